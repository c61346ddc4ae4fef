"""Calls that are made again, step after step, with the same tensors: what was found out about them is used again.

A call with compressed tensors is remembered when it runs alone for the first time: which tensors share messages, their
programs, where their residuals are. When the call comes again, its buckets begin with these, and only addresses, step
numbers and keys are new. Whatever differs - a tensor that is skipped, a changed state, a call that runs beside others -
takes the ordinary path, with the same messages and the same bits. So ranks may differ in it.

There, ``SteadyTensors`` still knows where the residuals are of a tensor, or of tensors that share messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from ..collectives.bucket_program import BucketProgram
from ..collectives.executor import Program
from ..collectives.job import Job
from ..collectives.progress import Progress, Segment
from ..collectives.tables.running import PreparedRun, obstacle
from ..state.store import SyncState
from ..tracing.recording import Recorder
from .batches import Bucket
from .calls import PendingCall
from .jobs import Jobs
from .payload_buckets import Ready

_CALLS = 256
"""Calls that are remembered at a time: each keeps up to 256 KiB for times."""


_TENSORS = 1024
"""Tensors and sets of tensors that are remembered at a time."""


@dataclass
class SteadyBucket:
    """Tensors that share messages in every step, or one that travels by itself.

    Attributes:
        members: each with its tensor.
        program: runs them.
        prepared: what stays equal; None before the first step by it.
    """

    members: tuple[Bucket, ...]
    program: BucketProgram | Program
    prepared: PreparedRun | None = None

    def __post_init__(self) -> None:
        self.names = tuple(bucket.name for bucket in self.members)
        self.positions = tuple(bucket.members[0].index for bucket in self.members)


@dataclass(frozen=True)
class SteadyCall:
    """How a call runs: its parts in the order in which they start, those that are prepared and others.

    Attributes:
        state, version: what the first ones were prepared for.
    """

    parts: tuple[SteadyBucket | Bucket, ...]
    state: SyncState
    version: tuple[int, int, int]

    def fits(self, state: SyncState) -> bool:
        """Whether nothing has changed that it was prepared for."""
        return state is self.state and state.version == self.version and not state.store.any_pending


class SteadyCalls:
    """The calls that are remembered.

    Args:
        recorder: gets their times.
        latest: by the name of a bucket: the number of segments that its latest step still has, as the only element.
    """

    def __init__(self, recorder: Recorder, latest: MutableMapping[str, list[int]]) -> None:
        self._recorder, self._latest = recorder, latest
        self._known: dict[int, SteadyCall] = {}
        self._candidates: dict[int, tuple[SteadyBucket | Bucket, ...]] = {}

    def forget(self) -> None:
        """The numbers of calls have become invalid."""
        self.forget_arrays()
        self._candidates.clear()

    def forget_arrays(self) -> None:
        """Another state follows."""
        for call in self._known.values():
            for part in call.parts:
                if isinstance(part, SteadyBucket):
                    part.prepared = None
        self._known.clear()

    def remember(
        self, call: PendingCall, buckets: Sequence[Sequence[Ready]],
        program_of: Callable[[Sequence[Bucket]], BucketProgram | Program],
    ) -> None:  # fmt: skip
        """A call has begun by itself.

        Args:
            buckets: those that share messages, in the order in which they start.
            program_of: returns the program of several that do, or of one that travels by itself.
        """
        number, batch = call.number, call.batch
        if number is None or batch is None or number in self._candidates or call.key[0] == "push":
            return
        if not any(one.bucket.shares for ready in buckets for one in ready):
            return
        started = {id(item) for ready in buckets for one in ready for item in one.bucket.members}
        if started != set(map(id, batch.items)):  # some are skipped, dense at first, or wait for their group
            return
        if any(item.group for item in batch.items) or not all(_settled(one) for ready in buckets for one in ready):
            return
        if len(self._candidates) >= _CALLS:
            self.forget()
        parts = tuple(_part(tuple(one.bucket for one in ready), program_of) for ready in buckets)
        self._candidates[number] = parts if any(isinstance(part, SteadyBucket) for part in parts) else ()

    def of(self, number: int, call: PendingCall, state: SyncState, jobs: Jobs) -> SteadyCall | None:
        """How a call runs that begins by itself and of which nothing is skipped; None: the ordinary path."""
        parts = self._candidates.get(number)
        if not parts or self._latest or call.large or (call.watch is not None and call.watch.debug):
            return None
        if not all(gradient.steady for gradient in call.gradients):  # its memory may not be aligned, or is a copy
            return None
        known = self._known.get(number)
        if known is None or not known.fits(state):
            if state.store.any_pending:
                return None
            for part in parts:
                if isinstance(part, SteadyBucket):
                    part.prepared = None
                    for bucket in part.members:
                        jobs.use(bucket, state)
            known = self._known[number] = SteadyCall(parts, state, state.version)
        return known

    def segment(
        self, part: SteadyBucket, call: PendingCall, state: SyncState, jobs: Jobs, seed: int,
        ended: Callable[[Sequence[PendingCall]], None],
    ) -> Segment:  # fmt: skip
        """The segment of a bucket; counts its step. ``ended`` is called with the call at the end."""
        steps, left = jobs.count_all(part.names, state), [1]
        for name in part.names:
            self._latest[name] = left
        made = _JobsOf(part.members, steps, state, jobs, seed)
        arrays = [call.gradients[position].array for position in part.positions]

        def progress(arrays: list[Any]) -> Iterator[Progress]:
            if part.prepared is None:
                part.prepared = part.program.prepared(arrays, made, self._recorder)
            if part.prepared is None:
                running = part.program.progress(arrays, made, self._recorder)
            else:
                running = part.program.repeat(arrays, made, steps, self._recorder, part.prepared)
            del arrays  # at its end only the caller refers to them: see ``guard``
            yield running
            for name in part.names:
                if self._latest.get(name) is left:
                    del self._latest[name]
            ended([call])

        given, arrays = progress(arrays), []
        more = f" and {len(part.names) - 1} more" if len(part.names) > 1 else ""
        return Segment(part.names[0] + more, 0, given, lambda: True)


class SteadyTensors:
    """Where the residuals of tensors are that run by themselves, or share messages, in whatever calls they come.

    Args:
        recorder: gets their times.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[tuple[object, ...], tuple[BucketProgram | Program, PreparedRun]] = {}
        self._known_for: tuple[SyncState, tuple[int, int, int]] | None = None

    def forget(self) -> None:
        """Another state follows."""
        self._known.clear()
        self._known_for = None

    def progress(
        self, program: BucketProgram | Program, arrays: Sequence[Any], jobs: Sequence[Job], state: SyncState
    ) -> Progress | None:
        """As ``program.progress``; None: a residual is still to be added, or Python runs the program."""
        now, before = state.version, self._known_for
        if before is None or before[0] is not state or before[1] != now:
            self.forget()  # also so that nothing refers to arrays that have left the state
        if state.store.any_pending or any(map(obstacle, arrays, jobs)):
            return None
        key = (id(program), *[(job.store_name or job.name, job.feedback.kind) for job in jobs])
        known = self._known.get(key)
        if known is None:
            prepared = program.prepared(arrays, jobs, self._recorder, repeats=False)
            if prepared is None:
                return None
            if len(self._known) >= _TENSORS:
                self._known.clear()
            known = self._known[key] = program, prepared  # the program lives on, so no other gets its id
            now = state.version  # it may have got its first residuals
        self._known_for = state, now
        return program.repeat(arrays, jobs, (), self._recorder, known[1])


