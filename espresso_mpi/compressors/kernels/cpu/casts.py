"""The casts: one 16-bit float an element, rounded to nearest even or, to bfloat16, stochastically.

Payload: n little-endian elements, 2·n bytes. They may be summed over the ranks; what then is infinite is decoded as the
largest finite value, and NaN, which only a damaged payload holds, as 0.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from . import entries, host

HALF, BRAIN, STOCHASTIC = 0, 1, 2
LARGEST = {"float16": 65504.0, "bfloat16": (2 - 2.0**-7) * 2.0**127}
BEYOND_HALF = 65520.0
"""Magnitudes from here on are not rounded to a half but cut to the largest one."""

_CHUNK = 8192


def rounding_error(mantissa: int, lowest: int) -> float:
    """``E(x - C(x))² / Ex²`` for normal x rounded to nearest: errors of variance unit²/12 in each binade.

    Args:
        mantissa: bits after the leading one; lowest: exponent of the smallest normal number.
    """
    return sum(_chance(e) * 4.0 ** (e - mantissa) / 12 for e in range(max(lowest, -40), 4))


def _chance(e: int) -> float:
    """The probability that the magnitude of a normal value lies in [2**e, 2**(e+1))."""
    return math.erf(2.0 ** (e + 1) / math.sqrt(2)) - math.erf(2.0**e / math.sqrt(2))


# --- one element ------------------------------------------------------------------------------------------------------


@host.inlined
def _within(value, largest):  # type: ignore[no-untyped-def]
    value = largest if value > largest else value
    return -largest if value < -largest else value


@host.inlined
def _half(value):  # type: ignore[no-untyped-def]
    return host.to_half(_within(value, np.float32(65504.0)))


@host.inlined
def _brain(value):  # type: ignore[no-untyped-def]
    """The bits of the nearest bfloat16, ties to even; the carry into the exponent is the right one."""
    bits = host.float_bits(value)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(bits + np.uint32(np.uint32(0x7FFF) + odd)) >> np.uint32(16))


@host.inlined
def _brain_stochastic(value, at, high):  # type: ignore[no-untyped-def]
    """The bits of the bfloat16 below or above, so that the mean is right: 16 random bits are added and cut off."""
    noise = np.uint32(np.int32(host.uniform(at, high) * np.float32(65536.0)))
    return np.uint16(np.uint32(host.float_bits(value) + noise) >> np.uint32(16))


@host.inlined
def _from_brain(code):  # type: ignore[no-untyped-def]
    return host.bits_float(np.uint32(np.uint32(code) << np.uint32(16)))


@host.inlined
def _finite(value, largest):  # type: ignore[no-untyped-def]
    value = _within(value, largest)
    return value if value == value else np.float32(0.0)


# --- the kernels ------------------------------------------------------------------------------------------------------


@host.inlined
def _cast(x, codes, rule, at, high):  # type: ignore[no-untyped-def]
    if rule == HALF:
        for i in range(x.size):
            codes[i] = _half(host.sanitise(x[i]))
    elif rule == BRAIN:
        for i in range(x.size):
            codes[i] = _brain(host.sanitise(x[i]))
    else:
        for i in range(x.size):
            codes[i] = _brain_stochastic(host.sanitise(x[i]), at, high)
            at = np.uint32(at + host.STEP)


@host.inlined
def _cast_keep(x, kept, codes, rule, at, high):  # type: ignore[no-untyped-def]
    if rule == HALF:
        for i in range(x.size):
            value = host.sanitise(x[i] + kept[i])
            code = _half(value)
            codes[i] = code
            kept[i] = value - host.from_half(code)
    elif rule == BRAIN:
        for i in range(x.size):
            value = host.sanitise(x[i] + kept[i])
            code = _brain(value)
            codes[i] = code
            kept[i] = value - _from_brain(code)
    else:
        for i in range(x.size):
            value = host.sanitise(x[i] + kept[i])
            code = _brain_stochastic(value, at, high)
            codes[i] = code
            kept[i] = value - _from_brain(code)
            at = np.uint32(at + host.STEP)


@host.inline
def _count_cut(x, kept, codes):  # type: ignore[no-untyped-def]
    """How many halves were cut; the codes are still in the cache, and hardly ever one is the largest."""
    top = np.uint16(0)
    for i in range(codes.size):
        top = max(top, np.uint16(codes[i] & np.uint16(0x7FFF)))
    cut = 0
    if top == np.uint16(0x7BFF):
        for i in range(codes.size):
            value = kept[i] + host.from_half(codes[i]) if kept.size else x[i]
            cut += abs(value) >= np.float32(BEYOND_HALF)
    return cut


@host.Kernel
def encode(x, residual, codes, rule, low, high):  # type: ignore[no-untyped-def]
    keep = residual.size > 0
    cut = 0
    for chunk in prange((x.size + _CHUNK - 1) // _CHUNK):
        a, b = chunk * _CHUNK, min(x.size, (chunk + 1) * _CHUNK)
        if keep:
            _cast_keep(x[a:b], residual[a:b], codes[a:b], rule, host.counter(a, low), high)
        else:
            _cast(x[a:b], codes[a:b], rule, host.counter(a, low), high)
        cut += _count_cut(x[a:b], residual[a:b], codes[a:b]) if rule == HALF else 0
    return cut


@host.inlined
def _widen(out, codes, half, largest):  # type: ignore[no-untyped-def]
    if half:
        for i in range(out.size):
            out[i] = _finite(host.from_half(codes[i]), largest)
    else:
        for i in range(out.size):
            out[i] = _finite(_from_brain(codes[i]), largest)


@host.inlined
def _widen_add(out, codes, half, largest):  # type: ignore[no-untyped-def]
    if half:
        for i in range(out.size):
            out[i] += _finite(host.from_half(codes[i]), largest)
    else:
        for i in range(out.size):
            out[i] += _finite(_from_brain(codes[i]), largest)


@host.Kernel
def decode(out, codes, half, largest, add):  # type: ignore[no-untyped-def]
    for chunk in prange((out.size + _CHUNK - 1) // _CHUNK):
        a, b = chunk * _CHUNK, min(out.size, (chunk + 1) * _CHUNK)
        if add:
            _widen_add(out[a:b], codes[a:b], half, largest)
        else:
            _widen(out[a:b], codes[a:b], half, largest)


_encode, _decode = encode.serial, decode.serial


@entries.Entry
def encode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Parameter: the rule."""
    rule = np.int64(entries.doubles(parameters, 1)[0])
    low, high = host.key_from(key, first)
    kept = entries.floats_if(residual, n)
    return _encode(entries.floats(x, n), kept, entries.codes16(payload + 2 * first, n), rule, low, high)


@entries.Entry
def decode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Parameters: whether codes are halves, and the largest finite value."""
    p = entries.doubles(parameters, 2)
    _decode(entries.floats(x, n), entries.codes16(payload + 2 * first, n), p[0] != 0, np.float32(p[1]), add != 0)
    return 0
