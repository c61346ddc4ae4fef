"""The schedule of a plan in tables: what each lane does, and how one buffer goes from lane to lane."""

from __future__ import annotations

from dataclasses import dataclass

from ..timetable import Schedule

WAITED = (
    "waited: how long the operation waits for its lane after the one before it has ended. Sessions keep the order of "
    "every lane; the times are predicted."
)

_MOST = 60
"""Operations of a buffer that are listed."""


@dataclass(frozen=True)
class Table:
    """A table of words: ``text`` names the columns that are not numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: tuple[str, ...]


@dataclass(frozen=True, order=True)
class ScheduledOperation:
    """An operation of a schedule: when, for how long, of which buffer and segment, what, and on which lane."""

    start: float
    seconds: float
    buffer: str
    segment: int
    what: str
    lane: int

    @property
    def stop(self) -> float:
        """When it ends."""
        return self.start + self.seconds


def by_lane(schedule: Schedule) -> dict[int, list[ScheduledOperation]]:
    """What every lane does, one after the other, the parts of the backward pass among it."""
    found: dict[int, list[ScheduledOperation]] = {}
    for buffer, table in schedule.buffers.items():
        home = schedule.lanes.backward
        found.setdefault(home, []).append(
            ScheduledOperation(table.backward, table.computes, buffer, -1, "backward", home)
        )
        for segment, starts in enumerate(table.starts):
            for start, seconds, what, lane in zip(starts, table.seconds, table.operations, table.lanes):
                found.setdefault(lane, []).append(ScheduledOperation(start, seconds, buffer, segment, what, lane))
    return {lane: sorted(found[lane]) for lane in sorted(found)}


def of_lanes(schedule: Schedule) -> Table:
    """How much each lane does in a step."""
    rows = [
        (
            schedule.lanes.name(lane), counted(len(done), "operation"), milliseconds(sum(one.seconds for one in done)),
            milliseconds(done[0].start), milliseconds(max(one.stop for one in done)),
        )
        for lane, done in by_lane(schedule).items()
    ]  # fmt: skip
    header = ("lane", "does", "busy ms", "first begins", "last ends")
    return Table("Lanes, which do one operation at a time", header, tuple(rows), ("lane", "does"))


def of_buffer(schedule: Schedule, buffer: str) -> Table:
    """What the lanes do for one buffer, and what each does right before."""
    rows, ended = [], dict[int, float]()
    before = {then: one for done in by_lane(schedule).values() for one, then in zip([None, *done], done)}
    for one in sorted(one for one in before if one.buffer == buffer):
        ready = ended.get(one.segment, ended.get(-1))
        ended[one.segment] = one.stop
        behind = before[one]
        rows.append((
            "" if one.segment < 0 else str(one.segment + 1), one.what, schedule.lanes.name(one.lane),
            milliseconds(one.start), milliseconds(one.stop), "" if ready is None else milliseconds(one.start - ready),
            "" if behind is None else f"{behind.what} of {behind.buffer}",
        ))  # fmt: skip
    more = f"; {counted(len(rows) - _MOST, 'more operation')} left out" if len(rows) > _MOST else ""
    header = ("segment", "operation", "lane", "begins", "ends", "waited", "the lane does before")
    title = f"Schedule, milliseconds since the step began{more}"
    return Table(title, header, tuple(rows[:_MOST]), ("operation", "lane", "the lane does before"))


def milliseconds(seconds: float) -> str:
    """Milliseconds as people read them."""
    value = seconds * 1e3
    return f"{value:.1f}" if abs(value) >= 99.95 else f"{value:.3g}"


def counted(number: int, what: str) -> str:
    """So many of something."""
    return f"{number} {what}{'' if number == 1 else 's'}"
