"""The CPU kernels of ``count_sketch``: sums into the sketch, medians, the choice of elements."""

from __future__ import annotations

import numpy as np
from numba import prange

from espresso_mpi.compressors.limit import LIMIT

from . import host
from . import linear_sparse as sparse

SHRINK = 2.0**-32
"""What sketches are multiplied by: the sum of 2³² elements stays finite. Estimates only need to be ordered."""

MOST = LIMIT / 2
"""Estimates count as at most this, so that elements drawn at random, with LIMIT for an estimate, come first."""

LEAST_BUCKETS = 16


# --- the sketch -------------------------------------------------------------------------------------------------------


@host.inline
def bucket_of(seed, row, segment, buckets):  # type: ignore[no-untyped-def]
    """By how many buckets a segment is rotated in a row, and its sign there, times SHRINK."""
    at = (np.uint64(segment) << np.uint64(3)) + np.uint64(row) + np.uint64(1)
    random = sparse.mix(sparse.mix(seed) + at * np.uint64(0x9E3779B97F4A7C15))
    sign = np.float32(-SHRINK) if random & np.uint64(1) else np.float32(SHRINK)
    return sparse.below(random, buckets), sign


@host.inline
def _add_scaled(table, values, factor):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        table[i] = host.fma(host.sanitise(values[i]), factor, table[i])


@host.inline
def _add_segment(table, values, a, b, by, factor):  # type: ignore[no-untyped-def]
    """Add a segment, rotated by some buckets, to buckets a to b of a row: at most two stretches of it."""
    for start in (by, by - table.size):  # where the segment's first element falls
        first, last = max(a, start), min(b, start + values.size)
        if first < last:
            _add_scaled(table[first:last], values[first - start : last - start], factor)


@host.Kernel
def sketch(x, summary, rows, seed, tiles):  # type: ignore[no-untyped-def]
    """Each tile of buckets is one thread's, for all rows: so a segment is read once, while it is in the cache."""
    buckets = summary.size // rows
    for tile in prange(tiles):
        a, b = tile * buckets // tiles, (tile + 1) * buckets // tiles
        for row in range(rows):
            summary[row * buckets + a : row * buckets + b] = np.float32(0)
        for segment in range((x.size + buckets - 1) // buckets):
            values = x[segment * buckets : min(x.size, (segment + 1) * buckets)]
            for row in range(rows):
                by, factor = bucket_of(seed, row, segment, buckets)
                _add_segment(summary[row * buckets : (row + 1) * buckets], values, a, b, by, factor)


# --- estimates --------------------------------------------------------------------------------------------------------


@host.inline
def _signed_copy(out, values, sign):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        out[i] = values[i] * sign


@host.inline
def _read(out, table, start, sign):  # type: ignore[no-untyped-def]
    """The buckets of a row from ``start`` on, around its end, with a sign."""
    start = start - table.size if start >= table.size else start
    until_end = min(out.size, table.size - start)
    _signed_copy(out[:until_end], table[start : start + until_end], sign)
    _signed_copy(out[until_end:], table[: out.size - until_end], sign)


@host.inline
def _least(p, q):  # type: ignore[no-untyped-def]
    return p if p < q else q


@host.inline
def _most(p, q):  # type: ignore[no-untyped-def]
    return q if p < q else p


@host.inline
def median3(p, q, r):  # type: ignore[no-untyped-def]
    return _most(_least(p, q), _least(_most(p, q), r))


@host.inline
def median5(p, q, r, s, t):  # type: ignore[no-untyped-def]
    """Neither the least nor the largest of four is the median of five: it is that of the other three."""
    low = _most(_least(p, q), _least(s, t))
    high = _least(_most(p, q), _most(s, t))
    return median3(low, high, r)


@host.inline
def median7(p, q, r, s, t, u, v):  # type: ignore[no-untyped-def]
    """Of two sorted triples the least and the largest can be left out: five are left."""
    a, c = _least(_least(p, q), r), _most(_most(p, q), r)
    x, z = _least(_least(s, t), u), _most(_most(s, t), u)
    return median5(_most(a, x), _least(c, z), v, median3(p, q, r), median3(s, t, u))


@host.inline
def _medians(scores, rounds):  # type: ignore[no-untyped-def]
    """The magnitude of the median over the rows, at most MOST."""
    rows = len(rounds)
    p, q, r = rounds[0], rounds[rows // 2], rounds[-1]
    s, t = rounds[min(1, rows - 1)], rounds[max(0, rows - 2)]
    u, v = rounds[min(2, rows - 1)], rounds[max(0, rows - 3)]
    for i in range(scores.size):
        if rows == 1:
            median = p[i]
        elif rows == 3:
            median = median3(p[i], q[i], r[i])
        elif rows == 5:
            median = median5(p[i], q[i], r[i], s[i], t[i])
        else:
            median = median7(p[i], q[i], r[i], s[i], t[i], u[i], v[i])
        size = abs(host.sanitise(median))
        scores[i] = np.float32(MOST) if size > np.float32(MOST) else size


_TILE = 1024


@host.Kernel
def estimate(scores, summary, rows, seed):  # type: ignore[no-untyped-def]
    """The magnitude of each element's estimate: the median over the rows."""
    buckets = summary.size // rows
    each = (buckets + _TILE - 1) // _TILE
    segments = (scores.size + buckets - 1) // buckets
    for piece in prange(segments * each):
        segment, offset = piece // each, piece % each * _TILE
        a = segment * buckets + offset
        b = min(scores.size, a + min(_TILE, buckets - offset))
        if a < b:
            rounds = np.empty((rows, b - a), np.float32)
            for row in range(rows):
                by, factor = bucket_of(seed, row, segment, buckets)
                _read(
                    rounds[row],
                    summary[row * buckets : (row + 1) * buckets],
                    by + offset,
                    np.float32(-1 if factor < 0 else 1),
                )
            _medians(scores[a:b], rounds)


@host.inline
def draws_of(k, explore, seed):  # type: ignore[no-untyped-def]
    """How many of k positions are drawn at random: ``explore·k`` on average, if that is no whole number."""
    chance = np.float64(sparse.mix(seed)) * 2.0**-64
    return min(k, np.int64(explore * k + chance))


@host.inline
def mark(scores, draws, seed):  # type: ignore[no-untyped-def]
    """Put the positions drawn at random before all others."""
    if draws:
        start, low, high = sparse.plan(seed, scores.size)
        each = sparse.chunk_of(scores.size, draws)
        where = sparse.room(each, scores.size, draws)
        for a in range(0, scores.size, each):
            b = min(scores.size, a + each)
            _, count = sparse.drawn(where, a, b, scores.size, draws, start, low, high)
            for j in range(count):
                scores[where[j]] = np.float32(LIMIT)


# --- values -----------------------------------------------------------------------------------------------------------


@host.Kernel
def take(values, indices, x, residual):  # type: ignore[no-untyped-def]
    keep = residual.size > 0
    for j in prange(indices.size):
        i = indices[j]
        if keep:
            values[j] = residual[i]
            residual[i] = np.float32(0)
        else:
            values[j] = host.sanitise(x[i])
