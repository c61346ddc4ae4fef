"""Collectives: steps of whole routes, pass after pass.

Between passes ranks exchange a few bytes, as sessions do between calls. Links and caches are thus as busy as in
training. A step lasts from when the last rank began it until the last rank has ended it. The end of a step is the begin
of the next on every rank, so the steps of a pass add up to the pass, and nothing is counted twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np

from ... import compressors
from ...collectives.data.layout import Layout, Packed, Topology
from ...collectives.executor import Program, Stage
from ...collectives.messages.agreement import gather_small
from ...collectives.messages.transport import Transport
from ...collectives.program import MoveStep
from ...compressors import Compressor
from ...planner.model.curve import Curve
from ...tracing.recording import Recorder
from ...types import CLOSING, Collective, Level, Op, Route
from .inputs import job_of, normal
from .repeating import Point, Repeating, Times, ends_first, paired, telescoped
from .request import Request

MoveKey = tuple[Op, Level, bool]

DENSE = (
    "allreduce@flat",
    "reduce_scatter@intra/allreduce@inter/allgather@intra",
    "reduce_scatter@flat/allgather@flat",
    "reduce@flat/broadcast@flat",
    "reduce_scatter@intra/reduce_scatter@inter/allgather@inter/allgather@intra",
    "reduce_scatter@intra/reduce@inter/broadcast@inter/allgather@intra",
    "reduce@intra/allreduce@inter/broadcast@intra",
    "reduce@intra/reduce_scatter@inter/allgather@inter/broadcast@intra",
    "reduce@intra/reduce@inter/broadcast@inter/broadcast@intra",
)
PACKED = (
    "encode@cpu/alltoall@flat/decode@cpu/encode@cpu/allgather@flat/decode@cpu",
    "encode@cpu/gather@flat/decode@cpu/encode@cpu/broadcast@flat/decode@cpu",
    "encode@cpu/alltoall@intra/decode@cpu/encode@cpu/alltoall@inter/decode@cpu/encode@cpu/allgather@inter"
    "/allgather@intra/decode@cpu",
    "encode@cpu/alltoall@intra/decode@cpu/encode@cpu/gather@inter/decode@cpu/encode@cpu/broadcast@inter"
    "/allgather@intra/decode@cpu",
    "encode@cpu/gather@intra/decode@cpu/encode@cpu/gather@inter/decode@cpu/encode@cpu/broadcast@inter"
    "/broadcast@intra/decode@cpu",
    "encode@cpu/gather@intra/decode@cpu/encode@cpu/alltoall@inter/decode@cpu/encode@cpu/allgather@inter"
    "/broadcast@intra/decode@cpu",
)
"""Routes that have every move of the decision tree among them, those of payloads as well."""

_CARRIER = "fp16"
"""What makes the payloads of those: half the bytes, at little time."""


class Moves:
    """Measures collectives, as steps of routes that are carried out whole. Collective, as are its methods.

    Attributes:
        reach: bytes of the largest tensors that there is time for.
    """

    def __init__(self, repeating: Repeating, request: Request) -> None:
        self._repeating, self._request, self._transport = repeating, request, repeating.transport
        self.reach = math.inf

    def warm_up(self) -> None:
        """Load every kernel, or compile it, before time counts."""
        for one in self._routes():
            self._times_along(one, self._request.nbytes[0])

    def curves(self) -> dict[MoveKey, Curve]:
        """A curve for every operation at every level."""
        self._repeating.allow("moves")
        measured = self._routes()
        points = [
            Point(f"{one.route} at {nbytes} bytes", one, nbytes, partial(self._times_along, one))
            for nbytes in ends_first(self._request.nbytes)
            for one in measured
        ]
        times, visit = Times(), partial(self._times_along, measured[0])
        self.reach = self._repeating.reach(visit, max(self._request.nbytes), len(measured))
        for point in self._repeating.surveyed(points, reach=self.reach):
            one: MeasuredRoute = point.family
            sizes = self._put_in(one.program(self._transport, point.size))
            assert point.found is not None
            for key, size, seconds in zip(one.keys, sizes, point.found.T):
                if key is not None and size > 0:
                    times.note(key, size, seconds)
        return times.curves()

    def _routes(self) -> list[MeasuredRoute]:
        """The routes whose moves are asked for, each with the moves that are looked at."""
        topology = self._transport.topology
        wanted = {level for level in get_args(Level) if _members(topology, level) > 1}
        routes = [Route.parse(text) for text in (*DENSE, *PACKED)]
        found = [MeasuredRoute(route, _wanted(keys_along(route, topology), wanted)) for route in routes]
        return [one for one in found if any(one.keys)]

    def _times_along(self, measured: MeasuredRoute, nbytes: int) -> np.ndarray:
        """Passes along a route."""
        program, n = measured.program(self._transport, nbytes), measured.elements(nbytes)
        job = job_of(measured.method, n)
        source = normal(n, self._transport.rank)
        x = source.copy()

        def run() -> list[float]:
            x[:] = source
            self._repeating.round()
            return _marks(program.stages(0, x, job, Recorder()))

        return telescoped(paired(self._repeating.passes(run)))

    def _put_in(self, program: Program) -> list[int]:
        """Bytes that the rank with most puts into each step."""
        mine = np.array([_nbytes(step) for step in program.steps(0)], np.int64)
        every = gather_small(self._transport, mine.view(np.uint8), mine.nbytes)
        return [int(most) for most in np.max([row.view(np.int64) for row in every], axis=0)]


@dataclass(frozen=True)
class MeasuredRoute:
    """A route, and for each step of its schedule the move that it tells about."""

    route: Route
    keys: tuple[MoveKey | None, ...]

    @property
    def method(self) -> Compressor | None:
        """What makes the payloads."""
        return compressors.get(_CARRIER) if self.route.compressed else None

    def elements(self, nbytes: int) -> int:
        """Elements of a tensor that is so many bytes on its way."""
        return max(1, nbytes // (2 if self.route.compressed else 4))

    def program(self, transport: Transport, nbytes: int) -> Program:
        """The route made ready."""
        return Program(transport, self.route, self.method, self.elements(nbytes), "float32")


def _wanted(keys: Sequence[MoveKey | None], levels: Collection[Level]) -> tuple[MoveKey | None, ...]:
    """The keys with None for moves at other levels."""
    return tuple(key if key and key[1] in levels else None for key in keys)


def keys_along(route: Route, topology: Topology) -> tuple[MoveKey | None, ...]:
    """The moves along a route, as the profile names them; None for encodes and decodes."""
    found: list[MoveKey | None] = []
    one_goes_on = False
    for step in route.steps:
        if not isinstance(step, Collective):
            found.append(None)
            continue
        if step.level == "intra":
            one_goes_on = CLOSING.get(step.op) == "broadcast" and topology.local_size > 1
        found.append((step.op, step.level, step.level == "inter" and one_goes_on))
    return tuple(found)


def _members(topology: Topology, level: Level) -> int:
    """Ranks that communicate with each other at a level, on the smallest node."""
    return {"flat": topology.size, "intra": topology.local_size, "inter": len(topology.nodes)}[level]


def _marks(stages: Iterator[Stage]) -> list[float]:
    """Carry the steps out; returns when each began, which is when the one before ended, and when it ended."""
    marks = [time.perf_counter()]
    for stage in stages:
        for _ in stage.progress():
            pass
        marks += [time.perf_counter()] * 2
    return marks[:-1]


def _nbytes(step: Any) -> int:
    """Bytes that this rank puts into a collective: the root, into a broadcast."""
    if not isinstance(step, MoveStep):
        return 0
    before, move = step.move.before, step.move
    held = before[move.context.root] if step.op == "broadcast" else before[move.index]
    return _size(held, move.bytes_of)


def _size(state: Layout, bytes_of: Callable[[Any], int]) -> int:
    if isinstance(state, Packed):
        return sum(part.nbytes for copy in state.copies for part in copy)
    return bytes_of(state)
