"""Which compressed tensors share messages, and how they run together.

Compressed tensors that start together and take the same route form *payload buckets*. They share messages, not memory:
see ``collectives.bucket_program``. A bucket ends where its payloads would be larger than a limit (``sharing.form``),
which follows from a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import compressors
from ..arrays import device
from ..collectives.bucket_program import BucketProgram
from ..collectives.executor import Program
from ..collectives.job import Job
from ..collectives.messages.agreement import floats
from ..collectives.messages.transport import Transport
from ..collectives.progress import Progress, Segment
from ..options import Options
from ..sharing import form, payload_limit
from ..tracing.recording import Recorder
from ..types import DeviceKind, Route
from .batches import Bucket
from .calls import PendingCall
from .fusion import Buffer
from .guard import Check
from .measured_limits import MeasuredLimits, seconds_of

_BUCKETS = 1024
"""Size of the cache of programs: which tensors start together may differ from step to step."""

_LARGE, _SEVERAL, _REPEATS = 1 << 16, 4, 4
"""Of the measurement: elements of its larger tensor, how many tensors travel together, and how often."""


@dataclass(frozen=True)
class Ready:
    """A bucket that can start: its arrays, which are skipped, the calls that brought them, and their priority."""

    bucket: Bucket
    arrays: list[Any]
    skip: list[bool]
    owners: list[PendingCall]
    checks: Sequence[Check]
    large: bool
    priority: float


@dataclass
class Running:
    """A bucket that has started.

    Attributes:
        bucket, owners: as in ``Ready``.
        job, program, buffer: how it runs.
        free: whether its previous step has ended.
        left: the number of segments that have not ended, as the only element.
    """

    bucket: Bucket
    owners: list[PendingCall]
    job: Job
    program: Program
    buffer: Buffer
    free: Callable[[], bool]
    left: list[int]

    def begin(self) -> Any:
        """The array that travels; the first segment fills it."""
        if self.buffer.x is None:
            self.buffer.fill()
        return self.buffer.x

    def end(self) -> None:
        """Copy the result to the caller's arrays. From here on only the caller refers to them: see ``guard``."""
        buffer = self.buffer
        buffer.empty()
        buffer.arrays, buffer.x, buffer.checks = (), None, ()


SteadyRun = Callable[[BucketProgram, Sequence[Any], Sequence[Job]], "Progress | None"]
"""Runs a program with what is known from earlier steps; None: nothing is, or it cannot."""


class PayloadBuckets:
    """Forms buckets, and runs them.

    Args:
        transport: used for all messages.
        recorder: gets the time of every step.
    """

    def __init__(self, transport: Transport, recorder: Recorder) -> None:
        self._transport, self._recorder = transport, recorder
        self._programs: dict[tuple[int, ...], tuple[Sequence[Program], BucketProgram]] = {}

    def together(self, ready: Sequence[Ready], options: Options, under_way: bool = False) -> list[list[Ready]]:
        """The buckets that share messages, and every other bucket by itself, in the order of their first tensors.

        Args:
            under_way: whether other messages are, so that the first bucket need not be small.
        """
        scheduled = options.plan is not None and options.plan.schedule
        if options.fusion == 0 or scheduled or sum(one.bucket.shares is not None for one in ready) < 2:
            return [[one] for one in ready]
        return form(
            [_told(one) for one in ready],
            lambda one: limit_of(self._transport, one.bucket.strategy.route, options),
            under_way,
        )

    def segment(
        self, tensors: Sequence[Running], ended: Callable[[Running], None], steady: SteadyRun,
        executors: MutableMapping[str, str],
    ) -> Segment:  # fmt: skip
        """The segment of a bucket.

        Args:
            ended: called for each tensor when its result is there.
            steady: see ``SteadyRun``.
            executors: receives what runs each tensor, by name.
        """
        program = self.program_of(tensors[0].bucket, [one.program for one in tensors])

        def progress() -> Iterator[Progress]:
            left = list(tensors)
            arrays, jobs = [one.begin() for one in left], [one.job for one in left]
            executors.update(dict.fromkeys([one.bucket.name for one in left], program.executor(arrays, jobs)))
            running = steady(program, arrays, jobs) or program.progress(arrays, jobs, self._recorder)
            del arrays  # at its end only the caller refers to them: see ``guard``
            yield running
            for one in left:
                ended(one)

        names = f"{tensors[0].bucket.name} and {len(tensors) - 1} more"
        return Segment(names, 0, progress(), lambda: all(one.free() for one in tensors))

    def program_of(self, first: Bucket, alone: Sequence[Program]) -> BucketProgram:
        """The program of tensors that share messages, of which ``first`` is one, from those of each alone."""
        key = tuple(map(id, alone))
        known = self._programs.get(key)
        if known is None:
            if len(self._programs) >= _BUCKETS:
                self._programs.clear()
            sizes = [(program.compressor, program.n) for program in alone if program.compressor is not None]
            made = BucketProgram(self._transport, first.strategy.route, sizes, first.total)
            known = self._programs[key] = alone, made  # the programs live on, so no other gets their ids
        return known[1]


def _told(one: Ready) -> tuple[Ready, Hashable | None, str, int, int]:
    """What ``form`` is told about a bucket."""
    shares = one.bucket.shares
    if shares is None:
        return one, None, "", 0, 0
    return one, (one.priority, shares.way), one.bucket.name, shares.payload, shares.dense


def limit_of(transport: Transport, route: Route, options: Options) -> int:
    """The bytes of the payloads of a bucket; none is cut into segments. Collective if they are measured now."""
    given, segment = options.fusion, options.segment_bytes
    limit = given if given is not None else measured_limit(transport, route)
    return min(limit, segment) if segment and len(transport.topology.nodes) > 1 else limit


def measured_limit(transport: Transport, route: Route) -> int:
    """The payload bytes that take ``_PER_START`` times as long as it takes to start a collective. Collective.

    Measured once for a transport and a route.
    """
    return _LIMITS.of(transport, route, lambda: _measured(transport, route))


_LIMITS = MeasuredLimits("compressed tensors share messages of up to %d bytes (measured)")


def _measured(transport: Transport, route: Route) -> int:
    """From the times of a tiny tensor and of a larger one, the least of a few: others disturb them, none shortens them.

    Several tensors overlap, as those of a model do.
    """
    half = compressors.get("fp16")
    where: DeviceKind = "gpu" if any(getattr(step, "device", "cpu") == "gpu" for step in route.steps) else "cpu"
    seconds = []
    for n in (64, _LARGE):
        program = Program(transport, route, half, n, "float32")
        arrays = [device.zeros(n, np.float32, where) for _ in range(_SEVERAL)]
        times = [seconds_of(program, arrays) for _ in range(_REPEATS)]
        seconds.append(min(times) / _SEVERAL)
    start, large = floats(transport, *seconds).max(axis=0)
    per_byte = (large - start) / half.nbytes(_LARGE)
    return payload_limit(start, per_byte)
