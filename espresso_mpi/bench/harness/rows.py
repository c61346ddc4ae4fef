"""What is known of a method that was timed; suites add fields of their own. JSON files hold them by their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A collective by one method.

    Attributes:
        method: compressor, or a name of MPI's own.
        nbytes: bytes of the arrays.
        seconds, p99: median and 99th percentile, over repetitions, of the slowest rank.
        repeats: repetitions that were made.
        cpu: seconds of processor time of all ranks together, per byte of the arrays of all of them.
        kernels: seconds of processor time of all ranks together that encodes and decodes alone take, per byte likewise;
            None without compression.
        algbw, busbw: bytes per second of the array, and of the busiest connection, as nccl-tests define them.
        wire_bytes: bytes that all ranks together send to other ranks in one synchronisation; MPI does not tell.
        inter_bytes: those of them that go to another node.
        wrong: elements, over all ranks, that differ from the reference; None where they were not compared.
    """

    method: str
    nbytes: int
    seconds: float
    repeats: int
    p99: float | None = None
    cpu: float | None = None
    kernels: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    wire_bytes: int | None = None
    inter_bytes: int | None = None
    wrong: int | None = None


R = TypeVar("R", bound=Timing)


def bandwidths(nbytes: int, seconds: float, ranks: int, collective: str = "allreduce") -> dict[str, float]:
    """``algbw`` and ``busbw`` of a collective, in bytes per second, as nccl-tests define them.

    An allreduce over p ranks moves at least 2(p-1)/p of the array over each rank's connection, so that ``busbw`` can be
    compared with the speed of the link, whatever p is. A reduce or a broadcast moves all of it, and what gives each
    rank a part, or joins parts, (p-1)/p.

    Args:
        nbytes: of the largest array that a rank has: of what a scatter begins with, or a gather ends with.
    """
    algbw, others = nbytes / seconds, (ranks - 1) / ranks
    share = {"allreduce": 2 * others, "reduce": 1.0, "broadcast": 1.0}.get(collective, others)
    return {"algbw": algbw, "busbw": algbw * share}


def completed(rows: Sequence[R], ranks: int | None) -> list[R]:
    """Rows with their bandwidths, also from files without; ``ranks``: of those rows that do not tell."""
    return [_completed(row, getattr(row, "ranks", ranks)) for row in rows]


def _completed(row: R, ranks: int | None) -> R:
    if row.algbw is not None or ranks is None:
        return row
    known = bandwidths(row.nbytes, row.seconds, ranks)
    return replace(row, algbw=known["algbw"], busbw=known["busbw"])
