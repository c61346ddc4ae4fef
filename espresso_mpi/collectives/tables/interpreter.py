"""Runs a table of operations: one function without the GIL, which returns where Python is needed.

It stops at YIELD, at PYTHON, when it has waited for other ranks for a while, and when MPI reports an error. Called
again, it continues where it stopped. So several tables are in progress at once, and every wait has the checks and the
timeout of the waiter.
"""

from __future__ import annotations

import numpy as np

from espresso_mpi.compressors.kernels.cpu import entries, host

from ..data.reduction import sum_floats
from ..messages import cross_memory, shared_memory
from ..messages.headers import in_row
from ..messages.joint_reads import read_from
from ..messages.mpi_calls import IRECV, ISEND, await_messages, start
from ..messages.shared_memory import REFUSED, move
from ..messages.window_places import COUNT, ME, STRIDE
from .operations import BUFFERS, SCRATCH, Code

GOING, YIELDED, PYTHON, AT_BARRIER, AT_MESSAGES, FAILED, HALTED, ENDED = range(8)
"""Why the interpreter returned."""

AT, EPOCH, USES, IN_FLIGHT, ERROR, MODE, STATE = range(shared_memory.LOG, shared_memory.LOG + 7)
"""Places of the state, an int64 array: the next operation; barriers and uses of the window so far; messages under way;
MPI's error; the mode, see ``PAUSES``. Before them is the log of ``shared_memory.barrier``; after them, for each tensor,
how many values were cut."""

PAUSES, HALTS, RUNS = range(3)
"""Modes: return at every YIELD, because others run as well; return before the next barrier; return only if needed."""

_ADD, _DIVIDE, _SUM, _WRITE, _READ = (int(c) for c in (Code.ADD, Code.DIVIDE, Code.SUM, Code.WRITE, Code.READ))
_REACH, _FETCH, _OFFER, _LEARN = (int(c) for c in (Code.REACH, Code.FETCH, Code.OFFER, Code.LEARN))
_LAP, _TILES, _COPY, _SHOW, _MEET = (int(c) for c in (Code.LAP, Code.TILES, Code.COPY, Code.SHOW, Code.MEET))
_TAKE, _SEND, _RECEIVE, _WAIT = (int(c) for c in (Code.TAKE, Code.SEND, Code.RECEIVE, Code.WAIT))
_MARK, _STACK, _YIELD, _SUM_RECEIVED = (int(c) for c in (Code.MARK, Code.STACK, Code.YIELD, Code.SUM_RECEIVED))
_REDUCE, _SUMMARISE = int(Code.REDUCE), int(Code.SUMMARISE)


_BLOCK = 2048
"""Elements that are summed at a time."""


@host.inline
def _divide(values, exact, by):  # type: ignore[no-untyped-def]
    if exact:
        for i in range(values.size):
            values[i] *= by
    else:
        for i in range(values.size):
            values[i] /= by


@host.inline
def _call(row, tile, x, size, parameters, places, state):  # type: ignore[no-untyped-def]
    """Call a kernel for the elements of a tile."""
    payload, kept, its_state, key = places[row[4]] + row[5], np.int64(0), np.int64(0), np.int64(0)
    if row[7] >= 0 and places[row[7]] != 0:
        kept = places[row[7]] + 4 * (row[8] + tile)
    if row[9] >= 0:
        key = places[row[9]]
    adding, at, first = np.int64(row[0] == _ADD), parameters.ctypes.data + 8 * row[10], row[13] + tile
    if row[16] >= 0:
        its_state = places[row[16]] + 4 * first
    if row[18] >= 0:
        its_state = places.ctypes.data + 8 * row[18]
        if row[19] >= 0:
            places[row[18]] = places[row[4]] + row[19]
    work = places[SCRATCH] + row[17]
    cut = entries.call(row[12], x, size, payload, kept, its_state, work, key, adding, at, first, row[14])
    state[STATE + row[1] - BUFFERS] += cut


@host.inline
def _with_rows(row, tile, x, mine, size, parameters, window, state):  # type: ignore[no-untyped-def]
    """Values of a tile to the own row of the half to use next, or with or from rows of the half that was met in."""
    place, half = row[11] + 4 * tile, state[USES] % 2
    if row[0] == _WRITE:
        move(in_row(window, half, window[ME]) + place, x, 4 * size)
    elif row[0] == _READ:
        move(x, in_row(window, 1 - half, row[10]) + place, 4 * size)
    else:
        stride, count = window[STRIDE] // 4, window[COUNT]
        span = entries.floats(in_row(window, 1 - half, 0) + place, (count - 1) * stride + size)
        exact, factor = parameters[row[10]] != 0, np.float32(parameters[row[10] + 1])
        out, own = entries.floats(x, size), entries.floats(mine, size)
        for first in range(0, size, _BLOCK):
            last = min(size, first + _BLOCK)
            sum_floats(out[first:last], own[first:last], span, first, stride, count, window[ME], exact, factor)


