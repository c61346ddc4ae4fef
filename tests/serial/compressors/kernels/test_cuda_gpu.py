"""The CUDA kernels on a GPU write what the CPU kernels write. Skipped where there is none."""

from __future__ import annotations

import cuda_twins
import law_tools
import numpy as np
import pytest
from numba import cuda

from espresso_mpi.compressors import Context, get, names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda.is_available(), reason="no GPU that numba can use"),
]
SIZES = (0, 1, 7, 33, 64, 65, 2000, 1_000_003)
SPECS = [spec for name in names() for spec in law_tools.specs_of(name)]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("spec", SPECS)
def test_compressor_writes_the_bytes_of_the_cpu(spec, n):
    problems = list(cuda_twins.compressor_problems(spec, [(n, kind) for kind in cuda_twins.KINDS]))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("n", SIZES)
def test_reduction_writes_the_bytes_of_the_cpu(n):
    problems = list(cuda_twins.collective_problems(n))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("n", SIZES)
def test_updates_of_optimizers_are_those_of_the_cpu(n):
    problems = list(cuda_twins.update_problems(n))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("spec", SPECS)
def test_same_bytes_every_time(spec):
    """Blocks run in any order; nothing that is written may depend on it."""
    compressor, n = get(spec).at(None), 3_000_001
    x = cuda.to_device(np.random.default_rng(0).standard_normal(n).astype(np.float32))
    payloads = [cuda.device_array(compressor.nbytes(n), np.uint8) for _ in range(5)]
    for payload in payloads:
        compressor.encode(x, payload, None, Context(law_tools.KEY, law_tools.SHARED))
    first, *others = (payload.copy_to_host() for payload in payloads)
    assert all(np.array_equal(first, other) for other in others)
