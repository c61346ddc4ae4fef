"""Turns a route into what one rank does: the same states, advanced for all ranks, on every rank alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..compressors import Compressor
from ..errors import ConfigError
from ..types import Collective, Decode, DeviceKind, Encode, Level, Route
from .base import Move, Scene, operations
from .layout import ALIGN, Dense, Packed, Part, State, Topology
from .reduction import Rule


@dataclass(frozen=True)
class SummaryStep:
    """Work out what the ranks must agree on before they encode a region."""

    device: DeviceKind
    region: Dense
    point: int


@dataclass(frozen=True)
class EncodeStep:
    """Compress a dense region into parts. ``point`` numbers the encodes of a route: each has its own residual.

    ``agreed``: a summary was agreed on. ``ranks``: how many payloads are averaged at the next decode.
    """

    device: DeviceKind
    region: Dense
    packed: Packed
    point: int
    agreed: bool = False
    ranks: int = 1


@dataclass(frozen=True)
class DecodeStep:
    """Sum all copies of a region, weighted, into the dense tensor. ``point`` is that of the encode before."""

    device: DeviceKind
    region: Dense
    packed: Packed
    point: int


@dataclass(frozen=True)
class LearnStep:
    """Let the method look at the payload, now summed over the ranks, of what this rank has encoded."""

    packed: Packed
    point: int


@dataclass(frozen=True)
class MoveStep:
    """One collective of this rank, on the tensor, or on the summary of the encode to come."""

    op: str
    move: Move
    of_summary: bool = False


@dataclass(frozen=True)
class IdleStep:
    """A collective that this rank has no part in: it lets the same number of turns pass as those that have."""

    op: str


ScheduleStep = SummaryStep | EncodeStep | LearnStep | DecodeStep | MoveStep | IdleStep


def segments(n: int, nbytes: int, topology: Topology, segment_bytes: int) -> list[Dense]:
    """The pieces of a tensor that follow each other along the route, so that one's sums hide behind another's messages.

    Inside one machine there is nothing to hide behind, so the tensor stays whole; so it does with 0 bytes.

    Args:
        n: elements of the tensor.
        nbytes: bytes that they are between machines: the payload's, or of the tensor itself where it stays dense.
        segment_bytes: about how many of these a segment should have.
    """
    several = len(topology.machines) > 1 and segment_bytes
    count = max(1, min(round(nbytes / segment_bytes), -(-n // ALIGN))) if several else 1
    pieces = Dense(0, n).split(count, count)
    return [piece for piece in pieces if piece.size] or pieces[:1]


def check_payloads(route: Route, compressor: Compressor | None) -> None:
    """Refuse a route that sums payloads which cannot be summed.

    Raises:
        ConfigError: the compressor is not linear.
    """
    if compressor is not None and route.sums_payloads and not compressor.linear:
        raise ConfigError(
            f"route {str(route)!r} sums payloads, but those of {str(compressor)!r} cannot be summed; decode before the "
            f"allreduce, or use a linear compressor such as randomk"
        )


def check_route(route: Route, topology: Topology, compressor: Compressor | None = None) -> None:
    """Refuse a route that this topology cannot run, or this compressor cannot go along.

    Between machines only as many ranks of each take part as the smallest machine has. What the others hold must have
    been handed to those before, by a scatter inside the machine.

    Raises:
        ConfigError: machines have unequal numbers of ranks and the route crosses them with nothing scattered inside;
            the route sums payloads and the compressor is not linear.
    """
    check_payloads(route, compressor)
    uneven = any(len(ranks) != topology.lanes for ranks in topology.machines)
    scattered = False
    for step in route.steps:
        if isinstance(step, Collective) and step.level == "intra":
            scattered = step.op in ("reduce_scatter", "alltoall")
        elif isinstance(step, Collective) and step.level == "inter" and uneven and not scattered:
            raise ConfigError(
                f"route {str(route)!r} goes between machines with nothing scattered inside them, which {topology} "
                f"cannot do; begin with reduce_scatter@intra, or use a flat route"
            )


def compile_route(
    route: Route, topology: Topology, whole: Dense, dtype: str, rank: int, compressor: Compressor | None = None
) -> tuple[ScheduleStep, ...]:
    """What ``rank`` does so that the mean of a region travels along ``route``.

    Args:
        whole: the elements to average.
        dtype: element type of the working tensor; compressors work on float32.
        compressor: needed if the route encodes.
    """
    states: list[State] = [whole] * topology.size
    steps: list[ScheduleStep] = []
    open_scatters: list[Level] = []
    points = 0
    for position, step in enumerate(route.steps):
        if isinstance(step, Encode):
            assert compressor is not None
            moves = _until_decode(route.steps[position + 1 :])
            packed = [_pack(state, moves, topology, compressor) for state in states]
            region = states[rank]
            assert isinstance(region, Dense)
            sums = _sums(moves)
            agreed = bool(sums) and compressor.summary(whole.size) is not None
            if agreed:
                steps.append(SummaryStep(step.device, region, points))
                for move in sums:
                    _agree(move, topology, states, compressor, rank, steps)
            steps.append(
                EncodeStep(step.device, region, packed[rank], points, agreed, _averaged(moves, topology, open_scatters))
            )
            states, points = list(packed), points + 1
        elif isinstance(step, Decode):
            mine = states[rank]
            assert isinstance(mine, Packed)
            states = [s.region for s in states if isinstance(s, Packed)]
            steps.append(DecodeStep(step.device, mine.region, mine, points - 1))
        else:
            states = _collective(step, topology, states, dtype, rank, open_scatters, steps)
            mine = states[rank]
            if isinstance(mine, Packed) and step.op == "allreduce" and not _sums(route.steps[position + 1 :]):
                steps.append(LearnStep(mine, points - 1))
    return tuple(steps)


def _collective(
    step: Collective,
    topology: Topology,
    states: list[State],
    dtype: str,
    rank: int,
    open_scatters: list[Level],
    steps: list[ScheduleStep],
) -> list[State]:
    """Advance every group of the level; note this rank's part in it."""
    op = operations()[step.op]
    joins = step.op == "allgather" and step.level in open_scatters
    scene = Scene(topology, step.level, joins)
    after = list(states)
    takes_part = False
    for group in topology.groups(step.level):
        before = [states[r] for r in group]
        for member, state in zip(group, op.advance(scene, before)):
            after[member] = state
        if rank in group:
            takes_part = True
            steps.append(MoveStep(step.op, Move(scene, group, group.index(rank), tuple(before), dtype)))
    if not takes_part:
        steps.append(IdleStep(step.op))
    if joins:
        open_scatters.remove(step.level)
    elif step.op in ("reduce_scatter", "alltoall"):
        open_scatters.append(step.level)
    return after


