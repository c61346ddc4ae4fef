"""What ``bench sync`` finds: its rows, their table for the terminal and for the report; and where compression loses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .harness import columns
from .harness.columns import BYTES, MS, RATIO, Column, Table, size_text
from .harness.rows import Timing
from .mpi_own import FP16, FP32, TUNED

MPI = "mpi-"
"""How the names of MPI's own rows begin."""


@dataclass(frozen=True, kw_only=True)
class Row(Timing):
    """One line of the result.

    Its method is a compressor, or ``mpi-allreduce-fp32`` / ``mpi-allreduce-fp16``, ending in ``-tuned`` where the
    quickest way was chosen that is not the library's own choice.

    Attributes:
        route: name or spec of the route; for MPI which way it went.
        wire_seconds, memory_seconds: least time for the busiest link and for the memory, see ``bound``.
        bound_seconds: the larger of the two. ratio: seconds / bound_seconds.
    """

    route: str
    wire_seconds: float | None = None
    memory_seconds: float | None = None
    bound_seconds: float | None = None
    ratio: float | None = None


def quickest(rows: Sequence[Row], nbytes: int, *methods: str) -> float | None:
    """Seconds of the quickest of these methods on this size; None where none was measured."""
    return min((row.seconds for row in rows if row.nbytes == nbytes and row.method in methods), default=None)


def _over(*methods: str) -> Callable[[Row, Sequence[Row]], float | None]:
    """How many times a row's time the quickest of these methods takes."""

    def value(row: Row, rows: Sequence[Row]) -> float | None:
        least = quickest(rows, row.nbytes, *methods)
        return None if least is None else least / row.seconds

    return value


def _way(row: Row, rows: Sequence[Row]) -> str:
    return (row.route or "MPI's own") if row.method.startswith(MPI) else f"`{row.route}`"


TABLE = Table(
    (
        columns.SIZE,
        columns.METHOD,
        *columns.TIMES,
        *columns.BANDWIDTHS,
        *columns.CPU,
        Column("x fp32", _over(FP32, FP32 + TUNED), RATIO),
        Column("x MPI fp16", _over(FP16, FP16 + TUNED), RATIO),
        Column("x our fp16", _over("fp16"), RATIO),
        Column("wire", "wire_seconds", MS),
        Column("memory", "memory_seconds", MS),
        Column("bound", "bound_seconds", MS),
        Column("time / bound", "ratio", RATIO),
        Column("bytes between nodes", "inter_bytes", BYTES),
        columns.WRONG,
        Column("route", _way, left=True),
    ),
    stacked=True,
)


def rates_text(rates: Mapping[str, Any]) -> str:
    """What link and memory reached, in words."""
    copy = f"copies or sums by all ranks of a node {min(rates['copy']) / 1e9:.1f} GB/s read and written"
    return copy if rates["link"] is None else f"a link carries {rates['link'] / 1e6:.1f} MB/s each way, {copy}"


# --- where compression loses ------------------------------------------------------------------------------------------

_AGAINST = {
    "fp32": ((FP32, FP32 + TUNED, "none"), ()),
    "fp16": ((FP16, FP16 + TUNED, "fp16"), ("none",)),
}
"""The ways whose quickest is to be beaten, and ours that are not compared with it."""


def losses(rows: Sequence[Row]) -> dict[str, str]:
    """Per baseline, in words: which of our methods took longer, size by size, and how many times."""
    found = {name: _slower(rows, methods, but) for name, (methods, but) in _AGAINST.items()}
    others = dict.fromkeys(row.method.partition(" (")[2].rstrip(")") for row in rows if row.method.endswith(")"))
    for library in others:
        methods = tuple(f"{kind} ({library})" for kind in (FP32, FP32 + TUNED, FP16, FP16 + TUNED))
        found[f"{library}, in a run of its own"] = _slower(rows, methods, ())
    return found


def _slower(rows: Sequence[Row], methods: Sequence[str], but: Sequence[str]) -> str:
    parts = []
    for nbytes in dict.fromkeys(row.nbytes for row in rows):
        least = quickest(rows, nbytes, *methods)
        ours = {
            row.method: row.seconds
            for row in rows
            if row.nbytes == nbytes and not row.method.startswith(MPI) and row.method not in but
        }
        slower = [f"{m} ({t / least:.2f} times)" for m, t in ours.items() if least is not None and t > least]
        parts += [f"{size_text(nbytes)}: {', '.join(slower)}"] if slower else []
    return "; ".join(parts) if parts else "nothing"
