"""Synthetic load: computes as a backward pass does, so that what is measured competes for cores and caches."""

from __future__ import annotations

import time

import numpy as np

from ..collectives.messages.agreement import floats
from ..collectives.messages.transport import Transport

_SIZE, _PIECE = 1 << 20, 1 << 14
"""Elements of the array, more than a core's own cache holds, and elements of a piece."""

_UNITS = 512
"""Pieces by which the rate is measured."""


class SyntheticLoad:
    """Computing in the place of a backward pass. Collective.

    The rate is measured on all ranks at once, because ranks that share cores compete for them. That of the
    slowest rank counts.
    """

    def __init__(self, transport: Transport) -> None:
        self._x, self._at, rates = np.ones(_SIZE, np.float32), 0, []
        for _ in range(5):
            floats(transport, 0.0)  # ranks begin together
            start = time.perf_counter()
            self._pieces(_UNITS)
            rates.append(_UNITS / (time.perf_counter() - start))
        self._rate = float(floats(transport, float(np.median(rates))).min())

    def run(self, seconds: float) -> None:
        """Compute for about so long."""
        self._pieces(round(seconds * self._rate))

    def _pieces(self, count: int) -> None:
        for _ in range(count):
            piece = self._x[self._at : self._at + _PIECE]
            np.multiply(piece, 1.0, out=piece)
            self._at = (self._at + _PIECE) % _SIZE
