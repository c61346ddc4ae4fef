"""``count_sketch``: about the k = ratio·n largest elements of the sum over all ranks, found in a count sketch.

Sketched-SGD (Ivkin et al., 2019) with the sketch of FetchSGD (Rothchild et al., 2020) in two rounds. The ranks first
sum a sketch: ``rows`` tables of ``columns·n`` buckets; in each every element is added to one bucket with a sign. The
median over the rows of an element's signed buckets estimates the summed element: without bias in each row, and there
with a variance of at most ``‖x‖²/buckets``, so elements well above ``‖x‖/√buckets`` are found. All ranks then send the
exact values of the k elements with the largest estimates, which are summed as they are: 32·(2·ratio + rows·columns)
bits an element, most of them for the sketch.

Unlike top-k it finds what is large in the sum and not what is large somewhere, and its messages do not grow with the
ranks. It needs a few large elements among many small ones; of normal values it chooses little better than chance.

A sketch promises nothing for every x, and equal values are its worst case. So a share ``explore`` of the k is drawn at
random, as Ivkin et al. fill up their choice: a contraction with ``δ = explore·k/n`` in expectation.

In a row the vector is cut into segments as long as the table, and each is rotated by a random number of buckets and
given a random sign. Two elements of one segment then never meet, two of different ones with probability 1/buckets
exactly, and signs of those that meet are independent: all that the estimates' mean and variance rest on. And memory is
read in order; a bucket sums its segments in order, so that its bits do not depend on threads or device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import get_num_threads, prange

from . import _cpu, _sparse
from . import _linear_sparse as sparse
from .base import LIMIT, Compressor, check_number, check_positive_int
from .context import Context, Summary
from .registry import register

SHRINK = 2.0**-32
"""What sketches are multiplied by: the sum of 2³² elements stays finite. Estimates only need to be ordered."""

MOST = LIMIT / 2
"""Estimates count as at most this, so that elements drawn at random, with LIMIT for an estimate, come first."""

_LEAST_BUCKETS = 16


@register
@dataclass(frozen=True)
class CountSketch(Compressor):
    """Heavy hitters of the sum. Payload: k uint32 indices in rising order, zeros up to a multiple of 16, then their k
    float32 values. Summary: the rows of the sketch one after another.

    Args:
        ratio: share of the elements that are sent, in (0, 1]; at least one element is.
        rows: independent estimates, at most 7; an even number counts as the next odd one.
        columns: buckets of a row as a share of the elements, in (0, 1]; at least 16.
        explore: share of the elements sent that is drawn at random, in [0, 1]; 0 allows no error feedback.
    """

    ratio: float = 0.01
    rows: int = 5
    columns: float = 0.02
    explore: float = 0.1
    name = "count_sketch"
    examples = ("count_sketch:ratio=0.2,rows=3,columns=0.1", "count_sketch:rows=1,columns=1.0,explore=0.0")
    common = True
    sparse = True

    def __post_init__(self) -> None:
        check_number("count_sketch", "ratio", self.ratio, 0, 1, above=True)
        check_positive_int("count_sketch", "rows", self.rows, high=7)
        check_number("count_sketch", "columns", self.columns, 0, 1, above=True)
        check_number("count_sketch", "explore", self.explore, 0, 1)

    # --- sizes ---

    def count(self, n: int) -> int:
        """How many of n elements are sent."""
        return _sparse.count(n, self.ratio)

    def depth(self) -> int:
        """Rows of the sketch."""
        return self.rows | 1

    def buckets(self, n: int) -> int:
        """Buckets of a row."""
        return min(n, max(_LEAST_BUCKETS, round(self.columns * n)))

    def header(self, n: int) -> int:
        return sparse.padded(4 * self.count(n))

    def nbytes(self, n: int) -> int:
        return self.header(n) + 4 * self.count(n)

    @property
    def element(self) -> str:
        return "float32"

    def summary(self, n: int) -> Summary:
        return Summary(self.depth() * self.buckets(n), "sum")

    # --- promises ---

    def contraction(self, n: int) -> float:
        return self.explore * self.count(n) / n if self.count(n) < n else 1.0

    def decode_traffic(self, n: int) -> int:
        return _sparse.scattered_traffic(n, self.count(n)) + self.nbytes(n)

    # --- the work ---

    def _summarise_cpu(self, x: np.ndarray, summary: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        if residual is not None:
            sparse.tame_sum(residual, x)
        tiles = 1 if x.size < _cpu.PARALLEL_MIN else get_num_threads()
        _sketch(x if residual is None else residual, summary, self.depth(), sparse.seed_of(context), tiles)

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        indices, values = self._split(payload, x.size)
        seed = sparse.seed_of(context)
        scores = context.scratch("scores", x.size, np.float32, x)
        _estimate(scores, context.summary, self.depth(), seed)
        _mark(scores, self._drawn(x.size, context), seed)
        sparse.choose(scores, indices, values, context)
        payload[4 * indices.size : self.header(x.size)] = 0
        _take(values, indices, x, _cpu.EMPTY if residual is None else residual)

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        _sparse.decode(*self._split(payload, out.size), out, add)

    def _summarise_cuda(self, x: Any, summary: Any, residual: Any, context: Context) -> None:
        from . import _cuda_count_sketch

        _cuda_count_sketch.summarise(x, summary, residual, self.depth(), context.shared)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from . import _cuda_count_sketch

        header = payload[: self.header(x.size)].view(np.uint32)
        draws = self._drawn(x.size, context)
        _cuda_count_sketch.encode(x, residual, header, *self._split(payload, x.size), self.depth(), draws, context)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from . import _cuda_topk

        _cuda_topk.decode(*self._split(payload, out.size), out, add)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any]:
        """The payload's two parts as (uint32 indices, float32 values) views."""
        return payload[: 4 * self.count(n)].view(np.uint32), payload[self.header(n) :].view(np.float32)

    def _drawn(self, n: int, context: Context) -> int:
        """How many positions are drawn at random: ``explore·k`` on average, if that is no whole number."""
        chance = float(sparse.mix(sparse.seed_of(context))) * 2.0**-64
        return min(self.count(n), int(self.explore * self.count(n) + chance))


