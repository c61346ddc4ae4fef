"""Carries out the schedule of a plan: every lane does one operation at a time, of what is ready the one planned first.

All ranks must go on with the same operation at every moment, or one waits for a message that another has not come to
send. Their clocks differ, so decisions are taken in *planned time*: an operation lasts as long as the schedule says. It
is begun when its lane is free by that time; a collective is gone on with in equal parts of its time, and waited for
when what comes after it begins. While its messages are under way, other lanes do what is planned for that time. The
first messages of a collective between nodes are posted as soon as it is ready, and those before it have posted
theirs: so the wire does its work in the order of the schedule, and is not idle where it is quicker than planned.

Tensors that come as the schedule expects them are served exactly in its order: of what is ready, the operation that was
planned to begin first is the one that began. What comes earlier or later, or not at all, blocks nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..timetable import CHECK, Schedule, Timetable
from .turns import ENDED, Segment, Turns

Key = tuple[float, float, float, int]
"""What is served first: (minus the priority, planned begin, seconds, how many came before).

Of two that begin at the same moment on one lane the first takes no time."""


@dataclass
class _Progress:
    """A segment under way: the operation that it has come to, and where and when each is done."""

    segment: Segment
    urgency: float
    lanes: tuple[int, ...]
    starts: tuple[float, ...]
    seconds: tuple[float, ...]
    at: int = 0
    posted: bool = False
    turns: Turns = field(default_factory=lambda: iter(()))

    @property
    def moves(self) -> bool:
        """Whether the operation that it has come to is a collective."""
        return self.segment.operations[self.at].resource in ("intra", "inter")


class OnLanes:
    """The segments under way, and what is done next.

    Args:
        schedule: buckets that it does not know travel after those that it knows, as if their operations took no time.
        warn: is told, once, if a bucket's operations are not those of the schedule; it then travels like one that the
            schedule does not know.
        begun: is told the lane, the segment, the place of its operation and the planned time whenever one begins.
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
        self._under_way: dict[int, _Progress] = {}
        self._held: list[_Progress] = []
        self._ready: list[list[tuple[Key, _Progress]]] = [[] for _ in range(self._lanes.count)]
        self._occupied = [False] * self._lanes.count
        self._events: list[tuple[float, int, _Progress, bool]] = []
        self._arrived: set[str] = set()
        self._first_missing = self._posted = 0
        self._postable: dict[int, _Progress] = {}

    def clear(self) -> list[Any]:
        """Forget everything; returns what was under way."""
        found = list(self._under_way.values())
        self._empty()
        return found

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._under_way)

    @property
    def waiting(self) -> bool:
        """Whether something waits to begin."""
        return bool(self._held or any(self._ready))

    def add(self, segment: Segment, priority: float) -> None:
        """Take a segment in; the higher its priority, the sooner it is served."""
        if (
            segment.number == 0 and segment.bucket in self._arrived and self.knows(segment.bucket)
        ):  # the next step begins
            self._arrived, self._first_missing, self._postable, self._posted = set(), 0, {}, 0
            self.now = self.now if self.busy else 0.0
        self._arrived.add(segment.bucket)
        while self._first_missing < len(self._backward) and self._backward[self._first_missing][1] in self._arrived:
            self._first_missing += 1
        one = self._planned(segment, priority)
        self._under_way[id(one)] = one
        self._held.append(one)

    def _planned(self, segment: Segment, priority: float) -> _Progress:
        table = self._schedule.buffers.get(segment.bucket)
        if table is not None:
            first = _checks(table)
            expected, found = table.operations[first:], tuple(operation.what for operation in segment.operations)
            if expected == found:
                starts = table.starts[min(segment.number, len(table.starts) - 1)]
                return _Progress(segment, -priority, table.lanes[first:], starts[first:], table.seconds[first:])
            if expected and segment.bucket not in self._warned:
                self._warned.add(segment.bucket)
                self._warn(f"{segment.bucket}: the plan's schedule has {expected} for it, here it is {found}")
        lanes = tuple(self._lanes.of(operation.resource) for operation in segment.operations)
        return _Progress(segment, -priority, lanes, (math.inf,) * len(lanes), (0.0,) * len(lanes))

    def knows(self, bucket: str) -> bool:
        """Whether a bucket is in the schedule."""
        return bucket in self._schedule.buffers

    # --- turns --------------------------------------------------------------------------------------------------------

    def turn(self, all_here: bool) -> bool:
        """Begin what can begin now, and go on to when something ends; False if nothing can be done.

        Args:
            all_here: nobody is about to bring more.
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
                next(one.turns, ENDED)
        self._end(ending)
        return True

    def _admit(self) -> bool:
        """Segments wait for a lane once their bucket of the step before has ended: what is kept belongs to that.

        Returns:
            whether any is let in.
        """
        held, self._held = self._held, []
        for one in held:
            if one.segment.free():
                self._wait(one)
            else:
                self._held.append(one)
        return len(self._held) < len(held)

    def _wait(self, one: _Progress) -> None:
        """A segment waits for the lane of its next operation, if it has any."""
        if one.at == len(one.lanes):
            for _ in itertools.chain(one.turns, one.segment.turns_of_operations):  # also what is done at its end
                pass
            del self._under_way[id(one)]
            return
        key = (one.urgency, one.starts[one.at], one.seconds[one.at], next(self._order))
        heapq.heappush(self._ready[one.lanes[one.at]], (key, one))
        place = self._place(one)
        if place is not None:
            self._postable[place] = one
            self._post_in_order()

    def _serve(self, all_here: bool) -> None:
        """Lanes that are free begin; the network first, so that messages are under way while the processor works."""
        for lane in reversed(range(self._lanes.count)):
            ready = self._ready[lane]
            if ready and not self._occupied[lane] and (all_here or self._may_begin(lane, ready[0][0][1])):
                self._begin(lane, heapq.heappop(ready)[1])

    def _may_begin(self, lane: int, start: float) -> bool:
        """Whether that part of the backward pass is over which is to be done before on the same lane."""
        if lane != self._lanes.backward or math.isinf(start) or self._first_missing == len(self._backward):
            return True
        return start <= self._backward[self._first_missing][0]

    def _begin(self, lane: int, one: _Progress) -> None:
        """Compute, or post the first messages of a collective; and see when it is to be gone on with."""
        operation, seconds, place = one.segment.operations[one.at], one.seconds[one.at], self._place(one)
        self._begun(lane, one.segment, one.at, self.now)
        self._occupied[lane] = True
        if not one.posted:
            self._post(one)
        one.posted, parts = False, operation.turns - 1 if one.moves else 0
        if not parts:
            for _ in one.turns:
                pass
        if place is not None and place >= self._posted:  # those before it are not here, or come late
            self._posted = place + 1
            self._post_in_order()
        for part in range(1, parts):
            self._later(self.now + seconds * part / parts, one, last=False)
        self._later(self.now + seconds, one, last=True)

    def _later(self, when: float, one: _Progress, last: bool) -> None:
        heapq.heappush(self._events, (when, next(self._order), one, last))

    def _end(self, ending: list[_Progress]) -> None:
        """End operations that end at the same moment.

        The messages of a collective are waited for where the segment's next operation begins, which may be later.
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

    def _post(self, one: _Progress) -> None:
        for _ in one.turns:
            pass
        one.turns, one.posted = next(one.segment.turns_of_operations), True
        next(one.turns, ENDED)

    def _place(self, one: _Progress) -> int | None:
        """Where the operation that a segment has come to stands among the collectives between nodes."""
        if one.segment.operations[one.at].resource != "inter":
            return None
        return self._between.get((one.segment.bucket, one.segment.number, one.at))


def _between_nodes(schedule: Schedule) -> dict[tuple[str, int, int], int]:
    """(buffer, segment, operation) of the collectives on the lane between nodes, numbered as they are to begin."""
    found = []
    for name, table in schedule.buffers.items():
        skipped = _checks(table)
        for at, (what, lane) in enumerate(zip(table.operations, table.lanes)):
            if lane == schedule.lanes.inter and what.partition("@")[2] in ("inter", "flat"):
                found += [(row[at], table.seconds[at], (name, n, at - skipped)) for n, row in enumerate(table.starts)]
    return {key: number for number, (_, _, key) in enumerate(sorted(found))}


def _checks(table: Timetable) -> int:
    """How many operations of a timetable are done when the call comes in, before it is agreed on."""
    return 1 if table.operations[:1] == (CHECK,) else 0
