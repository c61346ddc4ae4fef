"""What the low-rank methods share: how n values are seen as a matrix, orthonormal factors, and products on the CPU.

A matrix M has ``rows`` rows of ``cols`` values, the last one filled up with zeros that are never stored. Its factors
hold one vector after another: P is ``rank`` vectors of length ``rows``, Q is ``rank`` vectors of length ``cols``.

The order of every sum is part of the format, so that any number of threads, and a GPU, write the same bytes:

- a row times a vector: LANES running sums side by side, then a tree over them;
- a column times a vector: running sums over CHUNK rows, then the sums of the chunks one after another;
- an element of P Qᵀ: a running sum over the vectors;
- a product of two vectors of a factor: as a row, in float64, where products of two float32 are exact.

The products take GROUP vectors at a time, held in registers, so M is read from memory once for ranks up to GROUP and
comes from the cache for the other groups. Factors are filled up with zero vectors to a multiple of GROUP.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from espresso_mpi.compressors.base import LIMIT
from espresso_mpi.compressors.context import Context

from . import host

LANES = 32
CHUNK = 64
GROUP = 4

INDEPENDENT = 2.0**-20
"""A vector of which less than this is left when the others' directions are taken out depends on them: what is left
is rounding."""

LARGEST_RANK = 256  # a GPU keeps as many products of vectors in its shared memory
_BLOCK = 1 << 14  # values of M that a thread takes at a time, by rows
_ROWS = 8  # rows of M that are read side by side when columns are summed

READY, ADD, COPY = 0, 1, 2
"""What the residual holds before a product: the values; the residual, to which x is added; anything, x replaces it."""


class Matrix(NamedTuple):
    """How a method sees n values."""

    rows: int
    cols: int
    rank: int

    @property
    def groups(self) -> int:
        """The rank, filled up to whole groups."""
        return -(-self.rank // GROUP) * GROUP

    def length(self, factor: str) -> int:
        """How long the vectors of factor ``p`` or ``q`` are."""
        return self.rows if factor == "p" else self.cols

    def size(self, factor: str) -> int:
        """How many values that factor has."""
        return self.rank * self.length(factor)


def side(n: int) -> int:
    """The row length of a nearly square matrix of n values; a multiple of LANES unless that makes it much larger."""
    side = math.isqrt(max(0, n - 1)) + 1
    return side if n < 4096 else -(-side // LANES) * LANES


def share(rank: int, length: int) -> float:
    """How much of ‖M‖² a projection of its rows (or columns) of that length on random directions keeps on average.

    Exactly rank/length for any M, as the directions have independent entries of either sign; less what rounding takes.
    """
    return rank / max(1, length) * (1 - 2.0**-20)


# --- factors ----------------------------------------------------------------------------------------------------------


@host.inline
def _dot(a, b, lanes):  # type: ignore[no-untyped-def]
    """The product of two vectors in float64, by lanes and tree."""
    lanes[:] = 0.0
    whole = a.size // LANES * LANES
    for start in range(0, whole, LANES):
        ab, bb = a[start : start + LANES], b[start : start + LANES]
        for i in range(LANES):
            lanes[i] += np.float64(ab[i]) * np.float64(bb[i])
    for i in range(a.size - whole):
        lanes[i] += np.float64(a[whole + i]) * np.float64(b[whole + i])
    width = LANES // 2
    while width:
        for i in range(width):
            lanes[i] += lanes[i + width]
        width //= 2
    return lanes[0]


@host.inline
def _normalised(vector, least, lanes):  # type: ignore[no-untyped-def]
    """Give the vector length 1; False if it is not longer than ``least``. In float64 no length over- or underflows."""
    norm = math.sqrt(_dot(vector, vector, lanes))
    if not norm > least:
        return False
    for i in range(vector.size):
        vector[i] = np.float32(np.float64(vector[i]) / norm)
    return True


@host.inline
def _without_others(target, at, length, products, lanes):  # type: ignore[no-untyped-def]
    """Take the directions of the vectors before number ``at`` out of it: classical Gram-Schmidt, one sweep."""
    vector = target[at * length : (at + 1) * length]
    for k in range(at):
        products[k] = np.float32(_dot(vector, target[k * length : (k + 1) * length], lanes))
    for i in range(length):
        rest = np.float64(vector[i])
        for k in range(at):
            rest -= np.float64(products[k]) * np.float64(target[k * length + i])
        vector[i] = np.float32(rest)


@host.inline
def _independent(target, at, length, products, lanes):  # type: ignore[no-untyped-def]
    """Make vector ``at`` orthonormal to those before it, by two sweeps; False if nothing of it is left."""
    vector = target[at * length : (at + 1) * length]
    if not _normalised(vector, 0.0, lanes):
        return False
    for _ in range(2):
        _without_others(target, at, length, products, lanes)
        if not _normalised(vector, INDEPENDENT, lanes):
            return False
    return True


@host.inline
def orthonormalise(source, target, ranks, length, fill, low, high, lanes):  # type: ignore[no-untyped-def]
    products = np.empty(ranks, np.float32)
    for j in range(ranks):
        for i in range(j * length, (j + 1) * length):
            target[i] = host.tame(source[i])
        good = _independent(target, j, length, products, lanes)
        if fill and not good:
            for i in range(j * length, (j + 1) * length):
                target[i] = np.float32(2.0) * host.uniform(host.counter(i, low), high) - np.float32(1.0)
            good = _independent(target, j, length, products, lanes)
        if not good:
            target[j * length : (j + 1) * length] = np.float32(0.0)
    target[ranks * length :] = np.float32(0.0)


# --- vector instructions ----------------------------------------------------------------------------------------------


_FLOAT, _INDEX = ir.FloatType(), ir.IntType(64)


def _data(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    return context.make_array(array_type)(context, builder, array).data


def _load(builder: Any, data: Any, index: Any, width: int) -> Any:
    pointer = builder.bitcast(builder.gep(data, [index]), ir.VectorType(_FLOAT, width).as_pointer())
    return builder.load(pointer, align=4)


def _store(builder: Any, value: Any, data: Any, index: Any) -> None:
    builder.store(value, builder.bitcast(builder.gep(data, [index]), value.type.as_pointer()), align=4)


def _splat(builder: Any, scalar: Any, width: int) -> Any:
    vector = ir.VectorType(_FLOAT, width)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` for vectors, rounded once."""
    function = ir.FunctionType(a.type, 3 * [a.type])
    called = cgutils.get_or_insert_function(builder.module, function, f"llvm.fma.v{a.type.count}f32")
    return builder.call(called, [a, b, c])


