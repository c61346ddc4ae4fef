"""The compiled part of calls that are made again: a whole table, and the exchange of headers in its first barrier.

Everything that one synchronisation of small tensors needs is one call of ``run``: it looks for values that are too
large, keeps copies of residuals and states, runs the table up to the first barrier of the node, shows the header with
the payload, compares the headers of all ranks behind the barrier, and runs the rest of the table.
"""

from __future__ import annotations

from espresso_mpi.compressors.kernels.cpu import host

from ..data.magnitudes import in_range
from ..messages import headers, shared_memory
from ..messages.headers import SETUP
from ..messages.window_places import COUNT, ME
from . import interpreter
from .interpreter import AT, EPOCH, GOING, HALTED, HALTS, MODE, RUNS, USES
from .operations import BUFFERS

ODD, DIFFERENT = interpreter.ENDED + 1, interpreter.ENDED + 2
"""More reasons why ``run`` returned: values are too large, or the headers differ."""

BEGINS, MEETS = RUNS + 1, RUNS + 2
"""More modes: nothing was done yet; at the barrier of the headers."""

LEAST, TENSORS, SIZES = range(SETUP, SETUP + 3)
"""Places of the set-up behind those of ``headers``: the bits from which a magnitude is too large, 0 if none is
searched, and the number of tensors. Then the elements of each, and for each array of which there is a copy, its place,
the address of the copy, and its bytes."""

SEARCHED, SEARCHED_UNTIL, ASKED, ANSWERED, MARKS = range(5)
"""Marks behind those of the table: when the search began and ended, when the headers were shown, and when compared."""


@host.inline
def note(marks, number, state):  # type: ignore[no-untyped-def]
    """As ``headers.note``, for one of the marks behind those of the table."""
    headers.note(marks, marks.shape[0] - MARKS + number, state)


@host.inline
def _keep(setup, places):  # type: ignore[no-untyped-def]
    """Copy what is restored if the headers differ."""
    for at in range(SIZES + setup[TENSORS], setup.size, 3):
        shared_memory.move(setup[at + 1], places[setup[at]], setup[at + 2])


@host.inline
def search_and_keep(setup, places, marks, state):  # type: ignore[no-untyped-def]
    """Look for values that are too large, and copy what may have to be restored; returns ``GOING`` or ``ODD``."""
    note(marks, SEARCHED, state)
    for number in range(setup[TENSORS] if setup[LEAST] else 0):
        if not in_range(places[BUFFERS + number], setup[SIZES + number], setup[LEAST]):
            return ODD
    note(marks, SEARCHED_UNTIL, state)
    _keep(setup, places)
    return GOING


@host.inline
def compare(setup, marks, flags, window, state, pace):  # type: ignore[no-untyped-def]
    """Meet the ranks of the node, which show their headers; returns ``GOING``, ``AT_BARRIER`` or ``DIFFERENT``."""
    if not shared_memory.barrier(flags, window[ME], window[COUNT], state[EPOCH], pace, state):
        return interpreter.AT_BARRIER
    half = state[USES] % 2
    state[EPOCH] += 1
    state[USES] += 1
    note(marks, ANSWERED, state)
    return GOING if headers.same(setup, flags, window, half) else DIFFERENT


@host.inline
def begin(setup, rows, parameters, places, marks, flags, window, flag, mpi, state, pace):  # type: ignore[no-untyped-def]
    """Run up to the first barrier; returns ``HALTED`` there, ``ODD``, or another reason. Arguments: as of ``run``."""
    if state[MODE] == BEGINS:
        why = search_and_keep(setup, places, marks, state)
        if why != GOING:
            return why
        state[MODE] = HALTS
    return interpreter.run(rows, parameters, places, marks, flags, window, flag, mpi, state, pace)


@host.inline
def run(setup, heads, sizes, rows, parameters, places, marks, flags, window, flag, mpi, state, pace):  # type: ignore[no-untyped-def]
    """Begin or go on; returns why it stopped: ``AT_BARRIER``, ``AT_MESSAGES``, ``FAILED``, ``ENDED``, or see above.

    Args:
        setup: see above.
        heads, sizes: uint8 and int64: receive the headers of all ranks and their sizes if they differ.
        rows, parameters, places, marks, flags, window, flag, mpi, state, pace: see ``interpreter.run``; ``marks`` has
            ``MARKS`` rows more.
    """
    if state[MODE] in (BEGINS, HALTS):
        why = begin(setup, rows, parameters, places, marks, flags, window, flag, mpi, state, pace)
        if why != HALTED:
            return why
        note(marks, ASKED, state)
        headers.show(setup, flags, window, state[USES] % 2)
        state[MODE] = MEETS
    if state[MODE] == MEETS:
        why = compare(setup, marks, flags, window, state, pace)
        if why == DIFFERENT:
            headers.receive(setup, heads, sizes, flags, window, 1 - state[USES] % 2)
        if why != GOING:
            return why
        state[AT] += 1  # behind the barrier
        state[MODE] = RUNS
    return interpreter.run(rows, parameters, places, marks, flags, window, flag, mpi, state, pace)
