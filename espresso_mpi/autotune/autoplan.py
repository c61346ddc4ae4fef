"""How a session plans for itself: it measures the cluster, and makes the plans that its next steps try.

Everything here is collective and happens between two steps, when nothing else is under way. The times of the slowest
rank count, rank 0 plans, and every rank gets the same plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..collectives.messages.agreement import Failure, first_failure, floats, on_every_rank, on_rank_0
from ..collectives.messages.transport import Transport
from ..errors import ConfigError, PlanError
from ..options import Options, Tuning, default_route, dense_strategy
from ..planner.explain import short
from ..planner.model.beside import beside
from ..planner.model.profile import Profile
from ..planner.model.workload import Workload
from ..planner.plan import described, plan
from ..planner.planfile import from_json, to_json
from ..planner.search.baselines import Case
from ..types import DeviceKind, Plan, Route, Strategy, TensorSpec
from .clock import RecordedStep
from .fidelity import Fidelity
from .measuring_session import opener
from .profiler import measure
from .trials import Trial, compresses

_LOG = logging.getLogger("espresso_mpi")

FEWEST = 3
"""Steps that a workload is made of at least."""

_MEASURING = 0.25
"""The share of the budget that may be spent on measuring the cluster."""

_PATIENCE = 10.0
"""Times the timeout that ranks wait for rank 0 to plan: the planner's kernels may have to be compiled first."""


def proposed(
    transport: Transport, options: Options, tuning: Tuning, steps: Sequence[RecordedStep], fidelity: Fidelity
) -> list[Plan]:
    """Plans for the tensors of the steps that were watched, on this cluster, that are worth a trial. Collective.

    No tensor travels by a compressor that ``fidelity`` bars it from. Their forecasts are the model's. One of them at
    least compresses nothing.

    Raises:
        ConfigError, PlanError: on every rank, if the steps have different tensors or nothing can be planned.
    """
    start = time.perf_counter()
    workload = recorded(transport, steps, "recorded by the session")
    workload, tuning, dropped = fidelity.without_harm(transport, workload, tuning)
    sizes = sorted({tensor.size for tensor in workload.tensors} | {sum(tensor.size for tensor in workload.tensors)})
    pushed, least = steps[-1].pushed, max(tensor.ready for tensor in workload.tensors)  # no step is shorter
    seconds = min(tuning.seconds, _MEASURING * tuning.budget_for(least))
    profile = profiled(transport, options, tuning.compressors, sizes, seconds, device=workload.device, pushes=pushed)
    profiling = time.perf_counter()
    plans = _proposed(transport, options, workload, profile, tuning)
    if options.plan is not None and options.plan.forecast is not None:
        plans.append(options.plan)
    if transport.rank == 0:
        words = "%.1f s to measure the cluster, %.1f s to make %d plans; the next steps try them"
        _LOG.info(words, profiling - start, time.perf_counter() - profiling, len(plans))
    return [one if one.forecast is None else replace(one, forecast=replace(one.forecast, dropped=dropped))
            for one in plans]  # fmt: skip


def profiled(
    transport: Transport,
    options: Options,
    compressors: Sequence[str],
    sizes: Sequence[int] | None,
    seconds: float,
    tick: Callable[[float], None] = lambda share: None,
    device: DeviceKind | None = None,
    pushes: bool = True,
) -> Profile:
    """What the collectives, encodes and decodes of this session cost; see ``profiler.measure``. Collective."""
    return measure(
        transport, compressors, open_session=opener(transport, options), sizes=sizes, seconds=seconds, tick=tick,
        devices=("cpu",) if device == "cpu" else None, segment_bytes=options.segment_bytes, pushes=pushes,
    )  # fmt: skip


def report(transport: Transport, trials: Sequence[Trial], cost: float) -> None:
    """Say in the log of rank 0 which plan was chosen, why, and how many seconds beyond its steps planning took."""
    if transport.rank != 0:
        return
    _LOG.info("plan: %s; a step should take %.4g s", summary(trials[0].plan), trials[0].seconds)
    _LOG.info("planning cost %.1f s beyond the steps of this plan", cost)
    for one in trials:
        forecast = one.plan.forecast
        predicted = "" if forecast is None else f", {forecast.seconds:.4g} s by the model"
        _LOG.info("tried: %.4g s a step%s: %s", one.seconds, predicted, summary(one.plan))


