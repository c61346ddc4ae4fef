"""Compressed broadcast, gather and alltoall, against the compressors themselves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from espresso_mpi.collectives.copies import _packed
from espresso_mpi.collectives.to_root import gather
from espresso_mpi.compressors import get
from espresso_mpi.errors import ConfigError, MismatchError, NonFiniteError, StateError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

COMPRESSORS = ["fp16", "int8", "onebit", "topk:ratio=0.1", "powersgd:rank=1"]


def values(rank, n, step=0):
    return np.random.default_rng([rank, step]).standard_normal(n).astype(np.float32)


def coded(x, compressor, residual=None):
    """What a payload holds of ``x``, by the compressor's own encode and decode."""
    method, out = get(compressor).shaped(x.shape).second_pass(), np.empty(x.size, np.float32)
    payload = np.empty(method.nbytes(x.size) + 16, np.uint8)
    payload = payload[-payload.ctypes.data % 16 :][: method.nbytes(x.size)]
    if x.size:
        method.encode(x.reshape(-1), payload, residual)
        method.decode(payload, out)
    return out.reshape(x.shape)


def pairs(size):
    return [list(range(i, min(i + 2, size))) for i in range(0, size, 2)]


@pytest.fixture(params=[0, 1], ids=["one node", "nodes of two"])
def session(request, world, open_session):
    return open_session(nodes=pairs(world.size) if request.param else None)


def test_every_rank_gets_what_the_payloads_hold(world, session):
    for compressor in COMPRESSORS:
        check_payloads(world, session, compressor)


def check_payloads(world, session, compressor):
    size, me, root, how = world.size, world.rank, world.size - 1, {"compressor": compressor}
    exact = size == 1 or compressor.startswith("powersgd")  # a matrix of rank one; its first guess is drawn at random

    def matrix(rank, rows):
        full = np.outer(values(rank, rows), values(rank + 99, 30)) if exact else values(rank, rows * 30)
        return full.reshape(rows, 30).astype(np.float32)

    def check(found, parts):
        expected = np.concatenate(parts if exact else [coded(part, compressor) for part in parts])
        assert np.allclose(found, expected, atol=1e-5) if exact else np.array_equal(found, expected)

    parts = [matrix(rank, 40) for rank in range(size)]
    x = parts[me]
    found = x.copy() if me == root else np.full_like(x, np.nan)  # only the root's values count
    assert session.broadcast(found, root, **how) is found
    check(found, [parts[root]])
    assert len(set(world.allgather(found.tobytes()))) == 1
    gathered = session.gather(x, root=root, **how)
    assert (gathered is None) == (me != root)
    if me == root:
        check(gathered, parts)
    splits = [[1 + (3 * a + b) % 4 if a != b else 0 for b in range(size)] for a in range(size)]
    others = [[splits[b][a] for b in range(size)] for a in range(size)]  # of the same call, a step later
    for rows in (splits, others, [[4] * size] * size):
        sent = [matrix(rank, sum(rows[rank])) for rank in range(size)]
        blocks = [np.split(sent[rank], np.cumsum(rows[rank])[:-1])[me] for rank in range(size)]
        told = {"splits": rows[me], "received": [row[me] for row in rows]} if rows in (splits, others) else {}
        check(session.alltoall(sent[me], **told, **how), blocks)


def test_feedback_keeps_what_was_lost(world, session):
    """Bit for bit: each rank and each destination has a residual of its own."""
    size, me, n = world.size, world.rank, 600
    if size == 1:
        pytest.skip("one rank compresses nothing")
    ours = [np.zeros(n, np.float32) for _ in range(size)]
    how = {"compressor": "onebit", "feedback": "plain"}
    blocks = {(a, b): np.zeros(n, np.float32) for a in range(size) for b in range(size)}
    lost, mean = np.zeros(n, np.float32), [np.zeros(n), np.zeros(n)]
    for step in range(3):
        x = [values(rank, n, step) for rank in range(size)]
        found = session.broadcast(x[me].copy(), 0, name="b", **how)
        assert np.array_equal(found, coded(x[0], "onebit", lost))
        whole = [np.concatenate([values(10 * a + b, n, step) for b in range(size)]) for a in range(size)]
        got = session.alltoall(whole[me], name="a", **how).reshape(size, n)
        for a in range(size):
            assert np.array_equal(got[a], coded(whole[a][me * n : (me + 1) * n], "onebit", blocks[a, me]))
        gathered = session.gather(x[me], name="g", **how)
        expected = [coded(x[rank], "onebit", ours[rank]) for rank in range(size)]
        assert me or np.array_equal(gathered, np.concatenate(expected))
        reduced = session.reduce(x[me].copy(), name="r", root=0, **how)
        mean[0] += np.mean(x, axis=0, dtype=np.float64)
        mean[1] += reduced
    assert me or np.linalg.norm(mean[1] - mean[0]) < 0.8 * np.linalg.norm(mean[0]), "a reduce follows the mean"
    with pytest.raises(ConfigError, match="which had"):
        session.alltoall(
            np.ones(size * n + me, np.float32), splits=[n] * (size - 1) + [n + me],
            received=[n] * size if me < size - 1 else [n + r for r in range(size)], name="a", **how,
        )  # fmt: skip


