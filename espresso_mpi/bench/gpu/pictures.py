"""The result of ``gpu-check`` as a picture; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .report import COPY_GOALS, HIDDEN_GOAL, cards_of


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: the kernels' shares of the bound by memory, and what ``push`` hides, beside their goals.

    Args:
        result: of ``suite.main``; parts that were not tried are left out.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    figure.suptitle(f"GPU: {cards_of(result)}")
    _shares(left, [row for row in result.get("speeds", ()) if row["encode_bound_fraction"] and row["method"] != "copy"])
    ranks = result.get("ranks", "")
    _hidden(right, [] if isinstance(ranks, str) else ranks["overlap"])
    figure.savefig(path, dpi=120, format="png")


def _shares(axes: Any, rows: list[Mapping[str, Any]]) -> None:
    names = [row["method"] for row in rows]
    for shift, what in ((-0.2, "encode"), (0.2, "decode")):
        places = [number + shift for number in range(len(rows))]
        axes.barh(places, [row[f"{what}_bound_fraction"] or 0.0 for row in rows], height=0.4, label=what)
    axes.plot([_goal(name) for name in names], range(len(names)), "k|", markersize=12, label="goal")
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="share of the bound by memory", xlim=(0, 1))
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _goal(name: str) -> float:
    return next(goal for names, goal in COPY_GOALS if names is None or name in names)


def _hidden(axes: Any, rows: list[Mapping[str, Any]]) -> None:
    axes.bar([row["method"] for row in rows], [row["hidden"] for row in rows])
    axes.axhline(HIDDEN_GOAL, color="black", linewidth=0.8, linestyle=":", label="goal")
    axes.set(ylabel="share that push hides", ylim=(0, 1))
    axes.legend(fontsize=8)
