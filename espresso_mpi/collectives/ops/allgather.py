"""Allgather, dense or of payloads: every member sends all it has to every other.

A dense allgather joins the regions that a scatter left. An allgather of payloads joins pieces if a scatter of its level
is open. Otherwise every member contributes to the whole region: the copies multiply, and the decode sums them.
Each member sends (p-1) times its contribution s. Cost (p-1)·α + (p-1)·s·β.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np

from ..data.layout import Dense, Layout, Packed
from ..data.transfers import Sources, place
from ..messages.transport import Transport
from ..messages.window import SharedWindow
from .base import (
    Action,
    CollectiveContext,
    CollectiveOp,
    Data,
    Move,
    bind_payload,
    exchange,
    payload_sent,
    register,
    window_or_messages,
)


@register
class Allgather(CollectiveOp):
    """Afterwards every member holds what all held."""

    name = "allgather"

    def advance(self, context: CollectiveContext, layouts: Sequence[Layout]) -> list[Layout]:
        if isinstance(layouts[0], Dense):
            return [joined(layouts)] * len(layouts)
        divisor = layouts[0].divisor * (1.0 if context.joins else context.topology.divisor(context.level))
        return [place(_sources(context, layouts), divisor)] * len(layouts)

    def bind(self, transport: Transport, move: Move) -> Action:
        if isinstance(move.before[0], Dense):
            return bind_joins(transport, move, [[r] for r in move.before if isinstance(r, Dense)])
        return bind_payload(transport, move, self.payload_sources(move))

    def payload_sources(self, move: Move) -> Sequence[Sources]:
        """Of payloads only."""
        return [_sources(move.context, move.before)] * len(move.group)

    def sent(self, move: Move) -> int:
        mine = move.before[move.index]
        if isinstance(mine, Dense):
            return (len(move.group) - 1) * move.bytes_of(mine)
        return payload_sent(move, self.payload_sources(move))

    @staticmethod
    def reference(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate(list(inputs))] * len(inputs)


def joined(layouts: Sequence[Layout]) -> Dense:
    """The union of the members' regions."""
    regions = [s for s in layouts if isinstance(s, Dense) and s.size]
    return Dense(min(r.start for r in regions), max(r.stop for r in regions)) if regions else Dense(0, 0)


def _sources(context: CollectiveContext, layouts: Sequence[Layout]) -> Sources:
    packed = [s for s in layouts if isinstance(s, Packed)]
    if not context.joins:
        return [[(source, part) for part in copy] for source, s in enumerate(packed) for copy in s.copies]
    count = max((len(s.copies) for s in packed), default=0)
    return [
        [(source, part) for source, s in enumerate(packed) if c < len(s.copies) for part in s.copies[c]]
        for c in range(count)
    ]


def bind_joins(transport: Transport, move: Move, owned: Sequence[Sequence[Dense]], by_window: bool = True) -> Action:
    """The function that sends each member's regions of an array to all, by shared memory if the group has it.

    It yields once.

    Args:
        owned: the regions of each member; equally many of each.
        by_window: use the shared window if the group has it.
    """

    def through_window(window: SharedWindow, data: Data) -> None:
        for regions in zip(*owned):
            window.allgather(data.x, [(r.start, r.stop) for r in regions])

    def by_messages(data: Data) -> Iterator[None]:
        yield from exchange(
            transport,
            [(move.group[j], data.x[r.start : r.stop]) for j in move.others for r in owned[move.index]],
            [(move.group[j], data.x[r.start : r.stop]) for j in move.others for r in owned[j]],
            data.workspace,
        )

    if not by_window:
        return by_messages
    return window_or_messages(transport, move.group, attrgetter("x"), through_window, by_messages)
