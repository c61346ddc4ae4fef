"""From the steps of a program to a table of operations. Nothing runs here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, Protocol

from espresso_mpi.compressors import Compressor
from espresso_mpi.compressors.kernels.cpu import host

from ..data.layout import Dense, Packed
from ..data.transfers import Sources, Transfer, place, transfers
from ..ops.base import Move
from ..program import DecodeStep, EncodeStep, summary_sizes
from . import passes
from .early import with_sends
from .emission import Emission
from .operations import BUFFERS, Code, Operation, OperationTable, PythonStage, whole_lines
from .passes import DenseMove

Act = Callable[[Any], Iterator[None]]


def encodes_by_address(compressor: Compressor, packed: Packed) -> bool:
    """Whether a table can encode these parts: the method has kernels, and none would use several threads."""
    return all(
        host.runs_serial(n)
        and compressor.encoder(n) is not None
        and (compressor.summary(n) is None or compressor.summariser(n) is not None)
        for n in (part.size for part in packed.copies[0] if part.size)
    )


def decodes_by_address(compressor: Compressor, sizes: Sequence[int]) -> bool:
    """As ``encodes_by_address``, of a decode, and of what makes the result of the mean."""
    if compressor.finalizes and any(compressor.finalizer(n) is None for n in sizes):
        return False
    return all(host.runs_serial(n) and compressor.decoder(n) is not None for n in sizes)


class Ways(Protocol):
    """What a table must know of the ways between the ranks: a transport does, or a description."""

    @property
    def node(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""

    def window_room(self, group: Sequence[int]) -> int:
        """Bytes of a payload that pass the shared window of a group at a time; 0: the group has none."""

    def reads_memory(self, group: Sequence[int], nbytes: int, arrays: int) -> bool:
        """Whether the ranks of a group read each other's memory in a collective of so many bytes."""

    @property
    def windows_everywhere(self) -> bool:
        """Whether on every node all ranks share a window."""

    def pieces_of(self, rank: int, nbytes: int) -> list[tuple[int, int]]:
        """(first byte, bytes) of the messages that take so many bytes to a rank or from it."""


@dataclass(frozen=True)
class _Decoding:
    """A decode that is still to be made part of a pass.

    Attributes:
        parts: by tensor: the operations of each part.
        regions: by tensor: what is decoded.
        what: how it is recorded.
        buffer: where the payload is.
    """

    parts: dict[int, list[list[Operation]]]
    regions: dict[int, Dense]
    what: str
    buffer: int


