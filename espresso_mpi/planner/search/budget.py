"""How much a plan loses by compression, in one number, and the limit that a search can keep.

The error of a tensor is E‖x - C(x)‖² / ‖x‖² of its compressor for normal values (``Compressor.gaussian_error``), once
for each encode on its route; that of a plan is the mean over its tensors, each weighted by its share of all elements.
So 0 is dense, and a payload that says nothing is 1 for each encode. It is a measure of one step: error feedback sends
later what was lost, so it is for comparing plans, not for predicting accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from espresso_mpi import compressors
from espresso_mpi.errors import ConfigError, PlanError
from espresso_mpi.types import Encode

from ..model.problem import Problem


@dataclass(frozen=True)
class ErrorBudget:
    """A limit on what compression may spoil.

    Attributes:
        limit: of the sum over tensors of the errors of their options.
        errors: float64 (options,), of every option of the problem; at least 0.
    """

    limit: float
    errors: np.ndarray


@dataclass(frozen=True)
class Budget:
    """An ``ErrorBudget`` that fits its problem; without one every error is 0."""

    limit: float
    errors: np.ndarray

    def sum(self, choice: np.ndarray) -> float:
        return float(self.errors[choice].sum())


def checked(problem: Problem, error: ErrorBudget | None) -> Budget:
    """The budget as arrays; without one all is within it.

    Raises:
        ConfigError: it is of another problem; PlanError: no choice is within it.
    """
    options = problem.method.size
    if error is None:
        return Budget(np.inf, np.zeros(options))
    errors = np.asarray(error.errors, np.float64)
    if errors.shape != (options,) or not (errors >= 0).all():
        raise ConfigError(
            f"error budget: errors of shape {errors.shape}; expected {options} numbers of at least 0, one an option"
        )
    least = np.minimum.reduceat(errors, problem.first[:-1])[problem.set_of].sum()
    if not least <= error.limit:
        raise PlanError(f"error budget: the limit is {error.limit:g}, but every choice sums up to at least {least:g}")
    return Budget(float(error.limit), errors)


def errors(problem: Problem) -> np.ndarray:
    """What each option adds to the error of a plan, float64 (options,); nan where a compressor's is not known."""
    total = sum(tensor.size for tensor in problem.workload.tensors)
    size = {int(number): tensor.size for number, tensor in zip(problem.set_of, problem.workload.tensors)}
    passes = np.array([sum(isinstance(step, Encode) for step in route.steps) for route in problem.routes], np.float64)
    found = np.empty(problem.method.size)
    for number, n in size.items():
        options = slice(int(problem.first[number]), int(problem.first[number + 1]))
        once = np.array([*(_once(text, n) for text in problem.compressors), 0.0])  # -1, dense, is the last
        found[options] = once[problem.method[options]] * passes[problem.route[options]] * (n / total)
    return found


def _once(spec: str, n: int) -> float:
    error = compressors.get(spec).at(None).gaussian_error(n)
    return np.nan if error is None else error


def total_error(problem: Problem, choice: np.ndarray) -> float | None:
    """The error of a plan; None where a compressor's is not known."""
    total = float(errors(problem)[choice].sum())
    return None if np.isnan(total) else total


def limited(problem: Problem, limit: float) -> ErrorBudget:
    """What a search must keep for the plan's error to be at most ``limit``.

    Raises:
        ConfigError: the error of a compressor is not known.
    """
    cost = errors(problem)
    unknown = sorted({problem.compressors[m] for m in problem.method[np.isnan(cost)]})
    if unknown:
        raise ConfigError(
            f"error_budget: the error of {', '.join(unknown)} is not known; expected compressors with gaussian_error: "
            f"leave these out, or the budget"
        )
    return ErrorBudget(limit, cost)
