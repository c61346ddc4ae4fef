"""Draws a planned step as a Gantt chart, or writes it for Perfetto: what each lane does, by the model's timeline.

Each row shows a lane: a processor or a network. The backward pass is grey. The upper part of a row shows what the lane
serves in order. In the order ``backprop``, where a tensor can return to a lane, the lower part shows what runs beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..files.output import check_writable
from ..tracing import pictures, trace_file
from ..tracing.pictures import (
    COLOURS,
    INSIDE,
    MARGINS,
    Bar,
    draw_bars,
    draw_frame,
    draw_names,
    new_figure,
    require_output,
    save,
)
from ..tracing.recording import nanoseconds
from .model.problem import Problem
from .model.timeline import Interval

SUFFIXES = (*pictures.SUFFIXES, ".json")

_ROW = 0.62
"""Inches of a lane's height."""

_GAP = 0.12
"""Of a lane's height: what is free between it and the next."""


@dataclass(frozen=True)
class Shown:
    """An interval of the timeline, and what happens in it.

    Attributes:
        kind: key of the colours; what: the step of the route, or the copy; tensor: its name, "" for the backward pass.
        lane: number of the lane; row: 0, or a larger number if other intervals of the lane overlap this one.
        start, stop: seconds since the step began.
    """

    kind: str
    what: str
    tensor: str
    segment: int
    lane: int
    row: int
    start: float
    stop: float


def require(path: Path) -> None:
    """Check before planning that the picture can be drawn and written.

    Raises:
        ConfigError: another suffix, no such directory, a directory itself, or matplotlib is missing.
    """
    check_writable(path, "--picture")
    require_output(path, "--picture", SUFFIXES)


def picture(problem: Problem, choice: np.ndarray, path: Path, title: str = "") -> None:
    """Draw a choice to a .png or .svg file, or write it to a .json file for https://ui.perfetto.dev.

    Args:
        choice: int64 (tensors,), options of the problem.
        title: text above the picture, before the time of the step.

    Raises:
        ConfigError: another suffix, the file cannot be written, or matplotlib is missing.
    """
    path = Path(path)
    require(path)
    if path.suffix.lower() == ".json":
        trace_file.write(path, chrome(problem, choice, title))
    else:
        _draw(problem, choice, path, title)


def shown(problem: Problem, choice: np.ndarray) -> list[Shown]:
    """All intervals, sorted by their start; those that overlap in a lane get different rows."""
    found: list[Shown] = []
    ends: dict[int, list[float]] = {}
    names = _names(problem, choice)
    for one in sorted(problem.timeline.intervals(choice), key=lambda one: (one.start, one.stop)):
        rows = ends.setdefault(one.lane, [])
        beside = _beside(problem, choice, one)
        free = (row for row, end in enumerate(rows) if row >= beside and end <= one.start + 1e-12)
        row = next(free, max(len(rows), beside))
        rows += [0.0] * (row + 1 - len(rows))
        rows[row] = one.stop
        kind, what = names(one)
        tensor = "" if one.tensor < 0 else problem.workload.tensors[one.tensor].name
        found.append(Shown(kind, what, tensor, one.segment, one.lane, row, one.start, one.stop))
    return found


def _beside(problem: Problem, choice: np.ndarray, one: Interval) -> bool:
    """Whether an interval runs beside what the lane serves in order."""
    if one.tensor < 0 or problem.timeline.order != "backprop":
        return False
    return bool(problem.timeline.options.lane[choice[one.tensor], one.position] >= problem.timeline.lanes.count)


def _names(problem: Problem, choice: np.ndarray) -> Any:
    """A function that returns the kind of an interval and what is done in it."""
    slots = [problem.operations(int(option)) for option in choice]

    def name(one: Interval) -> tuple[str, str]:
        if one.tensor < 0:
            return "backward", f"backward {problem.workload.tensors[one.position].name}"
        slot = slots[one.tensor][one.position]
        wire = INSIDE if slot.resource == "intra" else "wire"
        return (wire if slot.kind == "move" else slot.kind), slot.what

    return name


# --- Perfetto ---------------------------------------------------------------------------------------------------------


