"""What the benchmarks share that train one replica of a model on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import MismatchError


def world() -> Any:
    """MPI's communicator of all ranks."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


def place_on_node(comm: Any) -> tuple[int, int]:
    """How many ranks this node has, and which of them this one is. Collective."""
    from mpi4py import MPI

    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    place = local.size, local.rank
    local.Free()
    return place


def node_of(comm: Any) -> list[int]:
    """Of every rank, the first rank of its node. Collective."""
    from mpi4py import MPI

    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = local.bcast(comm.rank)
    local.Free()
    return list(comm.allgather(first))


def require_same_start(comm: Any, text: str, weights: str, library: str) -> None:
    """See that all ranks train the same model on the same text. Collective.

    Args:
        text, weights: digests of them on this rank.
        library: what computes, for the error's text.

    Raises:
        MismatchError: on every rank, if they do not.
    """
    starts = comm.allgather((text, weights))
    for rank, start in enumerate(starts):
        if start != starts[0]:
            what = "training text" if start[0] != starts[0][0] else "initial weights"
            raise MismatchError(
                f"rank {rank} has another {what} than rank 0; run the same Python and {library} on all nodes"
            )


def mean_loss(comm: Any, starts: np.ndarray, chunk: int, loss: Callable[[np.ndarray], float]) -> float:
    """The mean loss over windows of the validation text, which the ranks share. Collective.

    Args:
        starts: where the windows begin, the same on every rank.
        chunk: windows in one call of ``loss``.
        loss: the mean loss over some windows.
    """
    mine = starts[comm.rank :: comm.size]
    total = 0.0
    for first in range(0, len(mine), chunk):
        part = mine[first : first + chunk]
        total += len(part) * loss(part)
    return float(sum(comm.allgather(total)) / len(starts))
