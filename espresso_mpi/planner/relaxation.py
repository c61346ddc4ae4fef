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
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .bound import certified, loads
from .problem import Problem, _front

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
        choice: int64 (tensors,), of every mixture the option with the largest share.
        above: by tensor, float64: by how much the bound rises, at least, if the tensor has each option of its menu.
    """

    value: float
    choice: np.ndarray
    above: tuple[np.ndarray, ...]


def relaxed(problem: Problem) -> Relaxed:
    """Solve the relaxation of a problem, over all options of its menus."""
    return _Relaxation(problem).solved()


@dataclass(frozen=True)
class _Relaxation:
    problem: Problem

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every row: seconds on each lane, (rows, lanes), and of a segment, (rows,)."""
        return loads(self.problem)

    @cached_property
    def ready(self) -> np.ndarray:
        return np.cumsum(self.problem.timeline.backward)

    @cached_property
    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Tensors and rows, int64 (columns,): those that no other row of the menu is below in loads and chain."""
        problem, (load, chain) = self.problem, self.tables
        kept = []
        for begin, end in zip(problem.first, problem.first[1:]):
            values = np.ascontiguousarray(np.column_stack([load[begin:end], chain[begin:end]]))
            kept.append(begin + np.sort(_front(values, np.argsort(values.sum(axis=1), kind="stable"))))
        tensors = np.repeat(np.arange(problem.tensors), [kept[menu].size for menu in problem.menu])
        return tensors, np.concatenate([kept[menu] for menu in problem.menu])

    def weight(self, lane: int, tensor: int) -> np.ndarray:
        """What each column adds to an inequality: of a lane from a tensor on, or the chain of a tensor."""
        tensors, rows = self.columns
        load, chain = self.tables
        if lane == CHAIN:
            return np.where(tensors == tensor, chain[rows], 0.0)
        return np.where(tensors >= tensor, load[rows, lane], 0.0)

    def constant(self, lane: int, tensor: int) -> float:
        backward = self.problem.timeline.lanes.backward
        return float(self.ready[-1] if lane == backward else self.ready[tensor])

    def begins(self) -> list[tuple[int, int]]:
        """The inequalities to begin with, as (lane, tensor)."""
        lanes = self.problem.timeline.lanes
        return [*((lane, 0) for lane in range(lanes.count)), (CHAIN, self.problem.tensors - 1)]

    def violated(self, shares: np.ndarray, value: float) -> Iterator[tuple[int, int]]:
        """Of every lane the inequality that is violated most, and some of chains."""
        tensors, rows = self.columns
        (load, chain), lanes, size = self.tables, self.problem.timeline.lanes, self.problem.tensors
        least = value * (1 + VIOLATED) + 1e-15
        for lane in range(lanes.count):
            if lane != lanes.backward:
                here = np.bincount(tensors, load[rows, lane] * shares, minlength=size)
                times = self.ready + here[::-1].cumsum()[::-1]
                if times.max() > least:
                    yield lane, int(times.argmax())
        times = self.ready + np.bincount(tensors, chain[rows] * shares, minlength=size)
        yield from ((CHAIN, int(place)) for place in np.argsort(-times, kind="stable")[:CHAINS] if times[place] > least)

    def solved(self) -> Relaxed:
        program = _Program(*self.columns, self.problem.tensors)
        known: dict[tuple[int, int], None] = {}
        new = self.begins()
        for _ in range(ROUNDS):
            for one in new:
                known[one] = None
                program.add(self.weight(*one), self.constant(*one))
            shares, multipliers, value = program.solved()
            new = [one for one in self.violated(shares, value) if one not in known]
            if not new:
                break
        return self.result(shares, list(known), multipliers)

    def result(self, shares: np.ndarray, known: list[tuple[int, int]], multipliers: np.ndarray) -> Relaxed:
        problem, (load, chain) = self.problem, self.tables
        factor = np.maximum(multipliers, 0.0)
        factor = factor / factor.sum() if factor.sum() > 0 else np.full(len(known), 1 / len(known))
        by_lane = np.zeros((problem.tensors + 1, problem.timeline.lanes.count))
        by_chain, total = np.zeros(problem.tensors), 0.0
        for (lane, tensor), part in zip(known, factor):
            total += part * self.constant(lane, tensor)
            if lane == CHAIN:
                by_chain[tensor] += part
            else:
                by_lane[tensor, lane] += part
        by_lane = by_lane.cumsum(axis=0)
        above = []
        for tensor in range(problem.tensors):
            here = slice(problem.rows(tensor).start, problem.rows(tensor).stop)
            cost = load[here] @ by_lane[tensor] + by_chain[tensor] * chain[here]
            total += float(cost.min())
            above.append(cost - cost.min())
        tensors, rows = self.columns
        order = np.lexsort((-np.arange(shares.size), shares))  # the largest share last, of equal ones the first
        choice = np.empty(problem.tensors, np.int64)
        choice[tensors[order]] = rows[order]
        return Relaxed(certified(total), choice, tuple(above))


class _Program:
    """The linear program: least T, shares of each tensor sum up to 1, T at least every inequality. By HiGHS."""

    def __init__(self, tensors: np.ndarray, rows: np.ndarray, size: int) -> None:
        import highspy

        self._none, self._size, self._columns = highspy.kHighsInf, size, rows.size
        self._solver: Any = highspy.Highs()
        for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
            self._solver.setOptionValue(name, value)
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = rows.size + 1, size
        model.col_cost_ = np.append(np.zeros(rows.size), 1.0)
        model.col_lower_, model.col_upper_ = np.zeros(rows.size + 1), np.full(rows.size + 1, self._none)
        model.row_lower_, model.row_upper_ = np.ones(size), np.ones(size)
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_ = np.append(np.arange(rows.size + 1), rows.size).astype(np.int32)
        model.a_matrix_.index_, model.a_matrix_.value_ = tensors.astype(np.int32), np.ones(rows.size)
        self._solver.passModel(model)

    def add(self, weight: np.ndarray, constant: float) -> None:
        """T is at least the constant and the shares' weights."""
        used = np.flatnonzero(weight)
        index, value = np.append(used, self._columns).astype(np.int32), np.append(-weight[used], 1.0)
        self._solver.addRow(constant, self._none, index.size, index, value)

    def solved(self) -> tuple[np.ndarray, np.ndarray, float]:
        """The shares, the multipliers of the inequalities in their order, and T."""
        self._solver.run()
        solution = self._solver.getSolution()
        return (np.array(solution.col_value[:-1]), np.array(solution.row_dual[self._size :]),
                float(solution.col_value[-1]))  # fmt: skip
