"""Segments that go on by turns, all that are under way in each: the order where no plan has a schedule."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .route_operations import RouteOperation

Turns = Iterator[None]
"""Something that is done bit by bit: it yields whenever other work could be done meanwhile."""

ENDED = object()
"""``next(turns, ENDED) is ENDED``: there was nothing left to do."""


@dataclass
class Segment:
    """One segment of a bucket that is about to travel.

    Attributes:
        bucket: its name; number: which segment.
        turns_of_operations: of each operation, to be taken to their end before those of the next are asked for.
        free: whether the bucket of the step before has ended.
        operations: the operations, where there is a schedule.
    """

    bucket: str
    number: int
    turns_of_operations: Iterator[Turns]
    free: Callable[[], bool]
    operations: tuple[RouteOperation, ...] = ()


class InTurns:
    """Segments of which one more begins at every turn, the most urgent first."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Turns]] = []
        self._order = itertools.count()
        self._under_way: list[Turns] = []

    def clear(self) -> list[Any]:
        """Forget everything; returns what was under way."""
        found = self._under_way
        self._queue, self._under_way = [], []
        return found

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._queue or self._under_way)

    @property
    def waiting(self) -> bool:
        """Whether something waits to begin."""
        return bool(self._queue)

    def add(self, segment: Segment, priority: float) -> None:
        """Take a segment in; the higher its priority, the sooner it begins."""
        heapq.heappush(self._queue, (-priority, next(self._order), _turns(segment)))

    def turn(self, all_here: bool) -> bool:
        """See ``take_turn``; ``all_here`` does not matter."""
        started = heapq.heappop(self._queue)[2] if self._queue else None
        self._under_way = take_turn(self._under_way, started)
        return True


def _turns(segment: Segment) -> Turns:
    while not segment.free():
        yield
    for turns in segment.turns_of_operations:
        yield from turns


def interleave(segments: Iterable[Turns]) -> None:
    """Run segments to their end, one more at every turn; see ``take_turn``."""
    waiting, under_way = iter(segments), list[Turns]()
    while True:
        started = next(waiting, None)
        if started is None and not under_way:
            return
        under_way = take_turn(under_way, started)


def take_turn(under_way: list[Turns], started: Turns | None) -> list[Turns]:
    """One more segment may start, then each that is under way goes on, the youngest first; returns those not at an end.

    The youngest first, so that its messages are queued before an older one waits. The order is the same on all ranks.
    """
    segments = under_way if started is None else [started, *under_way]
    return [segment for segment in segments if next(segment, ENDED) is not ENDED]
