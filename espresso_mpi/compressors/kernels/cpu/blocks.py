"""The family of block quantisers: codes of 8, 4 or 2 bits and one float32 scale a block.

``scale = max|x| / top`` over the block, where ``top`` is the largest code, and ``code = round(x / scale)``: an integer,
to nearest or stochastically, or an 8-bit float. A block whose magnitudes are all below ``TINY`` is sent as zeros, for
its scale would underflow.

Payload: ceil(n/block) float32 scales, then the codes, block by block. A block of m codes takes ``s = ceil(m/per)``
bytes, where ``per`` codes share a byte: byte j holds codes j, j + s, j + 2s, ... from its lowest bits upward, as two's
complement (8-bit floats: as their bits); places without a code are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numba import prange

from espresso_mpi.compressors.base import LIMIT

from . import host

TINY = 1e-30
MAGIC = 12582912.0  # 1.5 * 2**23: adding it to a small float leaves the rounded integer in the low mantissa bits
HALF = 0.5 - 2.0**-25
"""What is taken off a ``uniform`` before rounding: the noise then is symmetric, and an exact code stays what it is."""
NEAREST, STOCHASTIC, FLOAT8 = 0, 1, 2
_LIMIT_BITS = np.uint32(np.float32(LIMIT).view(np.uint32))
_CHUNK = 8192  # elements that a thread takes at a time: their codes, before they are packed, stay in the L1 cache
_ROUNDING = 2.0**-22
"""What float32 arithmetic adds to the errors below, relative to ``‖x‖²``: a value a little below half a step may become
a whole one."""


# --- how large the error is -------------------------------------------------------------------------------------------


def nearest_loss(size: int, step: float, relative: float = 0.0) -> float:
    """The least upper bound of ``‖x - C(x)‖² / ‖x‖²`` for a block of ``size`` rounded to nearest.

    The largest element is exact. Another one is off by its relative rounding error or, where codes are evenly spaced,
    by half a step and by itself at most: the worst block has them all at half a step.

    Args:
        step: distance of the evenly spaced codes around 0, relative to the largest.
        relative: largest squared relative error beyond those.
    """
    most = (size - 1) * step**2 / 4
    return max(relative, most / (1 + most)) + _ROUNDING


def stochastic_variance(size: int, top: float) -> float:
    """The least ω for a block of ``size`` rounded stochastically: at most size/(4·top²).

    The largest element is exact; the others, at t steps, have a variance of t(1 - t) steps², relative to
    ``top² + (size - 1)t²``, which is largest at ``t = top / (top + sqrt(top² + size - 1))``, here inserted.
    """
    return (math.sqrt(1 + (size - 1) / top**2) - 1) / 2 + _ROUNDING


def gaussian_loss(size: int, error: Callable[[np.ndarray], np.ndarray]) -> float:
    """``E‖x - C(x)‖² / ‖x‖²`` of normal values in blocks of ``size``, by integration over the block's largest.

    Given the largest, m, which is exact, the others are independent, with the normal density cut off at ±m.

    Args:
        error: mean squared error of values in [0, 1], for 1 as the largest.
    """
    edges = np.linspace(1e-3, 8, 401)
    chance = np.diff([math.exp(size * math.log1p(-math.erfc(m / math.sqrt(2)))) for m in edges])
    largest, t = (edges[1:] + edges[:-1]) / 2, (np.arange(8192) + 0.5) / 8192
    density = np.exp(-((largest[:, None] * t) ** 2) / 2)
    mean = density @ error(t) / density.sum(axis=1)
    return float(chance @ (largest**2 * mean)) * (1 - 1 / size)


# --- the methods ------------------------------------------------------------------------------------------------------


def uint32(values: tuple[int, ...]) -> tuple[np.uint32, ...]:
    return tuple(np.uint32(value) for value in values)


@lru_cache
def integer_error(size: int, top: float, rounding: str) -> float:
    def error(t: np.ndarray) -> np.ndarray:
        part: np.ndarray = top * t - np.floor(top * t)
        return (np.minimum(part, 1 - part) ** 2 if rounding == "nearest" else part * (1 - part)) / top**2

    return gaussian_loss(size, error)


@lru_cache
def float8_error(size: int, top: float, mantissa: int, lowest: int) -> float:
    def error(t: np.ndarray) -> np.ndarray:
        step: np.ndarray = 2.0 ** (np.maximum(np.floor(np.log2(top * t)), lowest) - mantissa)
        return (t - np.rint(top * t / step) * step / top) ** 2

    return gaussian_loss(size, error)


# --- rounding ---------------------------------------------------------------------------------------------------------


@host.inlined
def _steps(largest_bits, top):  # type: ignore[no-untyped-def]
    """The scale of a block, and what to multiply by instead of dividing by it."""
    largest = host.bits_float(largest_bits)
    if largest < np.float32(TINY):
        return np.float32(0.0), np.float32(0.0)
    return largest / top, top / largest


@host.inlined
def _nearest(value, inverse):  # type: ignore[no-untyped-def]
    """``value · inverse`` rounded to an integer, plus MAGIC."""
    return host.fma(value, inverse, np.float32(MAGIC))


@host.inlined
def _stochastic(value, inverse, top, at, high):  # type: ignore[no-untyped-def]
    """``value · inverse`` rounded up or down so that the mean is right, plus MAGIC."""
    noisy = host.fma(value, inverse, host.uniform(at, high) - np.float32(HALF))
    return min(max(noisy, -top), top) + np.float32(MAGIC)


@host.inlined
def _code(shifted):  # type: ignore[no-untyped-def]
    """The integer in a number that MAGIC was added to: its lowest byte, for MAGIC's own is 0."""
    return np.int8(host.float_bits(shifted))


