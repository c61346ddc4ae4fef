"""``bench routes``: one array by every named route, compressor by compressor: what the session's own choice rests on.

The routes of a compressor take turns, and each is compared with the quickest of them. Results of arrays up to 16 MiB
are checked, but for those of routes on which MPI adds the payloads; ``bench sync --route`` checks larger ones too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..compressors import read_specs
from ..files.output import parse_sizes
from ..planner.model.tree import named_routes
from ..types import Route, TensorSpec
from .bound import topology_of
from .defaults import Routes as Defaults
from .harness import columns
from .harness.checks import Inputs
from .harness.columns import BYTES, RATIO, Column, Table
from .harness.measuring import CHECKED, by_session, measure
from .harness.rows import Timing
from .harness.suite import Suite
from .harness.timing import Repetitions, TimedMethod, route_name

NAME = "x"
"""The tensor's."""


@dataclass(frozen=True, kw_only=True)
class Row(Timing):
    """One line of the result.

    Attributes:
        route: name of the route.
        ratio: seconds / the least of this method and size.
        default: whether a session takes this route by itself.
    """

    route: str
    ratio: float
    default: bool


TABLE = Table(
    (
        columns.SIZE,
        columns.METHOD,
        Column("route", "route", left=True),
        *columns.TIMES,
        *columns.BANDWIDTHS,
        Column("time / least", "ratio", RATIO),
        Column("inter bytes", "inter_bytes", BYTES),
        columns.WRONG,
        Column("default", lambda row, rows: "yes" if row.default else ""),
    )
)


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
        compressors: comma list of specs; ``none`` compares the dense routes.
        repeats: most timed repetitions of a method, size and route.
        seconds: time for each method and size after which no further repetition is begun, but for the first three.
        json: file for the result.

    Raises:
        ConfigError: a size or a spec cannot be read, or the file could not be written.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    run = Suite("routes", world, json)
    lengths, specs = parse_sizes(sizes), read_specs(compressors)
    run.note_one_rank()
    rows: list[Row] = []
    with run.repetitions(len(lengths) * len(specs), repeats, seconds) as repetitions:
        for nbytes in lengths:
            for spec in specs:
                rows += _measured(world, nbytes, spec, repetitions)
    run.publish(TABLE, f"one array by every named route, {world.size} ranks", rows)
    return rows


# --- measuring --------------------------------------------------------------------------------------------------------


def _measured(comm: Any, nbytes: int, spec: str, repetitions: Repetitions) -> list[Row]:
    """A row for each route of a compressor. Collective."""
    from .. import compressors

    inputs = Inputs(comm, {NAME: (nbytes // 4,)})
    x = np.empty(nbytes // 4, np.float32)  # the same memory every time, as in training
    topology = topology_of(comm)
    hierarchical = len(topology.nodes) > 1 and topology.size > len(topology.nodes)
    method = None if spec == "none" else compressors.get(spec)
    methods = [_along(comm, inputs, x, spec, route) for route in named_routes(method, hierarchical)]
    own = _own_choice(comm, spec, x)
    found = measure(comm, methods, repetitions, check=nbytes <= CHECKED)
    least = min(one.seconds for one in found)
    return [
        Row(**one.fields(nbytes, comm.size), route=route_name(one.method.route), ratio=one.seconds / least,
            default=one.method.route == own)
        for one in found
    ]  # fmt: skip


def _along(comm: Any, inputs: Inputs, x: np.ndarray, spec: str, route: Route) -> TimedMethod:
    """A session along a route. Where MPI adds payloads, their order is its own: no sum of three is right to the bit."""
    found = replace(by_session(comm, inputs, {NAME: x}, spec, route=route, min_bytes=0), route=route)
    return replace(found, check=None) if route.sums_payloads else found


def _own_choice(comm: Any, spec: str, x: np.ndarray) -> Route:
    from ..session import Session

    with Session(comm, compressor=spec, min_bytes=0) as session:
        return session.strategy(TensorSpec(NAME, x.shape, "float32")).route
