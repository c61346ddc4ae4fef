"""CUDA kernels of ``cpu.chunk_choice``: a block of threads takes a chunk, which it reads again for each bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from . import gpu

_MOST_WARPS = 32
"""Warps of a block, at most."""


def threads_for(chunk: int) -> int:
    """As many threads as a chunk has use for: whole warps."""
    return min(gpu.THREADS, -(-chunk // gpu.LANES) * gpu.LANES)


def choose(x: Any, residual: Any, indices: Any, sent: Any, chunk: int, k: int) -> None:
    """As ``cpu.chunk_choice.choose``; the residual may be None."""
    grid = gpu.blocks(-(-x.size // chunk), 1)
    _CHOOSE[residual is not None](
        grid, threads_for(chunk), x, x if residual is None else residual, indices, sent, chunk, k
    )


@cuda.jit(device=True)
def _block_sum(mine, sums):  # type: ignore[no-untyped-def]
    """The sum over all threads, in each of them."""
    mine = np.int32(gpu.warp_sum(mine))
    cuda.syncthreads()
    if cuda.laneid == 0:
        sums[cuda.threadIdx.x // 32] = mine
    cuda.syncthreads()
    total = np.int32(0)
    for warp in range(cuda.blockDim.x // 32):
        total = np.int32(total + sums[warp])
    return total


@cuda.jit(device=True)
def _before(mine, sums):  # type: ignore[no-untyped-def]
    """How many threads of lower number say yes, and how many there are."""
    mask = gpu.ballot(mine)
    warp = cuda.threadIdx.x // 32
    cuda.syncthreads()
    if cuda.laneid == 0:
        sums[warp] = np.int32(cuda.popc(mask))
    cuda.syncthreads()
    below, total = np.int32(cuda.popc(mask & gpu.lanes_below(cuda.laneid))), np.int32(0)
    for other in range(cuda.blockDim.x // 32):
        if other < warp:
            below = np.int32(below + sums[other])
        total = np.int32(total + sums[other])
    return below, total


def _make_kth(keep):  # type: ignore[no-untyped-def]
    """Device functions: an element, its magnitude's bits, how many reach some bits, the bits of the k-th largest."""

    @cuda.jit(device=True)
    def value(x, residual, i):  # type: ignore[no-untyped-def]
        return residual[i] if keep else gpu.sanitise(x[i])

    @cuda.jit(device=True)
    def bits(x, residual, i):  # type: ignore[no-untyped-def]
        return np.uint32(gpu.float_bits(value(x, residual, i)) & np.uint32(0x7FFFFFFF))

    @cuda.jit(device=True)
    def reach(x, residual, start, stop, least, sums):  # type: ignore[no-untyped-def]
        mine = np.int32(0)
        for i in range(start + cuda.threadIdx.x, stop, cuda.blockDim.x):
            if bits(x, residual, i) >= least:
                mine = np.int32(mine + np.int32(1))
        return _block_sum(mine, sums)

    @cuda.jit(device=True)
    def kth(x, residual, start, stop, k, sums):  # type: ignore[no-untyped-def]
        least = np.uint32(0)
        for turn in range(31):
            higher = np.uint32(least | np.uint32(np.uint32(1) << np.uint32(30 - turn)))
            found = reach(x, residual, start, stop, higher, sums)
            if found >= k:
                least = higher
                if found == k:
                    break
        return least

    return value, bits, reach, kth


def _make_choose(keep):  # type: ignore[no-untyped-def]
    value, bits, reach, kth = _make_kth(keep)

    @gpu.kernel("float32[::1], float32[::1], uint32[::1], float32[::1], int64, int64", keep=keep)
    def choose(x, residual, indices, sent, chunk, k):  # type: ignore[no-untyped-def]
        sums = cuda.shared.array(_MOST_WARPS, np.int32)
        for c in range(cuda.blockIdx.x, (x.size + chunk - 1) // chunk, cuda.gridDim.x):
            start, stop, at = c * chunk, min(x.size, (c + 1) * chunk), c * min(k, chunk)
            wanted = min(k, stop - start)
            if keep:
                for i in range(start + cuda.threadIdx.x, stop, cuda.blockDim.x):
                    residual[i] = gpu.sanitise(x[i] + residual[i])
            least = kth(x, residual, start, stop, wanted, sums)
            equal = np.int32(wanted - reach(x, residual, start, stop, np.uint32(least + np.uint32(1)), sums))
            for first in range(start, stop, cuda.blockDim.x):
                i = first + cuda.threadIdx.x
                mine = bits(x, residual, i) if i < stop else np.uint32(0)
                ties, tied = _before(i < stop and mine == least, sums)
                goes = i < stop and (mine > least or (mine == least and ties < equal))
                before, gone = _before(goes, sums)
                if goes:
                    indices[at + before] = np.uint32(i)
                    sent[at + before] = value(x, residual, i)
                    if keep:
                        residual[i] = np.float32(0)
                at += gone
                equal = np.int32(max(np.int32(0), np.int32(equal - tied)))

    return choose


_CHOOSE = {keep: _make_choose(keep) for keep in (False, True)}
