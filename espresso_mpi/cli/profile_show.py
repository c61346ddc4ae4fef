"""``profile show`` and ``profile describe``: what a cluster costs, as tables and as a picture.

Rates are dense bytes over seconds: of codecs the 4 bytes of each float32 element, of collectives the bytes that one
rank puts in.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..bench.harness.columns import size_text
from ..errors import ConfigError
from ..files.output import WIDTH, check_plot, check_writable, number, show
from ..planner.model.curve import Curve
from ..planner.model.profile import Profile
from ..planner.workloads.clusters import TESTBEDS, Cluster
from ..tracing.pictures import SUFFIXES

_SHOWN = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20)
"""Bytes at which curves are shown that were not fitted to samples."""

_LEFT = ("", "codec", "device", "direction", "operation", "level", "what")

Table = tuple[str, list[str], list[list[str]]]
"""Title, heading, lines."""


def main(path: Path, plot: Path | None = None) -> Profile:
    """Print a profile's tables, and draw it.

    Args:
        path: the profile's JSON.
        plot: PNG or SVG to write.

    Raises:
        ConfigError: the profile cannot be read, or the picture not be written.
    """
    _check_picture(plot)
    profile = Profile.load(path)
    for title, header, lines in tables(profile):
        show(title, header, lines, left=_LEFT)
    print(textwrap.fill(_sources(profile.environment), WIDTH))
    if plot is not None:
        draw(profile, plot)
        print(f"wrote {plot}")
    return profile


def describe_main(description: str | Path, output: Path) -> Profile:
    """Make the profile of a described cluster.

    Args:
        description: a JSON or TOML file, or the name of a testbed.
        output: the profile's JSON to write.

    Raises:
        ConfigError: the description cannot be read or is not valid, or the profile not be written.
    """
    check_writable(output, "-o")
    cluster = TESTBEDS.get(str(description)) or _described(Path(description))
    profile = cluster.profile()
    profile.save(output)
    print(f"wrote {output}: {cluster.name}, {cluster.nodes} × {cluster.gpus_per_node}")
    return profile


def _described(path: Path) -> Cluster:
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file; expected one, or a testbed: {', '.join(TESTBEDS)}")
    return Cluster.load(path)


def _check_picture(plot: Path | None) -> None:
    check_plot(plot)
    if plot is not None and plot.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {plot}: ends in {plot.suffix or 'nothing'!r}; expected {' or '.join(SUFFIXES)}")


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(profile: Profile) -> Iterator[Table]:
    """The tables that have lines."""
    every = (_cluster(profile), _codecs(profile), _moves(profile), _copies(profile))
    return (table for table in every if table[2])


def _cluster(profile: Profile) -> Table:
    facts = {
        "nodes": str(profile.nodes),
        "ranks per node": str(profile.ranks_per_node),
        "made by": "measuring" if profile.measured else "a description",
        "medians known to": f"{profile.noise():.1%}" if profile.measured else "",
        "a sync costs": _microseconds(profile.call),
        "a tensor costs": _microseconds(profile.tensor),
        "pushes hide": f"{profile.hidden:.0%} of what they could",
        "a pushed tensor costs besides": _microseconds(profile.pushed),
        "beside pushes computing takes": f"{profile.slowed:.0%} longer",
        "segments": size_text(profile.segment_bytes) if profile.segment_bytes else "none",
        **{key: str(value) for key, value in profile.fingerprint.items() if key not in _SAID},
        **{key: str(value) for key in _SURROUNDINGS if (value := profile.environment.get(key))},
    }
    return "cluster", ["", "what"], [[name, text] for name, text in facts.items() if text]


_SAID = ("nodes", "ranks_per_node")
_SURROUNDINGS = ("date", "lab", "cpu", "cores", "system", "python")


def _sources(environment: Mapping[str, Any]) -> str:
    """Where the numbers of a description come from; nothing for measured ones."""
    described = environment.get("cluster")
    return str(described.get("text", "")) if isinstance(described, Mapping) else ""


def _codecs(profile: Profile) -> Table:
    header = [
        "codec",
        "device",
        "direction",
        "elements",
        "median ms",
        "spread",
        "GB/s",
        "curve off by",
        "residual",
        "pieces",
    ]
    lines: list[list[str]] = []
    for (spec, device, direction), curve in profile.codecs.items():
        lines += _points([spec, device, direction], curve, element=4)
    return "encode with residual, decode and add one payload", header, lines


def _points(names: list[str], curve: Curve, element: int) -> Iterator[list[str]]:
    """A line for each sample, or for each size shown; what concerns the curve is in the first."""
    about = [f"{curve.residual:.1%}" if curve.samples else "", str(_pieces(curve))]
    for position, (size, seconds, spread) in enumerate(_shown(curve, element)):
        off = f"{curve(size) / seconds - 1:+.1%}" if curve.samples else ""
        yield [
            *(names if position == 0 else [""] * len(names)), f"{size:,}", _milliseconds(seconds),
            "" if spread is None else f"{spread:.1%}", _rate(size * element, seconds), off,
            *(about if position == 0 else ["", ""]),
        ]  # fmt: skip


def _shown(curve: Curve, element: int) -> list[tuple[int, float, float | None]]:
    if curve.samples:
        return [(s.size, s.seconds, s.spread) for s in curve.samples]
    return [(nbytes // element, curve(nbytes // element), None) for nbytes in _SHOWN]


def _moves(profile: Profile) -> Table:
    rows = []
    for (op, level, alone), curve in sorted(
        profile.moves.items(), key=lambda item: (item[0][1], item[0][0], item[0][2])
    ):
        rows.append([op, f"{level}, one rank per node" if alone else level, *_line(curve)])
    return "collectives, by the bytes that one rank puts in", ["operation", "level", *_LINE], rows


def _copies(profile: Profile) -> Table:
    rows = [[f"copy {direction}", *_line(curve)] for direction, curve in profile.copies.items()]
    rows += [[f"check of a tensor{where}", *_line(curve)] for where, curve in _checks(profile)]
    return "copies and checks", ["what", *_LINE], rows


def _checks(profile: Profile) -> list[tuple[str, Curve]]:
    """The curves of the check, where they are known, and where tensors are."""
    found = [("", profile.check)] if any(profile.check.values) else []
    return found + ([] if profile.check_on_gpu is None else [(" on the gpu", profile.check_on_gpu)])


_LINE = ["α µs", "β ns/byte", "pieces", "residual", "spread", "smallest", "largest", "MB/s there"]


def _line(curve: Curve) -> list[str]:
    """A curve in short: what nothing costs, what a byte of a large size costs, how good the fit is, its rate."""
    points = _shown(curve, 1)
    smallest, largest = points[0], points[-1]
    return [
        f"{curve(0) * 1e6:.1f}", f"{curve.slopes[-1] * 1e9:.4g}", str(_pieces(curve)),
        f"{curve.residual:.1%}" if curve.samples else "", f"{curve.spread:.1%}" if curve.samples else "",
        *(f"{_milliseconds(seconds)} ms ({size_text(size)})" for size, seconds, _ in (smallest, largest)),
        number(largest[0] / largest[1] / 1e6 if largest[1] else None, ",.0f"),
    ]  # fmt: skip


def _pieces(curve: Curve) -> int:
    return max(1, len(curve.knots) - 1)


def _milliseconds(seconds: float) -> str:
    """With three digits that count: times begin at microseconds."""
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"


def _rate(nbytes: int, seconds: float) -> str:
    return number(nbytes / seconds / 1e9 if seconds else None)


# --- picture ----------------------------------------------------------------------------------------------------------

_Lines = list[tuple[str, Curve]]


def draw(profile: Profile, path: Path) -> None:
    """Write a PNG or SVG: the measured points and the curves, a panel for encode, decode, each level and the copies.

    ``path``: its suffix says in which format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(profile)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (title, unit, lines) in zip(grid, panels):
        _panel(axes, lines)
        axes.set(title=title, xlabel=unit, ylabel="milliseconds", xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=120, format=path.suffix.lower()[1:])


