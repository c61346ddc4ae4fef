"""Steps that work on the same elements, as one pass over memory: all of them for one tile before the next.

A sum inside a node passes the shared window in chunks. What follows it, or comes before, works on each chunk while it
is in a cache, and there by tiles. Kernels can cut a payload at the multiples of their grain only, so an encode stays
behind the sums by less than one, and a decode is ahead of what is shown by less than one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..data.layout import Dense
from ..messages.window_places import ALIGN
from .emission import Emission
from .operations import BUFFERS, Code, Operation

TILE = 1 << 15
"""Elements of a tile."""

_FLOAT = 4


@dataclass(frozen=True)
class DenseMove:
    """A reduce-scatter or an allgather of tensors inside a node, by the shared window or by reads.

    Attributes:
        op: its name.
        index: this rank's, in the group.
        regions: by tensor: that of each member. The regions of a member count as one, one after the other.
        room: bytes that pass the window at a time.
        divisor: of the sum.
        weights: of the bytes that are sent, how many are each tensor's.
        reads_memory: whether members read each other's memory instead; the window shows only where it is.
    """

    op: str
    index: int
    regions: Sequence[Sequence[Dense]]
    room: int
    divisor: float
    weights: Sequence[int]
    reads_memory: bool = False

    @property
    def members(self) -> range:
        """Indices of the group."""
        return range(len(self.regions[0]))

    @property
    def others(self) -> list[int]:
        """Those of the other members, starting after this one."""
        return [(self.index + k) % len(self.members) for k in self.members[1:]]

    def elements(self, member: int) -> int:
        """Elements of a member."""
        return sum(regions[member].size for regions in self.regions)

    @property
    def sent(self) -> int:
        """Bytes that this member shows, as ``SharedWindow`` counts them."""
        if self.op == "allgather":
            return self.elements(self.index) * _FLOAT * (len(self.members) - 1)
        return sum(self.elements(member) for member in self.others) * _FLOAT

    @property
    def chunk(self) -> int:
        """Elements of a member that pass at a time."""
        parts = 1 if self.op == "allgather" else len(self.members)
        return self.room // parts // _FLOAT // ALIGN * ALIGN

    @property
    def chunks(self) -> range:
        """Where chunks begin, in the region of a member."""
        return range(0, max(self.elements(member) for member in self.members), self.chunk)

    def pieces(self, member: int, first: int) -> Iterator[tuple[int, int, int, int]]:
        """What of each tensor is in a chunk of a member: tensor, first element, elements, and place in the chunk."""
        before = 0
        for tensor, regions in enumerate(self.regions):
            region = regions[member]
            a, b = max(first, before), min(first + self.chunk, before + region.size)
            if a < b:
                yield tensor, region.start + a - before, b - a, a - first
            before += region.size

    def in_rows(self, code: Code, member: int, first: int, number: int = 0) -> dict[int, Operation]:
        """An operation with rows of the window for what of each tensor is in a chunk, by tensor."""
        start = 0 if self.op == "allgather" else member * self.chunk
        return {
            tensor: Operation(code, BUFFERS + tensor, at, size, number=number, other=_FLOAT * (start + place))
            for tensor, at, size, place in self.pieces(member, first)
        }


def _offered(move: DenseMove) -> list[Operation]:
    """All members learn where the tensors of the others are; they are there then."""
    tensors = len(move.regions)
    return [Operation(Code.OFFER, whole=tensors), Operation(Code.MEET), Operation(Code.LEARN, whole=tensors)]


def _reached(move: DenseMove, divisor: int) -> dict[int, Operation]:
    """The sum of this member's region of each tensor, which has elements, with what is read from the others."""
    own = {tensor: regions[move.index] for tensor, regions in enumerate(move.regions)}
    return {
        tensor: Operation(Code.REACH, BUFFERS + tensor, region.start, region.size, nbytes=_FLOAT * TILE, number=divisor,
                          whole=len(move.regions))
        for tensor, region in own.items() if region.size
    }  # fmt: skip


def _fetched(move: DenseMove) -> list[Operation]:
    """The regions of the other members."""
    return [
        Operation(Code.FETCH, BUFFERS + tensor, region.start, region.size, number=member, whole=len(move.regions))
        for member in move.others
        for tensor, region in ((tensor, regions[member]) for tensor, regions in enumerate(move.regions))
        if region.size
    ]


