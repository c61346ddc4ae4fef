"""The program of several ranks: sessions against those of host arrays, and ``push`` beside a backward pass.

Each rank has a GPU of its own where there are several, else two ranks share one.

Started by ``suite`` as a job of its own; rank 0 writes its result to the file that the first argument names.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from ...arrays import device
from ...collectives.messages import probe, switches
from ...session import Session
from ...types import ROUTES, Route

METHODS = ("none", "int8", "onebit")
"""What the times are measured with."""

_LAYERS, _WIDTH, _BATCH = 12, 2048, 16384
_ROUNDS = 4

_ELEMENTS = (300, 1_000_003)
"""Sizes of the arrays that every route is tried with."""

_IN_THREADS, _ARRAYS = 300_000, 8
"""Elements and number of the arrays of each thread."""
_BESIDE_LATE, _LATE_SIDE = 1 << 20, 4096
"""Elements of an array that a side stream writes, behind products of matrices with this side."""

_STEADY = 1 << 20
_BYTES = (4 << 10, 1 << 20, 64 << 20)
"""Bytes of the arrays whose ``sync`` is timed."""


def main(path: str) -> None:
    """Run all parts, and write their results on rank 0."""
    import cupy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    gpus, pointers = use_own_gpu(world, cupy), takes_pointers(world)
    result = {
        "ranks": world.size,
        "gpus": min(gpus, world.size),
        "routes": routes(world, cupy),
        "sessions": two_sessions(world, cupy),
        "side_stream": side_stream(world, cupy),
        "synchronises": synchronises(cupy),
        "overlap": [overlap(world, cupy, method) for method in METHODS],
        "sizes": [row for method in METHODS for row in times(world, cupy, method, pointers)],
    }
    if world.rank == 0:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file)


def use_own_gpu(world: Any, cupy: Any) -> int:
    """Let this rank work on a GPU of its own, or share them in turns: how many there are."""
    gpus = int(cupy.cuda.runtime.getDeviceCount())
    number = int(world.rank) % gpus
    cupy.cuda.Device(number).use()
    device.use_gpu(number)
    return gpus


# --- right ------------------------------------------------------------------------------------------------------------


def routes(world: Any, cupy: Any) -> dict[str, Any]:
    """Every named route on GPU arrays and on host arrays: the runs, and those whose bits differ on any rank."""
    nodes = [[r for r in range(world.size) if r % 2 == m] for m in range(min(2, world.size))]
    runs, wrong = 0, []
    for name in ROUTES:
        for method in _methods(Route.parse(name)):
            for n in _ELEMENTS:
                runs += 1
                bad = world.allreduce(_unlike(world, cupy, name, method, n, nodes))
                wrong += [f"{name} {method} {n}: {bad} elements"] if bad else []
    return {"runs": runs, "wrong": wrong}


def _methods(route: Route) -> tuple[str, ...]:
    if not route.compressed:
        return ("none",)
    if route.sums_payloads:
        return ("fp16", "randomk:ratio=0.1")
    return ("onebit", "topk:ratio=0.1", "int8")


def _omit_advice(*sessions: Session) -> None:
    """No optimizer uses the means."""
    for session in sessions:
        session.judge_for(None)


def _unlike(world: Any, cupy: Any, name: str, method: str, n: int, nodes: list[list[int]]) -> int:
    options: dict[str, Any] = {"compressor": method, "nodes": nodes}
    count = 0
    with Session(route=name, **options) as host, Session(route=Route.parse(name).on("gpu"), **options) as gpu:
        _omit_advice(host, gpu)
        for step in range(2):
            values = np.random.default_rng([world.rank, step]).standard_normal(n).astype(np.float32)
            there = cupy.asarray(values)
            host.sync(values)
            gpu.sync(there)
            count += int(np.count_nonzero(cupy.asnumpy(there) != values))
    return count


def two_sessions(world: Any, cupy: Any) -> int:
    """Two sessions in two threads of each rank, against each by itself: elements that differ."""
    rng, spec = np.random.default_rng(world.rank), "topk:ratio=0.01"
    data = [[rng.standard_normal(_IN_THREADS).astype(np.float32) for _ in range(_ARRAYS)] for _ in range(2)]

    gpu = device.current_gpu()

    def run(session: Session, arrays: list[np.ndarray], out: list[np.ndarray]) -> None:
        device.use_gpu(gpu)
        cupy.cuda.Device(gpu).use()
        out += [cupy.asnumpy(session.sync(cupy.asarray(array))) for array in arrays]

    alone: list[list[np.ndarray]] = [[], []]
    for arrays, out in zip(data, alone):
        with Session(compressor=spec) as session:
            _omit_advice(session)
            run(session, arrays, out)
    together: list[list[np.ndarray]] = [[], []]
    with Session(compressor=spec) as first, Session(compressor=spec) as second:
        _omit_advice(first, second)
        threads = [threading.Thread(target=run, args=given) for given in zip((first, second), data, together)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    bad = sum(int(np.count_nonzero(a != b)) for k in range(2) for a, b in zip(alone[k], together[k]))
    return int(world.allreduce(bad)) + (0 if all(map(len, together)) else 1)


def side_stream(world: Any, cupy: Any) -> int:
    """Values that a non-blocking stream of the caller's writes late, behind long work: steps with another mean."""
    bad, stream = 0, cupy.cuda.Stream(non_blocking=True)
    late = cupy.random.standard_normal((_LATE_SIDE, _LATE_SIDE), cupy.float32)
    mean = sum(range(1, world.size + 1)) / world.size
    with Session() as session:
        for step in range(10):
            x = cupy.zeros(_BESIDE_LATE, cupy.float32)
            cupy.cuda.runtime.deviceSynchronize()
            with stream:
                for _ in range(8):
                    late = cupy.matmul(late, late) * np.float32(1e-4)
                x.fill(world.rank + 1.0 + step)
                seen = session.push("x", x).wait() * 2
            stream.synchronize()
            bad += float(seen[7]) != 2 * (step + mean)
    return int(world.allreduce(bad))


