"""The published algorithms against literal versions of their text, and against enumeration."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from planner_cases import COMPRESSOR, random_problem, random_profile, random_workload

from espresso_mpi.errors import ConfigError, PlanError
from espresso_mpi.planner import routes
from espresso_mpi.planner.model.problem import Problem
from espresso_mpi.planner.model.timeline import LANES, ORDERS, follow
from espresso_mpi.planner.search.algorithms import (
    LIMIT,
    TIE,
    Chosen,
    algorithm1,
    algorithm2,
    follow_back,
    groups_of,
    offload_gap,
    on_cpu,
    published,
    reachable,
)
from espresso_mpi.planner.search.confirmed import Confirmed
from espresso_mpi.types import Encode

# --- Algorithm 1, literally -------------------------------------------------------------------------------------------


def bubbles(problem, choice):
    """Of each network lane when its last bubble begins: a gap in which it waits for the next tensor; else -inf.

    And of each tensor when it leaves the lane for the first time (the order ``backprop``) or the last.
    """
    timeline, total = problem.timeline, problem.timeline.lanes.count
    networks = {timeline.lanes.intra, timeline.lanes.inter}
    in_order = timeline.order == "backprop"
    begins, left = dict.fromkeys(networks, -math.inf), {}
    everything = [one for one in timeline.intervals(choice) if one.tensor >= 0]

    def first_visit(one):
        return not in_order or timeline.options.lane[choice[one.tensor], one.position] < total

    for lane in networks:
        here = sorted((one for one in everything if one.lane == lane), key=lambda one: (one.start, one.stop))
        if in_order:
            groups = [[one for one in here if one.tensor == tensor] for tensor in sorted({one.tensor for one in here})]
        else:
            groups = [[one] for one in here]
        free = None
        for group in groups:
            first = [one for one in group if first_visit(one)]
            late = sum(one.stop - one.start for one in group if one not in first)
            if free is not None and min(one.start for one in first) > free + 1e-15:
                begins[lane] = free
            stop = max(one.stop for one in first)
            free = stop + late if in_order or free is None else max(free, stop)
            for one in first:
                left[one.tensor, lane] = max(left.get((one.tensor, lane), -math.inf), one.stop)
    return begins, left


def before_a_bubble(problem, choice):
    begins, left = bubbles(problem, choice)
    found = set()
    for tensor in range(problem.tensors):
        lanes = [lane for one, lane in left if one == tensor]
        if lanes and all(left[tensor, lane] <= begins[lane] + 1e-15 for lane in lanes):
            found.add(tensor)
    return found


def literal1(problem):
    """As it is written: groups by size from the largest, in a group from the last computed; drop; take the best."""
    choice, priced = problem.dense(), 0
    sizes = [tensor.nbytes for tensor in problem.workload.tensors]
    left = set(range(problem.tensors)) - before_a_bubble(problem, choice)
    for size in sorted(set(sizes), reverse=True):
        for tensor in reversed([i for i, own in enumerate(sizes) if own == size]):
            if tensor not in left:
                continue
            left.remove(tensor)
            times = {}
            for row in problem.options(tensor):
                route = problem.routes[problem.route[row]]
                if all(step.device == "gpu" for step in route.steps if hasattr(step, "device")):
                    tried = choice.copy()
                    tried[tensor] = row
                    times[row] = problem.timeline.seconds(tried)
                    priced += 1
            least = [row for row, time in times.items() if time <= min(times.values()) * (1 + TIE)]
            if choice[tensor] not in least:
                choice[tensor] = min(least, key=lambda row: problem.alone[row])
            left -= before_a_bubble(problem, choice)
    return choice, priced


LITERAL = tuple(order for order in ORDERS if order != "schedule")
"""Orders in which every option of a tensor is priced."""


def lanes_and_orders(orders=ORDERS):
    return list(itertools.product(("one-network", "separate"), orders))


@pytest.mark.parametrize("lanes, order", lanes_and_orders(LITERAL))
def test_algorithm_1_is_what_is_written(lanes, order):
    compressed = dropped = 0
    for seed in range(12 if order == "backprop" else 3):
        problem = random_problem([seed, 1], tensors=6, lanes=lanes, order=order)
        found, (choice, priced) = algorithm1(problem), literal1(problem)
        assert problem.seconds(found.choice) == found.seconds == pytest.approx(problem.seconds(choice), rel=1e-12), seed
        assert np.array_equal(found.choice, choice), seed
        assert found.evaluations == priced <= problem.tensors * 174
        compressed += int((problem.method[choice] >= 0).sum())
        dropped += problem.tensors - priced // 174
    assert compressed and dropped


@pytest.mark.parametrize("lanes", ["one-network", "separate"])
def test_algorithm_1_by_schedules_is_as_good_as_what_is_written(lanes):
    """Where most options are ruled out without a schedule: on average no worse than with one for every option.

    And never worse than what the order ``backprop`` alone would choose, or than nothing compressed.
    """
    ratios, compressed = [], 0
    for seed in range(12):
        problem = random_problem([seed, 1], tensors=6, lanes=lanes, order="schedule")
        found, rough = algorithm1(problem), algorithm1(problem.ordered("backprop"))
        assert found.seconds == pytest.approx(problem.seconds(found.choice), rel=1e-12), seed
        assert found.seconds <= min(map(problem.seconds, (rough.choice, problem.dense()))) * (1 + 1e-12), seed
        ratios.append(found.seconds / problem.seconds(literal1(problem)[0]))
        compressed += int((problem.method[found.choice] >= 0).sum())
    assert compressed
    assert np.mean(ratios) <= 1.001


def test_bubbles_are_those_of_the_schedule():
    """What a step says after every change, against the intervals of the schedule."""
    found = 0
    for seed in range(12):
        problem = random_problem([seed, 6], tensors=6, lanes="separate" if seed % 2 else "one-network")
        rng, step = np.random.default_rng(seed), Confirmed(problem.timeline, problem.dense(), problem.alone)
        for _ in range(4):
            expected = before_a_bubble(problem, step.choice)
            assert set(np.flatnonzero(step.before_bubble())) == expected, seed
            assert step.seconds() == problem.timeline.seconds(step.choice)
            found += len(expected)
            tensor = int(rng.integers(6))
            step.take(tensor, int(rng.choice(problem.options(tensor))))
    assert found


def test_algorithm_1_takes_gpu_options_alone_and_is_never_worse_than_dense():
    for seed in range(10):
        problem = random_problem(seed, tensors=8)
        found = algorithm1(problem)
        assert found.seconds <= problem.seconds(problem.dense())
        used = [problem.routes[problem.route[row]] for row in found.choice]
        assert {s.device for route in used for s in route.steps if isinstance(s, Encode)} <= {"gpu"}


def test_tensors_before_a_bubble_are_left_alone():
    """The network has long sent the first tensor when the second comes: nothing would end sooner."""
    problem = random_problem(3, tensors=2)
    far = [replace(t, ready=at) for t, at in zip(problem.workload.tensors, (0.01, 50.0))]
    later = Problem.of(replace(problem.workload, tensors=tuple(far)), problem.profile, [COMPRESSOR], routes=reachable(),
                       prune=False)  # fmt: skip
    found = algorithm1(later)
    assert later.method[found.choice[0]] == -1
    assert found.evaluations == 2 * 174  # of the other tensor, by schedules and by the order backprop


# --- Algorithm 2, literally -------------------------------------------------------------------------------------------


def literal2(problem, choice):
    """As it is written: every (u_1 .. u_g), the first u_i of each group on the CPU."""
    moved, groups = on_cpu(problem, choice), {}
    for tensor, row in enumerate(choice):
        if problem.method[row] >= 0:
            groups.setdefault((problem.workload.tensors[tensor].nbytes, row), []).append(tensor)
    best = math.inf
    for counts in itertools.product(*(range(len(group) + 1) for group in groups.values())):
        tried = choice.copy()
        for group, count in zip(groups.values(), counts):
            tried[group[:count]] = moved[group[:count]]
        best = min(best, problem.seconds(tried))
    return best


def everything_compressed(problem, seed):
    """A choice with few groups of compressed tensors: of each size one option, here and there another."""
    rng = np.random.default_rng(seed)
    choice, rows = problem.dense(), {}
    for tensor in range(problem.tensors):
        own = [r for r in problem.options(tensor) if problem.method[r] >= 0 and r - problem.options(tensor)[0] < 174]
        kept = rows.setdefault(problem.set_of[tensor], rng.choice(own))
        choice[tensor] = rng.choice([kept, kept, kept, rng.choice(own), choice[tensor]])
    return Chosen(choice, problem.seconds(choice), 0)


@pytest.mark.parametrize("lanes, order", lanes_and_orders())
def test_algorithm_2_is_what_is_written(lanes, order):
    better = 0
    for seed in range(20 if order == "backprop" else 4):
        problem = random_problem([seed, 2], tensors=8, lanes=lanes, order=order)
        start = everything_compressed(problem, seed)
        found = algorithm2(problem, start, limit=LIMIT)
        assert found.complete
        assert (
            found.seconds == problem.seconds(found.choice) == pytest.approx(literal2(problem, start.choice), rel=1e-11)
        )
        moved = on_cpu(problem, start.choice)
        for group in groups_of(problem, start.choice):
            offloaded = [found.choice[tensor] == moved[tensor] for tensor in group]
            assert offloaded == sorted(offloaded, reverse=True), "the earliest ones"
        others = problem.method[start.choice] < 0
        assert np.array_equal(found.choice[others], start.choice[others])
        better += found.seconds < start.seconds
    assert better


def test_algorithm_2_by_schedules_needs_few_of_them():
    """With none for most combinations it is nearly as good as with one for each; and never worse than it began."""
    ratios, short = [], 0
    for seed in range(12):
        problem = random_problem([seed, 2], tensors=8, order="schedule")
        start = everything_compressed(problem, seed)
        rough = algorithm2(problem.ordered("backprop"), start)
        found = algorithm2(problem, start)
        short += not found.complete
        assert found.seconds == pytest.approx(problem.seconds(found.choice), rel=1e-12)
        assert found.seconds <= min(start.seconds, problem.seconds(rough.choice)) * (1 + 1e-12)
        ratios.append(found.seconds / literal2(problem, start.choice))
    assert short > 6
    assert min(ratios) >= 1 - 1e-12 and np.mean(ratios) <= 1.01


def test_algorithm_2_may_be_cut_short():
    """Then it says so, and what it found is no worse than where it began."""
    for order in ORDERS:
        problem = random_problem(5, tensors=8, order=order)
        start = everything_compressed(problem, 5)
        found = algorithm2(problem, start, limit=3)
        assert not found.complete
        assert found.seconds == problem.seconds(found.choice) <= start.seconds


def test_moving_to_the_cpu_moves_all_of_a_tensor():
    problem = random_problem(1)
    start = everything_compressed(problem, 1)
    moved = on_cpu(problem, start.choice)
    for tensor, (before, after) in enumerate(zip(start.choice, moved)):
        old, new = problem.strategy(before), problem.strategy(after)
        assert (new.compressor, new.route) == (old.compressor, old.route.on("cpu"))
        assert after in problem.options(tensor)


def test_a_problem_without_the_routes_on_the_cpu_is_refused():
    problem = random_problem(1, routes=routes(("gpu",)))
    with pytest.raises(PlanError, match="not among its options"):
        on_cpu(problem, everything_compressed(problem, 1).choice)


# --- both -------------------------------------------------------------------------------------------------------------


def test_they_reach_339_routes():
    assert len(reachable()) == len(set(reachable())) == 339
    assert sum(not route.compressed for route in reachable()) == 9
    on = [{s.device for s in r.steps if hasattr(s, "device")} for r in reachable() if r.compressed]
    assert on.count({"gpu"}) == on.count({"cpu"}) == 165
    assert set(reachable()) <= set(routes())
    assert reachable(gpu=False) == routes(("cpu",))


def test_published_does_both():
    rng = np.random.default_rng(7)
    workload, profile = random_workload(rng, 8), random_profile(rng)
    problem, found = published(workload, profile, COMPRESSOR)
    first = algorithm1(problem)
    second = algorithm2(problem, first)
    assert np.array_equal(found.choice, second.choice)
    assert found.seconds == second.seconds <= first.seconds
    assert found.evaluations == first.evaluations + second.evaluations


def test_published_for_tensors_in_host_memory():
    rng = np.random.default_rng(8)
    workload, profile = random_workload(rng, 6, device="cpu"), random_profile(rng)
    problem, found = published(workload, profile, COMPRESSOR, lanes="host")
    assert len(problem.routes) == 174
    assert found.seconds <= problem.seconds(problem.dense())
    assert (problem.method[found.choice] >= 0).any()


def test_a_single_rank_has_nothing_to_do():
    rng = np.random.default_rng(9)
    workload, profile = random_workload(rng, 3), random_profile(rng, 1, 1)
    problem, found = published(workload, profile, COMPRESSOR)
    assert found.seconds == pytest.approx(workload.seconds)
    assert (problem.method[found.choice] == -1).all()


def test_a_step_read_backwards_gives_the_same_time():
    """F is the largest sum of when a lane is free and how long the step goes on behind it, at every tensor."""
    for seed in range(10):
        lanes = list(LANES)[seed % 3]
        problem = random_problem([seed, 4], tensors=5, lanes=lanes, order="backprop")
        timeline, o = problem.timeline, problem.timeline.options
        rng, home, total = np.random.default_rng(seed), timeline.lanes.backward, timeline.lanes.count
        choice = np.array([rng.choice(problem.options(i)) for i in range(5)])
        expected, free = timeline.seconds(choice), np.zeros(2 * total)
        behind = [np.full(2 * total, -np.inf)]
        behind[0][home] = 0.0
        for tensor in reversed(range(5)):
            row, before = choice[tensor], behind[0].copy()
            option = (o.lane[row], o.seconds[row], o.count[row], o.repeats[row])
            follow_back(before, home, timeline.backward[tensor], *option)
            behind.insert(0, before)
        there = 0.0
        for tensor in range(5):
            assert max(there, (free + behind[tensor]).max()) == pytest.approx(expected, rel=1e-12)
            free[home] += timeline.backward[tensor]
            row = choice[tensor]
            there = max(there, follow(free, free[home], o.lane[row], o.seconds[row], o.count[row], o.repeats[row],
                                      np.empty((0, 0))))  # fmt: skip
        assert max(there, free[home]) == pytest.approx(expected, rel=1e-12)


# --- the gap of Algorithm 2 -------------------------------------------------------------------------------------------


def all_subsets(problem, choice):
    moved, tensors = on_cpu(problem, choice), np.flatnonzero(problem.method[choice] >= 0)
    best = math.inf
    for flags in itertools.product((False, True), repeat=tensors.size):
        tried = choice.copy()
        tried[tensors[list(flags)]] = moved[tensors[list(flags)]]
        best = min(best, problem.seconds(tried))
    return best


def test_the_gap_is_that_to_all_subsets():
    problems = [random_problem([seed, 5], tensors=7, order="backprop") for seed in range(40)]
    excess = []
    for problem in problems:
        first = algorithm1(problem)
        excess.append(algorithm2(problem, first).seconds / all_subsets(problem, first.choice) - 1)
    found = offload_gap(problems)
    assert found.cases == len(problems)
    assert found.above == sum(one > 1e-10 for one in excess)
    assert found.worst == pytest.approx(max(excess), abs=1e-10)
    assert found.mean == pytest.approx(np.mean(excess), abs=1e-10)


def test_the_gap_of_what_is_too_large_is_refused():
    with pytest.raises(ConfigError, match="too many"):
        offload_gap([random_problem(seed, tensors=8) for seed in range(20)], limit=2)
    assert offload_gap([]).cases == 0
