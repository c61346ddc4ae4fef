"""Schedules without MPI: every element reaches every rank, bytes add up, topologies of any shape."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espresso_mpi import compressors
from espresso_mpi.collectives.data.layout import Dense, Topology
from espresso_mpi.collectives.ops.base import operations
from espresso_mpi.collectives.program import DecodeStep, EncodeStep, MoveStep, UpdateStep, bytes_sent, compile_route
from espresso_mpi.planner import routes
from espresso_mpi.sharing import way_of
from espresso_mpi.types import ALIGN, CLOSING, SUMS, Op, Route


def topology(*counts):
    edges = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return Topology(tuple(tuple(range(a, b)) for a, b in itertools.pairwise(edges)))


def test_groups_of_uneven_nodes():
    uneven = topology(3, 1, 2)
    assert (uneven.size, uneven.local_size, uneven.node_of) == (6, 1, (0, 0, 0, 1, 2, 2))
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


TREE = routes(("cpu",), linear=True)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from(TREE), st.integers(0, 3000))
def test_every_route_ends_whole_on_every_rank(counts, route, n):
    nodes = topology(*counts)
    compressor = compressors.get("fp16") if route.compressed else None
    for rank in range(nodes.size):
        steps = compile_route(route, nodes, Dense(0, n), "float32", rank, compressor)
        last = steps[-1]
        if n and isinstance(last, DecodeStep):
            assert last.region == Dense(0, n)
        elif n and isinstance(last, MoveStep):
            after = operations()[last.op].advance(last.move.context, last.move.before)
            assert after[last.move.index] == Dense(0, n)
        for step in steps:
            if isinstance(step, EncodeStep):
                parts = [p for c in step.packed.copies for p in c]
                assert sum(p.size for p in parts) == step.region.size
                assert all(p.nbytes == compressor.nbytes(p.size) for p in parts if p.size)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.sampled_from(TREE))
def test_all_ranks_take_the_same_turns(counts, route):
    """Summaries, updates and collectives stand at the same places of every rank's schedule."""
    nodes, compressor = topology(*counts), compressors.get("powersgd")
    compressor = compressor if route.compressed else None
    kinds = set()
    for rank in range(nodes.size):
        steps = compile_route(route, nodes, Dense(0, 900), "float32", rank, compressor)
        kinds.add(tuple(getattr(s, "op", type(s).__name__) for s in steps))
    assert len(kinds) == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.sampled_from([r for r in TREE if r.compressed]))
def test_what_a_residual_will_add_to_the_mean(counts, route):
    """The ranks that hold an element before an encode stand together for the whole mean of that element."""
    nodes, n = topology(*counts), 300
    held = {}
    for rank in range(nodes.size):
        for step in compile_route(route, nodes, Dense(0, n), "float32", rank, compressors.get("fp16")):
            if isinstance(step, EncodeStep):
                share = held.setdefault(step.point, np.zeros(n))
                share[step.region.start : step.region.stop] += step.weight
                assert step.who <= rank
    for share in held.values():
        assert np.allclose(share, 1)


def encodes(text, *counts, n=256, rank=0):
    steps = compile_route(Route.parse(text), topology(*counts), Dense(0, n), "float32", rank, compressors.get("fp16"))
    return [step for step in steps if isinstance(step, EncodeStep)]


def test_ranks_that_encode_the_same_are_known():
    """2 x 2 ranks: after both sums every node holds the same halves, and writes the same bits for them."""
    text = "reduce_scatter@intra/reduce_scatter@inter/allgather@inter/encode@cpu/allgather@intra/decode@cpu"
    found = [encodes(text, 2, 2, rank=rank)[0] for rank in range(4)]
    assert [step.who for step in found] == [0, 1, 0, 1]
    assert [step.weight for step in found] == [0.5] * 4
    first = encodes("encode@cpu/alltoall@flat/decode@cpu/encode@cpu/allgather@flat/decode@cpu", 2, 2, rank=3)
    assert [(step.who, step.weight) for step in first] == [(3, 0.25), (3, 1.0)]
    uneven = encodes("reduce@intra/encode@cpu/allgather@inter/decode@cpu/broadcast@intra", 3, 1, rank=3)
    assert [(step.who, step.weight) for step in uneven] == [(3, 0.5)]


def test_roots_spread_over_the_nodes():
    nodes = topology(2, 2, 2)
    assert [nodes.root("inter", group) for group in nodes.groups("inter")] == [0, 1]
    assert {nodes.root(level, group) for level in ("flat", "intra") for group in nodes.groups(level)} == {0}


