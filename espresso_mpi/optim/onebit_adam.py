"""1-bit Adam (Tang et al., ICML 2021): momenta are synchronised in few bits once the variance has settled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import buffers
from ..compressors import get
from ..errors import NonFiniteError, StateError
from .messages import require_raising, wait_for
from .saved import entries
from .settings import AdamSettings, count, lies
from .tensors import Tensor, matched, native, tensors_of
from .updates import ADAM, FROZEN_ADAM, MOMENTUM

if TYPE_CHECKING:
    from ..session import Session
    from ..sessions.handles import Handle

SETTLED = 0.96
"""From this ratio of the norms of v at a distance of 1/(1 - β₂) steps on, v has settled: the paper's threshold."""

_EVERY = 10
"""Steps between two comparisons of norms: all ranks compare in the same steps, because it is a collective call."""


@dataclass
class Slot:
    """One parameter in a step.

    Attributes:
        tensor: the parameter.
        gradient: this rank's gradient, flat, of any floating-point type; None counts as zero.
        settings: hyperparameters of this step.
        m, v: moments, flat float32 arrays of the parameter's library.
        message: what is synchronised: float32, in the parameter's shape.
    """

    tensor: Tensor
    gradient: Any
    settings: AdamSettings
    m: Any
    v: Any
    message: Any

    @property
    def flat(self) -> Any:
        """The message as a flat array over the same memory."""
        return self.message.reshape(-1)


