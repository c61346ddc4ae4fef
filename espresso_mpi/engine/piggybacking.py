"""The part of a ``Dispatcher`` that runs calls whose data are piggybacked on the header of a negotiation round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..collectives.bucket_program import BucketProgram
from ..collectives.executor import Program
from ..collectives.lanes import LaneRunner
from ..collectives.messages.sum_calls import ValueCheck
from ..collectives.messages.transport import Transport
from ..collectives.progress import Progress, RoundRobinRunner, interleaved
from ..options import Options
from ..state.store import SyncState
from ..tracing.recording import Recorder
from . import fast_path
from .batches import Arranged, Batch, Bucket
from .calls import PendingCall
from .dense_piggyback import NOTHING, DensePiggyback, DensePiggybacks, PreparedCall, Summing
from .jobs import Jobs
from .negotiation import Piggyback
from .nonfinite import NonFinite
from .payload_buckets import PayloadBuckets
from .programs import Programs
from .steady_calls import SteadyCalls, SteadyTensors
from .table_piggyback import TablePiggyback, TablePiggybacks


class Piggybacking:
    """See ``Dispatcher``, which has the attributes."""

    sync_state: SyncState
    seed: int
    tally: Counter[str]
    _transport: Transport
    _options: Options
    _recorder: Recorder
    _jobs: Jobs
    _programs: Programs
    _payload_buckets: PayloadBuckets
    _piggybacks: TablePiggybacks
    _steady: SteadyCalls
    _steady_tensors: SteadyTensors
    _fast: dict[int, tuple[Bucket, ...]]
    _window: Any
    _nonfinite: NonFinite
    value_check: Callable[[Batch], ValueCheck]
    _dense: DensePiggybacks
    _arrangements: dict[tuple[int, ...], tuple[Arranged, ...]]
    runner: LaneRunner | RoundRobinRunner

    def forget_arrays(self) -> None:
        """Another state follows: let nothing that was prepared keep the arrays of the old one in memory."""
        self._steady.forget_arrays()
        self._steady_tensors.forget()
        self._piggybacks.forget_arrays()

    def may_piggyback(self, call: PendingCall) -> bool:
        """Whether the payload of a call may be piggybacked on its header, as far as this is known before its number."""
        if call.problem is not None or call.batch is None or self._options.debug:
            return False
        return self._piggybacks.knows(call.batch) or self.value_check(call.batch).pending

    def piggyback(self, call: PendingCall, expected: int | None, search: bool = False) -> Piggyback | None:
        """The data of a call that may take the fast path; None if it may not.

        Args:
            expected: the number of the call that all ranks expect; None: they expect none.
            search: they are not searched yet for values that cannot be summed; only for calls that ``may_piggyback``.
        """
        assert call.number is not None
        if call.exchange is not None:
            known, exchange = self._dense.of(call.number), call.exchange
            if known is None or exchange.moves is None:
                return None
            return DensePiggyback(self._transport, known, self._dense.data_of(exchange.moves, exchange.sizes))
        assert call.batch is not None
        return self.piggyback_sync(call.number, call.batch, [g.array for g in call.gradients], expected, search)

    def piggyback_sync(
        self, number: int, batch: Batch, arrays: Sequence[Any], expected: int | None, search: bool
    ) -> Piggyback | None:
        """As ``piggyback``, for a call that synchronises gradients.

        Args:
            number, batch: of the call.
            arrays: its gradients; flat, of float16 and bfloat16 the bits.
        """
        unexpected = number != expected and self._piggybacks.expects(number)
        small, state = () if unexpected else self._piggybacks.buckets_of(number), self.sync_state
        steps = [state.counts[bucket.name] for bucket in small]
        if small and min(steps) >= self._options.dense_steps:
            jobs = [self._jobs.job(bucket, step, state, self.seed) for bucket, step in zip(small, steps)]
            program = self._piggybacks.program_of(number) or self._program_of(small, steps[0])
            first = [arrays[bucket.members[0].index] for bucket in small]
            return self._piggybacks.piggyback(number, program, first, jobs, state, search)
        if search and not self.value_check(batch).pending:
            return None
        buckets = self._fast.get(number)  # known once the call was run
        if not buckets or fast_path.adds_residual(batch, self.sync_state.store):
            return None
        if self._window is None:
            return fast_path.Piggyback(self._transport, buckets, arrays)
        check = ValueCheck(self.value_check(batch).limit, pending=search)
        made = fast_path.NodePiggyback(self._transport, self._window, buckets, arrays, check)
        return made if made.searches or not search else None

    def goes_by_table(self, number: int) -> bool:
        """Whether the data of a call are payloads."""
        return bool(self._piggybacks.buckets_of(number))

    def may_repeat(self, number: int, batch: Batch) -> bool:
        """Whether a call that has ended may be made again by ``piggyback_sync``, which searches its values."""
        if self.goes_by_table(number):
            return self._piggybacks.knows(batch)
        return self._window is not None and bool(self._fast.get(number)) and self.value_check(batch).pending

    @property
    def expecting(self) -> bool:
        """Whether the ranks note which call follows which. The same on all ranks in each round."""
        return self._window is None and self._piggybacks.expecting

    def expects(self, number: int) -> bool:
        """Whether the ranks make a call in the way of expected ones, if they expect it."""
        return self._piggybacks.expects(number)

    def decline(self, number: int, header_size: int) -> None:
        """Take part in a call that the ranks expect, and that this one does not make so. Collective."""
        self._piggybacks.decline(number, header_size)

    def failed_to_expect(self, number: int) -> None:
        """All ranks have made a call that was expected, but not all of them in that way."""
        self._piggybacks.failed_to_expect(number)

    def _program_of(self, together: Sequence[Bucket], step: int = 0) -> BucketProgram | Program:
        """The program of tensors that travel together, or of one, in its step of this number."""
        alone = [self._programs.of(bucket, step, self._options.segment_bytes) for bucket in together]
        return self._payload_buckets.program_of(together[0], alone) if len(alone) > 1 else alone[0]

    def remember_action(self, call: PendingCall) -> None:
        """An action begins on the ordinary path; a barrier does nothing beyond that, so that ranks need only agree."""
        if call.key == ("barrier", ""):
            self._dense.remember(call.number, NOTHING)

    def prepared(self, number: int, moves: Any, header_size: int) -> PreparedCall | None:
        """What runs a dense call of a session that was made before; None: it may not take the fast path.

        Args:
            header_size: bytes of the headers by now.
        """
        if self.sync_state.store.any_pending:
            return None
        if not isinstance(moves, Summing):
            return self._dense.known.get(number)
        buckets = self._fast.get(number) or [bucket for bucket, _ in self._arrangements.get((number,), ())]
        if len(buckets) != 1 or len(buckets[0].members) > 1 or self._options.debug:
            return None
        if self._fast.get(number):
            return self._dense.sums(number, buckets[0], moves.x, header_size)
        by_route = not self._dense.moves_data and moves.x.dtype.kind == "f" and not isinstance(self.runner, LaneRunner)
        return self._dense.routed(number, partial(self._by_route, buckets[0])) if by_route else None

    def _by_route(self, bucket: Bucket, x: np.ndarray) -> Progress:
        """Sum the one array of a call by its route, all segments in turns."""
        state = self.sync_state
        program = self._programs.of(bucket, 0, self._options.segment_bytes, alone=True)
        job = self._jobs.job(bucket, self._jobs.count(bucket, state), state, self.seed)
        return interleaved(program.segment(number, x, job, self._recorder) for number in range(program.count))

    def known_sum(self, number: int | None) -> PreparedCall | None:
        """What has run a dense sum of one array with its header; None: nothing has."""
        return self._dense.known.get(number) if number is not None and self._fast.get(number) else None

    def still_sums(self, number: int, prepared: PreparedCall) -> bool:
        """Whether that is what is to run it now, too."""
        return self._dense.known.get(number) is prepared and not self.sync_state.store.any_pending

    def count_repeated(self, number: int, prepared: PreparedCall) -> None:
        """Count and record a call that ``prepared`` has run."""
        buckets, saturated = self._fast.get(number), prepared.agreed.saturated
        prepared.record(self._jobs.count(buckets[0], self.sync_state) if buckets else 0)
        if saturated:
            self.tally["saturated"] += saturated

    def _finish_exchange(self, call: PendingCall, piggyback: DensePiggyback) -> None:
        assert call.exchange is not None
        piggyback.record(0)
        self.tally["saturated"] += piggyback.agreed.saturated
        call.error = piggyback.problem(call.title)
        if call.error is None and (call.exchange.follows or not self._dense.moves_data):
            for _ in call.exchange.progress(self._transport):
                pass

    def finish_piggyback(
        self, call: PendingCall, piggyback: Piggyback, messages: Sequence[np.ndarray], header_size: int,
        before: Mapping[str, int],
    ) -> None:  # fmt: skip
        """Finish a call by the fast path, given the messages of all ranks; ``before``: bytes sent before the round."""
        assert call.number is not None
        if isinstance(piggyback, DensePiggyback):
            self._finish_exchange(call, piggyback)
            return
        if isinstance(piggyback, TablePiggyback):
            for bucket in self._piggybacks.buckets_of(call.number):
                self._jobs.count(bucket, self.sync_state)
            return
        for one in piggyback.finish(messages, header_size, before):
            step, name = self._jobs.count(one.bucket, self.sync_state), one.bucket.name
            self._recorder.add("wire", name, step, 0, one.start, one.stop, "fast path", "flat", one.intra, one.inter)
        self.tally["saturated"] += piggyback.saturated
