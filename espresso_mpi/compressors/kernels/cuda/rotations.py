"""What the CUDA kernels of ``drive``, ``eden`` and ``thc`` share: blocks rotated in shared memory.

A block of threads takes a block of the format. The butterflies and the sums come in the order of the CPU kernels,
which is part of the format: see ``cpu.rotations``.
Two strides are done at a time, one sum and one difference of four elements in each thread, so that a block of 1024
takes five trips through shared memory; one word in 33 is left out there, which keeps neighbours in different banks.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from espresso_mpi.compressors.limit import LIMIT

from ..cpu import rotations
from . import gpu

RESIDENT = 6  # blocks whose shared memory a multiprocessor has room for
ROOM = rotations.LARGEST + rotations.LARGEST // 32
WARPS = 32  # that a block has at most

_SMALLEST = rotations.SMALLEST
_TINY_BITS = rotations.TINY_BITS
_LIMIT = np.float32(LIMIT)


# --- shared memory ----------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def place(i):  # type: ignore[no-untyped-def]
    """Where element i of a block lies. Unsigned, or every access would ask whether it counts from the end."""
    return np.uint32(i + (i >> 5))


@cuda.jit(device=True)
def _four(work, i, stride):  # type: ignore[no-untyped-def]
    """The butterflies of two strides between four elements."""
    j, k, m = place(i + stride), place(i + 2 * stride), place(i + 3 * stride)
    i = place(i)
    a, b, c, d = work[i], work[j], work[k], work[m]
    e, f, g, h = a + b, a - b, c + d, c - d
    work[i], work[j], work[k], work[m] = e + g, f + h, e - g, f - h


@cuda.jit(device=True)
def transform(work, size):  # type: ignore[no-untyped-def]
    """As ``cpu.hadamard.transform``. It waits for what was written before, and all threads may read what it wrote."""
    stride, quarter = np.uint32(1), np.uint32(size >> 2)
    while stride <= quarter:
        cuda.syncthreads()
        unit = np.uint32(cuda.threadIdx.x)
        while unit < quarter:
            _four(work, np.uint32(4 * unit - 3 * (unit & np.uint32(stride - 1))), stride)
            unit = np.uint32(unit + cuda.blockDim.x)
        stride = np.uint32(stride * 4)
    if stride < size:
        cuda.syncthreads()
        unit = np.uint32(cuda.threadIdx.x)
        while unit < stride:
            i, j = place(unit), place(unit + stride)
            a, b = work[i], work[j]
            work[i], work[j] = a + b, a - b
            unit = np.uint32(unit + cuda.blockDim.x)
    cuda.syncthreads()


@cuda.jit(device=True)
def shared_sum(totals, low, high):  # type: ignore[no-untyped-def]
    """The sum of the 64 lanes that the first warp holds, two in each thread, for all threads."""
    total = gpu.warp_sum(low + high)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        totals[0] = total
    cuda.syncthreads()
    return totals[0]


@cuda.jit(device=True)
def square_sum(work, size, power, totals):  # type: ignore[no-untyped-def]
    """As ``cpu.flips.square_sum``."""
    low, high = np.float32(0), np.float32(0)
    if cuda.threadIdx.x < 32:
        for i in range(cuda.threadIdx.x, size, 64):
            p, q = work[place(i)] * power, work[place(i + 32)] * power
            low, high = cuda.fma(p, p, low), cuda.fma(q, q, high)
    return shared_sum(totals, low, high)


# --- one block --------------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def block_size(rest, block):  # type: ignore[no-untyped-def]
    """As ``cpu.rotations.block_size``."""
    size = block
    while size // 2 >= max(rest, _SMALLEST):
        size //= 2
    return np.uint32(size)


@cuda.jit(device=True)
def signed(scale, i, low, high):  # type: ignore[no-untyped-def]
    """The scale with the random sign of element i of the tensor."""
    at = gpu.counter(i >> 5, low)
    h = np.uint32((at ^ (at >> np.uint32(16)) ^ high) * np.uint32(0x7FEB352D))
    h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    h = np.uint32(h ^ (h >> np.uint32(16)))
    return -scale if (h >> np.uint32(i & 31)) & np.uint32(1) else scale


@cuda.jit(device=True)
def power_down(top):  # type: ignore[no-untyped-def]
    """The power of two by which to multiply a block with this largest magnitude."""
    exponent = np.uint32(gpu.float_bits(top) >> np.uint32(23))
    return gpu.bits_float(np.uint32(np.uint32(np.uint32(254) - exponent) << np.uint32(23)))


@cuda.jit(device=True)
def power_up(top):  # type: ignore[no-untyped-def]
    """Its inverse."""
    exponent = np.uint32(gpu.float_bits(top) >> np.uint32(23))
    return gpu.bits_float(np.uint32(exponent << np.uint32(23)))


@cuda.jit(device=True)
def is_tiny(top):  # type: ignore[no-untyped-def]
    return gpu.float_bits(top) < np.uint32(_TINY_BITS)


@cuda.jit(device=True)
def rotate(work, start, size, power, low, high):  # type: ignore[no-untyped-def]
    """``work = power · H·D·work``; each thread has written the elements that it takes here."""
    i = np.uint32(cuda.threadIdx.x)
    while i < size:
        work[place(i)] *= signed(power, start + i, low, high)
        i = np.uint32(i + cuda.blockDim.x)
    transform(work, size)


@cuda.jit(device=True)
def scale_back(work, start, size, scale, bound, low, high):  # type: ignore[no-untyped-def]
    """Rotated back codes become decoded values, sanitised where a product could leave the range."""
    if abs(scale) <= _LIMIT / bound:
        i = np.uint32(cuda.threadIdx.x)
        while i < size:
            work[place(i)] *= signed(scale, start + i, low, high)
            i = np.uint32(i + cuda.blockDim.x)
    else:
        i = np.uint32(cuda.threadIdx.x)
        while i < size:
            work[place(i)] = signed(gpu.sanitise(work[place(i)] * scale), start + i, low, high)
            i = np.uint32(i + cuda.blockDim.x)
    cuda.syncthreads()


def _make_put(add):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def before(out, start, i, count):  # type: ignore[no-untyped-def]
        return out[np.uint64(start + i)] if add and i < count else np.float32(0)

    @cuda.jit(device=True)
    def put_one(out, work, start, i, count, scale, plain, low, high, value):  # type: ignore[no-untyped-def]
        if i < count:
            h, factor = work[place(i)], scale
            if not plain:
                h, factor = gpu.sanitise(h * scale), np.float32(1)
            factor = signed(factor, start + i, low, high)
            out[np.uint64(start + i)] = cuda.fma(h, factor, value) if add else h * factor

    @cuda.jit(device=True)
    def put(out, work, start, stop, size, scale, bound, low, high):  # type: ignore[no-untyped-def]
        """Rotated back codes, multiplied by scale and signs, into ``out``."""
        plain = abs(scale) <= _LIMIT / bound
        i, step = np.uint32(cuda.threadIdx.x), np.uint32(cuda.blockDim.x)
        count = np.uint32(stop - start)
        while i < count:
            j, k, m = np.uint32(i + step), np.uint32(i + 2 * step), np.uint32(i + 3 * step)
            a, b = before(out, start, i, count), before(out, start, j, count)
            c, d = before(out, start, k, count), before(out, start, m, count)
            put_one(out, work, start, i, count, scale, plain, low, high, a)
            put_one(out, work, start, j, count, scale, plain, low, high, b)
            put_one(out, work, start, k, count, scale, plain, low, high, c)
            put_one(out, work, start, m, count, scale, plain, low, high, d)
            i = np.uint32(i + 4 * step)

    return put


def _make_load(keep):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(x, residual, i, stop):  # type: ignore[no-untyped-def]
        """What is to be compressed; zeros pad the last block."""
        if i >= stop:
            return np.float32(0)
        at = np.uint64(i)
        return gpu.sanitise(x[at] + residual[at] if keep else x[at])

    @cuda.jit(device=True)
    def load(x, residual, start, stop, size, work, tops):  # type: ignore[no-untyped-def]
        """Values into shared memory; their largest magnitude."""
        top, step = np.float32(0), cuda.blockDim.x
        i = np.uint32(cuda.threadIdx.x)
        while i < size:
            j = start + i
            p, q = value(x, residual, j, stop), value(x, residual, j + step, stop)
            r, s = value(x, residual, j + 2 * step, stop), value(x, residual, j + 3 * step, stop)
            work[place(i)], work[place(i + step)] = p, q
            work[place(i + 2 * step)], work[place(i + 3 * step)] = r, s
            top = max(top, max(max(abs(p), abs(q)), max(abs(r), abs(s))))
            i = np.uint32(i + 4 * step)
        return gpu.block_max(tops, top)

    return value, load


LOADS = {keep: _make_load(keep) for keep in (False, True)}
PUTS = {add: _make_put(add) for add in (False, True)}
