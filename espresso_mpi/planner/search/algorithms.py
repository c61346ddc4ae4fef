"""The two decision algorithms of Espresso as published (EuroSys'23, arXiv 2205.14465).

Algorithm 1 decides tensor by tensor, the largest first, how each travels with GPU compression; it leaves out tensors
whose communication comes before a bubble, a gap in which the network waits for the next tensor, because shortening
those only widens the bubble. Algorithm 2 moves compression to the CPU: of compressed tensors that are alike the
earliest ones; how many of each kind is tried in all combinations. What that may miss is measured by ``offload_gap``.

The figures F(S) are those of the timeline, in its order; ``steps`` tells how a candidate is priced without going
through the whole step. In the order ``schedule`` most candidates are ruled out by rougher figures (``confirmed``).
Greedy passes end elsewhere when figures change a little, so both algorithms then also decide by the figures of the
order ``backprop`` alone; what has the shorter F is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle, product
from math import prod

import numpy as np

from espresso_mpi.errors import ConfigError
from espresso_mpi.files.compiled import compiled
from espresso_mpi.types import Decode, DeviceKind, Encode, Route, Strategy

from ..model.compiled_routes import Same
from ..model.dispatch import laid_out
from ..model.problem import Problem
from ..model.profile import Profile
from ..model.timeline import TIE, Lanes, Order, Timeline, follow
from ..model.tree import routes as all_routes
from ..model.workload import Workload
from .confirmed import Confirmed
from .incremental import Backprop, Events, IncrementalTimeline, follow_back, replaced

LIMIT = 300_000
"""Steps of the search through the combinations of Algorithm 2, a tensor placed each: a few hundredths of a second."""

FEW = 1000
"""Operations of all combinations together up to which each gets a schedule: less than a millisecond."""


@dataclass(frozen=True)
class Chosen:
    """What an algorithm chose.

    Attributes:
        choice: int64 (tensors,), an option of the problem for each.
        seconds: of the step, ``Problem.seconds(choice)``.
        evaluations: how many choices were priced.
        complete: Algorithm 2 went through all combinations, or has shown the others to be no better.
        rough: in the order ``schedule``, what Algorithm 1 chooses by the figures of the order ``backprop`` alone;
            Algorithm 2 begins there as well.
    """

    choice: np.ndarray
    seconds: float
    evaluations: int
    complete: bool = True
    rough: np.ndarray | None = None


def published(
    workload: Workload, profile: Profile, compressor: str, *, lanes: Lanes | str = "one-network",
    order: Order = "schedule",
) -> tuple[Problem, Chosen]:  # fmt: skip
    """What both algorithms choose for a step, and the problem that the choice's options are of.

    Tensors in host memory have nothing to offload: Algorithm 1 alone then chooses, with compression on the CPU.

    Raises:
        ConfigError: the profile lacks what is needed.
    """
    routes = reachable(workload.device == "gpu")
    problem = Problem.of(workload, profile, [compressor], routes=routes, lanes=lanes, order=order, prune=False)
    first = algorithm1(problem)
    if workload.device != "gpu":
        return problem, first
    second = algorithm2(problem, first)
    return problem, replace(second, evaluations=first.evaluations + second.evaluations)


@lru_cache(maxsize=2)
def reachable(gpu: bool = True) -> tuple[Route, ...]:
    """The routes that the two algorithms reach: 9 + 165 on the GPU, and those 165 moved to the CPU."""
    home = all_routes(("gpu" if gpu else "cpu",))
    return home + tuple(route.on("cpu") for route in home if route.compressed) if gpu else home


# --- Algorithm 1 ------------------------------------------------------------------------------------------------------


def algorithm1(problem: Problem, order: Sequence[int] | None = None) -> Chosen:
    """GPU compression: beginning with nothing compressed, the best option of one tensor after the other.

    Of equal times the option that the tensor has wins, then the one that takes least by itself. In the order
    ``schedule`` a tensor's options are ruled out by rougher figures until one is left, which gets a schedule
    (``confirmed``); the bubbles are those of the schedule. A second pass decides by the order ``backprop`` alone, and
    the choice with the shorter F of the two is taken.

    Args:
        problem: made with the routes of ``reachable`` and ``prune=False``; of tensors in host memory all that
            compress do it there.
        order: of the tensors, instead of the published one, largest first.
    """
    order = _published_order(problem.workload) if order is None else order
    dense, candidates = problem.dense(), _at_home(problem)
    found = _greedy(problem, _step(problem, problem.timeline, dense), candidates, order)
    if problem.timeline.order != "schedule":
        return found
    rough = _greedy(problem, Backprop(replace(problem.timeline, order="backprop"), dense), candidates, order)
    seconds, evaluations = problem.seconds(rough.choice), found.evaluations + rough.evaluations
    if seconds < found.seconds:
        return replace(rough, seconds=seconds, evaluations=evaluations, rough=rough.choice)
    return replace(found, evaluations=evaluations, rough=rough.choice)


def _greedy(
    problem: Problem, step: IncrementalTimeline, candidates: Sequence[np.ndarray], order: Iterable[int]
) -> Chosen:
    """One pass of Algorithm 1 by the figures of a step."""
    waiting, evaluations = ~step.before_bubble(), 0
    for tensor in order:
        if not waiting[tensor]:
            continue
        options = candidates[problem.set_of[tensor]]
        times = step.candidates(tensor, options)
        evaluations += options.size
        waiting[tensor] = False
        best = _best(times, options, int(step.choice[tensor]), problem.alone)
        if best != step.choice[tensor]:
            step.take(tensor, best)
            waiting[step.before_bubble()] = False
    return Chosen(step.choice, step.seconds() + problem.around, evaluations)


def _step(problem: Problem, timeline: Timeline, choice: np.ndarray) -> IncrementalTimeline:
    if timeline.order == "schedule":
        return Confirmed(timeline, choice, problem.alone)
    return (Backprop if timeline.order == "backprop" else Events)(timeline, choice)


def _published_order(workload: Workload) -> list[int]:
    """Tensors by size, the largest first; of equal ones the latest of the backward pass first."""
    return sorted(range(len(workload.tensors)), key=lambda i: (-workload.tensors[i].nbytes, -i))


def _at_home(problem: Problem) -> list[np.ndarray]:
    """Of each candidate set the options whose encodes and decodes all run where the tensors are."""
    wanted = _routes_at(Same(problem.routes), problem.workload.device)[problem.route]
    return [a + np.flatnonzero(wanted[a:b]) for a, b in zip(problem.first, problem.first[1:])]


@lru_cache(maxsize=16)
def _routes_at(same: Same, home: DeviceKind) -> np.ndarray:
    """Which routes encode and decode on a device only, bool (routes,)."""
    devices = [{s.device for s in route.steps if isinstance(s, (Encode, Decode))} for route in same.routes]
    return np.array([found <= {home} for found in devices])


def _best(times: np.ndarray, options: np.ndarray, now: int, alone: np.ndarray) -> int:
    """The option with the least time; see ``algorithm1`` for ties."""
    least = options[times <= times.min() * (1 + TIE)]
    return now if now in least else int(least[np.argmin(alone[least])])


# --- Algorithm 2 ------------------------------------------------------------------------------------------------------


def algorithm2(problem: Problem, chosen: Chosen, *, limit: int | None = None) -> Chosen:
    """CPU offload: how many of each group of compressed tensors of one size and option, the earliest, go to the CPU.

    All combinations are covered. First the groups' numbers are improved in turn, then the combinations are gone
    through tensor by tensor, leaving out those that can be no better than what is known; of equal times the first
    wins. After ``limit`` steps of that search the best so far is taken, and ``complete`` is False; so it is in the
    orders ``fifo`` and ``priority``, where no bound is known, if all combinations have more tensors to place than that.

    In the order ``schedule`` all combinations get schedules where they have at most ``FEW`` operations together, or as
    many tensors to place as a given ``limit``. Else the numbers are improved in turn, with schedules for the best two
    of a group; the combination that is best in the order ``backprop``, among all, gets one as well; and ``complete``
    is False.

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
    for tensor, option in enumerate(choice):
        if problem.method[option] >= 0:
            groups.setdefault((problem.workload.tensors[tensor].nbytes, int(option)), []).append(tensor)
    return list(groups.values())


