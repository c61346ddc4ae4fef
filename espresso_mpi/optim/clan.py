"""CLAN, the optimizer of BytePS-Compress (Zhong et al., 2021): LANS fed by the averaged compressed gradient.

>>> import numpy as np
>>> from espresso_mpi.optim import Clan
>>> params = {"w": np.ones(4)}
>>> clan = Clan(params, lr=0.1, weight_decay=0)
>>> grads = {"w": np.array([1, -1, 1, -1], np.float32)}  # what Session.sync made of the ranks' gradients
>>> params = clan.step(grads)
>>> params["w"].round(4).tolist()
[0.9, 1.1, 0.9, 1.1]

A plain reference: whole-array arithmetic in the arrays' own library, no kernels, no MPI.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays import buffers
from ..errors import NonFiniteError, StateError
from .saved import array, entries
from .settings import MOST, AdamSettings, number
from .tensors import Tensor, matched, read, tensors_of


class Clan:
    """LANS (Zheng et al., 2020) on gradients that are synchronised already. For each tensor x with gradient ĝ::

        g = ĝ/(‖ĝ‖ + ε)
        m ← β₁ m + (1 - β₁) g,  m̂ = m/(1 - β₁ᵗ);  v ← β₂ v + (1 - β₂) g²,  v̂ = v/(1 - β₂ᵗ)
        r = m̂/(√v̂ + ε) + λ x;  u = g/(√v̂ + ε) + λ x
        x ← x - η (β₁ r ‖x‖/‖r‖ + (1 - β₁) u ‖x‖/‖u‖), where a ratio is 1 if one of its norms is 0

    Norms are float64, moments float32. Apart from ε, the norm of ĝ does not matter: a loss scale need not be undone,
    and compression may change the norm. If a gradient is None, its tensor does not change in that step. Ranks that
    start from the same values and run the same libraries with as many threads stay equal to the bit.

    Args:
        params: float32 or float64 arrays in nested lists, tuples and dicts, updated in place: on the CPU all that
            ``Session.sync`` takes, on a GPU tensors of torch, and other arrays if CuPy is imported, which computes
            there. Arrays of JAX cannot be changed: use what ``step`` returns.
        lr: η. An attribute, to be set between steps.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ.

    Raises:
        ConfigError: a number out of its range.
        GradientError: a parameter that cannot be updated; the text names it.

    Example:
        >>> params = {"w": np.ones(4)}
        >>> clan = espresso_mpi.optim.Clan(params, lr=0.1, weight_decay=0)
        >>> params = clan.step({"w": np.array([1, -1, 1, -1], np.float32)})
        >>> params["w"].round(4).tolist()
        [0.9, 1.1, 0.9, 1.1]
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        self._settings = AdamSettings.checked("Clan", lr, betas, eps, weight_decay)
        self._params = params
        self._moments = {t.name: Moments(0, t.library.zeros(t), t.library.zeros(t)) for t in tensors_of(params)}

    @property
    def lr(self) -> float:
        """The learning rate η of the next step."""
        return self._settings.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._settings = replace(self._settings, lr=number("Clan", "lr", value, 0, MOST))

    def step(self, grads: Any) -> Any:
        """Update the parameters once.

        Args:
            grads: arrays with the names and shapes of the parameters, or None; of any type that ``Session.sync`` takes.
                The keys on the way to an array are its name. Not changed.

        Returns:
            The parameters: the same containers, unless they hold arrays that cannot be changed (JAX).

        Raises:
            GradientError: names or shapes differ from those of the parameters, or an array cannot be read.
            NonFiniteError: a gradient holds a NaN or an infinity. Nothing has been changed in either case.
        """
        tensors = tensors_of(self._params)
        values = matched(tensors, dict(buffers.flatten(grads)))
        lengths = {t.name: length_of(t, values[t.name]) for t in tensors if values[t.name] is not None}
        for tensor in tensors:
            if tensor.name in lengths:
                gradient = read(tensor, values[tensor.name]) / (lengths[tensor.name] + self._settings.eps)
                update(tensor, tensor.library.single(gradient), self._moments[tensor.name], self._settings)
        self._params = buffers.rebuild(self._params, [tensor.adopted for tensor in tensors])
        return self._params

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The number of steps and the moments of each tensor, as numpy arrays: a copy."""
        return {
            t.name: {"steps": own.steps, "m": t.library.to_host(own.m), "v": t.library.to_host(own.v)}
            for t in tensors_of(self._params)
            for own in [self._moments[t.name]]
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue from what ``state_dict`` returned. The caller restores the parameters and ``lr``.

        Raises:
            StateError: the state belongs to other parameters, or is damaged. Nothing has been changed then.
        """
        tensors = tensors_of(self._params)
        saved = entries("Clan", state, self._moments)
        loaded = {t.name: moments_of(t, saved[t.name]) for t in tensors}
        for tensor in tensors:
            steps, m, v = loaded[tensor.name]
            own = self._moments[tensor.name]
            own.steps = steps
            own.m[...], own.v[...] = tensor.library.from_host(tensor, m), tensor.library.from_host(tensor, v)


