"""Calls with several dense tensors on one node: each type is summed as one array, piggybacked on the header."""

from __future__ import annotations

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest

from espresso_mpi.collectives.messages import sum_calls
from espresso_mpi.collectives.messages.choice import Choice
from espresso_mpi.collectives.messages.joint_reads import PLACE
from espresso_mpi.collectives.messages.single_copy import SingleCopy
from espresso_mpi.collectives.messages.sum_calls import AgreedSums
from espresso_mpi.compressors.kernels.cpu import host
from espresso_mpi.engine import fast_path
from espresso_mpi.engine.nonfinite import NonFinite
from espresso_mpi.errors import NonFiniteError, TransportError
from espresso_mpi.sessions import base

from .test_dense_piggyback import Fixed

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(240)]

SIZES = {"small": (1, 200, 3), "chunk": (40_000, 7, 60_000), "large": (300_001, 1, 64, 700_000, 5000)}


@pytest.fixture(params=["window", "reads", "chosen"])
def way(request, monkeypatch):
    """Sums pass the window, are read from the memory of other ranks (and searched then, if due), or by turns."""
    # with more threads, long arrays would be searched before the sum
    monkeypatch.setattr(base, "_limit_threads", lambda ranks: host.limit_threads(1))
    if request.param == "window":
        monkeypatch.setenv("ESPRESSO_SINGLE_COPY", "0")
    if request.param == "reads":
        monkeypatch.setattr(sum_calls, "Choice", Fixed)
        monkeypatch.setattr(Fixed, "wanted", 1)
    return request.param


@pytest.fixture
def sums(monkeypatch):
    """Of each call with several tensors that was piggybacked and found all ranks: how many types it had."""
    found, exchange = [], fast_path.NodePiggyback.exchange

    def noted(self, header, ignored):
        headers = exchange(self, header, ignored)
        found.extend([len(self._kinds)] if self.met and len(self._first) > 1 else [])
        return headers

    monkeypatch.setattr(fast_path.NodePiggyback, "exchange", noted)
    return found


@pytest.fixture
def given_up(monkeypatch):
    """The sums that were not made, because they had found values that must not be summed."""
    found, without_sum = [], AgreedSums._without_sum
    monkeypatch.setattr(AgreedSums, "_without_sum", lambda self: found.append(self) or without_sum(self))
    return found


def opened(open_session, way, **options):
    """A session; skips the test where ranks may not read each other's memory."""
    session = open_session(compressor="none", **options)
    if way == "reads" and not session._transport.single_copy:
        pytest.skip(session._transport.single_copy.why)
    return session


def values(rank, step, number, n, dtype):
    """Those of three steps come again: to make them takes longer than the sums."""
    return _values(rank, step % 3, number, n, dtype).copy()


def mean(size, step, number, n, dtype):
    return _mean(size, step % 3, number, n, dtype)


@functools.cache
def _values(rank, step, number, n, dtype):
    return np.random.default_rng([rank, step, number]).standard_normal(n).astype(dtype)


@functools.cache
def _mean(size, step, number, n, dtype):
    """In rank order, float16 in float32."""
    rows = [_values(rank, step, number, n, dtype) for rank in range(size)]
    wide = np.float64 if dtype == "float64" else np.float32
    total = rows[0].astype(wide)
    for row in rows[1:]:
        total = total + row.astype(wide)
    return (total / wide(size)).astype(dtype)


