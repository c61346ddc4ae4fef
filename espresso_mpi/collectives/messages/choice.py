"""Which of several ways is the quickest, found out while calls are made."""

from __future__ import annotations

import math
from collections import deque

_TRIES, _FAR = 3, 1.5
"""Turns that each way has at first, and how many times the least time is too long for the last of them. A call that is
made only some ten times should not spend them on trying."""

_RECENT, _SELDOM = 3, 512
"""Runs of a way whose least time counts: a machine changes, where cores of a virtual one are moved, say. And the most
runs from one trial of all ways to the next."""


class Choice:
    """Which of several ways is the quickest: in the first runs they take turns, and then again, more and more rarely.

    Of each way the least time of its latest runs counts, which other load on the node disturbs least. A way that was
    far from the best one in its first turns gets its last one of them only later.

    Args:
        ways: their number.

    Attributes:
        way: the one to take next; settled: whether it never changes.
    """

    def __init__(self, ways: int) -> None:
        self.way, self.settled, self._ways = 0, ways == 1, range(ways)
        self._times = [deque[int](maxlen=_RECENT) for _ in range(ways)]
        self._latest: int | None = None
        self._turns, self._last = [*self._ways] * (_TRIES - 1), [*self._ways]
        self._runs, self._again = 0, 4 * _TRIES * ways
        del self._turns[0]  # the first way is the next one already

    def add(self, took: int) -> None:
        """A run has ended.

        Args:
            took: nanoseconds of the run before; the same on all ranks.
        """
        if self._latest is not None:
            self.learn(self._latest, took)
        self._latest = self.way
        self.advance()

    def learn(self, way: int, took: int) -> None:
        """A run by this way took so many nanoseconds; the same on all ranks."""
        self._times[way].append(took)

    def advance(self) -> None:
        """A run has ended, whose time is not known yet."""
        best = [min(times, default=math.inf) for times in self._times]
        self._runs += 1
        if self._runs == self._again:
            self._turns, self._again = [*self._ways], self._again + min(self._again, _SELDOM)
        if not self._turns and self._last:
            self._turns, self._last = [way for way in self._last if best[way] < _FAR * min(best)], []
        self.way = self._turns.pop(0) if self._turns else best.index(min(best))
