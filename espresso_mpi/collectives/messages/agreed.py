"""Collectives inside a node that begin with the exchange of headers, each as one compiled call, prepared once.

If the headers of all ranks are equal, they have agreed, and the collective is done when the call returns; if they
differ, it was an exchange of headers and no more. See ``agreed_copies`` and ``agreed_sums``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from espresso_mpi.arrays import device
from espresso_mpi.errors import TransportError

from . import agreed_copies, agreed_sums, cross_memory, headers, shared_memory
from .agreed_copies import FROM, GIVE, GIVE_AT, LANDS, MARKS, PROCESS, TAKE, TAKE_AT
from .single_copy import SingleCopy
from .switches import SINGLE_COPY
from .waiting import Waiter
from .window_places import ALIGN, CHUNK, WindowPlaces

SMALL = 16 << 10
"""Bytes up to which every rank sums all rows itself: one barrier, but ``ranks`` times the reading."""

ROOMS = (128 << 10, CHUNK)
"""Bytes that pass the window at once when parts are copied; the quicker is found out. A rank shows a chunk while the
others copy the one before, so that there should be several, but every one takes a barrier."""

_PAGE = 4096
"""Bytes of a part up to which nothing is read directly: the system would look up a page for each."""

_TRIES = 3

How = tuple[bool, float, bool, int, int]
"""See ``reduction.arithmetic``."""

Spans = Sequence[tuple[int, int]]


class Agreed(NamedTuple):
    """What came of such a call.

    Attributes:
        met: when all headers were found equal, in seconds of ``time.perf_counter``; 0: they differ.
        headers: then, the header of every member.
        saturated: how many sums of this rank were cut to the range of their type.
        unequal: (giver, taker) of a part whose size they know differently; nothing was copied then. None: all fits.
    """

    met: float
    headers: Sequence[np.ndarray] = ()
    saturated: int = 0
    unequal: tuple[int, int] | None = None


@dataclass(frozen=True)
class Parts:
    """What each rank of a node gives to each other, in bytes.

    Attributes:
        gives: (first, behind the last) of what this rank gives to each, in what it has; empty: nothing moves.
        takes: likewise what it gets of each, in the result.
        begins: where that begins in what the other one has; lands: where what this rank gives to each begins in the
            other one's result. Anything where ``known`` is not.
        shared: whether each rank gives the same bytes to all others that get any.
        known: whether every rank knows the sizes of all parts.
    """

    gives: Spans
    takes: Spans
    begins: Sequence[int]
    lands: Sequence[int]
    shared: bool = False
    known: bool = True

    @cached_property
    def table(self) -> np.ndarray:
        """As ``agreed_copies`` takes it, without the numbers of processes."""
        table = np.zeros((len(self.gives), agreed_copies.COLUMNS), np.int64)
        for row, given, taken, begin, land in zip(table, self.gives, self.takes, self.begins, self.lands):
            row[[GIVE_AT, GIVE]] = given[0], given[1] - given[0]
            row[[TAKE_AT, TAKE]] = taken[0], taken[1] - taken[0]
            row[[FROM, LANDS]] = begin, land
        return table

    def given(self, me: int) -> int:
        """Bytes that this rank gives to others."""
        return sum(b - a for rank, (a, b) in enumerate(self.gives) if rank != me)


class AgreedCall:
    """One prepared call.

    Args:
        window: of the node.
        waiter: how to wait for the other ranks.
        places, log: lengths of the set-up and of the log of the kernel.

    Attributes:
        marks: int64 of shape (``MARKS``, 2): the nanoseconds of the clock, and of waiting so far, at the latest call.
    """

    def __init__(self, window: WindowPlaces, waiter: Waiter, places: int, log: int) -> None:
        self._window, self._waiter, self._count, self._me = window, waiter, window.count, window.member
        self._setup, self._log = np.zeros(places, np.int64), np.zeros(log, np.int64)
        self._sizes, self._heads = np.empty(self._count, np.int64), np.empty(0, np.uint8)
        self._header: np.ndarray | None = None
        self.marks = np.zeros((MARKS, 2), np.int64)

    def _run(self, header: np.ndarray, ignored: int, kernel: Callable[..., bool], *arguments: Any) -> None:
        """Run a kernel, again whenever it stops waiting."""
        window, waiter, log, setup = self._window, self._waiter, self._log, self._setup
        if header is not self._header:
            width = -(-header.size // ALIGN) * ALIGN
            setup[: headers.SETUP] = device.address(header), header.size, ignored, width
            self._header, self._heads = header, np.empty(self._count * width, np.uint8)
        setup[headers.IGNORED] = ignored
        log.fill(0)
        epoch, uses = window.turn
        flags, places, sizes, heads = window.flags, window.places, self._sizes, self._heads
        while not kernel(
            setup, heads, sizes, *arguments, self.marks, flags, places, uses, epoch, waiter.pace, log
        ):  # fmt: skip
            window.wait_for(epoch + int(log[shared_memory.STAGE]) + 1)
        waiter.waited += int(log[shared_memory.WAITED]) * 1e-9

    def _ended(self, barriers: int, halves: int, nbytes: int) -> None:
        """Count barriers, uses of halves, and the bytes that this rank gave away beside its header."""
        epoch, uses = self._window.turn
        self._window.turn = epoch + barriers, uses + halves
        assert self._header is not None
        self._window.bytes_sent += nbytes + self._header.size * (self._count - 1)

    def _differing(self) -> Agreed:
        """The headers, which differ."""
        self._ended(1, 1, 0)
        width = int(self._setup[headers.WIDTH])
        return Agreed(0.0, [self._heads[r * width : r * width + size] for r, size in enumerate(self._sizes.tolist())])


class AgreedCopies(AgreedCall):
    """A copying collective: broadcast, allgather, gather, alltoall; or with no parts, a barrier.

    Where a node's ranks may copy from and to each other's memory, calls take all ways by turns, at first and then more
    rarely, and else the one that is the quickest for the slowest rank. All ranks get to know the times with the
    headers, so they choose alike.

    Args:
        window, waiter: as of ``AgreedCall``.
        single: whether ranks may copy from and to each other's memory.
        parts: of the first call.
    """

    def __init__(self, window: WindowPlaces, waiter: Waiter, single: SingleCopy, parts: Parts) -> None:
        super().__init__(window, waiter, agreed_copies.PLACES, agreed_copies.LENGTH)
        self._processes, self._known = single.processes, parts.known
        setup = self._setup
        setup[agreed_copies.SHARED], setup[agreed_copies.SPLITS] = parts.shared, not parts.known
        setup[[agreed_copies.READ, agreed_copies.WRITE, agreed_copies.ERRNO]] = cross_memory.functions()
        longest = self._use(parts)
        self._ways = self._ways_for(longest, parts)
        self.choice = Choice(len(self._ways))

    def _ways_for(self, longest: int, parts: Parts) -> list[tuple[int, int]]:
        """The ways to choose from, as (way, bytes of a part in a chunk); the same on all ranks."""
        half, count = self._window.half_bytes, 1 if parts.shared else self._count
        rooms = list(dict.fromkeys(min(half, room) // count // ALIGN * ALIGN for room in ROOMS))
        if parts.known and longest <= rooms[0]:
            rooms = rooms[:1]
        ways = [(agreed_copies.BY_WINDOW, room) for room in rooms]
        if self._processes and (not parts.known or longest > _PAGE):
            ways += [(way, rooms[0]) for way in (agreed_copies.BY_READS, agreed_copies.BY_WRITES)]
        return ways

    def _use(self, parts: Parts) -> int:
        """Use these parts from now on; returns the bytes of the longest one of any rank."""
        none = np.zeros((self._count, agreed_copies.COLUMNS), np.int64)
        self._parts, self._table = parts, parts.table.copy() if parts.gives else none
        if self._processes:
            self._table[:, PROCESS] = self._processes
        self._given = parts.given(self._me)
        longest = int(max(self._table[:, GIVE].max(), self._table[:, TAKE].max()))
        self._setup[agreed_copies.LONGEST] = longest
        return longest

    def run(self, header: np.ndarray, ignored: int, source: int, target: int, parts: Parts) -> Agreed:
        """Show a header; if those of all members are equal, copy the parts.

        Args:
            header: flat uint8, at most ``agreed_copies.SHOWN_AT``; not to be changed while it is used.
            ignored: bits of its first byte that may differ.
            source, target: addresses of what this rank has and of the result.

        Raises:
            RankTimeoutError: a rank did not come within the timeout; TransportError: a read failed.
        """
        if parts is not self._parts:
            self._use(parts)
        setup, log, choice = self._setup, self._log, self.choice
        setup[agreed_copies.SOURCE], setup[agreed_copies.TARGET] = source, target
        way, room = self._ways[choice.way]
        setup[agreed_copies.WAY], setup[agreed_copies.ROOM] = way, room
        self._run(header, ignored, _copies, self._table)
        if not log[shared_memory.MET]:
            return self._differing()
        found = log.tolist()
        met, unequal, stage = found[shared_memory.MET] * 1e-9, found[agreed_copies.UNEQUAL], found[shared_memory.STAGE]
        if unequal:
            assert unequal > 0, "ranks have chosen different ways"
            self._ended(1, 1, 0)
            return Agreed(met, unequal=divmod(unequal - 1, self._count))
        self._ended(stage, stage if way == agreed_copies.BY_WINDOW else 1, self._given)
        if found[agreed_copies.FAILED]:
            why = os.strerror(found[agreed_copies.FAILED])
            raise TransportError(
                f"copying from or to the memory of another rank: {why}; set {SINGLE_COPY}=0 to do without it"
            )
        if not choice.settled:
            choice.add(found[agreed_copies.TOOK])
        return Agreed(met)


def _copies(setup: Any, heads: Any, sizes: Any, table: Any, *rest: Any) -> bool:
    return bool(agreed_copies.copies(setup, table, heads, sizes, *rest))


class Choice:
    """Which of several ways is the quickest: in the first runs they take turns, and then again, ever more rarely.

    Of each way the least time counts, which other load on the node disturbs least.

    Args:
        ways: their number.

    Attributes:
        way: the one to take next.
    """

    def __init__(self, ways: int) -> None:
        self.way, self._ways = 0, ways
        self._best: list[float] = [math.inf] * ways
        self._latest: int | None = None
        self._runs, self._turns, self._again = 0, _TRIES * ways, 4 * _TRIES * ways

    @property
    def settled(self) -> bool:
        """Whether the way never changes."""
        return self._ways == 1

    def add(self, took: int) -> None:
        """A run has ended.

        Args:
            took: nanoseconds of the run before; the same on all ranks.
        """
        if self._latest is not None:
            self._best[self._latest] = min(self._best[self._latest], took)
        self._latest = self.way
        self._runs += 1
        if self._turns:
            self._turns -= 1
        elif self._runs >= self._again:
            self._turns, self._again = self._ways, 2 * self._again
        self.way = self._runs % self._ways if self._turns else self._best.index(min(self._best))


class AgreedSums(AgreedCall):
    """Sums of arrays of one element type.

    Args:
        window, waiter: as of ``AgreedCall``.
        dtype: of the arrays; 16-bit floating-point numbers as their bits.
        how: from ``reduction.arithmetic``.
    """

    def __init__(self, window: WindowPlaces, waiter: Waiter, dtype: Any, how: How) -> None:
        super().__init__(window, waiter, headers.SETUP, shared_memory.LOG)
        self._how, self._elements, self._arrays = how, window.elements(dtype), window.arrays
        width = np.dtype(dtype).itemsize * ALIGN
        self._room = min(window.half_bytes, CHUNK) // width * ALIGN
        self._part = min(window.half_bytes, CHUNK) // self._count // width * ALIGN

    def reduce(self, header: np.ndarray, ignored: int, x: np.ndarray, reads: bool = True) -> Agreed:
        """Show a header; if those of all members are equal, ``x = reduced over the ranks``, else x stays.

        Members may call ``SharedWindow.gather`` with their header instead: it differs then.

        Args:
            header, ignored: as of ``AgreedCopies.run``.
            x: flat, not empty; equally long at members with equal headers.
            reads: whether this rank wants the result; at those that do not, x has no use afterwards.
        """
        chunks = -(-x.size // self._room)
        whole = chunks == 1 and x.nbytes <= SMALL
        elements = self._elements
        place, span = self._arrays.lies(x, elements[:0])
        self._run(header, ignored, agreed_sums.reduce, x, place, span, elements, self._room, self._how, whole, reads)
        if not self._log[shared_memory.MET]:
            return self._differing()
        mine = x.nbytes if whole else x.nbytes // self._count  # to a cache line
        self._ended(
            1 if whole else int(self._log[shared_memory.STAGE]), chunks, x.nbytes - mine + mine * (self._count - 1)
        )
        counts = not whole or self._me == 0  # of a whole sum, all see the same ones
        return self._summed(counts)

    def scatter(self, header: np.ndarray, ignored: int, x: np.ndarray, own: np.ndarray, edges: np.ndarray) -> Agreed:
        """As ``reduce``, but ``own`` receives the sum of this rank's region, and x stays.

        Args:
            edges: int64 of shape (2 · members,): where each one's region begins and ends.
        """
        longest = int((edges[1::2] - edges[::2]).max())
        self._run(header, ignored, agreed_sums.scatter, x, edges, longest, self._elements, self._part, own, self._how)
        if not self._log[shared_memory.MET]:
            return self._differing()
        chunks = -(-longest // self._part)
        self._ended(chunks, chunks, x.nbytes - own.nbytes)
        return self._summed(True)

    def _summed(self, counts: bool) -> Agreed:
        log = self._log
        return Agreed(int(log[shared_memory.MET]) * 1e-9, (), int(log[shared_memory.SATURATED]) if counts else 0)
