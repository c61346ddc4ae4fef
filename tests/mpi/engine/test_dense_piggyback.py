"""Dense collectives that are made again, piggybacked on the header or after one: every way and bit, ranks that fail."""

from __future__ import annotations

import time
import weakref

import ml_dtypes
import numpy as np
import pytest

import espresso_mpi
from espresso_mpi.collectives.messages import agreed, agreed_copies, single_copy, sum_calls
from espresso_mpi.collectives.messages.single_copy import SingleCopy
from espresso_mpi.engine import negotiation
from espresso_mpi.engine.call_failures import numbers_in
from espresso_mpi.errors import (
    EspressoError,
    GradientError,
    MismatchError,
    NonFiniteError,
    RankTimeoutError,
    RemoteError,
    TransportError,
)

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(240)]

SIZES = (1, 6000, 100001)
"""Elements: of which each rank sums all, of one chunk, and of several."""


class Fixed(agreed.Choice):
    """Always one way, counted from the last one, where it is possible."""

    wanted = 1

    def __init__(self, ways):
        super().__init__(1)
        self.way = max(0, ways - self.wanted)


def of_layout(layout, size):
    """The options of a session."""
    most = 2 if size > 2 else 1
    nodes = [list(range(first, min(first + most, size))) for first in range(0, size, most)]
    return {"one node": {}, "nodes": {"nodes": nodes}, "messages": {"window_bytes": 0}}[layout]


@pytest.fixture(params=["one node", "nodes"])
def layout(request, world):
    """The options of a session on one node, and on several."""
    return of_layout(request.param, world.size)


@pytest.fixture(params=["window", "reads", "writes", "chosen", "nodes", "messages"])
def session(request, world, open_session, monkeypatch):
    """A session whose copies go one way, or by turns; or whose ranks agree in a compiled call, and then copy."""
    if request.param in ("nodes", "messages"):
        return open_session(**of_layout(request.param, world.size))
    if request.param == "window":
        monkeypatch.setenv("ESPRESSO_SINGLE_COPY", "0")
    if request.param in ("reads", "writes"):
        monkeypatch.setattr(agreed, "Choice", Fixed)
        monkeypatch.setattr(Fixed, "wanted", {"reads": 2, "writes": 1}[request.param])
    found = open_session()
    if request.param in ("reads", "writes") and not found._transport.single_copy:
        pytest.skip(found._transport.single_copy.why)
    return found


def values(rank, n, step, dtype="int32"):
    return (np.arange(n) % 97 + 7 * rank + step).astype(dtype)


def piggybacked(session):
    """How many calls are remembered."""
    return len(session._engine._dispatcher._dense.known)


@pytest.mark.parametrize("n", SIZES)
def test_copies_that_come_again(world, session, n):
    """The values change from step to step: what an earlier step left in the window would be found."""
    size, me = world.size, world.rank
    out, block = np.empty(size * n, np.int32), np.empty(size * n, np.int32)
    for step in range(9):
        x, root = values(me, n, step), step % 2
        every = np.concatenate([values(rank, n, step) for rank in range(size)])
        assert session.allgather(x, out=out) is out and np.array_equal(out, every)
        gathered = session.gather(x, root=root, out=block if me == root else None)
        assert (gathered is None) == (me != root) and (gathered is None or np.array_equal(gathered, every))
        sent = np.concatenate([values(me, n, step + target) for target in range(size)])
        arrived = np.concatenate([values(source, n, step + me) for source in range(size)])
        assert np.array_equal(session.alltoall(sent), arrived)
        splits = [n * ((me + rank + step % 2) % 3) for rank in range(size)]  # as many come back
        sent = np.concatenate([values(me, k, rank) for rank, k in enumerate(splits)])
        arrived = np.concatenate([values(rank, k, me) for rank, k in enumerate(splits)])
        assert np.array_equal(session.alltoall(sent, splits=splits, received=splits), arrived)
        assert session.broadcast(x, root=root) is x and np.array_equal(x, values(root, n, step))
        session.barrier()
    assert piggybacked(session) >= 7, "they were not piggybacked on their headers"


def shown(x):
    """The bits."""
    return x.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "complex64"])
