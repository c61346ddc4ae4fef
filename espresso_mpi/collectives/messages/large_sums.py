"""Compiled: sums of large arrays over the ranks of a node: where they lie, by reads, or through the shared window.

If the arrays of all ranks are at the same place of one block of ``shared_arrays``, each rank reads its share of all of
them, and writes the sum to all: nothing is copied. Else they pass through the window in chunks (``joint_sums``), or are
read where the system allows it (``joint_reads``, ``single_copy``). Ranks show beside their flags where their arrays
lie, so all of them choose alike; where only some are in a block, that costs a barrier more.
"""

from __future__ import annotations

from espresso_mpi.compressors.kernels.cpu import host

from ..data.reduction import sum_block
from . import joint_reads, joint_sums
from .joint_reads import NUMBER, OFFSET, SHOWN_PLACE, STRIDE, UNSEARCHED
from .joint_sums import share_of
from .shared_memory import BLOCK, SATURATED, SHOWN, STAGE, STEP, WAY, await_all, copy, store

_UNKNOWN, _BY_WINDOW, _ANEW, _WHERE_THEY_LIE, _BY_READS = range(5)
"""The ways; ``_ANEW``: by the window, after a barrier more, since not all ranks have shown their first chunk."""


@host.inline
def show_first(places, edges, place, rows, start, room, stride, reads, flags, me, count):  # type: ignore[no-untyped-def]
    """Show where the arrays lie. Those in no block: write the shares of the first chunk that others sum to the window.

    Args: as of ``reduce_large``; start: where the first row begins.
    """
    flags[me * STEP + SHOWN_PLACE], flags[me * STEP + SHOWN_PLACE + 1] = place[NUMBER], 2 * place[OFFSET] + reads
    if place[NUMBER] < 0:
        joint_reads.show_places(places, rows, start, stride, flags, me)
    elif place[NUMBER] == 0:
        joint_sums.show_shares(places, edges, 0, rows, start, room, stride, me, count)


@host.inline
def _way(flags, count):  # type: ignore[no-untyped-def]
    """What all ranks have shown, so that all find the same."""
    within, readable, alike = 0, 0, True
    for rank in range(count):
        number, offset = flags[rank * STEP + SHOWN_PLACE], flags[rank * STEP + SHOWN_PLACE + 1] // 2
        within += number > 0
        readable += number < 0
        alike = alike and number == flags[SHOWN_PLACE] and offset == flags[SHOWN_PLACE + 1] // 2
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
            if flags[rank * STEP + SHOWN_PLACE + 1] % 2:
                copy(span[rank * stride + start : rank * stride + start + part.size], part)
    return saturated


@host.inline
def reduce_large(  # type: ignore[no-untyped-def]
    x, places, edges, place, span, rows, starts, room, stride, how, reads, flags, me, count, epoch, pace, log,
):  # fmt: skip
    """The joint array becomes the sum over the ranks where it ``reads``; elsewhere it has no use afterwards.

    Args:
        x: the only array, if it may be in a block; else empty.
        places, edges: of all arrays, see ``joint_sums.by_chunks``.
        place: see ``joint_reads.PLACE``; span: the block from where the array of the first rank begins, if x is in one.
        rows: the window as elements of the arrays' type.
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
            show_first(places, edges, place, rows, starts[0], room, stride, reads, flags, me, count)
            log[SHOWN] = 1
            store(flags, me * STEP, epoch + 1)
        if not await_all(flags, count, epoch + 1, pace, log):
            return False
        log[WAY] = _way(flags, count)
        if log[WAY] == _WHERE_THEY_LIE:
            log[SATURATED] += _sum_where_they_lie(x, span, place[STRIDE], how, flags, me, count)
            store(flags, me * STEP, epoch + 2)
        if log[WAY] == _ANEW:
            searched = place[NUMBER] != UNSEARCHED
            joint_sums.show_odd(flags, me, not (searched or joint_sums.search(places, edges, log)))
        if log[WAY] != _BY_WINDOW:
            log[STAGE], log[SHOWN] = 1, 0
    if log[WAY] == _BY_READS:
        return joint_reads.by_reads(
            places, edges, place, rows, starts[0], stride, how, reads, flags, me, count, epoch, pace, log
        )
    if log[WAY] == _WHERE_THEY_LIE:
        if not await_all(flags, count, epoch + 2, pace, log):
            return False
        log[STAGE] = 2
        return True
    more = log[WAY] == _ANEW
    return joint_sums.by_chunks(
        places, edges, rows, starts, room, stride, how, reads, more, flags, me, count, epoch, pace, log
    )
