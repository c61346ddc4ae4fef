"""The search for the choice with the least time of a step, and how far from the least it can be.

In the order ``backprop``: the game of ``bound`` gives a bound and, for every state of the lanes before a tensor, what
is to come at least. Choices are improved one tensor at a time, all its options against the exact time of the rest, at
first against a soft maximum that sees what is nearly critical; then all choices are explored together, tensor by
tensor, leaving out states that another one dominates, or from where nothing better than the best known can come, and
keeping the most promising ones. Where nothing had to be left out for want of room the result is the optimum; else the
bound of what was left out is a bound on it.

In the orders ``fifo`` and ``priority`` a choice is improved by trying, and the bound is that of the loads. In the order
``schedule`` a linear relaxation gives the bound and a choice, which is improved together with its schedule; see
``relaxation`` and ``scheduling``.

Everything is deterministic: ties go to the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from espresso_mpi.errors import ConfigError, PlanError
from espresso_mpi.types import ITEMSIZE, Route, buffer_name

from ..model.dominance import matrices
from ..model.fusion import fused
from ..model.menus import Menu
from ..model.problem import Problem
from ..model.profile import Profile
from ..model.timeline import Lanes, Order
from ..model.trace import Trace, TracedTensor
from . import relaxation
from .bound import Flow, branched, certified, exact_network, fusion_bound, load_network, relaxed
from .branches import candidates, descend, explore, soften, try_all
from .joining import Guesses, Move, carried
from .scheduling import Patience, improved

Effort = Literal["quick", "normal", "thorough"]

WIDTHS: dict[str, int] = {"quick": 0, "normal": 64, "thorough": 1024}
"""How many states are kept for each tensor."""
ANNEALS: dict[str, tuple[float, ...]] = {
    "quick": (0.005,),
    "normal": (0.02, 0.005, 0.003, 0.005, 0.002, 0.005),
    "thorough": (0.02, 0.005, 0.003, 0.005, 0.002, 0.005, *(0.01, 0.02, 0.005, 0.002, 0.03, 0.003) * 4),
}
"""Heats with which passes of annealing begin, relative to F."""
COOLINGS = 10
ROUNDS = 24
"""Of the game of bounds, see ``bound.relaxed``."""
ROUNDS_TO_BEGIN = 12
"""The same where its bound is not wanted, only what to begin with."""
NEAR = 1e-4
"""Relative distance from the bound at which annealing stops, and what it must gain."""
PATIENCE: dict[str, int] = {"quick": 1, "normal": 3, "thorough": 12}
"""How many annealings in a row may gain less than that."""
BRANCHES: dict[str, int] = {"quick": 0, "normal": 48, "thorough": 1000}
"""How many options of the tensor that matters most are tried for a better bound, each alone."""
WORTH = 0.006
"""Relative distance from the bound above which this is done."""
TRIES: dict[str, int] = {"quick": 500, "normal": 4000, "thorough": 40000}
"""How often F is worked out from each start, in the orders ``fifo`` and ``priority``."""
PATIENCES: dict[str, Patience] = {
    "quick": Patience(20, 500_000, 16, 0, 0, 0, 50_000),
    "normal": Patience(60, 2_000_000, 96, 3, 6, 1_000_000, 50_000),
    "thorough": Patience(1000, 100_000_000, 4000, 12, 100, 6_000_000, 4_000_000, True),
}
"""How long choices are improved in the order ``schedule``."""


FUSED_ENOUGH = 3e-4
"""Relative distance from the bound of all fusions within which no other buffers are looked for."""
MOST_CUTS = 3
"""How many of the thresholds' cuts are searched in the order ``schedule``, those with the least bounds."""
MOVES, JOINS, CUTS = 4, 16, 8
"""How often buffers are joined or cut there, and of how many joins and cuts it is guessed what they are worth."""


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        choice: int64 (tensors,), rows of the problem.
        seconds: its time of a step; bound: no choice takes less.
        claim: of what: of the ``choices`` of this problem, or also of all ``fusions`` of neighbours into buffers.
    """

    choice: np.ndarray
    seconds: float
    bound: float
    claim: Literal["choices", "fusions"] = "choices"

    @property
    def gap(self) -> float:
        """By how much the time may be above the least, relative to the bound."""
        return self.seconds / self.bound - 1 if self.bound > 0 else (0.0 if self.seconds <= 0 else float("inf"))


@dataclass(frozen=True)
class ErrorBudget:
    """A limit on what compression may spoil.

    Attributes:
        limit: of the sum over tensors of the errors of their options.
        errors: float64 (rows,), of every option of the problem; at least 0.
    """

    limit: float
    errors: np.ndarray


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
        ConfigError: an effort that there is not; a budget of another problem.
        PlanError: no choice is within the budget.
    """
    if effort not in WIDTHS:
        raise ConfigError(f"effort={effort!r}; expected one of {', '.join(get_args(Effort))}")
    budget = _checked(problem, error)
    given = [start for start in starts if budget.sum(start) <= budget.limit]
    if problem.timeline.order == "schedule":
        return _scheduled(problem, budget, given, effort, relaxation.relaxed(problem))
    lanes = _Lanes(problem.ordered("backprop"), budget)
    found = lanes.search(effort, given, ROUNDS)
    if problem.timeline.order == "backprop":
        return found
    return _tried(problem, lanes, [found.choice, *given], TRIES[effort])


