"""``bench scaling``: how the time of a synchronisation grows with the size of the array and with the number of ranks.

One run measures every size on all ranks, and sizes up to a limit on the first 2, 3, … of them, MPI's allreduce and our
methods in turns. To each method and number of ranks a line t = α + β·bytes is fitted: α is what a call costs, 1/β the
rate that large arrays approach. The deviation of the points from the line is printed: caches, bursts and changes of
algorithm are not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..compressors import read_specs
from ..errors import ConfigError
from ..files.output import milliseconds, parse_sizes
from .defaults import Scaling as Defaults
from .harness import columns
from .harness.checks import Inputs, wrong_sum
from .harness.columns import GB_PER_S, SHARE, Column, Table, Unit, size_text
from .harness.measuring import CHECKED, by_session, measure
from .harness.rows import Timing
from .harness.suite import ONE_RANK, Suite
from .harness.timing import Repetitions, TimedMethod

MPI_METHOD = "mpi-allreduce-fp32"

NAME = "x"


@dataclass(frozen=True, kw_only=True)
class Row(Timing):
    """One measured point, on so many ranks."""

    ranks: int


@dataclass(frozen=True)
class ScalingFit:
    """t = alpha + beta · bytes for a method on a number of ranks.

    Attributes:
        alpha: seconds. beta: seconds per byte.
        deviation: root mean square of the line's relative errors at the measured points; 0 for fewer than three.
    """

    method: str
    ranks: int
    alpha: float
    beta: float
    deviation: float


def main(
    sizes: str = Defaults.sizes,
    compressors: str = Defaults.compressors,
    ranks: str | None = None,
    rank_limit: str = Defaults.rank_limit,
    repeats: int = Defaults.repeats,
    seconds: float | None = None,
    json: Path | None = None,
    plot: Path | None = None,
) -> list[Row]:
    """Measure, print the fits on rank 0, and write the files asked for. Collective.

    Args:
        sizes: comma list of sizes of the float32 array.
        compressors: comma list of specs.
        ranks: comma list of numbers of ranks, each from 2 to all; default: 2, 4, 8, … and all.
        rank_limit: largest size that is measured on fewer than all ranks.
        repeats: most timed repetitions of each method, size and number of ranks.
        seconds: time for each size and number of ranks after which no further repetition is begun, but for the first
            three.
        json, plot: files to write, the plot as PNG.

    Raises:
        ConfigError: an argument does not fit, or a file could not be written later on.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    run = Suite("scaling", world, json, plot)
    lengths, specs, counts = sorted(parse_sizes(sizes)), read_specs(compressors), _counts(ranks, world.size)
    (limit,) = parse_sizes(rank_limit)
    plan = [(count, n) for count in counts for n in lengths if count == world.size or n <= limit]
    rows: list[Row] = []
    with run.repetitions(len(plan), repeats, seconds) as repetitions:
        for count, nbytes in plan:
            rows += _on_the_first(world, count, partial(_measured, nbytes, specs, repetitions))
    run.draw(partial(draw, rows))
    if run.leads:
        TABLE.show(f"t = α + β · bytes, up to {max(row.ranks for row in rows)} ranks", curves(rows))
    run.write(rows, fits=[asdict(line) for line in fits(rows)], picture=run.picture)
    return rows


def fits(rows: Sequence[Row]) -> list[ScalingFit]:
    """A line for each method and number of ranks that at least two sizes were measured with."""
    keys = dict.fromkeys((row.method, row.ranks) for row in rows)
    groups = [(key, [row for row in rows if (row.method, row.ranks) == key]) for key in keys]
    return [
        ScalingFit(*key, *fit([row.nbytes for row in group], [row.seconds for row in group]))
        for key, group in groups
        if len({row.nbytes for row in group}) > 1
    ]


