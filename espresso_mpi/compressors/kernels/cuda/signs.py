"""CUDA kernels of the sign methods: a warp takes a block of the format, 64 or 128 elements at a time.

The CPU sums 64 lanes and folds their upper half onto the lower one until one is left; here lane l of a warp holds the
sums l and l + 32, so the first fold is one addition and the others are the warp's. The order is part of the format.

With a residual the block is needed twice: it stays in shared memory if it is short enough, else it is read twice.

A warp collects the words of 1024 elements, one in each lane, and writes them at once. If lane 0 wrote the words of each
group, the compiler would move the question which lane it is out of the loop and make two loops, one for lane 0 and one
for the others, through which a warp goes in turns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from espresso_mpi.compressors.limit import LIMIT

from . import gpu

_WARPS = gpu.THREADS // gpu.LANES

_STAGE = gpu.STAGE

_COLLECTED = 32 * gpu.LANES
"""Elements whose words a warp writes at once."""

_LARGEST = float(np.finfo(np.float32).max)
_ZERO, _ONE = np.float32(0), np.float32(1)


def encode(x: Any, residual: Any, words: Any, scales: Any, lows: Any, block: int) -> int:
    """Write the signs and scales of ``x`` (+ ``residual``, unless it is None).

    With ``lows`` the scales are means of the elements that are not negative, and the lows those of the negative ones.

    Returns:
        how many values have a scale that is smaller than their mean; 0 on a session's stream, see ``gpu.cuts_of``.
    """
    keep, two = residual is not None, lows is not None
    staged, grid, threads = gpu.staging(scales.size, block)
    if not keep:  # each element is needed once
        staged, grid, threads = False, gpu.blocks(scales.size, _WARPS), gpu.THREADS
    kept, second = residual if keep else x, lows if two else scales
    counter = gpu.cut_counter()
    _ENCODE[keep, two, staged](grid, threads, x, kept, words.view(np.uint32), scales, second, block, counter)
    return gpu.cuts_of(counter)


def encode_signs(x: Any, residual: Any, momentum: Any, words: Any, beta: float) -> None:
    """Write the signs of ``x``, or of the momentum that it enters if there is one; a residual is added to either."""
    kernel = _SIGNS[residual is not None, momentum is not None]
    kept, moved = (x if array is None else array for array in (residual, momentum))
    grid = gpu.blocks(x.size, _COLLECTED * _WARPS)
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
def _collected(word, k, p, q):  # type: ignore[no-untyped-def]
    """The word of this lane, if it is word k or k + 1 of those that its warp collects, else what it was.

    Element i of the group of 64 is p of lane i, or q of lane i - 32. Returns how many are negative, too.
    """
    low, high = gpu.ballot(p < 0), gpu.ballot(q < 0)
    word = low if cuda.laneid == k else word
    word = high if cuda.laneid == k + 1 else word
    return word, cuda.popc(low) + cuda.popc(high)


@cuda.jit(device=True)
def _mean(total, count):  # type: ignore[no-untyped-def]
    """The mean of ``count`` magnitudes with this sum; 0 of none."""
    return min(total, np.float32(_LARGEST)) / np.float32(count) if count else _ZERO


def _make_values(keep, two):  # type: ignore[no-untyped-def]
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

    return value, above, below


def _make_sums(value, above, below, two, staged):  # type: ignore[no-untyped-def]
    stage = gpu.make_stage(staged)

    @cuda.jit(device=True)
    def group(x, residual, words, memory, place, start, stop):  # type: ignore[no-untyped-def]
        """Sums of whole groups of 64 magnitudes from start to stop and the number of negative ones; their signs."""
        low, high, low_below, high_below, negative = _ZERO, _ZERO, _ZERO, _ZERO, 0
        lane = cuda.laneid
        for begin in range(start, stop, _COLLECTED):
            end, word = min(stop, begin + _COLLECTED), np.uint32(0)
            for k in range(0, (end - begin) // 128 * 4, 4):
                i = begin + 32 * k + lane
                p, q = value(x, residual, i), value(x, residual, i + 32)
                r, s = value(x, residual, i + 64), value(x, residual, i + 96)
                stage(memory, place + i - start, p, q, r, s)
                low = low + above(p) + above(r)
                high = high + above(q) + above(s)
                low_below = low_below + below(p) + below(r)
                high_below = high_below + below(q) + below(s)
                word, one = _collected(word, k, p, q)
                word, more = _collected(word, k + 2, r, s)
                negative += one + more
            if (end - begin) % 128:
                i = end - 64 + lane
                p, q = value(x, residual, i), value(x, residual, i + 32)
                low, high = low + above(p), high + above(q)
                low_below, high_below = low_below + below(p), high_below + below(q)
                word, one = _collected(word, (end - begin) // 32 - 2, p, q)
                negative += one
            if lane < (end - begin) // 32:
                words[begin // 32 + lane] = word
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

    return group, rest


def _make_subtract(value, staged):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def again(x, residual, memory, i, shift):  # type: ignore[no-untyped-def]
        return memory[i + shift] if staged else value(x, residual, i)

    @cuda.jit(device=True)
    def subtract(x, residual, memory, place, start, stop, plus, minus):  # type: ignore[no-untyped-def]
        whole, shift = start + (stop - start) // 128 * 128, place - start
        for i in range(start + cuda.laneid, whole, 128):
            p, q = again(x, residual, memory, i, shift), again(x, residual, memory, i + 32, shift)
            r, s = again(x, residual, memory, i + 64, shift), again(x, residual, memory, i + 96, shift)
            residual[i] = p + (minus if p < 0 else -plus)
            residual[i + 32] = q + (minus if q < 0 else -plus)
            residual[i + 64] = r + (minus if r < 0 else -plus)
            residual[i + 96] = s + (minus if s < 0 else -plus)
        for i in range(whole + cuda.laneid, stop, 32):
            p = value(x, residual, i)
            residual[i] = p + (minus if p < 0 else -plus)

    return subtract


def _make_encode(keep, two, staged):  # type: ignore[no-untyped-def]
    value, above, below = _make_values(keep, two)
    group, rest = _make_sums(value, above, below, two, staged)
    subtract = _make_subtract(value, staged)
    signature = "float32[::1], float32[::1], uint32[::1], float32[::1], float32[::1], int64, int64[::1]"

    @gpu.kernel(signature, keep=keep, two=two, staged=staged)
    def encode(x, residual, words, scales, lows, block, cut):  # type: ignore[no-untyped-def]
        memory = cuda.shared.array(_STAGE, np.float32) if staged else residual
        place = cuda.threadIdx.x // 32 * gpu.STAGED
        for b in range(cuda.grid(1) // 32, scales.size, cuda.gridsize(1) // 32):
            start, stop = b * block, min(x.size, (b + 1) * block)
            whole = start + (stop - start) // 64 * 64
            first, second, negative = _ZERO, _ZERO, 0
            if whole > start:
                first, second, negative = group(x, residual, words, memory, place, start, whole)
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
                subtract(x, residual, memory, place, start, stop, plus, minus)

    return encode


def _make_last(moved, value, put):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def last(x, residual, momentum, words, i, beta):  # type: ignore[no-untyped-def]
        """The last elements, fewer than a warp collects, from i, which is this lane's."""
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

    return last


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

    last = _make_last(moved, value, put)
    signature = "float32[::1], float32[::1], float32[::1], uint32[::1], float32"

    @gpu.kernel(signature, keep=keep, moving=moving)
    def signs(x, residual, momentum, words, beta):  # type: ignore[no-untyped-def]
        warp, warps = cuda.grid(1) // 32, cuda.gridsize(1) // 32
        for start in range(warp * _COLLECTED, x.size, warps * _COLLECTED):
            if start + _COLLECTED > x.size:
                last(x, residual, momentum, words, start + cuda.laneid, beta)
                return
            word = np.uint32(0)
            for k in range(0, 32, 4):
                i = start + 32 * k + cuda.laneid
                p, q = moved(x, momentum, i, beta), moved(x, momentum, i + 32, beta)
                r, s = moved(x, momentum, i + 64, beta), moved(x, momentum, i + 96, beta)
                t, u = value(residual, i, p), value(residual, i + 32, q)
                v, w = value(residual, i + 64, r), value(residual, i + 96, s)
                word = _collected(word, k, t, u)[0]
                word = _collected(word, k + 2, v, w)[0]
                put(residual, momentum, i, p, t)
                put(residual, momentum, i + 32, q, u)
                put(residual, momentum, i + 64, r, v)
                put(residual, momentum, i + 96, s, w)
            words[start // 32 + cuda.laneid] = word

    return signs


def _make_decode(add, levels):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def sane(scale):  # type: ignore[no-untyped-def]
        return scale if abs(scale) <= np.float32(LIMIT) else _ZERO

    @cuda.jit(device=True)
    def value(old, word, scales, lows, block, divisor):  # type: ignore[no-untyped-def]
        """What an element is to be, by its lane's bit of a word."""
        negative = (word >> np.uint32(cuda.laneid)) & np.uint32(1)
        if levels == 0:
            signed = -_ONE if negative else _ONE
        elif levels == 1:
            signed = sane(scales[block])
            signed = -signed if negative else signed
        else:
            signed = sane(lows[block] if negative else scales[block])
        return gpu.over(old + signed if add else signed, divisor)

    @cuda.jit(device=True)
    def last(out, words, scales, lows, groups, divisor, start):  # type: ignore[no-untyped-def]
        """Fewer than 128 elements."""
        for i in range(start + cuda.laneid, out.size, 32):
            block = np.uint32(i // 64) // np.uint32(groups)
            out[i] = value(out[i], words[i // 32], scales, lows, block, divisor)

    @gpu.kernel("float32[::1], uint32[::1], float32[::1], float32[::1], int64, float32", add=add, levels=levels)
    def decode(out, words, scales, lows, groups, divisor):  # type: ignore[no-untyped-def]
        """``groups`` of 64 elements share a scale; a warp takes two groups at a time."""
        warp, warps = cuda.grid(1) // 32, cuda.gridsize(1) // 32
        for start in range(warp * 128, out.size, warps * 128):
            if start + 128 > out.size:
                last(out, words, scales, lows, groups, divisor, start)
                return
            i, at = start + cuda.laneid, start // 32
            p, q, r, s = out[i], out[i + 32], out[i + 64], out[i + 96]
            group = np.uint32(start // 64)
            block = group // np.uint32(groups)  # in 32 bits: a GPU divides 64 bits very slowly
            after = block + np.uint32(group + np.uint32(1) == (block + np.uint32(1)) * np.uint32(groups))
            out[i] = value(p, words[at], scales, lows, block, divisor)
            out[i + 32] = value(q, words[at + 1], scales, lows, block, divisor)
            out[i + 64] = value(r, words[at + 2], scales, lows, after, divisor)
            out[i + 96] = value(s, words[at + 3], scales, lows, after, divisor)

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
_ENCODE = {
    (keep, two, staged): _make_encode(keep, two, staged)
    for keep in _BOTH
    for two in _BOTH
    for staged in _BOTH[: 1 + keep]  # what is not needed twice is not kept
}
_SIGNS = {(keep, moving): _make_signs(keep, moving) for keep in _BOTH for moving in _BOTH}
_DECODE = {(add, levels): _make_decode(add, levels) for add in _BOTH for levels in (0, 1, 2)}