@host.inlined
def _rest(value, shifted, scale):  # type: ignore[no-untyped-def]
    """What the code does not say about the value."""
    return host.fma(-(shifted - np.float32(MAGIC)), scale, value)


@host.inlined
def _float8(value, inverse, shift, lowest):  # type: ignore[no-untyped-def]
    """``value · inverse`` rounded to an 8-bit float: its bits, and its value.

    To the magnitude is added the power of two whose last place is that of the 8-bit float, so that the sum is rounded
    there and its low bits are the mantissa, leading one included.
    """
    bits = host.float_bits(value * inverse)
    sign, magnitude = np.uint32(bits & np.uint32(0x80000000)), np.uint32(bits & np.uint32(0x7FFFFFFF))
    exponent = np.uint32(magnitude & np.uint32(0x7F800000))
    exponent = exponent if exponent > lowest else lowest
    power = np.uint32(exponent + np.uint32(shift << np.uint32(23)))
    shifted = host.bits_float(magnitude) + host.bits_float(power)
    mantissa = np.uint32(host.float_bits(shifted) - power)
    code = np.uint32(np.uint32(np.uint32(exponent - lowest) >> shift) + mantissa)
    rounded = np.uint32(host.float_bits(shifted - host.bits_float(power)) | sign)
    return np.int8(np.uint32(code | np.uint32(sign >> np.uint32(24)))), host.bits_float(rounded)


@host.inlined
def _float8_value(code, shift, lowest):  # type: ignore[no-untyped-def]
    """The value of an 8-bit float; what would be infinite or NaN continues the series of finite values."""
    bits = np.uint32(np.int32(code))
    magnitude = np.uint32(bits & np.uint32(0x7F))
    one = np.uint32(np.uint32(1) << np.uint32(np.uint32(23) - shift))  # the smallest normal value
    normal = host.bits_float(np.uint32(np.uint32(magnitude << shift) + np.uint32(lowest - np.uint32(1 << 23))))
    unit = host.bits_float(np.uint32(lowest - np.uint32(np.uint32(np.uint32(23) - shift) << np.uint32(23))))
    value = normal if magnitude >= one else np.float32(np.int32(magnitude)) * unit
    return host.bits_float(np.uint32(host.float_bits(value) | np.uint32(bits & np.uint32(0x80000000))))


# --- one block --------------------------------------------------------------------------------------------------------


@host.inlined
def _add_max(kept, x):  # type: ignore[no-untyped-def]
    """``kept += x``, and the largest magnitude of the sums as float32 bits."""
    top = np.uint32(0)
    for i in range(x.size):
        total = kept[i] + x[i]
        kept[i] = total
        bits = np.uint32(host.float_bits(total) & np.uint32(0x7FFFFFFF))
        top = bits if bits > top else top
    return top


@host.inlined
def _tame_max(out, x):  # type: ignore[no-untyped-def]
    """``out = tame(x)``, and the largest magnitude as float32 bits."""
    for i in range(x.size):
        out[i] = host.tame(x[i])
    return host.max_bits(out)


@host.inlined
def _quantise(values, codes, inverse):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        codes[i] = _code(_nearest(values[i], inverse))


