"""One training run over all ranks with one compression method, its clock, and what is measured meanwhile.

Each rank holds a replica of the model and its own shard of the text. Validation is outside the clock: a rank's clock
runs only from the start of a step to its end, and all ranks meet after a validation, before the next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from espresso_mpi.errors import ConfigError, NonFiniteError
from espresso_mpi.session import Session

from ..tracing import pictures
from . import text
from .defaults import Train as Defaults
from .harness.replicas import mean_loss, require_same_start
from .model import SGD, CharModel, ModelShape, learning_rate, to_bits

_CHUNK = 2048
"""Contexts in one validation pass, so that its activations stay in the cache."""

TRACED = 5
"""Steps that ``trace`` records: enough to see whether they are alike."""


@dataclass(frozen=True)
class TrainingSettings:
    """What all methods have in common.

    ``batch`` is in characters per rank and step; ``rate`` is the peak learning rate; every
    ``validation_stride``-th position of the validation text is predicted. At higher rates fp32 itself ends a
    little lower, but two runs that differ in rounding alone come to differ by one percent, and the comparison
    drowns. ``momentum`` leaves the effective rate as it is (``model.SGD``).

    Raises:
        ConfigError: a number is not in its range.
    """

    steps: int = Defaults.steps
    batch: int = 128
    rate: float = 4.0
    momentum: float = Defaults.momentum
    seed: int = Defaults.seed
    eval_every: int = 100
    route: str | None = None
    validation_stride: int = 2
    shape: ModelShape = field(default_factory=ModelShape)

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "rate", "eval_every", "validation_stride"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must be from 0 to below 1, got {self.momentum}")
        if self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, got {self.seed}")


@dataclass(frozen=True)
class Method:
    """How tensors are synchronised.

    Attributes:
        compressor: its spec.
        feedback: whether what it loses is added in the next step.
        plan: "auto" or the path of a plan, which then counts, not the compressor.
        candidates: what a session that plans for itself may use.
    """

    compressor: str
    feedback: bool = True
    plan: str | None = None
    candidates: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Name in tables and plots."""
        if self.plan is not None:
            return "auto plan" if self.plan == "auto" else f"plan {Path(self.plan).stem}"
        name = "fp32" if self.compressor == "none" else self.compressor
        return name if self.feedback else f"{name}, no feedback"


@dataclass(frozen=True)
class Point:
    """The state after ``step`` steps: clock, bytes sent by all ranks, validation loss in bits per character."""

    step: int
    seconds: float
    bytes_by_level: Mapping[str, int]
    loss: float


@dataclass(frozen=True)
class Run:
    """A finished run.

    ``seconds`` is the clock of the slowest rank, in total. ``compute_seconds`` is the mean over the steps of
    the slowest rank's forward pass, backward pass and update. ``diverged_at`` is the step at which gradients
    or loss were no longer finite, or None.
    """

    method: Method
    curve: tuple[Point, ...]
    steps: int
    ranks: int
    seconds: float
    compute_seconds: float
    replicas_identical: bool
    diverged_at: int | None

    @property
    def loss(self) -> float:
        """Validation loss at the end, bits per character; NaN if it diverged."""
        return float("nan") if self.diverged_at is not None else self.curve[-1].loss


class Replica:
    """One rank's copy of the model with its shard of the training text.

    The batches depend on ``settings.seed`` and the rank alone, so every method sees the same ones.
    """

    def __init__(self, settings: TrainingSettings, corpus: text.Corpus, ranks: int, rank: int) -> None:
        start, stop = text.shard_bounds(len(corpus.train), ranks, rank)
        self.model = CharModel(settings.shape, settings.seed)
        self._settings = settings
        self._shard = corpus.train[start:stop]
        self._rng = np.random.default_rng([settings.seed, rank])
        self._optimizer = SGD(self.model.weights, settings.momentum)

    def compute_gradients(self) -> None:
        """Leave the gradient on the next random batch in ``model.grads``."""
        context = self._settings.shape.context
        starts = self._rng.integers(0, len(self._shard) - context, self._settings.batch)
        self.model.loss_and_gradient(*text.windows(self._shard, starts, context))

    def update(self, step: int) -> None:
        """Apply ``model.grads`` as the gradient of step number ``step``."""
        rate = learning_rate(step, self._settings.steps, self._settings.rate)
        self._optimizer.step(self.model.gradient, rate)


def train(
    comm: Any,
    corpus: text.Corpus,
    method: Method,
    settings: TrainingSettings,
    progress: Callable[[int], None],
    trace: Path | None = None,
) -> Run:
    """Train with ``method``. Collective; every rank returns the same Run.

    Args:
        trace: trace a few early steps to this file, with the method's name before its suffix.

    Raises:
        MismatchError: the ranks do not start from the same text and weights.
    """
    replica = Replica(settings, corpus, comm.size, comm.rank)
    require_same_start(comm, corpus.sha256, replica.model.digest(), "numpy")
    session = Session(comm, seed=settings.seed, feedback=method.feedback, **_options(method, settings))
    session.judge_for(None)
    # Divergence is a result here, which the session reports; numpy need not warn of it.
    with session, np.errstate(over="ignore", invalid="ignore"):
        _warm_up(session, replica)
        return _Loop(comm, session, replica, corpus, settings, progress).run(method, trace)


