"""More tensors than are searched each for itself: what is planned then is what the timeline says of all of them."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from planner_cases import COMPRESSOR, random_problem, random_profile, random_workload

from espresso_mpi.errors import ConfigError
from espresso_mpi.planner.model import problem
from espresso_mpi.planner.model.problem import Problem, evaluated
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor
from espresso_mpi.planner.plan import defaults, plan
from espresso_mpi.planner.search import algorithms, buffers, many


@pytest.fixture
def few(monkeypatch):
    """Twenty tensors are many, and ten buffers are enough."""
    for module in (many, sys.modules[plan.__module__]):
        for name, value in (("MANY", 20), ("UNITS", 10), ("MOST_IN_EVENTS", 20)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


def mixed(rng, tensors):
    """A workload in which element types change here and there."""
    workload = random_workload(rng, tensors, device="cpu")
    kinds = ["float16" if number // 13 % 2 else "float32" for number in range(tensors)]
    return replace(workload, tensors=tuple(replace(t, dtype=kind) for t, kind in zip(workload.tensors, kinds)))


@pytest.mark.parametrize("order", ["schedule", "fifo"])
def test_neighbours_are_joined_first_and_the_plan_is_one_for_all(few, monkeypatch, order):
    searched, whole = [], buffers.Buffers.__init__

    def noted(self, workload, *more):
        searched.append(len(workload.tensors))
        whole(self, workload, *more)

    monkeypatch.setattr(buffers.Buffers, "__init__", noted)
    rng = np.random.default_rng(1)
    workload, profile = mixed(rng, 60), random_profile(rng)
    made = plan(workload, profile, [COMPRESSOR], order=order)
    assert 0 < max(searched) <= 10
    names = [tensor.name for tensor in workload.tensors]
    assert list(made.strategies) == list(made.made_for.tensors) == names
    assert [name for entry in made.forecast.buffers for name in entry.tensors] == names
    assert len(made.groups) > 1 and set(made.groups) <= {entry.tensors for entry in made.forecast.buffers}
    again, choice = evaluated(made, workload, profile, lanes=made.forecast.lanes, order=order)
    assert made.forecast.seconds == pytest.approx(again.seconds(choice), rel=1e-12)
    assert made.forecast.bound <= made.forecast.seconds
    assert made.forecast.bound_kind.endswith("of 10 buffers that the tensors were joined to first")


def test_element_types_that_always_change_cannot_be_joined(few):
    rng = np.random.default_rng(2)
    workload = random_workload(rng, 30)
    kinds = [replace(t, dtype="float16" if n % 2 else "float32") for n, t in enumerate(workload.tensors)]
    with pytest.raises(ConfigError, match=r"30 tensors whose element types change .* to 30 buffers only"):
        plan(replace(workload, tensors=tuple(kinds)), random_profile(rng), [COMPRESSOR])


def test_what_may_not_be_joined_is_planned_by_itself(few):
    rng = np.random.default_rng(3)
    workload, profile = random_workload(rng, 25, device="cpu"), random_profile(rng)
    assert defaults(workload, profile) == ("host", "schedule")
    made = plan(workload, profile, [COMPRESSOR], fusion=False)
    assert not made.groups and made.forecast.order == "schedule"
    again, choice = evaluated(made, workload, profile, lanes="host", order="schedule")
    assert made.forecast.seconds == pytest.approx(again.seconds(choice), rel=1e-12)
    assert made.forecast.bound <= made.forecast.seconds <= min(made.forecast.baselines.values()) * (1 + 1e-12)
    with pytest.raises(ConfigError, match=r"25 tensors; expected at most 20: .* order='fifo' .* use another order"):
        plan(workload, profile, [COMPRESSOR], fusion=False, order="fifo")


def test_too_many_are_refused_before_anything_is_done(monkeypatch):
    tensors = tuple(WorkloadTensor(f"t{n}", 1 + n, 0.1) for n in range(many.MOST_APART + 1))
    workload = Workload(tensors)
    with pytest.raises(ConfigError, match=r"5001 tensors; expected at most 5000: fusion=False .* use fusion=True"):
        plan(workload, None, fusion=False, order="backprop")
    with pytest.raises(ConfigError, match=r"5000 tensors of 5000 different sizes; expected at most 1000 sizes"):
        plan(Workload(tensors[1:]), None, fusion=False, order="backprop")
    monkeypatch.setattr(many, "MOST_JOINED", 5_000)
    with pytest.raises(ConfigError, match=r"5001 tensors; expected at most 5000: .* join small tensors"):
        plan(workload, None, order="backprop")


@pytest.mark.parametrize("seed", range(4))
def test_numbers_of_a_group_are_what_the_timeline_says(seed):
    """Of all numbers at once, and after some were moved, against a timeline for each."""
    rng = np.random.default_rng(seed)
    problem_ = random_problem([seed, 3], tensors=12, order="backprop")
    start = np.array([rng.choice(problem_.options(i)) for i in range(12)], np.int64)
    moved = np.array([rng.choice(problem_.options(i)) for i in range(12)], np.int64)
    step, plain = (kind(problem_.timeline, start) for kind in (algorithms.Backprop, algorithms.Events))
    for group in ([0, 4, 5, 9], [11], [1, 2, 3], [0, 4, 5, 9], list(range(12))):
        np.testing.assert_allclose(
            step.by_number(group, start, moved), plain.by_number(group, start, moved), rtol=1e-12
        )
        count = int(rng.integers(len(group) + 1))
        for one in (step, plain):
            one.give(group, np.concatenate([moved[group[:count]], start[group[count:]]]))
    fresh = algorithms.Backprop(problem_.timeline, step.choice)
    for kept, anew in zip(step._kept, fresh._kept):
        np.testing.assert_allclose(kept, anew, rtol=1e-12)


def test_candidates_do_not_depend_on_how_many_sizes_are_priced_together(monkeypatch):
    rng = np.random.default_rng(5)
    workload, profile = random_workload(rng, 12, sizes=9), random_profile(rng)
    together = Problem.of(workload, profile, [COMPRESSOR])
    monkeypatch.setattr(problem, "_AT_ONCE", 2)
    apart = Problem.of(workload, profile, [COMPRESSOR])
    assert np.array_equal(together.route, apart.route) and np.array_equal(together.first, apart.first)
    assert np.array_equal(together.timeline.options.seconds, apart.timeline.options.seconds)
