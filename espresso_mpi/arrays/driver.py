"""Functions and events of the CUDA driver, called without numba, whose way to them takes ten times as long."""

from __future__ import annotations

import ctypes
import weakref
from functools import lru_cache
from typing import Any

_NO_TIMING = 2
_NOT_READY = 600


def call(name: str, *args: Any) -> None:
    """Call a function of the CUDA driver, without the lock of Python.

    Raises:
        RuntimeError: it failed.
    """
    failed = status(name, *args)
    if failed:
        raise RuntimeError(f"the CUDA driver's {name} failed (error {failed})")


def status(name: str, *args: Any) -> int:
    """As ``call``, but returns the driver's error instead of raising it."""
    from numba import cuda

    cuda.current_context()  # this thread may not have met the GPU before
    return int(getattr(_library(), name)(*args))


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class DriverEvent:
    """An event without a time. Streams are given as their addresses."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        call("cuEventCreate", ctypes.byref(self._handle), _NO_TIMING)
        # Not at the end of the process: the context ends with it.
        weakref.finalize(self, call, "cuEventDestroy_v2", self._handle).atexit = False

    def record(self, stream: int | None) -> None:
        call("cuEventRecord", self._handle, ctypes.c_void_p(stream))

    def wait(self, stream: int | None) -> None:
        """Let a stream wait for it."""
        call("cuStreamWaitEvent", ctypes.c_void_p(stream), self._handle, 0)

    def query(self) -> bool:
        """Whether the GPU has passed it."""
        found = status("cuEventQuery", self._handle)
        if found not in (0, _NOT_READY):
            raise RuntimeError(f"the CUDA driver's cuEventQuery failed (error {found})")
        return found == 0

    def synchronize(self) -> None:
        call("cuEventSynchronize", self._handle)