def _variable(builder: Any, value: Any) -> Any:
    """A variable with that value; LLVM makes it a register."""
    place = cgutils.alloca_once(builder, value.type)
    builder.store(value, place)
    return place


def _zeros(builder: Any, width: int) -> Any:
    return _variable(builder, ir.Constant(ir.VectorType(_FLOAT, width), [0.0] * width))


def _tamed(builder: Any, value: Any) -> Any:
    """As ``host.tame``, for a vector."""
    top, bottom, zero = (ir.Constant(value.type, [x] * value.type.count) for x in (LIMIT, -LIMIT, 0.0))
    small = builder.select(builder.fcmp_ordered(">", value, top), top, value)
    small = builder.select(builder.fcmp_ordered("<", small, bottom), bottom, small)
    return builder.select(builder.fcmp_ordered("ord", value, value), small, zero)


def _settled(builder: Any, kept: Any, x: Any, indices: list[Any], width: int) -> list[Any]:
    """Vectors of ``kept`` after adding those of x to them, unless x is None. All are read before one is written."""
    values = [_load(builder, kept, at, width) for at in indices]
    if x is not None:
        values = [_tamed(builder, builder.fadd(v, _load(builder, x, at, width))) for v, at in zip(values, indices)]
        for value, at in zip(values, indices):
            _store(builder, value, kept, at)
    return values


def _accumulate(builder: Any, a: Any, b: Any, total: Any) -> None:
    builder.store(_fma(builder, a, b, builder.load(total)), total)


