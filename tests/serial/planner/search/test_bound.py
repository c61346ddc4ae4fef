"""Lower bounds against the optimum of small cases, by enumeration."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace

import highspy
import numpy as np
import pytest
from problem_cases import contiguous, small_profile, small_workload

from espresso_mpi.bench.planner.random_cases import enumerated, random_case
from espresso_mpi.planner.model.dominance import matrices
from espresso_mpi.planner.model.fusion import fused
from espresso_mpi.planner.model.problem import Problem
from espresso_mpi.planner.model.timeline import HOST, ORDERS, Lanes, Order, follow
from espresso_mpi.planner.search import relaxation
from espresso_mpi.planner.search.bound import branched, certified, lower_bound
from espresso_mpi.planner.search.fused_bound import fusion_bound
from espresso_mpi.planner.search.game import relaxed
from espresso_mpi.planner.search.networks import exact_network, load_network, loads

CASES = 250


@pytest.mark.parametrize("order", ORDERS)
def test_bound_is_never_above_the_optimum(order: Order) -> None:
    rng = np.random.default_rng(11)
    for _ in range(CASES):
        problem = random_case(rng, int(rng.integers(1, 5)), 4, order=order)
        assert lower_bound(problem) <= enumerated(problem)[0]


def test_every_flow_on_the_way_is_a_bound() -> None:
    rng = np.random.default_rng(12)
    for _ in range(60):
        problem = random_case(rng, int(rng.integers(1, 5)), 3, order="backprop")
        least, choice = enumerated(problem)
        for network in (exact_network(problem), load_network(problem)):
            for flow in relaxed(network, choice).flows:
                assert certified(flow.value) <= least
                np.testing.assert_allclose(flow.mass.sum(axis=1), 1.0, rtol=1e-9)


def test_branching_lifts_a_bound_but_not_above_the_optimum() -> None:
    rng = np.random.default_rng(15)
    lifted = 0
    for _ in range(60):
        problem = random_case(rng, int(rng.integers(1, 5)), 4, order="backprop")
        least, choice = enumerated(problem)
        full = matrices(problem.timeline.options, problem.timeline.lanes)
        relaxation = relaxed(exact_network(problem, full), choice)
        value = branched(problem, full, relaxation, choice, least, 10)
        assert relaxation.value <= value and certified(value) <= least
        lifted += value > relaxation.value + 1e-6
    assert lifted > 3


def test_pruned_candidates_hold_all_that_nothing_dominates() -> None:
    """Against the definition: every option of the whole set has one in the pruned set with no higher matrix."""
    for segment_bytes in (0, 20_000):
        workload, profile = small_workload(2, 1), small_profile(segment_bytes=segment_bytes)
        slim, whole = (
            Problem.of(workload, profile, ["int8"], lanes=HOST, order="backprop", prune=prune)
            for prune in (True, False)
        )
        assert slim.method.size < whole.method.size
        for tensor in range(2):
            kept, all_of_them = (matrices(p.candidates_of(tensor).options, HOST) for p in (slim, whole))
            for matrix in all_of_them:
                assert (kept <= matrix + 1e-12).all(axis=(1, 2)).any()
            for number, matrix in enumerate(kept):
                below = (kept <= matrix).all(axis=(1, 2))
                assert below.sum() == 1 and below[number]


def test_candidates_for_schedules_hold_all_that_nothing_needs_less_than() -> None:
    """Against the definition, by the loads that bounds are made of."""
    for segment_bytes in (0, 20_000):
        workload, profile = small_workload(2, 1), small_profile(segment_bytes=segment_bytes)
        slim, whole = (
            Problem.of(workload, profile, ["int8"], lanes=HOST, order="schedule", prune=prune)
            for prune in (True, False)
        )
        needs = [np.column_stack(loads(problem)) for problem in (slim, whole)]
        for tensor in range(2):
            kept, every = (values[list(p.options(tensor))] for p, values in zip((slim, whole), needs))
            assert kept.shape[0] < every.shape[0] / 4
            for one in every:
                assert (kept <= one * (1 + 1e-12)).all(axis=1).any()
            for row in slim.options(tensor):
                same = whole.option(tensor, slim.strategy(row))
                np.testing.assert_allclose(needs[0][row], needs[1][same], rtol=1e-12)


def test_relaxation_is_the_program_of_all_inequalities_and_options() -> None:
    """Classes, inequalities and columns that are added as they are wanted, against one program with all of them."""
    rng, differ = np.random.default_rng(16), []
    for number in range(40):
        problem = random_case(rng, int(rng.integers(1, 6)), 4, order="schedule")
        if number % 2:  # tensors with one candidate set
            problem = problem.with_sets(problem.workload, {0: problem.candidates_of(0)}, [0] * problem.tensors)
        value = relaxation.relaxed(problem).value
        assert value <= enumerated(problem)[0]
        differ.append(whole_program(problem) - value)
    assert min(differ) >= -1e-9 and max(differ) <= 1e-4


def whole_program(problem: Problem) -> float:
    """The least T with every inequality of ``relaxation``, each tensor with shares of its own."""
    (load, chain), lanes, ready = loads(problem), problem.timeline.lanes, np.cumsum(problem.timeline.backward)
    solver = highspy.Highs()
    solver.silent()
    shares = [[solver.addVariable(0, 1) for _ in problem.options(tensor)] for tensor in range(problem.tensors)]
    time = solver.addVariable(0)
    for tensor, own in enumerate(shares):
        solver.addConstr(sum(own) == 1)
        costs = chain[list(problem.options(tensor))]
        solver.addConstr(time >= ready[tensor] + sum(float(c) * x for c, x in zip(costs, own)))
        for lane in range(lanes.count):
            later = [
                float(load[row, lane]) * share
                for other in range(tensor, problem.tensors)
                for row, share in zip(problem.options(other), shares[other])
            ]
            solver.addConstr(time >= ready[-1 if lane == lanes.backward else tensor] + sum(later))
    solver.minimize(time)
    return float(solver.getObjectiveValue())


def test_what_a_flow_says_of_the_rest_is_a_bound_from_every_state() -> None:
    """``mass[i] · state + rest[i]`` against all ways to go on after the first tensor."""
    rng = np.random.default_rng(13)
    for _ in range(40):
        problem = random_case(rng, 3, 3, order="backprop")
        timeline, total = problem.timeline, problem.timeline.lanes.count
        _, choice = enumerated(problem)
        flow = relaxed(exact_network(problem), choice).flows[0]
        for row in problem.options(0):
            best = min(
                problem.seconds(np.array([row, *rest])) for rest in itertools.product(*map(problem.options, (1, 2)))
            )
            o, state = timeline.options, np.zeros(2 * total + 1)
            state[timeline.lanes.backward] = timeline.backward[0]
            state[-1] = follow(state[:-1], timeline.backward[0], o.lane[row], o.seconds[row], o.count[row],
                               o.repeats[row], np.empty((0, 0)))  # fmt: skip
            assert certified(float(flow.mass[1] @ state + flow.rest[1])) <= best


def test_single_options_leave_no_gap() -> None:
    """With one option a tensor F itself is the longest path; the game only softens it."""
    rng = np.random.default_rng(14)
    for _ in range(50):
        problem = random_case(rng, 4, 1, lanes=Lanes(), order="backprop")
        choice = problem.first[:-1][problem.set_of]
        if (problem.timeline.options.repeats == 1).all():
            assert lower_bound(problem) >= 0.99 * problem.seconds(choice) - 1e-12


def test_nothing_takes_no_time() -> None:
    problem = random_case(np.random.default_rng(3), 2, 2, order="backprop")
    still = replace(problem, timeline=replace(problem.timeline, backward=np.zeros(2)))
    still.timeline.options.seconds[:] = 0.0
    assert lower_bound(still) == 0.0


@pytest.mark.parametrize("order", ["backprop", "fifo", "schedule"])
@pytest.mark.parametrize("segment_bytes", [0, 100_000])
def test_fusion_bound_is_below_every_fusion(order: Order, segment_bytes: int) -> None:
    profile = small_profile(segment_bytes=segment_bytes)
    routes = [r for r in Problem.of(small_workload(1, 0), profile, ["int8"], lanes=HOST).routes if len(r.steps) <= 5][
        :40
    ]
    for seed in range(3):
        workload, best = small_workload(3, seed), np.inf
        for groups in contiguous(3):
            buffers = fused(workload, [tuple(f"t{i}" for i in group) for group in groups])
            problem = Problem.of(buffers, profile, ["int8"], routes=routes, lanes=HOST, order=order)
            quick = [problem.quickest(problem.method < 0), problem.quickest(problem.method >= -1)]
            rng = np.random.default_rng(seed)
            tried = [np.array([rng.choice(problem.options(i)) for i in range(problem.tensors)]) for _ in range(300)]
            best = min(best, *(problem.seconds(choice) for choice in [*quick, *tried]))
        bound = (relaxation.fusion_bound if order == "schedule" else fusion_bound)(problem, workload)
        assert 0.3 * best < bound <= best


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    shares, _, value = relaxation._solved(np.array([0, 0]), np.array([[2.0, 3.0]]), np.zeros(1))
    assert (list(shares), value) == ([1.0, 0.0], 2.0)
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr() == ("", "")
