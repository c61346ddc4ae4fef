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

for all λ ≥ 0 that sum up to 1, and the right side is worked out anew over all options of the menus.

Tensors with one menu between which no inequality of the program tells are the same to it: they are a *class*, and share
one mixture. So the program has as many columns as classes have options, whatever the number of tensors; an inequality
that is added may cut classes in two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ._needs import apportioned, least, needs_of
from .bound import certified
from .problem import Problem

ROUNDS = 30
"""How often inequalities are added, at most."""
VIOLATED = 1e-5
"""Relative: by how much one must be violated to be added."""
CHAINS = 3
"""Inequalities of the third kind that are added in a round, at most."""

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
        above: by class, float64: by how much the bound rises, at least, if a tensor has each option of its menu.
        needs: float64 (rows, lanes + 1), see ``_needs``.
    """

    value: float
    choice: np.ndarray
    kind: np.ndarray
    first: np.ndarray
    above: tuple[np.ndarray, ...]
    needs: np.ndarray


def relaxed(problem: Problem) -> Relaxed:
    """Solve the relaxation of a problem, over all options of its menus."""
    return _Relaxation(problem).solved()


@dataclass(frozen=True)
class _Classes:
    """Tensors that are the same to some inequalities.

    Attributes:
        kind, first: as in ``Relaxed``; size: int64 (classes,), tensors of each.
        column: int64 (columns,), the class of each column of the program; rows: int64 (columns,), its option.
    """

    kind: np.ndarray
    first: np.ndarray
    size: np.ndarray
    column: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True)
class _Relaxation:
    problem: Problem

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every row: seconds on each lane, (rows, lanes), and of a segment, (rows,)."""
        return self.needs[:, :-1], self.needs[:, -1]

    @cached_property
    def needs(self) -> np.ndarray:
        """Of every row: both."""
        o, lanes = self.problem.timeline.options, self.problem.timeline.lanes
        return np.asarray(needs_of(o.lane, o.seconds, o.count, o.repeats, lanes.count))

    @cached_property
    def ready(self) -> np.ndarray:
        return np.cumsum(self.problem.timeline.backward)

    @cached_property
    def kept(self) -> list[np.ndarray]:
        """Of every menu the rows that no other one is below in loads and chain."""
        first = self.problem.first
        return [begin + least(self.needs[begin:end]) for begin, end in zip(first, first[1:])]

    def classes(self, known: Iterable[tuple[int, int]]) -> _Classes:
        """The classes to some inequalities, as (lane, tensor)."""
        problem, place = self.problem, np.arange(self.problem.tensors)
        begins = np.unique([tensor for lane, tensor in known if lane != CHAIN])
        chains = np.unique([tensor for lane, tensor in known if lane == CHAIN])
        part = np.searchsorted(begins, place, "right")
        part[chains] = begins.size + 1 + np.arange(chains.size)
        _, first, kind, size = np.unique(
            part * (problem.first.size - 1) + problem.menu, return_index=True, return_inverse=True, return_counts=True
        )
        rows = [self.kept[menu] for menu in problem.menu[first]]
        column = np.repeat(np.arange(first.size), [own.size for own in rows])
        return _Classes(kind, first, size, column, np.concatenate(rows))

    def weight(self, lane: int, tensor: int, classes: _Classes) -> np.ndarray:
        """What each column adds to an inequality: of a lane from a tensor on, or the chain of a tensor."""
        load, chain = self.tables
        if lane == CHAIN:
            return np.where(classes.column == classes.kind[tensor], chain[classes.rows], 0.0)
        inside = np.where(classes.first >= tensor, classes.size, 0)
        return load[classes.rows, lane] * inside[classes.column]

    def constant(self, lane: int, tensor: int) -> float:
        backward = self.problem.timeline.lanes.backward
        return float(self.ready[-1] if lane == backward else self.ready[tensor])

    def begins(self) -> list[tuple[int, int]]:
        """The inequalities to begin with, as (lane, tensor)."""
        lanes = self.problem.timeline.lanes
        return [*((lane, 0) for lane in range(lanes.count)), (CHAIN, self.problem.tensors - 1)]

    def violated(self, classes: _Classes, shares: np.ndarray, value: float) -> Iterator[tuple[int, int]]:
        """Of every lane the inequality that is violated most, and some of chains."""
        (load, chain), lanes, kinds = self.tables, self.problem.timeline.lanes, classes.first.size
        limit = value * (1 + VIOLATED) + 1e-15
        for lane in range(lanes.count):
            if lane != lanes.backward:
                mean = np.bincount(classes.column, load[classes.rows, lane] * shares, minlength=kinds)
                times = self.ready + mean[classes.kind][::-1].cumsum()[::-1]
                if times.max() > limit:
                    yield lane, int(times.argmax())
        times = self.ready + np.bincount(classes.column, chain[classes.rows] * shares, minlength=kinds)[classes.kind]
        yield from ((CHAIN, int(place)) for place in np.argsort(-times, kind="stable")[:CHAINS] if times[place] > limit)

    def solved(self) -> Relaxed:
        known = dict.fromkeys(self.begins())
        for _ in range(ROUNDS):
            classes = self.classes(known)
            shares, multipliers, value = _solved(
                classes.column, np.array([self.weight(*one, classes) for one in known]),
                np.array([self.constant(*one) for one in known]),
            )  # fmt: skip
            new = [one for one in self.violated(classes, shares, value) if one not in known]
            if not new:
                break
            known |= dict.fromkeys(new)
        return self.result(classes, shares, list(known)[: multipliers.size], multipliers)

    def result(
        self, classes: _Classes, shares: np.ndarray, known: list[tuple[int, int]], multipliers: np.ndarray
    ) -> Relaxed:
        problem, (load, chain) = self.problem, self.tables
        factor = np.maximum(multipliers, 0.0)
        factor = factor / factor.sum() if factor.sum() > 0 else np.full(len(known), 1 / len(known))
        above, total = [], 0.0
        by_lane = np.zeros((classes.first.size, problem.timeline.lanes.count))
        by_chain = np.zeros(classes.first.size)
        for (lane, tensor), part in zip(known, factor):
            total += part * self.constant(lane, tensor)
            if lane == CHAIN:
                by_chain[classes.kind[tensor]] += part
            else:
                by_lane[classes.first >= tensor, lane] += part
        for kind, tensor in enumerate(classes.first):
            here = slice(problem.rows(tensor).start, problem.rows(tensor).stop)
            cost = load[here] @ by_lane[kind] + by_chain[kind] * chain[here]
            total += int(classes.size[kind]) * float(cost.min())
            above.append(cost - cost.min())
        begin = np.searchsorted(classes.column, np.arange(classes.first.size + 1))
        choice = classes.rows[apportioned(classes.kind, begin, shares)]
        return Relaxed(certified(total), choice, classes.kind, classes.first, tuple(above), self.needs)


def _solved(column: np.ndarray, weights: np.ndarray, constants: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Solve the program by HiGHS: least T, shares of each class sum up to 1, T at least every inequality.

    Args:
        column: int64 (columns,), the class of each, rising; weights: float64 (inequalities, columns); constants.

    Returns:
        the shares, the multipliers of the inequalities, and T.
    """
    import highspy

    columns, kinds, none = column.size, int(column[-1]) + 1, highspy.kHighsInf
    solver: Any = highspy.Highs()
    for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0), ("presolve", "off")):
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
