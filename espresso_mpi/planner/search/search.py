"""The search for the choice with the least time of a step, and how far from the least it can be.

In the order ``backprop``, the game of ``bound`` gives a bound. For every state of the lanes before a tensor, it also
gives the least that is still to come. First, choices are improved one tensor at a time: all options of a tensor are
compared by the exact time of the rest, at first by a soft maximum that sees what is nearly critical. Then all choices
are explored together, tensor by tensor. States are left out if another one dominates them, or if nothing better than
the best known can follow; of the others the most promising are kept. If all others were kept, the result is the
optimum. Else the bound of what was left out is a bound on it.

In the orders ``fifo`` and ``priority`` a choice is improved by trying, and the bound is that of the loads. In the order
``schedule`` a linear relaxation gives the bound and a choice, which is improved together with its schedule; see
``relaxation`` and ``scheduling``.

Everything is deterministic: ties go to the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

import numpy as np

from espresso_mpi.errors import ConfigError

from ..model.problem import Problem
from . import relaxation
from .backprop_search import BackpropSearch
from .bound import certified
from .budget import ErrorBudget, checked
from .exchanges import try_all
from .found import Effort, Found
from .game import relaxed
from .networks import load_network
from .schedule_search import search_schedules

ROUNDS = 24
"""Of the game of bounds, see ``game.relaxed``."""
TRIES: dict[str, int] = {"quick": 500, "normal": 4000, "thorough": 40000}
"""How often F is worked out from each start, in the orders ``fifo`` and ``priority``."""


def search(
    problem: Problem,
    *,
    effort: Effort = "normal",
    starts: Iterable[np.ndarray] = (),
    error: ErrorBudget | None = None,
) -> Found:
    """The choice with the least time that is found, and a certified bound on the least there is.

    With a budget the choice is always within it. In the order ``backprop`` it is the best there is where exploring had
    room for all states that no other one dominates in time and error (for some ten tensors it has); the bound is that
    without the budget, over the options that fit into it.

    Args:
        effort: ``quick`` improves a few choices, one tensor at a time; the others also explore all choices together.
        starts: choices to improve, besides the search's own.
        error: what compression may spoil at most.

    Raises:
        ConfigError: an unknown effort; a budget of another problem.
        PlanError: no choice is within the budget.
    """
    if effort not in get_args(Effort):
        raise ConfigError(f"effort={effort!r}; expected one of {', '.join(get_args(Effort))}")
    budget = checked(problem, error)
    given = [start for start in starts if budget.sum(start) <= budget.limit]
    if problem.timeline.order == "schedule":
        return search_schedules(problem, budget, given, effort, relaxation.relaxed(problem))
    lanes = BackpropSearch(problem.ordered("backprop"), budget)
    found = lanes.search(effort, given, ROUNDS)
    if problem.timeline.order == "backprop":
        return found
    return _tried(problem, lanes, [found.choice, *given], TRIES[effort])


def _tried(problem: Problem, lanes: BackpropSearch, starts: list[np.ndarray], tries: int) -> Found:
    """A search in the orders ``fifo`` and ``priority``, from choices of the search in the order ``backprop``."""
    timeline, budget = problem.timeline, lanes.budget
    most = max(4, tries // (8 * problem.tensors))
    options = [lanes.promising(tensor, most) for tensor in range(problem.tensors)]
    table = np.full((problem.tensors, max(map(len, options))), -1, np.int64)
    for tensor, found in enumerate(options):
        table[tensor, : found.size] = found
    best, time = starts[0], np.inf
    for start in [*starts, *lanes.own()]:
        choice = np.array(start, np.int64)
        by_tensor = timeline.order == "priority"
        seconds = try_all(choice, table, budget.errors, budget.limit, tries, timeline.tables, by_tensor)
        if seconds < time:
            best, time = choice, seconds
    bound = certified(relaxed(load_network(problem), best).value)
    return Found(best, problem.seconds(best), min(bound, time) + problem.around)
