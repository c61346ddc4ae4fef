"""The contract of a collective. To add one, write one file here with one class under ``@register``.

A collective has two faces that cannot drift apart, because the second is made from the first: ``advance`` says what
every rank holds afterwards (and so which bytes move), ``bind`` returns the function that moves them.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from espresso_mpi.arrays import device
from espresso_mpi.types import Level

from ..data.layout import PAYLOAD_ITEMSIZE, Dense, Packed, State, Topology
from ..data.reduction import Rule, stored
from ..data.transfers import Wish, place, transfers

if TYPE_CHECKING:
    from espresso_mpi.arrays.workspace import Workspace

    from ..messages.transport import Transport


@dataclass
class Data:
    """One tensor on its way: the flat tensor, its element type, and the payload it has been packed into."""

    x: Any
    dtype: str
    workspace: Workspace
    payload: Any = None
    summary: Any = None
    saturated: int = 0
    """Values and sums that were cut to the end of their range."""


Action = Callable[[Data], Iterator[None]]
"""Carries out one collective, in turns: it yields whenever its messages are under way and other work could be done."""


@dataclass(frozen=True)
class Scene:
    """Where a collective takes place."""

    topology: Topology
    level: Level
    joins: bool
    """Whether a scatter of this level is open, so that an allgather joins pieces instead of multiplying copies."""
    root: int = 0
    """Index in the group of the member that a reduce or a gather leads to and a broadcast comes from."""


@dataclass(frozen=True)
class Move:
    """One collective among one group as one member sees it: who takes part and what each held before."""

    scene: Scene
    group: tuple[int, ...]
    index: int
    before: tuple[State, ...]
    dtype: str
    rule: Rule | None = None
    """How arrays are reduced; None: to the mean over the level."""

    @property
    def reduce(self) -> Rule:
        """How arrays are reduced, with the divisor of the level where nothing else was said."""
        return self.rule or Rule("sum", self.scene.topology.divisor(self.scene.level))

    @property
    def others(self) -> list[int]:
        """Indices of the other members, starting after this one, so that not all send to the same member first."""
        return [(self.index + k) % len(self.group) for k in range(1, len(self.group))]

    def bytes_of(self, region: Dense) -> int:
        """Bytes of a dense region of the tensor."""
        return region.size * PAYLOAD_ITEMSIZE[self.dtype]

    def of_payloads(self, element: str) -> Move:
        """The same move on the payloads, seen as arrays of elements; they are summed as they are, not divided."""
        return replace(self, dtype=element, rule=Rule("sum"))


class CollectiveOp(ABC):
    """One collective operation."""

    name: ClassVar[str]
    phases: ClassVar[int] = 1
    """How often its action yields: always, on every rank, so that all ranks interleave tensors in the same order."""

    @abstractmethod
    def advance(self, scene: Scene, states: Sequence[State]) -> list[State]:
        """What the members of one group hold afterwards, given what they held before."""

    @abstractmethod
    def bind(self, transport: Transport, move: Move) -> Action:
        """The function that carries out ``move`` on this rank's data; it yields ``phases`` times."""

    @abstractmethod
    def sent(self, move: Move) -> int:
        """Bytes that this member sends to the others."""

    @staticmethod
    @abstractmethod
    def reference(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The textbook result on float64 arrays, one per member: what the tests check against."""


_OPS: dict[str, CollectiveOp] = {}


def register(cls: type[CollectiveOp]) -> type[CollectiveOp]:
    """Class decorator: make a collective known under ``cls.name``."""
    _OPS[cls.name] = cls()
    return cls


@lru_cache(maxsize=1)
def operations() -> dict[str, CollectiveOp]:
    """All collectives by name: every file of this folder is imported, those with an operation register it."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
    return _OPS


# --- moving payloads --------------------------------------------------------------------------------------------------


def bind_payload(transport: Transport, move: Move, wishes: Sequence[Wish]) -> Action:
    """The function that fulfils this member's wish and its share of the others': by shared memory where there is some.

    It yields once.
    """
    me = move.index
    size = place(wishes[me], 1.0).nbytes
    incoming = list(transfers(me, wishes[me]))
    outgoing = [t for j in move.others for t in transfers(j, wishes[j]) if t.source == me]
    longest = max(state.nbytes for state in move.before if isinstance(state, Packed))
    stays = not outgoing and all(t.source == me and t.source_offset == t.target_offset for t in incoming)

    def run(data: Data) -> Iterator[None]:
        source = data.payload
        target = data.workspace.other_payload(source, size)
        window = transport.window_for(move.group, source)
        if window is not None:
            window.exchange(source, target, incoming, longest)
            yield
        else:
            yield from by_messages(data, source, target)
        data.payload = target

    def by_messages(data: Data, source: Any, target: Any) -> Iterator[None]:
        for t in incoming:
            if t.source == me:
                copy_bytes(target, t.target_offset, source, t.source_offset, t.nbytes)
        pending = transport.post(
            [(move.group[t.target], source[t.source_offset : t.source_offset + t.nbytes]) for t in outgoing],
            [
                (move.group[t.source], target[t.target_offset : t.target_offset + t.nbytes])
                for t in incoming
                if t.source != me
            ],
            data.workspace,
        )
        yield
        transport.finish(pending)

    return _nothing if len(move.group) == 1 and stays else run


def _nothing(data: Data) -> Iterator[None]:
    """A move among one member whose payload is where it is wanted."""
    yield


def idle(data: Any, phases: int) -> Iterator[None]:
    """Take no part, but as many turns as those that do."""
    for _ in range(phases):
        yield


def bodies(packed: Packed) -> tuple[list[Dense], str | None]:
    """What follows the headers of the payloads of one copy, as regions of the buffer in elements, and their type.

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
    """An action on an array, carried out on the payload as an array of elements."""

    def run(data: Data) -> Iterator[None]:
        body = Data(data.payload.view(stored(element)), element, data.workspace)
        yield from action(body)
        data.saturated += body.saturated

    return run


class DealingOp(CollectiveOp):
    """A collective after which payloads of several members stand side by side, for a decode to sum."""

    @abstractmethod
    def wishes(self, scene: Scene, states: Sequence[State]) -> list[Wish]:
        """What each member of a group wants of what all hold."""

    def advance(self, scene: Scene, states: Sequence[State]) -> list[State]:
        divisor = states[0].divisor * scene.topology.divisor(scene.level)  # type: ignore[union-attr]
        return [place(wish, divisor) for wish in self.wishes(scene, states)]

    def bind(self, transport: Transport, move: Move) -> Action:
        return bind_payload(transport, move, self.wishes(move.scene, move.before))

    def sent(self, move: Move) -> int:
        return payload_sent(move, self.wishes(move.scene, move.before))


def payload_sent(move: Move, wishes: Sequence[Wish]) -> int:
    """Bytes of payload that this member sends to the others."""
    return sum(t.nbytes for j in move.others for t in transfers(j, wishes[j]) if t.source == move.index)


def copy_bytes(target: Any, target_offset: int, source: Any, source_offset: int, nbytes: int) -> None:
    """Copy within one device, host or GPU."""
    device.copy(target[target_offset : target_offset + nbytes], source[source_offset : source_offset + nbytes])
