"""The formulas of optimizers, each written once: a fused kernel for arrays in host memory, expressions elsewhere.

A formula takes elements of its arrays and plain numbers, and returns new elements for its first arrays. It uses only
operators and the square root that it is made with. Therefore numba compiles it into one pass over memory, in place and
on all threads of the rank, and torch's and CuPy's arrays on a GPU can be passed in the place of elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange

from ..compressors.kernels.cpu import host
from .tensors import NumPy, Torch

# --- formulas ---------------------------------------------------------------------------------------------------------


def adam(sqrt: Callable[[Any], Any]) -> Callable[..., Any]:
    """AdamW (Loshchilov and Hutter, 2019): new x, m and v from a gradient.

    ``m_scale`` and ``v_scale`` are 1/(1 - β₁ᵗ) and 1/(1 - β₂ᵗ); ``rest`` of a β is 1 - β. Here and below, ``typical``
    counts as v where v is zero; 0 if that is of no account.
    """

    def formula(x, m, v, g, first, first_rest, second, second_rest, rate, m_scale, v_scale, eps, decay, typical):  # type: ignore[no-untyped-def]
        m = first * m + first_rest * g
        v = second * v + second_rest * (g * g)
        x = x - rate * (m * m_scale / (sqrt((v + typical * (v == 0)) * v_scale) + eps) + decay * x)
        return x, m, v

    return formula


def momentum(sqrt: Callable[[Any], Any]) -> Callable[..., Any]:
    """What a rank sends: its gradient, replaced by β₁ m + (1 - β₁) g."""

    def formula(g, m, first, first_rest):  # type: ignore[no-untyped-def]
        return first * m + first_rest * g

    return formula


def frozen_adam(sqrt: Callable[[Any], Any], clip: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """AdamW with a momentum from outside and a variance that stays: new x and m.

    Here and below, ``most`` is the largest element of the direction, and ``clip`` limits a value to a range.
    """

    def formula(x, m, v, mean, rate, m_scale, v_scale, eps, decay, typical, most):  # type: ignore[no-untyped-def]
        root = sqrt((v + typical * (v == 0)) * v_scale)
        return x - rate * (clip(mean * m_scale / (root + eps), -most, most) + decay * x), mean

    return formula


def progress(sqrt: Callable[[Any], Any]) -> Callable[..., Any]:
    """The pseudo-gradient of local steps: where they began minus where they led."""

    def formula(message, anchor, x):  # type: ignore[no-untyped-def]
        return anchor - x

    return formula


def outer(sqrt: Callable[[Any], Any]) -> Callable[..., Any]:
    """SGD with momentum on averaged pseudo-gradients: new x, anchor and velocity.

    The anchor moves along ``direct`` · d + ``ahead`` · u: 1 and the momentum for Nesterov's step, 0 and 1 for the usual
    one. ``keep`` is the share of x that remains, ``keep_rest`` that of the anchor.
    """

    def formula(x, anchor, u, d, rate, inertia, direct, ahead, keep, keep_rest):  # type: ignore[no-untyped-def]
        u = inertia * u + d
        anchor = anchor - rate * (direct * d + ahead * u)
        return keep * x + keep_rest * anchor, anchor, u

    return formula


def decayed_momentum(sqrt: Callable[[Any], Any]) -> Callable[..., Any]:
    """What a rank sends in SGD: its gradient, replaced by μ m + g + λ x."""

    def formula(g, m, x, inertia, decay):  # type: ignore[no-untyped-def]
        return inertia * m + (g + decay * x)

    return formula


def sgd(sqrt: Callable[[Any], Any]) -> Callable[..., Any]:
    """SGD with a momentum from outside: new x and m.

    The step is ``ahead`` · new m - ``behind`` · old m: 1 and 0, or 1 + μ and μ for Nesterov's, whose gradient is the
    new m less μ times the old one.
    """

    def formula(x, m, mean, rate, ahead, behind):  # type: ignore[no-untyped-def]
        return x - rate * (ahead * mean - behind * m), mean

    return formula


def sign_step(sqrt: Callable[[Any], Any]) -> Callable[..., Any]:
    """A step of DeMo: new x, from ``shrink``·x, along q and along its sign. Zeros have none."""

    def formula(x, q, shrink, along, signed):  # type: ignore[no-untyped-def]
        return shrink * x - along * q - signed * (q > 0) + signed * (q < 0)

    return formula


def local_adam(sqrt: Callable[[Any], Any], clip: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """A local step of 0/1 Adam: new x, m, and sum u of the momenta by which x has moved. ``shrink`` is 1 - η λ."""

    def formula(x, m, u, v, g, first, first_rest, rate, v_scale, eps, shrink, typical, most):  # type: ignore[no-untyped-def]
        m = first * m + first_rest * g
        root = sqrt((v + typical * (v == 0)) * v_scale)
        return shrink * x - rate * clip(m / (root + eps), -most, most), m, shrink * u + rate * m

    return formula


def mean_momentum(sqrt: Callable[[Any], Any]) -> Callable[..., Any]:
    """What a rank sends after local steps of 0/1 Adam: its gradient, replaced by the mean momentum of the steps."""

    def formula(g, m, u, first, first_rest, rate, shrink, inverse):  # type: ignore[no-untyped-def]
        return (shrink * u + rate * (first * m + first_rest * g)) * inverse

    return formula


def from_anchor(sqrt: Callable[[Any], Any], clip: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """The end of local steps of 0/1 Adam: new x and m from where the steps began and from the mean momentum."""

    def formula(x, m, anchor, v, mean, length, v_scale, eps, kept, typical, most):  # type: ignore[no-untyped-def]
        root = sqrt((v + typical * (v == 0)) * v_scale)
        return kept * anchor - length * clip(mean / (root + eps), -most, most), mean

    return formula


def lamb_direction(sqrt: Callable[[Any], Any]) -> Callable[..., Any]:
    """Adam's direction with decay in the place of the gradient, and new m and v: what LAMB scales by its norm."""

    def formula(g, m, v, x, first, first_rest, second, second_rest, m_scale, v_scale, eps, decay):  # type: ignore[no-untyped-def]
        m = first * m + first_rest * g
        v = second * v + second_rest * (g * g)
        return m * m_scale / (sqrt(v * v_scale) + eps) + decay * x, m, v

    return formula


