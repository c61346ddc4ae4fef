"""MPI's operators, applied to arrays of this rank: what travels, travels as all else."""

from __future__ import annotations

from typing import Any

from ..data.reduction import ReduceOp
from .transport import Transport

_LONGEST = 1 << 28
"""Elements of one reduction: counts of MPI before version 4 are 32-bit integers."""


def operator_of(transport: Transport, op: str) -> ReduceOp:
    """MPI's elementwise operator; ``op``: its name in lower case."""
    operator = getattr(transport._mpi, op.upper())

    def combine(row: Any, total: Any) -> None:
        for first in range(0, total.size, _LONGEST):
            operator.Reduce_local(row[first : first + _LONGEST], total[first : first + _LONGEST])

    return ReduceOp("other", combine=combine)
