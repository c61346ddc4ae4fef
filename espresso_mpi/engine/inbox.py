"""Calls that user threads have made and the engine has not declared yet."""

from __future__ import annotations

import itertools

from .calls import PendingCall
from .driver import PAUSE, Driver


class Inbox:
    """Calls in the order in which they were made. ``driver.changed`` is held while it changes."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._calls: list[PendingCall] = []

    def __len__(self) -> int:
        return len(self._calls)

    def append(self, call: PendingCall) -> None:
        """A call has been made."""
        self._calls.append(call)

    def clear(self) -> None:
        """Forget all calls."""
        self._calls = []

    def take(self) -> list[PendingCall]:
        """Remove and return the calls whose arrays are ready. A call waits for those before it."""
        if not self._calls:
            return []
        with self._driver.changed:
            calls = list(itertools.takewhile(self._is_ready, self._calls))
            self._calls = self._calls[len(calls) :]
        return calls

    def wait(self) -> None:
        """Wait for a moment for the arrays of the first call: there is nothing else to do."""
        arrival = self._calls[0].arrival
        if arrival is not None:
            arrival.wait(PAUSE)

    def nap(self) -> None:
        """Wait for a moment, or until a call is made."""
        here = len(self)
        self._driver.nap(lambda: len(self) > here)

    def _is_ready(self, call: PendingCall) -> bool:
        """Whether the GPU has passed what the caller had queued before the call."""
        if call.gpu is None:
            return True
        self._driver.enter_gpu(call.gpu)
        return call.arrival is None or call.arrival.passed()
