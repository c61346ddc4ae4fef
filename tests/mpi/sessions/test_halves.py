"""Compressed reduce-scatter and allgather: the halves of a synchronisation, against the whole and against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from espresso_mpi.collectives.data import magnitudes
from espresso_mpi.errors import ConfigError, MismatchError, NonFiniteError, StateError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

WAY = {None: "flat-alltoall", "pairs": "hierarchical-alltoall-packed"}


def pairs(size):
    return [list(range(i, min(i + 2, size))) for i in range(0, size, 2)]


def values(rank, step, n):
    return np.random.default_rng([rank, step]).standard_normal(n).astype(np.float32)


@pytest.mark.parametrize("nodes", WAY)
@pytest.mark.parametrize("compressor", ["int8", "onebit", "topk:ratio=0.1"])
def test_one_after_the_other_they_are_sync(world, open_session, compressor, nodes):
    """Bit for bit and with feedback, where every part is a multiple of 64 elements as those of ``sync`` are."""
    size = world.size
    layout = None if nodes is None else pairs(size)
    if nodes and (len(layout) * 2 != size or len(layout) < 2):
        pytest.skip("one node, and nodes of unequal size, take flat routes")
    session = open_session(nodes=layout, compressor=compressor, route=WAY[nodes], min_bytes=0, segment_bytes=0)
    same = {"compressor": compressor, "feedback": "plain", "name": "w"}
    for step in range(3):
        x = values(world.rank, step, size * 640).reshape(size * 64, 10)
        before = x.copy()
        part = session.reduce_scatter(x, **same)
        found = session.allgather(part, **same)
        assert np.array_equal(x, before) and part.shape == (64, 10) and found.shape == x.shape
        assert np.array_equal(found, session.sync({"w": x})["w"]), (step, "differs from sync")


@pytest.mark.parametrize("nodes", WAY)
def test_nothing_is_lost(world, open_session, nodes):
    """What was given is what came and what is kept, in numpy; parts of 37 elements begin anywhere."""
    size, n = world.size, 37
    layout = None if nodes is None else pairs(size)
    session = open_session(nodes=layout)
    more = {"compressor": "onebit", "feedback": "plain"}
    given, scattered, gathered = np.zeros(n), np.zeros(n), np.zeros(n * size)
    for step in range(5):
        ranks = [values(rank, step, n * size) for rank in range(size)]
        part = session.reduce_scatter(ranks[world.rank].copy(), name="rs", **more)
        given += np.mean(ranks, axis=0, dtype=np.float64)[world.rank * n : (world.rank + 1) * n]
        scattered += part
        gathered += session.allgather(part, name="ag", **more)
    kept = session.state_dict()
    arrays, weights = kept["arrays"], kept["weights"]
    (own,) = [v for k, v in arrays.items() if k.startswith("allgather ag")]
    assert np.allclose(gathered[world.rank * n : (world.rank + 1) * n] + own, scattered, atol=1e-4)
    if nodes is None:  # else parts lie in another order; then the bits are those of sync, see above
        (mine,) = [(v, weights[k]) for k, v in arrays.items() if k.startswith("reduce_scatter rs|")]
        total = sum(weight * value for value, weight in world.allgather(mine))
        assert np.allclose(scattered + total[world.rank * n : (world.rank + 1) * n], given, atol=1e-4)
    # a single step of int8 by hand: blocks of 256 in each part
    ranks = [values(rank, 9, 300 * size) for rank in range(size)]
    part = session.reduce_scatter(ranks[world.rank].copy(), "sum", compressor="int8", route="flat-alltoall")
    expected = sum(quantised(x[world.rank * 300 : (world.rank + 1) * 300]) for x in ranks)
    assert np.allclose(part, expected, atol=1e-4)
    found = session.allgather(part, compressor="int8", route="flat-alltoall")
    assert np.allclose(found, np.concatenate([quantised(p) for p in world.allgather(part)]), atol=1e-4)


def quantised(x):
    blocks = [x[a : a + 256].astype(np.float64) for a in range(0, x.size, 256)]
    return np.concatenate([np.rint(b / np.abs(b).max() * 127) * np.abs(b).max() / 127 for b in blocks])


def test_what_is_kept_is_saved(world, open_session):
    size = world.size
    more = {"compressor": "onebit", "feedback": "plain", "name": "w"}

    def steps(session, first):
        found = []
        for step in range(first, first + 2):
            part = session.reduce_scatter(values(world.rank, step, 100 * size), **more)
            found.append(session.allgather(part, **more))
        return found

    session = open_session()
    steps(session, 0)
    saved = session.state_dict()
    expected, other, moved = steps(session, 2), open_session(), open_session(segment_bytes=12345)
    other.load_state_dict(saved)
    assert np.array_equal(steps(other, 2), expected)
    moved.load_state_dict(saved)  # resharded: every rank gets the mean residual, so the bits are others
    mean = np.mean(world.allgather(saved["arrays"][f"reduce_scatter w|{100 * size}|0|0:{100 * size}|residual"]), axis=0)
    assert np.allclose(
        moved.state_dict()["arrays"][f"reduce_scatter w|{100 * size}|whole|0:{100 * size}|residual"], mean
    )
    again = steps(moved, 2)
    assert not np.array_equal(again, expected) and np.allclose(np.sum(again, 0), np.sum(expected, 0), atol=3)
    if size == 4:
        by_nodes = open_session(nodes=pairs(4))
        steps(by_nodes, 0)
        state = by_nodes.state_dict()
        with pytest.raises(StateError, match="order of the former nodes"):
            session.load_state_dict(state)


def test_types_and_results(world, open_session):
    torch = pytest.importorskip("torch")
    size, session = world.size, open_session()
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = torch.arange(size * 6, dtype=dtype).reshape(size * 2, 3)
        out = torch.empty(2, 3, dtype=dtype)
        assert session.reduce_scatter(x, "sum", compressor="fp16", out=out) is out
        assert torch.allclose(out, size * x[2 * world.rank : 2 * world.rank + 2], rtol=0.01)
        handle = session.allgather(out, compressor="fp16", blocking=False)
        found = handle.wait()
        assert found.dtype == dtype and torch.allclose(found, size * x, rtol=0.01)
    strided = np.arange(size * 64, dtype=np.float32).reshape(2 * 8, size * 4).T
    part = session.reduce_scatter(strided, compressor="fp16")
    assert np.allclose(part, strided[4 * world.rank : 4 * world.rank + 4], rtol=1e-3)


@pytest.mark.parametrize("policy", ["raise", "skip", "skip_all"])
def test_a_nan_on_one_rank_is_heard_on_all(world, open_session, policy):
    session = open_session(nonfinite=policy)
    x, more = np.ones(64 * world.size, np.float32), {"compressor": "int8", "feedback": "plain", "name": "w"}
    session.reduce_scatter(x, **more)
    kept = session.state_dict()["arrays"]
    x[3] = np.nan if world.rank == world.size - 1 else 1
    if policy == "raise":
        with pytest.raises(NonFiniteError, match="NaN"):
            session.reduce_scatter(x, **more)
    else:
        part = session.reduce_scatter(x, **more)
        assert np.all(part == 0) if policy == "skip" else np.all(np.isnan(part))
        assert x[0] == 1, "what is read is not changed"
    assert all(np.array_equal(value, kept[key]) for key, value in session.state_dict()["arrays"].items())


def test_only_the_own_part_is_searched(world, open_session, monkeypatch):
    """What is allgathered is a part of the tensor: what lies behind it in memory is none of the call's."""
    search, sizes = magnitudes.all_in_range, [0]

    def noted(addresses, lengths, least):
        sizes.extend(lengths.tolist())
        return search(addresses, lengths, least)

    monkeypatch.setattr(magnitudes, "all_in_range", noted)
    whole = open_session().allgather(np.full(64, world.rank, np.float32), compressor="int8")
    assert np.allclose(whole, np.repeat(np.arange(world.size), 64), rtol=0.01)
    assert max(sizes) <= 64


