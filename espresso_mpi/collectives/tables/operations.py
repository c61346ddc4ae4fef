"""A table of operations: what one rank does with one segment, or with the tensors of a payload bucket.

Everything is known before the call: sizes, places in the payload buffers and in the shared window, ranks. What differs
from call to call is a list of addresses, the *places*: two payload buffers, scratch memory, the tensors, their
residuals and states, and the keys of random bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from espresso_mpi.compressors.by_address import HasAddress, KernelCall
from espresso_mpi.tracing.recording import Kind

from ..data.layout import Dense

NOWHERE = -1
"""The place of a residual or of a key that there is not."""

BUFFERS, SCRATCH = 3, 2
"""The first places: two payload buffers, and scratch memory for the values of a tile."""


_LINE = 64


def whole_lines(nbytes: int) -> int:
    """The bytes of the cache lines that so many take."""
    return -(-nbytes // _LINE) * _LINE


class Code(IntEnum):
    """What an operation does. ``interpreter`` knows the same numbers, and that those before DIVIDE call the kernel of a
    method."""

    ENCODE = 0
    DECODE = 1
    ADD = 2
    FINALIZE = 3
    SUMMARISE = 4
    UPDATE = 5
    DIVIDE = 6
    SUM = 7
    WRITE = 8
    READ = 9
    REACH = 10
    FETCH = 11
    LAP = 12
    TILES = 13
    COPY = 14
    SHOW = 15
    MEET = 16
    TAKE = 17
    SEND = 18
    RECEIVE = 19
    WAIT = 20
    MARK = 21
    STACK = 22
    YIELD = 23
    SUM_RECEIVED = 24
    OFFER = 25
    LEARN = 26
    REDUCE = 27
    PYTHON = 28


_CHANGING = frozenset(
    (Code.DECODE, Code.ADD, Code.FINALIZE, Code.SUMMARISE, Code.DIVIDE, Code.SUM, Code.READ, Code.REACH, Code.FETCH,
     Code.SUM_RECEIVED, Code.REDUCE)
)  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        code: what it does.
        tensor: place of the tensor; of MARK, LAP and STACK the number of the time; of PYTHON that of the stage; of
            TILES how many of the next operations are made tile by tile.
        at, size: which elements of the tensor; size of TILES: their elements, and of MARK and STACK: how many of the
            next times begin at 0, or are stacked.
        buffer, offset, nbytes: the payload: place of the buffer, and which bytes of it; of REACH: where in the scratch
            memory the elements of other ranks are put, and bytes of those of one rank at a time.
        kept, kept_at: place of the residual, and the element of it that belongs to the first one.
        key: place of the key.
        state: place of the state that the kernel gets; work: where in the scratch memory that of the kernel begins.
        listed: place from which on the list of addresses is that the kernel gets in place of a state; summary: byte of
            the buffer at which the summary begins, the first of them.
        number: of operations that call a kernel: where its parameters begin; of DIVIDE and of sums: where the
            divisor is; of COPY: the other buffer; of TAKE, READ, FETCH, SEND and RECEIVE: the rank; of WAIT: the number
            of messages; of LAP: 1 at the end and -1 at the beginning; of TILES: elements of one.
        other: of COPY and TAKE: the byte in the source; of SUM, WRITE and READ: the byte in the row; of REACH, FETCH
            and LEARN: the place of what is known of the memory of the other ranks, see ``OperationTable.reached``.
        call: the kernel.
        first, whole: of ENCODE, SUMMARISE, DECODE and ADD: the number of the first element in its payload, and how many
            that has; of FINALIZE: in its region; of SUM_RECEIVED: the row of the tensor's own elements, which is not
            read, and the number of rows; of REACH, FETCH, OFFER and LEARN: ``whole`` is the number of tensors.
        scratch: the values are in scratch memory instead; a sum of those of the tensor is written to it.

    REDUCE is different: ``tensor`` is the place of any memory, and ``at`` a byte of it. The rows are in a payload
    buffer, ``nbytes`` apart, or, where ``buffer`` is NOWHERE, in the window, from byte ``other`` of the row on.
    ``first`` and ``whole`` are as of SUM_RECEIVED. ``kept_at`` is 1 if the values that it cuts are counted.
    """

    code: Code
    tensor: int = 0
    at: int = 0
    size: int = 0
    buffer: int = 0
    offset: int = 0
    nbytes: int = 0
    kept: int = NOWHERE
    kept_at: int = 0
    key: int = NOWHERE
    number: int = 0
    other: int = 0
    call: KernelCall | None = None
    first: int = 0
    whole: int = 0
    scratch: bool = False
    state: int = NOWHERE
    work: int = 0
    listed: int = NOWHERE
    summary: int = NOWHERE

    @property
    def row(self) -> tuple[int, ...]:
        """The operation as the interpreter reads it, the address of the kernel at place 12."""
        address = 0 if self.call is None else self.call.entry.address
        return (
            self.code, self.tensor, self.at, self.size, self.buffer, self.offset, self.nbytes,
            self.kept, self.kept_at, self.key, self.number, self.other, address, self.first, self.whole, self.scratch,
            self.state, self.work, self.listed, self.summary,
        )  # fmt: skip

    @property
    def changes_tensor(self) -> bool:
        """Whether elements of a tensor may be others afterwards."""
        if self.tensor < BUFFERS or self.code not in _CHANGING:
            return False
        return self.scratch == (self.code == Code.SUMMARISE)  # that one copies its input to the tensor, if need be

    @property
    def grain(self) -> int:
        """At whose multiples its elements may be cut."""
        return 1 if self.call is None else self.call.grain or max(self.size, 1)

    def resumes(self, before: Operation) -> bool:
        """Whether a time goes on that has just paused."""
        return self.code == before.code == Code.LAP and self.tensor == before.tensor and self.number < 0 < before.number

    def cut(self, first: int, last: int) -> Operation:
        """An operation on values, for the elements from ``first`` to ``last`` only."""
        by = first - self.at
        in_row = 4 * by if self.code in (Code.SUM, Code.WRITE, Code.READ) else 0
        return replace(
            self, at=first, size=last - first, kept_at=self.kept_at + by, first=self.first + by,
            other=self.other + in_row,
        )  # fmt: skip

    @property
    def _elements(self) -> str:
        """The values in words."""
        first, last = self.at, self.at + self.size
        if self.scratch:
            return f"scratch {self.tensor - BUFFERS} [{first}:{last}]"
        if self.tensor >= BUFFERS:
            return f"tensor {self.tensor - BUFFERS} [{first}:{last}]"
        return f"{_memory(self.tensor)} [{4 * first}:{4 * last}]"

    def __str__(self) -> str:
        """The operation in words, for ``explain --program``."""
        elements, in_row = self._elements, f"[{self.other}:{self.other + 4 * self.size}]"
        payload = f"{_memory(self.buffer)} [{self.offset}:{self.offset + self.nbytes}]"
        source = f"[{self.other}:{self.other + self.nbytes}]"
        kept = f" + residual at place {self.kept}" if self.kept != NOWHERE else ""
        state = f" + state at place {self.state}" if self.state != NOWHERE else ""
        summary = f"{_memory(self.buffer)} [{self.summary}:]"
        return {
            Code.ENCODE: f"{elements}{kept}{state}{f', {summary}' if self.summary != NOWHERE else ''} -> {payload}",
            Code.DECODE: f"{payload} -> {elements}",
            Code.ADD: f"{payload} + {elements}",
            Code.FINALIZE: f"{elements} finalized",
            Code.SUMMARISE: f"{elements}{kept} -> {summary}",
            Code.UPDATE: f"{payload} -> states from place {self.listed} on",
            Code.DIVIDE: elements,
            Code.SUM: f"{elements} + {in_row} of the other rows, divided"
            if self.other >= 0
            else f"{elements} + {_SLOTS}",
            Code.WRITE: f"{elements} -> own row {in_row}",
            Code.READ: f"row {self.number} {in_row} -> {elements}",
            Code.REACH: f"{elements} + the same of the other ranks, read from their memory, divided",
            Code.FETCH: f"the memory of rank {self.number} -> {elements}",
            Code.LAP: f"time {self.tensor} {'goes on' if self.number < 0 else 'pauses'}",
            Code.TILES: f"the next {self.tensor} by {self.number} of {self.size} elements at a time",
            Code.COPY: f"buffer {self.number} {source} -> {payload}",
            Code.SHOW: f"{payload} -> own {'row' if self.other >= 0 else 'slot'}",
            Code.MEET: "barrier of the node",
            Code.TAKE: f"row {self.number} {source} -> {payload}",
            Code.SEND: f"{payload} -> rank {self.number}",
            Code.RECEIVE: f"rank {self.number} -> {payload}",
            Code.WAIT: f"{self.number} messages",
            Code.MARK: f"time {self.tensor}" + (f", and the next {self.size} from 0" if self.size else ""),
            Code.STACK: f"times {self.tensor} to {self.tensor + self.size - 1} follow each other",
            Code.YIELD: "other work may run",
            Code.SUM_RECEIVED: f"{elements} + the other rows of {payload}, divided",
            Code.OFFER: f"where {self.whole} tensors begin -> own row",
            Code.LEARN: f"where {self.whole} tensors begin on the other ranks",
            Code.REDUCE: f"{self.size} elements of {_memory(self.tensor)} from byte {self.at} on + "
            + (_SLOTS if self.buffer == NOWHERE else f"the other rows of {_memory(self.buffer)}"),
            Code.PYTHON: f"stage {self.tensor}",
        }[self.code]


