"""Ranks that wait for each other in different sessions are told so, long before the timeout.

A rank that waits for long tells those it waits for, by small messages on the session's communicator, where it waits.
Who hears this while it waits itself, in another session, passes it on to those it waits for, with its own place added.
What comes back to its sender went along a circle (Chandy, Misra and Haas, "Distributed deadlock detection", 1983). Slow
ranks are no circle: they compute, and pass nothing on.

The verdict must be certain. A rank passes a message on only if it could not answer otherwise: it has no call in the
session that the message came by, and all its threads that might make one wait. And a circle counts if the same waits
are found in it again some seconds later, when all that was under way has arrived.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from espresso_mpi.errors import MismatchError

THREAD = "espresso_mpi"
"""The name of the engine's threads, which make no calls."""

_TAG = 0x5E57
_AGAIN = 2.0
"""Seconds between the two messages that must have gone along the same circle."""

_FRESH = 10.0
"""Seconds for which a rank is believed to be where it said it was."""

_HOPS, _TARGETS, _SENT = 16, 32, 256
_ROOM = 16 << 10
_HELPERS = ("QueueFeederThread", "_pin_memory_loop", "tqdm", "pytest_timeout")
"""Threads of well-known libraries that call no session; part of their names."""

PROCESS = uuid.uuid4().hex
"""This process in messages."""

_LOCK = threading.RLock()


class Whereabouts:
    """Where this rank waits and what it hears of others, for one session.

    Args:
        comm: the session's own communicator.
        number: the session in messages, the same on all ranks; processes: ``PROCESS`` of every rank.
        describe: the text for a rank.

    Attributes:
        callers: how many threads wait for calls of the session. calls: those that are not finished.
    """

    _all: ClassVar[weakref.WeakSet[Whereabouts]] = weakref.WeakSet()
    _heard: ClassVar[dict[str, tuple[float, str]]] = {}
    _sent: ClassVar[dict[tuple[int, int, str], tuple[Any, Any]]] = {}
    """(request, memory) by session, rank and kind. A message is matched before the next of its kind is sent, so at most
    one of each lies about unread: a rank that never waits for long reads none."""

    def __init__(
        self, comm: Any, number: int, processes: Sequence[str], describe: Callable[[int], str] = "rank {}".format
    ) -> None:
        from mpi4py import MPI

        self._mpi, self._comm, self._describe = MPI, comm, describe
        self._number, self._processes = number, list(processes)
        self.callers = 0
        self.calls: Mapping[int, Any] = {}
        self._circles: dict[tuple[Any, ...], float] = {}
        with _LOCK:
            self._all.add(self)
            for process in self._processes:  # all have come to this opening: they wait nowhere else any more
                self._heard.pop(process, None)

    def of(self, rank: int) -> str:
        """Where a rank of the session waits, as it said itself a moment ago; else an empty text."""
        when, text = self._heard.get(self._processes[rank], (0.0, ""))
        return text if time.perf_counter() - when < _FRESH else ""

    def ask(self, since: float, what: str, late: Sequence[int]) -> None:
        """Called about every second while this rank waits since ``since`` in ``what`` for the ranks ``late``.

        Raises:
            MismatchError: they wait for this one, in other sessions.
        """
        others = ", ".join(map(self._describe, sorted(set(late))[:5])) or "others"
        place = f"waits in {what} of session number {self._number} for {others}"
        here = [PROCESS, since, f"{self._describe(self._comm.rank)} {place}", place]
        blocked = _user_threads() <= self.callers
        with _LOCK:
            for session, note in self._incoming():
                self._hear(session, note, here, late, blocked)
            self._send(late, "ask", {"origin": PROCESS, "at": time.perf_counter(), "sure": blocked, "hops": [here]})

    def close(self, patience: float = 1.0) -> None:
        """Before the communicator is freed, by all ranks after they have met: leave no message behind."""
        end = time.perf_counter() + patience
        with _LOCK:
            self._all.discard(self)
            while True:
                for _ in self._read():
                    pass
                if not self.unread(self._comm) or time.perf_counter() > end:
                    return
                time.sleep(1e-3)

    @classmethod
    def unread(cls, comm: Any) -> bool:
        """Whether a message that this rank has sent on a communicator has not been read."""
        with _LOCK:
            cls._reap()
            return any(key == id(comm) for key, _, _ in cls._sent)

    def _hear(
        self, session: Whereabouts, note: Mapping[str, Any], here: list[Any], late: Sequence[int], blocked: bool
    ) -> None:
        hops, now = note["hops"], time.perf_counter()
        for process, _, _, place in hops:
            self._heard[process] = now, place
        if "verdict" in note:
            if here[:2] in [hop[:2] for hop in hops]:
                self._send(late, "verdict", note)
                raise MismatchError(note["verdict"])
            return
        if not (blocked and note["sure"]) or session is self or session.calls:
            return
        if note["origin"] == PROCESS:
            self._came_back(note, here, late)
        elif len(hops) < _HOPS and all(hop[0] != PROCESS for hop in hops):
            self._send(late, note["origin"], {**note, "hops": [*hops, here]})

    def _came_back(self, note: Mapping[str, Any], here: list[Any], late: Sequence[int]) -> None:
        """A message of this rank went along a circle, which counts if it did before, and this rank is still in it."""
        hops = note["hops"]
        if len(hops) < 2 or hops[0][:2] != here[:2] or hops[1][0] not in [self._processes[rank] for rank in late]:
            return
        circle = tuple((process, since) for process, since, *_ in hops)
        first = self._circles.setdefault(circle, note["at"])
        if note["at"] - first >= _AGAIN:
            text = "; ".join(hop[2] for hop in hops)
            verdict = (
                f"ranks wait for each other in different sessions, which are numbered as they were opened: {text}; use "
                f"them in the same order on every rank"
            )
            self._send(late, "verdict", {**note, "verdict": verdict})
            raise MismatchError(verdict)

    def _incoming(self) -> Iterator[tuple[Whereabouts, Mapping[str, Any]]]:
        for session in list(self._all):
            for note in session._read():
                yield session, note

    def _read(self) -> Iterator[Mapping[str, Any]]:
        while True:
            status = self._mpi.Status()
            message = self._comm.Improbe(self._mpi.ANY_SOURCE, _TAG, status)
            if message is None:
                return
            memory = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([memory, self._mpi.BYTE])
            yield json.loads(memory)

    def _send(self, ranks: Sequence[int], kind: str, note: Mapping[str, Any]) -> None:
        self._reap()
        memory = np.frombuffer(json.dumps(note).encode(), np.uint8)
        for rank in sorted(set(ranks))[:_TARGETS]:
            key = (id(self._comm), rank, kind)
            if key not in self._sent and len(self._sent) < _SENT and memory.size <= _ROOM:
                self._sent[key] = self._comm.Issend([memory, self._mpi.BYTE], rank, _TAG), (memory, self._comm)

    @classmethod
    def _reap(cls) -> None:
        for key in [key for key, (request, _) in cls._sent.items() if request.Test()]:
            del cls._sent[key]


def _user_threads() -> int:
    """Threads that might call a session."""
    names = [thread.name for thread in threading.enumerate()]
    return sum(name != THREAD and not any(helper in name for helper in _HELPERS) for name in names)
