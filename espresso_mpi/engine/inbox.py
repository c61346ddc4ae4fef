"""Calls that user threads have made and the engine has not declared yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..arrays import device
from .calls import PendingCall
from .driver import PAUSE, Driver


class Inbox:
    """Calls in the order in which they were made. ``driver.changed`` is held while it changes.

    Args:
        begin: queues the search of a call's tensors on a GPU, once they are there.
    """

    def __init__(self, driver: Driver, begin: Callable[[PendingCall], None]) -> None:
        self._driver, self._begin = driver, begin
        self._calls: list[PendingCall] = []
        self._begun = 0

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[PendingCall]:
        return iter(self._calls)

    def append(self, call: PendingCall) -> None:
        """A call has been made."""
        self._calls.append(call)

    def put_back(self, calls: list[PendingCall]) -> None:
        """Calls that were taken come again, before the others; those that are renewed are searched again."""
        for call in self._calls[: self._begun]:
            while call.search is not None and not call.search.passed():  # what it writes to is freed with it
                device.poll(call.search.passed, PAUSE)
        self._calls, self._begun = [*calls, *self._calls], 0

    def clear(self) -> None:
        """Forget all calls."""
        self._calls, self._begun = [], 0

    def take(self) -> list[PendingCall]:
        """Remove and return the calls whose arrays are ready and were searched. A call waits for those before it."""
        if not self._calls:
            return []
        ready = self._ready(self._calls[:])  # without the lock: kernels may have to be compiled
        with self._driver.changed:
            self._calls, self._begun = self._calls[len(ready) :], self._begun - len(ready)
        return ready

    def wait(self) -> None:
        """Wait for a moment until the first call can be taken: there is nothing else to do."""
        if self._calls[0].gpu is not None:
            device.poll(lambda: bool(self._ready(self._calls[:1])), PAUSE)

    def nap(self) -> None:
        """Wait for a moment, or until a call is made."""
        here = len(self)
        self._driver.nap(lambda: len(self) > here)

    def _ready(self, calls: list[PendingCall]) -> list[PendingCall]:
        """Those of the first calls that can be taken; the searches of all whose arrays are there have begun."""
        for call in calls[self._begun :]:
            if call.gpu is not None:
                if not self._is_there(call, call.gpu):
                    break
                if call.search is None:
                    self._begin(call)
            self._begun += 1
        for number, call in enumerate(calls[: self._begun]):
            if call.search is not None and not call.search.passed():
                return calls[:number]
        return calls[: self._begun]

    def _is_there(self, call: PendingCall, gpu: int) -> bool:
        """Whether the GPU has passed what the caller had queued before the call."""
        self._driver.enter_gpu(gpu)
        return call.arrival is None or call.arrival.passed()
