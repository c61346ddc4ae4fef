"""How the optimizers of ``bench optimizers`` take a step: what is synchronised, and what is local."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

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

CLIP = 1.0
"""``update_clip`` of ``clipped-onebit-adam`` and ``clipped-zero-one-adam``."""

EVERY = 15
"""Local steps of those of ``LOCAL`` between two averages: few, because runs are short."""

FRAGMENTS, DELAY = 4, 5
"""Of ``streaming``, as in its paper; the delay is shorter where averages come more often."""


def _streaming(params: dict[str, Any], session: Session, every: int) -> DiLoCo:
    fragments = min(FRAGMENTS, every)
    return DiLoCo(params, session, every, fragments=fragments, delay=min(DELAY, (every - 1) // fragments))


LOCAL: dict[str, Callable[..., DiLoCo]] = {
    "diloco": DiLoCo,
    "streaming": _streaming,
    "muloco": DiLoCo,
    "sparseloco": DiLoCo.sparse,
}
"""The optimizers that take local steps by the optimizer of ``BASES``, and what averages them."""

INTERVALS = 3
"""How many intervals ``zero-one-adam`` has after its warm-up, of equal numbers of steps: 1, 2 and 4."""

BASES = {
    "adamw": "adamw",
    "sgd": "sgd",
    "muon": "muon",
    "onebit-adam": "adamw",
    "onebit-lamb": "adamw",
    "zero-one-adam": "adamw",
    "clipped-onebit-adam": "adamw",
    "clipped-zero-one-adam": "adamw",
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
    "clipped-onebit-adam": "onebit",
    "clipped-zero-one-adam": "onebit",
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
    """

    steps: int
    dense: int
    every: int = EVERY
    long: bool | None = None

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
        return Phases(steps, dense, max(1, min(self.every, (steps - dense - 1) // 2)), self._long)


class Way(Protocol):
    """One training run's steps on this rank."""

    def step(self, grads: dict[str, Any], rate: float) -> None:
        """Update the replica by this rank's gradients. Collective, but not in each step of each way."""

    def finish(self) -> None:
        """Make the replicas equal. Collective."""


def way_of(optimizer: str, session: Session, replica: Replica, phases: Phases) -> Way:
    """The steps of one of ``BASES``."""
    if optimizer in _OWN:
        return _Own(_OWN[optimizer](dict(replica.model.named_parameters()), session, phases))
    if optimizer in LOCAL:
        return _Local(session, replica, phases, LOCAL[optimizer])
    if optimizer == "clan":
        return _Clan(session, replica)
    return _Gradients(session, replica)


class OptimizerTraining:
    """Gradients of this rank alone, and what one of ``BASES`` makes of them: a ``loss_curves.Method``."""

    def __init__(self, optimizer: str, session: Session, replica: Replica, phases: Phases) -> None:
        self._way, self._session, self._replica = way_of(optimizer, session, replica, phases), session, replica

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


def _onebit_adam(
    params: dict[str, Any], session: Session, phases: Phases, update_clip: float | None = None
) -> OnebitAdam:
    return OnebitAdam(
        params, session, warmup=phases.dense, warmup_compressor=phases.warmup, update_clip=update_clip
    )  # fmt: skip


def _zero_one_adam(
    params: dict[str, Any], session: Session, phases: Phases, update_clip: float | None = None
) -> ZeroOneAdam:
    every = max(1, -(-(phases.steps - phases.dense) // INTERVALS))
    return ZeroOneAdam(
        params, session, warmup=phases.dense, double_every=every, warmup_compressor=RARE, update_clip=update_clip
    )


def _momentum_sgd(params: dict[str, Any], session: Session, phases: Phases) -> MomentumSGD:
    return MomentumSGD(params, session, momentum=MOMENTUM)


def _demo(params: dict[str, Any], session: Session, phases: Phases) -> DeMo:
    return DeMo(params, session)


def _onebit_lamb(params: dict[str, Any], session: Session, phases: Phases) -> OnebitLamb:
    return OnebitLamb(params, session, warmup=phases.dense, warmup_compressor=phases.warmup)


_OWN: dict[str, Callable[..., Any]] = {
    "onebit-lamb": _onebit_lamb,
    "onebit-adam": _onebit_adam,
    "zero-one-adam": _zero_one_adam,
    "clipped-onebit-adam": partial(_onebit_adam, update_clip=CLIP),
    "clipped-zero-one-adam": partial(_zero_one_adam, update_clip=CLIP),
    "momentum-sgd": _momentum_sgd,
    "demo": _demo,
}
"""The optimizers that synchronise by themselves."""


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

    def __init__(self, session: Session, replica: Replica, phases: Phases, make: Callable[..., DiLoCo]) -> None:
        self._session, self._replica, self._make = session, replica, make
        self._dense, self._every = phases.dense, phases.every
        self._diloco: DiLoCo | None = None

    def step(self, grads: dict[str, Any], rate: float) -> None:
        if self._dense:
            self._dense -= 1
            wait_for([self._session.allreduce(grad, name=name, blocking=False) for name, grad in grads.items()])
        self._replica.update(rate)
        if not self._dense:
            if self._diloco is None:
                self._diloco = self._make(dict(self._replica.model.named_parameters()), self._session, self._every)
                return
            self._diloco.step()

    def finish(self) -> None:
        if self._diloco is not None:
            self._diloco.average()
