"""As ``one_call`` on several nodes, for a call that all ranks expect: headers travel beside the first messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from espresso_mpi.arrays import device

from ..messages import headers
from ..messages.leader_gather import LeaderGather, gather_for
from ..messages.transport import Transport
from . import expecting, interpreter, piggyback
from .expected import SIZE, Expected, width_of
from .one_call import RepeatedTable
from .operations import Code, Operation
from .running import TableRunner, compiled_messages, run_compiled

_PATIENCE = 1.5
"""Times the timeout that a peer may take that waits for the ranks of its node first, and names the one that is late."""

_NO_GATHER: Any = None


class ExpectedCall(RepeatedTable):
    """A call, made by ranks that all expect it.

    Args:
        first: its messages up to the comparison of headers.
        room: from the bytes of a header, the most bytes of a message of an ordinary exchange of headers.
        runner: of the table of ``first.expected``.
        others: as of ``RepeatedTable``.
    """

    def __init__(self, first: FirstMessages, room: Callable[[int], int], runner: TableRunner, *others: Any) -> None:
        self._expected, self._room, self._first = first.expected, room, first
        expected = self._expected
        super().__init__(runner, *others)
        transport = runner.transport
        self._window = transport.window_on_host(transport.node) if expected.meets or runner.by_window else None
        theirs = device.begin_of(self._buffers[1]) + expected.theirs
        self._told = np.array([theirs, len(expected.peers), expected.meets], np.int64)
        self._header, self._width = np.empty(0, np.uint8), 0
        self._gather: LeaderGather = _NO_GATHER

    def _before_headers(self) -> Sequence[Operation]:
        """See ``RepeatedTable``: what comes before the interpreter returns for the second time."""
        operations = self._runner.table.operations
        halts = [at for at, operation in enumerate(operations) if operation.code == Code.PYTHON]
        return operations[: halts[1]]

    def _run(self, header: np.ndarray, ignored: int) -> int:
        if header is not self._header:
            self._take(header)
        self._setup[headers.IGNORED] = ignored
        why = run_compiled(
            expecting.run, (self._setup, self._told), self._runner, self._places, self._ledger.row, self._messages,
            self._window, self._state, self, self._first.patience,
        )  # fmt: skip
        if why == piggyback.ODD:
            return why
        self._first.count_shown(header.size)
        if why == piggyback.DIFFERENT:
            if self._state[interpreter.MODE] == piggyback.MEETS:
                self._first.exchange(header.size)
            else:
                self._first.count(self._width)
            transport = self._runner.transport
            self._gather = gather_for(transport, self._room(header.size))
            self._gather.run(header)
        return why

    def _take(self, header: np.ndarray) -> None:
        """Use another header from now on."""
        self._setup[headers.HEADER], self._setup[headers.SIZE] = device.address(header), header.size
        at, width = self._expected.own, width_of(header.size)
        memory = self._buffers[0][at : at + SIZE + header.size]
        memory[:SIZE].view(np.int64)[0] = header.size
        memory[SIZE:] = header
        if width != self._width:
            self._expected.set_width(self._runner.table.rows, width)
        self._header, self._width = header, width

    @property
    def headers(self) -> Sequence[np.ndarray]:
        """See ``RepeatedTable``."""
        return self._gather.messages

    def record(self) -> None:
        """See ``RepeatedTable``."""
        table, transport = self._runner.table, self._runner.transport
        transport.count_sent(table.posted, table.window, self._window)
        self._first.count_headers(self._width)
        super().record()


class FirstMessages:
    """The first messages of an expected call, for a rank that does not make it, or whose node does not.

    Args:
        expected: how the call is made; transport: what it uses.

    Attributes:
        expected: as given.
        patience: times the timeout that a peer may take, which may wait for the ranks of its node first.
    """

    def __init__(self, expected: Expected, transport: Transport) -> None:
        self.expected, self._transport = expected, transport
        self.patience = _PATIENCE if expected.meets else 1.0
        self._runner = TableRunner(expected.other, transport, [])
        self._window = transport.window_on_host(transport.node) if expected.meets else None
        here = set(transport.node)
        self._near = sum(peer in here for peer in expected.peers)
        sends = [o for o in expected.other.operations if o.code == Code.SEND][len(expected.peers) :]
        near = sum(o.nbytes for o in sends if o.number in here)
        self._unread = near, sum(o.nbytes for o in sends) - near

    def run(self, header: int) -> None:
        """Decline; ``header``: the bytes that headers have. Collective.

        Raises:
            RankTimeoutError: a rank did not come within the timeout; TransportError: MPI failed.
        """
        self._go(header, piggyback.MEETS if self.expected.meets else interpreter.RUNS)

    def exchange(self, header: int) -> None:
        """As ``run``, for the messages alone: the ranks of the node have met."""
        self._go(header, interpreter.RUNS)

    def count_shown(self, nbytes: int) -> None:
        """Count what this rank has shown to those of its node."""
        if self._window is not None:
            self._window.bytes_sent += nbytes * (self._window.count - 1)

    def count(self, width: int) -> None:
        """Count headers in messages of so many bytes, and the first messages."""
        self.count_headers(width)
        self._transport.count_sent(self._unread, 0, None)

    def count_headers(self, width: int) -> None:
        """Count messages of so many bytes with headers."""
        far = len(self.expected.peers) - self._near
        self._transport.count_sent((self._near * width, far * width), 0, None)

    def _go(self, header: int, mode: int) -> None:
        table, width, state = self.expected.other, width_of(header), np.zeros(interpreter.STATE + 1, np.int64)
        state[interpreter.MODE] = mode
        buffers = [np.zeros(room, np.uint8) for room in table.room[:2]]  # it is rare: no memory is kept
        places, marks = np.array([*map(device.begin_of, buffers), 0, 0], np.int64), np.zeros((1, 2), np.int64)
        self.expected.set_width(self._runner.table.rows, width)
        run_compiled(
            expecting.decline, (), self._runner, places, marks, compiled_messages(self._transport, table),
            self._window, state, buffers, self.patience,
        )  # fmt: skip
        self.count(width)
