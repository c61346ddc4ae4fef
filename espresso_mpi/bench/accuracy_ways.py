"""One replica of ``bench accuracy`` in training. It needs torch: nothing imports it but that suite, when it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..cluster import launch
from ..session import Session
from ..tuning import Tuning
from .accuracy_runs import AVERAGING, AccuracySettings, Run, Way
from .accuracy_times import StepTime, step_times_of
from .averaging import Averaged, tuning_of
from .datasets import Batch, Dataset
from .harness.replicas import place_on_node, require_same_start
from .harness.timing import Repetitions, TimedMethod, in_turns
from .loss_curves import LearningRateSchedule, Method, follow
from .model import learning_rate
from .optimizer_runs import WARMUP, momentum_of
from .optimizer_ways import FEEDBACK, OptimizerTraining, Phases
from .replica import Replica
from .workloads import network, workload_of

POWERSGD_DENSE = 10
"""Steps in which torch's PowerSGD sends dense gradients first."""

_WARM = 6
"""Steps of a run that is thrown away, so that kernels are compiled before the clock runs."""

_STILL = 1e-6
"""By which the learning rate is multiplied in runs whose result has no use: they are too short for what some optimizers
need of their first steps, and would diverge."""


class Averaging:
    """Gradients are averaged by DDP or by this library: a ``loss_curves.Method``."""

    def __init__(self, averaged: Averaged, replica: Replica) -> None:
        self._averaged, self._replica = averaged, replica

    def step(self, batch: Batch, rate: float) -> None:
        """Gradient, mean, update."""
        self._replica.gradients(*batch, run=self._averaged.run)
        self._averaged.wait()
        self._replica.update(rate)

    def finish(self) -> None:
        """The replicas are equal already."""

    def sent(self) -> Mapping[str, int]:
        """Bytes by level."""
        return self._averaged.sent()


class Training:
    """One replica, its batches, and the method by which it takes steps together with the others. Collective.

    Args:
        steps: of the run, which schedules of learning rates and warm-ups depend on.
        gloo: the process group of ways that need it.
        scale: by which the learning rate is multiplied.
    """

    def __init__(
        self, comm: Any, data: Dataset, settings: AccuracySettings, way: Way, seed: int, steps: int, gloo: Any,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        workload = workload_of(settings.workload)
        optimizer = way.optimizer(workload.optimizer)
        self.lr = workload.rates[optimizer] if settings.lr is None else settings.lr
        model = network(settings.workload, settings.width, settings.layers, seed)
        threads = launch.threads_per_rank(place_on_node(comm)[0])
        compressor = way.compressor if way.kind in AVERAGING[1:] and not way.plans else "none"
        local = "muon" if way.kind == "muloco" else workload.optimizer
        self.replica = Replica(model, local, momentum_of(local, compressor), threads)
        require_same_start(comm, data.digest, self.replica.digest(), "torch")
        self.batches = data.batches(comm.size, comm.rank, seed, settings.batch)
        self.steps, self._scale, self._done = steps, scale, 0
        self.method, self.close = self._method(comm, way, seed, settings.phases, gloo)

    def _method(
        self, comm: Any, way: Way, seed: int, usual: Phases, gloo: Any
    ) -> tuple[Method, Callable[[], object]]:  # fmt: skip
        if way.choice is None:
            averaged = Averaged(comm, way.spec, self.replica.model, gloo, POWERSGD_DENSE, seed, Tuning.share)
            return Averaging(averaged, self.replica), averaged.close
        session = _session(comm, way, seed)
        phases = way.choice.phases(usual).shortened(self.steps)
        return OptimizerTraining(way.choice, session, self.replica, phases), session.close

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        return self._scale * learning_rate(step, self.steps, self.lr, WARMUP)

    def advance(self) -> None:
        """The next step."""
        self.method.step(self.batches(), self.rate(self._done))
        self._done += 1


def _session(comm: Any, way: Way, seed: int) -> Session:
    """What a way sends its messages by."""
    how: dict[str, Any] = {"compressor": way.compressor, "feedback": FEEDBACK.get(way.kind, "auto")}
    how |= dict(way.options)
    if way.plans:
        how |= {"plan": "auto", "tuning": tuning_of(way.compressor), "compressor": "none"}
    session = Session(comm, seed=seed, **how)
    session.judge_for(None)
    return session


def check(comm: Any, settings: AccuracySettings, ways: Sequence[Way]) -> None:
    """Open every session that has options once, and make every optimizer with arguments, before the first run.

    Collective.

    Raises:
        ConfigError: an option or an argument has a wrong value.
    """
    for way in ways:
        if way.options or (way.choice is not None and way.choice.options):
            with _session(comm, way, 0) as session:
                if way.choice is not None:
                    way.choice.check(session, settings.phases)


def train(
    comm: Any, data: Dataset, settings: AccuracySettings, way: Way, seed: int, gloo: Any, advance: Callable[[], None]
) -> Run:  # fmt: skip
    """One run. Collective; every rank returns the same one.

    Raises:
        MismatchError: the ranks do not start from the same data and weights.
    """
    if not way.plans:  # planning is part of the run
        _warm_up(comm, data, settings, way, gloo)
    training = Training(comm, data, settings, way, seed, settings.steps, gloo)
    try:
        schedule = LearningRateSchedule(settings.steps, settings.eval_every, training.rate)
        curve = follow(comm, training.replica, training.method, data, training.batches, schedule, advance)
    finally:
        training.close()
    return Run.of(way, seed, training.lr, curve)


def _warm_up(comm: Any, data: Dataset, settings: AccuracySettings, way: Way, gloo: Any) -> None:
    training = Training(comm, data, settings, way, 0, _WARM, gloo, _STILL)
    for _ in range(_WARM):
        training.advance()
    training.method.finish()
    training.close()


def time_steps(
    comm: Any, data: Dataset, settings: AccuracySettings, ways: Sequence[Way], gloo: Any, repetitions: Repetitions
) -> list[StepTime]:
    """What a step takes by each way, in turns. Collective; every rank returns the same.

    Each way makes a short run of its own, of as many steps as there are repetitions, with the same share of dense steps
    as a long one, and with averages of local steps.
    """
    trainings = [Training(comm, data, settings, way, 0, repetitions.repeats, gloo, _STILL) for way in ways]
    sent = [[sum(training.method.sent().values()) for training in trainings]]
    seconds = in_turns(
        comm,
        [TimedMethod(way.spec, training.advance) for way, training in zip(ways, trainings)],
        repetitions,
        lambda repetition: sent.append([sum(training.method.sent().values()) for training in trainings]),
    ).seconds
    for training in trainings:
        training.method.finish()
        training.close()
    mean = np.array(comm.allgather(np.diff(np.array(sent), axis=0))).mean(axis=0)
    seconds = comm.bcast(seconds)
    return [time for i, way in enumerate(ways) for time in step_times_of(way.spec, mean[:, i], seconds[:, i])]
