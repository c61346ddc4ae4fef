"""One training run of ``bench optimizers``: a GPT, an optimizer, a learning rate, a compression method, a seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from espresso_mpi.cluster import launch
from espresso_mpi.compressors import get
from espresso_mpi.errors import ConfigError, NonFiniteError
from espresso_mpi.session import Session

from . import text
from .defaults import Optimizers as Defaults
from .gpt_shape import Shape as Shape
from .harness.replicas import mean_loss, place_on_node, require_same_start
from .model import learning_rate, to_bits
from .optimizer_ways import BASES, MOMENTUM, way_of
from .training import Method

if TYPE_CHECKING:  # needs torch, which only a run needs
    from .gpt import Replica

RATES = {
    "adamw": 1e-3,
    "sgd": 0.003,
    "onebit-adam": 1e-3,
    "onebit-lamb": 1e-2,
    "zero-one-adam": 1e-3,
    "momentum-sgd": 0.003,
    "diloco": 1e-3,
}
"""The optimizers, and their peak learning rates: AdamW's usual one, and SGD's best of a sweep with fp32."""

WARMUP = 0.15
"""Share of the steps in which the learning rate rises; a cosine brings it down to 2 % of its peak after that."""

_CHUNK = 16
"""Sequences in one validation pass, so that its activations stay in the cache."""


@dataclass(frozen=True)
class Settings:
    """What all runs have in common; ``batch`` is in sequences a rank and step.

    Every ``validation_stride``-th window of the validation text is predicted, windows without overlap.

    Raises:
        ConfigError: a number is below 1.
    """

    steps: int = Defaults.steps
    batch: int = 4
    eval_every: int = 100
    validation_stride: int = 4
    shape: Shape = field(default_factory=Shape)

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "eval_every", "validation_stride"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class RunConfig:
    """What one run has for itself: an optimizer of ``RATES``, its peak learning rate, a method, a seed."""

    optimizer: str
    lr: float
    method: Method
    seed: int

    @property
    def label(self) -> str:
        """Its name in progress bars and log lines."""
        return f"{self.optimizer} {self.lr:g}, {self.method.label}, seed {self.seed}"

    @property
    def momentum(self) -> float:
        """The optimizer's: 0 for AdamW, and where the method has a momentum of its own (dgc, signum)."""
        return MOMENTUM if BASES[self.optimizer] == "sgd" and not _has_momentum(self.method.compressor) else 0.0


@dataclass(frozen=True)
class Row:
    """A finished run.

    ``loss`` is in bits a character on the validation text at the end, None if the run diverged in step ``diverged_at``.
    ``curve`` holds steps with their losses. ``bytes_per_step`` is what a rank sends in a step, on average;
    ``seconds`` is how long the run took, validation included.
    """

    optimizer: str
    lr: float
    momentum: float
    method: str
    compressor: str
    feedback: bool
    seed: int
    loss: float | None
    diverged_at: int | None
    replicas_identical: bool
    bytes_per_step: float
    seconds: float
    curve: tuple[tuple[int, float | None], ...]


def _has_momentum(spec: str) -> bool:
    if spec == "none":
        return False
    compressor = get(spec)
    return compressor.second_pass() != compressor


def train(comm: Any, corpus: text.Corpus, config: RunConfig, settings: Settings, advance: Callable[[], None]) -> Row:
    """Train as ``config`` says. Collective; every rank returns the same row.

    Raises:
        MismatchError: the ranks do not start from the same text and weights.
    """
    from .gpt import Replica

    threads = launch.threads_per_rank(place_on_node(comm)[0])
    replica = Replica(settings.shape, config.seed, BASES[config.optimizer], config.momentum, threads)
    require_same_start(comm, corpus.sha256, replica.digest(), "torch")
    method = config.method
    with Session(comm, compressor=method.compressor, seed=config.seed, feedback=method.feedback) as session:
        return _Loop(comm, session, replica, corpus, settings, config).run(advance)


def sequences(symbols: np.ndarray, starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences [batch, context] at ``starts`` [batch], and the same one character later, as int64."""
    before, last = text.windows(symbols, starts, context)
    return before, np.concatenate([before[:, 1:], last[:, None]], axis=1)


def validation_loss(comm: Any, replica: Replica, corpus: text.Corpus, settings: Settings) -> float:
    """Mean bits a character over the windows of the validation text, shared among the ranks. Collective."""
    context = settings.shape.context
    starts = np.arange(0, len(corpus.validation) - context, context * settings.validation_stride)
    nats = mean_loss(comm, starts, _CHUNK, lambda part: replica.loss(*sequences(corpus.validation, part, context)))
    return to_bits(nats)


class _Loop:
    """The steps of one run, and what is measured on the way."""

    def __init__(
        self, comm: Any, session: Session, replica: Replica, corpus: text.Corpus, settings: Settings, config: RunConfig
    ) -> None:
        self._comm, self._session, self._replica = comm, session, replica
        self._corpus, self._settings, self._config = corpus, settings, config
        self._way = way_of(config.optimizer, session, replica, settings.steps)
        start, stop = text.shard_bounds(len(corpus.train), comm.size, comm.rank)
        self._shard = corpus.train[start:stop]
        # Of the seed and the rank alone, so that every method sees the same batches.
        self._rng = np.random.default_rng([config.seed, comm.rank])
        self._curve: list[tuple[int, float]] = []

    def run(self, advance: Callable[[], None]) -> Row:
        """All steps, or as many as there are before it diverges."""
        start, steps = time.perf_counter(), self._settings.steps
        self._measure(0)
        done, finite = 0, True
        while done < steps and finite:
            finite = self._step(done)
            done += 1
            if done == steps and finite:
                self._way.finish()
            if done % self._settings.eval_every == 0 or done == steps or not finite:
                self._measure(done)
            advance()
        return self._row(done, finite and bool(np.isfinite(self._curve[-1][1])), time.perf_counter() - start)

    def _step(self, step: int) -> bool:
        """One step; False if a gradient was not finite, which the session finds out for all ranks."""
        shape = self._settings.shape
        starts = self._rng.integers(0, len(self._shard) - shape.context, self._settings.batch)
        grads = self._replica.gradients(*sequences(self._shard, starts, shape.context))
        try:
            self._way.step(grads, learning_rate(step, self._settings.steps, self._config.lr, WARMUP))
        except NonFiniteError:
            return False
        return True

    def _measure(self, step: int) -> None:
        self._curve.append((step, validation_loss(self._comm, self._replica, self._corpus, self._settings)))

    def _row(self, done: int, finite: bool, seconds: float) -> Row:
        sent = self._comm.allgather(sum(self._session.stats().bytes_by_level.values()))
        config, comm = self._config, self._comm
        return Row(
            optimizer=config.optimizer,
            lr=config.lr,
            momentum=config.momentum,
            method=config.method.label,
            compressor=config.method.compressor,
            feedback=config.method.feedback,
            seed=config.seed,
            loss=self._curve[-1][1] if finite else None,
            diverged_at=None if finite else done,
            replicas_identical=len(set(comm.allgather(self._replica.digest()))) == 1,
            bytes_per_step=sum(sent) / (comm.size * done),
            seconds=max(comm.allgather(seconds)),
            curve=tuple((step, loss if np.isfinite(loss) else None) for step, loss in self._curve),
        )
