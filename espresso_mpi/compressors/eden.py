"""``eden``: a random rotation, then 1 to 4 bits per element (EDEN, Vargaftik et al., 2022); bits + 32/block bits.

Each block is rotated by random signs and a Walsh-Hadamard transform (``cpu.rotations``): y = R·x, scaled to mean square
1. Whatever x was, y looks normal, so each element is replaced by the nearest of the 2ᵇ centroids of the best quantiser
of a normal variable (Lloyd-Max; computed here). The receiver gets c and a scale S, and forms S·Rᵀc.

- ``scale=mse``: ``S = ⟨c, Rx⟩ / ‖c‖²``, an orthogonal projection: the error is ``‖x‖² - ⟨x, x̂⟩²/‖x̂‖²`` for every x.
  For Gaussian values .3634, .1175, .0345, .0095 of ``‖x‖²`` at 1, 2, 3, 4 bits. Biased; goes with error feedback.
- ``scale=unbiased``: ``S = ‖x‖² / ⟨c, Rx⟩``, so ``⟨x, x̂⟩ = ‖x‖²``; .5708, .1331, .0358, .0096. The mean over all
  rotations there are is x; over the randomised Hadamard transforms, renewed each step, it is x but for a remainder that
  vanishes where no few elements dominate a block. (Of a block (1, ε, 0, ..., 0) it never sends ε.) It is no
  contraction: the error of two equal elements is as large as they are. So it is used without error feedback.

The default is ``mse``, because it has a guarantee for every x. With |y| the sum of d terms ±xᵢ/‖x‖ of independent
signs, E|y| ≥ 1/√2 (Szarek, 1976) and E y⁴ ≤ 3. One bit: the error is at most ``1 - E(Σ|y|/d)² ≤ 1/2``, which two equal
elements attain. More bits, with the largest centroid m and h the largest distance of a magnitude up to m from its
centroid: at most ``h² + E(|y| - m)₊² ≤ h² + 3/(16m²)``, because ``(y - m)² ≤ y⁴/(16m²)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np

from .base import Compressor
from .by_address import KernelCall, KernelTable
from .checks import check_choice, check_positive_int
from .context import Context
from .kernels.cpu import codebooks, host, rotations
from .registry import register


@dataclass(frozen=True)
class Rotated(Compressor):
    """What ``drive`` and ``eden`` share. Payload: the uint64 seed of the rotation; for every 64 elements (the last
    block padded with zeros to a power of two) one uint64 of signs and one for each further bit, the highest first;
    a float32 scale for each block.

    Args:
        block: elements that are rotated together: a power of two from 64 to 4096.
        scale: "mse", for use with error feedback, or "unbiased", for use without.
    """

    block: int = 1024
    scale: str = "mse"
    powers_of_two = ("block",)

    def __post_init__(self) -> None:
        rotations.check_block(self.name, self.block)
        check_choice(self.name, "scale", self.scale, ("mse", "unbiased"))

    @property
    def _bits(self) -> int:
        """Bits of an element."""
        return 1

    def nbytes(self, n: int) -> int:
        planes = rotations.padded(n, self.block) // 64 * self._bits
        return 8 + 8 * planes + 4 * rotations.count(n, self.block) if n else 0

    def contraction(self, n: int) -> float:
        return _guaranteed(self._bits) if self.scale == "mse" else 0.0

    def gaussian_error(self, n: int) -> float:
        """Of blocks that are not short; the share of a distortion D that the scale S recovers is 1/d of it."""
        lost = distortion(self._bits) * (1 - 1 / self.block)
        return lost if self.scale == "mse" else lost / (1 - lost)

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        seed, planes, scales = self._split(payload, x.size)
        low, high = host.key_words(context.key)
        seed[0], seed[1] = low, high
        kept, unbiased = host.EMPTY if residual is None else residual, self.scale == "unbiased"
        codebooks.encode(x, kept, planes, scales, self.block, self._bits, unbiased, table(self._bits), low, high)

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        seed, planes, scales = self._split(payload, out.size)
        codebooks.decode(out, planes, scales, self.block, self._bits, table(self._bits), add, seed[0], seed[1])

    def encoder(self, n: int) -> KernelCall:
        rule = (self.block, self._bits, _kernel_table(self._bits), self.scale == "unbiased")
        return KernelCall(codebooks.encode_at, rule, draws=True, grain=self.block, leading=self._bits)

    def decoder(self, n: int) -> KernelCall:
        rule = (self.block, self._bits, _kernel_table(self._bits))
        return KernelCall(codebooks.decode_at, rule, grain=self.block)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import codebooks as cuda_codebooks

        seed, planes, scales = self._split(payload, x.size)
        unbiased = self.scale == "unbiased"
        parts = (seed, planes.view(np.uint32), scales)
        cuda_codebooks.encode(x, residual, *parts, self.block, self._bits, unbiased, table(self._bits), context.key)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from .kernels.cuda import codebooks as cuda_codebooks

        seed, planes, scales = self._split(payload, out.size)
        cuda_codebooks.decode(seed, planes.view(np.uint32), scales, out, self.block, self._bits, table(self._bits), add)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any, Any]:
        """The payload's parts as (two uint32 of the seed, uint64 bits, float32 scales) views."""
        tail = payload.size - 4 * rotations.count(n, self.block)
        return payload[:8].view(np.uint32), payload[8:tail].view(np.uint64), payload[tail:].view(np.float32)


