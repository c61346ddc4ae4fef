"""The contract of a collective. To add one, write one file here with one class under ``@register``.

``advance`` computes the layout that every rank holds afterwards, and therefore which bytes move. ``bind`` derives from
it the function that moves them, so the two cannot disagree.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from espresso_mpi.arrays import device
from espresso_mpi.types import Collective, Level

from ..data.layout import PAYLOAD_ITEMSIZE, Dense, Layout, Packed, Topology
from ..data.reduction import ReduceOp, stored
from ..data.transfers import Sources, place, transfers

if TYPE_CHECKING:
    from espresso_mpi.arrays.workspace import Workspace

    from ..messages.gpu_messages import Addressed
    from ..messages.transport import Transport
    from ..messages.window import SharedWindow

D = TypeVar("D")
"""What a function that moves data is called with: ``Data``, or those of a bucket."""


@dataclass
class Data:
    """The working data of a segment.

    Attributes:
        x: the whole tensor as a flat array. Collectives change it in place.
        dtype: its element type.
        workspace: scratch memory.
        payload: the compressed bytes, an array of uint8; None before the first encode.
        summary: the agreed summary of a linear compressor, or None.
        saturated: number of values and sums that were cut at the end of their range.
    """

    x: Any
    dtype: str
    workspace: Workspace
    payload: Any = None
    summary: Any = None
    saturated: int = 0


Action = Callable[[Data], Iterator[None]]
"""Runs one collective in progress steps: it yields whenever its messages are in flight."""


@dataclass(frozen=True)
class CollectiveContext:
    """The place of a collective in a route.

    Attributes:
        topology: which ranks share a node.
        level: the level at which the collective runs.
        joins: whether a scatter of this level is open. An allgather then joins pieces, and does not multiply copies.
        root: index in the group of the member to which a reduce or a gather leads, and from which a broadcast comes.
    """

    topology: Topology
    level: Level
    joins: bool
    root: int = 0


@dataclass(frozen=True)
class Move:
    """One collective of one group, as one member sees it.

    Attributes:
        context: the place of the collective in its route.
        group: the ranks of the members.
        index: the index of this member in ``group``.
        before: what each member holds before the collective.
        dtype: the element type of the tensor, or of the payloads that are summed.
        override: how arrays are reduced. None stands for the mean over the level.
    """

    context: CollectiveContext
    group: tuple[int, ...]
    index: int
    before: tuple[Layout, ...]
    dtype: str
    override: ReduceOp | None = None

    @property
    def reduce_op(self) -> ReduceOp:
        """How arrays are reduced. It is ``override``, or the mean over the level."""
        return self.override or ReduceOp("sum", self.context.topology.divisor(self.context.level))

    @property
    def others(self) -> list[int]:
        """Indices of the other members, from the next one on, so that not all send to the same member first."""
        return [(self.index + k) % len(self.group) for k in range(1, len(self.group))]

    def bytes_of(self, region: Dense) -> int:
        """Bytes of a dense region of the tensor."""
        return region.size * (PAYLOAD_ITEMSIZE.get(self.dtype) or np.dtype(self.dtype).itemsize)

    def of_payloads(self, element: str) -> Move:
        """The same move of payloads as arrays of ``element``. They are summed, and not divided."""
        return replace(self, dtype=element, override=ReduceOp("sum"))


class CollectiveOp(ABC):
    """The base class of collectives. Each subclass is one collective, under ``@register``.

    Attributes:
        name: the name by which routes name it.
        phases: how often its action yields. The number is the same on every rank, so that all ranks interleave tensors
            in the same order.

    Example:
        >>> from espresso_mpi.collectives.data.layout import Dense, Topology
        >>> from espresso_mpi.collectives.ops.base import CollectiveContext, operations
        >>> context = CollectiveContext(Topology(((0, 1),)), "flat", joins=False)
        >>> operations()["reduce_scatter"].advance(context, [Dense(0, 128), Dense(0, 128)])
        [Dense(start=0, stop=64), Dense(start=64, stop=128)]
    """

    name: ClassVar[str]
    phases: ClassVar[int] = 1

    @abstractmethod
    def advance(self, context: CollectiveContext, layouts: Sequence[Layout]) -> list[Layout]:
        """The layouts of all members after the collective.

        Args:
            context: the place of the collective in its route.
            layouts: the layouts of the members of one group before the collective.
        """

    @abstractmethod
    def bind(self, transport: Transport, move: Move) -> Action:
        """The function that runs ``move`` on the data of this rank. It yields ``phases`` times.

        Args:
            transport: sends and receives the messages.
            move: the collective as this rank sees it.
        """

    def payload_sources(self, move: Move) -> Sequence[Sources] | None:
        """The payloads that each member receives, if the collective only copies them in one exchange; else None."""
        return None

    @abstractmethod
    def sent(self, move: Move) -> int:
        """Bytes that this member sends to the others."""

    @staticmethod
    @abstractmethod
    def reference(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The exact result, to which the tests compare.

        Args:
            inputs: one float64 array per member.

        Returns:
            One array per member. Sums are not divided.
        """


