"""Tables for calls that all ranks expect, because the same call has followed the last one before.

The headers of such a call travel beside its first messages, to the same ranks. So every rank must hear of every node
by then: from all ranks themselves, or from one of each node whose ranks have met before. A rank that makes another call
takes part in these messages all the same: it sends an empty header, and bytes that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..data.layout import Topology
from ..messages.node_leaders import padded
from .operations import SCRATCH, Code, Operation, OperationTable, whole_lines

LONGEST = 4 << 10
"""Bytes of memory for a header, which has a bit for each call that ranks know."""

SIZE = 8
"""Bytes in front of a header: how many it has."""

_HALT = Operation(Code.PYTHON)
"""Where the interpreter returns: there is nothing for Python to do."""


@dataclass(frozen=True)
class Expected:
    """How a rank makes an expected call, or takes part in it.

    Attributes:
        table: the call. The interpreter returns before the headers are sent (where ``meets``: in the place of the
            barrier), and once they and the first messages have come.
        other: the same messages without anything else.
        meets: whether the ranks of a node compare their headers first.
        peers: the ranks with which headers are exchanged.
        own, theirs: where the own header is in the first payload buffer, and those of the peers in the second one,
            ``LONGEST`` bytes each.
    """

    table: OperationTable
    other: OperationTable
    meets: bool
    peers: tuple[int, ...]
    own: int
    theirs: int

    def set_width(self, rows: np.ndarray, width: int) -> None:
        """Let the messages with headers, in the rows of either table, have so many bytes."""
        at = [row for row in range(len(rows)) if rows[row, 0] in (Code.SEND, Code.RECEIVE)][: 2 * len(self.peers)]
        rows[at, 6] = width


def width_of(header: int) -> int:
    """Bytes of a message with a header of so many."""
    width = whole_lines(SIZE + header)
    assert width <= LONGEST, "headers are not that long"
    return width


def fit(told: Sequence[tuple[bool, Sequence[int]] | None], topology: Topology) -> bool:
    """Whether all ranks can expect a call together.

    Args:
        told: ``meets`` and ``peers`` of each rank; None: it cannot.
    """
    for rank, one in enumerate(told):
        if one is None:
            return False
        all_others = len(one[1]) == topology.size - 1
        for peer in one[1]:
            other = told[peer]
            if other is None or rank not in other[1]:
                return False
            if not (all_others or other[0] or len(topology.nodes[topology.node_of[peer]]) == 1):
                return False  # its header does not stand for its node
    return True


def expected(table: OperationTable, topology: Topology, rank: int) -> Expected | None:
    """How a call by a table can be expected by its ranks; None: it cannot.

    Args:
        rank: whose table it is. The table of each rank must allow it.
    """
    codes = [operation.code for operation in table.operations]
    if table.stages or Code.WAIT not in codes:
        return None
    end = codes.index(Code.WAIT) + 1
    head = list(table.operations[:end])
    meets = Code.MEET in codes[:end]
    meeting = codes.index(Code.MEET) if meets else 0
    messages = [o for o in head if o.code in (Code.SEND, Code.RECEIVE)]
    peers = tuple(sorted({o.number for o in messages}))
    if not _hears_all(peers, topology, rank, meets) or Code.SEND in codes[:meeting]:
        return None
    if any(o.buffer >= SCRATCH for o in messages):  # who declines has no such tensor
        return None
    own, theirs = padded(table.room[0]), padded(table.room[1])
    headers = list(_headers(peers, own, theirs))
    early = [o for o in head[:meeting] if o.code == Code.RECEIVE]
    before = [o for o in head[:meeting] if o.code != Code.RECEIVE]
    operations = [*before, _HALT, *headers, *early, *head[meeting + meets :], _HALT, *table.operations[end:]]
    room = (own + LONGEST, theirs + len(peers) * LONGEST, table.room[2])
    most = table.messages + len(headers)

    def of(operations: Sequence[Operation]) -> OperationTable:
        return replace(table, operations=operations, room=room, messages=most)

    return Expected(of(operations), of([*headers, *messages, head[-1]]), meets, peers, own, theirs)


def _hears_all(peers: Sequence[int], topology: Topology, rank: int, meets: bool) -> bool:
    """Whether a rank hears of all others by its first messages."""
    if len(peers) == topology.size - 1:
        return True
    here = topology.node_of[rank]
    told = meets or len(topology.nodes[here]) == 1
    return told and {topology.node_of[peer] for peer in peers} | {here} == set(range(len(topology.nodes)))


def _headers(peers: Sequence[int], own: int, theirs: int) -> Iterable[Operation]:
    for number, peer in enumerate(peers):
        yield Operation(Code.RECEIVE, buffer=1, offset=theirs + number * LONGEST, nbytes=LONGEST, number=peer)
        yield Operation(Code.SEND, buffer=0, offset=own, nbytes=LONGEST, number=peer)
