"""``bench tensors``: all gradients of a network in one ``sync``, beside MPI with all in one buffer and one by one.

The network is ResNet-101: 314 tensors of very different sizes, in the order in which a backward pass yields them.
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
from ..planner.workloads.models import MODELS
from .contest import Contestant, Effort, Inputs, in_turns, wrong_mean, wrong_of, wrong_together
from .defaults import Tensors as Defaults

FUSED, EACH = "mpi-allreduce-fused", "mpi-allreduce-each"

Shapes = Mapping[str, tuple[int, ...]]

resnet101 = MODELS["resnet101"].shapes
"""The shapes of ResNet-101's 314 parameters by name, the last layer first, as a backward pass yields them."""


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        method: compressor; or ``mpi-allreduce-fused``, MPI_Allreduce of one buffer as large as all tensors together,
            without the copies into and out of it; or ``mpi-allreduce-each``, one MPI_Allreduce a tensor.
        tensors, nbytes: how many, and their bytes together.
        seconds, p99: median and 99th percentile, over repetitions, of the slowest rank.
        wire_bytes, inter_bytes: sent by all ranks together, and to other machines; None for MPI.
        wrong: elements, over all ranks, that differ from the reference.
        repeats: repetitions that were made.
    """

    method: str
    tensors: int
    nbytes: int
    seconds: float
    p99: float
    wire_bytes: int | None
    inter_bytes: int | None
    wrong: int
    repeats: int


def main(
    compressors: str = Defaults.compressors,
    sizes: str | None = None,
    repeats: int = Defaults.repeats,
    seconds: float | None = None,
    json: Path | None = None,
) -> list[Row]:
    """Measure, print a table on rank 0, and write JSON if asked. Collective.

    Args:
        compressors: comma list of spellings.
        sizes: comma list of sizes of float32 arrays in the place of ResNet-101's.
        repeats: most timed repetitions of each method.
        seconds: time after which no further repetition is begun, but for the first three.
        json: file for the result.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    check_writable(json)
    specs, shapes = spellings(compressors), shapes_of(sizes)
    with progress("bench tensors", repeats, world.rank == 0) as tick:
        rows = _measured(world, shapes, specs, Effort(repeats, seconds, tick))
    if world.rank == 0:
        _print(rows, world.size)
        if json is not None:
            write_rows(json, rows, kind="tensors", network="ResNet-101" if sizes is None else sizes)
    return rows


def shapes_of(sizes: str | None) -> dict[str, tuple[int, ...]]:
    """Tensors of the sizes in a comma list, named by their place in it; without one those of ResNet-101."""
    if sizes is None:
        return resnet101()
    return {f"tensor{number}": (nbytes // 4,) for number, nbytes in enumerate(parse_sizes(sizes))}


# --- measuring --------------------------------------------------------------------------------------------------------


def _measured(comm: Any, shapes: Shapes, specs: Sequence[str], effort: Effort) -> list[Row]:
    inputs = Inputs(comm, shapes)
    grads = inputs.copies()
    contestants = [_fused(comm, inputs), _each(comm, inputs, grads)]
    contestants += [_ours(comm, inputs, grads, spec) for spec in specs]
    wrong = [c.check() for c in contestants]
    before = [None if c.sent is None else dict(c.sent()) for c in contestants]
    times = in_turns(comm, contestants, effort)
    rows = [_row(comm, shapes, *of_one) for of_one in zip(contestants, times.T, wrong, before)]
    for c in contestants:
        c.close()
    return rows


def _row(
    comm: Any, shapes: Shapes, c: Contestant, times: np.ndarray, wrong: int, before: Mapping[str, int] | None
) -> Row:
    nbytes = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    total = inter = None
    if c.sent is not None and before is not None:
        mine = {level: (count - before[level]) // len(times) for level, count in c.sent().items()}
        total, inter = comm.allreduce(sum(mine.values())), comm.allreduce(mine["inter"])
    seconds, p99 = float(np.median(times)), float(np.percentile(times, 99))
    return Row(c.method, len(shapes), nbytes, seconds, p99, total, inter, wrong, len(times))


def _ours(comm: Any, inputs: Inputs, grads: dict[str, np.ndarray], spec: str) -> Contestant:
    from ..session import Session

    session = Session(comm, compressor=spec)

    def check() -> int:
        with Session(comm, compressor=spec, feedback=False) as single:
            results = inputs.copies()
            single.sync(results)
            wrong = wrong_together(comm, results.values(), lambda: wrong_of(single, results, inputs.of_all()))
        session.sync(inputs.copies())  # the first step allocates and compiles
        return wrong

    def sent() -> Mapping[str, int]:
        return session.stats().bytes_by_level

    return Contestant(
        spec, partial(session.sync, grads), check, partial(inputs.refill, grads), sent=sent, close=session.close
    )


def _fused(comm: Any, inputs: Inputs) -> Contestant:
    """One buffer that holds all tensors side by side: what a program gains that keeps its gradients so."""
    from mpi4py import MPI

    flat = np.concatenate([x.reshape(-1) for x in inputs.mine.values()])
    out = np.empty_like(flat)

    def check() -> int:
        comm.Allreduce(flat, out, MPI.SUM)
        mean = out / np.float32(comm.size)
        return wrong_together(comm, [mean], lambda: wrong_mean(mean, [_joined(s) for s in inputs.of_all()]))

    return Contestant(FUSED, lambda: comm.Allreduce(flat, out, MPI.SUM), check)


def _joined(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([x.reshape(-1) for x in arrays.values()])


def _each(comm: Any, inputs: Inputs, grads: Mapping[str, np.ndarray]) -> Contestant:
    from mpi4py import MPI

    def run() -> None:
        for x in grads.values():
            comm.Allreduce(MPI.IN_PLACE, x, MPI.SUM)

    def check() -> int:
        inputs.refill(grads)
        run()
        mean = _joined(grads) / np.float32(comm.size)
        return wrong_together(comm, [mean], lambda: wrong_mean(mean, [_joined(s) for s in inputs.of_all()]))

    return Contestant(EACH, run, check, partial(inputs.refill, grads))


# --- output -----------------------------------------------------------------------------------------------------------


def _print(rows: Sequence[Row], ranks: int) -> None:
    header, lines = table(rows)
    first = rows[0]
    title = f"{first.tensors} tensors, {first.nbytes / 1e6:.1f} MB, {ranks} ranks"
    show(title, header, lines)


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Heading and lines of the table that people read; times are divided by those of MPI in the same run."""
    fused, each = (next(row.seconds for row in rows if row.method == method) for method in (FUSED, EACH))

    def megabytes(value: int | None) -> str:
        return "" if value is None else f"{value / 1e6:.1f}"

    header = ["method", "median ms", "p99 ms", "time / fused", "x each", "sent MB", "between MB", "wrong"]
    lines = [
        [row.method, *map(milliseconds, (row.seconds, row.p99)), f"{row.seconds / fused:.2f}",
         f"{each / row.seconds:.2f}", megabytes(row.wire_bytes), megabytes(row.inter_bytes), str(row.wrong)]
        for row in rows
    ]  # fmt: skip
    return header, lines
