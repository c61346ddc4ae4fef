"""The sample that sparse methods take a threshold from: a run of 16 neighbours, one cache line, from each stratum.

A stratum is a power of two of elements; where in it the run lies is hashed. Where the sample decides what is sent, it
is everything up to 65536 elements, and beyond them at least 1/64 of the elements. Where it only makes a search quick,
it grows with n more slowly: its runs cost as much as the elements that reach the threshold of a smaller sample beside
those that are sought.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import prange
from numba.extending import register_jitable

from . import host

RUN = 16
WHOLE = 1 << 16
"""Up to this many elements the sample is everything."""
_FEW = 2048
"""The same of samples that only make a search quick; from there on, their strata grow."""
_WIDEST = 1024
_GROWTH = 32
"""Strata of searching samples are about this, times the cube root of n. Of a sample of S elements, the threshold is
reached by a share of 1/√S too many, so that the least time is at S ~ n^(2/3); measured for 1 % of 1 to 64 million."""


class Sample(NamedTuple):
    """A sample of some elements.

    Attributes:
        rank: the place of the threshold among its largest magnitudes, from 1 on.
        width: the length of a stratum.
        size: how many elements it has.
    """

    rank: int
    width: int
    size: int


def stratum(n: int) -> int:
    """From how many elements one run of the sample is taken that decides; a power of two."""
    return _stratum(n, WHOLE)


def sample_size(n: int) -> int:
    """How many of n elements the sample holds that decides."""
    return _size(n, WHOLE)


def deciding(n: int, k: int) -> Sample:
    """Of n elements, with a threshold that about k of them reach; it decides what is sent."""
    size = sample_size(n)
    return Sample(max(1, (2 * k * size + n) // (2 * n)), stratum(n), size)


def searching(n: int, k: int) -> Sample:
    """Of n elements, with a threshold that more than k of them reach; a search for the k largest begins there."""
    widest = max(_WIDEST, 1 << (int(_GROWTH * n ** (1 / 3)).bit_length() - 1))
    size = _size(n, _FEW, widest)
    return Sample(rank_above(n, size, k), _stratum(n, _FEW, widest), size)


def _stratum(n: int, whole: int, widest: int = _WIDEST) -> int:
    """The length of a stratum where the sample is everything up to so many elements."""
    return min(widest, 1 << ((n * RUN // whole).bit_length() - 1)) if n > whole else RUN


def _size(n: int, whole: int, widest: int = _WIDEST) -> int:
    return n if n <= whole else RUN * (n // _stratum(n, whole, widest))


@register_jitable
def rank_above(n: int, size: int, k: int) -> int:
    """A rank whose magnitude more than k of n elements reach, but for four standard deviations of their count."""
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
