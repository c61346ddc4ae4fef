"""Compiled: sums of arrays over the ranks of a node through the shared window, in which they count as one array.

The joint array, all arrays one behind the other in their order, passes the window in chunks. So small arrays share
barriers, and nothing is copied but into the window and out of it. ``joint_reads`` does without the window.
"""

from __future__ import annotations

from numba import carray

from espresso_mpi.compressors.kernels.cpu import host

from ..data.magnitudes import in_range
from .shared_memory import (
    BUSY,
    LEAST,
    ODD,
    SATURATED,
    SHOWN,
    STAGE,
    STEP,
    await_all,
    copy,
    numbers_at,
    store,
    sum_rows,
    worked,
)

_ODD_PLACE = 6
"""Where, behind a rank's flag, it shows that it has found values that must not be summed."""


@host.inline
def share_of(rank, size, count):  # type: ignore[no-untyped-def]
    """The elements of a chunk that a rank sums: whole cache lines of any element type."""
    share = ((size + count - 1) // count + 63) // 64 * 64
    return min(size, rank * share), min(size, (rank + 1) * share)


@host.inline
def array_of(edges, element):  # type: ignore[no-untyped-def]
    """The array that has an element of the joint one; the last array for the place behind all elements."""
    low, high = 0, edges.size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if edges[middle] <= element:
            low = middle
        else:
            high = middle
    return low


@host.inline
def _piece(places, edges, array, first, last, like):  # type: ignore[no-untyped-def]
    """What of an array is in elements [first, last) of the joint one, and where in them it begins."""
    a, b = max(first, edges[array]), min(last, edges[array + 1])
    address = places[array] + like.itemsize * (a - edges[array])
    return carray(numbers_at(address, like), (b - a,)), a - first


@host.inline
def are_clean(places, edges, first, last, log):  # type: ignore[no-untyped-def]
    """Whether no float32 in elements [first, last) of the joint array is too large to be summed, or no number."""
    array = array_of(edges, first)
    while array < places.size and edges[array] < last:
        a, b = max(first, edges[array]), min(last, edges[array + 1])
        if not in_range(places[array] + 4 * (a - edges[array]), b - a, log[LEAST]):
            return False
        array += 1
    return True


@host.inline
def search(places, edges, log):  # type: ignore[no-untyped-def]
    """As ``are_clean``, for all of the joint array; counts as work."""
    before = worked()
    clean = are_clean(places, edges, 0, edges[places.size], log)
    log[BUSY] += worked() - before
    return clean


@host.inline
def show_odd(flags, me, odd):  # type: ignore[no-untyped-def]
    """Show whether this rank has found values that must not be summed."""
    flags[me * STEP + _ODD_PLACE] = odd


@host.inline
def found_odd(flags, count):  # type: ignore[no-untyped-def]
    """Whether a rank shows that it has."""
    found = False
    for rank in range(count):
        found = found or flags[rank * STEP + _ODD_PLACE] != 0
    return found


@host.inline
def to_row(places, edges, first, last, row):  # type: ignore[no-untyped-def]
    """Copy elements [first, last) of the joint array to a row."""
    array = array_of(edges, first)
    while array < places.size and edges[array] < last:
        piece, at = _piece(places, edges, array, first, last, row)
        copy(row[at : at + piece.size], piece)
        array += 1


@host.inline
def from_row(places, edges, first, last, row):  # type: ignore[no-untyped-def]
    """Copy elements [first, last) of the joint array from a row."""
    array = array_of(edges, first)
    while array < places.size and edges[array] < last:
        piece, at = _piece(places, edges, array, first, last, row)
        copy(piece, row[at : at + piece.size])
        array += 1


@host.inline
def sum_span(places, edges, first, last, span, stride, count, me, how):  # type: ignore[no-untyped-def]
    """Elements [first, last) of the joint array become the sum of all rows; returns as ``sum_rows``."""
    saturated, array = 0, array_of(edges, first)
    while array < places.size and edges[array] < last:
        piece, at = _piece(places, edges, array, first, last, span)
        saturated += sum_rows(piece, span[at:], stride, count, me, how)
        array += 1
    return saturated


@host.inline
def show_all(places, edges, rows, start, stride, me):  # type: ignore[no-untyped-def]
    """Write the joint array to the own row, in which it has room."""
    to_row(places, edges, 0, edges[places.size], rows[start + me * stride :])


@host.inline
def sum_all(places, edges, rows, start, stride, how, me, count):  # type: ignore[no-untyped-def]
    """The joint array, which all ranks have shown, becomes the sum; returns as ``sum_rows``."""
    return sum_span(places, edges, 0, edges[places.size], rows[start:], stride, count, me, how)


@host.inline
def show_shares(places, edges, chunk, rows, start, room, stride, me, count):  # type: ignore[no-untyped-def]
    """Write the shares of a chunk that others sum to the own row."""
    first = chunk * room
    size = min(room, edges[places.size] - first)
    a, b = share_of(me, size, count)
    row = start + me * stride
    to_row(places, edges, first, first + a, rows[row:])
    to_row(places, edges, first + b, first + size, rows[row + b :])


@host.inline
def _sum_share(places, edges, first, size, rows, start, stride, how, me, count):  # type: ignore[no-untyped-def]
    """Sum the own share of a chunk, and show it; returns as ``sum_rows``."""
    a, b = share_of(me, size, count)
    saturated = sum_span(places, edges, first + a, first + b, rows[start + a :], stride, count, me, how)
    to_row(places, edges, first + a, first + b, rows[start + me * stride + a :])
    return saturated


@host.inline
def _read_shares(places, edges, first, size, rows, start, stride, me, count):  # type: ignore[no-untyped-def]
    """The shares of a chunk that others have summed, beginning with the next rank's: not all read one at first."""
    for k in range(1, count):
        rank = (me + k) % count
        a, b = share_of(rank, size, count)
        from_row(places, edges, first + a, first + b, rows[start + rank * stride + a :])


@host.inline
def by_chunks(  # type: ignore[no-untyped-def]
    places, edges, rows, starts, room, stride, how, reads, more, flags, me, count, epoch, pace, log,
):  # fmt: skip
    """The joint array becomes the sum over the ranks where it is read; elsewhere it has no use afterwards.

    In chunks, with two barriers each: every rank sums its share of a chunk, and shows it.

    Args:
        places: int64: the addresses of the arrays.
        edges: int64: where each begins in the joint array, and where that ends.
        rows, starts, room, stride, how: as of ``large_sums.reduce_large``.
        reads: whether this rank wants the shares of the others.
        more: barriers before the first chunk is shown. If there is one, ranks ``show_odd`` behind it.
        log: as of ``shared_memory.barrier``; ``SHOWN`` is 1 at first if the first chunk is shown, and this rank has
            arrived.
    """
    total = edges[places.size]
    while log[STAGE] < more + 2 * ((total + room - 1) // room):
        chunk, second = divmod(log[STAGE] - more, 2)
        start, first = starts[chunk % 2], chunk * room
        size = min(room, total - first)
        before = worked()
        if second == 0 and log[SHOWN] == 0:
            show_shares(places, edges, chunk, rows, start, room, stride, me, count)
            log[BUSY] += worked() - before
            log[SHOWN] = 1
            store(flags, me * STEP, epoch + log[STAGE] + 1)
        if not await_all(flags, count, epoch + log[STAGE] + 1, pace, log):
            return False
        log[STAGE] += 1
        if more and log[STAGE] == more + 1 and found_odd(flags, count):
            log[ODD] = 1
            return True
        before = worked()
        if second == 0:
            log[SATURATED] += _sum_share(places, edges, first, size, rows, start, stride, how, me, count)
            store(flags, me * STEP, epoch + log[STAGE] + 1)
        else:
            log[SHOWN] = 0
            if reads:
                _read_shares(places, edges, first, size, rows, start, stride, me, count)
        log[BUSY] += worked() - before
    return True
