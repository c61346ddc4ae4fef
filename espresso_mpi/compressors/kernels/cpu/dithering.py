"""What ``qsgd``, ``natural_dithering`` and ``terngrad`` share: stochastic levels of a block's norm, packed in bits.

An element becomes a level number k, -s ≤ k ≤ s, that stands for ``k · step`` (linear) or ``±2^(|k|-1) · step``, 0 for
k = 0 (powers of two), with ``step = norm / top``, where top is what the highest level counts: s or 2^(s-1). The payload
holds the numbers of each block, in two's complement of ``width`` bits, and one float32 step per block.

A group of 64 elements becomes ``width`` words of 64 bits: bit i of word j is bit j of element i. So every width is
packed by vector comparisons on a CPU and by votes of a warp on a GPU. Each block starts a new group.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from espresso_mpi.compressors.limit import LIMIT

from . import entries, host, vectors
from .bit_planes import apply_group, number_at, pack, power_of
from .quantiser import L2, MAX, Quantiser

TINY = 2.0**-100
"""A block of a smaller norm is sent as zeros: its step, and the inverse of it, might not be normal numbers."""

_SPAN = 8192  # elements that a thread takes at a time, unless a block is larger
_PIECE = 1024  # elements whose level numbers are held at a time


def largest_step(q: Quantiser) -> np.float32:
    """What no step exceeds: a decoder takes larger ones, and such as are not numbers, for damage and for 0."""
    return np.float32(LIMIT / q.top * (1 + 1e-6))


_NARROW, _WIDE = np.empty(0, np.int8), np.empty(0, np.int16)


def is_narrow(width: int) -> bool:
    """Whether a byte holds level numbers of that width."""
    return width <= 8


def kind(width: int) -> np.ndarray:
    """An array of the type that holds level numbers of that width."""
    return _NARROW if is_narrow(width) else _WIDE


# --- norms ------------------------------------------------------------------------------------------------------------


@intrinsic
def _square_sum_groups(typingctx, x, groups, factor):  # type: ignore[no-untyped-def]
    """Sum of ``(factor · x)²`` over ``64 * groups`` elements: 64 running lane sums, then a pairwise tree over them."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        vector = vectors.floats(64)
        total = cgutils.alloca_once_value(builder, vectors.constant(vector, 0.0))
        factors = vectors.splat(builder, args[2], 64)
        with cgutils.for_range(builder, args[1]) as loop:
            index = builder.mul(loop.index, ir.Constant(loop.index.type, 64))
            values = builder.load(vectors.pointer(context, builder, sig.args[0], args[0], index, vector), align=4)
            scaled = builder.fmul(values, factors)
            builder.store(vectors.fma(builder, scaled, scaled, builder.load(total)), total)
        return vectors.tree_sum(builder, builder.load(total))

    return types.float32(x, types.intp, types.float32), codegen


@host.inline
def _root_square(values, bits, mean):  # type: ignore[no-untyped-def]
    """The Euclidean norm, or the root mean square, of values whose largest magnitude has these bits.

    They are divided by its power of two first, so that no square is too large or too small. The format fixes the order
    of the sum: whole groups of 64 by lanes and tree, then the rest one by one.
    """
    power = np.uint32(bits & np.uint32(0x7F800000))
    factor = host.bits_float(np.uint32(np.uint32(0x7F000000) - power))
    groups = values.size // 64
    total = _square_sum_groups(values, groups, factor)
    for i in range(64 * groups, values.size):
        scaled = np.float32(values[i] * factor)
        total = host.fma(scaled, scaled, total)
    if mean:
        total = np.float32(total / np.float32(values.size))
    return np.float32(np.float32(math.sqrt(total)) * host.bits_float(power))


@host.inline
def _norm(values, bits, norm, clip):  # type: ignore[no-untyped-def]
    """What the levels are shares of; at most LIMIT, and never below a magnitude that is to be kept."""
    largest = host.bits_float(bits)
    if norm == MAX or largest < np.float32(TINY):
        return largest
    if norm == L2:
        return min(max(_root_square(values, bits, False), largest), np.float32(LIMIT))
    return min(np.float32(clip * _root_square(values, bits, True)), largest)


