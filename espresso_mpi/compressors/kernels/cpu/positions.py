"""Positions in rising order, in few bits: the code of Elias (1974) and Fano (1971).

A position is split in two. Its ``low`` lowest bits stand in an array of their own. What is above them, h, is coded in a
bitmap: bit ``h + j`` is one for position j. Positions rise, so these bits do, too, and the number of ones is that of
the positions. Up to k positions below n take ``k·(low + 1) + n/2**low`` bits, whatever they are: 8.6 for each at 1 %,
12 at 0.1 %, where no code has an average below 8.1 and 11.4. The size is a function of n and k alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import prange
from numba.extending import register_jitable

from espresso_mpi.compressors.context import Context

from . import host
from .linear_sparse import plus
from .sparse import zero
from .sweeps import sums_before

_WORDS = 128
"""Words of the bitmap that one turn of a parallel loop takes."""

_SLOTS = 4096
"""Positions whose low bits one turn writes; 32 of them fill whole words."""


class Layout(NamedTuple):
    """How at most k positions below n are stored."""

    low: int
    """Bits of a position that are stored as they are."""
    highs: int
    """uint64 words of the bitmap."""
    lows: int
    """uint32 words of the low bits, one position after the other from the lowest bit upward."""

    @property
    def nbytes(self) -> int:
        """Both, up to the next multiple of 16."""
        return -(-(8 * self.highs + 4 * self.lows) // 16) * 16

    def split(self, payload: Any) -> tuple[Any, Any]:
        """The two parts as (uint64 bitmap, uint32 low bits) views; zeros up to ``nbytes`` belong to the second."""
        head = 8 * self.highs
        return payload[:head].view(np.uint64), payload[head : self.nbytes].view(np.uint32)


@lru_cache
def layout(n: int, k: int) -> Layout:
    """The layout of the least size; of several, that with the fewest low bits."""
    return min((_layout(n, k, low) for low in range(32)), key=lambda made: made.nbytes)


def _layout(n: int, k: int, low: int) -> Layout:
    return Layout(low, -(-(((n - 1) >> low) + k) // 64), -(-k * low // 32))


@host.Kernel
def _write_highs(highs, indices, low):  # type: ignore[no-untyped-def]
    for c in prange((highs.size + _WORDS - 1) // _WORDS):
        first, last = c * _WORDS, min(highs.size, (c + 1) * _WORDS)
        highs[first:last] = np.uint64(0)
        j, end = 0, indices.size  # the first position whose bit is in these words
        while j < end:
            middle = (j + end) // 2
            if (np.int64(indices[middle]) >> low) + middle < 64 * first:
                j = middle + 1
            else:
                end = middle
        while j < indices.size:
            bit = (np.int64(indices[j]) >> low) + j
            if bit >= 64 * last:
                break
            highs[bit >> 6] |= np.uint64(1) << np.uint64(bit & 63)
            j += 1


@host.Kernel
def _write_lows(lows, indices, low):  # type: ignore[no-untyped-def]
    mask = np.uint64((1 << low) - 1)
    for c in prange((indices.size + _SLOTS - 1) // _SLOTS):
        word, waiting, filled = c * (_SLOTS // 32) * low, np.uint64(0), 0
        for j in range(c * _SLOTS, min(indices.size, (c + 1) * _SLOTS)):
            waiting |= (np.uint64(indices[j]) & mask) << np.uint64(filled)
            filled += low
            if filled >= 32:
                lows[word] = np.uint32(waiting & np.uint64(0xFFFFFFFF))
                waiting >>= np.uint64(32)
                filled -= 32
                word += 1
        if filled > 0:
            lows[word] = np.uint32(waiting)
    lows[(indices.size * low + 31) // 32 :] = np.uint32(0)


@host.Composite
def write(indices, count, highs, lows, low):  # type: ignore[no-untyped-def]
    """Store the first ``count`` of the indices, which rise; the others are 0."""
    _write_highs(highs, indices[:count], low)
    _write_lows(lows, indices, low)


@host.Kernel
def _count(highs, before):  # type: ignore[no-untyped-def]
    for c in prange(before.size):
        ones = 0
        for w in range(c * _WORDS, min(highs.size, (c + 1) * _WORDS)):
            ones += host.ones(highs[w])
        before[c] = ones


@host.inline
def _low_bits(lows, j, low):  # type: ignore[no-untyped-def]
    """The low bits of position j."""
    if not low:
        return np.int64(0)
    word, shift = (j * low) >> 5, (j * low) & 31
    bits = np.uint64(lows[word]) >> np.uint64(shift)
    if shift + low > 32:
        bits |= np.uint64(lows[word + 1]) << np.uint64(32 - shift)
    return np.int64(bits & np.uint64((1 << low) - 1))


@host.Kernel
def _scatter(highs, lows, before, values, out, low, add):  # type: ignore[no-untyped-def]
    for c in prange(before.size):
        j = before[c]
        for w in range(c * _WORDS, min(highs.size, (c + 1) * _WORDS)):
            mask = highs[w]
            while mask and j < values.size:  # a damaged bitmap may hold more ones than there are values
                i = ((64 * w + host.trailing_zeros(mask) - j) << low) | _low_bits(lows, j, low)
                mask &= mask - np.uint64(1)
                if i < out.size:  # nor may it write outside the array
                    value = host.sanitise(values[j])
                    out[i] = plus(out[i], value) if add else value
                j += 1


@register_jitable
def parts_of(words: int) -> int:
    """For how many parts of a bitmap ``put`` counts apart."""
    return (words + _WORDS - 1) // _WORDS


@host.Composite
def put(out, highs, lows, low, values, before, add):  # type: ignore[no-untyped-def]
    """As ``scatter``, with memory for ``parts_of`` counts."""
    _count(highs, before)
    sums_before(before)
    if not add:
        zero(out)
    _scatter(highs, lows, before, values, out, low, add)


def scatter(
    highs: np.ndarray, lows: np.ndarray, low: int, values: np.ndarray, out: np.ndarray, add: bool, context: Context
) -> None:
    """Add the values to ``out`` at the stored positions, or write them there and zeros elsewhere."""
    before = context.scratch("positions-before", parts_of(highs.size), np.int64, out)
    put(out, highs, lows, low, values, before, add)


@host.Kernel
def settle(indices, sent, seen, residual):  # type: ignore[no-untyped-def]
    """Leave in the residual what ``sent`` is more than what the payload decodes to."""
    for j in prange(indices.size):
        residual[indices[j]] = sent[j] - seen[j]
