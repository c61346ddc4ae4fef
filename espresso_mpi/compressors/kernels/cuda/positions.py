"""CUDA kernels of ``cpu.positions``: a thread writes or reads one word; no kernel waits for the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from espresso_mpi.compressors.context import Context

from . import gpu
from .linear_sparse import plus

_MOST_WARPS = 32
"""Warps of a block, at most."""


def write(indices: Any, head: Any, highs: Any, lows: Any, low: int) -> None:
    """As ``cpu.positions.write``; the first word of ``head``, on the GPU, says how many there are. None: all."""
    words, counted = highs.view(np.uint32), head is not None
    count = head if counted else indices
    _WRITE_HIGHS[counted](gpu.blocks(words.size, gpu.THREADS), gpu.THREADS, words, indices, count, low)
    if lows.size:
        _write_lows(gpu.blocks(lows.size, gpu.THREADS), gpu.THREADS, lows, indices, low)


def scatter(highs: Any, lows: Any, low: int, values: Any, out: Any, add: bool, context: Context) -> None:
    """As ``cpu.positions.scatter``."""
    words = highs.view(np.uint32)
    before = context.scratch("positions-before", -(-words.size // gpu.THREADS), np.uint32, out)
    if not add:
        gpu.zero(out)
    grid = gpu.blocks(words.size, gpu.THREADS)
    _count(grid, gpu.THREADS, words, before)
    _sum_before(1, gpu.LANES, before)
    _SCATTER[add](grid, gpu.THREADS, words, lows if lows.size else words, before, values, out, low)


def settle(indices: Any, head: Any, sent: Any, seen: Any, residual: Any) -> None:
    """As ``cpu.positions.settle``; ``head`` as for ``write``."""
    counted = head is not None
    grid = gpu.blocks(indices.size, gpu.THREADS)
    _SETTLE[counted](grid, gpu.THREADS, indices, head if counted else indices, sent, seen, residual)


def _make_with_count(counted):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def total(indices, head):  # type: ignore[no-untyped-def]
        return min(np.int64(head[0]), np.int64(indices.size)) if counted else np.int64(indices.size)

    @gpu.kernel("uint32[::1], uint32[::1], uint32[::1], int64", counted=counted)
    def write_highs(words, indices, head, low):  # type: ignore[no-untyped-def]
        count = total(indices, head)
        for w in range(cuda.grid(1), words.size, cuda.gridsize(1)):
            j, end = np.int64(0), count  # the first position whose bit is in this word
            while j < end:
                middle = (j + end) >> 1
                if (np.int64(indices[middle]) >> low) + middle < 32 * w:
                    j = middle + 1
                else:
                    end = middle
            word, bit = np.uint32(0), np.int64(0)
            while j < count and bit < 32:
                bit = (np.int64(indices[j]) >> low) + j - 32 * w
                if bit < 32:
                    word |= np.uint32(np.uint32(1) << np.uint32(bit))
                j += 1
            words[w] = word

    @gpu.kernel("uint32[::1], uint32[::1], float32[::1], float32[::1], float32[::1]", counted=counted)
    def settle(indices, head, sent, seen, residual):  # type: ignore[no-untyped-def]
        for j in range(cuda.grid(1), total(indices, head), cuda.gridsize(1)):
            residual[indices[j]] = sent[j] - seen[j]

    return write_highs, settle


@gpu.kernel("uint32[::1], uint32[::1], int64")
def _write_lows(lows, indices, low):  # type: ignore[no-untyped-def]
    mask = np.uint64((np.int64(1) << low) - 1)
    for w in range(cuda.grid(1), lows.size, cuda.gridsize(1)):
        word, j = np.uint64(0), np.int64(indices.size)
        if low:
            j = np.int64(32 * w // low)  # the first position that has bits in this word
        while j < indices.size and j * low < 32 * w + 32:
            bits, at = np.uint64(indices[j]) & mask, j * low - 32 * w
            if at >= 0:
                word |= bits << np.uint64(at)
            else:
                word |= bits >> np.uint64(-at)
            j += 1
        lows[w] = np.uint32(word & np.uint64(0xFFFFFFFF))


@gpu.kernel("uint32[::1], uint32[::1]")
def _count(words, before):  # type: ignore[no-untyped-def]
    """The ones of each run of as many words as a block has threads."""
    ones = cuda.shared.array(1, np.uint32)
    for run in range(cuda.blockIdx.x, before.size, cuda.gridDim.x):
        if cuda.threadIdx.x == 0:
            ones[0] = np.uint32(0)
        cuda.syncthreads()
        w = run * cuda.blockDim.x + cuda.threadIdx.x
        if w < words.size:
            cuda.atomic.add(ones, 0, np.uint32(cuda.popc(words[w])))
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            before[run] = ones[0]
        cuda.syncthreads()


@gpu.kernel("uint32[::1]")
def _sum_before(counts):  # type: ignore[no-untyped-def]
    """One warp: replace counts by the sums of those before them."""
    total, lane = np.int32(0), cuda.laneid
    for start in range(0, counts.size, gpu.LANES):
        i = start + lane
        mine = np.int32(counts[i]) if i < counts.size else np.int32(0)
        upto = np.int32(gpu.warp_prefix_sum(mine, lane))
        if i < counts.size:
            counts[i] = np.uint32(total + upto - mine)
        total = np.int32(total + gpu.warp_sum(mine))


@cuda.jit(device=True)
def _low_bits(lows, j, low):  # type: ignore[no-untyped-def]
    """As in ``cpu.positions``."""
    word, shift = (j * low) >> 5, (j * low) & 31
    bits = np.uint64(lows[word]) >> np.uint64(shift)
    if shift + low > 32:
        bits |= np.uint64(lows[word + 1]) << np.uint64(32 - shift)
    return np.int64(bits & np.uint64((np.int64(1) << low) - 1))


def _make_scatter(add):  # type: ignore[no-untyped-def]
    @gpu.kernel("uint32[::1], uint32[::1], uint32[::1], float32[::1], float32[::1], int64", add=add)
    def scatter(words, lows, before, values, out, low):  # type: ignore[no-untyped-def]
        sums = cuda.shared.array(_MOST_WARPS, np.int32)
        warp, lane = cuda.threadIdx.x // 32, cuda.laneid
        for run in range(cuda.blockIdx.x, before.size, cuda.gridDim.x):
            w = run * cuda.blockDim.x + cuda.threadIdx.x
            mask = np.uint32(words[w]) if w < words.size else np.uint32(0)
            ones = np.int32(cuda.popc(mask))
            upto = np.int32(gpu.warp_prefix_sum(ones, lane))
            if lane == 31:
                sums[warp] = upto
            cuda.syncthreads()
            j = np.int64(before[run]) + np.int64(upto - ones)
            for other in range(warp):
                j += np.int64(sums[other])
            bit = np.int64(32 * w)
            while mask and j < values.size:  # a damaged bitmap may hold more ones than there are values
                if mask & np.uint32(1):
                    i = ((bit - j) << low) + (_low_bits(lows, j, low) if low else np.int64(0))
                    if i < out.size:  # nor may it write outside the array
                        value = gpu.tame(values[j])
                        out[i] = plus(out[i], value) if add else value
                    j += 1
                mask = np.uint32(mask >> np.uint32(1))
                bit += 1
            cuda.syncthreads()

    return scatter


_WRITE_HIGHS, _SETTLE = {}, {}
for _counted in (False, True):
    _WRITE_HIGHS[_counted], _SETTLE[_counted] = _make_with_count(_counted)
_SCATTER = {add: _make_scatter(add) for add in (False, True)}
