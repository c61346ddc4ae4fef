"""How much gradients that travel slow down a thread that computes in pure Python, and so needs the interpreter lock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_CALIBRATION = 200_000
"""Additions by which the speed of the interpreter is measured."""

_REPEATS = 7


@dataclass(frozen=True)
class Slowdown:
    """Medians, over repetitions, of the slowest rank.

    Attributes:
        slowed: by which share the work of the Python thread takes longer while gradients travel.
        cpu: the processor time of all other threads of the process meanwhile, as a share of the work alone. If a rank
            has one core, the work takes longer by this share at least.
    """

    slowed: float
    cpu: float


def measured(comm: Any, seconds: float, start: Callable[[], object], finish: Callable[[], object]) -> Slowdown:
    """Compare Python work alone with the same work while gradients travel, in turns. Collective.

    Args:
        seconds: about how long the work takes alone.
        start: makes the gradients travel, and returns at once; finish: waits for them.
    """
    from mpi4py import MPI

    took = min(_timed(_CALIBRATION)[0] for _ in range(3))
    additions = comm.allreduce(round(_CALIBRATION * seconds / took), MPI.MIN)
    found = []
    for _ in range(_REPEATS):
        comm.Barrier()
        alone, _ = _timed(additions)
        comm.Barrier()
        start()
        beside, cpu = _timed(additions)
        finish()
        found.append((comm.allreduce(beside / alone - 1, MPI.MAX), comm.allreduce(cpu / alone, MPI.MAX)))
    slowed, cpu = np.median(found, axis=0)
    return Slowdown(float(slowed), float(cpu))


def _timed(additions: int) -> tuple[float, float]:
    """Seconds of so many additions, and the processor time of the other threads meanwhile."""
    own, every, start = time.thread_time(), time.process_time(), time.perf_counter()
    total = 0
    for number in range(additions):
        total += number
    seconds = time.perf_counter() - start
    return seconds, max(0.0, time.process_time() - every - (time.thread_time() - own))
