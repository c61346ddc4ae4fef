"""Compiled: a copying collective inside a node that begins with the exchange of headers.

Each rank shows its header, where its bytes begin, and, if the parts differ from rank to rank, their sizes. Behind the
barrier the headers are compared, and only then is anything copied, in one of three ways:

- *through the window*: each rank has shown the first chunk of what others want beside its header, and shows the next
  ones by turns in the two halves; two copies of every byte, one barrier for a chunk.
- *by reads*: each rank reads from the memory of the others what it wants (``single_copy``); one copy, and a second
  barrier, at which only those wait that were read from.
- *by writes*: each rank writes what it has to the memory of the others; a gather thus keeps all cores busy, and what a
  rank gives to all others stays in its cache. Only those wait at the second barrier that were written to.
"""

from __future__ import annotations

from numba import carray, types

from espresso_mpi.compressors.kernels.cpu import host
from espresso_mpi.compressors.kernels.cpu.entries import pointer_to

from . import cross_memory, headers
from .shared_memory import (
    LOG,
    MET,
    SHOWN,
    STAGE,
    STEP,
    WAITED,
    await_all,
    load,
    move,
    now,
    poll_again,
    store,
    worked,
)
from .window_places import BEHIND_HEADER, COUNT, ME, MEMORY, SLOT, STARTS, STRIDE

SOURCE, TARGET, WAY, ROOM, LONGEST, SHARED, SPLITS, READ, WRITE, ERRNO, BEGAN, DONE, BEFORE, BUSY, CORES, PLACES = (
    range(headers.SETUP, headers.SETUP + 16)
)
"""Places of a set-up behind those of ``headers``, and its length: addresses of what is given and of the result; the
way; bytes of a part in a chunk; bytes of the longest part of any rank, which are found out if there are ``SPLITS``;
whether all others get the same bytes; whether sizes differ and are shown; addresses of the functions that read, that
write and that say where the error is; when this rank began and ended the latest such call, which all get to know; the
bytes of its parts, if there were splits; for how long it copied; and the cores that the ranks share, 0 if each has its
own. The same on all ranks, but for addresses and times."""

BY_WINDOW, BY_READS, BY_WRITES = range(3)
"""The ways."""

GIVE_AT, GIVE, TAKE_AT, TAKE, FROM, LANDS, PROCESS, COLUMNS = range(8)
"""Columns of a table of the ranks of the node, int64: where in what is given their part begins, and its bytes; where in
the result their part begins, and its bytes; where it begins in what they give; where the part of this rank begins in
their result; and the number of their process."""

TOOK, UNEQUAL, FAILED, TOTAL, COPIED, PIECES = range(LOG, LOG + 6)
"""Places of the log behind those of ``shared_memory``: nanoseconds that the call before took, or a MiB of it if there
are splits; 1 + giver * ranks + taker if two ranks differ in the size of a part, or -1 if they differ in the way; the
error of a copy; the bytes of all parts, if there are splits; nanoseconds of core time in which this rank copied; and
room for arguments. Before them, ``MET`` is when all headers were found equal; it stays 0 if they differ.

A call takes as long as from when the last rank began to when the last one ended. Where ranks share cores, who runs when
is chance: there it takes the core time of all copies by the number of cores, or that of one rank if this is more."""

LENGTH = PIECES + cross_memory.PIECES
"""Length of the log."""

HEADS, SIZES, TIMES, FLAGS, WINDOW, USES, EPOCH, PACE = range(PLACES, PLACES + 8)
FRESH = PACE + 3
LOGGED = FRESH + 1
TABLE = LOGGED + LENGTH
"""Places of a frame, an int64 array with all that a call takes: it begins with the set-up; then there are addresses of
``heads``, ``sizes``, ``marks``, ``flags`` and ``window``; ``uses``, ``epoch`` and the three numbers of ``pace``;
whether the call is new; the log; and the table. See ``copies``. One address is passed more quickly than 16 arguments:
on cores that ranks share, what Python does before and after a copy takes as long as the copy of a MiB."""

