"""How large the errors of the block quantisers are: bounds, and means for normal values.

``cpu.blocks`` describes the codes; a block is quantised relative to its largest magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

_ROUNDING = 2.0**-22
"""What float32 arithmetic adds to the errors below, relative to ``‖x‖²``: a value a little below half a step may become
a whole one."""


def nearest_loss(size: int, step: float, relative: float = 0.0) -> float:
    """The least upper bound of ``‖x - C(x)‖² / ‖x‖²`` for a block of ``size`` rounded to nearest.

    The largest element is exact. Another one is off by its relative rounding error or, where codes are evenly spaced,
    by half a step and by itself at most: the worst block has them all at half a step.

    Args:
        step: distance of the evenly spaced codes around 0, relative to the largest.
        relative: largest squared relative error beyond those.
    """
    most = (size - 1) * step**2 / 4
    return max(relative, most / (1 + most)) + _ROUNDING


def stochastic_variance(size: int, top: float) -> float:
    """The least ω for a block of ``size`` rounded stochastically: at most size/(4·top²).

    The largest element is exact; the others, at t steps, have a variance of t(1 - t) steps², relative to
    ``top² + (size - 1)t²``, which is largest at ``t = top / (top + sqrt(top² + size - 1))``, here inserted.
    """
    return (math.sqrt(1 + (size - 1) / top**2) - 1) / 2 + _ROUNDING


def gaussian_loss(size: int, error: Callable[[np.ndarray], np.ndarray]) -> float:
    """``E‖x - C(x)‖² / ‖x‖²`` of normal values in blocks of ``size``, by integration over the block's largest.

    Given the largest, m, which is exact, the others are independent, with the normal density cut off at ±m.

    Args:
        error: mean squared error of values in [0, 1], for 1 as the largest.
    """
    edges = np.linspace(1e-3, 8, 401)
    chance = np.diff([math.exp(size * math.log1p(-math.erfc(m / math.sqrt(2)))) for m in edges])
    largest, t = (edges[1:] + edges[:-1]) / 2, (np.arange(8192) + 0.5) / 8192
    density = np.exp(-((largest[:, None] * t) ** 2) / 2)
    mean = density @ error(t) / density.sum(axis=1)
    return float(chance @ (largest**2 * mean)) * (1 - 1 / size)


@lru_cache
def integer_error(size: int, top: float, rounding: str) -> float:
    def error(t: np.ndarray) -> np.ndarray:
        part: np.ndarray = top * t - np.floor(top * t)
        return (np.minimum(part, 1 - part) ** 2 if rounding == "nearest" else part * (1 - part)) / top**2

    return gaussian_loss(size, error)


@lru_cache
def float8_error(size: int, top: float, mantissa: int, lowest: int) -> float:
    def error(t: np.ndarray) -> np.ndarray:
        step: np.ndarray = 2.0 ** (np.maximum(np.floor(np.log2(top * t)), lowest) - mantissa)
        return (t - np.rint(top * t / step) * step / top) ** 2

    return gaussian_loss(size, error)
