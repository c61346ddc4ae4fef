"""The table of a route and a method on ranks that are only described, for ``espresso-mpi explain --program``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from espresso_mpi.compressors import Compressor
from espresso_mpi.types import Route

from ..data.layout import Dense, Topology
from ..messages.window_places import room_of
from ..program import check_route, compile_route
from .operations import OperationTable
from .segments import segment_table


@dataclass(frozen=True)
class DescribedWays:
    """See ``building.Ways``; every node has a shared window.

    Attributes:
        topology, rank: the ranks, and which of them this is.
        window_bytes, message_bytes: as in ``transport.Settings``.
    """

    topology: Topology
    rank: int
    window_bytes: int
    message_bytes: int
    windows_everywhere: bool = True

    @property
    def node(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        return self.topology.nodes[self.topology.node_of[self.rank]]

    def window_room(self, group: Sequence[int]) -> int:
        """Bytes of a payload that pass the shared window of a group at a time; 0: the group is not the node."""
        return room_of(self.window_bytes) if len(group) > 1 and tuple(group) == self.node else 0

    def reads_memory(self, group: Sequence[int], nbytes: int, arrays: int) -> bool:
        """Never: whether that is quicker is measured where the ranks run."""
        return False

    def pieces_of(self, rank: int, nbytes: int) -> list[tuple[int, int]]:
        """(first byte, bytes) of the messages between nodes."""
        return [(first, min(self.message_bytes, nbytes - first)) for first in range(0, nbytes, self.message_bytes)]


def table_of(ways: DescribedWays, route: Route, compressor: Compressor | None, n: int) -> OperationTable | str:
    """The table of a tensor of n elements of float32, or why there is none.

    Raises:
        ConfigError: the route cannot be run on these ranks, or with this compressor.
    """
    check_route(route, ways.topology, compressor)
    steps = compile_route(route, ways.topology, Dense(0, n), "float32", ways.rank, compressor)

    def compressor_at(point: int) -> Compressor:
        assert compressor is not None, "a route that encodes needs a compressor"
        return compressor.second_pass() if point else compressor

    return segment_table(ways, [(step, _nothing) for step in steps], compressor_at, n)


def _nothing(segment: Any) -> Iterator[None]:
    """Stands for what Python would do."""
    return iter(())
