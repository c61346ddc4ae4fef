"""CUDA kernels of ``bound``: a thread writes one word of the payload; a warp decodes a block."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from espresso_mpi.arrays import device

from ..cpu.deltas import BLOCK, HEADER, MAGIC, TINY
from . import gpu
from .linear_sparse import plus

_MAGIC_BITS = int(np.float32(MAGIC).view(np.int32))
_NOTHING = np.zeros(2, np.uint32)


def extent(x: Any) -> tuple[float, float]:
    """As ``cpu.deltas.extent``; waits for the stream."""
    tops = _tops()
    _extent(gpu.blocks(x.size, gpu.TILE), gpu.THREADS, x, tops)
    spread, largest = device.to_host(tops).view(np.float32)
    return (float(spread), float(largest)) if np.isfinite(largest) else (np.inf, np.inf)


def encode(x: Any, values: Any, payload: Any, bits: int, keep: bool) -> None:
    """Compress ``x``, or with ``keep`` ``values + x``, and leave in ``values`` what the payload does not hold."""
    grid, tops = gpu.blocks(x.size, gpu.TILE), _tops()
    if keep:
        _add(grid, gpu.THREADS, values, x)
    source = values if keep else x
    _extent(grid, gpu.THREADS, source, tops)
    steps = gpu.scratch("deltas steps", lambda: gpu.sent(np.zeros(2, np.float32)))
    _write_step(1, 1, tops, steps, payload.view(np.uint32), np.float32((1 << (bits - 1)) - 3))
    _encode(gpu.blocks(payload.size, gpu.TILE), gpu.THREADS, source, payload.view(np.uint32), steps, bits)
    if keep:
        _settle(gpu.blocks(-(-x.size // BLOCK), gpu.THREADS), gpu.THREADS, values, steps)


def decode(out: Any, payload: Any, bits: int, add: bool) -> None:
    """As ``cpu.deltas.decode``."""
    grid = gpu.blocks(-(-out.size // BLOCK), gpu.THREADS // gpu.LANES)
    _DECODE[add](grid, gpu.THREADS, out, payload.view(np.uint32), bits)


def _tops() -> Any:
    """The bits of the largest difference and of the largest magnitude: zeros."""
    found = gpu.scratch("deltas tops", lambda: cuda.device_array(2, np.uint32))
    device.copy_later(found, _NOTHING)
    return found


@gpu.kernel("float32[::1], float32[::1]")
def _add(values, x):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        values[i] = gpu.tame(values[i] + x[i])


@gpu.kernel("float32[::1], uint32[::1]")
def _extent(x, tops):  # type: ignore[no-untyped-def]
    spread, largest = np.uint32(0), np.uint32(0)
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        largest = max(largest, np.uint32(gpu.float_bits(x[i]) & np.uint32(0x7FFFFFFF)))
        before = x[i - 1] if i else x[i]
        apart = gpu.float_bits(gpu.tame(x[i]) - gpu.tame(before))
        spread = max(spread, np.uint32(apart & np.uint32(0x7FFFFFFF)))
    spread, largest = gpu.warp_max(np.int32(spread)), gpu.warp_max(np.int32(largest))
    if cuda.laneid == 0:
        cuda.atomic.max(tops, 0, np.uint32(spread))
        cuda.atomic.max(tops, 1, np.uint32(largest))


@gpu.kernel("uint32[::1], float32[::1], uint32[::1], float32")
def _write_step(tops, steps, payload, codes):  # type: ignore[no-untyped-def]
    """The step and its inverse, and the header."""
    spread = gpu.bits_float(tops[0])
    step, inverse = np.float32(0), np.float32(0)
    if spread >= np.float32(TINY):
        step = spread / codes
        inverse = np.float32(1) / step
    steps[0], steps[1] = step, inverse
    payload[0] = gpu.float_bits(step)
    for i in range(1, HEADER):
        payload[i] = np.uint32(0)


@cuda.jit(device=True)
def _number(value, first, inverse):  # type: ignore[no-untyped-def]
    """As ``cpu.deltas.number``."""
    shifted = cuda.fma(value - first, inverse, np.float32(MAGIC))
    return np.int64(np.int32(gpu.float_bits(shifted))) - np.int64(_MAGIC_BITS)


@gpu.kernel("float32[::1], uint32[::1], float32[::1], int64")
def _encode(values, payload, steps, bits):  # type: ignore[no-untyped-def]
    size, top, inverse = 1 + 2 * bits, (np.int64(1) << (bits - 1)) - 1, steps[1]
    for at in range(cuda.grid(1), payload.size - HEADER, cuda.gridsize(1)):
        block, word = at // size, at % size - 1
        start = block * BLOCK
        first = gpu.tame(values[start])
        if word < 0:
            payload[HEADER + at] = gpu.float_bits(first)
        else:
            i, stop = 32 * word // bits, min(values.size - start, np.int64(BLOCK))
            before, made = np.int64(0), np.uint64(0)
            if 0 < i < stop:
                before = _number(gpu.tame(values[start + i - 1]), first, inverse)
            while i < stop and i * bits < 32 * word + 32:
                q = _number(gpu.tame(values[start + i]), first, inverse)
                code, shift = np.uint64(q - before + top), i * bits - 32 * word
                if shift >= 0:
                    made |= code << np.uint64(shift)
                else:
                    made |= code >> np.uint64(-shift)
                before = q
                i += 1
            payload[HEADER + at] = np.uint32(made & np.uint64(0xFFFFFFFF))


@gpu.kernel("float32[::1], float32[::1]")
def _settle(values, steps):  # type: ignore[no-untyped-def]
    """A thread leaves in the values of a block what the payload does not hold."""
    step, inverse = steps[0], steps[1]
    for block in range(cuda.grid(1), (values.size + BLOCK - 1) // BLOCK, cuda.gridsize(1)):
        first = values[block * BLOCK]
        for i in range(block * BLOCK, min(values.size, (block + 1) * BLOCK)):
            q = _number(values[i], first, inverse)
            values[i] = values[i] - gpu.tame(cuda.fma(np.float32(q), step, first))


@cuda.jit(device=True)
def _code(payload, start, i, bits):  # type: ignore[no-untyped-def]
    """The code of element i of the block whose codes begin at ``start``."""
    word, shift = start + ((i * bits) >> 5), (i * bits) & 31
    found = np.uint64(payload[word]) >> np.uint64(shift)
    if shift + bits > 32:
        found |= np.uint64(payload[word + 1]) << np.uint64(32 - shift)
    return np.int32(found & np.uint64((np.int64(1) << bits) - 1)) - np.int32((np.int64(1) << (bits - 1)) - 1)


def _make_decode(add):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def put(out, i, q, step, first):  # type: ignore[no-untyped-def]
        if i < out.size:
            value = gpu.tame(cuda.fma(np.float32(q), step, first))
            out[i] = plus(out[i], value) if add else value

    @gpu.kernel("float32[::1], uint32[::1], int64", add=add)
    def decode(out, payload, bits):  # type: ignore[no-untyped-def]
        lane, step = cuda.laneid, gpu.tame(gpu.bits_float(payload[0]))
        for block in range(cuda.grid(1) // 32, (out.size + BLOCK - 1) // BLOCK, cuda.gridsize(1) // 32):
            start = HEADER + block * (1 + 2 * bits)
            first = gpu.tame(gpu.bits_float(payload[start]))
            lower, upper = _code(payload, start + 1, lane, bits), _code(payload, start + 1, lane + 32, bits)
            half = np.int32(gpu.warp_sum(lower))
            lower = np.int32(gpu.warp_prefix_sum(lower, lane))
            upper = np.int32(half + gpu.warp_prefix_sum(upper, lane))
            put(out, block * BLOCK + lane, lower, step, first)
            put(out, block * BLOCK + lane + 32, upper, step, first)

    return decode


_DECODE = {add: _make_decode(add) for add in (False, True)}
