"""Runs a table of operations in progress steps, and records how long its steps took."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from espresso_mpi.arrays import device
from espresso_mpi.arrays.workspace import Workspace
from espresso_mpi.compressors.checks import check_array
from espresso_mpi.tracing.recording import Recorder

from ..job import Job, encode_key
from ..messages import shared_memory
from ..messages.mpi_calls import CALLS
from ..messages.transport import Transport
from ..progress import Progress
from ..residuals import Residuals
from . import interpreter
from .operations import Code, Kept, OperationTable

_NO_FLAGS, _NO_WINDOW = np.zeros(1, np.int64), np.zeros(6, np.int64)


class _NoMessages:
    """Stands for the messages of a table that sends none."""

    calls, flag, in_flight = np.zeros(CALLS, np.int64), np.zeros(1, np.int32), 0


_NO_MESSAGES: Any = _NoMessages()


def obstacle(x: Any, job: Job) -> str:
    """Why no table can run for a tensor; empty: one can, if its program has one."""
    feedback = job.feedback
    if feedback.kind not in ("none", "plain") or feedback.decay != 1:
        return f"feedback {feedback}"
    if not isinstance(x, np.ndarray):
        return "the tensor is on a GPU"
    good = x.size > 0 and x.dtype == np.float32 and x.flags.carray
    return "" if good else "the tensor is empty, or its memory is not aligned"


@dataclass(frozen=True)
class Run:
    """One run of a table.

    Attributes:
        arrays, jobs: of its tensors.
        recorder: gets the times.
        segment: number of the segment.
        subject: makes what Python stages work on; called where one is reached.
        finish: called with that at the end.
    """

    arrays: Sequence[Any]
    jobs: Sequence[Job]
    recorder: Recorder
    segment: int
    subject: Callable[[Workspace], Any]
    finish: Callable[[Any], None]


class TableRunner:
    """Runs a table, any number of times at once.

    Args:
        table: the operations of this rank.
        transport: what they use.
        sizes: elements of each tensor, for the keys of residuals.
    """

    def __init__(self, table: OperationTable, transport: Transport, sizes: Sequence[int]) -> None:
        self.table, self.transport, self.sizes = table, transport, sizes
        self.by_window = any(operation.code == Code.MEET for operation in table.operations)

    @cached_property
    def halts(self) -> bool:
        """Whether it comes to a barrier of the node before anything that other ranks notice or Python must do."""
        before = [o.code for o in itertools.takewhile(lambda o: o.code != Code.MEET, self.table.operations)]
        return self.by_window and not {Code.PYTHON, Code.YIELD, Code.SEND, Code.RECEIVE} & set(before)

    def progress(self, run: Run) -> Progress:
        """Run it in progress steps, as many as the Python executor takes."""
        return self.rest(Active(self, run, self.transport.borrow()))

    def rest(self, active: Active) -> Progress:
        """What is left of a table that has begun, in progress steps."""
        stages, run, workspace, subject = self.table.stages, active.run, active.workspace, None
        while (why := active.go()) != interpreter.ENDED:
            if why == interpreter.YIELDED:
                yield
                continue
            stage = stages[active.stage]
            subject = subject or run.subject(workspace)
            if stage.nbytes is not None:  # a rank may have none of the data, and 0 bytes
                subject.data.payload = workspace.payload_buffer(stage.buffer, stage.nbytes)
            yield from stage.act(subject)
        active.record()
        if subject is not None:
            run.finish(subject)
        self.transport.give_back(workspace)

    def ranks_before(self, at: int) -> list[int]:
        """The other ends of the messages that the operation at ``at`` waits for."""
        found = list[int]()
        for operation in reversed(self.table.operations[:at]):
            if operation.code in (Code.SEND, Code.RECEIVE):
                found.append(operation.number)
            elif operation.code != Code.YIELD:
                break
        return found[::-1]


class Active:
    """A table under way.

    Args:
        runner: whose table it is.
        run: for what it runs.
        workspace: where the payload buffers are; given back at the end.
    """

    def __init__(self, runner: TableRunner, run: Run, workspace: Workspace) -> None:
        table, transport = runner.table, runner.transport
        self._runner, self._table, self._transport = runner, table, transport
        self.run, self.workspace = run, workspace
        self._residuals = [self._residual(kept) for kept in table.kept]
        buffers = [workspace.payload_buffer(number, max(room, 1)) for number, room in enumerate(table.room)]
        keys = [
            encode_key(job.seed, job.step, drawn.who, drawn.point, drawn.start, job.name)
            for drawn in table.drawn
            for job in (run.jobs[drawn.tensor],)
        ]
        self._places = np.array(
            [
                *map(device.begin_of, buffers),
                *map(device.begin_of, run.arrays),
                *(0 if kept is None else device.begin_of(kept) for kept in self._residuals),
                *(key - (key >> 63 << 64) for key in keys),
            ],
            np.int64,
        )
        self._marks = np.empty((table.marks, 2), np.int64)
        self._state = np.zeros(interpreter.STATE + table.tensors, np.int64)
        self._messages = transport.calls(table.messages) if table.messages else _NO_MESSAGES
        self._window = transport.window_on_host(transport.node) if runner.by_window else None

    @property
    def stage(self) -> int:
        """The number of the Python stage at which ``go`` has stopped."""
        return self._table.operations[int(self._state[interpreter.AT]) - 1].tensor

    # --- up to the first barrier, and back ---

    def show(self) -> None:
        """Run up to the first barrier of the node, see ``TableRunner.halts``."""
        self._before = [None if kept is None else kept.copy() for kept in self._residuals]
        self._state[interpreter.MODE] = interpreter.HALTS
        self._compiled()

    def met(self) -> None:
        """All ranks have shown the same, and met by another barrier. Nothing else runs beside the rest."""
        self._state[interpreter.AT] += 1
        self._state[interpreter.MODE] = interpreter.RUNS

    def rest(self) -> Progress:
        """What is left of the table, in progress steps."""
        return self._runner.rest(self)

    def undo(self) -> None:
        """Leave everything as it was before ``show``."""
        for kept, before in zip(self._residuals, self._before):
            if kept is not None and before is not None:
                kept[:] = before
        self._transport.give_back(self.workspace)

    def go(self) -> int:
        """Run on; returns ``interpreter.YIELDED``, ``PYTHON`` or ``ENDED``.

        Raises:
            RankTimeoutError: a rank did not come within the timeout; TransportError: MPI failed.
        """
        state, waiter = self._state, self._transport.waiter
        while True:
            before = int(state[shared_memory.WAITED])
            why = self._compiled()
            waiter.waited += (int(state[shared_memory.WAITED]) - before) * 1e-9
            if why == interpreter.FAILED:
                self._transport.raise_failed(int(state[interpreter.ERROR]))
            if why < interpreter.AT_BARRIER or why == interpreter.ENDED:
                return why
            waited = waiter.waited
            self._wait(why)
            state[shared_memory.WAITED] += round((waiter.waited - waited) * 1e9)

    def _compiled(self) -> int:
        """Run the compiled function once."""
        table, state, messages, window = self._table, self._state, self._messages, self._window
        flags, places = _NO_FLAGS, _NO_WINDOW
        if window is not None:
            flags, places = window.flags, window.places
            state[interpreter.EPOCH], state[interpreter.USES] = window.turn
        why: int = interpreter.run(
            table.rows, table.values, self._places, self._marks, flags, places, messages.flag, messages.calls, state,
            self._transport.waiter.pace,
        )  # fmt: skip
        if window is not None:
            window.turn = int(state[interpreter.EPOCH]), int(state[interpreter.USES])
        return why

    def _wait(self, why: int) -> None:
        """Wait for other ranks with the checks and the timeout of the waiter."""
        if why == interpreter.AT_BARRIER:
            assert self._window is not None
            self._window.wait_at_barrier()
            return
        self._messages.in_flight = int(self._state[interpreter.IN_FLIGHT])
        try:
            self._transport.finish_calls(self._messages, self._runner.ranks_before(int(self._state[interpreter.AT])))
        except BaseException:
            self._transport.outlive([self._messages, self.run])
            raise

    def record(self) -> None:
        """Record times, bytes, and values that were cut."""
        table, run, marks = self._table, self.run, (self._marks * 1e-9).tolist()
        self._transport.count_sent(table.posted, table.window, self._window)
        add, number = run.recorder.add, run.segment
        for span in table.spans:
            job, (start, before), (stop, after) = run.jobs[span.tensor], marks[span.first], marks[span.last]
            waited = after - before
            if span.kind == "wire" and waited > 0:
                a, b = (start + share * waited for share in span.share)
                add("wait", job.name, job.step, number, a, b, span.what, span.level)
            add(span.kind, job.name, job.step, number, start, stop, span.what, span.level, span.intra, span.inter)
        for job, cut in zip(run.jobs, self._state[interpreter.STATE :].tolist()):
            if cut:
                job.tally["saturated"] += cut

    def _residual(self, kept: Kept) -> np.ndarray | None:
        """The residual of a region, and its weight in the mean; None without feedback."""
        job, region = self.run.jobs[kept.tensor], kept.region
        residuals = Residuals(job, self._runner.sizes[kept.tensor])
        key = residuals.prefix(kept.point, region.start, region.stop) + "residual"
        job.weights[key] = kept.weight
        if job.feedback.kind != "plain":
            return None
        found: Any = job.store.get(key)
        if not isinstance(found, np.ndarray) or found.size != region.size:
            x = self.run.arrays[kept.tensor]
            found = residuals.prepared(kept.point, x[region.start : region.stop], region)
        check_array("residual", found, np.float32, region.size, "cpu")
        return found
