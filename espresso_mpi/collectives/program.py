"""Compiles a route to the program of one rank, by advancing the layouts of all ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..compressors import Compressor
from ..errors import ConfigError
from ..types import ALIGN, CLOSING, SUMS, Collective, Decode, DeviceKind, Encode, Level, Route
from .data.layout import Copy, Dense, Layout, Packed, Part, Topology
from .data.reduction import ReduceOp
from .ops.base import CollectiveContext, Move, advance, operations

_ALONE, _LEAST = 16, 256 << 10
"""Segments of a dense tensor that travels alone, and bytes of the shortest one: each costs some progress steps."""


@dataclass(frozen=True)
class SummaryStep:
    """Compute the summary of each part of a region, on which the ranks agree before they encode it.

    ``who``: as for the encode that follows.
    """

    device: DeviceKind
    region: Dense
    packed: Packed
    point: int
    who: int = 0


@dataclass(frozen=True)
class EncodeStep:
    """Compress a dense region into parts. ``point`` numbers the encodes of a route: each has its own residual.

    Attributes:
        agreed: whether a summary was agreed on.
        ranks: number of payloads that the next decode averages.
        who: the lowest rank that holds the same data. Random bits are drawn for this rank, so that ranks which encode
            the same data write the same payload.
        weight: what one unit of this rank's residual adds to the final mean once it is decoded: 1 / (product of the
            divisors of the levels still to be averaged over) / (number of ranks that hold the same data). Over all
            ranks and points, ``Σ mean(g) = Σ results + Σ weight · residual``.
    """

    device: DeviceKind
    region: Dense
    packed: Packed
    point: int
    agreed: bool = False
    ranks: int = 1
    who: int = 0
    weight: float = 1.0


@dataclass(frozen=True)
class DecodeStep:
    """Sum all copies of a region, weighted, into the dense tensor. ``point`` is that of the encode before."""

    device: DeviceKind
    region: Dense
    packed: Packed
    point: int


@dataclass(frozen=True)
class UpdateStep:
    """Pass the payloads, summed over the ranks, of what this rank has encoded to the compressor."""

    packed: Packed
    point: int


@dataclass(frozen=True)
class MoveStep:
    """One collective of this rank, on the tensor, or on the summary of the encode to come."""

    op: str
    move: Move
    of_summary: bool = False

    @property
    def inside(self) -> bool:
        """Whether it is a collective on the tensor, not on payloads or a summary, inside a node."""
        return self.move.context.level == "intra" and not self.of_summary and isinstance(self.move.before[0], Dense)


@dataclass(frozen=True)
class IdleStep:
    """A collective without this rank; it takes as many progress steps as on the ranks that take part."""

    op: str


ProgramStep = SummaryStep | EncodeStep | UpdateStep | DecodeStep | MoveStep | IdleStep


def segments(n: int, nbytes: int, topology: Topology, segment_bytes: int) -> list[Dense]:
    """The segments of a tensor; they overlap, so that one's sums hide behind another's messages.

    A tensor stays whole on a single node, where there is no network to hide behind, and if ``segment_bytes`` is 0.

    Args:
        n: elements of the tensor.
        nbytes: its bytes between nodes: those of the payload, or of the tensor if it stays dense.
        segment_bytes: target size of a segment.
    """
    several = len(topology.nodes) > 1 and segment_bytes
    count = max(1, min(round(nbytes / segment_bytes), -(-n // ALIGN))) if several else 1
    pieces = Dense(0, n).split(count, count)
    return [piece for piece in pieces if piece.size] or pieces[:1]


def segment_of(nbytes: int, segment_bytes: int) -> int:
    """The target size of a segment of a dense tensor that travels alone.

    No other tensor's messages hide its sums, nor what it does inside the nodes at its begin and its end. So it has
    ``_ALONE`` segments if they have ``_LEAST`` bytes.
    """
    return min(segment_bytes, max(_LEAST, nbytes // _ALONE))


def check_payloads(route: Route, compressor: Compressor | None) -> None:
    """Refuse a route that sums payloads which cannot be summed.

    Raises:
        ConfigError: the compressor is not linear.
    """
    if compressor is not None and route.sums_payloads and not compressor.linear:
        raise ConfigError(
            f"route {str(route)!r} sums payloads, but those of {str(compressor)!r} cannot be summed; decode before "
            f"they are summed, or use a linear compressor such as randomk"
        )


def check_route(route: Route, topology: Topology, compressor: Compressor | None = None) -> None:
    """Refuse a route that this topology or this compressor cannot run.

    Only ``Topology.local_size`` ranks per node take part between nodes. A scatter inside the node must pass the data of
    the others to these ranks first.

    Raises:
        ConfigError: nodes have unequal numbers of ranks and the route crosses them with nothing scattered inside;
            the route sums payloads and the compressor is not linear.
    """
    check_payloads(route, compressor)
    uneven = any(len(ranks) != topology.local_size for ranks in topology.nodes)
    scattered = False
    for step in route.steps:
        if isinstance(step, Collective) and step.level == "intra":
            scattered = step.op in CLOSING
        elif isinstance(step, Collective) and step.level == "inter" and uneven and not scattered:
            raise ConfigError(
                f"route {str(route)!r} goes between nodes with nothing scattered inside them, which {topology} "
                f"cannot do; begin with reduce_scatter@intra or reduce@intra, or use a flat route"
            )


def compile_route(
    route: Route, topology: Topology, whole: Dense, dtype: str, rank: int, compressor: Compressor | None = None
) -> tuple[ProgramStep, ...]:
    """The program by which ``rank`` averages a region along ``route``.

    Args:
        whole: the elements to average.
        dtype: element type of the working tensor; compressors work on float32.
        compressor: needed if the route encodes.
    """
    compilation = Compilation(route, topology, whole, dtype, rank, compressor)
    for position in range(len(route.steps)):
        compilation.take(position)
    return tuple(compilation.steps)


class Compilation:
    """The layouts of all ranks at a place along a route, and the program of one rank up to there."""

    def __init__(
        self, route: Route, topology: Topology, whole: Dense, dtype: str, rank: int, compressor: Compressor | None
    ) -> None:
        self.route, self.topology, self.dtype, self.rank, self.compressor = route, topology, dtype, rank, compressor
        self.layouts: list[Layout] = [whole] * topology.size
        self.steps: list[ProgramStep] = []
        self.averaged: set[Level] = set()
        self.points = 0
        self.encoded: list[list[Dense]] = []
        """The regions of the parts that each rank encoded last; empty when no method updates from them."""

    def take(self, position: int) -> None:
        """Append what a step of the route takes."""
        step, later = self.route.steps[position], _until_decode(self.route.steps[position + 1 :])
        if isinstance(step, Encode):
            self.encode(step, later)
        elif isinstance(step, Decode):
            self.decode(step)
        else:
            self.collective(step, later)

    # --- encode and decode ---

    def encode(self, step: Encode, moves: Sequence[Collective]) -> None:
        """Append an encode, and before it the agreement on summaries."""
        assert self.compressor is not None
        region, before = self.layouts[self.rank], self.layouts
        assert isinstance(region, Dense)
        made = {layout: _pack(layout, moves, self.topology, self.compressor) for layout in set(before)}  # few differ
        packed = [made[layout] for layout in before]
        replicas = self._replicas()
        mine, who = packed[self.rank], replicas[0]
        levels = _summed_levels(moves)
        agreed = bool(levels) and any(summary_sizes(self.compressor, pack.copies[0]) for pack in made.values())
        if agreed:
            self.steps.append(SummaryStep(step.device, region, mine, self.points, who))
            self._agree("flat" if len(levels) > 1 else levels[0], mine)
        ranks = _product(self.topology, {move.level for move in moves} - self.averaged)
        weight = 1 / _product(self.topology, self.route.levels - self.averaged) / len(replicas)
        self.steps.append(EncodeStep(step.device, region, mine, self.points, agreed, max(1, round(ranks)), who, weight))
        self.encoded = [_bounds(copy) for copy in packed] if levels else []
        self.layouts, self.points = list(packed), self.points + 1

    def decode(self, step: Decode) -> None:
        """Append a decode."""
        mine = self.layouts[self.rank]
        assert isinstance(mine, Packed)
        self.layouts = [layout.region for layout in self.layouts if isinstance(layout, Packed)]
        self.steps.append(DecodeStep(step.device, mine.region, mine, self.points - 1))
        self.encoded = []

    def _replicas(self) -> list[int]:
        """The ranks that hold the same data as this one, in rising order: the same region, averaged over the same."""
        mine, same = self.layouts[self.rank], {self.rank}
        if not (isinstance(mine, Dense) and mine.size):
            return [self.rank]
        if self.averaged >= {"intra", "inter"} or "flat" in self.averaged:
            same = set(range(self.topology.size))
        elif self.averaged:
            (level,) = self.averaged
            same = set(self._group(level) or same)
        return [rank for rank in sorted(same) if self.layouts[rank] == mine]

    def _group(self, level: Level) -> tuple[int, ...]:
        """The ranks that this one communicates with at a level; none for a rank beyond ``Topology.local_size``."""
        return next((group for group in self.topology.groups(level) if self.rank in group), ())

    def _agree(self, level: Level, packed: Packed) -> None:
        """Append the reduction of the summaries over the ranks whose payloads will be summed."""
        assert self.compressor is not None
        group = self._group(level)
        if not group:
            self.steps.append(IdleStep("allreduce"))
            return
        sizes = summary_sizes(self.compressor, packed.copies[0])
        reduce_op = ReduceOp(_operator(self.compressor, packed)) if sizes else ReduceOp("sum")
        before = (Dense(0, sum(sizes)),) * len(group)
        move = Move(
            CollectiveContext(self.topology, level, False), group, group.index(self.rank), before, "float32", reduce_op
        )
        self.steps.append(MoveStep("allreduce", move, of_summary=True))

    # --- collectives ---

    def collective(self, step: Collective, later: Sequence[Collective]) -> None:
        """Advance every group of the level; append this rank's part in it.

        Args:
            later: the collectives between this one and the next decode.
        """
        self.layouts, mine = advance(self.topology, step, self.averaged, self.layouts, self.rank, self.dtype)
        self.steps.append(IdleStep(step.op) if mine is None else MoveStep(step.op, mine))
        self.averaged.add(step.level)
        self._update(later)

    def _update(self, later: Sequence[Collective]) -> None:
        """Append an update of the compressors as soon as every rank holds the sum of all that it encoded.

        If the sums stay scattered until the decode, no rank updates: compressors need the same input on all ranks.
        """
        if not self.encoded or _summed_levels(later):
            return
        packed = [layout for layout in self.layouts if isinstance(layout, Packed)]
        if all(not parts or parts == _bounds(layout) for parts, layout in zip(self.encoded, packed)):
            mine = packed[self.rank]
            self.steps.append(UpdateStep(mine if self.encoded[self.rank] else mine.emptied(), self.points - 1))
            self.encoded = []


def _until_decode(later: Sequence[object]) -> list[Collective]:
    """The collectives before the next encode or decode."""
    moves = itertools.takewhile(lambda step: isinstance(step, Collective), later)
    return [step for step in moves if isinstance(step, Collective)]


def _summed_levels(moves: Sequence[Collective]) -> list[Level]:
    """The levels at which moves between an encode and its decode sum payloads."""
    return [move.level for move in moves if move.op in SUMS]


def _product(topology: Topology, levels: Iterable[Level]) -> float:
    """What the sums over levels are divided by."""
    return math.prod(topology.divisor(level) for level in levels)


def _bounds(packed: Packed) -> list[Dense]:
    """The regions of the parts of the only copy that are not empty; none where copies are outstanding."""
    if len(packed.copies) != 1:
        return []
    return [Dense(part.start, part.stop) for part in packed.copies[0] if part.size]


def _pack(layout: Layout, moves: Sequence[Collective], topology: Topology, compressor: Compressor) -> Packed:
    """One copy of the region, cut so that the scatters to come can deal out whole parts."""
    assert isinstance(layout, Dense)
    regions = [layout] if layout.size else []
    for move in moves:
        if move.op in ("alltoall", "reduce_scatter"):
            pieces = topology.pieces(move.level)
            regions = [piece for region in regions for piece in region.split(pieces, pieces)]
    return Packed((tuple(payload_part(region, compressor) for region in regions),)).placed()


def payload_part(region: Dense, compressor: Compressor) -> Part:
    """The payload of a region; of an empty one nothing."""
    n = region.size
    header = compressor.header(n) if compressor.linear and n else 0
    return Part(region.start, region.stop, 0, compressor.nbytes(n) if n else 0, header, compressor.element)


def summary_sizes(compressor: Compressor, parts: Copy) -> list[int]:
    """How many float32 values the summary of each part that is not empty has; [] for methods without summaries."""
    summaries = [compressor.summary(part.size) for part in parts if part.size]
    return [summary.size for summary in summaries if summary is not None]


def _operator(compressor: Compressor, packed: Packed) -> Literal["sum", "max"]:
    summaries = (compressor.summary(part.size) for part in packed.copies[0] if part.size)
    return next(summary.operator for summary in summaries if summary is not None)


def bytes_sent(steps: Sequence[ProgramStep]) -> int:
    """Bytes that the rank of a program sends to other ranks."""
    return sum(operations()[s.op].sent(s.move) for s in steps if isinstance(s, MoveStep))
