"""From calls that all ranks have made to active segments: buckets, their programs, and their state."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ..arrays import device
from ..collectives import ranges
from ..collectives.lanes import LaneRunner
from ..collectives.messages.sum_calls import NO_CHECK, ValueCheck
from ..collectives.messages.transport import Transport
from ..collectives.progress import Progress, RoundRobinRunner, Segment
from ..options import Options
from ..state.store import SyncState
from ..tracing.recording import Recorder
from . import fast_path
from .batches import Arranged, Batch, Bucket, Item, buckets_of, grouped, mixed
from .calls import Exchange, PendingCall
from .dense_piggyback import DensePiggybacks
from .dense_steps import begun
from .fusion import measured_limit
from .guard import Check
from .jobs import Jobs
from .nonfinite import NonFinite, blank
from .part_buffers import buffer_of
from .payload_buckets import PayloadBuckets, Ready, Running
from .pending_groups import PendingGroups
from .piggybacking import Piggybacking
from .programs import Programs
from .steady_calls import SteadyBucket, SteadyCalls, SteadyTensors
from .table_piggyback import TablePiggybacks

_LOG = logging.getLogger("espresso_mpi")

_ARRANGEMENTS = 256
"""Size of the cache: which small tensors share a buffer may differ from step to step."""

_ARRANGED = 512
"""Calls of the largest arrangement that is cached: the more calls run together, the less likely they do so again."""

Run = tuple[Bucket, list[PendingCall], list[bool]]
"""A bucket, the call of each of its tensors, and which are skipped."""


class Dispatcher(Piggybacking):
    """Splits calls into segments, and passes them to a runner.

    Args:
        finish: called with a call when all its tensors are done.
        sync_state: residuals and counters; changed by every step.

    Attributes:
        runner: the active segments.
        running: the calls that have started.
        pending_groups: tensors that wait for the rest of their group.
        tally: counts values that were clipped to the range of their type.
        executors: what runs each compressed bucket, in words.
    """

    def __init__(
        self, transport: Transport, options: Options, sync_state: SyncState, recorder: Recorder, nonfinite: NonFinite,
        finish: Callable[[PendingCall], None],
    ) -> None:  # fmt: skip
        self._transport, self._options, self.sync_state, self._recorder = transport, options, sync_state, recorder
        self._nonfinite, self._finish, self._window = nonfinite, finish, fast_path.window_of(transport)
        self.seed = options.seed
        self.value_check = nonfinite.value_check if self._window is not None else _no_check
        self.tally: Counter[str] = Counter()
        self.running: dict[PendingCall, None] = {}
        self.pending_groups: PendingGroups[PendingCall] = PendingGroups()
        self.runner = _runner_of(options, transport.rank)
        self._outdated = False
        self._jobs, self._piggybacks = Jobs(self.tally, transport.rank == 0), TablePiggybacks(transport, recorder)
        self._dense = DensePiggybacks(transport, self._window, recorder)
        self._latest: dict[str, list[int]] = {}
        self._steady, self._steady_tensors = SteadyCalls(recorder, self._latest), SteadyTensors(recorder)
        self.executors: dict[str, str] = {}
        self._arrangements: dict[tuple[int, ...], tuple[Arranged, ...]] = {}
        self._fast: dict[int, tuple[Bucket, ...]] = {}  # by number of the call; empty: not by the fast path
        self._programs = Programs(transport)
        self._fuse_bytes = options.fusion
        self._payload_buckets = PayloadBuckets(transport, recorder)

    def follow(self, options: Options, sync_state: SyncState) -> None:
        """Continue with another plan; no segment may be active."""
        if options.fusion != self._options.fusion:  # it is measured only once
            self._fuse_bytes = options.fusion
        self._options, self.sync_state = options, sync_state
        self.forget_numbers()
        self.pending_groups = PendingGroups()  # the old one has the groups of the previous plan
        self._outdated = True
        self.renew()

    def forget_numbers(self) -> None:
        """The numbers of calls have become invalid."""
        self._arrangements.clear()
        self._fast.clear()
        self._piggybacks.forget()
        self._dense.forget()
        self._steady.forget()
        self._steady_tensors.forget()

    def forget_arrangement(self, number: int) -> None:
        """The parts of a call have other sizes from now on."""
        self._arrangements = {known: found for known, found in self._arrangements.items() if number not in known}

    def renew(self) -> None:
        """Switch to the schedule of a new plan as soon as no segment is active."""
        if self._outdated and not self.runner.busy:
            self.runner, self._outdated = _runner_of(self._options, self._transport.rank), False
            self._transport.forget_kinds()

    # --- calls that start ---------------------------------------------------------------------------------------------

    def begin(self, started: Sequence[tuple[int, PendingCall, frozenset[int]]]) -> None:
        """Start calls: (number, call, positions of the tensors that are skipped)."""
        numbers, calls, skips = zip(*started)
        self.running.update(dict.fromkeys(calls))
        if any(call.gpu is not None for call in calls):
            self._transport.choose_device_way()
        batches = [call.batch for call in calls if call.batch is not None]
        now = begun(batches, skips, self._options.dense_steps, self.sync_state.counts, self._transport.topology)
        alone = len(calls) == 1 and not self.runner.busy
        if now is batches and alone and not skips[0] and self._begin_steady(numbers[0], calls[0]):
            return
        arranged = self._arranged(numbers, batches) if now is batches else self._buckets_of(now)
        runs = [_brought(bucket, indexes, calls, skips) for bucket, indexes in arranged]
        self._queue([*runs, *self._complete_groups(calls, batches, skips)], calls)

    def _begin_steady(self, number: int, call: PendingCall) -> bool:
        """Start a call as the last time; False if it may not."""
        state, scheduled = self.sync_state, isinstance(self.runner, LaneRunner)
        steady = None if scheduled else self._steady.of(number, call, state, self._jobs)
        for part in steady.parts if steady is not None else ():
            call.left += 1
            if isinstance(part, SteadyBucket):
                segments = [self._steady.segment(part, call, state, self._jobs, self.seed, self._bucket_done)]
            else:
                alone = Ready(part, arrays_of([call] * len(part.members), part), [False] * len(part.members), [call],
                              (), False, call.priority)  # fmt: skip
                segments = self._segments([alone])
            for segment in segments:
                self.runner.add(segment, call.priority)
        return steady is not None

    def begin_exchange(self, call: PendingCall, exchange: Exchange) -> None:
        """Queue a call that is no mean of gradients."""
        self._dense.remember(call.number, exchange.moves, exchange.sizes)
        self.running[call], call.left = None, 1
        self.runner.add(exchange.segment(call, self._transport, self._bucket_done), call.priority)

    def dissolve_groups(self) -> None:
        """Let the tensors of incomplete groups travel alone. Only for plans that the session made by itself."""
        if self._transport.rank == 0:
            missing = ", ".join(map(repr, self.pending_groups.absent()))
            _LOG.info("the plan's groups miss %s: their other tensors travel alone from now on", missing)
        self._queue([self._group_run([part]) for part in self.pending_groups.dissolve()])

    def give_up(self) -> list[PendingCall]:
        """Remove and return the started calls, none of which has active segments: they wait for their groups."""
        calls, self.running = list(self.running), {}
        self.pending_groups.clear()
        return calls

    def clear(self) -> list[Any]:
        """Drop all started calls; returns the active segments."""
        self.running = {}
        return self.runner.clear()

    def _queue(self, runs: Sequence[Run], new: Sequence[PendingCall] = ()) -> None:
        """Queue buckets; ``new``: the calls that start now, of which some may have no tensors."""
        brought = [(run, _owners(run[1])) for run in runs]
        for _, owners in brought:
            for call in owners:
                call.left += 1
        for call in new:
            if call.left == 0:
                self._done(call)
        ready = [found for run, owners in brought if (found := self._ready(*run, owners)) is not None]
        busy, scheduled = self.runner.busy, isinstance(self.runner, LaneRunner)
        buckets = self._payload_buckets.together(ready, self._options, under_way=busy)
        first = new[0] if len(new) == 1 and not busy else None  # beside others, its buckets are not those it has alone
        if first is not None and len(buckets) == 1 and not scheduled:
            shared = [one.bucket for one in buckets[0]]
            self._piggybacks.remember(first, shared, partial(self._program_of, shared))
        alone = len(buckets) == 1 and not busy and not scheduled
        for together in buckets:
            for segment in self._segments(together, alone):
                self.runner.add(segment, together[0].priority)
        if first is not None:
            self._steady.remember(first, buckets, self._program_of)

    def _arranged(self, numbers: tuple[int, ...], batches: Sequence[Batch]) -> tuple[Arranged, ...]:
        found = self._arrangements.get(numbers)
        if found is None:
            if len(self._arrangements) >= _ARRANGEMENTS:
                self._arrangements.clear()
            found = self._buckets_of(batches)
            if len(numbers) <= _ARRANGED:
                self._arrangements[numbers] = found
            if len(numbers) == len(batches) == 1:
                scheduled = isinstance(self.runner, LaneRunner)
                buckets = tuple(bucket for bucket, _ in found)
                ok = fast_path.allowed(batches[0], buckets, self._transport, scheduled)
                self._fast[numbers[0]] = buckets if ok else ()
        return found

    def _buckets_of(self, batches: Sequence[Batch]) -> tuple[Arranged, ...]:
        limit = self._fusion_limit(batches)
        return buckets_of(batches, limit, max(limit, self._options.segment_bytes))

    def _complete_groups(
        self, calls: Sequence[PendingCall], batches: Sequence[Batch], skips: Sequence[frozenset[int]]
    ) -> list[Run]:  # fmt: skip
        """The groups of the plan that are complete now."""
        ready = []
        for call, batch, skip in zip(calls, batches, skips):
            if not batch.grouped:
                continue
            found = [self.pending_groups.add(call, item, item.index in skip) for item in batch.items if item.group]
            found += [self.pending_groups.add_empty(name, group) for name, group in batch.empty]
            ready += [self._group_run(members) for members in found if members]
        return ready

    def _group_run(self, members: Sequence[tuple[PendingCall, Item, bool]]) -> Run:
        """The run of a complete group. If it is compressed as one, it is skipped as one, so that its residual stays."""
        bucket, skip = grouped([item for _, item, _ in members]), [skipped for _, _, skipped in members]
        if any(skip) and (bucket.compressor is not None or self._options.nonfinite == "skip_all"):
            self._nonfinite.skipped.update(item.spec.name for _, item, skipped in members if not skipped)
            skip = [True] * len(skip)
        return bucket, [call for call, _, _ in members], skip

    # --- one bucket ---------------------------------------------------------------------------------------------------

    def _ready(
        self, bucket: Bucket, calls: list[PendingCall], skip: list[bool], owners: list[PendingCall]
    ) -> Ready | None:
        """A bucket that can start; None if nothing of it travels. ``owners``: each of the calls once."""
        problem = mixed(bucket) if len(owners) > 1 and bucket.members[0].group else None
        if problem is not None:
            for call in owners:
                call.error = call.error or problem
            self._bucket_done(owners)
            return None
        arrays = arrays_of(calls, bucket)
        checks = self._blanked(bucket, calls, owners, skip)
        if False not in skip:
            self._bucket_done(owners)
            return None
        if len(calls) == 1:
            call = calls[0]
            return Ready(bucket, arrays, skip, owners, checks, bucket.members[0].index in call.large, call.priority)
        large = any(item.index in call.large for call, item in zip(calls, bucket.members))
        return Ready(bucket, arrays, skip, owners, checks, large, max(call.priority for call in owners))

    def _blanked(
        self, bucket: Bucket, calls: list[PendingCall], owners: list[PendingCall], skip: list[bool]
    ) -> list[Check]:
        """Overwrite the skipped tensors; returns the checks of the others in debug mode."""
        checks = list[Check]()
        if True not in skip and not (self._options.debug and any(call.watch is not None for call in owners)):
            return checks
        for call, item, skipped in zip(calls, bucket.members, skip):
            check = call.watch.check_of(call.gradients[item.index]) if call.watch is not None else None
            if skipped:
                blank(call.gradients[item.target], check, self._options.nonfinite)
            elif check is not None:
                checks.append(check)
        return checks

    def _segments(self, together: Sequence[Ready], alone: bool = False) -> list[Segment]:
        """The segments of a bucket, or the one of several buckets that share messages; ``alone``: nothing else runs."""
        started = [self._started(one, alone) for one in together]
        steady = partial(self._steady_tensors.progress, state=self.sync_state)
        if len(started) > 1:
            return [self._payload_buckets.segment(started, self._segment_ended, steady, self.executors)]
        run, bucket = started[0], together[0].bucket
        scheduled = isinstance(self.runner, LaneRunner)
        by_schedule = scheduled and bucket.half is None
        operations = run.program.operations(device.device_of(run.buffer.arrays[0])) if by_schedule else ()
        kind = bucket.name if isinstance(self.runner, LaneRunner) and self.runner.knows(bucket.name) else None
        several = len(self._transport.topology.nodes) > 1

        def operation_progress(number: int) -> Iterator[Progress]:
            x = run.begin()
            if number == 0 and (bucket.compressor is not None or several):
                self.executors[bucket.name] = run.program.executor(x, run.job, bool(operations))
            known = steady(run.program, [x], [run.job]) if count == 1 and not scheduled else None
            if known is None:
                progress = run.program.operation_progress(number, x, run.job, self._recorder, operations, kind)
            else:
                progress = iter((known,))
            del x  # at its end only the caller refers to it: see ``guard``
            yield from progress
            self._segment_ended(run)

        count = run.program.count
        return [Segment(bucket.name, n, operation_progress(n), run.free, operations) for n in range(count)]

    def _started(self, ready: Ready, alone: bool) -> Running:
        """A bucket that starts; the first segment fills its buffer, the last one empties it."""
        bucket, arrays = ready.bucket, ready.arrays
        shift = ranges.shift(bucket.dtype, self._transport.topology) if ready.large and not bucket.compressor else 0
        job = self._jobs.job(bucket, self._jobs.count(bucket, self.sync_state), self.sync_state, self.seed)
        program = self._programs.of(bucket, job.step, self._options.segment_bytes, alone)
        buffer = buffer_of(program, ready.owners, bucket, arrays, ready.skip, self._transport, self.sync_state.store,
                           self.tally, ready.checks, shift)  # fmt: skip
        before, left = self._latest.get(bucket.name), [program.count]
        self._latest[bucket.name] = left

        def free() -> bool:  # the state belongs to the previous step until that ends
            return before is None or before[0] == 0

        return Running(bucket, ready.owners, job, program, buffer, free, left)

    def _segment_ended(self, run: Running) -> None:
        run.left[0] -= 1
        if run.left[0] == 0:
            if self._latest.get(run.bucket.name) is run.left:
                del self._latest[run.bucket.name]
            run.end()
            self._bucket_done(run.owners)

    def _bucket_done(self, owners: Sequence[PendingCall]) -> None:
        for call in owners:
            call.left -= 1
            if call.left == 0:
                self._done(call)

    def _done(self, call: PendingCall) -> None:
        if call.waiting_tensors:
            return
        self.running.pop(call, None)
        self._finish(call)

    def _fusion_limit(self, batches: Sequence[Batch]) -> int:
        """Bytes below which dense tensors share a buffer: where copying in and out costs less than a collective."""
        dense = sum(1 for batch in batches for item in batch.items if item.compressor is None)
        if self._fuse_bytes is None and dense > 1:
            route = next(i.strategy.route for b in batches for i in b.items if i.compressor is None)
            self._fuse_bytes = measured_limit(self._transport, route)
        return self._fuse_bytes or 0


def arrays_of(calls: Sequence[PendingCall], bucket: Bucket) -> list[Any]:
    """The arrays of a bucket; ``calls``: the call of each tensor."""
    return [call.gradients[item.index].array for call, item in zip(calls, bucket.members)]


def _runner_of(options: Options, rank: int) -> LaneRunner | RoundRobinRunner:
    """The runner of segments: by the schedule of the plan, if it has one."""
    schedule = options.plan and options.plan.schedule
    if not schedule:
        return RoundRobinRunner()
    return LaneRunner(schedule, _LOG.warning if rank == 0 else _say_nothing)


def _say_nothing(text: str) -> None:
    """Ignores warnings, on all ranks but the first."""


def _brought(
    bucket: Bucket, indexes: Sequence[int], calls: Sequence[PendingCall], skips: Sequence[frozenset[int]]
) -> Run:
    """A bucket as it runs in some calls; ``indexes``: of these, that of each tensor."""
    bringing = [calls[index] for index in indexes]
    if not any(skips):
        return bucket, bringing, [False] * len(indexes)
    return bucket, bringing, [item.index in skips[index] for index, item in zip(indexes, bucket.members)]


def _owners(calls: list[PendingCall]) -> list[PendingCall]:
    """Each of several calls once."""
    return calls if len(calls) == 1 else list(dict.fromkeys(calls))


def _no_check(batch: Batch) -> ValueCheck:
    """See ``NonFinite.value_check``, where sums do not search."""
    return NO_CHECK
