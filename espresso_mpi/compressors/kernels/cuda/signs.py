"""CUDA kernels of the sign methods: a warp takes a block of the format, 64 or 128 elements at a time.

The CPU sums 64 lanes and folds their upper half onto the lower one until one is left; here lane l of a warp holds the
sums l and l + 32, so the first fold is one addition and the others are the warp's. The order is part of the format.

With a residual the block is read twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from espresso_mpi.compressors.limit import LIMIT

from . import gpu

_WARPS = gpu.THREADS // gpu.LANES

# With a residual each warp has 16 KB under way (at block = 2048) that it reads twice. More blocks of 8 warps on a
# multiprocessor than these push one another's data out of the caches before the second time.
_RESIDENT_KEEPING = 3

_LARGEST = float(np.finfo(np.float32).max)
_ZERO, _ONE = np.float32(0), np.float32(1)


def encode(x: Any, residual: Any, words: Any, scales: Any, lows: Any, block: int) -> int:
    """Write the signs and scales of ``x`` (+ ``residual``, unless it is None).

    With ``lows`` the scales are means of the elements that are not negative, and the lows those of the negative ones.

    Returns:
        how many values have a scale that is smaller than their mean; 0 on a session's stream, see ``gpu.cuts_of``.
    """
    kernel = _ENCODE[residual is not None, lows is not None]
    resident = (2048 // gpu.THREADS,) if residual is None else (_RESIDENT_KEEPING,)
    kept, second = x if residual is None else residual, scales if lows is None else lows
    grid = gpu.blocks(scales.size, _WARPS, *resident)
    counter = gpu.cut_counter()
    kernel(grid, gpu.THREADS, x, kept, words.view(np.uint32), scales, second, block, counter)
    return gpu.cuts_of(counter)


def encode_signs(x: Any, residual: Any, momentum: Any, words: Any, beta: float) -> None:
    """Write the signs of ``x``, or of the momentum that it enters if there is one; a residual is added to either."""
    kernel = _SIGNS[residual is not None, momentum is not None]
    kept, moved = (x if array is None else array for array in (residual, momentum))
    grid = gpu.blocks(x.size, gpu.TILE)
    kernel(grid, gpu.THREADS, x, kept, moved, words.view(np.uint32), np.float32(beta))


def decode(words: Any, scales: Any, lows: Any, out: Any, block: int, add: bool, divisor: float) -> None:
    """Write the values into ``out``, or add them to it, and divide it; without scales they are 1 and -1."""
    levels = sum(array is not None for array in (scales, lows))
    bits = words.view(np.uint32)
    first = out if scales is None else scales
    second = first if lows is None else lows
    _DECODE[add, levels](
        gpu.blocks(out.size, gpu.TILE), gpu.THREADS, out, bits, first, second, block // 64, np.float32(divisor)
    )


def vote(out: Any) -> None:
    """Replace every element by its sign, 1 or -1."""
    _vote(gpu.blocks(out.size, gpu.TILE), gpu.THREADS, out)


@cuda.jit(device=True)
def _put_signs(words, i, p, q):  # type: ignore[no-untyped-def]
    """The word of a group of 64 of which this lane, whose element i is, holds p = [i] and q = [i + 32].

    Returns how many of the group are negative.
    """
    low, high = gpu.ballot(p < 0), gpu.ballot(q < 0)
    if cuda.laneid == 0:
        words[i // 32] = low
        words[i // 32 + 1] = high
    return cuda.popc(low) + cuda.popc(high)


@cuda.jit(device=True)
def _mean(total, count):  # type: ignore[no-untyped-def]
    """The mean of ``count`` magnitudes with this sum; 0 of none."""
    return min(total, np.float32(_LARGEST)) / np.float32(count) if count else _ZERO


def _make_encode(keep, two):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(x, residual, i):  # type: ignore[no-untyped-def]
        return gpu.sanitise(residual[i] + x[i]) if keep else gpu.sanitise(x[i])

    @cuda.jit(device=True)
    def above(p):  # type: ignore[no-untyped-def]
        """What an element adds to the first sum."""
        return (_ZERO if p < 0 else p) if two else abs(p)

    @cuda.jit(device=True)
    def below(p):  # type: ignore[no-untyped-def]
        return -p if two and p < 0 else _ZERO

    @cuda.jit(device=True)
    def group(x, residual, words, start, stop):  # type: ignore[no-untyped-def]
        """Sums of whole groups of 64 magnitudes from start to stop and the number of negative ones; their signs."""
        low, high, low_below, high_below, negative = _ZERO, _ZERO, _ZERO, _ZERO, 0
        for i in range(start + cuda.laneid, stop - 64, 128):
            p, q = value(x, residual, i), value(x, residual, i + 32)
            r, s = value(x, residual, i + 64), value(x, residual, i + 96)
            low = low + above(p) + above(r)
            high = high + above(q) + above(s)
            low_below = low_below + below(p) + below(r)
            high_below = high_below + below(q) + below(s)
            negative += _put_signs(words, i, p, q)
            negative += _put_signs(words, i + 64, r, s)
        if (stop - start) % 128:
            i = stop - 64 + cuda.laneid
            p, q = value(x, residual, i), value(x, residual, i + 32)
            low, high = low + above(p), high + above(q)
            low_below, high_below = low_below + below(p), high_below + below(q)
            negative += _put_signs(words, i, p, q)
        first = gpu.warp_sum(low + high)
        second = gpu.warp_sum(low_below + high_below) if two else _ZERO
        return first, second, negative

    @cuda.jit(device=True)
    def rest(x, residual, words, start, stop, first, second):  # type: ignore[no-untyped-def]
        """The sums plus the fewer than 64 last magnitudes one by one, in every lane; the number of negative ones."""
        for i in range(start, stop):
            p = value(x, residual, i)
            first += above(p)
            second += below(p)
        i = start + cuda.laneid
        p = value(x, residual, i) if i < stop else _ZERO
        q = value(x, residual, i + 32) if i + 32 < stop else _ZERO
        return first, second, _put_signs(words, i, p, q)

    @cuda.jit(device=True)
    def subtract(x, residual, start, stop, plus, minus):  # type: ignore[no-untyped-def]
        whole = start + (stop - start) // 128 * 128
        for i in range(start + cuda.laneid, whole, 128):
            p, q = value(x, residual, i), value(x, residual, i + 32)
            r, s = value(x, residual, i + 64), value(x, residual, i + 96)
            residual[i] = p + (minus if p < 0 else -plus)
            residual[i + 32] = q + (minus if q < 0 else -plus)
            residual[i + 64] = r + (minus if r < 0 else -plus)
            residual[i + 96] = s + (minus if s < 0 else -plus)
        for i in range(whole + cuda.laneid, stop, 32):
            p = value(x, residual, i)
            residual[i] = p + (minus if p < 0 else -plus)

    signature = "float32[::1], float32[::1], uint32[::1], float32[::1], float32[::1], int64, int64[::1]"

    @gpu.kernel(signature, keep=keep, two=two)
    def encode(x, residual, words, scales, lows, block, cut):  # type: ignore[no-untyped-def]
        for b in range(cuda.grid(1) // 32, scales.size, cuda.gridsize(1) // 32):
            start, stop = b * block, min(x.size, (b + 1) * block)
            whole = start + (stop - start) // 64 * 64
            first, second, negative = _ZERO, _ZERO, 0
            if whole > start:
                first, second, negative = group(x, residual, words, start, whole)
            if stop > whole:
                first, second, more = rest(x, residual, words, whole, stop, first, second)
                negative += more
            count = stop - start - negative if two else stop - start
            plus = _mean(first, count)
            minus = _mean(second, negative) if two else plus
            if cuda.laneid == 0:
                if first > np.float32(_LARGEST):
                    cuda.atomic.add(cut, 0, count)
                if two and second > np.float32(_LARGEST):
                    cuda.atomic.add(cut, 0, negative)
                scales[b] = plus
                if two:
                    lows[b] = -minus
            if keep:
                cuda.syncwarp()  # every lane has read the last elements, which one lane is to overwrite
                subtract(x, residual, start, stop, plus, minus)

    return encode


def _make_signs(keep, moving):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def moved(x, momentum, i, beta):  # type: ignore[no-untyped-def]
        return cuda.fma(momentum[i], beta, x[i]) if moving else x[i]

    @cuda.jit(device=True)
    def value(residual, i, p):  # type: ignore[no-untyped-def]
        return gpu.sanitise(residual[i] + p) if keep else p

    @cuda.jit(device=True)
    def put(residual, momentum, i, p, v):  # type: ignore[no-untyped-def]
        if moving:
            momentum[i] = gpu.sanitise(p)
        if keep:
            residual[i] = v + (_ONE if v < 0 else -_ONE)

    @cuda.jit(device=True)
    def last(x, residual, momentum, words, i, beta):  # type: ignore[no-untyped-def]
        """Fewer than 128 elements from i, which is this lane's, to the end."""
        for j in range(i, (x.size + 63) // 64 * 64, 64):
            p = moved(x, momentum, j, beta) if j < x.size else _ZERO
            q = moved(x, momentum, j + 32, beta) if j + 32 < x.size else _ZERO
            v = value(residual, j, p) if j < x.size else _ZERO
            w = value(residual, j + 32, q) if j + 32 < x.size else _ZERO
            _put_signs(words, j, v, w)
            if j < x.size:
                put(residual, momentum, j, p, v)
            if j + 32 < x.size:
                put(residual, momentum, j + 32, q, w)

    signature = "float32[::1], float32[::1], float32[::1], uint32[::1], float32"

    @gpu.kernel(signature, keep=keep, moving=moving)
    def signs(x, residual, momentum, words, beta):  # type: ignore[no-untyped-def]
        for start in range(cuda.grid(1) // 32 * 128, x.size, cuda.gridsize(1) // 32 * 128):
            i = start + cuda.laneid
            if start + 128 > x.size:
                last(x, residual, momentum, words, i, beta)
                return
            p, q = moved(x, momentum, i, beta), moved(x, momentum, i + 32, beta)
            r, s = moved(x, momentum, i + 64, beta), moved(x, momentum, i + 96, beta)
            t, u = value(residual, i, p), value(residual, i + 32, q)
            v, w = value(residual, i + 64, r), value(residual, i + 96, s)
            _put_signs(words, i, t, u)
            _put_signs(words, i + 64, v, w)
            put(residual, momentum, i, p, t)
            put(residual, momentum, i + 32, q, u)
            put(residual, momentum, i + 64, r, v)
            put(residual, momentum, i + 96, s, w)

    return signs


def _make_decode(add, levels):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def sane(scale):  # type: ignore[no-untyped-def]
        return scale if abs(scale) <= np.float32(LIMIT) else _ZERO

    @cuda.jit(device=True)
    def value(out, words, scales, lows, groups, divisor, i):  # type: ignore[no-untyped-def]
        block = np.uint32(i // 64) // np.uint32(groups)  # in 32 bits: a GPU divides 64 bits very slowly
        negative = (words[i // 32] >> np.uint32(i % 32)) & np.uint32(1)
        if levels == 0:
            signed = -_ONE if negative else _ONE
        elif levels == 1:
            signed = sane(scales[block])
            signed = -signed if negative else signed
        else:
            signed = sane(lows[block] if negative else scales[block])
        return gpu.over(out[i] + signed if add else signed, divisor)

    @gpu.kernel("float32[::1], uint32[::1], float32[::1], float32[::1], int64, float32", add=add, levels=levels)
    def decode(out, words, scales, lows, groups, divisor):  # type: ignore[no-untyped-def]
        """``groups`` of 64 elements share a scale."""
        step = gpu.THREADS
        for tile in range(gpu.TILE * cuda.blockIdx.x, out.size, gpu.TILE * cuda.gridDim.x):
            i = tile + cuda.threadIdx.x
            if tile + gpu.TILE <= out.size:
                p = value(out, words, scales, lows, groups, divisor, i)
                q = value(out, words, scales, lows, groups, divisor, i + step)
                r = value(out, words, scales, lows, groups, divisor, i + 2 * step)
                s = value(out, words, scales, lows, groups, divisor, i + 3 * step)
                out[i], out[i + step], out[i + 2 * step], out[i + 3 * step] = p, q, r, s
            else:
                for j in range(i, out.size, step):
                    out[j] = value(out, words, scales, lows, groups, divisor, j)

    return decode


@cuda.jit(device=True)
def _sign(p):  # type: ignore[no-untyped-def]
    return -_ONE if p < 0 else _ONE


@gpu.kernel("float32[::1]")
def _vote(out):  # type: ignore[no-untyped-def]
    step = gpu.THREADS
    for tile in range(gpu.TILE * cuda.blockIdx.x, out.size, gpu.TILE * cuda.gridDim.x):
        i = tile + cuda.threadIdx.x
        if tile + gpu.TILE <= out.size:
            p, q, r, s = out[i], out[i + step], out[i + 2 * step], out[i + 3 * step]
            out[i], out[i + step], out[i + 2 * step], out[i + 3 * step] = _sign(p), _sign(q), _sign(r), _sign(s)
        else:
            for j in range(i, out.size, step):
                out[j] = _sign(out[j])


_BOTH = (False, True)
_ENCODE = {(keep, two): _make_encode(keep, two) for keep in _BOTH for two in _BOTH}
_SIGNS = {(keep, moving): _make_signs(keep, moving) for keep in _BOTH for moving in _BOTH}
_DECODE = {(add, levels): _make_decode(add, levels) for add in _BOTH for levels in (0, 1, 2)}
