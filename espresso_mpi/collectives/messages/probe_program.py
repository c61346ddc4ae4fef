"""What each process of a probe does: exchange GPU memory with each other one, and look at what came. See ``probe``."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from .probe import DEVICE, PASSED, PROBLEM

SIZES = (1, 1 << 10, 60 << 10, (64 << 10) + 1, 1 << 20, (8 << 20) + 3)
"""Lengths in bytes, around the limits where libraries go from one protocol to the next: 4, 8 and 64 KiB, and 1 MiB."""

_GUARD = 256
"""Bytes around what is received that must stay as they are."""


def main(limit: int) -> None:
    """Print ``PASSED``, or say why not and end with another status than 0; after ``limit`` seconds end in any case."""
    signal.alarm(limit)  # its default action: it ends also a process that hangs inside a library
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer, and nobody wants its core
    try:
        from mpi4py import MPI
        from numba import cuda

        cuda.select_device(int(os.environ[DEVICE]))
        problem = examine(MPI, MPI.COMM_WORLD)
    except Exception as error:  # whatever it is, it is the answer
        problem = " ".join(f"{type(error).__name__}: {error}".split())
    if problem:
        print(PROBLEM, problem, file=sys.stderr, flush=True)
        os._exit(1)  # MPI's own end would wait for the other process
    print(PASSED, flush=True)


def examine(mpi: Any, comm: Any) -> str | None:
    """What is wrong, if anything. Collective over the ranks of ``comm``: all pairs exchange messages."""
    if comm.size < 2:
        return (
            f"mpirun started {comm.size} process(es) of {mpi.get_vendor()[0]} in one job, not 2: it belongs to another "
            f"MPI library than mpi4py"
        )
    host = mpi.Get_processor_name()
    wrong = [(size, host) for size in SIZES for other in partners(comm) if not arrives(mpi, comm, size, other)]
    everyone = [found for some in comm.allgather(wrong) for found in some]
    return "messages of {} bytes arrived with wrong content on {}".format(*min(everyone)) if everyone else None


def partners(comm: Any) -> Iterator[int]:
    """Every other rank, so that two ranks have each other at the same time: by the circle of a round-robin."""
    even = comm.size + comm.size % 2
    for turn in range(even - 1):
        if comm.rank == even - 1:
            other = next(rank for rank in range(even - 1) if 2 * rank % (even - 1) == turn)
        else:
            other = (turn - comm.rank) % (even - 1)
            other = even - 1 if other == comm.rank else other
        if other < comm.size:
            yield other


def arrives(mpi: Any, comm: Any, size: int, other: int) -> bool:
    """Whether ``size`` bytes of GPU memory, in two messages both ways at a time, arrive as they were sent."""
    from numba import cuda

    cut = size // 3
    source = cuda.to_device(_content(comm.rank, size))
    target = cuda.to_device(np.zeros(size + 2 * _GUARD, np.uint8))
    inside = target[_GUARD : _GUARD + size]
    cuda.synchronize()
    requests = [comm.Irecv([part, mpi.BYTE], other) for part in (inside[:cut], inside[cut:]) if part.size]
    requests += [comm.Isend([part, mpi.BYTE], other) for part in (source[:cut], source[cut:]) if part.size]
    while not mpi.Request.Testall(requests):
        pass
    expected = np.pad(_content(other, size), _GUARD)
    return bool(np.array_equal(target.copy_to_host(), expected))


def _content(rank: int, size: int) -> np.ndarray:
    """Random bits: an MPI that compresses floats on their way does not get them across."""
    return np.random.default_rng([rank, size]).integers(0, 256, size, np.uint8)


if __name__ == "__main__":
    main(int(sys.argv[1]))
