"""The norm that DGC clips gradients by: sums of integers, which have no order."""

from __future__ import annotations

import math

import numpy as np
from numba import prange
from numba.extending import register_jitable

from espresso_mpi.compressors.context import Context

from . import host
from .magnitudes import key_of
from .sweeps import CHUNK


@register_jitable
def sums_of(n: int) -> int:
    """How many parts of n values are summed apart."""
    return (n + CHUNK - 1) // CHUNK


@register_jitable
def norm_shift(n: int) -> int:
    """By how many bits, an even number, squares of 24-bit numbers are shifted so that n of them fit 62 bits."""
    bits = 0
    while n >> bits:
        bits += 1
    return max(0, (bits - 13) // 2 * 2)


@host.inline
def aligned(key, exponent):  # type: ignore[no-untyped-def]
    """The 24-bit mantissa of a key, shifted down to a larger exponent: sums of integers have no order."""
    own = key >> np.uint32(23)
    mantissa = (key & np.uint32(0x7FFFFF)) | (np.uint32(0x800000) if own else np.uint32(0))
    return mantissa >> min(exponent - max(own, np.uint32(1)), np.uint32(31))


@host.inline
def _largest_key(x):  # type: ignore[no-untyped-def]
    top = np.uint32(0)
    for i in range(x.size):
        key = key_of(x[i])
        top = key if key > top else top
    return top


@host.Kernel
def _largest_keys(x, tops):  # type: ignore[no-untyped-def]
    for c in prange(tops.size):
        tops[c] = _largest_key(x[c * CHUNK : min(x.size, (c + 1) * CHUNK)])


@host.inline
def _squares_chunk(x, exponent, shift):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for i in range(x.size):
        q = np.uint64(aligned(key_of(x[i]), exponent))
        total += (q * q) >> shift
    return total


@host.Kernel
def _squares(x, sums, exponent, shift):  # type: ignore[no-untyped-def]
    for c in prange(sums.size):
        sums[c] = _squares_chunk(x[c * CHUNK : min(x.size, (c + 1) * CHUNK)], exponent, shift)


@host.inline
def _largest(sums):  # type: ignore[no-untyped-def]
    top = np.uint64(0)
    for c in range(sums.size):
        top = max(top, sums[c])
    return np.int64(top)


@host.inline
def _total(sums):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for c in range(sums.size):
        total += sums[c]
    return np.float64(total)


@host.Composite
def _factor(x, limit, sums):  # type: ignore[no-untyped-def]
    _largest_keys(x, sums)
    exponent, shift = max(1, _largest(sums) >> 23), norm_shift(x.size)
    _squares(x, sums, np.uint32(exponent), np.uint64(shift))
    norm = math.ldexp(math.sqrt(_total(sums)), exponent - 150 + shift // 2)
    return limit / norm if norm > limit else 1.0


factor_of = _factor.serial
"""``factor(x, limit, sums)``: as ``clip_factor``, in compiled code; to be rounded to float32. ``sums``: ``sums_of``
uint64."""


def clip_factor(x: np.ndarray, limit: float, context: Context) -> float:
    """What x is to be multiplied by so that its norm is at most ``limit``; a float32."""
    return float(np.float32(_factor(x, limit, context.scratch("sparse-sums", sums_of(x.size), np.uint64, x))))
