"""Deadlock detection: ranks that wait for each other in different sessions get an error, long before the timeout.

A rank that waits for long sends its location to the ranks that it waits for, by small messages on the session's
communicator. A rank that receives such a message while it waits itself, in another session, appends its own location
and forwards the message. A message that returns to its sender has found a cycle (Chandy, Misra and Haas, "Distributed
deadlock detection", 1983). Slow ranks form no cycle: they compute, and forward nothing.

The result must be certain. A rank forwards a message only if it cannot answer otherwise: it has no call in the session
of the message, and all its threads that could make one wait. A cycle counts only if the same waits are found again some
seconds later, when all messages in flight have arrived.
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
"""The name of the engines' threads, which make no calls."""

_TAG = 0x5E57
_AGAIN = 2.0
"""Seconds between the two messages that must have found the same cycle."""

_FRESH = 10.0
"""Seconds for which the reported location of a rank is trusted."""

_HOPS, _TARGETS, _SENT = 16, 32, 256
_ROOM = 16 << 10
_HELPERS = ("QueueFeederThread", "_pin_memory_loop", "tqdm", "pytest_timeout")
"""Threads of well-known libraries that call no session; part of their names."""

PROCESS = uuid.uuid4().hex
"""The name of this process in messages."""

_LOCK = threading.RLock()


