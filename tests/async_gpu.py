"""A simulated device that is asynchronous: what is queued runs when somebody waits for it, or at random.

It takes the place of the streams, events, copies and launches of numba's simulator, where all of them happen at once. A
stream runs its operations in order; nothing else orders them: several streams do not wait for each other, as streams
that are non-blocking. By default each operation runs at the last moment: a wait, an event or a stream that the library
forgets shows as data that are not there yet. With a seed, operations also run earlier, at random.

A stream that waits for an event lets the device go on that far before its own next operation. Streams of copies can
be eager instead of late: with ``eager``, copies in or out run as soon as they are queued, behind what they wait for.

Copies of page-locked host memory read and write it when they run. Those of other host memory behave as CUDA says: the
source of a copy to the device is read at once, and a copy from the device waits for the stream.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from gpu_arrays import GpuArray
from numba import cuda
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

from espresso_mpi.arrays import device
from espresso_mpi.compressors.kernels.cuda import gpu

Work = Callable[[], Any]


class Stream:
    """A queue of operations; ``begun`` and ``done`` count them."""

    def __init__(self, gpu: AsyncGpu) -> None:
        self.gpu, self.queue, self.done = gpu, [], 0

    def add(self, what: str, work: Work) -> None:
        with self.gpu.lock:
            self.gpu.log.append(what)
            self.queue.append(lambda: self._takes_its_time(work))
            if what == self.gpu.eager:
                self.run()
            self.gpu.sometimes_go_on()

    def run(self, until: int | None = None) -> None:
        """Do the first ``until`` of all that was ever queued; default: all."""
        with self.gpu.lock:
            while self.done < (len(self.queue) if until is None else until):
                work, self.queue[self.done] = self.queue[self.done], None
                self.done += 1
                before, self.gpu.working = self.gpu.working, True
                try:
                    work()
                finally:
                    self.gpu.working = before
                self._tell_the_time()

    def _tell_the_time(self) -> None:
        """Pass the events that follow and note the time, as a device does at once."""
        while self.done < len(self.queue) and self.queue[self.done] in self.gpu.readings:
            self.queue[self.done]()
            self.done += 1

    def _takes_its_time(self, work: Work) -> None:
        work()
        self.gpu.clock += self.gpu.lasts

    def synchronize(self) -> None:
        self.gpu.log.append("drain")
        self.run()


class Event:
    """A place in a stream. The first question whether the device has passed it is answered with no."""

    def __init__(self, gpu: AsyncGpu, timing: bool = False) -> None:
        self._gpu, self._asked, self._timing, self._clock = gpu, False, timing, 0.0
        self._stream, self._place = Stream(gpu), 0

    def record(self, given: Stream | int) -> None:
        stream = self._gpu.of_caller(given) if isinstance(given, int) else given
        if self._timing:
            self._gpu.readings.append(self._read_clock)
            stream.queue.append(self._read_clock)
        self._stream, self._place, self._asked = stream, len(stream.queue), False

    def _read_clock(self) -> None:
        self._clock = self._gpu.clock

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return 1e3 * (end._clock - self._clock)

    def query(self) -> bool:
        if self._asked:
            self._stream.run(self._place)
        self._asked = True
        return self._stream.done >= self._place

    def wait(self, stream: Stream) -> None:
        before, place = self._stream, self._place
        stream.add("hold", lambda: before.run(place))

    def synchronize(self) -> None:
        self._gpu.log.append("wait")
        self._stream.run(self._place)


class AsyncGpu:
    """The device. Install it before sessions are opened.

    Args:
        patch: pytest's monkeypatch.
        seed: of the moments at which operations run; None: as late as possible.
        eager: "in" or "out": what runs at once.

    Attributes:
        default: the legacy default stream.
        clock, lasts: seconds on the device's clock, and those of each operation.
        readings: the operations that note the time for an event.
        log: what was queued and waited for: "launch", "in", "out", "hold" (of a stream), and
            waits of the host: "wait" (for an event), "drain" (for a stream), "synchronize" (for the device).
    """

    def __init__(self, patch: Any, seed: int | None = None, eager: str = "") -> None:
        self.lock, self.log, self.working, self.eager = threading.RLock(), list[str](), False, eager
        self.clock, self.lasts = 0.0, 0.0
        self.readings = list[Work]()
        self._random = None if seed is None else random.Random(seed)
        self._locked = list[np.ndarray]()
        self._streams = [Stream(self)]
        self.default, self._callers = self._streams[0], dict[int, Stream]()
        self._to_host, self._to_device = FakeCUDAArray.copy_to_host, FakeCUDAArray.copy_to_device
        launch = gpu.Kernel.__call__
        patch.setattr(FakeCUDAArray, "copy_to_host", lambda *given, **named: self._out(*given, **named))
        patch.setattr(FakeCUDAArray, "copy_to_device", lambda *given, **named: self._in(*given, **named))
        patch.setattr(FakeCUDAArray, "__setitem__", lambda *given: self._assign(*given))
        patch.setattr(gpu.Kernel, "__call__", lambda *given: self._launched_on().add("launch", lambda: launch(*given)))
        patch.setattr(cuda, "default_stream", lambda: self.default, raising=False)
        patch.setattr(cuda, "synchronize", self._synchronize)
        patch.setattr(cuda, "stream", self._new_stream)
        patch.setattr(cuda, "event", lambda timing=True: Event(self, timing))
        for name in ("sent", "scratch"):  # the simulator swaps the module `cuda` under them while a kernel runs
            patch.setattr(gpu, name, self._alone(getattr(gpu, name)))
        patch.setattr(device, "pinned", self._pinned)
        patch.setattr(device, "_DEFAULT_MEMORY", {})  # of other streams
        patch.setattr(device, "caller_stream", lambda number: number)  # as on a GPU, where it is an address

    @property
    def done(self) -> int:
        return sum(stream.done for stream in self._streams)

    def run(self) -> None:
        """Do all that was ever queued."""
        for stream in list(self._streams):
            stream.run()

    def _synchronize(self) -> None:
        self.log.append("synchronize")
        self.run()

    def of_caller(self, number: int) -> Stream:
        """A stream of the program that uses the library; 1 is the legacy default stream."""
        if number == 1:
            return self.default
        if number not in self._callers:
            self._callers[number] = self._new_stream()
        return self._callers[number]

    def sometimes_go_on(self) -> None:
        """With a seed: run some operations of some stream."""
        while self._random is not None and not self.working and self._random.random() < 0.5:
            stream = self._random.choice(self._streams)
            stream.run(min(len(stream.queue), stream.done + 1 + self._random.randrange(3)))

    def _new_stream(self) -> Stream:
        self._streams.append(Stream(self))
        return self._streams[-1]

    def _alone(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def alone(*given: Any) -> Any:
            with self.lock:
                return function(*given)

        return alone

    def _launched_on(self) -> Stream:
        return device.launch_queue().stream

    def _pinned(self, size: int) -> np.ndarray:
        self._locked.append(np.zeros(size, np.uint8))
        return self._locked[-1]

    def _is_locked(self, array: np.ndarray) -> bool:
        return any(np.may_share_memory(array, memory) for memory in self._locked)

    def _queue_of(self, stream: Any) -> Stream:
        """The default stream does not wait for a session's: what is on it would come too early."""
        assert stream != 0 or device._HERE.own is None, "numba's default stream in a session"
        return self.default if stream == 0 else stream

    def _out(self, array: Any, target: Any = None, stream: Any = 0) -> Any:
        queue = self._queue_of(stream)
        if target is not None and self._is_locked(target):
            queue.add("out", lambda: self._to_host(array, target))
            return target
        queue.synchronize()
        return self._to_host(array, target)

    def _in(self, array: Any, source: Any, stream: Any = 0) -> None:
        queue = self._queue_of(stream)
        if isinstance(source, np.ndarray) and not self._is_locked(source):
            source = source.copy()
        queue.add("in", lambda: self._to_device(array, source))

    def _assign(self, array: Any, key: Any, value: Any) -> None:
        if not self.working:  # kernels assign as well
            self._queue_of(0).synchronize()  # numba waits for the GPU at every assignment by the host
        array._ary[key] = getattr(value, "_ary", value)


class Caller:
    """A program with a stream of its own, whose kernels write gradients and read results.

    Args:
        number: of the stream.
    """

    def __init__(self, gpu: AsyncGpu, number: int) -> None:
        self._gpu, self._number = gpu, number

    def gradient(self, values: np.ndarray) -> GpuArray:
        """An array that a kernel is still to write when this returns."""
        array = GpuArray(np.full_like(values, np.float32(1e6)))
        array.__cuda_array_interface__["stream"] = self._number
        self._gpu.of_caller(self._number).add("caller", lambda: np.copyto(array.host, values))
        return array
