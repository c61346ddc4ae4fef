"""Pictures of training runs; the only file that needs matplotlib (the extra `report`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from .accuracy_tables import Group
from .optimizer_runs import Row
from .training import Point, Run

_WORST_SHOWN = 4.0
"""Bits a character at the upper edge: above it lie only the first steps and runs that diverge."""

_STYLES = ("-", "--", ":", "-.")
"""Of lines: there are ten colours."""


def training(runs: Sequence[Run], path: Path) -> None:
    """Write a PNG of validation loss against seconds and against bytes sent, one curve a run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    level = _level(runs)
    _panel(left, runs, lambda point: point.seconds)
    _panel(right, runs, lambda point: point.bytes_by_level[level] / 1e6)
    left.set(xlabel="training seconds", ylabel="validation loss, bits/character")
    right.set(xlabel=f"megabytes sent {_LEVEL_TEXT[level]}, all ranks", xscale="log")
    left.set_ylim(_lowest(runs) - 0.05, _WORST_SHOWN)
    right.legend(fontsize=8)
    figure.savefig(path, dpi=120, format="png")


_LEVEL_TEXT = {"inter": "between nodes", "intra": "inside the node"}


def _level(runs: Sequence[Run]) -> str:
    """The slow level: between nodes, if anything goes there."""
    return "inter" if any(run.curve[-1].bytes_by_level["inter"] for run in runs) else "intra"


def _panel(axes: Any, runs: Sequence[Run], x: Callable[[Point], float]) -> None:
    colours: dict[str, str] = {}
    for run in runs:
        colour = colours.setdefault(run.method.compressor, f"C{len(colours)}")
        points = [point for point in run.curve if point.step > 0]
        style = "-" if run.method.feedback else ":"
        xs, losses = [x(point) for point in points], [point.loss for point in points]
        axes.plot(xs, losses, style, color=colour, label=run.method.label)
    axes.grid(alpha=0.3)


def _lowest(runs: Sequence[Run]) -> float:
    return min(point.loss for run in runs for point in run.curve if point.loss == point.loss)


def optimizers(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of validation loss against steps, a panel for each optimizer, a curve for each run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.optimizer for row in rows))
    figure = Figure(figsize=(5.5 * len(names), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    colours: dict[str, str] = {}
    for axes, name in zip(panels, names):
        for row in (row for row in rows if row.optimizer == name):
            points = [(step, loss) for step, loss in row.curve if step > 0 and loss is not None]
            colour = colours.setdefault(row.compressor, f"C{len(colours)}")
            label = f"{row.method}, {row.lr:g}" if row.seed == rows[0].seed else None
            steps, losses = [step for step, _ in points], [loss for _, loss in points]
            axes.plot(steps, losses, "-" if row.feedback else ":", color=colour, label=label)
        axes.set(title=name, xlabel="steps")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper right")
    panels[0].set(ylabel="validation loss, bits/character")
    figure.savefig(path, dpi=120, format="png")


def accuracy(groups: Sequence[Group], unit: str, path: Path) -> None:
    """Write a PNG of validation loss against seconds, a line for each way and a band over its seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, group in enumerate(groups):
        colour, style = f"C{number % 10}", _STYLES[number // 10 % len(_STYLES)]
        states = [points for points in zip(*(run.curve for run in group.runs)) if points[0].step > 0]
        known = [(points, [p.loss for p in points if p.loss is not None]) for points in states]
        known = [(points, losses) for points, losses in known if len(losses) == len(points)]
        seconds = [fmean(point.seconds for point in points) for points, _ in known]
        means = [fmean(losses) for _, losses in known]
        axes.plot(seconds, means, style, color=colour, label=group.way)
        if len(group.runs) > 1:
            low, high = [min(losses) for _, losses in known], [max(losses) for _, losses in known]
            axes.fill_between(seconds, low, high, color=colour, alpha=0.2, linewidth=0)
    if groups[0].target is not None:
        axes.axhline(groups[0].target, color="black", linewidth=0.8, linestyle=":", label="target")
    axes.set(xlabel="training seconds", ylabel=f"validation loss, {unit}", xscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120, format="png")
