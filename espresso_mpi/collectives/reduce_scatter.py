"""Reduce-scatter of dense data: member j ends with the sum, divided, of every member's region j.

Each member sends (p-1)/p of its region. Cost (p-1)·α + ((p-1)/p)·m·β. The sum is our own kernel, in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from . import reduction
from .base import Action, CollectiveOp, Data, Move, Scene, register
from .layout import Dense, State
from .transport import Transport


@register
class ReduceScatter(CollectiveOp):
    """Scatter of dense data: the region shrinks to this member's piece of the sum."""

    name = "reduce_scatter"

    def advance(self, scene: Scene, states: Sequence[State]) -> list[State]:
        region = states[0]
        assert isinstance(region, Dense)
        return list(region.split(scene.topology.pieces(scene.level), len(states)))

    def bind(self, transport: Transport, move: Move) -> Action:
        return bind_dense(transport, move, _regions(move))

    def sent(self, move: Move) -> int:
        regions = _regions(move)
        return sum(move.bytes_of(regions[j]) for j in move.others)

    @staticmethod
    def reference(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(np.array_split(np.sum(inputs, axis=0), len(inputs)))


def _regions(move: Move) -> list[Dense]:
    return [r for r in ReduceScatter().advance(move.scene, move.before) if isinstance(r, Dense)]


def bind_dense(transport: Transport, move: Move, regions: Sequence[Dense]) -> Action:
    """The function that sums each member's region at that member, by shared memory where the group has it."""
    others, mine, size = move.others, regions[move.index], len(move.group)
    rule = move.reduce

    def run(data: Data) -> Iterator[None]:
        window = transport.window_for(move.group, data.x)
        if window is not None:
            bounds = [(r.start, r.stop) for r in regions]
            data.saturated += window.reduce_scatter(data.x, data.dtype, bounds, rule)
            yield
            return
        rows = data.workspace.rows(data.x, size, mine.size)
        pending = transport.post(
            [(move.group[j], data.x[regions[j].start : regions[j].stop]) for j in others],
            [(move.group[j], rows[j]) for j in others],
            data.workspace,
        )
        yield
        transport.finish(pending)
        data.saturated += reduction.reduce_rows(data.x[mine.start : mine.stop], rows, move.index, rule, data.dtype)

    return run
