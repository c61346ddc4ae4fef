"""What of the overlap comes true: the share and the cost that are fitted, and what they make of a workload."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from espresso_mpi.autotune.profiling.fits import Effects, effects_of, nonnegative, step_costs
from espresso_mpi.autotune.profiling.whole_steps import SyntheticStep
from espresso_mpi.errors import ConfigError
from espresso_mpi.planner.model.beside import beside
from espresso_mpi.planner.model.curve import ZERO
from espresso_mpi.planner.model.problem import evaluated
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor
from espresso_mpi.planner.workloads.clusters import TESTBEDS
from espresso_mpi.types import Plan, Route, Strategy

WORKLOAD = Workload(tuple(WorkloadTensor(name, 10, at) for name, at in (("a", 0.1), ("b", 0.3), ("c", 0.5))))


def known(**more):
    return Profile(1, 1, {}, {}, {}, ZERO, **more)


@pytest.mark.parametrize("effects", [(0.0, 0.0, 0.0), (0.37, 0.0, 2e-4), (0.0, 0.4, 1e-3), (1.0, 0.25, 0.0)])
def test_effects_explain_what_was_measured(effects):
    hidden, slowed, pushed = effects
    saved, count = np.array([0.01, 0.002, 0.03, 0.0]), np.array([5, 30, 10, 30])
    beside, scale = np.array([0.008, 0.01, 0.04, 0.005]), np.array([0.02, 0.01, 0.05, 0.01])
    rows = np.stack([saved, beside, count, pushed * count + slowed * beside - hidden * saved, scale], axis=1)
    found = effects_of(rows)
    assert (found.hidden, found.slowed, found.pushed) == pytest.approx(effects, abs=1e-9)


def test_no_more_is_hidden_than_the_timeline_expects_and_no_push_pays():
    rows = np.array([[0.01, 0.02, 5, -0.02, 0.05], [0.02, 0.03, 10, -0.04, 0.05]])
    assert effects_of(rows) == Effects(1.0, 0.0, 0.0)


@pytest.mark.parametrize("call, tensor", [(2e-3, 3e-4), (0.0, 3e-4), (2e-3, 0.0)])
def test_costs_explain_what_steps_take(call, tensor):
    count, late = np.array([5, 10, 30, 30]), np.array([0.01, 0.012, 0.03, 0.02])
    rows = np.stack([count, call + tensor * count, late], axis=1)
    assert step_costs(rows) == pytest.approx((call, tensor), abs=1e-12)


def test_costs_are_never_below_zero():
    assert step_costs(np.array([[5, -0.002, 0.01], [10, 0.001, 0.01], [30, 0.005, 0.03]]))[0] == 0.0


def test_the_best_of_what_is_not_below_zero():
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((20, 3)), rng.standard_normal(20)
    found, left = nonnegative(a, b)
    grid = np.maximum(found + rng.normal(0, 0.05, (2000, 3)) * rng.integers(0, 2, (2000, 3)), 0)
    assert np.all(found >= 0)
    assert left == pytest.approx(np.sum((a @ found - b) ** 2))
    assert left <= np.min(np.sum((grid @ a.T - b) ** 2, axis=1)) + 1e-12


def test_ready_times_beside_communication():
    def ready(**more):
        return [t.ready for t in beside(WORKLOAD, known(**more))[0].tensors]

    assert beside(WORKLOAD, known()) == (WORKLOAD, known())
    assert ready(hidden=0.25) == pytest.approx([0.4, 0.45, 0.5])
    assert ready(hidden=0.0) == [0.5, 0.5, 0.5]
    assert ready(slowed=0.5) == pytest.approx([0.3, 0.5, 0.7])
    assert ready(hidden=0.0, slowed=0.5) == pytest.approx([0.7, 0.7, 0.7])


def test_what_a_push_costs_is_paid_by_every_buffer():
    profile = known(tensor=0.02, pushed=0.01, hidden=0.0)
    adjusted = beside(*beside(WORKLOAD, profile))  # once is enough
    for groups, buffers in (((), 3), ((("a", "c"),), 2), ((("a", "b", "c"),), 1)):
        plan = Plan(default=Strategy("none", Route.parse("flat")), groups=groups)
        problem, choice = evaluated(plan, *adjusted, lanes="serial", order="fifo")
        assert problem.seconds(choice) == pytest.approx(0.5 + 0.03 * buffers)


def test_steps_without_pushes_and_backward_passes_of_gpus_stay_as_they_are():
    late = Workload(tuple(WorkloadTensor(name, 10, 0.5) for name in "ab"))
    profile = known(hidden=0.0, slowed=1.0, pushed=0.01)
    assert beside(late, profile) == (late, profile)
    elsewhere = Workload(WORKLOAD.tensors, "gpu")
    assert beside(elsewhere, profile) == (elsewhere, profile)


def test_a_step_shares_its_computing_out():
    step = SyntheticStep(4, 100, 0.02)
    assert [t.ready for t in step.workload(pushed=True).tensors] == pytest.approx([0.005, 0.01, 0.015, 0.02])
    assert {t.ready for t in step.workload(pushed=False).tensors} == {0.02}


def test_profiles_keep_both():
    profile = known(hidden=0.25, slowed=0.5, pushed=0.01)
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    with pytest.raises(ConfigError, match="hidden"):
        known(hidden=1.5)


@pytest.mark.parametrize("segment_bytes", [0, 4096])
def test_what_a_tensor_costs_counts_once_however_many_segments_it_has(segment_bytes):
    cluster = replace(TESTBEDS["pcie-25g"], nodes=2, gpus_per_node=1)
    cheap, dear = (replace(cluster.profile(), segment_bytes=segment_bytes, tensor=cost) for cost in (1e-3, 0.251))
    workload, plan = Workload((WorkloadTensor("w", 1 << 17, 1.0),)), Plan({"w": Strategy("none", "flat")})
    seconds = [problem.seconds(choice) for problem, choice in (evaluated(plan, workload, p, lanes="serial")
                                                               for p in (cheap, dear))]  # fmt: skip
    assert seconds[1] - seconds[0] == pytest.approx(0.25, rel=1e-9)
