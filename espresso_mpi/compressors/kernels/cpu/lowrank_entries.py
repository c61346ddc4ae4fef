"""Kernels by address of the low-rank methods: orthonormal factors, and the products of a matrix with them.

Parameters are the numbers of FORM. Scratch memory holds the sums of ``orthonormalise``, an orthonormal factor, what its
product with the matrix needs, and the values if there is no residual.
"""

from __future__ import annotations

import numpy as np

from . import entries, host, lowrank
from .matrices import CHUNK, GROUP, LANES, Matrix
from .orthonormal import orthonormalise

ROWS, COLS, RANK, HEAD, FORM = range(5)
"""Places of the numbers about the matrix and the payload, and how many these are: the shape of the matrix, vectors of a
factor, float32 values of the header."""

SUMMARY, LEARNED = range(2)
"""What ``powersgd`` lists: P, which the ranks agree on, and Q of the step before."""

P, Q, TURN, FACTORS = range(4)
"""What ``acpsgd`` lists, and how much: the factors that the ranks have learned; not 0 where P is given."""

START = 4
"""Float32 values before the given factor in a header of ``acpsgd``: the first is 0 if that is Q, 1 if it is P; zeros
follow."""

_project_rows, _project_columns = lowrank.project_rows.serial, lowrank.project_columns.serial
_outer, _project_all_rows = lowrank.outer.serial, lowrank.project_all_rows.serial