def test_sums_that_come_again_have_the_same_bits(world, open_session, layout, dtype):
    """The first call takes the ordinary path, the next ones with their headers."""
    session = open_session(**layout)
    kind, size, me = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype), world.size, world.rank
    floats = dtype in ("float16", "bfloat16", "float32", "float64")
    for n in SIZES:
        rng = np.random.default_rng([me, n])
        x = (rng.integers(-3, 4, n * size) if dtype == "int8" else rng.standard_normal(n * size)).astype(kind)
        first, whole = session.reduce_scatter(x, op="sum"), session.allreduce(x.copy(), op="sum")
        assert shown(first) == shown(whole[me * n : (me + 1) * n])
        mean = session.reduce_scatter(x) if floats else None
        for step in range(2):
            own, total = np.zeros(n, kind), np.zeros_like(x)
            assert session.reduce_scatter(x, op="sum", out=own) is own and shown(own) == shown(first)
            assert session.allreduce(x, op="sum", out=total) is total and shown(total) == shown(whole)
            found, root = session.reduce(x.copy(), op="sum", root=step), step
            assert me != root or shown(found) == shown(whole)
            assert mean is None or shown(session.reduce_scatter(x)) == shown(mean)


OPERATORS = {
    "max": ("float32", np.maximum), "sum": ("int64", np.add), "band": ("uint8", np.bitwise_and),
    "lor": ("bool", np.logical_or), "min": ("int16", np.minimum),
}  # fmt: skip


@pytest.mark.parametrize("op", OPERATORS)
def test_other_operators_that_come_again(world, open_session, layout, op):
    """Short arrays travel with the header, longer ones after it; the values change from step to step."""
    session, (dtype, combine) = open_session(**layout), OPERATORS[op]
    for n in (1, 1000, 20000):
        for step in range(5):
            numbers = [values(rank, n, step) for rank in range(world.size)]
            every = [(one % 19 > 8 if dtype == "bool" else one).astype(dtype) for one in numbers]
            expected, mine, out = combine.reduce(every), every[world.rank], np.zeros(n, dtype)
            assert np.array_equal(session.allreduce(mine, op=op, out=out), expected)
            handle = session.allreduce(mine.copy(), op=op, blocking=False)
            found = session.reduce(mine.copy(), op=op, root=step % 2)
            assert np.array_equal(handle.wait(), expected)
            assert world.rank != step % 2 or np.array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_an_array_that_is_synchronised_again(world, open_session, layout, dtype, policy):
    """It is piggybacked with the same bits; not where it is odd on one rank, strided there, or after another plan."""
    session, me, last = open_session(nonfinite=policy, **layout), world.rank, world.size - 1
    x = np.random.default_rng(me).standard_normal(900 if layout else 9000).astype(dtype)
    expected = session.sync({"other": x.copy(), "w": x.copy()})["w"]
    for step in range(3):
        grads = {"w": x.copy()}
        assert session.sync(grads) is grads and shown(grads["w"]) == shown(expected), step
        odd = np.repeat(x, 2)[::2] if me == last and step else x.copy()
        assert shown(session.sync(odd)) == shown(expected), step
    assert piggybacked(session) == 2 - (me == last) and session.stats().tensors["w"].steps == 3
    y = x.copy()
    y[7] = np.nan if me == last else 1
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=f"rank {last}"):
            session.sync({"w": y})
        assert shown(y[8:]) == shown(x[8:])
    else:
        assert not session.sync({"w": y})["w"].any() and session.stats().skipped == {"w": 1}
    assert shown(session.sync({"w": x.copy()})["w"]) == shown(expected)
    with pytest.raises(MismatchError):
        session.sync({"w": x if me == last else x[1:]})
    session.follow(espresso_mpi.Plan(default=espresso_mpi.Strategy("onebit", "flat-allgather")))
    session.sync({"w": x.copy()})
    assert session.executors


def test_ranks_that_are_not_piggybacked_get_the_same(world, open_session, layout):
    """One rank has strided or read-only arrays, makes handles, or has a push under way; the others do not."""
    session = open_session(**layout)
    size, me, n = world.size, world.rank, 5000
    for step in range(12):
        x, odd, how = values(me, n, step), step % size == me, step % 4
        expected = np.concatenate([values(rank, n, step) for rank in range(size)])
        if odd and how == 0:
            x = np.repeat(x, 2)[::2]
        if odd and how == 1:
            x.flags.writeable = False
        handle = session.allgather(x, blocking=False) if odd and how == 2 else None
        assert np.array_equal(handle.wait() if handle else session.allgather(x), expected), step
        pushed = session.push("w", np.full(9, me, np.float32)) if odd and how == 3 else None
        assert np.array_equal(session.allgather(x), expected), step
        pushed = pushed or session.push("w", np.full(9, me, np.float32))
        assert np.allclose(pushed.wait(), (size - 1) / 2)
        total = np.full(400, me + step, np.float32)
        total = np.repeat(total, 2)[::2] if odd and how == 0 else total
        assert np.all(session.allreduce(total, op="sum") == sum(range(size)) + step * size)


