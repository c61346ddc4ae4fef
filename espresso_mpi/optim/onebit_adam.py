"""1-bit Adam (Tang et al., ICML 2021): momenta are synchronised in few bits once the variance has settled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta

from .late import Late, fill_past, with_new
from .rules import Count, GradientMeans, KeptArray, Rule, Slot, SynchronisedOptimizer, put_momenta
from .settings import AdamSettings, count, update_clip_of
from .updates import ADAM, FROZEN_ADAM
from .zero_variance import TypicalVariances

if TYPE_CHECKING:
    from ..session import Session

SETTLED = 0.96
"""From this ratio of the norms of v at a distance of 1/(1 - β₂) steps on, v has settled: the paper's threshold."""

EVERY = 10
"""Steps between two comparisons of norms: all ranks compare in the same steps, because it is a collective call."""


def norms_between(second: float) -> int:
    """How many norms of v before the present one is the norm that it is compared with: that of 1/(1 - β₂) steps."""
    return math.ceil(1 / (1 - second) / EVERY)


def settled(before: Any, now: Any) -> Any:
    """Whether v has settled, from its norm 1/(1 - β₂) steps before and now; of numbers, or of arrays of JAX."""
    return (now > 0) & (before >= SETTLED * now)  # without gradients nothing has settled


def settled_everywhere(session: Session, here: bool) -> bool:
    """Whether v has settled on all ranks: kinds of CPUs may round norms in other ways. Collective."""
    agreed = session.allreduce(np.array([here], np.uint8), op="min", name="OnebitAdam settled")
    return bool(agreed[0])


@dataclass(frozen=True)
class Counters:
    """The state of 1-bit Adam beside its moments.

    Attributes:
        steps: number of steps so far.
        frozen_at: the last step of the warm-up; 0: it has not ended.
        norms: of v, in the last steps in which they were computed.
        late: see ``late.Late``.
    """

    steps: Count
    frozen_at: Count
    norms: tuple[Annotated[float, Meta(ge=0)], ...]
    late: Late = ()

    def __post_init__(self) -> None:
        if self.frozen_at > self.steps:
            raise ValueError(f"{self.steps} steps of which {self.frozen_at} are warm-up")


class OnebitRule(Rule[Counters]):
    """What 1-bit Adam does with the parameters of one step.

    Args:
        session: synchronises the messages; its compressor is that of the second stage.
        warmup, warmup_compressor, update_clip: as for ``OnebitAdam``.

    Raises:
        ConfigError: the session would skip values that are not finite, or an argument is not valid.
    """

    owner: ClassVar[str] = "OnebitAdam"
    kept: ClassVar = {"m": KeptArray(), "v": KeptArray(positive=True)}

    def __init__(self, session: Session, warmup: int | str, warmup_compressor: str, update_clip: float | None) -> None:
        super().__init__(session, Counters(0, 0, ()))
        self._warmup = warmup if warmup == "auto" else count(self.owner, "warmup", warmup, 1)
        self._mean_gradients = GradientMeans(self.owner, session, warmup_compressor)
        self._typical = TypicalVariances()
        self._clip = update_clip_of(self.owner, update_clip)

    def adopt(self, counters: Counters) -> None:
        """As of every rule."""
        self._typical.forget()
        super().adopt(counters)

    def step(self, slots: Sequence[Slot[AdamSettings]]) -> None:
        """Update all parameters, in the stage that it is in."""
        if self.counters.frozen_at:
            self._compressed(slots)
            return
        self._dense(slots)
        if self._settled(slots):
            self.counters = replace(self.counters, frozen_at=self.counters.steps)

    def _dense(self, slots: Sequence[Slot[AdamSettings]]) -> None:
        """One step of AdamW on the mean of the gradients."""
        self._mean_gradients(slots)
        before = self.counters.steps
        late = with_new(self.counters.late, slots, before)
        self.counters = replace(self.counters, late=fill_past(slots, late, before, before))
        self._count()
        for slot in slots:
            s, (first, second) = slot.settings, slot.settings.betas
            numbers = (first, 1 - first, second, 1 - second, s.lr, *self._scales(s), s.eps, s.weight_decay, 0.0)
            ADAM(slot.tensor.library, (slot.tensor.array, slot.kept["m"], slot.kept["v"], slot.flat), numbers)

    def _send(self, messages: Mapping[str, Any]) -> None:
        """As of every rule."""
        send = super()._send if self.counters.frozen_at else self._mean_gradients.fail
        send(messages)

    def _compressed(self, slots: Sequence[Slot[AdamSettings]]) -> None:
        """Each rank adds its gradient to the momentum; the mean of these replaces it."""
        put_momenta(slots)
        self._sync(slots)
        self._count()
        typical = self._typical.of(slots, self.resting)
        for slot in slots:
            s = slot.settings
            arrays = (slot.tensor.array, slot.kept["m"], slot.kept["v"], slot.flat)
            numbers = (s.lr, *self._scales(s), s.eps, s.weight_decay, typical[slot.tensor.name], self._clip)
            FROZEN_ADAM(slot.tensor.library, arrays, numbers)

    def _count(self) -> None:
        self.counters = replace(self.counters, steps=self.counters.steps + 1)

    def _scales(self, settings: AdamSettings) -> tuple[float, float]:
        """The factors that undo the bias of m and v towards zero. That of v stays as it was when v was frozen."""
        (first, second), now = settings.betas, self.counters
        return 1 / (1 - first**now.steps), 1 / (1 - second ** (now.frozen_at or now.steps))

    def _settled(self, slots: Sequence[Slot[AdamSettings]]) -> bool:
        """Whether the warm-up ends with this step; the same on all ranks."""
        steps = self.counters.steps
        if self._warmup != "auto":
            return steps >= int(self._warmup)
        if steps % EVERY:
            return False
        second = max((slot.settings.betas[1] for slot in slots), default=0.0)
        norm = sum(float(slot.kept["v"].sum()) for slot in slots) / (1 - second**steps)
        back = norms_between(second)
        norms = (*self.counters.norms, norm)[-1 - back :]
        self.counters = replace(self.counters, norms=norms)
        return settled_everywhere(self._session, len(norms) > back and settled(norms[0], norms[-1]))


