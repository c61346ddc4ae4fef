"""Sums inside a node that begin with the exchange of headers: of one array, or of several that count as one.

See ``agreed_sums`` for the kernels, ``joint_sums`` for how several arrays pass the window, and ``agreed`` for how the
ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from espresso_mpi.arrays import device

from . import agreed_sums, headers, joint_reads, shared_memory
from .agreed import Agreed, AgreedCall, How
from .choice import Choice
from .joint import JointArray
from .shared_arrays import NOWHERE
from .single_copy import refusal
from .waiting import Waiter
from .window_places import ALIGN, BEHIND_HEADER, CHUNK, SLOT, WindowPlaces

SMALL = SLOT - BEHIND_HEADER
"""Bytes up to which every rank sums all rows itself: one barrier, but ``ranks`` times the reading. They fit a slot."""

_MOST_UNDONE = 16 << 20
"""Bytes of a rank's share that are kept, at most, to restore it: so much memory, and no more, is spent on that."""

_BY_WINDOW, _BY_READS, _BY_CHECKED_READS = range(3)
"""The ways of sums."""

_LATEST = slice(agreed_sums.BEGAN, agreed_sums.WORKED + 1)
_LOGGED = agreed_sums.LOGGED
_WAITED, _STAGE, _SATURATED, _MET, _REFUSED, _ODD = (
    _LOGGED + place
    for place in (shared_memory.WAITED, shared_memory.STAGE, shared_memory.SATURATED, shared_memory.MET,
                  shared_memory.REFUSED, shared_memory.ODD)
)  # fmt: skip
_LEAST, _SEARCH, _UNDO = (_LOGGED + p for p in (shared_memory.LEAST, shared_memory.SEARCH, shared_memory.UNDO))
_PACE = agreed_sums.PACE
_NOTHING: Callable[[], bool] = bool


class ValueCheck(NamedTuple):
    """The search for values that must not be summed, in a sum of float32.

    Attributes:
        limit: bits of the least magnitude of such values, the same on all ranks with equal headers: where one of them
            has not searched, the others do. 0: all may be summed.
        pending: whether those of this rank have not been searched yet.
    """

    limit: int = 0
    pending: bool = False


NO_CHECK = ValueCheck()