def _panels(profile: Profile) -> list[tuple[str, str, _Lines]]:
    """Title, unit of the sizes, and the curves by name; a panel without curves is left out."""
    codecs, moves = profile.codecs.items(), profile.moves.items()
    panels: list[tuple[str, str, _Lines]] = [
        (
            direction,
            "float32 elements",
            [(f"{spec} on {device}", c) for (spec, device, w), c in codecs if w == direction],
        )
        for direction in ("encode", "decode")
    ]
    panels += [
        (f"{level}, one rank per node" if alone else level, "bytes of one rank",
         [(op, c) for (op, where, single), c in moves if (where, single) == (level, alone)])
        for level, alone in (("flat", False), ("intra", False), ("inter", False), ("inter", True))
    ]  # fmt: skip
    others: _Lines = [(f"copy {direction}", curve) for direction, curve in profile.copies.items()]
    others += [(f"check{where}", curve) for where, curve in _checks(profile)]
    panels.append(("copies and checks", "bytes", others))
    return [panel for panel in panels if panel[2]] or [("check", "bytes", [("check", profile.check)])]


def _panel(axes: Any, lines: Sequence[tuple[str, Curve]]) -> None:
    for place, (name, curve) in enumerate(lines):
        colour, points = f"C{place % 10}", _shown(curve, 1)
        if curve.samples:
            axes.plot([p[0] for p in points], [p[1] * 1e3 for p in points], "o", color=colour, markersize=3)
        sizes = np.geomspace(max(1, points[0][0]), max(2, points[-1][0]), 200)
        style = "-" if place < 10 else "--"
        axes.plot(sizes, curve.many(sizes) * 1e3, style, color=colour, linewidth=1, label=name)