# --- the sketch -------------------------------------------------------------------------------------------------------


@_cpu.inline
def turn(seed, row, segment, buckets):  # type: ignore[no-untyped-def]
    """By how many buckets a segment is rotated in a row, and its sign there, times SHRINK."""
    at = (np.uint64(segment) << np.uint64(3)) + np.uint64(row) + np.uint64(1)
    random = sparse.mix(sparse.mix(seed) + at * np.uint64(0x9E3779B97F4A7C15))
    sign = np.float32(-SHRINK) if random & np.uint64(1) else np.float32(SHRINK)
    return sparse.below(random, buckets), sign


@_cpu.inline
def _add_scaled(table, values, factor):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        table[i] = _cpu.fma(_cpu.tame(values[i]), factor, table[i])


@_cpu.inline
def _add_segment(table, values, a, b, by, factor):  # type: ignore[no-untyped-def]
    """Add a segment, rotated by some buckets, to buckets a to b of a row: at most two stretches of it."""
    for start in (by, by - table.size):  # where the segment's first element falls
        first, last = max(a, start), min(b, start + values.size)
        if first < last:
            _add_scaled(table[first:last], values[first - start : last - start], factor)


@_cpu.Kernel
def _sketch(x, summary, rows, seed, tiles):  # type: ignore[no-untyped-def]
    """Each tile of buckets is one thread's, for all rows: so a segment is read once, while it is in the cache."""
    buckets = summary.size // rows
    for tile in prange(tiles):
        a, b = tile * buckets // tiles, (tile + 1) * buckets // tiles
        for row in range(rows):
            summary[row * buckets + a : row * buckets + b] = np.float32(0)
        for segment in range((x.size + buckets - 1) // buckets):
            values = x[segment * buckets : min(x.size, (segment + 1) * buckets)]
            for row in range(rows):
                by, factor = turn(seed, row, segment, buckets)
                _add_segment(summary[row * buckets : (row + 1) * buckets], values, a, b, by, factor)


# --- estimates --------------------------------------------------------------------------------------------------------


@_cpu.inline
def _signed_copy(out, values, sign):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        out[i] = values[i] * sign


@_cpu.inline
def _read(out, table, start, sign):  # type: ignore[no-untyped-def]
    """The buckets of a row from ``start`` on, around its end, with a sign."""
    start = start - table.size if start >= table.size else start
    until_end = min(out.size, table.size - start)
    _signed_copy(out[:until_end], table[start : start + until_end], sign)
    _signed_copy(out[until_end:], table[: out.size - until_end], sign)


@_cpu.inline
def _least(p, q):  # type: ignore[no-untyped-def]
    return p if p < q else q


@_cpu.inline
def _most(p, q):  # type: ignore[no-untyped-def]
    return q if p < q else p


@_cpu.inline
def median3(p, q, r):  # type: ignore[no-untyped-def]
    return _most(_least(p, q), _least(_most(p, q), r))


@_cpu.inline
def median5(p, q, r, s, t):  # type: ignore[no-untyped-def]
    """Neither the least nor the largest of four is the median of five: it is that of the other three."""
    low = _most(_least(p, q), _least(s, t))
    high = _least(_most(p, q), _most(s, t))
    return median3(low, high, r)


@_cpu.inline
def median7(p, q, r, s, t, u, v):  # type: ignore[no-untyped-def]
    """Of two sorted triples the least and the largest can be left out: five are left."""
    a, c = _least(_least(p, q), r), _most(_most(p, q), r)
    x, z = _least(_least(s, t), u), _most(_most(s, t), u)
    return median5(_most(a, x), _least(c, z), v, median3(p, q, r), median3(s, t, u))


@_cpu.inline
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
        size = abs(_cpu.tame(median))
        scores[i] = np.float32(MOST) if size > np.float32(MOST) else size


_TILE = 1024


@_cpu.Kernel
def _estimate(scores, summary, rows, seed):  # type: ignore[no-untyped-def]
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
                by, factor = turn(seed, row, segment, buckets)
                _read(
                    rounds[row],
                    summary[row * buckets : (row + 1) * buckets],
                    by + offset,
                    np.float32(-1 if factor < 0 else 1),
                )
            _medians(scores[a:b], rounds)


@_cpu.inline
def _mark(scores, draws, seed):  # type: ignore[no-untyped-def]
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


@_cpu.Kernel
def _take(values, indices, x, residual):  # type: ignore[no-untyped-def]
    keep = residual.size > 0
    for j in prange(indices.size):
        i = indices[j]
        if keep:
            values[j] = residual[i]
            residual[i] = np.float32(0)
        else:
            values[j] = _cpu.tame(x[i])
