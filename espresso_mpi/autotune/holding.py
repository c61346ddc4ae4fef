"""Holds pushes back while steps are recorded, so that the recorded backward pass is computing alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import EspressoError

if TYPE_CHECKING:
    from ..engine.calls import PendingCall
    from ..engine.engine import Engine


class Held:
    """Hands pushes to the engine; while ``active()``, only when one is waited for or asked for.

    Traffic that travels beside the backward pass slows it down, most where ranks share cores, and by another amount
    with every plan. A workload is to say when gradients are there without that, and some plans are quicker without it.
    """

    def __init__(self, engine: Engine, active: Callable[[], bool]) -> None:
        self._engine, self._active = engine, active
        self._lock = threading.Lock()
        self._units: deque[PendingCall] = deque()

    def submit(self, unit: PendingCall) -> None:
        """Take a push in.

        Raises:
            EspressoError: the engine takes no calls any more.
        """
        if not self._active():
            if self._units:
                self.release()
            self._engine.submit(unit, background=True)
            return
        self._engine.require_usable()
        with self._lock:
            self._units.append(unit)

    def release(self) -> None:
        """Let the engine begin with all pushes so far; those that it does not take have failed."""
        if not self._units:
            return
        with self._lock:
            while self._units:
                unit = self._units.popleft()
                try:
                    self._engine.submit(unit, background=True)
                except EspressoError as error:
                    unit.error, unit.finished = error, True
