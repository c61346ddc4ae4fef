"""The halves of routes, compiled: together they are the route, and leave every rank its part."""

from __future__ import annotations

import pytest

from espresso_mpi import compressors
from espresso_mpi.collectives.data.layout import Dense, Topology
from espresso_mpi.collectives.halves import by_nodes, check_half, compile_half, default_half_route
from espresso_mpi.collectives.program import DecodeStep, EncodeStep, MoveStep, bytes_sent, compile_route
from espresso_mpi.errors import ConfigError
from espresso_mpi.planner import routes
from espresso_mpi.types import ROUTES, Route

PAIRS = Topology(((0, 1), (2, 3)))
N = 4 * 64 * 3


def halved(route, topology):
    try:
        check_half("allgather", route, topology)
    except ConfigError:
        return False
    return True


def test_which_routes_have_halves():
    """Those with dense data between what scatters and what joins, on all levels."""
    found = {str(route) for route in routes(("cpu",)) if halved(route, PAIRS)}
    named = {name for name in ROUTES if str(Route.parse(name)) in found}
    assert named == {"flat-alltoall", "hierarchical-alltoall", "hierarchical-alltoall-packed"}
    assert "reduce_scatter@flat/encode@cpu/allgather@flat/decode@cpu" in found
    assert not any("reduce@" in route or "gather@flat/broadcast" in route or "allreduce" in route for route in found)


@pytest.mark.parametrize("linear", [False, True])
def test_the_halves_are_the_route(linear):
    """Where all parts are multiples of 64 elements: the same steps, the same bytes, the same regions."""
    compressor = compressors.get("randomk" if linear else "int8")
    for route in routes(("cpu",), linear=linear):
        if not halved(route, PAIRS):
            continue
        owned = set()
        for rank in range(4):
            arguments = (route, PAIRS, N, "float32", rank, compressor)
            first, second = compile_half("reduce_scatter", *arguments), compile_half("allgather", *arguments)
            whole = compile_route(route, PAIRS, Dense(0, N), "float32", rank, compressor)
            together = first.steps + second.steps
            assert [type(step) for step in together] == [type(step) for step in whole], route
            assert bytes_sent(together) == bytes_sent(whole)
            points = [(s.region.start, s.region.stop) for s in together if isinstance(s, EncodeStep | DecodeStep)]
            assert points == [(s.region.start, s.region.stop) for s in whole if isinstance(s, EncodeStep | DecodeStep)]
            assert first.owned == second.owned and {region.size for region in first.owned} == {N // 4}
            owned.add(first.owned)
            encodes = [s.point for s in second.steps if isinstance(s, EncodeStep)]
            assert encodes == list(range(len(encodes))), "they are counted anew"
        (regions,) = owned
        assert sorted(region.start for region in regions) == [0, N // 4, N // 2, 3 * N // 4]
        assert by_nodes(route) == ([region.start for region in regions] != [0, N // 4, N // 2, 3 * N // 4])


def test_parts_begin_anywhere():
    for topology in (PAIRS, Topology(((0, 1, 2),)), Topology(((0, 1), (2, 3), (4, 5)))):
        size = topology.size
        route = Route.parse(default_half_route(topology))
        found = [
            compile_half("reduce_scatter", route, topology, 7 * size, "float32", rank, compressors.get("onebit"))
            for rank in range(size)
        ]
        assert sorted(region.start for region in found[0].owned) == [7 * rank for rank in range(size)]
        assert len({len([s for s in one.steps if isinstance(s, MoveStep)]) for one in found}) == 1


def test_nodes_of_unequal_size():
    uneven = Topology(((0, 1, 2), (3,)))
    assert default_half_route(uneven) == "flat-alltoall"
    with pytest.raises(ConfigError, match=r"unequal parts on nodes of 3 \+ 1 ranks"):
        check_half("reduce_scatter", Route.parse("hierarchical-alltoall"), uneven)
