"""Sums of payloads of linear compressors: agreed summaries, headers, saturation, updates from the aggregate."""

from __future__ import annotations

import numpy as np
import pytest
from agreed_integers import Agreed
from session_cases import exact_mean, identical, layouts_seen_by, values

from espresso_mpi.bench.reference import synchronised
from espresso_mpi.compressors import get, register, unregister
from espresso_mpi.errors import ConfigError
from espresso_mpi.types import Route

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]
FLAT = (
    "flat-linear",
    "encode@cpu/reduce_scatter@flat/allgather@flat/decode@cpu",
    "encode@cpu/reduce@flat/broadcast@flat/decode@cpu",
)
ROUTES = (
    *FLAT,
    "hierarchical-linear",
    "encode@cpu/reduce_scatter@intra/reduce_scatter@inter/allgather@inter/allgather@intra/decode@cpu",
    "encode@cpu/reduce@intra/allreduce@inter/broadcast@intra/decode@cpu",
)


@pytest.fixture
def agreed():
    register(Agreed)
    yield "test-agreed"
    unregister("test-agreed")


@pytest.mark.parametrize("route", ROUTES)
def test_a_summary_is_agreed_on_before_encoding(world, open_session, agreed, route):
    """Only with one scale on all ranks is the sum of the integers the integer of the sum."""
    n = 1537
    for nodes in layouts_seen_by(route, world.size):
        session = open_session(compressor=agreed, route=route, nodes=nodes, feedback="none", segment_bytes=700)
        grad = values(world.rank, 0, n) * np.float32(world.rank + 1)
        session.sync(grad)
        expected = np.mean([values(r, 0, n).astype(np.float64) * (r + 1) for r in range(world.size)], 0)
        assert identical(world, grad)
        assert np.abs(grad - expected).max() <= 0.51 * world.size * 5 / 1000
        if world.size > 1:
            inputs = [values(r, 0, n) * np.float32(r + 1) for r in range(world.size)]
            simulated = synchronised(Route.parse(route), session.topology, inputs, get(agreed), 700)
            assert np.array_equal(grad, simulated[world.rank])


@pytest.mark.parametrize("route", ROUTES)
def test_conservation_law(world, open_session, agreed, route):
    n, steps = 1537, 10
    for nodes in layouts_seen_by(route, world.size):
        session = open_session(compressor=agreed, route=route, nodes=nodes, segment_bytes=700)
        given, got = np.zeros(n), np.zeros(n)
        for step in range(steps):
            grad = values(world.rank, step, n)
            given += exact_mean(world.size, step, n)
            session.sync(grad)
            got += grad
        held = np.zeros(n)
        count = world.size if str(Route.parse(route)).startswith("encode") or world.size == 1 else len(nodes)
        for memory in world.allgather(session.state_dict()["arrays"]):
            for key, value in memory.items():
                region, what = key.rsplit("|", 2)[1:]
                if what == "residual":
                    start, stop = map(int, region.split(":"))
                    held[start:stop] += value.astype(np.float64) / count
        assert np.abs(given - got - held).max() <= steps * 2.0**-21
        if world.size > 1:
            assert np.abs(held).max() > 1e-6


@pytest.mark.parametrize("route", FLAT)
def test_what_a_method_keeps_is_part_of_the_state(world, open_session, agreed, route):
    """Its own memory counts encodes; what it learns is the payload summed over the ranks."""
    n = 640
    if world.size == 1:
        pytest.skip("one rank compresses nothing")
    session = open_session(compressor=agreed, route=route)
    for step in range(3):
        session.sync(values(world.rank, step, n))
    memory = session.state_dict()["arrays"]
    times = [value.tolist() for key, value in memory.items() if key.endswith("own.times")]
    learned = [value for key, value in sorted(memory.items()) if key.endswith("own.learned")]
    assert times == [[3]] * len(learned)
    assert identical(world, np.concatenate(learned))
    assert all(np.abs(part).max() > 0 for part in learned) and sum(part.size for part in learned) == n
    other = open_session(compressor=agreed, route=route)
    other.load_state_dict(session.state_dict())
    grad, same = values(world.rank, 3, n), values(world.rank, 3, n)
    session.sync(grad)
    other.sync(same)
    assert np.array_equal(grad, same)


@pytest.mark.parametrize("n", [100, 5000])
@pytest.mark.parametrize("window_bytes", [0, 8192])
@pytest.mark.parametrize("route", FLAT)
def test_saturation_is_counted(world, open_session, agreed, route, n, window_bytes):
    """Two ranks at the end of the range: their sum leaves it. Each element counts once, on whichever rank."""
    grad = np.full(n, 2.0, np.float32)
    session = open_session(compressor=f"{agreed}:top=30000", route=route, feedback="none", window_bytes=window_bytes)
    session.sync(grad)
    counted = sum(world.allgather(session.stats().saturated))
    assert counted == (n if world.size > 1 else 0)
    if world.size > 1:
        assert np.allclose(grad, 2 * 32767 / 30000 / world.size, rtol=1e-6)


def test_only_linear_compressors_may_be_summed(world, open_session):
    with pytest.raises(ConfigError, match="cannot be summed"):
        open_session(compressor="onebit", route="flat-linear")


@pytest.mark.parametrize("text", ["encode@cpu/alltoall@intra/allreduce@inter/allgather@intra/decode@cpu"])
def test_payloads_that_were_dealt_out_are_not_summed(text):
    with pytest.raises(ConfigError, match="dealt out"):
        Route.parse(text)
