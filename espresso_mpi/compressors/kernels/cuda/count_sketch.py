"""CUDA kernels of ``count_sketch``: a thread for each bucket sums the segments in order, and one for each element
estimates it.

The largest estimates are chosen by the radix selection of ``topk``. No kernel waits for the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from espresso_mpi.compressors.limit import LIMIT

from ..cpu.count_sketch import MOST, SHRINK
from . import gpu, topk
from . import linear_sparse as sparse


def summarise(x: Any, summary: Any, residual: Any, rows: int, seed: int) -> None:
    """The sketch of ``x``, or of ``residual + x``, which ``residual`` then holds."""
    if residual is not None:
        sparse.sanitised_sum(residual, x)
    source, grid = x if residual is None else residual, gpu.blocks(summary.size, gpu.THREADS)
    _sketch(grid, gpu.THREADS, source, summary, rows, _seed(seed))


def encode(x: Any, residual: Any, header: Any, indices: Any, values: Any, rows: int, draws: int, context: Any) -> None:
    """Choose by the sketch in ``context.summary``, then move the values."""
    seed, scores = _seed(context.shared), context.scratch("scores", x.size, np.float32, x)
    _ESTIMATE[rows](gpu.blocks(x.size, gpu.THREADS), gpu.THREADS, scores, context.summary, seed)
    if draws:
        _mark(gpu.blocks(draws, gpu.THREADS), gpu.THREADS, scores, draws, seed)
    topk.encode(scores, None, indices, values)
    source, take = x if residual is None else residual, _TAKE[residual is not None]
    take(gpu.blocks(indices.size, gpu.THREADS), gpu.THREADS, source, header, indices, values)


def _seed(shared: int) -> np.uint64:
    return np.uint64(shared & 0xFFFFFFFFFFFFFFFF)


@cuda.jit(device=True)
def _bucket_of(mixed, row, segment, buckets):  # type: ignore[no-untyped-def]
    """As ``cpu.count_sketch.bucket_of``, from the mixed seed."""
    at = (np.uint64(segment) << np.uint64(3)) + np.uint64(row) + np.uint64(1)
    random = sparse.mix(mixed + at * np.uint64(0x9E3779B97F4A7C15))
    sign = np.float32(-SHRINK) if random & np.uint64(1) else np.float32(SHRINK)
    return sparse.below(random, buckets), sign


@cuda.jit(device=True)
def _rotated(values, mixed, row, segment, bucket, buckets):  # type: ignore[no-untyped-def]
    """The element of a segment that falls into a bucket of a row, and its sign times SHRINK."""
    by, factor = _bucket_of(mixed, row, segment, buckets)
    offset = bucket - by if bucket >= by else bucket - by + buckets
    i = segment * buckets + offset
    return gpu.sanitise(values[i]) if i < values.size else np.float32(0), factor


@gpu.kernel("float32[::1], float32[::1], int64, uint64")
def _sketch(x, summary, rows, seed):  # type: ignore[no-untyped-def]
    buckets = np.int64(summary.size) // rows
    segments, mixed = (np.int64(x.size) + buckets - 1) // buckets, sparse.mix(seed)
    for place in range(cuda.grid(1), summary.size, cuda.gridsize(1)):
        row = place // buckets
        bucket, total = place - row * buckets, np.float32(0)
        for segment in range(0, segments, 4):  # beyond the last segment lie zeros
            p, a = _rotated(x, mixed, row, segment, bucket, buckets)
            q, b = _rotated(x, mixed, row, segment + 1, bucket, buckets)
            r, c = _rotated(x, mixed, row, segment + 2, bucket, buckets)
            s, d = _rotated(x, mixed, row, segment + 3, bucket, buckets)
            total = cuda.fma(s, d, cuda.fma(r, c, cuda.fma(q, b, cuda.fma(p, a, total))))
        summary[place] = total


@cuda.jit(device=True)
def _least(p, q):  # type: ignore[no-untyped-def]
    return p if p < q else q


@cuda.jit(device=True)
def _most(p, q):  # type: ignore[no-untyped-def]
    return q if p < q else p


@cuda.jit(device=True)
def _median3(p, q, r):  # type: ignore[no-untyped-def]
    return _most(_least(p, q), _least(_most(p, q), r))


@cuda.jit(device=True)
def _median5(p, q, r, s, t):  # type: ignore[no-untyped-def]
    low = _most(_least(p, q), _least(s, t))
    high = _least(_most(p, q), _most(s, t))
    return _median3(low, high, r)


@cuda.jit(device=True)
def _median7(p, q, r, s, t, u, v):  # type: ignore[no-untyped-def]
    a, c = _least(_least(p, q), r), _most(_most(p, q), r)
    x, z = _least(_least(s, t), u), _most(_most(s, t), u)
    return _median5(_most(a, x), _least(c, z), v, _median3(p, q, r), _median3(s, t, u))


@cuda.jit(device=True)
def _signed_bucket(summary, mixed, row, segment, offset, buckets):  # type: ignore[no-untyped-def]
    by, factor = _bucket_of(mixed, row, segment, buckets)
    at = offset + by
    value = summary[row * buckets + (at - buckets if at >= buckets else at)]
    return -value if factor < 0 else value


def _make_estimate(rows):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def median(summary, mixed, segment, offset, buckets):  # type: ignore[no-untyped-def]
        p = _signed_bucket(summary, mixed, 0, segment, offset, buckets)
        if rows == 1:
            return p
        q = _signed_bucket(summary, mixed, 1, segment, offset, buckets)
        r = _signed_bucket(summary, mixed, 2, segment, offset, buckets)
        if rows == 3:
            return _median3(p, q, r)
        s = _signed_bucket(summary, mixed, 3, segment, offset, buckets)
        t = _signed_bucket(summary, mixed, 4, segment, offset, buckets)
        if rows == 5:
            return _median5(p, q, r, s, t)
        u = _signed_bucket(summary, mixed, 5, segment, offset, buckets)
        v = _signed_bucket(summary, mixed, 6, segment, offset, buckets)
        return _median7(p, q, r, s, t, u, v)

    @gpu.kernel("float32[::1], float32[::1], uint64", rows=rows)
    def estimate(scores, summary, seed):  # type: ignore[no-untyped-def]
        buckets, mixed = np.int64(summary.size // rows), sparse.mix(seed)
        for i in range(cuda.grid(1), scores.size, cuda.gridsize(1)):
            segment = i // buckets
            size = abs(gpu.sanitise(median(summary, mixed, segment, i - segment * buckets, buckets)))
            scores[i] = np.float32(MOST) if size > np.float32(MOST) else size

    return estimate


@gpu.kernel("float32[::1], int64, uint64")
def _mark(scores, draws, seed):  # type: ignore[no-untyped-def]
    """Put the positions drawn at random before all others."""
    n = np.int64(scores.size)
    start, low, high = sparse.plan(seed, n)
    for i in range(cuda.grid(1), draws, cuda.gridsize(1)):
        scores[sparse.position(i, n, draws, start, low, high)] = np.float32(LIMIT)


def _make_take(keep):  # type: ignore[no-untyped-def]
    @gpu.kernel("float32[::1], uint32[::1], uint32[::1], float32[::1]", keep=keep)
    def take(source, header, indices, values):  # type: ignore[no-untyped-def]
        if cuda.grid(1) == 0:
            for j in range(indices.size, header.size):
                header[j] = np.uint32(0)
        for j in range(cuda.grid(1), indices.size, cuda.gridsize(1)):
            i = indices[j]
            values[j] = gpu.sanitise(source[i])
            if keep:
                source[i] = np.float32(0)

    return take


_ESTIMATE = {rows: _make_estimate(rows) for rows in (1, 3, 5, 7)}
_TAKE = {keep: _make_take(keep) for keep in (False, True)}
