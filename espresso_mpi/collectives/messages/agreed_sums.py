"""Compiled: sums over the ranks of a node that begin with the exchange of headers.

The first chunk is shown together with the header, so the agreement needs no barrier of its own. If the headers differ,
nothing was summed, and what happened is an exchange of headers.
"""

from __future__ import annotations

from numba import carray, types

from espresso_mpi.compressors.kernels.cpu import host
from espresso_mpi.compressors.kernels.cpu.entries import pointer_to

from . import headers, joint_reads, joint_sums, large_sums, shared_memory
from .agreed_copies import ANSWERED, ASKED, ENDED, MARKS, SEARCHED
from .joint_reads import NUMBER, UNSEARCHED
from .shared_memory import (
    BUSY,
    LEAST,
    LOG,
    MET,
    ODD,
    SATURATED,
    SEARCH,
    SHOWN,
    STAGE,
    STEP,
    UNDO,
    await_all,
    copy,
    numbers_at,
    store,
)
from .window_places import COUNT, ME, STARTS, STRIDE

BEGAN, DONE, WORKED, TOOK, CORES, SETUP = range(headers.SETUP, headers.SETUP + 6)
"""Places of a set-up behind those of ``headers``, and its length: when the latest sum of this rank began and ended, and
for how long it had a core; how long that of all ranks took, as all get to know; and the cores that the ranks share, 0
if each has its own."""

(
    HEADS, SIZES, ARRAY, ELEMENTS, PLACES, EDGES, ARRAYS, PLACE, SPAN, SPAN_SIZE, ROWS, ROWS_SIZE, ROOM, WHOLE, READS,
    TIMES, FLAGS, WINDOW, USES, EPOCH, PACE,
) = range(SETUP, SETUP + 21)  # fmt: skip
FRESH = PACE + 3
LOGGED = FRESH + 1
FRAME = LOGGED + LOG
"""Places of a frame, an int64 array with all that ``reduce`` takes but ``how``, and its length. It begins with the
set-up. Then there are the addresses of ``heads``, ``sizes`` and the only array, and its elements; the addresses of
``places`` and ``edges``, and how many arrays there are; those of ``place``, ``span`` and ``rows``, the last two with
their elements; ``room``, ``whole`` and ``reads``; the addresses of ``marks``, ``flags`` and ``window``; ``uses``,
``epoch`` and the three numbers of ``pace``; whether the call is new; and the log. One address is passed more quickly
than 20 arguments."""

_numbers_at, _bytes_at = pointer_to(types.int64), pointer_to(types.uint8)

_TIMES = 8
"""Where, behind a rank's flag, it shows the first three of them."""


@host.inline
def _meet(setup, heads, sizes, marks, flags, window, half, epoch, pace, log):  # type: ignore[no-untyped-def]
    """Show the header, if that was not done, and compare all: (whether all ranks are here, whether all are equal)."""
    if log[SHOWN] == 0:
        headers.show(setup, flags, window, half)
        log[SHOWN] = 1
        store(flags, window[ME] * STEP, epoch + 1)
    if not await_all(flags, window[COUNT], epoch + 1, pace, log):
        return False, False
    headers.note(marks, ANSWERED, log)
    if not headers.same(setup, flags, window, half):
        headers.receive(setup, heads, sizes, flags, window, half)
        return True, False
    log[MET] = marks[ANSWERED, 0]
    return True, True


@host.inline
def _starts(window, half, size):  # type: ignore[no-untyped-def]
    """Where the first rows begin, in the half to use first and in the other, in elements of so many bytes."""
    return window[STARTS + half] // size, window[STARTS + 1 - half] // size


@host.inline
def _show_times(setup, flags, me):  # type: ignore[no-untyped-def]
    for place in range(3):
        flags[me * STEP + _TIMES + place] = setup[BEGAN + place]


