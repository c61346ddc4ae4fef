"""CUDA kernels of ``natural``: a warp takes a block of the format, 128 elements at a time.

The block is needed twice, for its exponent and for the codes; meanwhile it is in shared memory, or in the caches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from ..cpu import host
from . import gpu

_WARPS = gpu.THREADS // gpu.LANES
_STAGE = gpu.STAGE


def encode(x: Any, residual: Any, codes: Any, exponents: Any, block: int, key: int) -> None:
    """Round ``x`` (+ ``residual``, unless it is None)."""
    staged, grid, threads = gpu.staging(exponents.size, block)
    low, high = host.key_words(key)
    kept = x if residual is None else residual
    _ENCODE[residual is not None, staged](grid, threads, x, kept, codes, exponents, block, low, high)


def decode(codes: Any, exponents: Any, out: Any, block: int, add: bool) -> None:
    """Write the values of the codes into ``out``, or add them to it."""
    _DECODE[add](gpu.blocks(exponents.size, _WARPS), gpu.THREADS, out, codes, exponents, block)


@cuda.jit(device=True)
def _power(exponent):  # type: ignore[no-untyped-def]
    """2 to an exponent from -126 to 127."""
    return gpu.bits_float(np.int32(np.int32(exponent + np.int32(127)) << np.int32(23)))


@cuda.jit(device=True)
def _decoded(code):  # type: ignore[no-untyped-def]
    """What a byte stands for where e = 0."""
    number = np.int32(code)
    magnitude = gpu.bits_float(np.int32(np.int32(number & np.int32(127)) << np.int32(23)))
    return -magnitude if number >= np.int32(128) else magnitude


def _make_largest(value, staged):  # type: ignore[no-untyped-def]
    stage = gpu.make_stage(staged)

    @cuda.jit(device=True)
    def largest(x, residual, memory, shift, start, whole, stop):  # type: ignore[no-untyped-def]
        """The largest magnitude of a block; ``whole`` is where its last 128 elements end that are all there."""
        top = np.float32(0)
        for i in range(start + cuda.laneid, whole, 128):
            p, q = value(x, residual, i), value(x, residual, i + 32)
            r, s = value(x, residual, i + 64), value(x, residual, i + 96)
            stage(memory, i + shift, p, q, r, s)
            top = max(top, max(max(abs(p), abs(q)), max(abs(r), abs(s))))
        for i in range(whole + cuda.laneid, stop, 32):
            top = max(top, abs(value(x, residual, i)))
        return gpu.warp_max(top)

    return largest


def _make_encode(keep, staged):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(x, residual, i):  # type: ignore[no-untyped-def]
        return gpu.sanitise(residual[i] + x[i] if keep else x[i])

    largest = _make_largest(value, staged)

    @cuda.jit(device=True)
    def again(x, residual, memory, shift, i):  # type: ignore[no-untyped-def]
        return memory[i + shift] if staged else value(x, residual, i)

    @cuda.jit(device=True)
    def put(codes, residual, i, p, factor, scale, low, high):  # type: ignore[no-untyped-def]
        noise = np.uint32(gpu.uniform(gpu.counter(i, low), high) * np.float32(8388608.0))
        bits = gpu.float_bits(np.float32(abs(p) * factor))
        number = np.uint32(np.uint32(bits + noise) >> np.uint32(23))
        code = np.uint8(number | (np.uint32(gpu.float_bits(p) >> np.uint32(24)) & np.uint32(128)))
        codes[i] = code
        if keep:
            residual[i] = cuda.fma(-_decoded(code), scale, p)

    signature = "float32[::1], float32[::1], uint8[::1], int8[::1], int64, uint32, uint32"

    @gpu.kernel(signature, keep=keep, staged=staged)
    def encode(x, residual, codes, exponents, block, low, high):  # type: ignore[no-untyped-def]
        memory = cuda.shared.array(_STAGE, np.float32) if staged else x
        for b in range(cuda.grid(1) // 32, exponents.size, cuda.gridsize(1) // 32):
            start, stop = b * block, min(x.size, (b + 1) * block)
            whole = start + (stop - start) // 128 * 128
            shift = cuda.threadIdx.x // 32 * gpu.STAGED - start
            bits = gpu.float_bits(largest(x, residual, memory, shift, start, whole, stop))
            above = np.int32(np.uint32(bits + np.uint32(0x7FFFFF)) >> np.uint32(23))
            exponent = np.int32(max(above, np.int32(1)) - np.int32(127))
            factor, scale = _power(-exponent), _power(exponent)
            if cuda.laneid == 0:
                exponents[b] = np.int8(exponent)
            for i in range(start + cuda.laneid, whole, 128):
                p, q = again(x, residual, memory, shift, i), again(x, residual, memory, shift, i + 32)
                r, s = again(x, residual, memory, shift, i + 64), again(x, residual, memory, shift, i + 96)
                put(codes, residual, i, p, factor, scale, low, high)
                put(codes, residual, i + 32, q, factor, scale, low, high)
                put(codes, residual, i + 64, r, factor, scale, low, high)
                put(codes, residual, i + 96, s, factor, scale, low, high)
            for i in range(whole + cuda.laneid, stop, 32):
                put(codes, residual, i, value(x, residual, i), factor, scale, low, high)

    return encode


def _make_decode(add):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(out, codes, i, scale):  # type: ignore[no-untyped-def]
        if add:
            return cuda.fma(_decoded(codes[i]), scale, out[i])
        return _decoded(codes[i]) * scale

    @gpu.kernel("float32[::1], uint8[::1], int8[::1], int64", add=add)
    def decode(out, codes, exponents, block):  # type: ignore[no-untyped-def]
        for b in range(cuda.grid(1) // 32, exponents.size, cuda.gridsize(1) // 32):
            start, stop = b * block, min(out.size, (b + 1) * block)
            scale = _power(min(max(np.int32(exponents[b]), np.int32(-126)), np.int32(126)))
            whole = start + (stop - start) // 128 * 128
            for i in range(start + cuda.laneid, whole, 128):
                p, q = value(out, codes, i, scale), value(out, codes, i + 32, scale)
                r, s = value(out, codes, i + 64, scale), value(out, codes, i + 96, scale)
                out[i], out[i + 32], out[i + 64], out[i + 96] = p, q, r, s
            for i in range(whole + cuda.laneid, stop, 32):
                out[i] = value(out, codes, i, scale)

    return decode


_ENCODE = {(keep, staged): _make_encode(keep, staged) for keep in (False, True) for staged in (False, True)}
_DECODE = {add: _make_decode(add) for add in (False, True)}
