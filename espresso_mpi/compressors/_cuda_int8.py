"""CUDA kernels of ``int8``: a warp takes a block of the format, 128 elements at a time.

The block is read twice, for the scale and for the codes; the second time it comes from the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from . import _cpu, _cuda

_WARPS = _cuda.THREADS // _cuda.LANES
_TINY = np.float32(1e-30)
_MAGIC = np.float32(12582912.0)
_TOP = np.float32(127.0)


def encode(x: Any, residual: Any, scales: Any, codes: Any, block: int, stochastic: bool, key: int) -> None:
    """Quantise ``x`` (+ ``residual``, unless it is None)."""
    kernel = _ENCODE[residual is not None, stochastic]
    grid = _cuda.blocks(scales.size, _WARPS)
    low, high = _cpu.key_words(key)
    kernel(grid, _cuda.THREADS, x, x if residual is None else residual, scales, codes, block, low, high)


def decode(scales: Any, codes: Any, out: Any, block: int, add: bool) -> None:
    """Write the values of the codes into ``out``, or add them to it."""
    _DECODE[add](_cuda.blocks(scales.size, _WARPS), _cuda.THREADS, out, scales, codes, block)


def _make_encode(keep, stochastic):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(x, residual, i):  # type: ignore[no-untyped-def]
        return x[i] + residual[i] if keep else x[i]

    @cuda.jit(device=True)
    def rounded(p, inverse, i, low, high):  # type: ignore[no-untyped-def]
        if stochastic:
            noise = _cuda.uniform(_cuda.counter(i, low), high) - np.float32(0.5)
            noisy = cuda.fma(p, inverse, noise)
            return min(max(noisy, -_TOP), _TOP) + _MAGIC - _MAGIC
        return cuda.fma(p, inverse, _MAGIC) - _MAGIC

    @cuda.jit(device=True)
    def put(codes, residual, i, p, scale, inverse, low, high):  # type: ignore[no-untyped-def]
        code = rounded(p, inverse, i, low, high)
        codes[i] = np.int8(np.int32(code))
        if keep:
            residual[i] = cuda.fma(-code, scale, p)

    @cuda.jit(device=True)
    def largest(x, residual, start, whole, stop):  # type: ignore[no-untyped-def]
        """The largest magnitude of a block; ``whole`` is where its last 128 elements end that are all there."""
        top = np.float32(0)
        for i in range(start + cuda.laneid, whole, 128):
            p, q = abs(value(x, residual, i)), abs(value(x, residual, i + 32))
            r, s = abs(value(x, residual, i + 64)), abs(value(x, residual, i + 96))
            top = max(top, max(max(p, q), max(r, s)))
        for i in range(whole + cuda.laneid, stop, 32):
            top = max(top, abs(value(x, residual, i)))
        return _cuda.warp_max(top)

    signature = "float32[::1], float32[::1], float32[::1], int8[::1], int64, uint32, uint32"

    @_cuda.kernel(signature, keep=keep, stochastic=stochastic)
    def encode(x, residual, scales, codes, block, low, high):  # type: ignore[no-untyped-def]
        for b in range(cuda.grid(1) // 32, scales.size, cuda.gridsize(1) // 32):
            start, stop = b * block, min(x.size, (b + 1) * block)
            whole = start + (stop - start) // 128 * 128
            top = largest(x, residual, start, whole, stop)
            scale, inverse = np.float32(0), np.float32(0)
            if top >= _TINY:
                scale, inverse = top / _TOP, _TOP / top
            if cuda.laneid == 0:
                scales[b] = scale
            for i in range(start + cuda.laneid, whole, 128):
                p, q = value(x, residual, i), value(x, residual, i + 32)
                r, s = value(x, residual, i + 64), value(x, residual, i + 96)
                put(codes, residual, i, p, scale, inverse, low, high)
                put(codes, residual, i + 32, q, scale, inverse, low, high)
                put(codes, residual, i + 64, r, scale, inverse, low, high)
                put(codes, residual, i + 96, s, scale, inverse, low, high)
            for i in range(whole + cuda.laneid, stop, 32):
                put(codes, residual, i, value(x, residual, i), scale, inverse, low, high)

    return encode


def _make_decode(add):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(out, codes, i, scale):  # type: ignore[no-untyped-def]
        if add:
            return cuda.fma(np.float32(codes[i]), scale, out[i])
        return np.float32(codes[i]) * scale

    @_cuda.kernel("float32[::1], float32[::1], int8[::1], int64", add=add)
    def decode(out, scales, codes, block):  # type: ignore[no-untyped-def]
        for b in range(cuda.grid(1) // 32, scales.size, cuda.gridsize(1) // 32):
            start, stop, scale = b * block, min(out.size, (b + 1) * block), scales[b]
            whole = start + (stop - start) // 128 * 128
            for i in range(start + cuda.laneid, whole, 128):
                p, q = value(out, codes, i, scale), value(out, codes, i + 32, scale)
                r, s = value(out, codes, i + 64, scale), value(out, codes, i + 96, scale)
                out[i], out[i + 32], out[i + 64], out[i + 96] = p, q, r, s
            for i in range(whole + cuda.laneid, stop, 32):
                out[i] = value(out, codes, i, scale)

    return decode


_ENCODE = {(keep, rule): _make_encode(keep, rule) for keep in (False, True) for rule in (False, True)}
_DECODE = {add: _make_decode(add) for add in (False, True)}
