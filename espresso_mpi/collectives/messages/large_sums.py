"""Compiled: sums of large arrays over the ranks of a node: where they lie, by reads, or through the shared window.

If the arrays of all ranks are at the same place of one block of ``shared_arrays``, each rank reads its share of all of
them, and writes the sum to all: nothing is copied. Else they pass through the window in chunks. Ranks show beside their
flags where their arrays lie, so all of them choose alike; where only some are in a block, that costs a barrier more.

*By reads*, where the system allows it (``single_copy``): each rank reads its share from the memory of the others, a
part that fits a cache at a time, sums it, and reads the shares of the others when all are summed.
"""

from __future__ import annotations

import numpy as np

from espresso_mpi.compressors.kernels.cpu import host

from ..data.reduction import sum_block
from . import cross_memory
from .shared_memory import (
    BLOCK,
    BUSY,
    REFUSED,
    SATURATED,
    SHOWN,
    STAGE,
    STEP,
    WAY,
    await_all,
    copy,
    store,
    sum_rows,
    worked,
)

NUMBER, OFFSET, STRIDE, READ, ERRNO, PLACE = range(6)
"""Places of what says where an array lies, int64, and its length: the number of the block, 0 if it is in none, the byte
at which the array begins in the part of its rank, and elements from part to part. Of an array that others may read, the
number is ``READABLE`` and the byte its address, then come the addresses of the functions that read and that say where
the error is, and behind these the numbers of the processes of all ranks."""

READABLE, _FAILED = -1, -2

ROOM = 1 << 20
"""Bytes that are read of all ranks at a time: they stay in a cache until they are summed. Measured for 16 MiB on 2 and
4 ranks with 1 MiB L2 each, over ``MPI_Allreduce``: 32 and 64 KiB 1.5 and 1.2, 512 KiB and 1 MiB 1.1 and 1.2, 2 and 4
MiB 1.0 and 0.93 (by a cache of 32 MiB that all have in common)."""

_SHOWN = 3
"""Where, behind a rank's flag, it shows the first two of them; the offset with a bit that says whether it reads."""

_UNKNOWN, _BY_WINDOW, _ANEW, _WHERE_THEY_LIE, _BY_READS = range(5)
"""The ways; ``_ANEW``: by the window, after a barrier more, since not all ranks have shown their first chunk."""


