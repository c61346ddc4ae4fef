"""What tables of operations know of a shared window: where everything is, and whose turn it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from espresso_mpi.arrays import device

from . import shared_memory
from .shared_arrays import SharedArrays
from .single_copy import SingleCopy, readable
from .waiting import Waiter

SLOT = 32 << 10
"""Bytes of a rank's row that small data have to themselves, whatever the size of the window."""

BEHIND_HEADER = SLOT // 2
"""Where in a slot there is what ranks show at the same barrier as a header: small sums, and what copies need."""

CHUNK = 1 << 20
"""Bytes of a tensor that are in the window at once. Measured with 4 ranks on 2 cores with 1 MiB L2 each and 32 MiB L3,
16 MiB in all: 5.7 ms by 256 KiB (more barriers), 5.4 by 512 KiB and 1 MiB, 6.2 by 2 MiB, 14 by 4 MiB (out of cache)."""

ALIGN = 64

MEMORY, STRIDE, STARTS, ME, COUNT = 0, 1, 2, 4, 5
"""Places of ``WindowPlaces.places``, an int64 array; ``STARTS`` is that of the first of two halves."""


def room_of(half_bytes: int) -> int:
    """Bytes of a payload that pass a window at a time."""
    return min(-(-half_bytes // ALIGN) * ALIGN, CHUNK)


class WindowPlaces:
    """The part of a ``SharedWindow`` that code outside of it reads and advances; ``SharedWindow`` sets the attributes.

    Attributes:
        arrays: memory that the members share beside the window.
        single: whether the members may read each other's memory.
        read_limit: from so many bytes on they do so in dense collectives that begin without headers: those of float32
            by regions, and sums.
    """

    _waiter: Waiter
    _ranks: Sequence[int]
    _memory: np.ndarray
    _flags: np.ndarray
    _half: int
    _stride: int
    _count: int
    _me: int
    _epoch: int
    _uses: int
    _undo: np.ndarray = np.empty(0, np.uint8)
    bytes_sent: int
    arrays: SharedArrays
    single: SingleCopy = SingleCopy((), "not tried")
    read_limit: float = math.inf

    @property
    def count(self) -> int:
        """Number of members."""
        return self._count

    @property
    def member(self) -> int:
        """Which of them this rank is."""
        return self._me

    @property
    def half_bytes(self) -> int:
        """Bytes of a row for large data."""
        return self._half

    def elements(self, dtype: Any) -> np.ndarray:
        """The memory as elements of a type."""
        return self._memory.view(dtype)

    @property
    def room(self) -> int:
        """Bytes of a payload that pass at a time."""
        return room_of(self._half)

    @cached_property
    def flags(self) -> np.ndarray:
        """The flags of the barrier, see ``shared_memory``."""
        return self._flags

    @cached_property
    def places(self) -> np.ndarray:
        """int64: where the memory begins, bytes from row to row, where both halves begin, this member, members."""
        halves = [half * self._count * self._stride + SLOT for half in range(2)]
        return np.array([device.begin_of(self._memory), self._stride, *halves, self._me, self._count], np.int64)

    def reads_memory(self, nbytes: int, arrays: int = 1) -> bool:
        """Whether float32 arrays of so many bytes in all are read from the memory of the members in a collective."""
        return nbytes >= max(1, self.read_limit) and 8 * arrays <= self._half

    @property
    def readable(self) -> np.ndarray:
        """What says that an array may be read by the other members, see ``joint_reads.PLACE``; empty: it may not."""
        return readable(self.single)

    def room_to_undo(self, nbytes: int) -> int:
        """The address of so many bytes, of this rank alone and the same for all collectives, which come one by one."""
        if self._undo.size < nbytes:
            self._undo = np.empty(nbytes, np.uint8)
        return device.begin_of(self._undo)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Bytes and waits in the with-block are those of a measurement, and do not count."""
        sent, waited = self.bytes_sent, self._waiter.waited
        yield
        self.bytes_sent, self._waiter.waited = sent, waited

    @property
    def position(self) -> tuple[int, int]:
        """The number of barriers so far, and how often a half was used."""
        return self._epoch, self._uses

    @position.setter
    def position(self, position: tuple[int, int]) -> None:
        self._epoch, self._uses = position

    def wait_at_barrier(self) -> None:
        """Wait until all have arrived at the barrier at which this member has, with timeout and monitor."""
        self._wait(self._epoch + 1)

    def wait_for(self, epoch: int) -> None:
        """Wait until all have arrived so often."""
        self._wait(epoch)

    def forget_places(self) -> None:
        """The memory is about to be given back."""
        for known in ("flags", "places"):
            self.__dict__.pop(known, None)

    def _wait(self, epoch: int) -> None:
        """Wait until all ranks have arrived ``epoch`` times, with timeout and monitor."""
        self._waiter.until(
            lambda: shared_memory.arrived(self._flags, self._count, epoch),
            lambda: [rank for rank, flag in zip(self._ranks, self._flags[:: shared_memory.LINE // 8]) if flag < epoch],
        )
