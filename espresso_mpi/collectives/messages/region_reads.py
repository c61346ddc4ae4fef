"""Compiled: reduce-scatter and allgather of the ranks of a node by reads from each other's memory.

See ``joint_reads`` for how ranks read. The regions of a rank in several float32 arrays count as one, see ``joint``.
Both collectives have two barriers: all are here and have shown where their arrays begin, and all have read.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from espresso_mpi.compressors.kernels.cpu import host

from . import cross_memory
from .headers import in_row
from .joint_reads import ERRNO, PLACE, READ, ROOM, read_from
from .shared_memory import SATURATED, SHOWN, STAGE, STEP, await_all, move, numbers_at, store, sum_rows
from .window_places import COUNT, ME

_FLOAT = 4


@host.inline
def _sum_own(places, begins, edges, how, place, window, half, log):  # type: ignore[no-untyped-def]
    """This rank's regions become the sums of all ranks'."""
    me, count, like = window[ME], window[COUNT], np.empty(0, np.float32)
    pieces, shown, length = np.empty(cross_memory.PIECES, np.int64), begins[0, :0], ROOM // count // _FLOAT
    parts = np.empty(count * length, np.float32)
    for array in range(places.size):
        size, begin = edges[array + 1, me] - edges[array, me], begins[array, me]
        for first in range(0, size, length):
            n, at = min(length, size - first), _FLOAT * (begin + first)
            for k in range(1, count):
                rank = (me + k) % count
                theirs = carray(numbers_at(in_row(window, half, rank), shown), (places.size,))
                target, there = parts.ctypes.data + _FLOAT * rank * length, theirs[array] + at
                read_from(place[READ], place[ERRNO], place[PLACE + rank], target, there, _FLOAT * n, pieces, log)
            own = carray(numbers_at(places[array] + at, like), (n,))
            log[SATURATED] += sum_rows(own, parts, length, count, me, how)


@host.inline
def _read_others(places, begins, edges, place, window, half, log):  # type: ignore[no-untyped-def]
    """The regions of the other ranks."""
    me, count = window[ME], window[COUNT]
    pieces, shown = np.empty(cross_memory.PIECES, np.int64), begins[0, :0]
    for k in range(1, count):
        rank = (me + k) % count
        theirs = carray(numbers_at(in_row(window, half, rank), shown), (places.size,))
        for array in range(places.size):
            at, nbytes = _FLOAT * begins[array, rank], _FLOAT * (edges[array + 1, rank] - edges[array, rank])
            target, there = places[array] + at, theirs[array] + at
            read_from(place[READ], place[ERRNO], place[PLACE + rank], target, there, nbytes, pieces, log)


@host.inline
def run(sums, places, begins, edges, how, place, window, half, flags, me, count, epoch, pace, log):  # type: ignore[no-untyped-def]
    """This rank's regions become the sums of all ranks'; or it gets the regions of the others.

    Args:
        sums: which of both.
        places: where the arrays begin in memory, see ``addresses``.
        begins, edges: see ``joint.JointRegions``.
        how: of the sum, from ``reduction.arithmetic``.
        place: see ``joint_reads.PLACE``.
        window: see ``window_places``; half: that to use.
        flags and those behind it: as of ``shared_memory.barrier``.
    """
    while log[STAGE] < 2:
        if log[SHOWN] == 0:
            if log[STAGE] == 0:
                move(in_row(window, half, me), places.ctypes.data, 8 * places.size)
            elif sums:
                _sum_own(places, begins, edges, how, place, window, half, log)
            else:
                _read_others(places, begins, edges, place, window, half, log)
            log[SHOWN] = 1
            store(flags, me * STEP, epoch + log[STAGE] + 1)
        if not await_all(flags, count, epoch + log[STAGE] + 1, pace, log):
            return False
        log[STAGE], log[SHOWN] = log[STAGE] + 1, 0
    return True
