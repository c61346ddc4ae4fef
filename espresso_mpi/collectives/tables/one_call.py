"""A call that is made again and again: a table that runs with the exchange of headers as one compiled call.

What stays equal from step to step is prepared once: buffers, addresses of residuals and states, memory of the
interpreter. A step sets the address of its array, the keys of its random bits, and its header.
"""

from __future__ import annotations

import ctypes
import itertools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from espresso_mpi.arrays import device
from espresso_mpi.arrays.addresses import addresses
from espresso_mpi.tracing.ledger import Ledger, LedgerInterval
from espresso_mpi.tracing.recording import Recorder

from ..job import Job
from ..messages import headers
from ..messages.window import SharedWindow
from ..messages.window_places import BEHIND_HEADER
from . import interpreter, piggyback
from .operations import BUFFERS, Code, Operation
from .running import (
    TableRunner,
    compiled_messages,
    count_cut,
    intervals_of,
    kept_arrays,
    keys_of,
    places_of,
    run_compiled,
)

_ALIGN = 64


class RepeatedTable:
    """The synchronisation of small tensors, prepared for any number of steps.

    Args:
        runner: runs the table; nothing of it is Python's.
        jobs: of the tensors in the first of the steps; seed and step are given anew with each.
        arrays: of the first step; flat float32.
        recorder: gets the times.
        least: magnitudes from which values cannot be summed, as the bits of float32.
    """

    def __init__(
        self, runner: TableRunner, jobs: Sequence[Job], arrays: Sequence[np.ndarray], recorder: Recorder, least: int
    ) -> None:
        table = runner.table
        self._runner, self._least = runner, least
        self._kept = kept_arrays(runner, arrays, jobs)
        self._copies = [None if kept is None else np.empty_like(kept) for kept in self._kept]
        changes = any(operation.changes_tensor for operation in self._before_headers())
        self._before = [np.empty(x.size, np.float32) for x in arrays if changes]
        self._buffers = [np.empty(max(room, _ALIGN), np.uint8) for room in table.room]
        self._arrays = slice(BUFFERS, BUFFERS + table.tensors)
        self._places = places_of(runner, self._kept)
        self._places[:BUFFERS] = list(map(device.begin_of, self._buffers))
        self._keys = table.places[2]
        searched, asked = (table.marks + mark for mark in (piggyback.SEARCHED, piggyback.ASKED))
        intervals = [
            LedgerInterval("check", "", searched, searched + 1),
            LedgerInterval("agree", "", asked, asked + 1, share=(0.0, 1.0)),
            *intervals_of(table, [job.name for job in jobs]),
        ]
        self._ledger = Ledger(recorder, intervals, table.marks + piggyback.MARKS)
        self._state = np.zeros(interpreter.STATE + table.tensors, np.int64)
        self._messages = compiled_messages(runner.transport, table)
        self._setup = self._prepared([x.size for x in arrays])
        self._jobs = jobs

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it keeps."""
        kept: list[np.ndarray] = [*self._buffers, *self._before, *(copy for copy in self._copies if copy is not None)]
        return sum(array.nbytes for array in kept) + self._ledger.nbytes

    def _prepared(self, sizes: Sequence[int]) -> np.ndarray:
        """The set-up of ``piggyback``, but for the header; ``sizes``: elements of the tensors."""
        setup = [0] * piggyback.SIZES + list(sizes)
        setup[piggyback.TENSORS] = len(sizes)
        for number, (kept, copy) in enumerate(zip(self._kept, self._copies)):
            if kept is not None and copy is not None:
                setup += [self._arrays.stop + number, device.begin_of(copy), kept.nbytes]
        for number, before in enumerate(self._before):
            setup += [self._arrays.start + number, device.begin_of(before), before.nbytes]
        return np.array(setup, np.int64)

    def _before_headers(self) -> Sequence[Operation]:
        """The operations that run before all headers are compared."""
        operations = self._runner.table.operations
        return list(itertools.takewhile(lambda o: o.code not in (Code.MEET, Code.WAIT), operations))

    def _set(self, arrays: Sequence[np.ndarray], jobs: Sequence[Job], search: bool) -> None:
        """A step begins; arguments: as of ``run``."""
        setup, places, table, state = self._setup, self._places, self._runner.table, self._state
        self._jobs = jobs
        setup[piggyback.LEAST] = self._least if search else 0
        places[self._arrays] = addresses(arrays)
        if table.drawn:
            places[self._keys :] = keys_of(table, jobs)
        state.fill(0)
        state[interpreter.MODE] = piggyback.BEGINS

    def run(
        self, arrays: Sequence[np.ndarray], jobs: Sequence[Job], header: np.ndarray, ignored: int, search: bool
    ) -> int:
        """Synchronise arrays if all ranks show the same header.

        Args:
            arrays: flat float32, of the sizes of the first step.
            jobs: of this step.
            header: flat uint8 of at most ``window_places.BEHIND_HEADER`` bytes; not to be changed while it is used.
            ignored: bits of its first byte that may differ between ranks.
            search: look for values that cannot be summed first.

        Returns:
            ``interpreter.ENDED``: the arrays hold the means. ``piggyback.DIFFERENT``: the headers differ, see
            ``headers``; call ``undo``. ``piggyback.ODD``: there are such values, and nothing was done.

        Raises:
            RankTimeoutError: a rank did not come within the timeout; TransportError: MPI failed.
        """
        self._set(arrays, jobs, search)
        try:
            return self._run(header, ignored)
        except BaseException:
            if self._state[interpreter.MODE] not in (piggyback.BEGINS, interpreter.RUNS):  # there are copies
                self.undo()
            raise

    @abstractmethod
    def _run(self, header: np.ndarray, ignored: int) -> int:
        """See ``run``."""

    @property
    @abstractmethod
    def headers(self) -> Sequence[np.ndarray]:
        """What all ranks have shown, whose headers differ; each begins with its header."""

    def undo(self) -> None:
        """Leave residuals and states as they were, and the arrays."""
        for kept, before in zip(self._kept, self._copies):
            if kept is not None and before is not None:
                kept[:] = before
        for place, array in zip(self._places[self._arrays].tolist(), self._before):
            ctypes.memmove(place, array.ctypes.data, array.nbytes)

    def record(self) -> None:
        """Record the times of a step that has ended, its bytes, and values that were cut."""
        self._ledger.note(tuple(job.step for job in self._jobs))
        count_cut(self._jobs, self._state)


class OneCall(RepeatedTable):
    """On one node whose ranks share memory: the headers are compared at the first barrier of the table.

    Args:
        window: of the node; all ranks are on it.
        runner: ``halts`` holds.
        others: as of ``RepeatedTable``.
    """

    def __init__(self, window: SharedWindow, runner: TableRunner, *others: Any) -> None:
        super().__init__(runner, *others)
        self._window = window
        self._heads, self._sizes = np.empty(0, np.uint8), np.empty(len(runner.transport.node), np.int64)
        self._header: np.ndarray | None = None

    def _run(self, header: np.ndarray, ignored: int) -> int:
        if header is not self._header:
            self._take(header)
        self._setup[headers.IGNORED] = ignored
        why = run_compiled(
            piggyback.run, (self._setup, self._heads, self._sizes), self._runner, self._places, self._ledger.row,
            self._messages, self._window, self._state, self,
        )  # fmt: skip
        if why != piggyback.ODD:
            self._window.bytes_sent += header.size * (self._sizes.size - 1)
        return why

    def _take(self, header: np.ndarray) -> None:
        """Use another header from now on."""
        assert header.size <= BEHIND_HEADER, "headers are not that long"
        width = -(-header.size // _ALIGN) * _ALIGN
        self._setup[headers.HEADER], self._setup[headers.SIZE] = device.address(header), header.size
        self._setup[headers.WIDTH] = width
        self._header, self._heads = header, np.empty(self._sizes.size * width, np.uint8)

    @property
    def headers(self) -> Sequence[np.ndarray]:
        """See ``RepeatedTable``."""
        width = int(self._setup[headers.WIDTH])
        return [self._heads[r * width : r * width + size] for r, size in enumerate(self._sizes.tolist())]

    def record(self) -> None:
        """See ``RepeatedTable``."""
        self._runner.transport.count_sent(self._runner.table.posted, self._runner.table.window, self._window)
        super().record()
