"""Executes the schedule of a plan: every lane runs one operation at a time, the ready one that is planned first.

All ranks must continue with the same operation at every moment, or one waits for a message that another does not send
yet. Their clocks differ, so decisions use *planned time*, in which an operation takes as long as the schedule says. An
operation starts when its lane is free in planned time. A collective is resumed at equal intervals, and waited for when
the next operation of its segment starts. While its messages are in flight, other lanes run what is planned for that
time. The first messages of a collective between nodes are posted as soon as it is ready and all earlier ones have
posted theirs. The network thus works in the order of the schedule, and is not idle if it is faster than planned.

Tensors that arrive as the schedule expects are served exactly in its order. A tensor that arrives earlier or later, or
not at all, blocks nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..timetable import CHECK, Schedule, Timetable
from .progress import DONE, Progress, Segment

Key = tuple[float, float, float, int]
"""Sort key of ready operations: (minus the priority, planned start, seconds, number of arrival).

Of two operations that start at the same moment on one lane, the first takes no time."""


@dataclass
class _ActiveSegment:
    """An active segment: the index of its current operation, and the lane, start and length of each operation."""

    segment: Segment
    urgency: float
    lanes: tuple[int, ...]
    starts: tuple[float, ...]
    seconds: tuple[float, ...]
    at: int = 0
    posted: bool = False
    progress: Progress = field(default_factory=lambda: iter(()))

    @property
    def moves(self) -> bool:
        """Whether its current operation is a collective."""
        return self.segment.operations[self.at].resource in ("intra", "inter")


class LaneRunner:
    """The active segments, and the choice of what runs next.

    Args:
        schedule: the schedule. Unknown buckets are served after the known ones, as if their operations took no time.
        warn: called once if the operations of a bucket differ from the schedule; it is then served as unknown.
        begun: called with the lane, the segment, the index of its operation and the planned time at every start.
    """

    def __init__(
        self,
        schedule: Schedule,
        warn: Callable[[str], None] = lambda text: None,
        begun: Callable[[int, Segment, int, float], None] = lambda lane, segment, at, now: None,
    ) -> None:
        self._schedule, self._lanes, self._warn, self._begun = schedule, schedule.lanes, warn, begun
        self._backward = sorted((table.backward, name) for name, table in schedule.buffers.items())
        self._between = _between_nodes(schedule)
        self._warned: set[str] = set()
        self._order = itertools.count()
        self._empty()

    def _empty(self) -> None:
        self.now = 0.0
        self._active: dict[int, _ActiveSegment] = {}
        self._held: list[_ActiveSegment] = []
        self._ready: list[list[tuple[Key, _ActiveSegment]]] = [[] for _ in range(self._lanes.count)]
        self._occupied = [False] * self._lanes.count
        self._events: list[tuple[float, int, _ActiveSegment, bool]] = []
        self._arrived: set[str] = set()
        self._first_missing = self._posted = 0
        self._postable: dict[int, _ActiveSegment] = {}

    def clear(self) -> list[Any]:
        """Drop all segments; returns the active ones."""
        found = list(self._active.values())
        self._empty()
        return found

    @property
    def busy(self) -> bool:
        """Whether there are active segments."""
        return bool(self._active)

    @property
    def waiting(self) -> bool:
        """Whether an operation waits to start."""
        return bool(self._held or any(self._ready))

    def add(self, segment: Segment, priority: float) -> None:
        """Add a segment; those of a higher priority are served earlier."""
        if (
            segment.number == 0 and segment.bucket in self._arrived and self.knows(segment.bucket)
        ):  # the next step begins
            self._arrived, self._first_missing, self._postable, self._posted = set(), 0, {}, 0
            self.now = self.now if self.busy else 0.0
        self._arrived.add(segment.bucket)
        while self._first_missing < len(self._backward) and self._backward[self._first_missing][1] in self._arrived:
            self._first_missing += 1
        one = self._planned(segment, priority)
        self._active[id(one)] = one
        self._held.append(one)

    def _planned(self, segment: Segment, priority: float) -> _ActiveSegment:
        table = self._schedule.buffers.get(segment.bucket)
        if table is not None:
            first = _checks(table)
            expected, found = table.operations[first:], tuple(operation.what for operation in segment.operations)
            if expected == found:
                starts = table.starts[min(segment.number, len(table.starts) - 1)]
                return _ActiveSegment(segment, -priority, table.lanes[first:], starts[first:], table.seconds[first:])
            if expected and segment.bucket not in self._warned:
                self._warned.add(segment.bucket)
                self._warn(f"{segment.bucket}: the plan's schedule has {expected} for it, here it is {found}")
        lanes = tuple(self._lanes.of(operation.resource) for operation in segment.operations)
        return _ActiveSegment(segment, -priority, lanes, (math.inf,) * len(lanes), (0.0,) * len(lanes))

    def knows(self, bucket: str) -> bool:
        """Whether a bucket is in the schedule."""
        return bucket in self._schedule.buffers

    # --- progress steps -----------------------------------------------------------------------------------------------

    def progress(self, all_here: bool) -> bool:
        """Start all operations that can start, and advance to the next event; False if nothing can be done.

        Args:
            all_here: no more tensors are about to arrive.
        """
        came = self._admit()
        self._serve(all_here)
        if not self._events:
            return came
        self.now = self._events[0][0]
        ending = []
        while self._events and self._events[0][0] == self.now:
            _, _, one, last = heapq.heappop(self._events)
            if last:
                ending.append(one)
            else:
                next(one.progress, DONE)
        self._end(ending)
        return True

    def _admit(self) -> bool:
        """Queue segments whose bucket has finished its previous step; until then its state belongs to that step.

        Returns:
            Whether any was queued.
        """
        held, self._held = self._held, []
        for one in held:
            if one.segment.free():
                self._wait(one)
            else:
                self._held.append(one)
        return len(self._held) < len(held)

    def _wait(self, one: _ActiveSegment) -> None:
        """Queue a segment for the lane of its next operation, if it has any."""
        if one.at == len(one.lanes):
            for _ in one.progress:
                pass
            for rest in one.segment.operation_progress:  # a call without planned operations; else code after the last
                for _ in rest:
                    pass
            del self._active[id(one)]
            return
        key = (one.urgency, one.starts[one.at], one.seconds[one.at], next(self._order))
        heapq.heappush(self._ready[one.lanes[one.at]], (key, one))
        place = self._place(one)
        if place is not None:
            self._postable[place] = one
            self._post_in_order()

    def _serve(self, all_here: bool) -> None:
        """Start an operation on every free lane; the network first, so that messages overlap with computation."""
        for lane in reversed(range(self._lanes.count)):
            ready = self._ready[lane]
            if ready and not self._occupied[lane] and (all_here or self._may_begin(lane, ready[0][0][1])):
                self._begin(lane, heapq.heappop(ready)[1])

    def _may_begin(self, lane: int, start: float) -> bool:
        """Whether the part of the backward pass that precedes it on the same lane is over."""
        if lane != self._lanes.backward or math.isinf(start) or self._first_missing == len(self._backward):
            return True
        return start <= self._backward[self._first_missing][0]

    def _begin(self, lane: int, one: _ActiveSegment) -> None:
        """Compute, or post the first messages of a collective, and plan when to resume it."""
        operation, seconds, place = one.segment.operations[one.at], one.seconds[one.at], self._place(one)
        self._begun(lane, one.segment, one.at, self.now)
        self._occupied[lane] = True
        if not one.posted:
            self._post(one)
        one.posted, parts = False, operation.progress_steps - 1 if one.moves else 0
        if not parts:
            for _ in one.progress:
                pass
        if place is not None and place >= self._posted:  # those before it are missing or late
            self._posted = place + 1
            self._post_in_order()
        for part in range(1, parts):
            self._later(self.now + seconds * part / parts, one, last=False)
        self._later(self.now + seconds, one, last=True)

    def _later(self, when: float, one: _ActiveSegment, last: bool) -> None:
        heapq.heappush(self._events, (when, next(self._order), one, last))

    def _end(self, ending: list[_ActiveSegment]) -> None:
        """End operations that end at the same moment.

        A collective is waited for when the next operation of its segment starts, which may be later.
        """
        for one in sorted(ending, key=lambda one: one.moves):  # what follows on computing may post messages first
            self._occupied[one.lanes[one.at]] = False
            one.at += 1
            self._wait(one)

    # --- messages ahead of their time ---

    def _post_in_order(self) -> None:
        """Post the first messages of collectives between nodes that are ready, in the order of the schedule."""
        while self._posted in self._postable:
            self._post(self._postable.pop(self._posted))
            self._posted += 1

    def _post(self, one: _ActiveSegment) -> None:
        for _ in one.progress:
            pass
        one.progress, one.posted = next(one.segment.operation_progress), True
        next(one.progress, DONE)

    def _place(self, one: _ActiveSegment) -> int | None:
        """The position of the current operation among all scheduled collectives between nodes."""
        if one.segment.operations[one.at].resource != "inter":
            return None
        return self._between.get((one.segment.bucket, one.segment.number, one.at))


def _between_nodes(schedule: Schedule) -> dict[tuple[str, int, int], int]:
    """(buffer, segment, operation) of the collectives on the lane between nodes, numbered by their planned starts."""
    found = []
    for name, table in schedule.buffers.items():
        skipped = _checks(table)
        for at, (what, lane) in enumerate(zip(table.operations, table.lanes)):
            if lane == schedule.lanes.inter and what.partition("@")[2] in ("inter", "flat"):
                found += [(row[at], table.seconds[at], (name, n, at - skipped)) for n, row in enumerate(table.starts)]
    return {key: number for number, (_, _, key) in enumerate(sorted(found))}


def _checks(table: Timetable) -> int:
    """The number of operations that run when the call arrives, before it is negotiated."""
    return 1 if table.operations[:1] == (CHECK,) else 0
