"""How a session plans for itself: it measures the cluster, plans, and tries the best plans before it takes one.

All of it is collective and happens between two steps, when nothing else is under way. What was measured on the slowest
rank counts, rank 0 plans, and every rank gets the same plan.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .collectives.agreement import documents, gather_small
from .collectives.transport import Transport
from .errors import ConfigError, EspressoError, PlanError
from .options import Options
from .planner.explain import short
from .planner.plan import described, plan
from .planner.planfile import from_json, to_json
from .planner.problem import evaluated
from .planner.profile import Profile
from .planner.trace import Trace
from .profiler import measure
from .rehearsal import opener, trial
from .tuning import Step, Tuning
from .types import DeviceKind, Plan, TensorSpec

_LOG = logging.getLogger("espresso_mpi")

_FINALISTS = 4
"""Plans whose trial is repeated for longer."""

_LONGEST_PAUSE = 0.05
"""Seconds between the steps of a trial at most, in the place of computing: links rest meanwhile, as in training."""

FEWEST = 3
"""Steps that a trace is made of at least."""

_PATIENCE = 10.0
"""Times the timeout that ranks wait for rank 0 to plan: the planner's kernels may have to be compiled first."""


@dataclass(frozen=True)
class Made:
    """A plan with what it was made from.

    Attributes:
        plan: its forecast is the model's.
        seconds: how long a step should take, by its trial.
        trials: every plan that was tried, those that were tried longest first.
    """

    plan: Plan
    seconds: float
    trace: Trace
    profile: Profile
    trials: tuple[_Entry, ...]


def make(transport: Transport, options: Options, tuning: Tuning, steps: Sequence[Step]) -> Made:
    """A plan for the tensors of the steps that were watched, on this cluster. Collective.

    Raises:
        ConfigError, PlanError: on every rank, if the steps have different tensors or nothing can be planned.
    """
    trace = recorded(transport, steps, "recorded by the session")
    sizes = sorted({tensor.size for tensor in trace.tensors} | {sum(tensor.size for tensor in trace.tensors)})
    profile = profiled(transport, options, tuning.compressors, sizes, tuning.seconds, device=trace.device)
    entries = [_entry(one, trace, profile) for one in _proposed(transport, options, trace, profile, tuning)]
    specs = {spec.name: spec for spec in steps[-1].specs}
    tensors = [specs[tensor.name] for tensor in trace.tensors]
    tried = _tried(transport, options, entries, tensors, trace, tuning.seconds)
    best = _best(tried[: _FINALISTS + 1])
    return Made(best.plan, best.step, trace, profile, tuple(tried))


def profiled(
    transport: Transport,
    options: Options,
    compressors: Sequence[str],
    sizes: Sequence[int] | None,
    seconds: float,
    tick: Callable[[float], None] = lambda share: None,
    device: DeviceKind | None = None,
) -> Profile:
    """What the collectives, encodes and decodes of this session cost; see ``profiler.measure``. Collective."""
    return measure(
        transport, compressors, open_session=opener(transport, options), sizes=sizes, seconds=seconds, tick=tick,
        devices=("cpu",) if device == "cpu" else None, segment_bytes=options.segment_bytes,
    )  # fmt: skip


def report(transport: Transport, made: Made) -> None:
    """Say in the log of rank 0 what was planned, and why."""
    if transport.rank != 0:
        return
    _LOG.info("plan: %s; a step should take %.4g s", summary(made.plan), made.seconds)
    for entry in made.trials:
        predicted = entry.plan.forecast.seconds if entry.plan.forecast else 0.0
        words = "tried: %.4g s a step by its trial, %.4g s by the model: %s"
        _LOG.info(words, entry.step, predicted, summary(entry.plan))


def slowest(transport: Transport, seconds: float) -> float:
    """The largest value of all ranks. Collective."""
    rows = gather_small(transport, np.array([seconds]).view(np.uint8), 8)
    return max(float(row.view(np.float64)[0]) for row in rows)


