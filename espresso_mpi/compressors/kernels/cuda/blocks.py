"""CUDA kernels of the block quantisers: a warp takes a block of the format, four elements per lane at a time.

The block is read twice, for the scale and for the codes; the second time it comes from the cache. Lanes write
neighbouring bytes; where several codes share a byte, one lane has read all of them. Two blocks that have no more than
16 bytes share a warp.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from ..cpu.blocks import FLOAT8, MAGIC, NEAREST, STOCHASTIC, TINY
from . import gpu

_HALF = gpu.LANES // 2
_SHORT = 4 * _HALF
"""Elements of a block that leave half of a warp idle, at four in each byte."""

_TINY, _MAGIC = np.float32(TINY), np.float32(MAGIC)


def encode(
    x: Any, residual: Any, scales: Any, codes: Any, block: int, per: int, how: tuple[Any, ...], low: Any, high: Any
) -> None:
    """Quantise ``x`` (+ ``residual``, unless it is None); ``how`` is that of the CPU kernels."""
    rule, *numbers = how
    kernel, kept = _ENCODE[residual is not None, rule, per], x if residual is None else residual
    kernel(_grid(scales.size, block, per), gpu.THREADS, x, kept, scales, codes, block, *numbers, low, high)


def decode(
    out: Any, scales: Any, codes: Any, block: int, per: int, how: tuple[Any, ...], add: bool, divisor: float
) -> None:
    """Write the values of the codes into ``out``, or add them to it, and divide it."""
    float8, *numbers = how
    kernel = _DECODE[add, bool(float8), per]
    grid = _grid(scales.size, block, per)
    kernel(grid, gpu.THREADS, out, scales, codes, block, *numbers, np.float32(divisor))


def _grid(blocks: int, block: int, per: int) -> int:
    return gpu.blocks(blocks, gpu.THREADS // (_HALF if per == 4 and block <= _SHORT else gpu.LANES))


# --- what both directions need ----------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _float8(scaled, shift, lowest):  # type: ignore[no-untyped-def]
    """As ``cpu.blocks._float8``."""
    bits = gpu.float_bits(scaled)
    sign, magnitude = np.uint32(bits & np.uint32(0x80000000)), np.uint32(bits & np.uint32(0x7FFFFFFF))
    exponent = max(np.uint32(magnitude & np.uint32(0x7F800000)), lowest)
    power = np.uint32(exponent + np.uint32(shift << np.uint32(23)))
    shifted = gpu.bits_float(magnitude) + gpu.bits_float(power)
    mantissa = np.uint32(gpu.float_bits(shifted) - power)
    code = np.uint32(np.uint32(np.uint32(exponent - lowest) >> shift) + mantissa)
    rounded = np.uint32(gpu.float_bits(shifted - gpu.bits_float(power)) | sign)
    return np.int32(np.uint32(code | np.uint32(sign >> np.uint32(24)))), gpu.bits_float(rounded)


@cuda.jit(device=True)
def _float8_value(code, shift, lowest):  # type: ignore[no-untyped-def]
    """As ``cpu.blocks._float8_value``."""
    bits = np.uint32(np.int32(code))
    magnitude = np.uint32(bits & np.uint32(0x7F))
    one = np.uint32(np.uint32(1) << np.uint32(np.uint32(23) - shift))
    normal = gpu.bits_float(np.uint32(np.uint32(magnitude << shift) + np.uint32(lowest - np.uint32(1 << 23))))
    unit = gpu.bits_float(np.uint32(lowest - np.uint32(np.uint32(np.uint32(23) - shift) << np.uint32(23))))
    value = normal if magnitude >= one else np.float32(np.int32(magnitude)) * unit
    return gpu.bits_float(np.uint32(gpu.float_bits(value) | np.uint32(bits & np.uint32(0x80000000))))


def _make_order(per):  # type: ignore[no-untyped-def]
    """Where the four elements lie that a lane takes at a time: ``per`` for each byte, the next byte 32 further on."""

    @cuda.jit(device=True)
    def order(width):  # type: ignore[no-untyped-def]
        if per == 1:
            return 32, 64, 96
        if per == 2:
            return width, 32, 32 + width
        return width, 2 * width, 3 * width

    return order


def _make_lanes(per):  # type: ignore[no-untyped-def]
    """How many lanes of a warp take a block."""

    @cuda.jit(device=True)
    def lanes(block):  # type: ignore[no-untyped-def]
        if per == 4:
            return _HALF if block <= _SHORT else 32
        return 32

    return lanes


def _unit(per: int) -> int:
    """How many bytes of a block must be there for four elements in each lane; lanes that have one byte may be idle."""
    return 1 if per == 4 else 128 // per


# --- encode -----------------------------------------------------------------------------------------------------------


def _make_largest(value, per):  # type: ignore[no-untyped-def]
    order = _make_order(per)

    @cuda.jit(device=True)
    def largest(x, residual, start, stop, width, whole, lane, lanes):  # type: ignore[no-untyped-def]
        """The largest magnitude of a block; the elements of its first ``whole`` bytes are all there."""
        o1, o2, o3 = order(width)
        top = np.float32(0)
        for j in range(lane, whole, 4 * lanes // per):
            i = start + j
            p, q = abs(value(x, residual, i)), abs(value(x, residual, i + o1))
            r, s = abs(value(x, residual, i + o2)), abs(value(x, residual, i + o3))
            top = max(top, max(max(p, q), max(r, s)))
        for j in range(whole + lane, width, lanes):
            for i in range(start + j, stop, width):
                top = max(top, abs(value(x, residual, i)))
        if lanes == 32:
            top = max(top, cuda.shfl_xor_sync(gpu.FULL, top, 16))
        return gpu.half_warp_max(top)

    return largest


@cuda.jit(device=True)
def _noise(at, high):  # type: ignore[no-untyped-def]
    """``uniform(at, high) - HALF``, to the bit: whole and half, times 2**-24, so that no product is left to fuse."""
    whole = np.int32(gpu.uniform(at, high) * np.float32(16777216.0))
    return (np.float32(np.int32(whole - np.int32(8388608))) + np.float32(0.5)) * np.float32(5.9604645e-08)


def _make_put(keep, rule):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def put(residual, i, p, scale, inverse, top, shift, lowest, low, high):  # type: ignore[no-untyped-def]
        """The code of a value, whose rest goes into the residual."""
        if rule == FLOAT8:
            code, rounded = _float8(p * inverse, shift, lowest)
        else:
            if rule == STOCHASTIC:
                noisy = cuda.fma(p, inverse, _noise(gpu.counter(i, low), high))
                rounded = min(max(noisy, -top), top) + _MAGIC - _MAGIC
            else:
                rounded = cuda.fma(p, inverse, _MAGIC) - _MAGIC
            code = np.int32(rounded)
        if keep:
            residual[i] = cuda.fma(-rounded, scale, p)
        return code

    return put


def _make_store(per):  # type: ignore[no-untyped-def]
    bits, mask = 8 // per, (1 << 8 // per) - 1

    @cuda.jit(device=True)
    def store(codes, at, c0, c1, c2, c3):  # type: ignore[no-untyped-def]
        if per == 1:
            codes[at], codes[at + 32] = np.int8(c0), np.int8(c1)
            codes[at + 64], codes[at + 96] = np.int8(c2), np.int8(c3)
        elif per == 2:
            codes[at] = np.int8((c0 & mask) | (c1 & mask) << bits)
            codes[at + 32] = np.int8((c2 & mask) | (c3 & mask) << bits)
        else:
            low, high = (c0 & mask) | (c1 & mask) << bits, (c2 & mask) | (c3 & mask) << bits
            codes[at] = np.int8(low | high << 4)

    return store


def _make_encode(keep, rule, per):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(x, residual, i):  # type: ignore[no-untyped-def]
        return gpu.sanitise(x[i] + residual[i] if keep else x[i])

    order, largest, put, store = _make_order(per), _make_largest(value, per), _make_put(keep, rule), _make_store(per)
    bits, mask, unit, lanes_of = 8 // per, (1 << 8 // per) - 1, _unit(per), _make_lanes(per)
    signature = "float32[::1], float32[::1], float32[::1], int8[::1], int64, float32, float32" + 4 * ", uint32"

    @gpu.kernel(signature, keep=keep, rule=_NAMES[rule], per=per)
    def encode(x, residual, scales, codes, block, top, shrink, shift, lowest, low, high):  # type: ignore[no-untyped-def]
        stride = (block + per - 1) // per
        lanes = lanes_of(block)
        lane = cuda.laneid % lanes
        for first in range(cuda.grid(1) // 32 * (32 // lanes), scales.size, cuda.gridsize(1) // lanes):
            b = first + cuda.laneid // lanes  # beyond the last one in half a warp, perhaps
            start, stop = min(x.size, b * block), min(x.size, (b + 1) * block)
            width = (stop - start + per - 1) // per
            whole = width // unit * unit if width * per == stop - start else 0
            most = largest(x, residual, start, stop, width, whole, lane, lanes)
            scale, inverse = np.float32(0), np.float32(0)
            if most >= _TINY:
                scale, inverse = most / top * shrink, top / most
            if lane == start - b * block and start < stop:
                scales[b] = scale
            o1, o2, o3 = order(width)
            for j in range(lane, whole, 4 * lanes // per):
                i = start + j
                p, q = value(x, residual, i), value(x, residual, i + o1)
                r, s = value(x, residual, i + o2), value(x, residual, i + o3)
                c0 = put(residual, i, p, scale, inverse, top, shift, lowest, low, high)
                c1 = put(residual, i + o1, q, scale, inverse, top, shift, lowest, low, high)
                c2 = put(residual, i + o2, r, scale, inverse, top, shift, lowest, low, high)
                c3 = put(residual, i + o3, s, scale, inverse, top, shift, lowest, low, high)
                store(codes, b * stride + j, c0, c1, c2, c3)
            for j in range(whole + lane, width, lanes):
                byte, place = 0, 0
                for i in range(start + j, stop, width):
                    code = put(residual, i, value(x, residual, i), scale, inverse, top, shift, lowest, low, high)
                    byte |= (code & mask) << place
                    place += bits
                codes[b * stride + j] = np.int8(byte)

    return encode


# --- decode -----------------------------------------------------------------------------------------------------------


def _make_load(per):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def load(codes, at):  # type: ignore[no-untyped-def]
        """The bytes in which the codes of a lane's four elements lie, and where in them."""
        if per == 1:
            return codes[at], 0, codes[at + 32], 0, codes[at + 64], 0, codes[at + 96], 0
        if per == 2:
            a, b = codes[at], codes[at + 32]
            return a, 0, a, 4, b, 0, b, 4
        a = codes[at]
        return a, 0, a, 2, a, 4, a, 6

    return load


