"""`espresso-mpi timeline`: a picture of one step of a trace, and the option `--trace` of the benchmarks.

Each rank has two rows. The upper row shows the processor: checks, agreements, encodes and decodes. Grey is time in
which the rank only waited. White is time for sums and copies of collectives, and for all work outside the session. The
lower row shows the wire: each bar lasts from posting a collective's messages until they are finished. If several are
under way, their bars lie above each other. Encodes above a bar of the lower row overlap with its messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import trace_file
from .recording import KINDS, Span
from .trace_file import RankTrace, TraceFile

SUFFIXES = (".png", ".svg")


# --- the option of the benchmarks -------------------------------------------------------------------------------------


def check_trace(path: Path | None) -> None:
    """Check before measuring that the file of ``--trace`` can be written.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is not None:
        trace_file.refuse_unwritable(Path(path))


@contextmanager
def tracing(session: Any, path: Path | None, label: str = "") -> Iterator[None]:
    """Trace the with-block if a path is given; with a label, as one of several runs: see ``trace_file.labelled``.

    Collective, at both ends, if a path is given.
    """
    if path is None:
        yield
        return
    with session.trace(trace_file.labelled(Path(path), label) if label else Path(path)):
        yield


# --- one step ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTrace:
    """One step of all ranks: its spans, in seconds since the start of the first one, and its length."""

    number: int
    ranks: tuple[RankTrace, ...]
    seconds: float
    clocks_within: float
    """Seconds within which the clocks of the nodes are known; 0 with one node."""

    @property
    def tensors(self) -> int:
        """Number of tensors that were sent; small ones that share a message count once."""
        return len({span.tensor for rank in self.ranks for span in rank.spans if span.tensor})


def one_step(file: TraceFile, number: int | None, path: Path) -> StepTrace:
    """The spans of one step; the default is the last one.

    Raises:
        ConfigError: the file holds no such step.
    """
    if not file.steps:
        raise ConfigError(f"trace {str(path)!r}: holds no step; call session.sync inside the with-block of the trace")
    number = file.steps[-1] if number is None else number
    if number not in file.steps:
        raise ConfigError(f"trace {str(path)!r}: step {number} is not in it; it holds {_described(file.steps)}")
    chosen = [_of_step(rank.spans, number) for rank in file.ranks]
    zero = min(span.start for spans in chosen for span in spans)
    end = max(span.stop for spans in chosen for span in spans)
    ranks = tuple(
        RankTrace(rank.rank, rank.node, rank.hostname, [_shifted(span, zero) for span in spans])
        for rank, spans in zip(file.ranks, chosen)
    )
    return StepTrace(number, ranks, end - zero, file.clocks_within)


def _of_step(spans: Sequence[Span], number: int) -> list[Span]:
    """A rank's spans of a step: those of its tensors, and the checks and agreements that belong to it.

    Checks and agreements concern several tensors and have no step number. Those of a step are the ones during it, the
    last agreement before it, and the checks since the agreement before that one.
    """
    own = [span for span in spans if span.tensor and span.step == number]
    if not own:
        return []
    first, last = min(span.start for span in own), max(span.stop for span in own)
    shared = sorted((span for span in spans if not span.tensor), key=lambda span: span.start)
    agreements = [span for span in shared if span.kind == "agree" and span.start < first]
    since = agreements[-2].stop if len(agreements) > 1 else float("-inf")
    return [span for span in shared if since <= span.start < last] + own


def _shifted(span: Span, zero: float) -> Span:
    return Span(
        span.kind, span.tensor, span.step, span.segment, span.start - zero, span.stop - zero, span.what, span.level,
        span.nbytes, span.nbytes_inter,
    )  # fmt: skip


def _described(steps: Sequence[int]) -> str:
    """Numbers as text, with runs shortened: 2 to 6, 9."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return "steps " + ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)


def main(trace: Path, output: Path | None = None, step: int | None = None) -> None:
    """Draw one step of a trace (default: the last one) to a PNG or SVG file (default: beside the trace).

    Raises:
        ConfigError: the trace cannot be read, has no such step, or the picture cannot be written.
    """
    output = trace.with_suffix(".svg") if output is None else output
    require_output(output)
    chosen = one_step(trace_file.read(trace), step, trace)
    draw(chosen, output)
    print(f"wrote {output}: {_title(chosen)}")


def require_output(path: Path, what: str = "--output", suffixes: Sequence[str] = SUFFIXES) -> None:
    """Check before drawing that the picture can be written.

    Raises:
        ConfigError: the file cannot be written; the text calls it ``what``.
    """
    if path.suffix.lower() not in suffixes:
        raise ConfigError(f"{what} {path}: ends in {path.suffix or 'nothing'!r}; expected {' or '.join(suffixes)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{what} {path}: its directory does not exist; make it first")
    if path.suffix.lower() in SUFFIXES and find_spec("matplotlib") is None:
        raise ConfigError("a timeline needs matplotlib; install it with: pip install 'espresso-mpi[report]'")


# --- the picture ------------------------------------------------------------------------------------------------------

INSIDE = "wire in the node"

COLOURS: dict[str, str] = {
    "check": "#aa3377",
    "agree": "#66ccee",
    "encode": "#4477aa",
    "decode": "#228833",
    "wire": "#ee8866",
    INSIDE: "#f7d0ba",
    "copy": "#ccbb44",
    "wait": "#d4d4d4",
    "backward": "#bbbbbb",
}
"""Told apart by colour-blind readers as well, and in grey (after P. Tol, "Colour Schemes", 2021)."""

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 14.0, 0.95, 1.85, 0.75, 0.55
"""Inches: the picture, and its margins."""

MARGINS = _TOP + _BOTTOM
"""Inches above and below the axes of a picture."""

_RANK_HEIGHT, _TALLEST = 1.15, 60.0
"""Inches of a rank's two rows, and of the tallest picture."""

