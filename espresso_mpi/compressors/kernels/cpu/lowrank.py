"""The products of the low-rank methods on the CPU: a matrix times factors, and factors times one another.

``cpu.matrices`` describes them and fixes the order of the sums.
"""

from __future__ import annotations

import numpy as np
from numba import prange
from numba.extending import register_jitable

from espresso_mpi.compressors.limit import LIMIT

from . import host
from .matrices import CHUNK, GROUP, LANES
from .matrix_products import (
    add_and_columns_64,
    add_and_dot_rows,
    columns_16,
    columns_64,
    dot_rows,
    outer_1x16,
    outer_1x64,
    outer_4x16,
    outer_4x64,
)

_BLOCK = 1 << 14  # values of M that a thread takes at a time, by rows
_ROWS = 8  # rows of M that are read side by side when columns are summed

READY, ADD, COPY = 0, 1, 2
"""What the residual holds before a product: the values; the residual, to which x is added; anything, x replaces it."""


# --- products ---------------------------------------------------------------------------------------------------------


@host.inline
def _settle(kept, x, how):  # type: ignore[no-untyped-def]
    if how == ADD:
        host.sanitised_sum(kept, x)
    else:
        host.sanitise_into(kept, x)


@host.inline
def top_of(vectors, start, stride, count, ranks):  # type: ignore[no-untyped-def]
    """The largest magnitude in a part of each vector, as float64."""
    top = np.uint32(0)
    for k in range(ranks):
        top = max(top, host.max_bits(vectors[start + k * stride : start + k * stride + count]))
    return np.float64(host.bits_float(top))


@host.inline
def _safe(p_top, q_top, ranks):  # type: ignore[no-untyped-def]
    """Whether no element of P Qᵀ needs to be sanitised, given the largest magnitudes; not if one is not finite."""
    return p_top <= LIMIT and q_top <= LIMIT and p_top * q_top * ranks <= LIMIT / 2


@host.inline
def _outer_one_by_one(out, at, count, p, pi, ps, q, qi, qs, ranks, sign, add):  # type: ignore[no-untyped-def]
    """Part of a row, with values of any size."""
    for c in range(count):
        value = np.float32(0.0)
        for k in range(ranks):
            value = host.fma(sign * p[pi + k * ps], q[qi + k * qs + c], value)
        value = host.sanitise(value)
        out[at + c] = out[at + c] + value if add else value


@host.inline
def _outer_row(out, at, count, p, pi, ps, q, qs, ranks, sign, add, safe):  # type: ignore[no-untyped-def]
    c = 0
    if safe:
        while c + 64 <= count:
            outer_1x64(out, at + c, count, p, pi, ps, q, c, qs, ranks, sign, add)
            c += 64
        while c + 16 <= count:
            outer_1x16(out, at + c, count, p, pi, ps, q, c, qs, ranks, sign, add)
            c += 16
    _outer_one_by_one(out, at + c, count - c, p, pi, ps, q, c, qs, ranks, sign, add)


