"""What a session must not outlive: the process, MPI, and the process that opened it.

MPI may end before a session does: at the end of the process, or because somebody calls ``MPI.Finalize``. MPI deletes
the attributes of ``COMM_SELF`` first thing in there, so an attribute of ours hears of it while MPI still works. A
forked child has the memory of a session, but neither its thread nor MPI.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from typing import Any, Protocol

from espresso_mpi.errors import StateError

_LOG = logging.getLogger("espresso_mpi")

_CURE_OF_FORKS = "use it in that process only, or start workers by the method 'spawn' or 'forkserver'"


class Ending(Protocol):
    """What is watched: the engine of a session."""

    broken: BaseException | None

    @property
    def busy(self) -> bool:
        """Whether other ranks may be waiting for this one."""

    def leave(self, why: str, tell: bool = True, cure: str = "") -> None:
        """Stop without waiting for anybody."""

    def forked(self, why: str, cure: str) -> None:
        """The same in a forked child: locks of threads that are not there any more may be held."""


_open: weakref.WeakSet[Any] = weakref.WeakSet()
_pid = os.getpid()
_forked_from: int | None = None
"""The process that had MPI running when this one was forked from it, or from a fork of it."""
_keyval: int | None = None


def watch(ending: Ending) -> None:
    """Tell ``ending`` when it has to end, as long as it lives. MPI must be running."""
    global _keyval
    if _keyval is None:
        from mpi4py import MPI

        _keyval = MPI.Comm.Create_keyval(delete_fn=_mpi_ends)
        MPI.COMM_SELF.Set_attr(_keyval, True)
        atexit.register(_process_ends)
    _open.add(ending)


def refuse_forked() -> None:
    """Raise StateError in a process that was forked from one in which MPI was running."""
    if _forked_from is not None:
        raise StateError(
            f"a session cannot be opened: this process ({os.getpid()}) was forked from process {_forked_from}, in "
            f"which MPI was running, and MPI does not survive a fork; open it in that process, or start workers by the "
            f"method 'spawn' or 'forkserver'"
        )


def _process_ends() -> None:
    """A thread must not call MPI any more. Ranks hear of it if calls of this one are unfinished."""
    _end_all("its process ended without close()", "close it before")


def _mpi_ends(comm: Any, keyval: int, value: Any) -> None:
    """Called by ``MPI_Finalize`` while MPI still works."""
    if _forked_from is None:
        _end_all("MPI.Finalize was called before close()", "close it before, or leave MPI.Finalize to mpi4py")


def _end_all(why: str, cure: str) -> None:
    for ending in list(_open):
        if ending.broken is None:
            ending.leave(why, tell=ending.busy, cure=cure)


def _after_fork() -> None:
    """In the child: nothing here may talk to MPI, nor wait for a lock."""
    global _pid, _forked_from
    parent, _pid = _pid, os.getpid()
    if _keyval is not None or _mpi_runs():
        _forked_from = parent if _forked_from is None else _forked_from
    for ending in list(_open):
        why = f"it belongs to process {_forked_from}, from which this one ({_pid}) was forked"
        ending.forked(f"{why}, and MPI does not survive a fork", _CURE_OF_FORKS)


def _mpi_runs() -> bool:
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized())


os.register_at_fork(after_in_child=_after_fork)
