"""Collectives on a tensor by messages between its memory and that of other ranks, as operations of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from espresso_mpi.compressors.kernels.cpu import host

from ..data.layout import Dense
from ..ops.allreduce import is_small, shares
from ..ops.base import Move, operations
from .operations import BUFFERS, Code, Operation

_FLOAT = 4


@dataclass(frozen=True)
class SummedValues:
    """Values that a collective sums or copies.

    Attributes:
        place, start: the place of their memory, and the byte at which they begin in it.
        rows, rows_at: the payload buffer that receives what is summed, and from which byte on.
        itemsize: bytes of one.
    """

    place: int
    start: int = 0
    rows: int = 0
    rows_at: int = 0
    itemsize: int = 4


TENSOR = SummedValues(BUFFERS)
"""The only tensor of a table."""


@dataclass(frozen=True)
class Exchange:
    """Messages that are in flight together, and the sum of what they bring.

    Attributes:
        sends: which elements go to each other member, in the order of the messages.
        receives: which elements come from each of them, to the same place; empty where they are summed.
        total: elements whose contributions of all members are summed.
    """

    sends: Sequence[tuple[int, Dense]]
    receives: Sequence[tuple[int, Dense]] = ()
    total: Dense = field(default_factory=lambda: Dense(0, 0))


def exchanges_of(op: str, move: Move) -> list[Exchange | None] | None:
    """The exchanges of a collective in the order of its progress steps, None for one without messages.

    None: tables do not know the collective, or its sum would use several threads.
    """
    made, region = _MADE.get(op), move.before[move.index]
    if made is None or not isinstance(region, Dense):
        return None
    return made(move) if host.runs_serial(region.size) else None


def _reduce_scatter(move: Move) -> list[Exchange | None]:
    after = operations()["reduce_scatter"].advance(move.context, move.before)
    return [_scattered(move, [region for region in after if isinstance(region, Dense)])]


def _allgather(move: Move) -> list[Exchange | None]:
    return [_gathered(move, [region for region in move.before if isinstance(region, Dense)])]


def _allreduce(move: Move) -> list[Exchange | None]:
    whole = move.before[move.index]
    assert isinstance(whole, Dense)
    if is_small(move, [whole]):
        return [Exchange([(j, whole) for j in move.others], total=whole), None]
    owned = [region for (region,) in shares([whole], len(move.group))]
    return [_scattered(move, owned), _gathered(move, owned)]


def _scattered(move: Move, owned: Sequence[Dense]) -> Exchange:
    return Exchange([(j, owned[j]) for j in move.others], total=owned[move.index])


def _gathered(move: Move, owned: Sequence[Dense]) -> Exchange:
    return Exchange([(j, owned[move.index]) for j in move.others], [(j, owned[j]) for j in move.others])


_MADE = {"reduce_scatter": _reduce_scatter, "allgather": _allgather, "allreduce": _allreduce}


@dataclass(frozen=True)
class Message:
    """A message of a table, whole: code, member, place of the buffer, first byte and bytes."""

    code: Code
    member: int
    buffer: int
    offset: int
    nbytes: int


def messages_of(exchange: Exchange, move: Move, values: SummedValues = TENSOR) -> Iterator[Message]:
    """What a rank receives, then what it sends, as ``Transport.post`` orders them."""
    own = exchange.total.size * values.itemsize
    for j in move.others if own else ():
        yield Message(Code.RECEIVE, j, values.rows, values.rows_at + j * own, own)
    for code, regions in ((Code.RECEIVE, exchange.receives), (Code.SEND, exchange.sends)):
        for j, region in regions:
            first = values.start + region.start * values.itemsize
            yield Message(code, j, values.place, first, region.size * values.itemsize)


def rows_of(exchange: Exchange, move: Move, values: SummedValues = TENSOR) -> int:
    """Bytes of the buffer that receives what is summed."""
    return exchange.total.size * values.itemsize * len(move.group)


def sum_of(exchange: Exchange, move: Move, divisor: int, values: SummedValues = TENSOR) -> Operation:
    """The sum of an exchange, of float32, divided; ``divisor``: the number of the parameters."""
    total = exchange.total
    return Operation(
        Code.SUM_RECEIVED, values.place, values.start // _FLOAT + total.start, total.size, values.rows, values.rows_at,
        rows_of(exchange, move, values), number=divisor, first=move.index, whole=len(move.group),
    )  # fmt: skip
