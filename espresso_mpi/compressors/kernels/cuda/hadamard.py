"""CUDA kernels of ``drive``, ``eden`` and ``thc``: a block of threads takes a block of the format, in shared memory.

The butterflies and the sums come in the order of the CPU kernels, which is part of the format: see ``cpu.hadamard``.
Two strides are done at a time, one sum and one difference of four elements in each thread, so that a block of 1024
takes five trips through shared memory; one word in 33 is left out there, which keeps neighbours in different banks.

With a residual its values are read twice, the second time from the cache. The decoded value goes through shared memory
before it is subtracted: otherwise the compiler would fuse its product with the difference, and round once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from espresso_mpi.compressors.base import LIMIT

from ..cpu import hadamard, host
from . import gpu

_RESIDENT = 6  # blocks whose shared memory a multiprocessor has room for
_ROOM = hadamard.LARGEST + hadamard.LARGEST // 32
_WARPS = 32  # that a block has at most
_TABLE = 15  # the most levels, and the thresholds between them

_SMALLEST = hadamard.SMALLEST
_TINY_BITS = hadamard.TINY_BITS
_LIMIT = np.float32(LIMIT)
_MAGIC = np.float32(12582912.0)
_SMALLEST_NORM = np.float32(1e-33)  # these as in ``thc``
_MOST = np.float32(1e30)


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
    kept, grid = x if residual is None else residual, gpu.blocks(scales.size, 1, _RESIDENT)
    arrays = (x, kept, seed, planes, scales, _on_device(table))
    _ENCODE[residual is not None](grid, gpu.THREADS, *arrays, block, bits, unbiased, *host.key_words(key))


def decode(seed: Any, planes: Any, scales: Any, out: Any, block: int, bits: int, table: Any, add: bool) -> None:
    """Write the values of the levels into ``out``, or add them to it."""
    grid = gpu.blocks(scales.size, 1, _RESIDENT)
    _DECODE[add](grid, gpu.THREADS, out, seed, planes, scales, _on_device(table), block, bits)


def summarise(x: Any, residual: Any, norms: Any, block: int) -> None:
    """Leave ``x + residual`` in ``residual``, unless it is None, and write the root mean squares of the blocks."""
    kept, grid = x if residual is None else residual, gpu.blocks(norms.size, 1, _RESIDENT)
    _SUMMARISE[residual is not None](grid, gpu.THREADS, x, kept, norms, block)


def encode_integers(arrays: tuple[Any, ...], block: int, rules: tuple[np.float32, ...], keys: tuple[int, int]) -> None:
    """Quantise ``x``, or ``residual`` unless it is None, to the integers that add up.

    Args:
        arrays: x, residual, the agreed norms, and the payload's seed, norms and codes.
        rules: the largest code, what a code of 1 stands for, and what no code of a sum exceeds.
        keys: of the rotation, and of the rounding.
    """
    x, residual, summary, seed, norms, codes = arrays
    kept, grid = x if residual is None else residual, gpu.blocks(summary.size, 1, _RESIDENT)
    kernel = _ENCODE_INTEGERS[residual is not None, codes.dtype.itemsize]
    words = (*host.key_words(keys[0]), *host.key_words(keys[1]))
    kernel(grid, gpu.THREADS, x, kept, summary, seed, norms, codes, block, *rules, *words)


def decode_integers(
    seed: Any, norms: Any, codes: Any, out: Any, block: int, unit: np.float32, most: np.float32, add: bool
) -> None:
    """Write the values of the integers into ``out``, or add them to it."""
    kernel = _DECODE_INTEGERS[add, codes.dtype.itemsize]
    grid = gpu.blocks(hadamard.count(out.size, block), 1, _RESIDENT)
    kernel(grid, gpu.THREADS, out, seed, norms, codes, block, unit, most)


_tables: dict[tuple[int, bytes], Any] = {}


def _on_device(table: np.ndarray) -> Any:
    """A small constant array on the current GPU, copied there once."""
    key = (gpu.device_number(), table.tobytes())
    if key not in _tables:
        _tables[key] = cuda.to_device(table)
    return _tables[key]


# --- shared memory ----------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _at(i):  # type: ignore[no-untyped-def]
    """Where element i of a block lies. Unsigned, or every access would ask whether it counts from the end."""
    return np.uint32(i + (i >> 5))


@cuda.jit(device=True)
def _four(work, i, stride):  # type: ignore[no-untyped-def]
    """The butterflies of two strides between four elements."""
    j, k, m = _at(i + stride), _at(i + 2 * stride), _at(i + 3 * stride)
    i = _at(i)
    a, b, c, d = work[i], work[j], work[k], work[m]
    e, f, g, h = a + b, a - b, c + d, c - d
    work[i], work[j], work[k], work[m] = e + g, f + h, e - g, f - h


@cuda.jit(device=True)
def _transform(work, size):  # type: ignore[no-untyped-def]
    """As ``cpu.hadamard.transform``. It waits for what was written before, and all threads may read what it wrote."""
    stride = 1
    while 4 * stride <= size:
        cuda.syncthreads()
        for unit in range(cuda.threadIdx.x, size // 4, cuda.blockDim.x):
            _four(work, 4 * unit - 3 * (unit & (stride - 1)), stride)
        stride *= 4
    if stride < size:
        cuda.syncthreads()
        for unit in range(cuda.threadIdx.x, stride, cuda.blockDim.x):
            i, j = _at(unit), _at(unit + stride)
            a, b = work[i], work[j]
            work[i], work[j] = a + b, a - b
    cuda.syncthreads()


@cuda.jit(device=True)
def _block_max(tops, value):  # type: ignore[no-untyped-def]
    """The largest of all threads' values."""
    value = gpu.warp_max(value)
    cuda.syncthreads()  # all have read what was there before
    if cuda.laneid == 0:
        tops[cuda.threadIdx.x // 32] = value
    cuda.syncthreads()
    for warp in range(cuda.blockDim.x // 32):
        value = max(value, tops[warp])
    return value


@cuda.jit(device=True)
def _shared_sum(totals, low, high):  # type: ignore[no-untyped-def]
    """The sum of the 64 lanes that the first warp holds, two in each thread, for all threads."""
    total = gpu.warp_sum(low + high)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        totals[0] = total
    cuda.syncthreads()
    return totals[0]


@cuda.jit(device=True)
def _square_sum(work, size, power, totals):  # type: ignore[no-untyped-def]
    """As ``cpu.hadamard.square_sum``."""
    low, high = np.float32(0), np.float32(0)
    if cuda.threadIdx.x < 32:
        for i in range(cuda.threadIdx.x, size, 64):
            p, q = work[_at(i)] * power, work[_at(i + 32)] * power
            low, high = cuda.fma(p, p, low), cuda.fma(q, q, high)
    return _shared_sum(totals, low, high)


@cuda.jit(device=True)
def _level_sums(work, codes, size, totals):  # type: ignore[no-untyped-def]
    """The sums of ``|work · codes|`` and, in ``totals[1]``, of ``codes²``, in the same order."""
    low, high, low_squares, high_squares = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    if cuda.threadIdx.x < 32:
        for i in range(cuda.threadIdx.x, size, 64):
            p, q = abs(codes[_at(i)]), abs(codes[_at(i + 32)])
            low, high = cuda.fma(p, abs(work[_at(i)]), low), cuda.fma(q, abs(work[_at(i + 32)]), high)
            low_squares, high_squares = cuda.fma(p, p, low_squares), cuda.fma(q, q, high_squares)
    squares = gpu.warp_sum(low_squares + high_squares)
    if cuda.threadIdx.x == 0:
        totals[1] = squares
    return _shared_sum(totals, low, high)


# --- one block --------------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _size(rest, block):  # type: ignore[no-untyped-def]
    """As ``cpu.hadamard.block_size``."""
    size = block
    while size // 2 >= max(rest, _SMALLEST):
        size //= 2
    return size


@cuda.jit(device=True)
def _signed(scale, i, low, high):  # type: ignore[no-untyped-def]
    """The scale with the random sign of element i of the tensor."""
    at = gpu.counter(i >> 5, low)
    h = np.uint32((at ^ (at >> np.uint32(16)) ^ high) * np.uint32(0x7FEB352D))
    h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    h = np.uint32(h ^ (h >> np.uint32(16)))
    return -scale if (h >> np.uint32(i & 31)) & np.uint32(1) else scale


@cuda.jit(device=True)
def _power_down(top):  # type: ignore[no-untyped-def]
    """The power of two by which to multiply a block with this largest magnitude."""
    exponent = np.uint32(gpu.float_bits(top) >> np.uint32(23))
    return gpu.bits_float(np.uint32(np.uint32(np.uint32(254) - exponent) << np.uint32(23)))


@cuda.jit(device=True)
def _power_up(top):  # type: ignore[no-untyped-def]
    """Its inverse."""
    exponent = np.uint32(gpu.float_bits(top) >> np.uint32(23))
    return gpu.bits_float(np.uint32(exponent << np.uint32(23)))


@cuda.jit(device=True)
def _is_tiny(top):  # type: ignore[no-untyped-def]
    return gpu.float_bits(top) < np.uint32(_TINY_BITS)


@cuda.jit(device=True)
def _rotate(work, start, size, power, low, high):  # type: ignore[no-untyped-def]
    """``work = power · H·D·work``; each thread has written the elements that it takes here."""
    for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
        work[_at(i)] *= _signed(power, start + i, low, high)
    _transform(work, size)


@cuda.jit(device=True)
def _scale_back(work, start, size, scale, bound, low, high):  # type: ignore[no-untyped-def]
    """Turned back codes become decoded values, tame where a product could leave the range."""
    if abs(scale) <= _LIMIT / bound:
        for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            work[_at(i)] *= _signed(scale, start + i, low, high)
    else:
        for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            work[_at(i)] = _signed(gpu.tame(work[_at(i)] * scale), start + i, low, high)
    cuda.syncthreads()


def _make_put(add):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def put(out, work, start, stop, size, scale, bound, low, high):  # type: ignore[no-untyped-def]
        """Turned back codes, multiplied by scale and signs, into ``out``."""
        plain = abs(scale) <= _LIMIT / bound
        for i in range(cuda.threadIdx.x, stop - start, cuda.blockDim.x):
            h, factor, j = work[_at(i)], scale, start + i
            if not plain:
                h, factor = gpu.tame(h * scale), np.float32(1)
            factor = _signed(factor, j, low, high)
            out[j] = cuda.fma(h, factor, out[j]) if add else h * factor

    return put


def _make_load(keep):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(x, residual, i, stop):  # type: ignore[no-untyped-def]
        """What is to be compressed; zeros pad the last block."""
        if i >= stop:
            return np.float32(0)
        return gpu.tame(x[i] + residual[i] if keep else x[i])

    @cuda.jit(device=True)
    def load(x, residual, start, stop, size, work, tops):  # type: ignore[no-untyped-def]
        """Values into shared memory; their largest magnitude."""
        top, step = np.float32(0), cuda.blockDim.x
        for i in range(cuda.threadIdx.x, size, 4 * step):
            j = start + i
            p, q = value(x, residual, j, stop), value(x, residual, j + step, stop)
            r, s = value(x, residual, j + 2 * step, stop), value(x, residual, j + 3 * step, stop)
            work[_at(i)], work[_at(i + step)] = p, q
            work[_at(i + 2 * step)], work[_at(i + 3 * step)] = r, s
            top = max(top, max(max(abs(p), abs(q)), max(abs(r), abs(s))))
        return _block_max(tops, top)

    return value, load


_LOADS = {keep: _make_load(keep) for keep in (False, True)}
_PUTS = {add: _make_put(add) for add in (False, True)}


# --- levels of a table ------------------------------------------------------------------------------------------------


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
    number += 2 if magnitude >= table[number + 1] else 0
    number += 1 if magnitude >= table[number] else 0
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
    for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
        w = work[_at(i)]
        number = _number(abs(w) * inverse, table)
        level = table[number]
        codes[_at(i)] = -level if w < 0 else level
        _write_bits(planes, start + i, bits, number, w < 0)
    cuda.syncthreads()


@cuda.jit(device=True)
def _code(work, codes, start, size, bits, unbiased, power, table, planes, totals):  # type: ignore[no-untyped-def]
    """As ``cpu.hadamard._code``, with the levels in ``codes``."""
    count = np.float32(size)
    squares, inverse = np.float32(1), np.float32(1)
    if unbiased or bits > 1:
        squares = _square_sum(work, size, np.float32(1), totals)
        inverse = np.float32(math.sqrt(count / squares))
    _quantise(work, codes, start, size, bits, inverse, table, planes)
    products = _level_sums(work, codes, size, totals)
    factor = squares / products if unbiased else products / totals[1]
    return factor * (power / count)


def _make_encode(keep):  # type: ignore[no-untyped-def]
    value, load = _LOADS[keep]
    arrays = "float32[::1], float32[::1], uint32[::1], uint32[::1], float32[::1], float32[::1]"

    @gpu.kernel(arrays + ", int64, int64, boolean, uint32, uint32", keep=keep)
    def encode(x, residual, seed, planes, scales, levels, block, bits, unbiased, low, high):  # type: ignore[no-untyped-def]
        work = cuda.shared.array(_ROOM, np.float32)
        codes = cuda.shared.array(_ROOM, np.float32)
        tops = cuda.shared.array(_WARPS, np.float32)
        totals = cuda.shared.array(2, np.float32)
        table = cuda.shared.array(_TABLE, np.float32)
        _fill_table(table, levels)
        bound = levels[levels.size >> 1]
        if cuda.grid(1) == 0:
            seed[0] = low
            seed[1] = high
        for b in range(cuda.blockIdx.x, scales.size, cuda.gridDim.x):
            start, stop = b * block, min(x.size, (b + 1) * block)
            size = _size(stop - start, block)
            top, scale = load(x, residual, start, stop, size, work, tops), np.float32(0)
            if _is_tiny(top):
                for i in range(cuda.threadIdx.x, (size >> 5) * bits, cuda.blockDim.x):
                    planes[(start >> 5) * bits + i] = np.uint32(0)
                for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
                    codes[_at(i)] = np.float32(0)
            else:
                _rotate(work, start, size, _power_down(top), low, high)
                scale = _code(work, codes, start, size, bits, unbiased, _power_up(top), table, planes, totals)
                if keep:
                    _transform(codes, size)
                    _scale_back(codes, start, size, scale, bound * np.float32(size), low, high)
            if keep:
                for i in range(cuda.threadIdx.x, stop - start, cuda.blockDim.x):
                    residual[start + i] = value(x, residual, start + i, stop) - codes[_at(i)]
            if cuda.threadIdx.x == 0:
                scales[b] = scale
            cuda.syncthreads()

    return encode


def _make_decode(add):  # type: ignore[no-untyped-def]
    put = _PUTS[add]

    @cuda.jit(device=True)
    def level(planes, i, bits, table):  # type: ignore[no-untyped-def]
        first, lane = 2 * bits * (i >> 6) + ((i >> 5) & 1), np.uint32(i & 31)
        number = 0
        for k in range(1, bits):
            number = 2 * number + ((planes[first + 2 * k] >> lane) & 1)
        found = table[number]
        return -found if (planes[first] >> lane) & np.uint32(1) else found

    arrays = "float32[::1], uint32[::1], uint32[::1], float32[::1], float32[::1]"

    @gpu.kernel(arrays + ", int64, int64", add=add)
    def decode(out, seed, planes, scales, table, block, bits):  # type: ignore[no-untyped-def]
        work = cuda.shared.array(_ROOM, np.float32)
        low, high = seed[0], seed[1]
        for b in range(cuda.blockIdx.x, scales.size, cuda.gridDim.x):
            start, stop = b * block, min(out.size, (b + 1) * block)
            size = _size(stop - start, block)
            for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
                work[_at(i)] = level(planes, start + i, bits, table)
            _transform(work, size)
            bound = table[table.size // 2] * np.float32(size)
            put(out, work, start, stop, size, scales[b], bound, low, high)
            cuda.syncthreads()

    return decode


# --- integers that add up ---------------------------------------------------------------------------------------------


def _make_summarise(keep):  # type: ignore[no-untyped-def]
    _, load = _LOADS[keep]

    @gpu.kernel("float32[::1], float32[::1], float32[::1], int64", keep=keep)
    def summarise(x, residual, norms, block):  # type: ignore[no-untyped-def]
        work = cuda.shared.array(_ROOM, np.float32)
        tops = cuda.shared.array(_WARPS, np.float32)
        totals = cuda.shared.array(2, np.float32)
        for b in range(cuda.blockIdx.x, norms.size, cuda.gridDim.x):
            start, stop = b * block, min(x.size, (b + 1) * block)
            size = _size(stop - start, block)
            top, norm = load(x, residual, start, stop, size, work, tops), np.float32(0)
            if not _is_tiny(top):
                mean = _square_sum(work, size, _power_down(top), totals) / np.float32(size)
                norm = np.float32(math.sqrt(mean)) * _power_up(top)
            if keep:
                for i in range(cuda.threadIdx.x, stop - start, cuda.blockDim.x):
                    residual[start + i] = work[_at(i)]
            if cuda.threadIdx.x == 0:
                norms[b] = norm
            cuda.syncthreads()

    return summarise


@cuda.jit(device=True)
def _agreed(norm):  # type: ignore[no-untyped-def]
    """As ``thc._agreed``."""
    norm = gpu.tame(norm)
    return norm if norm >= _SMALLEST_NORM else np.float32(0)


@cuda.jit(device=True)
def _root(size):  # type: ignore[no-untyped-def]
    return np.float32(math.sqrt(np.float32(size)))


@cuda.jit(device=True)
def _round(work, codes, start, size, factor, levels, low, high):  # type: ignore[no-untyped-def]
    """As ``thc._round``."""
    for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
        u = gpu.uniform(gpu.counter(start + i, low), high)
        noise = cuda.fma(np.float32(2), u, np.float32(-1)) * np.float32(0.5)  # u - ½, and no product left to fuse
        noisy = min(max(cuda.fma(work[_at(i)], factor, noise), -levels), levels)
        code = noisy + _MAGIC - _MAGIC
        codes[start + i] = np.int32(code)
        work[_at(i)] = code


def _make_encode_integers(keep, width):  # type: ignore[no-untyped-def]
    _, load = _LOADS[False]
    arrays = f"float32[::1], float32[::1], float32[::1], uint32[::1], float32[::1], int{8 * width}[::1]"
    numbers = "int64, float32, float32, float32, uint32, uint32, uint32, uint32"

    @gpu.kernel(f"{arrays}, {numbers}", keep=keep, width=width)
    def encode(x, residual, summary, seed, norms, codes, block, levels, unit, most, low, high, key_low, key_high):  # type: ignore[no-untyped-def]
        work = cuda.shared.array(_ROOM, np.float32)
        tops = cuda.shared.array(_WARPS, np.float32)
        if cuda.grid(1) < 4:
            seed[cuda.grid(1)] = (low if cuda.grid(1) == 0 else high) if cuda.grid(1) < 2 else np.uint32(0)
        if summary.size + cuda.grid(1) < norms.size:
            norms[summary.size + cuda.grid(1)] = np.float32(0)
        for b in range(cuda.blockIdx.x, summary.size, cuda.gridDim.x):
            start, stop = b * block, min(x.size, (b + 1) * block)
            size, norm = _size(stop - start, block), _agreed(summary[b])
            step = norm * unit
            # With a residual the sum is there: ``summarise`` has left it.
            top = load(residual if keep else x, residual, start, stop, size, work, tops)
            if _is_tiny(top) or step == 0:
                for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
                    codes[start + i] = 0
            else:
                _rotate(work, start, size, _power_down(top), low, high)
                factor = min(_power_up(top) / step / _root(size), _MOST)
                _round(work, codes, start, size, factor, levels, key_low, key_high)
                if keep:
                    _transform(work, size)
                    _scale_back(work, start, size, step / _root(size), most * np.float32(size), low, high)
                    for i in range(cuda.threadIdx.x, stop - start, cuda.blockDim.x):
                        residual[start + i] -= work[_at(i)]
            if cuda.threadIdx.x == 0:
                norms[b] = norm
            cuda.syncthreads()

    return encode


def _make_decode_integers(add, width):  # type: ignore[no-untyped-def]
    put = _PUTS[add]
    arrays = f"float32[::1], uint32[::1], float32[::1], int{8 * width}[::1]"

    @gpu.kernel(arrays + ", int64, float32, float32", add=add, width=width)
    def decode(out, seed, norms, codes, block, unit, most):  # type: ignore[no-untyped-def]
        work = cuda.shared.array(_ROOM, np.float32)
        low, high = seed[0], seed[1]
        for b in range(cuda.blockIdx.x, (out.size + block - 1) // block, cuda.gridDim.x):
            start, stop = b * block, min(out.size, (b + 1) * block)
            size = _size(stop - start, block)
            for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
                work[_at(i)] = np.float32(codes[start + i])
            _transform(work, size)
            scale = norms[b] * unit / _root(size)
            put(out, work, start, stop, size, scale, most * np.float32(size), low, high)
            cuda.syncthreads()

    return decode


_ENCODE = {keep: _make_encode(keep) for keep in (False, True)}
_DECODE = {add: _make_decode(add) for add in (False, True)}
_SUMMARISE = {keep: _make_summarise(keep) for keep in (False, True)}
_ENCODE_INTEGERS = {(keep, width): _make_encode_integers(keep, width) for keep in (False, True) for width in (1, 2)}
_DECODE_INTEGERS = {(add, width): _make_decode_integers(add, width) for add in (False, True) for width in (1, 2)}
