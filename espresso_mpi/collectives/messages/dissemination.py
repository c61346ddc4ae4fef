"""The blocks of all ranks of a group at each of them, in few messages: by dissemination (Bruck et al., 1997).

In each round, rank i sends all that it has, or as much as the other still lacks, to rank i - d, and receives as much
from rank i + d; d is the number of blocks that it has, which doubles. So every rank sends ceil(log2 n) messages, for
any number n of ranks, where one message to every other would be n - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from .failures import named
from .roll_call import Roll
from .transport import Transport

T = TypeVar("T")


def gather_blocks(
    transport: Transport, group: Sequence[int], mine: np.ndarray, room: int, read: Callable[[np.ndarray], tuple[int, T]]
) -> list[T]:
    """What is in everyone's block, in the group's order. Collective over the group.

    Args:
        group: world ranks, the same on all of them.
        mine: flat uint8, at most ``room``; the same room on every rank. Blocks may differ in length.
        read: returns the length of the block that an array begins with, and what is in it.

    Raises:
        RankTimeoutError: a rank did not come; all that waited name the same one, or another rank of the group missed a
            rank and told this one.
    """
    count, me = len(group), list(group).index(transport.rank)
    roll = transport.roll_call.begin(group, transport.waiter.timeout)
    blocks = np.empty(count * room, np.uint8)
    blocks[: mine.size] = mine
    ends, found = [0, mine.size], [read(mine)[1]]
    while len(found) < count:
        held = len(found)
        more = min(held, count - held)
        at = ends[-1]
        requests = transport.trade_later(
            [(group[me - held], blocks[: ends[more]])],
            [(group[(me + held) % count], blocks[at : at + more * room])],
        )
        _finish(transport, requests, roll)
        for _ in range(more):
            length, inside = read(blocks[at:])
            at += length
            ends.append(at)
            found.append(inside)
    return found[count - me :] + found[: count - me]


@named("exchanging messages")
def _finish(transport: Transport, messages: Sequence[tuple[int, Any]], roll: Roll) -> None:
    """Wait for the messages of a round."""
    requests = [request for _, request in messages]
    testall = type(requests[0]).Testall
    awaited = partial(_open, messages)
    try:
        transport.waiter.until(lambda: testall(requests) or roll.look(), lambda: roll.late(awaited))
    except BaseException:
        transport.outlive(requests)
        raise


def _open(messages: Sequence[tuple[int, Any]]) -> list[int]:
    return [rank for rank, request in messages if request and not request.Test()]