LINEAR = "encode@cpu/reduce_scatter@flat/decode@cpu/allgather@flat"

MISTAKES = [
    (lambda s: s.reduce_scatter(np.ones(s.topology.size, np.float32), compressor="int8", feedback=True), "without a"),
    (lambda s: s.reduce_scatter(np.ones(s.topology.size, np.int64), "sum", compressor="int8"), "of int64"),
    (lambda s: s.reduce_scatter(np.ones(s.topology.size), "max", compressor="int8"), "op='max'"),
    (lambda s: s.reduce_scatter(np.ones(s.topology.size), compressor="nosuch"), "nosuch"),
    (lambda s: s.allgather(np.ones(2), compressor="int8", route="flat-allgather"), "has no halves"),
    (lambda s: s.allgather(np.ones(2), route="flat-alltoall"), "needs a compressor"),
    (
        lambda s: s.allgather(
            np.ones(2), compressor="randomk", route="encode@cpu/reduce_scatter@flat/decode@cpu/allgather@flat"
        ),
        "does not encode in its second",
    ),
    (lambda s: s.allgather(np.ones(2), compressor="signsgd"), "no approximation"),
]


@pytest.mark.parametrize(("call", "text"), MISTAKES)
def test_mistakes_are_errors_on_every_rank(world, open_session, call, text):
    session = open_session()
    with pytest.raises(ConfigError, match=text):
        call(session)


def test_differences_and_uneven_nodes(world, open_session):
    session = open_session(nodes=[list(range(world.size - 1)), [world.size - 1]] if world.size > 2 else None)
    if world.size > 2:
        with pytest.raises(ConfigError, match="unequal parts"):
            session.allgather(np.ones(2), compressor="int8", route="hierarchical-alltoall")
        part = session.reduce_scatter(np.ones(world.size * 3), compressor="int8")  # by the flat route
        assert np.allclose(part, 1)
    with pytest.raises(MismatchError, match="ranks"):
        session.allgather(np.ones(2), compressor="int8" if world.rank else "fp16")
