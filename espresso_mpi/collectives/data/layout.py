"""What every rank holds between two steps of a route: plain values, no MPI, no arrays.

On a rank, a tensor of n elements is either *dense* (one region of it is current, the rest is stale) or *packed*
(payloads of parts of it). A route is compiled to a program by advancing these layouts for all ranks at once. Every rank
therefore knows the sizes of all messages in advance.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from espresso_mpi.arrays.workspace import PAYLOAD_ALIGN
from espresso_mpi.types import ALIGN, ITEMSIZE, Level

PAYLOAD_ITEMSIZE = {**ITEMSIZE, "int8": 1, "int16": 2, "int32": 4, "uint8": 1}
"""Bytes of the element types that arrays and payloads may have when they are summed; uint8: what is only copied."""


@dataclass(frozen=True)
class Topology:
    """Which ranks share a node: ``nodes[h]`` lists the world ranks of node h in rising order."""

    nodes: tuple[tuple[int, ...], ...]

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.nodes))

    @cached_property
    def local_size(self) -> int:
        """Ranks per node that take part in collectives between nodes. It is the number of ranks of the smallest node.

        The *local rank* of a rank is its index in its node. The ranks with the same local rank form an inter-node
        group, if that index is below ``local_size``; the ranks beyond it belong to no inter-node group.
        """
        return min(map(len, self.nodes))

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """The node of each rank."""
        owner = {rank: h for h, ranks in enumerate(self.nodes) for rank in ranks}
        return tuple(owner[rank] for rank in range(self.size))

    def groups(self, level: Level) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that communicate at a level. See ``local_size`` for ``inter``."""
        if level == "flat":
            return (tuple(range(self.size)),)
        if level == "intra":
            return self.nodes
        return tuple(tuple(ranks[local] for ranks in self.nodes) for local in range(self.local_size))

    def pieces(self, level: Level) -> int:
        """The number of pieces into which a scatter at a level cuts a region.

        Inside a node, ranks with a local rank of ``local_size`` or more get an empty piece.
        """
        return {"flat": self.size, "intra": self.local_size, "inter": len(self.nodes)}[level]

    def root(self, level: Level, group: Sequence[int]) -> int:
        """Index in a group of the member that alone goes on after a reduce or a gather.

        It is the first of all ranks, or of the node. Between nodes, the roots of the groups are spread over the nodes.
        """
        local = self.nodes[self.node_of[group[0]]].index(group[0])
        return local % len(self.nodes) if level == "inter" else 0

    def divisor(self, level: Level) -> float:
        """What a level's sum is divided by, so that over a whole route the tensor is divided by the number of ranks.

        Inside a node that is ranks / nodes: where nodes have unequal numbers of ranks, their weights differ.
        """
        return {"flat": self.size, "intra": self.size / len(self.nodes), "inter": len(self.nodes)}[level]

    @cached_property
    def undivided(self) -> Topology:
        """The same ranks, over which a route gives the sum instead of the mean."""
        return _Undivided(self.nodes)

    def __str__(self) -> str:
        counts = [len(ranks) for ranks in self.nodes]
        even = len(set(counts)) == 1
        return f"{len(counts)} x {counts[0]} ranks" if even else f"nodes of {' + '.join(map(str, counts))} ranks"


class _Undivided(Topology):
    """See ``Topology.undivided``."""

    def divisor(self, level: Level) -> float:
        return 1.0


@dataclass(frozen=True)
class Dense:
    """Elements [start, stop) of the tensor are current."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of current elements."""
        return self.stop - self.start

    def split(self, pieces: int, count: int) -> list[Dense]:
        """Cut into ``pieces`` aligned regions of nearly equal size, then empty ones up to ``count``."""
        step = -(-self.size // pieces)
        step = -(-step // ALIGN) * ALIGN
        edges = [min(self.stop, self.start + i * step) for i in range(pieces + 1)]
        edges += [self.stop] * (count - pieces)
        return [Dense(a, b) for a, b in itertools.pairwise(edges)]


@dataclass(frozen=True)
class Even(Dense):
    """A region that is cut into exactly equal pieces, wherever they begin."""

    def split(self, pieces: int, count: int) -> list[Dense]:
        edges = [self.start + self.size * i // pieces for i in range(pieces + 1)] + [self.stop] * (count - pieces)
        return [Even(a, b) for a, b in itertools.pairwise(edges)]


@dataclass(frozen=True)
class Part:
    """The payload of elements [start, stop), at ``offset`` in a buffer.

    ``element`` is the type of its elements after ``header`` bytes, if payloads can be summed; else None.
    """

    start: int
    stop: int
    offset: int
    nbytes: int
    header: int = 0
    element: str | None = None

    @property
    def size(self) -> int:
        """Number of elements that the payload stands for."""
        return self.stop - self.start

    @property
    def room(self) -> int:
        """Bytes that the part takes in a buffer, alignment included."""
        return -(-self.nbytes // PAYLOAD_ALIGN) * PAYLOAD_ALIGN


Copy = tuple[Part, ...]


@dataclass(frozen=True)
class Packed:
    """Payloads in one buffer: ``copies[m][i]`` is part i of the m-th contribution, still to be summed over m.

    ``divisor`` is what the sum over the copies is to be divided by.
    """

    copies: tuple[Copy, ...]
    divisor: float = 1.0

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the buffer, to the end of its last part."""
        return max((part.offset + part.room for copy in self.copies for part in copy), default=0)

    def emptied(self) -> Packed:
        """What a rank holds after it has sent all its payloads: one copy of nothing."""
        return Packed(((),), self.divisor)

    @cached_property
    def region(self) -> Dense:
        """The elements that the parts cover together."""
        parts = self.copies[0] if self.copies else ()
        return Dense(parts[0].start, parts[-1].stop) if parts else Dense(0, 0)

    def placed(self) -> Packed:
        """The same copies one after the other in a buffer of their own."""
        offset, copies = 0, []
        for copy in self.copies:
            placed = []
            for part in copy:
                placed.append(replace(part, offset=offset))
                offset += part.room
            copies.append(tuple(placed))
        return Packed(tuple(copies), self.divisor)


Layout = Dense | Packed
"""What a rank holds of a tensor."""
