"""Short runs of the benchmarks of synchronisation on several ranks: nothing wrong, rows complete, files written."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from espresso_mpi.bench import mpi_own, overlap, python_beside, routes, scaling, sync, tensors
from espresso_mpi.bench.harness.checks import wrong_together
from espresso_mpi.bench.harness.timing import Repetitions, TimedMethod, in_turns, interleaved
from espresso_mpi.errors import ConfigError

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(300)]


@pytest.fixture
def folder(world, tmp_path):
    """Rank 0's temporary folder, on every rank."""
    return Path(world.bcast(str(tmp_path)))


def test_sync_checks_every_method_and_knows_its_bound(world, folder):
    rows = sync.main(sizes="4KiB,256KiB", compressors="none,int8,onebit", repeats=3, json=folder / "sync.json")
    mpi = ["mpi-allreduce-fp32", "mpi-allreduce-fp32-tuned", "mpi-allreduce-fp16", "mpi-allreduce-fp16-tuned"]
    methods = [*mpi, "none", "int8", "onebit"]
    assert [(row.nbytes, row.method) for row in rows] == [(n, m) for n in (4096, 1 << 18) for m in methods]
    for row in rows:
        assert row.wrong == 0
        assert row.seconds > 0
        assert row.bound_seconds == max(row.wire_seconds, row.memory_seconds) > 0
        assert row.ratio == row.seconds / row.bound_seconds
        assert row.algbw == row.nbytes / row.seconds
        assert row.cpu > 0
        assert (row.kernels is not None) == (row.method in ("int8", "onebit"))
        assert ("/" not in row.route) and (row.route != "")
    if world.rank == 0:
        written = json.loads((folder / "sync.json").read_text())
        assert [row["method"] for row in written["rows"]] == 2 * methods
        assert min(written["yardsticks"]["262144"]["copy"]) > 0


def test_all_of_mpis_own_ways_add_up(world):
    """float32 and float16, by every algorithm that can be chosen; halves without Python's operators."""
    x = np.full(5000, 1.0 + world.rank, np.float32)
    total = np.float32(world.size * (world.size + 1) / 2)
    op, ways = mpi_own.half_sum(), mpi_own.variants(world)
    wrong = []
    for way in ways:
        for values, datatype, add in ((x, MPI.FLOAT, MPI.SUM), (x.astype(np.float16), MPI.UINT16_T, op)):
            mine, out = values.copy(), np.zeros_like(values)
            way.allreduce([mine.view(np.uint8), datatype], [out.view(np.uint8), datatype], add)
            if not np.array_equal(mine if way.in_place else out, np.full_like(values, total)):
                wrong.append((way.text, values.dtype))
    op.Free()
    for way in ways[::2]:
        way.comm.Free()
    assert not wrong
    assert len(ways) == (14 if MPI.get_vendor()[0] == "Open MPI" else 2)


def test_routes_take_turns_and_the_default_is_one_of_them(world, folder):
    methods = ("none", "onebit", "fp16")
    rows = routes.main(sizes="4KiB", compressors=",".join(methods), repeats=3, json=folder / "routes.json")
    flat = ["flat-allgather", "flat-alltoall"]
    expected = {"none": ["flat"], "onebit": flat, "fp16": [*flat, "flat-linear"]}  # one node: no other names
    assert {m: [row.route for row in rows if row.method == m] for m in methods} == expected
    assert all(row.wrong == (None if row.route == "flat-linear" else 0) for row in rows)
    for method in methods:
        mine = [row for row in rows if row.method == method]
        assert sum(row.default for row in mine) == 1
        assert min(row.ratio for row in mine) == 1
        assert all(row.ratio == row.seconds / min(other.seconds for other in mine) for row in mine)
    if world.rank == 0:
        assert len(json.loads((folder / "routes.json").read_text())["rows"]) == len(rows)


def test_routes_carry_the_gradients_of_a_training(world, folder):
    """The sum of dense results is that of the means; feedback brings the rest of a compressed one later."""
    pytest.importorskip("torch")
    path = folder / "routes.json"
    rows = routes.main(sizes="64KiB", compressors="none,int8,onebit", repeats=6, data="gradients", json=path)
    errors = {row.route + ":" + row.method: row.error for row in rows}
    assert errors["flat:none"] < 1e-6
    assert all(1e-6 < error < 0.02 for name, error in errors.items() if "int8" in name)
    assert all(0.05 < error < 1 for name, error in errors.items() if "onebit" in name)
    assert all(row.wrong is None for row in rows)
    if world.rank == 0:
        assert json.loads(path.read_text())["data"] == "gradients"
    with pytest.raises(ConfigError, match="expected normal or gradients"):
        routes.main(data="grads")


def test_sync_writes_traces(world, folder):
    sync.main(sizes="64KiB", compressors="none,onebit", repeats=1, trace=folder / "step.json")
    if world.rank == 0:
        traces = sorted(folder.glob("step*.json"))
        assert len(traces) == 2
        assert all(json.loads(path.read_text())["traceEvents"] for path in traces)


