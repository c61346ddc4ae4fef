"""The latest sum made again: other arrays, other calls between, values and ranks that deviate, threads."""

import threading
import time
import weakref

import numpy as np
import pytest

import espresso_mpi
from espresso_mpi.engine.engine import Engine
from espresso_mpi.engine.latest_sum import LatestSums
from espresso_mpi.errors import EspressoError, GradientError, NonFiniteError

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(60)]


@pytest.fixture(params=["one node", "two nodes"])
def opened(request, world, open_session):
    """Opens sessions on one node, or on two with all ranks but the first on one of them."""
    apart = {} if request.param == "one node" else {"nodes": [[0], list(range(1, world.size))]}
    return lambda **options: open_session(**options, **apart)


@pytest.fixture
def made(monkeypatch):
    """What came of sums that were made so: True, or False if they took another way after all."""
    found, again = [], LatestSums.sum_again

    def watched(self, latest, x, title, real):
        ended = again(self, latest, x, title, real)
        found.append(ended is latest.placeholder)
        return ended

    monkeypatch.setattr(Engine, "sum_again", watched)
    return found


def values(rank, step, shape=(3, 5)):
    return np.random.default_rng((rank, step)).integers(-99, 99, shape).astype(np.float32)


def mean(world, step, shape=(3, 5)):
    return sum(values(rank, step, shape) for rank in range(world.size)) / np.float32(world.size)


def differing(world, found, expected):
    """The ranks on which arrays differ."""
    return world.allgather(bool(np.array_equal(found, expected))) != [True] * world.size


@pytest.mark.parametrize("policy", ["raise", "propagate", "skip"])
def test_other_arrays_of_the_same_shape(world, opened, made, policy):
    """Bare and by name, contiguous and not, of other types; another shape."""
    session, kept = opened(nonfinite=policy), values(world.rank, 0)
    for step in range(16):
        x = values(world.rank, step)
        if step % 3 == 0:
            kept[:] = x
            x = kept
        if step == 7:
            x = np.asfortranarray(x)
        if step == 8:
            x = x.astype(np.float64)
        if step == 10:
            x = x[:2].copy()
        given = {"w": x} if step in (5, 6) else x
        session.sync(given)
        assert not differing(world, x, mean(world, step)[: x.shape[0]]), step
    assert made.count(True) >= 4 and session.stats().steps == 16


def test_arrays_by_turns(world, opened, made):
    """Each is made again once it comes twice in a row; what was known of it before is used."""
    session = opened()
    for step in range(24):
        shape = (3, 5) if step // 3 % 2 else (7,)
        x = values(world.rank, step, shape)
        session.sync(x)
        assert not differing(world, x, mean(world, step, shape)), step
    assert made.count(True) > 10


def test_other_calls_between(world, opened, made):
    session, rng = opened(), np.random.default_rng(3)  # the same on all ranks
    for step in range(60):
        what, x = rng.integers(6), values(world.rank, step)
        session.sync(x)
        assert not differing(world, x, mean(world, step)), step
        y = values(world.rank, step, (7,))
        if what == 1:
            session.sync(y)
        elif what == 2:
            session.push("y", y).wait()
        elif what == 3:
            handles = [session.push(name, values(world.rank, step, (7,))) for name in ("a", "b")]
            session.sync(y)
            for handle in handles[:: 1 - 2 * (world.rank % 2)]:
                assert np.array_equal(handle.wait(), mean(world, step, (7,)))
        elif what == 4:
            session.barrier()
        elif what == 5:
            session.load_state_dict(session.state_dict())
        if what in (1, 2, 3):
            assert not differing(world, y, mean(world, step, (7,))), (step, what)
    tensors = session.stats().tensors
    assert made.count(True) > 10 and max(one.steps for one in tensors.values()) >= 60


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_values_that_cannot_be_summed_leave_all_arrays(world, opened, made, odd):
    session, last = opened(), world.size - 1
    for step in range(12):
        x = values(world.rank, step)
        if step in (4, 5, 9) and world.rank == last:
            x[1, 2] = odd
        before = x.copy()
        if step in (4, 5, 9):
            with pytest.raises(NonFiniteError, match=f"rank {last}"):
                session.sync(x)
            assert not differing(world, x.view(np.int32), before.view(np.int32))
        else:
            session.sync(x)
            assert not differing(world, x, mean(world, step))
    assert made.count(True) >= 3 and False in made