def tile_of(operations: Sequence[Operation]) -> int:
    """Elements of a tile of these operations."""
    grain = math.lcm(*(operation.grain for operation in operations))
    return max(grain, TILE // grain * grain)


def by_tiles(groups: Sequence[tuple[int, Sequence[Operation]]], first: int, last: int) -> list[Operation]:
    """Operations on the elements from ``first`` to ``last``, tile by tile.

    What is only made to be encoded at once is not written to the tensor, whose elements the next decode overwrites.

    Args:
        groups: (number of the duration to which their time is added; the operations).
    """
    if first >= last:
        return []
    every = [operation for _, operations in groups for operation in operations]
    tile, found = tile_of(every), list[Operation]()
    scratch = tile <= TILE and len(every) > 1 and every[-1].code in (Code.ENCODE, Code.SUMMARISE)
    for number, operations in groups:
        cut = [replace(operation.cut(first, last), scratch=scratch) for operation in operations]
        found += Emission.lap(number, cut)
    if last - first <= tile or sum(len(operations) for _, operations in groups) == 1:
        return found
    return [Operation(Code.TILES, len(found), size=last - first, number=tile), *found]


# --- a sum, and the encode behind it ----------------------------------------------------------------------------------


class _Behind:
    """The encode of a tensor, which follows the sums.

    Args:
        encodes: of its parts, in rising order; wire, number: the durations of the sums and of the encode.
    """

    def __init__(self, encodes: Sequence[Operation], wire: int, number: int) -> None:
        self._encodes, self._wire, self._number = encodes, wire, number
        self._done = encodes[0].at if encodes else 0

    def operations(self, total: Operation) -> list[Operation]:
        """A sum, and the encode of what is complete then."""
        found, at, stop = list[Operation](), total.at, total.at + total.size
        for encode in self._encodes:
            begin, end, grain = encode.at, encode.at + encode.size, encode.grain
            last = end if stop >= end else begin + (stop - begin) // grain * grain
            first = max(self._done, begin)
            if last <= first:
                continue
            edge = first if first == at else min(last, begin - (begin - at) // grain * grain)
            found += by_tiles([(self._wire, [total])], at, edge)
            found += by_tiles([(self._number, [encode])], first, edge)
            found += by_tiles([(self._wire, [total]), (self._number, [encode])], edge, last)
            at = self._done = last
        return found + by_tiles([(self._wire, [total])], at, stop)


def reduce_scatter(emission: Emission, move: DenseMove, encodes: dict[int, list[Operation]]) -> list[int]:
    """Sum the regions of this member, and encode them.

    Args:
        encodes: by tensor, of its parts; each of these tensors is encoded as soon as it is summed.

    Returns:
        The marks between which were the collective, then each encode.
    """
    (wire, *after), end = emission.durations(1 + len(encodes))
    divisor = emission.divisor(move.divisor)
    behind = {tensor: _Behind(own, wire, number) for (tensor, own), number in zip(encodes.items(), after)}
    alone = _Behind((), wire, wire)
    if move.reads_memory:
        emission.add(Emission.lap(wire, _offered(move)))
        for tensor, total in _reached(move, divisor).items():
            emission.add(behind.get(tensor, alone).operations(total))
        emission.add(Emission.lap(wire, [Operation(Code.MEET)]))  # from here on, tensors may change
        return end()
    for start in move.chunks:
        shown = [o for member in move.others for o in move.in_rows(Code.WRITE, member, start).values()]
        emission.add(Emission.lap(wire, [*shown, Operation(Code.MEET)]))
        for tensor, total in move.in_rows(Code.SUM, move.index, start, divisor).items():
            emission.add(behind.get(tensor, alone).operations(total))
    return end()


# --- a decode, and what shows it --------------------------------------------------------------------------------------


class _Ahead:
    """The decode of a tensor, which goes before what shows it.

    Args:
        decodes: of each of its parts, in rising order; wire, number: the durations of the collective and of the decode.
    """

    def __init__(self, decodes: Sequence[Sequence[Operation]], wire: int, number: int) -> None:
        self._decodes, self._wire, self._number = decodes, wire, number
        self._done = decodes[0][0].at if decodes else 0

    def operations(self, shown: Operation) -> list[Operation]:
        """The decode of what is shown, and what shows it."""
        found, at, stop = list[Operation](), shown.at, shown.at + shown.size
        for part in self._decodes:
            begin, end, grain = part[0].at, part[0].at + part[0].size, part[0].grain
            first, last = max(self._done, begin), min(end, begin - (begin - stop) // grain * grain)
            if begin >= stop or last <= first:
                continue
            edge = max(first, last if last <= stop else begin + (stop - begin) // grain * grain)
            found += by_tiles([(self._wire, [shown])], at, first)
            found += by_tiles([(self._number, part), (self._wire, [shown])], first, edge)
            found += by_tiles([(self._number, part)], edge, last)
            at, self._done = edge, last
        return found + by_tiles([(self._wire, [shown])], at, stop)


def allgather(emission: Emission, move: DenseMove, decodes: dict[int, list[list[Operation]]]) -> list[int]:
    """Decode the regions of this member, and show them to all.

    Args:
        decodes: by tensor, of each of its parts; each of these tensors is decoded just before it is shown.

    Returns:
        The marks between which were each decode, then the collective.
    """
    (*before, wire), end = emission.durations(len(decodes) + 1)
    if move.reads_memory:
        for parts, number in zip(decodes.values(), before):
            for part in parts:
                emission.add(by_tiles([(number, part)], part[0].at, part[0].at + part[0].size))
        emission.add(Emission.lap(wire, [*_offered(move), *_fetched(move), Operation(Code.MEET)]))
        return end()
    ahead = {tensor: _Ahead(own, wire, number) for (tensor, own), number in zip(decodes.items(), before)}
    alone = _Ahead((), wire, wire)
    for start in move.chunks:
        for tensor, shown in move.in_rows(Code.WRITE, move.index, start).items():
            emission.add(ahead.get(tensor, alone).operations(shown))
        taken = [o for member in move.others for o in move.in_rows(Code.READ, member, start, member).values()]
        emission.add(Emission.lap(wire, [Operation(Code.MEET), *taken]))
    return end()


# --- decodes alone, or with the encode that follows -------------------------------------------------------------------


def decode_all(
    emission: Emission, decodes: dict[int, list[list[Operation]]], encodes: dict[int, list[Operation]]
) -> list[int]:
    """Decode tensors, and encode some of them, which have one part each, at once.

    Returns:
        The marks between which were each decode, then each encode.
    """
    numbers, end = emission.durations(len(decodes) + len(encodes))
    after = dict(zip(encodes, numbers[len(decodes) :]))
    for (tensor, parts), number in zip(decodes.items(), numbers):
        for part in parts:
            groups = [(number, part)]
            if tensor in encodes:
                groups.append((after[tensor], encodes[tensor]))
            emission.add(by_tiles(groups, part[0].at, part[0].at + part[0].size))
    return end()
