"""``bench truth``: is what the planner predicts what happens, and is its plan the best one?

One training step of a small language model is recorded, the cluster is profiled, and every strategy is predicted. Then
all of them train, in turns of some steps, each in a session with that strategy forced; one session plans for itself.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..autoplan import summary
from ..compressors import spellings
from ..errors import ConfigError
from ..planner.baselines import baseline, usable
from ..planner.plan import defaults
from ..planner.plan import plan as planned
from ..planner.problem import evaluated
from ..planner.profile import Profile
from ..planner.trace import Trace
from ..session import Session
from ..tuning import Tuning
from ..types import Plan
from . import text
from .model import ModelShape
from .output import check_writable, progress, show, write_rows
from .planner_rows import Truth
from .planner_tables import TRUTH_HEADER, truth, truth_summary
from .profile import STEPS, Ticks
from .training import Replica, Settings

AUTO = "auto"

_TURN = 10
"""Steps of a method in a row; the first two, in which caches and links change over, are not counted."""

_CHANGE_OVER = 2
_RECORDED = 12


def main(
    compressors: str = "fp16,int8,onebit,topk:ratio=0.01",
    hidden: int = 1024,
    batch: int = 128,
    seconds: float = 60.0,
    profile_seconds: float = 40.0,
    json: Path | None = None,
) -> list[Truth]:
    """Measure, print a table on rank 0, and write JSON if asked. Collective.

    Args:
        compressors: comma list of spellings that plans may use.
        hidden: width of the model's hidden layer; 1024 makes 264 256 parameters.
        batch: characters that all ranks together predict in a step: how much is computed.
        seconds: time for the training steps of all methods together.
        profile_seconds: time for the profile.
        json: file for the result.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    check_writable(json)
    if world.size == 1:
        raise ConfigError("bench truth: one rank has nobody to synchronise with; start it on several, or in the lab")
    names = [name for name in spellings(compressors) if name != "none"]
    corpus = text.load()
    settings = Settings(batch=max(1, batch // world.size), shape=ModelShape(hidden=hidden))
    replica = Replica(settings, corpus, world.size, world.rank)
    profile = _profiled(world, names, replica, profile_seconds)
    with _recording(world) as (session, trace_of):
        for _ in range(_RECORDED):
            _step(session, replica)
        trace = trace_of()
    plans = _agreed(world, lambda: _plans(trace, profile, names))
    rows = _compared(world, replica, plans, profile, names, seconds)
    if world.rank == 0:
        _print(rows, trace)
        if json is not None:
            write_rows(json, rows, kind="truth", tensors=len(trace.tensors), nbytes=trace.nbytes)
    return rows


# --- what is predicted ------------------------------------------------------------------------------------------------


@contextmanager
def _recording(comm: Any) -> Iterator[tuple[Session, Callable[[], Trace]]]:
    """A dense session whose steps are recorded, and what ends that and gives the trace, the same on every rank."""
    with tempfile.TemporaryDirectory() as folder, Session(comm) as session, ExitStack() as recording:
        path = Path(folder) / "trace.json"
        recording.enter_context(session.record_trace(path))

        def trace() -> Trace:
            recording.close()
            return Trace.from_json(comm.bcast(Trace.load(path).to_json() if comm.rank == 0 else None))

        yield session, trace


def _profiled(comm: Any, names: Sequence[str], replica: Replica, seconds: float) -> Profile:
    """The cluster, at the sizes of these tensors."""
    sizes = sorted({x.size for x in replica.model.grads.values()} | {replica.model.gradient.size})
    with Session(comm) as session, progress("profile", STEPS, comm.rank == 0) as tick:
        return session.measure(names, sizes=sizes, seconds=seconds, tick=Ticks(tick))


def _plans(trace: Trace, profile: Profile, names: Sequence[str]) -> dict[str, Plan]:
    """The planner's own, and the baselines that can be used on such tensors, with every compressor."""
    found = {"model": planned(trace, profile, names)}
    for name in usable(trace):
        for compressor in names:
            plan = baseline(name, trace, profile, compressor)
            label = f"{name}, {compressor}" if _lossy(plan, compressor) else name
            found.setdefault(label, plan)
    return found


def _lossy(plan: Plan, compressor: str) -> bool:
    return any(strategy.compressor == compressor for strategy in plan.strategies.values())


def _agreed(comm: Any, make: Callable[[], dict[str, Plan]]) -> dict[str, Plan]:
    """Rank 0's plans, on every rank."""
    from ..planner.planfile import from_json, to_json

    found = {name: to_json(plan) for name, plan in make().items()} if comm.rank == 0 else None
    return {name: from_json(document) for name, document in comm.bcast(found).items()}


def predicted(plan: Plan, trace: Trace, profile: Profile) -> float:
    """Seconds of a step by a plan, as the executor goes about it."""
    lanes, order = defaults(trace, profile)
    problem, choice = evaluated(plan, trace, profile, lanes=lanes, order=order)
    return problem.seconds(choice)


# --- what happens -----------------------------------------------------------------------------------------------------


def _compared(
    comm: Any, replica: Replica, plans: Mapping[str, Plan], profile: Profile, names: Sequence[str], seconds: float
) -> list[Truth]:
    """Steps of all in turns. A dense session that records its steps has turns of its own: the machine's speed changes
    by the minute, and what is predicted must be for the minutes that are measured."""
    with ExitStack() as stack:
        tuning = Tuning(tuple(names), every=10**9)
        auto = stack.enter_context(Session(comm, plan="auto", tuning=tuning))
        while auto.plan is None:
            _step(auto, replica)
        sessions = {AUTO: auto}
        for name, plan in plans.items():
            sessions[name] = stack.enter_context(Session(comm, plan=replace(plan, made_for=None)))
        recorder, trace_of = stack.enter_context(_recording(comm))
        times = _in_turns(comm, replica, [*sessions.values(), recorder], seconds)[:, :-1]
        trace = trace_of()
        chosen = auto.plan
    assert chosen is not None
    everyone = {AUTO: chosen, **plans}
    guesses = {name: predicted(plan, trace, profile) for name, plan in everyone.items()}
    return rows_of(times, guesses, everyone)


def _in_turns(comm: Any, replica: Replica, sessions: Sequence[Session], seconds: float) -> np.ndarray:
    """Seconds of the slowest rank, shape (steps, sessions)."""
    found: list[list[list[float]]] = []
    start = time.perf_counter()
    while len(found) < 2 or comm.bcast(time.perf_counter() - start) < seconds:
        found.append([[_step(session, replica) for _ in range(_TURN)][_CHANGE_OVER:] for session in sessions])
    mine = np.array(found).transpose(0, 2, 1).reshape(-1, len(sessions))
    return np.max(comm.allgather(mine), axis=0)


def _step(session: Session, replica: Replica) -> float:
    """One training step, and how long it took. The weights do not move: all methods see the same gradients."""
    start = time.perf_counter()
    replica.compute_gradients()
    session.sync(replica.model.grads)
    return time.perf_counter() - start


def rows_of(times: np.ndarray, guesses: Mapping[str, float], plans: Mapping[str, Plan]) -> list[Truth]:
    """The result, from seconds of shape (steps, methods), in the order of ``guesses``."""
    medians, p90 = np.median(times, axis=0), np.percentile(times, 90, axis=0)
    return [
        Truth(name, guess, float(medians[k]), float(p90[k]), name == AUTO, float(medians[k] / medians.min()),
              summary(plans[name]))
        for k, (name, guess) in enumerate(guesses.items())
    ]  # fmt: skip


def _print(rows: Sequence[Truth], trace: Trace) -> None:
    ordered = sorted(rows, key=lambda row: row.measured)
    title = f"{len(trace.tensors)} tensors, {trace.nbytes / 1e6:.2f} MB: a training step"
    show(title, TRUTH_HEADER, truth(ordered), ("method", "chosen", "plan"))
    print(truth_summary(rows))
