"""CUDA kernels of ``thc``: rotated blocks rounded to integers that add up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from ..cpu import host
from ..cpu.rotations import count
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
    square_sum,
    transform,
)

_MAGIC = np.float32(12582912.0)
_SMALLEST_NORM = np.float32(1e-33)  # these as in ``thc``
_MOST = np.float32(1e30)


def summarise(x: Any, residual: Any, norms: Any, block: int) -> None:
    """Leave ``x + residual`` in ``residual``, unless it is None, and write the root mean squares of the blocks."""
    kept, grid = x if residual is None else residual, gpu.blocks(norms.size, 1, RESIDENT)
    _SUMMARISE[residual is not None](grid, gpu.THREADS, x, kept, norms, block)


def encode(arrays: tuple[Any, ...], block: int, rules: tuple[np.float32, ...], keys: tuple[int, int]) -> None:
    """Quantise ``x``, or ``residual`` unless it is None, to the integers that add up.

    Args:
        arrays: x, residual, the agreed norms, and the payload's seed, norms and codes.
        rules: the largest code, what a code of 1 stands for, and what no code of a sum exceeds.
        keys: of the rotation, and of the rounding.
    """
    x, residual, summary, seed, norms, codes = arrays
    kept, grid = x if residual is None else residual, gpu.blocks(summary.size, 1, RESIDENT)
    kernel = _ENCODE[residual is not None, codes.dtype.itemsize]
    words = (*host.key_words(keys[0]), *host.key_words(keys[1]))
    kernel(grid, gpu.THREADS, x, kept, summary, seed, norms, codes, block, *rules, *words)


def decode(
    seed: Any, norms: Any, codes: Any, out: Any, block: int, unit: np.float32, most: np.float32, add: bool
) -> None:
    """Write the values of the integers into ``out``, or add them to it."""
    kernel = _DECODE[add, codes.dtype.itemsize]
    grid = gpu.blocks(count(out.size, block), 1, RESIDENT)
    kernel(grid, gpu.THREADS, out, seed, norms, codes, block, unit, most)


def _make_summarise(keep):  # type: ignore[no-untyped-def]
    _, load = LOADS[keep]

    @gpu.kernel("float32[::1], float32[::1], float32[::1], int64", keep=keep)
    def summarise(x, residual, norms, block):  # type: ignore[no-untyped-def]
        work = cuda.shared.array(ROOM, np.float32)
        tops = cuda.shared.array(WARPS, np.float32)
        totals = cuda.shared.array(2, np.float32)
        for b in range(cuda.blockIdx.x, norms.size, cuda.gridDim.x):
            start, stop = b * block, min(x.size, (b + 1) * block)
            size = block_size(stop - start, block)
            top, norm = load(x, residual, start, stop, size, work, tops), np.float32(0)
            if not is_tiny(top):
                mean = square_sum(work, size, power_down(top), totals) / np.float32(size)
                norm = np.float32(math.sqrt(mean)) * power_up(top)
            if keep:
                i = np.uint32(cuda.threadIdx.x)
                while i < stop - start:
                    residual[np.uint64(start + i)] = work[place(i)]
                    i = np.uint32(i + cuda.blockDim.x)
            if cuda.threadIdx.x == 0:
                norms[b] = norm
            cuda.syncthreads()

    return summarise


@cuda.jit(device=True)
def _agreed(norm):  # type: ignore[no-untyped-def]
    """As ``thc._agreed``."""
    norm = gpu.sanitise(norm)
    return norm if norm >= _SMALLEST_NORM else np.float32(0)


@cuda.jit(device=True)
def _root(size):  # type: ignore[no-untyped-def]
    return np.float32(math.sqrt(np.float32(size)))


@cuda.jit(device=True)
def _round(work, codes, start, size, factor, levels, low, high):  # type: ignore[no-untyped-def]
    """As ``thc._round``."""
    i = np.uint32(cuda.threadIdx.x)
    while i < size:
        u = gpu.uniform(gpu.counter(start + i, low), high)
        noise = cuda.fma(np.float32(2), u, np.float32(-1)) * np.float32(0.5)  # u - ½, and no product left to fuse
        noisy = min(max(cuda.fma(work[place(i)], factor, noise), -levels), levels)
        code = noisy + _MAGIC - _MAGIC
        codes[np.uint64(start + i)] = np.int32(code)
        work[place(i)] = code
        i = np.uint32(i + cuda.blockDim.x)


def _make_encode(keep, width):  # type: ignore[no-untyped-def]
    _, load = LOADS[False]
    arrays = f"float32[::1], float32[::1], float32[::1], uint32[::1], float32[::1], int{8 * width}[::1]"
    numbers = "int64, float32, float32, float32, uint32, uint32, uint32, uint32"

    @gpu.kernel(f"{arrays}, {numbers}", keep=keep, width=width)
    def encode(x, residual, summary, seed, norms, codes, block, levels, unit, most, low, high, key_low, key_high):  # type: ignore[no-untyped-def]
        work = cuda.shared.array(ROOM, np.float32)
        tops = cuda.shared.array(WARPS, np.float32)
        if cuda.grid(1) < 4:
            seed[cuda.grid(1)] = (low if cuda.grid(1) == 0 else high) if cuda.grid(1) < 2 else np.uint32(0)
        if summary.size + cuda.grid(1) < norms.size:
            norms[summary.size + cuda.grid(1)] = np.float32(0)
        for b in range(cuda.blockIdx.x, summary.size, cuda.gridDim.x):
            start, stop = b * block, min(x.size, (b + 1) * block)
            size, norm = block_size(stop - start, block), _agreed(summary[b])
            step = norm * unit
            # With a residual the sum is there: ``summarise`` has left it.
            top = load(residual if keep else x, residual, start, stop, size, work, tops)
            if is_tiny(top) or step == 0:
                i = np.uint32(cuda.threadIdx.x)
                while i < size:
                    codes[np.uint64(start + i)] = 0
                    i = np.uint32(i + cuda.blockDim.x)
            else:
                rotate(work, start, size, power_down(top), low, high)
                factor = min(power_up(top) / step / _root(size), _MOST)
                _round(work, codes, start, size, factor, levels, key_low, key_high)
                if keep:
                    transform(work, size)
                    scale_back(work, start, size, step / _root(size), most * np.float32(size), low, high)
                    i = np.uint32(cuda.threadIdx.x)
                    while i < stop - start:
                        residual[np.uint64(start + i)] -= work[place(i)]
                        i = np.uint32(i + cuda.blockDim.x)
            if cuda.threadIdx.x == 0:
                norms[b] = norm
            cuda.syncthreads()

    return encode


def _make_decode(add, width):  # type: ignore[no-untyped-def]
    put = PUTS[add]
    arrays = f"float32[::1], uint32[::1], float32[::1], int{8 * width}[::1]"

    @gpu.kernel(arrays + ", int64, float32, float32", add=add, width=width)
    def decode(out, seed, norms, codes, block, unit, most):  # type: ignore[no-untyped-def]
        work = cuda.shared.array(ROOM, np.float32)
        low, high = seed[0], seed[1]
        for b in range(cuda.blockIdx.x, (out.size + block - 1) // block, cuda.gridDim.x):
            start, stop = b * block, min(out.size, (b + 1) * block)
            size = block_size(stop - start, block)
            i = np.uint32(cuda.threadIdx.x)
            while i < size:
                work[place(i)] = np.float32(codes[np.uint64(start + i)])
                i = np.uint32(i + cuda.blockDim.x)
            transform(work, size)
            scale = norms[b] * unit / _root(size)
            put(out, work, start, stop, size, scale, most * np.float32(size), low, high)
            cuda.syncthreads()

    return decode


_SUMMARISE = {keep: _make_summarise(keep) for keep in (False, True)}
_ENCODE = {(keep, width): _make_encode(keep, width) for keep in (False, True) for width in (1, 2)}
_DECODE = {(add, width): _make_decode(add, width) for add in (False, True) for width in (1, 2)}
