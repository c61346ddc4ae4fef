"""How a session plans for itself: it measures the cluster, and makes the plans that its next steps try.

Everything here is collective and happens between two steps, when nothing else is under way. The times of the slowest
rank count, rank 0 plans, and every rank gets the same plan.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..collectives.data.layout import Topology
from ..collectives.messages.agreement import Failure, first_failure, floats, on_every_rank, on_rank_0
from ..collectives.messages.transport import Transport
from ..compressors import get
from ..engine.fusion import measured_limit
from ..engine.payload_buckets import limit_of
from ..errors import ConfigError, PlanError
from ..options import Options, default_route
from ..planner.explain import short
from ..planner.model.beside import beside
from ..planner.model.profile import Profile
from ..planner.model.shared_messages import SharingLimits, shared_seconds
from ..planner.model.workload import Workload, WorkloadTensor
from ..planner.plan import described, plan
from ..planner.planfile import from_json, to_json
from ..planner.search.baselines import Case
from ..planner.search.game import is_ready
from ..tuning import ALWAYS_ACCURATE, LIKE_FP32, Tuning
from ..types import DeviceKind, MadeFor, Plan, Route, Strategy, TensorSpec
from .clock import RecordedStep
from .measuring_session import opener
from .payload_costs import compresses, without_needless
from .profiler import measure
from .tried import Trial

_LOG = logging.getLogger("espresso_mpi")

FEWEST = 3
"""Steps that a workload is made of at least."""

_PATIENCE = 10.0
"""Times the timeout that ranks wait for rank 0 to plan: the planner's kernels may have to be compiled first."""

_COMPILING = 30.0
"""Seconds about for which the planner's kernels compile: 10 to 44 were measured on 2 cores."""


@dataclass(frozen=True)
class Proposed:
    """Plans that are worth a trial, with the model's forecasts.

    Attributes:
        fixed: the fixed ways, see ``fixed_ways``.
        others: what the model expects to be quicker; one of them at least compresses nothing.
    """

    fixed: list[Plan]
    others: list[Plan]


def fixed_ways(topology: Topology, options: Options, tuning: Tuning, workload: Workload, pushed: bool) -> list[Plan]:
    """What sessions without a plan do: one plan for each compressor and one for none, the smallest payloads first.

    But for those that mix compressors and gain little (``payload_costs.without_needless``). If gradients are pushed,
    also the same after the backward pass. No model is needed for them, and all are tried.
    """
    ways = _smallest_first(tuning, workload)
    made = made_for(topology, workload)
    apart = [_apart(workload, topology, _usual(options, spec), ways) for spec in ways]
    plans = [replace(_with_default(plan, topology), made_for=made) for plan in without_needless(apart, workload)]
    found = [replace(plan, held=held) for plan in plans for held in (False, True)[: 1 + pushed]]
    return list({plan.digest: plan for plan in found}.values())  # compressors that few tensors may use can make one


def made_for(topology: Topology, workload: Workload) -> MadeFor:
    """What a plan for this workload is made for, here."""
    tensors = {t.name: (t.shape or t.size, t.dtype) for t in workload.tensors}
    return MadeFor(tensors, len(topology.nodes), topology.local_size, workload.device)


@dataclass(frozen=True)
class AccurateWay:
    """A plan by which steps can travel before anything is known of their gradients.

    Attributes:
        plan: one compressor for these tensors; others travel dense.
        shrinks: the bytes of the tensors over those of their payloads.
    """

    plan: Plan
    shrinks: float


def accurate_way(
    topology: Topology, options: Options, tuning: Tuning, specs: Sequence[TensorSpec], pushed: bool, momenta: bool
) -> AccurateWay | None:  # fmt: skip
    """The fixed way with the smallest payloads whose compressor no ``accuracy`` leaves out.

    Or ``int4`` for ``momenta``. Steps with other tensors can follow it. None: none is allowed, or one is on a GPU.
    """
    accurate = LIKE_FP32 if momenta else ALWAYS_ACCURATE
    allowed = tuple(text for text in tuning.compressors if text.partition(":")[0] in accurate)
    tensors = tuple(WorkloadTensor(s.name, s.size, 0.0, s.dtype, s.shape) for s in specs if s.dtype and s.size)
    if not (tensors and allowed) or any(spec.device == "gpu" for spec in specs):
        return None
    workload = Workload(tensors)
    found = fixed_ways(topology, options, replace(tuning, compressors=allowed), workload, pushed)
    shrinks = workload.nbytes / min(_payload_bytes(spec, workload) for spec in allowed)
    return AccurateWay(replace(found[1 if pushed else 0], made_for=None), shrinks)