_SLOTS = "the same of the other slots"


def _memory(place: int) -> str:
    """The memory of a message, in words."""
    return f"buffer {place}" if place < BUFFERS else f"bytes of tensor {place - BUFFERS}"


@dataclass(frozen=True)
class KeptMemory:
    """A residual that a table needs: of which tensor, encode point and region, and its weight in the mean.

    With a name as ``state`` it is what the compressor keeps by this name: as many elements as the region, or ``size``.
    With ``later`` it is no memory, but the place of an address that the table sets.
    """

    tensor: int
    point: int
    region: Dense
    weight: float = 0.0
    state: str = ""
    size: int = 0
    later: bool = False


@dataclass(frozen=True)
class Drawn:
    """A key of random bits that a table needs: of which tensor, encode point and first element, drawn for a rank."""

    tensor: int
    point: int
    start: int
    who: int


@dataclass(frozen=True)
class OperationSpan:
    """A time to record: from one mark to another.

    Attributes:
        kind: encode, wire or decode.
        tensor: number of the tensor.
        first, last: the marks.
        what, level: as in ``tracing``.
        intra, inter: bytes sent.
        share: which part of the time that the rank only waited counts for this tensor: from, to.
    """

    kind: Kind
    tensor: int
    first: int
    last: int
    what: str
    level: str = ""
    intra: int = 0
    inter: int = 0
    share: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class PythonStage:
    """What Python does in the middle of a table.

    Attributes:
        act: gets what runs, a segment or a bucket; returns its progress.
        what: in words.
        buffer, nbytes: where the payload is before; ``nbytes`` None: it needs none.
        summary: (byte, elements) of the summaries in the first payload buffer; None: it needs none.
    """

    act: Callable[[Any], Iterator[None]]
    what: str
    buffer: int = 0
    nbytes: int | None = None
    summary: tuple[int, int] | None = None


