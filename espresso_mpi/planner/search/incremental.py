"""F of steps of which one tensor after the other is changed: what Algorithms 1 and 2 ask of a timeline.

In the order ``backprop`` a step is a max-plus system. What is before a tensor counts by when the lanes are free. What
comes after counts by how long the step goes on after each lane is free (``behind``). A candidate thus costs the
tensor's own operations, not those of the whole step. In the other orders every candidate is a timeline of its own;
``confirmed`` has what the order ``schedule`` does about that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from espresso_mpi.files.compiled import compiled

from ..model.timeline import Interval, Lanes, Timeline, follow


class IncrementalTimeline(Protocol):
    """F of a step of which one tensor after the other is changed."""

    choice: np.ndarray

    def seconds(self) -> float:
        """F of the choice."""

    def candidates(self, tensor: int, options: np.ndarray) -> np.ndarray:
        """F with each of the options for one tensor, float64 (options,)."""

    def take(self, tensor: int, option: int) -> None:
        """Change the choice for good."""

    def by_number(self, group: Sequence[int], start: np.ndarray, moved: np.ndarray) -> np.ndarray:
        """F with the first 0, 1, ... tensors of a group on ``moved``, its others on ``start``: (tensors + 1,).

        Args:
            group: rising; start, moved: int64 (all tensors,), options.
        """

    def give(self, group: Sequence[int], options: np.ndarray) -> None:
        """Change the choice of several tensors, rising, for good."""

    def before_bubble(self) -> np.ndarray:
        """The tensors whose communication comes before a bubble, on each network that they use; bool (tensors,)."""


def networks(lanes: Lanes) -> np.ndarray:
    """The lanes of collectives."""
    return np.unique([lanes.intra, lanes.inter])


class Events:
    """The orders ``fifo`` and ``priority``: every candidate is a timeline of its own."""

    def __init__(self, timeline: Timeline, choice: np.ndarray) -> None:
        self.timeline, self.choice = timeline, choice.copy()

    def seconds(self) -> float:
        return self.timeline.seconds(self.choice)

    def candidates(self, tensor: int, options: np.ndarray) -> np.ndarray:
        tried, times = self.choice.copy(), np.empty(options.size)
        for place, option in enumerate(options):
            tried[tensor] = option
            times[place] = self.timeline.seconds(tried)
        return times

    def take(self, tensor: int, option: int) -> None:
        self.choice[tensor] = option

    def by_number(self, group: Sequence[int], start: np.ndarray, moved: np.ndarray) -> np.ndarray:
        tried, times = self.choice.copy(), np.empty(len(group) + 1)
        tried[group] = start[group]
        times[0] = self.timeline.seconds(tried)
        for place, tensor in enumerate(group):
            tried[tensor] = moved[tensor]
            times[place + 1] = self.timeline.seconds(tried)
        return times

    def give(self, group: Sequence[int], options: np.ndarray) -> None:
        self.choice[group] = options

    def before_bubble(self) -> np.ndarray:
        found = np.full((self.choice.size, 0), True)
        everything = [one for one in self.timeline.intervals(self.choice) if one.tensor >= 0]
        for lane in networks(self.timeline.lanes):
            here = sorted((one for one in everything if one.lane == lane), key=lambda one: one.start)
            found = np.column_stack([found, _over_by(here, _last_gap(here), self.choice.size)])
        used = {one.tensor for one in everything if one.lane in networks(self.timeline.lanes)}
        return found.all(axis=1) & np.isin(np.arange(self.choice.size), list(used))


def _last_gap(lane: Sequence[Interval]) -> float:
    """When the last gap between intervals of a lane, in order, begins; -inf if there is none."""
    last, free = -np.inf, np.inf
    for one in lane:
        if one.start > free:
            last = free
        free = one.stop if free == np.inf else max(free, one.stop)
    return last


def _over_by(lane: Sequence[Interval], when: float, tensors: int) -> np.ndarray:
    """Which tensors have nothing in a lane that ends after a time."""
    stops = np.full(tensors, -np.inf)
    for one in lane:
        stops[one.tensor] = max(stops[one.tensor], one.stop)
    return (stops == -np.inf) | (stops <= when)


class Backprop:
    """The order ``backprop``: what is before and behind every tensor is kept, so a candidate costs its own operations.

    Attributes:
        free: float64 (tensors + 1, 2 · lanes), when the lanes are free before each tensor; there: float64
            (tensors + 1,), when all tensors before it have arrived.
        behind: float64 (tensors + 1, 2 · lanes), how long the step goes on at least after a lane is free.
        used, waited: bool (tensors, lanes), whether a tensor's first visit is to this lane, and whether the lane was
            free before it came.
    """

    def __init__(self, timeline: Timeline, choice: np.ndarray) -> None:
        self.timeline, self.choice = timeline, choice.copy()
        tensors, home, total = choice.size, timeline.tables.home, timeline.tables.total
        self.free, self.there = np.full((tensors + 1, 2 * total), np.nan), np.full(tensors + 1, np.nan)
        self.behind = np.full((tensors + 1, 2 * total), np.nan)
        self.free[0], self.there[0] = 0.0, 0.0
        self.behind[tensors] = -np.inf
        self.behind[tensors, home] = 0.0
        self.used, self.waited = np.zeros((tensors, total), bool), np.zeros((tensors, total), bool)
        self.networks = networks(timeline.lanes)
        self.options = (timeline.backward, home, *timeline.tables[3:])
        _refresh(choice, 0, tensors - 1, *self._kept, *self.options)

    @property
    def _kept(self) -> tuple[np.ndarray, ...]:
        return self.free, self.there, self.behind, self.used, self.waited

    def seconds(self) -> float:
        return self.timeline.seconds(self.choice)

    def candidates(self, tensor: int, options: np.ndarray) -> np.ndarray:
        times = np.empty(options.size)
        _candidates(tensor, options, times, self.free, self.there, self.behind, *self.options)
        return times

    def take(self, tensor: int, option: int) -> None:
        self.choice[tensor] = option
        _refresh(self.choice, tensor, tensor, *self._kept, *self.options)

    def by_number(self, group: Sequence[int], start: np.ndarray, moved: np.ndarray) -> np.ndarray:
        times, ours = np.empty(len(group) + 1), self.choice.copy()
        ours[group] = start[group]
        _by_number(np.array(group, np.int64), ours, moved, times, self.free, self.there, self.behind, *self.options)
        return times

    def give(self, group: Sequence[int], options: np.ndarray) -> None:
        self.choice[group] = options
        _refresh(self.choice, group[0], group[-1], *self._kept, *self.options)

    def before_bubble(self) -> np.ndarray:
        return _before_bubble(self.used, self.waited, self.networks)


@compiled
def follow_back(behind, home, backward, lane, seconds, count, repeats):  # type: ignore[no-untyped-def]
    """Lead one tensor back through the lanes: ``follow``, and the part of the backward pass before it, read backwards.

    Args:
        behind: float64 (2 · lanes,), how long the step goes on at least after a lane is free behind the tensor;
            afterwards the same before it. F is the largest sum with when the lanes are free, at either place.
    """
    total = behind.size // 2
    for position in range(count):
        where = lane[position]
        if where >= total:
            behind[where - total] += repeats * seconds[position]
    ready = 0.0
    for _ in range(repeats):
        now = 0.0  # the tensor has to be there
        for back in range(count):
            position = count - 1 - back
            now = max(now, behind[lane[position]]) + seconds[position]
            behind[lane[position]] = now
        ready = max(ready, now)
    behind[home] = max(behind[home], ready) + backward


@compiled
def _refresh(choice, first, last, free, there, behind, used, waited, backward, home, lane, seconds, count, repeats):  # type: ignore[no-untyped-def]
    """Work out what is before the tensors after ``first`` and behind those up to ``last``, as far as it changes.

    The choice may have changed for tensors from ``first`` to ``last``.
    """
    total, longest = free.shape[1] // 2, 1
    for option in choice:
        longest = max(longest, repeats[option])
    starts = np.empty((longest, lane.shape[1]))
    state, at_ready = np.empty(2 * total), np.empty(2 * total)
    for tensor in range(first, choice.size):
        option = choice[tensor]
        replaced(state, free[tensor])
        state[home] += backward[tensor]
        replaced(at_ready, state)
        end = follow(state, state[home], lane[option], seconds[option], count[option], repeats[option], starts)
        end = max(end, there[tensor])
        for where in range(total):
            used[tensor, where] = waited[tensor, where] = False
        for position in range(count[option]):
            where = lane[option, position]
            if where < total and not used[tensor, where]:
                used[tensor, where] = True
                waited[tensor, where] = starts[0, position] > at_ready[where]
        same = end == there[tensor + 1]
        there[tensor + 1] = end
        if not replaced(free[tensor + 1], state) and same and tensor >= last:
            break
    for back in range(last + 1):
        tensor = last - back
        option = choice[tensor]
        replaced(state, behind[tensor + 1])
        follow_back(state, home, backward[tensor], lane[option], seconds[option], count[option], repeats[option])
        if not replaced(behind[tensor], state) and tensor <= first:
            break


@compiled
def replaced(target, source):  # type: ignore[no-untyped-def]
    """Copy an array over another, and say whether that changed it. (Quicker to compile than expressions of arrays.)"""
    changed = False
    for place in range(target.size):
        changed |= target[place] != source[place]
        target[place] = source[place]
    return changed


@compiled
def _candidates(tensor, options, times, free, there, behind, backward, home, lane, seconds, count, repeats):  # type: ignore[no-untyped-def]
    """F with each option for one tensor: what is before it, its own operations, what is behind it."""
    nothing, after = np.empty((0, 0)), behind[tensor + 1]
    state = np.empty(free.shape[1])
    for place in range(options.size):
        option = options[place]
        replaced(state, free[tensor])
        state[home] += backward[tensor]
        end = follow(state, state[home], lane[option], seconds[option], count[option], repeats[option], nothing)
        end = max(end, there[tensor])
        for which in range(state.size):
            end = max(end, state[which] + after[which])
        times[place] = end


@compiled
def _by_number(group, choice, moved, times, free, there, behind, backward, home, lane, seconds, count, repeats):  # type: ignore[no-untyped-def]
    """See ``Step.by_number``; ``choice``: with the whole group as it is at the start.

    What is behind each tensor of the group is led back from the last one to the first, with none of them moved; then
    what is before is led forward, with all of them moved.
    """
    first, last, nothing = group[0], group[-1], np.empty((0, 0))
    after = np.empty((group.size + 1, free.shape[1]))  # behind the tensors that are moved, of none, one, ...
    vector, place = behind[last + 1].copy(), group.size
    for back in range(last - first + 1):
        tensor = last - back
        if tensor == group[place - 1]:
            replaced(after[place], vector)
            place -= 1
        option = choice[tensor]
        follow_back(vector, home, backward[tensor], lane[option], seconds[option], count[option], repeats[option])
    replaced(after[0], vector)
    state, end = free[first].copy(), there[first]
    times[0] = _at_end(end, state, after[0])
    for tensor in range(first, last + 1):
        ours = tensor == group[place]
        option = moved[tensor] if ours else choice[tensor]
        state[home] += backward[tensor]
        end = max(
            end, follow(state, state[home], lane[option], seconds[option], count[option], repeats[option], nothing)
        )
        if ours:
            place += 1
            times[place] = _at_end(end, state, after[place])


@compiled
def _at_end(end, state, behind):  # type: ignore[no-untyped-def]
    """F from when the tensors so far are there, when the lanes are free, and how long the step goes on after that."""
    for place in range(state.size):
        end = max(end, state[place] + behind[place])
    return end


@compiled
def _before_bubble(used, waited, networks):  # type: ignore[no-untyped-def]
    """The tensors that use a network, and whose visits to networks all are before a bubble there."""
    tensors = used.shape[0]
    found, uses = np.ones(tensors, np.bool_), np.zeros(tensors, np.bool_)
    for lane in networks:
        begun, last = False, -1
        for tensor in range(tensors):
            if used[tensor, lane]:
                if begun and waited[tensor, lane]:
                    last = tensor
                begun = True
        for tensor in range(tensors):
            if used[tensor, lane]:
                uses[tensor] = True
                found[tensor] &= tensor < last
    return found & uses