def repeated(session, x, out):
    """A call that is piggybacked."""
    for _ in range(3):
        session.allgather(x, out=out, name="a")


@pytest.mark.parametrize("what", ["shape", "call", "root"])
def test_a_rank_that_deviates_is_named_by_all(world, open_session, layout, what):
    """Nothing is copied, and the session goes on."""
    session = open_session(**layout)
    size, me, last = world.size, world.rank, world.size - 1
    x, out = values(me, 70000, 0), np.empty(70000 * size, np.int32)
    repeated(session, x, out)
    root = np.full(9, me)
    for _ in range(3):
        session.broadcast(root, root=0, name="b")
    before, deviates = out.copy(), me == last
    x += 1
    act = {
        "shape": lambda: session.allgather(x[:-1].copy(), name="a"),
        "call": lambda: session.reduce_scatter(out, op="sum", name="c"),  # the others do not make it
        "root": lambda: session.broadcast(root, root=1, name="b"),
    }[what]
    if not deviates:
        act = {"root": lambda: session.broadcast(root, root=0, name="b")}.get(
            what, lambda: session.allgather(x, out=out, name="a")
        )
    with pytest.raises((MismatchError, EspressoError), match=r"ranks|waits") as caught:
        act()
    assert len({type(error) for error in world.allgather(caught.value)}) == 1
    assert np.array_equal(out, before)
    repeated(session, x, out)
    assert np.array_equal(out, np.concatenate([values(rank, 70000, 1) for rank in range(size)]))


@pytest.mark.parametrize("last", [4, 2, 60_000], ids=["one more", "one less", "several messages more"])
@pytest.mark.parametrize("compressor", ["none", "int8"])
def test_splits_that_do_not_fit_are_an_error_on_all_ranks(world, open_session, layout, last, compressor):
    """Of a first call, of one that is made again, by handles, and where one rank must take the ordinary path."""
    session = open_session(**layout)
    size, me = world.size, world.rank
    fit = [3] * size
    mine = [3] * (size - 1) + [last] if me == 0 else fit

    def call(splits, strided=False, blocking=True):
        x = np.ones(sum(splits) * (1 + strided), np.float32)[:: 1 + strided]
        found = session.alltoall(x, splits=splits, received=fit, blocking=blocking, compressor=compressor)
        return found if blocking else found.wait()

    for how in ({}, {"blocking": False}, {"strided": me == size - 1}, {"strided": me == 0}):
        with pytest.raises(MismatchError, match=f"alltoall: what rank 0 .* sends to rank {size - 1} .* another size"):
            call(mine, **how)
        for _ in range(3):
            assert call(fit, **how).size == 3 * size


@pytest.mark.parametrize("call", ["allgather", "allreduce", "barrier"])
def test_a_missing_rank_is_named_by_all(world, layout, call):
    """These sessions cannot be closed."""
    session, missing = espresso_mpi.Session(timeout=3.0, **layout), world.size - 1
    x, text = np.ones(500 if layout else 50000, np.float32), ""
    act = {"allgather": lambda: session.allgather(x), "allreduce": lambda: session.allreduce(x),
           "barrier": session.barrier}[call]  # fmt: skip
    for _ in range(3):
        act()
    if world.rank != missing:
        with pytest.raises((RankTimeoutError, RemoteError)) as caught:  # who waits less long hears of it
            act()
        text = str(caught.value)
        assert not session.usable
    texts = world.allgather(text)
    assert all(f"for rank {missing} (" in text and call in text for text in texts[:missing]), texts


def test_a_rank_that_comes_late_gets_and_gives_the_same(world, open_session, layout):
    """The others have long begun, and wait in Python; afterwards nothing refers to the arrays."""
    session, n, size, me = open_session(**layout), 300 if layout else 30000, world.size, world.rank
    for step in range(5):
        if step > 2 and me == step % size:
            time.sleep(0.1)
        x, total = values(me, n, step), np.full(n, me + step, np.float32)
        assert np.array_equal(session.allgather(x), np.concatenate([values(rank, n, step) for rank in range(size)]))
        if step > 2 and me == step % size:
            time.sleep(0.1)
        assert np.all(session.allreduce(total, op="sum") == sum(range(size)) + step * size)
        gone = weakref.ref(total)
        del total
        assert gone() is None


