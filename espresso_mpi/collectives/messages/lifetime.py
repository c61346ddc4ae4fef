"""Shuts sessions down when the process or MPI ends, and disables them in forked children.

MPI may end before a session does: at the end of the process, or because the user calls ``MPI.Finalize``. MPI_Finalize
first deletes the attributes of ``COMM_SELF``, so the callback of an attribute of ours runs while MPI still works. A
forked child has a copy of a session's memory, but neither its thread nor MPI.
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

_FORK_REMEDY = "use it in that process only, or start workers by the method 'spawn' or 'forkserver'"


class Watched(Protocol):
    """What is shut down: the engine of a session."""

    broken: BaseException | None

    @property
    def busy(self) -> bool:
        """Whether other ranks may be waiting for this one."""

    def shutdown(self, why: str, notify: bool = True, remedy: str = "") -> None:
        """Stop without waiting for other ranks."""

    def forked(self, why: str, remedy: str) -> None:
        """The same in a forked child, where locks may be held by threads that do not exist there."""


_open: weakref.WeakSet[Any] = weakref.WeakSet()
_pid = os.getpid()
_forked_from: int | None = None
"""The process that had MPI running when this one was forked from it, or from a fork of it."""
_keyval: int | None = None


def watch(engine: Watched) -> None:
    """Shut ``engine`` down when the process or MPI ends; only a weak reference is held. MPI must be running."""
    global _keyval
    if _keyval is None:
        from mpi4py import MPI

        _keyval = MPI.Comm.Create_keyval(delete_fn=_mpi_ends)
        MPI.COMM_SELF.Set_attr(_keyval, True)
        atexit.register(_process_ends)
    _open.add(engine)


def refuse_forked() -> None:
    """Raise StateError in a process that was forked from one in which MPI was running."""
    if _forked_from is not None:
        raise StateError(
            f"a session cannot be opened: this process ({os.getpid()}) was forked from process {_forked_from}, in "
            f"which MPI was running, and MPI does not survive a fork; open it in that process, or start workers by the "
            f"method 'spawn' or 'forkserver'"
        )


def _process_ends() -> None:
    """No thread may call MPI after this. Other ranks are notified if this one has unfinished calls."""
    _shut_down_all("its process ended without close()", "close it before")


def _mpi_ends(comm: Any, keyval: int, value: Any) -> None:
    """Called by ``MPI_Finalize`` while MPI still works."""
    if _forked_from is None:
        _shut_down_all("MPI.Finalize was called before close()", "close it before, or leave MPI.Finalize to mpi4py")


def _shut_down_all(why: str, remedy: str) -> None:
    for engine in list(_open):
        if engine.broken is None:
            engine.shutdown(why, notify=engine.busy, remedy=remedy)


def _after_fork() -> None:
    """Runs in the child: it must neither call MPI nor wait for a lock."""
    global _pid, _forked_from
    parent, _pid = _pid, os.getpid()
    if _keyval is not None or _mpi_runs():
        _forked_from = parent if _forked_from is None else _forked_from
    for engine in list(_open):
        why = f"it belongs to process {_forked_from}, from which this one ({_pid}) was forked"
        engine.forked(f"{why}, and MPI does not survive a fork", _FORK_REMEDY)


def _mpi_runs() -> bool:
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized())


os.register_at_fork(after_in_child=_after_fork)
