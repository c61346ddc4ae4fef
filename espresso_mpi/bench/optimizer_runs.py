"""One training run of ``bench optimizers``: a GPT, an optimizer, a learning rate, a compression method, a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from espresso_mpi.cluster import launch
from espresso_mpi.compressors import get
from espresso_mpi.errors import ConfigError
from espresso_mpi.session import Session

from . import text
from .datasets import Characters
from .defaults import Optimizers as Defaults
from .gpt_shape import Shape as Shape
from .harness.replicas import place_on_node, require_same_start
from .loss_curves import LearningRateSchedule, LossCurve, follow
from .model import learning_rate
from .optimizer_ways import BASES, FEEDBACK, MOMENTUM, Choice, OptimizerTraining, Phases
from .training import Method

RATES = {
    "adamw": 1e-3,
    "sgd": 0.003,
    "muon": 3e-3,
    "onebit-adam": 1e-3,
    "onebit-lamb": 1e-2,
    "zero-one-adam": 1e-3,
    "momentum-sgd": 0.003,
    "diloco": 1e-3,
    "muloco": 3e-3,
    "sparseloco": 1e-3,
    "demo": 1e-3,
    "streaming": 1e-3,
    "ef21": 1e-3,
    "clan": 1e-2,
}
"""The optimizers, and their peak learning rates: AdamW's usual one, and SGD's best of a sweep with fp32. For Muon, 100
steps end within 0.3 % of each other at 3e-3 and at 6e-3."""

WARMUP = 0.15
"""Share of the steps in which the learning rate rises; a cosine brings it down to 2 % of its peak after that."""


@dataclass(frozen=True)
class OptimizerSettings:
    """What all runs have in common; ``batch`` is in sequences per rank and step.

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
    """What one run has for itself: an optimizer of ``RATES``, its peak learning rate, a method, a seed.

    The optimizer is a name, with arguments of its class or without: see ``optimizer_ways.Choice``.
    """

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
        return momentum_of(BASES[self.choice.name], self.method.compressor)

    @property
    def choice(self) -> Choice:
        """The optimizer, and arguments of its class."""
        return Choice.of(self.optimizer)


@dataclass(frozen=True)
class Row:
    """A finished run.

    ``loss`` is in bits per character on the validation text at the end, None if the run diverged in step
    ``diverged_at``. ``curve`` holds steps with their losses. ``bytes_per_step`` is what a rank sends in a step, on
    average; ``seconds`` is how long the run took, validation included.
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


def momentum_of(optimizer: str, compressor: str) -> float:
    """The momentum of "adamw" or "sgd": 0 for AdamW, and where the compressor has one of its own (dgc, signum)."""
    return MOMENTUM if optimizer == "sgd" and not _has_momentum(compressor) else 0.0


def _has_momentum(spec: str) -> bool:
    if spec == "none":
        return False
    compressor = get(spec)
    return compressor.second_pass() != compressor


def train(
    comm: Any, corpus: text.Corpus, config: RunConfig, settings: OptimizerSettings, advance: Callable[[], None]
) -> Row:
    """Train as ``config`` says. Collective; every rank returns the same row.

    Raises:
        MismatchError: the ranks do not start from the same text and weights.
    """
    from .gpt import GPT
    from .replica import Replica

    threads = launch.threads_per_rank(place_on_node(comm)[0])
    replica = Replica(GPT(settings.shape, config.seed), BASES[config.choice.name], config.momentum, threads)
    data = Characters(corpus, settings.shape.context, settings.validation_stride)
    require_same_start(comm, data.digest, replica.digest(), "torch")
    batches = data.batches(comm.size, comm.rank, config.seed, settings.batch)
    schedule = LearningRateSchedule(
        settings.steps, settings.eval_every, lambda step: learning_rate(step, settings.steps, config.lr, WARMUP)
    )
    with _session(comm, config) as session:
        phases = config.choice.phases(Phases.usual(settings.steps))
        way = OptimizerTraining(config.choice, session, replica, phases)
        return _row(config, follow(comm, replica, way, data, batches, schedule, advance))


def _session(comm: Any, config: RunConfig) -> Session:
    feedback = FEEDBACK.get(config.choice.name, config.method.feedback)
    session = Session(comm, compressor=config.method.compressor, seed=config.seed, feedback=feedback)
    session.judge_for(None)
    return session


def check(comm: Any, configs: Sequence[RunConfig], settings: OptimizerSettings) -> None:
    """Make every optimizer that has arguments once, before the first run. Collective.

    Raises:
        ConfigError: an argument has a wrong value.
    """
    for config in (one for one in configs if one.choice.options):
        with _session(comm, config) as session:
            config.choice.check(session, Phases.usual(settings.steps))


def _row(config: RunConfig, curve: LossCurve) -> Row:
    return Row(
        optimizer=config.optimizer,
        lr=config.lr,
        momentum=config.momentum,
        method=config.method.label,
        compressor=config.method.compressor,
        feedback=config.method.feedback,
        seed=config.seed,
        loss=curve.loss,
        diverged_at=curve.diverged_at,
        replicas_identical=curve.replicas_identical,
        bytes_per_step=sum(curve.points[-1].sent.values()) / curve.steps,
        seconds=curve.seconds,
        curve=tuple((point.step, point.loss) for point in curve.points),
    )
