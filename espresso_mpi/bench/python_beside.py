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
        waits: how much longer this thread does not run meanwhile, as a share of the work alone: it waits for the
            interpreter lock, or for its core. By the rest of ``slowed``, it runs longer for the same work.
        cpu: the processor time of all other threads of the process meanwhile, as a share of the work alone. If a rank
            has one core, the thread waits for them.
    """

    slowed: float
    waits: float
    cpu: float


@dataclass(frozen=True)
class _Timed:
    """Seconds of some work, of these without the processor, and the processor time of the other threads."""

    seconds: float
    waits: float
    others: float


def measured(comm: Any, seconds: float, start: Callable[[], object], finish: Callable[[], object]) -> Slowdown:
    """Compare Python work alone with the same work while gradients travel, in turns. Collective.

    Args:
        seconds: about how long the work takes alone.
        start: makes the gradients travel, and returns at once; finish: waits for them.
    """
    from mpi4py import MPI

    took = min(_timed(_CALIBRATION).seconds for _ in range(3))
    additions = comm.allreduce(round(_CALIBRATION * seconds / took), MPI.MIN)
    found = []
    for _ in range(_REPEATS):
        comm.Barrier()
        alone = _timed(additions)
        comm.Barrier()
        start()
        beside = _timed(additions)
        finish()
        longer = (beside.seconds - alone.seconds, beside.waits - alone.waits, beside.others)
        found.append([comm.allreduce(each / alone.seconds, MPI.MAX) for each in longer])
    return Slowdown(*map(float, np.median(found, axis=0)))


def _timed(additions: int) -> _Timed:
    own, every, start = time.thread_time(), time.process_time(), time.perf_counter()
    total = 0
    for number in range(additions):
        total += number
    seconds, ran = time.perf_counter() - start, time.thread_time() - own
    return _Timed(seconds, seconds - ran, max(0.0, time.process_time() - every - ran))