@pytest.mark.parametrize(
    "text, updates",
    [
        ("encode@cpu/allreduce@flat/decode@cpu", True),
        ("reduce_scatter@intra/encode@cpu/allreduce@inter/decode@cpu/allgather@intra", True),
        ("encode@cpu/reduce@flat/broadcast@flat/decode@cpu", True),
        ("encode@cpu/reduce_scatter@intra/reduce_scatter@inter/allgather@inter/allgather@intra/decode@cpu", True),
        ("encode@cpu/reduce_scatter@flat/decode@cpu/allgather@flat", False),
        ("encode@cpu/reduce_scatter@intra/alltoall@inter/allgather@inter/allgather@intra/decode@cpu", False),
        ("encode@cpu/allgather@flat/decode@cpu", False),
    ],
)
def test_methods_update_where_the_sum_comes_back(text, updates):
    """To every rank that encoded, before it is decoded; else to none."""
    for rank in range(4):
        steps = compile_route(
            Route.parse(text), topology(2, 2), Dense(0, 900), "float32", rank, compressors.get("powersgd")
        )
        found = [step for step in steps if isinstance(step, UpdateStep)]
        assert len(found) == updates
        encode = next(step for step in steps if isinstance(step, EncodeStep))
        for step in found:
            assert [(p.start, p.stop) for p in step.packed.copies[0]] == [
                (p.start, p.stop) for p in encode.packed.copies[0]
            ]


@pytest.mark.parametrize(
    "name, expected",
    [
        # 2 nodes x 2 ranks, m = 4 n bytes; what one rank sends, from the cost formulas
        ("flat", 2 * 3 / 4),
        ("hierarchical", 1 / 2 + 2 * (1 / 2) * (1 / 2) + 1 / 2),
        # of four ranks the first is the root: in the first half it sends 3/4, in the second all; the others send all
        # to the sum, and 2/3 of a third to each other
        ("reduce@flat/broadcast@flat", 1 + 2 / 3),
    ],
)
def test_bytes_match_the_formulas(name, expected):
    n = 64 * 64 * 3
    steps = compile_route(Route.parse(name), topology(2, 2), Dense(0, n), "float32", 1)
    assert bytes_sent(steps) == expected * 4 * n


def test_compressed_bytes_match_the_formula():
    n, fp16 = 64 * 64, compressors.get("fp16")
    for name, expected in [
        ("flat-allgather", 3),
        ("flat-alltoall", 3 / 4 + 3 / 4),
        ("hierarchical-allgather", 4 * 2 / 4 + 1 / 2),
        ("encode@cpu/reduce_scatter@flat/allgather@flat/decode@cpu", 3 / 4 + 3 / 4),
        ("encode@cpu/alltoall@intra/alltoall@inter/allgather@inter/allgather@intra/decode@cpu", 1 / 2 + 1 / 2 + 1 + 2),
        ("encode@cpu/gather@intra/allgather@inter/broadcast@intra/decode@cpu", 2 + 4),  # rank 2 is a node's root
    ]:
        steps = compile_route(Route.parse(name), topology(2, 2), Dense(0, n), "float32", 2, fp16)
        assert bytes_sent(steps) == expected * 2 * n, name


def test_every_operation_has_a_spec_and_routes_know_what_it_does():
    assert set(operations()) == set(get_args(Op)), "add its name to Op in espresso_mpi/types/routes.py"
    known = SUMS | set(CLOSING) | set(CLOSING.values())
    assert set(operations()) == known, "add it to SUMS or CLOSING in espresso_mpi/types/routes.py"


@pytest.mark.parametrize("members", [1, 2, 3, 5])
def test_references_say_what_the_operations_do(members):
    """On data that says where it comes from."""
    inputs = [np.arange(6.0) + 10 * member for member in range(members)]
    for name, op in operations().items():
        outputs = op.reference(inputs)
        assert len(outputs) == members
        total = sum(x.sum() for x in inputs)
        held = np.concatenate(outputs).sum()
        if name in ("reduce_scatter", "alltoall", "reduce", "gather"):
            assert np.isclose(held, total)


def test_payloads_share_messages_if_all_ranks_get_one_sum_of_them():
    summed, scattered = (
        Route.parse("flat-linear"),
        Route.parse("encode@cpu/reduce_scatter@flat/allgather@flat/decode@cpu"),
    )
    ways = [way_of(summed, compressors.get(name)) for name in ("powersgd", "count_sketch", "acpsgd", "fp16", "thc")]
    assert ways[0] == ways[1] and len(set(ways)) == 4, "of one element type, and agreed on alike"
    assert (
        way_of(scattered, compressors.get("powersgd")) is None is way_of(Route.parse("flat"), compressors.get("fp16"))
    )
    gathered = Route.parse("flat-allgather")
    assert way_of(gathered, compressors.get("int8")) == way_of(gathered, compressors.get("onebit"))