def chrome(problem: Problem, choice: np.ndarray, title: str = "") -> dict[str, Any]:
    """The content of a trace file: a thread for each row of each lane; see ``trace_file`` for the format."""
    intervals = shown(problem, choice)
    threads = sorted({(one.lane, one.row) for one in intervals})
    numbers = {thread: number for number, thread in enumerate(threads, 1)}
    about = {"producer": f"{trace_file.PRODUCER} planner", "title": title, "seconds": problem.seconds(choice)}
    events = [_named("process_name", 1, title or "planned step")]
    for (lane, row), number in numbers.items():
        name = problem.timeline.lanes.name(lane) + (f" beside {row}" if row else "")
        events += [_named("thread_name", number, name), _named("thread_sort_index", number, number, "sort_index")]
    events += [_event(one, numbers[one.lane, one.row]) for one in intervals]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(what: str, thread: int, value: Any, key: str = "name") -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": thread, "args": {key: value}}


def _event(one: Shown, thread: int) -> dict[str, Any]:
    """A complete event; its end is rounded, not its length, so that neighbours do not overlap."""
    start, stop = nanoseconds(one.start), nanoseconds(one.stop)
    args: Mapping[str, Any] = {"tensor": one.tensor, "segment": one.segment, "what": one.what} if one.tensor else {}
    return {
        "name": " ".join(filter(None, (one.what, one.tensor))), "cat": one.kind, "ph": "X", "ts": start / 1000,
        "dur": (stop - start) / 1000, "pid": 1, "tid": thread, "args": args,
    }  # fmt: skip


# --- the chart --------------------------------------------------------------------------------------------------------


def _draw(problem: Problem, choice: np.ndarray, path: Path, title: str) -> None:
    intervals = shown(problem, choice)
    lanes = sorted({one.lane for one in intervals})
    seconds = max(one.stop for one in intervals)
    figure, axes, inner = new_figure(MARGINS + _ROW * len(lanes))
    bars, points = list(_bars(intervals, lanes)), 72 * inner / max(seconds * 1e3, 1e-6)
    draw_bars(axes, bars, points)
    draw_names(axes, bars, points, 72 * _ROW)
    _draw_lanes(axes, intervals, [(lane, problem.timeline.lanes.name(lane)) for lane in lanes], seconds)
    axes.set_xlabel("milliseconds", fontsize=8)
    whole = f"{problem.tensors} tensors, {problem.seconds(choice) * 1e3:.4g} ms"
    if problem.around:
        whole += f", {problem.around * 1e3:.4g} of them for agreement and update, not shown"
    kinds = [kind for kind in COLOURS if any(bar.kind == kind for bar in bars)]
    draw_frame(figure, axes, seconds, len(lanes), f"{title}: {whole}" if title else whole, kinds)
    save(figure, path)


def _draw_lanes(axes: Any, intervals: Sequence[Shown], lanes: Sequence[tuple[int, str]], seconds: float) -> None:
    """Draw the names of the lanes at the left, their busy time at the right, and lines between them."""
    side = axes.get_yaxis_transform()
    for place, (lane, name) in enumerate(lanes):
        busy = _busy(intervals, lane) / max(seconds, 1e-12)
        axes.text(-0.008, place + 0.5, name, size=8, ha="right", va="center", transform=side)
        axes.text(
            1.008, place + 0.5, f"{busy:.0%} busy", size=8, ha="left", va="center", transform=side, color="#555555"
        )
        if place:
            axes.axhline(place, color="#cccccc", linewidth=0.6, zorder=0)


def _bars(intervals: Sequence[Shown], lanes: Sequence[int]) -> Iterator[Bar]:
    """The rectangles; a lane has a height of 1, which its rows share."""
    rows = {lane: 1 + max(one.row for one in intervals if one.lane == lane) for lane in lanes}
    places = {lane: place for place, lane in enumerate(lanes)}
    for one in intervals:
        height = (1 - _GAP) / rows[one.lane]
        top = places[one.lane] + _GAP / 2 + one.row * height
        yield Bar(one.kind, one.tensor, one.start * 1e3, one.stop * 1e3, top, height)


def _busy(intervals: Sequence[Shown], lane: int) -> float:
    """Seconds in which a lane has at least one interval."""
    total, reached = 0.0, 0.0
    for one in intervals:
        if one.lane == lane:
            total += max(0.0, one.stop - max(one.start, reached))
            reached = max(reached, one.stop)
    return total
