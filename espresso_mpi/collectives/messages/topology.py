"""Finds which ranks share a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from espresso_mpi.errors import ConfigError

from ..data.layout import Topology


def discover(comm: Any, nodes: Sequence[Sequence[int]] | None = None) -> tuple[Topology, Any]:
    """The topology of an mpi4py communicator, and the communicator of this node's ranks. Collective.

    Nodes are those of ``MPI_COMM_TYPE_SHARED``, ordered by their lowest rank; their numbers of ranks may differ.

    Args:
        nodes: groups of ranks to treat as nodes instead, such as the sockets of one; the same on every rank.

    Raises:
        ConfigError: ``nodes`` is not a partition of the ranks, or a group of it does not share memory.
    """
    from mpi4py import MPI

    if nodes is not None:
        _check_partition(nodes, comm.size)
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    if nodes is None:
        local = shared
    else:
        topology = Topology(tuple(sorted(tuple(sorted(group)) for group in nodes)))
        local = shared.Split(topology.node_of[comm.rank], comm.rank)
        shared.Free()
    mine = tuple(local.allgather(comm.rank))
    found = Topology(tuple(sorted(set(comm.allgather(mine)))))
    if nodes is not None and found != topology:
        local.Free()
        raise ConfigError(f"nodes={nodes!r}: the ranks of a group must share memory; found {found.nodes}")
    return found, local


def _check_partition(nodes: Sequence[Sequence[int]], size: int) -> None:
    ranks = sorted(rank for group in nodes for rank in group)
    if ranks != list(range(size)) or not all(nodes):
        raise ConfigError(f"nodes={nodes!r}; expected every rank from 0 to {size - 1} in exactly one group")
