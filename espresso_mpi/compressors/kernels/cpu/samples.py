"""The sample that sparse methods take a threshold from: a run of 16 neighbours, one cache line, from each stratum.

A stratum is a power of two of elements; where in it the run lies is hashed. Up to 65536 elements the sample is
everything, beyond them at least 1/64 of the elements.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange
from numba.extending import register_jitable

from . import host

RUN = 16
WHOLE = 1 << 16
"""Up to this many elements the sample is everything."""
_WIDEST = 1024


def stratum(n: int) -> int:
    """From how many elements one run of the sample is taken; a power of two."""
    return min(_WIDEST, 1 << ((n * RUN // WHOLE).bit_length() - 1)) if n > WHOLE else RUN


def sample_size(n: int) -> int:
    """How many of n elements the sample holds."""
    return n if n <= WHOLE else RUN * (n // stratum(n))


def aim(n: int, k: int) -> int:
    """The rank in the sample whose magnitude about k elements reach."""
    return max(1, (2 * k * sample_size(n) + n) // (2 * n))


def aim_above(n: int, k: int) -> int:
    """A rank whose magnitude more than k elements reach, but for four standard deviations of their count."""
    return rank_above(n, sample_size(n), k)


@register_jitable
def rank_above(n: int, size: int, k: int) -> int:
    """As ``aim_above``, in a sample of this size."""
    expected = k * size / n
    return k if size == n else int(expected + 4 * math.sqrt(expected) + 4)


@host.inline
def _make(values, x, kept, momentum, decay, factor):  # type: ignore[no-untyped-def]
    """What is to be compressed of a few elements, without a trace in the arrays."""
    for i in range(x.size):
        value = x[i]
        if momentum.size:
            value = host.fma(decay, momentum[i], value * factor)
        values[i] = host.sanitise(kept[i] + value if kept.size else value)


@host.Kernel
def take_sample(sample, x, kept, momentum, width, decay, factor):  # type: ignore[no-untyped-def]
    for r in prange((sample.size + RUN - 1) // RUN):
        spot = (np.uint32(r) * host.STEP >> np.uint32(16)) & np.uint32(width // RUN - 1)
        a, at = r * width + RUN * np.int64(spot), r * RUN
        b = min(x.size, a + RUN)
        _make(sample[at : at + b - a], x[a:b], kept[a:b], momentum[a:b], decay, factor)
