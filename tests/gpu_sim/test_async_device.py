"""Sessions on a device that is asynchronous, and whether these tests find every wait that is left out."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from async_gpu import AsyncGpu, Caller
from gpu_arrays import foreign_memory, values  # noqa: F401
from mpi4py import MPI
from numba import cuda

from espresso_mpi import Session
from espresso_mpi.arrays import device
from espresso_mpi.collectives.data import cuda_sums
from espresso_mpi.collectives.messages import gpu_calls
from espresso_mpi.collectives.messages.gpu_messages import GpuMessages
from espresso_mpi.compressors.kernels.cuda import sparse, topk  # noqa: F401 - not in a thread, while a kernel runs
from espresso_mpi.engine.gpu_ends import GpuEnds
from espresso_mpi.errors import NonFiniteError
from espresso_mpi.types import Route

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(300)]

STAGED, DIRECT = "0", "1"


def options(world, compressor, where):
    route = "hierarchical" if compressor == "none" else "hierarchical-alltoall-packed"
    halves = [[rank for rank in range(world.size) if rank % 2 == half] for half in (0, 1)]
    return {"compressor": compressor, "route": Route.parse(route).on(where), "nodes": halves, "min_bytes": 0}


def differences(world, compressor, seed, patch, back="gpu", together=False, eager="", unit=None):
    """What the device did differently from the host on any rank: pushes from two streams, and memory used again.

    Args:
        back: where payloads are decoded.
        together: all tensors in one call, so that they share messages.
        eager: copies that run at once.
        unit: bytes that a copy is said to move in the time in which it starts: short parts of arrays are sent.
    """
    gpu = AsyncGpu(patch, seed, eager)
    if unit is not None:
        patch.setattr(gpu_calls, "measured_unit", lambda: unit)
    callers, problems = [Caller(gpu, 7), Caller(gpu, 8)], []
    given_options = options(world, compressor, "gpu")
    route = Route.parse(str(given_options["route"]).replace("decode@gpu", f"decode@{back}"))
    host, there = Session(**options(world, compressor, "cpu")), Session(**{**given_options, "route": route})
    try:
        for step in range(2):
            expected = {f"w{n}": values(world.rank, [step, n], 80 + n, np.float32) for n in range(2)}
            given = {name: callers[n % 2].gradient(x.copy()) for n, (name, x) in enumerate(expected.items())}
            host.sync(expected)
            if together:
                there.sync(given)
            for name, array in () if together else given.items():
                there.push(name, array)
            there.wait_all()
            found = {name: array.host.copy() for name, array in given.items()}
            for array in given.values():
                array.host[:] = np.nan  # the caller's allocator gives the memory to somebody else
            problems += [f"step {step}, {name}" for name, x in expected.items() if not np.array_equal(found[name], x)]
        gpu.run()
        for session in (host, there):
            session.close()
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
    return world.allreduce(problems, MPI.SUM)


@pytest.mark.parametrize("way", [STAGED, DIRECT])
@pytest.mark.parametrize("compressor", ["none", "int8"])
@pytest.mark.parametrize("seed", [None, 1])
def test_pushes_from_several_streams(world, monkeypatch, way, compressor, seed):
    monkeypatch.setenv("ESPRESSO_CUDA_AWARE", way)
    assert not differences(world, compressor, None if seed is None else seed + world.rank, monkeypatch)


@pytest.mark.parametrize("way", [STAGED, DIRECT])
@pytest.mark.parametrize("compressor", ["onebit", "topk:ratio=0.1"])
def test_tensors_that_share_messages(world, monkeypatch, way, compressor):
    monkeypatch.setenv("ESPRESSO_CUDA_AWARE", way)
    assert not differences(world, compressor, None, monkeypatch, together=True)


@pytest.mark.parametrize("compressor, eager", [("none", "in"), ("int8", "out")])
def test_arrays_in_parts(world, monkeypatch, compressor, eager):
    monkeypatch.setenv("ESPRESSO_CUDA_AWARE", STAGED)
    assert not differences(world, compressor, None, monkeypatch, eager=eager, unit=16)


@pytest.mark.parametrize("seed", [None, 1])
def test_two_sessions_in_two_threads(world, monkeypatch, seed):
    """Scratch memory and counters belong to a session's stream: their launches mix."""
    gpu = AsyncGpu(monkeypatch, seed)
    with pairs_of_sessions(world) as pairs:
        problems = in_threads(world, gpu, pairs)
    assert not world.allreduce(problems, MPI.SUM)


