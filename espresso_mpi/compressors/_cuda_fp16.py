"""CUDA kernels of ``fp16``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from . import _cuda

_LARGEST = np.float32(65504.0)


def encode(x: Any, residual: Any, half: Any) -> None:
    """Round ``x`` (+ ``residual``, unless it is None) into ``half``, a float16 view of the payload."""
    kernel = _ENCODE[residual is not None]
    kernel(_cuda.blocks(x.size, _cuda.TILE), _cuda.THREADS, x, x if residual is None else residual, half)


def decode(half: Any, out: Any, add: bool) -> None:
    """Widen ``half`` into ``out``, or onto it."""
    _DECODE[add](_cuda.blocks(out.size, _cuda.TILE), _cuda.THREADS, out, half)


def _make_encode(keep):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(x, residual, i):  # type: ignore[no-untyped-def]
        return x[i] + residual[i] if keep else x[i]

    @cuda.jit(device=True)
    def put(half, residual, i, p):  # type: ignore[no-untyped-def]
        code = np.float16(min(max(p, -_LARGEST), _LARGEST))
        half[i] = code
        if keep:
            residual[i] = p - np.float32(code)

    @_cuda.kernel("float32[::1], float32[::1], float16[::1]", keep=keep)
    def encode(x, residual, half):  # type: ignore[no-untyped-def]
        step = _cuda.THREADS
        for tile in range(_cuda.TILE * cuda.blockIdx.x, x.size, _cuda.TILE * cuda.gridDim.x):
            i = tile + cuda.threadIdx.x
            if tile + _cuda.TILE <= x.size:
                p, q = value(x, residual, i), value(x, residual, i + step)
                r, s = value(x, residual, i + 2 * step), value(x, residual, i + 3 * step)
                put(half, residual, i, p)
                put(half, residual, i + step, q)
                put(half, residual, i + 2 * step, r)
                put(half, residual, i + 3 * step, s)
            else:
                for j in range(i, x.size, step):
                    put(half, residual, j, value(x, residual, j))

    return encode


def _make_decode(add):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(out, half, i):  # type: ignore[no-untyped-def]
        return out[i] + np.float32(half[i]) if add else np.float32(half[i])

    @_cuda.kernel("float32[::1], float16[::1]", add=add)
    def decode(out, half):  # type: ignore[no-untyped-def]
        step = _cuda.THREADS
        for tile in range(_cuda.TILE * cuda.blockIdx.x, out.size, _cuda.TILE * cuda.gridDim.x):
            i = tile + cuda.threadIdx.x
            if tile + _cuda.TILE <= out.size:
                p, q = value(out, half, i), value(out, half, i + step)
                r, s = value(out, half, i + 2 * step), value(out, half, i + 3 * step)
                out[i], out[i + step], out[i + 2 * step], out[i + 3 * step] = p, q, r, s
            else:
                for j in range(i, out.size, step):
                    out[j] = value(out, half, j)

    return decode


_ENCODE = {keep: _make_encode(keep) for keep in (False, True)}
_DECODE = {add: _make_decode(add) for add in (False, True)}
