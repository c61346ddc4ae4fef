"""Calls on a GPU of which all is queued: they end when the GPU has passed it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..arrays import device
from .calls import PendingCall


class GpuEnds:
    """The calls that are to end, in their order. Only the thread that makes progress steps uses it.

    Args:
        end: ends a call.
        tally: counts values that were clipped to the range of their type.
    """

    def __init__(self, end: Callable[[PendingCall], None], tally: Counter[str]) -> None:
        self._end, self._tally = end, tally
        self._calls: list[tuple[PendingCall, device.Mark, device.OwnStream]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: PendingCall) -> bool:
        """Let a call end later; False if this thread is not on a session's stream."""
        own = device.own_stream()
        if own is not None:
            self._calls.append((call, own.ending(), own))
        return own is not None

    def settle(self) -> None:
        """End the calls that the GPU has finished."""
        while self._calls and self._calls[0][1].passed():
            call, _, own = self._calls.pop(0)
            self._tally["saturated"] += own.new_cuts()
            self._end(call)

    def wait(self, limit: float) -> None:
        """End calls; return after ``limit`` seconds, or when the first has ended."""
        here = len(self)

        def ended() -> bool:
            self.settle()
            return len(self) < here

        device.poll(ended, limit)

    def clear(self) -> None:
        """Forget the calls: they have failed."""
        self._calls = []
