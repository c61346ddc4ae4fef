"""The shared window's collectives against numpy, bit for bit; agreement among ranks; ranks that never come."""

from __future__ import annotations

import itertools
import logging
import math
import time

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from espresso_mpi.collectives.data.reduction import ReduceOp, arithmetic
from espresso_mpi.collectives.data.transfers import Transfer
from espresso_mpi.collectives.messages import transport as transport_module
from espresso_mpi.collectives.messages.agreement import allgather_json, gather_small
from espresso_mpi.collectives.messages.joint import JointArray
from espresso_mpi.collectives.messages.sum_calls import NO_CHECK
from espresso_mpi.collectives.messages.transport import Transport, TransportSettings
from espresso_mpi.collectives.messages.waiting import WaitMonitor
from espresso_mpi.errors import RankTimeoutError

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(240)]

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32")
TYPES = (*FLOATS, *(pytest.param(i, marks=() if i == "int8" else pytest.mark.thorough) for i in INTEGERS))
"""One integer type stands for all: their sums are compiled from the same source."""

SIZES = (0, 1, 17, 1000, 4099, 40001)
WINDOWS = (16384, 1 << 20)


@pytest.fixture
def open_transport(world):
    """Opens transports and closes them on all ranks if the test passed."""
    opened = []

    def opener(window_bytes=1 << 20, nodes=None, timeout=60.0):
        opened.append(Transport(world.Dup(), TransportSettings(timeout, window_bytes, nodes=nodes)))
        return opened[-1]

    yield opener
    for transport in opened:
        transport.close()


def window_of(transport):
    return transport.window_for(transport.node, np.empty(0, np.uint8))


def stored(x):
    return x.view(np.uint16) if x.itemsize == 2 and x.dtype.kind != "i" else x


def values(rank, n, dtype):
    rng = np.random.default_rng([rank, n])
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, n, dtype, endpoint=True)
    return rng.standard_normal(n).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def reduced(size, n, dtype, reduce_op):
    """In rank order, in the type of the sum, and rounded once."""
    rows = [values(rank, n, dtype) for rank in range(size)]
    if reduce_op.operator == "max":
        return np.maximum.reduce(rows)
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        return np.clip(np.sum(rows, axis=0, dtype=np.int64), limits.min, limits.max).astype(dtype)
    wide = np.float64 if dtype == "float64" else np.float32
    total = rows[0].astype(wide)
    for row in rows[1:]:
        total = total + row.astype(wide)
    return (total / wide(reduce_op.divisor)).astype(rows[0].dtype)


def outside(size, n, dtype, first=None):
    """How many of the first sums leave the range of their integers; of all by default."""
    rows, limits = [values(rank, n, dtype)[:first] for rank in range(size)], np.iinfo(dtype)
    total = np.sum(rows, axis=0, dtype=np.int64)
    return int(np.count_nonzero((total < limits.min) | (total > limits.max)))


