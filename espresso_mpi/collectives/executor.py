"""Runs a schedule: the steps of one tensor on this rank, with the residual of every encode."""

from __future__ import annotations

import hashlib
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import device
from ..compressors import Compressor, Context
from ..feedback import Feedback
from ..tracing.recording import Kind, Recorder
from ..types import ITEMSIZE, DeviceKind, Route
from .data import reduction
from .data.layout import Dense, Packed, Part
from .messages.transport import Transport
from .ops.base import Action, Data, idle, operations
from .program import (
    DecodeStep,
    EncodeStep,
    IdleStep,
    LearnStep,
    MoveStep,
    ScheduleStep,
    SummaryStep,
    compile_route,
    segments,
    summary_sizes,
)
from .turns import ENDED, Turns, interleave

if TYPE_CHECKING:
    from .route_operations import RouteOperation

Memory = MutableMapping[str, Any]

OWN = "own."
"""What the names of what methods keep begin with; the others are the executor's: residual, sent, average, mean."""


@dataclass(frozen=True)
class Job:
    """What makes one run of a program differ from the next: names for what is kept, seeds for randomness."""

    name: str
    memory: Memory
    """What is kept from step to step, by key: residuals and what methods keep of their own."""
    feedback: Feedback
    seed: int
    step: int
    """How often this tensor was synchronised before."""
    weights: MutableMapping[str, float] = field(default_factory=dict)
    """What a unit of each residual will add to the mean, by key; see ``EncodeStep.weight``."""
    tally: Counter[str] = field(default_factory=Counter)
    """Counts "saturated": values, and sums of payloads, that were cut to the end of their range."""
    kept: str = ""
    """The name in the memory, where it is not ``name``."""


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


@dataclass(frozen=True)
class Stage:
    """One step of a segment on its way: what it is, what it works on, and the turns that carry it out."""

    step: ScheduleStep
    data: Data
    turns: Callable[[], Turns]


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
        self._transport, self._compressor, self._dtype, self._route = transport, compressor, dtype, route
        self._operations: dict[DeviceKind, tuple[RouteOperation, ...]] = {}
        nbytes = payload_bytes or (n * ITEMSIZE[dtype] if compressor is None else compressor.nbytes(n))
        whole = compressor is not None and compressor.whole
        self._regions = segments(n, nbytes, transport.topology, 0 if whole else segment_bytes)
        compiled = [
            compile_route(route, transport.topology, region, dtype, transport.rank, compressor)
            for region in self._regions
        ]
        self._segments = [[(step, self._bound(step)) for step in steps] for steps in compiled]

    def _bound(self, step: ScheduleStep) -> Callable[[_Segment], Turns]:
        """The function that does a step."""
        if isinstance(step, IdleStep):
            return partial(idle, phases=operations()[step.op].phases)
        if isinstance(step, MoveStep):
            action = operations()[step.op].bind(self._transport, step.move)
            return lambda segment: segment.move(step, action)
        assert self._compressor is not None, "a route that encodes needs a compressor"
        act, compressor = _ACTS[type(step)], compressor_at(step.point, self._compressor)
        return lambda segment: act(segment, step, compressor)

    @property
    def count(self) -> int:
        """Number of segments."""
        return len(self._segments)

    def segment(self, number: int, x: Any, job: Job, recorder: Recorder) -> Turns:
        """The turns of one segment of replacing flat ``x`` by its mean over the ranks."""
        for turns in self.turns_of_operations(number, x, job, recorder):
            yield from turns

    def steps(self, number: int) -> list[ScheduleStep]:
        """The steps of one segment."""
        return [step for step, _ in self._segments[number]]

    def stages(self, number: int, x: Any, job: Job, recorder: Recorder) -> Iterator[Stage]:
        """The steps of one segment, each to be carried out before the next is asked for: ``segment`` in slow motion."""
        workspace = self._transport.borrow()
        segment = _Segment(Data(x, self._dtype, workspace), job, _Log(recorder, job, number, self._transport))
        for step, act in self._segments[number]:
            yield Stage(step, segment.data, partial(act, segment))
        segment.finish(self._regions[number])
        self._transport.give_back(workspace)

    def operations(self, home: DeviceKind) -> tuple[RouteOperation, ...]:
        """The operations of each segment of a tensor on a device."""
        from .route_operations import route_operations  # imports the planner, which only schedules need

        found = self._operations.get(home)
        if found is None:
            found = self._operations[home] = route_operations(
                self._route, self.steps(0), self._transport.topology, home
            )
        return found

    def turns_of_operations(
        self,
        number: int,
        x: Any,
        job: Job,
        recorder: Recorder,
        route: Sequence[RouteOperation] = (),
        kind: str | None = None,
    ) -> Iterator[Turns]:
        """The turns of each operation of a segment, to be taken to their end before the next is asked for.

        Args:
            route: what counts as one operation, see ``operations``; none: every step.
            kind: of scratch memory, see ``Transport.borrow``.
        """
        workspace, region = self._transport.borrow(kind), self._regions[number]
        segment = _Segment(Data(x, self._dtype, workspace), job, _Log(recorder, job, number, self._transport))
        steps = self._segments[number]
        for operation, then in zip(route, (*route[1:], None)):
            if operation.copies:
                after = () if then is None else (steps[at][0] for at in then.steps)
                segment.copy(next((s for s in after if isinstance(s, (EncodeStep, DecodeStep))), None), region)
            yield chain.from_iterable(steps[at][1](segment) for at in operation.steps)
        for _, act in () if route else steps:
            yield act(segment)
        segment.finish(region)
        self._transport.give_back(workspace, kind)

    def run(self, x: Any, job: Job, recorder: Recorder | None = None) -> None:
        """Replace flat ``x`` by its mean over the ranks, all at once."""
        recorder = recorder or Recorder()
        try:
            interleave(self.segment(number, x, job, recorder) for number in range(self.count))
        except BaseException:
            self._transport.outlive(x)
            raise


