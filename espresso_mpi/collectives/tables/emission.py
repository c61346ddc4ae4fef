"""The operations of a table as they are collected: numbered parameters, residuals, keys, times and spans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from espresso_mpi.compressors import Compressor
from espresso_mpi.compressors.by_address import HasAddress, KernelCall
from espresso_mpi.tracing.recording import Kind

from ..data import reduction
from ..data.layout import Dense, Part
from ..job import ALL_RANKS
from ..program import EncodeStep, SummaryStep, UpdateStep
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
    whole_lines,
)

_REACHING = (Code.REACH, Code.FETCH, Code.LEARN)


@dataclass
class Emission:
    """Collects operations.

    Args:
        sizes: elements of each tensor.

    Attributes:
        reached: members of the node whose memory is read.
    """

    sizes: Sequence[int]
    reached: int = 0
    operations: list[Operation] = field(default_factory=list)
    spans: list[OperationSpan] = field(default_factory=list)
    stages: list[PythonStage] = field(default_factory=list)
    _parameters: list[float | HasAddress] = field(default_factory=list)
    _kept: list[KeptMemory] = field(default_factory=list)
    _residuals: dict[tuple[int, int], int] = field(default_factory=dict)
    _drawn: list[Drawn] = field(default_factory=list)
    _marks: int = 0
    _in_tiles: bool = False

    def table(self, buffers: tuple[int, int], messages: int, window: int, posted: tuple[int, int]) -> OperationTable:
        """What was collected. Places are numbered now that all are known: residuals follow the tensors, then keys."""
        tensors = len(self.sizes)
        residuals = BUFFERS + tensors
        there = residuals + len(self._kept)
        keys, values = there + places_reached(self.reached, tensors), whole_lines(self._scratch())
        placed = [
            replace(o, kept=_after(residuals, o.kept), state=_after(residuals, o.state),
                    listed=_after(residuals, o.listed), key=_after(keys, o.key))
            for o in self.operations
        ]  # fmt: skip
        placed = [replace(o, other=there, offset=values) if o.code in _REACHING else o for o in placed]
        rows = self.reached * max((o.nbytes for o in placed if o.code == Code.REACH), default=0)
        work = values + rows
        end = work + max((o.call.scratch for o in placed if o.call is not None), default=0)
        placed = [replace(o, work=work) if o.call is not None else o for o in placed]
        return OperationTable(
            tuple(placed), tensors, tuple(self._kept), tuple(self._drawn), tuple(self._parameters),
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

    def encode(
        self, tensor: int, step: EncodeStep, compressor: Compressor, buffer: int, summary: int = NOWHERE
    ) -> list[Operation]:
        """The encodes of a tensor, one for each part that is not empty; its residual is noted.

        Args:
            summary: the byte of the buffer at which its summaries begin. If the ranks do not agree on them, each is
                made just before its encode.
        """
        kernels = {Code.ENCODE: compressor.encoder}
        if not step.agreed and compressor.summary(max(step.region.size, 1)) is not None:
            kernels = {Code.SUMMARISE: compressor.summariser, **kernels}
        return self._encoding(kernels, tensor, step, step.weight, buffer, summary)

    def summarise(
        self, tensor: int, step: SummaryStep, compressor: Compressor, buffer: int, summary: int
    ) -> list[Operation]:  # fmt: skip
        """The summaries of a tensor, as the encodes of ``encode``."""
        return self._encoding({Code.SUMMARISE: compressor.summariser}, tensor, step, 0.0, buffer, summary)

    def _encoding(
        self, kernels: Mapping[Code, Callable[[int], KernelCall | None]], tensor: int, step: EncodeStep | SummaryStep,
        weight: float, buffer: int, summary: int,
    ) -> list[Operation]:  # fmt: skip
        """Kernels for each part of a tensor, one after the other."""
        found = list[Operation]()
        if not step.region.size:
            return found
        kept = self._residual(KeptMemory(tensor, step.point, step.region, weight))
        for part in (part for part in step.packed.copies[0] if part.size):
            calls = {code: kernel(part.size) for code, kernel in kernels.items()}
            for code, call in calls.items():
                assert call is not None
                found.append(self._of_part(code, call, tensor, part, step, buffer, kept, summary))
            summary += 4 * max(call.summary for call in calls.values() if call is not None)
        return found

    def update(self, tensor: int, step: UpdateStep, compressor: Compressor, buffer: int) -> list[Operation]:
        """What keeps something of the summed payloads of a tensor."""
        found = list[Operation]()
        for part in (part for copy in step.packed.copies for part in copy if part.size):
            call = compressor.updater(part.size)
            assert call is not None
            found.append(self._of_part(Code.UPDATE, call, tensor, part, step, buffer))
        return found

    def _residual(self, kept: KeptMemory) -> int:
        """Where a residual is among what is kept; the weight of the last call counts."""
        number = self._residuals.setdefault((kept.tensor, kept.point), len(self._kept))
        self._kept[number : number + 1] = [kept]
        return number

    def _listed(self, call: KernelCall, tensor: int, point: int, region: Dense) -> int:
        """Where the list of addresses that a kernel gets begins among what is kept; equal states are listed once."""
        states = [KeptMemory(tensor, point, region, state=name, size=n) for name, n in call.states]
        for number in range(len(self._kept) if states and not call.summary else 0):
            if self._kept[number : number + len(states)] == states:
                return number
        self._kept += [KeptMemory(tensor, point, region, later=True)] if call.summary else []
        self._kept += states
        return len(self._kept) - len(states) - (1 if call.summary else 0)

    def _of_part(
        self, code: Code, call: KernelCall, tensor: int, part: Part, step: EncodeStep | SummaryStep | UpdateStep,
        buffer: int, kept: int = NOWHERE, summary: int = NOWHERE,
    ) -> Operation:  # fmt: skip
        """A kernel for a part of a tensor and its payload."""
        key, state, listed, first = NOWHERE, NOWHERE, NOWHERE, 0
        if not isinstance(step, UpdateStep):
            first = step.region.start
            if call.draws or call.shares:
                key = len(self._drawn)
                self._drawn.append(Drawn(tensor, step.point, part.start, ALL_RANKS if call.shares else step.who))
        region = Dense(part.start, part.start + part.size)
        if call.state:
            state = len(self._kept)
            self._kept.append(KeptMemory(tensor, step.point, region, state=call.state))
        if call.listed:
            listed = self._listed(call, tensor, step.point, region)
        ranks = step.ranks if isinstance(step, EncodeStep) else 1
        needs_context = [float(ranks), part.size / self.sizes[tensor]] if call.needs_context else []
        return Operation(
            code, BUFFERS + tensor, part.start, part.size, buffer, part.offset, part.nbytes, kept,
            part.start - first, key, self._place([*needs_context, *call.passed]), call=call, whole=part.size,
            state=state, listed=listed, summary=summary if call.summary else NOWHERE,
        )  # fmt: skip

    def decode(self, code: Code, tensor: int, part: Part, compressor: Compressor, buffer: int) -> Operation:
        """A decode of a part that overwrites, or adds."""
        call = compressor.decoder(part.size)
        assert call is not None
        return Operation(
            code, BUFFERS + tensor, part.start, part.size, buffer, part.offset, part.nbytes,
            number=self.parameters_of(call), call=call, whole=part.size,
        )  # fmt: skip

    def finalize(self, tensor: int, region: Dense, compressor: Compressor) -> Operation:
        """What makes a result of the mean of a region."""
        call = compressor.finalizer(region.size)
        assert call is not None
        if call.grain != 1 or not call.self_contained:
            raise ValueError(f"{compressor}: expected a finalizer with grain 1 that needs nothing but parameters")
        number, size = self.parameters_of(call), region.size
        return Operation(Code.FINALIZE, BUFFERS + tensor, region.start, size, number=number, call=call, whole=size)

    def divisor(self, divisor: float) -> int:
        """Where a divisor is among the parameters."""
        exact, factor = reduction.factor_of(divisor)
        return self._place([float(exact), factor])

    def parameters_of(self, call: KernelCall) -> int:
        """Where the parameters of a kernel begin among all."""
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

    def work(self, kind: Kind, tensor: int, operations: Sequence[Operation], what: str) -> None:
        """Collect operations, and record their time."""
        first = self.mark()
        self.operations += operations
        self.span(kind, tensor, first, self.mark(), what)

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