def on_rank_0(transport: Transport, act: Callable[[], None]) -> None:
    """Do something on rank 0. Collective.

    Raises:
        ConfigError: on every rank, if it raises an EspressoError there.
    """
    problem = None
    if transport.rank == 0:
        try:
            act()
        except (EspressoError, OSError) as error:
            problem = str(error)
    said = documents(transport, json.dumps(problem).encode())
    if said[0] is not None:
        raise ConfigError(said[0])


def write_trace(transport: Transport, steps: Sequence[Step], path: Path) -> None:
    """Write the trace of the steps that were watched, on rank 0. Collective.

    Raises:
        ConfigError: on every rank: too few steps, or steps that are not alike; the file cannot be written.
    """
    trace = recorded(transport, steps, f"recorded on {transport.topology}")
    on_rank_0(transport, lambda: trace.save(path))


# --- the trace --------------------------------------------------------------------------------------------------------


def recorded(transport: Transport, steps: Sequence[Step], source: str) -> Trace:
    """The trace of the steps that every rank has watched, of the slowest rank. Collective.

    Raises:
        ConfigError: on every rank: no step, or other tensors in one step than in the next.
    """
    mine, problem = None, None
    try:
        mine = _own_trace(steps, source)
    except EspressoError as error:
        problem = str(error)
    said = _exchanged(transport, {"problem": problem, "trace": mine and mine.to_json()})
    return Trace.merged([Trace.from_json(one["trace"]) for one in said])


def _own_trace(steps: Sequence[Step], source: str) -> Trace:
    if len(steps) < FEWEST:
        raise ConfigError(
            f"{len(steps)} step(s) were timed; expected {FEWEST} or more besides the first: synchronise the same "
            f"tensors in several steps"
        )
    specs = {spec.name: spec for spec in steps[-1].specs}
    alike = [step for step in steps if {spec.name: spec for spec in step.specs} == specs]
    if 2 * len(alike) <= len(steps):
        raise ConfigError(
            "most of the recorded steps have other tensors than the last; a plan is for steps that are alike: "
            "call sync, or push and wait_all, with the same tensors in every step"
        )
    ready = np.array([[_ready(step)[name] for name in specs] for step in alike])
    seconds = np.array([step.seconds for step in alike])
    where = "gpu" if any(spec.device == "gpu" for spec in specs.values()) else "cpu"
    text = f"{source}; {len(alike)} dense steps"
    return Trace.of_steps(list(specs.values()), ready, seconds, np.zeros(len(alike)), where, text)  # type: ignore[arg-type]


def _ready(step: Step) -> dict[str, float]:
    return {spec.name: float(at) for spec, at in zip(step.specs, step.ready)}


# --- plans ------------------------------------------------------------------------------------------------------------


def _proposed(transport: Transport, options: Options, trace: Trace, profile: Profile, tuning: Tuning) -> list[Plan]:
    """Plans that are worth a trial, of rank 0 for all."""
    found, problem = list[Any](), None
    if transport.rank == 0:
        try:
            found = [to_json(one) for one in _candidates(transport, options, trace, profile, tuning)]
        except Exception as error:  # whatever it is, the other ranks wait for an answer
            problem = f"{type(error).__name__}: {error}"
    with transport.waiter.patience(_PATIENCE):
        said = _exchanged(transport, {"problem": problem, "plans": found})
    return [from_json(text) for text in said[0]["plans"]]


def _candidates(
    transport: Transport, options: Options, trace: Trace, profile: Profile, tuning: Tuning
) -> Iterator[Plan]:
    """The planner's choices, with and without compression; and each compressor for all, as the model may be wrong."""
    best = plan(trace, profile, tuning.compressors, baselines=False)
    dense = plan(trace, profile, (), baselines=False) if compresses(best) else best
    spellings = ("none", *tuning.compressors)
    given = [simple for spelling in spellings for simple in _simple(transport, options, trace, spelling)]
    plans = [best, dense, *(described(simple, best, trace, profile) for simple in given)]
    return iter({one.digest: one for one in plans}.values())


