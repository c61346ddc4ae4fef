"""SGD with momentum whose momenta are synchronised, in few bits, in place of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from .rules import Count, GradientMeans, KeptArray, Rule, Slot, SynchronisedOptimizer
from .settings import SGDSettings, count
from .updates import DECAYED_MOMENTUM, SGD

if TYPE_CHECKING:
    from ..session import Session
    from ..tuning import OptimizerRule


@dataclass(frozen=True)
class Counters:
    """The state beside the momenta: the number of steps."""

    steps: Count


class MomentumRule(Rule[Counters]):
    """What SGD with compressed momenta does with the parameters of one step.

    Args:
        session: synchronises the momenta.
        warmup: as for ``MomentumSGD``.

    Raises:
        ConfigError: the session would skip values that are not finite, or an argument is not valid.
    """

    owner: ClassVar[str] = "MomentumSGD"
    kept: ClassVar = {"m": KeptArray()}
    judged_for: ClassVar[OptimizerRule] = "sgd-momentum"

    def __init__(self, session: Session, warmup: int) -> None:
        super().__init__(session, Counters(0))
        self._warmup = count(self.owner, "warmup", warmup, 0)
        self._mean_gradients = GradientMeans(self.owner, session)

    def _send(self, messages: Mapping[str, Any]) -> None:
        """As of every rule."""
        send = self._mean_gradients.fail if self.counters.steps < self._warmup else super()._send
        send(messages)

    def step(self, slots: Sequence[Slot[SGDSettings]]) -> None:
        """Each rank adds its gradient to the momentum; the mean of these replaces it."""
        if self.counters.steps < self._warmup:
            self._mean_gradients(slots)
            for slot in slots:
                self._add_momentum(slot)
        else:
            for slot in slots:
                slot.put_gradient()
                self._add_momentum(slot)
            self._sync(slots)
        self.counters = replace(self.counters, steps=self.counters.steps + 1)
        for slot in slots:
            s = slot.settings
            numbers = (s.lr, 1 + s.momentum, s.momentum) if s.nesterov else (s.lr, 1.0, 0.0)
            SGD(slot.tensor.library, (slot.tensor.array, slot.kept["m"], slot.flat), numbers)

    def _add_momentum(self, slot: Slot[SGDSettings]) -> None:
        """The gradient in the message becomes a momentum."""
        arrays = (slot.flat, slot.kept["m"], slot.tensor.array)
        DECAYED_MOMENTUM(slot.tensor.library, arrays, (slot.settings.momentum, slot.settings.weight_decay))


class MomentumSGD(SynchronisedOptimizer):
    """SGD with momentum whose messages are the momenta, with error feedback (1-bit Adam without its denominator).

    If gradients are compressed, a part that arrives late stays in the momentum for 1/(1 - μ) steps. Here the ranks send
    the momenta instead. The residuals of the session correct the momentum in the next step, on both passes of a route
    (Tang et al., ICML 2021; Zheng et al., NeurIPS 2019)::

        mᵢ = μ m + gᵢ + λ x;  m ← mean of C(mᵢ + residualᵢ);  x ← x - η m

    Without compression, this is ``torch.optim.SGD`` on the mean of the gradients.

    Args:
        params, session, lr: see ``rules.SynchronisedOptimizer``.
        momentum: μ.
        weight_decay: λ, an L2 penalty as in torch's SGD.
        nesterov: step along μ m plus the mean gradient. The mean gradient is the new m minus μ times the old one.
        warmup: number of first steps that synchronise uncompressed gradients.

    Example:
        >>> params = {"w": np.ones((64, 128), np.float32)}
        >>> with espresso_mpi.Session(compressor="onebit") as session:
        ...     sgd = espresso_mpi.optim.MomentumSGD(params, session, lr=0.1, momentum=0.5)
        ...     for step in range(2):
        ...         grads = {"w": np.full((64, 128), 0.5, np.float32)}  # of this rank, not synchronised
        ...         params = sgd.step(grads)
        >>> round(float(params["w"].mean()), 3)
        0.875
    """

    def __init__(
        self,
        params: Any,
        session: Session,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        warmup: int = 0,
    ) -> None:
        settings = SGDSettings.checked("MomentumSGD", lr, momentum, weight_decay, nesterov)
        super().__init__(params, MomentumRule(session, warmup), settings)
