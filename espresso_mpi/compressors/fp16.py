"""``fp16``: IEEE half precision, rounded to nearest even; 16 bits an element.

Relative error at most 2**-11 in the normal range. Values beyond the largest half, 65504, are sent as 65504; with a
residual the excess is kept there and sent in later steps, so nothing overflows to infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange

from . import _cpu
from .base import Compressor
from .registry import register

LARGEST = 65504.0
_CHUNK = 8192


@register
@dataclass(frozen=True)
class Fp16(Compressor):
    """Cast to float16. Payload: n little-endian halves, 2·n bytes."""

    name = "fp16"

    def nbytes(self, n: int) -> int:
        return 2 * n

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, key: int) -> None:
        _encode(x, _cpu.EMPTY if residual is None else residual, payload.view(np.uint16))

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        _decode(out, payload.view(np.uint16), add)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, key: int) -> None:
        from . import _cuda_fp16

        _cuda_fp16.encode(x, residual, payload.view(np.float16))

    def _decode_cuda(self, payload: Any, out: Any, add: bool) -> None:
        from . import _cuda_fp16

        _cuda_fp16.decode(payload.view(np.float16), out, add)


@_cpu.inline
def _saturate(value):  # type: ignore[no-untyped-def]
    value = np.float32(LARGEST) if value > np.float32(LARGEST) else value
    return np.float32(-LARGEST) if value < np.float32(-LARGEST) else value


@_cpu.inline
def _encode_block(x, residual, half):  # type: ignore[no-untyped-def]
    if residual.size:
        for i in range(x.size):
            value = x[i] + residual[i]
            code = _cpu.to_half(_saturate(value))
            half[i] = code
            residual[i] = value - _cpu.from_half(code)
    else:
        for i in range(x.size):
            half[i] = _cpu.to_half(_saturate(x[i]))


@_cpu.Kernel
def _encode(x, residual, half):  # type: ignore[no-untyped-def]
    for chunk in prange((x.size + _CHUNK - 1) // _CHUNK):
        a, b = chunk * _CHUNK, min(x.size, (chunk + 1) * _CHUNK)
        _encode_block(x[a:b], residual[a:b], half[a:b])


@_cpu.inline
def _decode_block(out, half, add):  # type: ignore[no-untyped-def]
    if add:
        for i in range(out.size):
            out[i] += _cpu.from_half(half[i])
    else:
        for i in range(out.size):
            out[i] = _cpu.from_half(half[i])


@_cpu.Kernel
def _decode(out, half, add):  # type: ignore[no-untyped-def]
    for chunk in prange((out.size + _CHUNK - 1) // _CHUNK):
        a, b = chunk * _CHUNK, min(out.size, (chunk + 1) * _CHUNK)
        _decode_block(out[a:b], half[a:b], add)
