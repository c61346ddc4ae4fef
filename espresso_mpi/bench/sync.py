"""``bench sync``: one array, every compressor, beside MPI's own allreduce in the same run.

The methods take turns within each repetition, so that a noisy moment of the machine meets them all. A repetition counts
as long as its slowest rank took. Every method's first result is checked element by element.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..compressors import spellings
from ..types import Route, TensorSpec
from .output import check_writable, parse_sizes, progress, show, write_rows
from .report import size_text


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        method: compressor, or ``mpi-allreduce-fp32`` / ``mpi-allreduce-fp16``.
        route: spelling of the route; "" for MPI's own.
        nbytes: bytes of the float32 array.
        seconds, p99: median and 99th percentile, over repetitions, of the slowest rank.
        wire_bytes: bytes that all ranks together send to other ranks in one synchronisation; MPI does not tell.
        inter_bytes: those of them that go to another machine.
        wrong: elements, over all ranks, that differ from the reference.
    """

    method: str
    route: str
    nbytes: int
    seconds: float
    p99: float
    wire_bytes: int | None
    inter_bytes: int | None
    wrong: int


@dataclass(frozen=True)
class Contestant:
    """A method under test: how to run it once on ``x``, and what it says about itself."""

    method: str
    route: str
    run: Callable[[np.ndarray], None]
    check: Callable[[], int]
    sent: Callable[[], dict[str, int]] | None = None
    close: Callable[[], None] | None = None


def main(
    sizes: str = "64KiB,1MiB,16MiB",
    compressors: str = "none,fp16,int8,onebit,topk:ratio=0.01",
    route: str | None = None,
    repeats: int = 20,
    json: Path | None = None,
) -> list[Row]:
    """Measure, print a table on rank 0, and write JSON if asked.

    Args:
        sizes: comma list of sizes of the float32 array, e.g. ``64KiB,1MiB``.
        compressors: comma list of spellings.
        route: route of the compressed methods; default: the session's own choice.
        repeats: timed repetitions a method and size.
        json: file for the result.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    check_writable(json)
    lengths, specs = parse_sizes(sizes), spellings(compressors)
    if world.size == 1:
        print("bench sync: one rank has nobody to send to; start several with espresso-mpi run -n 4")
    rows: list[Row] = []
    with progress("bench sync", len(lengths) * repeats, world.rank == 0) as tick:
        for nbytes in lengths:
            rows += _measure(world, nbytes, specs, route, repeats, tick)
    if world.rank == 0:
        _print(rows, world.size)
        if json is not None:
            write_rows(json, rows)
    return rows


# --- measuring --------------------------------------------------------------------------------------------------------


def _measure(
    world: Any, nbytes: int, specs: Sequence[str], route: str | None, repeats: int, tick: Callable[[], None]
) -> list[Row]:
    sources = [
        np.random.default_rng([rank, nbytes]).standard_normal(nbytes // 4).astype(np.float32)
        for rank in range(world.size)
    ]
    contestants = [_mpi_fp32(world, sources), _mpi_fp16(world, sources)]
    contestants += [_ours(world, sources, spec, route) for spec in specs]
    wrong = [world.allreduce(c.check()) for c in contestants]
    before = [c.sent() if c.sent else None for c in contestants]
    source = sources[world.rank]
    x = np.empty_like(source)
    times = np.array([_repetition(world, contestants, source, x, tick) for _ in range(repeats)])
    rows = []
    for c, column, bad, first in zip(contestants, times.T, wrong, before):
        bytes_ = None if c.sent is None else {k: (v - first[k]) // repeats for k, v in c.sent().items()}  # type: ignore[index]
        total = None if bytes_ is None else world.allreduce(sum(bytes_.values()))
        inter = None if bytes_ is None else world.allreduce(bytes_["inter"])
        seconds, p99 = float(np.median(column)), float(np.percentile(column, 99))
        rows.append(Row(c.method, c.route, nbytes, seconds, p99, total, inter, bad))
    for c in contestants:
        if c.close:
            c.close()
    return rows


def _repetition(
    world: Any, contestants: Sequence[Contestant], source: np.ndarray, x: np.ndarray, tick: Callable[[], None]
) -> list[float]:
    """Seconds of the slowest rank, for each contestant once."""
    from mpi4py import MPI

    seconds = np.empty(len(contestants))
    for number, contestant in enumerate(contestants):
        x[...] = source  # the same memory every time, as in training
        world.Barrier()
        start = time.perf_counter()
        contestant.run(x)
        seconds[number] = time.perf_counter() - start
    world.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    tick()
    return seconds.tolist()


def _ours(world: Any, sources: Sequence[np.ndarray], spec: str, route: str | None) -> Contestant:
    from ..session import Session

    options: dict[str, Any] = {"compressor": spec, "route": None if spec == "none" else route, "min_bytes": 0}
    session = Session(world, **options)
    chosen = session.strategy(TensorSpec("x", sources[0].shape, "float32")).route

    def check() -> int:
        with Session(world, **options, feedback=False) as single:
            x = sources[world.rank].copy()
            single.sync(x)
            topology = single.topology
        session.sync(sources[world.rank].copy())  # the first step allocates and compiles
        if spec == "none":
            return _wrong_mean(x, sources)
        return _wrong_bits(x, chosen, topology, sources, spec)

    return Contestant(
        spec,
        str(chosen),
        lambda x: session.sync(x),
        check,
        lambda: dict(session.stats().bytes_by_level),
        session.close,
    )


def _wrong_mean(x: np.ndarray, sources: Sequence[np.ndarray]) -> int:
    """Elements further from the float64 mean than float32 sums of this many terms can be."""
    total, size = np.zeros(x.size), np.zeros(x.size)
    for source in sources:
        total += source
        size += np.abs(source)
    return int(np.count_nonzero(~(np.abs(x - total / len(sources)) <= size * 2.0**-23)))


def _wrong_bits(x: np.ndarray, route: Route, topology: Any, sources: Sequence[np.ndarray], spec: str) -> int:
    """Elements that are not exactly the sum of decoded payloads along the route."""
    from .. import compressors
    from .reference import synchronised

    compressor = compressors.get(spec).shaped(x.shape)
    expected = synchronised(route, topology, sources, compressor)[0]
    return int(np.count_nonzero(x.view(np.uint32) != expected.view(np.uint32)))


# --- MPI's own --------------------------------------------------------------------------------------------------------


def _mpi_fp32(world: Any, sources: Sequence[np.ndarray]) -> Contestant:
    from mpi4py import MPI

    out = np.empty_like(sources[0])

    def check() -> int:
        world.Allreduce(sources[world.rank], out, MPI.SUM)
        return _wrong_mean(out / np.float32(world.size), sources)

    return Contestant("mpi-allreduce-fp32", "", lambda x: world.Allreduce(x, out, MPI.SUM), check)


def _mpi_fp16(world: Any, sources: Sequence[np.ndarray]) -> Contestant:
    """Cast, allreduce of halves, cast back. MPI's own half type is slow or missing, so the sum is our kernel."""
    from mpi4py import MPI

    from .. import compressors

    cast = compressors.get("fp16")
    mine, total = (np.empty(cast.nbytes(sources[0].size), np.uint8) for _ in range(2))
    out = np.empty_like(sources[0])
    op = MPI.Op.Create(_add_halves, commute=True)

    def run(x: np.ndarray) -> None:
        cast.encode(x, mine)
        world.Allreduce([mine, MPI.UINT16_T], [total, MPI.UINT16_T], op)
        cast.decode(total, out)

    def check() -> int:
        run(sources[world.rank])
        exact = np.sum(sources, axis=0, dtype=np.float64)
        size = np.sum(np.abs(sources), axis=0, dtype=np.float64)
        return int(np.count_nonzero(~(np.abs(out - exact) <= len(sources) * size * 2.0**-11 + 2.0**-24)))

    return Contestant("mpi-allreduce-fp16", "", run, check, close=op.Free)