# --- levels -----------------------------------------------------------------------------------------------------------


@host.inline
def _round_linear(values, codes, inverse, top, at, high):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        value = values[i]
        level = min(host.fma(abs(value), inverse, host.uniform(at, high)), top)
        sign = np.uint32(host.float_bits(value) & np.uint32(0x80000000))
        codes[i] = np.int32(host.bits_float(np.uint32(host.float_bits(level) | sign)))
        at = np.uint32(at + host.STEP)


@host.inline
def _round_powers(values, codes, inverse, top, at, high):  # type: ignore[no-untyped-def]
    """Random bits added to the fraction round a float to a power of two, up as often as the fraction says.

    Below the lowest level, 1 and 2 stand for 0 and 1.
    """
    for i in range(values.size):
        value = values[i]
        t = min(np.float32(abs(value) * inverse), top)
        shifted = t + t if t >= np.float32(1) else t + np.float32(1)
        noise = np.uint32(np.int32(host.uniform(at, high) * np.float32(8388608.0)))
        level = np.int32(np.uint32(host.float_bits(shifted) + noise) >> np.uint32(23)) - np.int32(127)
        codes[i] = -level if value < 0 else level
        at = np.uint32(at + host.STEP)


@host.inline
def _apply(out, words, at, steps, kind, block, width, levels, largest, sign, powers, add):  # type: ignore[no-untyped-def]
    """Write what the level numbers of some blocks stand for to ``out``, or add it; steps beyond ``largest`` are 0.

    ``at`` is where their words begin.
    """
    for b in range(steps.size):
        i, stop = b * block, min(out.size, (b + 1) * block)
        step = np.float32(steps[b] * sign) if abs(steps[b]) <= largest else np.float32(0)
        while i + 64 <= stop:
            apply_group(words, at, kind, width, levels, step, powers, add, out, i)
            i += 64
            at += width
        if i < stop:
            _apply_rest(out, i, stop, words, at, width, step, powers, levels, add)
            at += width


@host.inline
def _apply_rest(out, start, stop, words, at, width, step, powers, levels, add):  # type: ignore[no-untyped-def]
    """The same for less than a group."""
    for i in range(start, stop):
        number = number_at(words, at, i - start, width)
        multiple = power_of(number, levels) if powers else np.float32(number)
        out[i] = host.fma(multiple, step, out[i]) if add else np.float32(multiple * step)


# --- kernels ----------------------------------------------------------------------------------------------------------


@host.inline
def _encode_blocks(values, more, words, at, steps, kind, block, width, powers, norm, clip, top, shrink, count, high):  # type: ignore[no-untyped-def]
    """Encode some blocks of values, after adding ``more`` if it is not empty, into words from ``at`` on.

    A call for each would cost a fifth of the time. The sum is made here, block by block, so that memory is read while
    the block before is rounded. Without ``more`` the values must be sanitised.
    """
    codes = np.empty(_PIECE, kind.dtype)
    for b in range(steps.size):
        stop = min(values.size, (b + 1) * block)
        whole = values[b * block : stop]
        if more.size:
            host.sanitised_sum(whole, more[b * block : stop])
        length = _norm(whole, host.max_bits(whole), norm, clip)
        step, inverse = np.float32(0), np.float32(0)
        if length >= np.float32(TINY):
            step, inverse = np.float32(np.float32(length / top) * shrink), np.float32(top / length)
        steps[b] = step
        for a in range(b * block, stop, _PIECE):
            piece = values[a : min(stop, a + _PIECE)]
            if powers:
                _round_powers(piece, codes, inverse, top, host.counter(a, count), high)
            else:
                _round_linear(piece, codes, inverse, top, host.counter(a, count), high)
            at = pack(codes, piece.size, words, at, width)


