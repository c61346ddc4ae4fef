"""Sessions that were dropped without ``close``: their communicators are freed when the next session opens.

Freeing is collective, but each rank drops a session when its garbage collector finds it. So each rank records what it
has dropped. When the ranks open a session, they exchange these records, and free what all ranks have dropped, in one
order. This matters because communicators are scarce: about 500 sessions use up the 2048 of MPICH.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .deadlock import DeadlockDetector

_DROPPED: deque[Leftover] = deque()
"""The garbage collector appends at any time, in any thread, so there is no lock."""

_FEW = 16
_alive = 0
_limit = _FEW
"""The number of sessions neither closed nor known to be dropped, and the number that triggers a garbage collection."""


@dataclass(frozen=True)
class Leftover:
    """The MPI resources of a transport.

    Attributes:
        name: the same on all of its ranks, and no other's.
        size: number of its ranks.
        comm, local, window: mpi4py handles; None without a window.
    """

    name: str
    size: int
    comm: Any
    local: Any
    window: Any

    def free(self) -> None:
        """Collective over its ranks."""
        if self.window is not None:
            self.window.Unlock_all()
            self.window.Free()
        self.local.Free()
        self.comm.Free()


def follow(owner: Any, leftover: Leftover) -> weakref.finalize[..., Any]:
    """Record ``leftover`` as dropped when ``owner`` is garbage-collected, unless ``forget`` is called before.

    A transport that failed is never collected, so a recorded communicator has no messages in flight.
    """
    global _alive
    _alive += 1
    finalizer = weakref.finalize(owner, _drop, leftover)
    finalizer.atexit = False
    return finalizer


def forget(finalizer: weakref.finalize[..., Any]) -> None:
    """Do not record it: its owner frees it."""
    global _alive
    if finalizer.detach() is not None:
        _alive -= 1


def offered() -> dict[str, Leftover]:
    """Remove and return what this rank has dropped; ``free_common`` puts back what cannot be freed."""
    global _limit
    if _alive >= _limit:
        gc.collect()
        _limit = max(_FEW, 2 * _alive)
    found, unread = {}, []
    while _DROPPED:
        leftover = _DROPPED.popleft()
        if DeadlockDetector.unread(leftover.comm):
            unread.append(leftover)
        else:
            found[leftover.name] = leftover
    _DROPPED.extend(unread)
    return found


def free_common(mine: dict[str, Leftover], everyone: Sequence[Sequence[str]]) -> int:
    """Free what all ranks of it have dropped, and keep the rest; returns the number freed. Collective.

    Args:
        mine: what this rank offers.
        everyone: the names that each rank offers.
    """
    offers = Counter(name for names in everyone for name in names)
    ready = sorted(name for name, leftover in mine.items() if offers[name] == leftover.size)
    for name in ready:
        mine.pop(name).free()
    _DROPPED.extend(mine.values())
    return len(ready)


def _drop(leftover: Leftover) -> None:
    global _alive
    _alive -= 1
    _DROPPED.append(leftover)
