"""The k elements of largest magnitude in each chunk of c neighbours, on the CPU; and what of normal values they leave.

Magnitudes order like their bits. The k-th largest of a chunk is found bit by bit from the highest: each pass over the
chunk, which stays in the cache, counts the elements that reach a candidate. Equal magnitudes are taken in order of
their index, so the choice is unique on any device.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numba import prange

from . import host

_BLOCK = 8192
"""Elements that a thread takes at a time."""

_POINTS = 1 << 12
"""Points at which a distribution is integrated."""


def count(n: int, chunk: int, k: int) -> int:
    """How many of n elements go."""
    whole, rest = divmod(n, chunk)
    return whole * min(k, chunk) + min(k, rest)


# --- normal values ----------------------------------------------------------------------------------------------------


@lru_cache
def gaussian_error(chunk: int, k: int) -> float:
    """The share of ``‖x‖²`` that independent normal values lose when the k largest of each chunk are sent.

    A magnitude with a share p of larger ones stays if at least k of the chunk's other elements are larger: the integral
    over p of its square times the probability of that, a sum of binomial terms.
    """
    if k >= chunk:
        return 0.0
    p = (np.arange(_POINTS) + 0.5) / _POINTS
    normal, others = NormalDist(), chunk - 1
    squares = np.array([normal.inv_cdf(share / 2) ** 2 for share in p])
    ratio = np.log(p) - np.log1p(-p)
    first, last = (0, k) if 2 * k < chunk else (k, chunk)  # the terms of the smaller sum
    found = np.zeros(_POINTS)
    for j in range(first, last):
        ways = math.lgamma(chunk) - math.lgamma(j + 1) - math.lgamma(others - j + 1)
        found += np.exp(ways + j * ratio + others * np.log1p(-p))
    stays = 1 - found if first == 0 else found
    return float(np.mean(squares * stays))


# --- the choice -------------------------------------------------------------------------------------------------------


@host.inline
def _reach(bits, least):  # type: ignore[no-untyped-def]
    """How many are at least that large. In uint32, so that it vectorises."""
    total = np.uint32(0)
    for i in range(bits.size):
        total = np.uint32(total + np.uint32(bits[i] >= least))
    return np.int64(total)


@host.inline
def _kth(bits, k):  # type: ignore[no-untyped-def]
    """A threshold that exactly k reach, or the k-th largest."""
    least = np.uint32(0)
    for place in range(30, -1, -1):
        higher = np.uint32(least | np.uint32(np.uint32(1) << np.uint32(place)))
        reach = _reach(bits, higher)
        if reach >= k:
            least = higher
            if reach == k:
                break
    return least


@host.inline
def _take(values, clear, bits, k, first, indices, sent):  # type: ignore[no-untyped-def]
    """Write the k largest of a chunk and their positions, counted from ``first``; ``clear`` leaves zeros there."""
    for i in range(values.size):
        bits[i] = np.uint32(host.float_bits(host.sanitise(values[i])) & np.uint32(0x7FFFFFFF))
    least = _kth(bits, k)
    equal = k - _reach(bits, np.uint32(least + np.uint32(1)))
    j = 0
    for i in range(values.size):
        if bits[i] < least or (bits[i] == least and equal == 0):
            continue
        if bits[i] == least:
            equal -= 1
        indices[j], sent[j] = np.uint32(first + i), host.sanitise(values[i])
        if clear:
            values[i] = np.float32(0)
        j += 1


@host.Kernel
def choose(x, residual, indices, sent, chunk, k):  # type: ignore[no-untyped-def]
    """The k largest of each chunk of ``x + residual``, in order of index.

    The residual, if it is not empty, keeps the others.
    """
    chunks = (x.size + chunk - 1) // chunk
    each = max(1, _BLOCK // chunk)
    for block in prange((chunks + each - 1) // each):
        bits = np.empty(chunk, np.uint32)
        for c in range(block * each, min(chunks, (block + 1) * each)):
            start, stop, at = c * chunk, min(x.size, (c + 1) * chunk), c * min(k, chunk)
            values, size = x[start:stop], min(k, stop - start)
            if residual.size:
                host.sanitised_sum(residual[start:stop], values)
                values = residual[start:stop]
            taken, kept = indices[at : at + size], sent[at : at + size]
            _take(values, residual.size > 0, bits[: stop - start], size, start, taken, kept)
