"""Compiled: sums of arrays over the ranks of a node by reads from each other's memory; the arrays count as one array.

Each rank reads its share of the joint array (see ``joint_sums``) from the memory of the others, a part that fits a
cache at a time, sums it, and reads the shares of the others when all are summed. So data are copied once, and barriers
are three, whatever the number of arrays.

The ranks show in the shared window where their arrays begin. Nothing else is written there meanwhile.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from espresso_mpi.compressors.kernels.cpu import host

from ..data.magnitudes import in_range
from . import cross_memory
from .joint_sums import are_clean, array_of, found_odd, from_row, share_of, show_odd, sum_span, to_row
from .shared_memory import (
    BUSY,
    LEAST,
    ODD,
    REFUSED,
    SATURATED,
    SAVED,
    SHOWN,
    STAGE,
    STEP,
    UNDO,
    await_all,
    numbers_at,
    store,
    worked,
)

NUMBER, OFFSET, STRIDE, READ, ERRNO, PLACE = range(6)
"""Places of what says where an array lies, int64, and its length: the number of the block of ``shared_arrays``, 0 if it
is in none; the byte at which the array begins in the part of its rank; and elements from part to part. Then come the
addresses of the functions that read and that say where the error is, and behind these the numbers of the processes of
all ranks. Of an array that others may read, the number is ``READABLE``, or ``UNSEARCHED`` if they are to search what
they read for values that must not be summed; offset and stride mean nothing then."""

READABLE, UNSEARCHED = -1, -2

SHOWN_PLACE = 3
"""Where, behind a rank's flag, it shows the first two of them; the offset with a bit that says whether it reads."""

_REFUSED_PLACE = 5
"""Where, behind a rank's flag, it shows that it could not read."""

ROOM = 1 << 20
"""Bytes that are read of all ranks at a time: they stay in a cache until they are summed. Measured for 16 MiB on 2 and
4 ranks with 1 MiB L2 each, over ``MPI_Allreduce``: 32 and 64 KiB 1.5 and 1.2, 512 KiB and 1 MiB 1.1 and 1.2, 2 and 4
MiB 1.0 and 0.93 (by a cache of 32 MiB that all have in common)."""


@host.inline
def _places_of(rank, rows, start, stride, size, flags):  # type: ignore[no-untyped-def]
    """Where a rank shows the addresses of so many arrays, in its row."""
    address = rows.ctypes.data + (start + rank * stride) * rows.itemsize
    return carray(numbers_at(address, flags), (size,))


@host.inline
def show_places(places, rows, start, stride, flags, me):  # type: ignore[no-untyped-def]
    """Show the addresses of the arrays in the own row, which has room for them."""
    shown = _places_of(me, rows, start, stride, places.size, flags)
    for array in range(places.size):
        shown[array] = places[array]


@host.inline
def read_from(read, errno, process, target, there, nbytes, pieces, log):  # type: ignore[no-untyped-def]
    """Read from the memory of another process, unless a read has failed; as ``cross_memory.copy``."""
    if log[REFUSED] == 0 and nbytes > 0:
        log[REFUSED] = cross_memory.copy(read, errno, process, target, there, nbytes, pieces)


@host.inline
def _read(here, to, edges, first, last, there, itemsize, rank, place, pieces, log):  # type: ignore[no-untyped-def]
    """Read elements [first, last) of the joint array of another rank.

    Args:
        here: addresses of arrays that receive them; empty: they lie side by side from the address ``to`` on.
        there: addresses of the arrays of the other rank.
    """
    array = array_of(edges, first)
    while array < there.size and edges[array] < last:
        a, b = max(first, edges[array]), min(last, edges[array + 1])
        at = (a - edges[array]) * itemsize
        target = here[array] + at if here.size else to + (a - first) * itemsize
        nbytes = (b - a) * itemsize
        read_from(place[READ], place[ERRNO], place[PLACE + rank], target, there[array] + at, nbytes, pieces, log)
        array += 1


@host.inline
def _unsearched(rank, flags):  # type: ignore[no-untyped-def]
    """Whether the others are to search what they read of a rank."""
    return flags[rank * STEP + SHOWN_PLACE] == UNSEARCHED


@host.inline
def _part_is_clean(places, edges, first, last, to, room, flags, me, count, log):  # type: ignore[no-untyped-def]
    """Whether elements [first, last) of all ranks may be summed, where they were not searched before.

    Args:
        to: the address where those of the first rank were put; room: bytes from rank to rank.
    """
    for rank in range(count):
        if not _unsearched(rank, flags):
            continue
        if rank == me:
            clean = are_clean(places, edges, first, last, log)
        else:
            clean = in_range(to + rank * room, last - first, log[LEAST])
        if not clean:
            return False
    return True


