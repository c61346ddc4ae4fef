"""Plans with a schedule: the same means bit by bit as without, the same operations in the same order on all ranks."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from patience import until

from espresso_mpi import Plan, Strategy
from espresso_mpi.collectives.lanes import LaneRunner
from espresso_mpi.compressors import get
from espresso_mpi.errors import ConfigError, NonFiniteError
from espresso_mpi.planner.model.timetables import with_schedule
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor
from espresso_mpi.planner.workloads.clusters import TESTBEDS, Link
from espresso_mpi.timetable import Lanes, Schedule

pytestmark = pytest.mark.mpi(min_size=2)

SIZES = {f"w{n}": size for n, size in enumerate((70_000, 300, 9_000, 40_000, 64, 120_000, 5_000))}
WAYS = [
    ("onebit", "hierarchical-alltoall"), ("none", "hierarchical"), ("fp16", "flat-allgather"),
    ("topk:ratio=0.05", "hierarchical-allgather"), ("none", "flat"), ("int4", "hierarchical-alltoall-packed"),
    ("randomk:ratio=0.1", "hierarchical-linear"),
]  # fmt: skip
SEGMENT = 4_000


def nodes_of(ranks):
    """Two of half the ranks each; the last rank of an odd number belongs to the second."""
    return [list(range(ranks // 2)), list(range(ranks // 2, ranks))]


def planned(ranks, lanes="host", order="schedule", ways=tuple(WAYS), groups=()):
    """A plan with the schedule that suits a slow network; the profile is of as many ranks on each of two nodes."""
    names = tuple(str(get(name).at(None)) for name, _ in WAYS if name != "none")
    cluster = replace(TESTBEDS["pcie-25g"], nodes=2, gpus_per_node=max(1, ranks // 2), inter=Link.gbit(1.0, 1e-4),
                      compressors=names)  # fmt: skip
    profile = replace(cluster.profile(), segment_bytes=SEGMENT)
    strategies = {name: Strategy(*way) for name, way in zip(SIZES, ways)}
    workload = Workload(
        tuple(WorkloadTensor(name, n, 1e-3 * (i + 1)) for i, (name, n) in enumerate(SIZES.items())), "cpu"
    )
    plan = Plan(strategies, groups=groups, fuse_bytes=0)
    return with_schedule(plan, workload, profile, lanes, order)


@pytest.fixture
def begun(monkeypatch):
    """What every ``LaneRunner`` begins, in order: (session, lane, bucket, segment, operation)."""
    found, real = [], LaneRunner.__init__

    def init(self, schedule, warn):
        number = init.count = getattr(init, "count", 0) + 1
        real(self, schedule, pytest.fail, lambda lane, s, at, now: found.append((number, lane, s.bucket, s.number, at)))

    monkeypatch.setattr(LaneRunner, "__init__", init)
    return found


def gradients(rank, step, names=tuple(SIZES)):
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(SIZES[name]).astype(np.float32) for name in names}


def same_everywhere(world, value):
    return all(other == value for other in world.allgather(value))


@pytest.mark.parametrize(
    ("lanes", "order"), [("host", "schedule"), ("one-network", "schedule"), ("separate", "fifo"), ("host", "priority")]
)
def test_means_are_those_of_sessions_without_a_schedule(world, open_session, begun, lanes, order):
    plan = planned(world.size, lanes, order)
    how = {"nodes": nodes_of(world.size), "segment_bytes": SEGMENT}
    session, plain = (open_session(plan=p, **how) for p in (plan, replace(plan, schedule=None)))
    for step in range(3):
        grads, twins = gradients(world.rank, step), gradients(world.rank, step)
        session.sync(grads)
        plain.sync(twins)
        for name in SIZES:
            np.testing.assert_array_equal(grads[name], twins[name])
    assert same_everywhere(world, begun)
    expected = sum(len(t.starts) * (len(t.operations) - (t.operations[0] == "check")) for t in tables(plan))
    assert len(begun) == 3 * expected
    assert len({lane for _, lane, *_ in begun}) == len({lane for t in tables(plan) for lane in t.lanes})


def tables(plan):
    return plan.schedule.buffers.values()


def test_pushes_in_any_order_and_steps_without_some_tensors(world, open_session, begun):
    """Ranks push in orders of their own, leave out the same tensors, and bring one that the plan does not list."""
    plan = replace(planned(world.size), default=Strategy("none", "flat"))
    how = {"nodes": nodes_of(world.size), "segment_bytes": SEGMENT}
    session, plain = (open_session(plan=p, **how) for p in (plan, replace(plan, schedule=None)))
    for step in range(6):
        names = [name for n, name in enumerate(SIZES) if (n + step) % 4]
        results = []
        for number, one in enumerate((session, plain)):
            grads = {**gradients(world.rank, step, names), "new": np.full(50_000, world.rank + step, np.float32)}
            order = np.random.default_rng([world.rank, step, number]).permutation(list(grads))
            for name in order:
                one.push(name, grads[name], priority=float(step % 2 and SIZES.get(name, 0)))
            one.wait_all()
            results.append(grads)
        for name, mine in results[0].items():
            np.testing.assert_array_equal(mine, results[1][name])
    assert same_everywhere(world, begun)


def test_groups_share_a_timetable(world, open_session, begun):
    ways = [WAYS[0]] * 3 + WAYS[3:]
    plan = planned(world.size, ways=tuple(ways), groups=(("w0", "w1", "w2"),))
    assert any(name.startswith("w0..w2") for name in plan.schedule.buffers)
    session = open_session(plan=plan, nodes=nodes_of(world.size), segment_bytes=SEGMENT)
    for step in range(2):
        session.sync(gradients(world.rank, step))
    assert {key[2] for key in begun} == set(plan.schedule.buffers) and same_everywhere(world, begun)


def test_a_refused_call_and_other_plans_in_between(world, open_session):
    """NaN on one rank fails its call alone; sessions change between plans with and without a schedule."""
    plan = planned(world.size)
    session = open_session(plan=plan, nodes=nodes_of(world.size), segment_bytes=SEGMENT, nonfinite="raise")
    grads = gradients(world.rank, 0)
    handles = [session.push(name, grads[name]) for name in SIZES if name != "w3"]
    grads["w3"][5] = np.nan if world.rank == 0 else 0.0
    bad = session.push("w3", grads["w3"])
    with pytest.raises(NonFiniteError, match="w3"):
        bad.wait()
    for handle in handles:
        handle.wait()
    serial = planned(world.size, "serial")
    assert serial.schedule is None  # one lane: every order that does not idle takes as long
    for number, other in enumerate((serial, planned(world.size, "separate"), plan)):
        session.follow(other)
        grads = gradients(world.rank, number)
        session.sync(grads)
        assert same_everywhere(world, {name: zlib.crc32(x) for name, x in grads.items()})


# --- where the backward pass has a lane with operations, these wait for gradients that come before them ---------------

SHARED = Lanes(gpu=0, cpu=0, intra=1, inter=2, compute=0)


@pytest.fixture
def gated(world, open_session):
    """A session in which encoding w0 comes after the last gradient: the schedule of processors that compute, too."""
    plan = planned(world.size, SHARED)
    later = {
        name: replace(table, starts=tuple(tuple(at + 10 for at in row) for row in table.starts))
        for name, table in plan.schedule.buffers.items()
    }
    plan = replace(plan, schedule=Schedule(plan.schedule.lanes, later))
    return open_session(plan=plan, nodes=nodes_of(world.size), segment_bytes=SEGMENT)


def test_ranks_that_wait_for_different_tensors(world, gated):
    grads = gradients(world.rank, 0)
    first, second = (gated.push(name, grads[name]) for name in ("w0", "w2")) if world.rank == 0 else (None, None)
    if world.rank:
        first = gated.push("w0", grads["w0"])
        first.wait()
        second = gated.push("w2", grads["w2"])
    first.wait()
    second.wait()


def test_tensors_that_never_come(world, gated):
    """A step without the others, whose caller asks instead of waiting; and something else in the middle."""
    grads = gradients(world.rank, 0)
    assert until(gated.push("w0", grads["w0"]).done)
    late = gated.push("w2", grads["w2"])
    with pytest.raises(ConfigError, match="wait_all"):
        gated.rescale(0.5)
    late.wait()
    gated.rescale(0.5)


def test_a_recording_that_ends_by_an_error_with_tensors_under_way(world, open_session, tmp_path):
    """They go on as they began; the next step goes by the plan again."""
    plan = planned(world.size)
    session = open_session(plan=plan, nodes=nodes_of(world.size), segment_bytes=SEGMENT)
    for step in range(2):
        grads, path = gradients(world.rank, step), world.bcast(str(tmp_path / f"{step}.json"))
        with pytest.raises(KeyError, match="mine"):
            _failing_recording(session, path, grads)
        session.wait_all()
        grads = gradients(world.rank, step)
        session.sync(grads)
        assert same_everywhere(world, {name: zlib.crc32(x) for name, x in grads.items()})
    assert isinstance(session._engine._dispatcher.runner, LaneRunner)


def _failing_recording(session, path, grads):
    with session.record_workload(path):
        handles = [session.push(name, grads[name]) for name in SIZES]
        handles[0].wait()
        raise KeyError("mine")
