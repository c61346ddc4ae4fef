"""Runs a schedule: the steps of one tensor on this rank, with the residual of every encode."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .. import device
from ..compressors import Compressor, Context
from ..feedback import Feedback
from ..types import ITEMSIZE, DeviceKind, Route
from ..workspace import Workspace
from . import reduction
from .base import Action, Data, operations
from .layout import Dense
from .schedule import (
    DecodeStep,
    EncodeStep,
    IdleStep,
    LearnStep,
    MoveStep,
    ScheduleStep,
    SummaryStep,
    compile_route,
    segments,
)
from .transport import Transport

Memory = MutableMapping[str, Any]

OWN = "own."
"""What the names of what methods keep begin with; the others are the executor's: residual, sent, average, mean."""


@dataclass
class Clock:
    """Seconds that this rank spent, by kind of step."""

    seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "wire": 0.0, "decode": 0.0})
    saturated: int = 0
    """Integers of summed payloads that reached the end of their range."""

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Account the time of a with-block."""
        start = time.perf_counter()
        yield
        self.seconds[kind] += time.perf_counter() - start


@dataclass(frozen=True)
class Job:
    """What makes one run of a program differ from the next: names for what is kept, seeds for randomness."""

    name: str
    memory: Memory
    """What is kept from step to step, by key: residuals and what methods keep of their own."""
    feedback: Feedback
    seed: int
    step: int


@dataclass
class Kept(MutableMapping[str, Any]):
    """The part of a memory whose keys begin with a prefix."""

    memory: Memory
    prefix: str

    def __getitem__(self, name: str) -> Any:
        return self.memory[self.prefix + name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.memory[self.prefix + name] = value

    def __delitem__(self, name: str) -> None:
        del self.memory[self.prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.memory if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def compressor_at(point: int, compressor: Compressor) -> Compressor:
    """The method of the encode with this number along a route."""
    return compressor if point == 0 else compressor.again()


ALL_RANKS = -1


def encode_key(seed: int, step: int, rank: int, point: int, start: int, name: str) -> int:
    """The 64-bit key of the encode of a part: two encodes that differ in anything share no random bits.

    Args:
        rank: ALL_RANKS for what all ranks have in common.
        point: number of the encode along the route; start: first element of the part.
    """
    text = struct.pack("<qqqqq", seed, step, rank, point, start) + name.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


Turns = Iterator[None]


class Program:
    """A route made ready for tensors of one size: every message size known, every function bound.

    Args:
        route, compressor: the strategy; compressor None for dense routes.
        n: elements; dtype: element type of the working array (float32 where the route encodes).
        segment_bytes: about how many bytes between machines a segment has; 0 keeps the tensor whole.
        payload_bytes: those that segments are counted by; default: the compressor's. What is kept from step to step
            is kept by segment, so a compressor whose payload changes with the step needs one number for all steps.
    """

    def __init__(
        self,
        transport: Transport,
        route: Route,
        compressor: Compressor | None,
        n: int,
        dtype: str,
        segment_bytes: int = 0,
        payload_bytes: int | None = None,
    ) -> None:
        self._transport, self._compressor, self._dtype = transport, compressor, dtype
        nbytes = payload_bytes or (n * ITEMSIZE[dtype] if compressor is None else compressor.nbytes(n))
        whole = compressor is not None and compressor.whole
        self._regions = segments(n, nbytes, transport.topology, 0 if whole else segment_bytes)
        compiled = [
            compile_route(route, transport.topology, region, dtype, transport.rank, compressor)
            for region in self._regions
        ]
        self._segments = [[self._bound(step) for step in steps] for steps in compiled]
        # A segment is under way for as many turns as its steps yield, and the next one starts at every turn.
        self._depth = 1 + sum(operations()[s.op].phases for s in compiled[0] if isinstance(s, (MoveStep, IdleStep)))

    def _bound(self, step: ScheduleStep) -> Callable[[_Segment], Turns]:
        """The function that does a step."""
        if isinstance(step, IdleStep):
            return partial(_idle, phases=operations()[step.op].phases)
        if isinstance(step, MoveStep):
            action = operations()[step.op].bind(self._transport, step.move)
            if step.of_summary:
                return lambda segment: segment.on_summary(action)
            return lambda segment: action(segment.data)
        assert self._compressor is not None, "a route that encodes needs a compressor"
        act, compressor = _ACTS[type(step)], compressor_at(step.point, self._compressor)
        return lambda segment: act(segment, step, compressor)

    def run(self, x: Any, job: Job, clock: Clock) -> None:
        """Replace flat ``x`` by the mean over the ranks."""
        start, before = time.perf_counter(), sum(clock.seconds[kind] for kind in ("encode", "decode"))
        try:
            interleave(self._turns(x, job, clock, number) for number in range(len(self._regions)))
        except BaseException:
            self._transport.outlive(x)
            raise
        coding = sum(clock.seconds[kind] for kind in ("encode", "decode")) - before
        clock.seconds["wire"] += time.perf_counter() - start - coding

    def _turns(self, x: Any, job: Job, clock: Clock, number: int) -> Turns:
        workspace = self._transport.segment_workspace(number % self._depth)
        segment = _Segment(x, self._dtype, self._transport.rank, workspace, job, clock)
        for act in self._segments[number]:
            yield from act(segment)
        segment.finish(self._regions[number])


def interleave(segments: Iterable[Turns]) -> None:
    """Run segments in turns: at every turn one more starts, then each that is under way goes on, the youngest first.

    The youngest first, so that its messages are queued before an older one waits. The order is the same on all ranks.
    """
    waiting, under_way = iter(segments), list[Turns]()
    while True:
        started = next(waiting, None)
        if started is not None:
            under_way.insert(0, started)
        if not under_way:
            return
        under_way = [segment for segment in under_way if next(segment, _ENDED) is not _ENDED]


_ENDED = object()


def _idle(segment: _Segment, phases: int) -> Turns:
    for _ in range(phases):
        yield


class _Segment:
    """A piece of one tensor on its way, on whichever device its current step wants it."""

    def __init__(self, x: Any, dtype: str, rank: int, workspace: Workspace, job: Job, clock: Clock) -> None:
        self._home, self._rank, self._job, self._clock = x, rank, job, clock
        self.data = Data(x, dtype, workspace)

    def summarise(self, step: SummaryStep, compressor: Compressor) -> Turns:
        return self._timed("encode", self._summarise, step, compressor)

    def encode(self, step: EncodeStep, compressor: Compressor) -> Turns:
        return self._timed("encode", self._encode, step, compressor)

    def learn(self, step: LearnStep, compressor: Compressor) -> Turns:
        return self._timed("decode", self._learn, step, compressor)

    def decode(self, step: DecodeStep, compressor: Compressor) -> Turns:
        return self._timed("decode", self._decode, step, compressor)

    def on_summary(self, action: Action) -> Turns:
        """Carry out a collective on the summary."""
        summary = Data(self.data.summary, "float32", self.data.workspace)
        yield from action(summary)

    def _timed(self, kind: str, act: Callable[[Any, Compressor], None], step: Any, compressor: Compressor) -> Turns:
        with self._clock.timing(kind):
            act(step, compressor)
        return iter(())

    def _summarise(self, step: SummaryStep, compressor: Compressor) -> None:
        """The first half of an encode."""
        self._move_to(step.device, step.region)
        data, region = self.data, step.region
        wanted = compressor.summary(region.size) if region.size else None
        size = wanted.size if wanted else 0
        data.summary = data.workspace.array("summary", size, np.float32, device.device_of(data.x))
        if size:
            x, residual = self._prepare(step.point, region)
            compressor.summarise(x, data.summary, residual, self._context(step.point, region.start, region.stop))

    def _encode(self, step: EncodeStep, compressor: Compressor) -> None:
        self._move_to(step.device, step.region)
        data, packed, region = self.data, step.packed, step.region
        data.payload = data.workspace.payload(packed.nbytes, device.device_of(data.x))
        if region.size == 0:
            return
        x, residual = (self._prepared if step.agreed else self._prepare)(step.point, region)
        sent = self._kept(str(step.point), region, "sent") if self._job.feedback.kind == "ef21" else None
        for part in (part for copy in packed.copies for part in copy):
            inside = slice(part.start - region.start, part.stop - region.start)
            context = self._context(step.point, part.start, part.stop, step)
            payload = data.payload[part.offset : part.offset + part.nbytes]
            compressor.encode(x[inside], payload, None if residual is None else residual[inside], context)
            if sent is not None:
                compressor.decode_add(payload, sent[inside], context)

    def _learn(self, step: LearnStep, compressor: Compressor) -> None:
        for part in (part for copy in step.packed.copies for part in copy):
            payload = self.data.payload[part.offset : part.offset + part.nbytes]
            compressor.learn(payload, part.stop - part.start, self._context(step.point, part.start, part.stop))

    def _decode(self, step: DecodeStep, compressor: Compressor) -> None:
        self._move_to(step.device, Dense(0, 0))
        data, packed, region = self.data, step.packed, step.region
        self._payload_to(device.device_of(data.x), packed.nbytes)
        for number, copy in enumerate(packed.copies):
            decode = compressor.decode_add if number else compressor.decode
            for part in copy:
                payload = data.payload[part.offset : part.offset + part.nbytes]
                context = self._context(step.point, part.start, part.stop)
                decode(payload, data.x[part.start : part.stop], context)
        if region.size == 0:
            return
        x = data.x[region.start : region.stop]
        reduction.divide(x, packed.divisor)
        compressor.conclude(x)
        if self._job.feedback.kind == "ef21":
            mean = self._kept(f"{step.point}-decoded", region, "mean")
            reduction.blend(mean, 1.0, 1.0, x)
            device.copy(x, mean)

    # --- what is kept from step to step ---

    def _prepare(self, point: int, region: Dense) -> tuple[Any, Any]:
        """What a compressor is to compress, and the residual that it is to add; None where there is none.

        The tensor may be changed in place: it is written anew at the next decode.
        """
        x, feedback = self.data.x[region.start : region.stop], self._job.feedback
        if feedback.momentum != 1 and point == 0:
            average = self._kept(str(point), region, "average")
            reduction.blend(average, 1 - feedback.momentum, feedback.momentum, x)
            device.copy(x, average)
        if feedback.kind == "ef21":
            reduction.blend(x, 1.0, -1.0, self._kept(str(point), region, "sent"))
        x, residual = self._prepared(point, region)
        if feedback.decay != 1:
            reduction.blend(residual, feedback.decay, 0.0, residual)
        return x, residual

    def _prepared(self, point: int, region: Dense) -> tuple[Any, Any]:
        """As ``_prepare``, which was called before."""
        residual = self._kept(str(point), region, "residual") if self._job.feedback.kind == "plain" else None
        return self.data.x[region.start : region.stop], residual

    def _kept(self, point: str, region: Dense, name: str) -> Any:
        kept = Kept(self._job.memory, self._place(point, region.start, region.stop))
        return Context(state=kept).kept(name, region.size, self.data.x)

    def _place(self, point: str, start: int, stop: int) -> str:
        """What keys of the memory begin with: tensor, its size, encode point and region."""
        return f"{self._job.name}|{self._home.size}|{point}|{start}:{stop}|"

    def _context(self, point: int, start: int, stop: int, step: EncodeStep | None = None) -> Context:
        job = self._job
        return Context(
            key=self._key(point, start, self._rank),
            shared=self._key(point, start, ALL_RANKS),
            step=job.step,
            ranks=step.ranks if step else 1,
            workspace=self.data.workspace,
            share=(stop - start) / self._home.size,
            state=Kept(job.memory, self._place(str(point), start, stop) + OWN),
            summary=self.data.summary if step and step.agreed else None,
        )

    def _key(self, point: int, start: int, rank: int) -> int:
        return encode_key(self._job.seed, self._job.step, rank, point, start, self._job.name)

    def finish(self, region: Dense) -> None:
        """Bring the result to where the tensor came from."""
        self._move_to(device.device_of(self._home), region)
        self._clock.saturated += self.data.saturated

    def _move_to(self, where: DeviceKind, region: Dense) -> None:
        """Go on with the tensor on another device, taking the current region along."""
        data = self.data
        if device.device_of(data.x) == where or device.device_of(self._home) == "cpu":
            return
        target = self._home if where == "gpu" else self._host_mirror()
        device.copy(target[region.start : region.stop], data.x[region.start : region.stop])
        data.x = target

    def _host_mirror(self) -> np.ndarray:
        return self.data.workspace.array("mirror", self._home.size, self._home.dtype, "cpu")

    def _payload_to(self, where: DeviceKind, nbytes: int) -> None:
        data = self.data
        if device.device_of(data.payload) != where:
            target = data.workspace.payload(nbytes, where)
            device.copy(target, data.payload[:nbytes])
            data.payload = target


_ACTS: dict[type, Callable[[_Segment, Any, Compressor], Turns]] = {
    SummaryStep: _Segment.summarise,
    EncodeStep: _Segment.encode,
    LearnStep: _Segment.learn,
    DecodeStep: _Segment.decode,
}
