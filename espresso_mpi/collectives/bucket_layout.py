"""Payloads of several tensors in one buffer: what every rank holds of a bucket while its tensors are packed.

Each tensor is compiled by itself, so its regions, parts and weights are those of a tensor that travels alone. Only the
places of its payloads differ: they are slots of a buffer that all tensors of the bucket share.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ..types import Collective, Level
from .data.layout import Layout, Packed, Part, Topology
from .ops.base import Move, advance


@dataclass(frozen=True)
class Slot(Part):
    """A part of the tensor with this number."""

    tensor: int = 0


def shared(layouts: Sequence[Layout]) -> Packed:
    """The layout of one rank that has just encoded tensors, from the layouts of all of them.

    A scatter deals out parts in equal groups. So the first parts of all tensors come first, then the second ones.
    """
    copies = [layout.copies[0] for layout in layouts if isinstance(layout, Packed)]
    count = max(map(len, copies), default=0)
    slots = [
        Slot(part.start, part.stop, 0, part.nbytes, part.header, part.element, tensor)
        for number in range(count)
        for tensor, copy in enumerate(copies)
        if copy
        for part in copy[number : number + 1]
    ]
    return Packed((tuple(slots),)).placed()


def slots_of(whole: Packed, alone: Sequence[Packed]) -> list[Packed]:
    """The layout of each tensor inside the shared buffer.

    Args:
        whole: the layout of the bucket on one rank.
        alone: the layouts of its tensors there, were each alone.
    """
    found: list[list[list[Part]]] = [[[] for _ in whole.copies] for _ in alone]
    for number, copy in enumerate(whole.copies):
        for part in copy:
            assert isinstance(part, Slot)
            found[part.tensor][number].append(part)
    packed = [Packed(tuple(map(tuple, copies)), own.divisor) for copies, own in zip(found, alone)]
    for inside, own in zip(packed, alone):
        assert _content(inside) == _content(own), "a tensor has other payloads in a bucket than alone"
    return packed


def _content(packed: Packed) -> list[list[tuple[int, int, int]]]:
    """What is decoded, and in which order: (start, stop, bytes) of the parts of each copy that are not empty."""
    return [[(part.start, part.stop, part.nbytes) for part in copy if part.size] for copy in packed.copies]


class SharedLayouts:
    """The layouts of a bucket on all ranks, at a place along a route where its tensors are packed."""

    def __init__(self, topology: Topology, tensors: Sequence[Sequence[Layout]]) -> None:
        self._topology = topology
        made: dict[tuple[int, ...], Packed] = {}
        self.of_ranks: list[Layout] = []
        for layouts in zip(*tensors):
            key = tuple(map(id, layouts))  # few differ, and those of one tensor that are equal are one object
            if key not in made:
                made[key] = shared(layouts)
            self.of_ranks.append(made[key])

    def of(self, rank: int) -> Packed:
        """The layout of one rank."""
        found = self.of_ranks[rank]
        assert isinstance(found, Packed)
        return found

    def advance(self, step: Collective, averaged: AbstractSet[Level], rank: int) -> Move | None:
        """As ``ops.base.advance`` for the payloads."""
        self.of_ranks, mine = advance(self._topology, step, averaged, self.of_ranks, rank, "float32")
        return mine