def on_cpu(problem: Problem, choice: np.ndarray) -> np.ndarray:
    """Of each compressed tensor its strategy's option with all encodes and decodes on the CPU, else the option it has.

    Raises:
        PlanError: the problem lacks it.
    """
    found, there = choice.copy(), _there(Same(problem.routes))
    for option in np.unique(choice[problem.method[choice] >= 0]):
        having = choice == option
        tensor = int(np.argmax(having))
        options = np.arange(problem.options(tensor).start, problem.options(tensor).stop)
        same = options[
            (problem.method[options] == problem.method[option])
            & (problem.route[options] == there[problem.route[option]])
        ]
        if not same.size:
            strategy = problem.strategy(option)
            problem.option(tensor, Strategy(strategy.compressor, strategy.route.on("cpu")))  # says what is missing
        found[having] = same[0]
    return found


@lru_cache(maxsize=16)
def _there(same: Same) -> np.ndarray:
    """The place of every compressing route with its encodes and decodes on the CPU, int64 (routes,); else -1."""
    places = {route: place for place, route in enumerate(same.routes)}
    return np.array([places.get(route.on("cpu"), -1) if route.compressed else -1 for route in same.routes])


def _offloaded(problem: Problem, chosen: Chosen, groups: Sequence[Sequence[int]], limit: int | None) -> Chosen:
    """The best number of offloads in every group; see ``algorithm2``."""
    timeline, start = problem.timeline, chosen.choice
    if timeline.order == "schedule":
        return _offloaded_by_schedule(problem, chosen, groups, limit)
    moved = on_cpu(problem, start)
    choice, _, evaluations = _in_turn(_step(problem, timeline, start), start, moved, groups)
    every = _all if timeline.order == "backprop" else _each
    tried, complete = every(timeline, start, moved, groups, choice, LIMIT if limit is None else limit)
    return Chosen(choice, problem.seconds(choice), evaluations + tried, complete)