@host.Kernel
def encode(x, residual, words, steps, kind, block, width, powers, levels, norm, clip, top, shrink, low, high):  # type: ignore[no-untyped-def]
    each, per, keep = (block + 63) // 64 * width, max(1, _SPAN // block), residual.size > 0
    for chunk in prange((steps.size + per - 1) // per):
        first, last = chunk * per, min(steps.size, (chunk + 1) * per)
        a, e, at, count = first * block, min(x.size, last * block), first * each, host.counter(first * block, low)
        values, some = x[a:e], steps[first:last]
        rule = (kind, block, width, powers, norm, clip, top, shrink)
        if keep:
            kept = residual[a:e]
            _encode_blocks(kept, values, words, at, some, *rule, count, high)
            _apply(kept, words, at, some, kind, block, width, levels, np.float32(np.inf), np.float32(-1), powers, True)
        elif host.max_bits(values) <= np.uint32(host.LIMIT_BITS):
            _encode_blocks(values, values[:0], words, at, some, *rule, count, high)
        else:
            _encode_blocks(host.sanitised_copy(values), values[:0], words, at, some, *rule, count, high)


@host.Kernel
def decode(out, words, steps, kind, block, width, powers, levels, largest, add):  # type: ignore[no-untyped-def]
    each, per = (block + 63) // 64 * width, max(1, _SPAN // block)
    for chunk in prange((steps.size + per - 1) // per):
        first, last = chunk * per, min(steps.size, (chunk + 1) * per)
        part, some = out[first * block : min(out.size, last * block)], steps[first:last]
        _apply(part, words, first * each, some, kind, block, width, levels, largest, np.float32(1), powers, add)


# --- by address -------------------------------------------------------------------------------------------------------

_encode_serial, _decode_serial = encode.serial, decode.serial


@host.inline
def _parts_at(payload, n, block, width, first, whole):  # type: ignore[no-untyped-def]
    """The words and the steps of n elements of a payload."""
    each, rest = (block + 63) // 64 * width, (n % block + 63) // 64 * width
    steps = payload + 8 * (whole // block * each + (whole % block + 63) // 64 * width)
    before, blocks = first // block, (n + block - 1) // block
    words = entries.words(payload + 8 * before * each, n // block * each + rest)
    return words, entries.floats(steps + 4 * before, blocks)


@host.inline
def _encode_at(x, n, payload, residual, key, parameters, first, whole, kind):  # type: ignore[no-untyped-def]
    p = entries.doubles(parameters, 8)
    block, width = np.int64(p[0]), np.int64(p[1])
    words, steps = _parts_at(payload, n, block, width, first, whole)
    rule = (np.int32(p[3]), np.int64(p[4]), np.float32(p[5]), np.float32(p[6]), np.float32(p[7]))
    low, high = host.key_from(key, first)
    values, kept = entries.floats(x, n), entries.floats_if(residual, n)
    _encode_serial(values, kept, words, steps, kind, block, width, p[2] != 0, *rule, low, high)
    return 0


@host.inline
def _decode_at(x, n, payload, add, parameters, first, whole, kind):  # type: ignore[no-untyped-def]
    p = entries.doubles(parameters, 5)
    block, width, levels = np.int64(p[0]), np.int64(p[1]), np.int32(p[3])
    words, steps = _parts_at(payload, n, block, width, first, whole)
    out, largest = entries.floats(x, n), np.float32(p[4])
    _decode_serial(out, words, steps, kind, block, width, p[2] != 0, levels, largest, add != 0)
    return 0


@entries.Entry
def encode_narrow_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Parameters: block, width, powers, levels, norm, clip, top, shrink."""
    return _encode_at(x, n, payload, residual, key, parameters, first, whole, np.empty(0, np.int8))


@entries.Entry
def encode_wide_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    return _encode_at(x, n, payload, residual, key, parameters, first, whole, np.empty(0, np.int16))


@entries.Entry
def decode_narrow_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Parameters: block, width, powers, levels, the largest step."""
    return _decode_at(x, n, payload, add, parameters, first, whole, np.empty(0, np.int8))


@entries.Entry
def decode_wide_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    return _decode_at(x, n, payload, add, parameters, first, whole, np.empty(0, np.int16))


ENCODERS = {True: encode_narrow_at, False: encode_wide_at}
"""By ``is_narrow``."""

DECODERS = {True: decode_narrow_at, False: decode_wide_at}