@dataclass(frozen=True)
class OperationTable:
    """The operations of a segment or of a bucket, on one rank.

    Attributes:
        operations: in the order in which they run.
        tensors: number of tensors.
        kept, drawn: what the places after the tensors are: residuals and states; what is reached, below; then keys.
        reached: members of the node whose memory is read; 0: none is. The places are the addresses of the functions
            that read and that say where the error is, the processes of the members, and for each of these the addresses
            of its tensors, which LEARN writes.
        parameters: of kernels and divisions; what has an address stands for it.
        spans: what is recorded.
        marks: number of MARK operations.
        stages: what PYTHON operations run.
        room: bytes of each payload buffer, and of scratch memory.
        messages: most messages in flight.
        window, posted: bytes that the rank sends through the window, and (inside the node, between nodes) by messages.
    """

    operations: Sequence[Operation]
    tensors: int
    kept: Sequence[KeptMemory] = ()
    drawn: Sequence[Drawn] = ()
    parameters: Sequence[float | HasAddress] = ()
    spans: Sequence[OperationSpan] = ()
    marks: int = 0
    stages: Sequence[PythonStage] = ()
    room: tuple[int, int, int] = (0, 0, 0)
    messages: int = 0
    window: int = 0
    posted: tuple[int, int] = (0, 0)
    reached: int = 0

    @cached_property
    def values(self) -> np.ndarray:
        """The parameters as kernels read them: float64. Loads those of which an address is among them."""
        return np.array([*(one if isinstance(one, int | float) else one.address for one in self.parameters), 0.0])

    @cached_property
    def rows(self) -> np.ndarray:
        """The operations as the interpreter reads them: int64, shape (operations, columns). Loads the kernels."""
        return np.array([operation.row for operation in self.operations], np.int64).reshape(len(self.operations), -1)

    @property
    def places(self) -> tuple[int, int, int]:
        """Where in the places residuals begin, what is reached, and keys."""
        residuals = BUFFERS + self.tensors
        reached = residuals + len(self.kept)
        return residuals, reached, reached + places_reached(self.reached, self.tensors)

    @cached_property
    def words(self) -> str:
        """How it runs, in words."""
        by_python = ", ".join(stage.what for stage in self.stages)
        return f"table of {len(self.operations)} operations" + (f"; Python does {by_python}" if by_python else "")


def places_reached(members: int, tensors: int) -> int:
    """How many places say what is known of the memory of the members of a node; see ``OperationTable.reached``."""
    return 2 + members * (1 + tensors) if members else 0


def described(table: OperationTable | str) -> str:
    """What runs a tensor, in words: its table, or Python, and why."""
    return f"Python: {table}" if isinstance(table, str) else table.words
