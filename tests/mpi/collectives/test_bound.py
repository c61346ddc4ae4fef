"""``bound``: on every route and layout of nodes, no element of the result is off by more than the bound."""

from __future__ import annotations

import numpy as np
import pytest
from route_tools import ALL, Case, chosen, layouts, open_transport

from espresso_mpi import BoundError, compressors
from espresso_mpi.collectives import ranges
from espresso_mpi.compressors.context import Journey
from espresso_mpi.planner import routes
from espresso_mpi.types import Encode

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(3600 if ALL else 300)]

TREE = [route for route in routes(("cpu",)) if route.compressed][:: 1 if ALL else 3]  # test_routes has them all


def field(rank, n, offset=0.0):
    """A smooth row of a simulation: waves whose phases differ from rank to rank, far from zero if asked."""
    at = np.arange(n) / 40
    return (offset + np.sin(at + rank) + 0.3 * np.cos(3 * at - 2 * rank)).astype(np.float32)


def errors(world, result, n, offset=0.0, total=False):
    wide = sum(field(rank, n, offset).astype(np.float64) for rank in range(world.size))
    return float(np.abs(result.astype(np.float64) - (wide if total else wide / world.size)).max())


def extent(world, n):
    every = [field(rank, n).astype(np.float64) for rank in range(world.size)]
    return max(np.abs(np.diff(x)).max() for x in every), max(np.abs(x).max() for x in every)


class Field(Case):
    """A route run once with a smooth field."""

    def run(self, transport, **_):
        from espresso_mpi.collectives.executor import Program
        from espresso_mpi.collectives.job import Job

        x = field(transport.rank, self.n)
        program = Program(transport, self.route, self.method, self.n, "float32", self.segment_bytes)
        program.run(x, Job("field", self.memory, self.feedback, 7, 0))
        self.outputs.append(x)
        return self


def test_every_route_keeps_the_bound(world):
    """The error that the method promises for the route holds; with 4 bits a pass adds much, with 9 little."""
    n, wrong, closest = 1000, [], 0.0
    for number, nodes in enumerate(layouts(world.size)):
        method = compressors.get(f"bound:bits={(4, 9)[number % 2]}")
        link = open_transport(nodes)
        try:
            for route in chosen(TREE, number):
                (result,) = Field(route, str(method), n, segment_bytes=300).run(link).outputs
                encodes = sum(isinstance(step, Encode) for step in route.steps)
                journey = Journey(encodes, world.size, ranges.excess(link.topology))
                off, allowed = errors(world, result, n), method.largest_error(*extent(world, n), journey)
                closest = max(closest, off / allowed)
                if off > allowed or len(set(world.allgather(result.tobytes()))) > 1:
                    wrong.append(f"{route} on {nodes}: off by {off:.4g} of {allowed:.4g}")
        finally:
            link.close()
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:5])
    assert closest > 0.3, f"the bound is never approached: {closest}"


@pytest.mark.parametrize(
    "dtype, total", [("float32", False), ("float32", True), ("float64", False), ("float16", False)]
)
def test_sessions_keep_what_was_asked_for(world, open_session, dtype, total):
    asked = 0.004 * (world.size if total else 1)
    for nodes in (None, [[rank] for rank in range(world.size)], [list(range(world.size - 1)), [world.size - 1]]):
        session = open_session(compressor=f"bound:abs={asked},bits=8", min_bytes=0, nodes=nodes)
        x = field(world.rank, 3000).astype(dtype)
        inputs = [each.astype(np.float64) for each in world.allgather(x)]
        expected = sum(inputs) / (1 if total else world.size)
        result = session.allreduce(x, op="sum") if total else session.sync(x)
        off = float(np.abs(np.asarray(result, np.float64) - expected).max())
        assert off <= asked, f"off by {off}"


def test_rel_is_of_the_largest_magnitude(world, open_session):
    session = open_session(compressor="bound:rel=0.002,bits=9", min_bytes=0)
    x = field(world.rank, 3000) * np.float32(1000 * (world.rank + 1))
    inputs = [each.astype(np.float64) for each in world.allgather(x)]
    session.sync(x)
    assert np.abs(x - sum(inputs) / world.size).max() <= 0.002 * max(np.abs(each).max() for each in inputs)


CASES = {
    "rough": (lambda x: x[::-1] * np.where(np.arange(x.size) % 2, -1, 1), "bits=9 in place of bits=8"),
    "far from zero": (lambda x: x + np.float32(1e6), "a larger bound"),
}


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_one_rank_beyond_the_bound_is_an_error_on_all(world, open_session, what, nonfinite):
    change, text = CASES[what]
    session = open_session(compressor="bound:abs=0.01,bits=8", min_bytes=0, nonfinite=nonfinite)
    x = field(world.rank, 3000)
    for _ in range(3):  # calls that are made again are refused as well
        session.sync({"field": x.copy()})
    given = (change(x) if world.rank == world.size - 1 else x).astype(np.float32)
    with pytest.raises(BoundError, match=text) as caught:
        session.sync({"field": given.copy()})
    assert "'field'" in str(caught.value) and f"rank {world.size - 1}" in str(caught.value)
    session.sync({"field": x})
    assert errors(world, x, 3000) <= 0.01
