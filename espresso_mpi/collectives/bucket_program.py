"""Runs a bucket: several compressed tensors that share messages, each with its own blocks, residual and random numbers.

The steps are those of the route. Each tensor encodes into its slot of a payload buffer and decodes from it, with the
regions and keys that it has alone. A collective of payloads moves the buffer, once for all tensors. Where payloads are
summed, their bodies are summed as one array, and so are the summaries that the ranks agree on before. Nothing else is
shared, so every result has the bits of a tensor that travels alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..arrays import device
from ..arrays.workspace import Workspace
from ..compressors import Compressor
from ..tracing.recording import Recorder
from ..types import SUMS, Collective, Encode, Route
from .bucket_layout import SharedLayouts, slots_of
from .data.layout import Dense, Packed
from .data.reduction import stored
from .executor import compressor_at
from .job import Job
from .messages.joint import JointRegions
from .messages.switches import EXECUTOR
from .messages.transport import Transport
from .messages.window import SharedWindow
from .ops.allreduce import summed
from .ops.base import Action, Data, Move, idle, operations, window_or_messages
from .program import (
    Compilation,
    DecodeStep,
    EncodeStep,
    IdleStep,
    MoveStep,
    ProgramStep,
    SummaryStep,
    UpdateStep,
    summary_sizes,
)
from .progress import DONE, Progress, at_once
from .segment_run import SegmentLog, SegmentRun
from .tables.building import TableBuilder
from .tables.emission import shares
from .tables.expected import Expected, expected
from .tables.expected_call import FirstMessages
from .tables.one_call import RepeatedTable
from .tables.operations import OperationTable, described
from .tables.running import PreparedRun, TableRunner, obstacle
from .tables.running import Run as TableRun
from .tables.segments import dense_move
from .tables.small_calls import small_call

S = TypeVar("S", EncodeStep, DecodeStep)
P = TypeVar("P", bound=ProgramStep)

Stage = Callable[["BucketRun"], Progress]
"""One step of the route for all tensors of a bucket."""


@dataclass
class BucketRun:
    """A bucket under way: its tensors, and the payload buffer that they share."""

    tensors: Sequence[SegmentRun]
    logs: Sequence[SegmentLog]
    data: Data


class BucketProgram:
    """A route compiled for tensors that share messages.

    Args:
        transport: used for all messages.
        route: the route; ``sharing.way_of`` is the same for it and each compressor.
        tensors: (compressor, elements) of each tensor. Each makes one segment. All are where they are encoded, on the
            host if payloads are summed.
        total: the results are sums over the ranks instead of means.
    """

    def __init__(
        self, transport: Transport, route: Route, tensors: Sequence[tuple[Compressor, int]], total: bool = False
    ) -> None:
        self._transport, self._rank = transport, transport.rank
        self._compressors, self._sizes = [c for c, _ in tensors], [n for _, n in tensors]
        topology = transport.topology.undivided if total else transport.topology
        self._compilations = [
            Compilation(route, topology, Dense(0, n), "float32", transport.rank, compressor)
            for compressor, n in tensors
        ]
        self._shared: SharedLayouts | None = None
        self._builder: TableBuilder | str = f"{EXECUTOR}=python"
        if route.sums_payloads:
            self._builder = "payloads are summed"
        elif transport.by_tables:
            self._builder = TableBuilder(transport, len(tensors))
        self._stages = [self._stage(position, step) for position, step in enumerate(route.steps)]
        self.table = self._builder if isinstance(self._builder, str) else self._builder.table()
        self._runner = None
        if isinstance(self.table, OperationTable):
            self._runner = TableRunner(self.table, transport, self._sizes)
        del self._compilations, self._shared, self._builder  # layouts of all ranks

    @property
    def count(self) -> int:
        """Number of segments: one."""
        return 1

    def progress(self, arrays: Sequence[Any], jobs: Sequence[Job], recorder: Recorder) -> Progress:
        """Replace flat float32 arrays by their means over the ranks, in progress steps."""
        if self._runner is not None and not any(map(obstacle, arrays, jobs)):
            yield from self._runner.progress(self._table_run(arrays, jobs, recorder))
            return
        workspace = self._transport.borrow()
        run = self._begun(arrays, jobs, recorder, workspace)
        for stage in self._stages:
            yield from stage(run)
        self._finish(run)
        self._transport.give_back(workspace)

    def prepared(self, arrays: Sequence[Any], jobs: Sequence[Job], recorder: Recorder) -> PreparedRun | None:
        """What later steps of the same tensors can use again, see ``repeat``; None if Python runs them."""
        if self._runner is None or any(map(obstacle, arrays, jobs)):
            return None
        return PreparedRun(self._runner, arrays, jobs, recorder)

    def repeat(
        self,
        arrays: Sequence[Any],
        jobs: Sequence[Job],
        steps: Sequence[int],
        recorder: Recorder,
        prepared: PreparedRun,
    ) -> Progress:
        """As ``progress``, for arrays of which nothing but the address and the values differ from those prepared.

        Args:
            steps: those of the jobs, which are made where they are needed.
        """
        assert self._runner is not None
        return self._runner.progress(replace(self._table_run(arrays, jobs, recorder), prepared=prepared, steps=steps))

    def expected(self) -> Expected | None:
        """As of ``Program``."""
        if self._runner is None:
            return None
        return expected(self._runner.table, self._transport.topology, self._transport.rank)

    def small_call(
        self, arrays: Sequence[Any], jobs: Sequence[Job], recorder: Recorder, least: int, room: Callable[[int], int],
        first: FirstMessages | None,
    ) -> RepeatedTable | None:  # fmt: skip
        """As ``small_calls.small_call``."""
        if self._runner is None or any(map(obstacle, arrays, jobs)):
            return None
        return small_call(self._runner, jobs, arrays, recorder, least, room, first)

    def _table_run(self, arrays: Sequence[Any], jobs: Sequence[Job], recorder: Recorder) -> TableRun:
        return TableRun(arrays, jobs, recorder, 0, partial(self._begun, arrays, jobs, recorder), self._finish)

    def _begun(self, arrays: Sequence[Any], jobs: Sequence[Job], recorder: Recorder, workspace: Workspace) -> BucketRun:
        logs = [SegmentLog(recorder, job, 0, self._transport) for job in jobs]
        tensors = [SegmentRun(Data(x, "float32", workspace), job, log) for x, job, log in zip(arrays, jobs, logs)]
        return BucketRun(tensors, logs, Data(arrays[0], "float32", workspace))

    def executor(self, arrays: Sequence[Any], jobs: Sequence[Job]) -> str:
        """What runs the bucket, in words: a table of operations, or Python."""
        return described(next(filter(None, map(obstacle, arrays, jobs)), self.table))

    def _finish(self, run: BucketRun) -> None:
        for tensor, n in zip(run.tensors, self._sizes):
            tensor.finish(Dense(0, n))

    # --- compiling ----------------------------------------------------------------------------------------------------

    def _stage(self, position: int, step: object) -> Stage:
        """What a step of the route is for the bucket; advances the layouts."""
        levels = set(self._compilations[0].averaged)
        taken = [self._take(compilation, position) for compilation in self._compilations]
        if isinstance(step, Encode):
            self._shared = SharedLayouts(self._compilations[0].topology, [c.layouts for c in self._compilations])
            return _in_turn([*self._agreement(taken), self._encode(_of(taken, EncodeStep))])
        if not isinstance(step, Collective):
            return self._decode(_of(taken, DecodeStep))
        packed = self._shared
        move = packed.advance(step, levels, self._rank) if packed is not None else None
        moving = self._collective(step, move, taken)
        return _in_turn([moving, self._update(_of(taken, UpdateStep))]) if _of(taken, UpdateStep) else moving

    def _collective(self, step: Collective, move: Move | None, taken: Sequence[Sequence[ProgramStep]]) -> Stage:
        """A collective of payloads by ``move``, or of dense tensors."""
        if isinstance(taken[0][0], IdleStep):
            phases = operations()[step.op].phases
            if isinstance(self._builder, TableBuilder):
                self._builder.idle(phases)
            return lambda run: idle(run, phases)
        moves = _of(taken, MoveStep)
        what = _Recorded(self._transport, moves)
        if move is not None and step.op in SUMS:
            return what.of(self._sum(step.op, move))
        if move is not None:
            self._add_move(step.op, move, what.nbytes)
            action = operations()[step.op].bind(self._transport, move)
            return what.of(lambda run: action(run.data))
        return self._add_dense(str(step), moves, what)

    def _add_dense(self, name: str, moves: Sequence[MoveStep], what: _Recorded) -> Stage:
        """Add a collective on dense tensors to the table, and return what does it in Python."""
        dense = what.of(self._dense(moves[0].op, moves))
        inside = self._transport.windows_everywhere and moves[0].inside
        stage: Stage = (lambda run: at_once(dense(run))) if inside else dense
        if isinstance(self._builder, TableBuilder):
            move = dense_move(self._transport, moves, what.nbytes)
            if move is None:
                self._builder.python(stage, name)
            else:
                self._builder.dense(move)
        return stage

    def _sum(self, op: str, move: Move) -> Stage:
        """The payloads without their headers, side by side, are summed as one array."""
        regions, inner = summed(move)
        if not regions:
            return partial(idle, phases=operations()[op].phases)
        edges = list(itertools.accumulate((region.size for region in regions), initial=0))
        action = operations()[op].bind(self._transport, replace(inner, before=(Dense(0, edges[-1]),) * len(move.group)))

        def run(bucket: BucketRun) -> Progress:
            data = bucket.data
            bodies = data.payload.view(stored(inner.dtype))
            parts = [bodies[region.start : region.stop] for region in regions]
            joined = Data(data.workspace.array("bodies", edges[-1], bodies.dtype, "cpu"), inner.dtype, data.workspace)
            device.join(joined.x, parts)
            yield from action(joined)
            device.part(joined.x, parts)
            bucket.tensors[0].data.saturated += joined.saturated  # all count in one place

        return run

    def _agreement(self, taken: Sequence[Sequence[ProgramStep]]) -> list[Stage]:
        """What the ranks do before an encode to agree on the summaries of all tensors; nothing if there are none."""
        steps = _of(taken, SummaryStep)
        if not steps:
            return []
        pairs = [(step, compressor_at(step.point, c)) for step, c in zip(steps, self._compressors)]
        sizes = [sum(summary_sizes(compressor, step.packed.copies[0])) for step, compressor in pairs]
        edges = list(itertools.accumulate(sizes, initial=0))

        def summarise(run: BucketRun) -> Progress:
            whole = run.data.workspace.array("summary", edges[-1], np.float32, "cpu")
            run.data.summary = whole
            for tensor, pair, (a, b) in zip(run.tensors, pairs, itertools.pairwise(edges)):
                tensor.summarise(*pair, into=whole[a:b])
            return iter(())

        moves = _of(taken, MoveStep)
        if not moves:
            phases = operations()["allreduce"].phases
            return [summarise, lambda run: idle(run, phases)]
        like = next((one.move for one, size in zip(moves, sizes) if size), moves[0].move)
        move = replace(like, before=(Dense(0, edges[-1]),) * len(like.group))
        action = operations()["allreduce"].bind(self._transport, move)
        agree = _Recorded(self._transport, moves).of(
            lambda run: action(Data(run.data.summary, "float32", run.data.workspace))
        )
        return [summarise, agree]

    def _update(self, steps: Sequence[UpdateStep]) -> Stage:
        """Pass the summed payloads to the compressors."""
        assert self._shared is not None
        alone = [c.layouts[self._rank] for c in self._compilations]
        slots = slots_of(self._shared.of(self._rank), [layout for layout in alone if isinstance(layout, Packed)])
        placed = [replace(step, packed=own) if any(step.packed.copies) else step for step, own in zip(steps, slots)]
        pairs = [(step, compressor_at(step.point, c)) for step, c in zip(placed, self._compressors)]

        def run(bucket: BucketRun) -> Progress:
            for tensor, (step, compressor) in zip(bucket.tensors, pairs):
                tensor.data.payload = bucket.data.payload
                tensor.update(step, compressor)
            return iter(())

        return run

    def _add_move(self, op: str, move: Move, nbytes: Sequence[int]) -> None:
        """Add a collective of payloads to the table; there is no table if it does not know the collective."""
        sources = operations()[op].payload_sources(move)
        if sources is None:
            self._builder = f"{op} of payloads"
        elif isinstance(self._builder, TableBuilder):
            self._builder.move(op, move, sources, nbytes)

    def _take(self, compilation: Compilation, position: int) -> list[ProgramStep]:
        """The steps of one tensor for a step of the route."""
        compilation.take(position)
        taken, compilation.steps = compilation.steps, []
        return taken

    def _placed(self, steps: Sequence[S]) -> tuple[Packed, list[tuple[S, Compressor]]]:
        """The layout of the bucket on this rank; the step of each tensor with its slots there, and its compressor."""
        assert self._shared is not None
        whole = self._shared.of(self._rank)
        packed = slots_of(whole, [step.packed for step in steps])
        placed = [replace(step, packed=own) for step, own in zip(steps, packed)]
        return whole, [(step, compressor_at(step.point, c)) for step, c in zip(placed, self._compressors)]

    def _encode(self, steps: Sequence[EncodeStep]) -> Stage:
        whole, pairs = self._placed(steps)

        def run(bucket: BucketRun) -> Progress:
            bucket.data.payload = bucket.data.workspace.payload(whole.nbytes, device.device_of(bucket.data.x))
            for tensor, (step, compressor) in zip(bucket.tensors, pairs):
                tensor.encode(step, compressor)
            return iter(())

        def one(number: int, bucket: BucketRun) -> Progress:
            return bucket.tensors[number].encode(*pairs[number])

        if isinstance(self._builder, TableBuilder):
            self._builder.encode(whole.nbytes, pairs, [partial(one, number) for number in range(len(pairs))])
        return run

    def _decode(self, steps: Sequence[DecodeStep]) -> Stage:
        _, pairs = self._placed(steps)
        self._shared = None

        def run(bucket: BucketRun) -> Progress:
            for tensor, (step, compressor) in zip(bucket.tensors, pairs):
                tensor.data.payload = bucket.data.payload
                tensor.decode(step, compressor)
            return iter(())

        def one(number: int, bucket: BucketRun) -> Progress:
            tensor = bucket.tensors[number]
            tensor.data.payload = bucket.data.payload
            return tensor.decode(*pairs[number])

        if isinstance(self._builder, TableBuilder):
            self._builder.decode(pairs, [partial(one, number) for number in range(len(pairs))])
        return run

    def _dense(self, op: str, moves: Sequence[MoveStep]) -> Stage:
        """A collective on dense tensors: through the window for all at once, where the operation is known there."""
        transport = self._transport
        apart = [operations()[op].bind(transport, step.move) for step in moves]
        joint = self._joint_regions(op, moves)
        if joint is None:
            return lambda run: _in_step(transport, apart, run)
        group, divisor = moves[0].move.group, moves[0].move.reduce_op.divisor

        def by_window(window: SharedWindow, bucket: BucketRun) -> None:
            arrays = [tensor.data.x for tensor in bucket.tensors]
            if op == "allgather":
                window.allgather_joint(arrays, joint)
            else:
                window.reduce_scatter_joint(arrays, joint, divisor)

        return window_or_messages(
            transport, group, lambda bucket: bucket.tensors[0].data.x, by_window, partial(_in_step, transport, apart)
        )

    def _joint_regions(self, op: str, moves: Sequence[MoveStep]) -> JointRegions | None:
        if op == "allgather":
            owned = [step.move.before for step in moves]
        elif op == "reduce_scatter":
            owned = [tuple(operations()[op].advance(step.move.context, step.move.before)) for step in moves]
        else:
            return None
        return JointRegions.of([[(r.start, r.stop) for r in regions if isinstance(r, Dense)] for regions in owned])


def _of(taken: Sequence[Sequence[ProgramStep]], kind: type[P]) -> list[P]:
    """The steps of a kind, of which each tensor has one or none."""
    return [step for steps in taken for step in steps if isinstance(step, kind)]


def _in_turn(stages: Sequence[Stage]) -> Stage:
    """Stages as one; each is asked for when the one before has ended."""
    return stages[0] if len(stages) == 1 else lambda run: itertools.chain.from_iterable(act(run) for act in stages)


def _in_step(transport: Transport, actions: Sequence[Action], run: BucketRun) -> Progress:
    """Run a collective of each tensor, all of them in the same progress steps; each has scratch memory of its own."""
    kinds = [("in step", tensor.data.x.size.bit_length()) for tensor in run.tensors]  # many, of very different sizes
    spaces = [transport.borrow(kind) for kind in kinds]
    data = [replace(tensor.data, workspace=space, saturated=0) for tensor, space in zip(run.tensors, spaces)]
    left = [action(one) for action, one in zip(actions, data)]
    while left := [progress for progress in left if next(progress, DONE) is not DONE]:
        yield
    for tensor, one, space, kind in zip(run.tensors, data, spaces, kinds):
        tensor.data.saturated += one.saturated
        transport.give_back(space, kind)


@dataclass(frozen=True)
class _Recorded:
    """Records a collective of a bucket as one of each tensor.

    Every tensor has the time from the first progress step to the last one. Of what was sent and of the time in which
    the rank only waited, each has the share that its own bytes are of all.
    """

    transport: Transport
    moves: Sequence[MoveStep]

    @property
    def nbytes(self) -> list[int]:
        """The bytes that each tensor sends."""
        return [operations()[step.op].sent(step.move) for step in self.moves]

    def of(self, stage: Stage) -> Stage:
        """The same stage, recorded."""
        op, level, nbytes = self.moves[0].op, self.moves[0].move.context.level, self.nbytes
        what = f"{op}@{level}"

        def run(bucket: BucketRun) -> Progress:
            transport, progress, first = self.transport, stage(bucket), time.perf_counter()
            intra = inter = 0
            going = True
            while going:
                start, before, waited = time.perf_counter(), transport.sent, transport.waiter.waited
                going = next(progress, DONE) is not DONE
                after, waited = transport.sent, transport.waiter.waited - waited
                intra, inter = intra + after["intra"] - before["intra"], inter + after["inter"] - before["inter"]
                if waited > 0:
                    for log, (a, b) in zip(bucket.logs, shares(waited, nbytes)):
                        log.add("wait", start + a, start + b, what, level)
                if going:
                    yield
            stop = time.perf_counter()
            sent = zip(_whole_shares(intra, nbytes), _whole_shares(inter, nbytes))
            for log, (inside, between) in zip(bucket.logs, sent):
                log.add("wire", first, stop, what, level, inside, between)

        return run


def _whole_shares(total: int, weights: Sequence[int]) -> list[int]:
    """A number cut in proportion to weights, in whole numbers."""
    return [round(b) - round(a) for a, b in shares(total, weights)]
