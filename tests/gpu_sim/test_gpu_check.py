"""What the ranks of ``gpu-check`` do, with small arrays on a simulated device that is asynchronous."""

from __future__ import annotations

import json
import os
import sys

import pytest
from async_gpu import AsyncGpu
from fake_cupy import FakeCupy
from gpu_arrays import foreign_memory  # noqa: F401

from espresso_mpi.arrays import device
from espresso_mpi.bench.gpu import ranks, suite
from espresso_mpi.bench.gpu.report import _BESIDE_TIMES
from espresso_mpi.collectives.messages import switches
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


@pytest.mark.parametrize("waits", [0, 1])
def test_waits_of_the_host_are_counted(world, cupy, monkeypatch, waits):
    """None, unless the session waits for its stream with each call."""
    stats = ranks.Session.sync
    if waits:
        monkeypatch.setattr(ranks.Session, "sync", lambda *given: (stats(*given), device.Mark().wait())[0])
    assert world.allgather(ranks.synchronises(cupy)) == [10 * waits] * world.size


def test_staged_messages_are_timed_beside_device_pointers(world, cupy, monkeypatch):
    opened, session = [], ranks.Session
    monkeypatch.setattr(
        ranks, "Session", lambda **given: opened.append(os.environ.get(switches.SWITCH)) or session(**given)
    )
    monkeypatch.setenv(switches.SWITCH, "1")
    (row,) = ranks.times(world, cupy, "int8", ranks.takes_pointers(world))
    assert all(row[name] > 0 for name in ("gpu_s", "staged_s", "host_s"))
    assert os.environ[switches.SWITCH] == "1" and opened == ["1", "1", "0"]
    monkeypatch.delenv(switches.SWITCH)
    (row,) = ranks.times(world, cupy, "int8", ranks.takes_pointers(world))
    assert "staged_s" not in row


def test_the_whole_check(world, cupy, monkeypatch, tmp_path):
    """All parts but the job of ranks (above), and what kernels write and how fast (``tests/serial``)."""
    pytest.importorskip("matplotlib")
    problem = world.bcast(_checked(monkeypatch, tmp_path) if world.rank == 0 else None)
    assert not problem, problem


def _checked(patch, folder):
    """What is wrong with the reports of a check."""
    tool = folder / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho '========= ERROR SUMMARY: 0 errors'\n")
    tool.chmod(0o755)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    patch.setattr(suite.speeds, "require_gpu", lambda what: None)
    patch.setattr(suite, "gpus", lambda: [{"name": "a simulated GPU"}])
    patch.setattr(suite, "_BESIDE_ELEMENTS", 300)
    patch.setattr(suite, "_BESIDE_SIDE", 4)
    files = {name: folder / name for name in ("gpu.json", "gpu.md", "gpu.png")}
    status = suite.main("beside,pointers,sanitizer", *files.values())
    result, text = json.loads(files["gpu.json"].read_text()), files["gpu.md"].read_text()
    beside = {row["method"]: row for row in result["beside"]}
    wrong = {
        "status": status != 0,
        "methods": set(beside) != set(suite._BESIDE),
        "times": any(min(row[key] for key in _BESIDE_TIMES) <= 0 for row in beside.values()),
        "rows": not all(one["promise"] in text for one in result["rows"]) or len(result["rows"]) != 4,
        "sanitizer": result["sanitizer"]["status"] != 0 or "0 errors" not in text,
        "picture": files["gpu.png"].read_bytes()[:4] != b"\x89PNG",
    }
    return [name for name, is_wrong in wrong.items() if is_wrong]