def lans(
    x: Any,
    g: Any,
    m: Any,
    v: Any,
    betas: tuple[float, float],
    corrections: Sequence[Any],
    eps: float,
    decay: Any,
    ratio: Callable[[Any], Any],
) -> tuple[Any, Any, Any]:
    """By what LANS moves x, over η, and new m and v, for arrays of any framework.

    Args:
        g: the gradient over its norm.
        corrections: 1 - βᵗ of both β.
        ratio: the norm of x over that of a direction.
    """
    first, second = betas
    m = first * m + (1 - first) * g
    v = second * v + (1 - second) * (g * g)
    spread = (v / corrections[1]) ** 0.5 + eps
    r = m / corrections[0] / spread + decay * x
    u = g / spread + decay * x
    return (first * ratio(r)) * r + ((1 - first) * ratio(u)) * u, m, v


@dataclass
class Moments:
    """What is kept of one tensor: how often it was updated, and two flat float32 arrays of its own library."""

    steps: int
    m: Any
    v: Any


def update(tensor: Tensor, g: Any, moments: Moments, settings: AdamSettings) -> None:
    """One step of one tensor along ``g``, its gradient over its norm: flat, float32."""
    x = tensor.library.single(tensor.array)
    length = _norm(tensor, x)
    moments.steps += 1
    scales = [1 - beta**moments.steps for beta in settings.betas]
    change, moments.m[...], moments.v[...] = lans(
        x, g, moments.m, moments.v, settings.betas, scales, settings.eps, settings.weight_decay,
        lambda direction: _ratio(length, _norm(tensor, direction)),
    )  # fmt: skip
    array = tensor.array
    array -= settings.lr * change


def length_of(tensor: Tensor, value: Any) -> float:
    """The norm of a gradient.

    Raises:
        NonFiniteError: it is not finite.
    """
    length = tensor.library.norm(read(tensor, value))
    if not math.isfinite(length):
        raise NonFiniteError(
            f"{tensor.name}: the gradient holds a NaN, an infinity or values whose squares overflow; expected finite "
            f"ones; skip this step on all ranks, with a lower loss scale if there is one"
        )
    return length


def _norm(tensor: Tensor, array: Any) -> float:
    return tensor.library.norm(tensor.library.double(array))


def _ratio(length: float, other: float) -> float:
    """The trust ratio: how long the parameters are for the direction's length."""
    return length / other if length > 0 and other > 0 else 1.0


def moments_of(tensor: Tensor, entry: Any) -> tuple[int, np.ndarray, np.ndarray]:
    """Steps and moments of one tensor from a saved state.

    Raises:
        StateError: they are damaged, or those of another tensor.
    """
    m, v = array(tensor, entry, "m"), array(tensor, entry, "v", positive=True)
    steps = entry.get("steps")
    if not isinstance(steps, numbers.Integral) or isinstance(steps, bool) or steps < 0:
        raise StateError(
            f"{tensor.name}: steps={steps!r} in its state; expected a whole number; load what state_dict returned"
        )
    return int(steps), m, v