def test_a_rank_that_makes_another_call_is_named(world, opened, made):
    session = opened(timeout=20)
    for step in range(5):
        session.sync(values(world.rank, step))
    with pytest.raises(EspressoError) as caught:
        session.sync(values(world.rank, 5, (4, 5) if world.rank else (3, 5)))
    texts = world.allgather(str(caught.value))
    assert all("[4, 5]" in text and "[3, 5]" in text for text in texts), texts
    assert True in made


def test_a_rank_that_comes_late(world, opened, made):
    """The others are in the compiled call meanwhile; a step later it is the first."""
    session = opened()
    for step in range(8):
        if step > 3 and world.rank == step % world.size:
            time.sleep(0.05)
        x = values(world.rank, step)
        session.sync(x)
        assert not differing(world, x, mean(world, step))
    assert True in made


def test_memory_that_is_in_flight_is_refused(world, opened, made):
    session, x = opened(), values(world.rank, 0)
    for _ in range(4):
        session.sync(x)
    assert True in made
    handle = session.push("w", x)
    with pytest.raises(GradientError, match="in flight"):
        session.sync(x)
    handle.wait()
    x[:] = values(world.rank, 1)
    session.sync(x)
    assert not differing(world, x, mean(world, 1))


def test_read_only_arrays_are_refused(world, opened, made):
    session = opened()
    for step in range(4):
        session.sync(values(world.rank, step))
    x = values(world.rank, 5)
    x.flags.writeable = False
    with pytest.raises(GradientError, match="read-only"):
        session.sync(x)
    assert True in made


def test_nothing_refers_to_the_arrays_afterwards(world, opened, made):
    session, known = opened(), []
    for step in range(5):
        x = values(world.rank, step)
        known.append(weakref.ref(x))
        session.sync(x)
    del x
    assert [ref() for ref in known] == [None] * 5 and True in made


def test_steps_and_times_are_counted(world, open_session, made):
    session = open_session()
    for step in range(100):
        session.sync({"w": values(world.rank, step)})
    found = session.stats().tensors["w"]
    assert made.count(True) > 90 and found.steps == 100
    assert found.bytes_by_level["intra"] == 100 * 60 * (world.size - 1)
    assert min(session.stats().seconds_by[kind] for kind in ("agree", "check", "wire")) > 0


def test_a_missing_rank_is_named(world, made):
    session, last = espresso_mpi.Session(world, timeout=1), world.size - 1
    for step in range(4):
        session.sync(values(world.rank, step))
    said = ""
    try:
        if world.rank == last:
            time.sleep(2.5)  # what it showed then would be enough for its own sum: it may learn of the error later
        session.sync(values(world.rank, 5))
    except EspressoError as error:
        said = f"{type(error).__name__}: {error}"
    texts = world.allgather(said)
    assert all("RankTimeoutError" in text and f"rank {last}" in text for text in texts[:last]), texts
    assert world.allgather(True in made) == [True] * world.size


def test_another_thread_pushes_meanwhile(world, opened, made):
    session, found = opened(), []

    def push():
        for step in range(20):
            found.append(session.push("b", values(world.rank, step, (7,))).wait())

    thread = threading.Thread(target=push)
    for step in range(60):
        x = values(world.rank, step)
        session.sync({"a": x})
        assert not differing(world, x, mean(world, step))
        if step == 10:
            thread.start()
    thread.join()
    assert not differing(world, found, [mean(world, step, (7,)) for step in range(20)])
    assert made.count(True) > 10


def test_a_closed_session_says_so(world, opened, made):
    session, x = opened(), values(world.rank, 0)
    for _ in range(4):
        session.sync(x)
    session.close()
    with pytest.raises(EspressoError, match="it was closed"):
        session.sync(x)
    assert True in made