def _add_halves(source: Any, target: Any, datatype: Any) -> None:
    """``target += source`` on float16 bits, as an MPI reduction."""
    from ..collectives.reduction import mean_rows

    rows = np.frombuffer(source, np.uint16).reshape(1, -1)
    out = np.frombuffer(target, np.uint16)
    mean_rows(out, np.concatenate([rows, rows]), 1, 1.0, "float16")


# --- output -----------------------------------------------------------------------------------------------------------


def _print(rows: Sequence[Row], ranks: int) -> None:
    header = ["size", "method", "median ms", "p99 ms", "x fp32", "x fp16", "wire bytes", "between machines", "wrong",
              "route"]  # fmt: skip
    title = f"one array, {ranks} ranks; speed-up over MPI_Allreduce in the same run"
    show(title, header, [_line(row, rows) for row in rows], left=("method", "route"))


def _line(row: Row, rows: Sequence[Row]) -> list[str]:
    fp32, fp16 = (_seconds(rows, row.nbytes, f"mpi-allreduce-{kind}") / row.seconds for kind in ("fp32", "fp16"))
    return [
        size_text(row.nbytes), row.method, f"{row.seconds * 1e3:.2f}", f"{row.p99 * 1e3:.2f}", f"{fp32:.2f}",
        f"{fp16:.2f}", _count(row.wire_bytes), _count(row.inter_bytes), str(row.wrong), row.route or "MPI's own",
    ]  # fmt: skip


def _seconds(rows: Sequence[Row], nbytes: int, method: str) -> float:
    return next(row.seconds for row in rows if row.nbytes == nbytes and row.method == method)


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
