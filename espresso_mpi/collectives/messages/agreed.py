"""Collectives inside a node that begin with the exchange of headers, each as one compiled call, prepared once.

If the headers of all ranks are equal, they have agreed, and the collective is done when the call returns; if they
differ, it was an exchange of headers and no more. See ``agreed_copies`` and ``agreed_sums``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from espresso_mpi.arrays import device
from espresso_mpi.errors import TransportError

from ..data.combining import combine_rows
from . import agreed_copies, cross_memory, headers, shared_memory
from .agreed_copies import ANSWERED, ASKED, FROM, GIVE, GIVE_AT, LANDS, MARKS, PROCESS, TAKE, TAKE_AT
from .choice import Choice
from .single_copy import SingleCopy
from .switches import SINGLE_COPY
from .waiting import Waiter
from .window_places import ALIGN, CHUNK, WindowPlaces

ROOMS = (128 << 10, CHUNK)
"""Bytes that pass the window at once when parts are copied; the quicker is found out. A rank shows a chunk while the
others copy the one before, so that there should be several, but every one takes a barrier."""

_PAGE = 4096
"""Bytes of a part up to which nothing is read directly: the system would look up a page for each."""

Combine = Callable[[Any, Any], None]

_NOWHERE = np.empty(0)

_LOGGED, _PACE = agreed_copies.LOGGED, agreed_copies.PACE
_MET, _UNEQUAL, _FAILED = (
    _LOGGED + place for place in (shared_memory.MET, agreed_copies.UNEQUAL, agreed_copies.FAILED)
)

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
        odd: whether there are values that must not be summed. The arrays are as before then, and ``met`` is 0.
        asked: when this rank showed its header, likewise.
    """

    met: float
    headers: Sequence[np.ndarray] = ()
    saturated: int = 0
    unequal: tuple[int, int] | None = None
    odd: bool = False
    asked: float = 0.0


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


