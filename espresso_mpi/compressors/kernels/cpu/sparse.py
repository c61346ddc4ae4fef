"""What the methods share that send the elements of largest magnitude: the search, the copy, the way back.

Magnitudes order like their bits; the key of an element is the bits of what compressors carry for it (``LIMIT`` at most,
0 for NaN). One pass over the data makes the values that are to be compressed (``residual + x``, or DGC's two sums) and
one bit for each that reaches a threshold, which a sample has given. The bits then lead to those elements alone.

The sample is a run of 16 neighbours, one cache line, from each stratum of a power of two of elements; where in it the
run lies is hashed. Up to 65536 elements it is everything, beyond them at least 1/64 of the elements. It decides how
fast a search is and, in methods that say so, how many elements go, but never that a smaller one goes before a larger.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from espresso_mpi.compressors.context import Context

from . import host, samples
from .magnitudes import BINS, kth
from .sweeps import CHUNK, copy, gather, recount, sums_before, sweep

_LARGEST = np.float32(np.finfo(np.float32).max)


# --- sizes and errors -------------------------------------------------------------------------------------------------


def count(n: int, ratio: float) -> int:
    """How many of n elements a share of ``ratio`` is: at least one."""
    return min(n, max(1, round(ratio * n)))


@lru_cache
def gaussian_error(share: float) -> float:
    """``1 - 2(tφ(t) + Φ̄(t))``, ``t = Φ⁻¹(1 - share/2)``: what normal values lose when the largest ones are sent."""
    normal = NormalDist()
    t = normal.inv_cdf(1 - share / 2)
    return 1 - 2 * (t * normal.pdf(t) + normal.cdf(-t))


def sampled_error(n: int, k: int) -> float:
    """As ``gaussian_error`` where ``aim`` decides how many of at most k go: half the time, fewer than k."""
    size = samples.sample_size(n)
    deviation = math.sqrt((1 - size / n) / max(1.0, k * size / n))
    return gaussian_error(k / n * (1 - deviation / math.sqrt(2 * math.pi)))


def scattered_traffic(n: int, k: int) -> int:
    """Bytes that changing k of n scattered float32 moves: whole cache lines, there and back."""
    return int(8 * n * (1 - (1 - k / n) ** 16)) if n else 0


# --- the search -------------------------------------------------------------------------------------------------------


class Quota(NamedTuple):
    """How many elements go.

    All that reach the threshold do if they are from ``least`` to ``most``, or everything but zeros. Otherwise the
    ``most`` largest go if there were too many, and the ``few`` largest if there were too few.
    """

    most: int
    least: int
    few: int
    smallest: int = 1
    """The smallest threshold: 0 where zeros count."""


class Momentum(NamedTuple):
    """``momentum = decay · momentum + factor · x`` takes the place of x."""

    values: np.ndarray
    decay: float
    factor: float


class _Search:
    """One encode's arrays and what is known so far."""

    def __init__(self, x: np.ndarray, residual: np.ndarray | None, momentum: Momentum | None, context: Context) -> None:
        self.x = x
        self.kept = host.EMPTY if residual is None else residual
        self.momentum = host.EMPTY if momentum is None else momentum.values
        self.decay, self.factor = (
            (np.float32(0), np.float32(1))
            if momentum is None
            else (np.float32(momentum.decay), np.float32(momentum.factor))
        )
        self.values = self.kept if self.kept.size else self.momentum if self.momentum.size else x
        n, chunks = x.size, -(-x.size // CHUNK)
        self._context = context
        self.masks = context.scratch("sparse-masks", -(-n // 64), np.uint64, x)
        counts = context.scratch("sparse-counts", 2 * chunks + BINS, np.int64, x)
        self.larger, self.equal, self._bins = counts[:chunks], counts[chunks : 2 * chunks], counts[2 * chunks :]
        self.threshold = np.uint32(0)
        self.above = self.reach = 0

    def sampled(self, rank: int, advanced: bool = False) -> int:
        """The key of this rank in the sample; ``advanced``: after ``sweep``, when the values are there."""
        n = self.x.size
        sample = self._context.scratch("sparse-sample", samples.sample_size(n), np.float32, self.x)
        kept, momentum = (host.EMPTY, host.EMPTY) if advanced else (self.kept, self.momentum)
        samples.take_sample(
            sample, self.values if advanced else self.x, kept, momentum, samples.stratum(n), self.decay, self.factor
        )
        return int(kth(sample, rank, self._bins)[0]) if rank <= sample.size else 0

    def sweep(self, threshold: int) -> None:
        """Make the values and test them."""
        self.threshold = np.uint32(threshold)
        arrays = (self.x, self.kept, self.momentum, self.masks, self.larger, self.equal)
        sweep(*arrays, self.threshold, self.decay, self.factor)
        self._sum_counts()

    def test(self, threshold: int) -> None:
        """Test the values, which are there."""
        self.threshold = np.uint32(threshold)
        arrays = (self.values, host.EMPTY, host.EMPTY, self.masks, self.larger, self.equal)
        sweep(*arrays, self.threshold, self.decay, self.factor)
        self._sum_counts()

    def narrow(self, k: int) -> None:
        """Make the k-th largest key the threshold. At least k elements reach the present one."""
        if self.above < k <= self.reach:
            return
        candidates = self.values  # too many to be worth a copy, as when many are equal
        if self.reach <= max(4 * k, samples.WHOLE):
            candidates = self._context.scratch("sparse-found", self.reach, np.float32, self.x)
            gather(self.values, self.masks, self.larger, self.equal, candidates)
        self.threshold = np.uint32(kth(candidates, k, self._bins)[0])
        recount(self.values, self.masks, self.larger, self.equal, self.threshold)
        self._sum_counts()

    def bracket(self, k: int) -> None:
        """Find a threshold that at least k elements reach, and not many more if they differ."""
        rank = samples.aim_above(self.x.size, k)
        found = self.reach >= k and (self.above < k or self.reach <= max(4 * k, samples.WHOLE))
        while not found:
            self.test(self.sampled(rank, advanced=True))
            found, rank = self.reach >= k, 4 * rank

    def copy(self, wanted: int, indices: np.ndarray, sent: np.ndarray) -> None:
        """Move the ``wanted`` largest to the payload."""
        arrays = (self.values, self.kept, self.momentum, self.masks, self.larger, self.equal)
        copy(*arrays, self.threshold, wanted - self.above, indices, sent)

    def _sum_counts(self) -> None:
        self.above = sums_before(self.larger)
        self.reach = self.above + sums_before(self.equal)


def encode(
    x: np.ndarray,
    residual: np.ndarray | None,
    momentum: Momentum | None,
    quota: Quota,
    threshold: int | None,
    rank: int,
    indices: np.ndarray,
    sent: np.ndarray,
    context: Context,
) -> int:
    """Move large elements of what is to be compressed to the payload, in order of index; returns how many.

    Args:
        threshold: the key to reach; None: that of ``rank`` in the sample.
        rank: with a threshold, what to look at first: if too many reach that, they need not be told from the others.
        indices, sent: receive them; of ``quota.most`` elements. What is not used of them becomes zero.
    """
    search = _Search(x, residual, momentum, context)
    sampled = search.sampled(rank)
    search.sweep(max(quota.smallest, sampled, threshold or 0))
    if threshold is not None and search.threshold > threshold and search.reach <= quota.most:
        search.test(threshold)
    wanted = search.reach
    enough = search.reach >= quota.least or (search.threshold <= 1 and quota.smallest == 1)
    if search.reach > quota.most or not enough:
        wanted = quota.most if enough else quota.few
        search.bracket(wanted)
        search.narrow(wanted)
    search.copy(wanted, indices, sent)
    indices[wanted:] = 0
    sent[wanted:] = 0
    return wanted


def split(payload: Any) -> tuple[Any, Any, Any]:
    """The parts of a payload with a count, as (uint32 count and zero, uint32 indices, float32 values) views."""
    middle = 8 + (payload.size - 8) // 2
    return payload[:8].view(np.uint32), payload[8:middle].view(np.uint32), payload[middle:].view(np.float32)


def encode_counted(
    x: np.ndarray,
    residual: np.ndarray | None,
    momentum: Momentum | None,
    quota: Quota,
    threshold: int | None,
    rank: int,
    payload: np.ndarray,
    context: Context,
) -> None:
    """As ``encode``, into a payload that begins with the count."""
    head, indices, sent = split(payload)
    head[0] = encode(x, residual, momentum, quota, threshold, rank, indices, sent, context)
    head[1] = 0


# --- the way back -----------------------------------------------------------------------------------------------------


@host.Kernel
def zero(out):  # type: ignore[no-untyped-def]
    for c in prange((out.size + CHUNK - 1) // CHUNK):
        out[c * CHUNK : (c + 1) * CHUNK] = np.float32(0)


@host.Kernel
def _scatter(indices, sent, out, add):  # type: ignore[no-untyped-def]
    for c in prange((indices.size + CHUNK - 1) // CHUNK):
        for j in range(c * CHUNK, min(indices.size, (c + 1) * CHUNK)):
            i = indices[j]
            if i < out.size:  # a damaged payload must not write outside the array
                value = host.sanitise(sent[j])
                # Nor may one that repeats an index add up to infinity.
                out[i] = min(max(out[i] + value, -_LARGEST), _LARGEST) if add else value


def decode(indices: np.ndarray, sent: np.ndarray, out: np.ndarray, add: bool) -> None:
    """Add the values to ``out`` at their indices, or write them there and zeros elsewhere."""
    if not add:
        zero(out)
    _scatter(indices, sent, out, add)
