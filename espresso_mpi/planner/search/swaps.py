"""What a step would take if one tensor travelled otherwise: all such questions about a choice at once.

In the order ``backprop`` the lanes are a max-plus system. What comes before a tensor is kept as the state in which it
finds the lanes, what comes after it as a vector: how long the step still takes when a lane is free at 0. One swap then
costs one tensor's operations, however many tensors there are. In the other orders every swap is a timeline of its own;
in the order ``schedule`` one in which all operations keep the keys that they have in the choice's schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from espresso_mpi.files.compiled import compiled
from espresso_mpi.types import Route

from ..model.candidates import CandidateSet
from ..model.dispatch import exchanged, laid_out, scheduled, served
from ..model.problem import Problem
from ..model.timeline import ROUNDS, TIE, OptionTable, Timeline, follow
from .confirmed import Confirmed


def swapped(timeline: Timeline, choice: np.ndarray, tensors: np.ndarray, options: np.ndarray) -> np.ndarray:
    """F of a choice with one tensor on another option: float64 (swaps,).

    Args:
        choice: int64 (tensors,), an option of each; tensors, options: int64 (swaps,), which tensor takes which option.
    """
    tables = timeline.tables
    choice, tensors, options = (np.ascontiguousarray(values, np.int64) for values in (choice, tensors, options))
    if timeline.order == "backprop":
        return np.asarray(_backprop_swaps(choice, tensors, options, tables))
    found = np.full(tensors.size, timeline.seconds(choice))
    real = options != choice[tensors]
    if timeline.order == "schedule":
        found[real] = _scheduled_swaps(choice, tensors[real], options[real], ROUNDS, tables)
    else:
        found[real] = _event_swaps(choice, tensors[real], options[real], timeline.order == "priority", tables)
    return found


@compiled
def _backprop_swaps(choice, tensors, options, tables):  # type: ignore[no-untyped-def]
    backward, home, total, lane, seconds, count, repeats = tables
    size, nothing = choice.size, np.empty((0, 0))
    before, done = np.zeros((size + 1, 2 * total)), np.zeros(size + 1)
    for tensor in range(size):
        state, option = before[tensor + 1], choice[tensor]
        state[:] = before[tensor]
        state[home] += backward[tensor]
        there = follow(state, state[home], lane[option], seconds[option], count[option], repeats[option], nothing)
        done[tensor + 1] = max(done[tensor], there)
    after = np.full((size + 1, 2 * total), -np.inf)
    after[size, home] = 0.0
    state = np.empty(2 * total)
    for tensor in range(size - 1, -1, -1):
        option = choice[tensor]
        for free in range(2 * total):
            state[:] = -np.inf
            state[free] = 0.0
            state[home] += backward[tensor]
            end = follow(state, state[home], lane[option], seconds[option], count[option], repeats[option], nothing)
            for place in range(2 * total):
                end = max(end, state[place] + after[tensor + 1, place])
            after[tensor, free] = end
    found = np.empty(tensors.size)
    for swap in range(tensors.size):
        tensor, option = tensors[swap], options[swap]
        state[:] = before[tensor]
        state[home] += backward[tensor]
        end = follow(state, state[home], lane[option], seconds[option], count[option], repeats[option], nothing)
        end = max(end, done[tensor])
        for place in range(2 * total):
            end = max(end, state[place] + after[tensor + 1, place])
        found[swap] = end
    return found


@compiled
def _event_swaps(choice, tensors, options, by_tensor, tables):  # type: ignore[no-untyped-def]
    trial, found = choice.copy(), np.empty(tensors.size)
    for swap in range(tensors.size):
        tensor = tensors[swap]
        trial[tensor] = options[swap]
        found[swap] = served(trial, tables, by_tensor)[0]
        trial[tensor] = choice[tensor]
    return found


@compiled
def _scheduled_swaps(choice, tensors, options, rounds, tables):  # type: ignore[no-untyped-def]
    trial, found = choice.copy(), np.empty(tensors.size)
    _, key, _ = scheduled(trial, tables, rounds)
    first, _, _, took, _ = laid_out(trial, tables)
    for swap in range(tensors.size):
        found[swap] = exchanged(trial, tensors[swap], options[swap], first, key, took, tables, np.inf)[0]
    return found


# --- options to swap to -----------------------------------------------------------------------------------------------


def with_free(timeline: Timeline) -> tuple[Timeline, int]:
    """The timeline with one more option, which takes no time, and this option."""
    o = timeline.options
    return with_options(timeline, np.zeros(1, np.int64), np.zeros((1, o.seconds.shape[1])), np.zeros(1, np.int32)), len(
        o.count
    )


def with_options(
    timeline: Timeline, like: np.ndarray, seconds: np.ndarray, count: np.ndarray | None = None
) -> Timeline:
    """The timeline with more options after its own: those of options ``like``, with other seconds (and counts)."""
    o = timeline.options
    more = o.count[like] if count is None else count
    options = OptionTable(
        np.concatenate([o.lane, o.lane[like]]), np.concatenate([o.seconds, seconds]), np.concatenate([o.count, more]),
        np.concatenate([o.repeats, o.repeats[like]]),
    )  # fmt: skip
    return replace(timeline, options=options)


def swaps_of(problem: Problem, wanted: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Every tensor with every option of its candidate set: int64 (swaps,), int64 (swaps,).

    Args:
        wanted: bool (options,), the options to keep.
    """
    options = [np.arange(r.start, r.stop) for r in map(problem.options, range(problem.tensors))]
    tensors = np.repeat(np.arange(problem.tensors), [r.size for r in options])
    flat = np.concatenate(options)
    kept = slice(None) if wanted is None else wanted[flat]
    return tensors[kept], flat[kept]


