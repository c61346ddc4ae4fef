"""Holds pushes back while steps are recorded: what the recorded backward pass takes is computing alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine, Unit


class Held:
    """Hands pushes to the engine; while ``active()``, only when one is waited for or asked for.

    Traffic that travels beside the backward pass slows it down, most where ranks share cores, and by another amount
    with every plan. A trace is to say when gradients are there without that.
    """

    def __init__(self, engine: Engine, active: Callable[[], bool]) -> None:
        self._engine, self._active = engine, active
        self._units: deque[Unit] = deque()

    def submit(self, unit: Unit) -> None:
        """Take a push in."""
        self._units.append(unit)
        if not self._active():
            self.release()

    def release(self) -> None:
        """Let the engine begin with all pushes so far."""
        while self._units:
            self._engine.submit(self._units.popleft(), background=True)
