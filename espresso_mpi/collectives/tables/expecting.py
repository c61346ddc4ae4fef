"""The compiled part of calls that all ranks expect: a table with the headers beside its first messages."""

from __future__ import annotations

from numba import carray, types

from espresso_mpi.compressors.kernels.cpu import host
from espresso_mpi.compressors.kernels.cpu.entries import pointer_to

from ..messages import headers, shared_memory
from ..messages.shared_memory import STEP
from ..messages.window_places import COUNT, ME
from . import interpreter, piggyback
from .expected import LONGEST, SIZE
from .interpreter import EPOCH, MODE, PYTHON, RUNS, USES
from .piggyback import BEGINS, MEETS

LEADS, ASKS = MEETS + 1, MEETS + 2
"""More modes: before the headers; the headers and the first messages are under way."""

THEIRS, PEERS, GROUPED, TOLD = range(4)
"""Places of ``told``, an int64 array, and its length: the address of the headers of peers; how many they are; and
whether the ranks of the node compare their headers first."""

_number_at = pointer_to(types.int64)


@host.inline
def _all_equal(setup, told):  # type: ignore[no-untyped-def]
    """Whether all peers have sent the header of this rank, but for the bits that may differ."""
    for number in range(told[PEERS]):
        at = told[THEIRS] + number * LONGEST
        if not headers.equals(setup, at + SIZE, carray(_number_at(at), (1,))[0]):
            return False
    return True


@host.inline
def run(setup, told, rows, parameters, places, marks, flags, window, flag, mpi, state, pace):  # type: ignore[no-untyped-def]
    """Begin or go on; returns why it stopped: as ``piggyback.run``, with its arguments.

    After ``DIFFERENT`` in the mode ``MEETS``, nothing was sent to the peers.

    Args:
        told: see above.
    """
    if state[MODE] == BEGINS:
        why = piggyback.search_and_keep(setup, places, marks, state)
        if why != interpreter.GOING:
            return why
        state[MODE] = LEADS
    if state[MODE] == LEADS:
        why = interpreter.run(rows, parameters, places, marks, flags, window, flag, mpi, state, pace)
        if why != PYTHON:
            return why
        piggyback.note(marks, piggyback.ASKED, state)
        if told[GROUPED]:
            headers.show(setup, flags, window, state[USES] % 2)
            state[MODE] = MEETS
        else:
            piggyback.note(marks, piggyback.ANSWERED, state)
            state[MODE] = ASKS
    if state[MODE] == MEETS:
        why = piggyback.compare(setup, marks, flags, window, state, pace)
        if why != interpreter.GOING:
            return why
        state[MODE] = ASKS
    if state[MODE] == ASKS:
        why = interpreter.run(rows, parameters, places, marks, flags, window, flag, mpi, state, pace)
        if why != PYTHON:
            return why
        if not _all_equal(setup, told):
            return piggyback.DIFFERENT
        state[MODE] = RUNS
    return interpreter.run(rows, parameters, places, marks, flags, window, flag, mpi, state, pace)


@host.inline
def decline(rows, parameters, places, marks, flags, window, flag, mpi, state, pace):  # type: ignore[no-untyped-def]
    """Take part in an expected call that this rank does not make; as ``run``, without its first two arguments."""
    if state[MODE] == MEETS:
        flags[window[ME] * STEP + 1 + state[USES] % 2] = 0  # no header has no bytes
        if not shared_memory.barrier(flags, window[ME], window[COUNT], state[EPOCH], pace, state):
            return interpreter.AT_BARRIER
        state[EPOCH] += 1
        state[USES] += 1
        state[MODE] = RUNS
    return interpreter.run(rows, parameters, places, marks, flags, window, flag, mpi, state, pace)
