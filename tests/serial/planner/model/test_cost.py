"""What the planner thinks a route costs, against what the executor would do: sizes, calls and copies of all ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from espresso_mpi import compressors
from espresso_mpi.collectives.data.layout import Dense, Packed, Topology
from espresso_mpi.collectives.ops.base import operations as collectives
from espresso_mpi.collectives.program import DecodeStep, EncodeStep, IdleStep, MoveStep, compile_route, segments
from espresso_mpi.errors import ConfigError
from espresso_mpi.planner import routes
from espresso_mpi.planner.model import cost
from espresso_mpi.planner.model.cost import Prices, Shape, operations, price_table, walk
from espresso_mpi.planner.model.curve import Curve
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.types import ALIGN, CLOSING, SUMS, Collective, Op, Route, Strategy

BYTES, CALLS = Curve.line(0, 1), Curve.line(1, 0)
KEYS = [(op, level, alone) for op in get_args(Op) for level in ("flat", "intra", "inter") for alone in (False, True)]


def topology(nodes, ranks):
    return Topology(tuple(tuple(range(h * ranks, (h + 1) * ranks)) for h in range(nodes)))


def uniform(nodes, ranks, spec, moves=BYTES, codecs=BYTES, copies=BYTES, **more):
    """A profile in which everything of a kind takes the same: its size, or one."""
    return Profile(
        nodes, ranks, {(spec, d, direction): codecs for d in ("cpu", "gpu") for direction in ("encode", "decode")},
        {key: moves for key in KEYS if not key[2] or key[1] == "inter"}, {"to_host": copies, "to_gpu": copies},
        **{"check": Curve.line(0, 0), **more},
    )  # fmt: skip


def strategy(route, spec):
    return Strategy(spec if route.compressed else "none", route)


# --- the executor's side ----------------------------------------------------------------------------------------------


def schedule(route, cluster, rank, n, method):
    """One entry for every step of the route: what this rank's schedule has for it."""
    steps = compile_route(route, cluster, Dense(0, n), "float32", rank, method if route.compressed else None)
    wanted = (EncodeStep, DecodeStep, MoveStep, IdleStep)
    found = [s for s in steps if isinstance(s, wanted) and not getattr(s, "of_summary", False)]
    assert len(found) == len(route.steps)
    return found


def parts_of(packed):
    return [part for copy in packed.copies for part in copy if part.size]


def held(state):
    if isinstance(state, Packed):
        return sum(part.nbytes for part in parts_of(state))
    return 4 * state.size


def measured(entry):
    """(size, calls) of what a rank does: bytes that it puts in, or elements in all payloads and their number."""
    if isinstance(entry, IdleStep):
        return 0, 0
    if isinstance(entry, MoveStep):
        move = entry.move
        return held(move.before[move.context.root if entry.op == "broadcast" else move.index]), 1
    parts = parts_of(entry.packed)
    return sum(part.size for part in parts), len(parts)


def executed(route, cluster, n, method, ranks=None):
    """For every step with something to do: what it is, and the busiest rank's size and calls."""
    every = [schedule(route, cluster, rank, n, method) for rank in ranks or range(cluster.size)]
    found = []
    for step, *entries in zip(route.steps, *every):
        if isinstance(step, Collective) and len(cluster.groups(step.level)[0]) == 1:
            continue
        sizes = [measured(entry) for entry in entries]
        found.append((str(step), max(size for size, _ in sizes), max(calls for _, calls in sizes)))
    return found


def planned(route, nodes, ranks, n, spec):
    """The same in the planner's eyes."""
    chosen = strategy(route, spec)
    sizes = operations(chosen, n, uniform(nodes, ranks, spec))
    calls = operations(chosen, n, uniform(nodes, ranks, spec, CALLS, CALLS))
    return [(a.what, a.seconds, b.seconds) for a, b in zip(sizes, calls)]


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nodes, ranks, spec",
    [(2, 2, "onebit"), (2, 3, "topk:ratio=0.01"), (4, 1, "fp16"), (1, 4, "onebit"), (3, 2, "fp16")],
)
def test_sizes_and_calls_are_those_of_the_schedule(nodes, ranks, spec):
    """Along every route of the tree, on the busiest rank of each step, where everything divides evenly."""
    n, method = ALIGN * nodes * ranks * 8, compressors.get(spec)
    linear = spec == "fp16"
    for route in routes(("cpu",), linear=linear):
        expected = executed(route, topology(nodes, ranks), n, method)
        assert planned(route, nodes, ranks, n, spec) == expected, str(route)


def test_sizes_and_calls_on_64_ranks():
    """A part of the tree; rank 0 is the root of all roots, and so the busiest."""
    n, method = ALIGN * 64 * 4, compressors.get("onebit")
    for route in routes(("cpu",))[::9]:
        expected = executed(route, topology(8, 8), n, method, ranks=[0])
        assert planned(route, 8, 8, n, "onebit") == expected, str(route)


