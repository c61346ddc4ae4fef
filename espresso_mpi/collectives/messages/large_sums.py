"""Compiled: sums of large arrays over the ranks of a node, where the arrays lie or through the shared window.

If the arrays of all ranks are at the same place of one block of ``shared_arrays``, each rank reads its share of all of
them, and writes the sum to all: nothing is copied. Else they pass through the window in chunks. Ranks show beside their
flags where their arrays lie, so all of them choose alike; where only some are in a block, that costs a barrier more.
"""

from __future__ import annotations

from espresso_mpi.compressors.kernels.cpu import host

from ..data.reduction import sum_block
from .shared_memory import BLOCK, SATURATED, SHOWN, STAGE, STEP, WAY, await_all, copy, store, sum_rows

NUMBER, OFFSET, STRIDE, PLACE = range(4)
"""Places of what says where an array lies, int64, and its length: the number of the block, 0 if it is in none, the byte
at which the array begins in the part of its rank, and elements from part to part."""

_SHOWN = 3
"""Where, behind a rank's flag, it shows the first two of them; the offset with a bit that says whether it reads."""

_UNKNOWN, _BY_WINDOW, _ANEW, _WHERE_THEY_LIE = range(4)
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
    within, alike = 0, True
    for rank in range(count):
        number, offset = flags[rank * STEP + _SHOWN], flags[rank * STEP + _SHOWN + 1] // 2
        within += number > 0
        alike = alike and number == flags[_SHOWN] and offset == flags[_SHOWN + 1] // 2
    if within == 0:
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
        if second == 0 and log[SHOWN] == 0:
            _show_shares(part, rows, start, stride, me, count)
            log[SHOWN] = 1
            store(flags, me * STEP, epoch + log[STAGE] + 1)
        if not await_all(flags, count, epoch + log[STAGE] + 1, pace, log):
            return False
        log[STAGE] += 1
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
    return True
