"""``bench collectives``: every collective of a session beside MPI's own on the same buffers, in turns, checked.

In the manner of OSU's benchmarks and of nccl-tests: sizes, element types, operators, in place or not; algbw, busbw, and
wrong elements. All are also compressed; the bytes that they send are compared with what the payloads' sizes say.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..compressors import read_specs
from ..errors import ConfigError
from ..files.output import parse_sizes
from .collective_cases import COLLECTIVES, REDUCING, Case, Elements
from .collective_tables import TABLE, Row, draw
from .compressed_cases import CompressedCase
from .defaults import Collectives as Defaults
from .harness.columns import size_text
from .harness.measuring import Measurement, measure
from .harness.memory import lack
from .harness.suite import Suite
from .harness.timing import Repetitions, TimedMethod

DENSE = "none"

_DENSE_ARRAYS, _COMPRESSED_ARRAYS = 4, 3
"""Arrays of the measured size that a rank has at a time, for the dense methods and their check, and for each
compressor: up to 4 and 2 of 64 MiB (2 ranks, highest resident memory), and one more, as collectives differ."""


def main(
    collectives: str = Defaults.collectives,
    sizes: str = Defaults.sizes,
    factor: int = Defaults.factor,
    dtype: str = Defaults.dtype,
    op: str = Defaults.op,
    compressors: str | None = None,
    out_of_place: bool = False,
    repeats: int = Defaults.repeats,
    seconds: float | None = Defaults.seconds,
    json: Path | None = None,
    plot: Path | None = None,
) -> list[Row]:
    """Measure, print a table on rank 0, and write the files asked for. Collective.

    Args:
        collectives: comma list, or ``all``.
        sizes: comma list of sizes of the largest array of a rank, or ``FROM-TO``, by ``factor`` and both ends.
        dtype, op: element type, and operator of the reductions.
        compressors: comma list of specs to measure beside dense; default: some for sums and means of float32.
        out_of_place: reductions write to a second array.
        repeats: most timed repetitions of each collective and size.
        seconds: time for each of them after which no further repetition is begun, but for the first three.
        json, plot: files to write, the plot as PNG.

    Raises:
        ConfigError: an argument does not fit, or a file could not be written later on.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    run = Suite("collectives", world, json, plot)
    elements, names, lengths = Elements(dtype, op), chosen(collectives), lengths_of(sizes, factor)
    specs = specs_of(compressors, elements)
    run.note_one_rank()
    lengths = _that_fit(world, lengths, len(specs))
    points = [(name, n) for name in names for n in (lengths if name != "barrier" else [0])]
    rows: list[Row] = []
    with run.repetitions(len(points), repeats, seconds) as repetitions:
        for name, nbytes in points:
            case = Case(world, name, nbytes, elements, out_of_place)
            rows += _measured(case, specs if name != "barrier" else (), repetitions)
    run.draw(partial(draw, rows))
    title = f"{world.size} ranks, {dtype}, {op}, {'out of' if out_of_place else 'in'} place; MPI's own in turns"
    run.publish(TABLE, title, rows, picture=run.picture)
    return rows


# --- arguments --------------------------------------------------------------------------------------------------------


def chosen(text: str) -> list[str]:
    """The collectives of a comma list."""
    names = list(COLLECTIVES) if text == "all" else [part.strip() for part in text.split(",")]
    for name in names:
        if name not in COLLECTIVES:
            raise ConfigError(f"--collectives {name}; expected all, or some of {', '.join(COLLECTIVES)}")
    return names


def lengths_of(sizes: str, factor: int) -> list[int]:
    """The sizes of a comma list, or from one to another by a factor."""
    first, dash, last = sizes.partition("-")
    if not dash:
        return parse_sizes(sizes)
    (low,), (high,) = parse_sizes(first), parse_sizes(last)
    if factor < 2 or high < low:
        raise ConfigError(f"--sizes {sizes} --factor {factor}; expected FROM-TO, FROM below TO, and a factor from 2 on")
    found = [low]
    while found[-1] * factor < high:
        found.append(found[-1] * factor)
    return found if low == high else [*found, high]


def specs_of(text: str | None, elements: Elements) -> Sequence[str]:
    """The compressors to measure."""
    fits = elements.dtype == "float32" and elements.op in ("sum", "mean")
    if text is None:
        return read_specs(Defaults.compressors) if fits else ()
    specs = [spec for spec in read_specs(text) if spec != DENSE]
    if specs and not fits:
        raise ConfigError(
            f"--compressors {text} with --dtype {elements.dtype} --op {elements.op}; expected sum or mean of float32"
        )
    return specs


def _that_fit(comm: Any, lengths: Sequence[int], compressors: int) -> list[int]:
    """The sizes for which there is enough memory, the same on all ranks; says which ones are left out. Collective."""
    found = []
    for nbytes in lengths:
        missing = lack(comm, nbytes * (_DENSE_ARRAYS + _COMPRESSED_ARRAYS * compressors))
        if not missing:
            found.append(nbytes)
        elif comm.rank == 0:
            print(f"bench collectives: {size_text(nbytes)} is left out: that takes {missing}")
    return found


# --- measuring --------------------------------------------------------------------------------------------------------


def _measured(case: Case, specs: Sequence[str], repetitions: Repetitions) -> list[Row]:
    """A row for each way of this library. Collective."""
    from ..session import Session

    comm, own = case.comm, Session(case.comm)
    by_session = case.by_session(own)
    methods = [TimedMethod(DENSE, by_session, partial(case.wrong, by_session), case.prepare, close=own.close)]
    if case.by_mpi is not None:
        check = None if case.elements.op == "mean" and case.collective in REDUCING else partial(case.wrong, case.by_mpi)
        methods.append(TimedMethod("mpi", case.by_mpi, check, case.prepare))
    mpi = len(methods) - 1
    compressed = [CompressedCase(case, spec) for spec in specs]
    found = measure(comm, [*methods, *(one.method for one in compressed)], repetitions)
    case.close()
    theirs = found[1] if mpi else None
    rows = [_row(case, found[0], theirs)]
    return rows + [_row(case, one, theirs, c.expected) for one, c in zip(found[mpi + 1 :], compressed)]


def _row(case: Case, one: Measurement, mpi: Measurement | None, expected: int | None = None) -> Row:
    reduces = case.collective in REDUCING
    return Row(
        **one.fields(case.nbytes, case.comm.size, case.collective),
        collective=case.collective,
        dtype=case.elements.dtype,
        op=case.elements.op if reduces else "",
        in_place=case.in_place,
        mpi_seconds=None if mpi is None else mpi.seconds,
        ratio=None if mpi is None else one.seconds / mpi.seconds,
        best=float(np.min(one.times)),
        mpi_best=None if mpi is None else float(np.min(mpi.times)),
        mpi_wrong=None if mpi is None else mpi.wrong,
        expected_bytes=expected,
    )
