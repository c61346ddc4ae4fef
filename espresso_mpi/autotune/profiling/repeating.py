"""Passes that are repeated until their medians are known, on one clock for all nodes.

Every point is visited again and again until its median is known well enough or the time is used up. A visit makes few
passes, so that a disturbance of a second does not spoil a point. All ranks decide from the same numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...collectives.messages import clocks
from ...collectives.messages.agreement import gather_small
from ...collectives.messages.transport import Transport
from ...planner.model.curve import Curve, Sample
from ...types import Strategy

PRECISION = 0.05
"""A median is known well enough if its uncertainty is at most this share of it."""

_FEWEST, _BATCH, MOST = 2, 5, 60
"""Passes of a visit to a point where they take long, and where they do not; and in all."""

_SOON, _FIRST = 2 / 3, 1 / 4
"""The share of the time that is left which the next size may take, and the first one."""

_TELLING = 1 << 17
"""The size that a pass is allowed whatever it takes: of smaller ones alone, a curve would not tell what a byte costs.
It is several times what a link lets through at once after a pause."""

_CLIMB, _APART = 8, 16
"""How much larger the next size is that is tried, and how far below the reach the least size is, at least."""

_CLOCK_SECONDS = 0.5
"""After so long the clocks of other nodes are compared anew."""

_SHARES = {"moves": 0.42, "codecs": 0.22, "copies": 0.03, "check": 0.03, "calls": 0.1, "steps": 0.2}
"""How the time is divided; what one kind leaves goes to those that follow."""

_RESOLUTION = 1e-7
"""Seconds that a sample has at least."""


@dataclass
class Point:
    """Something that is measured at one size.

    Attributes:
        what: in words; family: what costs about as much for each unit of the size.
        size: becomes smaller where the time does not suffice.
        visit: makes some passes at a size and returns their seconds, shape (passes, steps).
        found: what the visits brought; lasted: seconds of the latest.
    """

    what: str
    family: Any
    size: int
    visit: Callable[[int], np.ndarray]
    found: np.ndarray | None = None
    lasted: float = 0.0

    @property
    def settled(self) -> bool:
        """Whether its median is known well enough: by its interquartile range over sqrt(n).

        The steps of a pass are judged by what they are of the pass, so that one of a microsecond does not hold up all.
        """
        if self.found is None or len(self.found) >= MOST:
            return True
        if len(self.found) < _BATCH:
            return False
        low, middle, high = np.percentile(self.found, [25, 50, 75], axis=0)
        return bool(np.sum(high - low) <= PRECISION * math.sqrt(len(self.found)) * np.sum(middle))


class Times(dict[Any, dict[int, list[float]]]):
    """Observed seconds by what they are of, and by size."""

    def note(self, key: Any, size: int, seconds: Iterable[float]) -> None:
        self.setdefault(key, {}).setdefault(size, []).extend(seconds)

    def curves(self) -> dict[Any, Curve]:
        """A curve for each key."""
        return {key: Curve.fit(_samples(by_size)) for key, by_size in self.items()}


def _samples(by_size: Mapping[int, Sequence[float]]) -> list[Sample]:
    """The samples of a curve. One that took too long to be repeated spreads as the others do at most."""
    found = [_sample(size, seconds) for size, seconds in sorted(by_size.items())]
    most = max((sample.spread for sample in found if sample.repeats > 1), default=1.0)
    return [sample if sample.repeats > 1 else Sample(sample.size, sample.seconds, most, 1) for sample in found]


def _sample(size: int, seconds: Sequence[float]) -> Sample:
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    middle = max(float(middle), _RESOLUTION)
    return Sample(size, middle, float(high - low) / middle, len(seconds))


class Repeating:
    """Repeats passes, on all ranks at once, until medians are known or the time is up. Collective, as are its methods.

    Attributes:
        transport: of the ranks; left_out: in words, the points that would have taken too long.
    """

    def __init__(self, transport: Transport, seconds: float, tick: Callable[[float], None]) -> None:
        self.transport, self._seconds, self._tick = transport, seconds, tick
        self.left_out: list[str] = []
        self._start = time.perf_counter()
        self._offsets = np.zeros(transport.topology.size)
        self._read = -math.inf
        self._deadline, self._limit, self._least, self._pass = 0.0, 0.0, 1, 0.0
        transport.waiter.what = "the profile"

    def begin(self) -> None:
        """Time counts from now on."""
        self._start = time.perf_counter()

    def allow(self, kind: str) -> None:
        """Begin with a kind of measurement: until when it may take."""
        kinds = list(_SHARES)
        until = sum(_SHARES[k] for k in kinds[: kinds.index(kind) + 1])
        self._deadline = until * self._seconds

    def time_for(self, seconds: float) -> bool:
        """Whether so much time is left for this kind. Collective."""
        return self._left() >= seconds

    def while_in_time(self, some: Sequence[Strategy], what: str) -> Iterator[Strategy]:
        """The first, and others while there is time for this kind; ``what``: in words, with a place for a method."""
        for number, one in enumerate(some):
            if number and self._left() <= 0:
                self.left_out.append(what.format(one.compressor))
            else:
                yield one

    def reach(self, visit: Callable[[int], np.ndarray], most: int, families: int) -> float:
        """The size of which a pass takes about as long as it may; infinite if that is more than ``most``.

        It is looked for from below, so that no pass takes much longer than that.

        Args:
            visit: makes passes at a size; families: how many are to be visited in the time for this kind.
        """
        allowed, size = self._left() / families / (_FEWEST * _FEWEST), _TELLING
        while size < most:
            self._limit = 0.0
            visit(size)
            if self._pass > allowed:
                return max(_TELLING, size * allowed / self._pass)
            size *= _CLIMB
        return math.inf

    def surveyed(self, points: Sequence[Point], needed: bool = False, reach: float = math.inf) -> list[Point]:
        """Visit all points, and again those that are not settled while there is time; those that were visited.

        Where the time does not suffice for a point, a smaller size takes its place if that tells something new, and the
        point is among those left out. Of each family two sizes are visited, whatever they take.

        Args:
            needed: visit all, and each more than once; reach: no size is larger.
        """
        costs: dict[Any, dict[int, float]] = {}
        visited: list[Point] = []
        self._least = _FEWEST if needed else 1
        for number, point in enumerate(points):
            alike = len(points) - number if needed else sum(1 for p in points[number:] if p.size == point.size)
            known = costs.setdefault(point.family, {})
            share = 1.0 if needed else _SOON if known else _FIRST
            self._limit = share * self._left() / alike
            size = point.size if needed else self._fitting(known, point.size, reach)
            if size < point.size:
                self.left_out.append(point.what)
            if size > 0:
                point.size = size
                self._visit(point)
                known[size] = self._pass
                visited.append(point)
        self._revisit(visited)
        self._limit, self._least = 0.0, 1
        return visited

    def _fitting(self, known: Mapping[int, float], size: int, reach: float) -> int:
        """The size that the limit allows in the place of one; 0: none that would tell something new."""
        found = min(size, int(reach if known else reach / _APART)) if reach < math.inf else size
        if len(known) > 1:
            if self._limit < min(known.values()):
                return 0
            found = min(found, affordable(known, size, self._limit / _FEWEST))
        smaller = [other for other in known if other <= size]
        return found if found == size or not smaller or found >= 2 * max(smaller) else 0

    def _revisit(self, points: Sequence[Point]) -> None:
        """Until all are settled or the time is up."""
        rough = [point for point in points if not point.settled]
        while rough:
            going = False
            for point in rough:
                self._limit = self._left()
                if point.lasted <= self._limit:
                    self._visit(point)
                    going = True
            rough = [point for point in rough if going and not point.settled]

    def _visit(self, point: Point) -> None:
        start = time.perf_counter()
        self._compare_clocks()
        seconds = point.visit(point.size)
        point.found = seconds if point.found is None else np.concatenate([point.found, seconds])
        point.lasted = self._agreed_time(start)
        self._tick(min(1.0, (time.perf_counter() - self._start) / self._seconds))

    def passes(self, one: Callable[[], list[float]]) -> np.ndarray:
        """The marks of some passes on rank 0's clock, shape (ranks, passes, marks).

        The first pass warms up. It counts if there is no time for others.
        """
        start = time.perf_counter()
        first = one()
        self._pass = self._agreed_time(start)
        count = int(min(_BATCH, self._limit / self._pass))
        count = 0 if count < _FEWEST and self._least < _FEWEST else max(count, _FEWEST)
        marks = [one() for _ in range(count)] or [first]
        return self._of_all(np.array(marks)) + self._offsets[:, None, None]

    def _of_all(self, mine: np.ndarray) -> np.ndarray:
        """The float64 arrays of all ranks, which have the same shape; shape (ranks, *shape)."""
        every = gather_small(self.transport, np.ascontiguousarray(mine).reshape(-1).view(np.uint8), mine.nbytes)
        return np.array([row.view(np.float64).reshape(mine.shape) for row in every])

    def round(self) -> None:
        """What sessions do between calls: an exchange of a few bytes."""
        gather_small(self.transport, np.zeros(8, np.uint8), 8)

    def _compare_clocks(self) -> None:
        """Find out anew how far the other nodes' clocks are from rank 0's, if that is long ago."""
        now = self._agreed_time(0.0)
        if now - self._read < _CLOCK_SECONDS:
            return
        self._read = now
        offsets = self._of_all(np.array([clocks.read(self.transport).offset]))[:, 0]
        topology = self.transport.topology
        self._offsets = offsets[[topology.nodes[node][0] for node in topology.node_of]]

    def _agreed_time(self, since: float) -> float:
        """Seconds since a moment, by rank 0's clock."""
        return float(self._of_all(np.array([time.perf_counter() - since]))[0, 0])

    def _left(self) -> float:
        """Seconds left for this kind."""
        return max(0.0, self._deadline - self._agreed_time(self._start))

    def interleaved(self, passes: Sequence[Callable[[], list[float]]]) -> list[np.ndarray]:
        """Seconds of the steps of some passes, each of shape (repetitions, steps)."""
        points = [Point("", "", number, partial(self._timed, one)) for number, one in enumerate(passes, 1)]
        return [point.found for point in self.surveyed(points, needed=True) if point.found is not None]

    def _timed(self, one: Callable[[], list[float]], _: int) -> np.ndarray:
        return telescoped(paired(self.passes(one)))


