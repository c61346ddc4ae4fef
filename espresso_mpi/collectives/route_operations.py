"""The operations of a segment as a schedule names them: the same on every rank, whatever each rank does in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..planner.model.cost import Shape, Slot, walk
from ..timetable import Resource
from ..types import Collective, DeviceKind, Encode, Route
from .data.layout import Topology
from .ops.base import operations
from .program import EncodeStep, ProgramStep, UpdateStep


@dataclass(frozen=True)
class RouteOperation:
    """One operation.

    Attributes:
        what, resource: as in ``planner.model.cost``.
        progress_steps: number of progress steps that it takes.
        steps: indices of its steps in the program.
        copies: whether it is a copy between devices, which the next step (or the end) would make otherwise.
    """

    what: str
    resource: Resource
    progress_steps: int
    steps: tuple[int, ...]
    copies: bool = False


def route_operations(
    route: Route, steps: Sequence[ProgramStep], topology: Topology, home: DeviceKind
) -> tuple[RouteOperation, ...]:
    """The operations of a program, for tensors on the device ``home``.

    A collective of a single rank is no operation: its step belongs to the next operation, or to the last. All nodes
    count as the smallest one, as in profiles.
    """
    shape = Shape(len(topology.nodes), topology.local_size, home)
    slots, found, waiting = list(walk(route, shape)), list[RouteOperation](), list[int]()
    for step, places in zip(route.steps, _by_step(route, steps)):
        if isinstance(step, Collective) and shape.members(step.level) == 1:
            waiting += places
            continue
        while slots[0].kind == "copy":
            found.append(_copy(slots.pop(0)))
        slot = slots.pop(0)
        progress_steps = 1 + operations()[step.op].phases if isinstance(step, Collective) else 1
        found.append(RouteOperation(slot.what, slot.resource, progress_steps, (*waiting, *places)))
        waiting.clear()
    found += map(_copy, slots)
    if waiting:
        last = found.pop() if found else RouteOperation("nothing", "cpu", 1, ())
        found.append(replace(last, steps=(*last.steps, *waiting)))
    return tuple(found)


def _copy(slot: Slot) -> RouteOperation:
    return RouteOperation(slot.what, slot.resource, 1, (), copies=True)


def _by_step(route: Route, steps: Sequence[ProgramStep]) -> Iterator[list[int]]:
    """The indices of the program steps of each route step; the agreement before an encode belongs to the encode."""
    place = 0
    for step in route.steps:
        first = place
        if isinstance(step, Encode):
            while not isinstance(steps[place], EncodeStep):
                place += 1
        place += 1
        if isinstance(step, Collective) and place < len(steps) and isinstance(steps[place], UpdateStep):
            place += 1
        yield list(range(first, place))
