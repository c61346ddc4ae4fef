"""Reductions and gathers inside a machine through a shared memory window: our own kernels, each rank its slice.

Every rank owns a segment of the window: a line of flags, then two halves that are used in turn. Tensors larger than a
half pass in chunks. One barrier a chunk is enough: a half is written again only after the barrier of the chunk that
used the other half, which nobody reaches before having read the first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import reduction
from .waiting import Waiter

_PAGE = 4096
Bounds = Sequence[tuple[int, int]]


class SharedWindow:
    """The window of one machine's ranks.

    Args:
        local: mpi4py communicator of the machine's ranks.
        half_bytes: bytes of a half segment.
        waiter: how to wait for the others.
        ranks: world ranks of the members, for messages.
    """

    def __init__(self, local: Any, half_bytes: int, waiter: Waiter, ranks: Sequence[int]) -> None:
        from mpi4py import MPI

        self._half = -(-half_bytes // _PAGE) * _PAGE
        self._waiter, self._ranks, self._me = waiter, tuple(ranks), local.rank
        segment = _PAGE + 2 * self._half
        self._win = MPI.Win.Allocate_shared(segment, 1, comm=local)
        self._win.Lock_all(MPI.MODE_NOCHECK)
        segments = [np.asarray(self._win.Shared_query(r)[0]).view(np.uint8) for r in range(local.size)]
        self.contiguous = all(
            s.size == segment and s.ctypes.data == segments[0].ctypes.data + r * segment for r, s in enumerate(segments)
        )
        base = np.lib.stride_tricks.as_strided(segments[0], (local.size, segment), (segment, 1), writeable=True)
        self._flags = base[:, :64].view(np.int64)[:, 0]
        self._data = base[:, _PAGE:]
        segments[self._me][:64] = 0  # not through the view above: the segments might lie elsewhere
        self._turn = 0
        self.bytes_sent = 0
        local.Barrier()

    def reduce_scatter(self, x: np.ndarray, dtype: str, regions: Bounds, rule: reduction.Rule) -> int:
        """``x[region j] = reduced over the ranks`` at rank j; the rest stays. Returns how many integers saturated."""
        me, count, saturated = self._me, len(regions), 0
        others = [j for j in range(count) if j != me]
        room = self._half // count // x.itemsize // 64 * 64
        for first in range(0, _longest(regions), room):
            rows = self._rows(x.dtype, count * room)
            for j in others:
                a, b = _chunk(regions[j], first, room)
                rows[me, j * room : j * room + b - a] = x[a:b]
                self.bytes_sent += (b - a) * x.itemsize
            self._barrier()
            a, b = _chunk(regions[me], first, room)
            own = rows[:, me * room : me * room + b - a]
            saturated += reduction.reduce_rows(x[a:b], own, me, rule, dtype)
        return saturated

    def allgather(self, x: np.ndarray, regions: Bounds) -> None:
        """Every rank's region of x at every rank."""
        me = self._me
        room = self._half // x.itemsize
        for first in range(0, _longest(regions), room):
            rows = self._rows(x.dtype, room)
            a, b = _chunk(regions[me], first, room)
            rows[me, : b - a] = x[a:b]
            self.bytes_sent += (b - a) * x.itemsize * (len(regions) - 1)
            self._barrier()
            for j in range(len(regions)):
                a, b = _chunk(regions[j], first, room)
                if j != me:
                    x[a:b] = rows[j, : b - a]

    def free(self) -> None:
        """Give the memory back. Collective over the machine."""
        self._win.Unlock_all()
        del self._flags, self._data
        self._win.Free()

    def _rows(self, dtype: Any, size: int) -> np.ndarray:
        """The half to use now, as one row of ``size`` elements a rank."""
        start = (self._turn % 2) * self._half
        return self._data[:, start : start + size * np.dtype(dtype).itemsize].view(dtype)

    def _barrier(self) -> None:
        self._turn += 1
        turn, flags = self._turn, self._flags
        self._win.Sync()
        flags[self._me] = turn
        self._waiter.until(lambda: int(flags.min()) >= turn, self._late)
        self._win.Sync()

    def _late(self) -> list[int]:
        return [self._ranks[r] for r in range(len(self._ranks)) if self._flags[r] < self._turn]


def _longest(regions: Bounds) -> int:
    return max((b - a for a, b in regions), default=0)


def _chunk(region: tuple[int, int], first: int, room: int) -> tuple[int, int]:
    a = min(region[1], region[0] + first)
    return a, min(region[1], a + room)


def shared_memory_free() -> int:
    """Bytes left where MPI keeps shared windows; a window beyond that would kill the process at first touch."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize
