"""The offsets of the nodes' clocks from the clock of rank 0, measured by round trips.

Of many round trips, the fastest was disturbed least. The other clock was read between its ends, so half of the round
trip bounds the error (Cristian, "Probabilistic clock synchronization", 1989).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .transport import Transport

ROUND_TRIPS = 32

Clock = Callable[[], float]


@dataclass(frozen=True)
class Reading:
    """At ``here`` seconds of a clock, rank 0's clock showed ``here + offset``, within half of ``round_trip``."""

    here: float
    offset: float
    round_trip: float


@dataclass(frozen=True)
class Correction:
    """Converts times of one node's clock to rank 0's by linear interpolation between two readings."""

    before: Reading
    after: Reading

    def __call__(self, seconds: float) -> float:
        """The time of rank 0's clock when this one showed ``seconds``."""
        length = self.after.here - self.before.here
        share = (seconds - self.before.here) / length if length > 0 else 0.0
        return seconds + self.before.offset + share * (self.after.offset - self.before.offset)


def read(transport: Transport, clock: Clock = time.perf_counter) -> Reading:
    """Compare this node's clock with rank 0's. Collective.

    The first rank of each node asks rank 0. The ranks of one node share a clock, so the other ranks, and those of rank
    0's node, return a reading with an offset of 0.

    Raises:
        RankTimeoutError: a rank did not come.
    """
    askers = [ranks[0] for ranks in transport.topology.nodes if 0 not in ranks]
    if transport.rank == 0:
        for rank in askers:
            _answer(transport, rank, clock)
    if transport.rank in askers:
        return min((_ask(transport, clock) for _ in range(ROUND_TRIPS)), key=lambda reading: reading.round_trip)
    return Reading(clock(), 0.0, 0.0)


def _ask(transport: Transport, clock: Clock) -> Reading:
    question, answer = np.zeros(1, np.uint8), np.zeros(1, np.float64)
    asked = clock()
    transport.exchange([(0, question)], [(0, answer)])
    answered = clock()
    middle = (asked + answered) / 2
    return Reading(middle, float(answer[0]) - middle, answered - asked)


def _answer(transport: Transport, rank: int, clock: Clock) -> None:
    question, answer = np.zeros(1, np.uint8), np.zeros(1, np.float64)
    for _ in range(ROUND_TRIPS):
        transport.exchange([], [(rank, question)])
        answer[0] = clock()
        transport.exchange([(rank, answer)], [])
