"""What the linear sparsifiers share on the CPU: positions that all ranks draw alike, the choice of the largest.

A draw of k among n positions: the n positions, in a circle that begins at a random one, are cut into k stretches whose
lengths differ by at most one, and each stretch gives one position. As the beginning is uniform every position is drawn
with probability k/n exactly, however the stretches fall, none is drawn twice, and they come in order: each block of
memory knows its own without looking at the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from numba.extending import register_jitable

from espresso_mpi.compressors.context import Context

from . import host, samples, sparse

CHUNK = 8192
"""Elements that a thread takes at a time."""

LARGEST = np.float32(np.finfo(np.float32).max)


@register_jitable
def padded(nbytes: int) -> int:
    """The next multiple of 16."""
    return (nbytes + 15) // 16 * 16


# --- draws ------------------------------------------------------------------------------------------------------------


@host.inline
def mix(z):  # type: ignore[no-untyped-def]
    """A bijection of the uint64 whose every output bit depends on every input bit (the end of SplitMix64)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@host.inline
def below(random, n):  # type: ignore[no-untyped-def]
    """``random · n >> 64``: uniform in [0, n) for a uniform uint64; n < 2**31."""
    wide, half = np.uint64(n), np.uint64(32)
    low = (random & np.uint64(0xFFFFFFFF)) * wide >> half
    return np.int64(((random >> half) * wide + low) >> half)


@host.inline
def plan(seed, n):  # type: ignore[no-untyped-def]
    """Of a draw among n: where the circle begins, and the two words that its other random bits come from."""
    words = mix(seed + np.uint64(0x3C6EF372FE94F82A))
    start = below(mix(seed + np.uint64(0x9E3779B97F4A7C15)), n)
    return start, np.uint32(words & np.uint64(0xFFFFFFFF)), np.uint32(words >> np.uint64(32))


@host.inline
def _jitter(i, length, low, high):  # type: ignore[no-untyped-def]
    """Which of ``length`` positions stretch i gives."""
    h = host.random_bits(host.counter(i, low), high)
    return (np.int64(h) * np.int64(length)) >> np.int64(32)


_DRAWS = 1024
"""Most draws that a thread makes at a time: they wait in a small buffer."""


@host.inline
def chunk_of(n, k):  # type: ignore[no-untyped-def]
    """How many positions along the circle a thread takes at a time."""
    return min(CHUNK, _DRAWS * (n // k))


@host.inline
def room(chunk, n, k):  # type: ignore[no-untyped-def]
    """Memory for the positions drawn among a chunk of the circle: it touches at most so many stretches."""
    return np.empty(chunk * k // n + 2, np.int64)


@host.inline
def drawn(where, a, b, n, k, start, low, high):  # type: ignore[no-untyped-def]
    """Put the positions drawn between a and b, counted along the circle, into ``where``.

    Returns:
        The number of the first one, counted along the circle, and how many they are.
    """
    i = ((a + 1) * k - 1) // n  # the stretch that a lies in
    begin = i * n // k
    rest, length, extra = i * n - begin * k, n // k, n % k
    first, count = i, 0
    while begin < b:
        here = length
        rest += extra
        if rest >= k:
            rest -= k
            here += 1
        at = begin + _jitter(i, here, low, high)
        if at < a:
            first = i + 1
        elif at < b:
            at += start
            where[count] = at - n if at >= n else at
            count += 1
        begin += here
        i += 1
    return first, count


# --- the largest ------------------------------------------------------------------------------------------------------


def choose(scores: np.ndarray, indices: np.ndarray, values: np.ndarray, context: Context) -> None:
    """Write the indices of the largest magnitudes, in rising order, and the scores there; ties by index."""
    n, k = scores.size, indices.size
    sparse.encode(scores, None, None, quota_of(k), 0, samples.searching(n, k), indices, values, context)


def quota_of(k: int) -> sparse.Quota:
    """The k largest go, zeros as well."""
    return sparse.Quota(most=k, least=k, few=k, smallest=0)


@host.inline
def plus(a, b):  # type: ignore[no-untyped-def]
    """``a + b``, which a damaged payload that names an element many times cannot make infinite."""
    total = a + b
    total = LARGEST if total > LARGEST else total
    return -LARGEST if total < -LARGEST else total


# --- memory -----------------------------------------------------------------------------------------------------------


@host.Kernel
def sanitised_sum(residual, x):  # type: ignore[no-untyped-def]
    """``residual = sanitise(residual + x)``."""
    for chunk in prange((x.size + CHUNK - 1) // CHUNK):
        a, b = chunk * CHUNK, min(x.size, (chunk + 1) * CHUNK)
        host.sanitised_sum(residual[a:b], x[a:b])


def seed_of(context: Context) -> Any:
    """The seed that all ranks share, for kernels."""
    return np.uint64(context.shared & 0xFFFFFFFFFFFFFFFF)
