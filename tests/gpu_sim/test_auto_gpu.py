"""``plan="auto"`` with gradients on a simulated device that is asynchronous."""

from __future__ import annotations

import numpy as np
import pytest
from async_gpu import AsyncGpu, Caller
from gpu_arrays import foreign_memory, values  # noqa: F401

from espresso_mpi import Session, Tuning
from espresso_mpi.autotune import trials
from espresso_mpi.autotune.profiling import request
from espresso_mpi.autotune.profiling.codecs import Codecs
from espresso_mpi.engine import payload_buckets

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]

SIZES = {"w": 70, "b": 9}
HURRY = Tuning(("fp16",), skip=1, steps=3, seconds=0.2, trial_steps=60, budget=1e6, accuracy="fast")


def train(session, caller, rank, step):
    """The results of a step."""
    given = {name: caller.gradient(values(rank, step, n, np.float32)) for name, n in SIZES.items()}
    session.sync(given)
    return {name: array.host.copy() for name, array in given.items()}


def expected(size, step):
    every = [{name: values(rank, step, n, np.float32) for name, n in SIZES.items()} for rank in range(size)]
    return {name: np.mean([each[name] for each in every], axis=0) for name in SIZES}


def test_a_plan_is_made_tried_and_followed(world, monkeypatch):
    """From figures of the device as well; the results are the means all the way."""
    gpu, measured = AsyncGpu(monkeypatch), []
    monkeypatch.setattr(request, "_devices", lambda: ("gpu",))  # a simulated one counts for none
    monkeypatch.setattr(trials, "_told_apart", lambda going: True)  # not by how long things take to simulate
    monkeypatch.setattr(payload_buckets, "_REPEATS", 1)
    codec = Codecs._codec
    monkeypatch.setattr(Codecs, "_codec", lambda *given: (measured.append(given[2]), codec(*given))[1])
    caller, steps = Caller(gpu, 7), 0
    with Session(plan="auto", tuning=HURRY) as session:
        while session.planning or steps < 5:
            found, mean = train(session, caller, world.rank, steps), expected(world.size, steps)
            assert all(np.allclose(found[name], mean[name], atol=1e-2) for name in SIZES)
            steps += 1
        assert session.plan is not None and set(session.plan.strategies) == set(SIZES)
    assert "gpu" in measured and steps < 75
