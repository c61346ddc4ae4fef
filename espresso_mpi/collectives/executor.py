"""Runs a schedule: the steps of one tensor on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..compressors import Compressor
from ..tracing.recording import Recorder
from ..types import ITEMSIZE, DeviceKind, Route
from .job import Job
from .journey import ACTS, Journey, Log
from .messages.transport import Transport
from .ops.base import Data, idle, operations
from .program import DecodeStep, EncodeStep, IdleStep, MoveStep, ScheduleStep, compile_route, segments
from .turns import Turns, interleave

if TYPE_CHECKING:
    from .route_operations import RouteOperation


def compressor_at(point: int, compressor: Compressor) -> Compressor:
    """The method of the encode with this number along a route."""
    return compressor if point == 0 else compressor.second_pass()


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
        segment_bytes: about how many bytes between nodes a segment has; 0 keeps the tensor whole.
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

    def _bound(self, step: ScheduleStep) -> Callable[[Journey], Turns]:
        """The function that does a step."""
        if isinstance(step, IdleStep):
            return partial(idle, phases=operations()[step.op].phases)
        if isinstance(step, MoveStep):
            action = operations()[step.op].bind(self._transport, step.move)
            return lambda segment: segment.move(step, action)
        assert self._compressor is not None, "a route that encodes needs a compressor"
        act, compressor = ACTS[type(step)], compressor_at(step.point, self._compressor)
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
        segment = Journey(Data(x, self._dtype, workspace), job, Log(recorder, job, number, self._transport))
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
        segment = Journey(Data(x, self._dtype, workspace), job, Log(recorder, job, number, self._transport))
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