def _simple(transport: Transport, options: Options, trace: Trace, spelling: str) -> Iterator[Plan]:
    """All tensors by one compressor, as a session does it by default: each for itself, and all in one buffer."""
    usual = replace(options, compressor=spelling, route=None, plan=None, tuning=None)
    specs = [TensorSpec(t.name, t.shape or (t.size,), t.dtype, trace.device) for t in trace.tensors]
    strategies = {spec.name: usual.strategy(spec, transport.topology) for spec in specs}
    small = [t.name for t in trace.tensors if strategies[t.name].compressor == "none"]
    yield Plan(strategies, groups=_of_one_type(trace, small if spelling != "none" else []))
    together = usual.strategy(TensorSpec("all", (trace.nbytes,), "float32", trace.device), transport.topology)
    yield Plan(dict.fromkeys(strategies, together), groups=_of_one_type(trace, list(strategies)))


def _of_one_type(trace: Trace, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Groups of these tensors, one for each element type."""
    groups: dict[str, list[str]] = {}
    for tensor in trace.tensors:
        if tensor.name in names:
            groups.setdefault(tensor.dtype, []).append(tensor.name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


@dataclass(frozen=True)
class _Entry:
    """A plan on trial. ``offset``: what a step takes besides the synchronisation that trials time."""

    plan: Plan
    offset: float
    seconds: float = 0.0
    uncertain: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of a step, by the trial."""
        return self.offset + self.seconds


def _entry(plan: Plan, trace: Trace, profile: Profile) -> _Entry:
    """A step is predicted to take ``forecast.seconds``, of them so much for what a trial times."""
    forecast = plan.forecast
    assert forecast is not None
    at_once = replace(trace, tensors=tuple(replace(tensor, ready=0.0) for tensor in trace.tensors))
    problem, choice = evaluated(plan, at_once, profile, lanes=forecast.lanes, order=forecast.order)
    return _Entry(plan, forecast.seconds - problem.seconds(choice))


def _best(entries: Sequence[_Entry]) -> _Entry:
    """The plan with the shortest step; with compression only if that is shorter by more than the trials' noise."""
    best = min(entries, key=lambda entry: entry.step)
    dense = [entry for entry in entries if not compresses(entry.plan)]
    plain = min(dense, key=lambda entry: entry.step, default=best)
    return best if plain.step - best.step > plain.uncertain + best.uncertain else plain


def _tried(
    transport: Transport, options: Options, entries: Sequence[_Entry], specs: Sequence[TensorSpec], trace: Trace,
    seconds: float,
) -> list[_Entry]:  # fmt: skip
    """All plans in a short trial, the best of them, and the best without compression, in a long one. Collective."""
    pause = min(trace.seconds, _LONGEST_PAUSE)

    def tried(entry: _Entry, share: float) -> _Entry:
        median, uncertain = trial(transport, options, entry.plan, specs, share, pause)
        return replace(entry, seconds=median, uncertain=uncertain)

    first = sorted((tried(entry, seconds / 2 / len(entries)) for entry in entries), key=lambda entry: entry.step)
    plain = [entry for entry in first if not compresses(entry.plan)][:1]
    final = first[:_FINALISTS] + [entry for entry in plain if entry not in first[:_FINALISTS]]
    again = [tried(entry, seconds / 2 / len(final)) for entry in final]
    return again + [entry for entry in first if entry not in final]


def compresses(plan: Plan) -> bool:
    """Whether any tensor is compressed."""
    return any(strategy.compressor != "none" for strategy in plan.strategies.values())


def summary(plan: Plan) -> str:
    """A plan in a few words: how many tensors travel how."""
    counts: dict[str, int] = {}
    for strategy in plan.strategies.values():
        how = short(strategy)
        counts[how] = counts.get(how, 0) + 1
    several = [f"{count} x {how}" for how, count in sorted(counts.items(), key=lambda pair: -pair[1])]
    return "; ".join(several) + (f"; {len(plan.groups)} shared buffers" if plan.groups else "")


def _exchanged(transport: Transport, document: dict[str, Any]) -> list[Any]:
    """The documents of all ranks.

    Raises:
        PlanError: on every rank, if one of them tells of a problem.
    """
    said = documents(transport, json.dumps(document).encode())
    problems = [f"{transport.describe(rank)}: {one['problem']}" for rank, one in enumerate(said) if one["problem"]]
    if problems:
        raise PlanError(f"no plan could be made: {problems[0]}")
    return said
