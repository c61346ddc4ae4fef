"""A barrier after which rank 0 says who did not come."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from ..errors import RankTimeoutError

_PAUSE = 1e-4

_HERE, _PASSED, _FAILED = b"here", b"pass", b"fail"

_REPLIES: list[Any] = []
"""Of barriers that failed: MPI may still send them."""


class MonitoredBarrierError(RankTimeoutError, RuntimeError):
    """Ranks that did not come to a monitored barrier; a ``RuntimeError``, as torch's programs expect."""


def monitored_barrier(comm: Any, timeout: timedelta, wait_all_ranks: bool) -> None:
    """Wait until every rank has called it.

    Every rank tells rank 0 that it is here, and waits for its answer. After an error, the ranks are out of step.

    Args:
        comm: over the ranks; timeout: after which the barrier fails; wait_all_ranks: wait for all before it fails, so
            that the error names all that did not come; else it names the first.

    Raises:
        MonitoredBarrierError: on every rank that came, but its text names the others on rank 0 only.
    """
    from mpi4py import MPI

    tag = comm.Get_attr(MPI.TAG_UB)
    deadline = time.monotonic() + timeout.total_seconds()
    if comm.rank:
        _report(comm, tag, timeout, deadline)
        return
    if timeout <= timedelta(0):
        raise MonitoredBarrierError("Rank 0 timed out in monitoredBarrier after 0 ms; pass a longer timeout")
    here, missing = list[int](), list[int]()
    for rank in range(1, comm.size):
        (here if _received(comm, rank, tag, deadline) == _HERE else missing).append(rank)
        if missing and not wait_all_ranks:
            break
    _REPLIES[:] = [comm.isend(_FAILED if missing else _PASSED, rank, tag=tag) for rank in here]
    if missing:
        named = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        raise MonitoredBarrierError(
            f"{named} failed to pass monitoredBarrier in {timeout.total_seconds() * 1e3:g} ms; every rank must call "
            f"it; see what {'these ranks are' if len(missing) > 1 else 'that rank is'} doing, or pass a longer timeout"
        )
    MPI.Request.waitall(_REPLIES)


def _report(comm: Any, tag: int, timeout: timedelta, deadline: float) -> None:
    """The part of a rank other than 0."""
    _REPLIES[:] = [comm.isend(_HERE, 0, tag=tag)]
    if _received(comm, 0, tag, deadline) != _PASSED:
        raise MonitoredBarrierError(
            f"Rank {comm.rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            f"from rank 0 within {timeout.total_seconds() * 1e3:g} ms; the error of rank 0 names who did not come"
        )
    _REPLIES.pop().wait()


def _received(comm: Any, source: int, tag: int, deadline: float) -> bytes | None:
    """A message, or None if none came in time."""
    while not comm.Iprobe(source, tag):
        if time.monotonic() > deadline:
            return None
        time.sleep(_PAUSE)
    return bytes(comm.recv(source=source, tag=tag))
