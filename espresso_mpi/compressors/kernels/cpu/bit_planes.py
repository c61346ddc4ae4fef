"""Level numbers of any width in bits: 64 elements are ``width`` words, bit i of word j is bit j of element i.

So every width is packed and unpacked by vector comparisons. ``cpu.dithering`` describes what the numbers stand for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from . import host, vectors


def _vector(array_type: Any) -> tuple[Any, Any]:
    """The vector of 64 elements of an integer array, and the type of one."""
    one = ir.IntType(array_type.dtype.bitwidth)
    return ir.VectorType(one, 64), one


def _word(context: Any, builder: Any, array_type: Any, array: Any, at: Any, offset: Any) -> Any:
    return vectors.pointer(context, builder, array_type, array, builder.add(at, offset), ir.IntType(64))


@intrinsic
def _pack_group(typingctx, codes, index, words, at, width):  # type: ignore[no-untyped-def]
    """``words[at + j]`` holds bit j of the 64 level numbers ``codes[index:]``, for j < width."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        vector, one = _vector(sig.args[0])
        values = builder.load(vectors.pointer(context, builder, sig.args[0], args[0], args[1], vector), align=1)
        with cgutils.for_range(builder, args[4]) as loop:
            bit = builder.shl(ir.Constant(one, 1), builder.trunc(loop.index, one))
            bits = builder.and_(values, vectors.splat(builder, bit, 64))
            plane = builder.icmp_unsigned("!=", bits, vectors.constant(vector, 0))
            place = _word(context, builder, sig.args[2], args[2], args[3], loop.index)
            builder.store(builder.bitcast(plane, ir.IntType(64)), place, align=8)
        return context.get_dummy_value()

    return types.none(codes, types.intp, words, types.intp, types.intp), codegen


def _numbers(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """The level numbers in ``width`` words from ``at`` on, as 64 of the kind that holds them."""
    words, at, _, width = args[:4]
    vector, one = _vector(sig.args[2])
    zero = vectors.constant(vector, 0)
    total = cgutils.alloca_once_value(builder, zero)
    last = builder.sub(width, ir.Constant(width.type, 1))

    def add(j: Any, weight: Any) -> None:
        word = builder.load(_word(context, builder, sig.args[0], words, at, j), align=8)
        mask = builder.bitcast(word, vectors.integers(64, 1))
        part = builder.select(mask, vectors.splat(builder, weight, 64), zero)
        builder.store(builder.add(builder.load(total), part), total)

    with cgutils.for_range(builder, last) as loop:
        add(loop.index, builder.shl(ir.Constant(one, 1), builder.trunc(loop.index, one)))
    add(last, builder.shl(ir.Constant(one, -1), builder.trunc(last, one)))  # of two's complement: counts negatively
    return builder.load(total)


def _multiples(builder: Any, numbers: Any, levels: Any) -> Any:
    """As ``power_of`` for 64 level numbers."""
    ints, zero = numbers.type, ir.Constant(numbers.type, [0] * 64)
    level = builder.select(builder.icmp_signed("<", numbers, zero), builder.neg(numbers), numbers)
    most = vectors.splat(builder, levels, 64)
    level = builder.select(builder.icmp_signed("<", level, most), level, most)
    bits = builder.shl(builder.add(level, ir.Constant(ints, [126] * 64)), ir.Constant(ints, [23] * 64))
    bits = builder.or_(bits, builder.and_(numbers, ir.Constant(ints, [-(1 << 31)] * 64)))
    bits = builder.select(builder.icmp_signed(">", level, zero), bits, zero)
    return builder.bitcast(bits, vectors.floats(64))


@intrinsic
def apply_group(typingctx, words, at, kind, width, levels, step, powers, add, out, index):  # type: ignore[no-untyped-def]
    """Write what the 64 level numbers from ``words[at]`` on stand for to ``out[index:]``, or add it."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        vector = vectors.floats(64)
        step, powers, add, out, index = args[5:]
        numbers = _numbers(context, builder, sig, args)
        multiples = cgutils.alloca_once(builder, vector)
        with builder.if_else(powers) as (some, others):
            with some:
                wide = builder.sext(numbers, vectors.integers(64))
                builder.store(_multiples(builder, wide, args[4]), multiples)
            with others:
                builder.store(builder.sitofp(numbers, vector), multiples)
        pointer = vectors.pointer(context, builder, sig.args[8], out, index, vector)
        factors = builder.load(multiples), vectors.splat(builder, step, 64)
        with builder.if_else(add) as (some, others):
            with some:
                builder.store(vectors.fma(builder, *factors, builder.load(pointer, align=4)), pointer, align=4)
            with others:
                builder.store(builder.fmul(*factors), pointer, align=4)
        return context.get_dummy_value()

    numbers = (words, types.intp, kind, types.intp, types.int32, types.float32)
    return types.none(*numbers, types.boolean, types.boolean, out, types.intp), codegen


@host.inline
def pack(codes, size, words, at, width):  # type: ignore[no-untyped-def]
    """Pack the first ``size`` level numbers into words from ``at`` on, the last group filled up with zeros.

    Returns where the words end.
    """
    groups = (size + 63) // 64
    for i in range(size, 64 * groups):
        codes[i] = 0
    for g in range(groups):
        _pack_group(codes, 64 * g, words, at + g * width, width)
    return at + groups * width


@host.inline
def power_of(code, levels):  # type: ignore[no-untyped-def]
    """The multiple of the step that a level number stands for."""
    number = np.int32(code)
    level = min(np.int32(abs(number)), levels)
    sign = np.uint32(np.uint32(number) & np.uint32(0x80000000))
    bits = np.uint32(np.uint32(level + np.int32(126)) << np.uint32(23))
    return host.bits_float(np.uint32(bits | sign)) if level > 0 else np.float32(0)


@host.inline
def number_at(words, at, i, width):  # type: ignore[no-untyped-def]
    """The level number of one element of a group."""
    total = np.int32(0)
    for j in range(width):
        bit = np.int32((words[at + j] >> np.uint64(i)) & np.uint64(1))
        total = np.int32(total + (-(bit << j) if j == width - 1 else bit << j))
    return total