def _make_decode(add, float8, per):  # type: ignore[no-untyped-def]
    order, bits, unit, lanes_of = _make_order(per), 8 // per, _unit(per), _make_lanes(per)

    @cuda.jit(device=True)
    def value(out, i, byte, place, scale, shift, lowest, divisor):  # type: ignore[no-untyped-def]
        if float8:
            code = _float8_value(byte, shift, lowest)
        else:
            code = np.float32(np.int32(np.int32(byte) << np.int32(32 - bits - place)) >> np.int32(32 - bits))
        return gpu.over(cuda.fma(code, scale, out[i]) if add else code * scale, divisor)

    load = _make_load(per)
    signature = "float32[::1], float32[::1], int8[::1], int64, float32, uint32, uint32, float32"

    @gpu.kernel(signature, add=add, float8=float8, per=per)
    def decode(out, scales, codes, block, largest, shift, lowest, divisor):  # type: ignore[no-untyped-def]
        stride = (block + per - 1) // per
        lanes = lanes_of(block)
        lane = cuda.laneid % lanes
        for b in range(cuda.grid(1) // lanes, scales.size, cuda.gridsize(1) // lanes):
            start, stop, scale = b * block, min(out.size, (b + 1) * block), scales[b]
            if gpu.float_bits(scale) > gpu.float_bits(largest):
                scale = np.float32(0)
            width = (stop - start + per - 1) // per
            whole = width // unit * unit if width * per == stop - start else 0
            o1, o2, o3 = order(width)
            for j in range(lane, whole, 4 * lanes // per):
                i = start + j
                b0, p0, b1, p1, b2, p2, b3, p3 = load(codes, b * stride + j)
                v0 = value(out, i, b0, p0, scale, shift, lowest, divisor)
                v1 = value(out, i + o1, b1, p1, scale, shift, lowest, divisor)
                v2 = value(out, i + o2, b2, p2, scale, shift, lowest, divisor)
                v3 = value(out, i + o3, b3, p3, scale, shift, lowest, divisor)
                out[i], out[i + o1], out[i + o2], out[i + o3] = v0, v1, v2, v3
            for j in range(whole + lane, width, lanes):
                byte, place = codes[b * stride + j], 0
                for i in range(start + j, stop, width):
                    out[i] = value(out, i, byte, place, scale, shift, lowest, divisor)
                    place += bits

    return decode


_NAMES = {NEAREST: "nearest", STOCHASTIC: "stochastic", FLOAT8: "float8"}
_INTEGERS = tuple((rule, per) for rule in (NEAREST, STOCHASTIC) for per in (1, 2, 4))
_ENCODE = {(keep, *kind): _make_encode(keep, *kind) for keep in (False, True) for kind in (*_INTEGERS, (FLOAT8, 1))}
_DECODE = {
    (add, float8, per): _make_decode(add, float8, per)
    for add in (False, True)
    for float8, per in ((False, 1), (False, 2), (False, 4), (True, 1))
}
