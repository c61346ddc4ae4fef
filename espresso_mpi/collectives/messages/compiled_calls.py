"""What compiled code needs of a transport: how to start messages, and how to wait for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .connection import Connection
from .failures import named
from .mpi_calls import Messages
from .window import SharedWindow

DATA_TAG = 0x5E55
"""The tag of all messages of data."""

_ON_HOST = np.empty(0, np.uint8)


class CompiledCalls(Connection):
    """The part of a ``Transport`` that tables of operations use."""

    def window_on_host(self, group: Sequence[int]) -> SharedWindow | None:
        """As ``window_for``, for data on the host."""
        return self.window_for(group, _ON_HOST)

    def window_room(self, group: Sequence[int]) -> int:
        """Bytes of a payload that pass the shared window of a group at a time; 0: the group has none."""
        window = self.window_on_host(group)
        return 0 if window is None else window.room

    def reads_memory(self, group: Sequence[int], nbytes: int, arrays: int) -> bool:
        """Whether the ranks of a group read each other's memory in a collective, see ``WindowPlaces.reads_memory``."""
        window = self.window_on_host(group)
        return window is not None and window.reads_memory(nbytes, arrays)

    def count_sent(self, posted: tuple[int, int], shown: int, window: SharedWindow | None) -> None:
        """Count bytes that compiled code has sent: by messages, inside the node and between nodes, and by a window."""
        self.posted["intra"] += posted[0]
        self.posted["inter"] += posted[1]
        if window is not None:
            window.bytes_sent += shown

    def calls(self, count: int) -> Messages:
        """Memory for so many messages, and how compiled code sends them."""
        return Messages(self._comm, DATA_TAG, count)

    @named("starting or testing messages")
    def raise_failed(self, code: int) -> None:
        """Raise the error that MPI returned to compiled code."""
        raise self._mpi.Exception(code)

    @named("exchanging messages")
    def finish_calls(self, messages: Messages, ranks: Sequence[int]) -> None:
        """Wait until messages that compiled code has started are through; ``ranks``: the other end of each.

        Raises:
            RankTimeoutError: a rank did not send or receive within the timeout.
        """
        self.waiter.until(
            messages.through, lambda: [rank for number, rank in enumerate(ranks) if not messages.is_through(number)]
        )