class AgreedSums(AgreedCall):
    """Sums of arrays of one element type.

    Where a node's ranks may read each other's memory, large arrays take all ways by turns, for each size, as
    ``AgreedCopies`` do: which one is quicker depends on whether the cores have a cache in common. One way more is that
    ranks search for values that must not be summed in what they read for the sum, not before: its share must be kept.

    Args:
        window, waiter: as of ``AgreedCall``.
        dtype: of the arrays; 16-bit floating-point numbers as their bits.
        how: from ``reduction.arithmetic``.
    """

    def __init__(self, window: WindowPlaces, waiter: Waiter, dtype: Any, how: How) -> None:
        super().__init__(window, waiter)
        memory = np.zeros(agreed_sums.FRAME, np.int64)
        self._address, self._frame, self._log = device.address(memory), memory.data, memory[_LOGGED:]
        self._setup = memory[: agreed_sums.SETUP]
        self._setup[agreed_sums.CORES] = waiter.cores
        self._readable = window.readable
        self._unsearched = self._readable.copy()
        self._unsearched[:1] = joint_reads.UNSEARCHED
        self._check, self._undo = NO_CHECK, 0
        self._choices: dict[tuple[int, int], tuple[Choice, np.ndarray]] = {}
        self._choice: tuple[Choice, np.ndarray] | None = None
        self._how, self._elements = how, window.elements(dtype)
        self._run: Callable[[], bool] = _NOTHING
        self._arrays, self._nothing = window.arrays, self._elements[:0]
        one = np.zeros(3, np.int64)  # where one array begins, and its edges, see ``JointArray``
        self._one, self._one_at = one.data, device.address(one)
        self._held: Any = None
        self._known: tuple[int, int, bool] | None = None  # of a sum that may be made as the one before
        self._kept = self._sizes, window.flags, window.places  # their addresses are in the frame
        self._fill_frame()
        width = np.dtype(dtype).itemsize * ALIGN
        self._room = min(window.half_bytes, CHUNK) // width * ALIGN
        self._part = min(window.half_bytes, CHUNK) // self._count // width * ALIGN
        self._frame[agreed_sums.ROOM] = self._room

    def _fill_frame(self) -> None:
        """What is the same in all sums."""
        frame, rows = self._frame, self._elements
        frame[agreed_sums.SIZES], frame[agreed_sums.FLAGS], frame[agreed_sums.WINDOW] = map(device.address, self._kept)
        frame[agreed_sums.ROWS], frame[agreed_sums.ROWS_SIZE] = device.address(rows), rows.size
        self._placed = {id(place): device.address(place) for place in (NOWHERE, self._readable, self._unsearched)}

    def sent(self, x: np.ndarray) -> int:
        """Bytes that this rank gives to others in a sum of such an array, beside its header."""
        self._is_whole(x.size, x.nbytes)
        return self._cost[1]

    def reduce(
        self, header: np.ndarray, ignored: int, x: np.ndarray, reads: bool = True, check: ValueCheck = NO_CHECK
    ) -> bool:
        """Show a header; if those of all members are equal, ``x = reduced over the ranks``, else x stays.

        Members may call ``SharedWindow.gather`` with their header instead: it differs then.

        Args:
            header, ignored: as of ``AgreedCopies.begin``.
            x: flat, not empty; equally long at members with equal headers; to be kept until the call is over.
            reads: whether this rank wants the result; at those that do not, x has no use afterwards.
            check: for values that must not be summed.

        Returns:
            As ``AgreedCopies.begin``.
        """
        frame, begin, nothing, known = self._frame, device.begin_of(x), self._nothing, (x.size, ignored, reads)
        if known == self._known and header is self._header and check is self._check and not self._arrays.any:
            frame[agreed_sums.ARRAY] = self._one[0] = begin
            return self._made(x)
        if x.dtype != nothing.dtype:
            raise TypeError(f"a sum of {nothing.dtype} got an array of {x.dtype}")
        whole = self._is_whole(x.size, x.nbytes)
        place, span = self._arrays.lies(x, nothing) if self._arrays.any else (NOWHERE, nothing)
        chosen = self._chosen((x.size, 1), whole, check)
        if chosen.size and not place[joint_reads.NUMBER]:
            place = chosen
        self._one[0], self._one[2] = begin, x.size
        frame[agreed_sums.ARRAY], frame[agreed_sums.ELEMENTS], frame[agreed_sums.ARRAYS] = begin, x.size, 1
        frame[agreed_sums.PLACES], frame[agreed_sums.EDGES] = self._one_at, self._one_at + 8
        self._describe(header, ignored, place, span, whole, reads)
        self._known = known if self._choice is None else None
        return self._made((x, place, span))

    def _describe(
        self, header: np.ndarray, ignored: int, place: np.ndarray, span: np.ndarray, whole: bool, reads: bool
    ) -> None:
        """Put what a sum takes beside its arrays into the frame."""
        frame, check = self._frame, self._check
        self._show(header, ignored)
        frame[agreed_sums.PLACE] = self._placed.get(id(place)) or device.address(place)
        frame[agreed_sums.SPAN_SIZE] = span.size
        if span.size:
            frame[agreed_sums.SPAN] = device.address(span)
        frame[agreed_sums.WHOLE], frame[agreed_sums.READS] = whole, reads
        frame[_LEAST], frame[_SEARCH], frame[_UNDO] = check.limit, check.pending, self._undo

    def _show(self, header: np.ndarray, ignored: int) -> None:
        """Put the header into the frame; see ``AgreedCopies.begin``."""
        frame = self._frame
        if header is not self._header:
            self._take(frame, header)
            frame[agreed_sums.HEADS] = device.address(self._heads)
        frame[headers.IGNORED] = ignored

    def _made(self, held: Any) -> bool:
        """Make the sum that the frame describes, of what is ``held``; returns as ``reduce``."""
        frame = self._frame
        frame[agreed_sums.TIMES], frame[agreed_sums.FRESH] = self.place, 1
        frame[agreed_sums.EPOCH], frame[agreed_sums.USES] = self._window.position
        frame[_PACE], frame[_PACE + 1], frame[_PACE + 2] = self._waiter.pace
        self._run, self._held = self._run_frame, held
        return self._begun()

    def _run_frame(self) -> bool:
        return bool(agreed_sums.run(self._address, self._nothing, self._how))

    def _is_whole(self, size: int, nbytes: int) -> bool:
        """Whether every rank sums all of so many elements; notes what the sum costs, and which rank counts cut sums."""
        chunks = -(-size // self._room)
        whole = chunks == 1 and nbytes <= SMALL
        mine = nbytes if whole else nbytes // self._count  # to a cache line
        self._cost = chunks, nbytes - mine + mine * (self._count - 1)
        self._counts = not whole or self._me == 0  # of a whole sum, all see the same ones
        return whole

    def _chosen(self, size: tuple[int, int], whole: bool, check: ValueCheck) -> np.ndarray:
        """What says that so many elements in so many arrays are to be read by the other ranks; empty: they are not.

        From here on the set-up has the times of the latest sum of this size, which the ranks show to each other.
        """
        self._choice, self._check, self._undo = None, check, 0
        if whole or not self._readable.size:
            return self._readable[:0]
        share = -(-size[0] // self._count // ALIGN) * ALIGN * self._elements.itemsize
        searches = check.limit > 0 and share <= _MOST_UNDONE
        found = self._choices.get(size)
        if found is None:
            found = self._choices[size] = Choice(2 + searches), np.zeros_like(self._setup[_LATEST])
        self._choice, self._setup[_LATEST] = found, found[1]
        if searches:
            self._undo = self._window.room_to_undo(share)
        if found[0].way == _BY_WINDOW:
            return self._readable[:0]
        return self._unsearched if found[0].way == _BY_CHECKED_READS and check.pending else self._readable

    def reduce_joint(self, header: np.ndarray, ignored: int, joint: JointArray, check: ValueCheck) -> bool:
        """Show a header; if those of all members are equal, each array becomes its sum, else the arrays stay.

        Args:
            header, ignored: as of ``AgreedCopies.begin``.
            joint: equally long at members with equal headers; to be kept until the call is over.
            check: for values that must not be summed.

        Returns:
            As ``AgreedCopies.begin``.
        """
        whole = self._is_whole(joint.size, joint.nbytes)
        has_room = joint.places.nbytes <= self._window.half_bytes
        chosen = self._chosen((joint.size, len(joint.places)), whole or not has_room, check)
        place = chosen if chosen.size else NOWHERE
        frame, self._known = self._frame, None
        frame[agreed_sums.ELEMENTS], frame[agreed_sums.ARRAYS] = 0, len(joint.places)
        frame[agreed_sums.PLACES], frame[agreed_sums.EDGES] = map(device.address, (joint.places, joint.edges))
        self._describe(header, ignored, place, self._nothing, whole, True)
        return self._made((joint, place))

    def scatter(self, header: np.ndarray, ignored: int, x: np.ndarray, own: np.ndarray, edges: np.ndarray) -> bool:
        """As ``reduce``, but ``own`` receives the sum of this rank's region, and x stays.

        Args:
            edges: int64 of shape (2 · members,): where each one's region begins and ends.
        """
        self._choice, self._check, self._undo, self._known = None, NO_CHECK, 0, None
        longest = int((edges[1::2] - edges[::2]).max())
        chunks = -(-longest // self._part)
        self._cost, self._counts = (chunks, x.nbytes - own.nbytes), True
        self._show(header, ignored)
        self._log.fill(0)
        heads, (epoch, uses), window = (self._setup, self._heads, self._sizes), self._window.position, self._window
        rest = self.marks, window.flags, window.places, uses, epoch, self._waiter.pace, self._log
        how = self._how
        self._run = partial(agreed_sums.scatter, *heads, x, edges, longest, self._elements, self._part, own, how, *rest)
        return self._begun()

    def finish(self) -> Agreed:
        """See ``AgreedCall``."""
        frame, window = self._frame, self._window
        while not self._over:
            window.wait_for(window.position[0] + frame[_STAGE] + 1)
            self._over = self._run()
        if frame[_ODD]:
            return self._without_sum()
        if not frame[_MET]:
            self._forget()
            self._waiter.waited += frame[_WAITED] * 1e-9
            return self._differing(frame[headers.WIDTH])
        self._end()
        if frame[_REFUSED]:
            raise refusal(frame[_REFUSED])
        return self.done()

    def _begun(self) -> bool:
        self._over, frame = self._run(), self._frame
        if not self._over or not frame[_MET] or frame[_REFUSED] or frame[_ODD]:
            return False
        self._end()
        return True

    def _forget(self) -> None:
        """Refer to the arrays no longer."""
        self._run, self._held = _NOTHING, None

    def _without_sum(self) -> Agreed:
        """Values must not be summed: this rank has shown nothing, or all know it, and have restored their shares.

        What they have read of each other until then does not count as sent.
        """
        self._forget()
        if self._frame[_MET]:
            self._waiter.waited += self._frame[_WAITED] * 1e-9
            self._ended(self._frame[_STAGE], self._cost[0], 0)
        return Agreed(0.0, odd=True)

    def _end(self) -> None:
        """The sums are there; nothing refers to the arrays any more."""
        frame = self._frame
        self._forget()
        self._waiter.waited += frame[_WAITED] * 1e-9
        self._ended(frame[_STAGE] or 1, *self._cost)  # a whole sum has one barrier, and no stages
        self.saturated = frame[_SATURATED] if self._counts else 0
        if self._choice is not None and not self._choice[0].settled:
            choice, times = self._choice
            times[:] = self._setup[_LATEST]
            choice.add(frame[agreed_sums.TOOK])