def quickest_alone(problem: Problem, most: int) -> np.ndarray:
    """The options of each candidate set that take least by themselves, at most so many of one: bool (options,)."""
    found = np.zeros(problem.alone.size, bool)
    for a, b in zip(problem.first, problem.first[1:]):
        found[a + np.argsort(problem.alone[a:b], kind="stable")[:most]] = True
    return found


def best_of_each(tensors: np.ndarray, times: np.ndarray, alone: np.ndarray, size: int) -> np.ndarray:
    """Of each tensor's swaps the place of the quickest, of equal ones of what takes least by itself; -1: it has none.

    Args:
        times: float64 (swaps,), F; alone: float64 (swaps,), seconds of the option by itself; size: number of tensors.
    """
    found = np.full(size, -1, np.int64)
    order = np.lexsort((alone, times))[::-1]  # the best last, so that it is what stays
    found[tensors[order]] = order
    return found


def improved(problem: Problem, choice: np.ndarray, rounds: int = 20) -> np.ndarray:
    """The choice after swaps of single tensors, each the best that there is, until none shortens the step.

    Args:
        rounds: how often all swaps are tried, at most; in each, those that still help after the ones before are kept.
    """
    if problem.timeline.order == "schedule":
        return _improved_by_schedule(problem, choice, rounds)
    tensors, options = swaps_of(problem)
    best, current = choice.copy(), problem.timeline.seconds(choice)
    for _ in range(rounds):
        times = swapped(problem.timeline, best, tensors, options)
        places = best_of_each(tensors, times, problem.alone[options], problem.tensors)
        began = current
        for place in places[np.argsort(times[places], kind="stable")]:
            if times[place] >= current and current == began:
                break
            trial = best.copy()
            trial[tensors[place]] = options[place]
            if (seconds := problem.timeline.seconds(trial)) < current:
                best, current = trial, seconds
        if current >= began:
            break
    return best


_WORTH = 1e-4
"""What a round of swaps must gain, relative, for another one to follow: a round takes as long as the runners-up."""

_FAILURES = 12
"""Swaps in a row that promise a shorter step and do not give it, after which a round ends: each takes a timeline."""


def refined(
    problem: Problem, choice: np.ndarray, wanted: np.ndarray, errors: np.ndarray, rounds: int = 3
) -> np.ndarray:
    """The choice after swaps of single tensors to other routes, or to dense ones, while they shorten the step.

    No tensor is compressed that was not, nor by another method: where compression was taken back, because its gain
    could be noise, it stays so.

    Args:
        wanted: bool (options,), the options that are looked at; errors: float64 (options,), no tensor's becomes larger.
    """
    current = problem.seconds(choice)
    for _ in range(rounds):
        tensors, options = swaps_of(problem, wanted)
        now = choice[tensors]
        allowed = (problem.method[options] == problem.method[now]) | (problem.method[options] < 0)
        allowed &= (errors[options] <= errors[now]) & (options != now)
        tensors, options = tensors[allowed], options[allowed]
        times = swapped(problem.timeline, choice, tensors, options)
        places = best_of_each(tensors, times, problem.alone[options], problem.tensors)
        places = places[places >= 0]
        began, failed = current, 0
        for place in places[np.argsort(times[places], kind="stable")]:
            if times[place] >= began * (1 - TIE) or failed == _FAILURES:
                break
            trial = choice.copy()
            trial[tensors[place]] = options[place]
            failed += 1
            if (seconds := problem.seconds(trial)) < current * (1 - TIE):
                choice, current, failed = trial, seconds, 0
        if current >= began * (1 - _WORTH):
            break
    return choice


