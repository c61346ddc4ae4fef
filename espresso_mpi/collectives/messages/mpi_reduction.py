"""MPI's own elementwise reductions, waited for as all else is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...arrays import device
from .failures import named
from .transport import Transport

_LONGEST = 1 << 30
"""Bytes of one reduction: counts of MPI before version 4 are 32-bit integers."""


def reduce_by_mpi(transport: Transport, x: Any, op: str, root: int | None) -> Iterator[None]:
    """Reduce an array elementwise, in place; on every rank, or on the root alone.

    Args:
        x: flat, of a type that MPI knows; on a GPU, MPI is given a copy in host memory.
        op: the name of MPI's operator in lower case.

    Raises:
        RankTimeoutError: it has not ended within the timeout; which rank is late, MPI does not tell.
    """
    others = [rank for rank in range(transport.topology.size) if rank != transport.rank]
    here = x if device.device_of(x) == "cpu" else device.to_host(x)
    for piece in np.array_split(here, max(1, -(-x.nbytes // _LONGEST))):
        request = _start(transport, piece, op, root)
        yield
        try:
            transport.waiter.until(request.Test, lambda: others)
        except BaseException:
            transport.outlive([piece, request])
            raise
    if here is not x:
        device.copy(x, here)


@named("starting a reduction")
def _start(transport: Transport, x: Any, op: str, root: int | None) -> Any:
    comm, mpi = transport._comm, transport._mpi
    operator = getattr(mpi, op.upper())
    if root is None:
        return comm.Iallreduce(mpi.IN_PLACE, x, operator)
    if transport.rank == root:
        return comm.Ireduce(mpi.IN_PLACE, x, operator, root)
    return comm.Ireduce(x, None, operator, root)
