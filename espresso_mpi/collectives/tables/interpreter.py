"""Runs a table of operations: one function without the GIL, which returns where Python is needed.

It stops at YIELD, at PYTHON, when it has waited for other ranks for a while, and when MPI reports an error. Called
again, it continues where it stopped. So several tables are in progress at once, and every wait has the checks and the
timeout of the waiter.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from espresso_mpi.compressors.kernels.cpu import entries, host

from ..messages import shared_memory
from ..messages.mpi_calls import BYTE, COMM, FLAG, IRECV, ISEND, REQUEST, REQUESTS, STATUSES, TAG, TESTALL
from ..messages.shared_memory import move
from ..messages.window_places import COUNT, ME, MEMORY, STARTS, STRIDE
from .operations import Code

GOING, YIELDED, PYTHON, AT_BARRIER, AT_MESSAGES, FAILED, HALTED, ENDED = range(8)
"""Why the interpreter returned."""

AT, EPOCH, USES, IN_FLIGHT, ERROR, MODE, STATE = range(shared_memory.LOG, shared_memory.LOG + 7)
"""Places of the state, an int64 array: the next operation; barriers and uses of the window so far; messages under way;
MPI's error; the mode, see ``PAUSES``. Before them is the log of ``shared_memory.barrier``; after them, for each tensor,
how many values were cut."""

PAUSES, HALTS, RUNS = range(3)
"""Modes: return at every YIELD, because others run as well; return before the next barrier; return only if needed."""

_ENCODE, _DECODE, _ADD, _DIVIDE, _COPY = (int(c) for c in (Code.ENCODE, Code.DECODE, Code.ADD, Code.DIVIDE, Code.COPY))
_SHOW, _MEET, _TAKE, _SEND, _RECEIVE = (int(c) for c in (Code.SHOW, Code.MEET, Code.TAKE, Code.SEND, Code.RECEIVE))
_WAIT, _MARK, _YIELD = (int(c) for c in (Code.WAIT, Code.MARK, Code.YIELD))


@intrinsic
def _start_message(typingctx, function, address, nbytes, byte, rank, tag, comm, request):  # type: ignore[no-untyped-def]
    """Call MPI_Isend or MPI_Irecv. A handle that is an int is passed as 64 bits, of which it reads the lower half."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        word, number = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(number, [word, number, word, number, number, word, word])
        function, address, nbytes, byte, rank, tag, comm, request = args
        small = [builder.trunc(value, number) for value in (nbytes, rank, tag)]
        called = [address, small[0], byte, small[1], small[2], comm, request]
        return builder.sext(builder.call(builder.inttoptr(function, kind.as_pointer()), called), word)

    return types.int64(*[types.int64] * 8), codegen


@intrinsic
def _test_all(typingctx, function, count, requests, flag, statuses):  # type: ignore[no-untyped-def]
    """Call MPI_Testall."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        word, number = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(number, [number, word, word, word])
        function, count, requests, flag, statuses = args
        called = [builder.trunc(count, number), requests, flag, statuses]
        return builder.sext(builder.call(builder.inttoptr(function, kind.as_pointer()), called), word)

    return types.int64(*[types.int64] * 5), codegen


@host.inline
def _apply(row, parameters, places, state):  # type: ignore[no-untyped-def]
    """Call a kernel, or divide."""
    x, size = places[row[1]] + 4 * row[2], row[3]
    if row[0] == _DIVIDE:
        values, exact, by = entries.floats(x, size), parameters[row[10]] != 0, np.float32(parameters[row[10] + 1])
        if exact:
            for i in range(size):
                values[i] *= by
        else:
            for i in range(size):
                values[i] /= by
        return
    payload, kept, key = places[row[4]] + row[5], np.int64(0), np.int64(0)
    if row[7] >= 0 and places[row[7]] != 0:
        kept = places[row[7]] + 4 * row[8]
    if row[9] >= 0:
        key = places[row[9]]
    adding = np.int64(row[0] == _ADD)
    at = parameters.ctypes.data + 8 * row[10]
    state[STATE + row[1] - 2] += entries.call(row[12], x, size, payload, kept, key, adding, at)


@host.inline
def _by_window(row, places, window, state):  # type: ignore[no-untyped-def]
    """Copy to the own row of the half to use next, or from another row of the half that was met in."""
    place = places[row[4]] + row[5]
    if row[0] == _SHOW:
        mine = window[MEMORY] + window[STARTS + state[USES] % 2] + window[ME] * window[STRIDE]
        move(mine, place, row[6])
    else:
        other = window[MEMORY] + window[STARTS + (state[USES] - 1) % 2] + row[10] * window[STRIDE]
        move(place, other + row[11], row[6])


@host.inline
def _start(row, places, mpi, state):  # type: ignore[no-untyped-def]
    """Start a message; returns MPI's error."""
    function = mpi[ISEND] if row[0] == _SEND else mpi[IRECV]
    request = mpi[REQUESTS] + state[IN_FLIGHT] * mpi[REQUEST]
    address = places[row[4]] + row[5]
    error = _start_message(function, address, row[6], mpi[BYTE], row[10], mpi[TAG], mpi[COMM], request)
    if error == 0:
        state[IN_FLIGHT] += 1
    return error


@host.inline
def messages_there(mpi, flag, state, pace):  # type: ignore[no-untyped-def]
    """GOING if all messages are through, AT_MESSAGES if that takes too many polls, FAILED with MPI's error."""
    polled = 0
    while True:
        state[ERROR] = _test_all(mpi[TESTALL], state[IN_FLIGHT], mpi[REQUESTS], mpi[FLAG], mpi[STATUSES])
        if state[ERROR] != 0:
            return FAILED
        if flag[0] != 0:
            state[IN_FLIGHT] = 0
            return GOING
        polled += 1
        if not shared_memory.keep_polling(polled, pace):
            return AT_MESSAGES


@host.inline
def _await_messages(mpi, flag, state, pace):  # type: ignore[no-untyped-def]
    """As ``messages_there``; adds to the time in the log."""
    if state[IN_FLIGHT] == 0:
        return GOING
    began = shared_memory.now(state[shared_memory.CLOCK :])
    found = messages_there(mpi, flag, state, pace)
    state[shared_memory.WAITED] += shared_memory.now(state[shared_memory.CLOCK :]) - began
    return found


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
        if code <= _DIVIDE:
            _apply(row, parameters, places, state)
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
        elif code == _MARK:
            marks[row[1], 0] = shared_memory.now(state[shared_memory.CLOCK :])
            marks[row[1], 1] = state[shared_memory.WAITED]
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