def guess(known: Mapping[int, float], size: int) -> float:
    """What a pass will take, by the line through the two next smaller sizes; 0 if fewer are known."""
    smaller = sorted(other for other in known if other < size)[-2:]
    if len(smaller) < 2:
        return 0.0
    low, high = smaller
    return known[high] + max(0.0, known[high] - known[low]) * (size - high) / (high - low)


def affordable(known: Mapping[int, float], size: int, seconds: float) -> int:
    """The largest size up to one whose pass will not take longer than that, by ``guess``; 0 if there is none.

    Args:
        known: seconds of passes, by size.
    """
    if guess(known, size) <= seconds:
        return size
    *_, low, high = sorted(other for other in known if other < size)
    slope = (known[high] - known[low]) / (high - low)
    return min(size, int(high + (seconds - known[high]) / slope)) if known[high] < seconds else 0


def ends_first(sizes: Sequence[int]) -> list[int]:
    """The least size, the largest, and then what halves the gaps.

    So a curve spans the sizes however early the time is up.
    """
    order, gaps = [0, len(sizes) - 1], [(0, len(sizes) - 1)]
    for low, high in gaps:
        middle = (low + high) // 2
        if middle > low:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return [sizes[i] for i in dict.fromkeys(order)]


def telescoped(marks: np.ndarray) -> np.ndarray:
    """Seconds from when the last rank began a step until the last one has ended it, shape (passes, steps).

    Args:
        marks: beginnings and ends, shape (ranks, passes, steps, 2).
    """
    ends = np.max(marks, axis=0)
    return np.maximum(ends[..., 1] - ends[..., 0], 0.0)


def paired(marks: np.ndarray) -> np.ndarray:
    """Marks as beginnings and ends: shape (ranks, passes, 2 * steps) as (ranks, passes, steps, 2)."""
    return marks.reshape(*marks.shape[:2], -1, 2)
