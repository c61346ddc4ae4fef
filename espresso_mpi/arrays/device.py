"""Host and GPU memory behind one small set of functions.

An array is a numpy array (host) or a numba device array (GPU).

**Streams.** Kernels and copies go to ``stream()``, a stream of the current thread. The threads that make a session's
progress steps enter a stream of that session (``OwnStream``): it is non-blocking, so its work neither waits for the
caller's kernels nor delays them. Elsewhere ``stream()`` is numba's default stream, the legacy one of CUDA. Work on a
stream runs in order, so kernels and copies need no further synchronisation. Only the host must synchronise: it may
read what a GPU wrote after ``drain()`` or when a ``Mark`` behind it is passed, and pass memory to MPI then. It may
write what a GPU reads (a host buffer of ``copy_later``) when a mark behind the copy is passed.

Messages are copied out and in on two more streams (``copying``), beside the kernels. ``Mark.hold`` orders streams: one
waits for a place in another one, and the host for neither.

The caller's kernels run on other streams. A call therefore records events there when it is made (``Arrival``), and the
session begins with its arrays when the GPU has passed these. A call ends when the GPU has passed a ``Mark`` behind its
last operation: afterwards, any stream can read the results.

Nothing of CUDA is imported before a GPU array appears.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..types import DeviceKind
from . import driver

T = TypeVar("T")


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

    return cuda.to_device(np.zeros(size, dtype), stream=stream())


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
    """Let this thread work on a GPU; a new thread begins with the first one. ``leaving_stream`` undoes it."""
    from numba import cuda

    active = cuda.gpus.current  # None: no GPU yet. To ask for the context would make one on the first GPU
    if active is not None and active.id == number:
        return  # CUDA keeps a stack of contexts, and each selection adds to it
    cuda.select_device(number)
    if active is not None:
        _HERE.selected += 1


def _go_back(selected: int) -> None:
    """Undo all selections of ``use_gpu`` in this thread but the first ``selected``."""
    from numba import cuda

    while _HERE.selected > selected:
        cuda.current_context().pop()
        _HERE.selected -= 1


# --- streams ----------------------------------------------------------------------------------------------------------


class Queue(NamedTuple):
    """A stream: as numba's object, and its address as the driver takes it."""

    stream: Any
    address: int | None


class OwnStream:
    """A non-blocking stream of a session on the current GPU, with the scratch memory of the kernels on it.

    It has the highest priority: its kernels are short, and other ranks wait for them. Two more streams copy messages
    out and in meanwhile. With ``queue``, all goes to this stream of the caller's.
    """

    def __init__(self, queue: Queue | None = None) -> None:
        made = [queue or new_queue() for _ in range(3)]
        self.kernels, self.out, self.into = made
        self.memory: dict[Any, Any] = {}
        self._cuts: Any = None
        self._read, self._known = np.zeros(1, np.int64), 0

    @property
    def cuts(self) -> Any:
        """One int64 of the GPU: how many values kernels on this stream have cut to the range of their type."""
        if self._cuts is None:
            self._cuts, self._read = zeros(1, np.int64, "gpu"), pinned(8).view(np.int64)
        return self._cuts

    def ending(self) -> Mark:
        """A place behind all that is queued now; once it is passed, ``new_cuts`` knows of what was cut before it."""
        if self._cuts is not None:
            copy_later(self._read, self._cuts)
        mark = Mark()
        mark.set()
        return mark

    def new_cuts(self) -> int:
        """How many values were cut since the last time."""
        before, self._known = self._known, int(self._read[0])
        return self._known - before


class _Here(threading.local):
    """The stream that this thread has entered, and how many GPUs it has selected on top of the caller's."""

    own: OwnStream | None = None
    selected = 0


_HERE = _Here()
_DEFAULT_MEMORY: dict[Any, Any] = {}


class leaving_stream:  # noqa: N801 - a context manager, as a class because that is quicker to enter
    """Leave, in the end, the stream that the with-block enters, and the GPU that it selects."""

    def __enter__(self) -> None:
        self._before, self._selected = _HERE.own, _HERE.selected

    def __exit__(self, *error: object) -> None:
        _HERE.own = self._before
        if _HERE.selected != self._selected:
            _go_back(self._selected)