def slowest(transport: Transport, seconds: float) -> float:
    """The largest value of all ranks. Collective."""
    return float(floats(transport, seconds).max())


def write_workload(transport: Transport, steps: Sequence[RecordedStep], path: Path) -> None:
    """Write the workload of the steps that were watched, on rank 0. Collective.

    Raises:
        PlanError: on every rank: too few steps, or steps that are not alike; ConfigError: the file cannot be written.
    """
    workload = recorded(transport, steps, f"recorded on {transport.topology}")
    on_rank_0(transport, lambda: workload.save(path), ConfigError)


# --- the workload -----------------------------------------------------------------------------------------------------


def recorded(transport: Transport, steps: Sequence[RecordedStep], source: str) -> Workload:
    """The workload of the steps that the ranks have watched. Collective; the same on every rank.

    A tensor is ready when the last rank has it, which is another one in every step: no collective can finish before all
    have given their part. So it is the median over the steps of the maximum over the ranks. They begin a step together,
    because the one before ended with synchronised gradients.

    Raises:
        PlanError: on every rank: too few steps, or other tensors in one step than in the next.
    """
    alike, said = on_every_rank(transport, lambda: _alike(steps), PlanError, say=_times, wording=_no_plan)
    specs = _by_name(alike[-1])
    count = min(len(one["seconds"]) for one in said)
    latest = np.max([np.array(one["ready"])[-count:] for one in said], axis=0)
    seconds = np.max([one["seconds"][-count:] for one in said], axis=0)
    first = {name: place for place, name in enumerate(said[0]["names"])}
    order = sorted(range(len(specs)), key=lambda column: first[specs[column].name])  # of equal times rank 0's
    where: DeviceKind = "gpu" if any(spec.device == "gpu" for spec in specs) else "cpu"
    text = f"{source}; {count} steps, the slowest of {len(said)} ranks in each"
    return Workload.of_steps([specs[c] for c in order], latest[:, order], seconds, np.zeros(count), where, text)