@host.inlined
def _quantise_stochastic(values, codes, inverse, top, at, high):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        codes[i] = _code(_stochastic(values[i], inverse, top, at, high))
        at = np.uint32(at + host.STEP)


@host.inlined
def _quantise_float8(values, codes, inverse, shift, lowest):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        codes[i], _ = _float8(values[i], inverse, shift, lowest)


@host.inlined
def _keep(kept, codes, inverse, scale):  # type: ignore[no-untyped-def]
    """As ``_quantise``, leaving the rest in ``kept``: in the same loop, so that the data is read once."""
    for i in range(kept.size):
        shifted = _nearest(kept[i], inverse)
        codes[i] = _code(shifted)
        kept[i] = _rest(kept[i], shifted, scale)


@host.inlined
def _keep_stochastic(kept, codes, inverse, scale, top, at, high):  # type: ignore[no-untyped-def]
    for i in range(kept.size):
        shifted = _stochastic(kept[i], inverse, top, at, high)
        codes[i] = _code(shifted)
        kept[i] = _rest(kept[i], shifted, scale)
        at = np.uint32(at + host.STEP)


@host.inlined
def _keep_float8(kept, codes, inverse, scale, shift, lowest):  # type: ignore[no-untyped-def]
    for i in range(kept.size):
        codes[i], rounded = _float8(kept[i], inverse, shift, lowest)
        kept[i] = host.fma(-rounded, scale, kept[i])


@host.inlined
def _keep_block(kept, codes, largest, how, at, high):  # type: ignore[no-untyped-def]
    """Quantise one block, whose largest magnitude is known, and leave in ``kept`` what is lost. Gives the scale."""
    rule, top, shrink, shift, lowest = how
    scale, inverse = _steps(largest, top)
    scale *= shrink
    if rule == NEAREST:
        _keep(kept, codes, inverse, scale)
    elif rule == STOCHASTIC:
        _keep_stochastic(kept, codes, inverse, scale, top, at, high)
    else:
        _keep_float8(kept, codes, inverse, scale, shift, lowest)
    return scale


@host.inlined
def _block(values, codes, largest, how, at, high):  # type: ignore[no-untyped-def]
    """As ``_keep_block`` for values that stay as they are."""
    rule, top, shrink, shift, lowest = how
    scale, inverse = _steps(largest, top)
    if rule == NEAREST:
        _quantise(values, codes, inverse)
    elif rule == STOCHASTIC:
        _quantise_stochastic(values, codes, inverse, top, at, high)
    else:
        _quantise_float8(values, codes, inverse, shift, lowest)
    return scale * shrink


@host.inlined
def _wild_block(values, codes, how, at, high):  # type: ignore[no-untyped-def]
    """As ``_block`` where something is too large or not finite: rare enough for a copy."""
    tamed = np.empty(values.size, np.float32)
    return _keep_block(tamed, codes, _tame_max(tamed, values), how, at, high)


# --- several codes in a byte ------------------------------------------------------------------------------------------


