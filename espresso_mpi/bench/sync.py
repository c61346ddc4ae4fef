"""``bench sync``: one array, every compressor, beside MPI's own allreduce in the same run and beside what is possible.

What is possible is said by ``bound``; how the methods are timed and checked by ``harness``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..compressors import read_specs
from ..files.output import parse_sizes
from .bound import Bound, Yardsticks, bound, memory_traffic, topology_of
from .defaults import Sync as Defaults
from .harness.checks import Inputs
from .harness.columns import size_text
from .harness.measuring import Measurement, by_session, measure
from .harness.suite import Suite
from .harness.timing import Repetitions, TimedMethod, route_name
from .mpi_own import FP16, FP32, Allreduces, least_sent, least_traffic
from .sync_tables import TABLE, Row, rates_text

NAME = "x"
"""The tensor's."""


def main(
    sizes: str = Defaults.sizes,
    compressors: str = Defaults.compressors,
    only_mpi: bool = False,
    route: str | None = None,
    repeats: int = Defaults.repeats,
    seconds: float | None = None,
    json: Path | None = None,
    trace: Path | None = None,
) -> list[Row]:
    """Measure, print a table on rank 0, and write JSON if asked. Collective.

    Args:
        sizes: comma list of sizes of the float32 array, e.g. ``64KiB,1MiB``.
        compressors: comma list of specs. only_mpi: leave them out and measure MPI's own only.
        route: route of the compressed methods; default: the session's own choice.
        repeats: most timed repetitions a method and size.
        seconds: time for each size after which no further repetition is begun, but for the first three.
        json: file for the result.
        trace: trace one more synchronisation of each compressor at the last size to this file, the compressor's name
            before its suffix.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    run = Suite("sync", world, json, trace=trace)
    lengths, specs = parse_sizes(sizes), () if only_mpi else read_specs(compressors)
    run.note_one_rank()
    rows: list[Row] = []
    rates: dict[str, Any] = {}
    with run.repetitions(len(lengths), repeats, seconds) as repetitions:
        for nbytes in lengths:
            wanted = trace if nbytes == lengths[-1] else None
            case = _Case(world, nbytes, specs, route)
            rows += case.measured(repetitions, wanted)
            rates[str(nbytes)] = case.rates
    title = f"one array, {world.size} ranks; speed-up over MPI_Allreduce and our fp16 in the same run"
    run.publish(TABLE, title, rows, yardsticks=rates)
    if run.leads:
        for length, rate in rates.items():
            print(f"{size_text(int(length))}: {rates_text(rate)}")
    return rows


# --- measuring --------------------------------------------------------------------------------------------------------


class _Case:
    """All methods on one size. Collective, as are its methods."""

    def __init__(self, comm: Any, nbytes: int, specs: Sequence[str], route: str | None) -> None:
        self.comm, self.nbytes = comm, nbytes
        self.inputs = Inputs(comm, {NAME: (nbytes // 4,)})
        self.x = np.empty(nbytes // 4, np.float32)  # the same memory every time, as in training
        self.mpi = Allreduces(comm, self.x, self._refill, self._sources)
        self.methods = [*self.mpi.methods(), *(self._ours(spec, route) for spec in specs)]
        self.topology = topology_of(comm)
        self.yardsticks = Yardsticks(comm, self.topology, nbytes)

    def measured(self, repetitions: Repetitions, trace: Path | None) -> list[Row]:
        """A row for each method; traces, if wanted, are taken after all is measured."""
        found = measure(self.comm, self.methods, repetitions, beside=self._compare, trace=trace)
        rows = _quickest_of_each([self._row(one) for one in found])
        self.mpi.close()
        self.yardsticks.close()
        return rows

    @property
    def rates(self) -> dict[str, Any]:
        """What link and memory reached, in bytes per second."""
        return {"link": self.yardsticks.link, "copy": self.yardsticks.copy}

    def _compare(self, repetition: int) -> None:
        """Measure the yardsticks in repetitions 0, 1, 2, 4, 8 and so on: their number is not known before."""
        if repetition & (repetition - 1) == 0:
            self.yardsticks.measure()

    def _row(self, m: Measurement) -> Row:
        c = m.method
        if m.sent is None:
            route, least = c.text, self._bound_of_mpi(c.name)
        else:
            route, least = route_name(c.route), self._bound(c, [levels["inter"] for levels in m.sent])
        return Row(
            **m.fields(self.nbytes, self.comm.size), route=route, wire_seconds=least.wire, memory_seconds=least.memory,
            bound_seconds=least.seconds, ratio=m.seconds / least.seconds if least.seconds else None,
        )  # fmt: skip

    def _bound(self, c: TimedMethod, inter: Sequence[int]) -> Bound:
        from .. import compressors
        from ..feedback import Feedback

        n = self.nbytes // 4
        method = None if c.name == "none" else compressors.get(c.name).at(None)
        feedback = method is not None and Feedback().resolved(method, n).kind != "none"
        assert c.route is not None
        return bound(inter, memory_traffic(c.route, self.topology, n, method, feedback), self.topology, self.yardsticks)

    def _bound_of_mpi(self, method: str) -> Bound:
        """Of any allreduce: the library does not tell what it does."""
        kind = FP32 if method.startswith(FP32) else FP16
        sent = least_sent(self.topology, self.nbytes if kind == FP32 else self.nbytes // 2)
        traffic = least_traffic(self.topology, self.nbytes // 4, kind)
        return bound(sent, traffic, self.topology, self.yardsticks)

    def _refill(self) -> None:
        self.inputs.refill({NAME: self.x})

    def _ours(self, spec: str, route: str | None) -> TimedMethod:
        own = None if spec == "none" else route
        return by_session(self.comm, self.inputs, {NAME: self.x}, spec, route=own, min_bytes=0)

    def _sources(self) -> list[np.ndarray]:
        return [source[NAME] for source in self.inputs.of_all()]


def _quickest_of_each(rows: Sequence[Row]) -> list[Row]:
    """A row for each method: where several ways were measured under one name, the one with the least median."""
    best: dict[str, Row] = {}
    for row in rows:
        if row.method not in best or row.seconds < best[row.method].seconds:
            best[row.method] = row
    return list(best.values())