def frozen_direction(sqrt: Callable[[Any], Any]) -> Callable[..., Any]:
    """The same from a mean momentum with a variance that stays; and a fresh variance of the gradient in that mean.

    ``inverse`` is 1/(1 - β₁).
    """

    def formula(mean, m, fresh, v, x, first, inverse, second, second_rest, m_scale, v_scale, eps, decay, typical):  # type: ignore[no-untyped-def]
        g = (mean - first * m) * inverse
        fresh = second * fresh + second_rest * (g * g)
        root = sqrt((v + typical * (v == 0)) * v_scale)
        return mean * m_scale / (root + eps) + decay * x, mean, fresh

    return formula


def along(sqrt: Callable[[Any], Any]) -> Callable[..., Any]:
    """A step along a direction: new x."""

    def formula(x, direction, rate):  # type: ignore[no-untyped-def]
        return x - rate * direction

    return formula


# --- kernels ----------------------------------------------------------------------------------------------------------


@host.inlined
def _clip(value, low, high):  # type: ignore[no-untyped-def]
    if value > high:
        return high
    return low if value < low else value  # NaN stays


_adam, _momentum, _progress, _outer = (host.inlined(make(np.sqrt)) for make in (adam, momentum, progress, outer))
_frozen, _local, _from_anchor = (host.inlined(make(np.sqrt, _clip)) for make in (frozen_adam, local_adam, from_anchor))
_decayed, _sgd, _mean_momentum = (host.inlined(make(np.sqrt)) for make in (decayed_momentum, sgd, mean_momentum))
_lamb, _frozen_lamb, _along, _sign_step = (
    host.inlined(make(np.sqrt)) for make in (lamb_direction, frozen_direction, along, sign_step)
)


@host.Kernel
def _adam_kernel(x, m, v, g, first, first_rest, second, second_rest, rate, m_scale, v_scale, eps, decay, typical):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i], m[i], v[i] = _adam(
            x[i], m[i], v[i], g[i], first, first_rest, second, second_rest, rate, m_scale, v_scale, eps, decay, typical
        )


@host.Kernel
def _momentum_kernel(g, m, first, first_rest):  # type: ignore[no-untyped-def]
    for i in prange(g.size):
        g[i] = _momentum(g[i], m[i], first, first_rest)


@host.Kernel
def _frozen_kernel(x, m, v, mean, rate, m_scale, v_scale, eps, decay, typical, most):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i], m[i] = _frozen(x[i], m[i], v[i], mean[i], rate, m_scale, v_scale, eps, decay, typical, most)


@host.Kernel
def _progress_kernel(message, anchor, x):  # type: ignore[no-untyped-def]
    for i in prange(message.size):
        message[i] = _progress(message[i], anchor[i], x[i])


@host.Kernel
def _outer_kernel(x, anchor, u, d, rate, inertia, direct, ahead, keep, keep_rest):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i], anchor[i], u[i] = _outer(x[i], anchor[i], u[i], d[i], rate, inertia, direct, ahead, keep, keep_rest)


