"""Several runs of one benchmark as one result: machines change from run to run, and a ratio of one run says little."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]

_MEASURED = {"sync": "seconds", "tensors": "seconds", "overlap": "step"}
"""The benchmarks of which several runs may be given, and the time of their rows by which runs are compared."""


def of_runs(results: Sequence[Result], place: Callable[[Result], Hashable]) -> list[Result]:
    """The results, where runs of one benchmark at one place with the same rows are one.

    Each of its rows is that of the run with the median time; with an even number of runs, the slower one in the middle.

    Args:
        results: each has "kind" and "rows"; ``place``: equal where runs may be compared.

    Returns:
        In the order of the first run of each. Those of several runs have their number as "runs", and the times of cache
        lines of all of them.
    """
    found: dict[Hashable, list[Result]] = {}
    for number, result in enumerate(results):
        rows = _rows_of(result)
        key: Hashable = number if rows is None else (result["kind"], place(result), rows)
        found.setdefault(key, []).append(result)
    return [runs[0] if len(runs) == 1 else _median(runs) for runs in found.values()]


def _rows_of(result: Result) -> tuple[str, ...] | None:
    """What the rows of a result are; None if it stands for itself: of another benchmark, or damaged."""
    time, rows = _MEASURED.get(result["kind"]), result["rows"]
    if time is None or not all(isinstance(row.get(time), float) and {"nbytes", "method"} <= row.keys() for row in rows):
        return None
    return tuple(sorted(map(_name, rows)))


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['nbytes']} {row['method']}"


def _median(runs: Sequence[Result]) -> Result:
    """Of runs of the same rows."""
    time, by_name = _MEASURED[runs[0]["kind"]], [{_name(row): row for row in run["rows"]} for run in runs]
    rows = [
        sorted((of_run[_name(row)] for of_run in by_name), key=lambda one: one[time])[len(runs) // 2]
        for row in runs[0]["rows"]
    ]
    lines = [time for run in runs for time in run.get("cache_line_ns") or () if time is not None]
    return {**runs[0], "rows": rows, "runs": len(runs), "cache_line_ns": lines}