def test_tensors_in_one_call_beside_mpi(world, folder):
    path = folder / "tensors.json"
    rows = tensors.main(sizes="4KiB,256KiB,64B,64KiB", compressors="none,onebit", repeats=3, json=path)
    assert [row.method for row in rows] == [tensors.FUSED, tensors.EACH, "none", "onebit"]
    assert all((row.tensors, row.nbytes, row.wrong) == (4, (4 + 256 + 64) * 1024 + 64, 0) for row in rows)
    assert rows[0].wire_bytes is None
    assert rows[3].wire_bytes < rows[2].wire_bytes
    if world.rank == 0:
        assert json.loads(path.read_text())["kind"] == "tensors"


def test_overlap_yields_what_one_sync_yields(folder):
    path = folder / "overlap.json"
    rows = overlap.main(sizes="64KiB,256KiB,4KiB", compressors="none,onebit", repeats=3, sockets=True, json=path)
    assert [row.method for row in rows] == ["none", "onebit", "sockets"]
    assert {row.repeats for row in rows} == {3}
    for row in rows:
        assert row.wrong == 0
        assert min(row.compute, row.sync, row.largest, row.step) > 0
        assert row.ratio == row.step / row.allowed
        assert row.python_cpu >= 0 and row.python_slowed > -1


def test_work_in_python_is_slowed_by_a_thread_that_holds_the_interpreter_lock(world):
    """Half of the time belongs to the other thread on a quiet node, and less where other programs run."""
    over, threads = threading.Event(), []

    def start():
        over.clear()
        threads.append(threading.Thread(target=burn))
        threads[0].start()

    def finish():
        over.set()
        threads.pop().join()

    def burn():
        while not over.is_set():
            sum(range(1000))

    tries = [python_beside.measured(world, 0.02, start, finish) for _ in range(4)]
    found = max(tries, key=lambda one: one.slowed)
    assert found.slowed > 0.2 and found.waits > 0.1 and found.cpu > 0.1
    still = python_beside.measured(world, 0.02, lambda: None, lambda: None)
    assert still.cpu < 0.1


def test_processor_time_is_that_of_all_ranks(world):
    def work():
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    busy, idle = TimedMethod("busy", work), TimedMethod("idle", lambda: time.sleep(0.05))
    times = in_turns(world, [busy, idle], Repetitions(repeats=3))
    assert times.cpu.shape == times.seconds.shape == (3, 2)
    assert times.cpu[:, 0].min() >= 0.05 * world.size
    assert np.median(times.cpu[:, 1]) < 0.025 * world.size


def test_computing_is_timed_once_for_all_methods():
    """With the same products for each, T_c is the same number: one baseline took turns with all."""
    rows = overlap.main(sizes="64KiB", compressors="none,onebit", compute_ms=5.0, repeats=3)
    assert rows[0].compute == rows[1].compute


def test_scaling_measures_sizes_and_ranks(world, folder):
    path = folder / "scaling.json"
    rows = scaling.main(sizes="4KiB,64KiB,256KiB", compressors="none", ranks=f"{world.size}", repeats=3, json=path)
    assert len(rows) == 2 * 3
    assert {(row.ranks, row.wrong) for row in rows} == {(world.size, 0)}
    counts = sorted({2, world.size})
    few = scaling.main(sizes="4KiB,64KiB", compressors="none", rank_limit="4KiB", ranks=_listed(counts), repeats=3)
    assert {(row.ranks, row.nbytes) for row in few} == {
        (count, n) for count in counts for n in (4096, 65536) if count == world.size or n == 4096
    }
    if world.rank == 0:
        assert {line["method"] for line in json.loads(path.read_text())["fits"]} == {scaling.MPI_METHOD, "none"}


def _listed(numbers):
    return ",".join(map(str, numbers))


def test_the_slowest_rank_counts_and_time_limits_are_common(world):
    import time

    slow = TimedMethod("sleep", lambda: time.sleep(0.05 * (world.rank == world.size - 1)))
    times = interleaved(world, [slow], Repetitions(repeats=50, seconds=0.2))
    assert 3 <= len(times) < 50
    assert times.min() >= 0.05
    assert len(set(world.allgather(len(times)))) == 1


def test_wrong_elements_are_counted_once_where_all_have_the_same(world):
    counted = []

    def count():
        counted.append(world.rank)
        return 2

    assert wrong_together(world, [np.zeros(4, np.float32)], count) == 2 * world.size
    assert counted == [0] * (world.rank == 0)
    different = np.full(4, world.rank, np.float32)
    assert wrong_together(world, [different], lambda: world.rank) == sum(range(world.size))


def test_a_folder_that_does_not_exist_is_refused_first(folder):
    missing = folder / "missing" / "out.json"
    for main in (sync.main, routes.main, tensors.main, overlap.main, scaling.main):
        with pytest.raises(ConfigError, match="directory does not exist"):
            main(json=missing)
