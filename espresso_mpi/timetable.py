"""The schedule of a training step: the lane, the start and the length of each operation of each buffer.

A *lane* does one operation at a time. ``planner.model.timetables`` makes schedules, plans contain them, and
``collectives.lanes`` executes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from .errors import PlanError
from .files import schema
from .files.schema import Seconds

MOST_LANES = 8
"""Upper limit of the number of lanes: four resources, and possibly one for the backward pass."""

CHECK = "check"
"""The search for NaN before a tensor travels; the first operation of a buffer if the profile contains it."""

Lane = Annotated[int, Meta(ge=0, lt=MOST_LANES)]

Resource = Literal["gpu", "cpu", "intra", "inter"]
RESOURCES: tuple[Resource, ...] = ("gpu", "cpu", "intra", "inter")


@dataclass(frozen=True)
class Lanes:
    """The lane of each resource; resources with the same number share a lane.

    ``compute``: the lane of the backward pass; None: a lane of its own, which nothing else delays.

    Raises:
        ConfigError: a number is out of range.
    """

    gpu: Lane = 0
    cpu: Lane = 1
    intra: Lane = 2
    inter: Lane = 3
    compute: Annotated[int, Meta(ge=0, le=MOST_LANES)] | None = 0

    def __post_init__(self) -> None:
        schema.check(self, "schedule: lanes")

    def of(self, resource: Resource) -> int:
        """The lane of a resource."""
        return int(getattr(self, resource))

    @property
    def count(self) -> int:
        """Number of lanes."""
        return max(*(self.of(resource) for resource in RESOURCES), self.backward) + 1

    @property
    def backward(self) -> int:
        """The lane of the backward pass."""
        own = max(self.of(resource) for resource in RESOURCES) + 1
        return own if self.compute is None else self.compute

    def name(self, lane: int) -> str:
        """The name of a lane in pictures."""
        here = [str(resource) for resource in RESOURCES if self.of(resource) == lane]
        return "+".join(here + (["compute"] if lane == self.backward and not here else []))


@dataclass(frozen=True)
class Timetable:
    """The operations of one buffer, in seconds since the step began.

    Attributes:
        backward, computes: when the part of the backward pass begins that ends with the buffer's last gradient, and how
            long it takes.
        operations: what each does: a step of its route, a copy between devices, or the check of the values.
        lanes: the lane of each; seconds: how long each takes.
        starts: when they begin, a row for each segment.

    Raises:
        PlanError: rows of different lengths; ConfigError: a time that is negative or not finite, a number of no lane.
    """

    backward: Seconds
    computes: Seconds
    operations: tuple[str, ...]
    lanes: tuple[Lane, ...]
    seconds: tuple[Seconds, ...]
    starts: tuple[tuple[Seconds, ...], ...]

    def __post_init__(self) -> None:
        schema.check(self, "schedule")  # executing goes from moment to moment: with NaN it would never end
        lengths = {len(row) for row in (self.operations, self.lanes, self.seconds, *self.starts)}
        if len(lengths) > 1 or not self.starts:
            raise PlanError(
                f"schedule: got {len(self.operations)} operations and rows of {sorted(lengths)} entries in "
                f"{len(self.starts)} segments; expected one lane, one duration and one start in each segment for every "
                f"operation"
            )


@dataclass(frozen=True)
class Schedule:
    """The planned operations of a step; ``buffers`` by name, see ``types.buffer_name``.

    Raises:
        PlanError: not lanes and timetables by name; an operation is on a lane that there is not.
    """

    lanes: Lanes
    buffers: Mapping[str, Timetable]

    def __post_init__(self) -> None:
        tables = self.buffers.values() if isinstance(self.buffers, Mapping) else [self.buffers]
        if not isinstance(self.lanes, Lanes) or not all(isinstance(table, Timetable) for table in tables):
            raise PlanError(
                f"schedule: got {schema.shown(self.lanes)} and {schema.shown(self.buffers)}; expected Lanes and a "
                f"Timetable for each buffer by its name"
            )
        for name, table in self.buffers.items():
            if max(table.lanes, default=0) >= self.lanes.count:
                raise PlanError(
                    f"schedule: {name!r}: an operation is on lane {max(table.lanes)}; expected numbers below "
                    f"{self.lanes.count}, those of the lanes"
                )

    def renamed(self, names: Mapping[str, str]) -> Schedule:
        """The same schedule with other names of the buffers."""
        return Schedule(self.lanes, {names[name]: timetable for name, timetable in self.buffers.items()})