_CPU, _WIRE = (0.05, 0.38), (0.44, 0.95)
"""Where the two rows of a rank begin and end, by its height, from above."""

_FONT, _CHARACTER = 6.5, 0.62
"""Points of the names in bars, and the width of a character by its height."""


@dataclass(frozen=True)
class Bar:
    """A rectangle: milliseconds from the left, ranks from the top (a rank is 1 high)."""

    kind: str  # a key of COLOURS
    text: str
    start: float
    stop: float
    top: float
    height: float


def draw(step: StepTrace, path: Path) -> None:
    """Draw a step to ``path``; its suffix says in which format."""
    figure, axes, inner = new_figure(min(_TALLEST, len(step.ranks) * _RANK_HEIGHT + MARGINS))
    bars = [bar for number, rank in enumerate(step.ranks) for bar in _bars(rank, number)]
    points = 72 * inner / max(step.seconds * 1e3, 1e-6)
    row = 72 * figure.get_figheight() * axes.get_position().height / len(step.ranks)
    draw_bars(axes, bars, points)
    draw_names(axes, bars, points, row)
    _draw_ranks(axes, step, min(8.0, row / 3.2))
    _draw_frame(figure, axes, step, [kind for kind in COLOURS if any(bar.kind == kind for bar in bars)])
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a picture in the format that its suffix says.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        figure.savefig(path, dpi=150, format=path.suffix.lower()[1:])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}; name another file") from None


def new_figure(height: float) -> tuple[Any, Any, float]:
    """A figure of this many inches, axes within the margins, and the width of those in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height))
    FigureCanvasAgg(figure)
    inner = _WIDTH - _LEFT - _RIGHT
    box = (_LEFT / _WIDTH, _BOTTOM / height, inner / _WIDTH, 1 - MARGINS / height)
    return figure, figure.add_axes(box), inner


def _bars(rank: RankTrace, number: int) -> Iterator[Bar]:
    """The rectangles of a rank."""
    top, end = _CPU
    waits = [span for span in rank.spans if span.kind == "wait"]
    yield from (Bar("wait", "", w.start * 1e3, w.stop * 1e3, number + top, end - top) for w in waits)
    work = [span for span in rank.spans if span.kind not in ("wait", "wire")]
    wires = [span for span in rank.spans if span.kind == "wire"]
    for spans, (top, end) in ((work, _CPU), (wires, _WIRE)):
        track_of = trace_file.tracks(spans)
        height = (end - top) / (max(track_of, default=0) + 1)
        for span, track in zip(spans, track_of):
            kind = INSIDE if span.level == "intra" else span.kind
            yield Bar(kind, span.tensor, span.start * 1e3, span.stop * 1e3, number + top + track * height, height)


def draw_bars(axes: Any, bars: Sequence[Bar], points: float) -> None:
    """All rectangles, kind by kind; those that are wide enough are parted by a white line.

    Args:
        points: width of a millisecond.
    """
    from matplotlib.collections import PolyCollection

    for kind in ("wait", *(kind for kind in COLOURS if kind != "wait")):  # an agreement lies over its waits
        chosen = [bar for bar in bars if bar.kind == kind]
        corners = [
            [(b.start, b.top), (b.start, b.top + b.height), (b.stop, b.top + b.height), (b.stop, b.top)] for b in chosen
        ]
        edges = [0.4 if (bar.stop - bar.start) * points > 4 and kind != "wait" else 0.0 for bar in chosen]
        axes.add_collection(
            PolyCollection(corners, facecolors=COLOURS[kind], edgecolors="white", linewidths=edges or None)
        )


def draw_names(axes: Any, bars: Sequence[Bar], points: float, row: float) -> None:
    """Tensor names where they fit.

    Args:
        points: width of a millisecond; row: height of a rank, in points.
    """
    for bar in bars:
        room = (bar.stop - bar.start) * points - 4
        text = _fitting(bar.text, int(room / (_FONT * _CHARACTER)))
        if text and bar.height * row > _FONT + 1:
            colour = "black" if bar.kind in ("wire", INSIDE, "agree", "copy") else "white"
            middle = (bar.start + bar.stop) / 2, bar.top + bar.height / 2
            # A name may hold a $, which is no formula.
            axes.text(*middle, text, size=_FONT, color=colour, ha="center", va="center_baseline", parse_math=False)


def _fitting(name: str, characters: int) -> str:
    """A tensor's name, or as many of its last parts as there is room for, or nothing."""
    while len(name) > characters:
        parts = re.split(r"[./]", name.lstrip("…"), maxsplit=1)
        if len(parts) == 1 or not re.search(r"[./]", parts[1]):
            return ""  # the very last part is "weight" for most
        name = f"…{parts[1]}"
    return name


