"""CUDA kernels of the low-rank methods; sums in the order that ``cpu.matrices`` fixes.

A row times a vector is a warp's work, a lane for each of the LANES. For sums over columns a thread takes a column of a
CHUNK of rows, and a second kernel adds the chunks. Factors are made orthonormal by one block: a warp for each product
of two vectors, a thread for each element of a difference.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from espresso_mpi.compressors.context import Context

from ..cpu.lowrank import ADD
from ..cpu.matrices import CHUNK, GROUP, LARGEST_RANK, Matrix
from ..cpu.orthonormal import INDEPENDENT
from . import gpu

_PRODUCTS = LARGEST_RANK + 1
"""Products that a block keeps: one more, for warps that have none to do."""

_BEYOND = 2.0**300
_CHUNK_OF_P = GROUP * CHUNK


def orthonormalise(
    source: Any, target: Any, ranks: int, length: int, fill: bool, low: np.uint32, high: np.uint32
) -> None:
    """As ``cpu.orthonormal.orthonormalise``."""
    _orthonormalise(1, 2 * gpu.THREADS, source, target, ranks, length, fill, low, high, INDEPENDENT)


def project_rows(x: Any, residual: Any, q: Any, m: Matrix, out: Any, how: int, subtract: bool) -> None:
    """As in ``cpu.orthonormal``."""
    source = x if residual is None else residual
    for first in range(0, m.rank, GROUP):
        kernel = _PROJECT_ROWS[first == 0 and how == ADD and residual is not None]
        grid = gpu.blocks(m.rows, gpu.THREADS // gpu.LANES)
        kernel(grid, gpu.THREADS, x, source, q, out, m.cols, m.rows, first, m.rank)
    if subtract and residual is not None:
        outer(out, q, m, residual, True, -1.0)


def project_columns(
    x: Any, residual: Any, p: Any, m: Matrix, out: Any, how: int, subtract: bool, context: Context
) -> None:
    """As in ``cpu.orthonormal``."""
    source = x if residual is None else residual
    if residual is not None and how == ADD:
        _settle(gpu.blocks(x.size, gpu.TILE), gpu.THREADS, residual, x)
    chunks = -(-m.rows // CHUNK)
    parts = context.scratch("parts", chunks * GROUP * m.cols, np.float32, x)
    for first in range(0, m.rank, GROUP):
        _project_columns(_tiles(m), gpu.THREADS, source, p, parts, m.cols, m.rows, first)
        sums = out[first * m.cols : min(m.rank, first + GROUP) * m.cols]
        _add_chunks(gpu.blocks(sums.size, gpu.THREADS), gpu.THREADS, parts, sums, GROUP * m.cols)
    if subtract and residual is not None:
        outer(p, out, m, residual, True, -1.0)


def outer(p: Any, q: Any, m: Matrix, out: Any, add: bool, sign: float = 1.0) -> None:
    """As in ``cpu.orthonormal``."""
    _OUTER[add, False](_tiles(m), gpu.THREADS, out, p, q, p, m.cols, m.rows, m.rank, np.float32(sign))


def outer_by_turns(first: Any, given: Any, other: Any, m: Matrix, out: Any, add: bool) -> None:
    """The same with P given if ``first[0]`` is not 0, else Q."""
    _OUTER[add, True](_tiles(m), gpu.THREADS, out, other, given, first, m.cols, m.rows, m.rank, np.float32(1))


def write_header(factor: Any, header: Any, start: int, first: float) -> None:
    """As in ``cpu.orthonormal``."""
    grid = gpu.blocks(header.size, gpu.THREADS)
    _write_header(grid, gpu.THREADS, header, factor, start, np.float32(first))


def keep(factor: Any, kept: Any) -> None:
    """As in ``cpu.orthonormal``."""
    _keep(gpu.blocks(kept.size, gpu.THREADS), gpu.THREADS, kept, factor)


def _tiles(m: Matrix) -> int:
    """Blocks for pieces of as many columns as a block has threads, and CHUNK rows."""
    return gpu.blocks(-(-m.cols // gpu.THREADS) * -(-m.rows // CHUNK), 1)


# --- factors ----------------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _product(a, b):  # type: ignore[no-untyped-def]
    """The product of two sanitised float32, exact; ``min`` changes nothing but keeps it from being fused with a sum."""
    return min(np.float64(a) * np.float64(b), np.float64(_BEYOND))


@cuda.jit(device=True)
def _products(a, i, j):  # type: ignore[no-untyped-def]
    """Products of elements that are 32 apart."""
    p, q = _product(a[i], a[j]), _product(a[i + 32], a[j + 32])
    return p, q, _product(a[i + 64], a[j + 64]), _product(a[i + 96], a[j + 96])


@cuda.jit(device=True)
def _dot(a, i, j, length):  # type: ignore[no-untyped-def]
    """The product of two vectors of a, which begin at i and j, in every lane of a warp.

    One block makes all products, so that nothing else hides how long memory takes: many loads are under way.
    """
    at, total = cuda.laneid, np.float64(0)
    while at + 224 < length:
        p, q, r, s = _products(a, i + at, j + at)
        t, u, v, w = _products(a, i + at + 128, j + at + 128)
        total = total + p + q + r + s + t + u + v + w
        at += 256
    while at < length:
        total = total + _product(a[i + at], a[j + at])
        at += 32
    return gpu.warp_sum(total)


@cuda.jit(device=True)
def _normalised(a, i, length, least):  # type: ignore[no-untyped-def]
    norm = math.sqrt(_dot(a, i, i, length))
    cuda.syncthreads()
    if not norm > least:
        return False
    for at in range(i + cuda.threadIdx.x, i + length, cuda.blockDim.x):
        a[at] = np.float32(np.float64(a[at]) / norm)
    cuda.syncthreads()
    return True


@cuda.jit(device=True)
def _without_others(a, vector, length, products):  # type: ignore[no-untyped-def]
    warps, warp = cuda.blockDim.x // 32, cuda.threadIdx.x // 32
    for first in range(0, vector, warps):  # every warp goes as often, or the simulator's barriers would not meet
        k = min(first + warp, vector)
        product = _dot(a, vector * length, k * length, length)
        if cuda.laneid == 0:
            products[k] = np.float32(product)
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, length, cuda.blockDim.x):
        rest = np.float64(a[vector * length + i])
        for k in range(vector):
            rest -= _product(products[k], a[k * length + i])
        a[vector * length + i] = np.float32(rest)
    cuda.syncthreads()


@cuda.jit(device=True)
def _independent(a, vector, length, products, least):  # type: ignore[no-untyped-def]
    if not _normalised(a, vector * length, length, 0.0):
        return False
    for _ in range(2):
        _without_others(a, vector, length, products)
        if not _normalised(a, vector * length, length, least):
            return False
    return True


@cuda.jit(device=True)
def _randomise(a, i, length, low, high):  # type: ignore[no-untyped-def]
    for at in range(i + cuda.threadIdx.x, i + length, cuda.blockDim.x):
        a[at] = cuda.fma(np.float32(2), gpu.uniform(gpu.counter(at, low), high), np.float32(-1))
    cuda.syncthreads()


@gpu.kernel("float32[::1], float32[::1], int64, int64, boolean, uint32, uint32, float64")
def _orthonormalise(source, target, ranks, length, fill, low, high, least):  # type: ignore[no-untyped-def]
    """One block."""
    products = cuda.shared.array(_PRODUCTS, np.float32)
    for j in range(ranks):
        start, stop = j * length, (j + 1) * length
        for at in range(start + cuda.threadIdx.x, stop, cuda.blockDim.x):
            target[at] = gpu.sanitise(source[at])
        cuda.syncthreads()
        good = _independent(target, j, length, products, least)
        if fill and not good:
            _randomise(target, start, length, low, high)
            good = _independent(target, j, length, products, least)
        if not good:
            for at in range(start + cuda.threadIdx.x, stop, cuda.blockDim.x):
                target[at] = np.float32(0)
            cuda.syncthreads()
    for at in range(ranks * length + cuda.threadIdx.x, target.size, cuda.blockDim.x):
        target[at] = np.float32(0)


# --- products ---------------------------------------------------------------------------------------------------------


@gpu.kernel("float32[::1], float32[::1]")
def _settle(kept, x):  # type: ignore[no-untyped-def]
    step = cuda.gridsize(1)
    i = cuda.grid(1)
    while i + 3 * step < kept.size:
        p, q, r, s = kept[i] + x[i], kept[i + step] + x[i + step], kept[i + 2 * step] + x[i + 2 * step], np.float32(0)
        s = kept[i + 3 * step] + x[i + 3 * step]
        kept[i], kept[i + step] = gpu.sanitise(p), gpu.sanitise(q)
        kept[i + 2 * step], kept[i + 3 * step] = gpu.sanitise(r), gpu.sanitise(s)
        i += 4 * step
    while i < kept.size:
        kept[i] = gpu.sanitise(kept[i] + x[i])
        i += step


def _make_project_rows(adding):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(x, source, i):  # type: ignore[no-untyped-def]
        return gpu.sanitise(source[i] + x[i] if adding else source[i])

    @cuda.jit(device=True)
    def write(out, at, total):  # type: ignore[no-untyped-def]
        total = gpu.sanitise(gpu.warp_sum(total))
        if cuda.laneid == 0 and at < out.size:
            out[at] = total

    signature = "float32[::1], float32[::1], float32[::1], float32[::1], int64, int64, int64, int64"

    @gpu.kernel(signature, adding=adding)
    def project_rows(x, source, q, out, cols, rows, first, ranks):  # type: ignore[no-untyped-def]
        """A warp for each row: the products with GROUP vectors of q from number ``first`` on."""
        for row in range(cuda.grid(1) // 32, rows, cuda.gridsize(1) // 32):
            start = row * cols
            count = min(cols, source.size - start)
            a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            j = cuda.laneid
            at = first * cols + j
            while j + 96 < count:
                v, w = value(x, source, start + j), value(x, source, start + j + 32)
                y, z = value(x, source, start + j + 64), value(x, source, start + j + 96)
                if adding:
                    source[start + j], source[start + j + 32] = v, w
                    source[start + j + 64], source[start + j + 96] = y, z
                a = cuda.fma(w, q[at + 32], cuda.fma(v, q[at], a))
                a = cuda.fma(z, q[at + 96], cuda.fma(y, q[at + 64], a))
                b = cuda.fma(w, q[at + cols + 32], cuda.fma(v, q[at + cols], b))
                b = cuda.fma(z, q[at + cols + 96], cuda.fma(y, q[at + cols + 64], b))
                c = cuda.fma(w, q[at + 2 * cols + 32], cuda.fma(v, q[at + 2 * cols], c))
                c = cuda.fma(z, q[at + 2 * cols + 96], cuda.fma(y, q[at + 2 * cols + 64], c))
                d = cuda.fma(w, q[at + 3 * cols + 32], cuda.fma(v, q[at + 3 * cols], d))
                d = cuda.fma(z, q[at + 3 * cols + 96], cuda.fma(y, q[at + 3 * cols + 64], d))
                j, at = j + 128, at + 128
            while j < count:
                v = value(x, source, start + j)
                if adding:
                    source[start + j] = v
                a, b = cuda.fma(v, q[at], a), cuda.fma(v, q[at + cols], b)
                c, d = cuda.fma(v, q[at + 2 * cols], c), cuda.fma(v, q[at + 3 * cols], d)
                j, at = j + 32, at + 32
            place = first * rows + row
            write(out, place, a)
            write(out, place + rows if first + 1 < ranks else out.size, b)
            write(out, place + 2 * rows if first + 2 < ranks else out.size, c)
            write(out, place + 3 * rows if first + 3 < ranks else out.size, d)

    return project_rows


@cuda.jit(device=True)
def _last_row(size, cols, row, column):  # type: ignore[no-untyped-def]
    """``row``, or the one before it if that row ends before the column: where to stop."""
    return row if (row - 1) * cols + column < size else row - 1


@cuda.jit(device=True)
def _four(shared, at, v, w, y, z, total):  # type: ignore[no-untyped-def]
    """A running sum after four more rows."""
    total = cuda.fma(w, shared[at + 1], cuda.fma(v, shared[at], total))
    return cuda.fma(z, shared[at + 3], cuda.fma(y, shared[at + 2], total))


@gpu.kernel("float32[::1], float32[::1], float32[::1], int64, int64, int64")
def _project_columns(source, p, parts, cols, rows, first):  # type: ignore[no-untyped-def]
    """The sums over each chunk of rows for GROUP vectors of p from number ``first`` on."""
    shared = cuda.shared.array(_CHUNK_OF_P, np.float32)
    across = (cols + cuda.blockDim.x - 1) // cuda.blockDim.x
    chunks = (rows + CHUNK - 1) // CHUNK
    for piece in range(cuda.blockIdx.x, across * chunks, cuda.gridDim.x):
        column, start = piece % across * cuda.blockDim.x + cuda.threadIdx.x, piece // across * CHUNK
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, _CHUNK_OF_P, cuda.blockDim.x):
            row = start + i % CHUNK
            shared[i] = p[(first + i // CHUNK) * rows + row] if row < rows else np.float32(0)
        cuda.syncthreads()
        if column < cols:
            stop = _last_row(source.size, cols, min(rows, start + CHUNK), column) - start
            a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            i, j = 0, start * cols + column
            while i + 3 < stop:
                v, w = gpu.sanitise(source[j]), gpu.sanitise(source[j + cols])
                y, z = gpu.sanitise(source[j + 2 * cols]), gpu.sanitise(source[j + 3 * cols])
                a, b = _four(shared, i, v, w, y, z, a), _four(shared, CHUNK + i, v, w, y, z, b)
                c, d = _four(shared, 2 * CHUNK + i, v, w, y, z, c), _four(shared, 3 * CHUNK + i, v, w, y, z, d)
                i, j = i + 4, j + 4 * cols
            while i < stop:
                v = gpu.sanitise(source[j])
                a, b = cuda.fma(v, shared[i], a), cuda.fma(v, shared[CHUNK + i], b)
                c, d = cuda.fma(v, shared[2 * CHUNK + i], c), cuda.fma(v, shared[3 * CHUNK + i], d)
                i, j = i + 1, j + cols
            place = piece // across * GROUP * cols + column
            parts[place], parts[place + cols] = a, b
            parts[place + 2 * cols], parts[place + 3 * cols] = c, d


@gpu.kernel("float32[::1], float32[::1], int64")
def _add_chunks(parts, out, size):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        total, at = np.float32(0), i
        while at + 3 * size < parts.size:
            p, q, r, s = parts[at], parts[at + size], parts[at + 2 * size], parts[at + 3 * size]
            total = total + p + q + r + s
            at += 4 * size
        while at < parts.size:
            total = total + parts[at]
            at += size
        out[i] = gpu.sanitise(total)


def _make_outer(add, by_turns):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def put(out, i, value):  # type: ignore[no-untyped-def]
        value = gpu.sanitise(value)
        out[i] = out[i] + value if add else value

    signature = "float32[::1], float32[::1], float32[::1], float32[::1], int64, int64, int64, float32"

    @gpu.kernel(signature, add=add, by_turns=by_turns)
    def outer(out, p, q, turn, cols, rows, ranks, sign):  # type: ignore[no-untyped-def]
        """``sign · P Qᵀ``; ``by_turns`` p and q change places if ``turn[0]`` is not 0."""
        left, right = p, q
        if by_turns and turn[0] != np.float32(0):
            left, right = q, p
        across = (cols + cuda.blockDim.x - 1) // cuda.blockDim.x
        chunks = (rows + CHUNK - 1) // CHUNK
        for piece in range(cuda.blockIdx.x, across * chunks, cuda.gridDim.x):
            column, chunk = piece % across * cuda.blockDim.x + cuda.threadIdx.x, piece // across
            if column < cols:
                i = chunk * CHUNK
                stop = _last_row(out.size, cols, min(rows, i + CHUNK), column)
                while i + 3 < stop:
                    a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                    at = i
                    for k in range(ranks):
                        factor = right[k * cols + column]
                        a, b = cuda.fma(sign * left[at], factor, a), cuda.fma(sign * left[at + 1], factor, b)
                        c, d = cuda.fma(sign * left[at + 2], factor, c), cuda.fma(sign * left[at + 3], factor, d)
                        at += rows
                    j = i * cols + column
                    put(out, j, a)
                    put(out, j + cols, b)
                    put(out, j + 2 * cols, c)
                    put(out, j + 3 * cols, d)
                    i += 4
                while i < stop:
                    a, at = np.float32(0), i
                    for k in range(ranks):
                        a = cuda.fma(sign * left[at], right[k * cols + column], a)
                        at += rows
                    put(out, i * cols + column, a)
                    i += 1

    return outer


# --- payloads and state -----------------------------------------------------------------------------------------------


@gpu.kernel("float32[::1], float32[::1], int64, float32")
def _write_header(header, factor, start, first):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), header.size, cuda.gridsize(1)):
        if start <= i and i < start + factor.size:
            header[i] = factor[i - start]
        else:
            header[i] = first if i == 0 else np.float32(0)


@gpu.kernel("float32[::1], float32[::1]")
def _keep(kept, factor):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), kept.size, cuda.gridsize(1)):
        kept[i] = gpu.sanitise(factor[i])


_PROJECT_ROWS = {adding: _make_project_rows(adding) for adding in (False, True)}
_OUTER = {(add, by_turns): _make_outer(add, by_turns) for add in (False, True) for by_turns in (False, True)}