@host.inline
def share_of(rank, size, count):  # type: ignore[no-untyped-def]
    """The elements of a chunk that a rank sums: whole cache lines of any element type."""
    share = ((size + count - 1) // count + 63) // 64 * 64
    return min(size, rank * share), min(size, (rank + 1) * share)


@host.inline
def show_first(x, place, rows, start, room, stride, reads, flags, me, count):  # type: ignore[no-untyped-def]
    """Show where x lies; if it is in no block, write the shares of its first chunk that others sum to the window.

    Args: as of ``reduce_large``; start: where the first row begins.
    """
    flags[me * STEP + _SHOWN], flags[me * STEP + _SHOWN + 1] = place[NUMBER], 2 * place[OFFSET] + reads
    if place[NUMBER] == 0:
        _show_shares(x[:room], rows, start, stride, me, count)


@host.inline
def _show_shares(part, rows, start, stride, me, count):  # type: ignore[no-untyped-def]
    """Copy the shares of a chunk that others sum to the own row."""
    row = rows[start + me * stride : start + me * stride + part.size]
    a, b = share_of(me, part.size, count)
    copy(row[:a], part[:a])
    copy(row[b:], part[b:])


@host.inline
def _copy_others(x, rows, start, stride, me, count):  # type: ignore[no-untyped-def]
    """The shares of a chunk that others have summed, beginning with the next rank's: not all read one at first."""
    for k in range(1, count):
        rank = (me + k) % count
        a, b = share_of(rank, x.size, count)
        copy(x[a:b], rows[start + rank * stride + a : start + rank * stride + b])


@host.inline
def _way(flags, count):  # type: ignore[no-untyped-def]
    """What all ranks have shown, so that all find the same."""
    within, readable, alike = 0, 0, True
    for rank in range(count):
        number, offset = flags[rank * STEP + _SHOWN], flags[rank * STEP + _SHOWN + 1] // 2
        within += number > 0
        readable += number == READABLE
        alike = alike and number == flags[_SHOWN] and offset == flags[_SHOWN + 1] // 2
    if readable == count:
        return _BY_READS
    if within + readable == 0:
        return _BY_WINDOW
    return _WHERE_THEY_LIE if within == count and alike else _ANEW


@host.inline
def _sum_where_they_lie(x, span, stride, how, flags, me, count):  # type: ignore[no-untyped-def]
    """The own share of the sum, at all ranks that read; returns as ``sum_rows``."""
    saturated = 0
    a, b = share_of(me, x.size, count)
    for start in range(a, b, BLOCK):
        part = x[start : min(b, start + BLOCK)]
        saturated += sum_block(part, span, start, stride, count, me, how)
        for k in range(1, count):
            rank = (me + k) % count
            if flags[rank * STEP + _SHOWN + 1] % 2:
                copy(span[rank * stride + start : rank * stride + start + part.size], part)
    return saturated


@host.inline
def _read(x, first, size, rank, first_there, place, flags, pieces, log):  # type: ignore[no-untyped-def]
    """Read elements from the array of another rank, unless a copy has failed."""
    if log[REFUSED] == 0 and size > 0:
        there = flags[rank * STEP + _SHOWN + 1] // 2 + first_there * x.itemsize
        log[REFUSED] = cross_memory.copy(
            place[READ], place[ERRNO], place[PLACE + rank], x.ctypes.data + first * x.itemsize, there,
            size * x.itemsize, pieces,
        )  # fmt: skip


@host.inline
def _sum_read(x, place, how, flags, me, count, log):  # type: ignore[no-untyped-def]
    """The own share of the sum."""
    pieces, length = np.empty(cross_memory.PIECES, np.int64), ROOM // count // x.itemsize
    rows = np.empty(count * length, x.dtype)
    a, b = share_of(me, x.size, count)
    for start in range(a, b, length):
        part = x[start : min(b, start + length)]
        for k in range(1, count):
            rank = (me + k) % count
            _read(rows, rank * length, part.size, rank, start, place, flags, pieces, log)
        log[SATURATED] += sum_rows(part, rows, length, count, me, how)
    if log[REFUSED] != 0:
        flags[me * STEP + _SHOWN] = _FAILED


@host.inline
def _read_others(x, place, reads, flags, me, count, log):  # type: ignore[no-untyped-def]
    """The shares that others have summed, unless one of them could not read."""
    pieces = np.empty(cross_memory.PIECES, np.int64)
    for rank in range(count):
        if flags[rank * STEP + _SHOWN] == _FAILED and log[REFUSED] == 0:
            log[REFUSED] = -1 - rank
    for k in range(1, count if reads else 0):
        rank = (me + k) % count
        a, b = share_of(rank, x.size, count)
        _read(x, a, b - a, rank, a, place, flags, pieces, log)


@host.inline
def _by_reads(x, place, how, reads, flags, me, count, epoch, pace, log):  # type: ignore[no-untyped-def]
    """Three barriers: all are here, all have summed, all have read."""
    while log[STAGE] < 3:
        if log[SHOWN] == 0:
            before = worked()
            if log[STAGE] == 1:
                _sum_read(x, place, how, flags, me, count, log)
            else:
                _read_others(x, place, reads, flags, me, count, log)
            log[BUSY] += worked() - before
            log[SHOWN] = 1
            store(flags, me * STEP, epoch + log[STAGE] + 1)
        if not await_all(flags, count, epoch + log[STAGE] + 1, pace, log):
            return False
        log[STAGE] += 1
        log[SHOWN] = 0
    return True


@host.inline
def reduce_large(x, place, span, rows, starts, room, stride, how, reads, flags, me, count, epoch, pace, log):  # type: ignore[no-untyped-def]
    """``x`` becomes the sum over the ranks where it ``reads``; elsewhere it has no use afterwards.

    Args:
        place: see ``PLACE``; span: the block from where the array of the first rank begins, if x is in one.
        rows: the window as elements of x's type.
        starts: where the first row begins in the half to use first, and in the other.
        room: elements of a chunk.
        stride: elements from row to row.
        how: from ``reduction.arithmetic``.
        reads: whether this rank wants the shares of the others.
        log: as of ``shared_memory.barrier``; ``SHOWN`` is 1 at first if ``show_first`` was called and this rank has
            arrived. ``STAGE`` becomes the number of barriers.
    """
    if log[WAY] == _UNKNOWN:
        if log[SHOWN] == 0:
            show_first(x, place, rows, starts[0], room, stride, reads, flags, me, count)
            log[SHOWN] = 1
            store(flags, me * STEP, epoch + 1)
        if not await_all(flags, count, epoch + 1, pace, log):
            return False
        log[WAY] = _way(flags, count)
        if log[WAY] == _WHERE_THEY_LIE:
            log[SATURATED] += _sum_where_they_lie(x, span, place[STRIDE], how, flags, me, count)
            store(flags, me * STEP, epoch + 2)
        if log[WAY] != _BY_WINDOW:
            log[STAGE], log[SHOWN] = 1, 0
    if log[WAY] == _BY_READS:
        return _by_reads(x, place, how, reads, flags, me, count, epoch, pace, log)
    if log[WAY] == _WHERE_THEY_LIE:
        if not await_all(flags, count, epoch + 2, pace, log):
            return False
        log[STAGE] = 2
        return True
    more = log[WAY] == _ANEW
    return _by_chunks(x, rows, starts, room, stride, how, reads, more, flags, me, count, epoch, pace, log)


@host.inline
def _by_chunks(x, rows, starts, room, stride, how, reads, more, flags, me, count, epoch, pace, log):  # type: ignore[no-untyped-def]
    """In chunks, with two barriers each: every rank sums its share of a chunk, and shows it.

    Args:
        more: barriers before the first chunk is shown.
    """
    while log[STAGE] < more + 2 * ((x.size + room - 1) // room):
        chunk, second = divmod(log[STAGE] - more, 2)
        start, part = starts[chunk % 2], x[chunk * room : (chunk + 1) * room]
        before = worked()
        if second == 0 and log[SHOWN] == 0:
            _show_shares(part, rows, start, stride, me, count)
            log[BUSY] += worked() - before
            log[SHOWN] = 1
            store(flags, me * STEP, epoch + log[STAGE] + 1)
        if not await_all(flags, count, epoch + log[STAGE] + 1, pace, log):
            return False
        log[STAGE] += 1
        before = worked()
        if second == 0:
            a, b = share_of(me, part.size, count)
            row = rows[start + me * stride : start + me * stride + part.size]
            log[SATURATED] += sum_rows(part[a:b], rows[start + a :], stride, count, me, how)
            copy(row[a:b], part[a:b])
            store(flags, me * STEP, epoch + log[STAGE] + 1)
        else:
            log[SHOWN] = 0
            if reads:
                _copy_others(part, rows, start, stride, me, count)
        log[BUSY] += worked() - before
    return True
