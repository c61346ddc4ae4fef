"""Allreduce: every member ends with the mean of all regions, or with the sum of all payloads of a linear compressor.

Small regions are exchanged whole and summed by everyone in the same order: one round of messages. Large ones are
reduce-scattered and allgathered, 2·((p-1)/p)·m bytes from each member. Cost of the latter 2(p-1)·α + 2((p-1)/p)·m·β.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from . import allgather, reduce_scatter, reduction
from .base import Action, CollectiveOp, Data, Move, Scene, register
from .layout import PAYLOAD_ITEMSIZE, Dense, Packed, Part, State
from .transport import Transport

DIRECT_MAX = 4096
"""Bytes up to which one round of whole messages is sent: they fit into a few network packets, so the second round's
latency would cost more than the bytes it saves."""


@register
class Allreduce(CollectiveOp):
    """The region or the payload stays and becomes the sum."""

    name = "allreduce"
    phases = 2

    def advance(self, scene: Scene, states: Sequence[State]) -> list[State]:
        divisor = scene.topology.divisor(scene.level)
        return [replace(s, divisor=s.divisor * divisor) if isinstance(s, Packed) else s for s in states]

    def bind(self, transport: Transport, move: Move) -> Action:
        region = move.before[move.index]
        if isinstance(region, Packed):
            return _bind_payload(transport, move, region)
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
        if isinstance(region, Packed):
            return sum(self.sent(inner) for _, inner in _bodies(move, region))
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
    rule = move.reduce

    def run(data: Data) -> Iterator[None]:
        x = data.x[region.start : region.stop]
        rows = data.workspace.rows(data.x, size, region.size)
        sends, receives = [(move.group[j], x) for j in others], [(move.group[j], rows[j]) for j in others]
        pending = transport.post(sends, receives, data.workspace)
        yield
        transport.finish(pending)
        saturated = reduction.reduce_rows(x, rows, move.index, rule, data.dtype)
        data.saturated += saturated if move.index == 0 else 0  # all members see the same ones
        yield

    return run


def _bodies(move: Move, packed: Packed) -> list[tuple[Part, Move]]:
    """The parts of a payload, each with the allreduce of what follows its header."""
    found = []
    for part in (part for copy in packed.copies for part in copy):
        assert part.element is not None, "only payloads of linear compressors are summed"
        region = Dense(0, (part.nbytes - part.header) // PAYLOAD_ITEMSIZE[part.element])
        before = (region,) * len(move.group)
        found.append((part, replace(move, before=before, dtype=part.element, rule=reduction.Rule("sum"))))
    return found


def _bind_payload(transport: Transport, move: Move, packed: Packed) -> Action:
    """Sums what follows the header; the header is the same everywhere. Payloads to be summed have one part or none."""
    bodies = _bodies(move, packed)
    assert len(bodies) <= 1, "routes that deal out payloads before they sum them are refused"
    if not bodies:
        return _idle
    ((part, inner),) = bodies
    action = Allreduce().bind(transport, inner)

    def run(data: Data) -> Iterator[None]:
        body = data.payload[part.offset + part.header : part.offset + part.nbytes].view(reduction.stored(inner.dtype))
        sum_ = Data(body, inner.dtype, data.workspace)
        yield from action(sum_)
        data.saturated += sum_.saturated

    return run


def _idle(data: Data) -> Iterator[None]:
    for _ in range(Allreduce.phases):
        yield
