"""Stochastic levels of a block's norm: the rule of rounding, and how large its errors are.

``cpu.dithering`` describes the levels and has the kernels.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

MAX, L2, CLIP = 0, 1, 2
"""What a level is a share of: the largest magnitude, the Euclidean norm, or the largest one after clipping."""


class Quantiser(NamedTuple):
    """A rule of rounding: ``levels`` above zero, equidistant or ``powers`` of two, of a block's ``norm``.

    ``clip``, in root mean squares, is for norm = CLIP alone. ``scaled`` divides what is sent by 1 + ω.
    """

    block: int
    levels: int
    powers: bool = False
    norm: int = MAX
    clip: float = 0.0
    scaled: bool = False

    @property
    def width(self) -> int:
        """Bits of a level number: they take 2·levels + 1 values."""
        return (2 * self.levels).bit_length()

    @property
    def top(self) -> float:
        """The highest level as a multiple of the lowest."""
        return 2.0 ** (self.levels - 1) if self.powers else float(self.levels)

    def groups(self, n: int) -> int:
        """Groups of 64 elements that hold n."""
        return n // self.block * -(-self.block // 64) + -(-(n % self.block) // 64)

    def omega(self, n: int) -> float:
        """ω with ``E‖x - C(x)‖² ≤ ω‖x‖²`` for blocks of n elements or of ``block``, before scaling, after clipping.

        In units of the step an element t < 1 has the variance t(1 - t), a larger one at most 1/4, or t²/8 between
        powers of two. So with λ ≥ f (f = 0, or 1/8 for powers) none exceeds ``λt² + 1/(4(1 + λ))``, and the largest
        element of a block, t = top, has no variance with the maximum norm. There the least λ with
        ``(B - 1)/(4(1 + λ)) ≤ λ·top²`` is ω, and is reached unless f is more; for the Euclidean norm it is the least
        value of ``λ + B/(4(1 + λ)·top²)``.
        """
        count, floor = min(n, self.block), 0.125 if self.powers else 0.0
        if self.norm != L2:
            return max(floor, (math.sqrt(1 + (count - 1) / self.top**2) - 1) / 2)
        half = math.sqrt(count) / (2 * self.top)
        return 2 * half - 1 if half >= 1 + floor else floor + half**2 / (1 + floor)

    def shrink(self, n: int) -> float:
        """What the decoded values are multiplied by."""
        return 1 / (1 + self.omega(n)) if self.scaled else 1.0

    def contraction(self, n: int) -> float:
        """δ = 1 - ω, scaled 1/(1 + ω), of what clipping leaves: least for a vector of one element, √B times its RMS."""
        if self.norm == CLIP and not self.scaled:
            return 0.0
        count = min(n, self.block)
        kept = self.clip / math.sqrt(count) if self.norm == CLIP else 1.0
        left = 2 * kept - kept**2 if kept < 1 else 1.0
        return left / (1 + self.omega(n)) if self.scaled else max(0.0, 1 - self.omega(n))

    def variance(self, n: int) -> float | None:
        """ω, where nothing biases."""
        return None if self.scaled or self.norm == CLIP else self.omega(n)

    def gaussian_error(self, n: int) -> float:
        """``E‖x - C(x)‖² / ‖x‖²`` for normal values."""
        count, a = min(n, self.block), self.shrink(n)
        if self.norm == CLIP:
            return _clipped_error(self.clip, count, a)
        error = _l2_error if self.norm == L2 else _max_error
        return (1 - a) ** 2 + a**2 * error(self.top, self.powers, count)


def rounding_variance(t: np.ndarray, powers: bool) -> np.ndarray:
    """The variance of stochastic rounding of t ≥ 0 to the whole numbers, or to 0 and the powers of two from 1 on."""
    if not powers:
        return (t - np.floor(t)) * (np.floor(t) + 1 - t)
    below = np.exp2(np.floor(np.log2(np.maximum(t, 1))))
    return np.where(t < 1, t * (1 - t), (t - below) * (2 * below - t))


def _mean_variance(t: np.ndarray, weights: np.ndarray, top: float, powers: bool) -> np.ndarray:
    """The weighted mean of the rounding variance; among many equidistant levels it is 1/6."""
    variance = np.full_like(t, 1 / 6) if top > 256 and not powers else rounding_variance(t, powers)
    return weights @ variance / weights.sum(axis=-1)


@lru_cache
def _l2_error(top: float, powers: bool, block: int) -> float:
    """The share c = sin θ of one element in the norm of ``block`` has the density cos^(block-2) θ."""
    if block == 1:
        return 0.0
    reach = math.asin(min(1.0, 12 / math.sqrt(block)))
    angle = (np.arange(1 << 16) + 0.5) * (reach / (1 << 16))
    density = np.cos(angle) ** (block - 2)
    return float(block / top**2 * _mean_variance(top * np.sin(angle), density, top, powers))


def _largest(block: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest of ``block`` normal magnitudes: values m and their probabilities."""
    edges = np.linspace(0, 9, 901)
    below = np.array([math.erf(m / math.sqrt(2)) ** block for m in edges])
    chance = np.diff(below)
    likely = chance > 1e-8
    return ((edges[1:] + edges[:-1]) / 2)[likely], chance[likely]


@lru_cache
def _max_error(top: float, powers: bool, block: int) -> float:
    """The others of a block whose largest magnitude is m are normal and below m."""
    m, chance = _largest(block)
    share = (np.arange(8192) + 0.5) / 8192
    variance = np.array([_mean_variance(top * share, np.exp(-((m_ * share) ** 2) / 2), top, powers) for m_ in m])
    return float((block - 1) / block * np.sum(chance * (m / top) ** 2 * variance))


@lru_cache
def _clipped_error(clip: float, block: int, a: float) -> float:
    """``‖x‖² - 2a⟨x, y⟩ + a²·M·‖y‖₁`` for x clipped to y with largest magnitude M, decoded values scaled by a."""
    with_x, with_m = (_sampled_clipping if block < 512 else _integrated_clipping)(clip, block)
    return 1 - 2 * a * with_x + a**2 * with_m


def _integrated_clipping(clip: float, block: int) -> tuple[float, float]:
    """``⟨x, y⟩`` and ``M·‖y‖₁`` relative to ``‖x‖²``; the block's RMS is taken as 1 and its elements as independent."""
    x = (np.arange(4096) + 0.5) * (9 / 4096)
    density = np.exp(-(x**2) / 2)
    density /= density.sum()
    below, y = np.cumsum(density), np.minimum(x, clip)
    others = np.cumsum(density * y) / below  # the mean of those below the largest one, x
    largest = np.diff(below**block, prepend=0)
    return float(density @ (x * y)), float(largest @ (y * ((block - 1) * others + y))) / block


def _sampled_clipping(clip: float, block: int) -> tuple[float, float]:
    """The same for small blocks, whose largest magnitude and RMS depend on one another: the mean of many."""
    x = np.abs(np.random.default_rng(0).standard_normal(((1 << 19) // block, block)))
    y = np.minimum(x, clip * np.sqrt(np.mean(x**2, axis=1, keepdims=True)))
    total = np.sum(x**2)
    return float(np.sum(x * y) / total), float(np.sum(y.max(axis=1) * y.sum(axis=1)) / total)
