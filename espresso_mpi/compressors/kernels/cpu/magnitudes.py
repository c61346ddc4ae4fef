"""Magnitudes by their bits, which order alike: the key of an element, comparisons of 64, the k-th largest.

The key of an element is the bits of what compressors carry for it: ``LIMIT`` at most, 0 for NaN.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import host, vectors

BINS = 2048
INFINITY = np.uint32(0x7F800000)
TOP = np.uint32(host.LIMIT_BITS)
"""The largest key."""

_V = 64
_VECTOR = vectors.integers(_V)


@intrinsic
def reached(typingctx, x, index, bits):  # type: ignore[no-untyped-def]
    """Bit i of the uint64 says whether the key of ``x[index + i]`` is at least ``bits``, for 64 elements."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        zero, top, infinity = (vectors.constant(_VECTOR, int(value)) for value in (0, TOP, INFINITY))
        pointer = vectors.pointer(context, builder, sig.args[0], args[0], args[1], _VECTOR)
        magnitude = builder.and_(builder.load(pointer, align=4), vectors.constant(_VECTOR, 0x7FFFFFFF))
        over = builder.icmp_unsigned(">", magnitude, top)
        nan = builder.icmp_unsigned(">", magnitude, infinity)
        key = builder.select(nan, zero, builder.select(over, top, magnitude))
        return builder.bitcast(builder.icmp_unsigned(">=", key, vectors.splat(builder, args[2], _V)), ir.IntType(_V))

    return types.uint64(x, types.intp, types.uint32), codegen


@intrinsic
def reached_of_clean(typingctx, x, index, bits):  # type: ignore[no-untyped-def]
    """As ``reached``, of elements that compressors carry as they are: their keys are the bits of their magnitudes."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        pointer = vectors.pointer(context, builder, sig.args[0], args[0], args[1], _VECTOR)
        key = builder.and_(builder.load(pointer, align=4), vectors.constant(_VECTOR, 0x7FFFFFFF))
        return builder.bitcast(builder.icmp_signed(">=", key, vectors.splat(builder, args[2], _V)), ir.IntType(_V))

    return types.uint64(x, types.intp, types.uint32), codegen


@host.inline
def key_of(value):  # type: ignore[no-untyped-def]
    bits = np.uint32(host.float_bits(value) & np.uint32(0x7FFFFFFF))
    return np.uint32(0) if bits > INFINITY else min(bits, TOP)


@host.inline
def kth(values, rank, bins):  # type: ignore[no-untyped-def]
    """The rank-th largest key (rank counts from 1) and how many are larger: 11, 11 and 9 bits at a time."""
    found, left = np.uint32(0), rank
    for level in range(3):
        above = np.uint32(31 if level == 0 else (20 if level == 1 else 9))
        below = np.uint32(20 if level == 0 else (9 if level == 1 else 0))
        bins[:] = 0
        for i in range(values.size):
            key = key_of(values[i])
            if key >> above == found >> above:
                bins[(key >> below) & np.uint32(BINS - 1 if level < 2 else BINS // 4 - 1)] += 1
        digit = BINS - 1
        while bins[digit] < left:
            left -= bins[digit]
            digit -= 1
        found |= np.uint32(digit) << below
    return found, rank - left
