"""Collectives as calls of their own, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from session_cases import node_layouts

from espresso_mpi.collectives import by_nodes, calls, to_root
from espresso_mpi.compressors import get
from espresso_mpi.errors import ConfigError, GradientError, MismatchError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


def layouts(size):
    """One node, and nodes of two ranks (the last one may be smaller)."""
    return [None, [list(range(i, min(i + 2, size))) for i in range(0, size, 2)]]


@pytest.fixture(params=[0, 1], ids=["one node", "nodes of two"])
def session(request, world, open_session):
    return open_session(nodes=layouts(world.size)[request.param])


def contribution(rank, n, dtype):
    return (np.arange(n) % 5 + rank).astype(dtype)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "float16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("op", ["sum", "max", "prod"])
def test_allreduce_is_exact(world, session, dtype, op):
    ranks = [contribution(rank, 20011, dtype) for rank in range(world.size)]
    if (dtype == "complex128" and op == "max") or (dtype == "float16" and op != "sum"):
        with pytest.raises(ConfigError, match="MPI has no such"):
            session.allreduce(ranks[0], op=op)
        return
    x = ranks[world.rank].copy()
    assert session.allreduce(x, op=op) is x
    expected = {"sum": np.add, "max": np.maximum, "prod": np.multiply}[op].reduce(ranks)
    assert np.array_equal(x, expected.astype(dtype))


def test_segments_of_an_array_that_travels_alone_change_no_bits(world, open_session):
    x = np.random.default_rng(world.rank).standard_normal(300_000).astype(np.float32)
    found, cut = [], []
    for segment_bytes in (0, 1 << 20):
        session = open_session(nodes=layouts(world.size)[1], segment_bytes=segment_bytes)
        found.append(session.allreduce(x.copy()).tobytes())
        cut.append([program.count for program in session._engine._dispatcher._programs.known.values()])
    assert found[0] == found[1]
    assert cut == [[1], [5 if world.size > 2 else 1]]


def test_allreduce_of_bool_and_into_another_array(world, session):
    assert session.allreduce(np.array([world.rank == 0, False]), op="lor").tolist() == [True, False]
    assert session.allreduce(np.array([world.rank == 0, True]), op="band").tolist() == [world.size == 1, True]
    x, out = np.full(5, world.rank + 1.0), np.empty(5)
    assert session.allreduce(x, op="sum", out=out) is out
    assert x[0] == world.rank + 1 and np.all(out == world.size * (world.size + 1) / 2)


def test_infinities_are_summed_as_they_are(world, session):
    x = np.array([np.inf, 1.0, np.nan], np.float32)
    assert np.array_equal(session.allreduce(x, op="sum"), [np.inf, world.size, np.nan], equal_nan=True)


@pytest.mark.parametrize("n", [0, 1, 3, 1000, 300001])
def test_copies(world, session, n):
    size, rank = world.size, world.rank
    for root in range(size):
        assert np.all(session.broadcast(np.full(n, rank, np.int32), root=root) == root)
    x = np.full((n, 3), rank, np.float32)
    every = np.repeat(np.arange(size, dtype=np.float32), n)[:, None] * np.ones(3, np.float32)
    assert np.array_equal(session.allgather(x), every)
    gathered = session.gather(x, root=size - 1)
    assert (gathered is None) == (rank != size - 1)
    assert gathered is None or np.array_equal(gathered, every)
    sent = np.repeat(np.arange(size) + 10 * rank, n).astype(np.int16)
    assert np.array_equal(session.alltoall(sent), np.repeat(10 * np.arange(size) + rank, n))


@pytest.mark.parametrize(
    "kind", ["broadcast", "gather_all", "alltoall", "alltoall by nodes", "reduce_scatter", "reduce"]
)
@pytest.mark.parametrize("even,share", [(False, 12), (True, 240_000)], ids=["uneven nodes", "even nodes"])
def test_all_ranks_yield_equally_often(world, open_session, kind, share, even):
    """Also where a node has one rank: ranks that end earlier would take part in other rounds than the rest."""
    size = world.size
    nodes = [list(range(size - 1)), [size - 1]] if size > 1 else [[0]]
    transport = open_session(nodes=layouts(size)[1] if even else nodes)._transport
    x, spans = np.zeros(share * size, np.uint8), [(share * rank, share * (rank + 1)) for rank in range(size)]
    steps = {
        "broadcast": lambda: calls.broadcast(transport, x, 0),
        "gather_all": lambda: calls.gather_all(transport, x, spans),
        "alltoall": lambda: calls.alltoall(transport, x, x.copy(), spans, spans, True),
        "alltoall by nodes": lambda: by_nodes.alltoall(transport, x, x.copy(), spans, spans),
        "reduce_scatter": lambda: calls.reduce_scatter(
            transport, x.view("f4"), np.empty(share // 4, "f4"), "float32", [(a // 4, b // 4) for a, b in spans], None
        ),
        "reduce": lambda: to_root.reduce(transport, x.view("f4"), "float32", 0, None, 1 << 18),
    }[kind]()
    assert len(set(world.allgather(len(list(steps))))) == 1


@pytest.mark.parametrize("share", [3, 20000])
@pytest.mark.parametrize("nodes", [[[0, 3, 2], [1]], [[0, 2], [1, 3]], [[0], [1], [2, 3]]], ids=str)
def test_rails_of_any_nodes(world, open_session, nodes, share, monkeypatch):
    """Ranks of a node that do not follow each other, and ranks without a rail; small blocks and large."""
    monkeypatch.setattr(calls, "_MANY", 0)
    monkeypatch.setattr(by_nodes, "merges", lambda topology, block: True)
    size, me = world.size, world.rank
    session = open_session(nodes=[own for ranks in nodes if (own := [r for r in sorted(ranks) if r < size])])
    rows = [[share * (1 + (3 * a + b) % 4) for b in range(size)] for a in range(size)]
    x = np.concatenate([np.arange(n) + 1000 * (10 * me + b) for b, n in enumerate(rows[me])])
    x.flags.writeable = False
    found = session.alltoall(x, splits=rows[me], received=[row[me] for row in rows])
    assert np.array_equal(
        found, np.concatenate([np.arange(row[me]) + 1000 * (10 * a + me) for a, row in enumerate(rows)])
    )
    even = np.repeat(np.arange(size) + 10 * me, share)
    assert np.array_equal(session.alltoall(even), np.repeat(10 * np.arange(size) + me, share))
    for dtype, op in (("float32", "mean"), ("float16", "sum"), ("complex64", "prod"), ("int8", "max")):
        every = [contribution(rank, share * size, dtype) for rank in range(size)]
        every[me].flags.writeable = False
        part, out = slice(me * share, (me + 1) * share), np.empty(share, dtype)
        assert session.reduce_scatter(every[me], op=op, out=out) is out
        total = {"sum": np.add, "mean": np.add, "max": np.maximum, "prod": np.multiply}[op].reduce(every)[part]
        assert np.allclose(out, total / size if op == "mean" else total, rtol=1e-6 if op == "mean" else 0, atol=0)


def test_what_is_only_read_may_be_read_only(world, session):
    size, me = world.size, world.rank
    for dtype in ("float16", "float32", "int32", "bool"):
        x = np.arange(2 * size).reshape(size, 2).astype(dtype)
        every = np.tile(x, (size, 1))
        total = np.add.reduce([x] * size).astype(dtype)
        x.flags.writeable = False
        assert np.array_equal(session.allgather(x), every)
        gathered = session.gather(x)
        assert me or np.array_equal(gathered, every)
        assert np.array_equal(session.alltoall(x), np.tile(x[me], (size, 1)))
        assert np.array_equal(session.allreduce(x, op="sum", out=x.copy()), total)
        assert np.array_equal(session.reduce_scatter(x, op="sum"), total[me : me + 1])
        with pytest.raises(GradientError, match="read-only"):
            session.allreduce(x, op="sum")


def test_alltoall_with_splits(world, session):
    size, rank = world.size, world.rank
    splits, received = [rank * k for k in range(size)], [k * rank for k in range(size)]
    x = np.repeat(np.arange(size) + 10 * rank, splits).astype(np.float64)
    found = session.alltoall(x, splits=splits, received=received)
    assert np.array_equal(found, np.repeat(10 * np.arange(size) + rank, received))


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
@pytest.mark.parametrize("n", [1, 70000])
def test_reduce_scatter_is_a_part_of_allreduce(world, session, dtype, n):
    x = contribution(world.rank, n * world.size, dtype)
    before = x.copy()
    mine = session.reduce_scatter(x, op="sum")
    assert np.array_equal(x, before)
    whole = session.allreduce(x.copy(), op="sum")
    assert np.array_equal(mine, whole[world.rank * n : (world.rank + 1) * n])


def test_reduce_gives_the_root_the_result(world, session):
    for root in range(world.size):
        for x in (np.full(9, world.rank + 1.0), np.full(9, world.rank + 1)):
            found = session.reduce(x, op="sum", root=root)
            assert world.rank != root or np.all(found == world.size * (world.size + 1) / 2)


@pytest.mark.parametrize(
    "nodes", [[[0, 3, 2], [1]], [[0, 2], [1, 3]], [[0], [1, 3], [2]], [[0], [1], [2], [3]]], ids=str
)
def test_reduce_gives_the_root_the_bits_of_allreduce(world, open_session, monkeypatch, nodes):
    monkeypatch.setattr(to_root, "_LARGE", 1 << 20)  # float64 and not float32
    monkeypatch.setattr(to_root, "_LEAST", 1 << 14)
    session = open_session(nodes=[own for ranks in nodes if (own := [r for r in sorted(ranks) if r < world.size])])
    x = np.random.default_rng(world.rank).standard_normal(200_001)
    for dtype, op, root in (("float32", "mean", 0), ("int32", "max", 1), *(("float64", "mean", r) for r in range(3))):
        root, mine = root % world.size, (99 * x).astype(dtype)
        every = session.allreduce(mine.copy(), op=op)
        found = session.reduce(mine.copy(), op=op, root=root)
        assert world.rank != root or found.tobytes() == every.tobytes()


@pytest.mark.parametrize("layout", [1, -1], ids=["pairs", "uneven"])
def test_messages_of_calls_that_are_under_way_together_stay_apart(world, open_session, monkeypatch, layout):
    """Each rank posts its receives in the progress step in which the other end sends."""
    monkeypatch.setattr(calls, "_MANY", 2)
    for name, nbytes in (("_LARGE", 1 << 16), ("_LEAST", 1 << 14)):
        monkeypatch.setattr(to_root, name, nbytes)
    alone = [[rank] for rank in range(world.size)]
    for nodes in (node_layouts(world.size)[layout], alone):
        session, me, ranks = open_session(nodes=nodes), world.rank, np.arange(world.size)
        for _ in range(3):
            sums = [np.full(60_000, me + 10.0 * root, np.float32) for root in range(2)]
            handles = [session.reduce(x, op="sum", root=r, name=f"{r}", blocking=False) for r, x in enumerate(sums)]
            gathered = session.gather(np.full(100, me, np.uint8), root=1, blocking=False)
            blocks = session.alltoall(np.repeat(ranks + 100 * me, 50), blocking=False)
            mean = session.push("mean", np.full(60_000, float(me), np.float32))
            for root, handle in enumerate(handles):
                found = handle.wait()
                assert me != root or (found == ranks.sum() + 10.0 * root * world.size).all()
            found = gathered.wait()
            assert me != 1 or (found == np.repeat(ranks, 100)).all()
            assert (blocks.wait() == np.repeat(100 * ranks + me, 50)).all()
            assert (mean.wait() == np.float32(ranks.mean())).all()


@pytest.mark.parametrize("compressor", ["fp16", "int8", "onebit"])
def test_a_compressed_mean_is_that_of_sync(world, session, compressor):
    x = np.random.default_rng(world.rank).standard_normal(40000).astype(np.float32)
    other = session.allreduce(x.copy(), compressor=compressor)
    total = session.allreduce(x.copy(), op="sum", compressor=compressor)
    exact = world.size & (world.size - 1) == 0  # else what is compressed a second time is rounded otherwise
    assert np.linalg.norm(total - world.size * other) <= (1e-5 if exact else 0.02) * np.linalg.norm(total)
    n, mean = x.size, np.mean(world.allgather(x), axis=0)
    error = np.sum((other - mean) ** 2) / np.mean([np.sum(row**2) for row in world.allgather(x)])
    assert error <= 2 * (1 - get(compressor).contraction(n)) + 1e-9


def test_feedback_keeps_what_was_lost(world, session):
    """Over steps the sum of the results approaches that of the means: the residual stays bounded."""
    x, found = np.random.default_rng(world.rank).standard_normal(20000).astype(np.float32), np.zeros(20000)
    for _ in range(20):
        found += session.allreduce(x.copy(), compressor="onebit", feedback="plain", name="w")
    mean = np.mean(world.allgather(x), axis=0)
    once = session.allreduce(x.copy(), compressor="onebit")
    assert np.linalg.norm(found / 20 - mean) < 0.5 * np.linalg.norm(once - mean)


def test_empty_arrays(world, session):
    """Also when the call is made again."""
    for _ in range(3):
        for kind in (np.float32, np.int64):
            assert session.allreduce(np.empty(0, kind), op="sum").size == 0
            assert session.reduce(np.empty((3, 0), kind), op="max" if kind is np.int64 else "sum").shape == (3, 0)
            assert session.allgather(np.empty(0, kind)).size == 0


def test_several_under_way(world, session):
    sums = [session.allreduce(np.full(999 * k + 1, world.rank + 1.0), op="sum", blocking=False) for k in range(5)]
    copies = [session.broadcast(np.full(9, world.rank), root=k % world.size, blocking=False) for k in range(5)]
    ints = [session.allreduce(np.full(100, world.rank + k), op="max", blocking=False) for k in range(5)]
    pushed = session.push("w", np.full(100, world.rank, np.float32))
    assert all(np.all(handle.wait() == world.size * (world.size + 1) / 2) for handle in sums)
    assert all(np.all(handle.wait() == k % world.size) for k, handle in enumerate(copies))
    assert all(np.all(handle.wait() == world.size - 1 + k) for k, handle in enumerate(ints))
    assert np.allclose(pushed.wait(), (world.size - 1) / 2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s, r: s.allreduce(np.arange(3)), "op='mean' of int64"),
        (lambda s, r: s.allreduce(np.ones(3, np.float32), op="nosuch"), "op='nosuch'"),
        (lambda s, r: s.allreduce(np.arange(3), op="sum", compressor="int8"), "compressor='int8'"),
        (lambda s, r: s.allreduce(np.ones(99, np.float32), compressor="onebit", feedback="plain"), "without a name"),
        (lambda s, r: s.broadcast(np.ones(3), root=99), "root=99"),
        (lambda s, r: s.allgather(np.float64(3)), "without dimensions"),
        (lambda s, r: s.alltoall(np.ones(7), splits=[1], received=[1]), "splits"),
        (lambda s, r: s.reduce_scatter(np.ones(s.topology.size + 1)), "expected equal parts"),
        (lambda s, r: s.allreduce(np.ones(3, np.float32) if r else np.arange(3)), "op='mean' of int64"),
        (lambda s, r: s.allgather(np.ones(3) if r else np.float64(3)), "without dimensions"),
        (lambda s, r: s.allreduce(np.ones(3), op="sum", out=np.empty(3 if r else 4)), "out is of shape"),
        (lambda s, r: s.allreduce(np.ones(3), op="sum", out=np.empty(3, int)), "type int64"),
        (lambda s, r: s.alltoall(np.ones(s.topology.size, np.float32), out=np.empty(s.topology.size)), "of float64"),
        (lambda s, r: s.gather(np.ones(1, np.float32), out=np.empty(s.topology.size)), "of float64"),
        (lambda s, r: s.allreduce(np.ones(3), op="lor"), "op='lor' of float64"),
    ],
)
def test_mistakes_are_errors_on_every_rank(world, open_session, call, text):
    session = open_session()
    with pytest.raises(ConfigError, match=text):
        call(session, world.rank)
    assert session.allreduce(np.ones(3), op="sum")[0] == world.size, "the session goes on"


@pytest.mark.parametrize(
    "call",
    [
        lambda s, r: s.allreduce(np.ones(3 + (r > 0)), op="sum"),
        lambda s, r: s.broadcast(np.ones(3), root=int(r > 0)),
        lambda s, r: s.allreduce(np.arange(3), op="min" if r else "max"),
        lambda s, r: s.alltoall(np.ones(s.topology.size * (1 + (r > 0)))),
    ],
)
def test_differences_between_ranks_are_errors_on_every_rank(world, open_session, call):
    session = open_session()
    if world.size > 1:
        with pytest.raises(MismatchError, match="ranks"):
            call(session, world.rank)


def test_torch_tensors(world, session):
    torch = pytest.importorskip("torch")
    x = torch.arange(6).reshape(2, 3) + world.rank
    assert session.allreduce(x, op="max") is x
    assert x.tolist() == (np.arange(6).reshape(2, 3) + world.size - 1).tolist()
    gathered = session.allgather(torch.full((2,), float(world.rank), dtype=torch.bfloat16))
    assert gathered.dtype == torch.bfloat16 and gathered.tolist() == [float(r) for r in range(world.size) for _ in "ab"]
