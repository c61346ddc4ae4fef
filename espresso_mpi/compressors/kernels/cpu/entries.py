"""Kernels that compiled code calls by their address, all with one signature.

An entry is a C function that takes addresses and numbers, and calls the serial build of a kernel. Its address is data,
so code that calls it can be kept on disk: in another process the address is another, and the code is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from espresso_mpi.files.compiled import c_function
from espresso_mpi.files.sources import with_digest

from . import host

_ARGUMENTS = 11
_SIGNATURE = types.int64(*[types.int64] * _ARGUMENTS)


class Entry:
    """A decorator: a function of int64 (x, n, payload, residual, state, work, key, add, parameters, first, whole).

    Args:
        function: gets the addresses of n float32 values, of a payload, of a residual and a state of n values (0: none)
            or in place of a state of a list of addresses (``KernelCall.listed``), of scratch memory, and of parameters,
            all float64, some of which can be addresses; the key of the random bits; and whether a decode adds. The
            payload is that of ``whole`` elements, of which the values are those from ``first`` on, a multiple of
            ``KernelCall.grain``; the rest of it is left alone. An encode returns how many values it cut, others 0.
            It allocates nothing that grows with n: numba only prints an exception here, and returns 0.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name, self._function, self.__doc__ = function.__name__, with_digest(function), function.__doc__

    @cached_property
    def address(self) -> int:
        """Where the machine code begins."""
        self._code = c_function(_SIGNATURE, self._function, error_model="numpy")
        return int(self._code.address)


def pointer_to(element: Any) -> Any:
    """An intrinsic that makes an address a pointer."""

    @intrinsic
    def pointer(typingctx, address):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

        return types.CPointer(element)(types.int64), codegen

    return pointer


_float32, _float64, _uint64 = pointer_to(types.float32), pointer_to(types.float64), pointer_to(types.uint64)
_int8, _uint16, _int64 = pointer_to(types.int8), pointer_to(types.uint16), pointer_to(types.int64)
_uint8, _uint32, _int16 = pointer_to(types.uint8), pointer_to(types.uint32), pointer_to(types.int16)


@host.inline
def floats(address, size):  # type: ignore[no-untyped-def]
    """The float32 array at an address."""
    return carray(_float32(address), (size,))


@host.inline
def floats_if(address, size):  # type: ignore[no-untyped-def]
    """The same; empty at address 0."""
    return floats(address, size if address else 0)


@host.inline
def doubles(address, size):  # type: ignore[no-untyped-def]
    return carray(_float64(address), (size,))


@host.inline
def words(address, size):  # type: ignore[no-untyped-def]
    """The uint64 array at an address."""
    return carray(_uint64(address), (size,))


@host.inline
def words32(address, size):  # type: ignore[no-untyped-def]
    """The uint32 array at an address."""
    return carray(_uint32(address), (size,))


@host.inline
def bytes_at(address, size):  # type: ignore[no-untyped-def]
    """The uint8 array at an address."""
    return carray(_uint8(address), (size,))


@host.inline
def codes8(address, size):  # type: ignore[no-untyped-def]
    """The int8 array at an address."""
    return carray(_int8(address), (size,))


@host.inline
def shorts(address, size):  # type: ignore[no-untyped-def]
    """The int16 array at an address."""
    return carray(_int16(address), (size,))


@host.inline
def codes16(address, size):  # type: ignore[no-untyped-def]
    """The uint16 array at an address."""
    return carray(_uint16(address), (size,))


@host.inline
def integers(address, size):  # type: ignore[no-untyped-def]
    """The int64 array at an address."""
    return carray(_int64(address), (size,))


@intrinsic
def call(typingctx, address, x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Call the entry at an address."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        word = ir.IntType(64)
        function = builder.inttoptr(args[0], ir.FunctionType(word, [word] * _ARGUMENTS).as_pointer())
        return builder.call(function, args[1:])

    return types.int64(*[types.int64] * (1 + _ARGUMENTS)), codegen
