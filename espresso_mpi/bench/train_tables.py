"""What ``bench train`` finds: its rows, their table for the terminal and for the report, and what is said of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .harness import columns
from .harness.columns import Column, Table, Unit
from .text import Corpus
from .training import Point, Run, TrainingSettings

TARGET_MARGIN = 1.02


@dataclass(frozen=True)
class Row:
    """One method's result.

    Attributes:
        loss: bits per character on the validation text at the end; None if the run diverged in step ``diverged_at``.
        loss_vs_fp32: by how many percent it is above that of fp32; None where one of them is not known.
        steps_to_target, seconds_to_target: at the first validation that reached the target; None if none did.
        seconds: of the training clock.
        step_seconds: ``compute_seconds`` + ``sync_seconds``. Compute is that of the slowest rank in each step, so the
            time that others wait for it counts as compute. Where ranks share cores, waiting for a core counts as sync.
        bytes_per_step: what a rank sends to others, by level; the mean over ranks and steps.
    """

    method: str
    compressor: str
    feedback: bool
    loss: float | None
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


def _sent(level: str) -> Callable[[Row, Sequence[Row]], float]:
    return lambda row, rows: row.bytes_per_step.get(level, 0)


def _loss(row: Row, rows: Sequence[Row]) -> float | str | None:
    return row.loss if row.diverged_at is None else f"diverged at {row.diverged_at}"


_SECONDS = Unit("", 1, ".1f")
_STEP = Unit("ms", 1e3, ".1f")

TABLE = Table(
    (
        columns.METHOD,
        Column("loss", _loss, Unit("", 1, ".4f")),
        Column("vs fp32 %", "loss_vs_fp32", Unit("", 1, "+.2f")),
        Column("s to target", "seconds_to_target", _SECONDS),
        Column("compute", "compute_seconds", _STEP),
        Column("sync", "sync_seconds", _STEP),
        Column("bytes in node", _sent("intra"), Unit("", 1, ",.0f")),
        Column("bytes between", _sent("inter"), Unit("", 1, ",.0f")),
        Column("identical", lambda row, rows: "yes" if row.replicas_identical else "NO"),
    )
)


def target(runs: Sequence[Run], given: float | None) -> float | None:
    """The loss to reach: the one given, else 2 % above fp32's at the end; None without either."""
    baseline = _baseline(runs)
    if given is not None or baseline is None or baseline.diverged_at is not None:
        return given
    return TARGET_MARGIN * baseline.loss


def rows(runs: Sequence[Run], target_loss: float | None) -> list[Row]:
    """One row a run."""
    baseline, goal = _baseline(runs), target(runs, target_loss)
    return [_row(run, baseline, goal) for run in runs]


def heading(corpus: Corpus, settings: TrainingSettings, ranks: int) -> str:
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


def _baseline(runs: Sequence[Run]) -> Run | None:
    return next((run for run in runs if run.method.compressor == "none"), None)


def _row(run: Run, baseline: Run | None, goal: float | None) -> Row:
    reached = _first_at_or_below(run, goal)
    known = run.diverged_at is None
    step_seconds, sent = run.seconds / run.steps, run.curve[-1].bytes_by_level
    return Row(
        method=run.method.label,
        compressor=run.method.compressor,
        feedback=run.method.feedback,
        loss=run.loss if known else None,
        loss_vs_fp32=_over(run, baseline) if known else None,
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


def _over(run: Run, baseline: Run | None) -> float | None:
    """Percent by which a run's loss is above the baseline's, if that did not diverge."""
    if baseline is None or baseline.diverged_at is not None:
        return None
    return 100 * (run.loss / baseline.loss - 1)


def _first_at_or_below(run: Run, goal: float | None) -> Point | None:
    if goal is None:
        return None
    return next((point for point in run.curve if point.loss <= goal), None)
