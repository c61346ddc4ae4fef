"""CUDA kernels of ``cpu.dct``: a block of threads takes a block of the format, each thread some of its sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from ..cpu import dct
from ..cpu.dct import ADD, MOST, STORE, SUBTRACT
from . import gpu
from .chunk_choice import threads_for


def forward(x: Any, residual: Any, out: Any, block: int) -> None:
    """As ``cpu.dct.forward``; the residual may be None."""
    grid = gpu.blocks(-(-x.size // block), 1)
    tables = _tables(x.size, block, 0)
    kept = x if residual is None else residual
    _FORWARD[residual is not None](grid, threads_for(block), x, kept, out, block, *tables)


def back(out: Any, coefficients: Any, block: int, how: int) -> None:
    """As ``cpu.dct.back``."""
    grid = gpu.blocks(-(-out.size // block), 1)
    _BACK[how](grid, threads_for(block), out, coefficients, block, *_tables(out.size, block, 1))


def _tables(n: int, block: int, direction: int) -> list[Any]:
    """The tables of a direction on the current GPU, copied there once for each stream."""
    found = []
    for table in dct.tables_of(n, block)[direction]:
        key = ("dct", direction, table.size)
        found.append(gpu.scratch(key, lambda table=table: gpu.sent(table)))  # type: ignore[misc]
    return found


def _make_forward(keep):  # type: ignore[no-untyped-def]
    @gpu.kernel("float32[::1], float32[::1], float32[::1], int64, float32[::1], float32[::1]", keep=keep)
    def forward(x, residual, out, block, whole, rest):  # type: ignore[no-untyped-def]
        values = cuda.shared.array(MOST, np.float32)
        for b in range(cuda.blockIdx.x, (x.size + block - 1) // block, cuda.gridDim.x):
            start, stop = b * block, min(x.size, (b + 1) * block)
            size = min(out.size, start + block) - start
            cuda.syncthreads()  # all have read what was there before
            for i in range(start + cuda.threadIdx.x, stop, cuda.blockDim.x):
                if keep:
                    residual[i] = gpu.sanitise(x[i] + residual[i])
                    values[i - start] = residual[i]
                else:
                    values[i - start] = gpu.sanitise(x[i])
            cuda.syncthreads()
            for j in range(cuda.threadIdx.x, size, cuda.blockDim.x):
                total = np.float32(0)
                if stop - start == block:
                    for i in range(stop - start):
                        total = cuda.fma(whole[i * size + j], values[i], total)
                else:
                    for i in range(stop - start):
                        total = cuda.fma(rest[i * size + j], values[i], total)
                out[start + j] = total

    return forward


def _make_back(how):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def put(out, i, value):  # type: ignore[no-untyped-def]
        if how == STORE:
            out[i] = value
        elif how == ADD:
            out[i] = out[i] + value
        else:
            out[i] = out[i] - value

    @gpu.kernel("float32[::1], float32[::1], int64, float32[::1], float32[::1]", how=how)
    def back(out, coefficients, block, whole, rest):  # type: ignore[no-untyped-def]
        for b in range(cuda.blockIdx.x, (out.size + block - 1) // block, cuda.gridDim.x):
            start, stop = b * block, min(out.size, (b + 1) * block)
            size = min(coefficients.size, start + block) - start
            for i in range(cuda.threadIdx.x, stop - start, cuda.blockDim.x):
                total = np.float32(0)
                for j in range(size):
                    coefficient = coefficients[start + j]
                    if coefficient != 0:
                        row = whole[j * size + i] if stop - start == block else rest[j * size + i]
                        total = cuda.fma(row, coefficient, total)
                put(out, start + i, gpu.sanitise(total * np.float32(size)))  # an exact product

    return back


_FORWARD = {keep: _make_forward(keep) for keep in (False, True)}
_BACK = {how: _make_back(how) for how in (STORE, ADD, SUBTRACT)}