@contextmanager
def pairs_of_sessions(world):
    pairs = [
        tuple(Session(**options(world, compressor, where)) for where in ("cpu", "gpu"))
        for compressor in ("topk:ratio=0.1", "dgc:ratio=0.2")
    ]
    yield pairs
    for session in (session for pair in pairs for session in pair):
        session.close()


def in_threads(world, gpu, pairs):
    """What differs when each pair of sessions has a thread, and the same calls on the host and on the device."""
    problems = []

    def train(number, host, there):
        caller = Caller(gpu, 7 + number)
        for step in range(2):
            expected = values(world.rank, [step, number], 100, np.float32)
            given = caller.gradient(expected.copy())
            there.push("w", given).wait()
            host.push("w", expected).wait()
            if not np.array_equal(given.host, expected):
                problems.append(f"session {number}, step {step}")

    threads = [threading.Thread(target=train, args=(number, *pair)) for number, pair in enumerate(pairs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return problems + [f"thread {n} hangs" for n, thread in enumerate(threads) if thread.is_alive()]


# --- what the host does not wait for ----------------------------------------------------------------------------------


def nan_is_found(world, patch):
    """On how many ranks a call with NaN on the last one is an error, and leaves the gradient as it was."""
    gpu = AsyncGpu(patch)
    session = Session(**options(world, "int8", "gpu"))
    clean = values(world.rank, [0, 0], 90, np.float32)
    if world.rank == world.size - 1:
        clean[70] = np.nan
    given, refused = Caller(gpu, 7).gradient(clean.copy()), False
    try:
        session.push("w", given).wait()
    except NonFiniteError as error:
        refused = f"rank {world.size - 1}" in str(error) and np.array_equal(given.host, clean, equal_nan=True)
    gpu.run()
    session.close()
    return world.allreduce(refused)


def test_nan_is_found_before_values_travel(world, monkeypatch):
    assert nan_is_found(world, monkeypatch) == world.size


def test_a_search_read_too_early_is_found(world, monkeypatch):
    """By the test above: the counts are still those of page-locked memory that nothing has written."""
    monkeypatch.setattr(cuda_sums.Counts, "passed", lambda self: True)
    assert nan_is_found(world, monkeypatch) == 0


@pytest.mark.parametrize("compressor", ["none", "fp16", "onebit"])
def test_the_host_waits_for_messages_only(world, monkeypatch, compressor):
    """And there by asking events: no call waits for a stream or an event. Tensors share messages."""
    monkeypatch.setenv("ESPRESSO_CUDA_AWARE", STAGED)
    gpu, exchanges = AsyncGpu(monkeypatch), []
    post = GpuMessages.post
    monkeypatch.setattr(GpuMessages, "post", lambda *given: (exchanges.append(1), post(*given))[1])
    route = Route.parse("flat" if compressor == "none" else "flat-alltoall").on("gpu")
    session = Session(compressor=compressor, route=route, min_bytes=0, fuse_bytes=1 << 16)
    caller, counts = Caller(gpu, 7), []
    for tensors in (3, 3, 1, 1):
        exchanges.clear()
        gpu.log.clear()
        session.sync({f"w{n}": caller.gradient(np.ones(80 + n, np.float32)) for n in range(tensors)})
        counts.append(len(exchanges))
        assert "out" in gpu.log and (not counts[1:] or not {"wait", "drain", "synchronize"} & set(gpu.log))
    assert counts[1] == counts[3], "without those of the first calls"
    session.close()


@pytest.mark.parametrize("compressor", ["onebit", "int8", "fp16"])
def test_launches_of_a_small_tensor(world, monkeypatch, compressor):
    """A search, an encode, and a decode for each rank, of which the last one divides."""
    gpu = AsyncGpu(monkeypatch)
    with Session(compressor=compressor, route=Route.parse("flat-allgather").on("gpu"), min_bytes=0) as session:
        for _ in range(2):
            gpu.log.clear()
            session.sync({f"w{n}": Caller(gpu, 7).gradient(np.ones(80 + n, np.float32)) for n in range(2)})
    assert gpu.log.count("launch") == 2 * (2 + world.size), "in the second step: in the first, a session measures"


CUT = [("fp16", "flat-alltoall", 1e5), ("fp16", "flat-linear", 4e4), ("onebit", "flat-alltoall", 2.0**120)]


@pytest.mark.parametrize("compressor, route, value", CUT)
def test_cut_values_are_counted(world, monkeypatch, compressor, route, value):
    """As on the host; those of one call by its end."""
    gpu = AsyncGpu(monkeypatch)
    caller, large, counted = Caller(gpu, 7), np.full(4096, value, np.float32), {}
    for where in ("cpu", "gpu"):
        session = Session(compressor=compressor, route=Route.parse(route).on(where), feedback="none", window_bytes=0)
        for _ in range(2):
            session.sync({"w": caller.gradient(large.copy()) if where == "gpu" else large.copy()})
        counted[where] = session.stats().saturated
        session.close()
    pairs = world.allgather((counted["cpu"], counted["gpu"]))
    assert all(here == there for here, there in pairs) and sum(here for here, _ in pairs) > 0


# --- each wait, left out ----------------------------------------------------------------------------------------------


def no_drain_in(name):
    """``device.drain`` does nothing when the function ``name`` calls it."""

    def mutate(patch):
        drain = device.drain
        patch.setattr(device, "drain", lambda: None if sys._getframe(1).f_code.co_name == name else drain())

    return mutate


def no_hold_in(name):
    """``Mark.hold`` does nothing when the function ``name`` calls it."""

    def mutate(patch):
        hold = device.Mark.hold
        patch.setattr(
            device.Mark, "hold", lambda *given: None if sys._getframe(1).f_code.co_name == name else hold(*given)
        )

    return mutate


def messages_at_once(patch):
    """Messages start whatever the device has done."""
    passed = device.Mark.passed
    patch.setattr(device.Mark, "passed", lambda mark: sys._getframe(1).f_code.co_name == "advance" or passed(mark))


def on_the_default_stream(patch):
    """Kernels are launched as if no session had a stream."""
    patch.setattr(device, "launch_queue", lambda: device.Queue(cuda.default_stream(), 0))


def copies_on_the_default_stream(patch):
    """Copies, and the waits for them, as if no session had a stream."""
    patch.setattr(device, "stream", lambda: cuda.default_stream())


MUTATIONS = {
    "a call does not wait for the caller's stream": (
        lambda patch: patch.setattr(device.Arrival, "passed", lambda self: True), STAGED, "none", "gpu",
    ),
    "a call ends before the device": (
        lambda patch: patch.setattr(GpuEnds, "add", lambda self, call: False), STAGED, "none", "gpu",
    ),
    "messages are copied out before kernels have written them": (no_hold_in("_staged"), STAGED, "int8", "gpu"),
    "messages are sent before they are copied out": (messages_at_once, STAGED, "none", "gpu"),
    "kernels read messages before they are copied in": (no_hold_in("end"), STAGED, "none", "gpu"),
    "device pointers are sent before kernels have written": (messages_at_once, DIRECT, "int8", "gpu"),
    "the host reads before a copy is done": (no_drain_in("copy"), STAGED, "int8", "cpu"),
    "launches go to the default stream": (on_the_default_stream, STAGED, "int8", "gpu"),
    "copies go to the default stream": (copies_on_the_default_stream, STAGED, "int8", "gpu"),
}  # fmt: skip
"""Each with the way of messages, the compressor and the device that decodes where it is noticed."""


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_missing_wait_is_found(world, mutation):
    """By the tests above. Others are left out in ``test_staging`` and ``test_pipeline``."""
    mutate, way, compressor, back = MUTATIONS[mutation]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPRESSO_CUDA_AWARE", way)
        assert not differences(world, compressor, None, patch, back), "without the mutation"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPRESSO_CUDA_AWARE", way)
        mutate(patch)
        assert differences(world, compressor, None, patch, back), f"nobody noticed: {mutation}"