SEARCHED, ASKED, ANSWERED, ENDED, MARKS = range(5)
"""Rows of the marks: when a sum began to search its values, when the header was shown, when all were compared, and when
the call ended."""

MOST_RANKS = (SLOT - BEHIND_HEADER) // 8 // 4 - 2
"""Ranks of a node for which there is room behind a header: for way, addresses and times, and four numbers of each."""

_numbers_at, _bytes_at = pointer_to(types.int64), pointer_to(types.uint8)


@host.inline
def _copy_across(setup, function, process, here, there, nbytes, log):  # type: ignore[no-untyped-def]
    """As ``cross_memory.copy``."""
    return cross_memory.copy(setup[function], setup[ERRNO], process, here, there, nbytes, log[PIECES:])


@host.inline
def _shown(window, rank, half):  # type: ignore[no-untyped-def]
    """What a rank shows beside its header."""
    return carray(_numbers_at(headers.slot_of(window, rank, half) + BEHIND_HEADER), (4 * (2 + window[COUNT]),))


@host.inline
def _row(window, rank, half):  # type: ignore[no-untyped-def]
    """Where a rank's row of large data begins."""
    return window[MEMORY] + window[STARTS + half] + rank * window[STRIDE]


@host.inline
def _show_chunk(setup, table, window, half, first):  # type: ignore[no-untyped-def]
    """Copy what others get to the own row, from a byte of each part on: once, if all get the same."""
    me, count = window[ME], window[COUNT]
    for k in range(1, count):
        rank = (me + k) % count
        size = min(setup[ROOM], table[rank, GIVE] - first)
        if size > 0:
            place = _row(window, me, half) + (0 if setup[SHARED] else rank * setup[ROOM])
            move(place, setup[SOURCE] + table[rank, GIVE_AT] + first, size)
            if setup[SHARED]:
                break


@host.inline
def _take_chunk(setup, table, window, half, first):  # type: ignore[no-untyped-def]
    """Copy what the others have shown, beginning with the next rank's: not all read one at first."""
    me, count = window[ME], window[COUNT]
    for k in range(1, count):
        rank = (me + k) % count
        size = min(setup[ROOM], table[rank, TAKE] - first)
        if size > 0:
            place = _row(window, rank, half) + (0 if setup[SHARED] else me * setup[ROOM])
            move(setup[TARGET] + table[rank, TAKE_AT] + first, place, size)


@host.inline
def _keep_own(setup, table, window):  # type: ignore[no-untyped-def]
    """Copy the part that this rank has for itself."""
    me = window[ME]
    if table[me, TAKE] > 0:
        move(setup[TARGET] + table[me, TAKE_AT], setup[SOURCE] + table[me, GIVE_AT], table[me, TAKE])


@host.inline
def _begin(setup, table, flags, window, epoch, half, log):  # type: ignore[no-untyped-def]
    """Show the header and all that goes with it, and arrive."""
    me, count = window[ME], window[COUNT]
    headers.show(setup, flags, window, half)
    mine = _shown(window, me, half)
    mine[0], mine[1], mine[2] = setup[WAY] + 4 * setup[ROOM], setup[SOURCE], setup[TARGET]
    mine[3], mine[4], mine[5] = setup[BEGAN], setup[DONE], setup[BUSY]
    if setup[SPLITS]:
        for rank in range(count):
            at = 4 * (2 + rank)
            mine[at], mine[at + 1] = table[rank, GIVE_AT], table[rank, GIVE]
            mine[at + 2], mine[at + 3] = table[rank, TAKE_AT], table[rank, TAKE]
    if setup[WAY] == BY_WINDOW:
        before = worked()
        _show_chunk(setup, table, window, half, 0)
        log[COPIED] += worked() - before
    log[SHOWN] = 1
    store(flags, me * STEP, epoch + 1)


