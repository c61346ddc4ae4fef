"""Schedules: which operation a lane does when, for plans that an executor can keep.

A schedule names for every lane the operations that it does one after the other. Executed as it stands, each operation
begins when the one before it on its lane and the one before it of its tensor have ended; so the time of a step is the
longest path through its operations, and none of them falls when another takes longer.

Schedules of a choice are found by list scheduling: every lane, whenever it is free, takes of what is ready the
operation with the least key. The keys begin with three rules (by tensor; the backward pass first; the longest remaining
way first). Then the schedule is *justified* (Wiest 1964; Li and Willis 1992): from its end, everything is pushed as
late as it can be, then as early as it can be by that order, which never forgets what the other direction has found.

Choices are improved by exchanging one option at a time, with the keys as they are and then justified, from what the
linear relaxation suggests (``relaxation``) and from other choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ._dispatch import climbed, kicked, scheduled
from .problem import Problem
from .relaxation import Relaxed
from .timeline import ROUNDS

NEAR = 0.002
"""Relative distance from the best within which an exchange is justified."""
KICKED = 3
"""Tensors whose options a kick changes, at most."""


@dataclass(frozen=True)
class Patience:
    """How long choices are improved.

    Attributes:
        tries: exchanges, in all; options: of each tensor, those that lift the relaxation least.
        kicks: how often some options are changed at random, in a row without gain.
    """

    tries: int
    options: int
    kicks: int


def improved(
    problem: Problem, starts: Sequence[np.ndarray], relaxed: Relaxed, errors: np.ndarray, limit: float, how: Patience
) -> tuple[np.ndarray, float]:
    """The best choice that is found from some others, and its F.

    Args:
        errors: float64 (rows,); their sum over a choice stays at most ``limit``, where that of a start is.
    """
    timeline = problem.timeline
    o, lanes = timeline.options, timeline.lanes
    tables = (timeline.backward, lanes.backward, lanes.count, o.lane, o.seconds, o.count, o.repeats)
    sizes = np.array([tensor.nbytes for tensor in problem.trace.tensors])
    turns = np.argsort(-sizes, kind="stable")
    best, time, left = starts[0], np.inf, how.tries
    for start in starts:
        choice = np.array(start, np.int64)
        tried, begin = _promising(problem, relaxed, scheduled(choice, *tables, ROUNDS)[0], how.options)
        seconds, spare = climbed(choice, tried, begin, turns, errors, limit, NEAR, how.tries // len(starts), ROUNDS,
                                 *tables)  # fmt: skip
        left -= how.tries // len(starts) - spare
        if seconds < time:
            best, time = choice, seconds
    draws, useless = np.random.default_rng(0), 0
    while left > 0 and useless < how.kicks and time > relaxed.value * (1 + 1e-9):
        tried, begin = _promising(problem, relaxed, time, how.options)
        choice = best.copy()
        kicked(choice, tried, begin, errors, limit, draws.random((KICKED, 2)))
        seconds, left = climbed(choice, tried, begin, turns, errors, limit, NEAR, left, ROUNDS, *tables)
        useless += 1
        if seconds < time * (1 - 1e-9):
            best, time, useless = choice, seconds, 0
    return best, timeline.seconds(best)


def _promising(problem: Problem, relaxed: Relaxed, time: float, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that a choice quicker than a time can have, the best first, at most so many of a tensor, and begins."""
    found, begin = [], np.zeros(problem.tensors + 1, np.int64)
    for tensor, above in enumerate(relaxed.above):
        order = np.argsort(above, kind="stable")[:most]
        kept = order[above[order] <= time - relaxed.value + 1e-12]
        found.append(problem.rows(tensor).start + (kept if kept.size else order[:1]))
        begin[tensor + 1] = begin[tensor] + found[-1].size
    return np.concatenate(found), begin
