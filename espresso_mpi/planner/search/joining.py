"""Which neighbours share a buffer, in the order ``schedule``: joins and cuts are estimated before they are searched.

A join or a cut concerns one or two buffers. Its worth is estimated from the known schedule: all other buffers keep
their options and keys. The new ones try the options that cost least by the prices of the relaxation, and those of the
buffers that they come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..model.candidates import CandidateSet
from ..model.dispatch import Tables, laid_out, scheduled
from ..model.needs import needs_of
from ..model.problem import Problem
from ..model.timeline import ROUNDS
from .climb import replaced
from .relaxation import Relaxed

CANDIDATES = 3
"""Options of a new buffer that are tried by their price."""
NEAR = 0.005
"""Relative distance from the best within which the schedule of a guess is justified."""
JUSTIFIED = 4
"""How often, at most."""


@dataclass(frozen=True)
class Move:
    """Neighbours that become other buffers: of ``begin`` to ``end``, by number, those of these candidates.

    Attributes:
        parts: seconds of the backward pass of each new buffer.
    """

    begin: int
    end: int
    candidates: tuple[CandidateSet, ...]
    parts: tuple[float, ...]


class Guesses:
    """What moves are worth, beginning with a choice for a problem whose tensors are buffers."""

    def __init__(self, problem: Problem, choice: np.ndarray, relaxed: Relaxed) -> None:
        timeline = problem.timeline
        self.problem, self.choice, self.relaxed, self.tables = problem, choice, relaxed, timeline.tables
        self.time, self.key, _ = scheduled(choice, self.tables, ROUNDS)
        self.first, _, _, self.took, _ = laid_out(choice, self.tables)
        self.home, self.total = timeline.lanes.backward, timeline.lanes.count

    def worth(self, move: Move) -> tuple[float, tuple[int, ...]]:
        """The least time of a step that is guessed, and the place of each new buffer's option among its candidates."""
        best, found = np.inf, tuple(0 for _ in move.candidates)
        options = [own.options for own in move.candidates]
        begins = np.cumsum([0, *(own.count.size for own in options)])[:-1]
        arrays = [
            np.concatenate([getattr(own, name) for own in [self.problem.timeline.options, *options]])
            for name in ("lane", "seconds", "count", "repeats")
        ]
        begins += self.problem.method.size
        for places in self.candidates(move):
            time, _, _ = replaced(
                self.choice, self.key, self.first, self.took, move.begin, move.end, begins + np.array(places),
                np.array(move.parts), min(best, self.time) * (1 + NEAR), JUSTIFIED,
                Tables(self.tables.backward, self.home, self.total, *arrays),
            )  # fmt: skip
            if time < best:
                best, found = time, places
        return best, found

    def candidates(self, move: Move) -> Iterator[tuple[int, ...]]:
        """Options to try: by price the cheapest of all new buffers, and so on; and what the old ones had."""
        prices = self.relaxed.prices[self.relaxed.kind[move.end - 1]]
        ranked = []
        for own in move.candidates:
            o = own.options
            cost = needs_of(o.lane, o.seconds, o.count, o.repeats, self.total) @ prices
            ranked.append(np.argsort(cost, kind="stable"))
        tried = dict.fromkeys(
            tuple(int(order[min(place, order.size - 1)]) for order in ranked) for place in range(CANDIDATES)
        )
        for option in dict.fromkeys(self.choice[move.begin : move.end].tolist()):
            same = [_places(own, self.problem.method[option], self.problem.route[option]) for own in move.candidates]
            if all(places.size for places in same):
                tried[tuple(int(places[0]) for places in same)] = None
        yield from tried


def _places(own: CandidateSet, method: int, route: int) -> np.ndarray:
    return np.flatnonzero((own.method == method) & (own.route == route))


def carried(problem: Problem, places: Sequence[int]) -> np.ndarray:
    """The choice of the options at these places of each tensor's candidate set."""
    return np.asarray(problem.first[problem.set_of] + np.array(places, np.int64))
