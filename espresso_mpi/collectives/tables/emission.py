"""The operations of a table as they are collected: numbered parameters, residuals, keys, times and spans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from espresso_mpi.compressors import Compressor
from espresso_mpi.compressors.by_address import HasAddress, KernelCall
from espresso_mpi.tracing.recording import Kind

from ..data import reduction
from ..data.layout import Dense, Part
from ..program import EncodeStep
from .operations import (
    BUFFERS,
    NOWHERE,
    Code,
    Drawn,
    KeptMemory,
    Operation,
    OperationSpan,
    OperationTable,
    PythonStage,
    places_reached,
)

_REACHING = (Code.REACH, Code.FETCH, Code.LEARN)
_LINE = 64


@dataclass
class Emission:
    """Collects operations.

    Args:
        tensors: number of tensors.

    Attributes:
        reached: members of the node whose memory is read.
    """

    tensors: int
    reached: int = 0
    operations: list[Operation] = field(default_factory=list)
    spans: list[OperationSpan] = field(default_factory=list)
    stages: list[PythonStage] = field(default_factory=list)
    _parameters: list[float | HasAddress] = field(default_factory=list)
    _kept: list[KeptMemory] = field(default_factory=list)
    _drawn: list[Drawn] = field(default_factory=list)
    _marks: int = 0
    _in_tiles: bool = False

    def table(self, buffers: tuple[int, int], messages: int, window: int, posted: tuple[int, int]) -> OperationTable:
        """What was collected. Places are numbered now that all are known: residuals follow the tensors, then keys."""
        residuals = BUFFERS + self.tensors
        there = residuals + len(self._kept)
        keys, values = there + places_reached(self.reached, self.tensors), -(-self._scratch() // _LINE) * _LINE
        placed = [
            replace(o, kept=_after(residuals, o.kept), state=_after(residuals, o.state), key=_after(keys, o.key))
            for o in self.operations
        ]
        placed = [replace(o, other=there, offset=values) if o.code in _REACHING else o for o in placed]
        rows = self.reached * max((o.nbytes for o in placed if o.code == Code.REACH), default=0)
        work = values + rows
        end = work + max((o.call.scratch for o in placed if o.call is not None), default=0)
        placed = [replace(o, work=work) if o.call is not None else o for o in placed]
        return OperationTable(
            tuple(placed), self.tensors, tuple(self._kept), tuple(self._drawn), tuple(self._parameters),
            tuple(self.spans), self._marks, tuple(self.stages), (*buffers, end), messages, window, posted,
            self.reached,
        )  # fmt: skip

    def _scratch(self) -> int:
        """Bytes of scratch memory: of the largest tile that is kept there."""
        most = tiles = length = 0
        for at, operation in enumerate(self.operations):
            if operation.code == Code.TILES:
                tiles, length = at + operation.tensor, operation.number
            if operation.scratch:
                most = max(most, min(operation.size, length) if at <= tiles else operation.size)
        return 4 * most

    # --- operations on values -----------------------------------------------------------------------------------------

    def encode(self, tensor: int, step: EncodeStep, compressor: Compressor, buffer: int) -> list[Operation]:
        """The encodes of a tensor, one for each part that is not empty; its residual is noted."""
        if not step.region.size:
            return []
        self._kept.append(KeptMemory(tensor, step.point, step.region, step.weight))
        kept = len(self._kept) - 1
        parts = [part for part in step.packed.copies[0] if part.size]
        return [self._encode(tensor, part, step, compressor, buffer, kept) for part in parts]

    def _encode(
        self, tensor: int, part: Part, step: EncodeStep, compressor: Compressor, buffer: int, kept: int
    ) -> Operation:
        call = compressor.encoder(part.size)
        assert call is not None
        key = NOWHERE
        if call.draws:
            key = len(self._drawn)
            self._drawn.append(Drawn(tensor, step.point, part.start, step.who))
        state = NOWHERE
        if call.state:
            state, region = len(self._kept), Dense(part.start, part.start + part.size)
            self._kept.append(KeptMemory(tensor, step.point, region, state=call.state))
        return Operation(
            Code.ENCODE, BUFFERS + tensor, part.start, part.size, buffer, part.offset, part.nbytes, kept,
            part.start - step.region.start, key, self._parameters_of(call), call=call, whole=part.size, state=state,
        )  # fmt: skip

    def decode(self, code: Code, tensor: int, part: Part, compressor: Compressor, buffer: int) -> Operation:
        """A decode of a part that overwrites, or adds."""
        call = compressor.decoder(part.size)
        assert call is not None
        return Operation(
            code, BUFFERS + tensor, part.start, part.size, buffer, part.offset, part.nbytes,
            number=self._parameters_of(call), call=call, whole=part.size,
        )  # fmt: skip

    def finalize(self, tensor: int, region: Dense, compressor: Compressor) -> Operation:
        """What makes a result of the mean of a region."""
        call = compressor.finalizer(region.size)
        assert call is not None
        if call.grain != 1 or not call.alone:
            raise ValueError(
                f"{compressor}: expected a finalizer with grain 1 that needs no key, state or scratch memory"
            )
        number, size = self._parameters_of(call), region.size
        return Operation(Code.FINALIZE, BUFFERS + tensor, region.start, size, number=number, call=call, whole=size)

    def divisor(self, divisor: float) -> int:
        """Where a divisor is among the parameters."""
        exact, factor = reduction.factor_of(divisor)
        return self._place([float(exact), factor])

    def _parameters_of(self, call: KernelCall) -> int:
        return self._place(call.passed)

    def _place(self, parameters: Sequence[float | HasAddress]) -> int:
        """Where parameters begin among all."""
        self._parameters += parameters
        return len(self._parameters) - len(parameters)

    # --- times --------------------------------------------------------------------------------------------------------

    def add(self, operations: Sequence[Operation]) -> None:
        """Collect operations. A duration that pauses and goes on at once does neither."""
        if not operations:
            return
        if self.operations and not self._in_tiles and operations[0].resumes(self.operations[-1]):
            self.operations.pop()
            operations = operations[1:]
        tiles = [at + o.tensor for at, o in enumerate(operations) if o.code == Code.TILES]
        self.operations += operations
        self._in_tiles = bool(tiles) and tiles[-1] == len(operations) - 1

    def mark(self, durations: int = 0) -> int:
        """Note the time; returns its number. The next numbers are those of so many durations."""
        first = self._marks
        self.operations.append(Operation(Code.MARK, first, size=durations))
        self._marks += 1 + durations
        return first

    @staticmethod
    def lap(number: int, operations: Sequence[Operation]) -> list[Operation]:
        """Operations whose time is added to a duration; none is where ``number`` is negative."""
        if number < 0:
            return list(operations)
        return [Operation(Code.LAP, number, number=-1), *operations, Operation(Code.LAP, number, number=1)]

    def durations(self, count: int) -> tuple[Sequence[int], Callable[[], list[int]]]:
        """From here on several things are done by turns; their numbers, for ``lap``.

        Also returns what ends that: it makes of the durations times that follow each other, and returns the marks
        between which they are.
        """
        first = self.mark(count if count > 1 else 0)

        def end() -> list[int]:
            if count == 1:
                return [first, self.mark()]
            self.operations.append(Operation(Code.STACK, first + 1, size=count))
            return list(range(first, first + count + 1))

        return (range(first + 1, first + 1 + count) if count > 1 else [-1] * count), end

    def span(self, kind: Kind, tensor: int, first: int, last: int, what: str) -> None:
        """Record the time between two marks."""
        self.spans.append(OperationSpan(kind, tensor, first, last, what))

    def shared(
        self, op: str, level: str, marks: tuple[int, int], sent: tuple[int, int], weights: Sequence[int]
    ) -> None:  # fmt: skip
        """Record a collective for each tensor; each has its share of the bytes and of the waiting."""
        first, last = marks
        parts = list(shares(1.0, weights))
        intra, inter = ([round(sent[k] * b) - round(sent[k] * a) for a, b in parts] for k in range(2))
        self.spans += [
            OperationSpan("wire", tensor, first, last, f"{op}@{level}", level, intra[tensor], inter[tensor], share)
            for tensor, share in enumerate(parts)
        ]


def _after(first: int, place: int) -> int:
    """The place that many places later, if it is one."""
    return first + place if place != NOWHERE else NOWHERE


def shares(total: float, weights: Sequence[int]) -> Iterator[tuple[float, float]]:
    """A length cut in proportion to weights."""
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    edges = [total * part / whole for part in accumulate(weights, initial=0)]
    return pairwise(edges)
