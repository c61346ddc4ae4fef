"""The MPI functions that compiled code calls: their addresses in the library that mpi4py has loaded, and handles.

Handles are pointers for Open MPI and ints for MPICH; they are read from where mpi4py keeps them.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from espresso_mpi.compressors.kernels.cpu import host

from .naps import COMPILED, FOREGROUND, YIELDS
from .shared_memory import PAUSE, WAITED, now, poll_again, polls_since

ISEND, IRECV, TESTALL, COMM, BYTE, TAG, REQUEST, REQUESTS, STATUSES, FLAG, CALLS = range(11)
"""Places of ``Messages.calls``: addresses of functions, handles, the tag, bytes of a request, and the addresses of
requests, of statuses and of a flag; and its length."""


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
def start(mpi, way, number, address, nbytes, rank):  # type: ignore[no-untyped-def]
    """Start a message to a rank or from it; returns MPI's error.

    Args:
        mpi: ``Messages.calls``.
        way: ``ISEND`` or ``IRECV``; number: of its request.
        address, nbytes: its memory.
    """
    request = mpi[REQUESTS] + number * mpi[REQUEST]
    return _start_message(mpi[way], address, nbytes, mpi[BYTE], rank, mpi[TAG], mpi[COMM], request)


@host.inline
def nap_of(polled, waited, pace):  # type: ignore[no-untyped-def]
    """Microseconds of a nap after so many polls and nanoseconds, see ``naps``; 0: yield."""
    if pace[2] == 0:  # no other thread computes
        if polled < pace[0] + YIELDS:
            return np.int64(0)
        least, share, longest = FOREGROUND
        return np.int64(1e6 * min(max(least, share * 1e-9 * waited), longest))
    least, share, longest = COMPILED
    longest = min(longest, pace[1] * PAUSE * 1e-9 / 4)  # Python is to look at other things after so many polls
    return np.int64(1e6 * min(max(least, share * 1e-9 * waited), longest))


@host.inline
def await_messages(mpi, count, flag, pace, log):  # type: ignore[no-untyped-def]
    """Poll until the first ``count`` messages are through, or for too many polls; adds to the time in ``log``.

    Args:
        mpi, flag: ``Messages.calls`` and ``Messages.flag``.
        pace, log: as of ``shared_memory.barrier``.

    Returns:
        MPI's error, and whether they are through.
    """
    began, polled, error = now(), 0, 0
    while polled >= 0:
        before = now()
        error = _test_all(mpi[TESTALL], count, mpi[REQUESTS], mpi[FLAG], mpi[STATUSES])
        if error != 0 or flag[0] != 0:
            break
        nap = nap_of(polled, now() - began, pace)
        polled = poll_again(polled + polls_since(before), pace, nap)  # MPI may give the core away
    log[WAITED] += now() - began
    return error, flag[0] != 0


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """mpi4py's module: a search in it goes on in the libraries that it was linked with."""
    from mpi4py import MPI

    return ctypes.CDLL(MPI.__file__)


def _function(name: str) -> int:
    address = ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value
    assert address is not None
    return address


def _handle(thing: Any) -> int:
    """The handle of an mpi4py object, as a number."""
    from mpi4py import MPI

    kind = ctypes.c_uint32 if MPI._sizeof(thing) == 4 else ctypes.c_uint64
    return int(kind.from_address(MPI._addressof(thing)).value)


class Messages:
    """Memory for the messages of tables, one at a time, and how to call MPI for them.

    Args:
        comm: the mpi4py communicator.
        tag: the tag of all messages.
        count: most messages in flight.

    Attributes:
        calls: int64, see ``ISEND``.
        flag: int32: whether all messages are through.
        room: ``count``.
        in_flight: how many are under way.
    """

    def __init__(self, comm: Any, tag: int, count: int) -> None:
        from mpi4py import MPI

        self._bytes, status = MPI._sizeof(MPI.Request), MPI._sizeof(MPI.Status)
        self._requests, self._statuses = np.zeros(count * self._bytes, np.uint8), np.zeros(count * status, np.uint8)
        self.flag, self.room, self.in_flight = np.zeros(1, np.int32), count, 0
        self.calls = np.array([
            _function("MPI_Isend"), _function("MPI_Irecv"), _function("MPI_Testall"), _handle(comm), _handle(MPI.BYTE),
            tag, self._bytes, self._requests.ctypes.data, self._statuses.ctypes.data, self.flag.ctypes.data,
        ], np.int64)  # fmt: skip

    def through(self) -> bool:
        """Whether all messages are through."""
        flag, requests = ctypes.c_int(0), ctypes.c_void_p(int(self.calls[REQUESTS]))
        statuses = ctypes.c_void_p(int(self.calls[STATUSES]))
        _check(_library().MPI_Testall(self.in_flight, requests, ctypes.byref(flag), statuses))
        return bool(flag.value)

    def is_through(self, number: int) -> bool:
        """Whether the message with this number is through, of those in flight."""
        flag, address = ctypes.c_int(0), int(self.calls[REQUESTS]) + number * self._bytes
        status = ctypes.c_void_p(int(self.calls[STATUSES]))
        _check(_library().MPI_Test(ctypes.c_void_p(address), ctypes.byref(flag), status))
        return bool(flag.value)


def _check(error: int) -> None:
    """Raise the error that MPI has returned."""
    if error:
        from mpi4py import MPI

        raise MPI.Exception(error)
