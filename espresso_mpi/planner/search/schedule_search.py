"""The search in the order ``schedule``, from what a linear relaxation suggests; see ``search``."""

from __future__ import annotations

import numpy as np

from ..model.problem import Problem
from .backprop_search import BackpropSearch
from .budget import Budget
from .found import Effort, Found
from .relaxation import Relaxed
from .scheduling import Patience, improved

ROUNDS_TO_BEGIN = 12
"""Of the game of bounds (``game.relaxed``), whose bound is not wanted, only what to begin with."""
PATIENCES: dict[str, Patience] = {
    "quick": Patience(20, 500_000, 16, 0, 0, 0, 50_000),
    "normal": Patience(60, 2_000_000, 96, 3, 6, 1_000_000, 50_000),
    "thorough": Patience(1000, 100_000_000, 4000, 24, 100, 3_000_000, 2_000_000, True),
}
"""How long choices are improved in the order ``schedule``."""


def search_schedules(
    problem: Problem, budget: Budget, given: list[np.ndarray], effort: Effort, mixtures: Relaxed
) -> Found:
    """A search in the order ``schedule``, from what the relaxation and a quick search in ``backprop`` suggest."""
    lanes = BackpropSearch(problem.ordered("backprop"), budget)
    starts = [lanes.search("quick", given, ROUNDS_TO_BEGIN).choice, *given]
    if budget.sum(mixtures.choice) <= budget.limit:
        starts = [mixtures.choice, *starts]
    return improve_schedules(problem, budget, starts, effort, mixtures)


def improve_schedules(
    problem: Problem, budget: Budget, starts: list[np.ndarray], effort: Effort, mixtures: Relaxed
) -> Found:
    """The best choice and schedule from some choices.

    A thorough search goes on from what a normal one finds, so that it is never worse.
    """
    for how in (effort,) if effort != "thorough" else ("normal", "thorough"):
        choice, time = improved(problem, starts, mixtures, budget.errors, budget.limit, PATIENCES[how])
        starts = [choice]
    return Found(choice, time + problem.around, min(mixtures.value, time) + problem.around)
