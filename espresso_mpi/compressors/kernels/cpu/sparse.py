"""What the methods share that send the elements of largest magnitude: the search, the copy, the way back.

Magnitudes order like their bits; the key of an element is the bits of what compressors carry for it (``LIMIT`` at most,
0 for NaN). One pass over the data makes the values that are to be compressed (``residual + x``, or DGC's two sums), and
notes those that reach a threshold, which a sample has given. The choice is made among them alone, or among those behind
bits where there was no room to note all.

The sample (``samples``) decides how fast a search is and, in methods that say so, how many elements go, but never that
a smaller one goes before a larger.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numba import prange
from numba.extending import register_jitable

from espresso_mpi.compressors.context import Context

from . import host, samples
from .magnitudes import BINS, kth
from .samples import take_sample
from .sweeps import CHUNK, copy, gather, join, put_back, recount, sums_before, sweep, take

_LARGEST = np.float32(np.finfo(np.float32).max)

_SPANS = 64
"""In how many spans threads sweep: each notes what it finds in its share of the memory."""


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


class Room(NamedTuple):
    """Scratch memory of a choice among n elements."""

    sample: Any
    """float32, of the size of the sample."""
    found: Any
    """float32, ``most_found``."""
    places: Any
    """uint32, as many."""
    counts: Any
    """int64, two for each span that a thread sweeps."""
    masks: Any
    """uint64, n/64."""
    larger: Any
    """int64, ``chunks_of(n)``, like ``equal``."""
    equal: Any
    bins: Any
    """int64, ``BINS``."""


@register_jitable
def chunks_of(n: int) -> int:
    """For how many parts of the data a choice counts apart."""
    return (n + CHUNK - 1) // CHUNK


def most_found(n: int, k: int) -> int:
    """How many candidates are copied at most, when the k largest are sought. More are read where they lie."""
    return min(n, max(4 * k, samples.WHOLE))


@host.Composite
def _sampled(x, kept, momentum, blend, rank, width, room):  # type: ignore[no-untyped-def]
    """The key of this rank in the sample; 0 if the sample is smaller."""
    if rank > room.sample.size:
        return 0
    take_sample(room.sample, x, kept, momentum, width, blend[0], blend[1])
    return np.int64(kth(room.sample, rank, room.bins)[0])


@host.Composite
def _swept(x, kept, momentum, clean, zeroed, blend, threshold, room):  # type: ignore[no-untyped-def]
    """Make the values and test them; returns how many reach the threshold, and whether all of them are noted."""
    sweep(x, kept, momentum, clean, zeroed, room.masks, threshold, blend, room.places, room.found, room.counts)
    reach = room.counts[::2].sum()
    return reach, reach == room.counts[1::2].sum()


@host.Composite
def _swept_again(values, zeroed, blend, threshold, room):  # type: ignore[no-untyped-def]
    """As ``_swept``, with another threshold; all noted before was put back."""
    return _swept(values, values[:0], values[:0], zeroed.size > 0, zeroed, blend, threshold, room)


@host.Composite
def _lowered(values, zeroed, blend, rank, width, room):  # type: ignore[no-untyped-def]
    """As ``_swept_again``, with the threshold of a rank in the sample, which comes first."""
    put_back(room.places, room.found, room.counts, zeroed)
    threshold = np.uint32(_sampled(values, values[:0], values[:0], blend, rank, width, room))
    reach, noted = _swept_again(values, zeroed, blend, threshold, room)
    return threshold, reach, noted


@host.Composite
def _counted(values, threshold, room):  # type: ignore[no-untyped-def]
    """Count in chunks how many keys behind the bits are above a threshold and equal to it; how many are above it."""
    recount(values, room.masks, room.larger, room.equal, threshold)
    above = sums_before(room.larger)
    sums_before(room.equal)
    return above


@host.Composite
def _bracket(values, blend, k, threshold, reach, width, room):  # type: ignore[no-untyped-def]
    """Find a threshold that at least k elements reach, and not many more if they differ; and how many these are."""
    rank = samples.rank_above(values.size, room.sample.size, k)
    good = _counted(values, threshold, room) < k
    while not good:
        threshold, reach, _ = _lowered(values, values[:0], blend, rank, width, room)
        good, rank = reach >= k, 4 * rank
    return threshold, reach


@host.Composite
def _choose_by_masks(values, kept, momentum, blend, wanted, threshold, reach, width, room, indices, sent):  # type: ignore[no-untyped-def]
    """The ``wanted`` largest of so many that reach the threshold, of which not all are noted."""
    if reach > max(wanted, room.found.size):
        threshold, reach = _bracket(values, blend, wanted, threshold, reach, width, room)
    above = _counted(values, threshold, room)
    if above >= wanted:
        candidates = values  # too many to be worth a copy, as when many are equal
        if reach <= room.found.size:
            candidates = room.found[:reach]
            gather(values, room.masks, room.larger, room.equal, room.places, candidates)
        threshold = np.uint32(kth(candidates, wanted, room.bins)[0])
        above = _counted(values, threshold, room)
    copy(values, kept, momentum, room.masks, room.larger, room.equal, threshold, wanted - above, indices, sent)


@host.inline
def _choose_noted(kept, momentum, zeroed, wanted, threshold, room, indices, sent):  # type: ignore[no-untyped-def]
    """The ``wanted`` largest of those that are noted."""
    reach, ties = join(room.places, room.found, room.counts), wanted
    found = room.found[:reach]
    if reach > wanted:
        key, above = kth(found, wanted, room.bins)
        threshold, ties = np.uint32(key), wanted - above
    take(room.places, found, threshold, ties, kept, momentum, zeroed, indices, sent)


@host.Composite
def choose(x, kept, momentum, blend, quota, least_key, rank, width, room, indices, sent):  # type: ignore[no-untyped-def]
    """Move large elements of what is to be compressed to the payload, in order of index; returns how many.

    Args:
        kept, momentum: the residual, and DGC's sum; empty: none.
        blend: the factors of the momentum and of x, float32.
        quota: most, least, few and smallest, see ``Quota``.
        least_key: the key to reach; 0: that of ``rank`` in the sample.
        rank: with such a key, what to look at first: if too many reach that, they need not be told from the others.
        width: elements of which each run of the sample is taken, see ``samples.stratum``.
        room: scratch memory.
        indices, sent: receive them; of ``most`` elements. What is not used of them becomes zero.
    """
    most, least, few, smallest = quota
    values = kept if kept.size else (momentum if momentum.size else x)
    zeroed = kept[:0] if momentum.size else kept
    first = max(smallest, least_key, _sampled(x, kept, momentum, blend, rank, width, room))
    threshold = np.uint32(first)
    clean = kept.size + momentum.size > 0
    reach, noted = _swept(x, kept, momentum, clean, zeroed, blend, threshold, room)
    if 0 < least_key < first and reach <= most:
        threshold = np.uint32(least_key)
        put_back(room.places, room.found, room.counts, zeroed)
        reach, noted = _swept_again(values, zeroed, blend, threshold, room)
    wanted = reach
    enough = reach >= least or (threshold <= 1 and smallest == 1)
    if reach > most or not enough:
        wanted = most if enough else few
        rank = samples.rank_above(values.size, room.sample.size, wanted)
        while reach < wanted:
            threshold, reach, noted = _lowered(values, zeroed, blend, rank, width, room)
            rank = 4 * rank
    if noted:
        _choose_noted(kept, momentum, zeroed, wanted, threshold, room, indices, sent)
    else:
        put_back(room.places, room.found, room.counts, zeroed)
        _choose_by_masks(values, kept, momentum, blend, wanted, threshold, reach, width, room, indices, sent)
    indices[wanted:] = 0
    sent[wanted:] = 0
    return wanted


def encode(
    x: np.ndarray,
    residual: np.ndarray | None,
    momentum: Momentum | None,
    quota: Quota,
    least_key: int,
    sample: samples.Sample,
    indices: np.ndarray,
    sent: np.ndarray,
    context: Context,
) -> int:
    """``choose`` with scratch memory of the context."""
    n, chunks, most = x.size, chunks_of(x.size), most_found(x.size, quota.most)
    spans = 1 if host.runs_serial(n) else min(chunks, _SPANS)
    counts = context.scratch("sparse-counts", 2 * chunks + BINS + 2 * spans, np.int64, x)
    room = Room(
        context.scratch("sparse-sample", sample.size, np.float32, x),
        context.scratch("sparse-found", most, np.float32, x),
        context.scratch("sparse-places", most, np.uint32, x),
        counts[2 * chunks + BINS :],
        context.scratch("sparse-masks", -(-n // 64), np.uint64, x),
        counts[:chunks], counts[chunks : 2 * chunks], counts[2 * chunks : 2 * chunks + BINS],
    )  # fmt: skip
    kept = host.EMPTY if residual is None else residual
    sums = Momentum(host.EMPTY, 0, 1) if momentum is None else momentum
    blend = (np.float32(sums.decay), np.float32(sums.factor))
    arrays, rank, width = (x, kept, sums.values), sample.rank, sample.width
    return int(choose(*arrays, blend, tuple(quota), least_key, rank, width, room, indices, sent))


def split(payload: Any) -> tuple[Any, Any, Any]:
    """The parts of a payload with a count, as (uint32 count and zero, uint32 indices, float32 values) views."""
    middle = 8 + (payload.size - 8) // 2
    return payload[:8].view(np.uint32), payload[8:middle].view(np.uint32), payload[middle:].view(np.float32)


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


@host.Composite
def decode(out, indices, sent, add):  # type: ignore[no-untyped-def]
    """Add the values to ``out`` at their indices, or write them there and zeros elsewhere."""
    if not add:
        zero(out)
    _scatter(indices, sent, out, add)