@host.inline
def _saved(rows, size, log):  # type: ignore[no-untyped-def]
    """The memory where this rank keeps what its share was, so many elements of it."""
    return carray(numbers_at(log[UNDO], rows), (size,))


@host.inline
def _sum_read(places, edges, place, rows, start, stride, how, flags, me, count, log):  # type: ignore[no-untyped-def]
    """The own share of the sum, up to values that must not be summed; what it was is saved if there may be any."""
    size, pieces, nowhere = rows.itemsize, np.empty(cross_memory.PIECES, np.int64), places[:0]
    length = ROOM // count // size
    parts = np.empty(count * length, rows.dtype)
    a, b = share_of(me, edges[places.size], count)
    to, search, odd = parts.ctypes.data, False, False
    for rank in range(count):
        search = search or _unsearched(rank, flags)
    for first in range(a, b, length):
        last = min(b, first + length)
        for k in range(1, count):
            rank = (me + k) % count
            there = _places_of(rank, rows, start, stride, places.size, flags)
            _read(nowhere, to + rank * length * size, edges, first, last, there, size, rank, place, pieces, log)
        if search and log[REFUSED] == 0:
            odd = log[UNDO] == 0 or not _part_is_clean(
                places, edges, first, last, to, length * size, flags, me, count, log
            )
            if odd:
                break
            to_row(places, edges, first, last, _saved(rows, last - a, log)[first - a :])
            log[SAVED] = last - a
        log[SATURATED] += sum_span(places, edges, first, last, parts, length, count, me, how)
    flags[me * STEP + _REFUSED_PLACE] = log[REFUSED]
    show_odd(flags, me, odd)


@host.inline
def _undone(places, edges, rows, flags, me, count, log):  # type: ignore[no-untyped-def]
    """Whether a rank has found values that must not be summed; the own share is then what it was.

    All ranks find the same. A rank that could not read comes first: that is an error of all.
    """
    refused = False
    for rank in range(count):
        refused = refused or flags[rank * STEP + _REFUSED_PLACE] != 0
    log[ODD] = not refused and found_odd(flags, count)
    if log[ODD]:
        a, _ = share_of(me, edges[places.size], count)
        from_row(places, edges, a, a + log[SAVED], _saved(rows, log[SAVED], log))
    return log[ODD] != 0


@host.inline
def _read_shares(places, edges, place, rows, start, stride, reads, flags, me, count, log):  # type: ignore[no-untyped-def]
    """The shares that others have summed, unless one of them could not read."""
    pieces = np.empty(cross_memory.PIECES, np.int64)
    for rank in range(count):
        if flags[rank * STEP + _REFUSED_PLACE] != 0 and log[REFUSED] == 0:
            log[REFUSED] = -1 - rank
    for k in range(1, count if reads else 0):
        rank = (me + k) % count
        a, b = share_of(rank, edges[places.size], count)
        there = _places_of(rank, rows, start, stride, places.size, flags)
        _read(places, 0, edges, a, b, there, rows.itemsize, rank, place, pieces, log)


@host.inline
def by_reads(  # type: ignore[no-untyped-def]
    places, edges, place, rows, start, stride, how, reads, flags, me, count, epoch, pace, log,
):  # fmt: skip
    """The joint array becomes the sum over the ranks where it is read; elsewhere it has no use afterwards.

    Three barriers: all are here and have shown their places, all have summed, all have read. If a rank has found values
    that must not be summed, all restore their shares after the second one, and that is the last.

    Args: as of ``joint_sums.by_chunks``; place: see ``PLACE``; start: where the first row begins.
    """
    while log[STAGE] < 3:
        if log[SHOWN] == 0:
            before = worked()
            if log[STAGE] == 2 and _undone(places, edges, rows, flags, me, count, log):
                return True
            if log[STAGE] == 1:
                _sum_read(places, edges, place, rows, start, stride, how, flags, me, count, log)
            else:
                _read_shares(places, edges, place, rows, start, stride, reads, flags, me, count, log)
            log[BUSY] += worked() - before
            log[SHOWN] = 1
            store(flags, me * STEP, epoch + log[STAGE] + 1)
        if not await_all(flags, count, epoch + log[STAGE] + 1, pace, log):
            return False
        log[STAGE] += 1
        log[SHOWN] = 0
    return True
