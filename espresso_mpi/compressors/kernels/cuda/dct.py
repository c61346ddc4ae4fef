"""CUDA kernels of ``cpu.dct``: a product of matrices, in tiles of whole blocks of the format.

A thread has the sums of eight blocks at four places each in registers, so that a value from shared memory serves four
of them and one of the table eight. The table is read through the cache. The values lie transposed: those of a place,
of all blocks of the tile, are neighbours, with a word left out behind them, which keeps the places in different banks.
Blocks of 1 or 2, and the last one if it is cut short, are summed one place in a thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from ..cpu import dct
from ..cpu.dct import ADD, MOST, STORE, SUBTRACT
from . import gpu

_ROWS, _SUMS = 8, 32
"""Blocks of which a thread sums four places each, and sums that this makes."""

_ROOM = _SUMS * gpu.THREADS + MOST
"""Elements of a tile, and those left out."""


def forward(x: Any, residual: Any, out: Any, block: int) -> None:
    """As ``cpu.dct.forward``; the residual may be None."""
    tables, kept = _tables(x.size, block, 0), x if residual is None else residual
    _FORWARD[residual is not None](_grid(x.size, block), gpu.THREADS, x, kept, out, block, *tables)


def back(out: Any, coefficients: Any, block: int, how: int) -> None:
    """As ``cpu.dct.back``."""
    _BACK[how](_grid(out.size, block), gpu.THREADS, out, coefficients, block, *_tables(out.size, block, 1))


def _grid(n: int, block: int) -> int:
    """How many blocks of threads; registers and shared memory leave room for four on a multiprocessor."""
    return gpu.blocks(n, _SUMS * gpu.THREADS if block >= 4 else block, 4)


def _tables(n: int, block: int, direction: int) -> list[Any]:
    """The tables of a direction on the current GPU, copied there once for each stream; that of whole blocks twice."""
    whole, rest = dct.tables_of(n, block)[direction]
    made = {"pairs": lambda: _pairs(whole, block), "whole": lambda: whole, "rest": lambda: rest}
    sizes = {"pairs": whole.size, "whole": whole.size, "rest": rest.size}
    found = []
    for name, make in made.items():
        key = ("dct", direction, name == "pairs", sizes[name])
        found.append(gpu.scratch(key, lambda make=make: gpu.sent(make())))  # type: ignore[misc]
    return found


def _pairs(table: np.ndarray, block: int) -> np.ndarray:
    """A table whose columns j and j + block/4, and so on, are neighbours, two in a word: half the loads."""
    if block < 4:
        return np.zeros(1, np.uint64)
    rows = table.reshape(block, 2, 2, block // 4).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(rows).view(np.uint64).reshape(-1)


# --- tiles ------------------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _log(size):  # type: ignore[no-untyped-def]
    """Of a power of two."""
    return np.uint32(cuda.popc(np.uint32(size - 1)))


@cuda.jit(device=True)
def _place(e, block, stride):  # type: ignore[no-untyped-def]
    """Where element e of a tile lies. The mask tells the compiler that this is no shift of 64 bits."""
    row = np.uint32(e >> np.uint32(_log(block) & np.uint32(31)))
    return np.uint32(np.uint32(np.uint32(e & np.uint32(block - 1)) * stride) + row)


def _make_load(value, keep):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def load(x, residual, start, size, block, stride, values):  # type: ignore[no-untyped-def]
        """A tile of ``size`` elements, and zeros behind; four loads are under way before the first is waited for."""
        four, e, step = cuda.local.array(4, np.float32), np.uint32(cuda.threadIdx.x), np.uint32(cuda.blockDim.x)
        for _ in range(_SUMS // 4):
            for r in range(4):
                f = np.uint32(e + np.uint32(np.uint32(r) * step))
                four[r] = value(x, residual, np.uint32(start + f)) if f < size else np.float32(0)
            for r in range(4):
                f = np.uint32(e + np.uint32(np.uint32(r) * step))
                values[_place(f, block, stride)] = four[r]
                if keep and f < size:
                    residual[np.uint32(start + f)] = four[r]
            e = np.uint32(e + np.uint32(4) * step)

    return load


def _make_multiply(skip):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def add(sums, r, a, b, c, d, value):  # type: ignore[no-untyped-def]
        sums[4 * r] = cuda.fma(a, value, sums[4 * r])
        sums[4 * r + 1] = cuda.fma(b, value, sums[4 * r + 1])
        sums[4 * r + 2] = cuda.fma(c, value, sums[4 * r + 2])
        sums[4 * r + 3] = cuda.fma(d, value, sums[4 * r + 3])

    @cuda.jit(device=True)
    def multiply(values, stride, pairs, block, row, column, sums):  # type: ignore[no-untyped-def]
        """``sums[4·r + c] = Σᵢ table[i, column + c·block/4] · values[i, row + r]``, in order of i."""
        half, quarter = np.uint32(block // 2), np.uint32(block // 4)
        entry, place = np.uint32(column), np.uint64(row)
        for k in range(_SUMS):
            sums[k] = np.float32(0)
        end = np.uint32(entry + np.uint32(half * block))
        while entry < end:  # and not for a count of rows, or the compiler would unroll it into too many registers
            p, q = pairs[entry], pairs[np.uint32(entry + quarter)]
            a, b = gpu.bits_float(np.uint32(p)), gpu.bits_float(np.uint32(p >> np.uint64(32)))
            c, d = gpu.bits_float(np.uint32(q)), gpu.bits_float(np.uint32(q >> np.uint64(32)))
            for r in range(_ROWS):
                value = values[np.uint64(place + np.uint64(r))]
                # To add a product that is zero would turn a sum of -0 into +0.
                if not skip or value != 0:
                    add(sums, r, a, b, c, d, value)
            entry, place = np.uint32(entry + half), np.uint64(place + np.uint64(stride))

    return multiply


def _make_tiles(load, multiply, put):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def tiles(source, residual, out, block, whole, pairs, values, sums):  # type: ignore[no-untyped-def]
        """The first ``whole`` blocks."""
        bits, t = _log(block), np.uint32(cuda.threadIdx.x)
        rows = np.int64((_SUMS * cuda.blockDim.x) >> bits)
        stride, quarter = np.uint32(rows + 1), np.uint32(block // 4)
        column, row = np.uint32(t & np.uint32(quarter - 1)), np.uint32(np.uint32(t >> (bits - 2)) * _ROWS)
        for first in range(cuda.blockIdx.x * rows, whole, cuda.gridDim.x * rows):
            start, count = np.uint32(first * block), np.uint32(min(rows, whole - first))
            cuda.syncthreads()  # all have read what was there before
            load(source, residual, start, np.uint32(count * block), np.uint32(block), stride, values)
            cuda.syncthreads()
            multiply(values, stride, pairs, block, row, column, sums)
            i = np.uint32(start + np.uint32(row * np.uint32(block) + column))
            for r in range(_ROWS):
                if np.uint32(row + r) < count:
                    put(out, i, quarter, sums, r, np.float32(block))
                i = np.uint32(i + np.uint32(block))

    return tiles


# --- forward ----------------------------------------------------------------------------------------------------------


def _reduce_rows(value, keep):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def one(x, residual, out, start, stop, block, table, values):  # type: ignore[no-untyped-def]
        """A block that may be cut short."""
        size = min(out.size - start, block)
        cuda.syncthreads()  # all have read what was there before
        for i in range(start + cuda.threadIdx.x, stop, cuda.blockDim.x):
            values[i - start] = value(x, residual, i)
            if keep:
                residual[i] = values[i - start]
        cuda.syncthreads()
        for j in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            total = np.float32(0)
            for i in range(stop - start):
                total = cuda.fma(table[i * size + j], values[i], total)
            out[start + j] = total

    return one


def _make_forward(keep):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(x, residual, i):  # type: ignore[no-untyped-def]
        return gpu.sanitise(x[i] + residual[i] if keep else x[i])

    @cuda.jit(device=True)
    def put(out, i, quarter, sums, r, size):  # type: ignore[no-untyped-def]
        """Four places of a block."""
        for c in range(4):
            out[np.uint32(i + np.uint32(c * quarter))] = sums[4 * r + c]

    one = _reduce_rows(value, keep)
    tiles = _make_tiles(_make_load(value, keep), _make_multiply(False), put)

    @gpu.kernel("float32[::1], float32[::1], float32[::1], int64, uint64[::1], float32[::1], float32[::1]", keep=keep)
    def forward(x, residual, out, block, pairs, whole, rest):  # type: ignore[no-untyped-def]
        values = cuda.shared.array(_ROOM, np.float32)
        sums = cuda.local.array(_SUMS, np.float32)
        done = x.size // block if block >= 4 else 0
        tiles(x, residual, out, block, done, pairs, values, sums)
        for b in range(done + cuda.blockIdx.x, (x.size + block - 1) // block, cuda.gridDim.x):
            start, stop = b * block, min(x.size, (b + 1) * block)
            one(x, residual, out, start, stop, block, whole if stop - start == block else rest, values)

    return forward


# --- back -------------------------------------------------------------------------------------------------------------


def _make_put(how):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def combined(before, total, size):  # type: ignore[no-untyped-def]
        value = gpu.sanitise(total * size)  # an exact product
        if how == STORE:
            return value
        return before + value if how == ADD else before - value

    @cuda.jit(device=True)
    def before(out, i):  # type: ignore[no-untyped-def]
        return np.float32(0) if how == STORE else out[i]

    @cuda.jit(device=True)
    def put_four(out, i, quarter, sums, r, size):  # type: ignore[no-untyped-def]
        """Four places of a block; all are read before one is written."""
        j, k, m = np.uint32(i + quarter), np.uint32(i + 2 * quarter), np.uint32(i + 3 * quarter)
        a, b, c, d = before(out, i), before(out, j), before(out, k), before(out, m)
        out[i], out[j] = combined(a, sums[4 * r], size), combined(b, sums[4 * r + 1], size)
        out[k], out[m] = combined(c, sums[4 * r + 2], size), combined(d, sums[4 * r + 3], size)

    return combined, before, put_four


def _make_back(how):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def coefficient(coefficients, residual, i):  # type: ignore[no-untyped-def]
        return coefficients[i]

    combined, before, put_four = _make_put(how)
    tiles = _make_tiles(_make_load(coefficient, False), _make_multiply(True), put_four)

    @cuda.jit(device=True)
    def one(out, coefficients, start, stop, block, table):  # type: ignore[no-untyped-def]
        """A block that may be cut short."""
        size = min(coefficients.size - start, block)
        for i in range(cuda.threadIdx.x, stop - start, cuda.blockDim.x):
            total = np.float32(0)
            for j in range(size):
                if coefficients[start + j] != 0:
                    total = cuda.fma(table[j * size + i], coefficients[start + j], total)
            out[start + i] = combined(before(out, start + i), total, np.float32(size))

    @gpu.kernel("float32[::1], float32[::1], int64, uint64[::1], float32[::1], float32[::1]", how=how)
    def back(out, coefficients, block, pairs, whole, rest):  # type: ignore[no-untyped-def]
        values = cuda.shared.array(_ROOM, np.float32)
        sums = cuda.local.array(_SUMS, np.float32)
        done = out.size // block if block >= 4 else 0
        tiles(coefficients, coefficients, out, block, done, pairs, values, sums)
        for b in range(done + cuda.blockIdx.x, (out.size + block - 1) // block, cuda.gridDim.x):
            start, stop = b * block, min(out.size, (b + 1) * block)
            one(out, coefficients, start, stop, block, whole if stop - start == block else rest)

    return back


_FORWARD = {keep: _make_forward(keep) for keep in (False, True)}
_BACK = {how: _make_back(how) for how in (STORE, ADD, SUBTRACT)}
