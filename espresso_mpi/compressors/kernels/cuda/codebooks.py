"""CUDA kernels of ``drive`` and ``eden``: rotated blocks quantised to the levels of a table.

With a residual its values are read twice, the second time from the cache. The decoded value goes through shared memory
before it is subtracted: otherwise the compiler would fuse its product with the difference, and round once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from ..cpu import host
from . import gpu
from .rotations import (
    LOADS,
    PUTS,
    RESIDENT,
    ROOM,
    WARPS,
    block_size,
    is_tiny,
    place,
    power_down,
    power_up,
    rotate,
    scale_back,
    shared_sum,
    square_sum,
    transform,
)

_TABLE = 15  # the most levels, and the thresholds between them


def encode(
    x: Any,
    residual: Any,
    seed: Any,
    planes: Any,
    scales: Any,
    block: int,
    bits: int,
    unbiased: bool,
    table: Any,
    key: int,
) -> None:
    """Quantise ``x`` (+ ``residual``, unless it is None) to the levels of a table; ``planes`` as uint32."""
    kept, grid = x if residual is None else residual, gpu.blocks(scales.size, 1, RESIDENT)
    arrays = (x, kept, seed, planes, scales, _on_device(table))
    _ENCODE[residual is not None](grid, gpu.THREADS, *arrays, block, bits, unbiased, *host.key_words(key))


def decode(seed: Any, planes: Any, scales: Any, out: Any, block: int, bits: int, table: Any, add: bool) -> None:
    """Write the values of the levels into ``out``, or add them to it."""
    grid = gpu.blocks(scales.size, 1)
    _DECODE[add](grid, gpu.THREADS, out, seed, planes, scales, _on_device(table), block, bits)


def _on_device(table: np.ndarray) -> Any:
    """A small constant array on the current GPU, copied there once for each stream."""
    return gpu.scratch(("table", table.tobytes()), lambda: gpu.sent(table))


@cuda.jit(device=True)
def _fill_table(table, levels):  # type: ignore[no-untyped-def]
    """Spread a table to 8 levels and 7 thresholds: those that it does not have are never reached."""
    k, count = cuda.threadIdx.x, (levels.size + 1) >> 1
    if k < count:
        table[k] = levels[k]
    if k >= 8 and k < 15:
        table[k] = levels[count + k - 8] if count + k - 8 < levels.size else np.float32(np.inf)
    cuda.syncthreads()


@cuda.jit(device=True)
def _number(magnitude, table):  # type: ignore[no-untyped-def]
    """How many of the thresholds are at most the magnitude: binary search."""
    number = 12 if magnitude >= table[11] else 8
    number += 2 if magnitude >= table[np.uint32(number + 1)] else 0
    number += 1 if magnitude >= table[np.uint32(number)] else 0
    return number - 8


@cuda.jit(device=True)
def _write_bits(planes, i, bits, number, negative):  # type: ignore[no-untyped-def]
    """The words of the group of 64 that element i, in this lane, belongs to: half of each."""
    at = np.uint32(2 * bits * (i >> 6) + ((i >> 5) & 1))
    _write_word(planes, at, negative)
    if bits == 2:
        _write_word(planes, at + np.uint32(2), number == 1)
    elif bits == 3:
        _write_word(planes, at + np.uint32(2), number >= 2)
        _write_word(planes, at + np.uint32(4), number & 1 != 0)
    elif bits == 4:
        _write_word(planes, at + np.uint32(2), number >= 4)
        _write_word(planes, at + np.uint32(4), number & 2 != 0)
        _write_word(planes, at + np.uint32(6), number & 1 != 0)


@cuda.jit(device=True)
def _write_word(planes, at, bit):  # type: ignore[no-untyped-def]
    word = gpu.ballot(bit)
    if cuda.laneid == 0:
        planes[at] = word


@cuda.jit(device=True)
def _quantise(work, codes, start, size, bits, inverse, table, planes):  # type: ignore[no-untyped-def]
    i = np.uint32(cuda.threadIdx.x)
    while i < size:
        w = work[place(i)]
        number = _number(abs(w) * inverse, table)
        level = table[np.uint32(number)]
        codes[place(i)] = -level if w < 0 else level
        _write_bits(planes, start + i, bits, number, w < 0)
        i = np.uint32(i + cuda.blockDim.x)
    cuda.syncthreads()


@cuda.jit(device=True)
def _level_sums(work, codes, size, totals):  # type: ignore[no-untyped-def]
    """The sums of ``|work · codes|`` and, in ``totals[1]``, of ``codes²``, in the same order."""
    low, high, low_squares, high_squares = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    if cuda.threadIdx.x < 32:
        for i in range(cuda.threadIdx.x, size, 64):
            p, q = abs(codes[place(i)]), abs(codes[place(i + 32)])
            low, high = cuda.fma(p, abs(work[place(i)]), low), cuda.fma(q, abs(work[place(i + 32)]), high)
            low_squares, high_squares = cuda.fma(p, p, low_squares), cuda.fma(q, q, high_squares)
    squares = gpu.warp_sum(low_squares + high_squares)
    if cuda.threadIdx.x == 0:
        totals[1] = squares
    return shared_sum(totals, low, high)


@cuda.jit(device=True)
def _code(work, codes, start, size, bits, unbiased, power, table, planes, totals):  # type: ignore[no-untyped-def]
    """As ``cpu.codebooks._code``, with the levels in ``codes``."""
    count = np.float32(size)
    squares, inverse = np.float32(1), np.float32(1)
    if unbiased or bits > 1:
        squares = square_sum(work, size, np.float32(1), totals)
        inverse = np.float32(math.sqrt(count / squares))
    _quantise(work, codes, start, size, bits, inverse, table, planes)
    products = _level_sums(work, codes, size, totals)
    factor = squares / products if unbiased else products / totals[1]
    return factor * (power / count)


def _make_encode(keep):  # type: ignore[no-untyped-def]
    value, load = LOADS[keep]
    arrays = "float32[::1], float32[::1], uint32[::1], uint32[::1], float32[::1], float32[::1]"

    @gpu.kernel(arrays + ", int64, int64, boolean, uint32, uint32", keep=keep)
    def encode(x, residual, seed, planes, scales, levels, block, bits, unbiased, low, high):  # type: ignore[no-untyped-def]
        work = cuda.shared.array(ROOM, np.float32)
        codes = cuda.shared.array(ROOM, np.float32)
        tops = cuda.shared.array(WARPS, np.float32)
        totals = cuda.shared.array(2, np.float32)
        table = cuda.shared.array(_TABLE, np.float32)
        _fill_table(table, levels)
        bound = levels[levels.size >> 1]
        if cuda.grid(1) == 0:
            seed[0] = low
            seed[1] = high
        for b in range(cuda.blockIdx.x, scales.size, cuda.gridDim.x):
            start, stop = b * block, min(x.size, (b + 1) * block)
            size = block_size(stop - start, block)
            top, scale = load(x, residual, start, stop, size, work, tops), np.float32(0)
            if is_tiny(top):
                i = np.uint32(cuda.threadIdx.x)
                while i < (size >> 5) * bits:
                    planes[np.uint64((start >> 5) * bits + i)] = np.uint32(0)
                    i = np.uint32(i + cuda.blockDim.x)
                i = np.uint32(cuda.threadIdx.x)
                while i < size:
                    codes[place(i)] = np.float32(0)
                    i = np.uint32(i + cuda.blockDim.x)
            else:
                rotate(work, start, size, power_down(top), low, high)
                scale = _code(work, codes, start, size, bits, unbiased, power_up(top), table, planes, totals)
                if keep:
                    transform(codes, size)
                    scale_back(codes, start, size, scale, bound * np.float32(size), low, high)
            if keep:
                i = np.uint32(cuda.threadIdx.x)
                while i < stop - start:
                    residual[np.uint64(start + i)] = value(x, residual, start + i, stop) - codes[place(i)]
                    i = np.uint32(i + cuda.blockDim.x)
            if cuda.threadIdx.x == 0:
                scales[b] = scale
            cuda.syncthreads()

    return encode


def _make_decode(add):  # type: ignore[no-untyped-def]
    put = PUTS[add]

    @cuda.jit(device=True)
    def level(planes, i, bits, table):  # type: ignore[no-untyped-def]
        first, lane = 2 * bits * (i >> 6) + ((i >> 5) & 1), np.uint32(i & 31)
        number = 0
        for k in range(1, bits):
            number = 2 * number + ((planes[np.uint64(first + 2 * k)] >> lane) & 1)
        found = table[np.uint32(number)]
        return -found if (planes[np.uint64(first)] >> lane) & np.uint32(1) else found

    arrays = "float32[::1], uint32[::1], uint32[::1], float32[::1], float32[::1]"

    @gpu.kernel(arrays + ", int64, int64", add=add)
    def decode(out, seed, planes, scales, table, block, bits):  # type: ignore[no-untyped-def]
        work = cuda.shared.array(ROOM, np.float32)
        low, high = seed[0], seed[1]
        for b in range(cuda.blockIdx.x, scales.size, cuda.gridDim.x):
            start, stop = b * block, min(out.size, (b + 1) * block)
            size = block_size(stop - start, block)
            i = np.uint32(cuda.threadIdx.x)
            while i < size:
                work[place(i)] = level(planes, start + i, bits, table)
                i = np.uint32(i + cuda.blockDim.x)
            transform(work, size)
            bound = table[table.size // 2] * np.float32(size)
            put(out, work, start, stop, size, scales[b], bound, low, high)
            cuda.syncthreads()

    return decode


_ENCODE = {keep: _make_encode(keep) for keep in (False, True)}
_DECODE = {add: _make_decode(add) for add in (False, True)}
