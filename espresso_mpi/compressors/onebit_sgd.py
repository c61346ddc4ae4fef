"""``onebit_sgd``: one-bit SGD (Seide et al., 2014), two values per block; 1 + 64/block bits per element.

Elements that are not negative become the mean of these in their block, negative ones the mean of those. That is the
orthogonal projection on the vectors with one value for each group, so compressing twice is compressing once. For
Gaussian values the squared error relative to ``‖x‖²`` is 1 - 2/π = 0.3634 as with ``onebit``; it is lower where the
values of one sign are fewer or larger than those of the other. It converges only with error feedback.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import prange

from .by_address import KernelCall
from .context import Context
from .families import signed
from .kernels.cpu import entries, host
from .kernels.cpu import signs as cpu_signs
from .limit import LIMIT
from .registry import register


@register
@dataclass(frozen=True)
class OneBitSGD(signed.Scaled):
    """Mean of each sign. Payload: ceil(n/64) uint64 of sign bits (1 = negative), then ceil(n/block) float32 means of
    the elements that are not negative, then as many of the negative ones. The mean of no elements is 0.

    Args:
        block: elements that share the two means; a multiple of 64.
    """

    name = "onebit_sgd"
    sides = 2
    examples: ClassVar[Sequence[str]] = ("onebit_sgd:block=64", "onebit_sgd:block=192")

    def gaussian_error(self, n: int) -> float | None:
        """Exact: a group of k > 0 elements loses (k - 1)(1 - 2/π), and a block has 2 - 2^(1 - d) groups on average."""
        full, rest = divmod(n, self.block)
        groups = full * (2 - 2.0 ** (1 - self.block)) + (2 - 2.0 ** (1 - rest) if rest else 0)
        return (1 - 2 / math.pi) * (1 - groups / max(n, 1))

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        words, means, lows = self._split(payload, x.size)
        context.cut = int(_encode(x, host.EMPTY if residual is None else residual, words, means, lows, self.block))

    def encoder(self, n: int) -> KernelCall:
        return KernelCall(_encode_at, (self.block,), grain=self.block, leading=1)


@host.inline
def _mean(total, count):  # type: ignore[no-untyped-def]
    """The mean of ``count`` magnitudes with this sum; 0 of none."""
    return min(total, cpu_signs.LARGEST) / np.float32(count) if count else np.float32(0.0)


@host.Kernel
def _encode(x, residual, words, means, lows, block):  # type: ignore[no-untyped-def]
    """Returns how many values are of halves of blocks whose mean is larger than what is sent of it."""
    cut = 0
    for b in prange(means.size):
        start, stop = b * block, min(x.size, (b + 1) * block)
        signs = words[start // 64 : (stop + 63) // 64]
        values, kept = x[start:stop], residual[start:stop]
        if kept.size:
            host.add_into(kept, values)
            values = kept
        plus, minus = host.split_sums(values)
        if not (plus <= np.float32(LIMIT) and minus <= np.float32(LIMIT)):  # else no value is beyond LIMIT, or NaN
            values = cpu_signs.sanitised(values, kept.size > 0)
            plus, minus = host.split_sums(values)
        cpu_signs.pack(values, signs)
        negative = 0
        for w in range(signs.size):
            negative += host.ones(signs[w])
        cut += stop - start - negative if plus > cpu_signs.LARGEST else 0
        cut += negative if minus > cpu_signs.LARGEST else 0
        plus, minus = _mean(plus, stop - start - negative), _mean(minus, negative)
        means[b], lows[b] = plus, -minus
        if kept.size:
            cpu_signs.add(kept, signs, -plus, minus)
    return cut


_encode_serial = _encode.serial


@entries.Entry
def _encode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    block = np.int64(entries.doubles(parameters, 1)[0])
    words, means, lows = cpu_signs.parts_at(payload, n, block, first, whole, 2)
    kept = entries.floats_if(residual, n)
    return _encode_serial(entries.floats(x, n), kept, words, means, lows, block)
