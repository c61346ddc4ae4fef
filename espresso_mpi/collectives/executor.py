"""Runs a program: the steps of one tensor on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..arrays.workspace import Workspace
from ..compressors import Compressor
from ..tracing.recording import Recorder
from ..types import ITEMSIZE, DeviceKind, Route
from .copies import Copies, CopyStep, compile_copies
from .data.layout import Dense
from .halves import Half, compile_half
from .job import Job
from .messages.switches import EXECUTOR
from .messages.transport import Transport
from .ops.base import Data, idle, operations
from .program import DecodeStep, EncodeStep, IdleStep, MoveStep, ProgramStep, compile_route, segments
from .progress import Progress, interleave
from .segment_run import HANDLERS, SegmentLog, SegmentRun
from .tables.expected import Expected, expected
from .tables.expected_call import FirstMessages
from .tables.one_call import RepeatedTable
from .tables.operations import OperationTable, described
from .tables.running import PreparedRun, Run, TableRunner, obstacle
from .tables.segments import segment_table
from .tables.small_calls import small_call

if TYPE_CHECKING:
    from .route_operations import RouteOperation


def compressor_at(point: int, compressor: Compressor) -> Compressor:
    """The compressor of the encode point with this number."""
    return compressor if point == 0 else compressor.second_pass()


@dataclass(frozen=True)
class Stage:
    """One step of a running segment: the step, the data that it works on, and the function that runs it."""

    step: ProgramStep
    data: Data
    progress: Callable[[], Progress]


class Program:
    """A route compiled for tensors of one size: all message sizes are known, all functions are bound.

    Args:
        transport: used for all messages.
        route: the route.
        compressor: the compressor; None for dense routes.
        n: number of elements.
        dtype: element type of the working array (float32 if the route encodes).
        segment_bytes: target size of a segment between nodes, in bytes; 0 keeps the tensor whole.
        payload_bytes: the size from which the number of segments follows; default: the compressor's payload. State is
            kept by segment, so a compressor whose payload changes with the step needs one size for all steps.
        total: the result is the sum over the ranks instead of their mean.
        half: run this half of the route only, or copy compressed data instead, in one segment.

    Attributes:
        compressor, n: as given.
        owned: of a half: by rank, where its part lies in the working array; else empty.
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
        total: bool = False,
        half: Half | Copies | None = None,
    ) -> None:
        self._transport, self._dtype, self._route = transport, dtype, route
        self.compressor, self.n = compressor, n
        self._inside_at_once = transport.windows_everywhere
        self.owned: tuple[Dense, ...] = ()
        self._runners: dict[int, TableRunner | str] = {}
        self._operations: dict[DeviceKind, tuple[RouteOperation, ...]] = {}
        nbytes = payload_bytes or (n * ITEMSIZE[dtype] if compressor is None else compressor.nbytes(n))
        whole = compressor is not None and compressor.whole
        topology = transport.topology.undivided if total else transport.topology
        self._regions = segments(n, nbytes, topology, 0 if whole or half else segment_bytes)
        if half is None:
            compiled = [
                compile_route(route, topology, region, dtype, transport.rank, compressor) for region in self._regions
            ]
        elif isinstance(half, Copies):
            assert compressor is not None, "copies are compressed"
            compiled = [compile_copies(half, topology, transport.rank, compressor)]
        else:
            found = compile_half(half, route, topology, n, dtype, transport.rank, compressor)
            self.owned, compiled = found.owned, [found.steps]
        self._segments = [[(step, self._bound(step)) for step in steps] for steps in compiled]

    def _bound(self, step: ProgramStep) -> Callable[[SegmentRun], Progress]:
        """The function that runs a step."""
        if isinstance(step, IdleStep):
            return partial(idle, phases=operations()[step.op].phases)
        if isinstance(step, MoveStep):
            binds = step.bind if isinstance(step, CopyStep) else partial(operations()[step.op].bind, move=step.move)
            action = binds(self._transport)
            return lambda segment: segment.move(step, action)
        act, compressor = HANDLERS[type(step)], self._compressor_at(step.point)
        return lambda segment: act(segment, step, compressor)

    @property
    def count(self) -> int:
        """Number of segments."""
        return len(self._segments)

    def segment(self, number: int, x: Any, job: Job, recorder: Recorder) -> Progress:
        """Replace one segment of flat ``x`` by its mean over the ranks, in progress steps."""
        for progress in self.operation_progress(number, x, job, recorder):
            yield from progress

    def steps(self, number: int) -> list[ProgramStep]:
        """The steps of one segment."""
        return [step for step, _ in self._segments[number]]

    def stages(self, number: int, x: Any, job: Job, recorder: Recorder) -> Iterator[Stage]:
        """As ``segment``, but step by step, for measurements; run each step before you ask for the next."""
        workspace = self._transport.borrow()
        segment = SegmentRun(Data(x, self._dtype, workspace), job, SegmentLog(recorder, job, number, self._transport))
        for step, act in self._segments[number]:
            yield Stage(step, segment.data, partial(act, segment))
        segment.finish(self._regions[number])
        self._transport.give_back(workspace)

    def operations(self, home: DeviceKind) -> tuple[RouteOperation, ...]:
        """The operations of each segment of a tensor that is on the device ``home``."""
        from .route_operations import route_operations  # imports the planner, which only schedules need

        found = self._operations.get(home)
        if found is None:
            found = self._operations[home] = route_operations(
                self._route, self.steps(0), self._transport.topology, home
            )
        return found

    def operation_progress(
        self,
        number: int,
        x: Any,
        job: Job,
        recorder: Recorder,
        route: Sequence[RouteOperation] = (),
        kind: str | None = None,
    ) -> Iterator[Progress]:
        """The progress of each operation of a segment; finish one before you ask for the next.

        Args:
            number: index of the segment.
            x: the flat tensor.
            job: names and seeds of this run.
            recorder: gets the time of every step.
            route: the operations, see ``operations``; empty: every step is one.
            kind: kind of the scratch memory, see ``Transport.borrow``.
        """
        runner = "" if route or obstacle(x, job) else self._runner(number)
        if isinstance(runner, TableRunner):
            yield runner.progress(self._table_run(number, [x], [job], recorder))
            return
        workspace, region = self._transport.borrow(kind), self._regions[number]
        log, inside = SegmentLog(recorder, job, number, self._transport), self._inside_at_once and not route
        segment = SegmentRun(Data(x, self._dtype, workspace), job, log, inside)
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

    def table(self, number: int = 0) -> OperationTable | str:
        """The operations by which a segment of host memory runs without Python, or why there are none."""
        runner = self._runner(number)
        return runner if isinstance(runner, str) else runner.table

    def executor(self, x: Any, job: Job, scheduled: bool) -> str:
        """What runs a tensor, in words: a table of operations, or Python."""
        why = "the plan has a schedule" if scheduled else obstacle(x, job)
        return described(why) if why else self._words

    @cached_property
    def _words(self) -> str:
        return described(self.table())

    def expected(self) -> Expected | None:
        """How ranks that expect it make a call by this program; None: they cannot, as far as this rank sees."""
        runner = self._runner(0) if self.count == 1 else ""
        if isinstance(runner, str):
            return None
        return expected(runner.table, self._transport.topology, self._transport.rank)

    def small_call(
        self, arrays: Sequence[Any], jobs: Sequence[Job], recorder: Recorder, least: int, room: Callable[[int], int],
        first: FirstMessages | None,
    ) -> RepeatedTable | None:  # fmt: skip
        """As ``small_calls.small_call``, for the only tensor of this program; None also if it has several segments."""
        runner = "" if self.count > 1 or any(map(obstacle, arrays, jobs)) else self._runner(0)
        return None if isinstance(runner, str) else small_call(runner, jobs, arrays, recorder, least, room, first)

    def _runner(self, number: int) -> TableRunner | str:
        if number not in self._runners:
            self._runners[number] = self._made_runner(number)
        return self._runners[number]

    def _made_runner(self, number: int) -> TableRunner | str:
        compressor, transport = self.compressor, self._transport
        if not transport.by_tables:
            return f"{EXECUTOR}=python"
        if compressor is None and self._dtype != "float32":
            return f"a dense tensor of {self._dtype}"
        table = segment_table(transport, self._segments[number], self._compressor_at, self.n)
        return table if isinstance(table, str) else TableRunner(table, transport, [self.n])

    def _compressor_at(self, point: int) -> Compressor:
        assert self.compressor is not None, "a route that encodes needs a compressor"
        return compressor_at(point, self.compressor)

    def _table_run(
        self, number: int, arrays: Sequence[Any], jobs: Sequence[Job], recorder: Recorder,
        prepared: PreparedRun | None = None, steps: Sequence[int] = (),
    ) -> Run:  # fmt: skip
        def subject(workspace: Workspace) -> SegmentRun:
            log = SegmentLog(recorder, jobs[0], number, self._transport)
            return SegmentRun(Data(arrays[0], self._dtype, workspace), jobs[0], log, self._inside_at_once)

        def finish(segment: SegmentRun) -> None:
            segment.finish(self._regions[number])

        return Run(arrays, jobs, recorder, number, subject, finish, prepared, steps)

    def progress(self, arrays: Sequence[Any], jobs: Sequence[Job], recorder: Recorder) -> Progress:
        """As ``BucketProgram.progress``, for the only tensor of this program, in one segment."""
        return self.segment(0, arrays[0], jobs[0], recorder)

    def prepared(
        self, arrays: Sequence[Any], jobs: Sequence[Job], recorder: Recorder, repeats: bool = True
    ) -> PreparedRun | None:
        """As ``BucketProgram.prepared``."""
        runner = "" if self.count > 1 or obstacle(arrays[0], jobs[0]) else self._runner(0)
        return PreparedRun(runner, arrays, jobs, recorder, repeats) if isinstance(runner, TableRunner) else None

    def repeat(
        self, arrays: Sequence[Any], jobs: Sequence[Job], steps: Sequence[int], recorder: Recorder,
        prepared: PreparedRun,
    ) -> Progress:  # fmt: skip
        """As ``BucketProgram.repeat``."""
        runner = self._runner(0)
        assert isinstance(runner, TableRunner)
        return runner.progress(self._table_run(0, arrays, jobs, recorder, prepared, steps))

    def run(self, x: Any, job: Job, recorder: Recorder | None = None) -> None:
        """Replace flat ``x`` by its mean over the ranks; blocks until it is done."""
        recorder = recorder or Recorder()
        try:
            interleave(self.segment(number, x, job, recorder) for number in range(self.count))
        except BaseException:
            self._transport.outlive(x)
            raise
