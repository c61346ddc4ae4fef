"""From calls that all ranks have made to segments that travel: buckets, their programs, and what is kept for them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import device
from ..collectives import ranges
from ..collectives.executor import Program
from ..collectives.job import Job
from ..collectives.lanes import OnLanes
from ..collectives.messages.transport import Transport
from ..collectives.turns import InTurns, Segment, Turns
from ..options import Options
from ..state.memory import Keeping
from ..tracing.recording import Recorder
from . import fast_path
from .batches import Batch, Bucket, Item, buckets_of, grouped, mixed
from .calls import Unit
from .fusion import Buffer, measured_limit
from .guard import Check
from .nonfinite import NonFinite, blank
from .parking import Parking

_LOG = logging.getLogger("espresso_mpi")

_ARRANGEMENTS, _PROGRAMS = 256, 4096
"""How many of these are kept: which small tensors share a buffer may differ from step to step."""

_ARRANGED = 512
"""Calls of the largest arrangement that is kept: the more calls run together, the less likely just they meet again."""

Run = tuple[Bucket, list[Unit], list[bool]]
"""A bucket, the call that brings each of its tensors, and which are skipped."""


class Dispatcher:
    """Makes segments of calls, and hands them to what runs them.

    Args:
        finish: ends a call all of whose tensors are done.
        keeping: residuals and counters; changed by every step.

    Attributes:
        runner: the segments under way.
        running: calls with tensors under way; parked: tensors that wait for the rest of their group.
        tally: counts values that were cut to fit their type.
    """

    def __init__(
        self, transport: Transport, options: Options, keeping: Keeping, recorder: Recorder, nonfinite: NonFinite,
        finish: Callable[[Unit], None],
    ) -> None:  # fmt: skip
        self._transport, self._options, self.keeping, self._recorder = transport, options, keeping, recorder
        self._nonfinite, self._finish = nonfinite, finish
        self.seed = options.seed
        self.tally: Counter[str] = Counter()
        self.running: dict[Unit, None] = {}
        self.parked: Parking[Unit] = Parking()
        self.runner = self._runner_of(options)
        self._outdated = self._dropped = False
        self._dense_steps: Counter[str] = Counter()
        self._latest: dict[str, list[int]] = {}
        self._arrangements: dict[tuple[int, ...], tuple[Bucket, ...]] = {}
        self._small: dict[int, Bucket | None] = {}
        self._programs: dict[tuple[Any, ...], Program] = {}
        self._fuse_bytes = options.fusion

    def follow(self, options: Options, keeping: Keeping) -> None:
        """Go on by another plan; nothing may be under way."""
        if options.fusion != self._options.fusion:  # what was measured is measured once
            self._fuse_bytes = options.fusion
        self._options, self.keeping = options, keeping
        self.forget_numbers()
        self.parked = Parking()  # it knows the groups of the plan before
        self._outdated = True
        self.renew()

    def forget_numbers(self) -> None:
        """The numbers of calls mean something else from here on."""
        self._arrangements.clear()
        self._small.clear()

    def renew(self) -> None:
        """Go on by the schedule of the plan, if that has changed and nothing is under way: else it ends as it began."""
        if self._outdated and not self.runner.busy:
            self.runner, self._outdated = self._runner_of(self._options), False
            self._transport.forget_kinds()

    def _runner_of(self, options: Options) -> OnLanes | InTurns:
        """How segments go on: by the schedule of the plan, if it has one."""
        schedule = options.plan and options.plan.schedule
        return OnLanes(schedule, _LOG.warning if self._transport.rank == 0 else _say_nothing) if schedule else InTurns()

    # --- small calls, whose data goes along with a header -------------------------------------------------------------

    def small(self, unit: Unit) -> Bucket | None:
        """The bucket of a call, if it is so small that its data goes along with the header of a round."""
        assert unit.number is not None and unit.batch is not None
        if unit.number not in self._small:
            buckets = self._arrangements.get((unit.number,), ())  # settled when the call went the long way, at first
            if not buckets:
                return None
            ok = len(buckets) == 1 and fast_path.fits(buckets[0], self._transport.topology)
            self._small[unit.number] = buckets[0] if ok and not any(item.group for item in unit.batch.items) else None
        bucket, memory = self._small[unit.number], self.keeping.memory
        owed = bucket is not None and any(memory.owes(item.spec.name, item.spec.size) for _, item in bucket.members)
        return None if owed else bucket

    def run_small(
        self, unit: Unit, bucket: Bucket, messages: Sequence[np.ndarray], header_size: int, before: Mapping[str, int]
    ) -> None:
        """All ranks sent the data of this one call with their headers; ``before``: bytes sent until then."""
        start, step = time.perf_counter(), self._dense_steps[bucket.name]
        arrays = arrays_of([unit] * len(bucket.members), bucket)
        fast_path.unpack_mean(messages, header_size, bucket, self._transport.topology, arrays)
        intra, inter = (self._transport.sent[level] - before[level] for level in ("intra", "inter"))
        self._recorder.add("wire", bucket.name, step, 0, start, time.perf_counter(), "fast path", "flat", intra, inter)
        self._dense_steps[bucket.name] += 1

    # --- calls that begin ---------------------------------------------------------------------------------------------

    def begin(self, calls: Sequence[tuple[int, Unit, frozenset[int]]]) -> None:
        """Queue the tensors of calls: (number, call, positions that are skipped)."""
        numbers, units, skips = zip(*calls)
        self.running.update(dict.fromkeys(units))
        if any(unit.gpu is not None for unit in units):
            self._transport.choose_device_way()
        batches = [unit.batch for unit in units if unit.batch is not None]
        runs = [(bucket, *_brought(bucket, units, skips)) for bucket in self._arranged(numbers, batches)]
        self._queue([*runs, *self._unparked(units, batches, skips)], units)

    def dissolve_groups(self) -> None:
        """Of a plan that the session made nobody asked for the groups: a step may lack some of their tensors."""
        if self._transport.rank == 0:
            missing = ", ".join(map(repr, self.parked.absent()))
            _LOG.info("the plan's groups miss %s: their other tensors travel alone from now on", missing)
        self._queue([self._group_run([part]) for part in self.parked.dissolve()])

    def give_up(self) -> list[Unit]:
        """The calls that have begun, none of which is under way: they wait for the rest of their groups."""
        units, self.running = list(self.running), {}
        self.parked.clear()
        return units

    def clear(self) -> list[Any]:
        """Forget what has begun; returns what is under way."""
        self.running = {}
        return self.runner.clear()

    def _queue(self, runs: Sequence[Run], new: Sequence[Unit] = ()) -> None:
        """Queue buckets; ``new``: the calls that start now, some of which may have nothing in them."""
        for _, members, _ in runs:
            for unit in dict.fromkeys(members):
                unit.left += 1
        for unit in new:
            if unit.left == 0:
                self._done(unit)
        for bucket, members, skip in runs:
            self._queue_bucket(bucket, members, skip)

    def _arranged(self, numbers: tuple[int, ...], batches: Sequence[Batch]) -> tuple[Bucket, ...]:
        found = self._arrangements.get(numbers)
        if found is None:
            if len(self._arrangements) >= _ARRANGEMENTS:
                self._arrangements.clear()
            limit = self._fusion_limit(batches)
            room = max(limit, self._options.segment_bytes)
            found = buckets_of(batches, limit, room)
            if len(numbers) <= _ARRANGED:
                self._arrangements[numbers] = found
        return found

    def _unparked(
        self, units: Sequence[Unit], batches: Sequence[Batch], skips: Sequence[frozenset[int]]
    ) -> list[Run]:  # fmt: skip
        """The plan's groups that are complete now."""
        ready = []
        for unit, batch, skip in zip(units, batches, skips):
            found = [self.parked.add(unit, item, item.index in skip) for item in batch.items if item.group]
            found += [self.parked.add_empty(name, group) for name, group in batch.empty]
            ready += [self._group_run(members) for members in found if members]
        return ready

    def _group_run(self, members: Sequence[tuple[Unit, Item, bool]]) -> Run:
        """What is compressed as one is skipped as one: only then its residual stays as it was."""
        bucket, skip = grouped([(0, item) for _, item, _ in members]), [skipped for _, _, skipped in members]
        if any(skip) and (bucket.compressor is not None or self._options.nonfinite == "skip_all"):
            self._nonfinite.skipped.update(item.spec.name for _, item, skipped in members if not skipped)
            skip = [True] * len(skip)
        return bucket, [unit for unit, _, _ in members], skip

    # --- one bucket ---------------------------------------------------------------------------------------------------

    def _queue_bucket(self, bucket: Bucket, units: list[Unit], skip: list[bool]) -> None:
        owners = list(dict.fromkeys(units))
        problem = mixed(bucket) if len(owners) > 1 and bucket.members[0][1].group else None
        if problem is not None:
            for unit in owners:
                unit.error = unit.error or problem
            self._bucket_done(owners)
            return
        arrays = arrays_of(units, bucket)
        checks = self._blanked(bucket, units, owners, skip)
        if all(skip):
            self._bucket_done(owners)
            return
        priority = max(unit.priority for unit in owners)
        large = any(unit.large for unit in owners) and any(
            item.index in unit.large for unit, (_, item) in zip(units, bucket.members)
        )
        for segment in self._segments(bucket, arrays, skip, owners, checks, large):
            self.runner.add(segment, priority)

    def _blanked(self, bucket: Bucket, units: list[Unit], owners: list[Unit], skip: list[bool]) -> list[Check]:
        """Blank what is skipped; returns what checks the rest in debug mode."""
        checks = list[Check]()
        if not any(skip) and not any(unit.watch is not None and unit.watch.debug for unit in owners):
            return checks
        for unit, (_, item), skipped in zip(units, bucket.members, skip):
            gradient = unit.gradients[item.index]
            check = unit.watch.check_of(gradient) if unit.watch is not None else None
            if skipped:
                blank(gradient, check, self._options.nonfinite)
            elif check is not None:
                checks.append(check)
        return checks

    def _segments(
        self,
        bucket: Bucket,
        arrays: Sequence[Any],
        skip: list[bool],
        owners: list[Unit],
        checks: Sequence[Check],
        large: bool,
    ) -> list[Segment]:
        """The segments of a bucket; the first makes its buffer, the last to end brings the result home."""
        shift = ranges.shift(bucket.dtype, self._transport.topology) if large and bucket.compressor is None else 0
        buffer = Buffer(bucket, arrays, skip, self._transport, self.keeping.memory, self.tally, checks, shift)
        job = self._job(bucket)
        program = self._program(bucket, job.step)
        by_schedule = isinstance(self.runner, OnLanes)
        operations = program.operations(device.device_of(arrays[0])) if by_schedule else ()
        kind = bucket.name if isinstance(self.runner, OnLanes) and self.runner.knows(bucket.name) else None
        before, left = self._latest.get(bucket.name), [program.count]
        self._latest[bucket.name] = left

        def turns_of_operations(number: int) -> Iterator[Turns]:
            if buffer.x is None:
                buffer.fill()
            yield from program.turns_of_operations(number, buffer.x, job, self._recorder, operations, kind)
            left[0] -= 1
            if left[0] == 0:
                if self._latest.get(bucket.name) is left:
                    del self._latest[bucket.name]
                buffer.empty()
                buffer.arrays, buffer.x, buffer.checks = (), None, ()  # from now on the caller's alone: see ``guard``
                self._bucket_done(owners)

        def free() -> bool:  # what is kept belongs to the step before until that ends
            return before is None or before[0] == 0

        return [
            Segment(bucket.name, number, turns_of_operations(number), free, operations)
            for number in range(program.count)
        ]

    def _job(self, bucket: Bucket) -> Job:
        """The next step of a bucket, which is counted."""
        keeping = self.keeping
        counts = self._dense_steps if bucket.compressor is None else keeping.counts
        step = counts[bucket.name]
        counts[bucket.name] += 1
        if bucket.compressor is not None:
            self._warn_of_dropped(keeping.use(bucket.kept, bucket.sizes))
        return Job(
            bucket.name, keeping.memory, bucket.feedback, self.seed, step, keeping.weights, self.tally, bucket.kept
        )

    def _warn_of_dropped(self, dropped: tuple[str, int] | None) -> None:
        """Once a session: a residual that is dropped is lost."""
        if dropped is not None and not self._dropped and self._transport.rank == 0:
            _LOG.warning(
                "%s comes in ever new sizes: what is kept of its oldest size, %d elements, is dropped, and so will be "
                "that of others; give tensors of different sizes different names, or do not compress them",
                *dropped,
            )
        self._dropped = self._dropped or dropped is not None

    def _bucket_done(self, owners: Sequence[Unit]) -> None:
        for unit in owners:
            unit.left -= 1
            if unit.left == 0:
                self._done(unit)

    def _done(self, unit: Unit) -> None:
        if unit.parked:
            return
        self.running.pop(unit, None)
        self._finish(unit)

    def _program(self, bucket: Bucket, step: int) -> Program:
        compressor = bucket.compressor and bucket.compressor.at(step)
        dtype = bucket.dtype if compressor is None else "float32"
        key = (bucket.compressor, compressor, bucket.strategy.route, bucket.size, dtype)
        program = self._programs.get(key)
        if program is None:
            final = None if bucket.compressor is None else bucket.compressor.at(None).nbytes(bucket.size)
            program = Program(
                self._transport, bucket.strategy.route, compressor, bucket.size, dtype, self._options.segment_bytes,
                final,
            )  # fmt: skip
            if len(self._programs) >= _PROGRAMS:
                self._programs.clear()
            self._programs[key] = program
        return program

    def _fusion_limit(self, batches: Sequence[Batch]) -> int:
        """Bytes below which dense tensors share a buffer: where copying in and out costs less than a collective."""
        dense = sum(1 for batch in batches for item in batch.items if item.compressor is None)
        if self._fuse_bytes is None and dense > 1:
            route = next(i.strategy.route for b in batches for i in b.items if i.compressor is None)
            self._fuse_bytes = measured_limit(self._transport, route)
            if self._transport.rank == 0:
                _LOG.info("dense tensors below %d bytes share a buffer (measured)", self._fuse_bytes)
        return self._fuse_bytes or 0


def arrays_of(units: Sequence[Unit], bucket: Bucket) -> list[Any]:
    """The arrays of a bucket; ``units``: the call that brings each."""
    return [unit.gradients[item.index].array for unit, (_, item) in zip(units, bucket.members)]


def _say_nothing(text: str) -> None:
    """What ranks other than the first do with warnings."""


def _brought(bucket: Bucket, units: Sequence[Unit], skips: Sequence[frozenset[int]]) -> tuple[list[Unit], list[bool]]:
    """The call that brings each tensor of a bucket, and whether it is skipped."""
    count = len(bucket.members)
    calls = [units[0]] * count if len(units) == 1 else [units[call] for call, _ in bucket.members]
    return calls, [item.index in skips[call] for call, item in bucket.members] if any(skips) else [False] * count