class _JobsOf(Sequence[Job]):
    """The jobs of the tensors of a bucket in one step, each made when it is asked for."""

    def __init__(
        self, members: Sequence[Bucket], steps: Sequence[int], state: SyncState, jobs: Jobs, seed: int
    ) -> None:
        self._members, self._steps, self._state, self._jobs, self._seed = members, steps, state, jobs, seed

    @overload
    def __getitem__(self, at: int) -> Job: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Job]: ...
    def __getitem__(self, at: int | slice) -> Job | Sequence[Job]:
        if isinstance(at, slice):
            return [self[number] for number in range(len(self))[at]]
        return self._jobs.job(self._members[at], self._steps[at], self._state, self._seed)

    def __len__(self) -> int:
        return len(self._members)


def _part(
    together: tuple[Bucket, ...], program_of: Callable[[Sequence[Bucket]], BucketProgram | Program]
) -> SteadyBucket | Bucket:
    """Tensors that travel together as a part of a call: prepared, unless one is dense or has several segments."""
    if together[0].shares is None:
        return together[0]
    program = program_of(together)
    return SteadyBucket(together, program) if program.count == 1 else together[0]


def _settled(one: Ready) -> bool:
    """Whether a tensor is compressed in the same way in every step, where it is compressed at all."""
    bucket = one.bucket
    if any(one.skip) or one.large or one.checks or len(one.owners) > 1:
        return False
    return bucket.compressor is None or (
        bucket.compressor.at(None) is bucket.compressor and bucket.dtype == "float32" and len(bucket.members) == 1
    )
