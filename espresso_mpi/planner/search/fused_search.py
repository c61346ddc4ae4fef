"""The search for buffers together with their choice: which neighbours in the backward pass travel in one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from espresso_mpi.types import ITEMSIZE, Route

from ..model.problem import Problem
from ..model.profile import Profile
from ..model.timeline import Lanes, Order
from ..model.workload import Workload
from . import relaxation
from .budget import checked
from .buffers import Buffers, Cut, Groups, alike, joined, kind_of
from .found import Effort, Found
from .fused_bound import fusion_bound
from .joining import Guesses, Move, carried
from .schedule_search import improve_schedules, search_schedules
from .search import search

FUSED_ENOUGH = 3e-4
"""Relative distance from the bound of all fusions within which no other buffers are looked for."""
MOST_CUTS = 3
"""How many of the thresholds' cuts are searched in the order ``schedule``, those with the least bounds."""
MOVES, JOINS, CUTS = 4, 16, 8
"""How often buffers are joined or cut there, and of how many joins and cuts it is guessed what they are worth."""


def search_fused(
    workload: Workload,
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
    buffers = Buffers(workload, profile, tuple(compressors), routes, lanes, order)
    searches = _FusedSearch(buffers, effort)
    series = [0, *(4**power << 16 for power in range(16))] if fusions is None else list(fusions)
    total = sum(tensor.size * ITEMSIZE[tensor.dtype] for tensor in workload.tensors)
    cuts = list(dict.fromkeys(joined(workload, min(limit, total)) for limit in series))
    if order == "schedule":
        best, found, bound = searches.settled(cuts)
    else:
        buffers.price(cuts)
        ranked = sorted(cuts, key=lambda cut: searches.found(cut, "quick").seconds)[:2]
        best = min(ranked, key=lambda cut: searches.found(cut, effort).seconds)
        best = searches.improved(best)
        found = searches.found(best, effort)
        bound = fusion_bound(buffers.problem(best), workload)
    problem, choice = buffers.named(best, found.choice)
    seconds = problem.seconds(choice)
    return buffers.groups(best), problem, Found(choice, seconds, min(bound, seconds), "fusions")


class _FusedSearch:
    """Searches of cuts of a workload into buffers, once each.

    Args:
        effort: with which the best cut is searched.
    """

    def __init__(self, buffers: Buffers, effort: Effort) -> None:
        self.buffers, self.effort = buffers, effort
        self.results: dict[tuple[Cut, Effort], Found] = {}
        self.relaxations: dict[Cut, relaxation.Relaxed] = {}

    def settled(self, cuts: Sequence[Cut]) -> tuple[Cut, Found, float]:
        """The best cut in the order ``schedule``, its choice, and the bound on all cuts.

        There every cut has a bound by itself before it is searched; see also ``joining``.
        """
        best = cuts[0]
        found = self.scheduled(best, self.effort)
        bound = relaxation.fusion_bound(self.buffers.problem(best), self.buffers.workload)
        if found.seconds <= bound * (1 + FUSED_ENOUGH):
            return best, found, bound
        self.buffers.price(cuts)
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
        if best != cuts[0] and self.effort != "quick":
            problem = self.buffers.problem(best)
            found = improve_schedules(problem, checked(problem, None), [found.choice], self.effort, self.relaxed(best))
        return best, found, bound

    def scheduled(self, cut: Cut, effort: Effort) -> Found:
        """What a search finds for a cut in the order ``schedule``."""
        problem = self.buffers.problem(cut)
        return search_schedules(problem, checked(problem, None), [], effort, self.relaxed(cut))

    def least(self, cut: Cut) -> float:
        """What no choice for a cut falls below."""
        return self.relaxed(cut).value + self.buffers.problem(cut).around

    def relaxed(self, cut: Cut) -> relaxation.Relaxed:
        """The relaxation of a cut."""
        if cut not in self.relaxations:
            self.relaxations[cut] = relaxation.relaxed(self.buffers.problem(cut))
        return self.relaxations[cut]

    def moved(self, cut: Cut, found: Found) -> tuple[Cut, Found]:
        """The cut with one join or cut more, the best by what is guessed, and the choice that was guessed."""
        problem = self.buffers.problem(cut)
        guesses = Guesses(problem, found.choice, self.relaxed(cut))
        nearby = self.nearby(cut)
        self.buffers.price([other for other, _, _ in nearby])
        best, time, places = cut, guesses.time * (1 - 1e-5), tuple[int, ...]()
        for other, begin, end in nearby:
            new = self.buffers.buffer_tensors(other)[begin : begin + len(other) - len(cut) + end - begin]
            parts = np.diff([problem.workload.tensors[begin - 1].ready if begin else 0.0, *(one.ready for one in new)])
            sets = tuple(self.buffers.candidates[kind_of(buffer)] for buffer in new)
            seconds, where = guesses.worth(Move(begin, end, sets, tuple(parts)))
            if seconds < time:
                own = (found.choice - problem.first[problem.set_of]).tolist()
                best, time, places = other, seconds, (*own[:begin], *where, *own[end:])
        if best == cut:
            return cut, found
        choice = carried(self.buffers.problem(best), places)
        seconds = self.buffers.problem(best).seconds(choice)
        return (best, Found(choice, seconds, 0.0)) if seconds < found.seconds else (cut, found)

    def nearby(self, cut: Cut) -> list[tuple[Cut, int, int]]:
        """Two neighbours of one type joined, the smallest first, and one buffer cut in two, the largest first.

        Of each the buffers of ``cut`` that become others: the first, and that after the last.
        """
        members = self.buffers.members(cut)
        pairs = [n for n in range(1, len(cut)) if alike(members[n - 1 : n + 1])]
        pairs.sort(key=lambda n: sum(t.size for t in members[n - 1] + members[n]))
        joins = [(cut[:n] + cut[n + 1 :], n - 1, n + 1) for n in pairs[:JOINS]]
        cuts = []
        for other in self.buffers.more(cut)[:CUTS]:
            number = next(n for n, begin in enumerate((*cut, -1)) if other[n] != begin) - 1
            cuts.append((other, number, number + 1))
        return [*joins, *cuts]

    def found(self, cut: Cut, effort: Effort) -> Found:
        """What a search finds for a cut."""
        if (cut, effort) not in self.results:
            self.results[cut, effort] = search(self.buffers.problem(cut), effort=effort)
        return self.results[cut, effort]

    def improved(self, cut: Cut, rounds: int = 3, most: int = 24) -> Cut:
        """Join and cut buffers, the one that helps most in every round."""
        for _ in range(rounds):
            nearby = [*self.fewer(cut), *self.buffers.more(cut)][:most]
            self.buffers.price(nearby)
            best = min(nearby, key=lambda other: self.found(other, "quick").seconds, default=cut)
            if best == cut or self.found(best, "quick").seconds >= self.found(cut, self.effort).seconds:
                return cut
            if self.found(best, self.effort).seconds >= self.found(cut, self.effort).seconds:
                return cut
            cut = best
        return cut

    def fewer(self, cut: Cut) -> list[Cut]:
        """Two neighbours of equal strategy and type joined, the smallest first."""
        problem, choice = self.buffers.problem(cut), self.found(cut, self.effort).choice
        strategies = [problem.strategy(int(option)) for option in choice]
        members = self.buffers.members(cut)
        pairs = [n for n in range(1, len(cut)) if strategies[n] == strategies[n - 1] and alike(members[n - 1 : n + 1])]
        pairs.sort(key=lambda n: sum(t.size for t in members[n - 1] + members[n]))
        return [cut[:n] + cut[n + 1 :] for n in pairs]
