"""The family of block quantisers: codes of 8, 4 or 2 bits and one float32 scale per block.

``scale = max|x| / top`` over the block, where ``top`` is the largest code, and ``code = round(x / scale)``: an integer,
to nearest or stochastically, or an 8-bit float. A block whose magnitudes are all below ``TINY`` is sent as zeros, for
its scale would underflow.

Payload: ceil(n/block) float32 scales, then the codes, block by block. A block of m codes takes ``s = ceil(m/per)``
bytes, where ``per`` codes share a byte: byte j holds codes j, j + s, j + 2s, ... from its lowest bits upward, as two's
complement (8-bit floats: as their bits); places without a code are 0.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from . import entries, host
from .packing import pack, unpack

TINY = 1e-30
MAGIC = 12582912.0  # 1.5 * 2**23: adding it to a small float leaves the rounded integer in the low mantissa bits
HALF = 0.5 - 2.0**-25
"""What is taken off a ``uniform`` before rounding: the noise then is symmetric, and an exact code stays what it is."""
NEAREST, STOCHASTIC, FLOAT8 = 0, 1, 2
_LIMIT_BITS = np.uint32(host.LIMIT_BITS)
_CHUNK = 8192  # elements that a thread takes at a time: their codes, before they are packed, stay in the L1 cache


def uint32(values: tuple[int, ...]) -> tuple[np.uint32, ...]:
    return tuple(np.uint32(value) for value in values)


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
def _sanitise_max(out, x):  # type: ignore[no-untyped-def]
    """``out = sanitise(x)``, and the largest magnitude as float32 bits."""
    host.sanitise_into(out, x)
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
def _sanitised_block(values, codes, how, at, high):  # type: ignore[no-untyped-def]
    """As ``_block`` where something is too large or not finite: rare enough for a copy."""
    sanitised = np.empty(values.size, np.float32)
    return _keep_block(sanitised, codes, _sanitise_max(sanitised, values), how, at, high)


# --- the kernels ------------------------------------------------------------------------------------------------------


@host.inlined
def _keep_blocks(x, residual, scales, codes, block, how, at, high):  # type: ignore[no-untyped-def]
    for b in range(scales.size):
        start, stop = b * block, min(x.size, (b + 1) * block)
        kept = residual[start:stop]
        largest = _add_max(kept, x[start:stop])
        if largest > _LIMIT_BITS:
            largest = _sanitise_max(kept, kept)
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
            scales[b] = _sanitised_block(values, out, how, first, high)
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
        pack(unpacked, codes[first * width : min(codes.size, last * width)], block, per)


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
        unpack(codes[first * width : min(codes.size, last * width)], unpacked, block, per)
        _decode_blocks(out[start:stop], scales[first:last], unpacked, block, how, add)


# --- by address -------------------------------------------------------------------------------------------------------

_encode, _encode_packed = encode.serial, encode_packed.serial
_decode, _decode_packed = decode.serial, decode_packed.serial


@host.inline
def _codes_at(payload, n, block, per, first, whole):  # type: ignore[no-untyped-def]
    """The scales and the codes of n elements of a payload."""
    before, width, rest = first // block, (block + per - 1) // per, n % block
    codes = payload + 4 * ((whole + block - 1) // block) + before * width
    size = n // block * width + (rest + per - 1) // per
    return entries.floats(payload + 4 * before, (n + block - 1) // block), entries.codes8(codes, size)


@entries.Entry
def encode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Parameters: block, codes in a byte, then ``how`` of ``encode``."""
    p = entries.doubles(parameters, 7)
    block, per = np.int64(p[0]), np.int64(p[1])
    scales, codes = _codes_at(payload, n, block, per, first, whole)
    how = (np.int64(p[2]), np.float32(p[3]), np.float32(p[4]), np.uint32(p[5]), np.uint32(p[6]))
    low, high = host.key_from(key, first)
    values, kept = entries.floats(x, n), entries.floats_if(residual, n)
    if per == 1:
        _encode(values, kept, scales, codes, block, how, low, high)
    else:
        _encode_packed(values, kept, scales, codes, block, how, low, high, per)
    return 0


@entries.Entry
def decode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Parameters: block, codes in a byte, then ``how`` of ``decode``."""
    p = entries.doubles(parameters, 6)
    block, per = np.int64(p[0]), np.int64(p[1])
    scales, codes = _codes_at(payload, n, block, per, first, whole)
    how = (p[2] != 0, np.float32(p[3]), np.uint32(p[4]), np.uint32(p[5]))
    if per == 1:
        _decode(entries.floats(x, n), scales, codes, block, how, add != 0)
    else:
        _decode_packed(entries.floats(x, n), scales, codes, block, how, add != 0, per)
    return 0