class AgreedCall(ABC):
    """One prepared call: ``begin`` it, and ``finish`` it if that has not ended it.

    Args:
        window: of the node.
        waiter: how to wait for the other ranks.

    Attributes:
        marks: int64 of shape (``MARKS``, 2), where the latest call wrote the nanoseconds of the clock and of waiting so
            far; place: its address. To be set before a call.
        saturated: how many sums of this rank were cut to the range of their type, in the latest call that ended well.
    """

    def __init__(self, window: WindowPlaces, waiter: Waiter) -> None:
        self._window, self._waiter, self._count, self._me = window, waiter, window.count, window.member
        self._sizes, self._heads = np.empty(self._count, np.int64), np.empty(0, np.uint8)
        self._header: np.ndarray | None = None
        self._over = True
        self.marks = np.zeros((MARKS, 2), np.int64)
        self.place, self.saturated = device.address(self.marks), 0

    @abstractmethod
    def finish(self) -> Agreed:
        """Wait for the other ranks, and say what came of the call that was begun.

        Raises:
            RankTimeoutError: a rank did not come within the timeout; TransportError: a copy failed.
        """

    def done(self) -> Agreed:
        """What came of a call that ``begin`` has ended."""
        answered, asked = (float(self.marks[mark, 0]) * 1e-9 for mark in (ANSWERED, ASKED))
        return Agreed(answered, saturated=self.saturated, asked=asked)

    def _take(self, setup: Any, header: np.ndarray) -> None:
        """Show this header from now on; ``setup``: see ``headers``."""
        width = -(-header.size // ALIGN) * ALIGN
        setup[headers.HEADER], setup[headers.SIZE], setup[headers.WIDTH] = device.address(header), header.size, width
        self._header, self._heads = header, np.empty(self._count * width, np.uint8)

    def _ended(self, barriers: int, halves: int, nbytes: int) -> None:
        """Count barriers, uses of halves, and the bytes that this rank gave away beside its header."""
        epoch, uses = self._window.position
        self._window.position = epoch + barriers, uses + halves
        assert self._header is not None
        self._window.bytes_sent += nbytes + self._header.size * (self._count - 1)

    def _differing(self, width: int) -> Agreed:
        """The headers, which differ; ``width``: bytes from one to the next."""
        self._ended(1, 1, 0)
        return Agreed(0.0, [self._heads[r * width : r * width + size] for r, size in enumerate(self._sizes.tolist())])


class AgreedCopies(AgreedCall):
    """A copying collective: broadcast, allgather, gather, alltoall; or with no parts, a barrier.

    Where a node's ranks may copy from and to each other's memory, calls take all ways by turns, at first and then more
    rarely, and else the one that is the quickest for the slowest rank; where ranks share cores, the one that takes the
    cores for the shortest time. All ranks get to know the times with the
    headers, so they choose alike.

    Args:
        window, waiter: as of ``AgreedCall``.
        single: whether ranks may copy from and to each other's memory.
        parts: of the first call.
    """

    def __init__(self, window: WindowPlaces, waiter: Waiter, single: SingleCopy, parts: Parts) -> None:
        super().__init__(window, waiter)
        self._processes = single.processes
        frame = np.zeros(agreed_copies.TABLE + self._count * agreed_copies.COLUMNS, np.int64)
        self._memory, self._address, self._frame = frame, device.address(frame), frame.data
        self._table = frame[agreed_copies.TABLE :].reshape(self._count, agreed_copies.COLUMNS)
        frame[agreed_copies.SHARED], frame[agreed_copies.SPLITS] = parts.shared, not parts.known
        frame[agreed_copies.CORES] = waiter.cores
        frame[[agreed_copies.READ, agreed_copies.WRITE, agreed_copies.ERRNO]] = cross_memory.functions()
        self._kept = self._sizes, window.flags, window.places
        frame[[agreed_copies.SIZES, agreed_copies.FLAGS, agreed_copies.WINDOW]] = list(map(device.address, self._kept))
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
        self._parts = parts
        self._table[:] = parts.table if parts.gives else 0
        if self._processes:
            self._table[:, PROCESS] = self._processes
        self._given = parts.given(self._me)
        longest = int(max(self._table[:, GIVE].max(), self._table[:, TAKE].max()))
        self._frame[agreed_copies.LONGEST] = longest
        return longest

    def begin(self, header: np.ndarray, ignored: int, source: int, target: int, parts: Parts) -> bool:
        """Show a header; if those of all members are equal, copy the parts.

        Args:
            header: flat uint8, at most ``agreed_copies.SHOWN_AT``; not to be changed while it is used.
            ignored: bits of its first byte that may differ.
            source, target: addresses of what this rank has and of the result; memory to be kept until the call is over.

        Returns:
            Whether this is done; else the call must be finished.
        """
        frame, window = self._frame, self._window
        if parts is not self._parts:
            self._use(parts)
        if header is not self._header:
            self._take(frame, header)
            frame[agreed_copies.HEADS] = device.address(self._heads)
        frame[headers.IGNORED], frame[agreed_copies.TIMES], frame[agreed_copies.FRESH] = ignored, self.place, 1
        frame[agreed_copies.SOURCE], frame[agreed_copies.TARGET] = source, target
        frame[agreed_copies.WAY], frame[agreed_copies.ROOM] = self._ways[self.choice.way]
        frame[agreed_copies.EPOCH], frame[agreed_copies.USES] = window.position
        frame[_PACE], frame[_PACE + 1], frame[_PACE + 2] = self._waiter.pace
        self._over = bool(agreed_copies.run(self._address))
        if not self._over or not frame[_MET] or frame[_UNEQUAL] or frame[_FAILED]:
            return False
        self._end()
        return True

    def agree(self, header: np.ndarray, ignored: int) -> bool:
        """As ``begin``, of a call without parts."""
        return self.begin(header, ignored, 0, 0, self._parts)

    def _end(self) -> None:
        """The parts were copied."""
        frame, choice = self._frame, self.choice
        self._waiter.waited += frame[_LOGGED + shared_memory.WAITED] * 1e-9
        stage, window = frame[_LOGGED + shared_memory.STAGE], self._window
        halves = stage if frame[agreed_copies.WAY] == agreed_copies.BY_WINDOW else 1
        window.position = frame[agreed_copies.EPOCH] + stage, frame[agreed_copies.USES] + halves
        window.bytes_sent += self._given + frame[headers.SIZE] * (self._count - 1)
        if not choice.settled:
            choice.add(frame[_LOGGED + agreed_copies.TOOK])

    def finish(self) -> Agreed:
        """See ``AgreedCall``."""
        frame, window = self._frame, self._window
        while not self._over:
            window.wait_for(frame[agreed_copies.EPOCH] + frame[_LOGGED + shared_memory.STAGE] + 1)
            self._over = bool(agreed_copies.run(self._address))
        unequal = frame[_UNEQUAL]
        if unequal or not frame[_MET]:
            self._waiter.waited += frame[_LOGGED + shared_memory.WAITED] * 1e-9
        if not frame[_MET]:
            return self._differing(frame[headers.WIDTH])
        if unequal:
            assert unequal > 0, "ranks have chosen different ways"
            self._ended(1, 1, 0)
            return Agreed(frame[_MET] * 1e-9, unequal=divmod(unequal - 1, self._count))
        self._end()
        if frame[_FAILED]:
            why = os.strerror(frame[_FAILED])
            raise TransportError(
                f"copying from or to the memory of another rank: {why}; set {SINGLE_COPY}=0 to do without it"
            )
        return self.done()


class AgreedReductions(AgreedCopies):
    """Short reductions by an operator that compiled code does not know: all ranks get all arrays, and reduce them.

    Args:
        window, waiter, single, parts: as of ``AgreedCopies``; the parts are those of an allgather.
        combine: as of ``combine_rows``.
    """

    def __init__(
        self,
        window: WindowPlaces,
        waiter: Waiter,
        single: SingleCopy,
        parts: Parts,
        combine: Callable[[Any, Any], None],
    ) -> None:
        super().__init__(window, waiter, single, parts)
        self._combine, self._arrays = combine, (_NOWHERE, _NOWHERE)

    def reduce(self, header: np.ndarray, ignored: int, x: np.ndarray, rows: np.ndarray, parts: Parts) -> bool:
        """As ``begin``: ``x`` becomes the reduction of the ranks' arrays, in their order; ``rows`` receives these."""
        self._arrays = x, rows
        done = self.begin(header, ignored, device.begin_of(x), device.begin_of(rows), parts)
        if done:
            self._reduce()
        return done

    def finish(self) -> Agreed:
        """See ``AgreedCall``."""
        found = super().finish()
        if found.met:
            self._reduce()
        return found

    def _reduce(self) -> None:
        (x, rows), self._arrays = self._arrays, (_NOWHERE, _NOWHERE)
        combine_rows(x, rows, self._me, self._combine)