class OnebitAdam(SynchronisedOptimizer):
    """AdamW whose messages are momenta in few bits (Tang et al., ICML 2021, algorithm 1, with decoupled weight decay).

    Adam divides by the root of the second moment of its gradients. Gradients in one bit have nearly the same magnitude
    everywhere, so this adaptivity is lost with them. 1-bit Adam begins as AdamW, and the ranks synchronise gradients.
    After this warm-up, v is constant, and they synchronise their momenta by the session, with error feedback::

        mᵢ = β₁ m + (1 - β₁) gᵢ;  m ← mean of C(mᵢ + residualᵢ);  x ← x - η (m̂/(√v̂ + ε) + λ x)

    Unlike in the paper, the bias of m and v is corrected, and a typical v stands where it is zero (docs/optimizers.md).
    In Adam, an element of m̂/√v̂ is rarely above 1 (Kingma and Ba, 2015, section 2.1). With a v that stays, it has no
    limit; ``update_clip`` sets one.

    Args:
        params, session, lr, betas, eps, weight_decay: see ``rules.SynchronisedOptimizer``.
        warmup: number of first steps in which this is AdamW. A tenth to a fifth of the steps is usual. The learning
            rate should have reached its peak by then. With ``"auto"``, the warm-up ends when the norm of v is at most
            4 % larger than it was 1/(1 - β₂) steps before. For β₂ = 0.999, this takes at least 1000 steps.
        warmup_compressor: spec of the compressor of gradients in the warm-up, with error feedback. ``"int8"`` sends a
            quarter of the bytes, and trains like uncompressed gradients under AdamW (docs/compressors.md). ``"auto"``:
            with ``Session(plan="auto")``, ``"int8"`` or ``"none"``, whichever is quicker in the first four steps that
            synchronise gradients, whatever ``Tuning.compressors`` names, and ``"int8"`` if ``Session.slow_network``;
            with other sessions ``"none"``.
        update_clip: the largest magnitude of an element of m̂/(√v̂ + ε) after the warm-up; None: no limit, as in the
            paper. 1 is for ``onebit``: without it, the loss of single runs rose after the warm-up. It can harm where
            most elements of a message are zero, as with ``int2`` (docs/optimizers.md).

    Example:
        >>> params = {"w": np.ones((64, 128), np.float32)}
        >>> with espresso_mpi.Session(compressor="onebit") as session:
        ...     adam = espresso_mpi.optim.OnebitAdam(params, session, lr=0.1, weight_decay=0, warmup=2)
        ...     for step in range(4):
        ...         grads = {"w": np.full((64, 128), 0.5, np.float32)}  # of this rank, not synchronised
        ...         params = adam.step(grads)
        >>> round(float(params["w"].mean()), 3), adam.frozen
        (0.6, True)
    """

    def __init__(
        self,
        params: Any,
        session: Session,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        warmup: int | str = "auto",
        warmup_compressor: str = "auto",
        update_clip: float | None = None,
    ) -> None:
        settings = AdamSettings.checked("OnebitAdam", lr, betas, eps, weight_decay)
        super().__init__(params, OnebitRule(session, warmup, warmup_compressor, update_clip), settings)

    @property
    def frozen(self) -> bool:
        """Whether the warm-up has ended, so that messages are compressed."""
        return bool(self._rule.counters.frozen_at)
