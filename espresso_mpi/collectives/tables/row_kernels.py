"""Kernels by address that make the rows of several ranks one: sums of other types than float32, and maxima.

They have the signature of ``entries.Entry``: n elements of this rank take the place of its row, number ``key``, and
become the result. In place of a payload they get the address of the first row, in place of a residual the bytes from
row to row, and in place of a state the number of rows. Parameters are those of ``reduction.arithmetic``.
"""

from __future__ import annotations

import numpy as np

from espresso_mpi.compressors.by_address import KernelCall
from espresso_mpi.compressors.kernels.cpu import entries, host

from ..data.reduction import ReduceOp, arithmetic, sum_block

_BLOCK = 2048


def kernel_of(dtype: str, reduce_op: ReduceOp) -> KernelCall | None:
    """What reduces rows of a type; None: there is no such kernel."""
    if reduce_op.operator == "max":
        return KernelCall(max_at) if dtype == "float32" else None
    entry = _SUMS.get(dtype) if reduce_op.operator == "sum" else None
    return None if entry is None else KernelCall(entry, arithmetic(reduce_op.divisor, dtype))


@host.inline
def _how(parameters):  # type: ignore[no-untyped-def]
    given = entries.doubles(parameters, 5)
    return given[0] != 0, given[1], given[2] != 0, np.int64(given[3]), np.int64(given[4])


@host.inline
def _sum(out, rows, stride, count, own, parameters):  # type: ignore[no-untyped-def]
    """Returns how many sums were cut."""
    cut, how = 0, _how(parameters)
    for start in range(0, out.size, _BLOCK):
        cut += sum_block(out[start : start + _BLOCK], rows, start, stride, count, own, how)
    return cut


@entries.Entry
def sum_int8_at(x, n, rows, stride, count, work, own, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    span = entries.codes8(rows, (count - 1) * stride + n)
    return _sum(entries.codes8(x, n), span, stride, count, own, parameters)


@entries.Entry
def sum_int16_at(x, n, rows, stride, count, work, own, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    span = entries.shorts(rows, (count - 1) * (stride // 2) + n)
    return _sum(entries.shorts(x, n), span, stride // 2, count, own, parameters)


@entries.Entry
def sum_halves_at(x, n, rows, stride, count, work, own, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    span = entries.codes16(rows, (count - 1) * (stride // 2) + n)
    return _sum(entries.codes16(x, n), span, stride // 2, count, own, parameters)


@entries.Entry
def max_at(x, n, rows, stride, count, work, own, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """As ``numpy.maximum``; which of two zeros of different sign remains depends on the rank there, too."""
    out, span = entries.floats(x, n), entries.floats(rows, (count - 1) * (stride // 4) + n)
    for rank in range(count):
        row = span[rank * (stride // 4) : rank * (stride // 4) + n]
        if rank != own:
            for i in range(n):
                out[i] = row[i] if not (out[i] >= row[i] or out[i] != out[i]) else out[i]
    return 0


_SUMS = {"int8": sum_int8_at, "int16": sum_int16_at, "float16": sum_halves_at, "bfloat16": sum_halves_at}
