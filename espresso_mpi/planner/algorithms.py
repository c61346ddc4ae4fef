"""The two decision algorithms of Espresso as published (EuroSys'23, arXiv 2205.14465).

Algorithm 1 decides tensor by tensor, the largest first, how each travels with GPU compression; it leaves out tensors
whose communication comes before a bubble, a gap in which the network waits for the next tensor, because shortening
those only widens the bubble. Algorithm 2 moves compression to the CPU: of compressed tensors that are alike the
earliest ones; how many of each kind is tried in all combinations. What that may miss is measured by ``offload_gap``.

The figures F(S) are those of the timeline, but most of each is reused. In the order ``backprop`` a step is a max-plus
system: what is before a tensor counts by when the lanes are free, and what comes after by how long the step goes on
after each lane is free (``behind``). So a candidate costs the tensor's own operations, not those of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Protocol

import numpy as np
from numba import njit

from ..errors import ConfigError
from ..types import Decode, DeviceKind, Encode, Route, Strategy
from .problem import Problem, Same
from .profile import Profile
from .timeline import Interval, Lanes, Order, Timeline, follow
from .trace import Trace
from .tree import routes as all_routes

TIE = 1e-12
"""Times that differ by less of themselves count as equal: sums of the same numbers in another order differ by that."""

LIMIT = 300_000
"""Steps of the search through the combinations of Algorithm 2, a tensor placed each: a few hundredths of a second."""


@dataclass(frozen=True)
class Chosen:
    """What an algorithm chose.

    Attributes:
        choice: int64 (tensors,), a row of the problem for each.
        seconds: of the step, ``Problem.seconds(choice)``.
        evaluations: how many choices were priced.
        complete: Algorithm 2 went through all combinations, or has shown the others to be no better.
    """

    choice: np.ndarray
    seconds: float
    evaluations: int
    complete: bool = True


def published(
    trace: Trace, profile: Profile, compressor: str, *, lanes: Lanes | str = "one-network", order: Order = "backprop"
) -> tuple[Problem, Chosen]:
    """What both algorithms choose for a step, and the problem that the choice's rows are of.

    Tensors in host memory have nothing to offload: Algorithm 1 alone then chooses, with compression on the CPU.

    Raises:
        ConfigError: the profile lacks what is needed.
    """
    problem = Problem.of(
        trace, profile, [compressor], routes=reachable(trace.device == "gpu"), lanes=lanes, order=order, prune=False
    )
    first = algorithm1(problem)
    if trace.device != "gpu":
        return problem, first
    second = algorithm2(problem, first)
    return problem, replace(second, evaluations=first.evaluations + second.evaluations)


@lru_cache(maxsize=2)
def reachable(gpu: bool = True) -> tuple[Route, ...]:
    """The routes that the two algorithms reach: 9 + 165 on the GPU, and those 165 moved to the CPU."""
    home = all_routes(("gpu" if gpu else "cpu",))
    return home + tuple(route.on("cpu") for route in home if route.compressed) if gpu else home


# --- Algorithm 1 ------------------------------------------------------------------------------------------------------


def algorithm1(problem: Problem, turns: Sequence[int] | None = None) -> Chosen:
    """GPU compression: beginning with nothing compressed, the best option of one tensor after the other.

    Of equal times the option that the tensor has wins, then the one that takes least by itself.

    Args:
        problem: made with the routes of ``reachable`` and ``prune=False``; of tensors in host memory all that
            compress do it there.
        turns: the tensors in another order than the published one, largest first.
    """
    candidates = _at_home(problem)
    step = _step(problem.timeline, problem.dense())
    waiting, evaluations = np.ones(problem.tensors, bool), 0
    waiting[step.before_bubble()] = False
    for tensor in _turns(problem.trace) if turns is None else turns:
        if not waiting[tensor]:
            continue
        rows = candidates[problem.menu[tensor]]
        times = step.candidates(tensor, rows)
        evaluations += rows.size
        waiting[tensor] = False
        best = _best(times, rows, int(step.choice[tensor]), problem.alone)
        if best != step.choice[tensor]:
            step.take(tensor, best)
            waiting[step.before_bubble()] = False
    return Chosen(step.choice, problem.seconds(step.choice), evaluations)


def _turns(trace: Trace) -> list[int]:
    """Tensors by size, the largest first; of equal ones the latest of the backward pass first."""
    return sorted(range(len(trace.tensors)), key=lambda i: (-trace.tensors[i].nbytes, -i))


def _at_home(problem: Problem) -> list[np.ndarray]:
    """Of each menu the rows whose encodes and decodes all run where the tensors are."""
    wanted = _routes_at(Same(problem.routes), problem.trace.device)[problem.route]
    return [a + np.flatnonzero(wanted[a:b]) for a, b in zip(problem.first, problem.first[1:])]


@lru_cache(maxsize=16)
def _routes_at(same: Same, home: DeviceKind) -> np.ndarray:
    """Which routes encode and decode on a device only, bool (routes,)."""
    devices = [{s.device for s in route.steps if isinstance(s, (Encode, Decode))} for route in same.routes]
    return np.array([found <= {home} for found in devices])


def _best(times: np.ndarray, rows: np.ndarray, now: int, alone: np.ndarray) -> int:
    """The row with the least time; see ``algorithm1`` for ties."""
    least = rows[times <= times.min() * (1 + TIE)]
    return now if now in least else int(least[np.argmin(alone[least])])


# --- what both orders of a timeline offer to Algorithm 1 --------------------------------------------------------------


class _Step(Protocol):
    """A step of which one tensor after the other is changed."""

    choice: np.ndarray

    def candidates(self, tensor: int, rows: np.ndarray) -> np.ndarray:
        """F with each of the rows for one tensor, float64 (rows,)."""

    def take(self, tensor: int, row: int) -> None:
        """Change the choice for good."""

    def by_number(self, group: Sequence[int], start: np.ndarray, moved: np.ndarray) -> np.ndarray:
        """F with the first 0, 1, ... tensors of a group on ``moved``, its others on ``start``: (tensors + 1,).

        Args:
            group: rising; start, moved: int64 (all tensors,), rows.
        """

    def give(self, group: Sequence[int], rows: np.ndarray) -> None:
        """Change the choice of several tensors, rising, for good."""

    def before_bubble(self) -> np.ndarray:
        """The tensors whose communication comes before a bubble, on each network that they use; bool (tensors,)."""


def _step(timeline: Timeline, choice: np.ndarray) -> _Step:
    known = _Backprop if timeline.order == "backprop" else _Events
    return known(timeline, choice)


def _networks(lanes: Lanes) -> np.ndarray:
    """The lanes of collectives."""
    return np.unique([lanes.intra, lanes.inter])


class _Events:
    """The orders ``fifo`` and ``priority``: every candidate is a timeline of its own."""

    def __init__(self, timeline: Timeline, choice: np.ndarray) -> None:
        self.timeline, self.choice = timeline, choice.copy()

    def candidates(self, tensor: int, rows: np.ndarray) -> np.ndarray:
        tried, times = self.choice.copy(), np.empty(rows.size)
        for place, row in enumerate(rows):
            tried[tensor] = row
            times[place] = self.timeline.seconds(tried)
        return times

    def take(self, tensor: int, row: int) -> None:
        self.choice[tensor] = row

    def by_number(self, group: Sequence[int], start: np.ndarray, moved: np.ndarray) -> np.ndarray:
        tried, times = self.choice.copy(), np.empty(len(group) + 1)
        tried[group] = start[group]
        times[0] = self.timeline.seconds(tried)
        for place, tensor in enumerate(group):
            tried[tensor] = moved[tensor]
            times[place + 1] = self.timeline.seconds(tried)
        return times

    def give(self, group: Sequence[int], rows: np.ndarray) -> None:
        self.choice[group] = rows

    def before_bubble(self) -> np.ndarray:
        found = np.full((self.choice.size, 0), True)
        everything = [one for one in self.timeline.intervals(self.choice) if one.tensor >= 0]
        for lane in _networks(self.timeline.lanes):
            here = sorted((one for one in everything if one.lane == lane), key=lambda one: one.start)
            found = np.column_stack([found, _over_by(here, _last_gap(here), self.choice.size)])
        used = {one.tensor for one in everything if one.lane in _networks(self.timeline.lanes)}
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


class _Backprop:
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
        tensors, total = choice.size, timeline.lanes.count
        self.free, self.there = np.full((tensors + 1, 2 * total), np.nan), np.full(tensors + 1, np.nan)
        self.behind = np.full((tensors + 1, 2 * total), np.nan)
        self.free[0], self.there[0] = 0.0, 0.0
        self.behind[tensors] = -np.inf
        self.behind[tensors, timeline.lanes.backward] = 0.0
        self.used, self.waited = np.zeros((tensors, total), bool), np.zeros((tensors, total), bool)
        self.networks = _networks(timeline.lanes)
        o = timeline.options
        self.options = (timeline.backward, timeline.lanes.backward, o.lane, o.seconds, o.count, o.repeats)
        _refresh(choice, 0, tensors - 1, *self._kept, *self.options)

    @property
    def _kept(self) -> tuple[np.ndarray, ...]:
        return self.free, self.there, self.behind, self.used, self.waited

    def candidates(self, tensor: int, rows: np.ndarray) -> np.ndarray:
        times = np.empty(rows.size)
        _candidates(tensor, rows, times, self.free, self.there, self.behind, *self.options)
        return times

    def take(self, tensor: int, row: int) -> None:
        self.choice[tensor] = row
        _refresh(self.choice, tensor, tensor, *self._kept, *self.options)

    def by_number(self, group: Sequence[int], start: np.ndarray, moved: np.ndarray) -> np.ndarray:
        times, ours = np.empty(len(group) + 1), self.choice.copy()
        ours[group] = start[group]
        _by_number(np.array(group, np.int64), ours, moved, times, self.free, self.there, self.behind, *self.options)
        return times

    def give(self, group: Sequence[int], rows: np.ndarray) -> None:
        self.choice[group] = rows
        _refresh(self.choice, group[0], group[-1], *self._kept, *self.options)

    def before_bubble(self) -> np.ndarray:
        return _before_bubble(self.used, self.waited, self.networks)


@njit(cache=True)
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


@njit(cache=True)
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
        _replaced(state, free[tensor])
        state[home] += backward[tensor]
        _replaced(at_ready, state)
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
        if not _replaced(free[tensor + 1], state) and same and tensor >= last:
            break
    for back in range(last + 1):
        tensor = last - back
        option = choice[tensor]
        _replaced(state, behind[tensor + 1])
        follow_back(state, home, backward[tensor], lane[option], seconds[option], count[option], repeats[option])
        if not _replaced(behind[tensor], state) and tensor <= first:
            break


@njit(cache=True)
def _replaced(target, source):  # type: ignore[no-untyped-def]
    """Copy an array over another, and say whether that changed it. (Quicker to compile than expressions of arrays.)"""
    changed = False
    for place in range(target.size):
        changed |= target[place] != source[place]
        target[place] = source[place]
    return changed


@njit(cache=True)
def _candidates(tensor, rows, times, free, there, behind, backward, home, lane, seconds, count, repeats):  # type: ignore[no-untyped-def]
    """F with each row for one tensor: what is before it, its own operations, what is behind it."""
    nothing, after = np.empty((0, 0)), behind[tensor + 1]
    state = np.empty(free.shape[1])
    for place in range(rows.size):
        row = rows[place]
        _replaced(state, free[tensor])
        state[home] += backward[tensor]
        end = follow(state, state[home], lane[row], seconds[row], count[row], repeats[row], nothing)
        end = max(end, there[tensor])
        for which in range(state.size):
            end = max(end, state[which] + after[which])
        times[place] = end


@njit(cache=True)
def _by_number(group, choice, moved, times, free, there, behind, backward, home, lane, seconds, count, repeats):  # type: ignore[no-untyped-def]
    """See ``_Step.by_number``; ``choice``: with the whole group as it is at the start.

    What is behind each tensor of the group is led back from the last one to the first, with none of them moved; then
    what is before is led forward, with all of them moved.
    """
    first, last, nothing = group[0], group[-1], np.empty((0, 0))
    after = np.empty((group.size + 1, free.shape[1]))  # behind the tensors that are moved, of none, one, ...
    vector, place = behind[last + 1].copy(), group.size
    for back in range(last - first + 1):
        tensor = last - back
        if tensor == group[place - 1]:
            _replaced(after[place], vector)
            place -= 1
        option = choice[tensor]
        follow_back(vector, home, backward[tensor], lane[option], seconds[option], count[option], repeats[option])
    _replaced(after[0], vector)
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


@njit(cache=True)
def _at_end(end, state, behind):  # type: ignore[no-untyped-def]
    """F from when the tensors so far are there, when the lanes are free, and how long the step goes on after that."""
    for place in range(state.size):
        end = max(end, state[place] + behind[place])
    return end


@njit(cache=True)
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


# --- Algorithm 2 ------------------------------------------------------------------------------------------------------


def algorithm2(problem: Problem, chosen: Chosen, *, limit: int = LIMIT) -> Chosen:
    """CPU offload: how many of each group of compressed tensors of one size and option, the earliest, go to the CPU.

    All combinations are covered. First the groups' numbers are improved in turn, then the combinations are gone
    through tensor by tensor, leaving out those that can be no better than what is known; of equal times the first
    wins. After ``limit`` steps of that search the best so far is taken, and ``complete`` is False; so it is in the
    orders ``fifo`` and ``priority``, where no bound is known, if all combinations have more tensors to place than that.

    Args:
        problem: with all compressing routes of ``chosen`` on the CPU as well, as in ``reachable``.
        chosen: by Algorithm 1.

    Raises:
        PlanError: the problem lacks a route on the CPU that ``chosen`` compresses along.
    """
    return _offloaded(problem, chosen, groups_of(problem, chosen.choice), limit)


def groups_of(problem: Problem, choice: np.ndarray) -> list[list[int]]:
    """The compressed tensors by size and option, earliest first."""
    groups: dict[tuple[int, int], list[int]] = {}
    for tensor, row in enumerate(choice):
        if problem.method[row] >= 0:
            groups.setdefault((problem.trace.tensors[tensor].nbytes, int(row)), []).append(tensor)
    return list(groups.values())


def on_cpu(problem: Problem, choice: np.ndarray) -> np.ndarray:
    """Of each compressed tensor the row of the same way with all encodes and decodes on the CPU, else the row it has.

    Raises:
        PlanError: the problem lacks it.
    """
    found = choice.copy()
    for row in np.unique(choice[problem.method[choice] >= 0]):
        way, having = problem.strategy(row), choice == row
        found[having] = problem.row(int(np.argmax(having)), Strategy(way.compressor, way.route.on("cpu")))
    return found


def _offloaded(problem: Problem, chosen: Chosen, groups: Sequence[Sequence[int]], limit: int) -> Chosen:
    """The best number of offloads in every group; see ``algorithm2``."""
    moved = on_cpu(problem, chosen.choice)
    choice, evaluations = _in_turn(problem.timeline, chosen.choice, moved, groups)
    tried, complete = (_all if problem.timeline.order == "backprop" else _each)(
        problem.timeline, chosen.choice, moved, groups, choice, limit
    )
    return Chosen(choice, problem.seconds(choice), evaluations + tried, complete)


def _in_turn(
    timeline: Timeline, start: np.ndarray, moved: np.ndarray, groups: Sequence[Sequence[int]]
) -> tuple[np.ndarray, int]:
    """Coordinate descent: the best number of one group after the other, until none gets better; and what was priced."""
    step = _step(timeline, start)
    best, evaluations, better = timeline.seconds(start), 1, True
    while better:
        better = False
        for group in groups:
            times, count = step.by_number(group, start, moved), -1
            evaluations += times.size
            for number, seconds in enumerate(times.tolist()):
                if seconds < best * (1 - TIE):
                    best, count = seconds, number
            if count >= 0:
                step.give(group, np.concatenate([moved[group[:count]], start[group[count:]]]))
                better = True
    return step.choice, evaluations


def _each(
    timeline: Timeline, start: np.ndarray, moved: np.ndarray, groups: Sequence[Sequence[int]], choice: np.ndarray,
    limit: int,
) -> tuple[int, bool]:  # fmt: skip
    """Price every combination into ``choice``, if they are not too many; how many were, and whether that is all."""
    combinations = prod(len(group) + 1 for group in groups)
    if combinations * start.size > limit:
        return 0, False
    best = timeline.seconds(choice)
    for counts in product(*(range(len(group) + 1) for group in groups)):
        tried = start.copy()
        for group, count in zip(groups, counts):
            tried[group[:count]] = moved[group[:count]]
        seconds = timeline.seconds(tried)
        if seconds < best * (1 - TIE):
            best, choice[:] = seconds, tried
    return combinations, True


def _all(
    timeline: Timeline, start: np.ndarray, moved: np.ndarray, groups: Sequence[Sequence[int]], choice: np.ndarray,
    limit: int,
) -> tuple[int, bool]:  # fmt: skip
    """The same by branch and bound: what cannot be better than the best so far is not gone through."""
    group_of = np.full(start.size, -1, np.int64)
    for number, group in enumerate(groups):
        group_of[list(group)] = number
    o, lanes = timeline.options, timeline.lanes
    priced, complete = _branch(
        start, moved, group_of, len(groups), choice, limit, timeline.seconds(choice) * (1 - TIE), timeline.backward,
        lanes.backward, lanes.count, o.lane, o.seconds, o.count, o.repeats,
    )  # fmt: skip
    return int(priced), bool(complete)


@njit(cache=True)
def _least_behind(start, moved, backward, home, total, lane, seconds, count, repeats):  # type: ignore[no-untyped-def]
    """Of every tensor how long the step goes on at least, whichever way it and those behind it go."""
    tensors = start.size
    behind = np.full((tensors + 1, 2 * total), -np.inf)
    behind[tensors, home] = 0.0
    for back in range(tensors):
        tensor = tensors - 1 - back
        before, other = behind[tensor], behind[tensor + 1].copy()
        _replaced(before, other)
        a, b = start[tensor], moved[tensor]
        follow_back(before, home, backward[tensor], lane[a], seconds[a], count[a], repeats[a])
        if b != a:
            follow_back(other, home, backward[tensor], lane[b], seconds[b], count[b], repeats[b])
            for which in range(before.size):
                before[which] = min(before[which], other[which])
    return behind


@njit(cache=True)
def _branch(start, moved, group_of, groups, choice, limit, best, backward, home, total, lane, seconds, count, repeats):  # type: ignore[no-untyped-def]
    """Go through the combinations depth first, in the order of the tensors; the best one into ``choice``.

    A tensor of a group that has not ended yet goes to the CPU, or ends it.

    Returns:
        how many whole choices were priced, and whether all were gone through or ruled out.
    """
    tensors = start.size
    behind = _least_behind(start, moved, backward, home, total, lane, seconds, count, repeats)
    free, there = np.zeros((tensors + 1, 2 * total)), np.zeros(tensors + 1)
    way = np.zeros(tensors, np.int64)  # 0: not tried, 1: as it was, 2: on the CPU
    ended = np.full(groups, tensors)  # the tensor that ended the group
    nothing, tried = np.empty((0, 0)), start.copy()
    priced, steps, tensor = 0, 0, 0
    while tensor >= 0:
        if tensor == tensors:
            priced += 1
            end = max(there[tensors], free[tensors, home])
            if end < best:
                best = end * (1 - TIE)
                _replaced(choice, tried)
            tensor -= 1
            continue
        group = group_of[tensor]
        if way[tensor] == 1 and group >= 0 and ended[group] == tensor:
            ended[group] = tensors
        open_ = group >= 0 and ended[group] > tensor
        way[tensor] += 1
        if way[tensor] == 3 or (way[tensor] == 2 and not open_):
            way[tensor] = 0
            tensor -= 1
            continue
        steps += 1
        if steps > limit:
            return priced, False
        if way[tensor] == 1 and open_:
            ended[group] = tensor
        option = start[tensor] if way[tensor] == 1 else moved[tensor]
        tried[tensor] = option
        state = free[tensor + 1]
        _replaced(state, free[tensor])
        state[home] += backward[tensor]
        end = follow(state, state[home], lane[option], seconds[option], count[option], repeats[option], nothing)
        there[tensor + 1] = max(there[tensor], end)
        least = there[tensor + 1]
        for which in range(2 * total):
            least = max(least, state[which] + behind[tensor + 1, which])
        if least < best:
            tensor += 1
    return priced, True


# --- what Algorithm 2 leaves on the table -----------------------------------------------------------------------------


@dataclass(frozen=True)
class OffloadGap:
    """How far Algorithm 2 is above the best of all 2ⁿ subsets of the compressed tensors.

    Attributes:
        cases: how many were compared; above: how many of them were above the best.
        mean, worst: relative excess of their step times, the mean over all cases.
    """

    cases: int
    above: int
    mean: float
    worst: float


def offload_gap(problems: Iterable[Problem], limit: int = 100 * LIMIT) -> OffloadGap:
    """Compare Algorithm 2 with all subsets, each after Algorithm 1. For small cases: 2ⁿ is what it says.

    Raises:
        ConfigError: a problem is too large to go through all subsets within ``limit`` steps.
    """
    excess = []
    for problem in problems:
        first = algorithm1(problem)
        second = algorithm2(problem, first, limit=limit)
        single = [[tensor] for group in groups_of(problem, first.choice) for tensor in group]
        best = _offloaded(problem, first, single, limit)
        if not (second.complete and best.complete):
            raise ConfigError(
                f"offload gap: {len(single)} compressed tensors are too many to try all subsets in {limit} steps; take "
                f"fewer tensors or raise the limit"
            )
        excess.append(max(0.0, second.seconds / best.seconds - 1))
    above = sum(one > 10 * TIE for one in excess)
    return OffloadGap(len(excess), above, float(np.mean(excess or [0.0])), max(excess, default=0.0))
