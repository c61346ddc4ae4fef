"""Bytes that move between the buffers of the members of a group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .layout import Packed, Part

Sources = list[list[tuple[int, Part]]]
"""What a member will hold: copies of parts, each with the member that it comes from."""


@dataclass(frozen=True)
class Transfer:
    """Bytes that move from a place in one member's buffer to a place in another's."""

    source: int
    target: int
    source_offset: int
    target_offset: int
    nbytes: int


def place(sources: Sources, divisor: float) -> Packed:
    """The layout of a member from its sources: the copies one after the other in a new buffer."""
    return Packed(tuple(tuple(part for _, part in copy) for copy in sources), divisor).placed()


def transfers(target: int, sources: Sources) -> Iterator[Transfer]:
    """The transfers to a member; those that are adjacent at both ends are merged."""
    last: Transfer | None = None
    offset = 0
    for source, part in (item for copy in sources for item in copy):
        if last and last.source == source and last.source_offset + last.nbytes == part.offset:
            last = Transfer(source, target, last.source_offset, last.target_offset, last.nbytes + part.room)
        else:
            if last and last.nbytes:
                yield last
            last = Transfer(source, target, part.offset, offset, part.room)
        offset += part.room
    if last and last.nbytes:
        yield last
