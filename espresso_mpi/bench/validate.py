"""``bench validate``: is what the planner predicts what happens, and is its plan the best one?

There are cases: models with few and with many tensors, whose gradients are synchronised at the end of the backward pass
or pushed as they come. First the cluster is profiled and a step of every case is recorded, in a session of its own, and
written to files; every strategy is predicted from them. Then, in other sessions, all strategies of a case train in
turns of some steps; one session plans for itself. Nothing of what is measured then has a part in the predictions.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..autotune.autoplan import summary
from ..collectives.messages.agreement import on_rank_0
from ..compressors import read_specs
from ..errors import ConfigError
from ..files.output import progress
from ..planner.model.beside import beside
from ..planner.model.problem import evaluated
from ..planner.model.profile import Profile
from ..planner.model.timetables import with_schedule
from ..planner.model.workload import Workload
from ..planner.plan import defaults
from ..planner.plan import plan as planned
from ..planner.planfile import from_json, to_json
from ..planner.search.baselines import baseline, usable
from ..session import Session
from ..tuning import Tuning
from ..types import Plan
from . import text, validate_tables
from .deep import DeepModel, DeepShape
from .defaults import Validate as Defaults
from .harness.suite import Suite
from .model import CharModel, ModelShape
from .ticks import STEPS, Ticks
from .validate_tables import Row

AUTO = "auto"
CALLS = ("sync", "push")
"""One call at the end of the backward pass, or a push of each gradient as it comes and a wait for all at the end."""

_TURN = 10
"""Steps of a method in a row; the first two, in which caches and links change over, are not counted."""

_CHANGE_OVER = 2
_RECORDED = 20


def _model(tensors: int) -> CharModel:
    """A model of so many tensors; all have about as many parameters."""
    return CharModel(ModelShape(hidden=1024)) if tensors == 5 else DeepModel(DeepShape())


MODELS = (5, 60)
"""Tensors of the models that there are."""


@dataclass(frozen=True)
class Case:
    """A training step: of how many tensors, and how they are handed over, see ``CALLS``."""

    tensors: int
    calls: str

    def __str__(self) -> str:
        return f"{self.tensors} tensors, {self.calls}"


def main(
    compressors: str = Defaults.compressors,
    tensors: str = Defaults.tensors,
    calls: str = Defaults.calls,
    batch: int = Defaults.batch,
    seconds: float = Defaults.seconds,
    profile_seconds: float = Defaults.profile_seconds,
    json: Path | None = None,
    keep: Path | None = None,
) -> list[Row]:
    """Measure, print tables on rank 0, and write JSON if asked. Collective.

    Args:
        compressors: comma list of specs that plans may use.
        tensors, calls: comma lists of what makes the cases, see ``MODELS`` and ``CALLS``.
        batch: characters that all ranks together predict in a step: how much is computed.
        seconds: time for the training steps of all methods and cases together.
        profile_seconds: time for the profile; a session that plans for itself measures for a fifth of that.
        json: file for the result.
        keep: folder for the profile and the workloads that predictions are made from; default: they are not kept.

    Raises:
        ConfigError: an argument does not fit, or there is one rank only.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    run = Suite("validate", world, json)
    cases = _cases(tensors, calls)
    if world.size == 1:
        raise ConfigError("bench validate: one rank has nobody to synchronise with; start it on several, or in the lab")
    names = [name for name in read_specs(compressors) if name != "none"]
    trainers = {n: _Trainer(n, max(1, batch // world.size), world) for n in dict.fromkeys(c.tensors for c in cases)}
    with _folder(world, keep) as folder:
        known = _Known.gathered(world, folder, names, {case: trainers[case.tensors] for case in cases}, profile_seconds)
    made = {
        case: _of_rank_0(world, partial(plans, workload, known.profile, names))
        for case, workload in known.workloads.items()
    }
    rows = []
    for case in cases:
        tuning = Tuning(tuple(names), seconds=profile_seconds / 5, every=10**9, share=1)
        rows += _compared(world, trainers[case.tensors], case, made[case], known, tuning, seconds / len(cases))
    if run.leads:
        _print(rows)
    run.write(rows, nbytes=max(workload.nbytes for workload in known.workloads.values()))
    return rows


def _cases(tensors: str, calls: str) -> list[Case]:
    """All cases that two comma lists make.

    Raises:
        ConfigError: there is no such case.
    """
    numbers, ways = ([part.strip() for part in given.split(",")] for given in (tensors, calls))
    for what, given, known in (("tensors", numbers, tuple(map(str, MODELS))), ("calls", ways, CALLS)):
        for one in given:
            if one not in known:
                raise ConfigError(f"bench validate: --{what} {one!r}; expected a comma list of {', '.join(known)}")
    return [Case(int(number), way) for number in dict.fromkeys(numbers) for way in dict.fromkeys(ways)]


# --- what trains ------------------------------------------------------------------------------------------------------


class _Trainer:
    """One rank's model and its shard of the text. The weights do not move: all methods see the same gradients."""

    def __init__(self, tensors: int, batch: int, comm: Any) -> None:
        corpus = text.load()
        start, stop = text.shard_bounds(len(corpus.train), comm.size, comm.rank)
        self.model, self._batch, self._shard = _model(tensors), batch, corpus.train[start:stop]
        self._rng = np.random.default_rng(comm.rank)

    def step(self, session: Session, calls: str) -> tuple[float, float]:
        """One training step: seconds until all gradients were there, and of all of it."""
        start, grads = time.perf_counter(), self.model.grads
        gradients = self._gradients()
        if calls == "push":
            for name in gradients:
                session.push(name, grads[name])
            computed = time.perf_counter()
            session.wait_all()
        else:
            for _ in gradients:
                pass
            computed = time.perf_counter()
            session.sync(grads)
        return computed - start, time.perf_counter() - start

    def _gradients(self) -> Iterator[str]:
        """The names of tensors as soon as the gradient of a random batch is there."""
        context = self.model.shape.context
        starts = self._rng.integers(0, len(self._shard) - context, self._batch)
        return self.model.gradients(*text.windows(self._shard, starts, context))


# --- what is predicted ------------------------------------------------------------------------------------------------


@contextmanager
def _folder(comm: Any, keep: Path | None) -> Iterator[Path]:
    """Where rank 0 writes, on every rank."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own) if keep is None else keep
        folder.mkdir(parents=True, exist_ok=True)
        yield comm.bcast(folder)


@dataclass(frozen=True)
class _Known:
    """All that is known before anything is measured: what predictions are made from, the same on every rank."""

    profile: Profile
    workloads: Mapping[Case, Workload]

    @classmethod
    def gathered(
        cls, comm: Any, folder: Path, names: Sequence[str], trainers: Mapping[Case, _Trainer], seconds: float
    ) -> _Known:
        """Profile the cluster and record a step of every case. Collective."""
        models = {id(one): one.model for one in trainers.values()}.values()
        sizes = sorted({size for m in models for size in (m.gradient.size, *(x.size for x in m.grads.values()))})
        with Session(comm) as session, progress("profile", STEPS, comm.rank == 0) as tick:
            every = list(dict.fromkeys([*names, "fp16"]))  # a baseline whatever else is compared
            profile = session.measure(every, sizes=sizes, seconds=seconds, tick=Ticks(tick))
        if comm.rank == 0:
            profile.save(folder / "profile.json")
        return cls(profile, {case: _recorded(comm, folder, case, one) for case, one in trainers.items()})


def plans(workload: Workload, profile: Profile, names: Sequence[str]) -> dict[str, Plan]:
    """The planner's own, and the baselines that can be used on such tensors, with every compressor; each once."""
    workload, profile = beside(workload, profile)
    found = {"model": planned(workload, profile, names)}
    for name in usable(workload):
        for compressor in names:
            plan = baseline(name, workload, profile, compressor)
            lossy = any(strategy.compressor == compressor for strategy in plan.strategies.values())
            apart = replace(plan, fuse_bytes=0)  # as it is predicted: every tensor by itself
            single = with_schedule(apart, workload, profile, *defaults(workload, profile))
            found.setdefault(f"{name}, {compressor}" if lossy and name != compressor else name, single)
    first: dict[str, str] = {}
    for label, plan in found.items():
        first.setdefault(plan.digest, label)
    return {label: found[label] for label in first.values()}


def predicted(plan: Plan, workload: Workload, profile: Profile) -> float:
    """Predicted seconds of a step by a plan, as the executor carries it out."""
    workload, profile = beside(workload, profile)
    lanes, order = defaults(workload, profile)
    problem, choice = evaluated(plan, workload, profile, lanes=lanes, order=order)
    return problem.seconds(choice)


def _recorded(comm: Any, folder: Path, case: Case, trainer: _Trainer) -> Workload:
    """The workload of a case, from a session of its own. Collective."""
    path = folder / f"{case.tensors}-{case.calls}.json"
    with Session(comm) as session:
        for _ in range(_CHANGE_OVER):
            trainer.step(session, case.calls)
        with session.record_workload(path):
            for _ in range(_RECORDED):
                trainer.step(session, case.calls)
    return Workload.from_json(comm.bcast(Workload.load(path).to_json() if comm.rank == 0 else None))


def _of_rank_0(comm: Any, make: Callable[[], dict[str, Plan]]) -> dict[str, Plan]:
    """Rank 0's plans, on every rank. Collective."""
    found = on_rank_0(comm, lambda: [(name, to_json(plan)) for name, plan in make().items()])
    return {name: from_json(content) for name, content in found}


# --- what happens -----------------------------------------------------------------------------------------------------


def _compared(
    comm: Any, trainer: _Trainer, case: Case, made: Mapping[str, Plan], known: _Known, tuning: Tuning,
    seconds: float,
) -> list[Row]:  # fmt: skip
    """Steps of all plans of a case in turns."""
    workload, profile = known.workloads[case], known.profile
    guesses = {name: predicted(plan, workload, profile) for name, plan in made.items()}
    with ExitStack() as stack:
        auto = stack.enter_context(Session(comm, plan="auto", tuning=tuning))
        while auto.planning:
            trainer.step(auto, case.calls)
        sessions = {AUTO: auto}
        for name, plan in made.items():
            sessions[name] = stack.enter_context(Session(comm, plan=replace(plan, made_for=None)))
        times = _interleaved(comm, trainer, case, list(sessions.values()), seconds)
        chosen = auto.plan
    assert chosen is not None
    everyone = {AUTO: chosen, **made}
    return rows_of(
        case, workload.tensors[-1].ready, times, {AUTO: predicted(chosen, workload, profile), **guesses}, everyone
    )


def _interleaved(
    comm: Any, trainer: _Trainer, case: Case, sessions: Sequence[Session], seconds: float
) -> np.ndarray:  # fmt: skip
    """Seconds of the slowest rank until all gradients are there and of whole steps, shape (2, steps, sessions)."""
    found: list[list[list[tuple[float, float]]]] = []
    start = time.perf_counter()
    while len(found) < 2 or comm.bcast(time.perf_counter() - start) < seconds:
        found.append([[trainer.step(one, case.calls) for _ in range(_TURN)][_CHANGE_OVER:] for one in sessions])
    mine = np.array(found).transpose(3, 0, 2, 1).reshape(2, -1, len(sessions))
    return np.max(comm.allgather(mine), axis=0)


def rows_of(
    case: Case, recorded: float, times: np.ndarray, guesses: Mapping[str, float], plans: Mapping[str, Plan]
) -> list[Row]:
    """The result, in the order of ``guesses``.

    Args:
        recorded: seconds of the backward pass in the workload.
        times: seconds until all gradients are there, and of whole steps, shape (2, steps, methods).
    """
    computing, medians = np.median(times, axis=1).tolist()
    p90 = np.percentile(times[1], 90, axis=0).tolist()
    return [
        Row(case.tensors, case.calls, name, guess, medians[k], p90[k], recorded, computing[k], name == AUTO,
              medians[k] / min(medians), summary(plans[name]))
        for k, (name, guess) in enumerate(guesses.items())
    ]  # fmt: skip


def _print(rows: Sequence[Row]) -> None:
    for own in validate_tables.by_case(rows).values():
        ordered = sorted(own, key=lambda row: row.measured)
        validate_tables.TABLE.show("a training step", ordered)
    validate_tables.CASES.show("all cases", validate_tables.cases(rows))
