"""``plan="auto"`` with gradients on a simulated device that is asynchronous."""

from __future__ import annotations

import numpy as np
import pytest
from async_gpu import AsyncGpu, Caller
from gpu_arrays import foreign_memory, values  # noqa: F401

from espresso_mpi import Session, Tuning
from espresso_mpi.arrays import device
from espresso_mpi.autotune import autoplan, payload_costs, room, trials
from espresso_mpi.autotune.profiling import request
from espresso_mpi.autotune.profiling.codecs import Codecs
from espresso_mpi.collectives.messages import gpu_messages
from espresso_mpi.engine import payload_buckets

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]

SIZES = {"w": 70, "b": 9}
NEEDED, NEEDED_TO_MEASURE = 3 * 4 * 79 + 4096, 4 * 4 * 79 + 4096
HURRY = Tuning(("fp16",), skip=1, steps=3, seconds=0.2, trial_steps=60, budget=1e6, accuracy="fast", share=1)


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
    monkeypatch.setattr(request, "devices_of_rank", lambda: ("gpu",))  # a simulated one counts for none
    monkeypatch.setattr(trials, "told_apart", lambda going: True)  # not by how long things take to simulate
    for module in (trials, payload_costs):  # nor is dense left out because simulated dense steps were long
        monkeypatch.setattr(module, "HOPELESS", 1e9)
    monkeypatch.setattr(payload_buckets, "_REPEATS", 1)
    codec = Codecs._codec
    monkeypatch.setattr(Codecs, "_codec", lambda *given: (measured.append(given[2]), codec(*given))[1])
    caller, steps, followed = Caller(gpu, 7), 0, set()
    with Session(plan="auto", tuning=HURRY, min_bytes=0) as session:
        while session.planning or steps < 5:
            found, mean = train(session, caller, world.rank, steps), expected(world.size, steps)
            assert all(np.allclose(found[name], mean[name], atol=1e-2) for name in SIZES)
            steps += 1
            followed |= {s.compressor for s in session.plan.strategies.values()} if session.plan else set()
        assert session.plan is not None and set(session.plan.strategies) == set(SIZES)
    assert measured and set(measured) == {"gpu"} and followed == {"none", "fp16"}


def test_what_a_gpu_has_no_room_for_is_not_tried(world, monkeypatch, caplog):
    """Memory lacks on the last rank alone, for the plan with fp16 and for measurements; training goes on everywhere."""
    gpu, steps, empty, adopted = AsyncGpu(monkeypatch), 0, device.empty, set()

    def limited(size, dtype, where):
        if where == "gpu" and world.rank == world.size - 1 and size * np.dtype(dtype).itemsize >= NEEDED:
            raise MemoryError("CUDA_ERROR_OUT_OF_MEMORY")
        return empty(size, dtype, where)

    monkeypatch.setattr(device, "empty", limited)
    monkeypatch.setattr(gpu_messages, "_LARGE", 256)
    monkeypatch.setattr(room, "_BESIDES", 4096)
    monkeypatch.setattr(trials, "told_apart", lambda going: True)
    monkeypatch.setattr(autoplan, "proposed", lambda *given: adopted.add("measured") or autoplan.Proposed([], []))
    caller = Caller(gpu, 7)
    with caplog.at_level("WARNING", "espresso_mpi"), Session(plan="auto", tuning=HURRY, min_bytes=0) as session:
        while session.planning or steps < 5:
            found, mean = train(session, caller, world.rank, steps), expected(world.size, steps)
            assert all(np.allclose(found[name], mean[name], atol=1e-2) for name in SIZES)
            adopted |= {s.compressor for s in session.plan.strategies.values()} if session.plan else set()
            steps += 1
    assert adopted == {"none"}
    said = [record.getMessage() for record in caplog.records if "no room for" in record.getMessage()]
    wanted = [NEEDED, NEEDED_TO_MEASURE] if world.rank == 0 else []
    assert sorted(int(text.split("no room for ")[1].split(" bytes")[0]) for text in said) == wanted
    assert all(f"rank {world.size - 1}" in text and "OUT_OF_MEMORY" in text for text in said)
