"""CUDA kernels of ``qsgd``, ``natural_dithering`` and ``terngrad``: a warp encodes a block of the format.

A warp's votes on bit j of 32 level numbers are half of word j of their group. The block is needed twice, or three times
for a sum of squares; meanwhile it is in shared memory, or in the caches. The CPU sums 64 lanes and folds their upper
half onto the lower one until one is left; here lane l of a warp holds the sums l and l + 32. The order is part of the
format.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from espresso_mpi.compressors.limit import LIMIT

from ..cpu import host
from ..cpu.dithering import TINY, largest_step
from ..cpu.quantiser import CLIP, L2, MAX, Quantiser
from . import gpu

_TINY, _STAGE = np.float32(TINY), gpu.STAGE


def encode(x: Any, residual: Any, words: Any, steps: Any, q: Quantiser, key: int) -> None:
    """Write the words, as uint32, and steps of ``x`` (+ ``residual``, unless it is None)."""
    staged, grid, threads = gpu.staging(steps.size, q.block)
    kernel, kept = _ENCODE[residual is not None, q.powers, staged], x if residual is None else residual
    numbers = (np.float32(q.clip), np.float32(q.top), np.float32(q.shrink(x.size)))
    rule = (q.block, q.width, np.int32(q.levels), q.norm, *numbers)
    kernel(grid, threads, x, kept, words, steps, *rule, *host.key_words(key))


def decode(words: Any, steps: Any, out: Any, q: Quantiser, add: bool) -> None:
    """Write what the level numbers stand for into ``out``, or add it."""
    grid = gpu.blocks(out.size, gpu.TILE)
    rule = (q.block, q.width, np.int32(q.levels), largest_step(q))
    _DECODE[add, q.powers](grid, gpu.THREADS, out, words, steps, *rule)


@cuda.jit(device=True)
def _power(number, levels):  # type: ignore[no-untyped-def]
    """The multiple of the step that a level number stands for."""
    level = min(np.int32(abs(number)), levels)
    if level == 0:
        return np.float32(0)
    magnitude = gpu.bits_float(np.int32(np.int32(level + np.int32(126)) << np.int32(23)))
    return -magnitude if number < 0 else magnitude


def _make_root_square(again):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def square(p, factor, total):  # type: ignore[no-untyped-def]
        scaled = np.float32(p * factor)
        return cuda.fma(scaled, scaled, total)

    @cuda.jit(device=True)
    def root_square(x, residual, memory, shift, start, stop, top, mean):  # type: ignore[no-untyped-def]
        """As ``cpu.dithering._root_square``, to the bit; adding the square of a 0 beyond the end changes nothing."""
        power = np.uint32(gpu.float_bits(top) & np.uint32(0x7F800000))
        factor = gpu.bits_float(np.uint32(np.uint32(0x7F000000) - power))
        whole = start + (stop - start) // 64 * 64
        low, high = np.float32(0), np.float32(0)
        for i in range(start + cuda.laneid, whole, 128):
            p, q = again(x, residual, memory, shift, i, whole), again(x, residual, memory, shift, i + 32, whole)
            r, s = again(x, residual, memory, shift, i + 64, whole), again(x, residual, memory, shift, i + 96, whole)
            low, high = square(r, factor, square(p, factor, low)), square(s, factor, square(q, factor, high))
        total = gpu.warp_sum(low + high)
        for i in range(whole, stop):
            total = square(again(x, residual, memory, shift, i, stop), factor, total)
        if mean:
            total = np.float32(total / np.float32(stop - start))
        return np.float32(np.float32(math.sqrt(total)) * gpu.bits_float(power))

    return root_square


def _make_length(keep, staged):  # type: ignore[no-untyped-def]
    """Functions for the elements of a block, and for its length."""

    value, stage = gpu.make_fetch(keep), gpu.make_stage(staged)

    @cuda.jit(device=True)
    def again(x, residual, memory, shift, i, stop):  # type: ignore[no-untyped-def]
        if staged:
            return memory[i + shift] if i < stop else np.float32(0)
        return value(x, residual, i, stop)

    @cuda.jit(device=True)
    def largest(x, residual, memory, shift, start, stop):  # type: ignore[no-untyped-def]
        top = np.float32(0)
        for i in range(start + cuda.laneid, stop, 128):
            p, q = value(x, residual, i, stop), value(x, residual, i + 32, stop)
            r, s = value(x, residual, i + 64, stop), value(x, residual, i + 96, stop)
            stage(memory, i + shift, p, q, r, s)
            top = max(top, max(max(abs(p), abs(q)), max(abs(r), abs(s))))
        if staged:
            cuda.syncwarp()
        return gpu.warp_max(top)

    root_square = _make_root_square(again)

    @cuda.jit(device=True)
    def length(x, residual, memory, shift, start, stop, norm, clip):  # type: ignore[no-untyped-def]
        """As ``cpu.dithering._norm``."""
        top = largest(x, residual, memory, shift, start, stop)
        if norm == MAX or top < _TINY:
            return top
        root = root_square(x, residual, memory, shift, start, stop, top, norm == CLIP)
        if norm == L2:
            return min(max(root, top), np.float32(LIMIT))
        return min(np.float32(clip * root), top)

    return again, length


def _make_encode(keep, powers, staged):  # type: ignore[no-untyped-def]
    again, length = _make_length(keep, staged)

    @cuda.jit(device=True)
    def level(p, inverse, limit, at, high):  # type: ignore[no-untyped-def]
        """The number of a level next to the magnitude of p."""
        u = gpu.uniform(at, high)
        if not powers:
            return np.int32(min(cuda.fma(abs(p), inverse, u), limit))
        t = min(np.float32(abs(p) * inverse), limit)
        shifted = t + t if t >= np.float32(1) else t + np.float32(1)
        noise = np.uint32(u * np.float32(8388608.0))
        return np.int32(np.uint32(gpu.float_bits(shifted) + noise) >> np.uint32(23)) - np.int32(127)

    @cuda.jit(device=True)
    def number(p, inverse, limit, i, low, high):  # type: ignore[no-untyped-def]
        k = np.int32(level(p, inverse, limit, gpu.counter(i, low), high))
        return np.int32(-k) if p < 0 else k

    @cuda.jit(device=True)
    def put(words, at, width, p, q):  # type: ignore[no-untyped-def]
        """The words of a group of 64 level numbers, of which each lane has two; lane j writes word j."""
        low, high = np.uint32(0), np.uint32(0)
        for j in range(width):
            first, second = gpu.ballot((p >> j) & 1), gpu.ballot((q >> j) & 1)
            if cuda.laneid == j:
                low, high = first, second
        if cuda.laneid < width:
            words[2 * (at + cuda.laneid)] = low
            words[2 * (at + cuda.laneid) + 1] = high

    @cuda.jit(device=True)
    def rest(residual, i, stop, p, k, step, levels):  # type: ignore[no-untyped-def]
        if keep and i < stop:
            multiple = _power(k, levels) if powers else np.float32(k)
            residual[i] = cuda.fma(multiple, -step, p)

    signature = (
        "float32[::1], float32[::1], uint32[::1], float32[::1], int64, int64, int32, int64, "
        "float32, float32, float32, uint32, uint32"
    )

    @gpu.kernel(signature, keep=keep, powers=powers, staged=staged)
    def encode(x, residual, words, steps, block, width, levels, norm, clip, limit, shrink, low, high):  # type: ignore[no-untyped-def]
        memory = cuda.shared.array(_STAGE, np.float32) if staged else x
        for b in range(cuda.grid(1) // 32, steps.size, cuda.gridsize(1) // 32):
            start, stop = b * block, min(x.size, (b + 1) * block)
            shift = cuda.threadIdx.x // 32 * gpu.STAGED - start
            size = length(x, residual, memory, shift, start, stop, norm, clip)
            step, inverse = np.float32(0), np.float32(0)
            if size >= _TINY:
                step, inverse = np.float32(np.float32(size / limit) * shrink), np.float32(limit / size)
            if cuda.laneid == 0:
                steps[b] = step
            if keep:
                cuda.syncwarp()  # every lane has read the last elements, which one lane is to overwrite
            at = b * ((block + 63) // 64) * width
            for group in range(start, stop, 128):
                i = group + cuda.laneid
                p, q = again(x, residual, memory, shift, i, stop), again(x, residual, memory, shift, i + 32, stop)
                r, s = again(x, residual, memory, shift, i + 64, stop), again(x, residual, memory, shift, i + 96, stop)
                j, k = number(p, inverse, limit, i, low, high), number(q, inverse, limit, i + 32, low, high)
                put(words, at, width, j, k)
                rest(residual, i, stop, p, j, step, levels)
                rest(residual, i + 32, stop, q, k, step, levels)
                if group + 64 < stop:
                    j, k = number(r, inverse, limit, i + 64, low, high), number(s, inverse, limit, i + 96, low, high)
                    put(words, at + width, width, j, k)
                    rest(residual, i + 64, stop, r, j, step, levels)
                    rest(residual, i + 96, stop, s, k, step, levels)
                at += 2 * width

    return encode


def _make_value(add, powers):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(old, bits, width, step, levels):  # type: ignore[no-untyped-def]
        """What the level number in the lowest ``width`` bits stands for."""
        number = np.int32(np.int32(bits << np.int32(32 - width)) >> np.int32(32 - width))
        multiple = _power(number, levels) if powers else np.float32(number)
        return cuda.fma(multiple, step, old) if add else multiple * step

    return value


@cuda.jit(device=True)
def _step(steps, b, most):  # type: ignore[no-untyped-def]
    return steps[b] if abs(steps[b]) <= most else np.float32(0)


def _reduce_rows(value):  # type: ignore[no-untyped-def]
    """An element of any block, whose address takes many operations."""

    @cuda.jit(device=True)
    def one(out, words, steps, block, width, levels, most, i):  # type: ignore[no-untyped-def]
        b = np.int64(np.uint32(i) // np.uint32(block))  # in 32 bits: a GPU divides 64 bits very slowly
        inside = i - b * block
        at = 2 * (b * ((block + 63) // 64) + inside // 64) * width + inside // 32 % 2
        bits = np.int32(0)
        for j in range(width):
            bits |= np.int32(np.int32((words[at + 2 * j] >> np.uint32(inside % 32)) & np.uint32(1)) << np.int32(j))
        return value(out[i], bits, width, _step(steps, b, most), levels)

    return one


@cuda.jit(device=True)
def _bit(words, at, j):  # type: ignore[no-untyped-def]
    """Bit j of a lane's level number, from the word that all lanes read."""
    return np.int32(np.int32((words[at] >> np.uint32(cuda.laneid)) & np.uint32(1)) << np.int32(j))