@dataclass(frozen=True)
class _Log:
    """Notes of one segment for the recorder."""

    recorder: Recorder
    job: Job
    segment: int
    transport: Transport

    def add(
        self, kind: Kind, start: float, stop: float, what: str, level: str = "", intra: int = 0, inter: int = 0
    ) -> None:
        job = self.job
        self.recorder.add(kind, job.name, job.step, self.segment, start, stop, what, level, intra, inter)

    def moving(self, turns: Turns, what: str, level: str) -> Turns:
        """Pass the turns of a collective on, and note what they took.

        It is on the wire from its first turn to its last, though other segments work meanwhile; what it waited for its
        messages is noted as well.
        """
        transport, first = self.transport, time.perf_counter()
        intra = inter = 0
        going = True
        while going:
            start, before, waited = time.perf_counter(), transport.sent, transport.waiter.waited
            going = next(turns, ENDED) is not ENDED
            after = transport.sent
            intra, inter = intra + after["intra"] - before["intra"], inter + after["inter"] - before["inter"]
            if transport.waiter.waited > waited:
                self.add("wait", start, start + transport.waiter.waited - waited, what, level)
            if going:
                yield
        self.add("wire", first, time.perf_counter(), what, level, intra, inter)


class _Segment:
    """A piece of one tensor on its way, on whichever device its current step wants it."""

    def __init__(self, data: Data, job: Job, log: _Log) -> None:
        self._home, self._rank, self._job, self._log = data.x, log.transport.rank, job, log
        self.data = data

    def summarise(self, step: SummaryStep, compressor: Compressor) -> Turns:
        return self._timed("encode", "summary", self._summarise, step, compressor)

    def encode(self, step: EncodeStep, compressor: Compressor) -> Turns:
        return self._timed("encode", f"encode@{step.device}", self._encode, step, compressor)

    def learn(self, step: LearnStep, compressor: Compressor) -> Turns:
        return self._timed("decode", "learn", self._learn, step, compressor)

    def decode(self, step: DecodeStep, compressor: Compressor) -> Turns:
        return self._timed("decode", f"decode@{step.device}", self._decode, step, compressor)

    def move(self, step: MoveStep, action: Action) -> Turns:
        """Carry out a collective, on the tensor or on the summary."""
        data = self.data
        if step.of_summary:
            data = Data(data.summary, "float32", data.workspace)
        level = step.move.scene.level
        return self._log.moving(action(data), f"{step.op}@{level}", level)

    def _timed(self, kind: Kind, what: str, act: Callable[[Any, Compressor], None], step: Any, by: Compressor) -> Turns:
        start = time.perf_counter()
        act(step, by)
        self._log.add(kind, start, time.perf_counter(), what)
        return iter(())

    def _summarise(self, step: SummaryStep, compressor: Compressor) -> None:
        """The first half of an encode."""
        self._move_to(step.device, step.region)
        data, region = self.data, step.region
        size = sum(summary_sizes(compressor, step.packed.copies[0]))
        data.summary = data.workspace.array("summary", size, np.float32, device.device_of(data.x))
        if region.size == 0:
            return
        x, residual = self._prepare(step.point, region)
        for part, summary in self._summaries(step.packed, compressor):
            if summary is not None:
                inside = slice(part.start - region.start, part.stop - region.start)
                context = self._context(step.point, part, step.who)
                compressor.summarise(x[inside], summary, None if residual is None else residual[inside], context)

    def _summaries(self, packed: Packed, compressor: Compressor) -> Iterator[tuple[Part, Any]]:
        """The parts of a payload that are not empty, each with its place in the summary, if it has one."""
        first = 0
        for part in (part for part in packed.copies[0] if part.size):
            size = sum(summary_sizes(compressor, (part,)))
            yield part, self.data.summary[first : first + size] if size else None
            first += size

    def _encode(self, step: EncodeStep, compressor: Compressor) -> None:
        self._move_to(step.device, step.region)
        data, packed, region = self.data, step.packed, step.region
        data.payload = data.workspace.payload(packed.nbytes, device.device_of(data.x))
        if region.size == 0:
            return
        self._job.weights[self._place(str(step.point), region.start, region.stop) + "residual"] = step.weight
        x, residual = (self._prepared if step.agreed else self._prepare)(step.point, region)
        sent = self._kept(str(step.point), region, "sent") if self._job.feedback.kind == "ef21" else None
        whole = ((part, None) for part in packed.copies[0] if part.size)
        for part, summary in self._summaries(packed, compressor) if step.agreed else whole:
            inside = slice(part.start - region.start, part.stop - region.start)
            context = self._context(step.point, part, step.who, step.ranks, summary)
            payload = data.payload[part.offset : part.offset + part.nbytes]
            compressor.encode(x[inside], payload, None if residual is None else residual[inside], context)
            data.saturated += context.cut
            if sent is not None:
                compressor.decode_add(payload, sent[inside], context)

    def _learn(self, step: LearnStep, compressor: Compressor) -> None:
        for part in (part for copy in step.packed.copies for part in copy if part.size):
            payload = self.data.payload[part.offset : part.offset + part.nbytes]
            compressor.learn(payload, part.size, self._context(step.point, part, self._rank))

    def _decode(self, step: DecodeStep, compressor: Compressor) -> None:
        self._move_to(step.device, Dense(0, 0))
        data, packed, region = self.data, step.packed, step.region
        self._payload_to(device.device_of(data.x), packed.nbytes)
        for number, copy in enumerate(packed.copies):
            decode = compressor.decode_add if number else compressor.decode
            for part in (part for part in copy if part.size):
                payload = data.payload[part.offset : part.offset + part.nbytes]
                decode(payload, data.x[part.start : part.stop], self._context(step.point, part, self._rank))
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
        return f"{self._job.kept or self._job.name}|{self._home.size}|{point}|{start}:{stop}|"

    def _context(self, point: int, part: Part, who: int, ranks: int = 1, summary: Any = None) -> Context:
        """What a method is given for a part. ``who``: the rank that random bits are drawn for."""
        job, start, stop = self._job, part.start, part.stop
        return Context(
            key=self._key(point, start, who),
            shared=self._key(point, start, ALL_RANKS),
            step=job.step,
            ranks=ranks,
            workspace=self.data.workspace,
            share=part.size / self._home.size,
            state=Kept(job.memory, self._place(str(point), start, stop) + OWN),
            summary=summary,
        )

    def _key(self, point: int, start: int, rank: int) -> int:
        return encode_key(self._job.seed, self._job.step, rank, point, start, self._job.name)

    def finish(self, region: Dense) -> None:
        """Bring the result to where the tensor came from."""
        self._move_to(device.device_of(self._home), region)
        self._job.tally["saturated"] += self.data.saturated

    def _move_to(self, where: DeviceKind, region: Dense) -> None:
        """Go on with the tensor on another device, taking the current region along."""
        data = self.data
        if device.device_of(data.x) == where or device.device_of(self._home) == "cpu":
            return
        target = self._home if where == "gpu" else self._host_mirror()
        device.copy(target[region.start : region.stop], data.x[region.start : region.stop])
        data.x = target

    def copy(self, before: ScheduleStep | None, region: Dense) -> None:
        """What a step would copy to its device, ahead of it; ``None``: what ``finish`` would copy home."""
        if isinstance(before, DecodeStep):
            self._payload_to(before.device, before.packed.nbytes)
        elif isinstance(before, EncodeStep):
            self._move_to(before.device, before.region)
        else:
            self._move_to(device.device_of(self._home), region)

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