def _offloaded_by_schedule(
    problem: Problem, chosen: Chosen, groups: Sequence[Sequence[int]], limit: int | None
) -> Chosen:
    """The same in the order ``schedule``, where all combinations are priced only if a limit allows them."""
    timeline, start = problem.timeline, chosen.choice
    moved = on_cpu(problem, start)
    few = FEW * start.size // max(1, laid_out(start, timeline.tables)[1].size)
    choice = start.copy()
    tried, complete = _each(timeline, start, moved, groups, choice, few if limit is None else limit)
    if complete:
        return Chosen(choice, problem.seconds(choice), tried)
    choice, seconds, evaluations = _in_turn(_step(problem, timeline, start), start, moved, groups)
    if chosen.rough is not None and not np.array_equal(chosen.rough, start):
        start = chosen.rough
        moved, groups = on_cpu(problem, start), groups_of(problem, start)
    rough = replace(timeline, order="backprop")
    other, _, tried = _in_turn(Backprop(rough, start), start, moved, groups)
    tried += _all(rough, start, moved, groups, other, LIMIT)[0]
    if not np.array_equal(other, choice) and (time := timeline.seconds(other)) < seconds:
        choice, seconds = other, time
    return Chosen(choice, seconds + problem.around, evaluations + tried, False)


