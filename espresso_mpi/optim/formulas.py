"""The formulas of optimizers, each written once.

A formula takes elements of its arrays and plain numbers, and returns new elements for its first arrays. It uses only
operators and the functions that it is made with: the square root, and one that limits values. ``updates`` makes kernels
for host memory of it, ``cuda_updates`` kernels for GPUs; arrays of torch, CuPy and JAX can be passed in the place of
elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def clip(value, low, high):  # type: ignore[no-untyped-def]
    """A value, limited to a range: for kernels. NaN stays."""
    if value > high:
        return high
    return low if value < low else value


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
