"""The blocks of all ranks of a group at each of them, in few messages: by dissemination (Bruck et al., 1997).

In each round, rank i sends all that it has, or as much as the other still lacks, to rank i - d, and receives as much
from rank i + d; d is the number of blocks that it has, which doubles. So every rank sends ceil(log2 n) messages, for
any number n of ranks, where one message to every other would be n - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Round(NamedTuple):
    """One message each way.

    Attributes:
        target, source: ranks that get blocks of this one, and that give some.
        blocks: how many blocks either message has. Those sent are the first ones that this rank has, those received
            come behind the ones that it has.
    """

    target: int
    source: int
    blocks: int


def rounds_of(group: Sequence[int], rank: int) -> list[Round]:
    """What a rank of a group does. Afterwards it has the blocks of the group in its order, beginning with its own."""
    count, me, held, found = len(group), list(group).index(rank), 1, list[Round]()
    while held < count:
        blocks = min(held, count - held)
        found.append(Round(group[me - held], group[(me + held) % count], blocks))
        held += blocks
    return found
