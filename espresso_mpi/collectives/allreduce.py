"""Allreduce of dense data: every member ends with the mean of all regions.

Small regions are exchanged whole and summed by everyone in the same order: one round of messages. Large ones are
reduce-scattered and allgathered, 2·((p-1)/p)·m bytes from each member. Cost of the latter 2(p-1)·α + 2((p-1)/p)·m·β.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from . import allgather, reduce_scatter, reduction
from .base import Action, CollectiveOp, Data, Move, Scene, register
from .layout import Dense, State
from .transport import Transport

DIRECT_MAX = 4096
"""Bytes up to which one round of whole messages is sent: they fit into a few network packets, so the second round's
latency would cost more than the bytes it saves."""


@register
class Allreduce(CollectiveOp):
    """The region stays and becomes the sum."""

    name = "allreduce"
    phases = 2

    def advance(self, scene: Scene, states: Sequence[State]) -> list[State]:
        return list(states)

    def bind(self, transport: Transport, move: Move) -> Action:
        region = move.before[move.index]
        assert isinstance(region, Dense)
        if move.bytes_of(region) <= DIRECT_MAX:
            return _bind_direct(transport, move, region)
        regions = region.split(len(move.group), len(move.group))
        scatter = reduce_scatter.bind_dense(transport, move, regions)
        gather = allgather.bind_dense(transport, move, regions)

        def run(data: Data) -> Iterator[None]:
            yield from scatter(data)
            yield from gather(data)

        return run

    def sent(self, move: Move) -> int:
        region = move.before[move.index]
        assert isinstance(region, Dense)
        size = len(move.group)
        if move.bytes_of(region) <= DIRECT_MAX:
            return (size - 1) * move.bytes_of(region)
        regions = region.split(size, size)
        to_owners = sum(move.bytes_of(regions[j]) for j in move.others)
        return to_owners + (size - 1) * move.bytes_of(regions[move.index])

    @staticmethod
    def reference(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.sum(inputs, axis=0)] * len(inputs)


def _bind_direct(transport: Transport, move: Move, region: Dense) -> Action:
    others, size = move.others, len(move.group)
    divisor = move.scene.topology.divisor(move.scene.level)

    def run(data: Data) -> Iterator[None]:
        x = data.x[region.start : region.stop]
        rows = data.workspace.rows(data.x, size, region.size)
        sends, receives = [(move.group[j], x) for j in others], [(move.group[j], rows[j]) for j in others]
        pending = transport.post(sends, receives, data.workspace)
        yield
        transport.finish(pending)
        reduction.mean_rows(x, rows, move.index, divisor, data.dtype)
        yield

    return run
