"""One training run over all ranks, and its curve: seconds, bytes and validation losses on the way.

Validation is outside the clock: a rank's clock runs only from the start of a step to its end, and all ranks meet after
a validation, before the next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import NonFiniteError
from .datasets import Batch, Dataset
from .harness.replicas import mean_loss
from .model import to_bits


class Trained(Protocol):
    """One rank's model; see ``replica.Replica``, which needs torch."""

    def loss(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Mean loss in nats on a batch."""

    def digest(self) -> str:
        """Equal exactly where two replicas agree to the last bit."""


class Method(Protocol):
    """How this rank's model takes steps together with the others."""

    def step(self, batch: Batch, rate: float) -> None:
        """Gradient of a batch, and update with this learning rate. Collective, but not in each step of each method."""

    def finish(self) -> None:
        """Make the replicas equal. Collective."""

    def sent(self) -> Mapping[str, int]:
        """Bytes that this rank has sent to others so far, by level."""


@dataclass(frozen=True)
class Point:
    """After ``step`` steps.

    Attributes:
        seconds: of the training clock, of the slowest rank.
        sent: bytes that a rank has sent to others, by level; the mean over the ranks.
        loss: validation loss in bits; None if it is not finite.
    """

    step: int
    seconds: float
    sent: Mapping[str, float]
    loss: float | None


@dataclass(frozen=True)
class LossCurve:
    """A finished run.

    Attributes:
        points: at the beginning, after each interval, and at the end.
        steps: how many were made.
        diverged_at: the step at which gradients or validation loss were no longer finite, or None.
        replicas_identical: whether all ranks ended with the same weights.
        seconds: how long the run took, validation included.
        sent_by_step: bytes that a rank sent in each step, the mean over the ranks.
    """

    points: tuple[Point, ...]
    steps: int
    diverged_at: int | None
    replicas_identical: bool
    seconds: float
    sent_by_step: tuple[int, ...]

    @property
    def loss(self) -> float | None:
        """At the end; None if it diverged."""
        return None if self.diverged_at is not None else self.points[-1].loss


@dataclass(frozen=True)
class LearningRateSchedule:
    """Length of a run, steps between validations, and the learning rate of each step."""

    steps: int
    eval_every: int
    rate: Callable[[int], float]


def follow(
    comm: Any, replica: Trained, method: Method, data: Dataset, batches: Callable[[], Batch],
    schedule: LearningRateSchedule, advance: Callable[[], None] = lambda: None,
) -> LossCurve:  # fmt: skip
    """Train, and measure on the way. Collective; every rank returns the same curve.

    Args:
        batches: makes this rank's next batch.
        advance: is called after each step.
    """
    return _Loop(comm, replica, method, data, batches).run(schedule, advance)


def validation_loss(comm: Any, replica: Trained, data: Dataset) -> float:
    """Mean bits over the validation examples, which the ranks share. Collective."""
    return to_bits(
        mean_loss(comm, data.places, data.chunk, lambda places: replica.loss(*data.validation(places)))
    )  # fmt: skip


class _Loop:
    """The steps of one run, and what is measured on the way."""

    def __init__(
        self, comm: Any, replica: Trained, method: Method, data: Dataset, batches: Callable[[], Batch]
    ) -> None:
        self._comm, self._replica, self._method, self._data, self._batches = comm, replica, method, data, batches
        self._before = dict(method.sent())
        self._clock, self._points = 0.0, list[Point]()
        self._sent = [sum(self._before.values())]

    def run(self, schedule: LearningRateSchedule, advance: Callable[[], None]) -> LossCurve:
        """All steps, or as many as there are before it diverges."""
        start, comm = time.perf_counter(), self._comm
        finite, done = self._measure(0), 0
        while done < schedule.steps and finite:
            finite = self._step(schedule.rate(done), done + 1 == schedule.steps)
            done += 1
            if done % schedule.eval_every == 0 or done == schedule.steps or not finite:
                finite = self._measure(done) and finite
            advance()
        sent = np.array(comm.allgather(np.diff(self._sent))).mean(axis=0)
        return LossCurve(
            points=tuple(self._points),
            steps=done,
            diverged_at=None if finite else done,
            replicas_identical=len(set(comm.allgather(self._replica.digest()))) == 1,
            seconds=max(comm.allgather(time.perf_counter() - start)),
            sent_by_step=tuple(round(float(count)) for count in sent),
        )

    def _step(self, rate: float, last: bool) -> bool:
        """One step; False if a gradient was not finite, which the session finds out for all ranks."""
        batch = self._batches()
        start = time.perf_counter()
        try:
            self._method.step(batch, rate)
            if last:
                self._method.finish()
        except NonFiniteError:
            return False
        finally:
            self._clock += time.perf_counter() - start
            self._sent.append(sum(self._method.sent().values()))
        return True

    def _measure(self, step: int) -> bool:
        """Add a point to the curve and let all ranks leave together; whether the loss is finite."""
        loss = validation_loss(self._comm, self._replica, self._data)
        sent = self._method.sent()
        everyone = self._comm.allgather((self._clock, {k: n - self._before.get(k, 0) for k, n in sent.items()}))
        mean = {level: sum(one[1][level] for one in everyone) / len(everyone) for level in sent}
        finite = bool(np.isfinite(loss))
        self._points.append(Point(step, max(seconds for seconds, _ in everyone), mean, loss if finite else None))
        self._comm.Barrier()
        return finite
