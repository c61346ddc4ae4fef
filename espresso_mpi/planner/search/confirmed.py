"""Steps in the order ``schedule`` of which one tensor after the other is changed, for Algorithms 1 and 2.

F of a choice is that of the best schedule found for it. To find one takes some fifty times as long as to serve all
operations once. So few of many candidates get a schedule:

1. Only tensors on the longest path are looked at. With the operations in their order, no other shortens the step.
2. Of a tensor's candidates, the best in the order ``backprop`` are kept. There each costs its own operations only.
3. These are served with the keys of all other operations as they are. The best one gets a schedule, and its F counts.

A candidate without a schedule counts as endless, so a change is made only for a shorter F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from espresso_mpi.files.compiled import compiled

from ..model.dispatch import exchanged, laid_out, scheduled
from ..model.timeline import ROUNDS, TIE, Timeline
from .incremental import Backprop

KEPT = 8
"""Candidates of a tensor that are served: with 16 or 32 the plans for the eight models are no better."""
NEAR = 3e-4
"""Relative: by how much a step may be longer with the keys as they are for a candidate to get a schedule."""
NEAR_OFFLOAD, NUMBERS = 0.02, 2
"""The same for moves to the CPU, which change more; and how many of a group's numbers get a schedule."""

_Schedule = tuple[float, np.ndarray, np.ndarray]
"""F, the keys of all operations, and when they begin."""


class Confirmed:
    """See the module; a ``Step``.

    Attributes:
        alone: float64 (options,), seconds of every option by itself: of equal candidates the one with less is kept.
    """

    def __init__(self, timeline: Timeline, choice: np.ndarray, alone: np.ndarray) -> None:
        self.alone, self.tables = alone, timeline.tables
        self.rough = Backprop(replace(timeline, order="backprop"), choice)
        self.choice = self.rough.choice
        self.known: tuple[np.ndarray, _Schedule] = self.choice[:0], (np.inf, self.choice, self.choice)
        self._settle()

    def _settle(self) -> None:
        """Work out what is said of the choice, after it has changed."""
        tried, found = self.known
        if not np.array_equal(tried, self.choice):
            found = scheduled(self.choice, self.tables, ROUNDS)
        self.time, self.key, start = found
        self.first, owner, where, self.took, _ = laid_out(self.choice, self.tables)
        self.critical, self.bubble = _read(self.choice, self.first, owner, where, self.took, self.tables.counts, start,
                                           self.rough.networks, self.tables.total)  # fmt: skip

    def seconds(self) -> float:
        return float(self.time)

    def candidates(self, tensor: int, options: np.ndarray) -> np.ndarray:
        times = np.full(options.size, np.inf)
        times[options == self.choice[tensor]] = self.time
        if self.critical[tensor]:
            rough = self.rough.candidates(tensor, options)
            self.known = _confirmed(self.choice, tensor, options, rough, self.alone, self.time, times, self.first,
                                    self.key, self.took, self.tables)  # fmt: skip
        return times

    def take(self, tensor: int, option: int) -> None:
        self.rough.take(tensor, option)
        self._settle()

    def by_number(self, group: Sequence[int], start: np.ndarray, moved: np.ndarray) -> np.ndarray:
        times = np.empty(len(group) + 1)
        self.known = _by_number(self.choice, np.array(group, np.int64), start, moved, self.time, times, self.first,
                                self.key, self.took, self.tables)  # fmt: skip
        return times

    def give(self, group: Sequence[int], options: np.ndarray) -> None:
        self.rough.give(group, options)
        self._settle()

    def before_bubble(self) -> np.ndarray:
        return self.bubble


@compiled
def _confirmed(  # type: ignore[no-untyped-def]
    choice, tensor, options, rough, alone, now, times, first, key, took, tables
):  # fmt: skip
    """Serve the best candidates of a tensor, and give the best of these a schedule.

    Args:
        rough: float64 (these options,), F in the order ``backprop``.
        alone: float64 (all options,); now: F of the choice.
        times: receives F of the one that got a schedule.

    Returns:
        the choice with it and its schedule; if none has: no choice.
    """
    old, left, tried = choice[tensor], rough.copy(), choice.copy()
    best, place = now * (1 + NEAR), -1
    for _ in range(min(KEPT, options.size)):
        at = _least(left, options, alone)
        left[at] = np.inf
        if options[at] == old:
            continue
        time = exchanged(choice, tensor, options[at], first, key, took, tables, best)[0]
        if time < best * (1 - TIE) or (time <= best and (place < 0 or alone[options[at]] < alone[options[place]])):
            best, place = time, at
    if place < 0:
        return choice[:0], (now, key, took)
    tried[tensor] = options[place]
    found = scheduled(tried, tables, ROUNDS)
    times[place] = found[0]
    return tried, found