def _alike(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """The steps with the same tensors as the last."""
    if len(steps) < FEWEST:
        raise ConfigError(
            f"{len(steps)} step(s) were timed; expected {FEWEST} or more besides the first: synchronise the same "
            f"tensors in several steps"
        )
    specs = set(steps[-1].specs)
    alike = [step for step in steps if set(step.specs) == specs]
    if 2 * len(alike) <= len(steps):
        raise ConfigError(
            "most of the recorded steps have other tensors than the last; a plan is for steps that are alike: "
            "call sync, or push and wait_all, with the same tensors in every step"
        )
    if len({spec.device for spec in specs}) > 1:
        raise ConfigError("some tensors are in host memory and some on a GPU; a plan is for tensors of one place")
    return alike


def _by_name(step: RecordedStep) -> list[TensorSpec]:
    return sorted(step.specs, key=lambda spec: spec.name)


def _times(alike: Sequence[RecordedStep]) -> dict[str, Any]:
    """What all ranks are to know of the steps of one: when its tensors were ready, in the order of their names."""
    specs = _by_name(alike[-1])
    return {
        "ready": [[_ready(step)[spec.name] for spec in specs] for step in alike],
        "seconds": [step.seconds for step in alike],
        "names": list(dict.fromkeys(spec.name for spec in alike[-1].specs)),
    }


def _no_plan(failures: Sequence[Failure | None]) -> str:
    return f"no plan could be made: {first_failure(failures)}"


def _ready(step: RecordedStep) -> dict[str, float]:
    return {spec.name: float(at) for spec, at in zip(step.specs, step.ready)}


# --- plans ------------------------------------------------------------------------------------------------------------


def _proposed(
    transport: Transport, options: Options, workload: Workload, profile: Profile, tuning: Tuning
) -> list[Plan]:
    """Plans that are worth a trial, of rank 0 for all. Collective."""

    def make() -> list[Any]:
        try:
            return [to_json(one) for one in _candidates(transport, options, workload, profile, tuning)]
        except Exception as error:  # the kind says what the planner was about
            raise PlanError(
                f"no plan could be made: {transport.describe(0)}: {type(error).__name__}: {error}"
            ) from error

    with transport.waiter.patience(_PATIENCE):
        return [from_json(text) for text in on_rank_0(transport, make, PlanError)]


def _candidates(
    transport: Transport, options: Options, workload: Workload, profile: Profile, tuning: Tuning
) -> Iterator[Plan]:
    """The planner's choices, with and without compression; and each compressor for all, as the model may be wrong."""
    workload, profile = beside(workload, profile)
    best = plan(workload, profile, tuning.compressors, baselines=False)
    assert best.forecast is not None
    dense = plan(workload, profile, (), baselines=False) if compresses(best) else best
    alone = [text for text in tuning.compressors if text != "bf16" or "fp16" not in tuning.compressors]  # cost the same
    free = workload.without_bars
    cases = [Case(free, profile, text, str(best.forecast.lanes), best.forecast.order) for text in alone]
    routes = {"none": None, **{case.compressor: case.usual(workload.device).route for case in cases}}
    plans = [best, dense]
    for way in routes.items():
        apart, together = (
            described(one, best, workload, profile) for one in _simple(transport, options, workload, *way)
        )
        plans += [replace(apart, schedule=None, fuse_bytes=None), together]  # messages are shared as without a plan
    other = Strategy("none", Route.parse(default_route(transport.topology, compressed=False)))
    return iter({one.digest: replace(one, default=other) for one in plans}.values())  # for tensors that come later


def _simple(
    transport: Transport, options: Options, workload: Workload, spec: str, route: Route | None
) -> Iterator[Plan]:
    """All tensors by one compressor and route (None: a session's default): each for itself, and all in one buffer.

    Small tensors that stay dense beside compressed ones share a buffer.
    """
    usual = replace(options, compressor=spec, route=route, plan=None, tuning=None)
    plain = replace(options, plan=None, tuning=None)
    barred = {t.name for t in workload.tensors if spec in t.barred}
    specs = [TensorSpec(t.name, t.shape or (t.size,), t.dtype, workload.device) for t in workload.tensors]
    strategies = {
        spec.name: (plain if spec.name in barred else usual).strategy(spec, transport.topology) for spec in specs
    }
    small = [t.name for t in workload.tensors if strategies[t.name].compressor == "none"]
    yield Plan(strategies, groups=_of_one_type(workload, small if spec != "none" else []), fuse_bytes=0)
    together = usual.strategy(TensorSpec("all", (workload.nbytes,), "float32", workload.device), transport.topology)
    dense = dense_strategy(transport.topology)
    all_ways = {name: dense if name in barred else together for name in strategies}
    groups = [_of_one_type(workload, [n for n in strategies if (n in barred) == out]) for out in (False, True)]
    yield Plan(all_ways, groups=(*groups[0], *groups[1]), fuse_bytes=0)


def _of_one_type(workload: Workload, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Groups of these tensors, one for each element type."""
    groups: dict[str, list[str]] = {}
    wanted = set(names)
    for tensor in workload.tensors:
        if tensor.name in wanted:
            groups.setdefault(tensor.dtype, []).append(tensor.name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def summary(plan: Plan) -> str:
    """A plan in a few words: how many tensors travel how."""
    counts: dict[str, int] = {}
    for strategy in plan.strategies.values():
        how = short(strategy)
        counts[how] = counts.get(how, 0) + 1
    several = [f"{count} x {how}" for how, count in sorted(counts.items(), key=lambda pair: -pair[1])]
    shared = [f"{len(plan.groups)} shared buffers"] if plan.groups else []
    return "; ".join([*several, *shared, *(["after the backward pass"] if plan.held else [])])