def _scheduled(
    problem: Problem, budget: _Budget, given: list[np.ndarray], effort: Effort, mixtures: relaxation.Relaxed
) -> Found:
    """A search in the order ``schedule``, from what the relaxation and a quick search in ``backprop`` suggest."""
    lanes = _Lanes(problem.ordered("backprop"), budget)
    starts = [lanes.search("quick", given, ROUNDS_TO_BEGIN).choice, *given]
    if budget.sum(mixtures.choice) <= budget.limit:
        starts = [mixtures.choice, *starts]
    return _schedules(problem, budget, starts, effort, mixtures)


def _schedules(
    problem: Problem, budget: _Budget, starts: list[np.ndarray], effort: Effort, mixtures: relaxation.Relaxed
) -> Found:
    """The best choice and schedule from some choices.

    A thorough search goes on from what a normal one finds, so that it is never worse.
    """
    for how in (effort,) if effort != "thorough" else ("normal", "thorough"):
        choice, time = improved(problem, starts, mixtures, budget.errors, budget.limit, PATIENCES[how])
        starts = [choice]
    return Found(choice, time + problem.around, min(mixtures.value, time) + problem.around)


@dataclass(frozen=True)
class _Budget:
    """An ``ErrorBudget`` that fits its problem; without one every error is 0."""

    limit: float
    errors: np.ndarray

    def sum(self, choice: np.ndarray) -> float:
        return float(self.errors[choice].sum())


def _checked(problem: Problem, error: ErrorBudget | None) -> _Budget:
    rows = problem.method.size
    if error is None:
        return _Budget(np.inf, np.zeros(rows))
    errors = np.asarray(error.errors, np.float64)
    if errors.shape != (rows,) or not (errors >= 0).all():
        raise ConfigError(
            f"error budget: errors of shape {errors.shape}; expected {rows} numbers of at least 0, one for each option"
        )
    least = np.minimum.reduceat(errors, problem.first[:-1])[problem.menu].sum()
    if not least <= error.limit:
        raise PlanError(f"error budget: the limit is {error.limit:g}, but every choice sums up to at least {least:g}")
    return _Budget(float(error.limit), errors)


class _Lanes:
    """A search in the order ``backprop``."""

    def __init__(self, problem: Problem, budget: _Budget) -> None:
        timeline = problem.timeline
        o = timeline.options
        self.problem, self.budget = problem, budget
        self.full = matrices(o, timeline.lanes)
        self.network = exact_network(problem, self.full)
        self.tables = (o.lane, o.seconds, o.count, o.repeats, timeline.backward, timeline.lanes.backward, problem.menu,
                       problem.first)  # fmt: skip

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
        self.tried = candidates(flow.flow, slack, self.network.weight, self.problem.menu, self.problem.first)

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
        rows = self.problem.rows(tensor)
        flow = self.relaxation.flows[0].flow[tensor]
        used = flow > 0
        cost = flow[used] @ self.network.weight[used, rows.start : rows.stop]
        return rows.start + np.argsort(cost, kind="stable")[:most]


