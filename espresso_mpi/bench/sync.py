"""``bench sync``: one array, every compressor, beside MPI's own allreduce in the same run and beside what is possible.

What is possible is said by ``bound``; how the methods are timed and checked by ``contest``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..compressors import spellings
from ..types import TensorSpec
from . import timeline
from .bound import Bound, Yardsticks, bound, memory_traffic, topology_of
from .contest import Contestant, Effort, Inputs, in_turns, route_name, wrong_mean, wrong_of, wrong_together
from .output import check_writable, milliseconds, number, parse_sizes, progress, show, write_rows
from .report import rates_text, size_text

NAME = "x"
"""The tensor's."""


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        method: compressor, or ``mpi-allreduce-fp32`` / ``mpi-allreduce-fp16``.
        route: name or spelling of the route; "" for MPI's own.
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
    sizes: str = "64KiB,1MiB,16MiB",
    compressors: str = "none,fp16,int8,int4,onebit,topk:ratio=0.01",
    route: str | None = None,
    repeats: int = 20,
    seconds: float | None = None,
    json: Path | None = None,
    trace: Path | None = None,
) -> list[Row]:
    """Measure, print a table on rank 0, and write JSON if asked. Collective.

    Args:
        sizes: comma list of sizes of the float32 array, e.g. ``64KiB,1MiB``.
        compressors: comma list of spellings.
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
    timeline.check_trace(trace)
    lengths, specs = parse_sizes(sizes), spellings(compressors)
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
        self.contestants = [self._mpi_fp32(), self._mpi_fp16(), *(self._ours(spec, route) for spec in specs)]
        self.topology = topology_of(comm)
        self.yardsticks = Yardsticks(comm, self.topology, nbytes)

    def measured(self, effort: Effort, trace: Path | None) -> list[Row]:
        """A row for each method; traces, if wanted, are taken after all is measured."""
        wrong = [c.check() for c in self.contestants]
        before = [None if c.sent is None else dict(c.sent()) for c in self.contestants]
        times = in_turns(self.comm, self.contestants, effort, self._compare)
        rows = [self._row(*of_one) for of_one in zip(self.contestants, times.T, wrong, before)]
        for c in self.contestants:
            if trace is not None and c.trace is not None:
                c.trace(trace)
            c.close()
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
            return Row(c.method, "", self.nbytes, seconds, p99, None, None, wrong, len(times))
        mine = {level: (count - before[level]) // len(times) for level, count in c.sent().items()}
        every = self.comm.allgather(mine)
        inter = [sent["inter"] for sent in every]
        least = self._bound(c, inter)
        total = sum(sum(sent.values()) for sent in every)
        return Row(
            c.method, route_name(c.route), self.nbytes, seconds, p99, total, sum(inter), wrong, len(times), least.wire,
            least.memory, least.seconds, seconds / least.seconds if least.seconds else None,
        )  # fmt: skip

    def _bound(self, c: Contestant, inter: Sequence[int]) -> Bound:
        from .. import compressors
        from ..feedback import Feedback

        n = self.nbytes // 4
        method = None if c.method == "none" else compressors.get(c.method).at(None)
        feedback = method is not None and Feedback().resolved(method, n).kind != "none"
        assert c.route is not None
        return bound(inter, memory_traffic(c.route, self.topology, n, method, feedback), self.topology, self.yardsticks)

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
            with timeline.tracing(session, path, spec):
                session.sync({NAME: self.x})

        way = session.strategy(TensorSpec(NAME, self.x.shape, "float32")).route
        sent = partial(_bytes_by_level, session)
        return Contestant(
            spec, lambda: session.sync({NAME: self.x}), check, self._refill, way, sent, trace, session.close
        )

    # --- MPI's own ---

    def _mpi_fp32(self) -> Contestant:
        from mpi4py import MPI

        out = np.empty_like(self.x)

        def check() -> int:
            self.comm.Allreduce(self.inputs.mine[NAME], out, MPI.SUM)
            mean = out / np.float32(self.comm.size)
            return wrong_together(self.comm, [mean], lambda: wrong_mean(mean, self._sources()))

        return Contestant("mpi-allreduce-fp32", lambda: self.comm.Allreduce(self.x, out, MPI.SUM), check, self._refill)

    def _mpi_fp16(self) -> Contestant:
        """Cast, allreduce of halves, cast back. MPI's own half type is slow or missing, so the sum is our kernel."""
        from mpi4py import MPI

        from .. import compressors

        cast = compressors.get("fp16")
        mine, total = (np.empty(cast.nbytes(self.x.size), np.uint8) for _ in range(2))
        out = np.empty_like(self.x)
        op = MPI.Op.Create(_add_halves, commute=True)

        def run() -> None:
            cast.encode(self.x, mine)
            self.comm.Allreduce([mine, MPI.UINT16_T], [total, MPI.UINT16_T], op)
            cast.decode(total, out)

        def check() -> int:
            self._refill()
            run()
            return wrong_together(self.comm, [out], lambda: _wrong_halves(out, self._sources()))

        return Contestant("mpi-allreduce-fp16", run, check, self._refill, close=op.Free)

    def _sources(self) -> list[np.ndarray]:
        return [source[NAME] for source in self.inputs.of_all()]


