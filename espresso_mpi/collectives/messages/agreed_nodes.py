"""Calls over several nodes that begin with the exchange of headers, in one compiled call, prepared once.

Short arrays to be summed travel with the header: every rank gets the data of all, and computes the sum itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from espresso_mpi.arrays import device
from espresso_mpi.compressors.kernels.cpu import host

from ..data.reduction import arithmetic
from .agreed import Agreed
from .agreed_copies import ANSWERED, ENDED, MARKS
from .headers import note
from .leader_gather import gather_for
from .node_leaders import padded
from .part_sizes import unequal
from .shared_memory import LOG, copy, sum_rows
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


@host.inline
def _stack(memory, places, start, ranks, stack, n):  # type: ignore[no-untyped-def]
    """Copy the data of all ranks, in this order, to rows of ``n`` elements."""
    for row in range(ranks.size):
        at = (places[ranks[row], 0] + start) // memory.itemsize
        copy(stack[row * n : (row + 1) * n], memory[at : at + n])


@host.inline
def _mean(x, stack, means, firsts, inner, outer):  # type: ignore[no-untyped-def]
    """``x`` becomes the sum of the rows; see ``mean_of_rows``. Returns how many sums were cut."""
    n, groups, cut = x.size, firsts.size - 1, 0
    for group in range(groups):
        out = x if groups == 1 else means[group * n : (group + 1) * n]
        rows = stack[firsts[group] * n : firsts[group + 1] * n]
        copy(out, rows[:n])
        cut += sum_rows(out, rows, n, firsts[group + 1] - firsts[group], 0, inner)
    if groups > 1:
        copy(x, means[:n])
        cut += sum_rows(x, means, n, groups, 0, outer)
    return cut


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
    return int(_mean(x, stack, means, stages.arrays()[1], inner, outer))


@host.inline
def _finish(x, memory, places, start, ranks, firsts, stack, means, inner, outer, marks, log):  # type: ignore[no-untyped-def]
    _stack(memory, places, start, ranks, stack, x.size)
    cut = _mean(x, stack, means, firsts, inner, outer)
    note(marks, ENDED, log)
    return cut


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
        return self._met() if gather.equal else Agreed(0.0, gather.messages)

    def done(self) -> Agreed:
        """See ``AgreedCall``."""
        return Agreed(int(self.marks[ANSWERED, 0]) * 1e-9, saturated=self.saturated, unequal=self.unequal)

    def _show(self, message: np.ndarray, header: int, ignored: int) -> bool:
        """As ``agree``, of a message that a header of so many bytes begins."""
        gather = self._gather = gather_for(self._transport, self._room(header))
        if not gather.begin(message, header, ignored, self.place) or not gather.equal:
            return False
        self._met()
        return True

    def _met(self) -> Agreed:
        """All headers are equal."""
        if self._sizes is not None:
            self.unequal = unequal([message[self._sizes] for message in self._gather.messages])
        return self.done()


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
        self.start = start
        self._message = np.zeros(start + size * kind.itemsize, np.uint8)
        self._bytes, self._header = self._message[start:], np.empty(0, np.uint8)
        groups = len(stages.groups)
        self._ranks, self._firsts = stages.arrays()
        self._stack = np.empty(size * self._ranks.size, kind)
        self._means = np.empty(size * groups if groups > 1 else 0, kind)
        self._how = [arithmetic(divisor, dtype) for divisor in stages.divisors]
        self._log, self._x = np.zeros(LOG, np.int64), self._stack[:0]

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes that a rank sends in each run, inside the node and between nodes."""
        return gather_for(self._transport, self._room(self.start)).sent(self._message.size)

    def reduce(self, header: np.ndarray, ignored: int, x: np.ndarray, reads: bool = True) -> bool:
        """As ``AgreedSums.reduce``: ``x`` becomes the sum over the ranks, if all headers are equal."""
        if header is not self._header:
            self._message[: self.start] = 0
            self._message[: header.size] = self._header = header
        self._bytes[:] = x.view(np.uint8)
        self._x = x
        return self._show(self._message, header.size, ignored)

    def finish(self) -> Agreed:
        """See ``AgreedCall``."""
        try:
            return super().finish()
        finally:
            self._x = self._stack[:0]

    def _met(self) -> Agreed:
        x, gather = self._x, self._gather
        memory = gather.memory.view(x.dtype)
        cut = _finish(x, memory, gather.places, self.start, self._ranks, self._firsts, self._stack, self._means,
                      *self._how, self.marks, self._log)  # fmt: skip
        self.saturated = cut if self._transport.rank == 0 else 0  # all have seen the same ones
        self._x = self._stack[:0]
        return self.done()


_NONE: Any = None
