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
from espresso_mpi.types import Route

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(300)]

STAGED, DIRECT = "0", "1"


def options(world, compressor, where):
    route = "hierarchical" if compressor == "none" else "hierarchical-alltoall-packed"
    halves = [[rank for rank in range(world.size) if rank % 2 == half] for half in (0, 1)]
    return {"compressor": compressor, "route": Route.parse(route).on(where), "nodes": halves, "min_bytes": 0}


def differences(world, compressor, seed, patch, back="gpu"):
    """What the device did differently from the host on any rank: pushes from two streams, and memory used again.

    Args:
        back: where payloads are decoded.
    """
    gpu = AsyncGpu(patch, seed)
    callers, problems = [Caller(gpu, 7), Caller(gpu, 8)], []
    given_options = options(world, compressor, "gpu")
    route = Route.parse(str(given_options["route"]).replace("decode@gpu", f"decode@{back}"))
    host, there = Session(**options(world, compressor, "cpu")), Session(**{**given_options, "route": route})
    try:
        for step in range(2):
            expected = {f"w{n}": values(world.rank, [step, n], 80 + n, np.float32) for n in range(2)}
            given = {name: callers[n % 2].gradient(x.copy()) for n, (name, x) in enumerate(expected.items())}
            host.sync(expected)
            for name, array in given.items():
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


# --- each wait, left out ----------------------------------------------------------------------------------------------


def no_drain_in(name):
    """``device.drain`` does nothing when the function ``name`` calls it."""

    def mutate(patch):
        drain = device.drain
        patch.setattr(device, "drain", lambda: None if sys._getframe(1).f_code.co_name == name else drain())

    return mutate


def on_the_default_stream(patch):
    """Kernels are launched as if no session had a stream."""
    patch.setattr(device, "launch_stream", lambda: 0)


def copies_on_the_default_stream(patch):
    """Copies, and the waits for them, as if no session had a stream."""
    patch.setattr(device, "stream", lambda: cuda.default_stream())


MUTATIONS = {
    "a call does not wait for the caller's stream": (
        lambda patch: patch.setattr(device.Arrival, "passed", lambda self: True), STAGED, "none", "gpu",
    ),
    "a call ends before the device": (no_drain_in("_finish"), STAGED, "none", "gpu"),
    "messages are sent before they are copied out": (no_drain_in("_post_staged"), STAGED, "none", "gpu"),
    "device pointers are sent before kernels have written": (no_drain_in("post"), DIRECT, "int8", "gpu"),
    "the host reads before a copy is done": (no_drain_in("copy"), STAGED, "int8", "cpu"),
    "launches go to the default stream": (on_the_default_stream, STAGED, "int8", "gpu"),
    "copies go to the default stream": (copies_on_the_default_stream, STAGED, "int8", "gpu"),
}  # fmt: skip
"""Each with the way of messages, the compressor and the device that decodes where it is noticed."""


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_missing_wait_is_found(world, mutation):
    """By the tests above. Those of staging buffers are left out in ``test_staging``."""
    mutate, way, compressor, back = MUTATIONS[mutation]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPRESSO_CUDA_AWARE", way)
        assert not differences(world, compressor, None, patch, back), "without the mutation"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPRESSO_CUDA_AWARE", way)
        mutate(patch)
        assert differences(world, compressor, None, patch, back), f"nobody noticed: {mutation}"
