"""Turns training runs into the rows, lines and tables that people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from .text import Corpus
from .training import Point, Run, Settings

TARGET_MARGIN = 1.02
_WIDTH = 120
"""Columns; the table takes about 100 of them."""


@dataclass(frozen=True)
class Row:
    """One method's result.

    ``loss`` is in bits a character on the validation text, ``loss_vs_fp32`` in percent. ``seconds`` is the
    training clock; ``seconds_to_target`` is its reading at the first validation that reached the target, None
    if none did. ``step_seconds`` = ``compute_seconds`` + ``sync_seconds``, where compute is the slowest
    rank's in each step, so that waiting for it counts as compute; where ranks share cores, waiting for a core
    counts as sync. ``bytes_per_step`` is what one rank sends to others, by level, on average over ranks and
    steps.
    """

    method: str
    compressor: str
    feedback: bool
    loss: float
    loss_vs_fp32: float | None
    steps_to_target: int | None
    seconds_to_target: float | None
    seconds: float
    step_seconds: float
    compute_seconds: float
    sync_seconds: float
    bytes_per_step: Mapping[str, float]
    replicas_identical: bool
    diverged_at: int | None


def target(runs: Sequence[Run], given: float | None) -> float | None:
    """The loss to reach: the one given, else 2 % above fp32's at the end; None without either."""
    baseline = _baseline(runs)
    if given is not None or baseline is None:
        return given
    return TARGET_MARGIN * baseline.loss


def rows(runs: Sequence[Run], target_loss: float | None) -> list[Row]:
    """One row a run."""
    baseline, goal = _baseline(runs), target(runs, target_loss)
    return [_row(run, baseline, goal) for run in runs]


def heading(corpus: Corpus, settings: Settings, ranks: int) -> str:
    """What is about to run."""
    return (
        f"Text: {corpus.characters} characters, SHA-256 {corpus.sha256}\n"
        f"Model: {settings.shape.parameters} parameters, {settings.shape.context} characters of context; "
        f"{ranks} ranks x batch {settings.batch}, {settings.steps} steps, SGD, "
        f"momentum {settings.momentum:g}, peak rate {settings.rate:g}, seed {settings.seed}"
    )


def line(run: Run) -> str:
    """One run, as it ends."""
    if run.diverged_at is not None:
        return f"{run.method.label}: diverged at step {run.diverged_at} after {run.seconds:.1f} s"
    return f"{run.method.label}: {run.loss:.4f} bits/char after {run.steps} steps, {run.seconds:.1f} s"


def print_table(table_rows: Sequence[Row], goal: float | None) -> None:
    """Print to stdout, without colours: mpirun passes everything off as a terminal, redirected or not."""
    console = Console(width=_WIDTH, color_system=None, highlight=False)
    if goal is not None:
        console.print(f"\nTarget: {goal:.4f} bits/char")
    console.print(_table(table_rows))
    console.print(
        "Loss: validation, bits a character. Sync: what the slowest rank's compute leaves of a step.\n"
        "Sent: KiB a step and rank, inside a node and between nodes.",
        soft_wrap=True,
    )


def _baseline(runs: Sequence[Run]) -> Run | None:
    return next((run for run in runs if run.method.compressor == "none"), None)


def _row(run: Run, baseline: Run | None, goal: float | None) -> Row:
    reached = _first_at_or_below(run, goal)
    step_seconds, sent = run.seconds / run.steps, run.curve[-1].bytes_by_level
    return Row(
        method=run.method.label,
        compressor=run.method.compressor,
        feedback=run.method.feedback,
        loss=run.loss,
        loss_vs_fp32=None if baseline is None else 100 * (run.loss / baseline.loss - 1),
        steps_to_target=reached.step if reached else None,
        seconds_to_target=reached.seconds if reached else None,
        seconds=run.seconds,
        step_seconds=step_seconds,
        compute_seconds=run.compute_seconds,
        sync_seconds=step_seconds - run.compute_seconds,
        bytes_per_step={level: n / (run.steps * run.ranks) for level, n in sent.items()},
        replicas_identical=run.replicas_identical,
        diverged_at=run.diverged_at,
    )


def _first_at_or_below(run: Run, goal: float | None) -> Point | None:
    if goal is None:
        return None
    return next((point for point in run.curve if point.loss <= goal), None)


def _table(table_rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True, vertical="bottom")
    for name in _NUMBERS:
        table.add_column(name, justify="right", vertical="bottom")
    table.add_column("replicas", vertical="bottom")
    for row in table_rows:
        table.add_row(*_cells(row))
    return table


_NUMBERS = (
    "loss",
    "vs fp32",
    "steps to\ntarget",
    "seconds\nto target",
    "ms a\nstep",
    "compute",
    "sync",
    "sent\nintra",
    "sent\ninter",
)


def _cells(row: Row) -> list[str]:
    diverged = row.diverged_at is not None
    change = "–" if row.loss_vs_fp32 is None or diverged else f"{row.loss_vs_fp32:+.2f} %"
    return [
        row.method.replace(", ", ",\n"),
        f"diverged\nat {row.diverged_at}" if diverged else f"{row.loss:.4f}",
        change,
        "–" if row.steps_to_target is None else str(row.steps_to_target),
        "–" if row.seconds_to_target is None else f"{row.seconds_to_target:.1f}",
        *(f"{1e3 * seconds:.2f}" for seconds in (row.step_seconds, row.compute_seconds, row.sync_seconds)),
        *(f"{row.bytes_per_step.get(level, 0) / 1024:.1f}" for level in ("intra", "inter")),
        "identical" if row.replicas_identical else "DIFFER",
    ]
