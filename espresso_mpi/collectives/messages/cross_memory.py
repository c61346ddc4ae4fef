"""Copies from and to the memory of another process of this node: Linux's ``process_vm_readv`` and
``process_vm_writev``, called by address.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from espresso_mpi.compressors.kernels.cpu import host
from espresso_mpi.compressors.kernels.cpu.entries import pointer_to

PIECES = 4
"""Numbers that a copy needs room for: two of the system's ``struct iovec``, an address and a length each."""

_error_at = pointer_to(types.int32)


@lru_cache(maxsize=1)
def functions() -> tuple[int, int, int]:
    """The addresses of the functions that read, that write, and that say where the error number is; 0: none."""
    library = ctypes.CDLL(None)
    try:
        found = library.process_vm_readv, library.process_vm_writev, library.__errno_location
    except AttributeError:
        return 0, 0, 0
    read, write, errno = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found)
    return read, write, errno


@intrinsic
def _call_copy(typingctx, function, process, local, remote):  # type: ignore[no-untyped-def]
    """Call process_vm_readv or process_vm_writev with one piece of memory on each side."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        word, number = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(word, [number, word, word, word, word, word])
        function, process, local, remote = args
        one, none = ir.Constant(word, 1), ir.Constant(word, 0)
        called = [builder.trunc(process, number), local, one, remote, one, none]
        return builder.call(builder.inttoptr(function, kind.as_pointer()), called)

    return types.int64(*[types.int64] * 4), codegen


@intrinsic
def _call_errno(typingctx, function):  # type: ignore[no-untyped-def]
    """Call the function that says where this thread's error number is."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.IntType(64), [])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), [])

    return types.int64(types.int64), codegen


@host.inline
def copy(function, errno, process, here, there, nbytes, pieces):  # type: ignore[no-untyped-def]
    """Copy bytes between addresses of this process and of another one; returns the error number, 0 if there is none.

    Args:
        function, errno: from ``functions``: the one that reads or that writes, and the one of the error.
        pieces: int64, room for ``PIECES`` numbers.
    """
    done = 0
    while done < nbytes:
        pieces[0], pieces[1] = here + done, nbytes - done
        pieces[2], pieces[3] = there + done, nbytes - done
        found = _call_copy(function, process, pieces.ctypes.data, pieces.ctypes.data + 16)
        if found <= 0:
            return max(1, carray(_error_at(_call_errno(errno)), (1,))[0]) if found < 0 else 1
        done += found
    return 0


def copy_across(function: int, process: int, here: int, there: int, nbytes: int) -> None:
    """As ``copy``, for Python.

    Raises:
        OSError: the system refuses.
    """
    error = int(copy(function, functions()[2], process, here, there, nbytes, np.zeros(PIECES, np.int64)))
    if error:
        raise OSError(error, os.strerror(error))