def _spread(flows: Sequence[Flow], most: int = 4) -> list[Flow]:
    """The best, and some of those that differ from it."""
    step = max(1, len(flows) // most)
    return list(flows[::step][:most])


def _tried(problem: Problem, lanes: _Lanes, starts: list[np.ndarray], tries: int) -> Found:
    """A search in the orders ``fifo`` and ``priority``, from choices of the search in the order ``backprop``."""
    timeline, o = problem.timeline, problem.timeline.options
    budget = lanes.budget
    most = max(4, tries // (8 * problem.tensors))
    rows = [lanes.promising(tensor, most) for tensor in range(problem.tensors)]
    table = np.full((problem.tensors, max(map(len, rows))), -1, np.int64)
    for tensor, found in enumerate(rows):
        table[tensor, : found.size] = found
    best, time = starts[0], np.inf
    for start in [*starts, *lanes.own()]:
        choice = np.array(start, np.int64)
        seconds = try_all(choice, table, budget.errors, budget.limit, tries, timeline.backward,
                          timeline.lanes.backward, timeline.lanes.count, o.lane, o.seconds, o.count, o.repeats,
                          timeline.order == "priority")  # fmt: skip
        if seconds < time:
            best, time = choice, seconds
    bound = certified(relaxed(load_network(problem), best).value)
    return Found(best, problem.seconds(best), min(bound, time) + problem.around)


# --- fusion -----------------------------------------------------------------------------------------------------------


Groups = tuple[tuple[str, ...], ...]


def search_fused(
    trace: Trace,
    profile: Profile,
    compressors: Sequence[str],
    *,
    routes: Sequence[Route] | None = None,
    lanes: Lanes | str = "one-network",
    order: Order = "schedule",
    fusions: Sequence[int] | None = None,
    effort: Effort = "normal",
) -> tuple[Groups, Problem, Found]:
    """Which neighbours in the backward pass travel in one buffer, and the choice for these buffers.

    Tensors are joined until a buffer has so many bytes, for several thresholds. In the order ``schedule`` those with
    the least bounds are searched; in the others all are searched quickly, the best ones thoroughly. Then neighbours
    with equal strategies are joined, and buffers cut in two, while that helps.

    Args:
        routes, lanes, order: as in ``Problem.of``; effort: as in ``search``.
        fusions: thresholds in bytes, 0 for no fusion; default: 0, and a geometric series up to the whole model.

    Returns:
        The groups of two tensors and more; the problem whose tensors are the buffers; its choice. The bound is one on
        every fusion of neighbours with every choice (``claim`` says so), and so lower than that of ``search``.
    """
    buffers = _Buffers(trace, profile, tuple(compressors), routes, lanes, order)
    series = [0, *(4**power << 16 for power in range(16))] if fusions is None else list(fusions)
    total = sum(tensor.size * ITEMSIZE[tensor.dtype] for tensor in trace.tensors)
    cuts = list(dict.fromkeys(joined(trace, min(limit, total)) for limit in series))
    if order == "schedule":
        best, found, bound = buffers.settled(cuts, effort)
    else:
        buffers.price(cuts)
        ranked = sorted(cuts, key=lambda cut: buffers.found(cut, "quick").seconds)[:2]
        best = min(ranked, key=lambda cut: buffers.found(cut, effort).seconds)
        best = buffers.improved(best, effort)
        found = buffers.found(best, effort)
        bound = fusion_bound(buffers.problem(best), trace)
    problem, choice = buffers.named(best, found.choice)
    seconds = problem.seconds(choice)
    return buffers.groups(best), problem, Found(choice, seconds, min(bound, seconds), "fusions")


Cut = tuple[int, ...]
"""Where buffers begin among the tensors of a trace; the first is 0."""


def joined(trace: Trace, limit: int) -> Cut:
    """Neighbours of one element type joined until a buffer has ``limit`` bytes."""
    begins, held, kind = [], limit, ""
    for place, tensor in enumerate(trace.tensors):
        if held >= limit or tensor.dtype != kind:
            begins.append(place)
            held, kind = 0, tensor.dtype
        held += tensor.size * ITEMSIZE[tensor.dtype]
    return tuple(begins)


class _Buffers:
    """Cuts of a trace into buffers, priced and searched once each."""

    def __init__(
        self, trace: Trace, profile: Profile, compressors: tuple[str, ...], routes: Sequence[Route] | None,
        lanes: Lanes | str, order: Order,
    ) -> None:  # fmt: skip
        self.trace, self.profile, self.compressors = trace, profile, compressors
        self.routes, self.lanes, self.order = routes, lanes, order
        self.menus: dict[tuple[int, str], Menu] = {}
        self.results: dict[tuple[Cut, Effort], Found] = {}
        self.known: dict[tuple[int, int], TracedTensor] = {}
        self.problems: dict[Cut, Problem] = {}
        self.relaxations: dict[Cut, relaxation.Relaxed] = {}
        self.priced: Problem | None = None

    def groups(self, cut: Cut) -> Groups:
        return tuple(tuple(t.name for t in members) for members in self.members(cut) if len(members) > 1)

    def members(self, cut: Cut) -> list[tuple[TracedTensor, ...]]:
        return [self.trace.tensors[a:b] for a, b in zip(cut, (*cut[1:], len(self.trace.tensors)))]

    def buffers(self, cut: Cut) -> tuple[TracedTensor, ...]:
        """The buffers of a cut, named by the places of their first tensor and that after the last."""
        return tuple(map(self.buffer, cut, (*cut[1:], len(self.trace.tensors))))

    def buffer(self, begin: int, end: int) -> TracedTensor:
        if (begin, end) not in self.known:
            members = self.trace.tensors[begin:end]
            size = sum(tensor.size for tensor in members)
            self.known[begin, end] = TracedTensor(f"{begin}:{end}", size, members[-1].ready, members[0].dtype)
        return self.known[begin, end]

    def named(self, cut: Cut, choice: np.ndarray) -> tuple[Problem, np.ndarray]:
        """The problem whose tensors are the buffers of a cut by their own names, and the choice in it."""
        trace, members = fused(self.trace, self.groups(cut)), self.members(cut)
        names = [buffer_name([t.name for t in own]) if len(own) > 1 else own[0].name for own in members]
        places = {name: number for number, name in enumerate(names)}
        order = np.array([places[tensor.name] for tensor in trace.tensors])  # of equal ready times others come first
        problem = self.problem(cut)
        firsts = [problem.trace.tensors[number] for number in np.unique(problem.menu, return_index=True)[1]]
        menus = {menu: self.menus[buffer.size, buffer.dtype] for menu, buffer in enumerate(firsts)}
        return problem.with_menus(trace, menus, problem.menu[order].tolist()), choice[order]

    def price(self, cuts: Iterable[Cut]) -> None:
        """Menus for all buffers of some cuts."""
        sizes = {(buffer.size, buffer.dtype) for cut in cuts for buffer in self.buffers(cut)}
        missing = sorted(sizes - self.menus.keys())
        if not missing and self.priced is not None:
            return
        alike = tuple(TracedTensor(str(n), size, 0.0, kind) for n, (size, kind) in enumerate(missing))
        self.priced = Problem.of(replace(self.trace, tensors=alike), self.profile, self.compressors, routes=self.routes,
                                 lanes=self.lanes, order=self.order)  # fmt: skip
        self.menus |= {size: self.priced.menu_of(number) for number, size in enumerate(missing)}

    def problem(self, cut: Cut) -> Problem:
        """The problem whose tensors are the buffers of a cut; see ``buffers``."""
        if cut not in self.problems:
            self.price([cut])
            assert self.priced is not None
            tensors = self.buffers(cut)
            sizes = [(buffer.size, buffer.dtype) for buffer in tensors]
            trace = replace(self.trace, tensors=tensors)
            self.problems[cut] = self.priced.with_menus(trace, {size: self.menus[size] for size in sizes}, sizes)
        return self.problems[cut]

    def settled(self, cuts: Sequence[Cut], effort: Effort) -> tuple[Cut, Found, float]:
        """The best cut in the order ``schedule``, its choice, and the bound on all cuts.

        There every cut has a bound by itself before it is searched; see also ``joining``.
        """
        best = cuts[0]
        found = self.scheduled(best, effort)
        bound = relaxation.fusion_bound(self.problem(best), self.trace)
        if found.seconds <= bound * (1 + FUSED_ENOUGH):
            return best, found, bound
        self.price(cuts)
        for cut in sorted(cuts, key=self.least)[:MOST_CUTS]:
            if self.least(cut) >= found.seconds * (1 - FUSED_ENOUGH):
                break
            best, found = min((best, found), (cut, self.scheduled(cut, "quick")), key=lambda one: one[1].seconds)
        for _ in range(MOVES):
            if found.seconds <= bound * (1 + FUSED_ENOUGH):
                break
            other, start = self.moved(best, found)
            if other == best:
                break
            best, found = other, start
        if best != cuts[0] and effort != "quick":
            problem = self.problem(best)
            found = _schedules(problem, _checked(problem, None), [found.choice], effort, self.relaxed(best))
        return best, found, bound

    def scheduled(self, cut: Cut, effort: Effort) -> Found:
        """What a search finds for a cut in the order ``schedule``."""
        problem = self.problem(cut)
        return _scheduled(problem, _checked(problem, None), [], effort, self.relaxed(cut))

    def least(self, cut: Cut) -> float:
        """What no choice for a cut falls below."""
        return self.relaxed(cut).value + self.problem(cut).around

    def relaxed(self, cut: Cut) -> relaxation.Relaxed:
        if cut not in self.relaxations:
            self.relaxations[cut] = relaxation.relaxed(self.problem(cut))
        return self.relaxations[cut]

    def moved(self, cut: Cut, found: Found) -> tuple[Cut, Found]:
        """The cut with one join or cut more, the best by what is guessed, and the choice that was guessed."""
        problem = self.problem(cut)
        guesses = Guesses(problem, found.choice, self.relaxed(cut))
        nearby = self.nearby(cut)
        self.price([other for other, _, _ in nearby])
        best, time, places = cut, guesses.time * (1 - 1e-5), tuple[int, ...]()
        for other, begin, end in nearby:
            new = self.buffers(other)[begin : begin + len(other) - len(cut) + end - begin]
            parts = np.diff([problem.trace.tensors[begin - 1].ready if begin else 0.0, *(one.ready for one in new)])
            menus = tuple(self.menus[buffer.size, buffer.dtype] for buffer in new)
            seconds, where = guesses.worth(Move(begin, end, menus, tuple(parts)))
            if seconds < time:
                own = (found.choice - problem.first[problem.menu]).tolist()
                best, time, places = other, seconds, (*own[:begin], *where, *own[end:])
        if best == cut:
            return cut, found
        choice = carried(self.problem(best), places)
        seconds = self.problem(best).seconds(choice)
        return (best, Found(choice, seconds, 0.0)) if seconds < found.seconds else (cut, found)

    def nearby(self, cut: Cut) -> list[tuple[Cut, int, int]]:
        """Two neighbours of one type joined, the smallest first, and one buffer cut in two, the largest first.

        Of each the buffers of ``cut`` that become others: the first, and that after the last.
        """
        members = self.members(cut)
        pairs = [n for n in range(1, len(cut)) if _alike(members[n - 1 : n + 1])]
        pairs.sort(key=lambda n: sum(t.size for t in members[n - 1] + members[n]))
        joins = [(cut[:n] + cut[n + 1 :], n - 1, n + 1) for n in pairs[:JOINS]]
        cuts = []
        for other in self.more(cut)[:CUTS]:
            number = next(n for n, begin in enumerate((*cut, -1)) if other[n] != begin) - 1
            cuts.append((other, number, number + 1))
        return [*joins, *cuts]

    def found(self, cut: Cut, effort: Effort) -> Found:
        if (cut, effort) not in self.results:
            self.results[cut, effort] = search(self.problem(cut), effort=effort)
        return self.results[cut, effort]

    def improved(self, cut: Cut, effort: Effort, rounds: int = 3, most: int = 24) -> Cut:
        """Join and cut buffers, the one that helps most in every round."""
        for _ in range(rounds):
            nearby = [*self.fewer(cut, effort), *self.more(cut)][:most]
            self.price(nearby)
            best = min(nearby, key=lambda other: self.found(other, "quick").seconds, default=cut)
            if best == cut or self.found(best, "quick").seconds >= self.found(cut, effort).seconds:
                return cut
            if self.found(best, effort).seconds >= self.found(cut, effort).seconds:
                return cut
            cut = best
        return cut

    def fewer(self, cut: Cut, effort: Effort) -> list[Cut]:
        """Two neighbours of equal strategy and type joined, the smallest first."""
        problem, choice = self.problem(cut), self.found(cut, effort).choice
        strategies = [problem.strategy(int(row)) for row in choice]
        members = self.members(cut)
        pairs = [n for n in range(1, len(cut)) if strategies[n] == strategies[n - 1] and _alike(members[n - 1 : n + 1])]
        pairs.sort(key=lambda n: sum(t.size for t in members[n - 1] + members[n]))
        return [cut[:n] + cut[n + 1 :] for n in pairs]

    def more(self, cut: Cut) -> list[Cut]:
        """One buffer cut in the middle of its bytes, the largest first."""
        found = []
        for number, members in enumerate(self.members(cut)):
            sizes = np.cumsum([tensor.size for tensor in members])
            if len(members) > 1:
                middle = cut[number] + min(len(members) - 1, 1 + int(np.searchsorted(sizes, sizes[-1] / 2)))
                found.append((int(sizes[-1]), (*cut[: number + 1], middle, *cut[number + 1 :])))
        return [other for _, other in sorted(found, key=lambda pair: -pair[0])]


def _alike(buffers: Sequence[tuple[TracedTensor, ...]]) -> bool:
    return len({tensor.dtype for members in buffers for tensor in members}) == 1
