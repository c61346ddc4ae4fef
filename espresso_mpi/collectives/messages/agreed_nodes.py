"""Calls over several nodes that begin with the exchange of headers, in one compiled call, prepared once.

Short arrays to be summed travel with the header: every rank gets the data of all, and computes the sum itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from espresso_mpi.arrays import device

from ..data.reduction import arithmetic
from . import node_sums
from .agreed import Agreed
from .agreed_copies import ANSWERED, ASKED, MARKS
from .leader_gather import LeaderGather, gather_for
from .node_leaders import padded
from .part_sizes import unequal
from .sum_calls import NO_CHECK, ValueCheck
from .transport import Transport

ALIGN = 64
"""Data begin behind a header at a multiple of so many bytes."""


class Stages(NamedTuple):
    """In which order rows are summed: within each group, and then the groups.

    Attributes:
        groups: ranks.
        divisors: by which the sum within a group is divided, and that of the groups; of one group, the first one.
    """

    groups: tuple[tuple[int, ...], ...]
    divisors: tuple[float, float]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """int64: the ranks in order of their groups, and how many there are before each group."""
        ranks = [rank for group in self.groups for rank in group]
        return np.array(ranks, np.int64), np.cumsum([0, *map(len, self.groups)], dtype=np.int64)


def mean_of_rows(x: np.ndarray, stack: np.ndarray, stages: Stages, dtype: str) -> int:
    """``x`` becomes the sum of rows, as a route over nodes has it.

    Args:
        x: flat.
        stack: one row for each rank, in order of the groups, one behind the other.
        dtype: name of the element type.

    Returns:
        How many sums were cut to the range of their type.
    """
    means = np.empty(x.size * (len(stages.groups) if len(stages.groups) > 1 else 0), x.dtype)
    inner, outer = (arithmetic(divisor, dtype) for divisor in stages.divisors)
    return int(node_sums.mean(x, stack, means, stages.arrays()[1], inner, outer))


class NodeAgreement:
    """The exchange of headers; see ``AgreedCall``.

    Args:
        room: from the bytes of a header, the most bytes of a message; the same on all ranks.

    Attributes:
        marks, place, saturated: as of ``AgreedCall``.
        unequal: as of ``Agreed``, with ranks of all nodes.
    """

    def __init__(self, transport: Transport, room: Callable[[int], int]) -> None:
        self._transport, self._room, self._gather = transport, room, _NONE
        self.marks = np.zeros((MARKS, 2), np.int64)
        self.place, self.saturated = device.address(self.marks), 0
        self.unequal: tuple[int, int] | None = None
        self._sizes: slice | None = None

    def agree(self, header: np.ndarray, ignored: int, sizes: np.ndarray | None = None) -> bool:
        """Show a header; returns whether all are equal by now, else the call must be finished.

        Args:
            header: flat uint8; not to be changed while it is used.
            ignored: bits of its first byte that may differ.
            sizes: as of ``part_sizes.shown``, to be compared with those of the others; None: there are none.
        """
        self.unequal = self._sizes = None
        if sizes is None:
            return self._show(header, header.size, ignored)
        start = padded(header.size)
        message = np.zeros(start + sizes.size, np.uint8)
        message[: header.size], message[start:] = header, sizes
        self._sizes = slice(start, start + sizes.size)
        return self._show(message, header.size, ignored)

    def finish(self) -> Agreed:
        """See ``AgreedCall``."""
        gather = self._gather
        gather.finish()
        if not gather.equal:
            return Agreed(0.0, gather.messages)
        self._met()
        return self.done()

    def done(self) -> Agreed:
        """See ``AgreedCall``."""
        return Agreed(int(self.marks[ANSWERED, 0]) * 1e-9, saturated=self.saturated, unequal=self.unequal)

    def _show(self, message: np.ndarray, header: int, ignored: int) -> bool:
        """As ``agree``, of a message that a header of so many bytes begins."""
        gather = self._gather = gather_for(self._transport, self._room(header))
        if not gather.begin(message, header, ignored, self._asked, self._run_with(gather)) or not gather.equal:
            return False
        self._met()
        return True

    @property
    def _asked(self) -> int:
        """The address of the marks of the exchange, ``ASKED`` and ``ANSWERED``."""
        return int(self.place + self.marks.strides[0] * ASKED)

    def _run_with(self, gather: LeaderGather) -> Callable[[], int] | None:
        """What runs the exchange, see ``LeaderGather.begin``."""
        return None

    def _met(self) -> None:
        """All headers are equal."""
        if self._sizes is not None:
            self.unequal = unequal([message[self._sizes] for message in self._gather.messages])


class NodeSums(NodeAgreement):
    """A sum that is made again and again.

    Args:
        transport, room: as of ``NodeAgreement``.
        size, dtype: of the arrays; kind: the type of their elements in memory.
        start: bytes in front of the data.
    """

    def __init__(
        self, transport: Transport, room: Callable[[int], int], stages: Stages, size: int, dtype: str,
        kind: np.dtype[Any], start: int,
    ) -> None:  # fmt: skip
        super().__init__(transport, room)
        self.start, self._x = start, _NONE
        self._message = np.zeros(start + size * kind.itemsize, np.uint8)
        self._header, groups = np.empty(0, np.uint8), len(stages.groups)
        ranks, firsts = stages.arrays()
        stack, means = np.empty(size * ranks.size, kind), np.empty(size * groups if groups > 1 else 0, kind)
        self._like, self._how = stack[:0], [arithmetic(divisor, dtype) for divisor in stages.divisors]
        frame = np.zeros(node_sums.FRAME, np.int64)
        self._address, self._frame, self._kept = device.address(frame), frame.data, (ranks, firsts, stack, means)
        frame[node_sums.SIZE], frame[node_sums.START] = size, start
        frame[node_sums.DATA] = device.address(self._message) + start
        frame[node_sums.COUNT], frame[node_sums.GROUPS] = ranks.size, groups
        places = node_sums.RANKS, node_sums.FIRSTS, node_sums.STACK, node_sums.MEANS
        frame[list(places)] = list(map(device.address, self._kept))

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes that a rank sends in each run, inside the node and between nodes."""
        return gather_for(self._transport, self._room(self.start)).sent(self._message.size)

    def takes(self, header_size: int) -> bool:
        """Whether there is room for headers of so many bytes."""
        return header_size <= self.start

    def reduce(
        self, header: np.ndarray, ignored: int, x: np.ndarray, reads: bool = True, check: ValueCheck = NO_CHECK
    ) -> bool:
        """As ``AgreedSums.reduce``: ``x`` becomes the sum over the ranks, if all headers are equal.

        If this rank finds values that must not be summed, it has shown no header. ``reads`` has no effect.
        """
        if header is not self._header:
            self._message[: self.start] = 0
            self._message[: header.size] = self._header = header
        frame, self._x = self._frame, x
        frame[node_sums.X], frame[node_sums.FRESH], frame[node_sums.ODD] = device.begin_of(x), 1, 0
        frame[node_sums.LEAST], frame[node_sums.TIMES] = check.limit if check.pending else 0, self.place
        return self._show(self._message, header.size, ignored)

    def _run_with(self, gather: LeaderGather) -> Callable[[], int] | None:
        """See ``NodeAgreement``."""
        self._frame[node_sums.GATHER], self._frame[node_sums.PLACES] = gather.addresses
        return self._run

    def _run(self) -> int:
        return int(node_sums.run(self._address, self._like, *self._how))

    def finish(self) -> Agreed:
        """See ``AgreedCall``."""
        if self._frame[node_sums.ODD]:
            self._x = _NONE
            return Agreed(0.0, odd=True)
        try:
            return super().finish()
        finally:
            self._x = _NONE

    def _met(self) -> None:
        self.saturated = self._frame[node_sums.CUT] if self._transport.rank == 0 else 0  # all have seen the same ones
        self._x = _NONE


_NONE: Any = None
