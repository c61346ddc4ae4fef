"""``bench routes``: one array by every named route, compressor by compressor: what the session's own choice rests on.

The routes of a compressor take turns, and each is told beside the quickest of them. Results are not checked here:
``bench sync --route`` checks every element along any route.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..compressors import spellings
from ..files.output import check_writable, milliseconds, parse_sizes, progress, show, write_rows
from ..planner.model.tree import named_routes
from ..types import Route, TensorSpec
from .bound import topology_of
from .contest import Contestant, Effort, Inputs, in_turns, route_name
from .defaults import Routes as Defaults
from .sync_tables import size_text

NAME = "x"
"""The tensor's."""

HEADER = ("size", "method", "route", "median ms", "p99 ms", "time / least", "inter bytes", "default")


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        method: compressor; route: name of the route.
        nbytes: bytes of the float32 array.
        seconds, p99: median and 99th percentile, over repetitions, of the slowest rank.
        ratio: seconds / the least of this method and size.
        inter_bytes: what all ranks together send to other machines in one synchronisation.
        default: whether a session takes this route by itself.
        repeats: repetitions that were made.
    """

    method: str
    route: str
    nbytes: int
    seconds: float
    p99: float
    ratio: float
    inter_bytes: int
    default: bool
    repeats: int


def main(
    sizes: str = Defaults.sizes,
    compressors: str = Defaults.compressors,
    repeats: int = Defaults.repeats,
    seconds: float | None = None,
    json: Path | None = None,
) -> list[Row]:
    """Measure, print a table on rank 0, and write JSON if asked. Collective.

    Args:
        sizes: comma list of sizes of the float32 array, e.g. ``64KiB,1MiB``.
        compressors: comma list of spellings; ``none`` compares the dense routes.
        repeats: most timed repetitions of a method, size and route.
        seconds: time for each method and size after which no further repetition is begun, but for the first three.
        json: file for the result.

    Raises:
        ConfigError: a size or a spelling cannot be read, or the file could not be written.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    check_writable(json)
    lengths, specs = parse_sizes(sizes), spellings(compressors)
    if world.size == 1:
        print("bench routes: one rank has nobody to send to; start several with espresso-mpi run -n 4")
    rows: list[Row] = []
    with progress("bench routes", len(lengths) * len(specs) * repeats, world.rank == 0) as tick:
        for nbytes in lengths:
            for spec in specs:
                rows += _measured(world, nbytes, spec, Effort(repeats, seconds, tick))
    if world.rank == 0:
        show(f"one array by every named route, {world.size} ranks", HEADER, lines(rows), ("method", "route"))
        if json is not None:
            write_rows(json, rows, kind="routes")
    return rows


# --- measuring --------------------------------------------------------------------------------------------------------


def _measured(comm: Any, nbytes: int, spec: str, effort: Effort) -> list[Row]:
    """A row for each route of a compressor. Collective."""
    from .. import compressors

    inputs = Inputs(comm, {NAME: (nbytes // 4,)})
    x = np.empty(nbytes // 4, np.float32)  # the same memory every time, as in training
    topology = topology_of(comm)
    hierarchical = len(topology.machines) > 1 and topology.size > len(topology.machines)
    method = None if spec == "none" else compressors.get(spec)
    contestants = [_ours(comm, inputs, x, spec, route) for route in named_routes(method, hierarchical)]
    own = _own_choice(comm, spec, x)
    before = [dict(c.sent()) for c in contestants if c.sent is not None]
    times = in_turns(comm, contestants, effort)
    found = [_sent_between(comm, c, earlier, len(times)) for c, earlier in zip(contestants, before)]
    for c in contestants:
        c.close()
    medians, p99 = np.median(times, axis=0), np.percentile(times, 99, axis=0)
    return [
        Row(spec, route_name(c.route), nbytes, float(medians[i]), float(p99[i]), float(medians[i] / medians.min()),
            found[i], c.route == own, len(times))
        for i, c in enumerate(contestants)
    ]  # fmt: skip


def _ours(comm: Any, inputs: Inputs, x: np.ndarray, spec: str, route: Route) -> Contestant:
    """A session along a route, with the feedback that it has by default."""
    from ..session import Session

    session = Session(comm, compressor=spec, route=route, min_bytes=0)
    session.sync(inputs.copies())  # the first step allocates and compiles
    return Contestant(
        spec, partial(session.sync, {NAME: x}), prepare=partial(inputs.refill, {NAME: x}), route=route,
        sent=lambda: session.stats().bytes_by_level, close=session.close,
    )  # fmt: skip


def _own_choice(comm: Any, spec: str, x: np.ndarray) -> Route:
    from ..session import Session

    with Session(comm, compressor=spec, min_bytes=0) as session:
        return session.strategy(TensorSpec(NAME, x.shape, "float32")).route


def _sent_between(comm: Any, c: Contestant, before: Mapping[str, int], times: int) -> int:
    """Bytes that all ranks together sent to other machines, a synchronisation."""
    assert c.sent is not None
    return int(comm.allreduce((c.sent()["inter"] - before["inter"]) // times))


# --- output -----------------------------------------------------------------------------------------------------------


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """The table that people read."""
    return [
        [size_text(row.nbytes), row.method, row.route, milliseconds(row.seconds), milliseconds(row.p99),
         f"{row.ratio:.2f}", f"{row.inter_bytes:,}", "yes" if row.default else ""]
        for row in rows
    ]  # fmt: skip
