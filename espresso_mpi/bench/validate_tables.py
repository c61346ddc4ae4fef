"""Tables of what ``bench validate`` found, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..files.output import number
from .harness import columns
from .harness.columns import MS, RATIO, Column, Table
from .planner.rows import Validation
from .planner.tables import Lines, percent

CASES_HEADER = ["tensors", "calls", "predictions", "median error", "largest", "bias", "computing", "auto / best",
                "best"]  # fmt: skip


def error(row: Validation) -> float:
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
        Column("error", lambda row, rows: percent(error(row))),
        Column("time / best", "ratio_to_best", RATIO),
        Column("chosen", lambda row, rows: "chosen" if row.chosen else "", left=True),
        Column("plan", "plan", left=True),
    )
)


def by_case(rows: Sequence[Validation]) -> dict[tuple[int, str], list[Validation]]:
    """The rows of every case, in their order."""
    found: dict[tuple[int, str], list[Validation]] = {}
    for row in rows:
        found.setdefault((row.tensors, row.calls), []).append(row)
    return found


def cases(rows: Sequence[Validation]) -> Lines:
    """One line a case, and one for all of them.

    *bias* is the median of the errors with their signs: what all predictions of a case have in common. *computing* is
    how long it took until all gradients were there, over the recorded time.
    """
    found = [[str(tensors), calls, *_summary(own)] for (tensors, calls), own in by_case(rows).items()]
    return [*found, ["all", "", *_summary(rows)]]


def _summary(rows: Sequence[Validation]) -> list[str]:
    errors = [error(row) for row in rows]
    sizes = np.abs(errors)
    chosen = [row.ratio_to_best for row in rows if row.chosen]
    best = [row.method for row in rows if row.ratio_to_best == 1]
    return [str(len(rows)), percent(float(np.median(sizes))), percent(float(sizes.max())),
            percent(float(np.median(errors))), number(float(np.median([r.computing / r.recorded for r in rows]))),
            number(float(np.median(chosen)) if chosen else None),
            best[0] if len(best) == 1 else ""]  # fmt: skip
