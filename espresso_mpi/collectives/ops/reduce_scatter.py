"""Reduce-scatter: member j ends with the sum, divided, of every member's region j; or with the sum of all payloads j.

Each member sends (p-1)/p of its region. Cost (p-1)·α + ((p-1)/p)·m·β. The sum is our own kernel, in rank order.
Payloads, which must be those of a linear compressor, are sent and summed without their headers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from espresso_mpi.arrays.device import device_of

from ..data import reduction
from ..data.layout import Copy, Dense, Layout, Packed
from ..messages.transport import Transport
from ..messages.window import SharedWindow
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

Owned = Sequence[Sequence[Dense]]
"""Regions of an array by member; all members have equally many, of which some may be empty."""


@register
class ReduceScatter(CollectiveOp):
    """The region, or the payloads, shrink to this member's piece of the sum."""

    name = "reduce_scatter"

    def advance(self, context: CollectiveContext, layouts: Sequence[Layout]) -> list[Layout]:
        region, pieces = layouts[0], context.topology.pieces(context.level)
        if isinstance(region, Dense):
            return list(region.split(pieces, len(layouts)))
        divisor = region.divisor * context.topology.divisor(context.level)
        return [Packed((parts,), divisor) for parts in _split_parts(region, pieces, len(layouts))]

    def bind(self, transport: Transport, move: Move) -> Action:
        owned, element = self._owned(move)
        if element is None:
            return partial(idle, phases=self.phases)
        if isinstance(move.before[0], Dense):
            return bind_sums(transport, move, owned)
        return on_payload(bind_sums(transport, move.of_payloads(element), owned), element)

    def sent(self, move: Move) -> int:
        owned, element = self._owned(move)
        inner = replace(move, dtype=element or move.dtype)
        return sum(inner.bytes_of(region) for j in move.others for region in owned[j])

    def _owned(self, move: Move) -> tuple[Owned, str | None]:
        """The regions of each member, and the element type; None if there is nothing to sum."""
        after = self.advance(move.context, move.before)
        if isinstance(move.before[0], Dense):
            return [[layout] for layout in after if isinstance(layout, Dense)], move.dtype
        each = [bodies(layout) for layout in after if isinstance(layout, Packed)]
        count = max(len(regions) for regions, _ in each)
        owned = [[*regions, *[Dense(0, 0)] * (count - len(regions))] for regions, _ in each]
        return owned, next((element for _, element in each if element), None)

    @staticmethod
    def reference(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(np.array_split(np.sum(inputs, axis=0), len(inputs)))


def _split_parts(packed: Packed, pieces: int, count: int) -> list[Copy]:
    """The parts of the only copy by member; members beyond the pieces get none."""
    (copy,) = packed.copies
    each = len(copy) // pieces
    return [copy[j * each : (j + 1) * each] if j < pieces else () for j in range(count)]


def bind_sums(transport: Transport, move: Move, owned: Owned, into: Sequence[Any] | None = None) -> Action:
    """The function that sums each member's regions at that member, by shared memory where the group has it.

    It yields once.

    Args:
        into: receive the sums of this member's regions, with whose values they come, so that the array does not change;
            for all members or none. By default the regions themselves do.
    """
    reduce_op = move.reduce_op

    def by_window(window: SharedWindow, data: Data) -> None:
        for regions, own in zip(zip(*owned), into or itertools.repeat(None)):
            edges = [(r.start, r.stop) for r in regions]
            data.saturated += window.reduce_scatter(data.x, data.dtype, edges, reduce_op, own)

    def by_messages(data: Data) -> Iterator[None]:
        mine = [region for region in owned[move.index] if region.size]
        targets = [own for own in into if own.size] if into else [data.x[r.start : r.stop] for r in mine]
        rows = rows_for(data, mine, len(move.group))
        yield from exchange(
            transport,
            [(move.group[j], data.x[r.start : r.stop]) for j in move.others for r in owned[j] if r.size],
            [(move.group[j], block[j]) for j in move.others for block in rows],
            data.workspace,
        )
        for out, block in zip(targets, rows):
            data.saturated += reduction.reduce_rows(out, block, move.index, reduce_op, data.dtype)

    return window_or_messages(transport, move.group, attrgetter("x"), by_window, by_messages)


def rows_for(data: Data, regions: Sequence[Dense], count: int) -> list:
    """Scratch for ``count`` contributions to each region: shape (count, size of the region), one after the other."""
    sizes = [region.size * count for region in regions]
    flat = data.workspace.array("rows", sum(sizes), data.x.dtype, device_of(data.x))
    edges = itertools.accumulate(sizes, initial=0)
    return [flat[a:b].reshape(count, (b - a) // count) for a, b in itertools.pairwise(edges)]
