"""How the optimizers of ``bench optimizers`` take a step: what is synchronised, and what is local."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from espresso_mpi.errors import ConfigError
from espresso_mpi.session import Session

from ..optim import Clan, DeMo, DiLoCo, MomentumSGD, OnebitAdam, OnebitLamb, ZeroOneAdam
from ..optim.messages import wait_for
from .datasets import Batch

if TYPE_CHECKING:  # needs torch, which only a run needs
    from .replica import Replica

DENSE = 0.2
"""Share of the steps in which ``onebit-adam``, ``onebit-lamb`` and those of ``LOCAL`` begin by synchronising gradients.
The warm-up of ``zero-one-adam``, which synchronises gradients in some of them."""

WARMUP, RARE = "int4", "int8"
"""How ``onebit-adam`` and ``onebit-lamb`` synchronise gradients, by an eighth of the bytes, and how ``zero-one-adam``
does. Both train like uncompressed ones, but error feedback needs gradients in all steps. ``zero-one-adam`` sends few:
with int4, one of three runs of the LSTM ended 6 % above fp32."""

SHORT = 30
"""Steps of a warm-up below which ``RARE`` is used by all: an element that is rounded to zero in all of them has no
variance of its own."""

_TIMED = 4
"""Dense steps of a run that is only timed, if it is not very short."""

MOMENTUM = 0.9
"""Of SGD."""

EVERY = 15
"""Local steps of those of ``LOCAL`` between two averages: few, because runs are short."""

FRAGMENTS, DELAY = 4, 5
"""Of ``streaming``, as in its paper; the delay is shorter where averages come more often."""

LOCAL: dict[str, Callable[..., DiLoCo]] = {
    "diloco": DiLoCo,
    "streaming": DiLoCo,
    "muloco": DiLoCo,
    "sparseloco": DiLoCo.sparse,
}
"""The optimizers that take local steps by the optimizer of ``BASES``, and what averages them."""

_OWN: dict[str, Callable[..., Any]] = {
    "onebit-adam": OnebitAdam,
    "onebit-lamb": OnebitLamb,
    "zero-one-adam": ZeroOneAdam,
    "momentum-sgd": MomentumSGD,
    "demo": DeMo,
}
"""The optimizers that synchronise by themselves."""

INTERVALS = 3
"""How many intervals ``zero-one-adam`` has after its warm-up, of equal numbers of steps: 1, 2 and 4."""

BASES = {
    "adamw": "adamw",
    "sgd": "sgd",
    "muon": "muon",
    "onebit-adam": "adamw",
    "onebit-lamb": "adamw",
    "zero-one-adam": "adamw",
    "momentum-sgd": "sgd",
    "diloco": "adamw",
    "streaming": "adamw",
    "muloco": "muon",
    "sparseloco": "adamw",
    "demo": "adamw",
    "ef21": "adamw",
    "clan": "adamw",
}
"""The optimizers, and with which one, on uncompressed gradients, each is compared."""


OWN = {
    "onebit-adam": "onebit",
    "onebit-lamb": "onebit",
    "zero-one-adam": "onebit",
    "momentum-sgd": "onebit",
    "diloco": "int4",
    "streaming": "int4",
    "muloco": "int4",
    "sparseloco": "topk_in_chunks:values=int2",
    "demo": "dct_topk:values=int4",
    "ef21": "int4",
    "clan": "onebit",
}
"""Those of them that are more than averages of gradients for the usual optimizer, and the compressors that are usual
for that. ``ef21`` is the usual optimizer on gradients by EF21, without a momentum (docs/error-feedback.md)."""

FEEDBACK = {"sparseloco": "plain:decay=0.95", "demo": "plain:decay=0.999", "ef21": "ef21"}
"""The error feedback that belongs to an optimizer: those of the papers."""


@dataclass(frozen=True)
class Phases:
    """The parts of a run of ``steps``.

    Attributes:
        dense: the first steps, in which an optimizer synchronises gradients.
        every: local steps between two averages.
        long: whether those steps are enough for ``WARMUP``; None: by their number.
        brief: of a run that is only timed, and has all kinds of steps.
    """

    steps: int
    dense: int
    every: int = EVERY
    long: bool | None = None
    brief: bool = False

    @property
    def warmup(self) -> str:
        """How ``onebit-adam`` and ``onebit-lamb`` synchronise gradients."""
        return WARMUP if self._long else RARE

    @property
    def _long(self) -> bool:
        return self.dense >= SHORT if self.long is None else self.long

    @classmethod
    def usual(cls, steps: int) -> Phases:
        """Those of short runs."""
        return cls(steps, max(1, round(DENSE * steps)))

    def shortened(self, steps: int) -> Phases:
        """The same of a run of so many steps, which has an average at least, if it has steps enough.

        A few of them are dense, so that not only the first one is timed; what they send is the same.
        """
        if steps == self.steps:
            return self
        dense = max(1, min(_TIMED, steps // 3), round(self.dense * steps / self.steps))
        return Phases(steps, dense, max(1, min(self.every, (steps - dense - 1) // 2)), self._long, brief=True)


class Way(Protocol):
    """One training run's steps on this rank."""

    def step(self, grads: dict[str, Any], rate: float) -> None:
        """Update the replica by this rank's gradients. Collective, but not in each step of each way."""

    def finish(self) -> None:
        """Make the replicas equal. Collective."""


