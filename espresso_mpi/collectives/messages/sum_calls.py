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
from .window_places import ALIGN, CHUNK, WindowPlaces

SMALL = 16 << 10
"""Bytes up to which every rank sums all rows itself: one barrier, but ``ranks`` times the reading."""

_UNDO = 16 << 20
"""Bytes of a rank's share that are kept, at most, to restore it: so much memory, and no more, is spent on that."""

_BY_WINDOW, _BY_READS, _BY_CHECKED_READS = range(3)
"""The ways of sums."""

_TIMES = [agreed_sums.BEGAN, agreed_sums.DONE, agreed_sums.WORKED]
_NOTHING: Callable[[], Any] = bool


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
        self._setup, self._log = np.zeros(agreed_sums.SETUP, np.int64), np.zeros(shared_memory.LOG, np.int64)
        self._setup[agreed_sums.CORES] = waiter.cores
        self._readable = window.readable
        self._unsearched = self._readable.copy()
        self._unsearched[:1] = joint_reads.UNSEARCHED
        self._check, self._undo = NO_CHECK, 0
        self._choices: dict[tuple[int, int], tuple[Choice, np.ndarray]] = {}
        self._choice: tuple[Choice, np.ndarray] | None = None
        self._how, self._elements, self._run = how, window.elements(dtype), _NOTHING
        self._arrays, self._nothing = window.arrays, self._elements[:0]
        self._places, self._edges = np.zeros(1, np.int64), np.zeros(2, np.int64)  # of one array, see ``JointArray``
        width = np.dtype(dtype).itemsize * ALIGN
        self._room = min(window.half_bytes, CHUNK) // width * ALIGN
        self._part = min(window.half_bytes, CHUNK) // self._count // width * ALIGN

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
        whole = self._is_whole(x.size, x.nbytes)
        place, span = self._arrays.lies(x, self._nothing) if self._arrays.any else (NOWHERE, self._nothing)
        chosen = self._chosen((x.size, 1), whole, check)
        if chosen.size and not place[joint_reads.NUMBER]:
            place = chosen
        self._places[0], self._edges[1] = device.begin_of(x), x.size
        self._run = partial(agreed_sums.reduce, *self._shown(header, ignored), x, self._places, self._edges, place,
                            span, self._elements, self._room, self._how, whole, reads, *self._rest())  # fmt: skip
        return self._begun()

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
        searches = check.limit > 0 and share <= _UNDO
        found = self._choices.get(size)
        if found is None:
            found = self._choices[size] = Choice(2 + searches), np.zeros(len(_TIMES), np.int64)
        self._choice, self._setup[_TIMES] = found, found[1]
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
        self._run = partial(agreed_sums.reduce, *self._shown(header, ignored), self._nothing, joint.places, joint.edges,
                            place, self._nothing, self._elements, self._room, self._how, whole, True,
                            *self._rest())  # fmt: skip
        return self._begun()

    def scatter(self, header: np.ndarray, ignored: int, x: np.ndarray, own: np.ndarray, edges: np.ndarray) -> bool:
        """As ``reduce``, but ``own`` receives the sum of this rank's region, and x stays.

        Args:
            edges: int64 of shape (2 · members,): where each one's region begins and ends.
        """
        self._choice, self._check, self._undo = None, NO_CHECK, 0
        longest = int((edges[1::2] - edges[::2]).max())
        chunks = -(-longest // self._part)
        self._cost, self._counts = (chunks, x.nbytes - own.nbytes), True
        self._run = partial(agreed_sums.scatter, *self._shown(header, ignored), x, edges, longest, self._elements,
                            self._part, own, self._how, *self._rest())  # fmt: skip
        return self._begun()

    def finish(self) -> Agreed:
        """See ``AgreedCall``."""
        while not self._over:
            self._window.wait_for(self._window.position[0] + int(self._log[shared_memory.STAGE]) + 1)
            self._over = bool(self._run())
        if self._log[shared_memory.ODD]:
            return self._without_sum()
        if not self._log[shared_memory.MET]:
            self._run = _NOTHING
            self._waiter.waited += int(self._log[shared_memory.WAITED]) * 1e-9
            return self._differing(int(self._setup[headers.WIDTH]))
        self._end()
        refused = int(self._log[shared_memory.REFUSED])
        if refused:
            raise refusal(refused)
        return self.done()

    def _shown(self, header: np.ndarray, ignored: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What kernels take of the headers."""
        if header is not self._header:
            self._take(self._setup, header)
        self._setup[headers.IGNORED] = ignored
        return self._setup, self._heads, self._sizes

    def _rest(self) -> tuple[Any, ...]:
        """What they take last."""
        window, log = self._window, self._log
        log.fill(0)
        if self._check.limit:
            log[shared_memory.LEAST], log[shared_memory.SEARCH] = self._check
            log[shared_memory.UNDO] = self._undo
        epoch, uses = window.position
        return self.marks, window.flags, window.places, uses, epoch, self._waiter.pace, log

    def _begun(self) -> bool:
        self._over = bool(self._run())
        log = self._log
        if not self._over or not log[shared_memory.MET] or log[shared_memory.REFUSED] or log[shared_memory.ODD]:
            return False
        self._end()
        return True

    def _without_sum(self) -> Agreed:
        """Values must not be summed: this rank has shown nothing, or all know it, and have restored their shares.

        What they have read of each other until then does not count as sent.
        """
        log, self._run = self._log, _NOTHING
        if log[shared_memory.MET]:
            self._waiter.waited += int(log[shared_memory.WAITED]) * 1e-9
            self._ended(int(log[shared_memory.STAGE]), self._cost[0], 0)
        return Agreed(0.0, odd=True)

    def _end(self) -> None:
        """The sums are there; nothing refers to the arrays any more."""
        log, self._run = self._log.tolist(), _NOTHING
        if log[shared_memory.WAITED]:
            self._waiter.waited += log[shared_memory.WAITED] * 1e-9
        self._ended(log[shared_memory.STAGE] or 1, *self._cost)  # a whole sum has one barrier, and no stages
        self.saturated = log[shared_memory.SATURATED] if self._counts else 0
        if self._choice is not None and not self._choice[0].settled:
            choice, times = self._choice
            times[:] = self._setup[_TIMES]
            choice.add(int(self._setup[agreed_sums.TOOK]))
