"""Arithmetic on whole arrays: weighted sums in rank order, conversions, the search for NaN and infinity.

MPI's own reductions neither fix an order nor know bfloat16, and are slow for float16; these are all our own, so every
rank that sums the same rows gets the same bits. 16-bit types are handled as their bits (uint16) and summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numba import prange, types
from numba.extending import overload

from espresso_mpi.arrays.device import device_of
from espresso_mpi.compressors.kernels.cpu import host
from espresso_mpi.compressors.kernels.cpu.casts import BEYOND_HALF

from . import magnitudes
from .combining import combine_rows

_BLOCK = 2048

_OVERFLOWS = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F800000,
    "float64": 0x7FF0000000000000,
    "float64 as float32": int(np.float64(2.0**128 - 2.0**103).view(np.uint64)),
}
"""Magnitudes from these bits on are infinite or NaN, or become so; magnitudes order like their bits."""


@dataclass(frozen=True)
class ReduceOp:
    """How the ranks' arrays become one: their sum, divided; (float32 only) their elementwise maximum; or otherwise.

    Attributes:
        combine: of another operator: ``combine(row, total)`` adds a row of host memory to a total, in its way.
    """

    operator: Literal["sum", "max", "other"]
    divisor: float = 1.0
    combine: Callable[[Any, Any], None] | None = None


def stored(dtype: str) -> Any:
    """The numpy type that arrays of an element type have: 16-bit floats are handled as their bits."""
    return np.dtype("uint16" if dtype in ("float16", "bfloat16") else dtype)


def filled(size: int, value: float, dtype: str) -> np.ndarray:
    """A flat host array of one value, 16-bit floats as their bits."""
    if dtype == "bfloat16":
        return np.full(size, np.float32(value).view(np.uint32) >> 16, np.uint16)
    return np.full(size, value, dtype).view(stored(dtype))


def reduce_rows(out: Any, rows: Any, own: int, reduce_op: ReduceOp, dtype: str, counted: bool = True) -> int:
    """Reduce ``rows``, with ``out`` in place of row ``own``, into ``out``; arguments as for ``mean_rows``.

    Returns:
        How many sums, of integers or as float16, would have left their range and were set to its end.
    """
    if out.size == 0:
        return 0
    if reduce_op.operator != "sum":
        combine_rows(out, rows, own, reduce_op.combine)
        return 0
    if np.dtype(stored(dtype)).kind == "i":
        return _add_integers(out, rows, own, counted)
    return mean_rows(out, rows, own, reduce_op.divisor, dtype, counted)


def reduce_span(
    out: np.ndarray, span: np.ndarray, stride: int, count: int, own: int, reduce_op: ReduceOp, dtype: str
) -> int:
    """As ``reduce_rows`` on the host, for rows that lie ``stride`` elements apart in flat memory.

    Args:
        span: row r is ``span[r * stride : r * stride + out.size]``; what follows is not read.
    """
    if out.size == 0:
        return 0
    if reduce_op.operator != "sum":
        rows = [span[r * stride : r * stride + out.size] for r in range(count)]
        combine_rows(out, rows, own, reduce_op.combine)
        return 0
    if out.dtype.kind == "i":
        limits = np.iinfo(out.dtype)
        return int(_sum_integers(out, span, stride, count, own, limits.min, limits.max))
    exact, factor = factor_of(reduce_op.divisor)
    if out.dtype == np.uint16:
        return int(_sum_rows_16(out, span, stride, count, own, exact, np.float32(factor), dtype == "bfloat16"))
    _sum_rows(out, span, stride, count, own, exact, out.dtype.type(factor))
    return 0


def _add_integers(out: Any, rows: Any, own: int, counted: bool) -> int:
    if device_of(out) == "gpu":
        from . import cuda_sums

        return int(cuda_sums.add_integers(out, rows, own, counted))
    limits = np.iinfo(out.dtype)
    span, stride = _span(rows)
    return counted * int(_sum_integers(out, span, stride, rows.shape[0], own, limits.min, limits.max))


def blend(out: Any, a: float, b: float, x: Any) -> None:
    """``out = fma(b, x, a·out)`` for flat float32 arrays on one device."""
    if out.size == 0:
        return
    if device_of(out) == "gpu":
        from . import cuda_sums

        cuda_sums.blend(out, a, b, x)
        return
    _blend(out, x, np.float32(a), np.float32(b))


def mean_rows(out: Any, rows: Any, own: int, divisor: float, dtype: str, counted: bool = True) -> int:
    """``out = (rows[0] + ... + out in place of rows[own] + ... + rows[p-1]) / divisor``, summed in that order.

    Args:
        out: flat, holds this rank's own contribution; receives the result.
        rows: shape (p, out.size), of which row ``own`` is not read.
        dtype: name of the element type; 16-bit types come as uint16 and are summed in float32, rounded once.
        counted: whether to count; of ranks that sum the same rows, one does.

    Returns:
        How many results were beyond float16 and became 65504; 0 on a session's stream, see ``gpu.cuts_of``.
    """
    if out.size == 0:
        return 0
    if device_of(out) == "gpu":
        from . import cuda_sums

        return int(cuda_sums.mean_rows(out, rows, own, divisor, dtype, counted))
    span, stride = _span(rows)
    return counted * reduce_span(out, span, stride, rows.shape[0], own, ReduceOp("sum", divisor), dtype)


def _span(rows: np.ndarray) -> tuple[np.ndarray, int]:
    """The memory from the first row to the last as one flat array, and the distance of rows in elements.

    Rows of a shared window lie apart; numba would give up vectorising over a 2-D array that is not contiguous.
    """
    if rows.flags.c_contiguous:
        return rows.reshape(-1), rows.shape[1]
    stride = rows.strides[0] // rows.itemsize
    size = (rows.shape[0] - 1) * stride + rows.shape[1]
    return np.lib.stride_tricks.as_strided(rows, (size,), (rows.itemsize,)), stride


def divide(x: Any, divisor: float) -> None:
    """``x /= divisor`` for flat float32."""
    if divisor == 1 or x.size == 0:
        return
    if device_of(x) == "gpu":
        from . import cuda_sums

        cuda_sums.divide(x, divisor)
        return
    exact, factor = factor_of(divisor)
    _divide(x, exact, np.float32(factor))


@lru_cache(maxsize=256)
def arithmetic(divisor: float, dtype: str) -> tuple[bool, float, bool, int, int]:
    """What ``sum_block`` needs to know: exact division, its factor, bfloat16, and the range of integers."""
    exact, factor = factor_of(divisor)
    limits = np.iinfo(dtype) if dtype.startswith("int") else np.iinfo(np.int64)
    return exact, float(factor), dtype == "bfloat16", int(limits.min), int(limits.max)


def factor_of(divisor: float) -> tuple[bool, float]:
    """(True, reciprocal) for powers of two, where multiplying rounds as dividing does; else (False, divisor)."""
    exact = float(np.frexp(divisor)[0]) == 0.5
    return exact, 1 / divisor if exact else divisor


def convert(out: Any, x: Any, dtype: str) -> None:
    """Between float32 and the type ``dtype``, to nearest even: one of the two is float32, the other as in the tensor.

    What float16 cannot hold becomes its largest value, 65504, not infinity.
    """
    if out.size == 0:
        return
    if device_of(out) == "gpu":
        from . import cuda_sums

        cuda_sums.convert(out, x, dtype)
        return
    if dtype == "float64":
        _cast(out, x)
    elif out.dtype == np.float32:
        _widen(out, x, dtype == "bfloat16")
    else:
        _narrow(out, x, dtype == "bfloat16")


def overflow_bits(dtype: str, as_float32: bool) -> int:
    """The bits of the least magnitude that is infinite, or (``as_float32``) would be as float32."""
    return _OVERFLOWS["float64 as float32" if dtype == "float64" and as_float32 else dtype]


def count_non_finite(x: Any, dtype: str, as_float32: bool) -> int:
    """How many elements are NaN or infinite, or (``as_float32``) would be as float32."""
    return count_from(x, dtype, overflow_bits(dtype, as_float32))


def count_from(x: Any, dtype: str, least: int) -> int:
    """How many elements have a magnitude with these bits or larger ones; NaN is larger than infinity."""
    if x.size == 0:
        return 0
    if device_of(x) == "gpu":
        from . import cuda_sums

        return int(cuda_sums.count_from(x, dtype, least))
    return magnitudes.count_from(x, least)


@host.inline
def _load(bits, bfloat):  # type: ignore[no-untyped-def]
    if bfloat:
        return host.bits_float(np.uint32(bits) << np.uint32(16))
    return host.from_half(bits)


@host.inline
def _round(value, bfloat):  # type: ignore[no-untyped-def]
    if bfloat:
        bits = np.uint32(host.float_bits(value))
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    cut = min(max(value, np.float32(-65504.0)), np.float32(65504.0))
    return host.to_half(value if abs(value) == np.float32(np.inf) else cut)  # what a loss scaler looks for stays


@host.inline
def _add_rows(total, a, b):  # type: ignore[no-untyped-def]
    for i in range(a.size):
        total[i] = a[i] + b[i]


@host.inline
def _finish_rows(out, a, b, exact, factor):  # type: ignore[no-untyped-def]
    """The last addition and the division in one pass."""
    if exact:
        for i in range(out.size):
            out[i] = (a[i] + b[i]) * factor
    else:
        for i in range(out.size):
            out[i] = (a[i] + b[i]) / factor


@host.inline
def _finish(out, total, exact, factor):  # type: ignore[no-untyped-def]
    if exact:
        for i in range(out.size):
            out[i] = total[i] * factor
    else:
        for i in range(out.size):
            out[i] = total[i] / factor


@host.inline
def sum_floats(out, mine, span, start, stride, count, own, exact, factor):  # type: ignore[no-untyped-def]
    """A block: ``mine`` in place of row ``own``, and the other rows' elements from ``start`` on."""
    total = np.empty(out.size if count > 2 else 0, out.dtype)
    sum_so_far = mine if own == 0 else span[start : start + out.size]
    for r in range(1, count):
        row = mine if r == own else span[r * stride + start : r * stride + start + out.size]
        if r + 1 < count:
            _add_rows(total, sum_so_far, row)
            sum_so_far = total
        else:
            _finish_rows(out, sum_so_far, row, exact, factor)
    if count == 1:
        _finish(out, sum_so_far, exact, factor)