@host.inlined
def _pack(codes, packed, block, per):  # type: ignore[no-untyped-def]
    """Put the codes of consecutive blocks into bytes: four bytes at a time where the blocks allow it."""
    whole = codes.size // block if block % (4 * per) == 0 else 0
    words, parts = _words(packed, whole * block // per), _words(codes, whole * block)
    if per == 2:
        _pack_4(parts, words, block // 8, whole)
    else:
        _pack_2(parts, words, block // 16, whole)
    at = whole * (block // per)
    for start in range(whole * block, codes.size, block):
        some = codes[start : min(codes.size, start + block)]
        _pack_any(some, packed[at : at + -(-some.size // per)], 8 // per)
        at += -(-block // per)


@host.inlined
def _unpack(packed, codes, block, per):  # type: ignore[no-untyped-def]
    """Take the codes of consecutive blocks out of their bytes."""
    whole = codes.size // block if block % (4 * per) == 0 else 0
    words, parts = _words(packed, whole * block // per), _words(codes, whole * block)
    if per == 2:
        _unpack_4(words, parts, block // 8, whole)
    else:
        _unpack_2(words, parts, block // 16, whole)
    at = whole * (block // per)
    for start in range(whole * block, codes.size, block):
        some = codes[start : min(codes.size, start + block)]
        _unpack_any(packed[at : at + -(-some.size // per)], some, 8 // per)
        at += -(-block // per)


@host.inlined
def _words(array, size):  # type: ignore[no-untyped-def]
    """The first ``size`` bytes, a multiple of 4, as uint32."""
    return array[:size].view(np.uint32)


@host.inlined
def _pack_4(parts, words, w, blocks):  # type: ignore[no-untyped-def]
    mask = np.uint32(0x0F0F0F0F)
    for b in range(blocks):
        low, high, out = parts[2 * b * w :][:w], parts[(2 * b + 1) * w :][:w], words[b * w :][:w]
        for i in range(out.size):
            out[i] = np.uint32((low[i] & mask) | ((high[i] & mask) << np.uint32(4)))


@host.inlined
def _pack_2(parts, words, w, blocks):  # type: ignore[no-untyped-def]
    mask = np.uint32(0x03030303)
    for b in range(blocks):
        codes, out = parts[4 * b * w :], words[b * w :][:w]
        c0, c1, c2, c3 = codes[:w], codes[w:][:w], codes[2 * w :][:w], codes[3 * w :][:w]
        for i in range(out.size):
            first = np.uint32((c0[i] & mask) | ((c1[i] & mask) << np.uint32(2)))
            second = np.uint32((c2[i] & mask) | ((c3[i] & mask) << np.uint32(2)))
            out[i] = np.uint32(first | np.uint32(second << np.uint32(4)))


@host.inlined
def _unpack_4(words, parts, w, blocks):  # type: ignore[no-untyped-def]
    for b in range(blocks):
        low, high, word = parts[2 * b * w :][:w], parts[(2 * b + 1) * w :][:w], words[b * w :][:w]
        for i in range(word.size):
            low[i] = _signed_4(word[i])
            high[i] = _signed_4(np.uint32(word[i] >> np.uint32(4)))


@host.inlined
def _unpack_2(words, parts, w, blocks):  # type: ignore[no-untyped-def]
    for b in range(blocks):
        codes, word = parts[4 * b * w :], words[b * w :][:w]
        c0, c1, c2, c3 = codes[:w], codes[w:][:w], codes[2 * w :][:w], codes[3 * w :][:w]
        for i in range(word.size):
            c0[i] = _signed_2(word[i])
            c1[i] = _signed_2(np.uint32(word[i] >> np.uint32(2)))
            c2[i] = _signed_2(np.uint32(word[i] >> np.uint32(4)))
            c3[i] = _signed_2(np.uint32(word[i] >> np.uint32(6)))


@host.inlined
def _signed_4(word):  # type: ignore[no-untyped-def]
    """The lower halves of four bytes as signed bytes: with its sign bit flipped c is c + 8, and 8 + 120 = 128."""
    flipped = np.uint32(np.uint32(word & np.uint32(0x0F0F0F0F)) ^ np.uint32(0x08080808))
    return np.uint32(np.uint32(flipped + np.uint32(0x78787878)) ^ np.uint32(0x80808080))


@host.inlined
def _signed_2(word):  # type: ignore[no-untyped-def]
    """The lowest two bits of four bytes as signed bytes: with its sign bit flipped c is c + 2, and 2 + 126 = 128."""
    flipped = np.uint32(np.uint32(word & np.uint32(0x03030303)) ^ np.uint32(0x02020202))
    return np.uint32(np.uint32(flipped + np.uint32(0x7E7E7E7E)) ^ np.uint32(0x80808080))


@host.inlined
def _pack_any(codes, packed, bits):  # type: ignore[no-untyped-def]
    packed[:] = 0
    mask = (1 << bits) - 1
    for i in range(codes.size):
        packed[i % packed.size] |= np.int8((codes[i] & mask) << (i // packed.size * bits))


@host.inlined
def _unpack_any(packed, codes, bits):  # type: ignore[no-untyped-def]
    top = 32 - bits
    for i in range(codes.size):
        moved = np.int32(np.int32(packed[i % packed.size]) << (top - i // packed.size * bits))
        codes[i] = np.int8(moved >> top)


# --- the kernels ------------------------------------------------------------------------------------------------------


@host.inlined
def _keep_blocks(x, residual, scales, codes, block, how, at, high):  # type: ignore[no-untyped-def]
    for b in range(scales.size):
        start, stop = b * block, min(x.size, (b + 1) * block)
        kept = residual[start:stop]
        largest = _add_max(kept, x[start:stop])
        if largest > _LIMIT_BITS:
            largest = _tame_max(kept, kept)
        first = np.uint32(at + np.uint32(start) * host.STEP)
        scales[b] = _keep_block(kept, codes[start:stop], largest, how, first, high)


@host.inlined
def _blocks(x, scales, codes, block, how, at, high):  # type: ignore[no-untyped-def]
    for b in range(scales.size):
        start, stop = b * block, min(x.size, (b + 1) * block)
        values, out = x[start:stop], codes[start:stop]
        first = np.uint32(at + np.uint32(start) * host.STEP)
        largest = host.max_bits(values)
        if largest > _LIMIT_BITS:
            scales[b] = _wild_block(values, out, how, first, high)
        else:
            scales[b] = _block(values, out, largest, how, first, high)


@host.Kernel
def encode(x, residual, scales, codes, block, how, low, high):  # type: ignore[no-untyped-def]
    each = max(1, _CHUNK // block)
    for chunk in prange(-(-scales.size // each)):
        first, last = chunk * each, min(scales.size, (chunk + 1) * each)
        start, stop, at = first * block, min(x.size, last * block), host.counter(first * block, low)
        values, steps, out = x[start:stop], scales[first:last], codes[start:stop]
        if residual.size > 0:
            _keep_blocks(values, residual[start:stop], steps, out, block, how, at, high)
        else:
            _blocks(values, steps, out, block, how, at, high)


@host.Kernel
def encode_packed(x, residual, scales, codes, block, how, low, high, per):  # type: ignore[no-untyped-def]
    each, width = max(1, _CHUNK // block), -(-block // per)
    for chunk in prange(-(-scales.size // each)):
        first, last = chunk * each, min(scales.size, (chunk + 1) * each)
        start, stop, at = first * block, min(x.size, last * block), host.counter(first * block, low)
        values, steps, unpacked = x[start:stop], scales[first:last], np.empty(stop - start, np.int8)
        if residual.size > 0:
            _keep_blocks(values, residual[start:stop], steps, unpacked, block, how, at, high)
        else:
            _blocks(values, steps, unpacked, block, how, at, high)
        _pack(unpacked, codes[first * width : min(codes.size, last * width)], block, per)


@host.inlined
def _usable(scale, largest):  # type: ignore[no-untyped-def]
    """The scale of a payload, 0 unless it is one that encoding can write: so the values are finite."""
    return scale if host.float_bits(scale) <= host.float_bits(largest) else np.float32(0.0)


@host.inlined
def _integers(out, codes, scale, add):  # type: ignore[no-untyped-def]
    if add:
        for i in range(out.size):
            out[i] = host.fma(np.float32(codes[i]), scale, out[i])
    else:
        for i in range(out.size):
            out[i] = np.float32(codes[i]) * scale


@host.inlined
def _floats8(out, codes, scale, shift, lowest, add):  # type: ignore[no-untyped-def]
    if add:
        for i in range(out.size):
            out[i] = host.fma(_float8_value(codes[i], shift, lowest), scale, out[i])
    else:
        for i in range(out.size):
            out[i] = _float8_value(codes[i], shift, lowest) * scale


@host.inlined
def _decode_blocks(out, scales, codes, block, how, add):  # type: ignore[no-untyped-def]
    float8, largest, shift, lowest = how
    for b in range(scales.size):
        start, stop, scale = b * block, min(out.size, (b + 1) * block), _usable(scales[b], largest)
        if float8:
            _floats8(out[start:stop], codes[start:stop], scale, shift, lowest, add)
        else:
            _integers(out[start:stop], codes[start:stop], scale, add)


@host.Kernel
def decode(out, scales, codes, block, how, add):  # type: ignore[no-untyped-def]
    each = max(1, _CHUNK // block)
    for chunk in prange(-(-scales.size // each)):
        first, last = chunk * each, min(scales.size, (chunk + 1) * each)
        start, stop = first * block, min(out.size, last * block)
        _decode_blocks(out[start:stop], scales[first:last], codes[start:stop], block, how, add)


@host.Kernel
def decode_packed(out, scales, codes, block, how, add, per):  # type: ignore[no-untyped-def]
    each, width = max(1, _CHUNK // block), -(-block // per)
    for chunk in prange(-(-scales.size // each)):
        first, last = chunk * each, min(scales.size, (chunk + 1) * each)
        start, stop = first * block, min(out.size, last * block)
        unpacked = np.empty(stop - start, np.int8)
        _unpack(codes[first * width : min(codes.size, last * width)], unpacked, block, per)
        _decode_blocks(out[start:stop], scales[first:last], unpacked, block, how, add)
