"""Waiting for other ranks, threads and processes, which take as long as the node lets them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def patient_barrier(comm: Any) -> None:
    """As ``comm.Barrier``, but it leaves the core to others: MPI's own waits are busy."""
    arrived, nap = comm.Ibarrier(), 1e-4
    while not arrived.Test():
        time.sleep(nap)
        nap = min(2 * nap, 5e-3)


def until(done: Callable[[], bool], seconds: float = 60.0, every: float = 0.002) -> bool:
    """Whether ``done()`` becomes true; as soon as it does, and after ``seconds`` at the latest.

    ``every``: seconds between two calls of ``done``, for one that costs more.
    """
    limit = time.monotonic() + seconds
    while not done() and time.monotonic() < limit:
        time.sleep(every)
    return done()
