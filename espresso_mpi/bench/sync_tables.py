"""What ``bench sync`` found, as lines for the terminal and for the report; and where compression loses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..files.output import milliseconds, number
from .mpi_own import FP16, FP32, TUNED

Row = Mapping[str, Any]
"""The fields of ``sync.Row``."""

MPI = "mpi-"
"""How the names of MPI's own rows begin."""

HEADER = ["size", "method", "median ms", "p99 ms", "x fp32", "x MPI fp16", "x our fp16", "wire ms", "memory ms",
          "bound ms", "time / bound", "bytes between machines", "wrong", "route"]  # fmt: skip


def size_text(nbytes: int) -> str:
    """A size as people write it."""
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KiB"


def quickest(rows: Sequence[Row], nbytes: int, *methods: str) -> float | None:
    """Seconds of the quickest of these methods on this size; None where none was measured."""
    return min((row["seconds"] for row in rows if row["nbytes"] == nbytes and row["method"] in methods), default=None)


def line(row: Row, rows: Sequence[Row]) -> list[str]:
    """A line of the table with this header; ``rows`` are all of the same run."""
    rivals = [(FP32, FP32 + TUNED), (FP16, FP16 + TUNED), ("fp16",)]
    least = [quickest(rows, row["nbytes"], *methods) for methods in rivals]
    parts = [row.get(key) for key in ("wire_seconds", "memory_seconds", "bound_seconds")]
    route = row["route"]
    return [
        size_text(row["nbytes"]),
        row["method"],
        *map(milliseconds, (row["seconds"], row["p99"])),
        *(number(None if seconds is None else seconds / row["seconds"]) for seconds in least),
        *map(milliseconds, parts),
        number(row.get("ratio")),
        "" if row["inter_bytes"] is None else f"{row['inter_bytes']:,}",
        str(row["wrong"]),
        (route or "MPI's own") if row["method"].startswith(MPI) else f"`{route}`",
    ]


# --- where compression loses ------------------------------------------------------------------------------------------

_AGAINST = {
    "fp32": ((FP32, FP32 + TUNED, "none"), ()),
    "fp16": ((FP16, FP16 + TUNED, "fp16"), ("none",)),
}
"""The ways whose quickest is to be beaten, and ours that are not compared with it."""


def losses(rows: Sequence[Row]) -> dict[str, str]:
    """Per baseline, in words: which of our methods took longer, size by size, and how many times."""
    found = {name: _slower(rows, methods, but) for name, (methods, but) in _AGAINST.items()}
    others = dict.fromkeys(row["method"].partition(" (")[2].rstrip(")") for row in rows if row["method"].endswith(")"))
    for library in others:
        methods = tuple(f"{kind} ({library})" for kind in (FP32, FP32 + TUNED, FP16, FP16 + TUNED))
        found[f"{library}, in a run of its own"] = _slower(rows, methods, ())
    return found


def _slower(rows: Sequence[Row], methods: Sequence[str], but: Sequence[str]) -> str:
    parts = []
    for nbytes in dict.fromkeys(row["nbytes"] for row in rows):
        least = quickest(rows, nbytes, *methods)
        ours = {
            row["method"]: row["seconds"]
            for row in rows
            if row["nbytes"] == nbytes and not row["method"].startswith(MPI) and row["method"] not in but
        }
        slower = [f"{m} ({t / least:.2f} times)" for m, t in ours.items() if least is not None and t > least]
        parts += [f"{size_text(nbytes)}: {', '.join(slower)}"] if slower else []
    return "; ".join(parts) if parts else "nothing"