def test_the_header_of_a_call_is_that_of_the_calls_known_now(world, open_session, layout, monkeypatch):
    """Other calls make it longer; and when all numbers are forgotten, the call gets another one."""
    session, x = open_session(**layout), np.full(3, world.rank)
    ranks, known = negotiation._KNOWN, session._engine._negotiation
    for most, names in ((ranks, ["a"]), (ranks, "bcdefghijk"), (11, ["l", "m"])):
        monkeypatch.setattr(negotiation, "_KNOWN", most)
        for name in [*names, "a", "a", "a"]:
            found = session.allgather(x, name=name)
            assert np.array_equal(found, np.repeat(np.arange(world.size), 3))
        (again,) = (one.placeholder for key, one in session._repeated.known.items() if key[1] == "a")
        header = again.shown[1]
        assert header.size == known.header_size and known.contents[again.number].key == ("allgather", "a")
        assert numbers_in(int.from_bytes(header[1:].tobytes(), "little")) == [again.number]
    assert len(known.contents) < 11


def test_memory_in_flight_is_refused_as_ever(world, open_session):
    session, x = open_session(), np.ones(5000, np.float32)
    for _ in range(3):
        session.allreduce(x)
    handle = session.allreduce(x, name="other", blocking=False)
    with pytest.raises(GradientError, match="in flight"):
        session.allreduce(x)
    handle.wait()
    with pytest.raises(GradientError, match="share memory"):
        session.allgather(x[: 5000 // world.size], out=x[: 5000 // world.size * world.size])
    assert session.allreduce(x)[0] == 1


@pytest.mark.parametrize("n", [600, 200000])
@pytest.mark.parametrize("nodes", ["nodes", "messages"])
def test_sums_on_nodes_are_counted_as_ever(world, open_session, nodes, n):
    """The same bytes as on the ordinary path. Short ones are piggybacked on their headers: no message follows."""
    session, sent, x = open_session(**of_layout(nodes, world.size)), [], np.full(n, world.rank, np.float32)
    for step in range(5):
        before = session.stats().bytes_by_level
        found = session.allreduce(np.repeat(x, 2)[::2] if step == 2 else x.copy())  # strided: on the ordinary path
        assert np.all(found == (world.size - 1) / 2)
        after = session.stats().bytes_by_level
        sent.append({level: after[level] - before[level] for level in after})
    assert sent[1:] == [sent[1]] * 4 and sum(sent[1].values()) >= x.nbytes
    known = session.stats().tensors["allreduce"]
    assert known.steps == 5 and known.last.step == 4 and known.last.seconds_by["wire"] > 0
    headers = sum(sent[1].values()) - sum(known.last.bytes_by_level.values())
    assert headers == 0 if n == 600 else 0 <= headers < 2000
    assert piggybacked(session) == 1, "they were not remembered"


# --- reading the memory of other ranks --------------------------------------------------------------------------------


def test_where_one_rank_may_not_read_none_does(world, open_session, monkeypatch):
    def refused(*arguments):
        raise PermissionError(1, "Operation not permitted")

    if world.rank == world.size - 1:
        monkeypatch.setattr(single_copy, "copy_across", refused)
    session = open_session()
    found = session._transport.single_copy
    assert not found and "Operation not permitted" in found.why
    monkeypatch.undo()
    x = values(world.rank, 100000, 0)
    for _ in range(4):
        assert np.array_equal(session.allgather(x), np.concatenate([values(r, 100000, 0) for r in range(world.size)]))


def test_processes_of_other_namespaces_are_found_out(world, open_session, monkeypatch):
    monkeypatch.setattr(single_copy, "copy_across", lambda *arguments: 0)
    session = open_session()
    assert not session._transport.single_copy and "other processes" in session._transport.single_copy.why


@pytest.mark.parametrize("way", [1, 2])
def test_a_copy_that_fails_is_an_error_of_all_ranks(world, monkeypatch, way):
    """The session cannot go on: data are incomplete."""
    monkeypatch.setattr(agreed, "Choice", Fixed)
    monkeypatch.setattr(Fixed, "wanted", way)
    session = espresso_mpi.Session(timeout=60.0)
    if not session._transport.single_copy:
        pytest.skip(session._transport.single_copy.why)
    if world.rank == 0:
        nobody = (2**22 + 1,) * world.size  # beyond the largest number of a process
        session._transport.single_copy = SingleCopy(nobody, "made up")
    x = values(world.rank, 100000, 0)
    session.allgather(x)

    def steps():
        for _ in range(3):
            session.allgather(x)
            session.barrier()

    with pytest.raises(TransportError if world.rank == 0 else RemoteError, match=r"memory of another rank.*process"):
        steps()
    assert not session.usable


def test_a_sum_that_cannot_be_read_is_an_error_of_all_ranks(world, monkeypatch):
    """The ranks that could read would have a wrong sum."""
    monkeypatch.setattr(sum_calls, "Choice", Fixed)
    monkeypatch.setattr(Fixed, "wanted", 1)
    session = espresso_mpi.Session(timeout=60.0)
    if not session._transport.single_copy:
        pytest.skip(session._transport.single_copy.why)
    if world.rank == world.size - 1:
        session._transport.window_on_host(session._transport.node).single = SingleCopy((2**22 + 1,) * world.size, "")
    x = np.ones(100000, np.float32)

    def steps():
        for _ in range(10):  # on a busy node, a call may not take the short path, in which ranks read
            session.allreduce(x)

    with pytest.raises(EspressoError, match=r"memory of another rank"):
        steps()
    assert not session.usable


def test_bytes_and_steps_are_counted_as_ever(world, open_session):
    """The same bytes, but for the headers, whether a call takes the ordinary path or with its header."""
    session, n = open_session(), 100000
    sent = []
    for call in (lambda: session.allgather(values(world.rank, n, 0)), lambda: session.allreduce(np.ones(n))):
        for _ in range(4):
            before = session.stats().bytes_by_level["intra"]
            call()
            sent.append(session.stats().bytes_by_level["intra"] - before)
    assert sent[1:4] == [sent[1]] * 3 and abs(sent[0] - sent[1]) < 4000
    assert sent[1] - 4 * n * (world.size - 1) < 4000
    known = session.stats().tensors["allreduce"]
    assert known.steps == 4 and known.last.step == 3
    assert known.last.bytes_by_level["intra"] <= sent[-1] and known.last.seconds_by["wire"] > 0
    assert session.stats().seconds_by["agree"] > 0


@pytest.mark.parametrize("cores", [1, 2])
def test_where_ranks_share_cores_the_time_of_copies_counts(world, open_session, cores):
    """All ranks get to know it with the next call: of all copies by the number of cores, or of the longest."""
    session = open_session()
    session._transport.waiter.cores = cores
    x = values(world.rank, 100000 * (world.rank + 1), 0)
    splits = [x.size // world.size // 4 * 4 if rank else 0 for rank in range(world.size)]
    splits[0] = x.size - sum(splits)
    received = world.alltoall(splits)
    for _ in range(3):
        session.alltoall(x, splits=splits, received=received)
    (prepared,) = session._engine._dispatcher._dense.known.values()
    frame = prepared.agreed._frame
    busy, total = world.allgather(frame[agreed_copies.BUSY]), frame[agreed_copies.BEFORE]
    session.alltoall(x, splits=splits, received=received)
    took = max(sum(busy) // cores, max(busy))
    assert min(busy) > 0 and total == 4 * sum(world.allgather(x.size))
    assert frame[agreed_copies.LOGGED + agreed_copies.TOOK] == (took << 20) // total


def test_a_choice_follows_the_machine():
    """Way 0 is quicker, then slower, then quicker again; each is tried again after 512 runs at the latest."""
    choice, taken = agreed.Choice(2), []
    for run in range(4000):
        slow = 1000 <= run < 2500
        taken.append(choice.way)
        choice.learn(choice.way, (20 if slow else 5, 8)[choice.way])
        choice.advance()
    assert sum(taken[100:1000]) < 10 and sum(taken[1010:2500]) > 1480 and sum(taken[3020:]) < 10


def test_the_quickest_way_is_found_also_later():
    """Way 2 is too slow for a third turn at first."""
    choice, ways, before = agreed.Choice(3), [], 0
    for run in range(60):
        ways.append(choice.way)
        choice.add(before)  # each is of the run before: the first one says nothing
        before = 7 if run < 9 and ways[-1] == 1 else (5, 3, 9)[ways[-1]]  # load hides at first that way 1 is quicker
    assert ways[:9] == [0, 1, 2] * 2 + [0, 1, 0] and set(ways[9:36]) == {0}
    assert ways[36:39] == [0, 1, 2] and set(ways[40:]) == {1}
