"""The search in the order ``backprop``, exact where there was room for all states; see ``search``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..model.dominance import matrices
from ..model.problem import Problem
from .bound import branched, certified
from .budget import Budget
from .descent import candidates, descend, soften
from .exploration import explore
from .found import Effort, Found
from .game import Flow, relaxed
from .networks import exact_network

WIDTHS: dict[str, int] = {"quick": 0, "normal": 64, "thorough": 1024}
"""How many states are kept for each tensor."""
ANNEALS: dict[str, tuple[float, ...]] = {
    "quick": (0.005,),
    "normal": (0.02, 0.005, 0.003, 0.005, 0.002, 0.005),
    "thorough": (0.02, 0.005, 0.003, 0.005, 0.002, 0.005, *(0.01, 0.02, 0.005, 0.002, 0.03, 0.003) * 4),
}
"""Heats with which passes of annealing begin, relative to F."""
COOLINGS = 10
NEAR = 1e-4
"""Relative distance from the bound at which annealing stops, and what it must gain."""
PATIENCE: dict[str, int] = {"quick": 1, "normal": 3, "thorough": 12}
"""How many annealings in a row may gain less than that."""
BRANCHES: dict[str, int] = {"quick": 0, "normal": 48, "thorough": 1000}
"""How many options of the tensor that matters most are tried for a better bound, each alone."""
WORTH = 0.006
"""Relative distance from the bound above which this is done."""


class BackpropSearch:
    """A search in the order ``backprop``."""

    def __init__(self, problem: Problem, budget: Budget) -> None:
        timeline = problem.timeline
        o = timeline.options
        self.problem, self.budget = problem, budget
        self.full = matrices(o, timeline.lanes)
        self.network = exact_network(problem, self.full)
        self.tables = (o.lane, o.seconds, o.count, o.repeats, timeline.backward, timeline.lanes.backward,
                       problem.set_of, problem.first)  # fmt: skip

    def search(self, effort: Effort, starts: list[np.ndarray], rounds: int) -> Found:
        problem = self.problem
        own = self.own()
        self.relaxation = relaxed(self.network, min(own, key=problem.timeline.seconds), rounds=rounds)
        self.narrow(np.inf)
        best, time = own[0], np.inf
        for start in [*self.within(self.relaxation.game.rounded()), *own, *starts]:
            choice, seconds = self.improved(start)
            if seconds < time:
                best, time = choice, seconds
            self.narrow(time)
        best, time = self.annealed(best, time, effort)
        bound = self.relaxation.value
        if WIDTHS[effort]:
            best, time, bound = self.explored(WIDTHS[effort], best, time)
        if BRANCHES[effort] and time > (1 + WORTH) * bound:
            bound = max(bound, branched(problem, self.full, self.relaxation, best, time, BRANCHES[effort]))
        return Found(best, problem.seconds(best), min(certified(bound), time) + problem.around)

    def own(self) -> list[np.ndarray]:
        """Choices to begin with, within the budget."""
        problem, errors = self.problem, self.budget.errors
        least = np.minimum.reduceat(errors, problem.first[:-1])
        modest = problem.quickest(errors <= np.repeat(least, np.diff(problem.first)))
        quick = problem.quickest(np.ones(errors.size, bool))
        everywhere = np.logical_or.reduceat(problem.method < 0, problem.first[:-1]).all()
        plain = [problem.dense()] if everywhere else []
        return [modest, *(c for c in (quick, *plain) if self.budget.sum(c) <= self.budget.limit)]

    def within(self, choice: np.ndarray) -> list[np.ndarray]:
        """The choice if it is within the budget, else what a price on errors makes of it."""
        if self.budget.sum(choice) <= self.budget.limit:
            return [choice]
        low, high = 0.0, self.problem.timeline.seconds(choice) / max(self.budget.limit, 1e-9 * self.budget.sum(choice))
        found: list[np.ndarray] = []
        for _ in range(16):
            priced = np.array(choice, np.int64)
            self._descend(priced, np.inf, high)
            if self.budget.sum(priced) <= self.budget.limit:
                break
            low, high = high, 4 * high
        for _ in range(12):
            price = 0.5 * (low + high)
            priced = np.array(choice, np.int64)
            self._descend(priced, np.inf, price)
            if self.budget.sum(priced) <= self.budget.limit:
                found, high = [priced], price
            else:
                low = price
        return found

    def _descend(self, choice: np.ndarray, limit: float, price: float, passes: int = 8) -> None:
        flow = self.relaxation.flows[0]
        descend(choice, *self.tried, self.budget.errors, limit, price, passes, self.full, flow.mass, *self.tables)

    def improved(self, choice: np.ndarray) -> tuple[np.ndarray, float]:
        found = np.array(choice, np.int64)
        self._descend(found, self.budget.limit, 0.0)
        return found, self.problem.timeline.seconds(found)

    def annealed(self, best: np.ndarray, time: float, effort: Effort) -> tuple[np.ndarray, float]:
        """Look at what is nearly critical too, at first with a heat of so much of F, then ever less."""
        useless = 0
        for heat in ANNEALS[effort]:
            if time <= self.relaxation.value * (1 + NEAR):
                break
            choice, now = best.copy(), heat * time
            for _ in range(COOLINGS):
                soften(choice, *self.tried, self.budget.errors, self.budget.limit, now, self.full, *self.tables)
                now *= 0.7
            choice, seconds = self.improved(choice)
            useless = 0 if seconds < time * (1 - NEAR) else useless + 1
            if seconds < time:
                best, time = choice, seconds
                self.narrow(time)
            if useless == PATIENCE[effort]:
                break
        return best, time

    def narrow(self, time: float) -> None:
        """Leave out, from now on, options that no choice quicker than this has: they alone lift the bound above it."""
        flow = self.relaxation.flows[0]
        slack = time - flow.value + 1e-9 * time if time < np.inf else np.inf
        self.tried = candidates(flow.flow, slack, self.network.weight, self.problem.set_of, self.problem.first)

    def explored(self, width: int, best: np.ndarray, time: float) -> tuple[np.ndarray, float, float]:
        """The best of all choices from the states that there was room for, and the bound of all."""
        cuts = _spread(self.relaxation.flows)
        masses, rests, flows = (np.stack([getattr(cut, name) for cut in cuts]) for name in ("mass", "rest", "flow"))
        found, choice, left_out = explore(width, time, self.budget.errors, self.budget.limit, *self.tables,
                                          masses, rests, flows, self.network.weight)  # fmt: skip
        if found < time:
            best, time = self.improved(choice)
        return best, time, max(self.relaxation.value, min(left_out, time))

    def promising(self, tensor: int, most: int) -> np.ndarray:
        """The options of a tensor that cost the bound least, the first first."""
        options = self.problem.options(tensor)
        flow = self.relaxation.flows[0].flow[tensor]
        used = flow > 0
        cost = flow[used] @ self.network.weight[used, options.start : options.stop]
        return options.start + np.argsort(cost, kind="stable")[:most]


def _spread(flows: Sequence[Flow], most: int = 4) -> list[Flow]:
    """The best, and some of those that differ from it."""
    step = max(1, len(flows) // most)
    return list(flows[::step][:most])
