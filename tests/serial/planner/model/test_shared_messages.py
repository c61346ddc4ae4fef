"""What a step takes in which tensors share messages, against sums that are written out here."""

from __future__ import annotations

import numpy as np
import pytest
from problem_cases import small_profile, small_workload

from espresso_mpi import Plan, Strategy, compressors
from espresso_mpi.planner.model.problem import evaluated
from espresso_mpi.planner.model.shared_messages import SharingLimits, shared_seconds
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor

INT8 = Strategy("int8", "hierarchical-allgather")


def payloads_of(limit):
    return SharingLimits({INT8.route: limit}, fuse=0, room=0)


def halves(sizes):
    return [-(-n // 2) for n in sizes]


def alone_or_together(sizes):
    """Seconds of one bucket on 2 x 2 ranks by the formulas of ``small_profile``: one latency for each collective."""
    mine, payload = halves(sizes), compressors.get("int8").nbytes
    return sum((
        sum(2e-6 + 4 * n * 1e-11 for n in sizes),
        1e-6 + 2e-10 * 4 * sum(sizes),
        sum(2e-6 + 5e-10 * n for n in mine),
        1e-5 + 2e-9 * sum(payload(n) for n in mine),
        2 * sum(2e-6 + 2e-10 * n for n in mine),
        1e-6 + 2e-10 * 4 * sum(mine),
    ))  # fmt: skip


def packed(sizes, limit):
    """Buckets of payloads, the first an eighth: those before one that does not fit are closed."""
    payload, found, left = compressors.get("int8").nbytes, [], limit // 8
    for n in sizes:
        if payload(n) > limit:
            found.append(([n], True))
            continue
        own = [bucket for bucket, alone in found if not alone]
        if not own or payload(n) > left:
            found.append(([], False))
            left = limit // 8 if not own else limit
        next(bucket for bucket, alone in reversed(found) if not alone).append(n)
        left -= payload(n)
    return [bucket for bucket, _ in found]


@pytest.mark.parametrize("limit", [0, 3000, 20_000, 10**6])
@pytest.mark.parametrize("seed", range(4))
def test_a_bucket_pays_for_one_message_and_encodes_each_tensor(limit, seed):
    workload, profile = small_workload(12, seed), small_profile()
    plan, limits = Plan(default=INT8, held=True), payloads_of(limit)
    buckets = packed([tensor.size for tensor in workload.tensors], limit)
    assert len(buckets) == 12 if limit == 0 else len(buckets) < 12
    expected = workload.tensors[-1].ready + 1e-5 + sum(map(alone_or_together, buckets))
    assert shared_seconds(plan, workload, profile, limits, "serial") == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_pushed_tensors_share_with_those_that_are_ready_at_the_same_time(seed):
    workload, profile = small_workload(6, seed), small_profile()
    plan, limits = Plan(default=INT8), payloads_of(10**6)
    problem, choice = evaluated(plan, workload, profile, lanes="host", order="fifo")
    apart = shared_seconds(plan, workload, profile, limits, "host")
    assert apart == pytest.approx(problem.seconds(choice), rel=1e-9), "all are ready at different times"
    pairs = Workload(tuple(
        WorkloadTensor(t.name, t.size, workload.tensors[i // 2 * 2 + 1].ready) for i, t in enumerate(workload.tensors)
    ))  # fmt: skip
    slow = shared_seconds(plan, pairs, profile, payloads_of(0), "serial")
    quick = shared_seconds(plan, pairs, profile, limits, "serial")
    buckets = [b for i in (0, 2, 4) for b in packed([t.size for t in pairs.tensors[i : i + 2]], 10**6)]
    assert slow >= quick >= 1e-5 + sum(map(alone_or_together, buckets))
    assert len(buckets) == 3 and slow > quick


def test_small_dense_tensors_share_a_buffer_of_limited_room():
    sizes, profile = [1000, 5000, 1000, 1000], small_profile()
    workload = Workload(tuple(WorkloadTensor(f"t{i}", n, 1e-4) for i, n in enumerate(sizes)))
    plan = Plan(default=Strategy("none", "flat"), held=True)

    def seconds(fuse, room):
        return shared_seconds(plan, workload, profile, SharingLimits({}, fuse, room), "serial")

    def of(*buffers):
        found = 1e-4 + 1e-5
        for n in buffers:
            found += 2e-6 + 4 * n * 1e-11 + 2 * 3e-5 + 4e-9 * 4 * n
        return pytest.approx(found, rel=1e-9)

    assert seconds(0, 0) == of(*sizes)
    assert seconds(10_000, 10**6) == of(3000, 5000)
    assert seconds(10_000, 8000) == of(2000, 5000, 1000)
    assert seconds(10**6, 10**6) == of(8000)


def test_a_held_plan_has_all_tensors_ready_at_the_end_and_no_traffic_beside_the_backward_pass():
    workload, apart = small_workload(8, 1), payloads_of(0)
    profile, disturbed = small_profile(), small_profile(slowed=0.5, pushed=1e-3, hidden=0.5)
    held, pushed = Plan(default=INT8, held=True), Plan(default=INT8)
    assert shared_seconds(held, workload, profile, apart) == shared_seconds(held, workload, disturbed, apart)
    assert shared_seconds(pushed, workload, profile, apart) < shared_seconds(pushed, workload, disturbed, apart)
    end = max(tensor.ready for tensor in workload.tensors)
    late = Workload(tuple(WorkloadTensor(t.name, t.size, end) for t in workload.tensors))
    assert np.isclose(shared_seconds(held, workload, profile, apart), shared_seconds(pushed, late, profile, apart))
