"""MPI's own elementwise reductions, waited for as all else is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .failures import named
from .transport import Transport

_LONGEST = 1 << 30
"""Bytes of one reduction: counts of MPI before version 4 are 32-bit integers."""


def reduce_by_mpi(transport: Transport, x: Any, op: str, root: int | None) -> Iterator[None]:
    """Reduce an array elementwise, in place; on every rank, or on the root alone.

    Args:
        x: flat, of a type that MPI knows; op: the name of MPI's operator in lower case.

    Raises:
        RankTimeoutError: it has not ended within the timeout; which rank is late, MPI does not tell.
    """
    for piece in np.array_split(x, max(1, -(-x.nbytes // _LONGEST))):
        yield from _finished(transport, _start(transport, piece, op, root), piece)


def scatter_by_mpi(transport: Transport, x: Any, own: Any, op: str) -> Iterator[None]:
    """Reduce an array elementwise, and leave each rank its part, in rank order; as ``reduce_by_mpi``.

    Args:
        x: not changed; own: receives the part.
    """
    ranks = transport.topology.size
    parts, width = x.reshape(ranks, own.size), max(1, _LONGEST // max(1, ranks * x.itemsize))
    for first in range(0, own.size, width) or range(1):
        piece = np.ascontiguousarray(parts[:, first : first + width])  # the array itself unless it is longer
        yield from _finished(transport, _start_scatter(transport, piece, own[first : first + width], op), [piece, own])


def _finished(transport: Transport, request: Any, memory: Any) -> Iterator[None]:
    """Wait for a reduction that has started."""
    others = [rank for rank in range(transport.topology.size) if rank != transport.rank]
    yield
    try:
        transport.waiter.until(request.Test, lambda: others)
    except BaseException:
        transport.outlive([memory, request])
        raise


@named("starting a reduction")
def _start_scatter(transport: Transport, x: Any, own: Any, op: str) -> Any:
    return transport._comm.Ireduce_scatter_block(x, own, getattr(transport._mpi, op.upper()))


@named("starting a reduction")
def _start(transport: Transport, x: Any, op: str, root: int | None) -> Any:
    comm, mpi = transport._comm, transport._mpi
    operator = getattr(mpi, op.upper())
    if root is None:
        return comm.Iallreduce(mpi.IN_PLACE, x, operator)
    if transport.rank == root:
        return comm.Ireduce(mpi.IN_PLACE, x, operator, root)
    return comm.Ireduce(x, None, operator, root)
