"""Schedules: which operation a lane does when, for plans that an executor can keep.

A schedule names for every lane the operations that it does one after the other. Each operation begins when the one
before it on its lane and the one before it of its tensor have ended. So the time of a step is the longest path through
its operations, and no operation ends earlier when another takes longer.

List scheduling finds the schedules of a choice: whenever a lane is free, it takes the ready operation with the least
key. The keys begin with three rules: by tensor; the backward pass first; the longest remaining path first. Then the
schedule is *justified* (Wiest 1964; Li and Willis 1992): all operations are moved as late as possible, then as early as
possible, each time in the order that the other direction has found.

Choices are improved by exchanging one option at a time: with the keys as they are, then justified. They start from what
the linear relaxation suggests (``relaxation``) and from other choices. Annealing follows, and exchanges once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..model.dispatch import Tables, laid_out, scheduled
from ..model.problem import Problem
from ..model.timeline import ROUNDS
from .climb import annealed, climbed
from .relaxation import Relaxed

NEAR = 0.002
"""Relative distance from the best within which an exchange is justified."""
NEAR_RULES = 0.02
"""The same where schedules come from rules alone."""
ENOUGH = 1e-4
"""Relative distance from the bound within which choices are not improved any more."""
WORTH = 5e-4
"""Relative distance from the bound above which choices are annealed."""
FEWER = 8
"""A climb begins with so many times fewer options."""
GAINED, FAR = 2e-4, 0.01
"""What an annealing must gain, relative, for another one to follow, unless the bound is further away than this."""
HOT, HOTTEST, COLD = 0.003, 0.05, 0.0001
"""The first and the last heat of annealing, relative to the step's time; the first is 3/4 of the distance from the
bound, if that is between the first two."""
AFRESH = 0.02
"""The first heat of every other annealing of justified schedules, which leads away from what the others found."""


@dataclass(frozen=True)
class Patience:
    """How long choices are improved, counted in schedules, as times are not the same twice.

    Attributes:
        tries: schedules for each tensor from one start; climb: operations of all of them, at most.
        options: of each tensor, those that lift the relaxation least.
        anneals: how often; steps: for each pair of tensors, in each; work: operations of all of them, at most.
        least: operations that a climb or an annealing may take, however few tensors there are.
        justifies: annealing compares justified schedules, which takes some times as long.
    """

    tries: int
    climb: int
    options: int
    anneals: int
    steps: int
    work: int
    least: int
    justifies: bool = False


def improved(
    problem: Problem, starts: Sequence[np.ndarray], relaxed: Relaxed, errors: np.ndarray, limit: float, how: Patience
) -> tuple[np.ndarray, float]:
    """The best choice that is found from some others, and its F.

    Args:
        errors: float64 (options,); their sum over a choice stays at most ``limit``, where that of a start is.
    """
    return _Improving(problem, relaxed, errors, limit, how).found(starts)


@dataclass(frozen=True)
class _Improving:
    """See ``improved``."""

    problem: Problem
    relaxed: Relaxed
    errors: np.ndarray
    limit: float
    how: Patience

    def found(self, starts: Sequence[np.ndarray]) -> tuple[np.ndarray, float]:
        tables, how, least = self.tables, self.how, self.relaxed.value
        known = {start.tobytes(): np.array(start, np.int64) for start in starts}
        ranked = sorted(((*scheduled(start, tables, ROUNDS)[:2], start) for start in known.values()),
                        key=lambda one: one[0])  # fmt: skip
        best, time = ranked[0][2], ranked[0][0]
        for start in ranked:
            if time > least * (1 + ENOUGH):
                best, time = min((best, time), self.climbed(*start), key=lambda one: one[1])
        rng = np.random.default_rng(0)
        for number in range(how.anneals):
            if time <= least * (1 + WORTH):
                break
            choice = self.annealed(best, time, rng, how.justifies and number % 2 == 1)
            start, before = (*scheduled(choice, tables, ROUNDS)[:2], choice), time
            best, time = min((best, time), self.climbed(*start), key=lambda one: one[1])
            if not how.justifies and time > before * (1 - GAINED) and time <= least * (1 + FAR):
                break
        return best, time

    @cached_property
    def tables(self) -> Tables:
        return self.problem.timeline.tables

    @cached_property
    def loads(self) -> tuple[np.ndarray, np.ndarray]:
        return self.relaxed.needs, np.cumsum(self.problem.timeline.backward)

    @cached_property
    def order(self) -> np.ndarray:
        return np.argsort([-tensor.nbytes for tensor in self.problem.workload.tensors], kind="stable")

    def climbed(self, time: float, key: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, float]:
        """The choice after exchanges of single options, and its F."""
        tries = min(max(self.how.tries * start.size, self.how.least // key.size), self.how.climb // key.size)
        choice = start.copy()
        for most in (self.how.options // FEWER, self.how.options):  # of few first: those lead further
            options = _promising(self.problem, self.relaxed, time, most)
            above, tries = climbed(
                choice, time, key, *options, self.order, self.errors, self.limit, NEAR, tries, ROUNDS,
                self.relaxed.value * (1 + ENOUGH), *self.loads, self.tables,
            )  # fmt: skip
            if above < time:
                time, key, _ = scheduled(choice, self.tables, ROUNDS)
        return choice, time

    def annealed(self, best: np.ndarray, time: float, rng: np.random.Generator, afresh: bool) -> np.ndarray:
        choice = best.copy()
        size = laid_out(choice, self.tables)[1].size
        steps = min(max(self.how.steps * choice.size**2, self.how.least // size), self.how.work // size)
        hot = AFRESH if afresh else min(HOTTEST, max(HOT, 0.75 * (time / max(self.relaxed.value, 1e-300) - 1)))
        options = _promising(self.problem, self.relaxed, time, self.how.options // 2)
        heats, draws = time * np.geomspace(hot, COLD, steps), rng.random((steps, 3))
        near, rounds = (NEAR_RULES, ROUNDS) if self.how.justifies else (0.0, 0)
        annealed(choice, *options, self.errors, self.limit, heats, draws, near, rounds, *self.loads, self.tables)
        return choice


def _promising(problem: Problem, relaxed: Relaxed, time: float, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that a choice quicker than a time can have, the best first, at most so many of a tensor, and begins."""
    kept = []
    for first, above in zip(relaxed.first, relaxed.above):
        order = np.argsort(above, kind="stable")[:most]
        near = order[above[order] <= time - relaxed.value + 1e-12]
        kept.append(problem.options(first).start + (near if near.size else order[:1]))
    sizes = np.array([options.size for options in kept])
    begin = np.append(0, sizes[relaxed.kind].cumsum())
    return np.concatenate([kept[kind] for kind in relaxed.kind]), begin
