"""The search against enumeration, its budget of errors, and fusion."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from problem_cases import contiguous, small_profile, small_workload

from espresso_mpi.bench.planner.random_cases import enumerated, random_case
from espresso_mpi.errors import ConfigError, PlanError
from espresso_mpi.planner.model.dispatch import forward, laid_out
from espresso_mpi.planner.model.fusion import fused
from espresso_mpi.planner.model.needs import needs_of
from espresso_mpi.planner.model.problem import Problem
from espresso_mpi.planner.model.timeline import HOST, ORDERS, Order
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor
from espresso_mpi.planner.search import climb
from espresso_mpi.planner.search.budget import ErrorBudget
from espresso_mpi.planner.search.buffers import joined
from espresso_mpi.planner.search.fused_search import search_fused
from espresso_mpi.planner.search.search import search
from espresso_mpi.types import Plan


@pytest.mark.parametrize("order", ORDERS)
def test_small_cases_are_solved(order: Order) -> None:
    """In the order ``backprop`` always, and the bound then is the optimum; in the others nearly always."""
    rng = np.random.default_rng(21)
    above = []
    for _ in range(200):
        problem = random_case(rng, int(rng.integers(1, 5)), 4, order=order)
        least, _ = enumerated(problem)
        found = search(problem)
        assert found.bound <= least <= found.seconds + 1e-12
        assert found.seconds == problem.seconds(found.choice)
        assert all(option in problem.options(tensor) for tensor, option in enumerate(found.choice))
        if order == "backprop":
            assert found.bound >= least * (1 - 1e-8)
        above.append(found.seconds / least - 1 if least else 0.0)
    solved = np.mean(np.array(above) < 1e-9)
    assert max(above) <= (1e-9 if order == "backprop" else 0.1)
    assert solved == 1 if order == "backprop" else solved >= 0.99


def test_enumeration_is_that_of_all_choices() -> None:
    rng = np.random.default_rng(20)
    for order in ORDERS:
        problem = random_case(rng, 3, 4, order=order)
        times = [problem.seconds(np.array(c)) for c in itertools.product(*map(problem.options, range(3)))]
        least, choice = enumerated(problem)
        assert least == min(times) == problem.seconds(choice)


def test_every_effort_returns_what_it_says_and_the_same_again() -> None:
    rng = np.random.default_rng(22)
    for number in range(6):
        problem = random_case(rng, 8 if number else 5, 5)
        for effort in ("quick", "normal", "thorough")[: 2 if number else 3]:  # the last one takes seconds
            first, second = (search(problem, effort=effort) for _ in range(2))
            assert first.seconds == problem.seconds(first.choice)
            assert first.bound <= first.seconds
            assert (first.choice == second.choice).all() and first.bound == second.bound


def test_a_start_is_never_made_worse() -> None:
    rng = np.random.default_rng(23)
    for order in ORDERS:
        problem = random_case(rng, 10, 6, order=order)
        start = np.array([rng.choice(problem.options(tensor)) for tensor in range(problem.tensors)])
        assert search(problem, effort="quick", starts=[start]).seconds <= problem.seconds(start)


@pytest.mark.parametrize("order", ["backprop", "fifo"])
def test_error_budget(order: Order) -> None:
    """Always kept; with few tensors in the order ``backprop`` the best that keeps it."""
    rng = np.random.default_rng(24)
    solved = 0
    for _ in range(60):
        problem = random_case(rng, int(rng.integers(1, 5)), 4, order=order)
        errors = rng.uniform(0, 1, problem.method.size) * rng.integers(0, 2, problem.method.size)
        least = sum(errors[list(problem.options(tensor))].min() for tensor in range(problem.tensors))
        limit = least + rng.uniform(0, 1)
        found = search(problem, error=ErrorBudget(limit, errors))
        assert errors[found.choice].sum() <= limit + 1e-12
        best = min(
            problem.seconds(np.array(rows))
            for rows in itertools.product(*map(problem.options, range(problem.tensors)))
            if errors[list(rows)].sum() <= limit
        )
        assert found.bound <= best <= found.seconds + 1e-12
        solved += found.seconds <= best * (1 + 1e-9) + 1e-12
    assert solved == 60 if order == "backprop" else solved >= 50


def test_schedules_are_given_up_only_beyond_the_limit() -> None:
    """What the loads say of an exchange is a bound on it, and a schedule with a limit is that without, or none."""
    rng, given_up = np.random.default_rng(26), 0
    for _ in range(200):
        problem = random_case(rng, 5, 4, order="schedule")
        tables, total = problem.timeline.tables, problem.timeline.lanes.count
        choice = np.array([rng.choice(problem.options(tensor)) for tensor in range(5)], np.int64)
        needs, ready = needs_of(*tables[3:], total), np.cumsum(problem.timeline.backward)
        heights = np.empty((5, total))
        climb._heights(choice, needs, ready, problem.timeline.lanes.backward, heights)
        tensor, other = int(rng.integers(5)), choice.copy()
        other[tensor] = rng.choice(problem.options(tensor))
        first, owner, where, took, _ = laid_out(other, tables)
        start, key = np.empty(took.size), rng.uniform(0, 1, took.size)
        time = forward(other, first, owner, where, took, tables[5], key, False, total, np.inf, start)
        hopeless = [
            climb._hopeless(tensor, other[tensor], choice[tensor], needs, ready, heights, time * (1 + by) + by)
            for by in (-0.3, 1e-9)
        ]
        assert not hopeless[1]
        given_up += hopeless[0]
        for by, expected in ((1e-9, time), (-1e-9, np.inf)):
            got = forward(other, first, owner, where, took, tables[5], key, False, total, time * (1 + by), start)
            assert got == expected or time == 0
    assert given_up > 50


def test_bad_input_is_named() -> None:
    problem = random_case(np.random.default_rng(25), 2, 3)
    with pytest.raises(ConfigError, match="effort='hard'; expected one of quick, normal, thorough"):
        search(problem, effort="hard")
    rows = problem.method.size
    with pytest.raises(ConfigError, match=f"expected {rows} numbers"):
        search(problem, error=ErrorBudget(1.0, np.zeros(rows + 1)))
    with pytest.raises(PlanError, match="the limit is 1, but every choice sums up to at least 2"):
        search(problem, error=ErrorBudget(1.0, np.ones(rows)))


def test_joined_neighbours() -> None:
    kinds = ("float32", "float32", "float32", "float64", "float32")
    workload = Workload(tuple(WorkloadTensor(f"t{i}", 10, i * 1.0, kind) for i, kind in enumerate(kinds)))
    assert joined(workload, 0) == (0, 1, 2, 3, 4)
    assert joined(workload, 80) == (0, 2, 3, 4)
    assert joined(workload, 10**9) == (0, 3, 4)


@pytest.mark.parametrize("order", ORDERS)
def test_fusion_is_no_slower_than_none_and_above_its_bound(order: Order) -> None:
    workload, profile = small_workload(6, 5), small_profile()
    groups, problem, found = search_fused(workload, profile, ["int8"], lanes=HOST, order=order, effort="quick")
    alone = search(Problem.of(workload, profile, ["int8"], lanes=HOST, order=order), effort="quick")
    assert found.claim == "fusions" and found.bound <= found.seconds <= alone.seconds
    assert problem.workload == fused(workload, groups)
    assert found.seconds == problem.seconds(found.choice)
    Plan({t.name: problem.strategy(0) for t in workload.tensors}, groups=groups)  # groups that a plan can have


@pytest.mark.parametrize("order", ["backprop", "schedule"])
def test_fusion_finds_the_best_of_few_tensors(order: Order) -> None:
    profile = small_profile()
    ratios = []
    for seed in range(4):
        workload = small_workload(4, seed)
        found = search_fused(workload, profile, ["int8"], lanes=HOST, order=order)[2]
        best = min(
            search(Problem.of(fused(workload, [tuple(f"t{i}" for i in g) for g in groups]), profile, ["int8"],
                              lanes=HOST, order=order), effort="quick").seconds
            for groups in contiguous(4)
        )  # fmt: skip
        ratios.append(found.seconds / best)
    assert max(ratios) <= 1.05
