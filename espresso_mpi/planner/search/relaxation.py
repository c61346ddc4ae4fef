"""The linear relaxation of a step: what loads and chains of any mixture of options demand, whatever the schedule.

A *mixture* gives every option of a tensor a share; the shares of a tensor sum up to 1. For every choice and every
schedule in which a lane does one thing at a time, with r_i the time at which gradient i is ready if nothing delays the
backward pass:

1. F is at least the backward pass and all that the options do on its lane.
2. F is at least r_i and all that tensor i and later ones do on any one lane: none of it begins before r_i.
3. F is at least r_i and the length of a segment of tensor i.

Each is linear in the shares, so the least F that all of them allow is a linear program; HiGHS solves it, with those of
them that a solution violates. What is returned is not its word: of the multipliers that it finds any are valid, for

> F(S) ≥ Σ_k λ_k (constant_k + Σ_i weight_k(S_i)) ≥ Σ_k λ_k constant_k + Σ_i min over o of Σ_k λ_k weight_k(o)

for all λ ≥ 0 that sum up to 1, and the right side is worked out anew over all options of the candidate sets.

Tensors with one candidate set between which no inequality of the program tells are the same to it: they are a *class*,
and share one mixture. So the program has as many columns as classes have options, whatever the number of tensors; an
inequality that is added may cut classes in two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..model.needs import apportioned, least, needs_of
from ..model.problem import Problem
from ..model.workload import Workload
from .bound import certified
from .fused_bound import fusion_table

ROUNDS = 40
"""How often inequalities and columns are added, at most."""
MANY = 250
"""Columns of a candidate set with which the program begins at most; others are added where they would lower T."""
LOWERED = 2e-5
"""Relative: by how much columns must lower T to be added."""
VIOLATED = 1e-5
"""Relative: by how much one must be violated to be added."""
CHAINS = 3
"""Inequalities of the third kind that are added in a round, at most."""

STALE = 2
"""Rounds of inequalities that may leave T where it is: mixtures can be spread so that few are violated."""

CHAIN = -1
"""In the place of a lane: an inequality of the third kind."""


@dataclass(frozen=True)
class Relaxed:
    """The solution of the relaxation.

    Attributes:
        value: seconds without ``Problem.around`` that no choice and no schedule falls below: certified.
        choice: int64 (tensors,): of every tensor an option of its mixture, so that each class has of every option about
            as much as its mixture.
        kind: int64 (tensors,), the class of each tensor; first: of every class the first tensor.
        above: by class, float64: by how much the bound rises, at least, if a tensor has each option of its set.
        prices: float64 (classes, lanes + 1), by how much the bound rises for each second that an option needs.
        needs: float64 (options, lanes + 1), see ``needs``.
    """

    value: float
    choice: np.ndarray
    kind: np.ndarray
    first: np.ndarray
    above: tuple[np.ndarray, ...]
    prices: np.ndarray
    needs: np.ndarray


def relaxed(problem: Problem) -> Relaxed:
    """Solve the relaxation of a problem, over all options of its candidate sets."""
    timeline, o = problem.timeline, problem.timeline.options
    needs = np.asarray(needs_of(o.lane, o.seconds, o.count, o.repeats, timeline.lanes.count))
    return _Relaxation(needs, problem.set_of, problem.first, timeline.backward, timeline.lanes.backward).solved()


def fusion_bound(problem: Problem, workload: Workload) -> float:
    """Like that of ``bound``, by the relaxation."""
    table, first, set_of = fusion_table(problem, workload)
    relaxation = _Relaxation(table, set_of, first, workload.backward, problem.timeline.lanes.backward)
    return float(relaxation.solved().value + problem.around)


@dataclass(frozen=True)
class _Classes:
    """Tensors that are the same to some inequalities.

    Attributes:
        kind, first: as in ``Relaxed``; size: int64 (classes,), tensors of each.
        column: int64 (columns,), the class of each column of the program; options: int64 (columns,), its option.
    """

    kind: np.ndarray
    first: np.ndarray
    size: np.ndarray
    column: np.ndarray
    options: np.ndarray


@dataclass(frozen=True)
class _Relaxation:
    """What is relaxed.

    Attributes:
        needs: float64 (options, lanes + 1), see ``needs``.
        candidate set, first, backward: as in ``Problem`` and its timeline; home: the lane of the backward pass.
    """

    needs: np.ndarray
    set_of: np.ndarray
    first: np.ndarray
    backward: np.ndarray
    home: int

    @property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every option: seconds on each lane, (options, lanes), and of a segment, (options,)."""
        return self.needs[:, :-1], self.needs[:, -1]

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return self.needs.shape[1] - 1

    @cached_property
    def ready(self) -> np.ndarray:
        """When gradients are ready, if nothing delays the backward pass."""
        return np.cumsum(self.backward)

    def begin(self, number: int) -> np.ndarray:
        """The options of a candidate set to begin with: those that no other one is below, or a few of many."""
        here = self.needs[self.first[number] : self.first[number + 1]]
        if here.shape[0] <= MANY:
            return np.asarray(self.first[number] + least(here))
        prices = np.vstack([np.ones(self.lanes + 1), 0.1 + np.eye(self.lanes + 1)])
        return np.asarray(self.first[number] + np.unique(np.argmin(here @ prices.T, axis=0)))

    def classes(self, known: Iterable[tuple[int, int]], kept: list[np.ndarray]) -> _Classes:
        """The classes to some inequalities, as (lane, tensor); kept: of every set the options that are columns."""
        place = np.arange(self.set_of.size)
        begins = np.unique([tensor for lane, tensor in known if lane != CHAIN])
        chains = np.unique([tensor for lane, tensor in known if lane == CHAIN])
        part = np.searchsorted(begins, place, "right")
        part[chains] = begins.size + 1 + np.arange(chains.size)
        _, first, kind, size = np.unique(
            part * (self.first.size - 1) + self.set_of, return_index=True, return_inverse=True, return_counts=True
        )
        options = [kept[number] for number in self.set_of[first]]
        column = np.repeat(np.arange(first.size), [own.size for own in options])
        return _Classes(kind, first, size, column, np.concatenate(options))

    def weight(self, lane: int, tensor: int, classes: _Classes) -> np.ndarray:
        """What each column adds to an inequality: of a lane from a tensor on, or the chain of a tensor."""
        load, chain = self.tables
        if lane == CHAIN:
            return np.where(classes.column == classes.kind[tensor], chain[classes.options], 0.0)
        inside = np.where(classes.first >= tensor, classes.size, 0)
        return load[classes.options, lane] * inside[classes.column]

    def constant(self, lane: int, tensor: int) -> float:
        return float(self.ready[-1] if lane == self.home else self.ready[tensor])

    def begins(self) -> list[tuple[int, int]]:
        """The inequalities to begin with, as (lane, tensor)."""
        return [*((lane, 0) for lane in range(self.lanes)), (CHAIN, self.set_of.size - 1)]

    def violated(self, classes: _Classes, shares: np.ndarray, value: float) -> Iterator[tuple[int, int]]:
        """Of every lane the inequality that is violated most, and some of chains."""
        (load, chain), kinds = self.tables, classes.first.size
        limit = value * (1 + VIOLATED) + 1e-15
        for lane in range(self.lanes):
            if lane != self.home:
                mean = np.bincount(classes.column, load[classes.options, lane] * shares, minlength=kinds)
                times = self.ready + mean[classes.kind][::-1].cumsum()[::-1]
                if times.max() > limit:
                    yield lane, int(times.argmax())
        times = self.ready + np.bincount(classes.column, chain[classes.options] * shares, minlength=kinds)[classes.kind]
        yield from ((CHAIN, int(place)) for place in np.argsort(-times, kind="stable")[:CHAINS] if times[place] > limit)

    def solved(self) -> Relaxed:
        known = dict.fromkeys(self.begins())
        kept = [self.begin(number) for number in range(self.first.size - 1)]
        values: list[float] = []  # since columns were added
        for _ in range(ROUNDS):
            classes = self.classes(known, kept)
            shares, multipliers, value = _solved(
                classes.column, np.array([self.weight(*one, classes) for one in known]),
                np.array([self.constant(*one) for one in known]),
            )  # fmt: skip
            bound, prices, costs = self.certified(classes, list(known), multipliers)
            new = [one for one in self.violated(classes, shares, value) if one not in known]
            lower = value - bound > LOWERED * value
            values = [] if lower else [*values, value]
            stale = len(values) > STALE and value <= values[-1 - STALE] * (1 + VIOLATED)
            if not lower and (stale or not new):
                break
            known |= dict.fromkeys(new)
            if lower:
                self.add(kept, classes, costs)
        begin = np.searchsorted(classes.column, np.arange(classes.first.size + 1))
        choice = classes.options[apportioned(classes.kind, begin, shares)]
        above = tuple(cost - cost.min() for cost in costs)
        return Relaxed(certified(bound), choice, classes.kind, classes.first, above, prices, self.needs)

    def add(self, kept: list[np.ndarray], classes: _Classes, costs: list[np.ndarray]) -> None:
        """Let the cheapest option of every class be a column."""
        for number, cost in zip(self.set_of[classes.first], costs):
            option = self.first[number] + int(np.argmin(cost))
            if option not in kept[number]:
                kept[number] = np.append(kept[number], option)

    def certified(
        self, classes: _Classes, known: list[tuple[int, int]], multipliers: np.ndarray
    ) -> tuple[float, np.ndarray, list[np.ndarray]]:
        """The bound of multipliers over all options; their prices, see ``Relaxed``; what options cost each class."""
        factor = np.maximum(multipliers, 0.0)
        factor = factor / factor.sum() if factor.sum() > 0 else np.full(len(known), 1 / len(known))
        costs, total = [], 0.0
        prices = np.zeros((classes.first.size, self.lanes + 1))
        for (lane, tensor), part in zip(known, factor):
            total += part * self.constant(lane, tensor)
            if lane == CHAIN:
                prices[classes.kind[tensor], -1] += part
            else:
                prices[classes.first >= tensor, lane] += part
        for kind, number in enumerate(self.set_of[classes.first]):
            costs.append(self.needs[self.first[number] : self.first[number + 1]] @ prices[kind])
            total += int(classes.size[kind]) * float(costs[-1].min())
        return float(total), prices, costs


