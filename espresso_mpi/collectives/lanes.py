"""Carries out the schedule of a plan: every lane does one operation at a time, of what is ready the one planned first.

All ranks must go on with the same operation at every moment, or one waits for a message that another has not come to
send. Their clocks differ, so decisions are taken in *planned time*: an operation lasts as long as the schedule says. It
is begun when its lane is free by that time; a collective is gone on with in equal parts of its time, and waited for
when what comes after it begins. While its messages are under way, other lanes do what is planned for that time. The
first messages of a collective between machines are posted as soon as it is ready, and those before it have posted
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
class _Way:
    """A segment on its way: the operation that it has come to, and where and when each is done."""

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
        return self.segment.legs[self.at].resource in ("intra", "inter")


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
        self._between = _between_machines(schedule)
        self._warned: set[str] = set()
        self._order = itertools.count()
        self._empty()

    def _empty(self) -> None:
        self.now = 0.0
        self._under_way: dict[int, _Way] = {}
        self._held: list[_Way] = []
        self._ready: list[list[tuple[Key, _Way]]] = [[] for _ in range(self._lanes.count)]
        self._occupied = [False] * self._lanes.count
        self._events: list[tuple[float, int, _Way, bool]] = []
        self._come: set[str] = set()
        self._first_missing = self._posted = 0
        self._postable: dict[int, _Way] = {}

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
        if segment.number == 0 and segment.bucket in self._come and self.knows(segment.bucket):  # the next step begins
            self._come, self._first_missing, self._postable, self._posted = set(), 0, {}, 0
            self.now = self.now if self.busy else 0.0
        self._come.add(segment.bucket)
        while self._first_missing < len(self._backward) and self._backward[self._first_missing][1] in self._come:
            self._first_missing += 1
        way = self._planned(segment, priority)
        self._under_way[id(way)] = way
        self._held.append(way)

    def _planned(self, segment: Segment, priority: float) -> _Way:
        table = self._schedule.buffers.get(segment.bucket)
        if table is not None:
            first = _checks(table)
            expected, found = table.operations[first:], tuple(leg.what for leg in segment.legs)
            if expected == found:
                starts = table.starts[min(segment.number, len(table.starts) - 1)]
                return _Way(segment, -priority, table.lanes[first:], starts[first:], table.seconds[first:])
            if expected and segment.bucket not in self._warned:
                self._warned.add(segment.bucket)
                self._warn(f"{segment.bucket}: the plan's schedule has {expected} for it, here it is {found}")
        lanes = tuple(self._lanes.of(leg.resource) for leg in segment.legs)
        return _Way(segment, -priority, lanes, (math.inf,) * len(lanes), (0.0,) * len(lanes))

    def knows(self, bucket: str) -> bool:
        """Whether a bucket is in the schedule."""
        return bucket in self._schedule.buffers

    # --- turns --------------------------------------------------------------------------------------------------------

    def turn(self, all_here: bool) -> bool:
        """Begin what can begin now, and go on to when something ends; False if nothing can be done.

        Args:
            all_here: nobody is about to bring more.
        """
        came = self._let_in()
        self._serve(all_here)
        if not self._events:
            return came
        self.now = self._events[0][0]
        ending = []
        while self._events and self._events[0][0] == self.now:
            _, _, way, last = heapq.heappop(self._events)
            if last:
                ending.append(way)
            else:
                next(way.turns, ENDED)
        self._end(ending)
        return True

    def _let_in(self) -> bool:
        """Segments wait for a lane once their bucket of the step before has ended: what is kept belongs to that.

        Returns:
            whether any is let in.
        """
        held, self._held = self._held, []
        for way in held:
            if way.segment.free():
                self._wait(way)
            else:
                self._held.append(way)
        return len(self._held) < len(held)

    def _wait(self, way: _Way) -> None:
        """A segment waits for the lane of its next operation, if it has any."""
        if way.at == len(way.lanes):
            for _ in itertools.chain(way.turns, way.segment.journey):  # also what is to be done at its end
                pass
            del self._under_way[id(way)]
            return
        key = (way.urgency, way.starts[way.at], way.seconds[way.at], next(self._order))
        heapq.heappush(self._ready[way.lanes[way.at]], (key, way))
        place = self._place(way)
        if place is not None:
            self._postable[place] = way
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

    def _begin(self, lane: int, way: _Way) -> None:
        """Compute, or post the first messages of a collective; and see when it is to be gone on with."""
        leg, seconds, place = way.segment.legs[way.at], way.seconds[way.at], self._place(way)
        self._begun(lane, way.segment, way.at, self.now)
        self._occupied[lane] = True
        if not way.posted:
            self._post(way)
        way.posted, parts = False, leg.turns - 1 if way.moves else 0
        if not parts:
            for _ in way.turns:
                pass
        if place is not None and place >= self._posted:  # those before it are not here, or come late
            self._posted = place + 1
            self._post_in_order()
        for part in range(1, parts):
            self._later(self.now + seconds * part / parts, way, last=False)
        self._later(self.now + seconds, way, last=True)

    def _later(self, when: float, way: _Way, last: bool) -> None:
        heapq.heappush(self._events, (when, next(self._order), way, last))

    def _end(self, ending: list[_Way]) -> None:
        """End operations that end at the same moment.

        The messages of a collective are waited for where the segment's next operation begins, which may be later.
        """
        for way in sorted(ending, key=lambda way: way.moves):  # what follows on computing may post messages first
            self._occupied[way.lanes[way.at]] = False
            way.at += 1
            self._wait(way)

    # --- messages ahead of their time ---

    def _post_in_order(self) -> None:
        """Post the first messages of collectives between machines that are ready, in the order of the schedule."""
        while self._posted in self._postable:
            self._post(self._postable.pop(self._posted))
            self._posted += 1

    def _post(self, way: _Way) -> None:
        for _ in way.turns:
            pass
        way.turns, way.posted = next(way.segment.journey), True
        next(way.turns, ENDED)

    def _place(self, way: _Way) -> int | None:
        """Where the operation that a segment has come to stands among the collectives between machines."""
        if way.segment.legs[way.at].resource != "inter":
            return None
        return self._between.get((way.segment.bucket, way.segment.number, way.at))


def _between_machines(schedule: Schedule) -> dict[tuple[str, int, int], int]:
    """(buffer, segment, operation) of the collectives on the lane between machines, numbered as they are to begin."""
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
