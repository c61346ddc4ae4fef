"""The ranks of a communicator, how messages of legal size to them start, and the memory that those of a node share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from espresso_mpi.arrays import device

from ..data.layout import Topology
from .waiting import Waiter
from .window import SharedWindow

MESSAGE_MAX = 1 << 30
"""Longest message in bytes: 2**31 fails on Open MPI 5.0, and a count of bytes must fit an int everywhere."""


class Connection:
    """The part of a ``Transport`` on which its other parts build; ``Transport`` sets the attributes.

    Attributes:
        rank: of this process.
        hostnames: of all ranks.
        topology: which ranks share a node.
        waiter: how to wait for other ranks.
        posted: bytes of messages so far, inside the node and between nodes; the window counts its own.
    """

    rank: int
    hostnames: list[str]
    topology: Topology
    waiter: Waiter
    posted: dict[str, int]
    _mpi: Any
    _comm: Any
    _near: frozenset[int]
    _message_bytes: int
    _window: SharedWindow | None

    def describe(self, rank: int) -> str:
        """A rank in messages: its number and hostname."""
        return f"rank {rank} ({self.hostnames[rank]})"

    @property
    def node(self) -> tuple[int, ...]:
        """World ranks of this node."""
        return self.topology.nodes[self.topology.node_of[self.rank]]

    def window_for(self, group: Sequence[int], x: Any) -> SharedWindow | None:
        """The shared window, if the group is this node's ranks and the data is on the host."""
        usable = self._window is not None and device.device_of(x) == "cpu" and tuple(group) == self.node
        return self._window if usable else None

    def pieces_of(self, rank: int, nbytes: int) -> list[tuple[int, int]]:
        """(first byte, bytes) of the messages of legal size that take so many bytes to a rank or from it."""
        longest = self._longest(rank)
        return [(first, min(longest, nbytes - first)) for first in range(0, nbytes, longest)]

    def _longest(self, rank: int) -> int:
        """Bytes of the longest message to a rank."""
        return MESSAGE_MAX if rank in self._near else self._message_bytes

    def _messages_of(self, way: str, rank: int, array: Any, tag: int, longest: int) -> list[tuple[int, Any]]:
        """Start the messages of an array, by "Isend" or "Irecv": (rank, request) of each."""
        if array.nbytes == 0:
            return []
        start, flat = getattr(self._comm, way), array.view(np.uint8)
        pieces = (flat[first : first + longest] for first in range(0, flat.size, longest))
        return [(rank, start([piece, self._mpi.BYTE], rank, tag)) for piece in pieces]