def _improved_by_schedule(problem: Problem, choice: np.ndarray, rounds: int) -> np.ndarray:
    """The same in the order ``schedule``, where most swaps are ruled out by rougher figures; see ``confirmed``."""
    step = Confirmed(problem.timeline, choice, problem.alone)
    options = [np.arange(a, b) for a, b in zip(problem.first, problem.first[1:])]
    for _ in range(rounds):
        began = step.seconds()
        for tensor in range(problem.tensors):
            own = options[problem.set_of[tensor]]
            times = step.candidates(tensor, own)
            best = int(np.argmin(times))
            if times[best] < step.seconds():
                step.take(tensor, int(own[best]))
        if step.seconds() >= began * (1 - TIE):
            break
    return step.choice


# --- complete candidate sets ------------------------------------------------------------------------------------------


def completed(problem: Problem, compressors: Sequence[str] = ()) -> Problem:
    """The problem with more options: after its own the dense ones, and those of each given compressor.

    Of these what no other option of the same compressor dominates. A search may do without them; comparing may not.
    Choices of the problem are translated by ``moved``.
    """
    timeline = problem.timeline
    pieces = [problem] + [
        Problem.of(problem.workload, problem.profile, specs, routes=problem.routes, lanes=timeline.lanes)
        for specs in ([], *([text] for text in compressors))
    ]
    only = [np.ones(piece.method.size, bool) for piece in pieces]
    for kept, piece in zip(only[2:], pieces[2:]):
        kept[:] = piece.method >= 0
    return joined(pieces, only)


def moved(choice: np.ndarray, before: Problem, after: Problem) -> np.ndarray:
    """A choice of ``before`` in a problem whose candidate sets begin with those of ``before``."""
    return choice - before.first[before.set_of] + after.first[after.set_of]


def joined(pieces: Sequence[Problem], only: Sequence[np.ndarray] | None = None) -> Problem:
    """The first problem, with the options of others of the same tensors, lanes and prices after those of its own.

    Args:
        only: bool (options,) of each piece, which of its options to take; None: all.
    """
    first = pieces[0]
    if only is None:
        only = [np.ones(piece.method.size, bool) for piece in pieces]
    specs = tuple(dict.fromkeys(text for piece in pieces for text in piece.compressors))
    routes = first.routes
    if any(piece.routes is not routes for piece in pieces):  # to look at all of them takes a while
        routes = tuple(dict.fromkeys(route for piece in pieces for route in piece.routes))
    parts = [_renumbered(piece, specs, routes) for piece in pieces]
    sets = []
    for number in range(first.first.size - 1):
        tensor = int(
            np.flatnonzero(first.set_of == number)[0]
        )  # candidate sets may be numbered otherwise in other pieces
        slices = [
            part.only(np.array([option for option in piece.options(tensor) if kept[option]], np.int64))
            for part, piece, kept in zip(parts, pieces, only)
        ]
        sets.append(_once(slices, len(routes)))
    return Problem.of_sets(first.workload, first.profile, specs, routes, sets, first.set_of.tolist(),
                            first.timeline.lanes, first.timeline.order)  # fmt: skip


def _renumbered(piece: Problem, specs: Sequence[str], routes: Sequence[Route]) -> CandidateSet:
    """All options of a problem, with methods and routes numbered as in these lists."""
    methods = {text: number for number, text in enumerate(specs)}
    method = np.array([*(methods[text] for text in piece.compressors), -1], np.int32)  # -1: the last, dense
    if piece.routes is routes:
        return CandidateSet(piece.timeline.options, method[piece.method], piece.route)
    places = {route: number for number, route in enumerate(routes)}
    route = np.array([places[route] for route in piece.routes], np.int32)
    return CandidateSet(piece.timeline.options, method[piece.method], route[piece.route])


def _once(slices: Sequence[CandidateSet], routes: int) -> CandidateSet:
    """Candidate sets in one, each option once."""
    method, route = (np.concatenate([getattr(one, name) for one in slices]) for name in ("method", "route"))
    _, kept = np.unique((method.astype(np.int64) + 1) * routes + route, return_index=True)
    width = max(one.options.lane.shape[1] for one in slices)
    lane, seconds = (
        np.concatenate([_padded(getattr(one.options, name), width) for one in slices]) for name in ("lane", "seconds")
    )
    count, repeats = (np.concatenate([getattr(one.options, name) for one in slices]) for name in ("count", "repeats"))
    return CandidateSet(OptionTable(lane, seconds, count, repeats), method, route).only(np.sort(kept))


def _padded(values: np.ndarray, width: int) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, width - values.shape[1])))
