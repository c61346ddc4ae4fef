"""The decision tree: counted by its grammar, counted by listing, and every route run in a simulation of all ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from route_tools import Case, Exact, exact_mean

from espresso_mpi.collectives.data.layout import Topology
from espresso_mpi.compressors import register, unregister
from espresso_mpi.errors import ConfigError
from espresso_mpi.planner import routes
from espresso_mpi.types import ROUTES, Collective, Decode, Encode, Route


def counts(d):
    """The grammar of the paper, with d kinds of devices: how many ways there are from each place of the tree."""
    t1 = 1 + d**2
    t2 = d + d * t1
    t5 = t1 + d * t2
    t3 = t1 + 2 * t5
    t4 = t2 + 2 * (t2 + d * t5)
    flat = 1 + 2 * t1 + d * (d + 2 * t2)
    hierarchical = 2 * (t3 + d * t4) + 2 * d * (t4 + d * (t3 + d * t4))
    return {"T1": t1, "T2": t2, "T3": t3, "T4": t4, "T5": t5, "flat": flat, "hierarchical": hierarchical}


def linear_counts(d):
    """The same with sums of payloads: L4 is T4 where the payload is one contribution."""
    t = counts(d)
    l4 = 2 * t["T2"] + 4 * (t["T2"] + d * t["T5"])
    between = t["T3"] + d * l4
    flat = 1 + 2 * t["T1"] + d * (2 * d + 4 * t["T2"])
    return {"flat": flat, "hierarchical": 2 * between + d * (2 * t["T4"] + 2 * l4 + 4 * d * between)}


def test_the_grammar_gives_the_figures_of_the_paper():
    assert counts(2) == {"T1": 5, "T2": 12, "T3": 63, "T4": 152, "T5": 29, "flat": 63, "hierarchical": 4278}
    assert (counts(1)["flat"], counts(1)["hierarchical"]) == (12, 162)


@pytest.mark.parametrize("devices, total", [(("cpu",), 174), (("gpu",), 174), (("cpu", "gpu"), 4341)])
def test_the_tree_has_as_many_routes_as_its_grammar(devices, total):
    found = routes(devices)
    assert len(found) == len(set(found)) == total
    kinds = Counter("flat" if route.levels == {"flat"} else "hierarchical" for route in found)
    expected = counts(len(devices))
    assert kinds == {kind: expected[kind] for kind in ("flat", "hierarchical")}
    assert not any(route.sums_payloads for route in found)


@pytest.mark.parametrize("devices, total", [(("cpu",), 433), (("gpu", "cpu"), 14017)])
def test_the_linear_branch_has_as_many_routes_as_its_grammar(devices, total):
    found = routes(devices, linear=True)
    assert len(found) == len(set(found)) == total
    kinds = Counter("flat" if route.levels == {"flat"} else "hierarchical" for route in found)
    assert kinds == linear_counts(len(devices))
    assert {route for route in found if not route.sums_payloads} == set(routes(devices))


def test_routes_by_number_of_encodes():
    """The figures of the paper for two kinds of devices, and 9 routes without any."""
    found = Counter(sum(isinstance(step, Encode) for step in route.steps) for route in routes())
    assert found == {0: 9, 1: 236, 2: 1152, 3: 1920, 4: 1024}


def test_every_device_at_every_step():
    """The routes on two kinds of devices are those on one with every choice at every encode and decode."""
    coded = Counter(sum(not isinstance(step, Collective) for step in route.steps) for route in routes(("cpu",)))
    assert sum(2**steps * count for steps, count in coded.items()) == 4341
    assert {route.on("cpu") for route in routes()} == set(routes(("cpu",)))
    assert {
        step.device for route in routes(("gpu",)) for step in route.steps if isinstance(step, (Encode, Decode))
    } == {"gpu"}


def test_every_route_has_a_spec_that_parses_back():
    found = routes(linear=True)
    assert all(Route.parse(str(route)) == route for route in found)
    assert len({str(route) for route in found}) == len(found)


def test_the_named_routes_are_members():
    plain, linear = set(routes()), set(routes(linear=True))
    for name in ROUTES:
        assert Route.parse(name) in (linear if name.endswith("linear") else plain), name


@pytest.mark.parametrize("devices", [(), ("cpu", "cpu"), ("tpu",), "cpu"])
def test_devices_that_there_are_not(devices):
    with pytest.raises(ConfigError, match="expected one or both of 'cpu', 'gpu'"):
        routes(devices)


@pytest.fixture
def exact():
    register(Exact)
    yield Exact.name
    unregister(Exact.name)


@pytest.mark.parametrize(
    "nodes",
    [[[0, 1], [2, 3]], [[0, 1], [2, 3], [4, 5]], [[0, 1], [2]], [[0, 1, 2], [3], [4, 5]], [[0, 1, 2]], [[0]]],
)
@pytest.mark.parametrize("n", [5, 257])
def test_the_simulation_gives_the_mean_along_every_route(exact, nodes, n):
    """What the executor is compared with: NaN wherever a rank has handed its data on, so nothing stale is used."""
    topology = Topology(tuple(map(tuple, nodes)))
    expected = exact_mean(topology.size, 0, n)
    for route in routes(("cpu",), linear=True):
        results = Case(route, exact, n).simulated(topology)
        assert all(np.abs(result - expected).max() < 1e-6 for result in results), str(route)
        assert all(np.array_equal(result, results[0]) for result in results), str(route)
