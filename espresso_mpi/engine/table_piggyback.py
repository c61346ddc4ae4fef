"""The fast path of compressed tensors: the payload that a rank shows first is piggybacked on the header of the round.

A call that was made before, as the only one of its rank, by a table of operations, runs up to the first barrier of the
node. The exchange of headers is that barrier. If the headers of all ranks announce the same call in the same way, the
table goes on behind it, so that the agreement costs nothing of its own. Else the residuals are as before, and the round
is an ordinary one. All of this is one compiled call, which is prepared once (``OneCall``).

Where each rank is alone on its node, headers and payloads travel in the same messages, if all ranks get all payloads
and ``piggyback_limit`` allows it (``NodeCall``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..collectives import ranges
from ..collectives.executor import Program
from ..collectives.job import Job
from ..collectives.messages.agreement import floats
from ..collectives.messages.transport import Transport
from ..collectives.tables import interpreter, piggyback
from ..collectives.tables.expected_call import Declined, ExpectedCall
from ..collectives.tables.one_call import RepeatedTable
from ..state.store import SyncState
from ..tracing.recording import Recorder
from ..types import Collective
from . import piggyback_limit
from .batches import Batch, Bucket
from .calls import PendingCall
from .fast_path import room, window_of

_LARGEST = 1 << 18
"""Bytes of the tensors, up to which their residuals are copied for the case that the headers differ."""

_ROOM = 64 << 20
"""Bytes that prepared calls keep in all: each has buffers as large as its payloads and residuals."""


class TablePiggyback:
    """The payloads of the only call of this rank.

    Args:
        prepared: what synchronises the tensor.
        x, job: the tensor, and its step.
        search: look for values that cannot be summed first.

    Attributes:
        met: whether all ranks have shown the same header. The tensor holds the mean then, and the times are recorded.
        odd: whether there are such values. Then nothing was done.
        expected: whether the call was expected.
    """

    def __init__(self, prepared: RepeatedTable, x: Any, job: Job, search: bool = False) -> None:
        self._prepared, self._x, self._job, self._search = prepared, x, job, search
        self.expected = isinstance(prepared, ExpectedCall)
        self.met = self.odd = False

    def exchange(self, header: np.ndarray, ignored: int) -> Sequence[np.ndarray]:
        """Synchronise the tensor if all ranks show the same header; else returns the headers of all ranks."""
        why = self._prepared.run(self._x, self._job, header, ignored, self._search)
        self.met, self.odd = why == interpreter.ENDED, why == piggyback.ODD
        if self.met:
            self._prepared.record()
        return self._prepared.headers if why == piggyback.DIFFERENT else ()

    def undo(self) -> None:
        """The headers differ: nothing has happened."""
        self._prepared.undo()


@dataclass(frozen=True)
class _Prepared:
    """A call that may take the fast path, and the state that it was prepared for."""

    call: RepeatedTable
    program: Program
    state: SyncState
    version: tuple[int, int, int]

    def fits(self, program: Program, state: SyncState) -> bool:
        """Whether nothing of it has changed."""
        return program is self.program and state is self.state and state.version == self.version


class TablePiggybacks:
    """Which calls may show their payload with the header.

    Args:
        transport: what they use.
        recorder: gets their times.
    """

    def __init__(self, transport: Transport, recorder: Recorder) -> None:
        self._transport, self._recorder, self._window = transport, recorder, window_of(transport)
        self._least = ranges.limits("float32", True, transport.topology).large
        self._buckets: dict[int, Bucket] = {}
        self._settled: set[int] = set()
        self._batches: dict[int, Batch] = {}  # alive, so no other gets their ids
        self._prepared: dict[int, _Prepared] = {}
        self._expected: dict[int, Declined | None] = {}  # None: some rank cannot

    def remember(self, call: PendingCall, bucket: Bucket, program: Callable[[], Program]) -> None:
        """Let a call take the fast path from now on, if its only bucket is one compressed tensor of a small size."""
        small = bucket.dtype == "float32" and 4 * bucket.size <= _LARGEST
        alone = bucket.shares is not None and not bucket.strategy.route.sums_payloads
        if call.number is None or not (alone and small):
            return
        if (
            self._window is not None
            or self._between_nodes(bucket)
            or self._may_be_expected(call.number, bucket, program)
        ):
            self._buckets[call.number] = bucket
            if bucket.compressor is not None and bucket.compressor.at(None) is bucket.compressor:
                self._settled.add(call.number)
            if call.batch is not None and not call.batch.bounded and not call.batch.exact:
                self._batches[id(call.batch)] = call.batch

    def _between_nodes(self, bucket: Bucket) -> bool:
        """Whether ranks that are alone on their nodes may show the payload of a tensor. Collective."""
        transport = self._transport
        if bucket.compressor is None or not 1 < len(transport.topology.nodes) == transport.topology.size:
            return False
        if [step.op for step in bucket.strategy.route.steps if isinstance(step, Collective)] != ["allgather"]:
            return False
        nbytes, ways = bucket.compressor.at(None).nbytes(bucket.size), piggyback_limit.ways_of_payloads(transport)
        return piggyback_limit.fits(nbytes, transport, bucket.strategy.route, ways)

    def _may_be_expected(self, number: int, bucket: Bucket, program: Callable[[], Program]) -> bool:
        """Whether the ranks can expect a call with a tensor. Collective, once for each call."""
        if bucket.compressor is None or bucket.compressor.at(None) is not bucket.compressor:
            return False  # its messages have other sizes in other steps
        if number not in self._expected:
            found = program().expected()
            everywhere = floats(self._transport, found is not None).min() > 0
            self._expected[number] = Declined(found, self._transport) if found is not None and everywhere else None
        return self._expected[number] is not None

    def expects(self, number: int) -> bool:
        """Whether the ranks make a call in the way of expected ones, if they expect it."""
        return self._expected.get(number) is not None

    def decline(self, number: int, header_size: int) -> None:
        """Take part in a call that the ranks expect, and that this one does not make so. Collective."""
        declined = self._expected[number]
        assert declined is not None
        declined.run(header_size)

    def expect_no_more(self, number: int) -> None:
        """All ranks have made a call that was expected, but not all of them in that way."""
        self._expected[number] = None
        self._buckets.pop(number, None)

    def bucket_of(self, number: int) -> Bucket | None:
        """The tensor of a call that may take the fast path."""
        return self._buckets.get(number)

    def program_of(self, number: int) -> Program | None:
        """The program of a prepared call, if it is the same in all steps: no parameter has a schedule."""
        known = self._prepared.get(number) if number in self._settled else None
        return known.program if known is not None else None

    def knows(self, batch: Batch) -> bool:
        """Whether a call with these tensors is remembered, and nothing but the size of its values is to be searched."""
        return id(batch) in self._batches

    def forget(self) -> None:
        """The numbers of calls have become invalid."""
        for known in (self._buckets, self._batches, self._settled, self._expected):
            known.clear()
        self._prepared.clear()

    def piggyback(
        self, number: int, program: Program, x: Any, job: Job, state: SyncState, search: bool, expected: bool
    ) -> TablePiggyback | None:
        """The payload of a tensor; None where a resharded residual waits for it, or no table can stop in time.

        Args:
            expected: whether the ranks expect this call.
        """
        declined = self._expected.get(number)
        if declined is not None and not expected:
            return None
        if state.store.any_pending or not isinstance(x, np.ndarray) or not x.flags.carray:
            return None
        known = self._prepared.get(number)
        if known is None or not known.fits(program, state):
            call = program.one_call(
                x, job, self._recorder, self._least, partial(room, transport=self._transport), declined
            )
            if call is None:
                return None
            self._prepared.pop(number, None)
            if sum(one.call.nbytes for one in self._prepared.values()) + call.nbytes > _ROOM:
                self._prepared.clear()
            known = self._prepared[number] = _Prepared(call, program, state, state.version)
        return TablePiggyback(known.call, x, job, search)
