"""Allreduce: every member ends with the mean of all regions, or with the sum of all payloads of a linear compressor.

A group that shares memory uses its window. Otherwise, small regions are sent whole in one exchange, and every member
sums them in the same order. Large regions are reduce-scattered and allgathered: each member sends 2·((p-1)/p)·m bytes,
at a cost of 2(p-1)·α + 2((p-1)/p)·m·β. Payloads are sent and summed without their headers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

import numpy as np

from ..data import reduction
from ..data.layout import Dense, Layout, Packed
from ..messages.transport import Transport
from ..messages.window import SharedWindow
from . import allgather, reduce_scatter
from .base import (
    Action,
    CollectiveContext,
    CollectiveOp,
    Data,
    Move,
    bodies,
    exchange,
    idle,
    on_payload,
    register,
    window_or_messages,
)

DIRECT_MAX = 4096
"""Bytes up to which regions are sent whole: they fit into a few network packets, so the latency of a second exchange
would cost more than the bytes that it saves."""


@register
class Allreduce(CollectiveOp):
    """The region or the payload stays and becomes the sum."""

    name = "allreduce"
    phases = 2

    def advance(self, context: CollectiveContext, layouts: Sequence[Layout]) -> list[Layout]:
        divisor = context.topology.divisor(context.level)
        return [replace(s, divisor=s.divisor * divisor) if isinstance(s, Packed) else s for s in layouts]

    def bind(self, transport: Transport, move: Move) -> Action:
        return bind_summed(_bind, transport, move, self.phases)

    def sent(self, move: Move) -> int:
        regions, inner = summed(move)
        if is_small(inner, regions):
            return len(move.others) * sum(map(inner.bytes_of, regions))
        owned = shares(regions, len(move.group))
        to_owners = sum(inner.bytes_of(region) for j in move.others for region in owned[j])
        return to_owners + len(move.others) * sum(map(inner.bytes_of, owned[move.index]))

    @staticmethod
    def reference(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.sum(inputs, axis=0)] * len(inputs)


def summed(move: Move) -> tuple[list[Dense], Move]:
    """The regions to sum, of the tensor or of the payload as an array, and the move of that array."""
    mine = move.before[move.index]
    if isinstance(mine, Dense):
        return [mine], move
    regions, element = bodies(mine)
    regions = [region for region in regions if region.size]
    return regions, move.of_payloads(element) if element else move


def bind_summed(
    bind: Callable[[Transport, Move, Sequence[Dense]], Action], transport: Transport, move: Move, phases: int
) -> Action:
    """The function that ``bind`` makes for the regions to sum, of the tensor or of payloads."""
    regions, inner = summed(move)
    if isinstance(move.before[move.index], Dense):
        return bind(transport, inner, regions)
    if not regions:
        return partial(idle, phases=phases)
    return on_payload(bind(transport, inner, regions), inner.dtype)


def is_small(move: Move, regions: Sequence[Dense]) -> bool:
    """Whether one exchange of whole regions costs less than two exchanges of pieces."""
    return sum(map(move.bytes_of, regions)) <= DIRECT_MAX


def shares(regions: Sequence[Dense], members: int) -> list[list[Dense]]:
    """A piece of every region for each member."""
    pieces = [region.split(members, members) for region in regions]
    return [[piece[j] for piece in pieces] for j in range(members)]


def _bind(transport: Transport, move: Move, regions: Sequence[Dense]) -> Action:
    """The function that reduces regions of an array; it yields twice."""
    reduce_op = move.reduce_op
    by_messages = (_bind_direct if is_small(move, regions) else _bind_pieces)(transport, move, regions)

    def by_window(window: SharedWindow, data: Data) -> None:
        for region in regions:
            data.saturated += window.allreduce(data.x, data.dtype, (region.start, region.stop), reduce_op)

    return window_or_messages(transport, move.group, attrgetter("x"), by_window, by_messages, phases=Allreduce.phases)


def _bind_pieces(transport: Transport, move: Move, regions: Sequence[Dense]) -> Action:
    owned = shares(regions, len(move.group))
    scatter = reduce_scatter.bind_sums(transport, move, owned)
    gather = allgather.bind_joins(transport, move, owned)

    def run(data: Data) -> Iterator[None]:
        yield from scatter(data)
        yield from gather(data)

    return run


def _bind_direct(transport: Transport, move: Move, regions: Sequence[Dense]) -> Action:
    reduce_op = move.reduce_op

    def run(data: Data) -> Iterator[None]:
        rows = reduce_scatter.rows_for(data, regions, len(move.group))
        whole = [data.x[region.start : region.stop] for region in regions]
        yield from exchange(
            transport,
            [(move.group[j], x) for j in move.others for x in whole],
            [(move.group[j], block[j]) for j in move.others for block in rows],
            data.workspace,
        )
        for x, block in zip(whole, rows):
            counted = move.index == 0  # all members see the same ones
            data.saturated += reduction.reduce_rows(x, block, move.index, reduce_op, data.dtype, counted)
        yield

    return run
