"""The training runs of ``bench accuracy``: what they have in common, what each has for itself, what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..compressors import get
from ..compressors.registry import split_specs
from ..errors import ConfigError
from .defaults import Accuracy as Defaults
from .loss_curves import LossCurve, Point
from .optimizer_ways import FEEDBACK, OWN, Choice, Phases
from .session_options import for_optimizer, with_options
from .workloads import workload_of

AVERAGING = ("gloo", "push", "sync", "gradsync")
"""Ways that average gradients: see ``averaging.WAYS``."""

GLOO = ("none", "fp16", "powersgd")
"""What torch has for DDP over gloo."""

AUTO = "auto"
"""In the place of a compressor: the session makes a plan."""


@dataclass(frozen=True)
class AccuracySettings:
    """What all runs have in common.

    Attributes:
        workload: a name of ``workloads.WORKLOADS``.
        batch: examples of a rank and step.
        eval_every: steps between validations.
        width, layers: of the network.
        dense_steps: in which optimizers that send something else than gradients begin by synchronising these.
        every: local steps between two averages.
        lr: peak learning rate of all ways; None: those of the workload.

    Raises:
        ConfigError: a number is below 1, or the rate is not above 0.
    """

    workload: str
    steps: int
    batch: int
    eval_every: int
    width: int
    layers: int
    dense_steps: int
    every: int
    lr: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "eval_every", "width", "layers", "dense_steps", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(self, name)}")
        if self.dense_steps > self.steps:
            raise ConfigError(f"--dense-steps: expected at most the {self.steps} of a run, got {self.dense_steps}")
        if self.lr is not None and not self.lr > 0:
            raise ConfigError(f"--lr: expected a number above 0, got {self.lr}")

    @property
    def phases(self) -> Phases:
        """The parts of a run."""
        return Phases(self.steps, self.dense_steps, self.every)


@dataclass(frozen=True)
class Way:
    """How a model is trained by all ranks: ``gradsync:int8``, ``gloo:fp16``, ``diloco:int4``, ``diloco+every=30``.

    Attributes:
        spec: its name, as it was given.
        kind: one of ``AVERAGING``, or an optimizer that synchronises by itself.
        compressor: its spec, "none", "auto", or "auto@FILE" with a file for the plan.
        choice: the optimizer with its arguments; None for ``AVERAGING``.
        options: of its session.
    """

    spec: str
    kind: str
    compressor: str
    choice: Choice | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def dense_steps(self) -> int:
        """With which a session begins that averages gradients."""
        return int(dict(self.options).get("dense_steps", 0))

    @property
    def plans(self) -> bool:
        """Whether a session plans for itself."""
        return plans(self.compressor)

    def optimizer(self, usual: str) -> str:
        """The optimizer's name; ``usual``: of ways that average gradients."""
        return usual if self.kind in AVERAGING else self.kind


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        way: its spec.
        lr: peak learning rate.
        loss: validation loss at the end, in bits; None if the run diverged in step ``diverged_at``.
        replicas_identical: whether all ranks ended with the same weights.
        wall_seconds: how long it took, validation included.
        curve: seconds of training, bytes and loss on the way.
        sent_by_step: bytes that a rank sent in each step, the mean over the ranks.
        computing: share of the time after the dense steps in which ranks do not wait for averages, where it is known
            from step times, and some of these steps send nothing.
    """

    way: str
    seed: int
    lr: float
    loss: float | None
    diverged_at: int | None
    replicas_identical: bool
    wall_seconds: float
    curve: tuple[Point, ...]
    sent_by_step: tuple[int, ...]
    computing: float | None = None

    @classmethod
    def of(cls, way: Way, seed: int, lr: float, curve: LossCurve) -> Run:
        """From what was measured."""
        return cls(
            way.spec, seed, lr, curve.loss, curve.diverged_at, curve.replicas_identical, curve.seconds, curve.points,
            curve.sent_by_step,
        )  # fmt: skip


def plans(compressor: str) -> bool:
    """Whether this stands for ``plan="auto"``: ``auto``, or ``auto@FILE``."""
    return compressor.partition("@")[0] == AUTO


def usual_ways(workload: str) -> str:
    """The ways that are compared if none are chosen: with the optimizers that go with the workload's own."""
    own = Defaults.momenta if workload_of(workload).optimizer == "adamw" else "momentum-sgd"
    return f"{Defaults.gradients},{own},{Defaults.local}"


def ways_of(text: str) -> list[Way]:
    """The ways of a comma list, each once. A bare ``parameter=value`` belongs to the one before it.

    Raises:
        ConfigError: a way or its compressor is unknown, or there is none.
    """
    found = split_specs(text)
    if not found:
        raise ConfigError("--ways: names none; expected a list such as gloo:none,gloo:fp16,gradsync:int8,onebit-adam")
    return [_way_of(spec) for spec in dict.fromkeys(found)]


def dense_of(spec: str, settings: AccuracySettings) -> int | None:
    """The first steps of a way, in which its optimizer synchronises gradients; 0 where it has no others.

    None: they are not known, as of a file of an earlier version with another way.
    """
    way = _known(spec)
    if way is None or way.choice is None:
        return None if way is None else way.dense_steps
    return way.choice.dense(settings.phases)


def waits_from(spec: str, settings: AccuracySettings) -> int | None:
    """The step from which a way waits for messages only in steps that send some; None if there is none."""
    way = _known(spec)
    if way is None or way.choice is None or way.choice.delays(settings.phases):
        return None
    return way.choice.dense(settings.phases)


def _known(spec: str) -> Way | None:
    """The way, if this version has it."""
    try:
        return _way_of(spec)
    except ConfigError:
        return None


def _way_of(spec: str) -> Way:
    named, _, compressor = spec.partition(":")
    kind, options = named.partition("+")[0], dict[str, Any]()
    if kind in OWN:
        compressor = compressor or OWN[kind]
        named, options = for_optimizer(named)
    elif kind in AVERAGING[1:] and compressor:
        _, options = with_options(named)
    elif named not in AVERAGING or not compressor:
        raise ConfigError(
            f"--ways {spec!r}; expected {', '.join(AVERAGING)} with a method after a colon, or one of "
            f"{', '.join(OWN)}, if need be with arguments, such as onebit-adam+update_clip=1"
        )
    if kind == "gloo":
        if compressor.partition(":")[0] not in GLOO:
            raise ConfigError(f"--ways {spec!r}; torch has {', '.join(GLOO)}")
    elif plans(compressor) and kind in FEEDBACK:
        raise ConfigError(f"--ways {spec!r}; expected a compressor: plans have no feedback of an optimizer's own")
    elif compressor != "none" and not plans(compressor):
        get(compressor)
    if options and plans(compressor):
        raise ConfigError(f"--ways {spec!r}; expected a compressor: a session that plans takes no {', '.join(options)}")
    if kind in FEEDBACK and "feedback" in options:
        raise ConfigError(f"--ways {spec!r}; expected no feedback: {kind} has its own, {FEEDBACK[kind]}")
    return Way(spec, kind, compressor, Choice.of(named) if kind in OWN else None, tuple(options.items()))