@pytest.mark.parametrize("n", [100_003, 77_777])
def test_sizes_that_do_not_divide_differ_by_alignment_alone(n):
    method, slack = compressors.get("onebit"), 4 * ALIGN * 16
    for route in routes(("cpu",))[::3]:
        expected = executed(route, topology(2, 3), n, method)
        for (what, size, calls), (other, exact, exact_calls) in zip(planned(route, 2, 3, n, "onebit"), expected):
            assert (what, calls) == (other, exact_calls)
            assert size == pytest.approx(exact, rel=0.02, abs=slack), (str(route), what)


@pytest.mark.parametrize("nodes, ranks", [(2, 2), (3, 2), (2, 3)])
def test_alone_is_where_one_rank_of_each_node_has_something(nodes, ranks):
    cluster, method = topology(nodes, ranks), compressors.get("fp16")
    n = ALIGN * nodes * ranks * 4
    for route in routes(("cpu",), linear=True)[::2]:
        every = [schedule(route, cluster, rank, n, method) for rank in range(cluster.size)]
        slots = {slot.what: slot for slot in walk(route, Shape(nodes, ranks, "cpu"))}
        for position, step in enumerate(route.steps):
            if isinstance(step, Collective) and step.level == "inter":
                moves = [entries[position].move for entries in every]
                busy = {move.group for move in moves if any(map(held, move.before))}
                assert slots[str(step)].alone == (len(busy) == 1), (str(route), str(step))


def test_what_a_rank_sends_follows_from_what_it_puts_in():
    """The table of the paper's terms: (p-1)·m·c(L/p) of an alltoall, and so on, beside the executor's own count."""
    nodes, ranks, method = 2, 2, compressors.get("fp16")
    cluster, n = topology(nodes, ranks), ALIGN * 64 * 16
    shares = {
        "allreduce": lambda p: 2 * (p - 1) / p,
        "reduce_scatter": lambda p: (p - 1) / p,
        "alltoall": lambda p: (p - 1) / p,
        "allgather": lambda p: p - 1,
    }
    seen = set()
    for route in routes(("cpu",), linear=True)[::3]:
        bytes_of = {what: size for what, size, _ in planned(route, nodes, ranks, n, "fp16")}
        for step, entry in zip(route.steps, schedule(route, cluster, 0, n, method)):
            if isinstance(step, Collective) and step.op in shares:
                sent = collectives()[step.op].sent(entry.move)
                expected = shares[step.op](len(entry.move.group)) * bytes_of[str(step)]
                assert sent == pytest.approx(expected, rel=0.01), (str(route), str(step))
                seen.add((step.op, isinstance(entry.move.before[0], Packed)))
    assert seen == {(op, packed) for op in shares for packed in (False, True)} - {("alltoall", False)}


def test_segments_are_those_of_the_executor():
    method, profile = compressors.get("onebit"), uniform(2, 2, "onebit", segment_bytes=1 << 16)
    for n in (1, 100, 10_000_000, 3_000_001):
        for by in (None, method):
            nbytes = 4 * n if by is None else by.nbytes(n)
            pieces = segments(n, nbytes, topology(2, 2), 1 << 16)
            count, prices = Prices(profile, n, by).segments()
            assert (count, prices.n) == (len(pieces), pieces[0].size)


# --- copies -----------------------------------------------------------------------------------------------------------


def copies(route, cluster, n, method):
    """Bytes that rank 0 copies between the devices, told from the schedule as the executor goes about it."""
    where = payload = "gpu"
    found = []
    for entry in schedule(route, cluster, 0, n, method):
        if isinstance(entry, EncodeStep):
            if where != entry.device:
                found.append((f"tensor to {entry.device}", 4 * entry.region.size))
            where = payload = entry.device
        elif isinstance(entry, DecodeStep):
            if payload != entry.device:
                found.append((f"payload to {entry.device}", sum(part.nbytes for part in parts_of(entry.packed))))
            where = entry.device
    return found + ([("tensor to gpu", 4 * n)] if where != "gpu" else [])


