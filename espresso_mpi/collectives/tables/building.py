"""From the steps of a program to a table of operations. Nothing runs here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol

from espresso_mpi.compressors import Compressor
from espresso_mpi.compressors.by_address import KernelCall
from espresso_mpi.compressors.kernels.cpu import host
from espresso_mpi.compressors.optional import Result
from espresso_mpi.tracing.recording import Kind

from ..data import reduction
from ..data.layout import Packed, Part
from ..data.transfers import Sources, Transfer, place, transfers
from ..ops.base import Move
from ..program import DecodeStep, EncodeStep
from .operations import BUFFERS, Code, Drawn, Kept, Operation, OperationTable, PythonStage, Span

Act = Callable[[Any], Iterator[None]]


def encodes_by_address(compressor: Compressor, sizes: Sequence[int]) -> bool:
    """Whether a table can encode parts of these sizes: the method has a kernel, and none would use several threads."""
    return all(host.runs_serial(n) and compressor.encoder(n) is not None for n in sizes)


def decodes_by_address(compressor: Compressor, sizes: Sequence[int]) -> bool:
    """As ``encodes_by_address``, of a decode, which must also leave the mean as it is."""
    plain = type(compressor).finalize is Result.finalize
    return plain and all(host.runs_serial(n) and compressor.decoder(n) is not None for n in sizes)


class Ways(Protocol):
    """What a table must know of the ways between the ranks: a transport does, or a description."""

    @property
    def node(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""

    def window_room(self, group: Sequence[int]) -> int:
        """Bytes of a payload that pass the shared window of a group at a time; 0: the group has none."""

    def pieces_of(self, rank: int, nbytes: int) -> list[tuple[int, int]]:
        """(first byte, bytes) of the messages that take so many bytes to a rank or from it."""


@dataclass
class TableBuilder:
    """Collects the operations of a table, step by step.

    Args:
        ways: between the ranks.
        tensors: number of tensors.
    """

    ways: Ways
    tensors: int
    _operations: list[Operation] = field(default_factory=list)
    _parameters: list[float] = field(default_factory=list)
    _kept: list[Kept] = field(default_factory=list)
    _drawn: list[Drawn] = field(default_factory=list)
    _spans: list[Span] = field(default_factory=list)
    _stages: list[PythonStage] = field(default_factory=list)
    _room: list[int] = field(default_factory=lambda: [0, 0])
    _now: int = 0
    _held: int = 0
    _marks: int = 0
    _messages: int = 0
    _window: int = 0
    _posted: list[int] = field(default_factory=lambda: [0, 0])

    # --- steps --------------------------------------------------------------------------------------------------------

    def encode(self, nbytes: int, steps: Sequence[tuple[EncodeStep, Compressor]], by_python: Sequence[Act]) -> None:
        """Encode every tensor into the first buffer; ``by_python``: what does it where there is no kernel."""
        self._hold(0, nbytes)
        for tensor, (step, compressor) in enumerate(steps):
            parts = [part for part in step.packed.copies[0] if part.size]
            if not encodes_by_address(compressor, [part.size for part in parts]):
                self.python(by_python[tensor], f"encode {compressor} of tensor {tensor}")
                continue
            first = self._mark()
            kept = self._residual(tensor, step) if step.region.size else 0
            for part in parts:
                self._operations.append(self._encode(tensor, part, step, compressor, kept))
            self._span("encode", tensor, first, f"encode@{step.device}")

    def decode(self, steps: Sequence[tuple[DecodeStep, Compressor]], by_python: Sequence[Act]) -> None:
        """Decode every tensor from the buffer that holds the payload now."""
        for tensor, (step, compressor) in enumerate(steps):
            sizes = [part.size for copy in step.packed.copies for part in copy if part.size]
            if not decodes_by_address(compressor, sizes):
                self.python(by_python[tensor], f"decode {compressor} of tensor {tensor}", payload=True)
                continue
            first = self._mark()
            for number, copy in enumerate(step.packed.copies):
                code = Code.ADD if number else Code.DECODE
                self._operations += [self._decode(code, tensor, part, compressor) for part in copy if part.size]
            if step.region.size and step.packed.divisor != 1:
                exact, factor = reduction.factor_of(step.packed.divisor)
                at = self._place([float(exact), factor])
                region = step.region
                self._operations.append(Operation(Code.DIVIDE, BUFFERS + tensor, region.start, region.size, number=at))
            self._span("decode", tensor, first, f"decode@{step.device}")

    def move(self, op: str, move: Move, sources: Sequence[Sources], weights: Sequence[int]) -> None:
        """Move the payload to the other buffer, through the window if the group has it; yields once.

        Args:
            sources: what each member gets.
            weights: of the bytes that are sent, how many are each tensor's.
        """
        me, first, source = move.index, self._mark(), self._now
        incoming = list(transfers(me, sources[me]))
        outgoing = [t for j in move.others for t in transfers(j, sources[j]) if t.source == me]
        stays = not outgoing and all(t.source == me and t.source_offset == t.target_offset for t in incoming)
        sent = (0, 0)
        if len(move.group) > 1 or not stays:
            self._hold(1 - source, place(sources[me], 1.0).nbytes)
            own = [t for t in incoming if t.source == me]
            self._operations += [self._copy(Code.COPY, t, t.source_offset, source) for t in own]
            room = self.ways.window_room(move.group)
            if room:
                sent = self._by_window(room, move, incoming, source)
            else:
                sent = self._by_messages(move, incoming, outgoing, source)
        else:
            self._yield()
        self._spans += self._shared(f"{op}@{move.context.level}", move.context.level, first, sent, weights)

    def python(self, act: Act, what: str, payload: bool = False) -> None:
        """Let Python do something; ``payload``: it reads the payload."""
        stage = PythonStage(act, what, self._now, self._held if payload else None)
        self._operations.append(Operation(Code.PYTHON, len(self._stages)))
        self._stages.append(stage)

    def idle(self, phases: int) -> None:
        """Take no part in a collective, but as many progress steps as the ranks that do."""
        for _ in range(phases):
            self._yield()

    def table(self) -> OperationTable:
        """What was collected. Places are numbered now that all are known: residuals follow the tensors, then keys."""
        residuals = BUFFERS + self.tensors
        keys = residuals + len(self._kept)
        placed = [
            replace(o, kept=o.kept + residuals if o.kept >= 0 else o.kept, key=o.key + keys if o.key >= 0 else o.key)
            for o in self._operations
        ]
        return OperationTable(
            tuple(placed), self.tensors, tuple(self._kept), tuple(self._drawn), tuple(self._parameters),
            tuple(self._spans), self._marks, tuple(self._stages), (self._room[0], self._room[1]), self._messages,
            self._window, (self._posted[0], self._posted[1]),
        )  # fmt: skip

    # --- parts of steps -----------------------------------------------------------------------------------------------

    def _encode(self, tensor: int, part: Part, step: EncodeStep, compressor: Compressor, kept: int) -> Operation:
        call = compressor.encoder(part.size)
        assert call is not None
        key = -1
        if call.draws:
            key = len(self._drawn)
            self._drawn.append(Drawn(tensor, step.point, part.start, step.who))
        return Operation(
            Code.ENCODE, BUFFERS + tensor, part.start, part.size, self._now, part.offset, part.nbytes, kept,
            part.start - step.region.start, key, self._parameters_of(call), call=call,
        )  # fmt: skip

    def _decode(self, code: Code, tensor: int, part: Part, compressor: Compressor) -> Operation:
        call = compressor.decoder(part.size)
        assert call is not None
        return Operation(
            code, BUFFERS + tensor, part.start, part.size, self._now, part.offset, part.nbytes,
            number=self._parameters_of(call), call=call,
        )  # fmt: skip

    def _by_window(self, room: int, move: Move, incoming: Sequence[Transfer], source: int) -> tuple[int, int]:
        """As ``SharedWindow.exchange``. Returns the bytes sent, inside the node and between nodes."""
        longest = max(state.nbytes for state in move.before if isinstance(state, Packed))
        held, taken = self._held_before(move), 0
        for first in range(0, longest, room):
            shown = max(0, min(room, held - first))
            self._operations.append(Operation(Code.SHOW, buffer=source, offset=first, nbytes=shown))
            self._operations.append(Operation(Code.MEET))
            for t in incoming:
                a, b = max(first, t.source_offset), min(first + room, t.source_offset + t.nbytes)
                if t.source != move.index and a < b:
                    piece = replace(t, target_offset=t.target_offset + a - t.source_offset, nbytes=b - a)
                    self._operations.append(self._copy(Code.TAKE, piece, a - first, t.source))
                    taken += b - a
        self._window += taken
        self._yield()
        return taken, 0

    def _by_messages(
        self, move: Move, incoming: Sequence[Transfer], outgoing: Sequence[Transfer], source: int
    ) -> tuple[int, int]:
        """As ``Transport.post`` and ``finish``. Returns as ``_by_window``."""
        count, sent = 0, [0, 0]
        for t in (t for t in incoming if t.source != move.index):
            count += self._message(Code.RECEIVE, move.group[t.source], self._now, t.target_offset, t.nbytes)
        for t in outgoing:
            rank = move.group[t.target]
            count += self._message(Code.SEND, rank, source, t.source_offset, t.nbytes)
            sent[rank not in self.ways.node] += t.nbytes
        self._yield()
        self._operations.append(Operation(Code.WAIT, number=count))
        self._messages = max(self._messages, count)
        self._posted = [before + new for before, new in zip(self._posted, sent)]
        return sent[0], sent[1]

    def _message(self, code: Code, rank: int, buffer: int, offset: int, nbytes: int) -> int:
        pieces = self.ways.pieces_of(rank, nbytes)
        for first, size in pieces:
            self._operations.append(Operation(code, buffer=buffer, offset=offset + first, nbytes=size, number=rank))
        return len(pieces)

    def _copy(self, code: Code, t: Transfer, at: int, number: int) -> Operation:
        """A copy to the current buffer."""
        return Operation(code, buffer=self._now, offset=t.target_offset, nbytes=t.nbytes, number=number, other=at)

    def _held_before(self, move: Move) -> int:
        state = move.before[move.index]
        assert isinstance(state, Packed)
        return state.nbytes

    def _hold(self, buffer: int, nbytes: int) -> None:
        """From here on the payload is in a buffer."""
        self._now, self._held = buffer, nbytes
        self._room[buffer] = max(self._room[buffer], nbytes)

    def _residual(self, tensor: int, step: EncodeStep) -> int:
        self._kept.append(Kept(tensor, step.point, step.region, step.weight))
        return len(self._kept) - 1

    def _parameters_of(self, call: KernelCall) -> int:
        return self._place(call.parameters)

    def _place(self, parameters: Sequence[float]) -> int:
        """Where parameters begin among all."""
        self._parameters += parameters
        return len(self._parameters) - len(parameters)

    def _mark(self) -> int:
        self._operations.append(Operation(Code.MARK, self._marks))
        self._marks += 1
        return self._marks - 1

    def _yield(self) -> None:
        self._operations.append(Operation(Code.YIELD))

    def _span(self, kind: Kind, tensor: int, first: int, what: str) -> None:
        self._spans.append(Span(kind, tensor, first, self._mark(), what))

    def _shared(
        self, what: str, level: str, first: int, sent: tuple[int, int], weights: Sequence[int]
    ) -> Iterator[Span]:
        """The span of a collective, for each tensor; each has its share of the bytes and of the waiting."""
        last, parts = self._mark(), list(shares(1.0, weights))
        intra, inter = ([round(sent[k] * b) - round(sent[k] * a) for a, b in parts] for k in range(2))
        for tensor, share in enumerate(parts):
            yield Span("wire", tensor, first, last, what, level, intra[tensor], inter[tensor], share)


def shares(total: float, weights: Sequence[int]) -> Iterator[tuple[float, float]]:
    """A length cut in proportion to weights."""
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    edges = [total * part / whole for part in accumulate(weights, initial=0)]
    return pairwise(edges)
