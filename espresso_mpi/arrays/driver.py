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


def destroy(name: str, handle: Any) -> None:
    """Call a function that destroys something, in any thread: one without a context does not get one for it."""
    getattr(_library(), name)(handle)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class DriverEvent:
    """An event. Streams are given as their addresses.

    Args:
        timing: whether it notes when the GPU passes it, which takes the GPU longer.
    """

    def __init__(self, timing: bool = False) -> None:
        self._handle = ctypes.c_void_p()
        call("cuEventCreate", ctypes.byref(self._handle), 0 if timing else _NO_TIMING)
        # Not at the end of the process: the context ends with it.
        weakref.finalize(self, destroy, "cuEventDestroy_v2", self._handle).atexit = False

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

    def elapsed_time(self, end: DriverEvent) -> float:
        """Milliseconds from here to ``end``, which the GPU has passed, too; below 0 if it passed ``end`` before."""
        found = ctypes.c_float()
        call("cuEventElapsedTime", ctypes.byref(found), self._handle, end._handle)
        return found.value
