"""Pictures of training runs; the only file that needs matplotlib (the extra `report`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .training import Point, Run

_WORST_SHOWN = 4.0
"""Bits a character at the upper edge: above it lie only the first steps and runs that diverge."""


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


_LEVEL_TEXT = {"inter": "between machines", "intra": "inside the machine"}


def _level(runs: Sequence[Run]) -> str:
    """The slow level: between machines, if anything goes there."""
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
