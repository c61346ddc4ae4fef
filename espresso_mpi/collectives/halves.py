"""The two halves of a route: a reduce-scatter, which leaves each rank its part of the mean, and an allgather of parts.

A route has halves if its tensor lies dense and in equal parts on all ranks between two of its steps. The steps before
are a reduce-scatter, those after it an allgather; one after the other they are the route.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from ..compressors import Compressor
from ..errors import ConfigError
from ..types import Collective, Decode, Encode, Route, RouteStep
from .data.layout import Dense, Even, Topology
from .program import Compilation, DecodeStep, EncodeStep, ProgramStep, SummaryStep, UpdateStep

Half = Literal["reduce_scatter", "allgather"]

_SCATTERS = ("reduce_scatter", "alltoall")

S = TypeVar("S", bound=ProgramStep)


@dataclass(frozen=True)
class HalfProgram:
    """One half of a route for one rank.

    Attributes:
        steps: its steps; encode points count from 0.
        owned: by rank, the region of the working array that holds its part. Parts lie in the order in which the route
            deals them out, which is by nodes if it scatters inside the nodes first.
    """

    steps: tuple[ProgramStep, ...]
    owned: tuple[Dense, ...]


def default_half_route(topology: Topology) -> str:
    """The name of the route whose halves are taken by default: hierarchical where nodes have equally many ranks."""
    sizes = {len(ranks) for ranks in topology.nodes}
    by_nodes = len(topology.nodes) > 1 and len(sizes) == 1 and topology.local_size > 1
    return "hierarchical-alltoall-packed" if by_nodes else "flat-alltoall"


def check_half(half: Half, route: Route, topology: Topology) -> None:
    """Refuse a route that does not leave equal parts on all ranks.

    Raises:
        ConfigError: the route has no halves, or gives the ranks of these nodes unequal parts.
    """
    if _middle(route) is None:
        raise ConfigError(
            f"{half}: route {str(route)!r} has no halves; expected one that leaves a dense part on every rank before "
            f"it joins the parts, such as 'flat-alltoall'"
        )
    if by_nodes(route) and any(len(ranks) != topology.local_size for ranks in topology.nodes):
        raise ConfigError(
            f"{half}: route {str(route)!r} leaves unequal parts on {topology}; expected nodes with equally many ranks, "
            f"or a flat route such as 'flat-alltoall'"
        )


def half_steps(half: Half, route: Route) -> Sequence[RouteStep]:
    """The steps of one half of a route that ``check_half`` accepts."""
    middle = _middle(route)
    return route.steps[:middle] if half == "reduce_scatter" else route.steps[middle:]


def encodes(half: Half, route: Route) -> bool:
    """Whether a half compresses."""
    return any(isinstance(step, Encode) for step in half_steps(half, route))


def by_nodes(route: Route) -> bool:
    """Whether parts lie in another order than that of the ranks."""
    return "intra" in route.levels


def _middle(route: Route) -> int | None:
    """The number of steps of the first half; None: there are no halves."""
    for position in range(1, len(route.steps)):
        before, after = (_moves(steps) for steps in (route.steps[:position], route.steps[position:]))
        coded = [step for step in route.steps[:position] if not isinstance(step, Collective)]
        dense = not coded or isinstance(coded[-1], Decode)
        scattered = all(move.op in _SCATTERS for move in before) and all(move.op == "allgather" for move in after)
        if dense and scattered and {move.level for move in before} == route.levels:
            return position
    return None


def _moves(steps: Sequence[RouteStep]) -> list[Collective]:
    return [step for step in steps if isinstance(step, Collective)]


def compile_half(
    half: Half, route: Route, topology: Topology, n: int, dtype: str, rank: int, compressor: Compressor | None
) -> HalfProgram:
    """The program of one half on one rank.

    Args:
        n: elements of all parts together, a multiple of the number of ranks.
        dtype, compressor: as for ``compile_route``.
    """
    check_half(half, route, topology)
    middle = len(half_steps("reduce_scatter", route))
    compilation = Compilation(route, topology, Even(0, n), dtype, rank, compressor)
    for position in range(middle):
        compilation.take(position)
    owned = [layout for layout in compilation.layouts if isinstance(layout, Dense)]
    count, points = len(compilation.steps), compilation.points
    regions = tuple(Dense(region.start, region.stop) for region in owned)
    if half == "reduce_scatter":
        return HalfProgram(tuple(compilation.steps), regions)
    for position in range(middle, len(route.steps)):
        compilation.take(position)
    return HalfProgram(tuple(_renumbered(step, points) for step in compilation.steps[count:]), regions)


def _renumbered(step: S, points: int) -> S:
    """The same step where so many encodes before it do not count."""
    if isinstance(step, (SummaryStep, EncodeStep, DecodeStep, UpdateStep)):
        return replace(step, point=step.point - points)
    return step
