"""``bench routes``: one array by every named route, compressor by compressor: what the session's own choice rests on.

The routes of a compressor take turns, and each is compared with the quickest of them. Results of arrays up to 16 MiB
are checked, but for those of routes on which MPI adds the payloads; ``bench sync --route`` checks larger ones too.

With ``data="gradients"``, each call gets the gradients of the next step of a GPT in training. In place of the check,
the error is measured: how far the sum of all results is from that of the means.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..compressors import read_specs
from ..errors import ConfigError
from ..files.output import parse_sizes
from ..planner.model.tree import named_routes
from ..types import Route, TensorSpec
from .bound import topology_of
from .defaults import Routes as Defaults
from .harness import columns
from .harness.checks import Inputs
from .harness.columns import BYTES, RATIO, Column, Table, Unit
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
        error: ‖Σ means − Σ results‖ / ‖Σ means‖ of all calls with gradients but the last; None for normal values. Error
            feedback makes it fall with the number of calls.
    """

    route: str
    ratio: float
    default: bool
    error: float | None = None


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
        Column("error", "error", Unit("", 1, ".3f")),
        Column("default", lambda row, rows: "yes" if row.default else ""),
    )
)


def main(
    sizes: str = Defaults.sizes,
    compressors: str = Defaults.compressors,
    repeats: int = Defaults.repeats,
    seconds: float | None = None,
    data: str = Defaults.data,
    json: Path | None = None,
) -> list[Row]:
    """Measure, print a table on rank 0, and write JSON if asked. Collective.

    Args:
        sizes: comma list of sizes of the float32 array, e.g. ``64KiB,1MiB``.
        compressors: comma list of specs; ``none`` compares the dense routes.
        repeats: most timed repetitions of a method, size and route.
        seconds: time for each method and size after which no further repetition is begun, but for the first three.
        data: "normal" values, the same in each call; or "gradients" of a GPT in training, from step to step.
        json: file for the result.

    Raises:
        ConfigError: a size or a spec cannot be read, gradients are asked for without PyTorch, or the file could not be
            written.
        CorpusError: this Python has no training text.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    run = Suite("routes", world, json)
    lengths, specs = parse_sizes(sizes), read_specs(compressors)
    _check(data)
    run.note_one_rank()
    rows: list[Row] = []
    with run.repetitions(len(lengths) * len(specs), repeats, seconds) as repetitions:
        for nbytes in lengths:
            for spec in specs:
                rows += _measured(world, nbytes, spec, repetitions, data)
    run.publish(TABLE, f"one array by every named route, {data} data, {world.size} ranks", rows, data=data)
    return rows


# --- measuring --------------------------------------------------------------------------------------------------------


def _check(data: str) -> None:
    if data not in ("normal", "gradients"):
        raise ConfigError(f"--data {data!r}; expected normal or gradients")
    if data == "gradients" and find_spec("torch") is None:
        raise ConfigError("--data gradients trains with PyTorch, which is not installed: pip install torch")


def _measured(comm: Any, nbytes: int, spec: str, repetitions: Repetitions, data: str) -> list[Row]:
    """A row for each route of a compressor. Collective."""
    from .. import compressors

    topology = topology_of(comm)
    hierarchical = len(topology.nodes) > 1 and topology.size > len(topology.nodes)
    method = None if spec == "none" else compressors.get(spec)
    routes = named_routes(method, hierarchical)
    given = _given(comm, nbytes // 4, data, len(routes))
    methods = [_along(comm, inputs, x, spec, route) for (inputs, x), route in zip(given, routes)]
    own = _own_choice(comm, spec, given[0][1])
    found = measure(comm, methods, repetitions, check=data == "normal" and nbytes <= CHECKED)
    least = min(one.seconds for one in found)
    return [
        Row(**one.fields(nbytes, comm.size), route=route_name(one.method.route), ratio=one.seconds / least,
            default=one.method.route == own, error=inputs.error())
        for one, (inputs, _) in zip(found, given)
    ]  # fmt: skip


def _given(comm: Any, n: int, data: str, routes: int) -> list[tuple[Inputs, np.ndarray]]:
    """For each route its inputs, and the memory that they come in, the same every time, as in training. Collective."""
    if data == "normal":
        return [(Inputs(comm, {NAME: (n,)}), np.empty(n, np.float32))] * routes
    from .gradient_inputs import Gradients, Training

    training = Training(comm, n)
    return [(Gradients(training, NAME), np.empty(n, np.float32)) for _ in range(routes)]


def _along(comm: Any, inputs: Inputs, x: np.ndarray, spec: str, route: Route) -> TimedMethod:
    """A session along a route. Where MPI adds payloads, their order is its own: no sum of three is right to the bit."""
    found = replace(by_session(comm, inputs, {NAME: x}, spec, route=route, min_bytes=0), route=route)
    return replace(found, check=None) if route.sums_payloads else found


def _own_choice(comm: Any, spec: str, x: np.ndarray) -> Route:
    from ..session import Session

    with Session(comm, compressor=spec, min_bytes=0) as session:
        return session.strategy(TensorSpec(NAME, x.shape, "float32")).route
