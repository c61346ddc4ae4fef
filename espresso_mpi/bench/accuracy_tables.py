"""What the runs of ``bench accuracy`` come to: seconds and megabytes to the target, by way, over the seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

from .accuracy_runs import AccuracySettings, Run, dense_of
from .harness.columns import MB, MS, Column, Table, Unit
from .harness.resuming import rows_of

FP32 = ("gloo:none", "gradsync:none", "push:none", "sync:none")
"""Ways whose loss is the target; the first of them that was run counts."""

FP16 = ("gloo:fp16", "gradsync:fp16", "push:fp16", "sync:fp16")
"""The fair baseline, in the same order."""


@dataclass(frozen=True)
class Reached:
    """The state at the first validation with the target or less, the mean over the seeds."""

    step: int
    seconds: float
    sent: float


@dataclass(frozen=True)
class Group:
    """Runs of one way, which differ in the seed alone.

    Attributes:
        runs: one for each seed.
        target: the loss to reach; None where there is no run in fp32.
        baseline: the final loss of fp32, the mean over its seeds.
        dense: the first steps, in which the way's optimizer synchronises gradients; 0 of others, None: not known.
    """

    runs: Sequence[Run]
    target: float | None
    baseline: float | None
    dense: int | None = None

    @property
    def way(self) -> str:
        """Its spec."""
        return self.runs[0].way

    @property
    def losses(self) -> list[float]:
        """Final ones of the runs that did not diverge."""
        return [run.loss for run in self.runs if run.loss is not None]

    @property
    def diverged(self) -> bool:
        """Whether one of the runs did."""
        return len(self.losses) < len(self.runs)

    @property
    def loss(self) -> float | str:
        """The final loss, the mean over the seeds."""
        return "diverged" if self.diverged else fmean(self.losses)

    @property
    def spread(self) -> float | None:
        """The largest final loss less the smallest."""
        return max(self.losses) - min(self.losses) if len(self.losses) > 1 else None

    @property
    def gap(self) -> float | None:
        """By how much of it the final loss is above that of fp32."""
        return None if self.diverged or self.baseline is None else fmean(self.losses) / self.baseline - 1

    @property
    def reached(self) -> Reached | None:
        """When the mean curve of the seeds reached the target; None if it did not, or if there is no target."""
        if self.diverged or self.target is None:
            return None
        for points in zip(*(run.curve for run in self.runs)):
            losses = [point.loss for point in points if point.loss is not None]
            if len(losses) == len(points) and fmean(losses) <= self.target:
                sent = fmean(sum(point.sent.values()) for point in points)
                return Reached(points[0].step, fmean(point.seconds for point in points), sent)
        return None

    @property
    def step_seconds(self) -> float:
        """Of a step, the mean over steps and seeds."""
        return fmean(run.curve[-1].seconds / run.curve[-1].step for run in self.runs)

    @property
    def step_bytes(self) -> float:
        """What a rank sends in a step, the mean over steps and seeds."""
        return fmean(sum(run.curve[-1].sent.values()) / run.curve[-1].step for run in self.runs)

    @property
    def later_bytes(self) -> float | None:
        """The same of the steps after the dense ones; None where there are none of these."""
        later = [sent for run in self.runs for sent in run.sent_by_step[self.dense :]]
        return fmean(later) if self.dense and later else None

    @property
    def computing(self) -> float | None:
        """Of the time after the dense steps, the share in which ranks do not wait for averages, if that is known."""
        known = [run.computing for run in self.runs if run.computing is not None]
        return fmean(known) if known else None

    @property
    def replicas(self) -> str:
        """Whether all ranks ended with the same weights."""
        return "identical" if all(run.replicas_identical for run in self.runs) else "DIFFER"


def target_of(runs: Sequence[Run], tolerance: float) -> tuple[float | None, float | None]:
    """The loss to reach, and the final loss of fp32: the mean over its seeds. None where that is not known.

    Args:
        tolerance: percent by which the target is above the loss of fp32.
    """
    for way in FP32:
        losses = [run.loss for run in runs if run.way == way]
        known = [loss for loss in losses if loss is not None]
        if known and len(known) == len(losses):
            return fmean(known) * (1 + tolerance / 100), fmean(known)
    return None, None


def groups(runs: Sequence[Run], tolerance: float, settings: Mapping[str, Any]) -> list[Group]:
    """The runs by way, in the order in which they were made.

    Args:
        settings: those of the file. Files of earlier versions can lack some; then dense steps are not known.
    """
    known = {field.name: settings[field.name] for field in fields(AccuracySettings) if field.name in settings}
    complete = AccuracySettings(**known) if len(known) == len(fields(AccuracySettings)) else None
    target, baseline = target_of(runs, tolerance)
    ways: dict[str, list[Run]] = {}
    for run in runs:
        ways.setdefault(run.way, []).append(run)
    return [
        Group(own, target, baseline, None if complete is None else dense_of(way, complete)) for way, own in ways.items()
    ]


def describe(settings: Mapping[str, Any]) -> str:
    """The conditions of a file's runs, in one line."""
    rate = f" at {settings['rate']}" if settings["rate"] else ""
    return (
        f"{settings['workload']}, {settings['parameters']:,} parameters; {settings['nodes']} nodes, "
        f"{settings['ranks']} ranks{rate}; batch {settings['batch']} a rank, {settings['steps']} steps, validation "
        f"every {settings['eval_every']}"
    )