def enter_stream(own: OwnStream) -> None:
    """Let all launches and copies of this thread go to a stream."""
    _HERE.own = own


def own_stream() -> OwnStream | None:
    """The stream that this thread has entered."""
    return _HERE.own


def stream() -> Any:
    """The stream of this thread's launches and copies, as an object: copies that are given it return at once."""
    if _HERE.own is not None:
        return _HERE.own.kernels.stream
    from numba import cuda

    return cuda.default_stream() if hasattr(cuda, "default_stream") else cuda.stream()  # the simulator has no default


def launch(kernel: ctypes.c_void_p, grid: int, threads: int, arguments: Any) -> None:
    """Queue a kernel of the driver's on ``stream()``, of ``grid`` blocks; ``arguments``: as its last parameter."""
    on = ctypes.c_void_p(launch_queue().address)
    driver.call("cuLaunchKernel", kernel, grid, 1, 1, threads, 1, 1, 0, on, None, arguments)


def launch_queue() -> Queue:
    """Where kernels are queued: ``stream()``."""
    return _here() if _HERE.own is None else _HERE.own.kernels


def copying() -> tuple[Queue, Queue]:
    """The streams on which messages are copied out and in: two of the session, or else twice that of the kernels."""
    own = _HERE.own
    return (own.out, own.into) if own is not None else (_here(), _here())


def _here() -> Queue:
    """``stream()``."""
    if _HERE.own is not None:
        return Queue(stream(), _HERE.own.kernels.address)
    return Queue(stream(), _PER_THREAD if os.environ.get(_BY_THREAD, "0") not in ("", "0") else 0)


def per_stream(key: Any, make: Callable[[], T]) -> T:
    """What ``make`` made when this was first called for a key and ``stream()``: memory that no other stream uses.

    The default streams of several GPUs share their memory, so the key tells the GPU.
    """
    memory: dict[Any, T] = _DEFAULT_MEMORY if _HERE.own is None else _HERE.own.memory
    found = memory.get(key)
    if found is None:
        found = memory[key] = make()
    return found


def new_queue() -> Queue:
    """A stream that does not synchronise with the legacy default stream; numba makes none."""
    from numba import cuda

    if simulated():
        return Queue(cuda.stream(), 0)
    handle, least, greatest = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    driver.call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
    driver.call("cuStreamCreateWithPriority", ctypes.byref(handle), _NON_BLOCKING, greatest)
    found = cuda.external_stream(handle.value)
    # Not at the end of the process: the context ends with it.
    weakref.finalize(found, driver.destroy, "cuStreamDestroy_v2", handle).atexit = False
    return Queue(found, handle.value)


_BY_THREAD = "NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM"

_POLL_S = 20e-6
"""Between two looks at events: a fraction of what the shortest exchange takes, and the processor is free meanwhile."""

_EAGER_S = 100e-6
"""For so long, another thread may run between two looks, but the processor is not given up: to sleep takes 70 µs."""

_NON_BLOCKING = 1
_LEGACY, _PER_THREAD = 1, 2
"""What stands for the two default streams among the addresses of streams."""


def stream_of(owner: Any) -> int:
    """The stream on which a GPU array of another library was last used, as its address.

    torch: the current stream. Others: what the CUDA array interface says, else the default stream. Streams that are not
    non-blocking, such as numba's own, are waited for with the legacy default stream.
    """
    if any(cls.__module__.split(".")[0] == "torch" for cls in type(owner).__mro__):
        return int(sys.modules["torch"].cuda.current_stream(owner.device).cuda_stream) or _LEGACY
    said = owner.__cuda_array_interface__.get("stream")
    if said:
        return int(said)
    by_thread = (_BY_THREAD, "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM")
    return _PER_THREAD if any(os.environ.get(name, "0") not in ("", "0") for name in by_thread) else _LEGACY


def caller_stream(number: int) -> Any:
    """A stream of the caller's as events take it, given what ``stream_of`` returned."""
    if simulated():
        from numba import cuda

        return cuda.stream()
    return number


