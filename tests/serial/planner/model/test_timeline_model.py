"""The timeline against a slow simulation that is written from its description, and what the model promises."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from planner_cases import random_problem
from timeline_cases import random_case, random_options, simulated

from espresso_mpi.errors import ConfigError
from espresso_mpi.planner.model.dominance import matrices, undominated
from espresso_mpi.planner.model.problem import Problem
from espresso_mpi.planner.model.timeline import LANES, ORDERS, Interval, Lanes, OptionTable, Timeline, follow
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor
from espresso_mpi.planner.search.algorithms import reachable

# --- random cases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("whole", [False, True])
def test_the_time_and_every_interval_are_those_of_the_simulation(order, whole):
    for seed in range(250):
        timeline, choice = random_case(seed, order, whole)
        starts, end = simulated(timeline, choice)
        assert timeline.seconds(choice) == pytest.approx(end, rel=1e-12), seed
        found = {(i.tensor, i.segment, i.position): i for i in timeline.intervals(choice)}
        assert found.keys() == starts.keys()
        for key, one in found.items():
            assert one.start == pytest.approx(starts[key], rel=1e-12, abs=1e-12), (seed, key)
        last = max(one.stop for one in found.values())
        assert last == pytest.approx(end, rel=1e-12) or (order == "backprop" and last < end)


def overlapping(intervals):
    ordered = sorted(intervals, key=lambda one: (one.start, one.stop))
    return any(b.start < a.stop - 1e-12 for a, b in itertools.pairwise(ordered))


@pytest.mark.parametrize("order", ["fifo", "priority", "schedule"])
def test_a_lane_does_one_thing_at_a_time(order):
    for seed in range(100):
        timeline, choice = random_case(seed, order)
        found = timeline.intervals(choice)
        for lane in range(timeline.lanes.count):
            assert not overlapping([one for one in found if one.lane == lane]), seed


def test_first_visits_never_overlap_in_backprop_order():
    for seed in range(100):
        timeline, choice = random_case(seed, "backprop")
        total, lane = timeline.lanes.count, timeline.options.lane

        def first(one, lane=lane, choice=choice, total=total):
            return one.tensor < 0 or lane[choice[one.tensor], one.position] < total

        found = [one for one in timeline.intervals(choice) if first(one)]
        for where in range(total):
            here = [one for one in found if one.lane == where]
            assert not overlapping(here), seed
            tensors = [one.tensor for one in sorted(here, key=lambda one: (one.start, one.stop)) if one.tensor >= 0]
            assert tensors == sorted(tensors), seed


def test_operations_of_a_tensor_follow_each_other():
    for order, seed in itertools.product(ORDERS, range(60)):
        timeline, choice = random_case(seed, order)
        found = {(i.tensor, i.segment, i.position): i for i in timeline.intervals(choice)}
        for (tensor, segment, position), one in found.items():
            if tensor >= 0:
                before = found[(tensor, segment, position - 1)] if position else found[(-1, 0, tensor)]
                assert one.start >= before.stop - 1e-12


def test_an_order_can_be_told_from_the_others():
    """By the second of two cases; in the first nobody has a choice."""
    options = OptionTable(
        np.array([[3], [3]], np.int8), np.array([[10.0], [1.0]]), np.ones(2, np.int32), np.ones(2, np.int32)
    )
    backward, choice = np.array([1.0, 1.0, 1.0]), np.array([0, 1, 1])
    for order in ORDERS:
        timeline = Timeline(backward, options, Lanes(), order)
        assert timeline.seconds(choice) == 13.0
    late = OptionTable(np.array([[0, 3, 4], [3, 0, 0]], np.int8), np.array([[1.0, 2.0, 4.0], [1.0, 0, 0]]),
                   np.array([3, 1], np.int32), np.ones(2, np.int32))  # fmt: skip
    told = {order: Timeline(np.array([1.0, 5.0]), late, Lanes(), order) for order in ORDERS}
    # The decode of tensor 0 comes to the GPU during the backward pass of tensor 1: it waits. In the order backprop it
    # runs beside it, and has taken its time from the lane before.
    assert {order: t.seconds(np.array([0, 1])) for order, t in told.items()} == {
        "backprop": 12.0, "fifo": 11.0, "priority": 11.0, "schedule": 11.0
    }  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_ready_times_are_never_wrapped(order):
    """Whole seconds and more count in full."""
    options = OptionTable(np.array([[3]], np.int8), np.array([[1e-3]]), np.ones(1, np.int32), np.ones(1, np.int32))
    for ready in ([0.9, 1.0, 1.9995, 2.4, 3.7], [1.0, 2.0, 3.0], [1000.0, 1000.0005, 86400.25]):
        workload = Workload(tuple(WorkloadTensor(f"t{i}", 64, at) for i, at in enumerate(ready)), "gpu")
        timeline = Timeline(workload.backward, options, Lanes(), order)
        choice = np.zeros(len(ready), np.int64)
        sent = [one.start for one in timeline.intervals(choice) if one.tensor >= 0]
        assert sent == pytest.approx([max(at, before + 1e-3) for at, before in zip(ready, [-1, *sent])], abs=1e-9)
        assert timeline.seconds(choice) == pytest.approx(sent[-1] + 1e-3)


def test_an_order_that_there_is_not():
    with pytest.raises(ConfigError, match="lifo"):
        Timeline(np.ones(1), random_options(np.random.default_rng(0), Lanes()), Lanes(), "lifo")


# --- what the order backprop promises ---------------------------------------------------------------------------------


def test_nothing_gets_quicker_when_something_takes_longer():
    for seed in range(150):
        rng = np.random.default_rng(seed)
        timeline, choice = random_case(seed, "backprop")
        before, slower = timeline.seconds(choice), timeline.options.seconds.copy()
        option = rng.choice(choice)
        slower[option, rng.integers(slower.shape[1])] += rng.exponential(1.0)
        assert replace(timeline, options=replace(timeline.options, seconds=slower)).seconds(choice) >= before
        backward = timeline.backward.copy()
        backward[rng.integers(backward.size)] += rng.exponential(1.0)
        assert replace(timeline, backward=backward).seconds(choice) >= before


def test_matrices_lead_where_the_kernel_leads():
    for seed in range(60):
        rng = np.random.default_rng(seed)
        timeline, _ = random_case(seed, "backprop")
        options, lanes = timeline.options, timeline.lanes
        found = matrices(options, lanes)
        for option in range(options.count.size):
            state = rng.exponential(3.0, 2 * lanes.count)
            expected = (state[:, None] + found[option]).max(axis=0)
            after = state.copy()
            there = follow(after, after[lanes.backward], options.lane[option], options.seconds[option],
                           options.count[option], options.repeats[option], np.empty((0, 0)))  # fmt: skip
            assert [*after, there] == pytest.approx(expected, rel=1e-12)


def test_what_is_dominated_is_never_missed():
    """The best of all combinations of a candidate set is the best of those of its undominated options."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        lanes = list(LANES.values())[seed % 3]
        options = random_options(rng, lanes, rows=12, most=4, whole=bool(seed % 2))
        kept, timeline = undominated(options, lanes), Timeline(rng.exponential(1.0, 3), options, lanes)
        best = {rows: min(timeline.seconds(np.array(c)) for c in itertools.product(rows, repeat=3))
                for rows in (tuple(range(12)), tuple(map(int, kept)))}  # fmt: skip
        assert min(best.values()) == pytest.approx(max(best.values()), rel=1e-12)


def test_a_pruned_problem_is_as_good():
    for seed in range(3):
        full = random_problem(seed, tensors=2, routes=reachable()[::5])
        pruned = Problem.of(
            full.workload, full.profile, full.compressors, routes=full.routes, lanes=full.timeline.lanes
        )
        assert pruned.first[-1] < full.first[-1]
        best = [
            min(p.seconds(np.array(c)) for c in itertools.product(p.options(0), p.options(1))) for p in (full, pruned)
        ]  # fmt: skip
        assert best[1] == pytest.approx(best[0], rel=1e-12)


def test_lanes_by_name():
    assert [LANES["one-network"].name(lane) for lane in range(3)] == ["gpu", "cpu", "intra+inter"]
    assert [LANES["host"].name(lane) for lane in range(4)] == ["gpu", "cpu+intra", "inter", "compute"]
    assert LANES["separate"].count == 4
    assert isinstance(Interval(0, 0, 0, 0, 0.0, 1.0), Interval)
