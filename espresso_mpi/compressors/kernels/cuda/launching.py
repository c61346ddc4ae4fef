"""How a compiled kernel is launched: by the driver's ``cuLaunchKernel``, without the way through numba.

Numba and its ``cuda.core`` take 50 to 100 µs of the host for a launch, many times what the kernel of a small tensor
takes. Here the arguments are packed into one buffer, as C packs a struct, and handed to the driver with it.

Numba passes an array as words: two for its memory's owner (unused on a GPU), the number of its elements, the size of
one, its address, its shape, and its strides.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from numba import types
from numba.core.sigutils import normalize_signature

from espresso_mpi.arrays import device
from espresso_mpi.arrays.caller_streams import Flat

_SCALARS = {
    types.boolean: "?", types.int32: "i", types.uint32: "I", types.int64: "q", types.uint64: "Q", types.uint16: "H",
    types.float32: "f", types.float64: "d",
}  # fmt: skip

_POINTER, _SIZE, _END = 1, 2, 0
"""CU_LAUNCH_PARAM_BUFFER_POINTER and others: what the driver takes in the place of pointers to each argument."""


class Launch:
    """A kernel on one device.

    Args:
        dispatcher: numba's, compiled for this one signature.
        signature: as numba writes it, of arrays and numbers.
    """

    def __init__(self, dispatcher: Any, signature: str) -> None:
        expected, _ = normalize_signature(signature)
        self._arrays = [isinstance(one, types.Array) for one in expected]
        self._packed = struct.Struct(layout(signature))
        (compiled,) = dispatcher.overloads.values()
        self._library = compiled.library  # unloaded when nobody knows it any more
        handle = self._library.get_cufunc().handle
        self._handle = ctypes.c_void_p(int(getattr(handle, "value", handle)))

    def __call__(self, grid: int, threads: int, args: Sequence[Any]) -> None:
        """Queue it on ``device.stream()``; the driver copies the arguments."""
        size = self._packed.size
        buffer = (ctypes.c_char * size)()
        self._packed.pack_into(buffer, 0, *self._words(args))
        length = ctypes.c_size_t(size)
        extra = (ctypes.c_void_p * 5)(_POINTER, ctypes.addressof(buffer), _SIZE, ctypes.addressof(length), _END)
        device.launch(self._handle, grid, threads, extra)

    def _words(self, args: Sequence[Any]) -> Iterator[Any]:
        for array, value in zip(self._arrays, args, strict=True):
            if array and isinstance(value, Flat):
                yield from (0, 0, value.size, value.itemsize, value.address, value.size, value.itemsize)
            elif array:
                yield from (0, 0, value.size, value.dtype.itemsize, value.device_ctypes_pointer.value or 0)
                yield from (*value.shape, *value.strides)
            else:
                yield value


def layout(signature: str) -> str:
    """The arguments of a kernel with this signature, as ``struct`` names them."""
    arguments, _ = normalize_signature(signature)
    return "".join("PPnnP" + 2 * one.ndim * "n" if isinstance(one, types.Array) else _SCALARS[one] for one in arguments)
