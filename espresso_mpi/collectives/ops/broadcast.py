"""Broadcast, dense or of payloads: every member ends with what the root of a reduce or gather was left with.

A group that shares memory uses its window. Otherwise, small data, and those of two members, are sent whole: the root
sends (p-1)·m, at a cost of α + (p-1)·m·β. Large data are scattered to the other members, which then exchange their
pieces: the root sends m, every other member (p-2)/(p-1)·m, at a cost of (2p-3)·α + (1 + (p-2)/(p-1))·m·β (after van de
Geijn).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np

from ..data.layout import Dense, Layout, Packed
from ..messages.gpu_messages import Addressed
from ..messages.transport import Transport
from ..messages.window import SharedWindow
from .allreduce import is_small
from .base import Action, CollectiveContext, CollectiveOp, Data, Move, exchange, register, window_or_messages


@register
class Broadcast(CollectiveOp):
    """Afterwards every member holds what the root held."""

    name = "broadcast"
    phases = 2

    def advance(self, context: CollectiveContext, layouts: Sequence[Layout]) -> list[Layout]:
        return [layouts[context.root]] * len(layouts)

    def bind(self, transport: Transport, move: Move) -> Action:
        inner, region = _as_array(move)
        if isinstance(move.before[0], Dense):
            return _bind(transport, inner, region)
        return _bind_payload(_bind(transport, inner, region), move)

    def sent(self, move: Move) -> int:
        inner, region = _as_array(move)
        sends = [message for exchange in _exchanges(inner, region) for message in exchange if message[0] == move.index]
        return sum(inner.bytes_of(piece) for _, _, piece in sends)

    @staticmethod
    def reference(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [inputs[0]] * len(inputs)


Message = tuple[int, int, Dense]
"""Source member, target member, and what of the array is sent."""


def _as_array(move: Move) -> tuple[Move, Dense]:
    """The region to broadcast, of the tensor or of the payload buffer as bytes, and the move of that array."""
    held = move.before[move.context.root]
    if isinstance(held, Dense):
        return move, held
    first = min((part.offset for copy in held.copies for part in copy), default=0)
    return replace(move, dtype="uint8"), Dense(first, held.nbytes)


def _exchanges(move: Move, region: Dense) -> tuple[list[Message], list[Message]]:
    """The messages of the two exchanges, for all members."""
    root, size = move.context.root, len(move.group)
    others = [(root + k) % size for k in range(1, size)]
    if size <= 2 or is_small(move, [region]):
        return [(root, j, region) for j in others], []
    pieces = dict(zip(others, region.split(size - 1, size - 1)))
    passed_on = [(j, k, pieces[j]) for j in others for k in others if j != k]
    return [(root, j, pieces[j]) for j in others], passed_on


def _bind(transport: Transport, move: Move, region: Dense) -> Action:
    """The function that sends the root's region of an array to all; it yields twice."""
    exchanges = [[m for m in messages if move.index in m[:2]] for messages in _exchanges(move, region)]
    root = move.context.root

    def by_window(window: SharedWindow, data: Data) -> None:
        window.broadcast(data.x, (region.start, region.stop), root)

    def by_messages(data: Data) -> Iterator[None]:
        for messages in exchanges:
            yield from exchange(transport, *_addressed(messages, move, data), data.workspace)

    return window_or_messages(transport, move.group, attrgetter("x"), by_window, by_messages, phases=Broadcast.phases)


def _addressed(messages: Sequence[Message], move: Move, data: Data) -> tuple[Addressed, Addressed]:
    """What this member sends and what it receives."""
    views = [(source, target, data.x[piece.start : piece.stop]) for source, target, piece in messages]
    return (
        [(move.group[target], view) for source, target, view in views if source == move.index],
        [(move.group[source], view) for source, target, view in views if target == move.index],
    )


def _bind_payload(action: Action, move: Move) -> Action:
    """The same for payload buffers: the root keeps its buffer, the others get one of its size."""
    held = move.before[move.context.root]
    assert isinstance(held, Packed)
    nbytes, is_root = held.nbytes, move.index == move.context.root

    def run(data: Data) -> Iterator[None]:
        if not is_root:
            data.payload = data.workspace.other_payload(data.payload, nbytes)
        yield from action(Data(data.payload, "uint8", data.workspace))

    return run