def synchronises(cupy: Any) -> int:
    """How often the host waits for the GPU, a stream or an event in ten calls of the steady state."""
    with Session(compressor="int8") as session:
        x = cupy.ones(_STEADY, cupy.float32)
        session.sync(x)
        with _counted_waits() as waits:
            for _ in range(10):
                session.sync(x)
    return len(waits)


@contextmanager
def _counted_waits() -> Iterator[list[str]]:
    """The waits for the GPU in the with-block: by this package, or by numba, which waits where nobody asked for it."""
    found = list[str]()
    places: list[tuple[Any, str]] = [(device, "synchronize"), (device, "drain"), (device.Mark, "wait")]
    if not device.simulated():
        from numba.cuda.cudadrv.driver import driver

        places += [(driver, name) for name in ("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize")]
    before = [getattr(owner, name) for owner, name in places]

    def counting(name: str, wait: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            found.append(name)
            return wait(*given)

        return counted

    for (owner, name), wait in zip(places, before):
        setattr(owner, name, counting(name, wait))
    try:
        yield found
    finally:
        for (owner, name), wait in zip(places, before):
            setattr(owner, name, wait)


# --- fast -------------------------------------------------------------------------------------------------------------


def overlap(world: Any, cupy: Any, method: str) -> dict[str, Any]:
    """A backward pass of matrix products, a ``sync``, one after the other, and the pass with ``push``: seconds."""
    weights = [cupy.random.standard_normal((_WIDTH, _WIDTH), cupy.float32) * 0.02 for _ in range(_LAYERS)]
    inputs = cupy.random.standard_normal((_BATCH, _WIDTH), cupy.float32)
    gradients = [cupy.empty_like(w) for w in weights]

    def backward(after: Callable[[int], object] = lambda k: None) -> None:
        error = inputs
        for k in reversed(range(_LAYERS)):
            cupy.matmul(inputs.T, error, out=gradients[k])
            error = cupy.matmul(error, weights[k])
            after(k)

    with Session(compressor=method) as session:
        _omit_advice(session)

        def synced() -> None:
            session.sync({str(k): g for k, g in enumerate(gradients)})

        def one_by_one() -> None:
            backward()
            synced()

        def pushed() -> None:
            handles = []
            backward(lambda k: handles.append(session.push(str(k), gradients[k])))
            for handle in handles:
                handle.wait()

        with _own_stream(cupy):
            found = [_least(world, cupy, work) for work in (backward, synced, one_by_one, pushed)]
    names = ("backward_s", "sync_s", "one_by_one_s", "pushed_s")
    hidden = (found[0] + found[1] - found[3]) / min(found[0], found[1])
    return {"method": method, **dict(zip(names, found)), "hidden": hidden}


@contextmanager
def _own_stream(cupy: Any) -> Iterator[None]:
    with cupy.cuda.Stream(non_blocking=True):
        yield


def takes_pointers(world: Any) -> bool:
    """Whether sessions give device pointers to MPI."""
    given = switches.device_aware()
    return bool(world.bcast(probe.probe_gpu().works if given is None and world.rank == 0 else given))


def times(world: Any, cupy: Any, method: str, pointers: bool) -> Iterator[dict[str, Any]]:
    """One array of several sizes: seconds of ``sync`` on the GPU, and of the same array in host memory.

    Args:
        pointers: whether MPI gets device pointers; then also seconds of staged messages.
    """
    for nbytes in _BYTES:
        values = np.random.default_rng(world.rank).standard_normal(nbytes // 4).astype(np.float32)
        there = cupy.asarray(values)
        with Session(compressor=method, min_bytes=0) as gpu, Session(compressor=method, min_bytes=0) as host:
            _omit_advice(gpu, host)
            found = {"gpu_s": _least(world, cupy, partial(gpu.sync, there))}
            found["host_s"] = _least(world, cupy, partial(host.sync, values))
        if pointers:
            with _staged(), Session(compressor=method, min_bytes=0) as staged:
                _omit_advice(staged)
                found["staged_s"] = _least(world, cupy, partial(staged.sync, there))
        yield {"method": method, "nbytes": nbytes, **found}


@contextmanager
def _staged() -> Iterator[None]:
    """Sessions that are opened in the with-block stage their messages."""
    before = os.environ.get(switches.SWITCH)
    os.environ[switches.SWITCH] = "0"
    try:
        yield
    finally:
        del os.environ[switches.SWITCH]
        if before is not None:
            os.environ[switches.SWITCH] = before


def _least(world: Any, cupy: Any, work: Callable[[], object]) -> float:
    """The least time of several runs, of the slowest rank, until the GPU has done everything."""
    seconds = []
    for _ in range(_ROUNDS):
        cupy.cuda.runtime.deviceSynchronize()
        world.barrier()
        start = time.perf_counter()
        work()
        cupy.cuda.runtime.deviceSynchronize()
        seconds.append(world.allreduce(time.perf_counter() - start, op=_greatest()))
    return float(min(seconds[1:]))


def _greatest() -> Any:
    from mpi4py import MPI

    return MPI.MAX


if __name__ == "__main__":
    main(sys.argv[1])