def _draw_ranks(axes: Any, step: StepTrace, size: float) -> None:
    """Draw row names at the left, sums at the right, lines between ranks, and stronger lines between nodes."""
    side = axes.get_yaxis_transform()
    for number, rank in enumerate(step.ranks):
        cpu, wire = number + sum(_CPU) / 2, number + sum(_WIRE) / 2
        axes.text(-0.008, cpu, f"rank {rank.rank}  cpu", size=size, ha="right", va="center", transform=side)
        axes.text(-0.008, wire, "wire", size=size, ha="right", va="center", transform=side, color="#555555")
        above, below = _sums(rank)
        axes.text(1.008, cpu, above, size=size * 0.9, ha="left", va="center", transform=side, color="#555555")
        axes.text(1.008, wire, below, size=size * 0.9, ha="left", va="center", transform=side, color="#555555")
        new = number > 0 and rank.node != step.ranks[number - 1].node
        axes.axhline(number, color="#333333" if new else "#cccccc", linewidth=1.2 if new else 0.6, zorder=0)


def _sums(rank: RankTrace) -> tuple[str, str]:
    """The text at the right of a rank's rows. Time in which several tensors are on the wire counts once."""
    total = {kind: sum(s.stop - s.start for s in rank.spans if s.kind == kind) * 1e3 for kind in KINDS}
    wire = _covered([s for s in rank.spans if s.kind == "wire"]) * 1e3
    out = sum(s.nbytes_inter for s in rank.spans)
    inside = sum(s.nbytes for s in rank.spans) - out
    above = f"encode {_short(total['encode'])}, decode {_short(total['decode'])},\nwait {_short(total['wait'])} ms"
    return above, f"wire {_short(wire)} ms, sent {_short(out / 1e6)} MB\nout, {_short(inside / 1e6)} MB inside node"


def _short(value: float) -> str:
    """A number with three digits; large ones have no decimals."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def _covered(spans: Sequence[Span]) -> float:
    """Seconds that at least one of the spans covers."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda one: one.start):
        total += max(0.0, span.stop - max(span.start, reached))
        reached = max(reached, span.stop)
    return total


def _draw_frame(figure: Any, axes: Any, step: StepTrace, kinds: Sequence[str]) -> None:
    doubt = f"; the nodes' clocks agree to within {step.clocks_within * 1e3:.2g} ms" if step.clocks_within else ""
    axes.set_xlabel(f"milliseconds{doubt}", fontsize=8)
    draw_frame(figure, axes, step.seconds, len(step.ranks), _title(step), kinds)


def draw_frame(figure: Any, axes: Any, seconds: float, rows: int, title: str, kinds: Sequence[str]) -> None:
    """Draw what surrounds the bars: the axes (milliseconds by rows), the title, and a legend of the kinds."""
    from matplotlib.patches import Patch

    axes.set_xlim(0, max(seconds * 1e3, 1e-6))
    axes.set_ylim(rows, 0)
    axes.set_yticks([])
    axes.grid(axis="x", color="#e8e8e8", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8)
    top = 1 - 0.22 / figure.get_figheight()
    figure.text(_LEFT / _WIDTH, top, title, size=11, weight="bold", va="center", parse_math=False)
    handles = [Patch(facecolor=COLOURS[kind], label=kind) for kind in kinds]
    figure.legend(
        handles=handles, ncols=len(handles) or 1, loc="center left", frameon=False, fontsize=8, handlelength=1.2,
        bbox_to_anchor=(_LEFT / _WIDTH - 0.008, 1 - 0.52 / figure.get_figheight()), columnspacing=1.4,
    )  # fmt: skip


def _title(step: StepTrace) -> str:
    nodes = len({rank.node for rank in step.ranks})
    where = f"{_count(len(step.ranks), 'rank')} on {_count(nodes, 'node')}"
    return f"step {step.number}: {where}, {_count(step.tensors, 'tensor')}, {step.seconds * 1e3:.4g} ms"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
