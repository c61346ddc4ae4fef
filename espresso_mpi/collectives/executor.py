"""Runs a schedule: the steps of one tensor on this rank, with the residual of every encode."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .. import device
from ..compressors import Compressor
from ..types import DeviceKind, Route
from . import reduction
from .base import Data, operations
from .layout import Dense
from .schedule import DecodeStep, EncodeStep, MoveStep, ScheduleStep, bytes_sent, compile_route
from .transport import Transport

Residuals = MutableMapping[str, Any]


@dataclass
class Clock:
    """Seconds that this rank spent, by kind of step."""

    seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "wire": 0.0, "decode": 0.0})

    def timed(self, kind: str, action: Callable[[], None]) -> None:
        """Run and account."""
        start = time.perf_counter()
        action()
        self.seconds[kind] += time.perf_counter() - start


@dataclass(frozen=True)
class Job:
    """What makes one run of a program differ from the next: names for residuals, seeds for randomness."""

    name: str
    residuals: Residuals | None
    """Where residuals are kept by key; None compresses without feedback."""
    seed: int
    step: int


class Program:
    """A route made ready for tensors of one size: every message size known, every function bound.

    Args:
        route, compressor: the strategy; compressor None for dense routes.
        n: elements; dtype: element type of the working array (float32 where the route encodes).
    """

    def __init__(
        self, transport: Transport, route: Route, compressor: Compressor | None, n: int, dtype: str
    ) -> None:
        self._transport, self._compressor, self._dtype, self._n = transport, compressor, dtype, n
        steps = compile_route(route, transport.topology, n, dtype, transport.rank, compressor)
        self.bytes_sent = bytes_sent(steps)
        self._steps = [self._bound(step) for step in steps]

    def _bound(self, step: ScheduleStep) -> tuple[str, Callable[[_Run], None]]:
        """The kind of a step, for the clock, and the function that does it."""
        if isinstance(step, MoveStep):
            action = operations()[step.op].bind(self._transport, step.move)
            return "wire", lambda run: action(run.data)
        assert self._compressor is not None, "a route that encodes needs a compressor"
        if isinstance(step, EncodeStep):
            return "encode", partial(_Run.encode, step=step, compressor=self._compressor)
        return "decode", partial(_Run.decode, step=step, compressor=self._compressor)

    def run(self, x: Any, job: Job, clock: Clock) -> None:
        """Replace flat ``x`` by the mean over the ranks."""
        run = _Run(x, self._dtype, self._transport, job)
        for kind, act in self._steps:
            clock.timed(kind, partial(act, run))
        run.finish(Dense(0, self._n))


class _Run:
    """One tensor on its way, on whichever device its current step wants it."""

    def __init__(self, x: Any, dtype: str, transport: Transport, job: Job) -> None:
        self._home, self._transport, self._job = x, transport, job
        self.data = Data(x, dtype, transport.workspace)

    def encode(self, step: EncodeStep, compressor: Compressor) -> None:
        self._move_to(step.device, step.region)
        data, packed = self.data, step.packed
        data.payload = data.workspace.payload(packed.nbytes, device.device_of(data.x))
        residual = self._residual(step)
        for number, part in enumerate(part for copy in packed.copies for part in copy):
            compressor.encode(
                data.x[part.start : part.stop],
                data.payload[part.offset : part.offset + part.nbytes],
                None
                if residual is None
                else residual[part.start - step.region.start : part.stop - step.region.start],
                self._key(step.point, number),
            )

    def decode(self, step: DecodeStep, compressor: Compressor) -> None:
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
        if kept is None:
            return None
        key = f"{self._job.name}|{step.point}|{region.start}:{region.stop}"
        where = device.device_of(self.data.x)
        if key not in kept:
            kept[key] = device.zeros(region.size, np.float32, where)
        elif device.device_of(kept[key]) != where:
            moved = device.empty(region.size, np.float32, where)
            device.copy(moved, kept[key])
            kept[key] = moved
        return kept[key]

    def _key(self, point: int, part: int) -> int:
        """The seed of one encode: of (seed, tensor, step, rank, encode point, part), so no two share random bits."""
        job = self._job
        text = (
            struct.pack("<qqqqq", job.seed, job.step, self._transport.rank, point, part) + job.name.encode()
        )
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
