"""Small data of all ranks at each of them where there are several nodes: one compiled call, see ``node_leaders``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from espresso_mpi.arrays import device
from espresso_mpi.errors import RankTimeoutError

from . import node_leaders, shared_memory
from .connection import MESSAGE_MAX
from .dissemination import rounds_of
from .failures import named
from .mpi_calls import Messages
from .node_leaders import (
    ENDED,
    ENDS,
    EPOCH,
    FRAME,
    FRESH,
    HEADER,
    IGNORED,
    IN_FLIGHT,
    LOGGED,
    MINE,
    NOTHING,
    PACE,
    SIZE,
    TIMES,
    padded,
    slots_of,
)
from .roll_call import Roll
from .transport import Transport

_TEXT_BYTES = 2000

_KEPT_BYTES, _KEPT = 1 << 20, 16
"""Memory for messages up to so many bytes is kept for later ones of equal room, so many times."""

_STAGE, _WAITED = (LOGGED + place for place in (shared_memory.STAGE, shared_memory.WAITED))


class LeaderGather:
    """The exchange of messages that have at most so many bytes.

    Args:
        transport: what it uses; all ranks make the same gathers in the same order.
        room: the most bytes of a rank's message, the same on every rank.

    Attributes:
        memory: flat uint8, with the messages of the latest run.
        places: int64 of shape (ranks, 2): where the message of each rank begins in it, and its bytes.
        addresses: of the frame of ``node_leaders.run``, and of ``places``.
        nbytes: bytes of the memory.
    """

    def __init__(self, transport: Transport, room: int) -> None:
        topology = transport.topology
        self._transport, self._room = transport, room
        grouped = transport.windows_everywhere
        nodes = topology.nodes if grouped else tuple((rank,) for rank in range(topology.size))
        node = topology.node_of[transport.rank] if grouped else transport.rank
        self._nodes, self._node, self._leaders = nodes, node, [ranks[0] for ranks in nodes]
        self._window = transport.window_on_host(transport.node) if len(nodes[node]) > 1 else None
        self._leads, self._slots = transport.rank in self._leaders, slots_of(room)
        self._rounds = rounds_of(self._leaders, self._leaders[node]) if self._leads else []
        most = max(map(len, nodes))
        self._patience = 1.5 if most > 1 else 1.0  # leaders that wait for ranks of their node report these first
        block = padded(8 * most) + most * padded(room)
        self.nbytes = max(len(nodes) * block, padded(_TEXT_BYTES))
        assert self.nbytes <= MESSAGE_MAX, "small data are not that long"
        self.memory, self.places = np.empty(self.nbytes, np.uint8), np.zeros((topology.size, 2), np.int64)
        self._messages: Messages = transport.calls(2)
        self._number, self._why = 0, ENDED
        self._mine = self._text = np.empty(0, np.uint8)
        self._prepare(block)

    def _prepare(self, block: int) -> None:
        """Make the frame, as far as it stays; ``block``: the most bytes of a block."""
        near, nodes = self._transport.node, self._nodes
        frame = np.zeros(FRAME, np.int64)
        self._memory, self._address, self._frame = frame, device.address(frame), frame.data
        frame[node_leaders.ROOM], frame[node_leaders.LEADS] = self._room, self._leads
        frame[node_leaders.NODES], frame[node_leaders.NODE] = len(nodes), self._node
        frame[node_leaders.BLOCK], frame[node_leaders.ROUNDS] = block, len(self._rounds)
        plan = np.array([(*each, each.target in near) for each in self._rounds], np.int64).reshape(-1)
        tables = {
            node_leaders.BLOCKS: self.memory, node_leaders.WHERE: self.places, ENDS: np.zeros(len(nodes) + 1, np.int64),
            node_leaders.FIRSTS: np.cumsum([0, *map(len, nodes)], dtype=np.int64),
            node_leaders.ORDER: np.concatenate([np.array(ranks, np.int64) for ranks in nodes]),
            node_leaders.PLAN: np.append(plan, 0), node_leaders.MPI: self._messages.calls,
        }  # fmt: skip
        if self._window is not None:
            tables |= {node_leaders.WINDOW: self._window.places, node_leaders.FLAGS: self._window.flags}
        self._kept = tables
        for place, table in tables.items():
            frame[place] = device.address(table)
        self.addresses = self._address, device.address(self.places)
        self._run = self._run_alone

    def run(self, mine: np.ndarray) -> list[np.ndarray]:
        """The messages of all ranks, in rank order, given this rank's: flat uint8, at most ``room``. Collective.

        Raises:
            RankTimeoutError: a rank did not come; where nodes share memory, all ranks name the same one.
        """
        self.begin(mine)
        self.finish()
        return self.messages

    def begin(
        self, mine: np.ndarray, header: int = 0, ignored: int = 0, times: int = 0,
        run: Callable[[], int] | None = None,
    ) -> bool:  # fmt: skip
        """Begin an exchange of messages, which takes no longer than compiled code polls.

        Args:
            mine: as of ``run``; to be kept until the exchange is over.
            header: bytes that a message begins with, and that are compared with those of the others.
            ignored: bits of its first byte that may differ.
            times: address of two marks, for when it begins and ends, as ``headers.note`` writes them; 0: none.
            run: calls ``node_leaders.run`` with the first of ``addresses``, and returns what it does; if it has not
                called it, ``NOTHING``: then there is no exchange. Default: it does nothing else.

        Returns:
            Whether it is over; else it must be finished.
        """
        frame, transport, window = self._frame, self._transport, self._window
        self._mine, self._why = mine, ENDED
        frame[MINE], frame[SIZE] = device.address(mine), mine.size
        frame[HEADER], frame[IGNORED], frame[TIMES], frame[FRESH] = header, ignored, times, 1
        if window is not None:
            frame[EPOCH], frame[EPOCH + 1] = window.position
        frame[PACE], frame[PACE + 1], frame[PACE + 2] = transport.waiter.pace
        self._run, frame[node_leaders.EQUAL] = run or self._run_alone, 0
        self._go()
        if self._why == NOTHING:
            self._why, self._run = ENDED, self._run_alone
            return True
        if self._leads:
            self._number = transport.roll_call.advance()
        if self._why == ENDED:
            self._end()
        return bool(self._why == ENDED)

    def finish(self) -> None:
        """Wait until the exchange that was begun is over.

        Raises:
            RankTimeoutError: as of ``run``.
        """
        if self._why == ENDED:
            return
        while self._why != ENDED:
            self._go()
        self._end()

    def _go(self) -> None:
        """Run on, after what stopped it; an error leaves messages under way."""
        waiter = self._transport.waiter
        try:
            if self._why != ENDED:
                before = waiter.waited
                self._wait(self._why)
                self._frame[_WAITED] += round((waiter.waited - before) * 1e9)
                waiter.waited = before  # what the frame has is added at the end
            self._why = self._run()
        except BaseException:
            self._transport.outlive(self)
            self._transport.gathers.clear()
            raise

    def _run_alone(self) -> int:
        return int(node_leaders.run(self._address))

    @property
    def equal(self) -> bool:
        """Whether all messages of the latest exchange have one length and one header; False if there is none."""
        return bool(self._frame[node_leaders.EQUAL])

    def sent(self, size: int) -> tuple[int, int]:
        """Bytes that this rank sends if the messages of all ranks have so many: inside the node and between nodes."""
        topology = self._transport.topology
        blocks = [padded(8 * len(ranks)) + len(ranks) * padded(size) for ranks in self._nodes]
        posted = {True: 0, False: 0}
        for each in self._rounds:
            some = [blocks[(self._node + number) % len(blocks)] for number in range(each.blocks)]
            posted[topology.node_of[each.target] == topology.node_of[self._transport.rank]] += sum(some)
        shown = 0
        if self._window is not None:
            shown = (size + (sum(blocks) if self._leads else 0)) * (self._window.count - 1)
        return shown + posted[True], posted[False]

    @property
    def messages(self) -> list[np.ndarray]:
        """Those of all ranks, in rank order; they stay as they are."""
        memory = self.memory[: int(self.places.sum(axis=1).max())].copy()
        return [memory[at : at + size] for at, size in self.places.tolist()]

    def _end(self) -> None:
        """Count what this rank has sent, and the time that it has waited; raise what its leader says."""
        frame, window, transport = self._frame, self._window, self._transport
        self._run = self._run_alone  # and refer to no array any longer
        transport.waiter.waited += frame[_WAITED] * 1e-9
        shown = 0
        if window is not None:
            barriers = self._slots + frame[_STAGE]
            window.position = frame[EPOCH] + barriers, frame[EPOCH + 1] + barriers
            shown = (frame[SIZE] + (frame[node_leaders.TOTAL] if self._leads else 0)) * (window.count - 1)
        transport.count_sent((frame[node_leaders.NEAR], frame[node_leaders.FAR]), shown, window)
        if frame[node_leaders.TEXT]:
            text = self._text if self._leads else self.memory[: frame[node_leaders.TOTAL]]
            raise RankTimeoutError(text.tobytes().decode(errors="replace"))

    def _wait(self, why: int) -> None:
        """Wait with timeout. A rank that waits for a waiting rank has a longer one: the other one reports first."""
        frame, transport, window = self._frame, self._transport, self._window
        if why == node_leaders.FAILED:
            transport.raise_failed(frame[node_leaders.ERROR])
        if why == node_leaders.AT_MESSAGES:
            self._await_leaders()
            return
        assert window is not None
        shown = frame[EPOCH] + (self._slots if why == node_leaders.AT_LEADER else frame[_STAGE] + 1)
        try:
            window.wait_for(shown)
        except RankTimeoutError as error:
            if self._leads:
                self._roll().fail(_cut(error))
            raise
        if why == node_leaders.AT_LEADER:
            with transport.waiter.patience(2.0):
                window.wait_for(shown + frame[_STAGE] + (0 if self._leads else 1))

    def _await_leaders(self) -> None:
        """Wait for the messages of a round; a leader that misses a rank tells the others of its node."""
        transport, messages, roll = self._transport, self._messages, self._roll()
        target, source, _ = self._rounds[self._frame[node_leaders.ROUND]]
        messages.in_flight = self._frame[IN_FLIGHT]
        try:
            with transport.waiter.patience(self._patience):
                _finish(transport, messages, (source, target), roll)
        except RankTimeoutError as error:
            if self._window is None:
                raise
            self._tell_node(_cut(error))

    def _tell_node(self, text: str) -> None:
        """Go on with a text in the place of the blocks. What is in flight may still come: no other run follows."""
        self._transport.outlive(self)
        self._transport.gathers.clear()
        self._text = np.frombuffer(text.encode(), np.uint8)
        self._frame[node_leaders.TEXT] = device.address(self._text)
        self._frame[node_leaders.TOTAL] = self._text.size
        self._frame[node_leaders.ROUND] = len(self._rounds)

    def _roll(self) -> Roll:
        return self._transport.roll_call.roll(self._leaders, self._number, self._transport.waiter.timeout)


def gather_for(transport: Transport, room: int) -> LeaderGather:
    """What exchanges messages of at most so many bytes; its memory is used again by later ones."""
    found: LeaderGather | None = transport.gathers.get(room)
    if found is None:
        found = LeaderGather(transport, room)
        if found.nbytes <= _KEPT_BYTES:
            if len(transport.gathers) >= _KEPT:
                transport.gathers.clear()
            transport.gathers[room] = found
    return found


@named("exchanging messages")
def _finish(transport: Transport, messages: Messages, ranks: tuple[int, int], roll: Roll) -> None:
    awaited = partial(_open, messages, ranks)
    transport.waiter.until(lambda: messages.through() or roll.look(), lambda: roll.late(awaited))


def _open(messages: Messages, ranks: Sequence[int]) -> list[int]:
    return [rank for number, rank in enumerate(ranks) if not messages.is_through(number)]


def _cut(error: RankTimeoutError) -> str:
    return str(error).encode()[:_TEXT_BYTES].decode(errors="ignore")
