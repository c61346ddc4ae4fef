"""Vector instructions for products with a matrix: rows, columns and outer products, GROUP vectors at a time.

``cpu.matrices`` fixes the order of the sums.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from espresso_mpi.compressors.limit import LIMIT

from . import vectors
from .matrices import GROUP, LANES

_INDEX = ir.IntType(64)


def _load(builder: Any, data: Any, index: Any, width: int) -> Any:
    pointer = builder.bitcast(builder.gep(data, [index]), vectors.floats(width).as_pointer())
    return builder.load(pointer, align=4)


def _store(builder: Any, value: Any, data: Any, index: Any) -> None:
    builder.store(value, builder.bitcast(builder.gep(data, [index]), value.type.as_pointer()), align=4)


def _variable(builder: Any, value: Any) -> Any:
    """A variable with that value; LLVM makes it a register."""
    place = cgutils.alloca_once(builder, value.type)
    builder.store(value, place)
    return place


def _zeros(builder: Any, width: int) -> Any:
    return _variable(builder, vectors.constant(vectors.floats(width), 0.0))


def _sanitised(builder: Any, value: Any) -> Any:
    """As ``host.sanitise``, for a vector."""
    top, bottom, zero = (vectors.constant(value.type, x) for x in (LIMIT, -LIMIT, 0.0))
    small = builder.select(builder.fcmp_ordered(">", value, top), top, value)
    small = builder.select(builder.fcmp_ordered("<", small, bottom), bottom, small)
    return builder.select(builder.fcmp_ordered("ord", value, value), small, zero)


def _settled(builder: Any, kept: Any, x: Any, indices: list[Any], width: int) -> list[Any]:
    """Vectors of ``kept`` after adding those of x to them, unless x is None. All are read before one is written."""
    values = [_load(builder, kept, at, width) for at in indices]
    if x is not None:
        values = [_sanitised(builder, builder.fadd(v, _load(builder, x, at, width))) for v, at in zip(values, indices)]
        for value, at in zip(values, indices):
            _store(builder, value, kept, at)
    return values


def _accumulate(builder: Any, a: Any, b: Any, total: Any) -> None:
    builder.store(vectors.fma(builder, a, b, builder.load(total)), total)


def _filled_up(builder: Any, data: Any, start: Any, count: Any) -> Any:
    """``count`` < LANES floats and zeros after them, as a vector."""
    room = _zeros(builder, LANES)
    floats = builder.bitcast(room, ir.FloatType().as_pointer())
    with cgutils.for_range(builder, count) as loop:
        value = builder.load(builder.gep(data, [builder.add(start, loop.index)]))
        builder.store(value, builder.gep(floats, [loop.index]))
    return builder.load(room)


def _dot_rows_code(adding: bool) -> Any:
    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        kept, x, right, into = (vectors.data(context, builder, sig.args[i], args[i]) for i in (0, 1, 5, 8))
        first, second, count, start, stride = (args[i] for i in (2, 3, 4, 6, 7))
        totals = [[_zeros(builder, LANES) for _ in range(GROUP)] for _ in range(2)]

        def group(offset, rows):  # type: ignore[no-untyped-def]
            at = builder.add(start, offset)
            for k in range(GROUP):
                vector = _load(builder, right, at, LANES)
                at = builder.add(at, stride)
                for row, total in zip(rows, totals):
                    _accumulate(builder, row, vector, total[k])

        def places(offset):  # type: ignore[no-untyped-def]
            return [builder.add(row, offset) for row in (first, second)]

        width = ir.Constant(_INDEX, LANES)
        whole = builder.sdiv(count, width)
        with cgutils.for_range(builder, whole) as loop:
            offset = builder.mul(loop.index, width)
            group(offset, _settled(builder, kept, x if adding else None, places(offset), LANES))
        done = builder.mul(whole, width)
        rest = builder.sub(count, done)
        with builder.if_then(builder.icmp_signed(">", rest, ir.Constant(_INDEX, 0)), likely=False):
            group(done, [_filled_up(builder, kept, at, rest) for at in places(done)])
        for i, total in enumerate(totals[0] + totals[1]):
            value = vectors.tree_sum(builder, builder.load(total))
            builder.store(value, builder.gep(into, [ir.Constant(_INDEX, i)]))
        return context.get_dummy_value()

    return codegen


def _dot_rows_signature(kept: Any, x: Any, q: Any, out: Any) -> Any:
    i = types.intp
    return types.none(kept, x, i, i, i, q, i, i, out)


@intrinsic
def dot_rows(typingctx, kept, x, first, second, count, q, start, stride, out):  # type: ignore[no-untyped-def]
    """Two rows, at ``first`` and ``second``, times GROUP vectors of q, ``stride`` apart: 2·GROUP values in out.

    The vectors of q are filled up with zeros to whole LANES.
    """
    return _dot_rows_signature(kept, x, q, out), _dot_rows_code(adding=False)


@intrinsic
def add_and_dot_rows(typingctx, kept, x, first, second, count, q, start, stride, out):  # type: ignore[no-untyped-def]
    """The same after adding x to the whole LANES of the rows, which may be one and the same."""
    return _dot_rows_signature(kept, x, q, out), _dot_rows_code(adding=True)


def _columns_code(width: int, adding: bool) -> Any:
    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        kept, x, right, into = (vectors.data(context, builder, sig.args[i], args[i]) for i in (0, 1, 5, 8))
        at, cols, count, start, stride, to = (args[i] for i in (2, 3, 4, 6, 7, 9))
        places = [builder.add(to, builder.mul(cols, ir.Constant(_INDEX, k))) for k in range(GROUP)]
        totals = [_variable(builder, _load(builder, into, place, width)) for place in places]
        with cgutils.for_range(builder, count) as loop:
            index = builder.add(at, builder.mul(loop.index, cols))
            (row,) = _settled(builder, kept, x if adding else None, [index], width)
            place = builder.add(start, loop.index)
            for total in totals:
                _accumulate(
                    builder, row, vectors.splat(builder, builder.load(builder.gep(right, [place])), width), total
                )
                place = builder.add(place, stride)
        for total, place in zip(totals, places):
            _store(builder, builder.load(total), into, place)
        return context.get_dummy_value()

    return codegen


def _columns_signature(kept: Any, x: Any, p: Any, out: Any) -> Any:
    i = types.intp
    return types.none(kept, x, i, i, i, p, i, i, out, i)


@intrinsic
def columns_64(typingctx, kept, x, at, cols, count, p, start, stride, out, to):  # type: ignore[no-untyped-def]
    """To GROUP running sums in out add those of p times ``count`` rows of 64 columns, which begin at ``at``."""
    return _columns_signature(kept, x, p, out), _columns_code(64, adding=False)


@intrinsic
def columns_16(typingctx, kept, x, at, cols, count, p, start, stride, out, to):  # type: ignore[no-untyped-def]
    return _columns_signature(kept, x, p, out), _columns_code(16, adding=False)


@intrinsic
def add_and_columns_64(typingctx, kept, x, at, cols, count, p, start, stride, out, to):  # type: ignore[no-untyped-def]
    """The same after adding x."""
    return _columns_signature(kept, x, p, out), _columns_code(64, adding=True)


def _outer_code(rows: int, width: int) -> Any:
    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        into, left, right = (vectors.data(context, builder, sig.args[i], args[i]) for i in (0, 3, 6))
        totals = [_zeros(builder, width) for _ in range(rows)]
        with cgutils.for_range(builder, args[9]) as loop:
            vector = _load(builder, right, builder.add(args[7], builder.mul(loop.index, args[8])), width)
            at = builder.add(args[4], builder.mul(loop.index, args[5]))
            for j, total in enumerate(totals):
                value = builder.load(builder.gep(left, [builder.add(at, ir.Constant(_INDEX, j))]))
                _accumulate(builder, vectors.splat(builder, builder.fmul(value, args[10]), width), vector, total)
        with builder.if_else(args[11]) as (adding, storing):
            with adding:
                _write_rows(builder, totals, into, args, True)
            with storing:
                _write_rows(builder, totals, into, args, False)
        return context.get_dummy_value()

    return codegen


def _write_rows(builder: Any, totals: list[Any], into: Any, args: Any, add: bool) -> None:
    at = args[1]
    for total in totals:
        value = builder.load(total)
        if add:
            value = builder.fadd(_load(builder, into, at, value.type.count), value)
        _store(builder, value, into, at)
        at = builder.add(at, args[2])


def _make_outer(rows: int, width: int) -> Any:
    @intrinsic
    def outer(typingctx, out, at, cols, p, pi, ps, q, qi, qs, ranks, sign, add):  # type: ignore[no-untyped-def]
        """Write ``sign · P Qᵀ`` for some rows and columns, or add it; vectors of p are ps apart, those of q qs."""
        i = types.intp
        signature = types.none(out, i, i, p, i, i, q, i, i, i, types.float32, types.boolean)
        return signature, _outer_code(rows, width)

    return outer


outer_4x64, outer_4x16 = _make_outer(4, 64), _make_outer(4, 16)
outer_1x64, outer_1x16 = _make_outer(1, 64), _make_outer(1, 16)
