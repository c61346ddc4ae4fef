"""When gradients on a GPU are ready, and which GPU a thread works on."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from async_gpu import AsyncGpu, Caller
from gpu_arrays import foreign_memory, values  # noqa: F401
from numba import cuda

from espresso_mpi import Session, Tuning
from espresso_mpi.arrays import device, gpu_times
from espresso_mpi.arrays.gpu_times import Moment
from espresso_mpi.autotune import autoplan
from espresso_mpi.autotune.clock import StepClock
from espresso_mpi.types import TensorSpec

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]

LASTS = 50.0
"""Seconds of a kernel of the caller: far longer than the host takes to simulate it."""


def test_gradients_are_ready_one_after_the_other(monkeypatch):
    """By the clock of the device, whatever the host does meanwhile."""
    gpu = AsyncGpu(monkeypatch)
    gpu.lasts = LASTS
    monkeypatch.setattr(gpu_times, "_FRESH_S", 0.0)  # the two clocks do not agree
    caller, clock = Caller(gpu, 7), StepClock()
    for _ in range(2):
        for n in range(3):
            array = caller.gradient(np.ones(4, np.float32))
            spec = TensorSpec(f"w{n}", array.shape, "float32", "gpu")
            clock.called(("push", spec.name), (spec,), Moment([7]))
        gpu.run()
        with clock.within():
            clock.waited(time.perf_counter())
        clock.end_step()
    (recorded,) = clock.steps
    assert np.allclose(recorded.ready, [LASTS, 2 * LASTS, 3 * LASTS], atol=1.0)


def test_a_call_that_is_waited_for_while_its_gradient_is_computed(monkeypatch):
    """All kernels are queued, and then one call after the other is made and waited for: the wait is no idle time."""
    gpu = AsyncGpu(monkeypatch)
    gpu.lasts = LASTS
    monkeypatch.setattr(gpu_times, "_FRESH_S", 0.0)
    caller, now = Caller(gpu, 7), [0.0]
    monkeypatch.setattr(gpu_times.time, "perf_counter", lambda: gpu.clock + now[0])  # the host's clock goes on as well
    clock = StepClock(clock=gpu_times.time.perf_counter)
    for _ in range(2):
        arrays = [caller.gradient(np.ones(4, np.float32)) for _ in range(2)]
        for n, array in enumerate(arrays):
            spec, since = TensorSpec(f"w{n}", array.shape, "float32", "gpu"), gpu_times.time.perf_counter()
            clock.called(("sync", spec.name), (spec,), Moment([7]))
            gpu.run()
            now[0] += 3.0  # its messages
            clock.waited(since, ("sync", spec.name))
        clock.end_step()
    (recorded,) = clock.steps
    assert np.allclose(recorded.ready, [2 * LASTS, 2 * LASTS]) and recorded.seconds == pytest.approx(2 * LASTS + 6)


@pytest.mark.parametrize("pushed", [True, False])
def test_a_gradient_is_ready_when_the_gpu_has_passed_its_kernel(world, monkeypatch, tmp_path, pushed):
    """And not when the kernel was queued."""
    gpu, recorded = AsyncGpu(monkeypatch), []
    gpu.lasts = LASTS
    monkeypatch.setattr(gpu_times, "_FRESH_S", 0.0)
    monkeypatch.setattr(autoplan, "write_workload", lambda transport, steps, target: recorded.extend(steps))
    caller = Caller(gpu, 7)
    with Session(min_bytes=0) as session, session.record_workload(tmp_path / "workload.json"):
        for step in range(4):
            given = {f"w{n}": caller.gradient(values(world.rank, step, 80, np.float32)) for n in range(3)}
            if pushed:
                for name, array in given.items():
                    session.push(name, array)
                session.wait_all()
            else:
                session.sync(given)
    ready = world.allgather([step.ready.tolist() for step in recorded])
    assert all(len(steps) == 3 and np.min(steps) >= LASTS - 1 for steps in ready)


def test_what_the_gpu_computes_is_part_of_a_watched_step(world, monkeypatch):
    """The session waits for gradients before it takes samples: only the copies are not of the step."""
    gpu, left, within = AsyncGpu(monkeypatch), [], StepClock.within
    caller = Caller(gpu, 7)

    def noted(clock):
        stream = gpu.of_caller(7)
        left.append(len(stream.queue) - stream.done)
        return within(clock)

    monkeypatch.setattr(StepClock, "within", noted)
    tuning = Tuning(("fp16", "onebit"), skip=1, steps=3, seconds=0.2, optimizer="adam")
    with Session(plan="auto", tuning=tuning, min_bytes=0) as session:
        for step in range(3):
            session.sync({"w": caller.gradient(values(world.rank, step, 5000, np.float32))})
    assert all(rows and not any(rows) for rows in world.allgather(left))


def test_one_reference_serves_for_a_while(monkeypatch):
    """The host sees events pass only now and then: a push waits for nothing. It looks again if it was not quick."""
    gpu, made = AsyncGpu(monkeypatch), []
    reference = gpu_times._Reference
    monkeypatch.setattr(gpu_times, "_Reference", lambda: made.append(reference()) or made[-1])
    monkeypatch.setattr(gpu_times, "_UNCERTAIN_S", 1e9)
    for _ in range(5):
        Moment([7, 8])
    assert len(made) == 1
    monkeypatch.setattr(gpu_times, "_FRESH_S", -1.0)
    monkeypatch.setattr(gpu_times, "_UNCERTAIN_S", 0.0)
    moment = Moment([7])
    assert len(made) == 2 + gpu_times._TRIES
    assert moment._reference.uncertainty == min(one.uncertainty for one in made[1:])
    gpu.run()


class Contexts:
    """The stacks of contexts that CUDA keeps for threads, in place of numba's functions for them."""

    def __init__(self, patch):
        self._stacks, self.all = threading.local(), []
        patch.setattr(cuda, "gpus", self)
        patch.setattr(cuda, "select_device", self.push)
        patch.setattr(cuda, "current_context", lambda: SimpleNamespace(device=self.current, pop=self.stack.pop))

    @property
    def stack(self):
        if not hasattr(self._stacks, "own"):
            self._stacks.own = []
            self.all.append(self._stacks.own)
        return self._stacks.own

    @property
    def current(self):
        return SimpleNamespace(id=self.stack[-1]) if self.stack else None

    def push(self, number):
        self.stack.append(number)


def test_a_session_selects_its_gpu_once_in_a_thread(world, monkeypatch):
    """Whoever makes the progress steps, and however often it looks for events: that of the caller, not the first."""
    gpu, contexts = AsyncGpu(monkeypatch), Contexts(monkeypatch)
    contexts.push(1)
    caller = Caller(gpu, 7)
    with Session(compressor="int8", min_bytes=0) as session:
        for step in range(3):
            handle = session.push("w", caller.gradient(values(world.rank, step, 80, np.float32)))
            thread = threading.Thread(target=handle.wait)
            thread.start()
            thread.join()
    for stacks in world.allgather(contexts.all):
        assert len(stacks) > 1 and all(stack == [1] for stack in stacks), stacks


def test_a_thread_goes_back_to_its_own_gpu(monkeypatch):
    contexts = Contexts(monkeypatch)
    contexts.push(1)
    for _ in range(3):
        with device.leaving_stream():
            for _ in range(5):
                device.use_gpu(0)
            assert contexts.stack == [1, 0]
            with device.leaving_stream():
                device.use_gpu(2)
            assert contexts.stack == [1, 0]
        assert contexts.stack == [1]
