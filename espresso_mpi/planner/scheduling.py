"""Schedules: which operation a lane does when, for plans that an executor can keep.

A schedule names for every lane the operations that it does one after the other. Executed as it stands, each operation
begins when the one before it on its lane and the one before it of its tensor have ended; so the time of a step is the
longest path through its operations, and none of them falls when another takes longer.

Schedules of a choice are found by list scheduling: every lane, whenever it is free, takes of what is ready the
operation with the least key. The keys begin with three rules (by tensor; the backward pass first; the longest remaining
way first). Then the schedule is *justified* (Wiest 1964; Li and Willis 1992): from its end, everything is pushed as
late as it can be, then as early as it can be by that order, which never forgets what the other direction has found.

Choices are improved by exchanging one option at a time, with the keys as they are and then justified, from what the
linear relaxation suggests (``relaxation``) and from other choices; then by annealing, and once more from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ._climb import annealed, climbed
from ._dispatch import laid_out, scheduled
from .problem import Problem
from .relaxation import Relaxed
from .timeline import ROUNDS

NEAR = 0.002
"""Relative distance from the best within which an exchange is justified."""
WORTH = 1e-4
"""Relative distance from the bound above which choices are annealed."""
HOT, COLD = 0.01, 0.0002
"""The first and the last heat of annealing, relative to the step's time."""


@dataclass(frozen=True)
class Patience:
    """How long choices are improved.

    Attributes:
        tries: exchanges from one start; options: of each tensor, those that lift the relaxation least.
        anneals: how often; work: in each, operations that are served.
    """

    tries: int
    options: int
    anneals: int
    work: int


def improved(
    problem: Problem, starts: Sequence[np.ndarray], relaxed: Relaxed, errors: np.ndarray, limit: float, how: Patience
) -> tuple[np.ndarray, float]:
    """The best choice that is found from some others, and its F.

    Args:
        errors: float64 (rows,); their sum over a choice stays at most ``limit``, where that of a start is.
    """
    tables = problem.timeline.tables  # F of every choice here is that of ``scheduled``
    loads = relaxed.needs, np.cumsum(problem.timeline.backward)
    turns = np.argsort([-tensor.nbytes for tensor in problem.trace.tensors], kind="stable")

    def climb(start: np.ndarray) -> tuple[np.ndarray, float]:
        choice = np.array(start, np.int64)
        time, key, _ = scheduled(choice, *tables, ROUNDS)
        rows = _promising(problem, relaxed, time, how.options)
        above = climbed(choice, time, key, *rows, turns, errors, limit, NEAR, how.tries, ROUNDS, *loads, *tables)
        return choice, scheduled(choice, *tables, ROUNDS)[0] if above < time else time

    best, time = min(map(climb, starts), key=lambda found: found[1])
    rng = np.random.default_rng(0)
    for _ in range(how.anneals):
        if time <= relaxed.value * (1 + WORTH):
            break
        choice = best.copy()
        steps = how.work // laid_out(choice, *tables)[1].size
        rows = _promising(problem, relaxed, time, 4 * how.options)
        heats, draws = time * np.geomspace(HOT, COLD, steps), rng.random((steps, 3))
        annealed(choice, *rows, errors, limit, heats, draws, *loads, *tables)
        best, time = min((best, time), climb(choice), key=lambda found: found[1])
    return best, time


def _promising(problem: Problem, relaxed: Relaxed, time: float, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that a choice quicker than a time can have, the best first, at most so many of a tensor, and begins."""
    kept = []
    for first, above in zip(relaxed.first, relaxed.above):
        order = np.argsort(above, kind="stable")[:most]
        near = order[above[order] <= time - relaxed.value + 1e-12]
        kept.append(problem.rows(first).start + (near if near.size else order[:1]))
    sizes = np.array([rows.size for rows in kept])
    begin = np.append(0, sizes[relaxed.kind].cumsum())
    return np.concatenate([kept[kind] for kind in relaxed.kind]), begin