def test_copies_between_devices():
    n, method, profile = ALIGN * 4 * 8, compressors.get("onebit"), uniform(2, 2, "onebit")
    for route in routes()[:: 4341 // 300]:
        found = operations(strategy(route, "onebit"), n, profile, "gpu")
        told = [(one.what, one.seconds) for one in found if " to " in one.what]
        assert told == copies(route, topology(2, 2), n, method), str(route)
        assert all(one.resource == "cpu" for one in found if " to " in one.what)


def test_tensors_in_host_memory_are_never_copied():
    profile = uniform(2, 2, "onebit", copies=Curve.line(1, 1))
    for route in routes(("cpu",)):
        assert not any(" to " in one.what for one in operations(strategy(route, "onebit"), 4096, profile))


# --- prices -----------------------------------------------------------------------------------------------------------


def test_every_route_has_a_price():
    """All 4341, on 8 x 8 ranks with a GPU each: one operation a step besides copies, each on its resource."""
    profile = uniform(8, 8, "onebit", Curve.line(1e-5, 1e-9), Curve.line(1e-5, 1e-9), Curve.line(1e-5, 1e-9))
    for route in routes():
        found = operations(strategy(route, "onebit"), 1 << 20, profile, "gpu")
        steps = [one for one in found if " to " not in one.what]
        assert [one.what for one in steps] == [str(step) for step in route.steps]
        for step, one in zip(route.steps, steps):
            flat = {"flat": "inter", "intra": "intra", "inter": "inter"}
            assert one.resource == (flat[step.level] if isinstance(step, Collective) else step.device)
            assert 0 < one.seconds < math.inf


def test_a_single_node_has_one_network():
    flat = operations(Strategy("none", "flat"), 64, uniform(1, 4, "onebit"))
    inside = operations(Strategy("none", "hierarchical"), 64, uniform(1, 4, "onebit"))
    assert [one.resource for one in flat] == ["intra"]
    assert [one.what for one in inside] == [
        "reduce_scatter@intra", "allgather@intra"
    ]  # fmt: skip
    assert operations(Strategy("none", "flat"), 64, uniform(1, 1, "onebit")) == ()


def test_the_right_curve_is_asked():
    """Operations that are priced by prime numbers: every operation shows which curve it was."""
    costs = {key: float(number + 100) for number, key in enumerate(KEYS)}
    base = uniform(2, 2, "onebit")
    profile = replace(base, moves={key: Curve.line(costs[key], 0) for key in base.moves})
    route = Route.parse("reduce@intra/encode@cpu/alltoall@inter/decode@cpu/allgather@inter/broadcast@intra")
    told = {one.what: one.seconds for one in operations(strategy(route, "onebit"), 4096, profile)}
    assert told["reduce@intra"] == costs["reduce", "intra", False]
    assert told["alltoall@inter"] == costs["alltoall", "inter", True]
    assert told["allgather@inter"] == costs["allgather", "inter", True]
    assert told["broadcast@intra"] == costs["broadcast", "intra", False]


def bent(rng):
    """A curve of one to five knots between 1 and ten million, or a line."""
    knots = np.unique(10 ** rng.uniform(0, 7, rng.integers(1, 6)))
    values = np.cumsum(rng.exponential(1e-4, knots.size))
    return rng.choice([Curve(tuple(knots), tuple(values)), Curve.line(1e-5, 1e-9)])


@pytest.mark.parametrize("free", [False, True])
def test_tables_hold_the_same_numbers(free):
    rng = np.random.default_rng(0)
    base = uniform(2, 3, "onebit", check=Curve.line(1e-6, 3e-11), tensor=7e-6)
    profile = replace(
        base, moves={key: bent(rng) for key in base.moves}, codecs={key: bent(rng) for key in base.codecs}
    )
    slots = list(dict.fromkeys(slot for route in routes()[::5] for slot in walk(route, Shape(2, 3, "gpu"))))
    slots.append(replace(slots[0], what="check", kind="check"))
    for method in (None, compressors.get("onebit")):
        own = [s for s in slots if method is not None or (s.kind not in ("encode", "decode") and not s.packed)]
        prices = [Prices(profile, n, method, itemsize, free) for n in (1, 999, 10**7) for itemsize in (2, 4)]
        expected = [[one.seconds(slot) for slot in own] for one in prices]
        assert np.array_equal(price_table(prices, own), expected)
    assert price_table(prices, []).shape == (len(prices), 0)


def test_the_check_of_a_tensor_is_priced_by_its_device():
    """As in host memory where the profile is of a cluster without GPUs."""
    profile, host, there = uniform(2, 2, "onebit"), Curve.line(1e-6, 3e-11), Curve.line(5e-6, 1e-12)
    for on_gpu, expected in ((there, there(4096)), (None, host(4096))):
        known = replace(profile, check=host, check_on_gpu=on_gpu)
        for home, seconds in (("cpu", host(4096)), ("gpu", expected)):
            first = cost.slots(Route.parse("allreduce@flat"), Shape(2, 2, home), checked=True)[0]
            assert (first.kind, Prices(known, 1024).seconds(first)) == ("check", seconds)


def test_half_precision_is_half_the_bytes_only_where_nothing_is_compressed():
    profile = uniform(2, 2, "onebit")
    half, full = (operations(Strategy("none", "hierarchical"), 4096, profile, itemsize=size) for size in (2, 4))
    assert [2 * one.seconds for one in half] == [one.seconds for one in full]
    packed = [operations(Strategy("onebit", "hierarchical-allgather"), 4096, profile, itemsize=s) for s in (2, 4)]
    assert packed[0] == packed[1]


def test_what_was_not_profiled_is_named():
    lacking = replace(uniform(2, 2, "onebit"), copies={}, moves={})
    with pytest.raises(ConfigError, match="allreduce@flat"):
        operations(Strategy("none", "flat"), 64, lacking)
    with pytest.raises(ConfigError, match="fp16"):
        operations(Strategy("fp16", "flat-allgather"), 64, uniform(2, 2, "onebit"))
    with pytest.raises(ConfigError, match="copies to_host"):
        operations(Strategy("onebit", "flat-allgather"), 64, lacking, "gpu")


def test_the_planner_and_the_executor_know_the_same_collectives():
    assert set(collectives()) == set(get_args(Op)) == set(CLOSING) | set(CLOSING.values()) | SUMS
