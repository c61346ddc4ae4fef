"""Sessions with ``nonfinite="propagate"``: dense values that are not finite travel like others, as in MPI."""

from __future__ import annotations

import numpy as np
import pytest

from espresso_mpi import NonFiniteError

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]

ODD = [np.nan, np.inf, -np.inf]


def mean(arrays):
    with np.errstate(all="ignore"):
        return np.mean(np.asarray(arrays, np.float64), axis=0)


@pytest.mark.parametrize("window", [0, 4 << 20])
@pytest.mark.parametrize("n", [7, 5000, 1 << 17])
def test_one_array_again_and_again(world, open_session, n, window):
    """The same call with values of every kind: the quick path of a repeated call, too."""
    session, rng = open_session(nonfinite="propagate", window_bytes=window), np.random.default_rng(world.rank)
    for step in range(6):
        x = rng.integers(-8, 8, n).astype(np.float32)
        if step % 2 == 1:
            x[step % n] = ODD[(step // 2 + world.rank) % 3]
        expected = mean(world.allgather(x)).astype(np.float32)
        session.sync(x)
        assert np.array_equal(x, expected, equal_nan=True)
        if step % 2 == 0:
            assert np.isfinite(x).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("way", ["sync", "push"])
def test_tensors_of_a_call(world, open_session, dtype, way):
    """A NaN on one rank reaches all ranks, in its own element only."""
    session = open_session(nonfinite="propagate")
    for size in (10, 40000):
        grads = {name: np.full(size, 1.0, dtype) for name in "abc"}
        if world.rank == world.size - 1:
            grads["b"][3], grads["c"][4] = np.nan, np.inf
        if way == "sync":
            session.sync(grads)
        else:
            for name, x in grads.items():
                session.push(name, x)
            session.wait_all()
        expected = {name: np.full(size, 1.0, dtype) for name in "abc"}
        expected["b"][3], expected["c"][4] = np.nan, np.inf
        for name, x in grads.items():
            assert np.array_equal(x, expected[name], equal_nan=True), name
    assert not session.stats().skipped


@pytest.mark.parametrize("n", [4, 1 << 17])
def test_infinite_halves_stay_infinite_in_collectives(world, open_session, n):
    """These search nothing. A loss scaler looks for the infinities; finite sums beyond the range are cut."""
    session, n = open_session(), n * world.size
    for op in ("mean", "sum"):
        for _ in range(3):
            x = np.ones(n, np.float16)
            x[:3] = np.inf if world.rank == 0 else 1, -np.inf, np.nan
            part = session.reduce_scatter(x.copy(), op=op)
            session.allreduce(x, op=op)
            expected = np.full(n, 1 if op == "mean" else world.size, np.float16)
            expected[:3] = np.inf, -np.inf, np.nan
            assert np.array_equal(x, expected, equal_nan=True)
            here = slice(world.rank * part.size, (world.rank + 1) * part.size)
            assert np.array_equal(part, expected[here], equal_nan=True)
    assert session.stats().saturated == 0
    x = np.full(n, 60000, np.float16)
    session.allreduce(x, op="sum")
    assert (x == 65504).all() and world.allreduce(session.stats().saturated) > 0


def test_what_is_compressed_is_searched_all_the_same(world, open_session):
    session = open_session(nonfinite="propagate", compressor="onebit", min_bytes=1 << 14)
    large, small = np.ones(8192, np.float32), np.ones(16, np.float32)
    small[0] = np.nan
    session.sync({"large": large, "small": small})
    assert np.isnan(small[0]) and (large == 1).all()
    if world.rank == 0:
        large[5] = np.inf
    before, small[:] = large.copy(), 2.0
    with pytest.raises(NonFiniteError, match="large"):
        session.sync({"large": large, "small": small})
    assert np.array_equal(large, before) and (small == 2).all()


def test_sums_beyond_the_range_are_infinite(open_session):
    """The default divides them by a power of two on their way."""
    most = np.finfo(np.float32).max
    x, y = np.full(100, most, np.float32), np.full(100, most, np.float32)
    open_session(nonfinite="propagate").sync(x)
    open_session().sync(y)
    assert np.isinf(x).all() and np.isfinite(y).all()