def _filled_up(builder: Any, data: Any, start: Any, count: Any) -> Any:
    """``count`` < LANES floats and zeros after them, as a vector."""
    room = _zeros(builder, LANES)
    floats = builder.bitcast(room, _FLOAT.as_pointer())
    with cgutils.for_range(builder, count) as loop:
        value = builder.load(builder.gep(data, [builder.add(start, loop.index)]))
        builder.store(value, builder.gep(floats, [loop.index]))
    return builder.load(room)


def _dot_rows_code(adding: bool) -> Any:
    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        kept, x, right, into = (_data(context, builder, sig.args[i], args[i]) for i in (0, 1, 5, 8))
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
            value = host.tree_sum(builder, builder.load(total))
            builder.store(value, builder.gep(into, [ir.Constant(_INDEX, i)]))
        return context.get_dummy_value()

    return codegen


def _dot_rows_signature(kept: Any, x: Any, q: Any, out: Any) -> Any:
    i = types.intp
    return types.none(kept, x, i, i, i, q, i, i, out)


@intrinsic
def _dot_rows(typingctx, kept, x, first, second, count, q, start, stride, out):  # type: ignore[no-untyped-def]
    """Two rows, at ``first`` and ``second``, times GROUP vectors of q, ``stride`` apart: 2·GROUP values in out.

    The vectors of q are filled up with zeros to whole LANES.
    """
    return _dot_rows_signature(kept, x, q, out), _dot_rows_code(adding=False)


@intrinsic
def _add_and_dot_rows(typingctx, kept, x, first, second, count, q, start, stride, out):  # type: ignore[no-untyped-def]
    """The same after adding x to the whole LANES of the rows, which may be one and the same."""
    return _dot_rows_signature(kept, x, q, out), _dot_rows_code(adding=True)


def _columns_code(width: int, adding: bool) -> Any:
    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        kept, x, right, into = (_data(context, builder, sig.args[i], args[i]) for i in (0, 1, 5, 8))
        at, cols, count, start, stride, to = (args[i] for i in (2, 3, 4, 6, 7, 9))
        places = [builder.add(to, builder.mul(cols, ir.Constant(_INDEX, k))) for k in range(GROUP)]
        totals = [_variable(builder, _load(builder, into, place, width)) for place in places]
        with cgutils.for_range(builder, count) as loop:
            index = builder.add(at, builder.mul(loop.index, cols))
            (row,) = _settled(builder, kept, x if adding else None, [index], width)
            place = builder.add(start, loop.index)
            for total in totals:
                _accumulate(builder, row, _splat(builder, builder.load(builder.gep(right, [place])), width), total)
                place = builder.add(place, stride)
        for total, place in zip(totals, places):
            _store(builder, builder.load(total), into, place)
        return context.get_dummy_value()

    return codegen


def _columns_signature(kept: Any, x: Any, p: Any, out: Any) -> Any:
    i = types.intp
    return types.none(kept, x, i, i, i, p, i, i, out, i)


@intrinsic
def _columns_64(typingctx, kept, x, at, cols, count, p, start, stride, out, to):  # type: ignore[no-untyped-def]
    """To GROUP running sums in out add those of p times ``count`` rows of 64 columns, which begin at ``at``."""
    return _columns_signature(kept, x, p, out), _columns_code(64, adding=False)


@intrinsic
def _columns_16(typingctx, kept, x, at, cols, count, p, start, stride, out, to):  # type: ignore[no-untyped-def]
    return _columns_signature(kept, x, p, out), _columns_code(16, adding=False)


@intrinsic
def _add_and_columns_64(typingctx, kept, x, at, cols, count, p, start, stride, out, to):  # type: ignore[no-untyped-def]
    """The same after adding x."""
    return _columns_signature(kept, x, p, out), _columns_code(64, adding=True)


def _outer_code(rows: int, width: int) -> Any:
    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        into, left, right = (_data(context, builder, sig.args[i], args[i]) for i in (0, 3, 6))
        totals = [_zeros(builder, width) for _ in range(rows)]
        with cgutils.for_range(builder, args[9]) as loop:
            vector = _load(builder, right, builder.add(args[7], builder.mul(loop.index, args[8])), width)
            at = builder.add(args[4], builder.mul(loop.index, args[5]))
            for j, total in enumerate(totals):
                value = builder.load(builder.gep(left, [builder.add(at, ir.Constant(_INDEX, j))]))
                _accumulate(builder, _splat(builder, builder.fmul(value, args[10]), width), vector, total)
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