@host.Kernel
def _decayed_kernel(g, m, x, inertia, decay):  # type: ignore[no-untyped-def]
    for i in prange(g.size):
        g[i] = _decayed(g[i], m[i], x[i], inertia, decay)


@host.Kernel
def _sgd_kernel(x, m, mean, rate, ahead, behind):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i], m[i] = _sgd(x[i], m[i], mean[i], rate, ahead, behind)


@host.Kernel
def _sign_step_kernel(x, q, shrink, along, signed):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i] = _sign_step(x[i], q[i], shrink, along, signed)


@host.Kernel
def _local_kernel(x, m, u, v, g, first, first_rest, rate, v_scale, eps, shrink, typical, most):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i], m[i], u[i] = _local(
            x[i], m[i], u[i], v[i], g[i], first, first_rest, rate, v_scale, eps, shrink, typical, most
        )


@host.Kernel
def _mean_momentum_kernel(g, m, u, first, first_rest, rate, shrink, inverse):  # type: ignore[no-untyped-def]
    for i in prange(g.size):
        g[i] = _mean_momentum(g[i], m[i], u[i], first, first_rest, rate, shrink, inverse)


@host.Kernel
def _from_anchor_kernel(x, m, anchor, v, mean, length, v_scale, eps, kept, typical, most):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i], m[i] = _from_anchor(x[i], m[i], anchor[i], v[i], mean[i], length, v_scale, eps, kept, typical, most)


@host.Kernel
def _lamb_kernel(g, m, v, x, first, first_rest, second, second_rest, m_scale, v_scale, eps, decay):  # type: ignore[no-untyped-def]
    for i in prange(g.size):
        g[i], m[i], v[i] = _lamb(
            g[i], m[i], v[i], x[i], first, first_rest, second, second_rest, m_scale, v_scale, eps, decay
        )


@host.Kernel
def _frozen_lamb_kernel(  # type: ignore[no-untyped-def]
    mean, m, fresh, v, x, first, inverse, second, second_rest, m_scale, v_scale, eps, decay, typical
):
    for i in prange(mean.size):
        mean[i], m[i], fresh[i] = _frozen_lamb(
            mean[i], m[i], fresh[i], v[i], x[i], first, inverse, second, second_rest, m_scale, v_scale, eps, decay,
            typical,
        )  # fmt: skip


@host.Kernel
def _along_kernel(x, direction, rate):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i] = _along(x[i], direction[i], rate)


class Update:
    """A formula, applied in place.

    Args:
        make: makes the formula for a square root.
        kernel: its loop over host memory.
        outputs: how many of the first arrays the formula changes.
        clips: whether ``make`` also takes a function that limits values.
    """

    def __init__(self, make: Callable[..., Any], kernel: host.Kernel, outputs: int, clips: bool = False) -> None:
        self._make, self._kernel, self._outputs, self._clips = make, kernel, outputs, clips

    def __call__(self, library: NumPy | Torch, arrays: tuple[Any, ...], numbers: tuple[float, ...] = ()) -> None:
        """Replace the first arrays by what the formula makes of the arrays and numbers. All arrays are of one size."""
        views = [view for view in map(library.host_view, arrays) if view is not None]
        if len(views) == len(arrays):
            self._kernel(*views, *map(np.float32, numbers))
            return
        functions = (library.sqrt, library.clip) if self._clips else (library.sqrt,)
        results = self._make(*functions)(*arrays, *map(library.number, numbers))
        results = results if isinstance(results, tuple) else (results,)
        changed = arrays[: self._outputs]
        kept = [library.copy(one) if any(one is array for array in changed) else one for one in results]
        for array, result in zip(changed, kept):
            array[...] = result


ADAM = Update(adam, _adam_kernel, 3)
MOMENTUM = Update(momentum, _momentum_kernel, 1)
FROZEN_ADAM = Update(frozen_adam, _frozen_kernel, 2, clips=True)
PROGRESS = Update(progress, _progress_kernel, 1)
OUTER = Update(outer, _outer_kernel, 3)
DECAYED_MOMENTUM = Update(decayed_momentum, _decayed_kernel, 1)
SGD = Update(sgd, _sgd_kernel, 2)
SIGN_STEP = Update(sign_step, _sign_step_kernel, 1)
LOCAL_ADAM = Update(local_adam, _local_kernel, 3, clips=True)
MEAN_MOMENTUM = Update(mean_momentum, _mean_momentum_kernel, 1)
FROM_ANCHOR = Update(from_anchor, _from_anchor_kernel, 2, clips=True)
LAMB_DIRECTION = Update(lamb_direction, _lamb_kernel, 3)
FROZEN_DIRECTION = Update(frozen_direction, _frozen_lamb_kernel, 3)
ALONG = Update(along, _along_kernel, 1)
