"""Passes over a block before and after its transform: sums, largest magnitudes, products with signs.

Sums run in the 64 lanes that ``cpu.rotations`` fixes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from . import group64, vectors


def _larger(builder: Any) -> Any:
    return lambda a, b: builder.select(builder.icmp_unsigned(">", a, b), a, b)


def _note_largest(builder: Any, tops: list[Any], values: list[Any]) -> None:
    """Keep the largest magnitudes' bits, lane by lane."""
    no_sign = vectors.constant(group64.VECTOR_I, 0x7FFFFFFF)
    for k in group64.FOUR:
        bits = builder.and_(builder.bitcast(values[k], group64.VECTOR_I), no_sign)
        builder.store(_larger(builder)(bits, builder.load(tops[k])), tops[k])


@intrinsic
def largest(typingctx, x, groups):  # type: ignore[no-untyped-def]
    """The bits of the largest magnitude among ``64 * groups`` elements."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        tops, source = group64.accumulators(builder, group64.VECTOR_I, 0), group64.Array(context, builder, sig, args, 0)
        with cgutils.for_range(builder, args[1]) as loop:
            _note_largest(builder, tops, source.group(group64.start_of(builder, loop)))
        return group64.fold(builder, [builder.load(t) for t in tops], _larger(builder))

    return types.uint32(x, types.intp), codegen


@intrinsic
def add_largest(typingctx, kept, x, groups):  # type: ignore[no-untyped-def]
    """``kept += x`` over ``64 * groups`` elements; the bits of the largest magnitude of the sums."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        tops = group64.accumulators(builder, group64.VECTOR_I, 0)
        target, source = (group64.Array(context, builder, sig, args, k) for k in (0, 1))
        with cgutils.for_range(builder, args[2]) as loop:
            at = group64.start_of(builder, loop)
            sums = [builder.fadd(a, b) for a, b in zip(target.group(at), source.group(at))]
            target.store_group(sums, at)
            _note_largest(builder, tops, sums)
        return group64.fold(builder, [builder.load(t) for t in tops], _larger(builder))

    return types.uint32(kept, x, types.intp), codegen


def _flipped(builder: Any, signs: group64.Array, at: Any, scale: Any) -> list[Any]:
    """For 64 elements the scale, or minus the scale where the bit of the sign words is set."""
    plus, minus = (vectors.splat(builder, factor, group64.WIDTH) for factor in (scale, builder.fneg(scale)))
    word = builder.udiv(at, ir.Constant(at.type, 32))
    low, high = (builder.zext(signs.load(group64.offset(builder, word, k), group64.I32), group64.I64) for k in (0, 1))
    mask = builder.or_(low, builder.shl(high, ir.Constant(group64.I64, 32)))
    return [builder.select(lanes, minus, plus) for lanes in group64.bits_of(builder, mask)]


def _make_flip(combine: Any) -> Any:
    @intrinsic
    def flip(typingctx, out, x, groups, signs, scale):  # type: ignore[no-untyped-def]
        """Combine ``out`` with ``±scale · x`` for ``64 * groups`` elements, minus where the sign words have a one."""

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            target, source, words = (group64.Array(context, builder, sig, args, k) for k in (0, 1, 3))
            with cgutils.for_range(builder, args[2]) as loop:
                at = group64.start_of(builder, loop)
                factors = _flipped(builder, words, at, args[4])
                parts = zip(source.group(at), factors, target.group(at))
                target.store_group([combine(builder, a, b, c) for a, b, c in parts], at)
            return context.get_dummy_value()

        return types.none(out, x, types.intp, signs, types.float32), codegen

    return flip


def _product(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a·b``; LLVM drops the load of ``c``."""
    return builder.fmul(a, b)


def _less(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``c - a·b`` with the product rounded, as the receiver rounds it."""
    return builder.fsub(c, builder.fmul(a, b))


flip, flip_add, flip_subtract = (_make_flip(combine) for combine in (_product, vectors.fma, _less))


@intrinsic
def square_sum(typingctx, x, groups, power):  # type: ignore[no-untyped-def]
    """Sum of ``(power · x)²`` over ``64 * groups`` elements: 64 running lane sums, then a pairwise tree over them."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        totals, source = (
            group64.accumulators(builder, group64.VECTOR, 0.0),
            group64.Array(context, builder, sig, args, 0),
        )
        factor = vectors.splat(builder, args[2], group64.WIDTH)
        with cgutils.for_range(builder, args[1]) as loop:
            values = source.group(group64.start_of(builder, loop))
            for value, total in zip(values, totals):
                scaled = builder.fmul(value, factor)
                builder.store(vectors.fma(builder, scaled, scaled, builder.load(total)), total)
        return group64.fold(builder, [builder.load(t) for t in totals], builder.fadd)

    return types.float32(x, types.intp, types.float32), codegen
