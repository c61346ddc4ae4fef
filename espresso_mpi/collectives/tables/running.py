"""Runs a table of operations in progress steps, and records how long its steps took."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from espresso_mpi.arrays import device
from espresso_mpi.arrays.addresses import addresses
from espresso_mpi.arrays.workspace import Workspace
from espresso_mpi.compressors import Context
from espresso_mpi.compressors.checks import check_array
from espresso_mpi.tracing.ledger import Ledger, LedgerInterval
from espresso_mpi.tracing.recording import Recorder

from ..job import Job, encode_key
from ..messages import cross_memory, shared_memory
from ..messages.mpi_calls import CALLS
from ..messages.single_copy import refusal
from ..messages.transport import Transport
from ..messages.window import SharedWindow
from ..progress import Progress
from ..residuals import Residuals
from . import interpreter
from .operations import BUFFERS, Code, KeptMemory, OperationTable

NO_FLAGS, NO_WINDOW = np.zeros(1, np.int64), np.zeros(6, np.int64)
"""For tables that use no window."""


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
        prepared: what is known from earlier steps; None: nothing.
        steps: that of each job; only with ``prepared``.
    """

    arrays: Sequence[Any]
    jobs: Sequence[Job]
    recorder: Recorder
    segment: int
    subject: Callable[[Workspace], Any]
    finish: Callable[[Any], None]
    prepared: PreparedRun | None = None
    steps: Sequence[int] = ()


class PreparedRun:
    """What stays equal from step to step of a table.

    Args:
        runner: runs the table.
        arrays, jobs: of the tensors in the first of the steps.
        recorder: gets the times.
        repeats: whether it runs step after step, so that its times are kept as numbers until somebody asks.
    """

    def __init__(
        self, runner: TableRunner, arrays: Sequence[Any], jobs: Sequence[Job], recorder: Recorder, repeats: bool = True
    ) -> None:
        table, self._repeats = runner.table, repeats
        self.kept = kept_arrays(runner, arrays, jobs)
        self._places = places_of(runner, self.kept)
        self._arrays = slice(BUFFERS, BUFFERS + table.tensors)
        self._recorder, self._table, self._names = recorder, table, [job.name for job in jobs]

    @cached_property
    def ledger(self) -> Ledger | None:
        """Keeps the times; None if Python does a part: that is recorded by itself, in the order of the steps."""
        table = self._table
        if table.stages or not self._repeats:
            return None
        return Ledger(self._recorder, intervals_of(table, self._names), table.marks)

    def places(self, arrays: Sequence[Any]) -> np.ndarray:
        """The places of a step, without those of buffers and keys."""
        places = self._places.copy()
        places[self._arrays] = addresses(arrays)
        return places


