"""Host and GPU memory behind one small set of functions.

An array is a numpy array (host) or a numba device array (GPU).

**One stream.** Every kernel and every copy of this library goes to ``stream()``: numba's default stream, the legacy one
of CUDA. Work on it runs in order, whichever thread queues it, so kernels and copies need no synchronisation. Only
the host must synchronise: it may read what a GPU wrote, or pass memory to MPI, after ``drain()``. It may write what a
GPU reads (a host buffer of ``copy_later``) after ``Mark.wait()``.

The legacy stream also waits for, and is waited for by, all streams that were not made "non-blocking". The caller's may
be non-blocking (torch's are), so a session calls ``synchronize()`` when a call starts and when it ends. With
``NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM=1``, each thread has its own default stream: the above then holds inside a
thread, and the same call separates the caller's thread from that of the session.

Nothing of CUDA is imported before a GPU array appears.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..types import DeviceKind


def device_of(array: Any) -> DeviceKind:
    """Where an array lives."""
    return "cpu" if isinstance(array, np.ndarray) else "gpu"


def address(array: Any) -> int:
    """Where an array begins in its memory."""
    interface = array.__array_interface__ if isinstance(array, np.ndarray) else array.__cuda_array_interface__
    return interface["data"][0]


def begin_of(array: Any) -> int:
    """As ``address``, for a flat array that is not empty; on the host, if it is writable, quicker: no dict is made."""
    if isinstance(array, np.ndarray) and array.flags.writeable:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    return address(array)


def empty(size: int, dtype: Any, device: DeviceKind) -> Any:
    """A flat uninitialised array."""
    if device == "cpu":
        return np.empty(size, dtype)
    from numba import cuda

    return cuda.device_array(size, dtype)


def zeros(size: int, dtype: Any, device: DeviceKind) -> Any:
    """A flat array of zeros."""
    if device == "cpu":
        return np.zeros(size, dtype)
    from numba import cuda

    return cuda.to_device(np.zeros(size, dtype))


def pinned(size: int) -> np.ndarray:
    """Host bytes that a GPU copies from and to at full speed, while the host does something else."""
    from numba import cuda

    return cuda.pinned_array(size, np.uint8)


# --- which GPU --------------------------------------------------------------------------------------------------------


def simulated() -> bool:
    """Whether numba's simulator plays the GPU: its arrays are host memory, and there are no device pointers."""
    from numba.core import config

    return bool(config.ENABLE_CUDASIM)


def current_gpu() -> int:
    """The number of the GPU that this thread works on."""
    from numba import cuda

    return getattr(cuda.current_context().device, "id", 0)  # the simulator's only one has no number


def use_gpu(number: int) -> None:
    """Let this thread work on a GPU: a new thread begins with the first one, whatever the others use."""
    from numba import cuda

    cuda.select_device(number)


# --- copies and streams -----------------------------------------------------------------------------------------------


def stream() -> Any:
    """The stream of all launches and copies, as an object: copies that are given it return at once."""
    from numba import cuda

    return cuda.default_stream() if hasattr(cuda, "default_stream") else cuda.stream()  # the simulator has no default


def copy(target: Any, source: Any) -> None:
    """Copy a flat array onto another of the same size and type, between any two places; the host sees it done.

    Between two GPU arrays it is queued, as a kernel is.
    """
    if target.size == 0:
        return
    if device_of(target) == "gpu":
        target.copy_to_device(source)
    elif device_of(source) == "gpu":
        source.copy_to_host(target)
    else:
        target[...] = source


def join(target: Any, sources: Sequence[Any]) -> None:
    """Copy flat arrays side by side onto one of their type, all on one device."""
    if device_of(target) == "cpu":
        np.concatenate(sources, out=target)
        return
    start = 0
    for source in sources:
        copy(target[start : start + source.size], source)
        start += source.size


def part(source: Any, targets: Sequence[Any]) -> None:
    """Copy what lies side by side in a flat array onto flat arrays of its type, all on one device: undoes ``join``."""
    here, start = device_of(source) == "cpu", 0
    for target in targets:
        stop = start + target.size
        if here:
            target[...] = source[start:stop]
        else:
            copy(target, source[start:stop])
        start = stop


def copy_later(target: Any, source: Any) -> None:
    """As ``copy`` between page-locked host memory and a GPU, but only queued.

    The host memory must stay as it is until the copy is done: see ``drain`` and ``Mark``.
    """
    if target.size == 0:
        return
    if device_of(target) == "gpu":
        target.copy_to_device(source, stream=stream())
    else:
        source.copy_to_host(target, stream=stream())


def drain() -> None:
    """Wait until the GPU has done everything queued on ``stream()``; the caller's other streams go on."""
    stream().synchronize()


class Mark:
    """A place in the queue of ``stream()``; an event that is used again and again."""

    def __init__(self) -> None:
        from numba import cuda

        self._event = cuda.event()

    def set(self) -> None:
        """Set it behind all that is queued now."""
        self._event.record(stream())

    def wait(self) -> None:
        """Return when the GPU has passed it."""
        self._event.synchronize()


def synchronize() -> None:
    """Wait until the GPU has finished what this process queued, on any stream."""
    from numba import cuda

    cuda.synchronize()