def _in_turn(
    step: IncrementalTimeline, start: np.ndarray, moved: np.ndarray, groups: Sequence[Sequence[int]]
) -> tuple[np.ndarray, float, int]:
    """Coordinate descent: the best number of one group after the other, until none gets better.

    Returns:
        the choice, its F by the step's figures, and how many were priced.
    """
    best, evaluations, stale = step.seconds(), 1, 0
    for group in cycle(groups):
        times, count = step.by_number(group, start, moved), -1
        evaluations += times.size
        for number, seconds in enumerate(times.tolist()):
            if seconds < best * (1 - TIE):
                best, count = seconds, number
        stale += 1
        if count >= 0:
            step.give(group, np.concatenate([moved[group[:count]], start[group[count:]]]))
            stale = 1
        if stale == len(groups):
            break
    return step.choice, best, evaluations


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
    priced, complete = _branch(
        start, moved, group_of, len(groups), choice, limit, timeline.seconds(choice) * (1 - TIE), timeline.tables,
    )  # fmt: skip
    return int(priced), bool(complete)


@compiled
def _least_behind(start, moved, tables):  # type: ignore[no-untyped-def]
    """Of every tensor how long the step goes on at least, whichever options it and those behind it have."""
    backward, home, total, lane, seconds, count, repeats = tables
    tensors = start.size
    behind = np.full((tensors + 1, 2 * total), -np.inf)
    behind[tensors, home] = 0.0
    for back in range(tensors):
        tensor = tensors - 1 - back
        before, other = behind[tensor], behind[tensor + 1].copy()
        replaced(before, other)
        a, b = start[tensor], moved[tensor]
        follow_back(before, home, backward[tensor], lane[a], seconds[a], count[a], repeats[a])
        if b != a:
            follow_back(other, home, backward[tensor], lane[b], seconds[b], count[b], repeats[b])
            for which in range(before.size):
                before[which] = min(before[which], other[which])
    return behind


@compiled
def _branch(start, moved, group_of, groups, choice, limit, best, tables):  # type: ignore[no-untyped-def]
    """Go through the combinations depth first, in the order of the tensors; the best one into ``choice``.

    A tensor of a group that has not ended yet goes to the CPU, or ends it.

    Returns:
        how many whole choices were priced, and whether all were gone through or ruled out.
    """
    backward, home, total, lane, seconds, count, repeats = tables
    tensors = start.size
    behind = _least_behind(start, moved, tables)
    free, there = np.zeros((tensors + 1, 2 * total)), np.zeros(tensors + 1)
    state_of = np.zeros(tensors, np.int64)  # 0: not tried, 1: as it was, 2: on the CPU
    ended = np.full(groups, tensors)  # the tensor that ended the group
    nothing, tried = np.empty((0, 0)), start.copy()
    priced, steps, tensor = 0, 0, 0
    while tensor >= 0:
        if tensor == tensors:
            priced += 1
            end = max(there[tensors], free[tensors, home])
            if end < best:
                best = end * (1 - TIE)
                replaced(choice, tried)
            tensor -= 1
            continue
        group = group_of[tensor]
        if state_of[tensor] == 1 and group >= 0 and ended[group] == tensor:
            ended[group] = tensors
        open_ = group >= 0 and ended[group] > tensor
        state_of[tensor] += 1
        if state_of[tensor] == 3 or (state_of[tensor] == 2 and not open_):
            state_of[tensor] = 0
            tensor -= 1
            continue
        steps += 1
        if steps > limit:
            return priced, False
        if state_of[tensor] == 1 and open_:
            ended[group] = tensor
        option = start[tensor] if state_of[tensor] == 1 else moved[tensor]
        tried[tensor] = option
        state = free[tensor + 1]
        replaced(state, free[tensor])
        state[home] += backward[tensor]
        end = follow(state, state[home], lane[option], seconds[option], count[option], repeats[option], nothing)
        there[tensor + 1] = max(there[tensor], end)
        if _at_least(there[tensor + 1], state, behind[tensor + 1]) < best:
            tensor += 1
    return priced, True


@compiled
def _at_least(there, state, behind):  # type: ignore[no-untyped-def]
    """How long a step takes at least whose lanes are in a state."""
    least = there
    for which in range(state.size):
        least = max(least, state[which] + behind[which])
    return least


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
