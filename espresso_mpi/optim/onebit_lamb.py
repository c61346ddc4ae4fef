"""1-bit LAMB (Li et al., HiPC 2022): 1-bit Adam with a step length for each layer, which is kept and corrected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta

from ..errors import ConfigError, StateError
from .late import Late, fill_past, with_new
from .rules import Count, GradientMeans, KeptArray, Rule, Slot, SynchronisedOptimizer, put_momenta
from .settings import MOST, AdamSettings, count, lies
from .tensors import computing
from .updates import ALONG, FROZEN_DIRECTION, LAMB_DIRECTION
from .zero_variance import TypicalVariances

if TYPE_CHECKING:
    from ..session import Session

KEEP = 0.9
"""β₃: how much of its mean the coefficient of a layer keeps in a step of the warm-up."""

FACTORS, CHANGE = (0.5, 4.0), 0.1
"""The range of the factors that correct coefficients, and by which share a factor changes at most in a step."""

_Number = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
class Counters:
    """The state of 1-bit LAMB beside its moments.

    Attributes:
        steps: number of steps so far.
        frozen_at: the last step of the warm-up; 0: it has not ended.
        coefficients: by parameter: the mean of its coefficients in the warm-up, and the factor of the last step.
        late: see ``late.Late``.
    """

    steps: Count
    frozen_at: Count
    coefficients: Mapping[str, tuple[_Number, _Number]]
    late: Late = ()

    def __post_init__(self) -> None:
        if self.frozen_at > self.steps:
            raise ValueError(f"{self.steps} steps of which {self.frozen_at} are warm-up")


class LambRule(Rule[Counters]):
    """What 1-bit LAMB does with the parameters of one step.

    Args:
        session: synchronises the messages; its compressor is that of the second stage.
        warmup, warmup_compressor, coefficients: as for ``OnebitLamb``.

    Raises:
        ConfigError: the session would skip values that are not finite, or an argument is not valid.
    """

    owner: ClassVar[str] = "OnebitLamb"
    kept: ClassVar = {"m": KeptArray(), "v": KeptArray(positive=True), "fresh": KeptArray(positive=True)}

    def __init__(
        self, session: Session, warmup: int, warmup_compressor: str, coefficients: tuple[float, float]
    ) -> None:
        super().__init__(session, Counters(0, 0, {}))
        self._warmup = count(self.owner, "warmup", warmup, 1)
        self._least, self._largest = checked_range(self.owner, coefficients)
        self._mean_gradients = GradientMeans(self.owner, session, warmup_compressor)
        self._typical = TypicalVariances()

    def read(self, state: Any, names: Iterable[str]) -> Counters:
        """As of every rule; the coefficients are those of the parameters, but for such as came late."""
        counters, own = super().read(state, names), set(names)
        if counters.coefficients and own and own.isdisjoint(counters.coefficients):
            raise StateError(
                f"{self.owner}: the state has coefficients of {min(counters.coefficients)!r} and others, but none of "
                f"{min(own)!r} and others; load the state of this model, with its names of parameters"
            )
        return counters

    def adopt(self, counters: Counters) -> None:
        """As of every rule."""
        self._typical.forget()
        super().adopt(counters)

    def step(self, slots: Sequence[Slot[AdamSettings]]) -> None:
        """Update all parameters, in the stage that it is in."""
        if self.counters.frozen_at:
            self._compressed(slots)
        else:
            self._dense(slots)

    def _dense(self, slots: Sequence[Slot[AdamSettings]]) -> None:
        """One step of LAMB on the mean of the gradients."""
        self._mean_gradients(slots)
        steps, found = self.counters.steps + 1, dict(self.counters.coefficients)
        last = steps >= self._warmup
        late = with_new(self.counters.late, slots, steps - 1)
        still_late = fill_past(slots, late, steps - 1, steps - 1)
        filled = {*late} - {*still_late}
        for slot in slots:
            s, (first, second), kept, library = slot.settings, slot.settings.betas, slot.kept, slot.tensor.library
            scales = 1 / (1 - first**steps), 1 / (1 - second**steps)
            arrays = (slot.flat, kept["m"], kept["v"], slot.tensor.array)
            LAMB_DIRECTION(library, arrays, (first, 1 - first, second, 1 - second, *scales, s.eps, s.weight_decay))
            coefficient = self._coefficient(slot)
            mean, _ = found.get(slot.tensor.name, (0.0, 1.0))
            if slot.tensor.name in filled:
                mean = coefficient * (1 - KEEP ** (steps - 1))  # as its moments
            found[slot.tensor.name] = KEEP * mean + (1 - KEEP) * coefficient, 1.0
            ALONG(library, (slot.tensor.array, slot.flat), (s.lr * coefficient,))
            if last:
                kept["fresh"][...] = kept["v"]
        self.counters = Counters(steps, steps if last else 0, found, still_late)

    def _coefficient(self, slot: Slot[AdamSettings]) -> float:
        """How long the parameter is for the direction in its message; 1 if one of them is zero."""
        library, arrays = computing(slot.tensor.library, slot.tensor.array, slot.flat)
        length, other = (library.norm(library.double(array)) for array in arrays)
        if not (length > 0 and other > 0):
            return 1.0
        return min(max(length / other, self._least), self._largest)

    def _send(self, messages: Mapping[str, Any]) -> None:
        """As of every rule."""
        send = super()._send if self.counters.frozen_at else self._mean_gradients.fail
        send(messages)

    def _compressed(self, slots: Sequence[Slot[AdamSettings]]) -> None:
        """Each rank adds its gradient to the momentum; the mean of these replaces it."""
        put_momenta(slots)
        self._sync(slots)
        steps, frozen_at, found = self.counters.steps + 1, self.counters.frozen_at, dict(self.counters.coefficients)
        typical = self._typical.of(slots, self.resting)
        for slot in slots:
            s, (first, second), kept, tensor = slot.settings, slot.settings.betas, slot.kept, slot.tensor
            v_scale = 1 / (1 - second**frozen_at)
            numbers = (first, 1 / (1 - first), second, 1 - second, 1 / (1 - first**steps), v_scale, s.eps)
            arrays = (slot.flat, kept["m"], kept["fresh"], kept["v"], tensor.array)
            FROZEN_DIRECTION(tensor.library, arrays, (*numbers, s.weight_decay, typical[tensor.name]))
            if tensor.name in found:
                mean, factor = found[tensor.name]
                factor = _factor(slot, v_scale, 1 / (1 - second**steps), factor)
                found[tensor.name] = mean, factor
                coefficient = factor * mean / (1 - KEEP**frozen_at)
            else:  # it came after the warm-up, which knows nothing of it
                coefficient = self._coefficient(slot)
            ALONG(tensor.library, (tensor.array, slot.flat), (s.lr * coefficient,))
        self.counters = replace(self.counters, steps=steps, coefficients=found)


def _factor(slot: Slot[AdamSettings], v_scale: float, fresh_scale: float, before: float) -> float:
    """The largest ratio of the frozen root to the fresh one, in its range and near the factor of the step before."""
    library, (v, fresh) = computing(slot.tensor.library, slot.kept["v"], slot.kept["fresh"])
    ratios = root_ratios(library.sqrt, v, fresh, v_scale, fresh_scale, slot.settings.eps)
    return float(bounded(float(ratios.max()), before))


def checked_range(owner: str, coefficients: Any) -> tuple[float, float]:
    """The smallest and the largest coefficient.

    Raises:
        ConfigError: they are not two numbers, the smaller one first.
    """
    pair = isinstance(coefficients, (tuple, list)) and len(coefficients) == 2
    if not pair or not lies(coefficients[1], 0, MOST) or not lies(coefficients[0], 0, coefficients[1]):
        raise ConfigError(f"{owner}: coefficients={coefficients!r}; expected the least and the largest")
    return float(coefficients[0]), float(coefficients[1])


def root_ratios(sqrt: Callable[[Any], Any], v: Any, fresh: Any, v_scale: Any, fresh_scale: Any, eps: float) -> Any:
    """By how much the roots of the frozen variance exceed those of the fresh one; arrays of any framework."""
    return (sqrt(v * v_scale) + eps) / (sqrt(fresh * fresh_scale) + eps)


def bounded(factor: Any, before: Any, clip: Callable[..., Any] = np.clip) -> Any:
    """A factor in its range and near the one of the step before."""
    return clip(clip(factor, *FACTORS), before * (1 - CHANGE), before * (1 + CHANGE))


class OnebitLamb(SynchronisedOptimizer):
    """LAMB whose messages are momenta in few bits (Li et al., arXiv 2104.06069), for large batches.

    LAMB scales the direction u of Adam for each parameter, so that the step is as long as the parameter. As in
    ``OnebitAdam``, v is constant after a warm-up, and the ranks synchronise momenta. The coefficient c is then the mean
    of the coefficients of the warm-up, times a factor r. The factor corrects for v, which is no longer updated. It uses
    a new variance v' of the gradients, which follow from the momenta::

        u = m̂/(√v̂ + ε) + λ x
        warm-up:  c = ‖x‖/‖u‖, within ``coefficients``;  x ← x - η c u;  c̄ ← β₃ c̄ + (1 - β₃) c
        after it: mᵢ = β₁ m + (1 - β₁) gᵢ;  m ← mean of C(mᵢ + residualᵢ);  v' as v from g = (m - β₁ m_before)/(1 - β₁)
                  r = max (√v̂ + ε)/(√v̂' + ε), within 0.5 … 4 and 10 % of the r before;  x ← x - η r c̄ u

    The bias of all averages towards zero is corrected. On GPUs, the parameters of the ranks stay equal to the bit only
    if the GPUs are of one kind.

    Args:
        params, session, lr, betas, eps, weight_decay: see ``rules.SynchronisedOptimizer``.
        warmup: number of first steps in which this is LAMB. The learning rate should have reached its peak by then.
        warmup_compressor: spec of the compressor of gradients in the warm-up, with error feedback; ``"auto"``: see
            ``OnebitAdam``.
        coefficients: the smallest and the largest c.

    Example:
        >>> params = {"w": np.ones((64, 128), np.float32)}
        >>> with espresso_mpi.Session(compressor="onebit") as session:
        ...     lamb = espresso_mpi.optim.OnebitLamb(params, session, lr=0.1, weight_decay=0, warmup=1)
        ...     for step in range(2):
        ...         grads = {"w": np.full((64, 128), 0.5, np.float32)}  # of this rank, not synchronised
        ...         params = lamb.step(grads)
        >>> round(float(params["w"].mean()), 3)
        0.8
    """

    def __init__(
        self,
        params: Any,
        session: Session,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        warmup: int = 1000,
        warmup_compressor: str = "auto",
        coefficients: tuple[float, float] = (0.01, 10.0),
    ) -> None:
        settings = AdamSettings.checked("OnebitLamb", lr, betas, eps, weight_decay)
        super().__init__(params, LambRule(session, warmup, warmup_compressor, coefficients), settings)
