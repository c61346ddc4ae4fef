"""Sessions over the ranks of a process group of ``torch.distributed``."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import distributed

from ..errors import ConfigError
from ..session import Session


def group_session(group: Any = None, **options: Any) -> Session:
    """A session over the ranks of a process group, of whatever backend. Collective over the group.

    Args:
        group: as for ``torch.distributed``, such as ``mesh.get_group("shard")``; default: all ranks.
        options: as for ``espresso_mpi.Session``.

    Raises:
        ConfigError: a rank of torch is another one in MPI.

    Example:
        >>> session = espresso_mpi.torch.group_session(mesh.get_group("shard"), compressor="int8")  # doctest: +SKIP
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if (distributed.get_rank(), distributed.get_world_size()) != (world.rank, world.size):
        raise ConfigError(
            f"group_session: torch says rank {distributed.get_rank()} of {distributed.get_world_size()}, MPI says "
            f"{world.rank} of {world.size}; start the program by mpirun, and import espresso_mpi.torch before "
            f"init_process_group, which takes rank and size from MPI then"
        )
    ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    comm = world.Create_group(world.group.Incl(ranks), tag=sum(ranks) % 30000)
    try:
        return Session(comm, **options)  # which duplicates it
    finally:
        comm.Free()


def ranks_of(session: Session) -> list[int]:
    """torch's ranks of a session's ranks, in their order. Collective."""
    found = session.allgather(np.array([distributed.get_rank()]), name="ranks of torch")
    return [int(rank) for rank in found]