@host.Kernel
def _sum_rows(out, span, stride, count, own, exact, factor):  # type: ignore[no-untyped-def]
    for b in prange((out.size + _BLOCK - 1) // _BLOCK):
        start, stop = b * _BLOCK, min(out.size, (b + 1) * _BLOCK)
        sum_floats(out[start:stop], out[start:stop], span, start, stride, count, own, exact, factor)


@host.inline
def _accumulate_16(total, row, first, bfloat):  # type: ignore[no-untyped-def]
    for i in range(row.size):
        value = _load(row[i], bfloat)
        total[i] = value if first else total[i] + value


@host.inline
def _sum_halves(out, span, start, stride, count, own, exact, factor, bfloat):  # type: ignore[no-untyped-def]
    total = np.empty(out.size, np.float32)
    for r in range(count):
        row = out if r == own else span[r * stride + start : r * stride + start + out.size]
        _accumulate_16(total, row, r == 0, bfloat)
    _finish(total, total, exact, factor)
    _narrow_block(out, total, bfloat)
    return 0 if bfloat else _beyond_half(total)


@host.inline
def _beyond_half(x):  # type: ignore[no-untyped-def]
    """How many values a half cannot hold, not even rounded."""
    if host.bits_float(host.max_bits(x)) < np.float32(BEYOND_HALF):
        return 0
    beyond = 0
    for i in range(x.size):
        beyond += np.float32(BEYOND_HALF) <= abs(x[i]) < np.float32(np.inf)
    return beyond


@host.Kernel
def _sum_rows_16(out, span, stride, count, own, exact, factor, bfloat):  # type: ignore[no-untyped-def]
    beyond = 0
    for b in prange((out.size + _BLOCK - 1) // _BLOCK):
        start, stop = b * _BLOCK, min(out.size, (b + 1) * _BLOCK)
        beyond += _sum_halves(out[start:stop], span, start, stride, count, own, exact, factor, bfloat)
    return beyond


@host.inline
def _accumulate_integers(total, row):  # type: ignore[no-untyped-def]
    for i in range(row.size):
        total[i] += np.int64(row[i])


@host.inline
def _saturate(out, total, low, high):  # type: ignore[no-untyped-def]
    outside = 0
    for i in range(out.size):
        outside += total[i] < low or total[i] > high
        out[i] = min(max(total[i], low), high)
    return outside


@host.inline
def _add_block(out, span, start, stride, count, own, low, high):  # type: ignore[no-untyped-def]
    total = np.zeros(out.size, np.int64)
    for r in range(count):
        row = out if r == own else span[r * stride + start : r * stride + start + out.size]
        _accumulate_integers(total, row)
    return _saturate(out, total, low, high)


@host.Kernel
def _sum_integers(out, span, stride, count, own, low, high):  # type: ignore[no-untyped-def]
    outside = 0
    for b in prange((out.size + _BLOCK - 1) // _BLOCK):
        start, stop = b * _BLOCK, min(out.size, (b + 1) * _BLOCK)
        outside += _add_block(out[start:stop], span, start, stride, count, own, low, high)
    return outside


def sum_block(out: Any, span: Any, start: Any, stride: Any, count: Any, own: Any, how: Any) -> int:
    """For compiled code: a block of a sum of any element type; ``how`` as ``arithmetic`` makes it.

    Returns:
        As ``reduce_rows``.
    """
    raise NotImplementedError("only compiled code calls this")


@overload(sum_block)
def _sum_block(out, span, start, stride, count, own, how):  # type: ignore[no-untyped-def]
    if isinstance(out.dtype, types.Float):
        element = out.dtype

        def floats(out, span, start, stride, count, own, how):  # type: ignore[no-untyped-def]
            sum_floats(out, out, span, start, stride, count, own, how[0], element(how[1]))
            return 0

        return floats
    if out.dtype == types.uint16:

        def halves(out, span, start, stride, count, own, how):  # type: ignore[no-untyped-def]
            return _sum_halves(out, span, start, stride, count, own, how[0], np.float32(how[1]), how[2])

        return halves

    def integers(out, span, start, stride, count, own, how):  # type: ignore[no-untyped-def]
        return _add_block(out, span, start, stride, count, own, how[3], how[4])

    return integers


@host.inline
def _blend_block(out, x, a, b):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = host.fma(b, x[i], a * out[i])


@host.Kernel
def _blend(out, x, a, b):  # type: ignore[no-untyped-def]
    for block in prange((x.size + _BLOCK - 1) // _BLOCK):
        start, stop = block * _BLOCK, min(x.size, (block + 1) * _BLOCK)
        _blend_block(out[start:stop], x[start:stop], a, b)


@host.Kernel
def _divide(x, exact, factor):  # type: ignore[no-untyped-def]
    for b in prange((x.size + _BLOCK - 1) // _BLOCK):
        block = x[b * _BLOCK : min(x.size, (b + 1) * _BLOCK)]
        _finish(block, block, exact, factor)


@host.inline
def _narrow_block(out, x, bfloat):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = _round(x[i], bfloat)


@host.Kernel
def _narrow(out, x, bfloat):  # type: ignore[no-untyped-def]
    for b in prange((x.size + _BLOCK - 1) // _BLOCK):
        start, stop = b * _BLOCK, min(x.size, (b + 1) * _BLOCK)
        _narrow_block(out[start:stop], x[start:stop], bfloat)


@host.Kernel
def _widen(out, x, bfloat):  # type: ignore[no-untyped-def]
    for b in prange((x.size + _BLOCK - 1) // _BLOCK):
        start, stop = b * _BLOCK, min(x.size, (b + 1) * _BLOCK)
        to, source = out[start:stop], x[start:stop]
        for i in range(to.size):
            to[i] = _load(source[i], bfloat)


@host.Kernel
def _cast(out, x):  # type: ignore[no-untyped-def]
    for b in prange((x.size + _BLOCK - 1) // _BLOCK):
        start, stop = b * _BLOCK, min(x.size, (b + 1) * _BLOCK)
        to, source = out[start:stop], x[start:stop]
        for i in range(to.size):
            to[i] = source[i]