@pytest.mark.parametrize("sizes", SIZES)
def test_tensors_of_several_types(world, open_session, way, sums, sizes):
    session, size, me = opened(open_session, way), world.size, world.rank
    kinds = ["float32", "float16", "float64", ml_dtypes.bfloat16]
    for step in range(9):
        told = [(n, kinds[(number // 2) % 4]) for number, n in enumerate(SIZES[sizes] * 2)]
        given = {f"t{number}": values(me, step, number, *one) for number, one in enumerate(told)}
        session.sync(given)
        for number, one in enumerate(told):
            assert given[f"t{number}"].tobytes() == mean(size, step, number, *one).tobytes(), (step, number)
    assert sums == [len({kind for _, kind in told})] * 8, "the first call finds out that the next ones may be"


def test_more_tensors_than_a_row_of_the_window_has_room_for(world, open_session, way, sums):
    session, size, me, count = opened(open_session, way, window_bytes=16384), world.size, world.rank, 2100
    for step in range(3):
        given = {f"t{number}": values(me, step, number, 5, "float32") for number in range(count)}
        session.sync(given)
        assert all(given[f"t{n}"].tobytes() == mean(size, step, n, 5, "float32").tobytes() for n in range(count))
    assert sums == [1, 1]


def odd_array(me, x):
    """The values of x in an array that is not aligned on rank 0, and strided on rank 1."""
    if me == 0:
        memory = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype)
        memory[...] = x
        return memory
    return np.repeat(x, 2)[::2] if me == 1 else x


def test_arrays_that_are_not_aligned_or_strided(world, open_session, way, sums):
    session, size, me = opened(open_session, way), world.size, world.rank
    for step in range(5):
        given = {f"t{n}": odd_array(me, values(me, step, n, 50_000, "float32")) for n in range(3)}
        session.sync(given)
        assert all(given[f"t{n}"].tobytes() == mean(size, step, n, 50_000, "float32").tobytes() for n in range(3))
    assert sums == [1] * 4


def test_a_rank_that_makes_another_call(world, open_session, way, sums):
    """It pushes first what the others push behind the sync: the round is an ordinary one, with the same bits."""
    session, size, me, alone = opened(open_session, way), world.size, world.rank, 3
    for step, odd in enumerate([False, False, True, False, True, False]):
        given = {f"t{n}": values(me, step, n, 80_000, "float32") for n in range(alone)}
        x = values(me, step, alone, 9000, "float32")
        handle = session.push("x", x) if odd and me == size - 1 else None
        session.sync(given)
        (handle or session.push("x", x)).wait()
        for n, found in enumerate([*given.values(), x]):
            assert found.tobytes() == mean(size, step, n, found.size, "float32").tobytes()
    assert sums == [1] * 3


SEARCHED_SIZES = {"several": (30_000, 600_000, 7), "one": (600_000,), "short": (400,)}


@pytest.mark.parametrize("who", ["sums search", "one has searched"])
@pytest.mark.parametrize("sizes", SEARCHED_SIZES)
def test_values_that_are_not_finite_change_nothing(world, open_session, way, given_up, sizes, who, monkeypatch):
    """Wherever they are: in the share of the rank itself or of another one, in its first part or behind sums."""
    session, me, size, sizes = opened(open_session, way), world.rank, world.size, SEARCHED_SIZES[sizes]
    places = itertools.product(range(len(sizes)), (0.0, 0.49, 0.74, 1.0), (0, size - 1))
    found = []
    for step, (tensor, place, rank) in enumerate(itertools.chain([(0, 0.0, -1)] * 4, places)):
        given = {f"t{n}": values(me, step, n, one, "float32") for n, one in enumerate(sizes)}
        if me == rank:
            given[f"t{tensor}"][round(place * (sizes[tensor] - 1))] = np.inf if step % 2 else np.nan
        before = {name: x.copy() for name, x in given.items()}
        if step == 4 and who == "one has searched" and me == 1:  # as a call that does not begin at once
            monkeypatch.setattr(session._engine, "repeat", lambda *arguments: None)
            monkeypatch.setattr(session._engine._dispatcher, "may_piggyback", lambda call: False)
        if rank < 0:
            session.sync(given)
            continue
        with pytest.raises(NonFiniteError, match=f"rank {rank} .*'t{tensor}'"):
            session.sync(given)
        found.append(all(given[name].tobytes() == x.tobytes() for name, x in before.items()))
        again = {f"t{n}": values(me, step, n, one, "float32") for n, one in enumerate(sizes)}
        session.sync(again)
        for n, one in enumerate(sizes):
            assert again[f"t{n}"].tobytes() == mean(size, step, n, one, "float32").tobytes(), (step, n)
    assert all(found)
    searched = who == "one has searched" and me == 1
    assert given_up or me not in (0, size - 1) or searched, "the sum has found nothing of what this rank has"


@pytest.mark.parametrize("odd_rank", [0, 1])
def test_a_rank_whose_array_is_memory_of_the_node(world, open_session, way, odd_rank):
    """The others' arrays are not, so all pass the window: what the sum was left to search is searched then."""
    session, size, me, n = opened(open_session, way), world.size, world.rank, 300_000
    arena = session.empty(n)
    for step in range(9):
        x = values(me, step, 0, n, "float32")
        if me == 0:
            arena[:], x = x, arena
        if step == 6 and me == odd_rank:
            x[n // 2] = np.nan
        before = x.copy()
        if step == 6:
            with pytest.raises(NonFiniteError, match=f"rank {odd_rank} "):
                session.sync(x)
        else:
            session.sync(x)
        assert x.tobytes() == (before if step == 6 else mean(size, step, 0, n, "float32")).tobytes(), step


def test_sums_that_leave_the_range_are_made_with_smaller_values(world, open_session, way, given_up):
    """The search in the sum finds them, and the call is made anew."""
    session = opened(open_session, way)
    for step in range(8):
        given = {f"t{n}": np.full(n, 3e38 if step > 3 else 1.0, np.float32) for n in (5, 400_000)}
        session.sync(given)
        assert all(np.allclose(x, 3e38 if step > 3 else 1.0, rtol=1e-6) for x in given.values())
    assert len(given_up) == 4


def test_calls_of_which_nothing_else_is_searched_are_searched_by_the_sum(world, open_session, way, monkeypatch):
    session, looked = opened(open_session, way), []
    for name in ("look_for", "finds_nothing"):
        search = getattr(NonFinite, name)
        monkeypatch.setattr(NonFinite, name, lambda *args, search=search: looked.append(args) or search(*args))
    for number in (1, 3):
        for step in range(4):
            session.sync({f"t{n}": values(world.rank, step, n, 100_000, "float32") for n in range(number)})
    assert len(looked) == 2, "only the first call of each kind"


def test_a_read_that_fails_on_one_rank_is_an_error_on_all_ranks(world, open_session, way):
    """At once, before the others have looked which way all go; nobody takes what it has got for a sum."""
    if way != "reads":
        pytest.skip("nothing is read, or not always")
    session = opened(open_session, way, timeout=20)
    given = {f"t{n}": values(world.rank, 0, n, 3000, "float32") for n in range(3)}
    session.sync(given)
    if world.rank == 0:
        window = session._transport.window_on_host(session._transport.node)
        window.single = SingleCopy((2**22 + 1,) * world.size, "made up")
    with pytest.raises(TransportError, match="reading the memory of another rank"):
        session.sync(given)


def test_a_read_that_fails_comes_before_values_that_are_not_finite(world, open_session, way):
    """All ranks must go on alike: it is an error of the session, so nobody restores its share."""
    if way != "reads":
        pytest.skip("nothing is read, or not always")
    session, me = opened(open_session, way, timeout=20), world.rank
    given = {f"t{n}": values(me, 0, n, 200_000, "float32") for n in range(3)}
    for _ in range(3):
        session.sync(given)
    if me == 0:
        (sums,) = session._transport.window_on_host(session._transport.node)._sums.values()
        sums._unsearched[PLACE:] = 2**22 + 1  # no process has this number
    if me == world.size - 1:
        given["t1"][::1000] = np.nan
    with pytest.raises(TransportError, match="reading the memory of another rank"):
        session.sync(given)


def test_a_rank_that_differs_in_every_step_lets_the_others_search_first(world, open_session, way):
    """Its tensors are memory of the node, so its headers differ: then a search by the sum costs a round."""
    session, me, sizes = opened(open_session, way), world.rank, (50_000, 20_000)
    memory = session.empty(sum(sizes))
    for step in range(8):
        given = {f"t{n}": values(me, step, n, one, "float32") for n, one in enumerate(sizes)}
        if me == 0:
            memory[:] = np.concatenate([*given.values()])
            given = dict(zip(given, np.split(memory, [sizes[0]])))
        session.sync(given)
        for n, one in enumerate(sizes):
            assert given[f"t{n}"].tobytes() == mean(world.size, step, n, one, "float32").tobytes()
    checks = [check.pending for _, check in session._engine.nonfinite._checks.values()]
    assert checks == [me == 0]


def test_a_small_call_between_large_ones_does_not_change_what_is_learnt_of_these(world, open_session, monkeypatch):
    session, learnt, learn = opened(open_session, "reads"), [], Choice.learn
    monkeypatch.setattr(Choice, "learn", lambda self, way, took: learnt.append((way, took)) or learn(self, way, took))
    large, small = ({f"t{n}": np.ones(size, np.float32) for n in range(3)} for size in (400_000, 5))
    for _ in range(9):
        session.sync(large)
        session.sync(small)
    assert [way for way, _ in learnt[:6]] == [0, 1, 2, 0, 1, 2]
    assert all(took > 100_000 for _, took in learnt), "1.6 MB at 16 GB/s, in nanoseconds"


def test_arrays_of_the_node_in_the_order_of_the_call_are_one_array(world, open_session, sums):
    """Small ones share a bucket, so buckets have another order."""
    session, sizes = open_session(compressor="none"), (300_000, 10, 500_000, 20, 400_000)
    memory, edges = session.empty(sum(sizes)), np.cumsum([0, *sizes])
    given = {f"t{n}": memory[a:b] for n, (a, b) in enumerate(itertools.pairwise(edges))}
    for step in range(3):
        for number, (name, n) in enumerate(zip(given, sizes)):
            given[name][:] = values(world.rank, step, number, n, "float32")
        session.sync(given)
        for number, (name, n) in enumerate(zip(given, sizes)):
            assert given[name].tobytes() == mean(world.size, step, number, n, "float32").tobytes()
    assert sums == [], "they were summed as several arrays"
