"""Schedules without MPI: every element reaches every rank, bytes add up, topologies of any shape."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espresso_mpi import compressors
from espresso_mpi.collectives.layout import ALIGN, Dense, Topology
from espresso_mpi.collectives.schedule import DecodeStep, EncodeStep, MoveStep, bytes_sent, compile_route
from espresso_mpi.types import ROUTES, Route


def topology(*counts):
    edges = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return Topology(tuple(tuple(range(a, b)) for a, b in itertools.pairwise(edges)))


def test_groups_of_uneven_machines():
    uneven = topology(3, 1, 2)
    assert (uneven.size, uneven.lanes, uneven.machine_of) == (6, 1, (0, 0, 0, 1, 2, 2))
    assert uneven.groups("flat") == ((0, 1, 2, 3, 4, 5),)
    assert uneven.groups("intra") == ((0, 1, 2), (3,), (4, 5))
    assert uneven.groups("inter") == ((0, 3, 4),)
    assert topology(2, 2).groups("inter") == ((0, 2), (1, 3))


@given(st.integers(0, 5000), st.integers(1, 9), st.integers(0, 3))
def test_split_covers_without_overlap(n, pieces, idle):
    parts = Dense(0, n).split(pieces, pieces + idle)
    assert len(parts) == pieces + idle
    assert parts[0].start == 0 and parts[-1].stop == n
    assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
    assert all(p.start % ALIGN == 0 or p.start == n for p in parts)
    assert all(p.size == 0 for p in parts[pieces:])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from(sorted(ROUTES)), st.integers(0, 3000))
def test_every_route_ends_whole_on_every_rank(counts, name, n):
    route, machines = Route.parse(name), topology(*counts)
    compressor = compressors.get("onebit") if route.compressed else None
    for rank in range(machines.size):
        steps = compile_route(route, machines, Dense(0, n), "float32", rank, compressor)
        last = steps[-1]
        if n == 0:
            continue
        if isinstance(last, DecodeStep):
            assert (last.region.start, last.region.stop) == (0, n)
        elif isinstance(last, MoveStep):
            covered = sorted((s.start, s.stop) for s in last.move.before if s.size)
            assert covered[0][0] == 0 and covered[-1][1] == n
        for step in steps:
            if isinstance(step, EncodeStep):
                assert sum(p.nbytes for c in step.packed.copies for p in c) >= compressor.nbytes(0)
                assert all(p.nbytes == compressor.nbytes(p.stop - p.start) for c in step.packed.copies for p in c)


@pytest.mark.parametrize(
    "name, expected",
    [
        # 2 machines x 2 ranks, m = 4 n bytes; what one rank sends, from the cost formulas
        ("flat", 2 * 3 / 4),
        ("hierarchical", 1 / 2 + 2 * (1 / 2) * (1 / 2) + 1 / 2),
    ],
)
def test_bytes_match_the_formulas(name, expected):
    n = 64 * 64
    steps = compile_route(Route.parse(name), topology(2, 2), Dense(0, n), "float32", 1)
    assert bytes_sent(steps) == expected * 4 * n


def test_compressed_bytes_match_the_formula():
    n, fp16 = 64 * 64, compressors.get("fp16")
    for name, expected in [
        ("flat-allgather", 3),
        ("flat-alltoall", 3 / 4 + 3 / 4),
        ("hierarchical-allgather", 4 * 2 / 4 + 1 / 2),
    ]:
        steps = compile_route(Route.parse(name), topology(2, 2), Dense(0, n), "float32", 2, fp16)
        assert bytes_sent(steps) == expected * 2 * n, name