def scratch_of(m: Matrix, n: int) -> int:
    """Bytes of scratch memory that encodes of n values need.

    The last n values are used only where no residual holds them; before, no page of them is there.
    """
    by_rows = m.groups * (m.cols + lowrank.filled_up(m.cols))
    by_columns = m.groups * (m.rows + -(-m.rows // CHUNK) * m.cols)
    return 8 * LANES + 4 * (max(by_rows, by_columns) + n)


@host.inline
def _shape(form):  # type: ignore[no-untyped-def]
    """Rows, columns, rank, and the rank filled up to whole groups."""
    rank = np.int64(form[RANK])
    return np.int64(form[ROWS]), np.int64(form[COLS]), rank, (rank + GROUP - 1) // GROUP * GROUP


@host.inline
def _orthonormal(source, length, fill, work, key, form):  # type: ignore[no-untyped-def]
    """The vectors of a factor at an address made orthonormal; and where scratch memory goes on."""
    _, _, rank, groups = _shape(form)
    low, high = host.key_from(key, 0)
    begin = work + 8 * LANES
    target, lanes = entries.floats(begin, groups * length), entries.doubles(work, LANES)
    orthonormalise(entries.floats(source, rank * length), target, rank, length, fill, low, high, lanes)
    return target, begin + 4 * target.size


@host.inline
def _settled(n, residual, how, work):  # type: ignore[no-untyped-def]
    """Where the values are or will be, and what is to be done for it."""
    if residual:
        return entries.floats(residual, n), how
    return entries.floats(work, n), lowrank.COPY


@host.inline
def _rows_at(x, n, residual, q, out, work, form):  # type: ignore[no-untyped-def]
    rows, cols, rank, groups = _shape(form)
    stride, wide = lowrank.filled_up(cols), q
    if stride != cols:
        wide = entries.floats(work, groups * stride)
        work += 4 * wide.size
    kept, how = _settled(n, residual, lowrank.ADD, work)
    given, product = entries.floats(x, n), entries.floats(out, rank * rows)
    _project_rows(kept, given, how, q, wide, product, rows, cols, rank, residual != 0)


@host.inline
def _columns_at(x, n, residual, how, p, out, work, form):  # type: ignore[no-untyped-def]
    rows, cols, rank, groups = _shape(form)
    parts = entries.floats(work, (rows + CHUNK - 1) // CHUNK * groups * cols)
    kept, how = _settled(n, residual, how, work + 4 * parts.size)
    given = entries.floats(x, n)
    _project_columns(kept, given, how, p, parts, entries.floats(out, rank * cols), rows, cols, rank, residual != 0)


@host.inline
def _write_header(factor, size, head, start, first):  # type: ignore[no-untyped-def]
    head[:] = np.float32(0.0)
    head[0] = first
    head[start : start + size] = factor[:size]


@host.inline
def _keep(kept, factor, size):  # type: ignore[no-untyped-def]
    """Copy a factor to another address, without what is not finite."""
    host.sanitise_into(entries.floats(kept, size), entries.floats(factor, size))


@host.inline
def _outer_at(x, n, p, q, add, form):  # type: ignore[no-untyped-def]
    rows, cols, rank, _ = _shape(form)
    out, left, right = entries.floats(x, n), entries.floats(p, rank * rows), entries.floats(q, rank * cols)
    _outer(out, left, right, rows, cols, rank, add != 0, np.float32(1.0))


# --- powersgd ---------------------------------------------------------------------------------------------------------


@entries.Entry
def summarise_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Some rows; the orthonormal factor stays in scratch memory from the first of them to the last."""
    form, listed = entries.doubles(parameters, FORM), entries.integers(state, 2)
    rows, cols, rank, groups = _shape(form)
    stride, begin = lowrank.filled_up(cols), work + 8 * LANES
    q = entries.floats(begin, groups * cols)
    wide = q if stride == cols else entries.floats(begin + 4 * q.size, groups * stride)
    if first == 0:
        _orthonormal(listed[LEARNED], cols, True, work, key, form)
        lowrank.fill_up(q, cols, wide, stride)
    kept, how = _settled(n, residual, lowrank.ADD, begin + 4 * (q.size + groups * stride))
    before = first // cols
    product, block = entries.floats(listed[SUMMARY] + 4 * before, rank * rows - before), lowrank.rows_at_once(cols)
    here = (n + cols - 1) // cols
    _project_all_rows(
        kept, entries.floats(x, n), how, cols, q, wide, stride, 0.0, rank, product, rows, here, block, False
    )
    return 0


@entries.Entry
def encode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    form, head = entries.doubles(parameters, FORM), np.int64(entries.doubles(parameters, FORM)[HEAD])
    rows, _, rank, _ = _shape(form)
    p, work = _orthonormal(entries.integers(state, 1)[SUMMARY], rows, False, work, key, form)
    _write_header(p, rank * rows, entries.floats(payload, head), 0, p[0])
    _columns_at(x, n, residual, lowrank.READY, p, payload + 4 * head, work, form)
    return 0


@entries.Entry
def update_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    form = entries.doubles(parameters, FORM)
    _, cols, rank, _ = _shape(form)
    _keep(entries.integers(state, 1)[0], payload + 4 * np.int64(form[HEAD]), rank * cols)
    return 0


@entries.Entry
def decode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    form = entries.doubles(parameters, FORM)
    _outer_at(x, n, payload, payload + 4 * np.int64(form[HEAD]), add, form)
    return 0


# --- acpsgd -----------------------------------------------------------------------------------------------------------


@entries.Entry
def encode_by_turns_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    form, listed = entries.doubles(parameters, FORM), entries.integers(state, FACTORS)
    (rows, cols, rank, _), head = _shape(form), np.int64(form[HEAD])
    turn, body = entries.floats(listed[TURN], 1), payload + 4 * head
    p_given = turn[0] != 0
    length = rows if p_given else cols
    factor, work = _orthonormal(listed[P] if p_given else listed[Q], length, True, work, key, form)
    _write_header(factor, rank * length, entries.floats(payload, head), START, np.float32(1 if p_given else 0))
    if p_given:
        _columns_at(x, n, residual, lowrank.ADD, factor, body, work, form)
    else:
        _rows_at(x, n, residual, factor, body, work, form)
    entries.floats(body, rank * max(rows, cols))[rank * (cols if p_given else rows) :] = np.float32(0.0)
    turn[0] = np.float32(1) - turn[0]
    return 0


@entries.Entry
def update_by_turns_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """What was summed now is given in the encode to come."""
    form, listed = entries.doubles(parameters, FORM), entries.integers(state, FACTORS)
    (rows, cols, rank, _), body = _shape(form), payload + 4 * np.int64(form[HEAD])
    if entries.floats(listed[TURN], 1)[0] != 0:
        _keep(listed[P], body, rank * rows)
    else:
        _keep(listed[Q], body, rank * cols)
    return 0


@entries.Entry
def decode_by_turns_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    form = entries.doubles(parameters, FORM)
    given, other = payload + 4 * START, payload + 4 * np.int64(form[HEAD])
    if entries.floats(payload, 1)[0] != 0:
        _outer_at(x, n, given, other, add, form)
    else:
        _outer_at(x, n, other, given, add, form)
    return 0
