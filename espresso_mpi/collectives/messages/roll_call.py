"""Roll calls: who takes part in an exchange in which ranks wait for ranks that wait themselves.

In an exchange of several rounds, a rank waits for few others, and one of these may itself wait for the rank that is
missing. So a rank that waits for long tells all others of the exchange that it is there, and hears who else is. Its
timeout then names those that were never heard. Ordinary exchanges send none of these notes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from espresso_mpi.errors import RankTimeoutError

from .deadlock import DeadlockDetector

_FIRST, _EVERY = 2.0, 1.0
"""Seconds of waiting before the first note, and between looks for those of others; less if the timeout is short."""


class RollCall:
    """The exchanges of one transport, which all of their ranks count alike."""

    def __init__(self, detector: DeadlockDetector, rank: int) -> None:
        self._detector, self._rank = detector, rank
        self._number = 0
        self._heard: dict[int, tuple[int, str]] = {}

    def advance(self) -> int:
        """Count one more exchange; returns its number."""
        self._number += 1
        return self._number

    def roll(self, group: Sequence[int], number: int, timeout: float) -> Roll:
        """What a rank of a group needs that waits for long in an exchange, or cannot take part in it."""
        return Roll(self, [rank for rank in group if rank != self._rank], number, timeout)

    def hear(self) -> dict[int, tuple[int, str]]:
        """By rank: the number of the latest exchange that it is known to have reached, and why it failed there."""
        for rank, number, text in self._detector.roll_notes():
            self._heard[rank] = max(self._heard.get(rank, (0, "")), (number, text))
        return self._heard

    def tell(self, ranks: Sequence[int], number: int, text: str = "") -> list[int]:
        """Send a note; returns the ranks that it is under way to."""
        return self._detector.tell(ranks, [self._rank, number, text])


class Roll:
    """One exchange, as one rank sees it."""

    def __init__(self, calls: RollCall, others: Sequence[int], number: int, timeout: float) -> None:
        self._calls, self._others, self._number = calls, others, number
        self._untold = list(others)
        self._every = min(_EVERY, timeout / 16)
        self._next = time.perf_counter() + min(_FIRST, timeout / 8)

    def look(self) -> bool:
        """Called at every poll: tells and hears from time to time. False: it waits for nothing.

        Raises:
            RankTimeoutError: another rank has missed one, and says which.
        """
        if time.perf_counter() >= self._next:
            self._exchange_notes()
            self._next = time.perf_counter() + self._every
        return False

    def late(self, awaited: Callable[[], Sequence[int]]) -> list[int]:
        """The ranks that were not heard; if there are none, those whose messages are awaited.

        Raises:
            RankTimeoutError: as ``look``.
        """
        heard = self._exchange_notes()
        absent = [rank for rank in self._others if heard.get(rank, (0, ""))[0] < self._number]
        return absent or list(awaited())

    def fail(self, text: str) -> None:
        """Tell all others that this rank cannot take part, because another one did not come. Does not wait."""
        self._calls.tell(self._others, self._number, text)

    def _exchange_notes(self) -> dict[int, tuple[int, str]]:
        if self._untold:
            told = set(self._calls.tell(self._untold, self._number))
            self._untold = [rank for rank in self._untold if rank not in told]
        heard = self._calls.hear()
        failed = next((heard[rank][1] for rank in self._others if rank in heard and heard[rank][1]), None)
        if failed:
            raise RankTimeoutError(failed)
        return heard
