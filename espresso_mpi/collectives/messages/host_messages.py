"""Messages of host memory that are under way together: compiled code starts them and waits for them.

In Python, each message would take 10 us of a core, and each test of 40 messages as long. Where ranks share cores, all
of them wait for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from espresso_mpi.arrays import device
from espresso_mpi.compressors.kernels.cpu import host

from .gpu_messages import Addressed
from .mpi_calls import IRECV, ISEND, Messages, await_messages, start
from .shared_memory import LOG, WAITED
from .waiting import Waiter

RANK, ADDRESS, NBYTES, LONGEST = range(4)
"""Columns of an array: the rank to which it goes or from which it comes, its memory, and the longest message."""

_LEAST = 16
"""Messages for which memory is made at least."""


@host.inline
def _start(arrays, way, first, calls):  # type: ignore[no-untyped-def]
    """Start the messages of arrays; returns MPI's error and the number of messages by then."""
    number = first
    for row in range(arrays.shape[0]):
        for at in range(0, arrays[row, NBYTES], arrays[row, LONGEST]):
            nbytes = min(arrays[row, LONGEST], arrays[row, NBYTES] - at)
            error = start(calls, way, number, arrays[row, ADDRESS] + at, nbytes, arrays[row, RANK])
            if error != 0:
                return error, number
            number += 1
    return 0, number


@host.inline
def _start_all(arrays, sends, calls):  # type: ignore[no-untyped-def]
    """Start the messages of all arrays, of which so many are sent; see ``_start``.

    MPI receives nothing before it is asked to test messages. So the links can be busy while receives are posted.
    """
    error, number = _start(arrays[:sends], ISEND, 0, calls)
    if error != 0:
        return error, number
    return _start(arrays[sends:], IRECV, number, calls)


@host.inline
def _await(calls, count, flag, spins, polls, nap, log):  # type: ignore[no-untyped-def]
    """See ``await_messages``."""
    return await_messages(calls, count, flag, (spins, polls, nap), log)


class HostExchange:
    """Messages that have been started together.

    Args:
        messages: memory for them.
        arrays: int64 of shape (arrays, 4), see ``RANK``: first those that are sent, ``sends`` of them.
        kept: what must live until all messages are through.

    Attributes:
        error: of MPI; 0: none.
    """

    def __init__(self, messages: Messages, arrays: np.ndarray, sends: int, kept: Any) -> None:
        self.messages, self._arrays, self._kept = messages, arrays, kept
        self.error, messages.in_flight = _start_all(arrays, sends, messages.calls)

    def polled(self, waiter: Waiter) -> bool:
        """Whether all messages are through by now, or before compiled code has polled for long; see ``Waiter.pace``."""
        messages, log = self.messages, np.zeros(LOG, np.int64)
        self.error, through = _await(messages.calls, messages.in_flight, messages.flag, *waiter.pace, log)
        waiter.waited += log[WAITED] * 1e-9
        return bool(through)

    def late(self) -> list[int]:
        """The ranks that have not sent or received something."""
        ranks = [rank for rank, _, nbytes, longest in self._arrays.tolist() for _ in range(0, nbytes, longest)]
        return [rank for number, rank in enumerate(ranks) if not self.messages.is_through(number)]


class HostMessages:
    """Starts exchanges, and keeps their memory for others.

    Args:
        make: makes memory for so many messages.
        longest: bytes of the longest message to a rank.
    """

    def __init__(self, make: Callable[[int], Messages], longest: Callable[[int], int]) -> None:
        self._make, self._longest = make, longest
        self._free: dict[int, list[Messages]] = {}

    def start(self, sends: Addressed, receives: Addressed) -> HostExchange:
        """Start to send and receive."""
        outgoing = self._rows(sends)
        rows = outgoing + self._rows(receives)
        count = sum(-(-nbytes // longest) for _, _, nbytes, longest in rows)
        room = max(_LEAST, 1 << (count - 1).bit_length())
        free = self._free.setdefault(room, [])
        messages = free.pop() if free else self._make(room)
        arrays = np.array(rows, np.int64).reshape(-1, 4)
        return HostExchange(messages, arrays, len(outgoing), (sends, receives))

    def _rows(self, messages: Addressed) -> list[tuple[int, int, int, int]]:
        """Of the arrays that are not empty."""
        longest, begin_of = self._longest, device.begin_of
        return [(rank, begin_of(array), array.nbytes, longest(rank)) for rank, array in messages if array.nbytes]

    def end(self, exchange: HostExchange) -> None:
        """Take back the memory of an exchange whose messages are all through."""
        messages = exchange.messages
        self._free[messages.room].append(messages)
