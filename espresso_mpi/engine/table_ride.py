"""The fast path of compressed tensors: the payload that a rank shows first travels with the header of the round.

A call that was made before, as the only one of its rank, by a table of operations, runs up to the first barrier of the
node. The exchange of headers is that barrier. If the headers of all ranks announce the same call in the same way, the
table goes on behind it, so that the agreement costs nothing of its own. Else the residuals are as before, and the round
is an ordinary one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ..collectives.messages.agreement import gather_small
from ..collectives.messages.transport import Transport
from ..collectives.tables.running import Active

LARGEST = 1 << 18
"""Bytes of the tensors, up to which their residuals are copied for the case that the headers differ."""


class TableRide:
    """The payloads of the only call of this rank.

    Args:
        active: their table, at its begin.

    Attributes:
        met: as of ``fast_path.Ride``; always 0, for the headers tell.
        began: when the exchange of headers began; what came before was encoding.
    """

    def __init__(self, transport: Transport, active: Active) -> None:
        self._transport, self._active = transport, active
        self.met = self.began = 0.0

    def exchange(self, header: np.ndarray, ignored: int) -> Sequence[np.ndarray]:
        """Encode, show the payload and the header; returns the headers of all ranks."""
        self._active.show()
        self.began = time.perf_counter()
        try:
            return gather_small(self._transport, header, header.size)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """The headers differ: nothing has happened."""
        self._active.undo()

    def finish(self) -> None:
        """Run the rest of the table."""
        self._active.met()
        for _ in self._active.rest():
            pass
