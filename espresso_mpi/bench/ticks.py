"""A progress bar that moves by shares of the whole, not by steps."""

from __future__ import annotations

from typing import Any

STEPS = 100
"""Of the progress bar."""


class Ticks:
    """Moves a bar of ``STEPS`` to a share."""

    def __init__(self, advance: Any) -> None:
        self._advance, self._done = advance, 0

    def __call__(self, share: float) -> None:
        while self._done < round(share * STEPS):
            self._done += 1
            self._advance()
