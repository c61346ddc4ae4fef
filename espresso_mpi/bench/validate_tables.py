"""Tables of what ``bench validate`` found, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .harness import columns
from .harness.columns import MS, PERCENT, RATIO, Column, Table


@dataclass(frozen=True)
class Row:
    """One method's step, predicted and measured.

    Attributes:
        tensors, calls: the case: how many tensors a step has, and whether they are pushed as they come (``push``) or
            synchronised at the end (``sync``).
        predicted, measured: seconds of a step, measured the median; p90: of the measured ones.
        recorded, computing: seconds until all gradients are there, in the workload and in the measured steps (median).
        chosen: this is what ``auto`` chose. ratio_to_best: measured over the quickest method's of the case.
        plan: what travelled how, in words.
    """

    tensors: int
    calls: str
    method: str
    predicted: float
    measured: float
    p90: float
    recorded: float
    computing: float
    chosen: bool
    ratio_to_best: float
    plan: str = ""


def error(row: Row) -> float:
    """How far the prediction is above what was measured, as a share of that."""
    return row.predicted / row.measured - 1


TABLE = Table(
    (
        Column("tensors", "tensors"),
        Column("calls", "calls", left=True),
        columns.METHOD,
        Column("predicted", "predicted", MS),
        Column("measured", "measured", MS),
        Column("p90", "p90", MS),
        Column("error", lambda row, rows: error(row), PERCENT),
        Column("time / best", "ratio_to_best", RATIO),
        Column("chosen", lambda row, rows: "chosen" if row.chosen else "", left=True),
        Column("plan", "plan", left=True),
    )
)


def by_case(rows: Sequence[Row]) -> dict[tuple[int, str], list[Row]]:
    """The rows of every case, in their order."""
    found: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.tensors, row.calls), []).append(row)
    return found


@dataclass(frozen=True)
class Case:
    """The rows of a case, or of all.

    Attributes:
        tensors, calls: which case.
    """

    tensors: int | str
    calls: str
    rows: Sequence[Row]

    @property
    def errors(self) -> np.ndarray:
        """Those of the predictions, with their signs."""
        return np.array([error(row) for row in self.rows])

    @property
    def bias(self) -> float:
        """The median of the errors with their signs: what all predictions of a case have in common."""
        return float(np.median(self.errors))

    @property
    def computing(self) -> float:
        """How long it took until all gradients were there, over the recorded time."""
        return float(np.median([row.computing / row.recorded for row in self.rows]))

    @property
    def auto(self) -> float | None:
        """What ``plan="auto"`` chose, over the quickest method."""
        chosen = [row.ratio_to_best for row in self.rows if row.chosen]
        return float(np.median(chosen)) if chosen else None

    @property
    def best(self) -> str:
        """The quickest method, where there is one."""
        best = [row.method for row in self.rows if row.ratio_to_best == 1]
        return best[0] if len(best) == 1 else ""


CASES = Table(
    (
        Column("tensors", "tensors", left=True),
        Column("calls", "calls", left=True),
        Column("predictions", lambda case, cases: len(case.rows)),
        Column("median error", lambda case, cases: float(np.median(np.abs(case.errors))), PERCENT),
        Column("largest", lambda case, cases: float(np.abs(case.errors).max()), PERCENT),
        Column("bias", "bias", PERCENT),
        Column("computing", "computing", RATIO),
        Column("auto / best", "auto", RATIO),
        Column("best", "best", left=True),
    )
)


def cases(rows: Sequence[Row]) -> list[Case]:
    """Every case, and all of them."""
    return [*(Case(*key, own) for key, own in by_case(rows).items()), Case("all", "", rows)]
