"""``natural``: natural compression, rounding to powers of two (Horváth et al., 2019); 8 + 8/block bits per element.

An element between two powers of two becomes one of them, at random so that the mean is right. Unbiased, with variance
ω = 1/8; on Gaussian values the squared error relative to ``‖x‖²`` is 0.0818.

The paper sends the sign and the exponent of a float32, 9 bits. Here a byte counts the exponent down from the largest
one in the block, 127 powers of two deep, and so loses nothing: only below 2^-126 times the largest magnitude is the
neighbour on the one side 0, and an element there still is right in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numba import prange

from .base import Compressor
from .by_address import KernelCall
from .checks import check_positive_int
from .context import Context
from .kernels.cpu import entries, host
from .kernels.cpu.quantiser import rounding_variance
from .registry import register


@register
@dataclass(frozen=True)
class Natural(Compressor):
    """Stochastic powers of two. Payload: n bytes, bit 7 the sign and k below it, then ceil(n/block) int8 exponents e.

    A byte stands for ``± 2^(k - 127 + e)``, for 0 if k = 0.

    Args:
        block: elements that share the largest exponent.
    """

    block: int = 2048
    name = "natural"
    examples = ("natural:block=100",)

    def __post_init__(self) -> None:
        check_positive_int("natural", "block", self.block)

    def nbytes(self, n: int) -> int:
        return n + -(-n // self.block)

    def contraction(self, n: int) -> float:
        return 0.875

    def variance(self, n: int) -> float | None:
        return 0.125

    def gaussian_error(self, n: int) -> float | None:
        return _gaussian_error()

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        kept = host.EMPTY if residual is None else residual
        _encode(x, kept, *self._split(payload, x.size), self.block, *host.key_words(context.key))

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        _decode(out, *self._split(payload, out.size), self.block, add)

    def encoder(self, n: int) -> KernelCall:
        return KernelCall(_encode_at, (self.block,), draws=True, grain=self.block, leading=8)

    def decoder(self, n: int) -> KernelCall:
        return KernelCall(_decode_at, (self.block,), grain=self.block)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import natural as cuda_natural

        cuda_natural.encode(x, residual, *self._split(payload, x.size), self.block, context.key)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from .kernels.cuda import natural as cuda_natural

        cuda_natural.decode(*self._split(payload, out.size), out, self.block, add)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any]:
        """The payload's two parts as (uint8 codes, int8 exponents) views."""
        return payload[:n], payload[n:].view(np.int8)


@lru_cache(maxsize=1)
def _gaussian_error() -> float:
    """The mean rounding variance of a normal value, integrated over its logarithm."""
    log = np.linspace(-12, 2.5, 1 << 16)
    x = np.exp(log)
    density = np.exp(-(x**2) / 2) * x * np.sqrt(2 / np.pi) * (log[1] - log[0])
    return float(np.sum(density * rounding_variance(x * 2.0**30, True)) / 2.0**60)


@host.inline
def _exponent(bits):  # type: ignore[no-untyped-def]
    """The exponent of a block whose largest magnitude has these bits, that of the power of two not below it.

    At least -126, so that both 2^e and 2^-e are normal numbers; at most 126, for LIMIT.
    """
    above = np.int32(np.uint32(bits + np.uint32(0x7FFFFF)) >> np.uint32(23))
    return np.int32(max(above, np.int32(1)) - np.int32(127))


@host.inline
def _power(exponent):  # type: ignore[no-untyped-def]
    """2 to an exponent from -126 to 127."""
    return host.bits_float(np.uint32(np.uint32(np.int32(exponent) + np.int32(127)) << np.uint32(23)))


@host.inline
def _value(code):  # type: ignore[no-untyped-def]
    """What a byte stands for where e = 0."""
    number = np.uint32(code)
    low = np.uint32(np.uint32(number & np.uint32(127)) << np.uint32(23))
    return host.bits_float(np.uint32(low | np.uint32(np.uint32(number & np.uint32(128)) << np.uint32(24))))


@host.inline
def _round(values, codes, factor, at, high):  # type: ignore[no-untyped-def]
    """Random bits added to the fraction of a float carry into its exponent as often as the fraction says."""
    for i in range(values.size):
        value = values[i]
        bits = host.float_bits(np.float32(abs(value) * factor))
        noise = np.uint32(np.int32(host.uniform(at, high) * np.float32(8388608.0)))
        sign = np.uint32(host.float_bits(value) >> np.uint32(24)) & np.uint32(128)
        codes[i] = np.uint8(np.uint32(np.uint32(bits + noise) >> np.uint32(23)) | sign)
        at = np.uint32(at + host.STEP)


@host.inline
def _subtract(kept, codes, scale):  # type: ignore[no-untyped-def]
    for i in range(kept.size):
        kept[i] = host.fma(-_value(codes[i]), scale, kept[i])


@host.Kernel
def _encode(x, residual, codes, exponents, block, low, high):  # type: ignore[no-untyped-def]
    keep = residual.size > 0
    for b in prange(exponents.size):
        start, stop = b * block, min(x.size, (b + 1) * block)
        values, out, at = x[start:stop], codes[start:stop], host.counter(start, low)
        if keep:
            kept = residual[start:stop]
            host.sanitised_sum(kept, values)
            exponent = _exponent(host.max_bits(kept))
            _round(kept, out, _power(-exponent), at, high)
            _subtract(kept, out, _power(exponent))
        else:
            bits = host.max_bits(values)
            if bits > np.uint32(host.LIMIT_BITS):
                sanitised = host.sanitised_copy(values)
                exponent = _exponent(host.max_bits(sanitised))
                _round(sanitised, out, _power(-exponent), at, high)
            else:
                exponent = _exponent(bits)
                _round(values, out, _power(-exponent), at, high)
        exponents[b] = exponent


@host.inline
def _decode_block(out, codes, scale, add):  # type: ignore[no-untyped-def]
    if add:
        for i in range(out.size):
            out[i] = host.fma(_value(codes[i]), scale, out[i])
    else:
        for i in range(out.size):
            out[i] = _value(codes[i]) * scale


@host.Kernel
def _decode(out, codes, exponents, block, add):  # type: ignore[no-untyped-def]
    for b in prange(exponents.size):
        start, stop = b * block, min(out.size, (b + 1) * block)
        # Others than these only come from damage; they must not lead to infinity.
        exponent = min(max(np.int32(exponents[b]), np.int32(-126)), np.int32(126))
        _decode_block(out[start:stop], codes[start:stop], _power(exponent), add)


# --- by address -------------------------------------------------------------------------------------------------------

_encode_serial, _decode_serial = _encode.serial, _decode.serial


@host.inline
def _parts_at(payload, n, block, first, whole):  # type: ignore[no-untyped-def]
    """The codes and the exponents of n elements of a payload."""
    blocks = (n + block - 1) // block
    return entries.bytes_at(payload + first, n), entries.codes8(payload + whole + first // block, blocks)


@entries.Entry
def _encode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    block = np.int64(entries.doubles(parameters, 1)[0])
    codes, exponents = _parts_at(payload, n, block, first, whole)
    low, high = host.key_from(key, first)
    kept = entries.floats_if(residual, n)
    _encode_serial(entries.floats(x, n), kept, codes, exponents, block, low, high)
    return 0


@entries.Entry
def _decode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    block = np.int64(entries.doubles(parameters, 1)[0])
    codes, exponents = _parts_at(payload, n, block, first, whole)
    _decode_serial(entries.floats(x, n), codes, exponents, block, add != 0)
    return 0
