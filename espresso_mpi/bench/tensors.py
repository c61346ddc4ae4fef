"""``bench tensors``: all gradients of a network in one ``sync``, beside MPI with all in one buffer and one by one.

The network is ResNet-101: 314 tensors of very different sizes, in the order in which a backward pass yields them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..compressors import read_specs
from ..files.output import parse_sizes
from ..planner.workloads.models import MODELS
from .defaults import Tensors as Defaults
from .harness import columns
from .harness.checks import Inputs, wrong_sum
from .harness.columns import MB, RATIO, Column, Table
from .harness.measuring import by_session, measure
from .harness.rows import Timing
from .harness.suite import Suite
from .harness.timing import Repetitions, TimedMethod

FUSED, EACH = "mpi-allreduce-fused", "mpi-allreduce-each"

Shapes = Mapping[str, tuple[int, ...]]

resnet101 = MODELS["resnet101"].shapes
"""The shapes of ResNet-101's 314 parameters by name, the last layer first, as a backward pass yields them."""


@dataclass(frozen=True, kw_only=True)
class Row(Timing):
    """One line of the result.

    Its method is a compressor; or ``mpi-allreduce-fused``, MPI_Allreduce of one buffer as large as all tensors
    together, without the copies into and out of it; or ``mpi-allreduce-each``, one MPI_Allreduce a tensor.

    Attributes:
        tensors: how many; ``nbytes`` are of all together.
    """

    tensors: int


def _over(method: str, inverse: bool = False) -> Callable[[Row, Sequence[Row]], float]:
    """A row's time over that of one of MPI's ways in the same run, or the other way round."""

    def value(row: Row, rows: Sequence[Row]) -> float:
        other = {one.method: one.seconds for one in rows}[method]
        return other / row.seconds if inverse else row.seconds / other

    return value


TABLE = Table(
    (
        columns.METHOD,
        *columns.TIMES,
        *columns.BANDWIDTHS,
        *columns.CPU,
        Column("time / fused", _over(FUSED), RATIO),
        Column("x each", _over(EACH, inverse=True), RATIO),
        Column("sent", "wire_bytes", MB),
        Column("between", "inter_bytes", MB),
        columns.WRONG,
    )
)


def main(
    compressors: str = Defaults.compressors,
    sizes: str | None = None,
    repeats: int = Defaults.repeats,
    seconds: float | None = None,
    json: Path | None = None,
) -> list[Row]:
    """Measure, print a table on rank 0, and write JSON if asked. Collective.

    Args:
        compressors: comma list of specs.
        sizes: comma list of sizes of float32 arrays in the place of ResNet-101's.
        repeats: most timed repetitions of each method.
        seconds: time after which no further repetition is begun, but for the first three.
        json: file for the result.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    run = Suite("tensors", world, json)
    specs, shapes = read_specs(compressors), shapes_of(sizes)
    with run.repetitions(1, repeats, seconds) as repetitions:
        rows = _measured(world, shapes, specs, repetitions)
    title = f"{rows[0].tensors} tensors, {rows[0].nbytes / 1e6:.1f} MB, {world.size} ranks"
    run.publish(TABLE, title, rows, network="ResNet-101" if sizes is None else sizes)
    return rows


def shapes_of(sizes: str | None) -> dict[str, tuple[int, ...]]:
    """Tensors of the sizes in a comma list, named by their place in it; without one those of ResNet-101."""
    if sizes is None:
        return resnet101()
    return {f"tensor{number}": (nbytes // 4,) for number, nbytes in enumerate(parse_sizes(sizes))}


# --- measuring --------------------------------------------------------------------------------------------------------


def _measured(comm: Any, shapes: Shapes, specs: Sequence[str], repetitions: Repetitions) -> list[Row]:
    inputs = Inputs(comm, shapes)
    grads = inputs.copies()
    methods = [_fused(comm, inputs), _each(comm, inputs, grads)]
    methods += [by_session(comm, inputs, grads, spec) for spec in specs]
    nbytes = sum(x.nbytes for x in grads.values())
    return [Row(**one.fields(nbytes, comm.size), tensors=len(grads)) for one in measure(comm, methods, repetitions)]


def _fused(comm: Any, inputs: Inputs) -> TimedMethod:
    """One buffer that holds all tensors side by side: what a program gains that keeps its gradients so."""
    from mpi4py import MPI

    flat = np.concatenate([x.reshape(-1) for x in inputs.mine.values()])
    out = np.empty_like(flat)

    def check() -> int:
        comm.Allreduce(flat, out, MPI.SUM)
        return wrong_sum(comm, out, lambda: [_joined(s) for s in inputs.of_all()])

    return TimedMethod(FUSED, lambda: comm.Allreduce(flat, out, MPI.SUM), check)


def _joined(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([x.reshape(-1) for x in arrays.values()])


def _each(comm: Any, inputs: Inputs, grads: Mapping[str, np.ndarray]) -> TimedMethod:
    from mpi4py import MPI

    def run() -> None:
        for x in grads.values():
            comm.Allreduce(MPI.IN_PLACE, x, MPI.SUM)

    def check() -> int:
        inputs.refill(grads)
        run()
        return wrong_sum(comm, _joined(grads), lambda: [_joined(s) for s in inputs.of_all()])

    return TimedMethod(EACH, run, check, partial(inputs.refill, grads))
