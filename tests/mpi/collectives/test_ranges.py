"""Gradients at the end of their type's range: the mean is right, or one error on all ranks; never a silent infinity."""

from __future__ import annotations

import numpy as np
import pytest
from rank_errors import several

from espresso_mpi.errors import NonFiniteError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

ULPS = {"float32": 2.0**-21, "float64": 2.0**-50, "float16": 2.0**-9, "bfloat16": 2.0**-6}


def typed(dtype):
    if dtype == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(dtype)


def layouts(size):
    """One node, nodes of their own, and [[0, 1], [2]] or the like."""
    uneven = [[list(range(size - 1)), [size - 1]]] if size > 2 else []
    return [None, [[rank] for rank in range(size)], *uneven]


def at_the_end(rank, n, dtype):
    """Values of all magnitudes up to the largest, with any sign; the first two are the largest on all ranks."""
    random = np.random.default_rng([rank, n])
    largest = np.longdouble({"float16": 65504, "bfloat16": (2 - 2.0**-7) * 2.0**127}.get(dtype) or np.finfo(dtype).max)
    x = largest * random.uniform(0.4, 1, n) * random.choice([-1, 1], n)
    x[::3] = random.standard_normal(x[::3].size)
    x[:2] = largest, -largest
    return x.astype(typed(dtype))


def mean(size, n, dtype):
    """In extended precision, whose range is larger than that of all types."""
    return sum(at_the_end(rank, n, dtype).astype(np.longdouble) / size for rank in range(size))


def right(x, size, n, dtype):
    expected, got = mean(size, n, dtype), x.astype(np.longdouble)
    scale = np.max([np.abs(at_the_end(rank, n, dtype).astype(np.longdouble)) for rank in range(size)], axis=0)
    return bool(np.all(np.isfinite(got)) and np.all(np.abs(got - expected) <= ULPS[dtype] * scale))


@pytest.mark.parametrize("window_bytes", [0, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_dense_means_of_the_largest_values(world, open_session, dtype, window_bytes):
    for nodes in layouts(world.size):
        session = open_session(nodes=nodes, window_bytes=window_bytes, fuse_bytes=1000)
        for n in (5, 5, 30_000):  # the second of the small ones could take the short way
            grad, ones = at_the_end(world.rank, n, dtype), np.full(7, world.rank + 1, typed(dtype))
            session.sync({"grad": grad, "ones": ones})  # small ones share a buffer
            assert right(grad, world.size, n, dtype) and np.allclose(ones.astype(float), (world.size + 1) / 2, 0.01)
            assert len(set(world.allgather(grad.tobytes()))) == 1
        for _ in range(2):
            grad = at_the_end(world.rank, 5, dtype)
            session.push("pushed", grad).wait()
            assert right(grad, world.size, 5, dtype)
        assert session.stats().saturated == 0 and not session.stats().skipped


@several
def test_values_that_are_large_on_one_rank_only(world, open_session):
    """All ranks must divide, and the next step is as ever."""
    session, other = open_session(), open_session()
    for step in range(4):
        large = step % 2 == 0
        grad = np.full(1000, 3e38 if large and world.rank == 0 else step, np.float32)
        session.sync(grad)
        expected = (3e38 + (world.size - 1) * step) / world.size if large else step
        assert np.allclose(grad, np.float32(expected), rtol=1e-6)
        usual = np.random.default_rng([world.rank, step]).standard_normal(1000).astype(np.float32)
        again = usual.copy()
        session.sync(usual)
        other.sync(again)
        assert usual.tobytes() == again.tobytes()


@several
@pytest.mark.parametrize("compressor", ["int8", "onebit", "fp16", "topk:ratio=0.1"])
def test_compressed_values_beyond_what_can_be_summed_are_refused(world, open_session, compressor):
    session, skipping = open_session(compressor=compressor), open_session(compressor=compressor, nonfinite="skip")
    usual = np.random.default_rng(world.rank).standard_normal(5000).astype(np.float32)
    session.sync(usual)
    state = {key: value.copy() for key, value in session.state_dict()["arrays"].items()}
    grad = np.full(5000, 3e38 if world.rank == 1 else 1, np.float32)
    before = grad.copy()
    text = r"rank 1 .*'grads' has 5000 value\(s\) of .* too large .*loss scale"
    with pytest.raises(NonFiniteError, match=text) as raised:
        session.sync(grad)
    assert len(set(world.allgather(str(raised.value)))) == 1
    assert np.array_equal(grad, before)
    assert all(np.array_equal(value, state[key]) for key, value in session.state_dict()["arrays"].items())
    skipping.sync(grad)
    assert not grad.any() and skipping.stats().skipped == {"grads": 1}


@several
@pytest.mark.parametrize("window_bytes", [0, 1 << 20])
@pytest.mark.parametrize(
    "compressor, route, value", [("fp16", None, 1e5), ("fp16", "flat-linear", 40_000), ("onebit", None, 2.0**120)]
)
def test_values_that_are_cut_are_counted(world, open_session, caplog, compressor, route, value, window_bytes):
    """By whoever cuts them; the log says so once, there."""
    n = 4096 * world.size
    session = open_session(compressor=compressor, route=route, feedback="none", window_bytes=window_bytes)
    for _ in range(2):
        session.sync(np.ones(n, np.float32))
        assert session.stats().saturated == 0
    for _ in range(2):
        session.sync(np.full(n, value, np.float32))
    counted = sum(world.allgather(session.stats().saturated))
    passes = {"flat-linear": 1}.get(route, world.size)  # sums, or what each rank encodes; and some of them again
    assert 2 * passes * n <= counted <= 2 * (passes + 1) * n
    said = [record for record in caplog.records if "left their range" in record.message]
    assert len(said) == (session.stats().saturated > 0)