def test_what_is_kept_is_saved_for_this_rank(world, open_session):
    if world.size == 1:
        pytest.skip("one rank keeps nothing")
    how = {"compressor": "onebit", "feedback": "plain", "name": "w"}

    def steps(session):
        return [session.alltoall(values(world.rank, 100 * world.size, step), **how) for step in range(2)]

    session, other = open_session(), open_session()
    steps(session)
    saved = session.state_dict()
    other.load_state_dict(saved)
    assert np.array_equal(steps(other), steps(session))
    with pytest.raises(StateError, match="every rank has sent"):
        open_session(segment_bytes=12345).load_state_dict(saved)


def test_bytes_are_those_of_the_payloads(world, open_session):
    """Counted in statistics, between nodes of one rank: each payload crosses the link to its target once."""
    size, me, n = world.size, world.rank, 5000
    session, x = open_session(nodes=[[rank] for rank in range(size)]), values(me, 5000 * size)
    payload = _packed([n], get("int8")).nbytes
    assert get("int8").nbytes(n) <= payload < get("int8").nbytes(n) + 16
    session.alltoall(x, compressor="int8")
    session.gather(x[:n], compressor="int8")
    session.broadcast(x[:n], compressor="int8")
    counted = session.stats().tensors
    for kind, messages in (("alltoall", size * (size - 1)), ("gather", size - 1), ("broadcast", size - 1)):
        here = [sum(s.bytes_by_level.values()) for name, s in counted.items() if name.startswith(kind)]
        assert world.allreduce(sum(here)) == messages * payload, kind


@pytest.mark.parametrize("nodes", [[[0, 3, 2], [1]], [[0, 2], [1, 3]], [[0], [1], [2, 3]]], ids=str)
def test_gather_by_nodes(world, open_session, nodes):
    """Short parts travel as one message of a node; all ranks yield equally often, whatever their part in it."""
    size, me = world.size, world.rank
    session = open_session(nodes=[own for ranks in nodes if (own := [r for r in sorted(ranks) if r < size])])
    for n, root in itertools.product((0, 1, 33, 70000), range(size)):
        found = session.gather(np.arange(n) + 1000 * me, root=root)
        expected = np.concatenate([np.arange(n) + 1000 * rank for rank in range(size)])
        assert found is None if me != root else np.array_equal(found, expected)
        own, every = np.zeros(n, np.uint8), np.zeros(n * size if me == root else 0, np.uint8)
        assert len(set(world.allgather(len(list(gather(session._transport, own, every, root)))))) == 1


def test_mistakes_are_errors_on_every_rank(world, open_session):
    session, x = open_session(), np.ones(world.size, np.float32)
    for call, text in (
        (lambda: session.broadcast(x, compressor="int8", feedback=True), "broadcast: .*without a name"),
        (lambda: session.gather(np.arange(3), compressor="int8"), "of int64"),
        (lambda: session.alltoall(x, compressor="signsgd"), "no approximation"),
        (lambda: session.alltoall(x, compressor="nosuch"), "nosuch"),
        (lambda: session.reduce(np.arange(3), op="max", compressor="int8"), "compressor='int8'"),
    ):
        with pytest.raises(ConfigError, match=text):
            call()
    if world.size > 1:
        with pytest.raises(MismatchError, match="ranks"):
            session.alltoall(x, compressor="int8" if world.rank else "fp16")
        bad = np.full(world.size, np.nan if world.rank == world.size - 1 else 1, np.float32)
        for call in (session.gather, session.alltoall, lambda y, **how: session.broadcast(y, world.size - 1, **how)):
            with pytest.raises(NonFiniteError, match="NaN"):
                call(bad.copy(), compressor="int8")
    assert session.allreduce(np.ones(3), op="sum")[0] == world.size, "the session goes on"