@dataclass
class TableBuilder:
    """Collects the operations of a table, step by step: the part of ``summing.SummingBuilder`` that knows no sums.

    A sum inside a node and a decode wait for the step that follows: what works on the same elements is one pass.

    Args:
        ways: between the ranks.
        sizes: elements of each tensor.
    """

    ways: Ways
    sizes: Sequence[int]
    _room: list[int] = field(default_factory=lambda: [0, 0])
    _now: int = 0
    _held: int = 0
    _messages: int = 0
    _window: int = 0
    _posted: list[int] = field(default_factory=lambda: [0, 0])
    _waiting: DenseMove | _Decoding | None = None
    _encoding: slice | None = None

    def __post_init__(self) -> None:
        self._to = Emission(self.sizes)

    # --- steps --------------------------------------------------------------------------------------------------------

    def encode(self, nbytes: int, steps: Sequence[tuple[EncodeStep, Compressor]], by_python: Sequence[Act]) -> None:
        """Encode every tensor into the first buffer; ``by_python``: what does it where there is no kernel.

        Summaries are behind the payload: those on which the ranks agree, see ``summing.SummingBuilder``.
        """
        sizes = [sum(summary_sizes(compressor, step.packed.copies[0])) for step, compressor in steps]
        summaries = list(accumulate((4 * size for size in sizes), initial=whole_lines(nbytes)))
        if any(sizes):
            self._flush()
        self._hold(0, summaries[-1] if any(sizes) else nbytes)
        self._held = nbytes
        begin = len(self._to.operations)
        found, others = dict[int, list[Operation]](), list[int]()
        for tensor, (step, compressor) in enumerate(steps):
            if encodes_by_address(compressor, step.packed):
                found[tensor] = self._to.encode(tensor, step, compressor, 0, summaries[tensor])
            else:
                others.append(tensor)
        self._encode_found(found, {tensor: f"encode@{steps[tensor][0].device}" for tensor in found})
        self._encoding = None if others else slice(begin, len(self._to.operations))
        for tensor in others:
            self.python(by_python[tensor], f"encode {steps[tensor][1]} of tensor {tensor}")

    def _encode_found(self, found: dict[int, list[Operation]], whats: dict[int, str]) -> None:
        """Encode or summarise tensors by kernels, in one pass with the step before where that is possible.

        Args:
            whats: how it is recorded.
        """
        done = self._encode_in_pass({tensor: own for tensor, own in found.items() if own}, whats)
        for tensor in sorted(found.keys() - done):
            self._to.work("encode", tensor, found[tensor], whats[tensor])

    def _encode_in_pass(self, found: dict[int, list[Operation]], whats: dict[int, str]) -> set[int]:
        """Encode the tensors that the step before has just written; returns them."""
        waiting, self._waiting = self._waiting, None
        if isinstance(waiting, DenseMove):
            marks = self._sum(waiting, found)
        elif isinstance(waiting, _Decoding):
            found = {tensor: own for tensor, own in found.items() if self._follows(waiting, tensor, own)}
            marks = self._decode_all(waiting, found)
        else:
            return set()
        for (tensor, what), first, last in zip(
            ((tensor, whats[tensor]) for tensor in found), marks[-len(found) - 1 :], marks[len(marks) - len(found) :]
        ):
            self._to.span("encode", tensor, first, last, what)
        return set(found)

    def decode(self, steps: Sequence[tuple[DecodeStep, Compressor]], by_python: Sequence[Act]) -> None:
        """Decode every tensor from the buffer that holds the payload now."""
        self._flush()
        parts, regions = dict[int, list[list[Operation]]](), dict[int, Dense]()
        for tensor, (step, compressor) in enumerate(steps):
            sizes = [part.size for copy in step.packed.copies for part in copy if part.size]
            if not decodes_by_address(compressor, sizes):
                self.python(by_python[tensor], f"decode {compressor} of tensor {tensor}", payload=True)
                continue
            decoded = self._decoded(tensor, step, compressor)
            if decoded is not None:
                parts[tensor], regions[tensor] = decoded, step.region
        if parts:
            self._waiting = _Decoding(parts, regions, f"decode@{steps[0][0].device}", self._now)

    def dense(self, move: DenseMove) -> None:
        """A collective on the tensors, inside the node."""
        if move.reads_memory:
            self._to.reached = len(move.members)
        if move.op == "allgather":
            self._allgather(move)
        else:
            self._flush()
            self._waiting = move

    def _allgather(self, move: DenseMove) -> None:
        waiting = self._waiting
        decodes = dict[int, list[list[Operation]]]()
        if isinstance(waiting, _Decoding):
            same = all(region == move.regions[tensor][move.index] for tensor, region in waiting.regions.items())
            decodes = waiting.parts if same else {}
        if decodes and isinstance(waiting, _Decoding):
            self._waiting = None
        else:
            self._flush()
        marks = passes.allgather(self._to, move, decodes)
        if isinstance(waiting, _Decoding):
            self._spans_of(waiting, decodes, marks)
        self._count_shown(move, (marks[-2], marks[-1]))

    def python(
        self, act: Act, what: str, payload: bool = False, summary: tuple[int, int] | None = None
    ) -> None:  # fmt: skip
        """Let Python do something; ``payload``: it reads the payload; ``summary``: as of ``PythonStage``."""
        self._flush()
        stage = PythonStage(act, what, self._now, self._held if payload else None, summary)
        self._to.operations.append(Operation(Code.PYTHON, len(self._to.stages)))
        self._to.stages.append(stage)

    def idle(self, phases: int) -> None:
        """Take no part in a collective, but as many progress steps as the ranks that do."""
        self._flush()
        for _ in range(phases):
            self._yield()

    def table(self) -> OperationTable:
        """What was collected."""
        self._flush()
        room, posted = (self._room[0], self._room[1]), (self._posted[0], self._posted[1])
        return self._to.table(room, self._messages, self._window, posted)

    def move(self, op: str, move: Move, sources: Sequence[Sources], weights: Sequence[int]) -> None:
        """Move the payload to the other buffer, through the window if the group has it; yields once.

        Args:
            sources: what each member gets.
            weights: of the bytes that are sent, how many are each tensor's.
        """
        encoding = self._encoding
        self._flush()
        me, first, source = move.index, self._to.mark(), self._now
        incoming = list(transfers(me, sources[me]))
        outgoing = [t for j in move.others for t in transfers(j, sources[j]) if t.source == me]
        stays = not outgoing and all(t.source == me and t.source_offset == t.target_offset for t in incoming)
        sent = (0, 0)
        if len(move.group) > 1 or not stays:
            self._hold(1 - source, place(sources[me], 1.0).nbytes)
            own = [t for t in incoming if t.source == me]
            self._to.operations += [self._copy(Code.COPY, t, t.source_offset, source) for t in own]
            room = self.ways.window_room(move.group)
            if room:
                sent = self._by_window(room, move, incoming, source)
            else:
                sent = self._by_messages(move, incoming, outgoing, source, encoding)
        else:
            self._yield()
        self._to.shared(op, move.context.level, (first, self._to.mark()), sent, weights)

    # --- passes -------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Make the step that waits a pass of its own; another step follows."""
        waiting, self._waiting, self._encoding = self._waiting, None, None
        if isinstance(waiting, DenseMove):
            self._sum(waiting, {})
        elif isinstance(waiting, _Decoding):
            self._decode_all(waiting, {})

    def _sum(self, move: DenseMove, encodes: dict[int, list[Operation]]) -> list[int]:
        marks = passes.reduce_scatter(self._to, move, encodes)
        self._count_shown(move, (marks[0], marks[1]))
        return marks

    def _count_shown(self, move: DenseMove, marks: tuple[int, int]) -> None:
        self._window += move.sent
        self._to.shared(move.op, "intra", marks, (move.sent, 0), move.weights)

    def _decode_all(self, waiting: _Decoding, encodes: dict[int, list[Operation]]) -> list[int]:
        marks = passes.decode_all(self._to, waiting.parts, encodes)
        self._spans_of(waiting, waiting.parts, marks)
        return marks

    def _spans_of(self, waiting: _Decoding, decodes: dict[int, list[list[Operation]]], marks: Sequence[int]) -> None:
        for tensor, first, last in zip(decodes, marks, marks[1:]):
            self._to.span("decode", tensor, first, last, waiting.what)

    def _follows(self, waiting: _Decoding, tensor: int, encodes: Sequence[Operation]) -> bool:
        """Whether a tensor can be encoded tile by tile as it is decoded, from the one buffer to the other."""
        parts = waiting.parts.get(tensor, [])
        same = [(part[0].at, part[0].size) for part in parts] == [(encode.at, encode.size) for encode in encodes]
        return same and len(parts) == 1 and waiting.buffer != 0

    def _decoded(self, tensor: int, step: DecodeStep, compressor: Compressor) -> list[list[Operation]] | None:
        """The operations that decode a tensor, for each part: all copies, the division, and what finalizes the mean.

        None, and they do not wait for the next step, where there are none, or the copies are cut in different places.
        """
        copies = [[part for part in copy if part.size] for copy in step.packed.copies]
        decoded = [
            [self._to.decode(Code.ADD if n else Code.DECODE, tensor, part, compressor, self._now) for part in copy]
            for n, copy in enumerate(copies)
        ]
        region, rest = step.region, list[Operation]()
        if region.size and step.packed.divisor != 1:
            number = self._to.divisor(step.packed.divisor)
            rest.append(Operation(Code.DIVIDE, BUFFERS + tensor, region.start, region.size, number=number))
        if region.size and compressor.finalizes:
            rest.append(self._to.finalize(tensor, region, compressor))
        if len({tuple((o.at, o.size) for o in copy) for copy in decoded}) > 1 or not any(copies):
            self._to.work("decode", tensor, [*chain(*decoded), *rest], f"decode@{step.device}")
            return None
        return [[*part, *(one.cut(part[0].at, part[0].at + part[0].size) for one in rest)] for part in zip(*decoded)]

    # --- parts of steps -----------------------------------------------------------------------------------------------

    def _by_window(self, room: int, move: Move, incoming: Sequence[Transfer], source: int) -> tuple[int, int]:
        """As ``SharedWindow.exchange``. Returns the bytes sent, inside the node and between nodes."""
        longest = max(state.nbytes for state in move.before if isinstance(state, Packed))
        held, taken = _held_before(move), 0
        for first in range(0, longest, room):
            shown = max(0, min(room, held - first))
            self._to.operations.append(Operation(Code.SHOW, buffer=source, offset=first, nbytes=shown))
            self._to.operations.append(Operation(Code.MEET))
            for t in incoming:
                a, b = max(first, t.source_offset), min(first + room, t.source_offset + t.nbytes)
                if t.source != move.index and a < b:
                    piece = replace(t, target_offset=t.target_offset + a - t.source_offset, nbytes=b - a)
                    self._to.operations.append(self._copy(Code.TAKE, piece, a - first, t.source))
                    taken += b - a
        self._window += taken
        self._yield()
        return taken, 0

    def _by_messages(
        self,
        move: Move,
        incoming: Sequence[Transfer],
        outgoing: Sequence[Transfer],
        source: int,
        encoding: slice | None,
    ) -> tuple[int, int]:
        """As ``Transport.post`` and ``finish``. Returns as ``_by_window``."""
        receives, sends, sent = list[Operation](), list[Operation](), [0, 0]
        for t in (t for t in incoming if t.source != move.index):
            receives += self._message(Code.RECEIVE, move.group[t.source], self._now, t.target_offset, t.nbytes)
        for t in outgoing:
            rank = move.group[t.target]
            sends += self._message(Code.SEND, rank, source, t.source_offset, t.nbytes)
            sent[rank not in self.ways.node] += t.nbytes
        self._start(receives, sends, encoding)
        self._await(len(receives) + len(sends))
        self._posted = [before + new for before, new in zip(self._posted, sent)]
        return sent[0], sent[1]

    def _await(self, count: int, at_once: bool = False) -> None:
        """Wait for messages that were started; other work may run meanwhile."""
        if not at_once:
            self._yield()
        if count:
            self._to.operations.append(Operation(Code.WAIT, number=count))
        self._messages = max(self._messages, count)

    def _start(self, receives: list[Operation], sends: list[Operation], encoding: slice | None) -> None:
        """Start messages: if the payload was encoded just before, while that is done."""
        if encoding is None:
            self._to.operations += [*receives, *sends]
        else:
            encodes = self._to.operations[encoding]
            self._to.operations[encoding] = with_sends(encodes, receives, sends)

    def _message(self, code: Code, rank: int, buffer: int, offset: int, nbytes: int) -> list[Operation]:
        return [
            Operation(code, buffer=buffer, offset=offset + first, nbytes=size, number=rank)
            for first, size in self.ways.pieces_of(rank, nbytes)
        ]

    def _copy(self, code: Code, t: Transfer, at: int, number: int) -> Operation:
        """A copy to the current buffer."""
        return Operation(code, buffer=self._now, offset=t.target_offset, nbytes=t.nbytes, number=number, other=at)

    def _hold(self, buffer: int, nbytes: int) -> None:
        """From here on the payload is in a buffer."""
        self._now, self._held = buffer, nbytes
        self._room[buffer] = max(self._room[buffer], nbytes)

    def _yield(self) -> None:
        self._to.operations.append(Operation(Code.YIELD))


def _held_before(move: Move) -> int:
    """Bytes of this member's payload before a collective."""
    state = move.before[move.index]
    assert isinstance(state, Packed)
    return state.nbytes