@register
@dataclass(frozen=True)
class Eden(Rotated):
    """Rotation and Lloyd-Max centroids. Payload: 8 + n·bits/8 + 4·ceil(n/block) bytes, and padding; see ``Rotated``.

    Args:
        bits: of each element, 1 to 4. With one bit this is ``drive``.
    """

    bits: int = 2
    name = "eden"
    examples = ("eden:bits=1,block=64", "eden:bits=3,scale=unbiased", "eden:bits=4,block=4096")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_int("eden", "bits", self.bits, 1, 4)

    @property
    def _bits(self) -> int:
        return self.bits


# --- the best quantiser of a standard normal variable -----------------------------------------------------------------

_NORMAL = NormalDist()


@lru_cache
def centroids(bits: int) -> tuple[float, ...]:
    """The positive ones of the 2ᵇ centroids: each the mean of the values nearest to it (Lloyd, 1957; Max, 1960)."""
    count = 1 << (bits - 1)
    levels = [4 * (k + 0.5) / (count + 1) for k in range(count)]
    while True:
        edges = [0.0, *_between(levels), float("inf")]
        better = [(_density(a) - _density(b)) / _mass(a, b) for a, b in pairwise(edges)]
        if max(abs(a - b) for a, b in zip(levels, better)) < 1e-13:
            return tuple(better)
        levels = better


@lru_cache
def distortion(bits: int) -> float:
    """The mean squared error of that quantiser: ``1 - E c²``, because each centroid is a mean."""
    levels = centroids(bits)
    edges = [0.0, *_between(levels), float("inf")]
    return 1 - 2 * sum(_mass(a, b) * c * c for a, b, c in zip(edges, edges[1:], levels))


@lru_cache
def table(bits: int) -> np.ndarray:
    """For the kernels: the levels, then the thresholds between them. At one bit ±1, whose sums are exact."""
    levels = centroids(bits) if bits > 1 else (1.0,)
    return np.array([*levels, *_between(levels)], np.float32)


@lru_cache
def _kernel_table(bits: int) -> KernelTable:
    return KernelTable(table(bits))


@lru_cache
def _guaranteed(bits: int) -> float:
    """δ with ``scale=mse``; see the file's docstring."""
    if bits == 1:
        return 0.5
    levels = centroids(bits)
    farthest = max(levels[0], *((b - a) / 2 for a, b in pairwise(levels)))
    return 1 - farthest**2 - 3 / (16 * levels[-1] ** 2)


def _between(levels: Any) -> list[float]:
    return [(a + b) / 2 for a, b in pairwise(levels)]


def _density(y: float) -> float:
    return _NORMAL.pdf(y) if y != float("inf") else 0.0


def _mass(a: float, b: float) -> float:
    """The probability of [a, b]; by the upper tails, which lose nothing where it is small."""
    return _NORMAL.cdf(-a) - (_NORMAL.cdf(-b) if b != float("inf") else 0.0)