@host.inline
def _reach(row, x, size, rank, count, places, at, pieces, state):  # type: ignore[no-untyped-def]
    """Read elements of a tensor from the memory of another rank of the node."""
    known = row[11]
    there = places[known + 2 + count + rank * row[14] + row[1] - BUFFERS] + 4 * at
    read, errno, process = places[known], places[known + 1], places[known + 2 + rank]
    read_from(read, errno, process, x, there, 4 * size, pieces, state)


@host.inline
def _from_memory(row, tile, x, mine, size, parameters, places, window, state):  # type: ignore[no-untyped-def]
    """Values of a tile from another rank of the node, or summed with those of all others, some at a time."""
    pieces, count = np.empty(cross_memory.PIECES, np.int64), window[COUNT]
    if row[0] == _FETCH:
        _reach(row, x, size, row[10], count, places, row[2] + tile, pieces, state)
        return
    length, others = row[6] // 4, places[SCRATCH] + row[5]
    exact, factor = parameters[row[10]] != 0, np.float32(parameters[row[10] + 1])
    for begin in range(0, size, length):
        n = min(length, size - begin)
        for k in range(1, count):
            rank = (window[ME] + k) % count
            _reach(row, others + 4 * rank * length, n, rank, count, places, row[2] + tile + begin, pieces, state)
        span = entries.floats(others, count * length)
        out, own = entries.floats(x + 4 * begin, n), entries.floats(mine + 4 * begin, n)
        for first in range(0, n, _BLOCK):
            last = min(n, first + _BLOCK)
            sum_floats(out[first:last], own[first:last], span, first, length, count, window[ME], exact, factor)


@host.inline
def _exchange_places(row, places, window, state):  # type: ignore[no-untyped-def]
    """Show where the tensors begin in the own row of the half to use next, or note it for all other ranks."""
    nbytes = 8 * row[14]
    if row[0] == _OFFER:
        move(in_row(window, state[USES] % 2, window[ME]), places.ctypes.data + 8 * BUFFERS, nbytes)
        return
    known = places.ctypes.data + 8 * (row[11] + 2 + window[COUNT])
    for rank in range(window[COUNT]):
        move(known + rank * nbytes, in_row(window, 1 - state[USES] % 2, rank), nbytes)


@host.inline
def _lap(row, marks, state):  # type: ignore[no-untyped-def]
    """A time begins to run, or stops."""
    marks[row[1], 0] += row[10] * shared_memory.now()
    marks[row[1], 1] += row[10] * state[shared_memory.WAITED]


@host.inline
def _on_values(row, tile, size, parameters, places, window, state):  # type: ignore[no-untyped-def]
    """An operation on values of a tensor: on ``size`` of them from number ``tile`` of its own on."""
    mine = places[row[1]] + 4 * (row[2] + tile)
    x = places[SCRATCH] if row[15] else mine
    if row[0] == _DIVIDE:
        _divide(entries.floats(x, size), parameters[row[10]] != 0, np.float32(parameters[row[10] + 1]))
    elif row[0] < _DIVIDE:
        if row[0] == _SUMMARISE and row[15] and (row[7] < 0 or places[row[7]] == 0):
            move(mine, x, 4 * size)  # the encode reads it, for there is no residual that holds the values
        _call(row, tile, x, size, parameters, places, state)
    elif row[0] >= _REACH:
        _from_memory(row, tile, x, mine, size, parameters, places, window, state)
    else:
        _with_rows(row, tile, x, mine, size, parameters, window, state)


@host.inline
def _by_tiles(rows, parameters, places, marks, window, state):  # type: ignore[no-untyped-def]
    """The operations that follow, all of them for one tile before the next: it stays in a cache."""
    first, count, size, length = state[AT] + 1, rows[state[AT], 1], rows[state[AT], 3], rows[state[AT], 10]
    for tile in range(0, size, length):
        for number in range(first, first + count):
            row = rows[number]
            if row[0] == _LAP:
                _lap(row, marks, state)
            else:
                _on_values(row, tile, min(length, size - tile), parameters, places, window, state)
    state[AT] += count


@host.inline
def _mark(row, marks, state):  # type: ignore[no-untyped-def]
    """Note the time, and let the times that follow begin at 0; or make durations times that follow each other."""
    at, count = row[1], row[3]
    if row[0] == _MARK:
        marks[at : at + count + 1] = 0
        marks[at, 0] = shared_memory.now()
        marks[at, 1] = state[shared_memory.WAITED]
    else:
        for number in range(at, at + count):
            marks[number, 0] += marks[number - 1, 0]
            marks[number, 1] += marks[number - 1, 1]


@host.inline
def _by_window(row, places, window, state):  # type: ignore[no-untyped-def]
    """Copy to the own row of the half to use next, or from another row of the half that was met in."""
    place = places[row[4]] + row[5]
    if row[0] == _SHOW:
        move(in_row(window, state[USES] % 2, window[ME]) + row[11], place, row[6])
    else:
        move(place, in_row(window, 1 - state[USES] % 2, row[10]) + row[11], row[6])


