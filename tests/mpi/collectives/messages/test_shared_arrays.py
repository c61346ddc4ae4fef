"""Arrays that the ranks of a node share: sums where they lie, beside other arrays, and the life of their memory."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from espresso_mpi.collectives.messages.shared_arrays import SharedArrays
from espresso_mpi.collectives.messages.window_places import STARTS
from espresso_mpi.errors import ConfigError, MismatchError, NonFiniteError

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(240)]

N = 300_007
"""Elements: several chunks of a window, and shares of uneven length."""


def values(rank, n=N, dtype="float32"):
    return np.random.default_rng([rank, n]).standard_normal(n).astype(dtype)


def mean(size, n=N, dtype="float32"):
    """In rank order, in the type of the sum, and rounded once."""
    wide = np.float64 if dtype == "float64" else np.float32
    total = values(0, n, dtype).astype(wide)
    for rank in range(1, size):
        total = total + values(rank, n, dtype).astype(wide)
    return (total / wide(size)).astype(dtype)


def blocks():
    """How many such blocks this process has mapped; none of them has a name in the file system."""
    found = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:espresso_mpi" in line]
    assert all(line.endswith("(deleted)") for line in found)
    return len(found)


@pytest.fixture
def session(open_session):
    found = open_session()
    if not found._transport.shared_memory(1).size:
        pytest.skip("ranks cannot map each other's memory here")
    return found


def row_of(session):
    """Where large data of this rank pass the window: a view of each half."""
    window = session._transport.window_for(session._transport.node, np.empty(0))
    begins = window.places[STARTS : STARTS + 2] + window.member * window.places[1]
    return [window.elements(np.uint8)[begin : begin + window.half_bytes] for begin in begins.tolist()]


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_the_bits_are_those_of_other_arrays(world, session, dtype):
    """By every call that sums, the first time and again; the data do not pass the window."""
    size, me = world.size, world.rank
    x, y, expected = session.empty(N, dtype), np.empty(N, dtype), mean(size, dtype=dtype).tobytes()
    row = row_of(session)
    for _ in range(2):
        for call in (session.allreduce, lambda x: session.push("x", x).wait(), session.sync):
            x[:] = y[:] = values(me, dtype=dtype)
            assert call(y).tobytes() == expected
            session.barrier()  # all have read what is in the window
            for half in row:
                half[:] = 0x55
            session.barrier()
            assert call(x) is x and x.tobytes() == expected
            assert all(np.all(half == 0x55) for half in row), "they have passed the window"
        x[:] = values(me, dtype=dtype)
        found = session.reduce(x, root=size - 1)
        assert me != size - 1 or found.tobytes() == expected
        assert session.allreduce(values(me, dtype=dtype), out=x) is x and x.tobytes() == expected


def test_beside_arrays_that_lie_elsewhere(world, session):
    """Another place in the block, another block, or none: at one rank, at all but one, at all."""
    size, me, n = world.size, world.rank, N - 1000
    one, two, expected = session.empty(N), session.empty(N), mean(size, n).tobytes()
    for who in ([0], list(range(1, size)), list(range(size))):
        for other in (one[1:], two, np.empty(N, np.float32)):
            x = other[:n] if me in who else one[:n]
            for call in (session.allreduce, session.sync, session.allreduce):
                x[:] = values(me, n)
                assert call(x).tobytes() == expected
            session.barrier()


@pytest.mark.parametrize("count", [3, 20])
def test_views_that_lie_one_behind_the_other_are_one_array(world, session, open_session, count):
    """Of different sizes, by one call; not where a rank has another order, or arrays that lie elsewhere."""
    session = open_session(fuse_bytes=0)
    row, size, me, flat, n = row_of(session), world.size, world.rank, session.empty(N), N - 40_000
    edges = np.linspace(0, np.sqrt(n), count + 1) ** 2
    pieces = list(itertools.pairwise(edges.round().astype(int).tolist()))
    expected, whole = mean(size, n), {f"layer {a}": flat[a:b] for a, b in pieces}
    swapped, loose = dict(whole), {name: np.empty_like(view) for name, view in whole.items()}
    swapped["layer 0"] = flat[n : n + pieces[0][1]]
    for step, odd in enumerate([whole, whole, swapped, loose, whole]):
        layers = odd if me == size - 1 else whole
        for name, (a, b) in zip(layers, pieces):
            layers[name][:] = values(me, n)[a:b]
        session.barrier()
        for half in row:
            half[:] = 0x55
        session.barrier()
        session.sync(layers)
        assert all(layers[name].tobytes() == expected[a:b].tobytes() for name, (a, b) in zip(layers, pieces))
        assert step == 0 or odd is not whole or all(np.all(half == 0x55) for half in row), "by the window"


def test_what_all_ranks_refuse(world, session):
    """Values that are not finite, and a rank that brings another array: nothing has changed."""
    size, me, flat = world.size, world.rank, session.empty((N // 7, 7)).reshape(-1)
    flat[:] = values(me, flat.size)
    flat[17] = np.nan if me == size - 1 else 1.0
    before = flat.copy()
    for call, error in (
        (lambda: session.sync(flat), NonFiniteError),
        (lambda: session.allreduce(flat[: flat.size - (me == 0)]), MismatchError),
    ):
        with pytest.raises(error):
            call()
        assert flat.tobytes() == before.tobytes()


def test_the_memory_lives_as_long_as_an_array_of_it(world, session, open_session):
    gc.collect()
    before, x = blocks(), session.empty(N)
    part, second = x[5:], open_session()
    assert blocks() == before + 1
    del x
    for _ in range(2):
        part[:] = values(world.rank, part.size)
        session.allreduce(part)
    session.close()
    assert part.tobytes() == mean(world.size, part.size).tobytes()
    part[:] = values(world.rank, part.size)
    assert second.allreduce(part).tobytes() == mean(world.size, part.size).tobytes()  # to it an array as others
    world.Barrier()
    if world.rank == 0:
        del part
        assert blocks() == before
    y = second.empty(N)  # where the other one may have been
    y[:] = values(world.rank)
    assert second.allreduce(y).tobytes() == mean(world.size).tobytes()


def test_what_cannot_be_had(world, session, monkeypatch):
    """Errors are the same on all ranks; without shared memory all get arrays of their own."""
    me = world.rank
    with pytest.raises(ConfigError, match=r"rank 1.*shape=-1"):
        session.empty(-1 if me == 1 else 10)
    with pytest.raises(ConfigError, match="expected numbers"):
        session.empty(10, object)
    with pytest.raises(MismatchError, match=r"rank 0.*\(10,\).*rank 1.*\(10, 1\)"):
        session.empty((10, 1) if me == 1 else 10)
    with pytest.raises(MemoryError):
        session.empty(1 << 50)
    mapped = SharedArrays._map

    def refused(self, *arguments):
        if me == 1:
            raise OSError(13, "Permission denied")
        return mapped(self, *arguments)

    monkeypatch.setattr(SharedArrays, "_map", refused)
    gc.collect()
    before, x = blocks(), session.empty(N)
    assert blocks() == before
    x[:] = values(me)
    assert session.allreduce(x).tobytes() == mean(world.size).tobytes()
    assert session.empty(0).shape == (0,) and session.empty((), "int8").shape == ()
