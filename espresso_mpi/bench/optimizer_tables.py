"""What the runs of ``bench optimizers`` come to: a row for each optimizer, learning rate and method, over the seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from .harness import resuming
from .harness.columns import Column, Table, Unit
from .optimizer_runs import Row
from .optimizer_ways import BASES, Choice


def rows_of(raw: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows from what a JSON file holds.

    Raises:
        ConfigError: an entry has other fields.
    """
    return resuming.rows_of(raw, Row)


def line(row: Row) -> str:
    """One run, as it ends."""
    name = f"{row.optimizer} {row.lr:g}, {row.method}, seed {row.seed}"
    if row.loss is None:
        return f"{name}: diverged at step {row.diverged_at} after {row.seconds:.0f} s"
    return f"{name}: {row.loss:.4f} bits/char, {row.seconds:.0f} s"


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed alone.

    Attributes:
        runs: one for each seed.
        changes: by how many percent the loss of each differs from that of fp32 with the same optimizer, learning rate
            and seed; runs without such a counterpart are left out.
    """

    runs: Sequence[Row]
    changes: Sequence[float]

    @property
    def first(self) -> Row:
        """The run that says what all have in common."""
        return self.runs[0]

    @property
    def losses(self) -> list[float]:
        """Those of the runs that did not diverge."""
        return [run.loss for run in self.runs if run.loss is not None]

    @property
    def loss(self) -> float | str:
        """The mean over the seeds."""
        return "diverged" if len(self.losses) < len(self.runs) else fmean(self.losses)

    @property
    def spread(self) -> float | None:
        """The largest loss less the smallest."""
        return max(self.losses) - min(self.losses) if len(self.losses) > 1 else None

    @property
    def change(self) -> float | None:
        """The mean of the changes."""
        return fmean(self.changes) if self.changes else None

    @property
    def range(self) -> str:
        """The least change and the largest."""
        return f"{min(self.changes):+.2f} to {max(self.changes):+.2f}" if len(self.changes) > 1 else ""

    @property
    def bytes_per_step(self) -> float:
        """What a rank sends in a step, on average."""
        return fmean(run.bytes_per_step for run in self.runs)

    @property
    def replicas(self) -> str:
        """Whether all ranks ended with the same weights."""
        return "identical" if all(run.replicas_identical for run in self.runs) else "DIFFER"


def groups(rows: Sequence[Row]) -> list[Group]:
    """The runs by optimizer, learning rate and method, sorted by the first two.

    The baseline is fp32 with the same learning rate, by the optimizer that synchronises in every step.
    """
    found: dict[tuple[str, float], dict[str, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: (row.optimizer, row.lr)):
        found.setdefault((row.optimizer, row.lr), {}).setdefault(row.method, []).append(row)
    made = []
    for (optimizer, lr), methods in found.items():
        base = BASES.get(Choice.of(optimizer).name, optimizer)
        baseline = {row.seed: row.loss for row in found.get((base, lr), {}).get("fp32", [])}
        itself = "fp32" if base == optimizer else None
        made += [Group(runs, [] if name == itself else changes(runs, baseline)) for name, runs in methods.items()]
    return made


def changes(rows: Sequence[Row], baseline: Mapping[int, float | None]) -> list[float]:
    """By how many percent each run's loss differs from fp32's of the same seed, where both have one."""
    pairs = [(row.loss, baseline.get(row.seed)) for row in rows]
    return [100 * (loss / other - 1) for loss, other in pairs if loss is not None and other is not None]


_LOSS = Unit("", 1, ".4f")

TABLE = Table(
    (
        Column("optimizer", lambda group, every: group.first.optimizer, left=True),
        Column("lr", lambda group, every: group.first.lr, Unit("", 1, "g")),
        Column("method", lambda group, every: group.first.method, left=True),
        Column("seeds", lambda group, every: len(group.runs)),
        Column("loss", "loss", _LOSS),
        Column("spread", "spread", _LOSS),
        Column("vs fp32 %", "change", Unit("", 1, "+.2f")),
        Column("over seeds", "range"),
        Column("KiB per step", "bytes_per_step", Unit("", 1 / 1024, ".1f")),
        Column("replicas", "replicas", left=True),
    )
)
