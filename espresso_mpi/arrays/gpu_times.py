"""How long a GPU takes, and when it has done something, by events that note the time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from . import device


class Stopwatch:
    """Measures the GPU's time between two places of ``stream()``, by a pair of events, however long the host takes."""

    def __init__(self) -> None:
        self._begin, self._end = device.event(timing=True), device.event(timing=True)

    def start(self) -> None:
        """Begin behind all that is queued now."""
        self._begin.record(device.place(None))

    def stop(self) -> None:
        """End behind all that is queued now."""
        self._end.record(device.place(None))

    def seconds(self) -> float:
        """Seconds between them; waits until the GPU has passed the end."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3


class Moment:
    """When a GPU passes all that is queued now on some streams of the caller's, by its own clock."""

    def __init__(self, streams: Iterable[int]) -> None:
        self._reference = _reference()
        self._ends = device.events_behind(streams, timing=True)

    def seconds(self) -> float:
        """It, on the host's ``time.perf_counter``, mostly to 50 µs; waits until the GPU has passed all."""
        for event in self._ends:
            event.synchronize()
        return max(self._reference.seconds(event) for event in self._ends)


_FRESH_S = 10.0
"""For so long, one reference serves: later, milliseconds in 24 bits are too coarse, and the two clocks may differ."""

_UNCERTAIN_S, _TRIES = 50e-6, 4
"""The uncertainty of a reference that is good enough, and how many more are tried if it is larger."""


class _Reference:
    """An event on an idle stream, of which the host sees when the GPU passes it: it relates their clocks.

    Attributes:
        at: when it passed, by the host's clock; uncertainty: seconds within which it passed.
    """

    def __init__(self) -> None:
        self._event = device.event(timing=True)
        queue = device.per_stream(("idle", device.current_gpu()), device.new_queue)
        begin = time.perf_counter()
        self._event.record(device.place(queue))
        while not self._event.query():
            pass
        end = time.perf_counter()
        self.at, self.uncertainty = (begin + end) / 2, end - begin

    def seconds(self, event: Any) -> float:
        """When the GPU has passed another event, on the host's clock."""
        return self.at + float(self._event.elapsed_time(event)) / 1e3


def _reference() -> _Reference:
    """That of the current GPU."""
    key = ("reference", device.current_gpu())
    held = device.per_stream(key, lambda: [_best()])
    if time.perf_counter() - held[0].at > _FRESH_S:
        held[0] = _best()
    return held[0]


def _best() -> _Reference:
    """The least uncertain of some references: another thread of Python may run for milliseconds meanwhile."""
    found = _Reference()
    for _ in range(_TRIES):
        if found.uncertainty <= _UNCERTAIN_S:
            break
        found = min(found, _Reference(), key=lambda one: one.uncertainty)
    return found
