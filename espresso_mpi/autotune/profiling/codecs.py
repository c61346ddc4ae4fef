"""Encodes and decodes, copies between host and GPU, and the check: the executor's own code, without the network.

Every rank acts as one of two: it encodes, is given a second payload like its own, and decodes the sum. All ranks do so
at the same time, and those of a node meet before each step. Ranks that share cores thus compete as in training. A step
lasts from when the last rank of a node begins it until the last one has ended it, on the slowest node. The decode of a
payload costs half of the decode of two.

What a GPU does is timed by a pair of events around it on its stream, not by the host's clock. If its stream is idle,
the first event passes at once, so the time between them has the launches in it: of a few elements it is little else,
and what a curve rises by is the kernels' own. How long the host takes to queue an operation is noted apart.

Where ranks share cores, ranks that compute delay others that leave the collective before. That time belongs to the
collective and to the call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...arrays import device
from ...arrays.gpu_times import Stopwatch
from ...collectives.data import reduction
from ...collectives.data.layout import Dense, Topology
from ...collectives.data.reduction import ReduceOp
from ...collectives.executor import Program, Stage
from ...collectives.messages.transport import Transport
from ...collectives.ops import base as collective
from ...collectives.program import MoveStep
from ...compressors import Compressor
from ...planner.model.curve import Curve
from ...planner.model.profile_keys import Direction
from ...tracing.recording import Recorder
from ...types import DeviceKind, Route
from .inputs import job_of, normal
from .repeating import Point, Repeating, Times, ends_first, paired, telescoped
from .request import Request

_SEARCHED = 8
"""Arrays of a search on a GPU that is timed: a call clears and copies the counts of all its tensors at once."""


class Codecs:
    """Measures encodes, decodes, copies and the check. Collective, as are its methods.

    Attributes:
        queueing: median seconds in which the slowest host queues an encode, and the decode of two payloads, of the
            fewest elements on the GPU; by spec.
    """

    def __init__(self, repeating: Repeating, request: Request) -> None:
        self.queueing: dict[str, list[float]] = {}
        self._stream: device.OwnStream | None = None
        self._repeating, self._request, self._transport = repeating, request, repeating.transport
        self._neighbours = _meeting(self._transport)

    def warm_up(self) -> None:
        """Load every kernel, or compile it, before time counts."""
        for method in self._request.methods.values():
            for where in self._request.devices:
                self._codec(method, where, self._request.elements[0])
        if "gpu" in self._request.devices:
            self._check_on_gpu(4 * self._request.elements[0])
        self._check(4 * self._request.elements[0])

    def codecs(self) -> dict[tuple[str, DeviceKind, Direction], Curve]:
        """A curve for encode and decode of every method on every device."""
        self._repeating.allow("codecs")
        points = [
            Point(f"{name} on the {where} with {n} elements", (name, where), n, partial(self._codec, method, where))
            for n in ends_first(self._request.elements)
            for name, method in self._request.methods.items()
            for where in self._request.devices
        ]
        times, methods = Times(), list(self._request.methods.values())
        visit = partial(self._codec, methods[-1], self._request.devices[0]) if methods else None
        families = len(methods) * len(self._request.devices)
        reach = self._repeating.reach(visit, max(self._request.elements), families) if visit else math.inf
        for point in self._repeating.surveyed(points, reach=reach):
            assert point.found is not None
            times.note((*point.family, "encode"), point.size, point.found[:, 0])
            times.note((*point.family, "decode"), point.size, point.found[:, 1] / 2)
        return times.curves()

    def copies(self) -> dict[Any, Curve]:
        """Between host and GPU, page-locked on the host as the session's are."""
        if "gpu" not in self._request.devices:
            return {}
        self._repeating.allow("copies")
        points = [Point(f"copies of {4 * n} bytes", "", 4 * n, self._copy) for n in ends_first(self._request.elements)]
        times = Times()
        for point in self._repeating.surveyed(points):
            assert point.found is not None
            times.note("to_host", point.size, point.found[:, 0])
            times.note("to_gpu", point.size, point.found[:, 1])
        return times.curves()

    def checks(self) -> dict[DeviceKind, Curve]:
        """The search for values that are not finite, on the host, and on the GPU where there is one."""
        self._repeating.allow("check")
        searches: dict[DeviceKind, Callable[[int], np.ndarray]] = {"cpu": self._check}
        if "gpu" in self._request.devices:
            searches["gpu"] = self._check_on_gpu
        points = [
            Point(f"check of {4 * n} bytes on the {where}", where, 4 * n, search)
            for n in ends_first(self._request.elements)
            for where, search in searches.items()
        ]
        times = Times()
        for point in self._repeating.surveyed(points):
            assert point.found is not None
            times.note(point.family, point.size, point.found[:, 0])
        return times.curves()

    def _codec(self, method: Compressor, where: DeviceKind, n: int) -> np.ndarray:
        """Encodes, and decodes of two payloads."""
        shaped = method.shaped((n,))
        route = Route.parse("encode@cpu/allgather@flat/decode@cpu").on(where)
        program = Program(_pair(self._transport), route, shaped, n, "float32")
        job = job_of(shaped, n)

        def acts(x: Any, source: Any) -> Iterator[Callable[[], None]]:
            device.copy(x, source)
            if where == "gpu":
                device.drain()  # or the launches that follow would be hidden behind it
            for stage in program.stages(0, x, job, Recorder()):
                if isinstance(stage.step, MoveStep):
                    _multiply(stage)
                else:
                    yield partial(_finish, stage)

        with self._on(where):
            x, source = (device.empty(n, np.float32, where) for _ in range(2))
            device.copy(source, normal(n, self._transport.rank))
            seconds, queueing = self._side_by_side(partial(acts, x, source), where)
        if where == "gpu" and n == self._request.elements[0]:
            self.queueing[str(method)] = np.median(queueing, axis=0).tolist()
        return seconds

    def _copy(self, nbytes: int) -> np.ndarray:
        n = nbytes // 4
        with self._on("gpu"):
            host, gpu = device.pinned(4 * n).view(np.float32), device.zeros(n, np.float32, "gpu")
            each = partial(device.copy_later, host, gpu), partial(device.copy_later, gpu, host)
            return self._side_by_side(lambda: iter(each), "gpu")[0]

    def _check(self, nbytes: int) -> np.ndarray:
        x = normal(nbytes // 4, 0)

        def count() -> None:
            reduction.count_non_finite(x, "float32", False)

        return self._side_by_side(lambda: iter((count,)))[0]

    def _check_on_gpu(self, nbytes: int) -> np.ndarray:
        from ...collectives.data import cuda_sums  # with numba's part for GPUs

        def acts(x: Any) -> Iterator[Callable[[], None]]:
            begun, one = [], (x, "float32", reduction.overflow_bits("float32", False))
            yield lambda: begun.append(cuda_sums.Counts([one] * _SEARCHED))
            begun[0].read()  # its memory is used again

        with self._on("gpu"):
            x = device.zeros(nbytes // 4, np.float32, "gpu")
            return self._side_by_side(partial(acts, x), "gpu")[0] / _SEARCHED

    @contextmanager
    def _on(self, where: DeviceKind) -> Iterator[None]:
        """Work on a device as a session does: on a GPU, on a stream of its own."""
        with device.leaving_stream():
            if where == "gpu":
                self._stream = self._stream or device.OwnStream()
                device.enter_stream(self._stream)
            yield

    def _side_by_side(
        self, acts: Callable[[], Iterator[Callable[[], None]]], where: DeviceKind = "cpu"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of what all ranks do by themselves at the same time on a device, and of queueing it.

        Both have the shape (passes, acts).
        """
        meet, watch = self._neighbours, Stopwatch() if where == "gpu" else None

        def one() -> list[float]:
            marks = []
            for act in acts():
                meet()
                start = time.perf_counter()
                if watch is not None:
                    watch.start()
                act()
                end = queued = time.perf_counter()
                if watch is not None:
                    watch.stop()
                    end = start + watch.seconds()
                marks += [start, end, start, queued]
            return marks

        marks = paired(self._repeating.passes(one))
        found = np.max([telescoped(marks[list(ranks)]) for ranks in self._transport.topology.nodes], axis=0)
        return found[:, ::2], found[:, 1::2]


def _finish(stage: Stage) -> None:
    """Carry out an encode or a decode to its end; on a GPU, queue it."""
    for _ in stage.progress():
        pass


def _meeting(transport: Transport) -> Callable[[], None]:
    """What lets the ranks of each node wait for each other: the least that a collective among them does."""
    group, context = transport.node, collective.CollectiveContext(transport.topology, "intra", False)
    region = (Dense(0, 1),) * len(group)
    move = collective.Move(context, group, group.index(transport.rank), region, "float32", ReduceOp("sum"))
    action = collective.operations()["allreduce"].bind(transport, move)
    data = collective.Data(np.zeros(1, np.float32), "float32", transport.workspace)

    def meet() -> None:
        for _ in action(data):
            pass

    return meet if len(group) > 1 else lambda: None


def _multiply(stage: Stage) -> None:
    """Do as if an allgather had brought a payload of each member."""
    data, move = stage.data, stage.step.move  # type: ignore[union-attr]
    own = data.payload
    every = data.workspace.other_payload(own, own.size * len(move.group))
    for member in range(len(move.group)):
        device.copy(every[member * own.size : (member + 1) * own.size], own)
    data.payload = every


@dataclass
class _Pair:
    """The transport as one of two ranks would see it that nobody else talks to."""

    transport: Transport
    topology: Topology
    rank: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


def _pair(transport: Transport) -> Any:
    return _Pair(transport, Topology(((0, 1),)), 0)
