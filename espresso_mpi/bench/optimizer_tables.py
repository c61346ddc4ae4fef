"""What the runs of ``bench optimizers`` come to: a line for each optimizer, learning rate and method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from .optimizer_runs import Row

HEADER = ["optimizer", "lr", "method", "seeds", "loss", "spread", "vs fp32 %", "over seeds", "KiB a step", "replicas"]


def rows_of(raw: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows from what a JSON file holds.

    Raises:
        TypeError: an entry has other fields.
    """
    return [Row(**{**row, "curve": tuple((step, loss) for step, loss in row["curve"])}) for row in raw]


def line(row: Row) -> str:
    """One run, as it ends."""
    name = f"{row.optimizer} {row.lr:g}, {row.method}, seed {row.seed}"
    if row.loss is None:
        return f"{name}: diverged at step {row.diverged_at} after {row.seconds:.0f} s"
    return f"{name}: {row.loss:.4f} bits/char, {row.seconds:.0f} s"


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells. *spread* is the largest loss less the smallest, over the seeds; *vs fp32* compares runs of the
    same optimizer, learning rate and seed: their mean, and *over seeds* the least and the most."""
    groups: dict[tuple[str, float], dict[str, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: (row.optimizer, row.lr)):
        groups.setdefault((row.optimizer, row.lr), {}).setdefault(row.method, []).append(row)
    lines = []
    for methods in groups.values():
        baseline = {row.seed: row.loss for row in methods.get("fp32", [])}
        lines += [_cells(own, baseline) for own in methods.values()]
    return HEADER, lines


def changes(rows: Sequence[Row], baseline: Mapping[int, float | None]) -> list[float]:
    """By how many percent each run's loss differs from fp32's of the same seed, where both have one."""
    pairs = [(row.loss, baseline.get(row.seed)) for row in rows]
    return [100 * (loss / other - 1) for loss, other in pairs if loss is not None and other is not None]


def _cells(rows: Sequence[Row], baseline: Mapping[int, float | None]) -> list[str]:
    first, losses = rows[0], [row.loss for row in rows if row.loss is not None]
    change = [] if first.method == "fp32" else changes(rows, baseline)
    return [
        first.optimizer,
        f"{first.lr:g}",
        first.method,
        str(len(rows)),
        "diverged" if len(losses) < len(rows) else f"{fmean(losses):.4f}",
        f"{max(losses) - min(losses):.4f}" if len(losses) > 1 else "",
        f"{fmean(change):+.2f}" if change else "",
        f"{min(change):+.2f} to {max(change):+.2f}" if len(change) > 1 else "",
        f"{fmean(row.bytes_per_step for row in rows) / 1024:.1f}",
        "identical" if all(row.replicas_identical for row in rows) else "DIFFER",
    ]
