"""The fast path of compressed tensors: the payload that a rank shows first is piggybacked on the header of the round.

A call that was made before, as the only one of its rank, by a table of operations, runs up to the first barrier of the
node. The exchange of headers is that barrier. If the headers of all ranks announce the same call in the same way, the
table goes on behind it, so that the agreement costs nothing of its own. Else the residuals are as before, and the round
is an ordinary one. All of this is one compiled call, which is prepared once (``OneCall``).

Where each rank is alone on its node, headers and payloads travel in the same messages, if all ranks get all payloads
and ``piggyback_limit`` allows it (``NodeCall``). On other routes between nodes, headers travel beside the first
messages of a call that all ranks expect (``ExpectedCall``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..collectives import ranges
from ..collectives.bucket_program import BucketProgram
from ..collectives.executor import Program
from ..collectives.job import Job
from ..collectives.messages.agreement import allgather_json
from ..collectives.messages.transport import Transport
from ..collectives.tables import interpreter, piggyback
from ..collectives.tables.expected import fit
from ..collectives.tables.expected_call import ExpectedCall, FirstMessages
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

_EXPECTED = 1024
"""Calls that ranks can expect: each keeps two tables."""

_TRIED = 3
"""How often ranks expect a call that not all of them can make so, for example because one has a strided array."""

_ROOM = 64 << 20
"""Bytes that prepared calls keep in all: each has buffers as large as its payloads and residuals."""


class TablePiggyback:
    """The payloads of the only call of this rank.

    Args:
        transport, prepared: what synchronises the tensors.
        arrays, jobs: the tensors, and their steps.
        search: look for values that cannot be summed first.

    Attributes:
        met: whether all ranks have shown the same header. The tensors hold the means then, and the times are recorded.
        odd: whether there are such values. Then nothing was done.
        expected: whether the call was expected.
        unsearched: False: it looks for such values before it shows anything.
    """

    unsearched = False

    def __init__(
        self, transport: Transport, prepared: RepeatedTable, arrays: Sequence[Any], jobs: Sequence[Job],
        search: bool = False,
    ) -> None:  # fmt: skip
        self._transport, self._prepared, self._arrays, self._jobs = transport, prepared, arrays, jobs
        self._search = search
        self.expected = isinstance(prepared, ExpectedCall)
        self.met = self.odd = False

    def exchange(self, header: np.ndarray, ignored: int) -> Sequence[np.ndarray]:
        """Synchronise the tensors if all ranks show the same header; else returns the headers of all ranks."""
        try:
            why = self._prepared.run(self._arrays, self._jobs, header, ignored, self._search)
        except BaseException:
            self._transport.outlive(self._arrays)  # messages may still be written to them
            raise
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
    program: Program | BucketProgram
    state: SyncState
    version: tuple[int, int, int]

    def fits(self, program: Program | BucketProgram, state: SyncState) -> bool:
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
        self._buckets: dict[int, tuple[Bucket, ...]] = {}
        self._settled: set[int] = set()
        self._batches: dict[int, tuple[int, Batch]] = {}  # by id, with their numbers; alive, so no other gets their ids
        self._prepared: dict[int, _Prepared] = {}
        self._expected: dict[int, FirstMessages | None] = {}  # None: some rank cannot
        self._failures: Counter[int] = Counter()

    def remember(
        self, call: PendingCall, together: Sequence[Bucket], program: Callable[[], Program | BucketProgram]
    ) -> None:
        """Let a call take the fast path from now on, if its tensors are compressed, share messages, and are small.

        Args:
            together: the buckets of its tensors that have started.
            program: makes what runs them.
        """
        number, batch = call.number, call.batch
        if number is None or batch is None or (number in self._buckets and id(batch) in self._batches):
            return
        if not _are_small(together):
            return
        if [item.index for bucket in together for item in bucket.members] != [item.index for item in batch.items]:
            return  # some are skipped
        settled = all(map(_is_settled, together))
        if len(together) > 1 and not settled:
            return
        travels = self._window is not None or self._between_nodes(together)
        if not travels and not (settled and self._may_be_expected(number, program)):
            return
        self._buckets[number] = tuple(together)
        if settled:
            self._settled.add(number)
        if not batch.bounded and not batch.exact:
            self._batches[id(batch)] = number, batch

    def _between_nodes(self, together: Sequence[Bucket]) -> bool:
        """Whether ranks that are alone on their nodes may show the payload of one tensor. Collective."""
        transport, bucket = self._transport, together[0]
        if len(together) > 1 or bucket.compressor is None:
            return False
        if not 1 < len(transport.topology.nodes) == transport.topology.size:
            return False
        if [step.op for step in bucket.strategy.route.steps if isinstance(step, Collective)] != ["allgather"]:
            return False
        nbytes, ways = bucket.compressor.at(None).nbytes(bucket.size), piggyback_limit.ways_of_payloads(transport)
        return piggyback_limit.fits(nbytes, transport, bucket.strategy.route, ways)

    def _may_be_expected(self, number: int, program: Callable[[], Program | BucketProgram]) -> bool:
        """Whether the ranks can expect a call. Collective, once for each call."""
        if number not in self._expected and len(self._expected) < _EXPECTED:
            found, transport = program().expected(), self._transport
            mine = None if found is None else (found.meets, found.peers)
            told = allgather_json(transport, json.dumps(mine).encode())
            fits = found is not None and fit(told, transport.topology)
            self._expected[number] = FirstMessages(found, transport) if found is not None and fits else None
        return self.expects(number)

    @property
    def expecting(self) -> bool:
        """Whether the ranks have found out of any call whether they can expect it: from then on they note all."""
        return bool(self._expected)

    def expects(self, number: int) -> bool:
        """Whether the ranks make a call in the way of expected ones, if they expect it."""
        return self._expected.get(number) is not None

    def decline(self, number: int, header_size: int) -> None:
        """Take part in a call that the ranks expect, and that this one does not make so. Collective."""
        first = self._expected[number]
        assert first is not None
        first.run(header_size)

    def failed_to_expect(self, number: int) -> None:
        """All ranks have made a call that was expected, but not all of them in that way: not to be tried for ever."""
        self._failures[number] += 1
        if self._failures[number] < _TRIED:
            return
        self._expected[number] = None
        self._buckets.pop(number, None)
        self._prepared.pop(number, None)
        self._settled.discard(number)
        self._batches = {key: one for key, one in self._batches.items() if one[0] != number}

    def buckets_of(self, number: int) -> tuple[Bucket, ...]:
        """The tensors of a call that may take the fast path; none of another one."""
        return self._buckets.get(number, ())

    def program_of(self, number: int) -> Program | BucketProgram | None:
        """The program of a prepared call, if it is the same in all steps: no parameter has a schedule."""
        known = self._prepared.get(number) if number in self._settled else None
        return known.program if known is not None else None

    def knows(self, batch: Batch) -> bool:
        """Whether a call with these tensors is remembered, and nothing but the size of its values is to be searched."""
        return id(batch) in self._batches

    def forget(self) -> None:
        """The numbers of calls have become invalid."""
        for known in (self._buckets, self._batches, self._settled, self._expected, self._failures):
            known.clear()
        self.forget_arrays()

    def forget_arrays(self) -> None:
        """Another state follows."""
        self._prepared.clear()

    def piggyback(
        self, number: int, program: Program | BucketProgram, arrays: Sequence[Any], jobs: Sequence[Job],
        state: SyncState, search: bool,
    ) -> TablePiggyback | None:  # fmt: skip
        """The payloads of tensors; None where a resharded residual waits for one, or no table can stop in time.

        If the ranks can expect the call, they do.
        """
        first = self._expected.get(number)
        if state.store.any_pending or not all(isinstance(x, np.ndarray) and x.flags.carray for x in arrays):
            return None
        known = self._prepared.get(number)
        if known is None or not known.fits(program, state):
            call = program.small_call(
                arrays, jobs, self._recorder, self._least, partial(room, transport=self._transport), first
            )
            if call is None:
                return None
            self._prepared.pop(number, None)
            if sum(one.call.nbytes for one in self._prepared.values()) + call.nbytes > _ROOM:
                self._prepared.clear()
            known = self._prepared[number] = _Prepared(call, program, state, state.version)
        return TablePiggyback(self._transport, known.call, arrays, jobs, search)


def _are_small(together: Sequence[Bucket]) -> bool:
    """Whether these are compressed tensors of a small size in all, which travel as they are."""
    if not all(bucket.shares is not None and bucket.dtype == "float32" for bucket in together):
        return False
    return 4 * sum(bucket.size for bucket in together) <= _LARGEST


def _is_settled(bucket: Bucket) -> bool:
    """Whether its messages have the same sizes in all steps."""
    return bucket.compressor is not None and bucket.compressor.at(None) is bucket.compressor