def _outer_signature(out: Any, p: Any, q: Any) -> Any:
    i = types.intp
    return types.none(out, i, i, p, i, i, q, i, i, i, types.float32, types.boolean)


@intrinsic
def _outer_4x64(typingctx, out, at, cols, p, pi, ps, q, qi, qs, ranks, sign, add):  # type: ignore[no-untyped-def]
    """Write ``sign · P Qᵀ`` for 4 rows and 64 columns of out, or add it; vectors of p are ps apart, those of q qs."""
    return _outer_signature(out, p, q), _outer_code(4, 64)


@intrinsic
def _outer_4x16(typingctx, out, at, cols, p, pi, ps, q, qi, qs, ranks, sign, add):  # type: ignore[no-untyped-def]
    return _outer_signature(out, p, q), _outer_code(4, 16)


@intrinsic
def _outer_1x64(typingctx, out, at, cols, p, pi, ps, q, qi, qs, ranks, sign, add):  # type: ignore[no-untyped-def]
    return _outer_signature(out, p, q), _outer_code(1, 64)


@intrinsic
def _outer_1x16(typingctx, out, at, cols, p, pi, ps, q, qi, qs, ranks, sign, add):  # type: ignore[no-untyped-def]
    return _outer_signature(out, p, q), _outer_code(1, 16)


# --- products ---------------------------------------------------------------------------------------------------------


@host.inline
def copy(kept, x):  # type: ignore[no-untyped-def]
    for i in range(kept.size):
        kept[i] = host.tame(x[i])


@host.inline
def _settle(kept, x, how):  # type: ignore[no-untyped-def]
    if how == ADD:
        host.tame_sum(kept, x)
    else:
        copy(kept, x)


@host.inline
def top_of(vectors, start, stride, count, ranks):  # type: ignore[no-untyped-def]
    """The largest magnitude in a part of each vector, as float64."""
    top = np.uint32(0)
    for k in range(ranks):
        top = max(top, host.max_bits(vectors[start + k * stride : start + k * stride + count]))
    return np.float64(host.bits_float(top))


@host.inline
def _safe(p_top, q_top, ranks):  # type: ignore[no-untyped-def]
    """Whether no element of P Qᵀ needs to be tamed, given the largest magnitudes; not if one is not finite."""
    return p_top <= LIMIT and q_top <= LIMIT and p_top * q_top * ranks <= LIMIT / 2


@host.inline
def _outer_one_by_one(out, at, count, p, pi, ps, q, qi, qs, ranks, sign, add):  # type: ignore[no-untyped-def]
    """Part of a row, with values of any size."""
    for c in range(count):
        value = np.float32(0.0)
        for k in range(ranks):
            value = host.fma(sign * p[pi + k * ps], q[qi + k * qs + c], value)
        value = host.tame(value)
        out[at + c] = out[at + c] + value if add else value


@host.inline
def _outer_row(out, at, count, p, pi, ps, q, qs, ranks, sign, add, safe):  # type: ignore[no-untyped-def]
    c = 0
    if safe:
        while c + 64 <= count:
            _outer_1x64(out, at + c, count, p, pi, ps, q, c, qs, ranks, sign, add)
            c += 64
        while c + 16 <= count:
            _outer_1x16(out, at + c, count, p, pi, ps, q, c, qs, ranks, sign, add)
            c += 16
    _outer_one_by_one(out, at + c, count - c, p, pi, ps, q, c, qs, ranks, sign, add)