@host.inline
def _learn(setup, flags, count):  # type: ignore[no-untyped-def]
    """How long the sum before took; see ``agreed_copies`` for what counts on cores that ranks share."""
    began, done, worked, most = setup[BEGAN], setup[DONE], 0, 0
    for rank in range(count):
        at = rank * STEP + _TIMES
        began, done = max(began, flags[at]), max(done, flags[at + 1])
        worked, most = worked + flags[at + 2], max(most, flags[at + 2])
    setup[TOOK] = max(worked // setup[CORES], most) if setup[CORES] else max(0, done - began)


@host.inline
def reduce(  # type: ignore[no-untyped-def]
    setup, heads, sizes, x, places, edges, place, span, rows, room, how, whole, reads, marks, flags, window, uses,
    epoch, pace, log,
):  # fmt: skip
    """One or several arrays that count as one become their sum over the ranks where it is read.

    If this rank finds values that must not be summed before it shows its header, it shows none: nothing has happened.

    Args:
        setup: int64, see above.
        heads, sizes: uint8 and int64: receive the headers of all ranks and their sizes if they differ.
        x, places, edges, place, span: the arrays, and where they lie, see ``large_sums.reduce_large``.
        rows: the window as elements of their type; room: those of a chunk.
        how: from ``reduction.arithmetic``.
        whole: every rank sums all elements, which are one chunk, so that the barrier of the headers is the only one.
        reads: whether this rank wants the shares of the others; if not, the arrays have no use afterwards.
        marks, flags, window, uses, epoch, pace: as of ``agreed_copies.copies``.
        log: as of ``shared_memory.barrier``; ``MET`` becomes the time at which all headers were found equal, in
            nanoseconds; it stays 0 if they differ.
    """
    me, count, half = window[ME], window[COUNT], uses % 2
    starts, stride = _starts(window, half, rows.itemsize), window[STRIDE] // rows.itemsize
    if log[STAGE] == 0:
        if log[SHOWN] == 0:
            headers.note(marks, SEARCHED, log)
            if log[SEARCH] and place[NUMBER] != UNSEARCHED and not joint_sums.search(places, edges, log):
                log[ODD] = 1
                return True
            headers.note(marks, ASKED, log)
            if whole:
                joint_sums.show_all(places, edges, rows, starts[0], stride, me)
            else:
                _show_times(setup, flags, me)
                large_sums.show_first(places, edges, place, rows, starts[0], room, stride, reads, flags, me, count)
        here, equal = _meet(setup, heads, sizes, marks, flags, window, half, epoch, pace, log)
        if not here or not equal:
            return here
        if not whole:
            _learn(setup, flags, count)
    if whole:
        log[SATURATED] += joint_sums.sum_all(places, edges, rows, starts[0], stride, how, me, count)
    elif not large_sums.reduce_large(
        x, places, edges, place, span, rows, starts, room, stride, how, reads, flags, me, count, epoch, pace, log
    ):
        return False
    if log[ODD]:
        return True
    headers.note(marks, ENDED, log)
    setup[BEGAN], setup[DONE], setup[WORKED] = marks[SEARCHED, 0], marks[ENDED, 0], log[BUSY]
    return True


@host.inline
def _begin(frame):  # type: ignore[no-untyped-def]
    """The log of a call; empty, but for what is to be searched, if that is new."""
    log = frame[LOGGED:FRAME]
    if frame[FRESH]:
        least, search, undo = log[LEAST], log[SEARCH], log[UNDO]
        log[:] = 0
        log[LEAST], log[SEARCH], log[UNDO], frame[FRESH] = least, search, undo, 0
    return log


@host.inline
def run(address, like, how):  # type: ignore[no-untyped-def]
    """As ``reduce``, given the address of a frame; ``like``: an array of the type of the elements."""
    frame = carray(_numbers_at(address), (FRAME,))
    window = carray(_numbers_at(frame[WINDOW]), (COUNT + 1,))
    count, arrays, log = window[COUNT], frame[ARRAYS], _begin(frame)
    heads = carray(_bytes_at(frame[HEADS]), (count * frame[headers.WIDTH],))
    sizes = carray(_numbers_at(frame[SIZES]), (count,))
    x = carray(numbers_at(frame[ARRAY], like), (frame[ELEMENTS],))
    places, edges = carray(_numbers_at(frame[PLACES]), (arrays,)), carray(_numbers_at(frame[EDGES]), (arrays + 1,))
    place = carray(_numbers_at(frame[PLACE]), (joint_reads.PLACE,))
    if place[NUMBER] < 0:  # the numbers of all processes follow
        place = carray(_numbers_at(frame[PLACE]), (joint_reads.PLACE + count,))
    span = carray(numbers_at(frame[SPAN], like), (frame[SPAN_SIZE],))
    rows = carray(numbers_at(frame[ROWS], like), (frame[ROWS_SIZE],))
    marks = carray(_numbers_at(frame[TIMES]), (MARKS, 2))
    flags = carray(_numbers_at(frame[FLAGS]), (count * STEP,))
    pace = (frame[PACE], frame[PACE + 1], frame[PACE + 2])
    whole, reads = frame[WHOLE] != 0, frame[READS] != 0
    return reduce(frame, heads, sizes, x, places, edges, place, span, rows, frame[ROOM], how, whole, reads, marks,
                  flags, window, frame[USES], frame[EPOCH], pace, log)  # fmt: skip


@host.inline
def scatter(  # type: ignore[no-untyped-def]
    setup, heads, sizes, x, edges, longest, rows, room, own, how, marks, flags, window, uses, epoch, pace, log,
):  # fmt: skip
    """``own`` becomes the sum of all ranks' regions of this rank, as of ``shared_memory.reduce_scatter``.

    Args: as of ``reduce``, and as there, but for ``own``: it need not hold this rank's contribution.
    """
    me, count, half = window[ME], window[COUNT], uses % 2
    starts, stride = _starts(window, half, x.itemsize), window[STRIDE] // x.itemsize
    if log[STAGE] == 0:
        if log[SHOWN] == 0:
            headers.note(marks, ASKED, log)
            shared_memory.show_regions(x, edges, 0, rows, starts[0], room, stride, count, me, count)
        here, equal = _meet(setup, heads, sizes, marks, flags, window, half, epoch, pace, log)
        if not here or not equal:
            return here
        copy(own, x[edges[2 * me] : edges[2 * me + 1]])
    if not shared_memory.reduce_scatter(
        x, edges, longest, rows, starts, room, stride, own, how, flags, me, count, epoch, pace, log
    ):
        return False
    headers.note(marks, ENDED, log)
    return True