def _options(method: Method, settings: TrainingSettings) -> dict[str, Any]:
    """The options of a session that say how tensors travel."""
    if method.plan == "auto":
        return {"plan": "auto", "compressors": method.candidates}
    if method.plan is not None:
        return {"plan": method.plan}
    return {"compressor": method.compressor, "route": settings.route if method.compressor != "none" else None}


def validation_loss(comm: Any, model: CharModel, corpus: text.Corpus, stride: int) -> float:
    """Mean bits per character over every ``stride``-th position, shared among the ranks. Collective."""
    context = model.shape.context
    starts = np.arange(0, len(corpus.validation) - context, stride)
    nats = mean_loss(comm, starts, _CHUNK, lambda part: model.loss(*text.windows(corpus.validation, part, context)))
    return to_bits(nats)


class _Loop:
    """The steps of one run and their measurements."""

    def __init__(
        self,
        comm: Any,
        session: Session,
        replica: Replica,
        corpus: text.Corpus,
        settings: TrainingSettings,
        progress: Callable[[int], None],
    ) -> None:
        self._comm, self._session, self._replica = comm, session, replica
        self._corpus, self._settings, self._progress = corpus, settings, progress
        self._before: Mapping[str, int] = session.stats().bytes_by_level
        self._compute = np.zeros(settings.steps)
        self._total = np.zeros(settings.steps)
        self._curve: list[Point] = []

    def run(self, method: Method, trace: Path | None = None) -> Run:
        """All steps, or as many as there are before it diverges."""
        self._measure(0)
        with self._tracing(trace, method.label):
            done, diverged = self._steps(0, min(TRACED, self._settings.steps) if trace else 0)
        if not diverged:
            done, diverged = self._steps(done, self._settings.steps)
        diverged = diverged or not np.isfinite(self._curve[-1].loss)
        compute = np.max(self._comm.allgather(self._compute[:done]), axis=0)
        return Run(
            method=method,
            curve=tuple(self._curve),
            steps=done,
            ranks=self._comm.size,
            seconds=self._curve[-1].seconds,
            compute_seconds=float(compute.mean()),
            replicas_identical=len(set(self._comm.allgather(self._replica.model.digest()))) == 1,
            diverged_at=done if diverged else None,
        )

    def _steps(self, done: int, stop: int) -> tuple[int, bool]:
        """Steps ``done`` to ``stop``, with their measurements: how many were done in all, and whether it diverged."""
        diverged = False
        while done < stop and not diverged:
            diverged = not self._step(done)
            done += 1
            if done % self._settings.eval_every == 0 or done == self._settings.steps or diverged:
                self._measure(done)
        return done, diverged

    @contextmanager
    def _tracing(self, path: Path | None, label: str) -> Iterator[None]:
        """Trace the with-block, if a path is given."""
        with ExitStack() as stack:
            with self._uncounted():
                stack.enter_context(pictures.tracing(self._session, path, label))
            yield
            with self._uncounted():
                stack.close()

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """What is sent in the with-block is not the training's."""
        before = self._session.stats().bytes_by_level
        yield
        sent = _sent(self._session.stats().bytes_by_level, before)
        self._before = {level: count + sent[level] for level, count in self._before.items()}

    def _step(self, step: int) -> bool:
        """One step; False if a gradient was not finite, which the session finds out for all ranks."""
        replica = self._replica
        start = time.perf_counter()
        replica.compute_gradients()
        computed = time.perf_counter()
        try:
            self._session.sync(replica.model.grads)
        except NonFiniteError:
            return False
        synced = time.perf_counter()
        replica.update(step)
        end = time.perf_counter()
        self._compute[step] = (computed - start) + (end - synced)
        self._total[step] = end - start
        return True

    def _measure(self, step: int) -> None:
        """Add a point to the curve, outside the clock, and let all ranks leave together."""
        stride = self._settings.validation_stride
        loss = validation_loss(self._comm, self._replica.model, self._corpus, stride)
        mine = (float(self._total.sum()), _sent(self._session.stats().bytes_by_level, self._before))
        everyone = self._comm.allgather(mine)
        sent = {level: sum(one[1][level] for one in everyone) for level in mine[1]}
        self._curve.append(Point(step, max(seconds for seconds, _ in everyone), sent, loss))
        self._progress(step)
        self._comm.Barrier()


def _sent(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {level: count - before[level] for level, count in now.items()}


def _warm_up(session: Session, replica: Replica) -> None:
    """Compile and allocate outside the clock. All methods map zeros to zeros, so no residual stays behind."""
    replica.model.gradient.fill(0)
    session.sync(replica.model.grads)
