"""Values that a format cannot hold are cut to the end of its range, and counted."""

from __future__ import annotations

import numpy as np
import pytest

from espresso_mpi.collectives.data import reduction
from espresso_mpi.compressors import Context, get

SIZES = (1, 7, 4096, 70_001)


def cut_by(spec, x, residual):
    compressor, context = get(spec), Context()
    compressor.encode(x, np.empty(compressor.nbytes(x.size), np.uint8), residual, context)
    return context.cut


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("fed_back", [False, True])
def test_halves_beyond_the_largest_are_counted(n, fed_back):
    random = np.random.default_rng(n)
    x = (random.standard_normal(n) * 50_000).astype(np.float32)
    x[: n // 2 : 3] = random.choice(
        np.array([65503, 65519.99, 65520, -65536, 1e30, 65504], np.float32), x[: n // 2 : 3].size
    )
    residual = (random.standard_normal(n) * 20_000).astype(np.float32) if fed_back else None
    whole = x + residual if fed_back else x
    assert cut_by("fp16", x, residual) == np.count_nonzero(np.abs(whole) >= 65520)
    assert cut_by("fp16", np.ones(n, np.float32), None) == cut_by("bf16", x, None) == 0


@pytest.mark.parametrize("fed_back", [False, True])
@pytest.mark.parametrize("spec", ["onebit:block=128", "onebit_sgd:block=128"])
def test_values_beyond_what_a_scale_carries_are_counted(spec, fed_back):
    """Where the magnitudes of a block, or of its positive or negative half, sum to more than float32 holds."""
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    x[128:256] = 2.0**122  # 128 of them: 2**129
    x[300] = 2.0**125
    x[900:] = np.where(np.arange(100) % 4 == 0, -(2.0**122), 1.0)  # 2**122 * 25 is below, and 104 elements are a block
    residual = np.zeros(1000, np.float32) if fed_back else None
    assert cut_by(spec, x, residual) == 128
    x[896:] = np.where(np.arange(104) % 4 == 0, 2.0**121, -(2.0**124))
    assert cut_by(spec, x, residual if residual is None else np.zeros(1000, np.float32)) == 128 + (
        104 if spec.startswith("onebit:") else 78
    )
    assert cut_by(spec, x[:128].copy(), None) == 0


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("divisor", [1.0, 1.5])
def test_sums_of_halves_beyond_the_largest_are_counted(n, divisor):
    rows = np.random.default_rng(n).uniform(-60_000, 60_000, (3, n)).astype(np.float16)
    total = rows[0].astype(np.float32)
    for row in rows[1:]:
        total = total + row.astype(np.float32)
    total = total / np.float32(divisor)
    out = rows[1].copy()
    counted = reduction.reduce_rows(
        out.view(np.uint16), rows.view(np.uint16), 1, reduction.ReduceOp("sum", divisor), "float16"
    )
    assert counted == np.count_nonzero(np.abs(total) >= 65520)
    assert np.array_equal(out, np.clip(total, -65504, 65504).astype(np.float16))