@host.inline
def _sum_received(row, parameters, places):  # type: ignore[no-untyped-def]
    """The elements of a tensor in place of their row in a payload buffer, and the other rows, summed and divided."""
    size, count = row[3], row[14]
    out = entries.floats(places[row[1]] + 4 * row[2], size)
    rows = entries.floats(places[row[4]] + row[5], count * size)
    exact, factor = parameters[row[10]] != 0, np.float32(parameters[row[10] + 1])
    for first in range(0, size, _BLOCK):
        mine = out[first : min(size, first + _BLOCK)]
        sum_floats(mine, mine, rows, first, size, count, row[13], exact, factor)


@host.inline
def _reduce_rows(row, parameters, places, window, state):  # type: ignore[no-untyped-def]
    """Reduce elements, in place of their row, with the other rows, in the window or in a payload buffer."""
    if row[0] == _SUM_RECEIVED:
        _sum_received(row, parameters, places)
        return
    at = parameters.ctypes.data + 8 * row[10]
    if row[4] >= 0:
        rows, stride = places[row[4]] + row[5], row[6]
    else:
        rows, stride = in_row(window, 1 - state[USES] % 2, 0) + row[11], window[STRIDE]
    x = places[row[1]] + row[2]
    none = np.int64(0)
    cut = entries.call(row[12], x, row[3], rows, stride, row[14], none, row[13], none, at, none, none)
    state[STATE] += row[8] * cut


@host.inline
def _start(row, places, mpi, state):  # type: ignore[no-untyped-def]
    """Start a message; returns MPI's error."""
    way = ISEND if row[0] == _SEND else IRECV
    error = start(mpi, way, state[IN_FLIGHT], places[row[4]] + row[5], row[6], row[10])
    if error == 0:
        state[IN_FLIGHT] += 1
    return error


@host.inline
def _await_messages(mpi, flag, state, pace):  # type: ignore[no-untyped-def]
    """GOING if all messages are through, AT_MESSAGES if that takes too many polls, FAILED with MPI's error."""
    if state[IN_FLIGHT] == 0:
        return GOING
    state[ERROR], through = await_messages(mpi, state[IN_FLIGHT], flag, pace, state)
    if state[ERROR] != 0:
        return FAILED
    if not through:
        return AT_MESSAGES
    state[IN_FLIGHT] = 0
    return GOING


@host.inline
def _meet(flags, window, state, pace):  # type: ignore[no-untyped-def]
    """The barrier of the node."""
    if state[MODE] == HALTS:
        return HALTED
    if not shared_memory.barrier(flags, window[ME], window[COUNT], state[EPOCH], pace, state):
        return AT_BARRIER
    state[EPOCH] += 1
    state[USES] += 1
    return GOING


@host.inline
def run(rows, parameters, places, marks, flags, window, flag, mpi, state, pace):  # type: ignore[no-untyped-def]
    """Run operations until Python is needed; returns why.

    Args:
        rows, parameters: of the table, see ``operations.OperationTable``.
        places: int64: addresses, and keys.
        marks: int64 of shape (marks, 2): receives the nanoseconds of the clock and of waiting so far.
        flags: of the window's ranks, see ``shared_memory``; empty without a window, like ``window``.
        flag: int32: whether messages are through.
        mpi, state, window: see above.
        pace: how to poll, see ``Waiter.pace``.
    """
    while state[AT] < rows.shape[0]:
        row, found = rows[state[AT]], GOING
        code = row[0]
        if code <= _FETCH:
            _on_values(row, 0, row[3], parameters, places, window, state)
            found = FAILED if state[REFUSED] != 0 else GOING
        elif code == _TILES:
            _by_tiles(rows, parameters, places, marks, window, state)
            found = FAILED if state[REFUSED] != 0 else GOING
        elif code == _LAP:
            _lap(row, marks, state)
        elif code == _COPY:
            move(places[row[4]] + row[5], places[row[10]] + row[11], row[6])
        elif code in (_SHOW, _TAKE):
            _by_window(row, places, window, state)
        elif code == _MEET:
            found = _meet(flags, window, state, pace)
        elif code in (_SEND, _RECEIVE):
            state[ERROR] = _start(row, places, mpi, state)
            found = FAILED if state[ERROR] != 0 else GOING
        elif code == _WAIT:
            found = _await_messages(mpi, flag, state, pace)
        elif code in (_MARK, _STACK):
            _mark(row, marks, state)
        elif code in (_SUM_RECEIVED, _REDUCE):
            _reduce_rows(row, parameters, places, window, state)
        elif code in (_OFFER, _LEARN):
            _exchange_places(row, places, window, state)
        elif code == _YIELD:
            found = YIELDED if state[MODE] == PAUSES else GOING
        else:
            found = PYTHON
        if found >= AT_BARRIER:
            return found
        state[AT] += 1
        if found != GOING:
            return found
    return ENDED