def markdown(result: Mapping[str, Any], tolerance: float) -> str:
    """A result for a page: its table, which way is first, and where seconds are from."""
    settings = result["settings"]
    found = groups(rows_of(result["rows"], Run), tolerance, settings)
    times = ""
    if "step_times" in result:
        rate = settings["curves_rate"] or "one node"
        times = f" Seconds: the steps of runs made at {rate}, by step times measured here, in turns."
    return f"{TABLE.markdown(found)}\n{describe(settings)}.{times} {summary(found)}\n"


def line(run: Run) -> str:
    """One run, as it ends."""
    if run.loss is None:
        return f"{run.way}, seed {run.seed}: diverged at step {run.diverged_at} after {run.wall_seconds:.0f} s"
    seconds = run.curve[-1].seconds
    return f"{run.way}, seed {run.seed}: {run.loss:.4f} bits, {seconds:.0f} s of training, {run.wall_seconds:.0f} s"


def summary(found: Sequence[Group]) -> str:
    """Which way is first at the target, what the baselines take, and which way sends least, in one line."""
    reached = sorted(((group.reached.seconds, group) for group in found if group.reached), key=lambda one: one[0])
    if not reached:
        return "No way reached the target." if found[0].target is not None else "No target: no way is in fp32."
    seconds, first = reached[0]
    parts = [f"{first.way} reaches the target first, after {seconds:.1f} s"]
    baselines = [name for names in (FP32, FP16) for name in _first(names, found)]
    if first.way in baselines and len(reached) > 1:
        after, second = reached[1]
        parts.append(f"no smaller message pays here: {second.way} takes {after / seconds:.2f} times as long")
    for group in found:
        if group.way in baselines and group is not first:
            told = (
                f"takes {group.reached.seconds / seconds:.2f} times as long" if group.reached else "does not reach it"
            )
            parts.append(f"{group.way} {told}")
    sent, least = min(((group.reached.sent, group.way) for group in found if group.reached), default=(0.0, ""))
    parts.append(f"{least} sends least until then, {sent / 1e6:.1f} MB per rank")
    return "; ".join(parts) + "."


def _first(names: Sequence[str], found: Sequence[Group]) -> list[str]:
    """The first of the names that was run, if any was."""
    return [name for name in names if any(group.way == name for group in found)][:1]


def _to_target(name: str, unit: Unit, field: str) -> Column:
    def value(group: Group, every: Sequence[Group]) -> float | str | None:
        if group.target is None:
            return None
        return getattr(group.reached, field) if group.reached else "not reached"

    return Column(name, value, unit)


_LOSS = Unit("", 1, ".4f")
_KIB = Unit("", 1 / 1024, ".1f")

TABLE = Table(
    (
        Column("way", "way", left=True),
        Column("seeds", lambda group, every: len(group.runs)),
        Column("loss", "loss", _LOSS),
        Column("spread", "spread", _LOSS),
        Column("vs fp32 %", "gap", Unit("", 100, "+.2f")),
        _to_target("steps to target", Unit("", 1, "d"), "step"),
        _to_target("s to target", Unit("", 1, ".1f"), "seconds"),
        _to_target("to target", MB, "sent"),
        Column("step", "step_seconds", MS),
        Column("KiB per step", "step_bytes", _KIB),
        Column("after dense", "later_bytes", _KIB),
        Column("computing %", "computing", Unit("", 100, ".1f")),
        Column("replicas", "replicas", left=True),
    )
)
