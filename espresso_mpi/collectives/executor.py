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
from ..compressors import Compressor
from ..types import ITEMSIZE, DeviceKind, Route
from . import reduction
from .base import Data, operations
from .layout import Dense
from .schedule import DecodeStep, EncodeStep, IdleStep, MoveStep, ScheduleStep, compile_route, segments
from .transport import Transport
from .workspace import Workspace

Residuals = MutableMapping[str, Any]


@dataclass
class Clock:
    """Seconds that this rank spent, by kind of step."""

    seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "wire": 0.0, "decode": 0.0})

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Account the time of a with-block."""
        start = time.perf_counter()
        yield
        self.seconds[kind] += time.perf_counter() - start


@dataclass(frozen=True)
class Job:
    """What makes one run of a program differ from the next: names for residuals, seeds for randomness."""

    name: str
    residuals: Residuals | None
    """Where residuals are kept by key; None compresses without feedback."""
    seed: int
    step: int


Turns = Iterator[None]


class Program:
    """A route made ready for tensors of one size: every message size known, every function bound.

    Args:
        route, compressor: the strategy; compressor None for dense routes.
        n: elements; dtype: element type of the working array (float32 where the route encodes).
        segment_bytes: about how many bytes between machines a segment has; 0 keeps the tensor whole.
    """

    def __init__(
        self,
        transport: Transport,
        route: Route,
        compressor: Compressor | None,
        n: int,
        dtype: str,
        segment_bytes: int = 0,
    ) -> None:
        self._transport, self._compressor, self._dtype = transport, compressor, dtype
        nbytes = n * ITEMSIZE[dtype] if compressor is None else compressor.nbytes(n)
        self._regions = segments(n, nbytes, transport.topology, segment_bytes)
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
            return lambda segment: action(segment.data)
        assert self._compressor is not None, "a route that encodes needs a compressor"
        if isinstance(step, EncodeStep):
            return partial(_Segment.encode, step=step, compressor=self._compressor)
        return partial(_Segment.decode, step=step, compressor=self._compressor)

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

    def encode(self, step: EncodeStep, compressor: Compressor) -> Turns:
        with self._clock.timing("encode"):
            self._encode(step, compressor)
        return iter(())

    def decode(self, step: DecodeStep, compressor: Compressor) -> Turns:
        with self._clock.timing("decode"):
            self._decode(step, compressor)
        return iter(())

    def _encode(self, step: EncodeStep, compressor: Compressor) -> None:
        self._move_to(step.device, step.region)
        data, packed = self.data, step.packed
        data.payload = data.workspace.payload(packed.nbytes, device.device_of(data.x))
        residual = self._residual(step)
        for part in (part for copy in packed.copies for part in copy):
            compressor.encode(
                data.x[part.start : part.stop],
                data.payload[part.offset : part.offset + part.nbytes],
                None if residual is None else residual[part.start - step.region.start : part.stop - step.region.start],
                self._key(step.point, part.start),
            )

    def _decode(self, step: DecodeStep, compressor: Compressor) -> None:
        self._move_to(step.device, Dense(0, 0))
        data, packed = self.data, step.packed
        self._payload_to(device.device_of(data.x), packed.nbytes)
        for number, copy in enumerate(packed.copies):
            decode = compressor.decode_add if number else compressor.decode
            for part in copy:
                decode(data.payload[part.offset : part.offset + part.nbytes], data.x[part.start : part.stop])
        reduction.divide(data.x[step.region.start : step.region.stop], packed.divisor)

    def finish(self, region: Dense) -> None:
        """Bring the result to where the tensor came from."""
        self._move_to(device.device_of(self._home), region)

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

    def _residual(self, step: EncodeStep) -> Any:
        kept, region = self._job.residuals, step.region
        if kept is None or region.size == 0:
            return None
        key = f"{self._job.name}|{self._home.size}|{step.point}|{region.start}:{region.stop}"
        where = device.device_of(self.data.x)
        if key not in kept:
            kept[key] = device.zeros(region.size, np.float32, where)
        elif device.device_of(kept[key]) != where:
            moved = device.empty(region.size, np.float32, where)
            device.copy(moved, kept[key])
            kept[key] = moved
        return kept[key]

    def _key(self, point: int, start: int) -> int:
        """The seed of one encode, of (seed, tensor, step, rank, point, first element): none share random bits."""
        job = self._job
        text = struct.pack("<qqqqq", job.seed, job.step, self._rank, point, start) + job.name.encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
