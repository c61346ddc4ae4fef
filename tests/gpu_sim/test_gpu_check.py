"""What the ranks of ``gpu-check`` do, with small arrays on a simulated device that is asynchronous."""

from __future__ import annotations

import json
import sys

import pytest
from async_gpu import AsyncGpu
from fake_cupy import FakeCupy
from gpu_arrays import foreign_memory  # noqa: F401

from espresso_mpi.arrays import device
from espresso_mpi.bench.gpu import ranks, suite
from espresso_mpi.compressors.kernels.cuda import sparse, topk  # noqa: F401 - not in a thread, while a kernel runs

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(300)]

SMALL = {
    "ROUTES": ("flat-allgather",), "METHODS": ("int8",), "_LAYERS": 2, "_WIDTH": 8, "_BATCH": 8, "_ROUNDS": 2,
    "_ELEMENTS": (70,), "_IN_THREADS": 70, "_ARRAYS": 2,
    "_methods": lambda route: ("int8",), "_BESIDE_LATE": 70, "_LATE_SIDE": 4, "_STEADY": 70, "_BYTES": (280,),
}  # fmt: skip


@pytest.fixture
def cupy(monkeypatch):
    fake = FakeCupy(AsyncGpu(monkeypatch))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(device, "use_gpu", lambda number: None)
    for name, value in SMALL.items():
        monkeypatch.setattr(ranks, name, value)
    return fake


def test_the_ranks_of_gpu_check(world, cupy, tmp_path):
    path = tmp_path / f"{world.rank}.json"
    ranks.main(str(path))
    assert path.exists() == (world.rank == 0)
    found = world.bcast(json.loads(path.read_text()) if world.rank == 0 else None)
    assert (found["ranks"], found["gpus"]) == (world.size, 1)
    kept = {one.promise: one.kept for one in suite._of_ranks(found)}
    assert all(kept[promise] for promise in list(kept)[:4]), "the others are of speed"
    assert len(kept) == 5 and len(found["sizes"]) == 1


def test_a_result_that_is_read_too_early_is_found(world, cupy, monkeypatch):
    monkeypatch.setattr(device.Arrival, "passed", lambda self: True)
    assert ranks.side_stream(world, cupy) > 0