class OnebitRule:
    """What 1-bit Adam does with the parameters of one step, whatever framework they come from.

    Args:
        session: synchronises the messages; its compressor is that of the second stage.
        warmup, warmup_compressor: as for ``OnebitAdam``.

    Raises:
        ConfigError: the session would skip values that are not finite, or an argument is not valid.
    """

    def __init__(self, session: Session, warmup: int | str, warmup_compressor: str) -> None:
        require_raising("OnebitAdam", session)
        if warmup != "auto":
            warmup = count("OnebitAdam", "warmup", warmup, 1)
        self._session, self._warmup = session, warmup
        self._warmup_compressor = "none" if warmup_compressor == "none" else str(get(warmup_compressor))
        self.steps, self.frozen_at = 0, 0
        self._norms: list[float] = []

    def step(self, slots: Sequence[Slot]) -> None:
        """Update all parameters. Collective.

        Raises:
            EspressoError: as ``Session.sync``, on every rank. No parameter and no moment has changed then.
        """
        if self.frozen_at:
            self._compressed(slots)
        else:
            self._dense(slots)
            if self._settled(slots):
                self.frozen_at = self.steps

    def _dense(self, slots: Sequence[Slot]) -> None:
        """One step of AdamW on the mean of the gradients."""
        for slot in slots:
            slot.flat[...] = 0 if slot.gradient is None else slot.gradient
        wait_for([self._mean(slot) for slot in slots])
        _require_finite(slots)
        self.steps += 1
        for slot in slots:
            s, (first, second) = slot.settings, slot.settings.betas
            numbers = (first, 1 - first, second, 1 - second, s.lr, *self._scales(s), s.eps, s.weight_decay)
            ADAM(slot.tensor.library, (slot.tensor.array, slot.m, slot.v, slot.flat), numbers)

    def _mean(self, slot: Slot) -> Handle:
        """Begin the allreduce of a gradient."""
        small = slot.tensor.size * 4 < self._session.min_bytes
        compressor = "none" if small else self._warmup_compressor
        feedback = "none" if compressor == "none" else "auto"
        handle: Handle = self._session.allreduce(
            slot.message,
            name=f"OnebitAdam {slot.tensor.name}",
            compressor=compressor,
            feedback=feedback,
            blocking=False,
        )
        return handle

    def _compressed(self, slots: Sequence[Slot]) -> None:
        """Each rank adds its gradient to the momentum; the mean of these replaces it."""
        for slot in slots:
            first = slot.settings.betas[0]
            slot.flat[...] = 0 if slot.gradient is None else slot.gradient
            MOMENTUM(slot.tensor.library, (slot.flat, slot.m), (first, 1 - first))
        self._session.sync({slot.tensor.name: slot.message for slot in slots})
        self.steps += 1
        for slot in slots:
            s = slot.settings
            arrays = (slot.tensor.array, slot.m, slot.v, slot.flat)
            FROZEN_ADAM(slot.tensor.library, arrays, (s.lr, *self._scales(s), s.eps, s.weight_decay))

    def _scales(self, settings: AdamSettings) -> tuple[float, float]:
        """The factors that undo the bias of m and v towards zero. That of v stays as it was when v was frozen."""
        first, second = settings.betas
        return 1 / (1 - first**self.steps), 1 / (1 - second ** (self.frozen_at or self.steps))

    def _settled(self, slots: Sequence[Slot]) -> bool:
        """Whether the warm-up ends with this step; the same on all ranks."""
        if self._warmup != "auto":
            return self.steps >= int(self._warmup)
        if self.steps % _EVERY:
            return False
        second = max((slot.settings.betas[1] for slot in slots), default=0.0)
        self._norms.append(sum(float(slot.v.sum()) for slot in slots) / (1 - second**self.steps))
        back = math.ceil(1 / (1 - second) / _EVERY)
        here = len(self._norms) > back and self._norms[-1 - back] >= SETTLED * self._norms[-1]
        del self._norms[: -1 - back]
        agreed = self._session.allreduce(np.array([here], np.uint8), op="min", name="OnebitAdam settled")
        return bool(agreed[0])

    def state(self) -> dict[str, Any]:
        """The counters, for a checkpoint."""
        return {"steps": self.steps, "frozen_at": self.frozen_at, "norms": list(self._norms)}

    def load(self, state: Any) -> None:
        """Continue from ``state``.

        Raises:
            StateError: it is damaged.
        """
        try:
            steps, frozen_at = int(state["steps"]), int(state["frozen_at"])
            norms = [float(norm) for norm in state["norms"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StateError(f"OnebitAdam: cannot read its counters ({error!r}); load what state_dict made") from None
        if not 0 <= frozen_at <= steps or not all(lies(norm, 0, math.inf) for norm in norms):
            raise StateError(
                f"OnebitAdam: got {steps} steps of which {frozen_at} are warm-up; expected at least as many steps"
            )
        self.steps, self.frozen_at, self._norms = steps, frozen_at, norms


class OnebitAdam:
    """AdamW whose messages are momenta in few bits (Tang et al., ICML 2021, algorithm 1, with decoupled weight decay).

    Adam divides by the root of the second moment of the gradients that it is given. Gradients in one bit have nearly
    the same magnitude everywhere, so this adaptivity is lost with them. 1-bit Adam is AdamW on uncompressed gradients
    first. Then v stays as it is, and the ranks synchronise their momenta by the session, with error feedback::

        mᵢ = β₁ m + (1 - β₁) gᵢ;  m ← mean of C(mᵢ + residualᵢ);  x ← x - η (m̂/(√v̂ + ε) + λ x)

    All ranks must start from the same parameters. They stay equal to the bit.

    Args:
        params: float32 or float64 arrays in nested lists, tuples and dicts, updated in place, as for ``Clan``.
        session: its compressor, feedback and route are those of the momenta; tensors below its ``min_bytes`` are sent
            uncompressed. It needs ``nonfinite="raise"``, the default.
        lr: η. An attribute, to be set between steps.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ, decoupled.
        warmup: number of first steps that are AdamW's. ``"auto"``: until the norm of v is at most 4 % larger than
            1/(1 - β₂) steps before, which takes 1000 steps at least for β₂ = 0.999. A tenth to a fifth of the steps is
            usual; the learning rate should have reached its peak.
        warmup_compressor: spec of the compressor of gradients in the warm-up, with error feedback. ``"int8"`` sends a
            quarter of the bytes, and trains like uncompressed gradients under AdamW (docs/compressors.md).

    Raises:
        ConfigError: a number is out of its range, or the session would skip values that are not finite.
        GradientError: a parameter cannot be updated; the text names it.

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
        warmup_compressor: str = "none",
    ) -> None:
        self._settings = AdamSettings.checked("OnebitAdam", lr, betas, eps, weight_decay)
        self._rule = OnebitRule(session, warmup, warmup_compressor)
        self._params = params
        self._moments = {t.name: (t.library.zeros(t), t.library.zeros(t)) for t in tensors_of(params)}
        self._messages = {t.name: t.library.zeros(t).reshape(t.adopted.spec.shape) for t in tensors_of(params)}

    @property
    def lr(self) -> float:
        """The learning rate η of the next step."""
        return self._settings.lr

    @lr.setter
    def lr(self, value: float) -> None:
        s = self._settings
        self._settings = AdamSettings.checked("OnebitAdam", value, s.betas, s.eps, s.weight_decay)

    @property
    def frozen(self) -> bool:
        """Whether the warm-up has ended, so that messages are compressed."""
        return self._rule.frozen_at > 0

    def step(self, grads: Any) -> Any:
        """Update the parameters once. Collective.

        Args:
            grads: this rank's gradients, not synchronised: arrays with the names and shapes of the parameters. None
                counts as zero. Not changed.

        Returns:
            The parameters: the same containers, unless they hold arrays that cannot be changed (JAX).

        Raises:
            GradientError: the names or shapes are others than the parameters', or an array cannot be read.
            EspressoError: as ``Session.sync``, on every rank, NonFiniteError among them. Nothing has been changed in
                either case.
        """
        tensors = tensors_of(self._params)
        values = matched(tensors, dict(buffers.flatten(grads)))
        self._rule.step([self._slot(t, values[t.name]) for t in tensors if t.size])
        self._params = buffers.rebuild(self._params, [tensor.adopted for tensor in tensors])
        return self._params

    def _slot(self, tensor: Tensor, value: Any) -> Slot:
        gradient = None if value is None else native(tensor, value)
        return Slot(tensor, gradient, self._settings, *self._moments[tensor.name], self._messages[tensor.name])

    def state_dict(self) -> dict[str, Any]:
        """The counters, and the moments of each tensor as numpy arrays: a copy.

        Residuals are the session's state.
        """
        tensors = tensors_of(self._params)
        moments = {t.name: dict(zip("mv", map(t.library.to_host, self._moments[t.name]))) for t in tensors}
        return {"rule": self._rule.state(), "moments": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        The parameters, ``lr`` and the state of the session are the caller's to restore.

        Raises:
            StateError: the state belongs to other parameters, or is damaged. Nothing has been changed then.
        """
        tensors = tensors_of(self._params)
        moments = entries("OnebitAdam", state, self._moments, "moments")
        loaded = {t.name: checked_moments(t, moments[t.name]) for t in tensors}
        self._rule.load(state.get("rule"))
        for tensor in tensors:
            for own, value in zip(self._moments[tensor.name], loaded[tensor.name]):
                own[...] = tensor.library.from_host(tensor, value)


def _require_finite(slots: Sequence[Slot]) -> None:
    """Refuse mean gradients that are not finite. All ranks have the same means, so all raise the same error.

    Raises:
        NonFiniteError: naming the first.
    """
    for slot in slots:
        if not slot.tensor.library.finite(slot.flat):
            raise NonFiniteError(
                f"{slot.tensor.name}: the gradient of a rank holds a NaN or an infinity; expected finite ones; nothing "
                f"has been changed: skip this step on all ranks"
            )


def checked_moments(tensor: Tensor, entry: Any) -> tuple[np.ndarray, np.ndarray]:
    """m and v of one tensor from a saved state.

    Raises:
        StateError: they are missing or damaged, or do not fit.
    """
    try:
        m, v = (np.asarray(entry[key], np.float32) for key in "mv")
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"{tensor.name}: cannot read its state ({error!r}); load what state_dict returned") from None
    if m.shape != (tensor.size,) or v.shape != (tensor.size,) or not (np.isfinite([m, v]).all() and (v >= 0).all()):
        raise StateError(
            f"{tensor.name}: got moments of shape {m.shape} and {v.shape}; expected finite ones of shape "
            f"({tensor.size},); load the state of this model"
        )
    return m, v