_OPS: dict[str, CollectiveOp] = {}


def register(cls: type[CollectiveOp]) -> type[CollectiveOp]:
    """Class decorator: make a collective known under ``cls.name``."""
    _OPS[cls.name] = cls()
    return cls


@lru_cache(maxsize=1)
def operations() -> dict[str, CollectiveOp]:
    """All collectives by name. The first call imports every module of this folder."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
    return _OPS


# --- moving data ------------------------------------------------------------------------------------------------------


def window_or_messages(
    transport: Transport,
    group: Sequence[int],
    array: Callable[[D], Any],
    by_window: Callable[[SharedWindow, D], None],
    by_messages: Callable[[D], Iterator[None]],
    phases: int = 1,
) -> Callable[[D], Iterator[None]]:
    """The function that moves data through the shared window if the group has one for them, else by messages.

    Args:
        array: what is moved, of the data that the function is called with: its device decides.
        by_window: moves all at once.
        phases: how often ``by_messages`` yields, and so the function.
    """

    def run(data: D) -> Iterator[None]:
        window = transport.window_for(group, array(data))
        if window is None:
            yield from by_messages(data)
            return
        by_window(window, data)
        yield from idle(data, phases)

    return run


def exchange(transport: Transport, sends: Addressed, receives: Addressed, workspace: Workspace) -> Iterator[None]:
    """Send and receive in one progress step; see ``Transport.post``."""
    pending = transport.post(sends, receives, workspace)
    yield
    transport.finish(pending)


# --- moving payloads --------------------------------------------------------------------------------------------------


def bind_payload(transport: Transport, move: Move, sources: Sequence[Sources]) -> Action:
    """The function that moves payloads from the sources of each member, by shared memory if possible.

    It yields once.
    """
    me = move.index
    size = place(sources[me], 1.0).nbytes
    incoming = list(transfers(me, sources[me]))
    outgoing = [t for j in move.others for t in transfers(j, sources[j]) if t.source == me]
    longest = max(layout.nbytes for layout in move.before if isinstance(layout, Packed))
    stays = not outgoing and all(t.source == me and t.source_offset == t.target_offset for t in incoming)

    def by_window(window: SharedWindow, data: Data) -> None:
        target = data.workspace.other_payload(data.payload, size)
        window.exchange(data.payload, target, incoming, longest)
        data.payload = target

    def by_messages(data: Data) -> Iterator[None]:
        source, target = data.payload, data.workspace.other_payload(data.payload, size)
        for t in incoming:
            if t.source == me:
                copy_bytes(target, t.target_offset, source, t.source_offset, t.nbytes)
        yield from exchange(
            transport,
            [(move.group[t.target], source[t.source_offset : t.source_offset + t.nbytes]) for t in outgoing],
            [
                (move.group[t.source], target[t.target_offset : t.target_offset + t.nbytes])
                for t in incoming
                if t.source != me
            ],
            data.workspace,
        )
        data.payload = target

    if len(move.group) == 1 and stays:
        return _nothing
    return window_or_messages(transport, move.group, attrgetter("payload"), by_window, by_messages)


def _nothing(data: Data) -> Iterator[None]:
    """A move of a single member whose payload already is in its place."""
    yield


def idle(data: Any, phases: int) -> Iterator[None]:
    """Take no part, but as many progress steps as the ranks that do."""
    for _ in range(phases):
        yield


def bodies(packed: Packed) -> tuple[list[Dense], str | None]:
    """The payloads of one copy without their headers, as regions of the buffer in elements, and their element type.

    Raises:
        AssertionError: copies are outstanding, or the payloads are not those of a linear compressor; routes that lead
            here are refused.
    """
    (copy,) = packed.copies
    regions, element = [], None
    for part in copy:
        element = part.element
        assert element is not None, "only payloads of linear compressors are summed"
        size = PAYLOAD_ITEMSIZE[element]
        regions.append(Dense((part.offset + part.header) // size, (part.offset + part.nbytes) // size))
    return regions, element


def on_payload(action: Action, element: str) -> Action:
    """Run an action on an array on the payload, seen as an array of elements."""

    def run(data: Data) -> Iterator[None]:
        body = Data(data.payload.view(stored(element)), element, data.workspace)
        yield from action(body)
        data.saturated += body.saturated

    return run


def advance(
    topology: Topology, step: Collective, averaged: AbstractSet[Level], layouts: Sequence[Layout], rank: int, dtype: str
) -> tuple[list[Layout], Move | None]:
    """Advance every group of a level.

    Args:
        averaged: the levels over which the layouts are averaged already.
        layouts: of all ranks before.

    Returns:
        the layouts afterwards, and the part of ``rank`` in it: None if no group has it.
    """
    op, after, mine = operations()[step.op], list(layouts), None
    joins = step.op == "allgather" and step.level in averaged
    for group in topology.groups(step.level):
        context = CollectiveContext(topology, step.level, joins, topology.root(step.level, group))
        before = tuple(layouts[member] for member in group)
        for member, layout in zip(group, op.advance(context, before)):
            after[member] = layout
        if rank in group:
            mine = Move(context, group, group.index(rank), before, dtype)
    return after, mine


class GatheringOp(CollectiveOp):
    """A collective after which a member holds payloads of several members, for a decode to sum."""

    @abstractmethod
    def sources(self, context: CollectiveContext, layouts: Sequence[Layout]) -> list[Sources]:
        """What each member of a group will hold, and where it comes from."""

    def advance(self, context: CollectiveContext, layouts: Sequence[Layout]) -> list[Layout]:
        divisor = layouts[0].divisor * context.topology.divisor(context.level)  # type: ignore[union-attr]
        return [place(of_member, divisor) for of_member in self.sources(context, layouts)]

    def payload_sources(self, move: Move) -> Sequence[Sources]:
        return self.sources(move.context, move.before)

    def bind(self, transport: Transport, move: Move) -> Action:
        return bind_payload(transport, move, self.payload_sources(move))

    def sent(self, move: Move) -> int:
        return payload_sent(move, self.payload_sources(move))


def payload_sent(move: Move, sources: Sequence[Sources]) -> int:
    """Bytes of payload that this member sends to the others."""
    return sum(t.nbytes for j in move.others for t in transfers(j, sources[j]) if t.source == move.index)


def copy_bytes(target: Any, target_offset: int, source: Any, source_offset: int, nbytes: int) -> None:
    """Copy within one device, host or GPU."""
    device.copy(target[target_offset : target_offset + nbytes], source[source_offset : source_offset + nbytes])
