"""The fast path of compressed tensors: the payload that a rank shows first travels with the header of the round.

A call that was made before, as the only one of its rank, by a table of operations, runs up to the first barrier of the
node. The exchange of headers is that barrier. If the headers of all ranks announce the same call in the same way, the
table goes on behind it, so that the agreement costs nothing of its own. Else the residuals are as before, and the round
is an ordinary one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..collectives.executor import Program
from ..collectives.job import Job
from ..collectives.messages.agreement import gather_small
from ..collectives.messages.transport import Transport
from ..collectives.tables.running import Active
from ..tracing.recording import Recorder
from .batches import Bucket
from .calls import PendingCall
from .fast_path import window_of

_LARGEST = 1 << 18
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


class TableRides:
    """Which calls may show their payload with the header.

    Args:
        transport: what they use.
        recorder: gets their times.
    """

    def __init__(self, transport: Transport, recorder: Recorder) -> None:
        self._transport, self._recorder, self._window = transport, recorder, window_of(transport)
        self._buckets: dict[int, Bucket] = {}

    def learn(self, call: PendingCall, bucket: Bucket) -> None:
        """Let a call take the fast path from now on, if its only bucket is one compressed tensor of a small size."""
        small = bucket.dtype == "float32" and 4 * bucket.size <= _LARGEST
        if call.number is not None and bucket.shares is not None and small and self._window is not None:
            self._buckets[call.number] = bucket

    def bucket_of(self, number: int) -> Bucket | None:
        """The tensor of a call that may take the fast path."""
        return self._buckets.get(number)

    def forget(self) -> None:
        """The numbers of calls have become invalid."""
        self._buckets.clear()

    def ride(self, program: Program, x: Any, job: Job) -> TableRide | None:
        """The payload of a tensor; None where a resharded residual waits for it, or no table can stop in time."""
        if getattr(job.store, "any_pending", False):
            return None
        active = program.begun(x, job, self._recorder)
        return None if active is None else TableRide(self._transport, active)
