"""Runs a bucket: several compressed tensors that share messages, each with its own blocks, residual and random numbers.

The steps are those of the route. Each tensor encodes into its slot of a payload buffer and decodes from it, with the
regions and keys that it has alone. A collective of payloads moves the buffer, once for all tensors. Where payloads are
summed, their bodies are summed as one array, and so are the summaries that the ranks agree on before. Nothing else is
shared, so every result has the bits of a tensor that travels alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..arrays import device
from ..arrays.workspace import Workspace
from ..compressors import Compressor
from ..tracing.recording import Recorder
from ..types import SUMS, Collective, Encode, Route
from .bucket_layout import SharedLayouts, slots_of
from .bucket_stages import BucketRun, Recorded, Stage, dense_collective, in_turn, payload_sum
from .data.layout import Dense, Packed
from .executor import compressor_at
from .job import Job
from .messages.switches import EXECUTOR
from .messages.transport import Transport
from .ops.base import Data, Move, idle, operations
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
from .progress import Progress, at_once
from .segment_run import SegmentLog, SegmentRun
from .tables.expected import Expected, expected
from .tables.expected_call import FirstMessages
from .tables.one_call import RepeatedTable
from .tables.operations import OperationTable, described
from .tables.running import PreparedRun, TableRunner, obstacle
from .tables.running import Run as TableRun
from .tables.segments import dense_move
from .tables.small_calls import small_call
from .tables.summing import SummingBuilder

S = TypeVar("S", SummaryStep, EncodeStep, DecodeStep)
P = TypeVar("P", bound=ProgramStep)


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
        self._builder = SummingBuilder(transport, self._sizes) if transport.by_tables else None
        self._stages = [self._stage(position, step) for position, step in enumerate(route.steps)]
        self.table: OperationTable | str = f"{EXECUTOR}=python"
        self._runner = None
        if self._builder is not None:
            self.table = self._builder.table()
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

    def prepared(
        self, arrays: Sequence[Any], jobs: Sequence[Job], recorder: Recorder, repeats: bool = True
    ) -> PreparedRun | None:
        """What later steps of the same tensors can use again, see ``repeat``; None if Python runs them.

        Args:
            repeats: as of ``PreparedRun``.
        """
        if self._runner is None or any(map(obstacle, arrays, jobs)):
            return None
        return PreparedRun(self._runner, arrays, jobs, recorder, repeats)

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
            steps: those of the jobs, which are made where they are needed; empty if no ledger keeps their times.
        """
        assert self._runner is not None
        return self._runner.progress(self._table_run(arrays, jobs, recorder, prepared, steps))

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

    def _table_run(
        self, arrays: Sequence[Any], jobs: Sequence[Job], recorder: Recorder, prepared: PreparedRun | None = None,
        steps: Sequence[int] = (),
    ) -> TableRun:  # fmt: skip
        begun = partial(self._begun, arrays, jobs, recorder)
        return TableRun(arrays, jobs, recorder, 0, begun, self._finish, prepared, steps)

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
            return in_turn([*self._agreement(taken), self._encode(_of(taken, EncodeStep))])
        if not isinstance(step, Collective):
            return self._decode(_of(taken, DecodeStep))
        packed = self._shared
        move = packed.advance(step, levels, self._rank) if packed is not None else None
        moving = self._collective(step, move, taken)
        return in_turn([moving, self._update(_of(taken, UpdateStep))]) if _of(taken, UpdateStep) else moving

    def _collective(self, step: Collective, move: Move | None, taken: Sequence[Sequence[ProgramStep]]) -> Stage:
        """A collective of payloads by ``move``, or of dense tensors."""
        if isinstance(taken[0][0], IdleStep):
            return self._idle(step.op)
        moves = _of(taken, MoveStep)
        what = Recorded(self._transport, moves)
        return self._add_dense(str(step), moves, what) if move is None else self._of_payloads(step.op, move, what)

    def _idle(self, op: str) -> Stage:
        """Take no part in a collective."""
        phases = operations()[op].phases
        if self._builder is not None:
            self._builder.idle(phases)
        return lambda run: idle(run, phases)

    def _of_payloads(self, op: str, move: Move, what: Recorded) -> Stage:
        """A collective of payloads."""
        if op in SUMS:
            stage = what.of(payload_sum(self._transport, op, move))
        else:
            action = operations()[op].bind(self._transport, move)
            stage = what.of(lambda run: action(run.data))
        sources = operations()[op].payload_sources(move)
        if self._builder is not None and sources is None:
            self._builder.sum_payloads(op, move, stage, what.nbytes)
        elif self._builder is not None and sources is not None:
            self._builder.move(op, move, sources, what.nbytes)
        return stage

    def _add_dense(self, name: str, moves: Sequence[MoveStep], what: Recorded) -> Stage:
        """Add a collective on dense tensors to the table, and return what does it in Python."""
        dense = what.of(dense_collective(self._transport, moves[0].op, moves))
        inside = self._transport.windows_everywhere and moves[0].inside
        stage: Stage = (lambda run: at_once(dense(run))) if inside else dense
        if self._builder is not None:
            move = dense_move(self._transport, moves, what.nbytes)
            if move is None:
                self._builder.python(stage, name)
            else:
                self._builder.dense(move)
        return stage

    def _agreement(self, taken: Sequence[Sequence[ProgramStep]]) -> list[Stage]:
        """What the ranks do before an encode to agree on the summaries of all tensors; nothing if there are none."""
        steps, moves = _of(taken, SummaryStep), _of(taken, MoveStep)
        if not steps:
            return []
        whole, pairs = self._placed(steps)
        sizes = [sum(summary_sizes(compressor, step.packed.copies[0])) for step, compressor in pairs]
        edges = list(itertools.accumulate(sizes, initial=0))

        def one(number: int, run: BucketRun) -> Progress:
            own = run.data.summary[edges[number] : edges[number + 1]]
            return run.tensors[number].summarise(*pairs[number], into=own)

        def summarise(run: BucketRun) -> Progress:
            run.data.summary = run.data.workspace.array("summary", edges[-1], np.float32, "cpu")
            return itertools.chain.from_iterable(one(number, run) for number in range(len(pairs)))

        if self._builder is not None:
            self._builder.summarise(whole.nbytes, pairs, [partial(one, number) for number in range(len(pairs))])
        if not moves:
            return [summarise, self._idle("allreduce")]
        like = next((one.move for one, size in zip(moves, sizes) if size), moves[0].move)
        move, what = replace(like, before=(Dense(0, edges[-1]),) * len(like.group)), Recorded(self._transport, moves)
        action = operations()["allreduce"].bind(self._transport, move)
        agree = what.of(lambda run: action(Data(run.data.summary, "float32", run.data.workspace)))
        if self._builder is not None:
            self._builder.reduce_summaries(whole.nbytes, move, agree, what.nbytes)
        return [summarise, agree]

    def _update(self, steps: Sequence[UpdateStep]) -> Stage:
        """Pass the summed payloads to the compressors."""
        assert self._shared is not None
        alone = [c.layouts[self._rank] for c in self._compilations]
        slots = slots_of(self._shared.of(self._rank), [layout for layout in alone if isinstance(layout, Packed)])
        placed = [replace(step, packed=own) if any(step.packed.copies) else step for step, own in zip(steps, slots)]
        pairs = [(step, compressor_at(step.point, c)) for step, c in zip(placed, self._compressors)]

        of_each = _with_payload(SegmentRun.update, pairs)
        if self._builder is not None:
            self._builder.update(pairs, of_each)
        return in_turn(of_each)

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

        if self._builder is not None:
            self._builder.encode(whole.nbytes, pairs, [partial(one, number) for number in range(len(pairs))])
        return run

    def _decode(self, steps: Sequence[DecodeStep]) -> Stage:
        _, pairs = self._placed(steps)
        self._shared = None

        of_each = _with_payload(SegmentRun.decode, pairs)
        if self._builder is not None:
            self._builder.decode(pairs, of_each)
        return in_turn(of_each)


def _with_payload(act: Callable[..., Progress], pairs: Sequence[tuple[ProgramStep, Compressor]]) -> list[Stage]:
    """For each tensor, what does something with its part of the payload."""

    def one(number: int, bucket: BucketRun) -> Progress:
        tensor = bucket.tensors[number]
        tensor.data.payload = bucket.data.payload
        return act(tensor, *pairs[number])

    return [partial(one, number) for number in range(len(pairs))]


def _of(taken: Sequence[Sequence[ProgramStep]], kind: type[P]) -> list[P]:
    """The steps of a kind, of which each tensor has one or none."""
    return [step for steps in taken for step in steps if isinstance(step, kind)]