def _agree(
    step: Collective,
    topology: Topology,
    states: Sequence[State],
    compressor: Compressor,
    rank: int,
    steps: list[ScheduleStep],
) -> None:
    """Note this rank's part in reducing the summary over the ranks whose payloads will be summed."""
    for group in topology.groups(step.level):
        if rank in group:
            region = states[rank]
            assert isinstance(region, Dense)
            summary = compressor.summary(region.size) if region.size else None
            size, rule = (summary.size, Rule(summary.operator)) if summary else (0, Rule("sum"))
            before = (Dense(0, size),) * len(group)
            scene = Scene(topology, step.level, False)
            move = Move(scene, group, group.index(rank), before, "float32", rule)
            steps.append(MoveStep(step.op, move, of_summary=True))
            return
    steps.append(IdleStep(step.op))


def _until_decode(later: Sequence[object]) -> list[Collective]:
    """The collectives before the next decode."""
    coded = itertools.takewhile(lambda step: isinstance(step, Collective), later)
    return [step for step in coded if isinstance(step, Collective)]


def _sums(later: Sequence[object]) -> list[Collective]:
    """The collectives before the next decode that sum payloads."""
    return [move for move in _until_decode(later) if move.op == "allreduce"]


def _averaged(moves: Sequence[Collective], topology: Topology, open_scatters: Sequence[Level]) -> int:
    """How many payloads come together along the moves, on average over uneven machines."""
    levels = {move.level for move in moves if move.level not in open_scatters}
    return max(1, round(math.prod(topology.divisor(level) for level in levels)))


def _pack(state: State, moves: Sequence[Collective], topology: Topology, compressor: Compressor) -> Packed:
    """One copy of the region, cut so that the alltoalls to come can deal out whole parts."""
    assert isinstance(state, Dense)
    regions = [state] if state.size else []
    for pieces in (topology.pieces(move.level) for move in moves if move.op == "alltoall"):
        regions = [piece for region in regions for piece in region.split(pieces, pieces)]
    return Packed((tuple(_part(region, compressor) for region in regions),)).placed()


def _part(region: Dense, compressor: Compressor) -> Part:
    n = region.size
    header = compressor.header(n) if compressor.linear else 0
    return Part(region.start, region.stop, 0, compressor.nbytes(n), header, compressor.element)


def bytes_sent(steps: Sequence[ScheduleStep]) -> int:
    """Bytes that the rank of a schedule sends to other ranks."""
    return sum(operations()[s.op].sent(s.move) for s in steps if isinstance(s, MoveStep))
