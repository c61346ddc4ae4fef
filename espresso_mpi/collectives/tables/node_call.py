"""As ``one_call`` where each rank is alone on its node: the payload travels behind the header, in the same messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from espresso_mpi.arrays import device

from ..messages.leader_gather import LeaderGather, gather_for
from ..messages.node_leaders import padded
from ..messages.shared_memory import WAITED
from . import interpreter, piggyback
from .gathered import Gathered
from .one_call import RepeatedTable
from .running import NO_FLAGS, NO_WINDOW, TableRunner

_NO_GATHER: Any = None


class NodeCall(RepeatedTable):
    """The ranks exchange headers and payloads, and decode them if all headers are equal.

    Args:
        messages: the table of ``runner`` without its messages.
        room: from the bytes of a header, the most bytes of a message; the same on all ranks.
        runner, others: as of ``RepeatedTable``.
    """

    def __init__(self, messages: Gathered, room: Callable[[int], int], runner: TableRunner, *others: Any) -> None:
        super().__init__(runner, *others)
        self._gathered, self._room = messages, room
        self._gather: LeaderGather = _NO_GATHER
        self._header, self._message = np.empty(0, np.uint8), np.empty(0, np.uint8)

    def _run(self, header: np.ndarray, ignored: int) -> int:
        if header is not self._header:
            self._take(header)
        why = self._go(piggyback.begin, self._setup)
        if why != interpreter.HALTED:
            return why
        if not self._exchanged(ignored):
            return piggyback.DIFFERENT
        self._state[interpreter.AT] += 1  # behind the barrier
        self._state[interpreter.MODE] = interpreter.RUNS
        return self._go(interpreter.run)

    def _take(self, header: np.ndarray) -> None:
        """Use another header from now on: the payload is encoded behind it."""
        given, start = self._gathered, padded(header.size)
        memory = self._buffers[given.buffer]
        if memory.size < start + given.nbytes or self._header.size != header.size:
            memory = self._buffers[given.buffer] = np.zeros(start + self._runner.table.room[given.buffer], np.uint8)
        memory[: header.size] = header
        self._places[given.buffer] = device.begin_of(memory) + start
        self._header, self._message = header, memory[: start + given.nbytes]

    def _go(self, compiled: Callable[..., int], *setup: np.ndarray) -> int:
        messages, table = self._messages, self._runner.table
        return compiled(
            *setup, self._gathered.rows, table.values, self._places, self._ledger.row, NO_FLAGS, NO_WINDOW,
            messages.flag, messages.calls, self._state, self._runner.transport.waiter.pace,
        )  # fmt: skip

    def _exchanged(self, ignored: int) -> bool:
        """Exchange the messages; whether all headers are equal: then the payloads are where the table expects them."""
        transport, header, given = self._runner.transport, self._header, self._gathered
        asked, waited = self._runner.table.marks + piggyback.ASKED, transport.waiter.waited
        gather = self._gather = gather_for(transport, self._room(header.size))
        if not gather.begin(
            self._message, header.size, ignored, self._ledger.place + self._ledger.row.strides[0] * asked
        ):
            gather.finish()
        self._state[WAITED] += round((transport.waiter.waited - waited) * 1e9)
        if not gather.equal:
            return False
        memory, start, places = gather.memory, padded(header.size), gather.places[:, 0].tolist()
        for rank, buffer, first in given.receives:
            at = places[rank] + start
            self._buffers[buffer][first : first + given.nbytes] = memory[at : at + given.nbytes]
        return True

    @property
    def headers(self) -> Sequence[np.ndarray]:
        """See ``RepeatedTable``."""
        return self._gather.messages
