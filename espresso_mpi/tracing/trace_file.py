"""The file of a trace: the Trace Event Format, which Perfetto and chrome://tracing load.

Source: Google, "Trace Event Format", 2016, as read by Perfetto: complete events ("X") of one thread may nest, but not
overlap otherwise; number 0 is the idle thread.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ..errors import ConfigError
from ..files import schema
from ..files.atomic import replacing
from ..files.schema import Count, Seconds
from ..types import Level
from .recording import Kind, Span, nanoseconds

PRODUCER = "espresso_mpi"
"""How a file says that it is ours."""

MOST_BYTES = 1 << 30
"""Of a file: a span has some 250 bytes there, and there are ``recording.MAX_EVENTS`` of them at most."""


@dataclass(frozen=True)
class RankTrace:
    """What one rank did: its spans with times of rank 0's clock, and how many there was no room for."""

    rank: int
    node: int
    hostname: str
    spans: Sequence[Span]
    dropped: int = 0


def tracks(spans: Sequence[Span]) -> list[int]:
    """A track for each span, so that spans of a track do not overlap, except waits within their wire spans.

    Viewers refuse or cut events that overlap without nesting. The number of tracks is minimal.
    """
    found = [0] * len(spans)
    times = [(nanoseconds(span.start), nanoseconds(span.stop)) for span in spans]
    stacks: list[list[int]] = []
    for index in sorted(range(len(spans)), key=lambda i: (times[i][0], -times[i][1], spans[i].kind == "wait")):
        for stack in stacks:
            while stack and times[stack[-1]][1] <= times[index][0]:
                stack.pop()
        within = (
            track
            for track, stack in enumerate(stacks)
            if stack and times[index][1] <= times[stack[-1]][1] and _is_part(spans[index], spans[stack[-1]])
        )
        free = (track for track, stack in enumerate(stacks) if not stack)
        track = next(chain(within, free), len(stacks))
        if track == len(stacks):
            stacks.append([])
        stacks[track].append(index)
        found[index] = track
    return found


def _is_part(span: Span, of: Span) -> bool:
    if not span.tensor:
        return span.kind == "wait" and of.kind == "agree"
    same = (span.tensor, span.step, span.segment, span.what) == (of.tensor, of.step, of.segment, of.what)
    return span.kind == "wait" and of.kind == "wire" and same


def on_wire(span: Span) -> bool:
    """Whether a span belongs to a wire track; agreements and their waits do not."""
    return span.kind == "wire" or (span.kind == "wait" and bool(span.tensor))