@pytest.mark.parametrize("window_bytes", WINDOWS)
@pytest.mark.parametrize("dtype", TYPES)
def test_allreduce_sums_in_rank_order(world, open_transport, dtype, window_bytes):
    window = window_of(open_transport(window_bytes))
    reduce_op = ReduceOp("sum") if dtype in INTEGERS else ReduceOp("sum", world.size + 0.5)
    for n in SIZES:
        x = values(world.rank, n, dtype)
        own = x.copy()
        region = (n // 5, n - n // 7)
        saturated = window.allreduce(stored(x), dtype, region, reduce_op)
        inside, expected = slice(*region), reduced(world.size, n, dtype, reduce_op)
        assert x[inside].tobytes() == expected[inside].tobytes()
        own[inside] = x[inside]
        assert x.tobytes() == own.tobytes(), "what lies outside of the region changed"
        if dtype in INTEGERS and region == (0, n):
            assert world.allreduce(saturated) == outside(world.size, n, dtype)


@pytest.mark.parametrize("window_bytes", WINDOWS)
@pytest.mark.parametrize("dtype", TYPES)
def test_arrays_that_count_as_one(world, open_transport, dtype, window_bytes):
    """Small ones, large ones, and one that ends where a share or a chunk ends, by the window."""
    window, how = window_of(open_transport(window_bytes)), arithmetic(1 if dtype in INTEGERS else 3, dtype)
    reduce_op = ReduceOp("sum") if dtype in INTEGERS else ReduceOp("sum", 3)
    for sizes in ((1, 1), (64 * world.size, 1, 5), (17, 40001, 3, 4096, 1, 1000), (300,) * 200):
        arrays = [values(world.rank, n + k, dtype)[:n] for k, n in enumerate(sizes)]
        saturated = window.allreduce_joint(JointArray.of([stored(x) for x in arrays]), how)
        expected = [reduced(world.size, n + k, dtype, reduce_op)[:n] for k, n in enumerate(sizes)]
        assert [x.tobytes() for x in arrays] == [mean.tobytes() for mean in expected]
        if dtype in INTEGERS:
            cut = sum(outside(world.size, n + k, dtype, n) for k, n in enumerate(sizes))
            assert world.allreduce(saturated) == cut


@pytest.mark.parametrize("window_bytes", WINDOWS)
@pytest.mark.parametrize("dtype", ["float32", "int8", pytest.param("int16", marks=pytest.mark.thorough)])
def test_reduce_and_broadcast_at_every_root(world, open_transport, dtype, window_bytes):
    window = window_of(open_transport(window_bytes))
    reduce_op = ReduceOp("sum") if dtype in INTEGERS else ReduceOp("sum", world.size)
    for root in range(world.size):
        for n in SIZES:
            x, expected = values(world.rank, n, dtype), reduced(world.size, n, dtype, reduce_op)
            saturated = window.reduce(x, dtype, (0, n), reduce_op, root)
            assert world.rank != root or x.tobytes() == expected.tobytes()
            assert dtype not in INTEGERS or world.allreduce(saturated) == outside(world.size, n, dtype)
            x = values(world.rank, n, dtype)
            window.broadcast(x, (0, n), root)
            assert x.tobytes() == values(root, n, dtype).tobytes()


@pytest.mark.parametrize("window_bytes", WINDOWS)
def test_the_maximum(world, open_transport, window_bytes):
    window = window_of(open_transport(window_bytes))
    for n in SIZES:
        for call in (
            lambda x, n=n: window.allreduce(x, "float32", (0, n), ReduceOp("max")),
            lambda x, n=n: window.reduce(x, "float32", (0, n), ReduceOp("max"), 0),
        ):
            x = values(world.rank, n, "float32")
            call(x)
            expected = reduced(world.size, n, "float32", ReduceOp("max"))
            assert world.rank != 0 or x.tobytes() == expected.tobytes()


@pytest.mark.parametrize("window_bytes, reads", [*((room, False) for room in WINDOWS), (16384, True)])
def test_regions_of_any_size(world, open_transport, window_bytes, reads):
    """Reduce-scatter and allgather where regions are empty, and where one rank has nearly all."""
    window, reduce_op, n = window_of(open_transport(window_bytes)), ReduceOp("sum", world.size), 30011
    if reads and not window.single:
        pytest.skip(window.single.why)
    window.read_limit = 0.0 if reads else math.inf
    empty = [(0, 0)] * (world.size - 1)
    edges = np.linspace(3, n, world.size + 1).astype(int).tolist()
    for regions in ([*empty, (5, n)], [(0, n), *empty], list(itertools.pairwise(edges))):
        start, stop = regions[world.rank]
        x, own = values(world.rank, n, "float32"), values(world.rank, n, "float32")
        window.reduce_scatter(x, "float32", regions, reduce_op)
        own[start:stop] = reduced(world.size, n, "float32", reduce_op)[start:stop]
        assert x.tobytes() == own.tobytes()
        window.allgather(x, regions)
        for a, b in regions:
            assert x[a:b].tobytes() == reduced(world.size, n, "float32", reduce_op)[a:b].tobytes()


@pytest.mark.parametrize("window_bytes", WINDOWS)
def test_exchange_moves_payloads(world, open_transport, window_bytes):
    """Everybody's buffer has another length: all to all, and all to one."""
    window, size, me = window_of(open_transport(window_bytes)), world.size, world.rank
    for part in (1, 1000, 50001):
        sources = [np.random.default_rng(r).integers(0, 256, (r + 1) * part * size, np.uint8) for r in range(size)]
        at = np.cumsum([0, *((r + 1) * part for r in range(size))]).tolist()
        incoming = [Transfer(r, me, me * (r + 1) * part, at[r], (r + 1) * part) for r in range(size)]
        target = np.zeros(at[-1], np.uint8)
        window.exchange(sources[me], target, incoming, sources[-1].size)
        for r in range(size):
            assert np.array_equal(target[at[r] : at[r + 1]], sources[r][me * (r + 1) * part :][: (r + 1) * part])
        root = size // 2
        incoming = [Transfer(r, root, 3, r * part, part - 3 if part > 3 else 0) for r in range(size)]
        target = np.zeros(size * part, np.uint8)
        window.exchange(sources[me], target, incoming if me == root else [], sources[-1].size)
        for t in incoming if me == root else ():
            got = target[t.target_offset : t.target_offset + t.nbytes]
            assert np.array_equal(got, sources[t.source][3 : 3 + t.nbytes])


@pytest.mark.parametrize("background", [False, True])
def test_ranks_that_come_late(world, open_transport, background):
    """Halves are not written again before they were read, whoever is slow."""
    transport = open_transport(16384)
    transport.waiter.background = background
    window, reduce_op = window_of(transport), ReduceOp("sum", world.size)
    window.read_limit = 40_000.0 if window.single else math.inf  # half of the sums and broadcasts
    naps, choice = np.random.default_rng(world.rank), np.random.default_rng(7)
    for step in range(60):
        n, kind = int(choice.integers(1, 20000)), int(choice.integers(0, 7))
        if naps.random() < 0.3:
            time.sleep(naps.random() * 2e-3)
        x = values(world.rank, n, "float32")
        if kind == 0:
            window.broadcast(x, (0, n), step % world.size)
            expected = values(step % world.size, n, "float32")
        elif kind == 1:
            notes = gather_small(transport, x[:100].view(np.uint8), 400)
            assert [note.tobytes() for note in notes] == [
                values(r, n, "float32")[:100].tobytes() for r in range(world.size)
            ]
            continue
        elif kind == 4:  # a sum that begins with the headers, as all are equal but for the bit that may differ
            header = np.array([world.rank % 2, step, n % 251], np.uint8)
            agreed = window.agreed_allreduce(header, 1, x, arithmetic(world.size, "float32"), NO_CHECK)
            assert agreed.met > 0
            expected = reduced(world.size, n, "float32", reduce_op)
        elif kind == 6:  # likewise, of several arrays
            joint = JointArray.of(np.array_split(x, min(n, step + 1)))
            agreed = window.agreed_allreduce_joint(
                np.array([step], np.uint8), 0, joint, arithmetic(3, "float32"), NO_CHECK
            )
            assert agreed.met > 0
            expected = reduced(world.size, n, "float32", ReduceOp("sum", 3))
        elif kind == 5:  # one that does not come about: rank 0 has another header, and no data
            header, expected = np.array([2 if world.rank == 0 else 4, step], np.uint8), x.copy()
            if world.rank == 0:
                headers = gather_small(transport, header, header.size)
            else:
                headers = window.agreed_allreduce(header, 1, x, arithmetic(world.size, "float32"), NO_CHECK).headers
            assert [found.tolist() for found in headers] == [[4 if r else 2, step] for r in range(world.size)]
        else:
            window.allreduce(x, "float32", (0, n), reduce_op)
            expected = reduced(world.size, n, "float32", reduce_op)
        assert x.tobytes() == expected.tobytes(), step


def layouts(size):
    """(bytes of the window, nodes): one node with and without a window, and several nodes."""
    pairs = [list(range(i, min(i + 2, size))) for i in range(0, size, 2)]
    apart = [list(range(0, size, 2)), list(range(1, size, 2))]
    alone = [[rank] for rank in range(size)]
    lopsided = [[0], list(range(1, size))]
    return [(16384, None), (0, None), *((16384, m) for m in (pairs, apart, alone, lopsided)), (0, apart)]


def test_small_arrays_of_all_ranks(world, open_transport):
    for window_bytes, nodes in layouts(world.size):
        transport = open_transport(window_bytes, nodes)
        for room in (1, 48, 1300, 17000, 100000):
            sizes = [(room * (rank + 1)) // world.size for rank in range(world.size)]
            notes = [np.random.default_rng([r, room]).integers(0, 256, sizes[r], np.uint8) for r in range(world.size)]
            found = gather_small(transport, notes[world.rank], room)
            assert [note.tobytes() for note in found] == [note.tobytes() for note in notes]
            assert all(note.ctypes.data % 16 == 0 for note in found)
        for room in (17000, 17000, 64, 17000):  # of all ranks together longer than a slot
            found = gather_small(transport, np.full(room, world.rank, np.uint8), room)
            assert [set(note.tolist()) for note in found] == [{rank} for rank in range(world.size)]
        texts = allgather_json(transport, b'{"rank": %d, "text": "%s"}' % (world.rank, b"x" * 5000 * world.rank))
        assert [text["rank"] for text in texts] == list(range(world.size))


def gather_eight(transport):
    gather_small(transport, np.zeros(8, np.uint8), 8)


def allreduce_200_kb(transport):
    window_of(transport).allreduce(np.ones(50000, np.float32), "float32", (0, 50000), ReduceOp("sum"))


@pytest.mark.parametrize("call", [gather_eight, allreduce_200_kb])
def test_a_missing_rank_is_named_by_all(world, call):
    """Also by ranks of other nodes, which wait for a rank that waits itself. These transports cannot be closed.

    On a busy node, such a rank may itself be late to say for whom it waits: then once more, with more time.
    """
    for window_bytes, nodes in layouts(world.size):
        if call is allreduce_200_kb and (nodes is not None or not window_bytes):
            continue
        for timeout in (2.0, 20.0):
            missing, named = named_by_others(world, call, TransportSettings(timeout, window_bytes, nodes=nodes))
            if all(f"for rank {missing} (" in text for text in named):
                break
        else:
            pytest.fail(f"not all waited for rank {missing}: {named}")


def named_by_others(world, call, settings):
    """A rank that does not call, and what the others say of it."""
    missing, text = world.size - 1, ""
    transport = Transport(world.Dup(), settings)
    if world.rank != missing:
        with pytest.raises(RankTimeoutError) as caught:
            call(transport)
        text = str(caught.value)
    return missing, world.allgather(text)[:missing]


def test_bad_news_ends_a_wait(world):
    """Long before its own limit, which is far beyond that of the test."""
    transport = Transport(world.Dup(), TransportSettings(3600.0, 16384))
    world.Barrier()

    class Failing(WaitMonitor):
        def check(self):
            raise ConnectionError("another rank gave up")

    if world.rank != 0:
        with pytest.raises(ConnectionError), transport.waiter.monitored(Failing()):
            window_of(transport).allreduce(np.ones(5, np.float32), "float32", (0, 5), ReduceOp("sum"))
    world.Barrier()


def test_where_windows_fail_messages_are_used(world, monkeypatch, caplog):
    class Broken:
        def __init__(self, *arguments):
            raise MPI.Exception(MPI.ERR_RMA_SHARED)

    monkeypatch.setattr(transport_module, "SharedWindow", Broken)
    with caplog.at_level(logging.WARNING, "espresso_mpi"):
        transport = Transport(world.Dup(), TransportSettings(20.0, 16384))
    assert window_of(transport) is None
    assert not transport.windows_everywhere
    assert "using messages inside the node" in caplog.text
    found = gather_small(transport, np.array([world.rank], np.uint8), 1)
    assert [int(note[0]) for note in found] == list(range(world.size))
    transport.close()


def test_without_shared_memory_messages_are_used(world, monkeypatch, caplog):
    monkeypatch.setattr(transport_module, "shared_memory_free", lambda: 1 << 16)
    transport = Transport(world.Dup(), TransportSettings(20.0, 1 << 20))
    assert window_of(transport) is None
    transport.close()
