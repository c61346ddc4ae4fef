"""Tables whose only messages carry one payload of each rank to all others: any exchange of them will do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .operations import Code, Operation, OperationTable

_OTHERS = frozenset((Code.MEET, Code.SHOW, Code.TAKE, Code.PYTHON))
"""Operations that have more to do with other ranks than messages, or that are not compiled."""


@dataclass(frozen=True)
class Gathered:
    """A table without its messages.

    Attributes:
        rows: its operations as of ``OperationTable.rows``. Where it waited for messages, it comes to a barrier of the
            node, at which the interpreter halts.
        buffer, nbytes: which payload buffer begins with what this rank gives, and its bytes; all give equally many.
        receives: what others give: rank, payload buffer, and first byte in it.
    """

    rows: np.ndarray
    buffer: int
    nbytes: int
    receives: tuple[tuple[int, int, int], ...]


def gathered(table: OperationTable, ranks: int) -> Gathered | None:
    """The table of one of so many ranks without its messages; None: it has others, or something else to do.

    Tables send no part of a payload before they have encoded all of it where all of it goes to each rank.
    """
    waits = [at for at, operation in enumerate(table.operations) if operation.code == Code.WAIT]
    if len(waits) != 1 or _OTHERS & {operation.code for operation in table.operations}:
        return None
    sends, receives = (_of(table, code) for code in (Code.SEND, Code.RECEIVE))
    given, nbytes = {(o.buffer, o.offset, o.nbytes) for o in sends}, {o.nbytes for o in (*sends, *receives)}
    if len(sends) != ranks - 1 or len(receives) != ranks - 1 or len(given) != 1 or len(nbytes) != 1:
        return None
    ((buffer, offset, size),) = given
    if offset or any(operation.buffer == buffer for operation in receives):
        return None
    rows = table.rows.copy()
    rows[waits[0], 0] = Code.MEET
    rows = rows[~np.isin(rows[:, 0], (Code.SEND, Code.RECEIVE))]
    return Gathered(rows, buffer, size, tuple((o.number, o.buffer, o.offset) for o in receives))


def _of(table: OperationTable, code: Code) -> list[Operation]:
    return [operation for operation in table.operations if operation.code == code]