class TableRunner:
    """Runs a table, any number of times at once.

    Args:
        table: the operations of this rank.
        transport: what they use.
        sizes: elements of each tensor, for the keys of residuals.
    """

    def __init__(self, table: OperationTable, transport: Transport, sizes: Sequence[int]) -> None:
        self.table, self.transport, self.sizes = table, transport, sizes
        self.room = tuple(max(room, 1) for room in table.room)
        self.by_window = any(operation.code == Code.MEET for operation in table.operations)

    @cached_property
    def halts(self) -> bool:
        """Whether it comes to a barrier of the node before anything that other ranks notice or Python must do."""
        before = [o.code for o in itertools.takewhile(lambda o: o.code != Code.MEET, self.table.operations)]
        return self.by_window and not {Code.PYTHON, Code.YIELD, Code.SEND, Code.RECEIVE} & set(before)

    def progress(self, run: Run) -> Progress:
        """Run it in progress steps, as many as the Python executor takes."""
        active = Active(self, run, self.transport.borrow())
        stages, workspace, subject = self.table.stages, active.workspace, None
        while (why := active.go()) != interpreter.ENDED:
            if why == interpreter.YIELDED:
                yield
                continue
            stage = stages[active.stage]
            subject = subject or run.subject(workspace)
            if stage.nbytes is not None:  # a rank may have none of the data, and 0 bytes
                subject.data.payload = workspace.payload_buffer(stage.buffer, stage.nbytes)
            if stage.summary is not None:
                first, size = stage.summary
                memory = workspace.payload_buffer(0, first + 4 * size)
                subject.data.summary = memory[first:].view(np.float32)
            yield from stage.act(subject)
        active.record()
        if subject is not None:
            run.finish(subject)
        self.transport.give_back(workspace)

    def ranks_before(self, at: int) -> list[int]:
        """The other ends of the messages that the operation at ``at`` waits for."""
        found = list[int]()
        for operation in itertools.takewhile(lambda o: o.code != Code.WAIT, reversed(self.table.operations[:at])):
            if operation.code in (Code.SEND, Code.RECEIVE):
                found.append(operation.number)
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
        prepared = run.prepared or PreparedRun(runner, run.arrays, run.jobs, run.recorder)
        self._kept_alive = prepared.kept
        self._places = prepared.places(run.arrays)
        self._places[:BUFFERS] = workspace.payload_places(runner.room)
        if table.drawn:
            self._places[-len(table.drawn) :] = keys_of(table, run.jobs)
        self._marks = np.empty((table.marks, 2), np.int64)
        self._state = np.zeros(interpreter.STATE + table.tensors, np.int64)
        self._messages = self._borrowed_messages()
        self._window = transport.window_on_host(transport.node) if runner.by_window else None

    def _borrowed_messages(self) -> Any:
        """Memory for the messages, which stays in the workspace."""
        known, count = self.workspace.messages, self._table.messages
        if count not in known:
            known[count] = compiled_messages(self._transport, self._table)
        return known[count]

    @property
    def stage(self) -> int:
        """The number of the Python stage at which ``go`` has stopped."""
        return self._table.operations[int(self._state[interpreter.AT]) - 1].tensor

    def go(self) -> int:
        """Run on; returns ``interpreter.YIELDED``, ``PYTHON`` or ``ENDED``.

        Raises:
            RankTimeoutError: a rank did not come within the timeout; TransportError: MPI failed.
        """
        return run_compiled(
            interpreter.run, (), self._runner, self._places, self._marks, self._messages, self._window, self._state,
            self.run,
        )  # fmt: skip

    def record(self) -> None:
        """Record times, bytes, and values that were cut."""
        table, run = self._table, self.run
        self._transport.count_sent(table.posted, table.window, self._window)
        count_cut(run.jobs, self._state)
        if run.prepared is None or run.prepared.ledger is None:
            recorded(table, run, self._marks)
            return
        run.prepared.ledger.row[:] = self._marks
        run.prepared.ledger.note(run.steps)


# --- what all runs of a table have in common --------------------------------------------------------------------------


def kept_arrays(runner: TableRunner, arrays: Sequence[Any], jobs: Sequence[Job]) -> list[np.ndarray | None]:
    """The residuals and states of a table; the weights of residuals in the mean are noted. None without feedback."""
    return [
        _array_of(kept, jobs[kept.tensor], arrays[kept.tensor], runner.sizes[kept.tensor]) for kept in runner.table.kept
    ]


def _array_of(kept: KeptMemory, job: Job, x: Any, n: int) -> np.ndarray | None:
    region, residuals = kept.region, Residuals(job, n)
    if kept.later:
        return None
    if kept.state:
        size = kept.size or region.size
        state = Context(state=residuals.own(kept.point, region.start, region.stop)).kept(kept.state, size, x)
        check_array(kept.state, state, np.float32, size, "cpu")
        return state
    key = residuals.prefix(kept.point, region.start, region.stop) + "residual"
    job.weights[key] = kept.weight
    if job.feedback.kind != "plain":
        return None
    found: Any = job.store.get(key)
    if not isinstance(found, np.ndarray) or found.size != region.size:
        found = residuals.prepared(kept.point, x[region.start : region.stop], region)
    check_array("residual", found, np.float32, region.size, "cpu")
    return found


def places_of(runner: TableRunner, kept: Sequence[np.ndarray | None]) -> np.ndarray:
    """The places of a table, without those of buffers, tensors and keys."""
    table = runner.table
    first, there, keys = table.places
    places = np.zeros(keys + len(table.drawn), np.int64)
    places[first:there] = [0 if array is None else device.begin_of(array) for array in kept]
    if table.reached:
        read, _, errno = cross_memory.functions()
        places[there : there + 2 + table.reached] = read, errno, *runner.transport.single_copy.processes
    return places


def keys_of(table: OperationTable, jobs: Sequence[Job]) -> list[int]:
    """The keys of random bits, as int64."""
    keys = [
        encode_key(job.seed, job.step, drawn.who, drawn.point, drawn.start, job.name)
        for drawn in table.drawn
        for job in (jobs[drawn.tensor],)
    ]
    return [key - (key >> 63 << 64) for key in keys]


