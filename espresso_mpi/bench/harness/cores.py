"""How far apart the cores of two ranks are: what a cache line takes from one to the other and back.

The times of whatever passes shared memory depend on it, and on a virtual machine it changes while programs run.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ...collectives.messages.shared_memory import STEP, load, poll_again, store
from ...compressors.kernels.cpu import host

_TRIPS, _BURSTS, _HARD = 200, 50, 2000


@host.inline
def _await(flags, at, number):  # type: ignore[no-untyped-def]
    """Poll hard, but for so long only: both ranks may be on one core."""
    polled = 0
    while load(flags, at) < number:
        polled = poll_again(polled, (_HARD, 1 << 60, 0), 0)


@host.Kernel
def _trips(flags, first, count, begun):  # type: ignore[no-untyped-def]
    """So many round trips, of the rank that begins them or of the one that answers."""
    for number in range(first + 1, first + count + 1):
        if begun:
            store(flags, 0, number)
            _await(flags, STEP, number)
        else:
            _await(flags, 0, number)
            store(flags, STEP, number)


def roundtrip(comm: Any) -> float | None:
    """Nanoseconds of a round trip between the first two ranks of the first rank's node. Collective.

    The least mean of several bursts: other ranks may want the same cores. None: that node has one rank.
    """
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    found = None
    if node.size > 1:
        window = MPI.Win.Allocate_shared(2 * STEP * 8 if node.rank == 0 else 0, 8, comm=node)
        memory: Any = window.Shared_query(0)[0]
        flags = np.frombuffer(memory, np.int64)
        if node.rank == 0:
            flags[:] = 0
        node.Barrier()
        if node.rank < 2:
            found = min(_burst(flags, number, node.rank == 0) for number in range(_BURSTS))
        node.Barrier()
        del flags
        window.Free()
    node.Free()
    return comm.bcast(found)


def _burst(flags: np.ndarray, number: int, begun: bool) -> float:
    start = time.perf_counter()
    _trips(flags, number * _TRIPS, _TRIPS, begun)
    return (time.perf_counter() - start) / _TRIPS * 1e9