def _silent_solver() -> Any:
    """A solver that prints nothing: the first function that is called prints a banner, unless this option was set.

    That is ``enableCallbacks``, which ``highspy.Highs()`` calls itself, so the option must be set in between.
    """
    import highspy

    class Silent(highspy.Highs):
        def enableCallbacks(self) -> Any:  # noqa: N802
            self.setOptionValue("output_flag", False)
            return super().enableCallbacks()

    return Silent()


def _solved(column: np.ndarray, weights: np.ndarray, constants: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Solve the program by HiGHS: least T, shares of each class sum up to 1, T at least every inequality.

    Args:
        column: int64 (columns,), the class of each, rising; weights: float64 (inequalities, columns); constants.

    Returns:
        the shares, the multipliers of the inequalities, and T.
    """
    import highspy

    columns, kinds, none = column.size, int(column[-1]) + 1, highspy.kHighsInf
    solver = _silent_solver()
    for name, value in (("threads", 1), ("random_seed", 0), ("presolve", "off")):
        solver.setOptionValue(name, value)
    inequalities = kinds + np.arange(constants.size)  # the rows after those of the classes
    index = np.append(np.column_stack([column, np.tile(inequalities, (columns, 1))]), inequalities)
    values = np.append(np.column_stack([np.ones(columns), -weights.T]), np.ones(constants.size))
    start = np.append(np.arange(columns + 1) * (1 + constants.size), index.size)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = columns + 1, kinds + constants.size
    model.col_cost_ = np.append(np.zeros(columns), 1.0)
    model.col_lower_, model.col_upper_ = np.zeros(columns + 1), np.full(columns + 1, none)
    model.row_lower_ = np.append(np.ones(kinds), constants)
    model.row_upper_ = np.append(np.ones(kinds), np.full(constants.size, none))
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = start, index, values
    solver.passModel(model)
    solver.run()
    solution = solver.getSolution()
    shares, duals = np.array(solution.col_value), np.array(solution.row_dual)
    return shares[:-1], duals[kinds:], float(shares[-1])
