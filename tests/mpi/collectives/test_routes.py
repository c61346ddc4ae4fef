"""Every route of the decision tree, on nodes of every shape: the mean, the simulation's bits, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
from route_tools import ALL, Case, Exact, chosen, exact_mean, layouts, open_transport, problems, values

from espresso_mpi.collectives.executor import Program
from espresso_mpi.collectives.job import Job
from espresso_mpi.collectives.messages import connection
from espresso_mpi.collectives.ops import allreduce
from espresso_mpi.compressors import register, unregister
from espresso_mpi.errors import ConfigError
from espresso_mpi.feedback import NO_FEEDBACK, Feedback
from espresso_mpi.planner import routes
from espresso_mpi.types import Route

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(3600 if ALL else 300)]

TREE = routes(("cpu",))
LINEAR = [route for route in routes(("cpu",), linear=True) if route.sums_payloads]
SHORT = 5
LONG = 257


@pytest.fixture
def exact():
    register(Exact)
    yield Exact.name
    unregister(Exact.name)


@pytest.fixture
def pieces(monkeypatch):
    """Sums and broadcasts cut small arrays as they cut large ones."""
    monkeypatch.setattr(allreduce, "DIRECT_MAX", 0)


def check(world, nodes, cases, **settings):
    """Run all cases on one layout; the same outcome on all ranks."""
    link = open_transport(nodes, **settings)
    try:
        wrong = problems(world, link, [case.run(link) for case in cases])
    finally:
        link.close()
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong[:10])


@pytest.mark.parametrize("n, window_bytes", [(SHORT, 0), (LONG, 8192)])
def test_every_route_gives_the_mean(world, exact, n, window_bytes):
    """An identity compressor in the place of a real one, against the float64 mean."""
    for number, nodes in enumerate(layouts(world.size), 1 if n == SHORT else 0):  # long ones see all on a layout
        cases = [Case(route, exact, n) for route in chosen((*TREE, *LINEAR), number)]
        check(world, nodes, cases, window_bytes=window_bytes)


def test_every_route_in_pieces(world, exact, pieces):
    """As large tensors travel: sums in two rounds, broadcasts by scattering, messages and windows in several parts."""
    for number, nodes in enumerate(layouts(world.size)):
        cases = [Case(route, exact, 700) for route in chosen((*TREE, *LINEAR), number)]
        check(world, nodes, cases, window_bytes=0, message_bytes=200)


THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    "method",
    [
        "onebit",
        "topk:ratio=0.1",
        pytest.param("randomk:ratio=0.2", marks=THOROUGH),  # to routes as topk
        "int8:rounding=stochastic",
    ],
)
def test_every_route_loses_nothing(world, method):
    """Given = received + what the residuals hold; the same bits everywhere, and those of the simulation."""
    everywhere = method == "onebit"  # the others see most routes on one of the layouts
    for number, nodes in enumerate(layouts(world.size), 0 if everywhere else 1):
        cases = [Case(route, method, LONG, steps=2) for route in chosen(TREE, number) if route.compressed]
        check(world, nodes, cases)


@pytest.mark.parametrize(
    "method",
    [
        "thc:block=64",
        pytest.param("acpsgd", marks=THOROUGH),  # to routes as powersgd
        "powersgd",
        pytest.param("randomk:ratio=0.2", marks=THOROUGH),  # no summary is agreed on, as with `exact`
        "topk_chunked:ratio=0.3,chunk=16",
    ],
)
def test_every_route_that_sums_payloads(world, method):
    """The linear branch: keys in common, agreed summaries, integers, what methods update from the aggregate."""
    for number, nodes in enumerate(layouts(world.size), 1):
        check(world, nodes, [Case(route, method, LONG, steps=2) for route in chosen(LINEAR, number)])


def test_what_ef21_keeps_belongs_to_the_route(world, exact):
    """Differences to what was sent are sent, and added to what was decoded: of nothing lost the mean, at every step."""
    for number, nodes in enumerate(layouts(world.size), 1):
        ways = [route for route in chosen((*TREE, *LINEAR), number) if route.compressed]
        check(world, nodes, [Case(route, exact, LONG, steps=3, feedback=Feedback("ef21")) for route in ways])


@pytest.mark.parametrize("method", ["onebit", "thc:block=64"])
def test_segments_go_every_way(world, method, pieces):
    """Several segments under way at once, each along the whole route."""
    ways = [r for r in (LINEAR if method.startswith("thc") else TREE) if r.compressed]
    segment_bytes = 30 if method == "onebit" else 300
    ways = ways if ALL else ways[world.size % 3 :: 3]
    for number, nodes in enumerate(layouts(world.size), 1):
        check(world, nodes, [Case(route, method, 900, segment_bytes, 2) for route in chosen(ways, number)])


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float16", 1e-2)])
def test_dense_routes_carry_every_type(world, dtype, tolerance):
    for nodes in layouts(world.size):
        link = open_transport(nodes)
        off = []
        for route in (route for route in TREE if not route.compressed):
            x = values(world.rank, 0, LONG, dtype)
            given = x.view(np.uint16) if dtype == "float16" else x
            Program(link, route, None, LONG, dtype).run(given, Job("x", {}, NO_FEEDBACK, 0, 0))
            expected = np.mean([values(r, 0, LONG, dtype).astype(np.float64) for r in range(world.size)], axis=0)
            off.append(np.abs(x - expected).max())
        link.close()
        assert max(off) <= tolerance


def test_tensors_beyond_a_message(world, exact, monkeypatch):
    """What 2³¹ bytes would do: messages inside and between nodes, and the window, are all cut."""
    monkeypatch.setattr(connection, "MESSAGE_MAX", 1000)
    for nodes in layouts(world.size):
        for window_bytes in (0, 4096):
            cases = [Case(route, exact, 5003) for route in (*TREE, *LINEAR)[::17]]
            check(world, nodes, cases, window_bytes=window_bytes, message_bytes=700)


def test_uneven_nodes_need_lanes(world):
    """Between nodes only as many ranks of each take part as the smallest has: a session refuses the other routes."""
    if world.size < 3:
        return
    from espresso_mpi.collectives.program import check_route

    link = open_transport([range(world.size - 1), [world.size - 1]])
    for route in (*TREE, *LINEAR):
        check_route(route, link.topology)
    with pytest.raises(ConfigError, match="nothing scattered"):
        check_route(Route.parse("allreduce@inter/allreduce@intra"), link.topology)
    link.close()


def test_a_session_takes_any_route(world, open_session):
    """By spec, as users give it."""
    n = 1000
    for text in (
        "reduce@intra/encode@cpu/gather@inter/broadcast@inter/broadcast@intra/decode@cpu",
        "encode@cpu/alltoall@intra/alltoall@inter/allgather@inter/allgather@intra/decode@cpu",
        "encode@cpu/reduce_scatter@intra/reduce@inter/broadcast@inter/allgather@intra/decode@cpu",
    ):
        for nodes in layouts(world.size):
            session = open_session(compressor="fp16", route=text, nodes=nodes)
            grad = values(world.rank, 0, n)
            session.sync(grad)
            assert np.abs(grad - exact_mean(world.size, 0, n)).max() < 5e-3
            assert all(np.array_equal(grad, other) for other in world.allgather(grad))
