"""Sums, conversions and the search for NaN, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from espresso_mpi.collectives.data import reduction

SIZES = (1, 7, 2047, 2048, 4096, 4097, 12289, 100003)


def as_memory(x):
    return x.view(np.uint16) if x.itemsize == 2 else x


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("n", SIZES)
def test_every_non_finite_value_is_found_wherever_it_stands(n, dtype):
    x = np.random.default_rng(n).standard_normal(n).astype(dtype)
    assert reduction.count_non_finite(as_memory(x), dtype, False) == 0
    for position in sorted({0, n - 1, n // 2, n // 3, min(n - 1, 4096)}):
        for bad in (np.nan, np.inf, -np.inf):
            y = x.copy()
            y[position] = bad
            assert reduction.count_non_finite(as_memory(y), dtype, False) == 1


def test_float64_that_float32_cannot_hold():
    largest = float(np.finfo(np.float32).max)
    x = np.array([largest, -largest, largest * (1 + 2.0**-26), 2.0**128 - 2.0**103, 1e300])
    with np.errstate(over="ignore"):
        expected = np.count_nonzero(~np.isfinite(x.astype(np.float32)))
    assert reduction.count_non_finite(x, "float64", True) == expected == 2
    assert reduction.count_non_finite(x, "float64", False) == 0


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("divisor", [1, 2, 3, 1.5])
def test_mean_rows_sums_in_rank_order(dtype, count, divisor):
    n, wide = 5000, np.float64 if dtype == "float64" else np.float32
    for own in range(count):
        rows = np.random.default_rng(own).standard_normal((count, n)).astype(dtype)
        total = rows[0].astype(wide)
        for row in rows[1:]:
            total = total + row.astype(wide)
        out = rows[own].copy()
        rows[own] = np.nan  # must not be read
        reduction.mean_rows(as_memory(out), as_memory(rows), own, divisor, dtype)
        assert np.array_equal(out, (total / wide(divisor)).astype(dtype))


def test_rows_may_lie_apart():
    window = np.zeros((3, 1000), np.float32)
    window[:, :10] = np.arange(30).reshape(3, 10)
    out = window[1, :10].copy()
    reduction.mean_rows(out, window[:, :10], 1, 3.0, "float32")
    assert np.array_equal(out, np.arange(30).reshape(3, 10).mean(axis=0, dtype=np.float32))


def test_float16_saturates_and_bfloat16_rounds_to_even():
    x = np.array([1e6, -1e6, 65504, 65520, 1.0009765625, 0.1], np.float32)
    out = np.empty(6, np.uint16)
    reduction.convert(out, x, "float16")
    assert np.array_equal(out.view(np.float16), np.clip(x, -65504, 65504).astype(np.float16))
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).standard_normal(9999).astype(np.float32)
    out = np.empty(9999, np.uint16)
    reduction.convert(out, x, "bfloat16")
    assert np.array_equal(out, x.astype(ml_dtypes.bfloat16).view(np.uint16))
    back = np.empty(9999, np.float32)
    reduction.convert(back, out, "bfloat16")
    assert np.array_equal(back, x.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
@pytest.mark.parametrize("count", [2, 5])
def test_sums_of_integers_stop_at_the_end_of_their_range_and_say_how_often(dtype, count):
    limits = np.iinfo(dtype)
    for n in (1, 100, 5000):
        rows = np.random.default_rng(n).integers(limits.min, limits.max, (count, n), dtype, endpoint=True)
        wide = rows.astype(np.int64).sum(axis=0)
        out = rows[1].copy()
        saturated = reduction.reduce_rows(out, rows, 1, reduction.ReduceOp("sum"), dtype)
        assert np.array_equal(out, np.clip(wide, limits.min, limits.max))
        assert saturated == np.count_nonzero((wide < limits.min) | (wide > limits.max))


def test_the_largest_of_each_element():
    rows = np.random.default_rng(0).standard_normal((4, 999)).astype(np.float32)
    expected, out = rows.max(axis=0), rows[3].copy()
    rows[3] = np.nan  # must not be read
    assert reduction.reduce_rows(out, rows, 3, reduction.ReduceOp("max"), "float32") == 0
    assert np.array_equal(out, expected)


def test_blends_round_like_a_fused_product():
    rng = np.random.default_rng(0)
    x, out = (rng.standard_normal(5001).astype(np.float32) for _ in range(2))
    a, b = np.float32(0.3), np.float32(0.7)
    kept = (a * out).astype(np.float64)
    expected = (kept + b.astype(np.float64) * x.astype(np.float64)).astype(np.float32)
    reduction.blend(out, 0.3, 0.7, x)
    assert np.abs(out - expected).max() <= 2.0**-23


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int16"])
@pytest.mark.parametrize(
    "reduce_op", [reduction.ReduceOp("sum"), reduction.ReduceOp("sum", 3.0), reduction.ReduceOp("max")]
)
def test_rows_in_flat_memory_are_reduced_like_rows(dtype, reduce_op):
    """``reduce_span``, on memory as the ranks of a window lay it out, against ``reduce_rows``."""
    n, count, stride = 5000, 3, 5064
    if reduce_op.operator == "max" and dtype != "float32":
        pytest.skip("maxima are of float32 summaries")
    flat = (np.random.default_rng(1).standard_normal(count * stride) * 9000).astype(dtype)
    rows = np.stack([flat[r * stride : r * stride + n] for r in range(count)])
    for own in range(count):
        out, expected = rows[own].copy(), rows[own].copy()
        memory = (lambda x: x) if dtype == "int16" else as_memory
        saturated = reduction.reduce_span(memory(out), memory(flat), stride, count, own, reduce_op, dtype)
        assert saturated == reduction.reduce_rows(memory(expected), memory(rows), own, reduce_op, dtype)
        assert (saturated > 0) == (dtype == "int16")
        assert out.tobytes() == expected.tobytes()
