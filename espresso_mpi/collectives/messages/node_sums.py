"""Compiled: short sums over several nodes. The data of all ranks travel with their headers, see ``node_leaders``."""

from __future__ import annotations

from numba import carray, types

from espresso_mpi.compressors.kernels.cpu import host
from espresso_mpi.compressors.kernels.cpu.entries import pointer_to

from ..data.magnitudes import in_range
from . import node_leaders
from .agreed_copies import ENDED, MARKS, SEARCHED
from .headers import note
from .shared_memory import copy, move, numbers_at, sum_rows

(
    GATHER, X, SIZE, DATA, START, RANKS, COUNT, FIRSTS, GROUPS, STACK, MEANS, PLACES, TIMES, LEAST, FRESH, ODD, CUT,
    FRAME,
) = range(18)  # fmt: skip
"""Places of a frame, an int64 array, and its length. The addresses of the frame of the exchange and of the array, and
its elements; where its bytes are in the message, and where they begin there. The address of the ranks in order of their
groups, how many there are, the address of the number of ranks before each group, and how many groups there are.
Addresses: of memory for the arrays of all ranks and for the sums of groups; of where the messages of all ranks are; of
marks as of ``agreed_copies``. The bits from which magnitudes are too large to be summed, 0 if none is searched; whether
the call is new; whether there are such values; and how many sums were cut."""

_numbers_at = pointer_to(types.int64)


@host.inline
def mean(x, stack, means, firsts, inner, outer):  # type: ignore[no-untyped-def]
    """``x`` becomes the sum of rows as a route over nodes has it; returns how many sums were cut.

    Args:
        stack: one row for each rank, in order of the groups, one behind the other.
        means: memory for a row of each group, if there are several.
        firsts: int64: the rows before each group, and of all.
        inner, outer: from ``reduction.arithmetic``, for the sums within groups and that of the groups.
    """
    n, groups, cut = x.size, firsts.size - 1, 0
    for group in range(groups):
        out = x if groups == 1 else means[group * n : (group + 1) * n]
        rows = stack[firsts[group] * n : firsts[group + 1] * n]
        copy(out, rows[:n])
        cut += sum_rows(out, rows, n, firsts[group + 1] - firsts[group], 0, inner)
    if groups > 1:
        copy(x, means[:n])
        cut += sum_rows(x, means, n, groups, 0, outer)
    return cut


@host.inline
def _show(frame, gather, marks, like):  # type: ignore[no-untyped-def]
    """Put the array into the message; returns whether its values can be summed."""
    frame[FRESH] = 0
    move(frame[DATA], frame[X], frame[SIZE] * like.itemsize)
    note(marks, SEARCHED, gather[node_leaders.LOGGED :])
    return frame[LEAST] == 0 or in_range(frame[X], frame[SIZE], frame[LEAST])


@host.inline
def _sum(frame, gather, marks, like, inner, outer):  # type: ignore[no-untyped-def]
    """The array becomes the sum of what all ranks have sent."""
    n, count, groups = frame[SIZE], frame[COUNT], frame[GROUPS]
    ranks, firsts = carray(_numbers_at(frame[RANKS]), (count,)), carray(_numbers_at(frame[FIRSTS]), (groups + 1,))
    places, x = carray(_numbers_at(frame[PLACES]), (count, 2)), carray(numbers_at(frame[X], like), (n,))
    stack = carray(numbers_at(frame[STACK], like), (count * n,))
    means = carray(numbers_at(frame[MEANS], like), (groups * n,))
    for row in range(count):
        move(frame[STACK] + row * n * like.itemsize, gather[node_leaders.BLOCKS] + places[ranks[row], 0] + frame[START],
             n * like.itemsize)  # fmt: skip
    frame[CUT] = mean(x, stack, means, firsts, inner, outer)
    note(marks, ENDED, gather[node_leaders.LOGGED :])


@host.inline
def run(address, like, inner, outer):  # type: ignore[no-untyped-def]
    """Search, exchange and sum, given the address of a frame; returns as ``node_leaders.run``.

    If there are values that are too large, it is ``NOTHING``.

    Args:
        like: an array of the type of the elements.
        inner, outer: as of ``mean``.
    """
    frame = carray(_numbers_at(address), (FRAME,))
    gather = carray(_numbers_at(frame[GATHER]), (node_leaders.FRAME,))
    marks = carray(_numbers_at(frame[TIMES]), (MARKS, 2))
    if frame[FRESH] and not _show(frame, gather, marks, like):
        frame[ODD] = 1
        return node_leaders.NOTHING
    why = node_leaders.run(frame[GATHER])
    if why == node_leaders.ENDED and gather[node_leaders.EQUAL]:
        _sum(frame, gather, marks, like, inner, outer)
    return why