class DeadlockDetector:
    """Detects deadlocks in which one session takes part.

    Args:
        comm: the session's own communicator.
        number: number of the session in messages, the same on all ranks.
        processes: ``PROCESS`` of every rank.
        describe: returns the text for a rank.

    Attributes:
        calls: the unfinished calls of the session; set by its owner.
    """

    _all: ClassVar[weakref.WeakSet[DeadlockDetector]] = weakref.WeakSet()
    _locations: ClassVar[dict[str, tuple[float, str]]] = {}
    _sent: ClassVar[dict[tuple[int, int, str], tuple[Any, Any]]] = {}
    """(request, memory) by session, rank and kind. A message is matched before the next of its kind is sent, so at most
    one of each lies about unread: a rank that never waits for long reads none."""

    def __init__(
        self, comm: Any, number: int, processes: Sequence[str], describe: Callable[[int], str] = "rank {}".format
    ) -> None:
        from mpi4py import MPI

        self._mpi, self._comm, self._describe = MPI, comm, describe
        self._number, self._processes = number, list(processes)
        self.calls: Mapping[int, Any] = {}
        self._cycles: dict[tuple[Any, ...], float] = {}
        self._unhandled: list[Mapping[str, Any]] = []
        self._roll_notes: list[tuple[int, int, str]] = []
        with _LOCK:
            self._all.add(self)
            for process in self._processes:  # all have come to this opening: they wait nowhere else any more
                self._locations.pop(process, None)

    def location(self, rank: int) -> str:
        """Where a rank of the session waits, as it reported a moment ago; else an empty text."""
        when, text = self._locations.get(self._processes[rank], (0.0, ""))
        return text if time.perf_counter() - when < _FRESH else ""

    def long_wait(self, since: float, what: str, late: Sequence[int], callers: int) -> None:
        """Send this rank's location, and handle the messages of others; see ``waiting.DeadlockCheck``.

        Raises:
            MismatchError: a cycle of ranks waits in different sessions.
        """
        others = ", ".join(map(self._describe, sorted(set(late))[:5])) or "others"
        location = f"waits in {what} of session number {self._number} for {others}"
        here = [PROCESS, since, f"{self._describe(self._comm.rank)} {location}", location]
        blocked = _user_threads() <= callers
        with _LOCK:
            for session, note in self._incoming():
                self._handle(session, note, here, late, blocked)
            self._send(late, "ask", {"origin": PROCESS, "at": time.perf_counter(), "sure": blocked, "hops": [here]})

    def tell(self, ranks: Sequence[int], note: Sequence[Any]) -> list[int]:
        """Send a note of a roll call: [rank, number of the exchange, text]; returns the ranks that it is under way to.

        A rank that has not read the one before gets none, and of many ranks only some do: try again later.
        """
        with _LOCK:
            return self._send(ranks, "roll", {"roll": list(note)})

    def roll_notes(self) -> list[tuple[int, int, str]]:
        """The notes of roll calls that have come."""
        with _LOCK:
            self._unhandled += self._read()
            found, self._roll_notes = self._roll_notes, []
        return found

    def close(self, patience: float = 1.0) -> None:
        """Receive all messages that are left. Called by all ranks after a barrier, before the communicator is freed."""
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

    def _handle(
        self, session: DeadlockDetector, note: Mapping[str, Any], here: list[Any], late: Sequence[int], blocked: bool
    ) -> None:
        hops, now = note["hops"], time.perf_counter()
        for process, _, _, location in hops:
            self._locations[process] = now, location
        if "error" in note:
            if here[:2] in [hop[:2] for hop in hops]:
                self._send(late, "error", note)
                raise MismatchError(note["error"])
            return
        if not (blocked and note["sure"]) or session is self or session.calls:
            return
        if note["origin"] == PROCESS:
            self._returned(note, here, late)
        elif len(hops) < _HOPS and all(hop[0] != PROCESS for hop in hops):
            self._send(late, note["origin"], {**note, "hops": [*hops, here]})

    def _returned(self, note: Mapping[str, Any], here: list[Any], late: Sequence[int]) -> None:
        """A message of this rank found a cycle; it counts if it was found before and this rank is still part of it."""
        hops = note["hops"]
        if len(hops) < 2 or hops[0][:2] != here[:2] or hops[1][0] not in [self._processes[rank] for rank in late]:
            return
        cycle = tuple((process, since) for process, since, *_ in hops)
        first = self._cycles.setdefault(cycle, note["at"])
        if note["at"] - first >= _AGAIN:
            text = "; ".join(hop[2] for hop in hops)
            error = (
                f"ranks wait for each other in different sessions, which are numbered as they were opened: {text}; use "
                f"them in the same order on every rank"
            )
            self._send(late, "error", {**note, "error": error})
            raise MismatchError(error)

    def _incoming(self) -> Iterator[tuple[DeadlockDetector, Mapping[str, Any]]]:
        for session in list(self._all):
            notes, session._unhandled = [*session._unhandled, *session._read()], []
            for note in notes:
                yield session, note

    def _read(self) -> Iterator[Mapping[str, Any]]:
        """What has come about waits; notes of roll calls are put aside."""
        while True:
            status = self._mpi.Status()
            message = self._comm.Improbe(self._mpi.ANY_SOURCE, _TAG, status)
            if message is None:
                return
            memory = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([memory, self._mpi.BYTE])
            note = json.loads(memory)
            if "roll" in note:
                rank, number, text = note["roll"]
                self._roll_notes.append((rank, number, text))
            else:
                yield note

    def _send(self, ranks: Sequence[int], kind: str, note: Mapping[str, Any]) -> list[int]:
        self._reap()
        sent = []
        memory = np.frombuffer(json.dumps(note).encode(), np.uint8)
        for rank in sorted(set(ranks))[:_TARGETS]:
            key = (id(self._comm), rank, kind)
            if key not in self._sent and len(self._sent) < _SENT and memory.size <= _ROOM:
                self._sent[key] = self._comm.Issend([memory, self._mpi.BYTE], rank, _TAG), (memory, self._comm)
                sent.append(rank)
        return sent

    @classmethod
    def _reap(cls) -> None:
        for key in [key for key, (request, _) in cls._sent.items() if request.Test()]:
            del cls._sent[key]


def _user_threads() -> int:
    """Threads that might call a session."""
    names = [thread.name for thread in threading.enumerate()]
    return sum(name != THREAD and not any(helper in name for helper in _HELPERS) for name in names)
