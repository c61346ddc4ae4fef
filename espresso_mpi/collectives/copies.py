"""Broadcast, gather and alltoall of compressed data: each rank encodes what it gives, and decodes what it gets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..compressors import Compressor
from ..types import DeviceKind
from . import calls
from .data.layout import Dense, Packed, Topology
from .messages.transport import Transport
from .ops.base import Action, CollectiveContext, Data, Move
from .program import DecodeStep, EncodeStep, MoveStep, ProgramStep, payload_part
from .progress import Progress
from .to_root import gather

CopyKind = Literal["broadcast", "gather", "alltoall"]


@dataclass(frozen=True)
class Copies:
    """A collective that copies, as one rank sees it. Every part is a payload by itself.

    Attributes:
        root: of a broadcast or a gather.
        given: elements of the parts that this rank encodes, which follow each other; of an alltoall by target.
        taken: elements of the parts that it decodes, likewise; of an alltoall and a gather by source.
        equal: whether all parts of all ranks have the same size.
        device: where parts are encoded and decoded.
    """

    kind: CopyKind
    root: int
    given: tuple[int, ...]
    taken: tuple[int, ...]
    equal: bool
    device: DeviceKind

    @property
    def size(self) -> int:
        """Elements of an array that has room for what is given, and then for what is taken."""
        return max(sum(self.given), sum(self.taken))


@dataclass(frozen=True, kw_only=True)
class CopyStep(MoveStep):
    """The messages of a copying collective."""

    copies: Copies
    sent: Packed
    arrived: Packed

    def bind(self, transport: Transport) -> Action:
        """The function that replaces the payloads that are given by those that are taken."""
        how, sent, arrived = self.copies, self.sent, self.arrived

        def run(data: Data) -> Progress:
            own = data.payload[: sent.nbytes]
            if how.kind == "broadcast" and transport.rank == how.root:
                yield from calls.broadcast(transport, own, how.root)
                return
            data.payload = data.workspace.other_payload(data.payload, arrived.nbytes)
            every = data.payload[: arrived.nbytes]
            if how.kind == "broadcast":
                yield from calls.broadcast(transport, every, how.root)
            elif how.kind == "gather":
                yield from gather(transport, own, every, how.root)
            else:
                yield from calls.alltoall(transport, own, every, _spans(sent), _spans(arrived), how.equal)

        return run


def compile_copies(copies: Copies, topology: Topology, rank: int, compressor: Compressor) -> tuple[ProgramStep, ...]:
    """The program of a copying collective on one rank, for a working array of ``copies.size`` elements."""
    sent, arrived = (_packed(sizes, compressor) for sizes in (copies.given, copies.taken))
    everyone = tuple(range(topology.size))
    nothing = (Dense(0, 0),) * topology.size
    move = Move(CollectiveContext(topology, "flat", False, copies.root), everyone, rank, nothing, "uint8")
    return (
        EncodeStep(copies.device, Dense(0, sum(copies.given)), sent, 0, who=rank),
        CopyStep(copies.kind, move, copies=copies, sent=sent, arrived=arrived),
        DecodeStep(copies.device, Dense(0, sum(copies.taken)), arrived, 0),
    )


def _packed(sizes: Sequence[int], compressor: Compressor) -> Packed:
    edges = itertools.accumulate(sizes, initial=0)
    return Packed((tuple(payload_part(Dense(a, b), compressor) for a, b in itertools.pairwise(edges)),)).placed()


def _spans(packed: Packed) -> list[tuple[int, int]]:
    return [(part.offset, part.offset + part.room) for part in packed.copies[0]]
