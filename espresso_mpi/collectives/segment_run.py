"""Runs one segment of a tensor: encodes, moves and decodes it, and records how long that takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..arrays import device
from ..compressors import Compressor, Context
from ..tracing.recording import Kind, Recorder
from ..types import DeviceKind
from .data import reduction
from .data.layout import Dense, Packed, Part
from .job import ALL_RANKS, Job, encode_key
from .messages.transport import Transport
from .ops.base import Action, Data
from .program import DecodeStep, EncodeStep, MoveStep, ProgramStep, SummaryStep, UpdateStep, summary_sizes
from .progress import DONE, Progress, at_once
from .residuals import Residuals


@dataclass(frozen=True)
class SegmentLog:
    """Reports the spans of one segment to the recorder."""

    recorder: Recorder
    job: Job
    segment: int
    transport: Transport

    def add(
        self, kind: Kind, start: float, stop: float, what: str, level: str = "", intra: int = 0, inter: int = 0
    ) -> None:
        job = self.job
        self.recorder.add(kind, job.name, job.step, self.segment, start, stop, what, level, intra, inter)

    def recorded(self, progress: Progress, what: str, level: str) -> Progress:
        """Run a collective, and record its wire and wait spans.

        The wire span lasts from the first progress step to the last one, although other segments work in between. The
        time in which it only waited for messages is recorded as well.
        """
        transport, first = self.transport, time.perf_counter()
        intra = inter = 0
        going = True
        while going:
            start, before, waited = time.perf_counter(), transport.sent, transport.waiter.waited
            going = next(progress, DONE) is not DONE
            after = transport.sent
            intra, inter = intra + after["intra"] - before["intra"], inter + after["inter"] - before["inter"]
            if transport.waiter.waited > waited:
                self.add("wait", start, start + transport.waiter.waited - waited, what, level)
            if going:
                yield
        self.add("wire", first, time.perf_counter(), what, level, intra, inter)


class SegmentRun:
    """One running segment; its data is on the device that the current step needs.

    Args:
        data: the segment's working data.
        job: names and seeds of this run.
        log: gets the spans.
        inside_at_once: whether collectives on tensors inside a node are made in one progress step: where they pass
            shared windows on every node, no message is ever in flight. The same on all ranks.
    """

    def __init__(self, data: Data, job: Job, log: SegmentLog, inside_at_once: bool = False) -> None:
        self._home, self._rank, self._job, self._log = data.x, log.transport.rank, job, log
        self._residuals = Residuals(job, data.x.size)
        self._at_once = inside_at_once and device.device_of(data.x) == "cpu"
        self.data = data

    def summarise(self, step: SummaryStep, compressor: Compressor, into: Any = None) -> Progress:
        """Compute the summaries for the encode to come; ``into``: memory for them, if it is not this tensor's own."""
        return self._timed("encode", "summary", partial(self._summarise, into=into), step, compressor)

    def encode(self, step: EncodeStep, compressor: Compressor) -> Progress:
        return self._timed("encode", f"encode@{step.device}", self._encode, step, compressor)

    def update(self, step: UpdateStep, compressor: Compressor) -> Progress:
        return self._timed("decode", "update", self._update, step, compressor)

    def decode(self, step: DecodeStep, compressor: Compressor) -> Progress:
        return self._timed("decode", f"decode@{step.device}", self._decode, step, compressor)

    def move(self, step: MoveStep, action: Action) -> Progress:
        """Run a collective, on the tensor or on the summary."""
        data = self.data
        if step.of_summary:
            data = Data(data.summary, "float32", data.workspace)
        level = step.move.context.level
        progress = self._log.recorded(action(data), f"{step.op}@{level}", level)
        return at_once(progress) if self._at_once and step.inside else progress

    def _timed(
        self, kind: Kind, what: str, act: Callable[[Any, Compressor], None], step: Any, by: Compressor
    ) -> Progress:
        start = time.perf_counter()
        act(step, by)
        self._log.add(kind, start, time.perf_counter(), what)
        return iter(())

    def _summarise(self, step: SummaryStep, compressor: Compressor, into: Any) -> None:
        """Compute the summaries of an encode that the ranks must agree on."""
        self._move_to(step.device, step.region)
        data, region = self.data, step.region
        if into is None:
            size = sum(summary_sizes(compressor, step.packed.copies[0]))
            into = data.workspace.array("summary", size, np.float32, device.device_of(data.x))
        data.summary = into
        if region.size == 0:
            return
        x = data.x[region.start : region.stop]
        residual = self._residuals.prepare(step.point, x, region)
        for part, summary in self._summaries(step.packed, compressor):
            if summary is not None:
                inside = slice(part.start - region.start, part.stop - region.start)
                context = self._context(step.point, part, step.who)
                compressor.summarise(x[inside], summary, None if residual is None else residual[inside], context)

    def _summaries(self, packed: Packed, compressor: Compressor) -> Iterator[tuple[Part, Any]]:
        """The non-empty parts of a payload, each with its slice of the summary, if it has one."""
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
        residuals, x = self._residuals, data.x[region.start : region.stop]
        residuals.weigh(step.point, region, step.weight)
        residual = (residuals.prepared if step.agreed else residuals.prepare)(step.point, x, region)
        sent = residuals.sent(step.point, x, region)
        whole = ((part, None) for part in packed.copies[0] if part.size)
        for part, summary in self._summaries(packed, compressor) if step.agreed else whole:
            inside = slice(part.start - region.start, part.stop - region.start)
            context = self._context(step.point, part, step.who, step.ranks, summary)
            payload = data.payload[part.offset : part.offset + part.nbytes]
            compressor.encode(x[inside], payload, None if residual is None else residual[inside], context)
            data.saturated += context.cut
            if sent is not None:
                compressor.decode_add(payload, sent[inside], context)

    def _update(self, step: UpdateStep, compressor: Compressor) -> None:
        for part in (part for copy in step.packed.copies for part in copy if part.size):
            payload = self.data.payload[part.offset : part.offset + part.nbytes]
            compressor.update_from_aggregate(payload, part.size, self._context(step.point, part, self._rank))

    def _decode(self, step: DecodeStep, compressor: Compressor) -> None:
        self._move_to(step.device, Dense(0, 0))
        data, packed, region = self.data, step.packed, step.region
        self._payload_to(device.device_of(data.x), packed.nbytes)
        last = packed.copies[-1] if packed.copies else ()
        fused = compressor.divides and device.device_of(data.x) == "gpu" and _covers(last, region)
        for number, copy in enumerate(packed.copies):
            decode = compressor.decode_add if number else compressor.decode
            for part in (part for part in copy if part.size):
                payload = data.payload[part.offset : part.offset + part.nbytes]
                context = self._context(step.point, part, self._rank)
                context.divisor = packed.divisor if fused and number == len(packed.copies) - 1 else 1.0
                decode(payload, data.x[part.start : part.stop], context)
        if region.size == 0:
            return
        x = data.x[region.start : region.stop]
        if not fused:
            reduction.divide(x, packed.divisor)
        compressor.finalize(x)
        self._residuals.decoded(step.point, x, region)

    def _context(self, point: int, part: Part, who: int, ranks: int = 1, summary: Any = None) -> Context:
        """The context of a compressor for one part; ``who``: the rank that the random bits are drawn for."""
        job, start, stop = self._job, part.start, part.stop
        return Context(
            key=self._key(point, start, who),
            shared=self._key(point, start, ALL_RANKS),
            step=job.step,
            ranks=ranks,
            workspace=self.data.workspace,
            share=part.size / self._home.size,
            state=self._residuals.own(point, start, stop),
            summary=summary,
        )

    def _key(self, point: int, start: int, rank: int) -> int:
        return encode_key(self._job.seed, self._job.step, rank, point, start, self._job.name)

    def finish(self, region: Dense) -> None:
        """Copy the result to the device of the caller's tensor."""
        self._move_to(device.device_of(self._home), region)
        self._job.tally["saturated"] += self.data.saturated

    def _move_to(self, where: DeviceKind, region: Dense) -> None:
        """Continue on another device: copy the current region there."""
        data = self.data
        if device.device_of(data.x) == where or device.device_of(self._home) == "cpu":
            return
        target = self._home if where == "gpu" else self._host_mirror()
        device.copy(target[region.start : region.stop], data.x[region.start : region.stop])
        data.x = target

    def copy(self, before: ProgramStep | None, region: Dense) -> None:
        """Copy ahead of a step what it needs on its device; ``None``: copy ahead what ``finish`` would copy."""
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


def _covers(parts: Sequence[Part], region: Dense) -> bool:
    """Whether a payload's parts have every element of a region, each once, and no other."""
    ends = sorted((part.start, part.stop) for part in parts if part.size)
    starts, stops = [start for start, _ in ends], [stop for _, stop in ends]
    return [region.start, *stops] == [*starts, region.stop]


HANDLERS: dict[type, Callable[[SegmentRun, Any, Compressor], Progress]] = {
    SummaryStep: SegmentRun.summarise,
    EncodeStep: SegmentRun.encode,
    UpdateStep: SegmentRun.update,
    DecodeStep: SegmentRun.decode,
}
"""The method for each kind of step that needs a compressor."""
