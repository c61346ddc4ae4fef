"""The operations of a segment as a schedule names them: the same on every rank, whatever each has to do in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..planner.model.cost import Shape, Slot, walk
from ..timetable import Resource
from ..types import Collective, DeviceKind, Encode, Route
from .data.layout import Topology
from .ops.base import operations
from .program import EncodeStep, ScheduleStep, UpdateStep


@dataclass(frozen=True)
class RouteOperation:
    """One operation.

    Attributes:
        what, resource: as in ``planner.cost``.
        turns: how often it is gone on with before it is at its end.
        steps: places of its steps in the compiled route.
        copies: it is a copy between devices, which the step of the next operation would make, or the end.
    """

    what: str
    resource: Resource
    turns: int
    steps: tuple[int, ...]
    copies: bool = False


def route_operations(
    route: Route, steps: Sequence[ScheduleStep], topology: Topology, home: DeviceKind
) -> tuple[RouteOperation, ...]:
    """The operations of a compiled route, for tensors on a device.

    A collective among one rank is no operation: its step is done with the next one, or with the last. Nodes count
    as the smallest, as in profiles.
    """
    shape = Shape(len(topology.nodes), topology.lanes, home)
    slots, found, waiting = list(walk(route, shape)), list[RouteOperation](), list[int]()
    for step, places in zip(route.steps, _by_step(route, steps)):
        if isinstance(step, Collective) and shape.members(step.level) == 1:
            waiting += places
            continue
        while slots[0].kind == "copy":
            found.append(_copy(slots.pop(0)))
        slot = slots.pop(0)
        turns = 1 + operations()[step.op].phases if isinstance(step, Collective) else 1
        found.append(RouteOperation(slot.what, slot.resource, turns, (*waiting, *places)))
        waiting.clear()
    found += map(_copy, slots)
    if waiting:
        last = found.pop() if found else RouteOperation("nothing", "cpu", 1, ())
        found.append(replace(last, steps=(*last.steps, *waiting)))
    return tuple(found)


def _copy(slot: Slot) -> RouteOperation:
    return RouteOperation(slot.what, slot.resource, 1, (), copies=True)


def _by_step(route: Route, steps: Sequence[ScheduleStep]) -> Iterator[list[int]]:
    """The places of the compiled steps of each step of the route: what ranks agree on before an encode goes with it."""
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