def chrome(ranks: Sequence[RankTrace], about: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of a trace file: one process per node, with a processor track and wire tracks for every rank.

    Overlapping spans get further tracks of the same kind. Processes and threads are numbered from 1. Times
    are microseconds since the first span.

    Args:
        about: what to say about the whole trace, under ``otherData``.
    """
    zero = min((nanoseconds(span.start) for rank in ranks for span in rank.spans), default=0)
    events: list[dict[str, Any]] = []
    for first in {rank.node: rank for rank in reversed(ranks)}.values():
        pid, tid = first.node + 1, first.rank + 1
        events.append(_named("process_name", pid, tid, {"name": f"node {first.node} ({first.hostname})"}))
        events.append(_named("process_sort_index", pid, tid, {"sort_index": first.node}))
    for rank in ranks:
        events += _rank_events(rank, zero, len(ranks))
    members = [{key: getattr(rank, key) for key in ("rank", "node", "hostname", "dropped")} for rank in ranks]
    other = {"producer": PRODUCER, "ranks": members, **(about or {})}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _rank_events(rank: RankTrace, zero: int, ranks: int) -> Iterator[dict[str, Any]]:
    before = 0
    for name, wanted in (("cpu", False), ("wire", True)):
        spans = [span for span in rank.spans if on_wire(span) is wanted]
        track_of = tracks(spans)
        count = max(track_of, default=0) + 1
        tids = [1 + rank.rank + ranks * (before + track) for track in range(count)]
        for track, tid in enumerate(tids):
            more = f" {track + 1}" if track else ""
            yield _named("thread_name", rank.node + 1, tid, {"name": f"rank {rank.rank} {name}{more}"})
            yield _named("thread_sort_index", rank.node + 1, tid, {"sort_index": 1000 * rank.rank + before + track})
        for span, track in zip(spans, track_of):
            yield _event(span, rank, tids[track], zero)
        before += count


def _named(what: str, pid: int, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _event(span: Span, rank: RankTrace, tid: int, zero: int) -> dict[str, Any]:
    """One complete event; its end is rounded, not its length, so that what nested before nests after."""
    start, stop = nanoseconds(span.start) - zero, nanoseconds(span.stop) - zero
    args: dict[str, Any] = {"rank": rank.rank}
    if span.tensor:
        args |= {"tensor": span.tensor, "step": span.step, "segment": span.segment, "what": span.what}
    if span.kind == "wire":
        intra = span.nbytes - span.nbytes_inter
        args |= {"level": span.level, "bytes": span.nbytes, "bytes_intra": intra, "bytes_inter": span.nbytes_inter}
    return {
        "name": " ".join(filter(None, ("wait" if span.kind == "wait" else span.what or span.kind, span.tensor))),
        "cat": span.kind, "ph": "X", "ts": start / 1000, "dur": (stop - start) / 1000,
        "pid": rank.node + 1, "tid": tid, "args": args,
    }  # fmt: skip


# --- reading ----------------------------------------------------------------------------------------------------------

Microseconds = Annotated[float, Meta(ge=0, le=1e15)]
"""Up to 30 years."""


class _Clock(Struct):
    known_within_s: Seconds = 0.0


class _Member(Struct):
    rank: Count
    node: Count
    hostname: str
    dropped: Count = 0


class _About(Struct):
    producer: Literal["espresso_mpi"]
    ranks: list[_Member]
    clocks: list[_Clock] = []


class _Args(Struct):
    rank: Count
    tensor: str = ""
    step: Count = 0
    segment: Count = 0
    what: str = ""
    level: Level | Literal[""] = ""
    bytes: Count = 0
    bytes_inter: Count = 0


class _Complete(Struct, tag_field="ph", tag="X"):
    cat: Kind
    ts: Microseconds
    dur: Microseconds
    args: _Args

    def span(self) -> Span:
        given, stop = self.args, (self.ts + self.dur) / 1e6
        which = (given.tensor, given.step, given.segment)
        return Span(self.cat, *which, self.ts / 1e6, stop, given.what, given.level, given.bytes, given.bytes_inter)


class _Metadata(Struct, tag_field="ph", tag="M"):
    pass


class _Content(Struct):
    """A file, as far as it is read; what else stands in it is for the viewers."""

    otherData: _About  # noqa: N815
    traceEvents: list[_Complete | _Metadata]  # noqa: N815


@dataclass(frozen=True)
class TraceFile:
    """What was read from a file.

    Attributes:
        ranks: all of them, with times in seconds since the first span.
        clocks_within: seconds within which the clocks of the nodes are known.
    """

    ranks: tuple[RankTrace, ...]
    clocks_within: float

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps of which there are spans."""
        return sorted({span.step for rank in self.ranks for span in rank.spans if span.tensor})


def read(path: Path) -> TraceFile:
    """Read what ``write`` wrote.

    Raises:
        ConfigError: there is no such file, or it is not such a trace.
    """
    data = schema.contents(path, MOST_BYTES)
    try:
        content: _Content = schema.decode(data, _Content, "its content")
        return TraceFile(_ranks(content), max((one.known_within_s for one in content.otherData.clocks), default=0.0))
    except ConfigError as error:
        raise ConfigError(
            f"{path}: is no trace of espresso_mpi, or is damaged: {error}; name a file that session.trace or a "
            f"benchmark's --trace wrote"
        ) from None


def _ranks(content: _Content) -> tuple[RankTrace, ...]:
    members = content.otherData.ranks
    spans: dict[int, list[Span]] = {member.rank: [] for member in members}
    if len(spans) < len(members):
        raise ConfigError("otherData: ranks: a rank stands in it twice")
    for number, event in enumerate(content.traceEvents):
        if isinstance(event, _Complete):
            if event.args.rank not in spans:
                raise ConfigError(f"traceEvents[{number}]: got rank {event.args.rank}; expected one of otherData")
            spans[event.args.rank].append(event.span())
    return tuple(RankTrace(one.rank, one.node, one.hostname, spans[one.rank], one.dropped) for one in members)


# --- writing ----------------------------------------------------------------------------------------------------------


def refuse_unwritable(path: Path, what: str = "trace") -> None:
    """Find out before anything is recorded that a file, called ``what`` in errors, could not be written.

    Raises:
        ConfigError: naming what is in the way.
    """
    target = path.resolve()
    if not target.parent.is_dir():
        raise ConfigError(f"{what} {str(path)!r}: the directory {target.parent} does not exist; make it first")
    if target.exists() and not target.is_file():
        raise ConfigError(f"{what} {str(path)!r}: is not a regular file; name one, such as step.json")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{what} {str(path)!r}: cannot write there ({error.strerror}); name another file") from None


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a trace file; a reader finds the former one or the whole new one.

    Raises:
        ConfigError: it cannot be written, with the system's reason.
    """
    target = path.resolve()
    try:
        with replacing(target) as file:
            file.writelines(_lines(content))
    except OSError as error:
        raise ConfigError(f"trace {str(path)!r}: cannot be written ({error.strerror}); name another file") from None


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    """JSON with an event a line: a million events are never one text in memory, and diff and grep work."""
    head = {key: value for key, value in content.items() if key != "traceEvents"}
    yield json.dumps(head, allow_nan=False)[:-1] + ', "traceEvents": [\n'
    events = content["traceEvents"]
    for number, event in enumerate(events, 1):
        yield json.dumps(event, allow_nan=False) + (",\n" if number < len(events) else "\n")
    yield "]}\n"


def labelled(path: Path, label: str) -> Path:
    """The file of one of several runs: ``step.json`` and ``topk:ratio=0.01`` give ``step-topk-ratio=0.01.json``."""
    return path.with_name(f"{path.stem}-{re.sub('[^A-Za-z0-9.=_+]+', '-', label).strip('-')}{path.suffix}")