@compiled
def _least(times, options, alone):  # type: ignore[no-untyped-def]
    """The place of the least time; of equal ones that with the least seconds by itself."""
    best = 0
    for place in range(1, times.size):
        equal = abs(times[place] - times[best]) <= TIE * min(times[place], times[best])
        if alone[options[place]] < alone[options[best]] if equal else times[place] < times[best]:
            best = place
    return best


@compiled
def _by_number(  # type: ignore[no-untyped-def]
    choice, group, start, moved, now, times, first, key, took, tables
):  # fmt: skip
    """See ``Step.by_number``: F of the numbers that got a schedule, and of the present one; of all others inf.

    Returns:
        the choice with the best of them and its schedule; if none has one: no choice.
    """
    tried, time, rough = choice.copy(), now, np.empty(group.size + 1)
    present = 0
    for tensor in group:
        present += choice[tensor] != start[tensor]
        if tried[tensor] != start[tensor]:
            time, key = exchanged(tried, tensor, start[tensor], first, key, took, tables, np.inf)
            tried[tensor] = start[tensor]
            first, _, _, took, _ = laid_out(tried, tables)
    rough[0] = time
    for place in range(group.size):
        tensor = group[place]
        rough[place + 1], key = exchanged(tried, tensor, moved[tensor], first, key, took, tables, np.inf)
        tried[tensor] = moved[tensor]
        first, _, _, took, _ = laid_out(tried, tables)
    times[:] = np.inf
    times[present], rough[present] = now, np.inf
    best, schedule = choice[:0], (np.inf, key, took)
    for _ in range(min(NUMBERS, group.size)):
        number = np.argmin(rough)
        if rough[number] > now * (1 + NEAR_OFFLOAD):
            break
        rough[number] = np.inf
        for place in range(group.size):
            tried[group[place]] = moved[group[place]] if place < number else start[group[place]]
        found = scheduled(tried, tables, ROUNDS)
        times[number] = found[0]
        if found[0] < schedule[0]:
            best, schedule = tried.copy(), found
    return best, schedule


@compiled
def _read(choice, first, owner, where, took, count, start, networks, total):  # type: ignore[no-untyped-def]
    """Which tensors have operations on a longest path, one of them, and which are before a bubble on all networks."""
    size, tensors = took.size, choice.size
    stop, before, last = start + took, np.full(size, -1, np.int64), np.full(total, -1, np.int64)
    begun = np.zeros(total, np.bool_)  # whether a tensor has been served
    free, gap = np.zeros(total), np.full(total, -np.inf)
    left = np.full((tensors, total), -np.inf)
    for place in np.argsort(start, kind="mergesort"):
        on, tensor = where[place], owner[place]
        before[place], last[on] = last[on], place
        if place == first[tensor]:
            continue
        if begun[on] and start[place] > free[on]:
            gap[on] = free[on]
        begun[on], free[on] = True, max(free[on], stop[place])
        left[tensor, on] = max(left[tensor, on], stop[place])
    critical, bubble = np.zeros(tensors, np.bool_), np.zeros(tensors, np.bool_)
    place = np.argmax(stop) if size else -1
    while place >= 0:
        tensor, part, then = owner[place], first[owner[place]], place - 1
        if place == part:
            then = first[tensor - 1] if tensor else -1
        else:
            critical[tensor] = True
            if (place - part - 1) % count[choice[tensor]] == 0:
                then = part
        if before[place] >= 0 and (then < 0 or stop[then] < start[place]):
            then = before[place]
        place = then
    for tensor in range(tensors):
        uses, over = False, True
        for on in networks:
            if left[tensor, on] > -np.inf:
                uses = True
                over &= left[tensor, on] <= gap[on]
        bubble[tensor] = uses and over
    return critical, bubble
