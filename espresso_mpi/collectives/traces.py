"""Gathers the traces of all ranks in one file, on one clock."""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MismatchError, StateError
from ..tracing import recording as records
from ..tracing import trace_file
from ..tracing.recording import Recorder, Span
from ..tracing.trace_file import RankTrace
from .messages.agreement import first_failure, on_every_rank
from .messages.clocks import Clock, Correction, Reading, read
from .messages.transport import Transport

_LOG = logging.getLogger("espresso_mpi")


@contextmanager
def recording(
    recorder: Recorder, transport: Transport, path: str | Path, clock: Clock = time.perf_counter
) -> Iterator[None]:
    """Record the with-block on all ranks; rank 0 writes the file at its end. Collective at both ends.

    If an exception leaves the block, the other ranks may never reach its end, so nothing is sent or written. No other
    messages of ``transport`` may be in flight at either end.

    Args:
        path: of the file; rank 0's counts.
        clock: that of the recorder's spans; the ranks of one node share it.

    Raises:
        ConfigError: rank 0 cannot write there; before the block if that can be known, on every rank.
        StateError: this session is being traced already.
        MismatchError: another rank is in another call; RankTimeoutError: it did not come.
    """
    before = begin(recorder, transport, path, clock)
    try:
        yield
    except BaseException:
        recorder.stop()
        raise
    finish(recorder, transport, path, before, clock)


def begin(recorder: Recorder, transport: Transport, path: str | Path, clock: Clock = time.perf_counter) -> Reading:
    """The first half of ``recording``: start on all ranks or on none. The result is an argument of ``finish``."""

    def check() -> None:
        if recorder.tracing:
            raise StateError("trace: this session is being traced already; leave that with-block first")
        if transport.rank == 0:
            trace_file.refuse_unwritable(Path(path))

    _together(transport, "begins", check)
    before = read(transport, clock)
    recorder.start(records.MAX_EVENTS // transport.topology.size)
    return before


def finish(
    recorder: Recorder, transport: Transport, path: str | Path, before: Reading, clock: Clock = time.perf_counter
) -> None:
    """The second half of ``recording``: gather the spans, and write them on rank 0."""
    spans, dropped = recorder.stop()
    _together(transport, "ends", lambda: None)
    ranks = collect(transport, spans, dropped, (before, read(transport, clock)))

    def write() -> None:
        if ranks is not None:
            trace_file.write(Path(path), trace_file.chrome([rank for rank, _ in ranks], _about(transport, ranks)))

    _together(transport, "is written", write)
    if dropped:
        room = records.MAX_EVENTS // transport.topology.size
        _LOG.warning(
            "trace %s: room for %d spans per rank, %d more were left out; trace fewer steps", path, room, dropped
        )


Collected = list[tuple[RankTrace, Correction]]


def collect(
    transport: Transport, spans: list[Span], dropped: int, readings: tuple[Reading, Reading]
) -> Collected | None:
    """The spans of all ranks in rank 0's clock, and the clock corrections; None except on rank 0.

    Collective. The spans travel as compressed JSON: a trace is of most use where the network is slow.
    """
    mine = {
        "readings": [[one.here, one.offset, one.round_trip] for one in readings],
        "dropped": dropped,
        **records.dump(spans),
    }
    texts = _gather(transport, zlib.compress(json.dumps(mine).encode(), 1))
    if texts is None:
        return None
    records_of = [json.loads(zlib.decompress(text)) for text in texts]
    return [_corrected(transport, rank, records_of) for rank in range(len(records_of))]


def _corrected(transport: Transport, rank: int, records_of: list[dict[str, Any]]) -> tuple[RankTrace, Correction]:
    node = transport.topology.node_of[rank]
    asker = transport.topology.nodes[node][0]
    before, after = (Reading(*values) for values in records_of[asker]["readings"])
    correction = Correction(before, after)
    spans = records.restore(records_of[rank], correction)
    return RankTrace(rank, node, transport.hostnames[rank], spans, records_of[rank]["dropped"]), correction


def _about(transport: Transport, ranks: Collected) -> dict[str, Any]:
    """Metadata of the file: the nodes, and the uncertainty of their clocks."""
    clocks = []
    for number, members in enumerate(transport.topology.nodes):
        correction = ranks[members[0]][1]
        doubt = max(correction.before.round_trip, correction.after.round_trip) / 2
        clocks.append({"node": number, "offset_s": correction.before.offset, "known_within_s": doubt})
    return {"nodes": [list(ranks) for ranks in transport.topology.nodes], "clocks": clocks}


def _gather(transport: Transport, mine: bytes) -> list[bytes] | None:
    """The bytes of all ranks, in rank order, on rank 0; None on the others."""
    size, body = np.array([len(mine)], np.int64), np.frombuffer(mine, np.uint8).copy()
    if transport.rank != 0:
        transport.exchange([(0, size)], [])
        transport.exchange([(0, body)], [])
        return None
    others = range(1, transport.topology.size)
    sizes = [np.zeros(1, np.int64) for _ in others]
    transport.exchange([], list(zip(others, sizes)))
    bodies = [np.empty(int(one[0]), np.uint8) for one in sizes]
    transport.exchange([], list(zip(others, bodies)))
    return [mine, *(one.tobytes() for one in bodies)]


def _together(transport: Transport, moment: str, act: Callable[[], None]) -> None:
    """Run a function on every rank; a failure on any of them is an error on all."""
    _, moments = on_every_rank(transport, act, say=lambda _: {"trace": moment}, wording=first_failure)
    for rank, one in enumerate(moments):
        if one != {"trace": moment}:
            raise MismatchError(
                f"trace: {transport.describe(rank)} is in another call while a trace {moment} elsewhere; enter and "
                f"leave session.trace on every rank at the same place"
            )
