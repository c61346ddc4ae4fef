"""Names the ranks that do not come to open a session, before there is a communicator to ask on.

No message is sent on the caller's communicator, because the caller's own probes could find it on a rank that never
comes. Instead, a rank that has waited for a moment publishes a name with the launcher (``MPI_Publish_name``), and looks
up the names of the others when its timeout ends. If the launcher keeps no names, the missing ranks cannot be named.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import Counter
from typing import Any

from .waiting import WaitMonitor

_PAUSE = 1 / 4
"""Share of the timeout after which a rank publishes its name. Most sessions open earlier, and so do not depend on the
launcher."""

_MANY, _FEW = 256, 8
"""With more ranks than this, only the first few look up the others, to limit the load of the launcher."""

_openings: Counter[str] = Counter()


class Presence(WaitMonitor):
    """One opening of a session on this rank; monitors the wait for the other ranks.

    Args:
        MPI: mpi4py's module; comm: the communicator that the session is opened on.
        timeout: how long this rank waits, in seconds.
    """

    def __init__(self, MPI: Any, comm: Any, timeout: float) -> None:
        self._mpi, self._rank, self._size = MPI, comm.rank, comm.size
        self._pause = _PAUSE * timeout
        self._since, self._published, self._works = time.perf_counter(), False, False
        group_of_all, group_here = MPI.COMM_WORLD.Get_group(), comm.Get_group()
        members = group_here.Translate_ranks(None, group_of_all)
        group_here.Free()
        group_of_all.Free()
        job = os.environ.get("PMIX_NAMESPACE", "")
        group = hashlib.sha256(f"{job} {list(members)}".encode()).hexdigest()[:16]
        _openings[group] += 1
        self._name = f"espresso_mpi-{group}-{_openings[group]}"
        # A name that is not there is an error of MPI, which must not end the job.
        handlers = [each.Get_errhandler() for each in (MPI.COMM_WORLD, MPI.COMM_SELF)]
        self._may = MPI.UNDEFINED not in members and all(handler == MPI.ERRORS_RETURN for handler in handlers)

    def check(self) -> None:
        """Publish this rank's name once it has waited for a while."""
        if self._published or not self._may or time.perf_counter() - self._since < self._pause:
            return
        self._published = True
        with contextlib.suppress(self._mpi.Exception):
            self._mpi.Publish_name(self._of(self._rank), "here")
            self._works = True

    def absent(self) -> list[int]:
        """The ranks that did not come; empty if they are not known."""
        if not self._works or (self._size > _MANY and self._rank >= _FEW) or not self._is_here(self._rank):
            return []
        return [rank for rank in range(self._size) if not self._is_here(rank)]

    def withdraw(self) -> None:
        """Withdraw this rank's name: it waits no longer."""
        if self._works:
            with contextlib.suppress(self._mpi.Exception):
                self._mpi.Unpublish_name(self._of(self._rank), "here")

    def _of(self, rank: int) -> str:
        return f"{self._name}-{rank}"

    def _is_here(self, rank: int) -> bool:
        try:
            return bool(self._mpi.Lookup_name(self._of(rank)) == "here")
        except self._mpi.Exception:
            return False
