"""Cooperative execution of segments by progress steps, and the order that is used if the plan has no schedule.

Communication is written as generators. A generator yields whenever its messages are in flight and other work could be
done; resuming it once is a *progress step*. All ranks resume the same generators in the same order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .route_operations import RouteOperation

Progress = Iterator[None]
"""Work that is done in progress steps: a generator that yields whenever other work could be done."""

DONE = object()
"""``next(progress, DONE) is DONE`` if there was nothing left to do."""


def at_once(progress: Progress) -> Progress:
    """Make all progress steps of some work in this one; returns what is left: none."""
    for _ in progress:
        pass
    return iter(())


@dataclass
class Segment:
    """One segment of a bucket, ready to be synchronised.

    Attributes:
        bucket: name of the bucket.
        number: index of the segment in the bucket.
        operation_progress: the progress of each operation; finish one before you ask for the next.
        free: whether the bucket's previous step has finished.
        operations: the operations, if there is a schedule.
    """

    bucket: str
    number: int
    operation_progress: Iterator[Progress]
    free: Callable[[], bool]
    operations: tuple[RouteOperation, ...] = ()


class RoundRobinRunner:
    """Resumes all active segments in each progress step, and starts one more, the one with the highest priority."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Progress]] = []
        self._order = itertools.count()
        self._active: list[Progress] = []

    def clear(self) -> list[Any]:
        """Drop all segments; returns the active ones."""
        found = self._active
        self._queue, self._active = [], []
        return found

    @property
    def busy(self) -> bool:
        """Whether there are queued or active segments."""
        return bool(self._queue or self._active)

    @property
    def waiting(self) -> bool:
        """Whether a segment waits to start."""
        return bool(self._queue)

    def add(self, segment: Segment, priority: float) -> None:
        """Queue a segment; those of a higher priority start earlier."""
        heapq.heappush(self._queue, (-priority, next(self._order), _progress_of(segment)))

    def progress(self, all_here: bool) -> bool:
        """Make one progress step, see ``progress_all``; ``all_here`` is ignored. Returns True."""
        started = heapq.heappop(self._queue)[2] if self._queue else None
        self._active = progress_all(self._active, started)
        return True


def _progress_of(segment: Segment) -> Progress:
    while not segment.free():
        yield
    for progress in segment.operation_progress:
        yield from progress


def interleave(segments: Iterable[Progress]) -> None:
    """Run segments to their end, see ``interleaved``."""
    for _ in interleaved(segments):
        pass


def interleaved(segments: Iterable[Progress]) -> Progress:
    """Segments as one; each progress step starts one more, see ``progress_all``."""
    waiting, active = iter(segments), list[Progress]()
    while True:
        started = next(waiting, None)
        if started is None and not active:
            return
        active = progress_all(active, started)
        if active:
            yield


def progress_all(active: list[Progress], started: Progress | None) -> list[Progress]:
    """Start a segment, if there is one, and resume all active ones, the youngest first; returns the unfinished ones.

    A younger segment posts its messages before an older one waits. The order is the same on all ranks.
    """
    segments = active if started is None else [started, *active]
    return [segment for segment in segments if next(segment, DONE) is not DONE]
