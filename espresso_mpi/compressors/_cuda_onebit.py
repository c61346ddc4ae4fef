"""CUDA kernels of ``onebit``: a warp takes a block of the format, 64 or 128 elements at a time.

The CPU sums 64 lanes and folds their upper half onto the lower one until one is left; here lane l of a warp holds the
sums l and l + 32, so the first fold is one addition and the others are the warp's. The order is part of the format.

With a residual the block is read twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from . import _cuda

_WARPS = _cuda.THREADS // _cuda.LANES

# With a residual each warp has 16 KB under way (at block = 2048) that it reads twice. More blocks of 8 warps on a
# multiprocessor than these push one another's data out of the caches before the second time.
_RESIDENT_KEEPING = 3

_LARGEST = float(np.finfo(np.float32).max)


def encode(x: Any, residual: Any, words: Any, scales: Any, block: int) -> None:
    """Write the signs and scales of ``x`` (+ ``residual``, unless it is None); ``words`` as uint32, two a group."""
    if residual is None:
        _ENCODE[False](_cuda.blocks(scales.size, _WARPS), _cuda.THREADS, x, x, words, scales, block)
    else:
        grid = _cuda.blocks(scales.size, _WARPS, _RESIDENT_KEEPING)
        _ENCODE[True](grid, _cuda.THREADS, x, residual, words, scales, block)


def decode(words: Any, scales: Any, out: Any, block: int, add: bool) -> None:
    """Write the signed scales into ``out``, or add them to it."""
    _DECODE[add](_cuda.blocks(out.size, _cuda.TILE), _cuda.THREADS, out, words, scales, block // 64)


def _make_encode(keep):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(x, residual, i):  # type: ignore[no-untyped-def]
        return x[i] + residual[i] if keep else x[i]

    @cuda.jit(device=True)
    def put_signs(words, i, p, q):  # type: ignore[no-untyped-def]
        """The word of a group of 64 of which this lane, whose element i is, holds p = [i] and q = [i + 32]."""
        low, high = _cuda.ballot(p < 0), _cuda.ballot(q < 0)
        if cuda.laneid == 0:
            words[i // 32] = low
            words[i // 32 + 1] = high

    @cuda.jit(device=True)
    def group(x, residual, words, start, stop):  # type: ignore[no-untyped-def]
        """Sums of whole groups of 64 magnitudes from start to stop; the signs on the way."""
        low, high = np.float32(0), np.float32(0)
        for i in range(start + cuda.laneid, stop - 64, 128):
            p, q = value(x, residual, i), value(x, residual, i + 32)
            r, s = value(x, residual, i + 64), value(x, residual, i + 96)
            low = low + abs(p) + abs(r)
            high = high + abs(q) + abs(s)
            put_signs(words, i, p, q)
            put_signs(words, i + 64, r, s)
        if (stop - start) % 128:
            i = stop - 64 + cuda.laneid
            p, q = value(x, residual, i), value(x, residual, i + 32)
            low, high = low + abs(p), high + abs(q)
            put_signs(words, i, p, q)
        return _cuda.warp_sum(low + high)

    @cuda.jit(device=True)
    def rest(x, residual, words, start, stop, total):  # type: ignore[no-untyped-def]
        """``total`` plus the fewer than 64 last magnitudes one by one, in every lane; their signs."""
        for i in range(start, stop):
            total += abs(value(x, residual, i))
        i = start + cuda.laneid
        p = value(x, residual, i) if i < stop else np.float32(0)
        q = value(x, residual, i + 32) if i + 32 < stop else np.float32(0)
        put_signs(words, i, p, q)
        return total

    @cuda.jit(device=True)
    def left(p, scale):  # type: ignore[no-untyped-def]
        return p + (scale if p < 0 else -scale)

    @cuda.jit(device=True)
    def subtract(x, residual, start, stop, scale):  # type: ignore[no-untyped-def]
        whole = start + (stop - start) // 128 * 128
        for i in range(start + cuda.laneid, whole, 128):
            p, q = value(x, residual, i), value(x, residual, i + 32)
            r, s = value(x, residual, i + 64), value(x, residual, i + 96)
            residual[i], residual[i + 32] = left(p, scale), left(q, scale)
            residual[i + 64], residual[i + 96] = left(r, scale), left(s, scale)
        for i in range(whole + cuda.laneid, stop, 32):
            residual[i] = left(value(x, residual, i), scale)

    @_cuda.kernel("float32[::1], float32[::1], uint32[::1], float32[::1], int64", keep=keep)
    def encode(x, residual, words, scales, block):  # type: ignore[no-untyped-def]
        for b in range(cuda.grid(1) // 32, scales.size, cuda.gridsize(1) // 32):
            start, stop = b * block, min(x.size, (b + 1) * block)
            whole = start + (stop - start) // 64 * 64
            total = np.float32(0)
            if whole > start:
                total = group(x, residual, words, start, whole)
            if stop > whole:
                total = rest(x, residual, words, whole, stop, total)
            scale = min(total, np.float32(_LARGEST)) / np.float32(stop - start)
            if cuda.laneid == 0:
                scales[b] = scale
            if keep:
                cuda.syncwarp()  # every lane has read the last elements, which one lane is to overwrite
                subtract(x, residual, start, stop, scale)

    return encode


def _make_decode(add):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(out, words, scales, groups, i):  # type: ignore[no-untyped-def]
        scale = scales[np.uint32(i // 64) // np.uint32(groups)]  # in 32 bits: a GPU divides 64 bits very slowly
        negative = (words[i // 32] >> np.uint32(i % 32)) & np.uint32(1)
        signed = -scale if negative else scale
        return out[i] + signed if add else signed

    @_cuda.kernel("float32[::1], uint32[::1], float32[::1], int64", add=add)
    def decode(out, words, scales, groups):  # type: ignore[no-untyped-def]
        """``groups`` of 64 elements share a scale."""
        step = _cuda.THREADS
        for tile in range(_cuda.TILE * cuda.blockIdx.x, out.size, _cuda.TILE * cuda.gridDim.x):
            i = tile + cuda.threadIdx.x
            if tile + _cuda.TILE <= out.size:
                p = value(out, words, scales, groups, i)
                q = value(out, words, scales, groups, i + step)
                r = value(out, words, scales, groups, i + 2 * step)
                s = value(out, words, scales, groups, i + 3 * step)
                out[i], out[i + step], out[i + 2 * step], out[i + 3 * step] = p, q, r, s
            else:
                for j in range(i, out.size, step):
                    out[j] = value(out, words, scales, groups, j)

    return decode


_ENCODE = {keep: _make_encode(keep) for keep in (False, True)}
_DECODE = {add: _make_decode(add) for add in (False, True)}