def compiled_messages(transport: Transport, table: OperationTable) -> Any:
    """Memory for the messages of a table."""
    return transport.calls(table.messages) if table.messages else _NO_MESSAGES


def run_compiled(
    compiled: Callable[..., int], before: Sequence[np.ndarray], runner: TableRunner, places: np.ndarray,
    marks: np.ndarray, messages: Any, window: SharedWindow | None, state: np.ndarray, alive: Any,
    patience: float = 1.0,
) -> int:  # fmt: skip
    """Call compiled code until it has ended, and wait with the checks of the waiter where it has polled for long.

    Args:
        compiled: takes ``before`` and then the arguments of ``interpreter.run``.
        alive: what must outlive a failure, because messages under way may be written to it.
        patience: times the timeout that messages may take, for ranks whose peers wait for others themselves.

    Returns:
        A reason before ``interpreter.AT_BARRIER`` or from ``interpreter.ENDED`` on.
    """
    table, waiter = runner.table, runner.transport.waiter
    flags, where = (NO_FLAGS, NO_WINDOW) if window is None else (window.flags, window.places)
    try:
        while True:
            waited = int(state[shared_memory.WAITED])
            if window is not None:
                state[interpreter.EPOCH], state[interpreter.USES] = window.position
            why = compiled(
                *before, table.rows, table.values, places, marks, flags, where, messages.flag, messages.calls, state,
                waiter.pace,
            )  # fmt: skip
            if window is not None:
                window.position = int(state[interpreter.EPOCH]), int(state[interpreter.USES])
            waiter.waited += (int(state[shared_memory.WAITED]) - waited) * 1e-9
            if why < interpreter.AT_BARRIER or why >= interpreter.ENDED:
                return why
            with waiter.patience(patience if why == interpreter.AT_MESSAGES else 1.0):
                _wait_for_ranks(runner, why, state, messages, window)
    except BaseException:  # also an interrupt
        runner.transport.outlive([messages, alive])
        raise


def _wait_for_ranks(
    runner: TableRunner, why: int, state: np.ndarray, messages: Any, window: SharedWindow | None
) -> None:
    """Where compiled code has polled for long, wait with the checks and the timeout of the waiter; raise MPI's errors.

    Args:
        why: why the interpreter returned.
    """
    transport, waiter = runner.transport, runner.transport.waiter
    if why == interpreter.FAILED:
        if state[shared_memory.REFUSED]:
            raise refusal(int(state[shared_memory.REFUSED]))
        transport.raise_failed(int(state[interpreter.ERROR]))
    waited = waiter.waited
    if why == interpreter.AT_BARRIER:
        assert window is not None
        wait = window.wait_at_barrier
    else:
        messages.in_flight = int(state[interpreter.IN_FLIGHT])
        wait = partial(transport.finish_calls, messages, runner.ranks_before(int(state[interpreter.AT])))
    wait()
    state[shared_memory.WAITED] += round((waiter.waited - waited) * 1e9)


def recorded(table: OperationTable, run: Run, marks: np.ndarray) -> None:
    """Record the times of a run."""
    found, number, times = list[tuple[Any, ...]](), run.segment, (marks * 1e-9).tolist()
    for span in table.spans:
        job, (start, before), (stop, after) = run.jobs[span.tensor], times[span.first], times[span.last]
        waited = after - before
        if span.kind == "wire" and waited > 0:
            a, b = (start + share * waited for share in span.share)
            found.append(("wait", job.name, job.step, number, a, b, span.what, span.level))
        sent = span.intra, span.inter
        found.append((span.kind, job.name, job.step, number, start, stop, span.what, span.level, *sent))
    run.recorder.add_all(found)


def count_cut(jobs: Sequence[Job], state: np.ndarray) -> None:
    """Count the values that a run has cut."""
    for number, cut in enumerate(state[interpreter.STATE :].tolist()):
        if cut:
            jobs[number].tally["saturated"] += cut


def intervals_of(table: OperationTable, names: Sequence[str]) -> list[LedgerInterval]:
    """What is recorded of every run of a table, for tensors of these names."""
    return [
        LedgerInterval(
            span.kind, names[span.tensor], span.first, span.last, span.what, span.level, span.intra, span.inter,
            span.share if span.kind == "wire" else None,
        )
        for span in table.spans
    ]  # fmt: skip
