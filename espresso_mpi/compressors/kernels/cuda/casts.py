"""CUDA kernels of the casts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from ..cpu.casts import BEYOND_HALF, BRAIN, HALF, LARGEST, STOCHASTIC
from . import gpu

_HALF = np.float32(LARGEST["float16"])
_BRAIN = np.float32(LARGEST["bfloat16"])
_BEYOND = np.float32(BEYOND_HALF)


def encode(x: Any, residual: Any, payload: Any, rule: int, low: Any, high: Any) -> int:
    """Round ``x`` (+ ``residual``, unless it is None) into ``payload``.

    Returns:
        how many halves were cut to the largest one; 0 on a session's stream, see ``gpu.cuts_of``.
    """
    kernel, kept = _ENCODE[residual is not None, rule], x if residual is None else residual
    codes = payload.view(np.float16 if rule == HALF else np.uint16)
    counter = gpu.cut_counter() if rule == HALF else gpu.uncounted()
    kernel(gpu.blocks(x.size, gpu.TILE), gpu.THREADS, x, kept, codes, low, high, counter)
    return gpu.cuts_of(counter) if rule == HALF else 0


def decode(payload: Any, out: Any, half: bool, add: bool, divisor: float) -> None:
    """Widen ``payload`` into ``out``, or onto it, and divide it."""
    codes = payload.view(np.float16 if half else np.uint16)
    _DECODE[add, half](gpu.blocks(out.size, gpu.TILE), gpu.THREADS, out, codes, np.float32(divisor))


@cuda.jit(device=True)
def _from_brain(code):  # type: ignore[no-untyped-def]
    return gpu.bits_float(np.uint32(np.uint32(code) << np.uint32(16)))


def _make_encode(keep, rule):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def value(x, residual, i):  # type: ignore[no-untyped-def]
        return gpu.sanitise(x[i] + residual[i] if keep else x[i])

    @cuda.jit(device=True)
    def half(p, i, low, high):  # type: ignore[no-untyped-def]
        return np.float16(min(max(p, -_HALF), _HALF))

    @cuda.jit(device=True)
    def brain(p, i, low, high):  # type: ignore[no-untyped-def]
        bits = gpu.float_bits(p)
        if rule == STOCHASTIC:
            noise = np.uint32(np.int32(gpu.uniform(gpu.counter(i, low), high) * np.float32(65536.0)))
        else:
            noise = np.uint32(np.uint32(0x7FFF) + np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1)))
        return np.uint16(np.uint32(bits + noise) >> np.uint32(16))

    @cuda.jit(device=True)
    def put(codes, residual, i, p, low, high, cut):  # type: ignore[no-untyped-def]
        if rule == HALF and abs(p) >= _BEYOND:
            cuda.atomic.add(cut, 0, 1)
        code = cast(p, i, low, high)
        codes[i] = code
        if keep:
            residual[i] = p - widen(code)

    cast, widen = (half, np.float32) if rule == HALF else (brain, _from_brain)
    element = "float16" if rule == HALF else "uint16"

    signature = f"float32[::1], float32[::1], {element}[::1], uint32, uint32, int64[::1]"

    @gpu.kernel(signature, keep=keep, rule=_NAMES[rule])
    def encode(x, residual, codes, low, high, cut):  # type: ignore[no-untyped-def]
        step = gpu.THREADS
        for tile in range(gpu.TILE * cuda.blockIdx.x, x.size, gpu.TILE * cuda.gridDim.x):
            i = tile + cuda.threadIdx.x
            if tile + gpu.TILE <= x.size:
                p, q = value(x, residual, i), value(x, residual, i + step)
                r, s = value(x, residual, i + 2 * step), value(x, residual, i + 3 * step)
                put(codes, residual, i, p, low, high, cut)
                put(codes, residual, i + step, q, low, high, cut)
                put(codes, residual, i + 2 * step, r, low, high, cut)
                put(codes, residual, i + 3 * step, s, low, high, cut)
            else:
                for j in range(i, x.size, step):
                    put(codes, residual, j, value(x, residual, j), low, high, cut)

    return encode


def _make_decode(add, half):  # type: ignore[no-untyped-def]
    widen, largest = (np.float32, _HALF) if half else (_from_brain, _BRAIN)

    @cuda.jit(device=True)
    def value(out, codes, divisor, i):  # type: ignore[no-untyped-def]
        wide = widen(codes[i])
        finite = min(max(wide, -largest), largest) if wide == wide else np.float32(0)
        return gpu.over(out[i] + finite if add else finite, divisor)

    @gpu.kernel(f"float32[::1], {'float16' if half else 'uint16'}[::1], float32", add=add, half=half)
    def decode(out, codes, divisor):  # type: ignore[no-untyped-def]
        step = gpu.THREADS
        for tile in range(gpu.TILE * cuda.blockIdx.x, out.size, gpu.TILE * cuda.gridDim.x):
            i = tile + cuda.threadIdx.x
            if tile + gpu.TILE <= out.size:
                p, q = value(out, codes, divisor, i), value(out, codes, divisor, i + step)
                r, s = value(out, codes, divisor, i + 2 * step), value(out, codes, divisor, i + 3 * step)
                out[i], out[i + step], out[i + 2 * step], out[i + 3 * step] = p, q, r, s
            else:
                for j in range(i, out.size, step):
                    out[j] = value(out, codes, divisor, j)

    return decode


_NAMES = {HALF: "half", BRAIN: "brain", STOCHASTIC: "stochastic"}
_ENCODE = {(keep, rule): _make_encode(keep, rule) for keep in (False, True) for rule in _NAMES}
_DECODE = {(add, half): _make_decode(add, half) for add in (False, True) for half in (False, True)}
