"""What ``bench collectives`` finds: its rows, their table for the terminal and for the report, and their picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .harness import columns
from .harness.columns import BYTES, GB_PER_S, RATIO, US, Column, Table
from .harness.rows import Timing


@dataclass(frozen=True, kw_only=True)
class Row(Timing):
    """One line of the result: a collective by this library, and by MPI in the same run.

    Its method is a compressor, or ``none``; ``nbytes`` are those of the largest array that a rank has.

    Attributes:
        collective: name of the session's method; ``alltoallv`` is alltoall with unequal parts.
        dtype, op: element type and operator; no operator where nothing is reduced.
        in_place: whether the result replaces the array.
        mpi_seconds: median of MPI's own collective, which is dense; None where MPI has none for these elements.
        ratio: seconds / mpi_seconds.
        best, mpi_best: the least times, which a busy node disturbs least.
        mpi_wrong: MPI's wrong elements, over all ranks.
        expected_bytes: what the sizes of the payloads say of ``wire_bytes``; None for dense methods.
    """

    collective: str
    dtype: str
    op: str = ""
    in_place: bool = False
    mpi_seconds: float | None = None
    ratio: float | None = None
    best: float | None = None
    mpi_best: float | None = None
    mpi_wrong: int | None = None
    expected_bytes: int | None = None


def _best_ratio(row: Row, rows: Sequence[Row]) -> float | None:
    """Of the least times."""
    return None if row.best is None or row.mpi_best is None else row.best / row.mpi_best


def _excess(row: Row, rows: Sequence[Row]) -> int | None:
    """Bytes sent beyond those expected."""
    known = row.wire_bytes is not None and row.expected_bytes is not None
    return row.wire_bytes - row.expected_bytes if known else None  # type: ignore[operator]


TABLE = Table(
    (
        Column("collective", "collective", left=True),
        columns.SIZE,
        columns.METHOD,
        Column("median", "seconds", US),
        Column("p99", "p99", US),
        Column("MPI", "mpi_seconds", US),
        Column("time / MPI", "ratio", RATIO),
        Column("best / best", _best_ratio, RATIO),
        Column("algbw", "algbw", GB_PER_S),
        Column("busbw", "busbw", GB_PER_S),
        columns.WRONG,
        Column("MPI wrong", "mpi_wrong"),
        Column("sent bytes", "wire_bytes", BYTES),
        Column("beyond expected", _excess),
    ),
    stacked=True,
)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: time against size, a panel for each collective, MPI's as a dashed line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in dict.fromkeys(row.collective for row in rows) if name != "barrier"]
    across = min(3, max(1, len(names)))
    down = max(1, -(-len(names) // across))
    figure = Figure(figsize=(4 * across, 3.2 * down), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes, name in zip(panels, names):
        _panel(axes, [row for row in rows if row.collective == name])
        axes.set(title=name, xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=120, format="png")


def _panel(axes: Any, rows: Sequence[Row]) -> None:
    for number, method in enumerate(dict.fromkeys(row.method for row in rows)):
        own = [row for row in rows if row.method == method]
        axes.plot([r.nbytes for r in own], [r.seconds * 1e6 for r in own], "o-", color=f"C{number}", markersize=3,
                  label=method)  # fmt: skip
    known = {row.nbytes: row.mpi_seconds for row in rows if row.mpi_seconds is not None}
    axes.plot(list(known), [t * 1e6 for t in known.values()], "k--", linewidth=1, label="MPI")
