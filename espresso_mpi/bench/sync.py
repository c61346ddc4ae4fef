"""``bench sync``: one array, every compressor, beside MPI's own allreduce in the same run and beside what is possible.

What is possible is said by ``bound``; how the methods are timed and checked by ``contest``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..compressors import spellings
from ..files.output import check_writable, parse_sizes, progress, show, write_rows
from ..tracing import pictures
from ..types import TensorSpec
from .bound import Bound, Yardsticks, bound, memory_traffic, topology_of
from .contest import Contestant, Effort, Inputs, in_turns, route_name, wrong_of, wrong_together
from .defaults import Sync as Defaults
from .mpi_own import FP16, FP32, Allreduces, least_sent, least_traffic
from .report import rates_text
from .sync_tables import HEADER, line, size_text

NAME = "x"
"""The tensor's."""


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        method: compressor, or ``mpi-allreduce-fp32`` / ``mpi-allreduce-fp16``, ending in ``-tuned`` where the quickest
            way was chosen that is not the library's own choice.
        route: name or spelling of the route; for MPI which way it went.
        nbytes: bytes of the float32 array.
        seconds, p99: median and 99th percentile, over repetitions, of the slowest rank.
        wire_bytes: bytes that all ranks together send to other ranks in one synchronisation; MPI does not tell.
        inter_bytes: those of them that go to another machine.
        wrong: elements, over all ranks, that differ from the reference.
        repeats: repetitions that were made.
        wire_seconds, memory_seconds: least time for the busiest link and for the memory, see ``bound``.
        bound_seconds: the larger of the two. ratio: seconds / bound_seconds.
    """

    method: str
    route: str
    nbytes: int
    seconds: float
    p99: float
    wire_bytes: int | None
    inter_bytes: int | None
    wrong: int
    repeats: int
    wire_seconds: float | None = None
    memory_seconds: float | None = None
    bound_seconds: float | None = None
    ratio: float | None = None


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
        compressors: comma list of spellings. only_mpi: leave them out and measure MPI's own only.
        route: route of the compressed methods; default: the session's own choice.
        repeats: most timed repetitions a method and size.
        seconds: time for each size after which no further repetition is begun, but for the first three.
        json: file for the result.
        trace: trace one more synchronisation of each compressor at the last size to this file, the compressor's name
            before its suffix.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    check_writable(json)
    pictures.check_trace(trace)
    lengths, specs = parse_sizes(sizes), () if only_mpi else spellings(compressors)
    if world.size == 1:
        print("bench sync: one rank has nobody to send to; start several with espresso-mpi run -n 4")
    rows: list[Row] = []
    rates: dict[str, Any] = {}
    with progress("bench sync", len(lengths) * repeats, world.rank == 0) as tick:
        for nbytes in lengths:
            wanted = trace if nbytes == lengths[-1] else None
            suite = _Suite(world, nbytes, specs, route)
            rows += suite.measured(Effort(repeats, seconds, tick), wanted)
            rates[str(nbytes)] = suite.rates
    if world.rank == 0:
        _print(rows, world.size, rates)
        if json is not None:
            write_rows(json, rows, kind="sync", yardsticks=rates)
    return rows


# --- measuring --------------------------------------------------------------------------------------------------------


class _Suite:
    """All methods on one size. Collective, as are its methods."""

    def __init__(self, comm: Any, nbytes: int, specs: Sequence[str], route: str | None) -> None:
        self.comm, self.nbytes = comm, nbytes
        self.inputs = Inputs(comm, {NAME: (nbytes // 4,)})
        self.x = np.empty(nbytes // 4, np.float32)  # the same memory every time, as in training
        self.mpi = Allreduces(comm, self.x, self._refill, self._sources)
        self.contestants = [*self.mpi.contestants(), *(self._ours(spec, route) for spec in specs)]
        self.topology = topology_of(comm)
        self.yardsticks = Yardsticks(comm, self.topology, nbytes)

    def measured(self, effort: Effort, trace: Path | None) -> list[Row]:
        """A row for each method; traces, if wanted, are taken after all is measured."""
        wrong = [c.check() for c in self.contestants]
        before = [None if c.sent is None else dict(c.sent()) for c in self.contestants]
        times = in_turns(self.comm, self.contestants, effort, self._compare)
        rows = _quickest_of_each([self._row(*of_one) for of_one in zip(self.contestants, times.T, wrong, before)])
        for c in self.contestants:
            if trace is not None and c.trace is not None:
                c.trace(trace)
            c.close()
        self.mpi.close()
        self.yardsticks.close()
        return rows

    @property
    def rates(self) -> dict[str, Any]:
        """What link and memory reached, in bytes a second."""
        return {"link": self.yardsticks.link, "copy": self.yardsticks.copy}

    def _compare(self, repetition: int) -> None:
        """Take the yardsticks in repetitions 0, 1, 2, 4, 8 and so on: nobody knows how many there will be."""
        if repetition & (repetition - 1) == 0:
            self.yardsticks.measure()

    def _row(self, c: Contestant, times: np.ndarray, wrong: int, before: Mapping[str, int] | None) -> Row:
        seconds, p99 = float(np.median(times)), float(np.percentile(times, 99))
        if c.sent is None or before is None:
            route, total, between, least = c.text, None, None, self._bound_of_mpi(c.method)
        else:
            mine = {level: (count - before[level]) // len(times) for level, count in c.sent().items()}
            every = self.comm.allgather(mine)
            inter = [sent["inter"] for sent in every]
            route, least = route_name(c.route), self._bound(c, inter)
            total, between = sum(sum(sent.values()) for sent in every), sum(inter)
        return Row(
            c.method, route, self.nbytes, seconds, p99, total, between, wrong, len(times), least.wire, least.memory,
            least.seconds, seconds / least.seconds if least.seconds else None,
        )  # fmt: skip

    def _bound(self, c: Contestant, inter: Sequence[int]) -> Bound:
        from .. import compressors
        from ..feedback import Feedback

        n = self.nbytes // 4
        method = None if c.method == "none" else compressors.get(c.method).at(None)
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

    def _ours(self, spec: str, route: str | None) -> Contestant:
        from ..session import Session

        options: dict[str, Any] = {"compressor": spec, "route": None if spec == "none" else route, "min_bytes": 0}
        session = Session(self.comm, **options)

        def check() -> int:
            with Session(self.comm, **options, feedback=False) as single:
                results = self.inputs.copies()
                single.sync(results)
                wrong = wrong_together(
                    self.comm, results.values(), lambda: wrong_of(single, results, self.inputs.of_all())
                )
            session.sync(self.inputs.copies())  # the first step allocates and compiles
            return wrong

        def trace(path: Path) -> None:
            self._refill()
            with pictures.tracing(session, path, spec):
                session.sync({NAME: self.x})

        way = session.strategy(TensorSpec(NAME, self.x.shape, "float32")).route
        sent = partial(_bytes_by_level, session)
        return Contestant(
            spec, lambda: session.sync({NAME: self.x}), check, self._refill, way, sent, trace, session.close
        )

    def _sources(self) -> list[np.ndarray]:
        return [source[NAME] for source in self.inputs.of_all()]


def _quickest_of_each(rows: Sequence[Row]) -> list[Row]:
    """A row for each method: where several ways were measured under one name, the one with the least median."""
    best: dict[str, Row] = {}
    for row in rows:
        if row.method not in best or row.seconds < best[row.method].seconds:
            best[row.method] = row
    return list(best.values())


def _bytes_by_level(session: Any) -> Mapping[str, int]:
    return session.stats().bytes_by_level


# --- output -----------------------------------------------------------------------------------------------------------


def _print(rows: Sequence[Row], ranks: int, rates: Mapping[str, Mapping[str, Any]]) -> None:
    every = [asdict(row) for row in rows]
    title = f"one array, {ranks} ranks; speed-up over MPI_Allreduce and our fp16 in the same run"
    header = [heading.replace(" ", "\n") for heading in HEADER]
    show(title, header, [line(row, every) for row in every], left=("method", "route"))
    for nbytes, rate in rates.items():
        print(f"{size_text(int(nbytes))}: {rates_text(rate)}")