def dense_plan(topology: Topology) -> Plan:
    """All tensors dense."""
    return _with_default(Plan(), topology)


def proposed(
    transport: Transport, options: Options, tuning: Tuning, workload: Workload, pushed: bool,
    dropped: tuple[str, ...] = (),
) -> Proposed:  # fmt: skip
    """Measure the cluster, and make plans for a step on it. Collective.

    Args:
        pushed: whether gradients are pushed.
        dropped: what the tensors are barred from, in words, which the forecasts repeat.

    Raises:
        ConfigError, PlanError: on every rank, if nothing can be planned.
    """
    start = time.perf_counter()
    sizes = sorted({tensor.size for tensor in workload.tensors} | {sum(tensor.size for tensor in workload.tensors)})
    least = max(tensor.ready for tensor in workload.tensors)  # no step is shorter
    seconds = tuning.measuring_for(least)
    profile = profiled(transport, options, tuning.compressors, sizes, seconds, device=workload.device, pushes=pushed)
    limits = _limits(transport, options, tuning, workload.device)
    profiling = time.perf_counter()
    plans = _on_rank_0(transport, _Maker(transport.topology, options, workload, profile, tuning, pushed, limits))
    if transport.rank == 0:
        words = "%.1f s to measure the cluster, %.1f s to make %d plans by the model"
        _LOG.info(words, profiling - start, time.perf_counter() - profiling, len(plans.others))
    return Proposed(*([_telling(one, dropped) for one in some] for some in (plans.fixed, plans.others)))


def compiling_seconds(transport: Transport) -> float:
    """What the search takes besides if its kernels are not compiled on rank 0, which searches. Collective."""
    seconds = 0.0 if transport.rank or is_ready() else _COMPILING
    if seconds:
        _LOG.info("plans by the model only if its kernels can compile in half of the budget: run `espresso-mpi warmup`")
    return float(floats(transport, seconds).max())


def _telling(plan: Plan, dropped: tuple[str, ...]) -> Plan:
    return plan if plan.forecast is None else replace(plan, forecast=replace(plan.forecast, dropped=dropped))


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
        _LOG.info("tried: %.4g s per step (of %d)%s: %s", one.seconds, one.steps, predicted, summary(one.plan))


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


def _limits(transport: Transport, options: Options, tuning: Tuning, where: DeviceKind) -> SharingLimits:
    """How much travels together without a plan, as this session measures it for itself. Collective."""
    without, topology = replace(options, plan=None), transport.topology
    names = dict.fromkeys(default_route(topology, True, get(text).common) for text in tuning.compressors)
    routes = [Route.parse(name).on(where) for name in names]
    payloads = {route: limit_of(transport, route, without) for route in routes}
    fuse = options.fuse_bytes
    if fuse is None:
        fuse = measured_limit(transport, Route.parse(default_route(topology, compressed=False)))
    return SharingLimits(payloads, fuse, max(fuse, options.segment_bytes))


def _on_rank_0(transport: Transport, maker: _Maker) -> Proposed:
    """The plans of rank 0 for all. Collective."""

    def make() -> list[Any]:
        try:
            return [[to_json(one) for one in plans] for plans in maker.made()]
        except Exception as error:  # the kind says what the planner was about
            raise PlanError(
                f"no plan could be made: {transport.describe(0)}: {type(error).__name__}: {error}"
            ) from error

    with transport.waiter.patience(_PATIENCE):
        found = on_rank_0(transport, make, PlanError)
    return Proposed(*([from_json(text) for text in texts] for texts in found))