@host.inline
def _learn(setup, table, window, half, log):  # type: ignore[no-untyped-def]
    """Read what the others show; False if two ranks differ in what must fit together: all ranks find the same."""
    me, count = window[ME], window[COUNT]
    began, done, busy, most = setup[BEGAN], setup[DONE], 0, 0
    for rank in range(count):
        shown = _shown(window, rank, half)
        began, done = max(began, shown[3]), max(done, shown[4])
        busy, most = busy + shown[5], max(most, shown[5])
        if shown[0] != setup[WAY] + 4 * setup[ROOM]:
            log[UNEQUAL] = -1
            return False
    log[TOOK] = max(busy // setup[CORES], most) if setup[CORES] else max(0, done - began)
    if setup[SPLITS]:
        log[TOOK] = (log[TOOK] << 20) // max(setup[BEFORE], 1)
        setup[LONGEST] = 0
        for giver in range(count):
            shown = _shown(window, giver, half)
            for taker in range(count):
                if shown[4 * (2 + taker) + 1] != _shown(window, taker, half)[4 * (2 + giver) + 3]:
                    log[UNEQUAL] = 1 + giver * count + taker
                    return False
                setup[LONGEST] = max(setup[LONGEST], shown[4 * (2 + taker) + 1])
                log[TOTAL] += shown[4 * (2 + taker) + 1]
            table[giver, FROM], table[giver, LANDS] = shown[4 * (2 + me)], shown[4 * (2 + me) + 2]
    return True


@host.inline
def _read_all(setup, table, window, half, log):  # type: ignore[no-untyped-def]
    """Read from every other rank what this one wants, beginning with the next."""
    me, count = window[ME], window[COUNT]
    _keep_own(setup, table, window)
    for k in range(1, count):
        rank = (me + k) % count
        if table[rank, TAKE] > 0 and log[FAILED] == 0:
            source = _shown(window, rank, half)[1] + table[rank, FROM]
            target = setup[TARGET] + table[rank, TAKE_AT]
            log[FAILED] = _copy_across(setup, READ, table[rank, PROCESS], target, source, table[rank, TAKE], log)


@host.inline
def _write_all(setup, table, window, half, log):  # type: ignore[no-untyped-def]
    """Write to every other rank what it wants, beginning with the next; in chunks that stay in cache if all want it."""
    me, count = window[ME], window[COUNT]
    _keep_own(setup, table, window)
    room = setup[ROOM] if setup[SHARED] else setup[LONGEST]
    first = 0
    while first < setup[LONGEST]:
        for k in range(1, count):
            rank = (me + k) % count
            size = min(room, table[rank, GIVE] - first)
            if size > 0 and log[FAILED] == 0:
                target = _shown(window, rank, half)[2] + table[rank, LANDS] + first
                source = setup[SOURCE] + table[rank, GIVE_AT] + first
                log[FAILED] = _copy_across(setup, WRITE, table[rank, PROCESS], source, target, size, log)
        first += room


@host.inline
def _await_copies(table, column, flags, window, epoch, pace, log):  # type: ignore[no-untyped-def]
    """Wait for those that read from this rank, or write to it; as ``shared_memory.await_all``."""
    polled, began = 0, now()
    for rank in range(window[COUNT]):
        while table[rank, column] > 0 and rank != window[ME] and load(flags, rank * STEP) < epoch:
            polled = poll_again(polled, pace, pace[2])
            if polled < 0:
                log[WAITED] += now() - began
                return False
    log[WAITED] += now() - began
    return True


@host.inline
def _by_chunks(setup, table, flags, window, uses, epoch, pace, log):  # type: ignore[no-untyped-def]
    """Take the chunk that was met for, show the next one, meet again; False as ``shared_memory.barrier``."""
    me, room = window[ME], setup[ROOM]
    while True:
        chunk = log[STAGE] - 1
        if log[SHOWN] == 0:
            before = worked()
            _take_chunk(setup, table, window, (uses + chunk) % 2, chunk * room)
            if (chunk + 1) * room >= setup[LONGEST]:
                _keep_own(setup, table, window)
                log[COPIED] += worked() - before
                return True
            _show_chunk(setup, table, window, (uses + chunk + 1) % 2, (chunk + 1) * room)
            log[COPIED] += worked() - before
            log[SHOWN] = 1
            store(flags, me * STEP, epoch + chunk + 2)
        if not await_all(flags, window[COUNT], epoch + chunk + 2, pace, log):
            return False
        log[STAGE] += 1
        log[SHOWN] = 0


@host.inline
def copies(setup, table, heads, sizes, marks, flags, window, uses, epoch, pace, log):  # type: ignore[no-untyped-def]
    """Run the collective; False if ranks are still missing after a while: call it again.

    Args:
        setup, table, log: int64, see above; ``log`` is zero at first. ``STAGE`` becomes the number of barriers that are
            over, of which each has used a half of the window, but for the second one where none passes the window.
        heads, sizes: uint8 and int64: receive the headers of all ranks and their sizes if they differ.
        marks: int64 of shape (``MARKS``, 2).
        flags, window, epoch, pace: as of ``shared_memory.barrier``, and ``WindowPlaces.places``.
        uses: how often a half was used so far.
    """
    half = uses % 2
    if log[STAGE] == 0:
        if log[SHOWN] == 0:
            headers.note(marks, ASKED, log)
            _begin(setup, table, flags, window, epoch, half, log)
        if not await_all(flags, window[COUNT], epoch + 1, pace, log):
            return False
        headers.note(marks, ANSWERED, log)
        log[STAGE], log[SHOWN] = 1, 0
        if not headers.same(setup, flags, window, half):
            headers.receive(setup, heads, sizes, flags, window, half)
            return True
        log[MET] = marks[ANSWERED, 0]
        if not _learn(setup, table, window, half, log):
            return True
    if setup[WAY] != BY_WINDOW:
        if log[SHOWN] == 0:
            before = worked()
            if setup[WAY] == BY_READS:
                _read_all(setup, table, window, half, log)
            else:
                _write_all(setup, table, window, half, log)
            log[COPIED] += worked() - before
            log[SHOWN] = 1
            store(flags, window[ME] * STEP, epoch + 2)
        column = GIVE if setup[WAY] == BY_READS else TAKE
        if not _await_copies(table, column, flags, window, epoch + 2, pace, log):
            return False
        log[STAGE] = 2
    elif not _by_chunks(setup, table, flags, window, uses, epoch, pace, log):
        return False
    headers.note(marks, ENDED, log)
    setup[BEGAN], setup[DONE], setup[BEFORE] = marks[ASKED, 0], marks[ENDED, 0], log[TOTAL]
    setup[BUSY] = log[COPIED]
    return True


@host.inline
def run(address):  # type: ignore[no-untyped-def]
    """As ``copies``, given the address of a frame."""
    setup = carray(_numbers_at(address), (TABLE,))
    window = carray(_numbers_at(setup[WINDOW]), (COUNT + 1,))
    count, log = window[COUNT], setup[LOGGED:TABLE]
    if setup[FRESH]:
        log[:] = 0
        setup[FRESH] = 0
    table = carray(_numbers_at(address + 8 * TABLE), (count, COLUMNS))
    heads = carray(_bytes_at(setup[HEADS]), (count * setup[headers.WIDTH],))
    sizes = carray(_numbers_at(setup[SIZES]), (count,))
    marks = carray(_numbers_at(setup[TIMES]), (MARKS, 2))
    flags = carray(_numbers_at(setup[FLAGS]), (count * STEP,))
    pace = (setup[PACE], setup[PACE + 1], setup[PACE + 2])
    return copies(setup, table, heads, sizes, marks, flags, window, setup[USES], setup[EPOCH], pace, log)