class Arrival:
    """The moment at which a GPU has passed all that is queued now on some streams of the caller's."""

    def __init__(self, streams: Iterable[int]) -> None:
        self._events = events_behind(streams)

    def passed(self) -> bool:
        """Whether it has."""
        self._events = [one for one in self._events if not one.query()]
        return not self._events


def poll(passed: Callable[[], bool], limit: float) -> None:
    """Return when the GPU has passed something, or after ``limit`` seconds; other threads run meanwhile."""
    begin = time.perf_counter()
    while not passed() and (gone := time.perf_counter() - begin) < limit:
        time.sleep(_POLL_S if gone > _EAGER_S else 0)


def event(timing: bool = False) -> Any:
    """An event of the current GPU, for streams as ``place`` gives them; ``timing``: it notes when it is passed."""
    if not simulated():
        return driver.DriverEvent(timing)
    from numba import cuda

    return cuda.event(timing=timing)


def events_behind(streams: Iterable[int], timing: bool = False) -> list[Any]:
    """An event behind all that is queued now on each of some streams of the caller's."""
    found = {number: event(timing) for number in set(streams)}
    for number, one in found.items():
        one.record(caller_stream(number))
    return list(found.values())


def place(queue: Queue | None) -> Any:
    """A stream as events take it; None: ``stream()``."""
    if simulated():
        return stream() if queue is None else queue.stream
    return (launch_queue() if queue is None else queue).address


# --- copies -----------------------------------------------------------------------------------------------------------


def copy(target: Any, source: Any) -> None:
    """Copy a flat array onto another of the same size and type, between any two places; the host sees it done.

    Between two GPU arrays it is queued, as a kernel is.
    """
    if target.size == 0:
        return
    places = {device_of(target), device_of(source)}
    if places == {"cpu"}:
        target[...] = source
        return
    copy_later(target, source)
    if "cpu" in places:
        drain()


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


def to_host(array: Any) -> np.ndarray:
    """A copy of a flat array in host memory."""
    found = np.empty(array.size, array.dtype)
    copy(found, array)
    return found


def copy_later(target: Any, source: Any, queue: Queue | None = None) -> None:
    """As ``copy`` to or from a GPU, but only queued: on ``stream()``, or on another stream.

    Page-locked host memory must stay as it is until the copy is done: see ``drain`` and ``Mark``.
    """
    if target.size == 0:
        return
    if (target.size, target.dtype) != (source.size, source.dtype):
        raise ValueError(f"copy of {source.size} {source.dtype} onto {target.size} {target.dtype}")
    on = queue or _here()
    if not simulated():
        places = ctypes.c_uint64(_pointer(target)), ctypes.c_uint64(_pointer(source))
        driver.call("cuMemcpyAsync", *places, ctypes.c_size_t(target.nbytes), ctypes.c_void_p(on.address))
    elif device_of(target) == "gpu":
        target.copy_to_device(source, stream=on.stream)
    else:
        source.copy_to_host(target, stream=on.stream)


def _pointer(array: Any) -> int:
    """As ``address``, quicker on a GPU: no dict is made."""
    return address(array) if isinstance(array, np.ndarray) else array.device_ctypes_pointer.value or 0


def drain() -> None:
    """Wait until the GPU has done everything queued on ``stream()``; other streams go on."""
    if simulated():
        stream().synchronize()
    else:
        driver.call("cuStreamSynchronize", ctypes.c_void_p(_here().address))


class Mark:
    """A place in a stream; an event that is used again and again."""

    def __init__(self) -> None:
        self._event = event()

    def set(self, queue: Queue | None = None) -> None:
        """Set it behind all that is queued now on ``stream()``, or on another stream."""
        self._event.record(place(queue))

    def hold(self, queue: Queue | None = None) -> None:
        """Let what is queued from now on, on ``stream()`` or on another stream, wait until the GPU has passed it."""
        self._event.wait(place(queue))

    def passed(self) -> bool:
        """Whether the GPU has passed it; does not wait."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Return when the GPU has passed it."""
        self._event.synchronize()


def synchronize() -> None:
    """Wait until the GPU has finished what this process queued, on any stream."""
    from numba import cuda

    cuda.synchronize()