@host.inline
def _outer_rows(out, cols, first, last, p, ps, q, ranks, sign, add, safe):  # type: ignore[no-untyped-def]
    """``sign · P Qᵀ`` in some rows, in fours where they are whole."""
    i, whole = first, min(last, out.size // cols)
    while safe and i + 4 <= whole:
        c = 0
        while c + 64 <= cols:
            _outer_4x64(out, i * cols + c, cols, p, i, ps, q, c, cols, ranks, sign, add)
            c += 64
        while c + 16 <= cols:
            _outer_4x16(out, i * cols + c, cols, p, i, ps, q, c, cols, ranks, sign, add)
            c += 16
        for j in range(i, i + 4):
            _outer_one_by_one(out, j * cols + c, cols - c, p, j, ps, q, c, cols, ranks, sign, add)
        i += 4
    for j in range(i, last):
        count = min(cols, out.size - j * cols)
        _outer_row(out, j * cols, count, p, j, ps, q, cols, ranks, sign, add, safe)


@host.inline
def _project_pair(kept, x, how, i, j, count, cols, q, stride, ranks, out, rows, dots):  # type: ignore[no-untyped-def]
    """Rows i and j times the vectors of q."""
    a, b = i * cols, j * cols
    if how == ADD:
        whole = count // LANES * LANES
        host.tame_sum(kept[a + whole : a + count], x[a + whole : a + count])
        if j > i:
            host.tame_sum(kept[b + whole : b + count], x[b + whole : b + count])
    elif how == COPY:
        copy(kept[a : b + count], x[a : b + count])
    for g in range(0, ranks, GROUP):
        if how == ADD and g == 0:
            _add_and_dot_rows(kept, x, a, b, count, q, 0, stride, dots)
        else:
            _dot_rows(kept, x, a, b, count, q, g * stride, stride, dots)
        for k in range(min(GROUP, ranks - g)):
            out[(g + k) * rows + i] = host.tame(dots[k])
            out[(g + k) * rows + j] = host.tame(dots[GROUP + k])


@host.inline
def _project_four(kept, x, how, cols, first, last, q, stride, ranks, out, rows, dots):  # type: ignore[no-untyped-def]
    """Settle at most four rows, few enough for the first cache, and project them."""
    whole = min(last, kept.size // cols)
    i = first
    while i < whole:
        j = min(i + 1, whole - 1)
        _project_pair(kept, x, how, i, j, cols, cols, q, stride, ranks, out, rows, dots)
        i = j + 1
    if whole < last:
        count = kept.size - whole * cols
        _project_pair(kept, x, how, whole, whole, count, cols, q, stride, ranks, out, rows, dots)


@host.Kernel
def project_all_rows(kept, x, how, cols, q, wide, stride, q_top, ranks, out, rows, block, subtract):  # type: ignore[no-untyped-def]
    for b in prange((rows + block - 1) // block):
        dots = np.empty(2 * GROUP, np.float32)
        for i in range(b * block, min(rows, (b + 1) * block), 4):
            last = min(rows, i + 4)
            _project_four(kept, x, how, cols, i, last, wide, stride, ranks, out, rows, dots)
            if subtract:  # now, while the rows are in the cache
                safe = _safe(top_of(out, i, rows, last - i, ranks), q_top, ranks)
                _outer_rows(kept, cols, i, last, out, rows, q, ranks, np.float32(-1.0), True, safe)


@host.inline
def _columns_one_by_one(m, at, cols, count, p, start, stride, out, to, width):  # type: ignore[no-untyped-def]
    for k in range(GROUP):
        for c in range(width):
            total = out[to + k * cols + c]
            for i in range(count):
                total = host.fma(m[at + i * cols + c], p[start + k * stride + i], total)
            out[to + k * cols + c] = total


@host.inline
def _add_columns(kept, x, how, at, cols, count, p, start, stride, out, to, width):  # type: ignore[no-untyped-def]
    """To GROUP running sums in out add those of p times ``count`` rows, of which ``width`` columns begin at ``at``."""
    c = 0
    if how == ADD:
        while c + 64 <= width:
            _add_and_columns_64(kept, x, at + c, cols, count, p, start, stride, out, to + c)
            c += 64
    if how != READY:
        for i in range(count):
            a, b = at + i * cols + c, at + i * cols + width
            _settle(kept[a:b], x[a:b], how)
    while c + 64 <= width:
        _columns_64(kept, x, at + c, cols, count, p, start, stride, out, to + c)
        c += 64
    while c + 16 <= width:
        _columns_16(kept, x, at + c, cols, count, p, start, stride, out, to + c)
        c += 16
    _columns_one_by_one(kept, at + c, cols, count, p, start, stride, out, to + c, width - c)


@host.inline
def _project_chunk(kept, x, how, cols, first, last, p, stride, ranks, out, to):  # type: ignore[no-untyped-def]
    """All columns of a chunk of rows, a few rows at a time, so that they come from memory once and in order."""
    whole = kept.size // cols
    for i in range(first, last, _ROWS):
        stop = min(last, i + _ROWS)
        count = min(stop, whole) - i
        for g in range(0, ranks, GROUP):
            do = how if g == 0 else READY
            _add_columns(kept, x, do, i * cols, cols, count, p, g * stride + i, stride, out, to + g * cols, cols)
            if whole < stop:
                rest, at = kept.size - whole * cols, g * stride + whole
                _add_columns(kept, x, do, whole * cols, cols, 1, p, at, stride, out, to + g * cols, rest)


@host.Kernel
def project_chunks(kept, x, how, cols, p, rows, ranks, parts, size):  # type: ignore[no-untyped-def]
    for b in prange((rows + CHUNK - 1) // CHUNK):
        parts[b * size : (b + 1) * size] = np.float32(0.0)
        _project_chunk(kept, x, how, cols, b * CHUNK, min(rows, (b + 1) * CHUNK), p, rows, ranks, parts, b * size)


@host.inline
def _add_up(parts, size, start, out):  # type: ignore[no-untyped-def]
    """Add the chunks' sums one after another."""
    out[:] = np.float32(0.0)
    for at in range(start, parts.size, size):
        part = parts[at : at + out.size]
        for c in range(out.size):
            out[c] += part[c]
    for c in range(out.size):
        out[c] = host.tame(out[c])


@host.Kernel
def add_chunks(parts, size, out):  # type: ignore[no-untyped-def]
    for b in prange((out.size + 1023) // 1024):
        start, stop = b * 1024, min(out.size, (b + 1) * 1024)
        _add_up(parts, size, start, out[start:stop])


@host.Kernel
def _outer(out, cols, p, rows, q, ranks, block, sign, add, safe):  # type: ignore[no-untyped-def]
    for b in prange((rows + block - 1) // block):
        _outer_rows(out, cols, b * block, min(rows, (b + 1) * block), p, rows, q, ranks, sign, add, safe)


# --- what the methods call --------------------------------------------------------------------------------------------


def values(x: np.ndarray, residual: np.ndarray | None, how: int, context: Context) -> tuple[np.ndarray, int]:
    """Where the values to be compressed are or will be, and what has to be done for it."""
    if residual is not None:
        return residual, how
    return context.scratch("values", x.size, np.float32, x), COPY


def rows_at_once(cols: int) -> int:
    return max(4, _BLOCK // cols // 4 * 4)


def filled_rows(q: np.ndarray, m: Matrix, context: Context) -> tuple[np.ndarray, int]:
    """The vectors of q, each filled up with zeros to whole LANES, and how far they lie apart."""
    stride = -(-m.cols // LANES) * LANES
    if stride == m.cols:
        return q, stride
    wide = context.scratch("wide", m.groups * stride, np.float32, q)
    rows = wide.reshape(m.groups, stride)
    rows[:, : m.cols] = q.reshape(m.groups, m.cols)
    rows[:, m.cols :] = 0
    return wide, stride


def outer(p: np.ndarray, q: np.ndarray, m: Matrix, out: np.ndarray, add: bool, sign: float = 1.0) -> None:
    """Write ``sign · P Qᵀ`` into ``out``, or add it; any factors give finite values."""
    safe = bool(_factors_are_safe(p[: m.size("p")], q[: m.size("q")], m.rank))
    _outer(out, m.cols, p, m.rows, q, m.rank, rows_at_once(m.cols), np.float32(sign), add, safe)


@host.inline
def _factors_are_safe(p, q, ranks):  # type: ignore[no-untyped-def]
    return _safe(top_of(p, 0, 0, p.size, 1), top_of(q, 0, 0, q.size, 1), ranks)
