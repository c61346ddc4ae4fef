"""Reduce: one member, the root, ends with the mean of all regions, or the sum of all payloads; the others with nothing.

A group that shares memory uses its window. Otherwise, small regions, and those of two members, are sent whole: the root
receives (p-1)·m, at a cost of α + (p-1)·m·β. Large regions are reduce-scattered, and the pieces gathered: the root
receives 2·((p-1)/p)·m, every other member sends m, at a cost of p·α + 2((p-1)/p)·m·β. Sums are computed in rank order.
Afterwards, the region is stale on the other members. Payloads are sent without their headers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np

from ..data import reduction
from ..data.layout import Dense, Layout
from ..messages.transport import Transport
from ..messages.window import SharedWindow
from . import reduce_scatter
from .allreduce import bind_summed, is_small, shares, summed
from .base import Action, CollectiveContext, CollectiveOp, Data, Move, exchange, register, window_or_messages


@register
class Reduce(CollectiveOp):
    """The root keeps the region or the payload, which becomes the sum."""

    name = "reduce"
    phases = 2

    def advance(self, context: CollectiveContext, layouts: Sequence[Layout]) -> list[Layout]:
        divisor, after = context.topology.divisor(context.level), list[Layout]()
        for member, layout in enumerate(layouts):
            if isinstance(layout, Dense):
                after.append(layout if member == context.root else Dense(0, 0))
            else:
                total = replace(layout, divisor=layout.divisor * divisor)
                after.append(total if member == context.root else total.emptied())
        return after

    def bind(self, transport: Transport, move: Move) -> Action:
        return bind_summed(_bind, transport, move, self.phases)

    def sent(self, move: Move) -> int:
        regions, inner = summed(move)
        root = move.context.root
        if _whole(inner, regions):
            return 0 if move.index == root else sum(map(inner.bytes_of, regions))
        owned = shares(regions, len(move.group))
        to_root = 0 if move.index == root else sum(map(inner.bytes_of, owned[move.index]))
        return to_root + sum(inner.bytes_of(region) for j in move.others for region in owned[j])

    @staticmethod
    def reference(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.sum(inputs, axis=0), *[np.empty(0)] * (len(inputs) - 1)]


def _whole(move: Move, regions: Sequence[Dense]) -> bool:
    return len(move.group) <= 2 or is_small(move, regions)


def _bind(transport: Transport, move: Move, regions: Sequence[Dense]) -> Action:
    """The function that reduces regions of an array at the root; it yields twice."""
    reduce_op, root = move.reduce_op, move.context.root
    by_messages = (_bind_whole if _whole(move, regions) else _bind_pieces)(transport, move, regions)

    def by_window(window: SharedWindow, data: Data) -> None:
        for region in regions:
            data.saturated += window.reduce(data.x, data.dtype, (region.start, region.stop), reduce_op, root)

    return window_or_messages(transport, move.group, attrgetter("x"), by_window, by_messages, phases=Reduce.phases)


def _bind_whole(transport: Transport, move: Move, regions: Sequence[Dense]) -> Action:
    reduce_op, root = move.reduce_op, move.context.root

    def at_root(data: Data) -> Iterator[None]:
        rows = reduce_scatter.rows_for(data, regions, len(move.group))
        receives = [(move.group[j], block[j]) for j in move.others for block in rows]
        yield from exchange(transport, [], receives, data.workspace)
        for region, block in zip(regions, rows):
            out = data.x[region.start : region.stop]
            data.saturated += reduction.reduce_rows(out, block, root, reduce_op, data.dtype)
        yield

    def elsewhere(data: Data) -> Iterator[None]:
        sends = [(move.group[root], data.x[region.start : region.stop]) for region in regions]
        yield from exchange(transport, sends, [], data.workspace)
        yield

    return at_root if move.index == root else elsewhere


def _bind_pieces(transport: Transport, move: Move, regions: Sequence[Dense]) -> Action:
    owned, root, me = shares(regions, len(move.group)), move.context.root, move.index
    scatter = reduce_scatter.bind_sums(transport, move, owned)
    sends = [(move.group[root], region) for region in owned[me]] if me != root else []
    receives = [(move.group[j], region) for j in move.others for region in owned[j]] if me == root else []

    def run(data: Data) -> Iterator[None]:
        yield from scatter(data)
        yield from exchange(
            transport,
            [(rank, data.x[region.start : region.stop]) for rank, region in sends],
            [(rank, data.x[region.start : region.stop]) for rank, region in receives],
            data.workspace,
        )

    return run
