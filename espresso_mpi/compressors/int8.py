"""``int8``: symmetric linear quantisation to 8 bits with one float32 scale a block; 8 + 32/block bits an element.

``scale = max|x| / 127`` over the block and ``code = round(x / scale)``, to nearest (ties to even) or stochastically
(unbiased). For Gaussian values and block 256 the squared error relative to ``‖x‖²`` is 4.86e-5 to nearest and twice
that stochastically. A block whose largest magnitude is below 1e-30 is sent as zeros (its scale would underflow).
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

TINY = 1e-30
MAGIC = 12582912.0  # 1.5 * 2**23: adding it to a small float leaves the rounded integer in the low mantissa bits
_ROUNDINGS = ("nearest", "stochastic")


@register
@dataclass(frozen=True)
class Int8(Compressor):
    """Block-scaled int8. Payload: ceil(n/block) float32 scales, then n int8 codes: 4·ceil(n/block) + n bytes.

    Args:
        block: elements that share a scale.
        rounding: "nearest" or "stochastic".
    """

    block: int = 256
    rounding: str = "nearest"
    name = "int8"

    def __post_init__(self) -> None:
        check_positive_int("int8", "block", self.block)
        if self.rounding not in _ROUNDINGS:
            raise ConfigError(f"int8: rounding={self.rounding!r}; expected one of {', '.join(_ROUNDINGS)}")

    def nbytes(self, n: int) -> int:
        return 4 * -(-n // self.block) + n

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, key: int) -> None:
        scales, codes = self._split(payload, x.size)
        low, high = _cpu.key_words(key)
        stochastic = self.rounding == "stochastic"
        _encode(x, _cpu.EMPTY if residual is None else residual, scales, codes, self.block, stochastic, low, high)

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        scales, codes = self._split(payload, out.size)
        _decode(out, scales, codes, self.block, add)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, key: int) -> None:
        from . import _cuda_int8

        _cuda_int8.encode(x, residual, *self._split(payload, x.size), self.block, self.rounding == "stochastic", key)

    def _decode_cuda(self, payload: Any, out: Any, add: bool) -> None:
        from . import _cuda_int8

        _cuda_int8.decode(*self._split(payload, out.size), out, self.block, add)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any]:
        """The payload's two parts as (float32 scales, int8 codes) views."""
        head = 4 * -(-n // self.block)
        return payload[:head].view(np.float32), payload[head:].view(np.int8)


@_cpu.inline
def _steps(largest_bits):  # type: ignore[no-untyped-def]
    """The scale of a block, and what to multiply by instead of dividing by it."""
    largest = _cpu.bits_float(largest_bits)
    if largest < np.float32(TINY):
        return np.float32(0.0), np.float32(0.0)
    return largest / np.float32(127.0), np.float32(127.0) / largest


@_cpu.inline
def _nearest(value, inverse):  # type: ignore[no-untyped-def]
    """``value · inverse`` rounded to an integer, plus MAGIC."""
    return _cpu.fma(value, inverse, np.float32(MAGIC))


@_cpu.inline
def _stochastic(value, inverse, at, high):  # type: ignore[no-untyped-def]
    """``value · inverse`` rounded up or down so that the mean is right, plus MAGIC."""
    noisy = _cpu.fma(value, inverse, _cpu.uniform(at, high) - np.float32(0.5))
    return min(max(noisy, np.float32(-127.0)), np.float32(127.0)) + np.float32(MAGIC)


@_cpu.inline
def _code(shifted):  # type: ignore[no-untyped-def]
    """The integer in a number that MAGIC was added to: its lowest byte, for MAGIC's own is 0."""
    return np.int8(_cpu.float_bits(shifted))


@_cpu.inline
def _rest(value, shifted, scale):  # type: ignore[no-untyped-def]
    """What the code does not say about the value."""
    return _cpu.fma(-(shifted - np.float32(MAGIC)), scale, value)


@_cpu.inline
def _quantise(values, codes, inverse):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        codes[i] = _code(_nearest(values[i], inverse))


@_cpu.inline
def _quantise_stochastic(values, codes, inverse, at, high):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        codes[i] = _code(_stochastic(values[i], inverse, at, high))
        at = np.uint32(at + _cpu.STEP)


@_cpu.inline
def _keep(kept, codes, inverse, scale):  # type: ignore[no-untyped-def]
    """As ``_quantise``, leaving the rest in ``kept``: in the same loop, so that the data is read once."""
    for i in range(kept.size):
        shifted = _nearest(kept[i], inverse)
        codes[i] = _code(shifted)
        kept[i] = _rest(kept[i], shifted, scale)


@_cpu.inline
def _keep_stochastic(kept, codes, inverse, scale, at, high):  # type: ignore[no-untyped-def]
    for i in range(kept.size):
        shifted = _stochastic(kept[i], inverse, at, high)
        codes[i] = _code(shifted)
        kept[i] = _rest(kept[i], shifted, scale)
        at = np.uint32(at + _cpu.STEP)


@_cpu.Kernel
def _encode(x, residual, scales, codes, block, stochastic, low, high):  # type: ignore[no-untyped-def]
    # Both choices are invariant and asked right here, so that LLVM splits the loop by them: 25 ns a block otherwise.
    keep = residual.size > 0
    for b in prange(scales.size):
        start, stop = b * block, min(x.size, (b + 1) * block)
        at = _cpu.counter(start, low)
        if keep:
            values, kept, out = x[start:stop], residual[start:stop], codes[start:stop]
            _cpu.add_into(kept, values)
            scale, inverse = _steps(_cpu.max_bits(kept))
            scales[b] = scale
            if stochastic:
                _keep_stochastic(kept, out, inverse, scale, at, high)
            else:
                _keep(kept, out, inverse, scale)
        else:
            values, out = x[start:stop], codes[start:stop]
            scale, inverse = _steps(_cpu.max_bits(values))
            scales[b] = scale
            if stochastic:
                _quantise_stochastic(values, out, inverse, at, high)
            else:
                _quantise(values, out, inverse)


@_cpu.Kernel
def _decode(out, scales, codes, block, add):  # type: ignore[no-untyped-def]
    for b in prange(scales.size):
        start, stop = b * block, min(out.size, (b + 1) * block)
        ob, cb, scale = out[start:stop], codes[start:stop], scales[b]
        if add:
            for i in range(ob.size):
                ob[i] = _cpu.fma(np.float32(cb[i]), scale, ob[i])
        else:
            for i in range(ob.size):
                ob[i] = np.float32(cb[i]) * scale
