"""How methods are compared: in turns within each repetition, the slowest rank counting.

Turns, so that a noisy moment of the node meets all of them; what a method is compared with is always measured in
the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...types import ROUTES, Route

LEAST_REPEATS = 3
"""Repetitions that are made however long they take: a median of fewer says nothing."""


@dataclass(frozen=True)
class TimedMethod:
    """A method under test.

    Attributes:
        name: in the results.
        run: does it once.
        check: elements, over all ranks, of its first result that are wrong; None where nothing says what is right.
            Collective; called once, before ``run``.
        prepare: puts the inputs in place before ``run``, outside the clock.
        route: how the tensor travels; None for MPI's own choice.
        sent: bytes sent so far by this rank, by level; None where it cannot be told.
        trace: writes a trace of one more run to a file; None where there is nothing to see. Collective.
        close: gives back what it holds. Collective.
        text: what MPI does, in words.
        kernels: seconds of processor time, of all ranks together, that its kernels alone take in one run; None where
            nothing tells. Collective; called once, after the timing.
    """

    name: str
    run: Callable[[], object]
    check: Callable[[], int] | None = None
    prepare: Callable[[], None] = lambda: None
    route: Route | None = None
    sent: Callable[[], Mapping[str, int]] | None = None
    trace: Callable[[Path], None] | None = None
    close: Callable[[], None] = lambda: None
    text: str = ""
    kernels: Callable[[], float] | None = None


@dataclass(frozen=True)
class Repetitions:
    """How long to measure.

    Attributes:
        repeats: most repetitions.
        seconds: no further repetition is begun after this time, but for the first three; None: no limit.
        tick: is called at the end of each.
    """

    repeats: int
    seconds: float | None = None
    tick: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Times:
    """What methods took that ran in turns; arrays have the shape (repetitions, methods).

    Attributes:
        seconds: of the slowest rank.
        cpu: seconds of processor time of all ranks together, all threads of their processes, waiting included.
    """

    seconds: np.ndarray
    cpu: np.ndarray


def in_turns(
    comm: Any,
    methods: Sequence[TimedMethod],
    repetitions: Repetitions,
    beside: Callable[[int], None] = lambda repetition: None,
) -> Times:
    """Run the methods in turns. Collective.

    Args:
        beside: is called at the end of each repetition with its number, for measurements of another kind.
    """
    start, seconds, cpu = time.perf_counter(), [], []
    for number in range(repetitions.repeats):
        found = [_timed(comm, c.run, c.prepare) for c in methods]
        seconds.append([one for one, _ in found])
        cpu.append([one for _, one in found])
        beside(number)
        repetitions.tick()
        spent = comm.bcast(time.perf_counter() - start)
        if number + 1 >= LEAST_REPEATS and repetitions.seconds is not None and spent > repetitions.seconds:
            break
    return Times(np.array(seconds), comm.allreduce(np.array(cpu)))


def interleaved(comm: Any, methods: Sequence[TimedMethod], repetitions: Repetitions) -> np.ndarray:
    """The ``seconds`` of ``in_turns``. Collective."""
    return in_turns(comm, methods, repetitions).seconds


def timed(comm: Any, run: Callable[[], object], prepare: Callable[[], None] = lambda: None) -> float:
    """Seconds that the slowest rank takes, from a moment when all are ready. Collective."""
    return _timed(comm, run, prepare)[0]


def _timed(comm: Any, run: Callable[[], object], prepare: Callable[[], None]) -> tuple[float, float]:
    """As ``timed``, and the processor time of this rank."""
    from mpi4py import MPI

    prepare()
    comm.Barrier()
    cpu, start = time.process_time(), time.perf_counter()
    run()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return comm.allreduce(seconds, MPI.MAX), cpu


def route_name(route: Route | None) -> str:
    """A route's name if it has one, else its steps; MPI's own way for None."""
    if route is None:
        return "MPI's own"
    names = {str(Route.parse(name)): name for name in ROUTES}
    return names.get(str(route), str(route))
