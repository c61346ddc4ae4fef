"""``bench validate`` on two ranks: small, and whole."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from espresso_mpi.bench import validate
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.planner.model.workload import Workload


@pytest.mark.skipif(MPI.COMM_WORLD.size != 2, reason="with more ranks it does the same for longer")
def test_pushed_steps_are_predicted_from_what_was_recorded_before(world, tmp_path):
    folder = world.bcast(tmp_path)
    rows = validate.main(
        compressors="int8", tensors="5", calls="push", batch=8, seconds=0.1, profile_seconds=1.0, keep=folder
    )
    world.Barrier()
    profile, workload = Profile.load(folder / "profile.json"), Workload.load(folder / "5-push.json")
    known = validate.plans(workload, profile, ["int8"])
    assert [row.method for row in rows] == ["auto", *known]  # equal plans have one row
    assert all((row.tensors, row.calls, row.recorded) == (5, "push", workload.tensors[-1].ready) for row in rows)
    assert workload.tensors[0].ready < workload.tensors[-1].ready
    names = [tensor.name for tensor in workload.tensors]
    assert len(known) > 2 and all(set(plan.strategies) == set(names) for plan in known.values())
    assert [row.predicted for row in rows[1:]] == [validate.predicted(p, workload, profile) for p in known.values()]
    assert all(0 < row.computing < row.measured <= row.p90 for row in rows)
    assert min(row.ratio_to_best for row in rows) == 1
    assert world.allgather(rows) == [rows] * world.size