@host.inline
def _outer_rows(out, cols, first, last, p, ps, q, ranks, sign, add, safe):  # type: ignore[no-untyped-def]
    """``sign · P Qᵀ`` in some rows, in fours where they are whole."""
    i, whole = first, min(last, out.size // cols)
    while safe and i + 4 <= whole:
        c = 0
        while c + 64 <= cols:
            outer_4x64(out, i * cols + c, cols, p, i, ps, q, c, cols, ranks, sign, add)
            c += 64
        while c + 16 <= cols:
            outer_4x16(out, i * cols + c, cols, p, i, ps, q, c, cols, ranks, sign, add)
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
        host.sanitised_sum(kept[a + whole : a + count], x[a + whole : a + count])
        if j > i:
            host.sanitised_sum(kept[b + whole : b + count], x[b + whole : b + count])
    elif how == COPY:
        host.sanitise_into(kept[a : b + count], x[a : b + count])
    for g in range(0, ranks, GROUP):
        if how == ADD and g == 0:
            add_and_dot_rows(kept, x, a, b, count, q, 0, stride, dots)
        else:
            dot_rows(kept, x, a, b, count, q, g * stride, stride, dots)
        for k in range(min(GROUP, ranks - g)):
            out[(g + k) * rows + i] = host.sanitise(dots[k])
            out[(g + k) * rows + j] = host.sanitise(dots[GROUP + k])


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
def project_all_rows(kept, x, how, cols, q, wide, stride, q_top, ranks, out, rows, count, block, subtract):  # type: ignore[no-untyped-def]
    """``count`` rows, whose products with a vector begin ``rows`` apart in ``out``."""
    for b in prange((count + block - 1) // block):
        dots = np.empty(2 * GROUP, np.float32)
        for i in range(b * block, min(count, (b + 1) * block), 4):
            last = min(count, i + 4)
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
            add_and_columns_64(kept, x, at + c, cols, count, p, start, stride, out, to + c)
            c += 64
    if how != READY:
        for i in range(count):
            a, b = at + i * cols + c, at + i * cols + width
            _settle(kept[a:b], x[a:b], how)
    while c + 64 <= width:
        columns_64(kept, x, at + c, cols, count, p, start, stride, out, to + c)
        c += 64
    while c + 16 <= width:
        columns_16(kept, x, at + c, cols, count, p, start, stride, out, to + c)
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
        out[c] = host.sanitise(out[c])


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


@host.inline
def rows_at_once(cols):  # type: ignore[no-untyped-def]
    return max(4, _BLOCK // cols // 4 * 4)


@register_jitable
def filled_up(cols: int) -> int:
    """How long vectors of that length are with the zeros that fill up their LANES."""
    return (cols + LANES - 1) // LANES * LANES


@host.inline
def fill_up(q, cols, wide, stride):  # type: ignore[no-untyped-def]
    """Copy vectors to where each is followed by zeros; there is nothing to do where ``wide`` is q."""
    for k in range(wide.size // stride if stride != cols else 0):
        wide[k * stride : k * stride + cols] = q[k * cols : (k + 1) * cols]
        wide[k * stride + cols : (k + 1) * stride] = np.float32(0.0)


@host.inline
def _factors_are_safe(p, q, ranks):  # type: ignore[no-untyped-def]
    return _safe(top_of(p, 0, 0, p.size, 1), top_of(q, 0, 0, q.size, 1), ranks)


@host.Composite
def outer(out, p, q, rows, cols, ranks, add, sign):  # type: ignore[no-untyped-def]
    """Write ``sign · P Qᵀ`` into ``out``, or add it; any factors give finite values."""
    safe = _factors_are_safe(p[: ranks * rows], q[: ranks * cols], ranks)
    _outer(out, cols, p, rows, q, ranks, rows_at_once(cols), sign, add, safe)


@host.Composite
def project_rows(kept, x, how, q, wide, out, rows, cols, ranks, subtract):  # type: ignore[no-untyped-def]
    """``P = M Q`` into ``out``; M is in ``kept``, once what ``how`` says is done.

    Args:
        q: orthonormal vectors, filled up with zero vectors to whole groups.
        wide: room for these filled up to whole LANES; q itself where they are.
        subtract: leave ``M - P Qᵀ`` in ``kept``.
    """
    stride = filled_up(cols)
    fill_up(q, cols, wide, stride)
    top, block = top_of(wide, 0, 0, wide.size, 1), rows_at_once(cols)
    project_all_rows(kept, x, how, cols, q, wide, stride, top, ranks, out, rows, rows, block, subtract)


@host.Composite
def project_columns(kept, x, how, p, parts, out, rows, cols, ranks, subtract):  # type: ignore[no-untyped-def]
    """``Q = Mᵀ P`` into ``out``; ``parts``: room for the groups of Q of each chunk. Otherwise as ``project_rows``."""
    size = p.size // rows * cols
    project_chunks(kept, x, how, cols, p, rows, ranks, parts, size)
    add_chunks(parts, size, out)
    if subtract:
        outer(kept, p, out, rows, cols, ranks, True, np.float32(-1.0))
