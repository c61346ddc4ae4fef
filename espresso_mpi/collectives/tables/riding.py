"""The compiled part of calls that are made again: a whole table, and the exchange of headers in its first barrier.

Everything that one synchronisation of a small tensor needs is one call of ``ride``: it looks for values that are too
large, keeps copies of the residuals, runs the table up to the first barrier of the node, shows the header with the
payload, compares the headers of all ranks behind the barrier, and runs the rest of the table.
"""

from __future__ import annotations

from numba import carray, types

from espresso_mpi.compressors.kernels.cpu import host
from espresso_mpi.compressors.kernels.cpu.entries import pointer_to

from ..data.magnitudes import in_range
from ..messages import shared_memory
from ..messages.window_places import SLOT
from . import interpreter
from .interpreter import AT, COUNT, EPOCH, HALTED, HALTS, ME, MODE, RUNS, USES

ODD, DIFFERENT = interpreter.ENDED + 1, interpreter.ENDED + 2
"""More reasons why ``ride`` returned: values are too large, or the headers differ."""

BEGINS, MEETS = RUNS + 1, RUNS + 2
"""More modes: nothing was done yet; at the barrier of the headers."""

HEADER, SIZE, IGNORED, WIDTH, ARRAY, ELEMENTS, LEAST, KEPT = range(8)
"""Places of the set-up, an int64 array: address and size of the header, bits of its first byte that may differ, bytes
between the headers that were received; place of the array whose values are searched, its elements, and the bits from
which a magnitude is too large, 0 if none is searched. Then, for each residual, its place, the address of a copy, and
its bytes."""

SEARCHED, SEARCHED_UNTIL, ASKED, ANSWERED, MARKS = range(5)
"""Marks behind those of the table: when the search began and ended, when the headers were shown, and when compared."""

_STEP = shared_memory.LINE // 8
_bytes_at = pointer_to(types.uint8)


@host.inline
def _note(marks, number, state):  # type: ignore[no-untyped-def]
    at = marks.shape[0] - MARKS + number
    marks[at, 0] = shared_memory.now(state[shared_memory.CLOCK :])
    marks[at, 1] = state[shared_memory.WAITED]


@host.inline
def _keep(setup, places):  # type: ignore[no-untyped-def]
    """Copy the residuals, for the case that the headers differ."""
    for at in range(KEPT, setup.size, 3):
        interpreter.move(setup[at + 1], places[setup[at]], setup[at + 2])


@host.inline
def _slot(window, rank, half):  # type: ignore[no-untyped-def]
    """Where the small data of a rank are in a half of the window."""
    return interpreter.in_row(window, half, rank) - SLOT


@host.inline
def _same(setup, flags, window, half):  # type: ignore[no-untyped-def]
    """Whether all ranks show the header of this one, but for the bits that may differ."""
    size = setup[SIZE]
    mine = carray(_bytes_at(setup[HEADER]), (size,))
    for rank in range(window[COUNT]):
        if flags[rank * _STEP + 1 + half] != size:
            return False
        other = carray(_bytes_at(_slot(window, rank, half)), (size,))
        if (mine[0] ^ other[0]) & ~setup[IGNORED]:
            return False
        for i in range(1, size):
            if mine[i] != other[i]:
                return False
    return True


@host.inline
def _receive(setup, heads, sizes, flags, window, half):  # type: ignore[no-untyped-def]
    """Copy the headers of all ranks."""
    for rank in range(window[COUNT]):
        size = sizes[rank] = flags[rank * _STEP + 1 + half]
        interpreter.move(heads.ctypes.data + rank * setup[WIDTH], _slot(window, rank, half), size)


@host.inline
def ride(setup, heads, sizes, rows, parameters, places, marks, flags, window, flag, mpi, state, pace):  # type: ignore[no-untyped-def]
    """Begin or go on; returns why it stopped: ``AT_BARRIER``, ``AT_MESSAGES``, ``FAILED``, ``ENDED``, or see above.

    Args:
        setup: see above.
        heads, sizes: uint8 and int64: receive the headers of all ranks and their sizes if they differ.
        rows, parameters, places, marks, flags, window, flag, mpi, state, pace: see ``interpreter.run``; ``marks`` has
            ``MARKS`` rows more.
    """
    if state[MODE] == BEGINS:
        _note(marks, SEARCHED, state)
        if setup[LEAST] and not in_range(places[setup[ARRAY]], setup[ELEMENTS], setup[LEAST]):
            return ODD
        _note(marks, SEARCHED_UNTIL, state)
        _keep(setup, places)
        state[MODE] = HALTS
    if state[MODE] == HALTS:
        why = interpreter.run(rows, parameters, places, marks, flags, window, flag, mpi, state, pace)
        if why != HALTED:
            return why
        _note(marks, ASKED, state)
        half, me = state[USES] % 2, window[ME]
        interpreter.move(_slot(window, me, half), setup[HEADER], setup[SIZE])
        flags[me * _STEP + 1 + half] = setup[SIZE]
        state[MODE] = MEETS
    if state[MODE] == MEETS:
        if not shared_memory.barrier(flags, window[ME], window[COUNT], state[EPOCH], pace, state):
            return interpreter.AT_BARRIER
        half = state[USES] % 2
        state[EPOCH] += 1
        state[USES] += 1
        _note(marks, ANSWERED, state)
        if not _same(setup, flags, window, half):
            _receive(setup, heads, sizes, flags, window, half)
            return DIFFERENT
        state[AT] += 1  # behind the barrier
        state[MODE] = RUNS
    return interpreter.run(rows, parameters, places, marks, flags, window, flag, mpi, state, pace)