def _bytes_by_level(session: Any) -> Mapping[str, int]:
    return session.stats().bytes_by_level


def _wrong_halves(out: np.ndarray, sources: Sequence[np.ndarray]) -> int:
    """Elements further from the float64 sum than sums of this many float16 values can be."""
    exact, size = np.zeros(out.size), np.zeros(out.size)
    for source in sources:
        exact += source
        size += np.abs(source)
    return int(np.count_nonzero(~(np.abs(out - exact) <= len(sources) * size * 2.0**-11 + 2.0**-24)))


def _add_halves(source: Any, target: Any, datatype: Any) -> None:
    """``target += source`` on float16 bits, as an MPI reduction."""
    from ..collectives.reduction import mean_rows

    rows = np.frombuffer(source, np.uint16).reshape(1, -1)
    out = np.frombuffer(target, np.uint16)
    mean_rows(out, np.concatenate([rows, rows]), 1, 1.0, "float16")


# --- output -----------------------------------------------------------------------------------------------------------


def _print(rows: Sequence[Row], ranks: int, rates: Mapping[str, Mapping[str, Any]]) -> None:
    header = ["size", "method", "median\nms", "p99\nms", "x fp32", "x fp16", "wire\nms", "memory\nms", "bound\nms",
              "time /\nbound", "sent\nMB", "between\nMB", "wrong", "route"]  # fmt: skip
    title = f"one array, {ranks} ranks; speed-up over MPI_Allreduce in the same run"
    show(title, header, [_line(row, rows) for row in rows], left=("method", "route"))
    for nbytes, rate in rates.items():
        print(f"{size_text(int(nbytes))}: {rates_text(rate)}")


def _line(row: Row, rows: Sequence[Row]) -> list[str]:
    fp32, fp16 = (_seconds(rows, row.nbytes, f"mpi-allreduce-{kind}") / row.seconds for kind in ("fp32", "fp16"))
    parts = (row.wire_seconds, row.memory_seconds, row.bound_seconds)
    return [
        size_text(row.nbytes), row.method, *map(milliseconds, (row.seconds, row.p99)), number(fp32), number(fp16),
        *map(milliseconds, parts), number(row.ratio), _megabytes(row.wire_bytes), _megabytes(row.inter_bytes),
        str(row.wrong), row.route or "MPI's own",
    ]  # fmt: skip


def _seconds(rows: Sequence[Row], nbytes: int, method: str) -> float:
    return next(row.seconds for row in rows if row.nbytes == nbytes and row.method == method)


def _megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:.3g}"