def _make_decode(add, powers):  # type: ignore[no-untyped-def]
    value = _make_value(add, powers)
    one = _reduce_rows(value)

    @cuda.jit(device=True)
    def four(out, words, step, width, levels, start):  # type: ignore[no-untyped-def]
        """128 elements of one block, whose words lie side by side."""
        at, i = start // 32 * width, start + cuda.laneid
        p, q, r, s = np.int32(0), np.int32(0), np.int32(0), np.int32(0)
        for j in range(width):
            p, q = p | _bit(words, at, j), q | _bit(words, at + 1, j)
            r, s = r | _bit(words, at + 2 * width, j), s | _bit(words, at + 2 * width + 1, j)
            at += 2
        a, b, c, d = out[i], out[i + 32], out[i + 64], out[i + 96]
        out[i], out[i + 32] = value(a, p, width, step, levels), value(b, q, width, step, levels)
        out[i + 64], out[i + 96] = value(c, r, width, step, levels), value(d, s, width, step, levels)

    @gpu.kernel("float32[::1], uint32[::1], float32[::1], int64, int64, int32, float32", add=add, powers=powers)
    def decode(out, words, steps, block, width, levels, most):  # type: ignore[no-untyped-def]
        whole = block % 128 == 0
        for start in range(cuda.grid(1) // 32 * 128, out.size, cuda.gridsize(1) // 32 * 128):
            if whole and start + 128 <= out.size:
                step = _step(steps, np.uint32(start) // np.uint32(block), most)
                four(out, words, step, width, levels, start)
            else:
                for i in range(start + cuda.laneid, min(start + 128, out.size), 32):
                    out[i] = one(out, words, steps, block, width, levels, most, i)

    return decode


_BOTH = (False, True)
_ENCODE = {
    (keep, powers, staged): _make_encode(keep, powers, staged) for keep in _BOTH for powers in _BOTH for staged in _BOTH
}
_DECODE = {(add, powers): _make_decode(add, powers) for add in _BOTH for powers in _BOTH}