@dataclass(frozen=True)
class _Maker:
    """Makes plans; see ``Proposed``."""

    topology: Topology
    options: Options
    workload: Workload
    profile: Profile
    tuning: Tuning
    pushed: bool
    limits: SharingLimits

    @cached_property
    def _beside(self) -> tuple[Workload, Profile]:
        """The workload and the profile of communication beside the backward pass."""
        return beside(self.workload, self.profile)

    def made(self) -> tuple[list[Plan], list[Plan]]:
        """The fixed ways, and the others; no plan twice."""
        best = plan(*self._beside, self.tuning.compressors, baselines=False)
        dense = plan(*self._beside, (), baselines=False) if compresses(best) else best
        fixed = fixed_ways(self.topology, self.options, self.tuning, self.workload, self.pushed)
        known = {one.digest: self._priced(one, best) for one in fixed}
        others, ways = [best, dense], _smallest_first(self.tuning, self.workload)
        for spec in ways:
            usual = _usual(self.options, spec)
            default = _apart(self.workload, self.topology, usual, ways)
            quick = self._quick_route(spec, best)
            if quick not in {strategy.route for strategy in default.strategies.values()}:
                usual = _usual(self.options, spec, quick)
                apart = _apart(self.workload, self.topology, usual, ways)
                others.append(replace(self._described(apart, best), schedule=None))
            others.append(self._described(self._together(usual, ways), best))
        new = {one.digest: one for one in (_with_default(one, self.topology) for one in others)}
        return list(known.values()), [one for digest, one in new.items() if digest not in known]

    def _quick_route(self, spec: str, best: Plan) -> Route:
        """The named route by which the model expects a step with this compressor to be shortest."""
        if spec == "none":
            return Route.parse(default_route(self.topology, compressed=False))
        assert best.forecast is not None
        workload, profile = self._beside
        case = Case(workload.without_bars, profile, spec, str(best.forecast.lanes), best.forecast.order)
        return case.usual(self.workload.device).route

    def _together(self, usual: Options, ways: Sequence[str]) -> Plan:
        """All tensors in one buffer, one for each element type and compressor."""
        whole = TensorSpec("all", (self.workload.nbytes,), "float32", self.workload.device)
        chosen = _allowed(self.workload, usual, ways)
        strategies = {name: options.strategy(whole, self.topology) for name, options in chosen.items()}
        groups = [
            group
            for spec in ways
            for group in _of_one_type(self.workload, [name for name in chosen if chosen[name].compressor == spec])
        ]
        return Plan(strategies, groups=tuple(groups), fuse_bytes=0)

    def _described(self, given: Plan, best: Plan) -> Plan:
        """A plan with what is predicted for it."""
        return described(given, best, *self._beside)

    def _priced(self, given: Plan, best: Plan) -> Plan:
        """A fixed way with what is predicted for it: its tensors share messages."""
        found = self._described(given, best)
        assert found.forecast is not None
        seconds = shared_seconds(given, self.workload, self.profile, self.limits, str(found.forecast.lanes))
        forecast = replace(found.forecast, seconds=seconds, bound=min(found.forecast.bound, seconds), order="fifo")
        return replace(found, schedule=None, forecast=forecast)


def _methods(tuning: Tuning) -> list[str]:
    """The compressors that are tried for all tensors; bf16 costs as much as fp16."""
    return [text for text in tuning.compressors if text != "bf16" or "fp16" not in tuning.compressors]


def _smallest_first(tuning: Tuning, workload: Workload) -> list[str]:
    """These compressors by the bytes of their payloads; without compression at the end."""
    return sorted((*_methods(tuning), "none"), key=lambda spec: _payload_bytes(spec, workload))


def _payload_bytes(spec: str, workload: Workload) -> float:
    """The bytes of all gradients by this compressor."""
    if spec == "none":
        return math.inf  # dense steps were watched: little is new
    method = get(spec).at(None)
    return float(sum(method.nbytes(tensor.size) for tensor in workload.tensors))


def _usual(options: Options, spec: str, route: Route | None = None) -> Options:
    """The options of a session with this compressor."""
    return replace(options, compressor=spec, route=route, plan=None, tuning=None)


def _apart(workload: Workload, topology: Topology, usual: Options, ways: Sequence[str]) -> Plan:
    """Every tensor as the session sends it by whose options it may. Messages and buffers are shared as there."""
    specs = [TensorSpec(t.name, t.shape or (t.size,), t.dtype, workload.device) for t in workload.tensors]
    chosen = _allowed(workload, usual, ways)
    return Plan({spec.name: chosen[spec.name].strategy(spec, topology) for spec in specs})


def _allowed(workload: Workload, usual: Options, ways: Sequence[str]) -> dict[str, Options]:
    """The options of a session for each tensor: those given, or where they are barred, of the next compressor.

    Args:
        ways: as of ``_smallest_first``.
    """
    choices = [usual, *(_usual(usual, spec) for spec in ways[ways.index(usual.compressor) + 1 :])]
    return {t.name: next(one for one in choices if one.compressor not in t.barred) for t in workload.tensors}


def _with_default(plan: Plan, topology: Topology) -> Plan:
    """The plan with a strategy for tensors that come later."""
    return replace(plan, default=Strategy("none", Route.parse(default_route(topology, compressed=False))))


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