def fit(nbytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """alpha, beta and the relative deviation of the line that has the least squares of relative errors.

    Relative, because times range over five orders of magnitude: the small ones decide alpha, the large ones beta.
    """
    t = np.asarray(seconds, np.float64)
    scale = float(np.max(nbytes))
    lines = np.stack([1 / t, np.asarray(nbytes, np.float64) / scale / t], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(lines, np.ones_like(t), rcond=None)
    deviation = float(np.sqrt(np.mean((lines @ [alpha, beta] - 1) ** 2))) if t.size > 2 else 0.0
    return float(alpha), float(beta) / scale, deviation


def _counts(text: str | None, size: int) -> list[int]:
    """Numbers of ranks to measure with, all of them last."""
    if size < 2:
        raise ConfigError(f"bench scaling: {ONE_RANK}")
    if text is None:
        return sorted({size, *(2**i for i in range(1, size.bit_length()) if 2**i <= size)})
    parts = text.split(",")
    counts = sorted({int(part) for part in parts if part.strip().isdigit()})
    if len(counts) < len(parts) or not all(2 <= count <= size for count in counts):
        raise ConfigError(f"--ranks {text}; expected different numbers from 2 to {size}, such as 2,{size}")
    return counts


# --- measuring --------------------------------------------------------------------------------------------------------


def _on_the_first(world: Any, count: int, measure: Any) -> list[Row]:
    """Rows measured by the first ``count`` ranks while the others rest; on every rank. Collective."""
    from mpi4py import MPI

    comm = world.Split(0 if world.rank < count else MPI.UNDEFINED, world.rank)
    rows: list[Row] = []
    if comm != MPI.COMM_NULL:
        rows = measure(comm)
        comm.Free()
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(0.005)
    return world.bcast(rows)


def _measured(nbytes: int, specs: Sequence[str], repetitions: Repetitions, comm: Any) -> list[Row]:
    inputs = Inputs(comm, {NAME: (nbytes // 4,)})
    arrays = inputs.copies()
    methods = [_mpi(comm, inputs, arrays), *(by_session(comm, inputs, arrays, spec, min_bytes=0) for spec in specs)]
    found = measure(comm, methods, repetitions, check=nbytes <= CHECKED)
    return [Row(**one.fields(nbytes, comm.size), ranks=comm.size) for one in found]


def _mpi(comm: Any, inputs: Inputs, arrays: dict[str, np.ndarray]) -> TimedMethod:
    from mpi4py import MPI

    out = np.empty_like(arrays[NAME])
    run = partial(comm.Allreduce, arrays[NAME], out, MPI.SUM)

    def check() -> int:
        inputs.refill(arrays)
        run()
        return wrong_sum(comm, out, lambda: [source[NAME] for source in inputs.of_all()])

    return TimedMethod(MPI_METHOD, run, check, partial(inputs.refill, arrays))


# --- output -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScalingCurve:
    """A line of the table: a fit and the points that it was made from, the smallest first."""

    fit: ScalingFit
    points: Sequence[Row]

    @property
    def wrong(self) -> int | None:
        """Wrong elements of all points; None if none was checked."""
        found = [point.wrong for point in self.points if point.wrong is not None]
        return sum(found) if found else None


def curves(rows: Sequence[Row]) -> list[ScalingCurve]:
    """All fits, with their points."""
    return [
        ScalingCurve(line, [row for row in rows if (row.method, row.ranks) == (line.method, line.ranks)])
        for line in fits(rows)
    ]


def _point(place: int) -> Callable[[ScalingCurve, Sequence[ScalingCurve]], str]:
    """The time of the first or the last point, and its size."""

    def text(curve: ScalingCurve, every: Sequence[ScalingCurve]) -> str:
        point = curve.points[place]
        return f"{milliseconds(point.seconds)} ({size_text(point.nbytes)})"

    return text


TABLE = Table(
    (
        Column("method", lambda c, every: c.fit.method, left=True),
        Column("ranks", lambda c, every: c.fit.ranks),
        Column("α", lambda c, every: c.fit.alpha, Unit("ms", 1e3, ".3f")),
        Column("1/β", lambda c, every: 1 / c.fit.beta if c.fit.beta > 0 else None, Unit("MB/s", 1e-6, ".1f")),
        Column("deviation", lambda c, every: c.fit.deviation, SHARE),
        Column("smallest ms", _point(0)),
        Column("largest ms", _point(-1)),
        Column("algbw", lambda c, every: c.points[-1].algbw, GB_PER_S),
        Column("busbw", lambda c, every: c.points[-1].busbw, GB_PER_S),
        columns.WRONG,
    )
)
"""Bandwidths are those of the largest size."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: time against size on all ranks with the fitted lines, and time against ranks at one size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for number, method in enumerate(dict.fromkeys(row.method for row in rows)):
        of_method = [row for row in rows if row.method == method]
        _draw_sizes(left, of_method, f"C{number}")
        _draw_ranks(right, of_method, rows, f"C{number}")
    most = max(row.ranks for row in rows)
    left.set(
        xscale="log", yscale="log", xlabel="bytes", ylabel="milliseconds", title=f"{most} ranks; lines: α + β·bytes"
    )
    size = size_text(_common_size(rows))
    right.set(yscale="log", xlabel="ranks", ylabel="milliseconds", title=f"{size} against ranks")
    right.set_xticks(sorted({row.ranks for row in rows}))
    for axes in (left, right):
        axes.set(yscale="log", ylabel="milliseconds")
        axes.grid(alpha=0.3)
    right.legend(fontsize=8)
    figure.savefig(path, dpi=120, format="png")


def _draw_sizes(axes: Any, rows: Sequence[Row], colour: str) -> None:
    most = max(row.ranks for row in rows)
    points = [row for row in rows if row.ranks == most]
    axes.plot([p.nbytes for p in points], [p.seconds * 1e3 for p in points], "o", color=colour, markersize=4)
    for line in fits(points):
        x = np.geomspace(points[0].nbytes, points[-1].nbytes, 100)
        y = (line.alpha + line.beta * x) * 1e3
        axes.plot(x[y > 0], y[y > 0], color=colour, linewidth=1)


def _draw_ranks(axes: Any, rows: Sequence[Row], every: Sequence[Row], colour: str) -> None:
    size = _common_size(every)
    points = [row for row in rows if row.nbytes == size]
    axes.plot([p.ranks for p in points], [p.seconds * 1e3 for p in points], "o-", color=colour, label=points[0].method)


def _common_size(rows: Sequence[Row]) -> int:
    """The largest size that was measured on every number of ranks; the smallest of all if there is none."""
    sizes = [{row.nbytes for row in rows if row.ranks == count} for count in {row.ranks for row in rows}]
    return max(set.intersection(*sizes), default=min(set.union(*sizes)))
