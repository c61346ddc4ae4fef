"""``onebit``: scaled sign (EF-SignSGD, Karimireddy et al., 2019), one scale a block; 1 + 32/block bits an element.

Each element becomes ``mean|x| · sign(x)`` with the mean over its block and sign(0) = +. A contraction with
``δ = ‖x‖₁²/(d‖x‖²)``: for Gaussian values the squared error relative to ``‖x‖²`` is 1 - 2/π = 0.3634. It converges
only with error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange

from ..errors import ConfigError
from . import _cpu
from .base import Compressor, check_positive_int
from .registry import register

_LARGEST = np.finfo(np.float32).max


@register
@dataclass(frozen=True)
class OneBit(Compressor):
    """Scaled sign. Payload: ceil(n/64) uint64 of sign bits (1 = negative), then ceil(n/block) float32 scales.

    Args:
        block: elements that share a scale; a multiple of 64.
    """

    block: int = 2048
    name = "onebit"

    def __post_init__(self) -> None:
        check_positive_int("onebit", "block", self.block, low=64)
        if self.block % 64:
            raise ConfigError(f"onebit: block={self.block}; expected a multiple of 64")

    def nbytes(self, n: int) -> int:
        return 8 * -(-n // 64) + 4 * -(-n // self.block)

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, key: int) -> None:
        words, scales = self._split(payload, x.size)
        _encode(x, _cpu.EMPTY if residual is None else residual, words, scales, self.block)

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        words, scales = self._split(payload, out.size)
        _decode(out, words, scales, self.block, add)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, key: int) -> None:
        from . import _cuda_onebit

        words, scales = self._split(payload, x.size)
        _cuda_onebit.encode(x, residual, words.view(np.uint32), scales, self.block)

    def _decode_cuda(self, payload: Any, out: Any, add: bool) -> None:
        from . import _cuda_onebit

        words, scales = self._split(payload, out.size)
        _cuda_onebit.decode(words.view(np.uint32), scales, out, self.block, add)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any]:
        """The payload's two parts as (uint64 sign words, float32 scales) views."""
        head = 8 * -(-n // 64)
        return payload[:head].view(np.uint64), payload[head:].view(np.float32)


@_cpu.inline
def _pack(values, words):  # type: ignore[no-untyped-def]
    whole = values.size // 64
    for w in range(whole):
        words[w] = _cpu.negative_mask(values, 64 * w)
    if whole < words.size:
        last = np.uint64(0)
        for i in range(64 * whole, values.size):
            last |= np.uint64(values[i] < 0) << np.uint64(i - 64 * whole)
        words[whole] = last


@_cpu.inline
def _unpack_add(out, words, scale):  # type: ignore[no-untyped-def]
    whole = out.size // 64
    for w in range(whole):
        _cpu.add_signed(out, 64 * w, words[w], scale)
    for i in range(64 * whole, out.size):
        out[i] += -scale if (words[whole] >> np.uint64(i - 64 * whole)) & np.uint64(1) else scale


@_cpu.inline
def _unpack(out, words, scale):  # type: ignore[no-untyped-def]
    whole = out.size // 64
    for w in range(whole):
        _cpu.store_signed(out, 64 * w, words[w], scale)
    for i in range(64 * whole, out.size):
        out[i] = -scale if (words[whole] >> np.uint64(i - 64 * whole)) & np.uint64(1) else scale


@_cpu.Kernel
def _encode(x, residual, words, scales, block):  # type: ignore[no-untyped-def]
    for b in prange(scales.size):
        start, stop = b * block, min(x.size, (b + 1) * block)
        signs = words[start // 64 : (stop + 63) // 64]
        values, kept = x[start:stop], residual[start:stop]
        if kept.size:
            _cpu.add_into(kept, values)
            values = kept
        # A sum beyond float32 would make the scale, and with it the residual, infinite for ever.
        scale = min(_cpu.abs_sum(values), _LARGEST) / np.float32(stop - start)
        scales[b] = scale
        _pack(values, signs)
        if kept.size:
            _unpack_add(kept, signs, -scale)


@_cpu.Kernel
def _decode(out, words, scales, block, add):  # type: ignore[no-untyped-def]
    for b in prange(scales.size):
        start, stop = b * block, min(out.size, (b + 1) * block)
        signs = words[start // 64 : (stop + 63) // 64]
        if add:
            _unpack_add(out[start:stop], signs, scales[b])
        else:
            _unpack(out[start:stop], signs, scales[b])
