"""A barrier for ranks that wait while others do something long, or wait for each other."""

from __future__ import annotations

import time
from typing import Any


def patient_barrier(comm: Any) -> None:
    """As ``comm.Barrier``, but it leaves the core to others: MPI's own waits are busy."""
    arrived = comm.Ibarrier()
    while not arrived.Test():
        time.sleep(0.005)