@dataclass(frozen=True)
class Choice:
    """One of ``BASES``, and arguments of its class: ``onebit-adam+update_clip=1+warmup=100``.

    Attributes:
        name: the optimizer.
        options: the arguments.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, text: str) -> Choice:
        """From text; "none", "true" and "false" are those of Python, but for arguments that are texts.

        Raises:
            ConfigError: its class has no such argument. Whether there is such an optimizer is not checked.
        """
        name, *given = re.split(r"\+(?=[A-Za-z_])", text)  # not within 1e+3
        allowed = _arguments(name)
        options = {}
        for part in given:
            key, assigned, value = part.partition("=")
            if not assigned or key not in allowed:
                listed = f"name=value with a name of {', '.join(allowed)}" if allowed else f"no arguments of {name!r}"
                raise ConfigError(f"{text!r}: {part!r} after a '+'; expected {listed}")
            options[key] = value if allowed[key] == "str" else _value(value)
        return cls(name, tuple(options.items()))

    def dense(self, usual: Phases) -> int | None:
        """The first steps, in which it synchronises gradients; None if their number depends on the run."""
        arguments = self._arguments(usual)
        if arguments.get("warmup") == "auto":
            return None
        return self.phases(usual).dense if self.name in LOCAL or "warmup" in arguments else 0

    def delays(self, usual: Phases) -> bool:
        """Whether messages travel during later steps."""
        return bool(self._arguments(usual).get("delay"))

    def _arguments(self, usual: Phases) -> dict[str, Any]:
        return {**_usual(self.name, self.phases(usual)), **dict(self.options)}

    def phases(self, usual: Phases) -> Phases:
        """The parts of a run, if arguments name them."""
        named = {"warmup": "dense", "every": "every"}
        given: dict[str, Any] = {named[k]: v for k, v in self.options if k in named and type(v) is int}
        return replace(usual, **given)

    def check(self, session: Session, phases: Phases) -> None:
        """Make the optimizer once without a model, so that an argument is refused before the first run.

        Raises:
            ConfigError: an argument has a wrong value, or the session has a feedback that it cannot use.
        """
        if self.name in _OWN | LOCAL:
            self.make({"weight": np.zeros(1, np.float32)}, session, self.phases(phases))

    def make(self, params: dict[str, Any], session: Session, phases: Phases) -> Any:
        """The optimizer of ``params``. One that takes local steps must have their other optimizer beside it.

        Raises:
            ConfigError: an argument has a wrong value.
        """
        arguments = {**_usual(self.name, phases), **self._given(phases)}
        if phases.brief and self.name in LOCAL:
            fragments = arguments["fragments"] = min(arguments.get("fragments", 1), phases.every)
            arguments["delay"] = min(arguments.get("delay", 0), (phases.every - 1) // fragments)
        return (_OWN | LOCAL)[self.name](params, session, **arguments)

    def _given(self, phases: Phases) -> dict[str, Any]:
        """The arguments, with the steps of a run that may be shorter."""
        given = dict(self.options)
        for key, steps in (("warmup", phases.dense), ("every", phases.every)):
            if type(given.get(key)) is int:
                given[key] = steps
        if phases.brief:  # so that it comes to later steps, too
            given = {k: v for k, v in given.items() if (k, v) != ("warmup", "auto") and (k != "double_every" or not v)}
        return given


def _arguments(name: str) -> dict[str, str]:
    """What a class takes beside parameters, session, and a learning rate that follows the schedule, with its types."""
    made = _OWN.get(name) or LOCAL.get(name)
    if made is None:
        return {}
    beside = {"params", "session"} if name in LOCAL else {"params", "session", "lr"}
    known = signature(made).parameters
    return {key: known[key].annotation for key in known if key not in beside and type(known[key].default) is not tuple}


def _value(text: str) -> Any:
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _usual(name: str, phases: Phases) -> dict[str, Any]:
    """Arguments of its class in short runs."""
    if name in ("onebit-adam", "onebit-lamb"):
        return {"warmup": phases.dense, "warmup_compressor": phases.warmup}
    if name == "zero-one-adam":
        every = max(1, -(-(phases.steps - phases.dense) // INTERVALS))
        return {"warmup": phases.dense, "double_every": every, "warmup_compressor": RARE}
    if name == "momentum-sgd":
        return {"momentum": MOMENTUM}
    if name == "streaming":
        fragments = max(1, min(FRAGMENTS, phases.every))
        return {"every": phases.every, "fragments": fragments, "delay": min(DELAY, (phases.every - 1) // fragments)}
    return {"every": phases.every} if name in LOCAL else {}


def way_of(choice: Choice, session: Session, replica: Replica, phases: Phases) -> Way:
    """The steps of one of ``BASES``."""
    if choice.name in _OWN:
        return _Own(choice.make(dict(replica.model.named_parameters()), session, phases))
    if choice.name in LOCAL:
        return _Local(session, replica, phases, choice)
    if choice.name == "clan":
        return _Clan(session, replica)
    return _Gradients(session, replica)


class OptimizerTraining:
    """Gradients of this rank alone, and what one of ``BASES`` makes of them: a ``loss_curves.Method``."""

    def __init__(self, choice: Choice, session: Session, replica: Replica, phases: Phases) -> None:
        self._way, self._session, self._replica = way_of(choice, session, replica, phases), session, replica

    def step(self, batch: Batch, rate: float) -> None:
        """Gradient, synchronisation, update."""
        self._way.step(self._replica.gradients(*batch), rate)

    def finish(self) -> None:
        """Make the replicas equal."""
        self._way.finish()

    def sent(self) -> Mapping[str, int]:
        """Bytes by level, of the session."""
        return self._session.stats().bytes_by_level


class _Gradients:
    """Gradients are synchronised in every step."""

    def __init__(self, session: Session, replica: Replica) -> None:
        self._session, self._replica = session, replica

    def step(self, grads: dict[str, Any], rate: float) -> None:
        self._session.sync(grads)
        self._replica.update(rate)

    def finish(self) -> None:
        """The replicas are equal already."""


class _Clan(_Gradients):
    """The same, for an optimizer of arrays."""

    def __init__(self, session: Session, replica: Replica) -> None:
        super().__init__(session, replica)
        self._clan = Clan(dict(replica.model.named_parameters()))

    def step(self, grads: dict[str, Any], rate: float) -> None:
        self._clan.lr = rate
        self._clan.step(self._session.sync(grads))


class _Own:
    """The optimizer synchronises by itself."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def step(self, grads: dict[str, Any], rate: float) -> None:
        self._optimizer.lr = rate
        self._optimizer.step(grads)

    def finish(self) -> None:
        if hasattr(self._optimizer, "average"):
            self._optimizer.average()


class _Local:
    """Gradients first, then the progress of local steps."""

    def __init__(self, session: Session, replica: Replica, phases: Phases, choice: Choice) -> None:
        self._session, self._replica, self._choice = session, replica, choice
        self._dense, self._phases = phases.dense, phases
        self._diloco: DiLoCo | None = None

    def step(self, grads: dict[str, Any], rate: float) -> None:
        if self._dense:
            self._dense -= 1
            wait_for([self._session.allreduce(grad, name=name, blocking=False) for name, grad in grads.items()])
        self._replica.update(rate)
        if not self._dense:
            if self._diloco is None:
                params = dict(self._replica.model.named_parameters())
                self._diloco = self._choice.make(params, self._session, self._phases)
                return
            self._diloco.step()

    def finish(self) -> None:
        if self._diloco is not None:
            self._diloco.average()
