"""Kernels that reduce the rows of ranks, by address, against ``reduction.reduce_rows``."""

import ctypes

import numpy as np
import pytest

from espresso_mpi.collectives.data.reduction import ReduceOp, reduce_rows
from espresso_mpi.collectives.tables.row_kernels import kernel_of

SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 11)
N = 5003


def rows_of(dtype, count):
    rng = np.random.default_rng(count)
    if dtype.startswith("int"):
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max + 1, (count, N)).astype(dtype)
    values = rng.standard_normal((count, N)).astype(np.float32)
    if dtype == "float32":
        return np.abs(values)
    if dtype == "float16":
        return (values * 40000).clip(-65504, 65504).astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "operator"),
    [("int8", "sum"), ("int16", "sum"), ("float16", "sum"), ("bfloat16", "sum"), ("float32", "max")],
)
def test_rows_become_one(dtype, operator, count):
    """Rows lie further apart than they are long, and there is something behind the elements."""
    reduce_op, rows = ReduceOp(operator), rows_of(dtype, count)
    kernel, apart = kernel_of(dtype, reduce_op), N + 37
    memory = np.concatenate([rows, np.full((count, apart - N), 77, rows.dtype)], axis=1)
    parameters = np.array(kernel.passed or [0.0], np.float64)
    for own in range(count):
        expected, found = rows[own].copy(), np.append(rows[own], np.full(9, 77, rows.dtype))
        cut = reduce_rows(expected, rows, own, reduce_op, dtype)
        stride, last = apart * rows.itemsize, (0, own, 0, parameters.ctypes.data, 0, 0)
        got = SIGNATURE(kernel.entry.address)(found.ctypes.data, N, memory.ctypes.data, stride, count, *last)
        assert got == cut and (cut > 0) == (operator == "sum" and dtype != "bfloat16" and count > 1)
        np.testing.assert_array_equal(found[:N], expected)
        assert (found[N:] == 77).all()


def test_what_has_no_kernel():
    assert kernel_of("int32", ReduceOp("sum")) is None
    assert kernel_of("float32", ReduceOp("other", combine=np.add)) is None
