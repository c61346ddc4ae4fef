"""Finds which ranks share a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from espresso_mpi.errors import ConfigError

from ..data.layout import Topology


def discover(comm: Any, machines: Sequence[Sequence[int]] | None = None) -> tuple[Topology, Any]:
    """The topology of an mpi4py communicator, and the communicator of this machine's ranks. Collective.

    Machines are those of ``MPI_COMM_TYPE_SHARED``, ordered by their lowest rank; their numbers of ranks may differ.

    Args:
        machines: groups of ranks to treat as machines instead, such as the sockets of one; the same on every rank.

    Raises:
        ConfigError: ``machines`` is not a partition of the ranks, or a group of it does not share memory.
    """
    from mpi4py import MPI

    if machines is not None:
        _check_partition(machines, comm.size)
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    if machines is None:
        local = shared
    else:
        topology = Topology(tuple(sorted(tuple(sorted(group)) for group in machines)))
        local = shared.Split(topology.machine_of[comm.rank], comm.rank)
        shared.Free()
    mine = tuple(local.allgather(comm.rank))
    found = Topology(tuple(sorted(set(comm.allgather(mine)))))
    if machines is not None and found != topology:
        local.Free()
        raise ConfigError(f"machines={machines!r}: the ranks of a group must share memory; found {found.machines}")
    return found, local


def _check_partition(machines: Sequence[Sequence[int]], size: int) -> None:
    ranks = sorted(rank for group in machines for rank in group)
    if ranks != list(range(size)) or not all(machines):
        raise ConfigError(f"machines={machines!r}; expected every rank from 0 to {size - 1} in exactly one group")
