"""How methods are compared: in turns within each repetition, the slowest rank counting, every result checked.

Turns, so that a noisy moment of the machine meets all of them; what a method is compared with is always measured in
the same run.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..types import ROUTES, Route, TensorSpec

LEAST_REPEATS = 3
"""Repetitions that are made however long they take: a median of fewer says nothing."""


@dataclass(frozen=True)
class Contestant:
    """A method under test.

    Attributes:
        method: its name in the results.
        run: does it once.
        check: elements, over all ranks, of its first result that are wrong. Collective; called once, before ``run``.
        prepare: puts the inputs in place before ``run``, outside the clock.
        route: the way that it goes; None for MPI's own.
        sent: bytes sent so far by this rank, by level; None where it cannot be told.
        trace: writes a trace of one more run to a file; None where there is nothing to see. Collective.
        close: gives back what it holds. Collective.
        text: the way that MPI goes, in words.
    """

    method: str
    run: Callable[[], object]
    check: Callable[[], int] = lambda: 0
    prepare: Callable[[], None] = lambda: None
    route: Route | None = None
    sent: Callable[[], Mapping[str, int]] | None = None
    trace: Callable[[Path], None] | None = None
    close: Callable[[], None] = lambda: None
    text: str = ""


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        repeats: most repetitions.
        seconds: no further repetition is begun after this time, but for the first three; None: no limit.
        tick: is called at the end of each.
    """

    repeats: int
    seconds: float | None = None
    tick: Callable[[], None] = lambda: None


def in_turns(
    comm: Any,
    contestants: Sequence[Contestant],
    effort: Effort,
    beside: Callable[[int], None] = lambda repetition: None,
) -> np.ndarray:
    """Seconds of the slowest rank, shape (repetitions, contestants). Collective.

    Args:
        beside: is called at the end of each repetition with its number, for measurements of another kind.
    """
    start, rows = time.perf_counter(), []
    for number in range(effort.repeats):
        rows.append([timed(comm, c.run, c.prepare) for c in contestants])
        beside(number)
        effort.tick()
        spent = comm.bcast(time.perf_counter() - start)
        if number + 1 >= LEAST_REPEATS and effort.seconds is not None and spent > effort.seconds:
            break
    return np.array(rows)


def timed(comm: Any, run: Callable[[], object], prepare: Callable[[], None] = lambda: None) -> float:
    """Seconds that the slowest rank takes, from a moment when all are ready. Collective."""
    from mpi4py import MPI

    prepare()
    comm.Barrier()
    start = time.perf_counter()
    run()
    return comm.allreduce(time.perf_counter() - start, MPI.MAX)


def route_name(route: Route | None) -> str:
    """A route's name if it has one, else its steps; MPI's own way for None."""
    if route is None:
        return "MPI's own"
    names = {str(Route.parse(name)): name for name in ROUTES}
    return names.get(str(route), str(route))


# --- inputs -----------------------------------------------------------------------------------------------------------


class Inputs:
    """Normal float32 values of some tensors, different on every rank and reproducible on any.

    Args:
        shapes: by tensor name.
    """

    def __init__(self, comm: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._comm, self._shapes = comm, shapes
        self.mine = self._made(comm.rank)
        self._all: list[dict[str, np.ndarray]] = []

    def _made(self, rank: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([rank, len(self._shapes)])
        return {name: rng.standard_normal(shape, np.float32) for name, shape in self._shapes.items()}

    def of_all(self) -> list[dict[str, np.ndarray]]:
        """Every rank's values, in rank order; only a rank that asks for them pays for the memory."""
        if not self._all:
            self._all = [self._made(rank) for rank in range(self._comm.size)]
        return self._all

    def copies(self) -> dict[str, np.ndarray]:
        """This rank's values in new arrays."""
        return {name: x.copy() for name, x in self.mine.items()}

    def refill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Put this rank's values into arrays of the same names."""
        for name, x in self.mine.items():
            arrays[name][...] = x


# --- checks -----------------------------------------------------------------------------------------------------------


def wrong_together(comm: Any, results: Iterable[np.ndarray], count: Callable[[], int]) -> int:
    """Wrong elements over all ranks. Collective.

    Args:
        results: the arrays that are checked, contiguous.
        count: this rank's wrong elements of them. Where all ranks hold the same bits, only rank 0 counts, for all.
    """
    digest = hashlib.blake2b()
    for x in results:
        digest.update(x.data)
    if len(set(comm.allgather(digest.digest()))) == 1:
        return comm.bcast(count() if comm.rank == 0 else None) * comm.size
    return comm.allreduce(count())


def wrong_mean(x: np.ndarray, sources: Sequence[np.ndarray]) -> int:
    """Elements further from the float64 mean than float32 sums of this many terms can be."""
    total, size = np.zeros(x.size), np.zeros(x.size)
    for source in sources:
        total += source
        size += np.abs(source)
    return int(np.count_nonzero(~(np.abs(x - total / len(sources)) <= size * 2.0**-23)))


def wrong_bits(x: np.ndarray, route: Route, topology: Any, sources: Sequence[np.ndarray], spec: str, name: str) -> int:
    """Elements that are not exactly the sum of decoded payloads along the route.

    Args:
        x: a session's first result, without feedback. sources: what every rank put in.
        spec: spelling of the compressor, with the tensor's shape settled. name: the tensor's.
    """
    from .. import compressors
    from .reference import synchronised

    compressor = compressors.get(spec).shaped(x.shape)
    flat = [source.reshape(-1) for source in sources]
    expected = synchronised(route, topology, flat, compressor, name=name)[0]
    return int(np.count_nonzero(x.reshape(-1).view(np.uint32) != expected.view(np.uint32)))


def wrong_of(session: Any, results: Mapping[str, np.ndarray], sources: Sequence[Mapping[str, np.ndarray]]) -> int:
    """Wrong elements of a session's first results without feedback, tensor by tensor as each was sent."""
    wrong = 0
    for name, x in results.items():
        strategy = session.strategy(TensorSpec(name, x.shape, "float32"))
        every = [source[name] for source in sources]
        if strategy.compressor == "none":
            wrong += wrong_mean(x.reshape(-1), [source.reshape(-1) for source in every])
        else:
            wrong += wrong_bits(x, strategy.route, session.topology, every, strategy.compressor, name)
    return wrong
