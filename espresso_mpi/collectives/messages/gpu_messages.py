"""Exchanges of GPU memory: a pipeline of copies out, messages and copies in, of which the host waits for none alone.

An exchange is posted when its kernels are queued, not when they are done. Its messages start later, when the GPU has
passed what they need: a message is sent when its memory is copied out, and received when its buffer is empty. So
several exchanges are under way at once, each at another place of the pipeline. Copies have streams of their own. They
wait there for the kernels before them, and the kernels behind them for the copies; see ``device.Mark.hold``.

Messages start in the order in which they were posted, whenever their copies end, because MPI matches them by order.
They have a tag of their own. What ranks exchange meanwhile, headers for instance, may thus overtake them.

**Cuts.** A long array is copied and sent in parts, so that one is sent while the next is copied. The pipeline has three
stages: copies out, messages, and copies in. The last of n parts is through after n + 2 steps. If B bytes are cut into n
parts, a step takes (u + B/n)/b, where b is the speed of a copy, and u the bytes that it could move in the time that it
takes to start. All steps together are shortest for n² = 2B/u. A session measures u.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from espresso_mpi.arrays import device
from espresso_mpi.arrays.workspace import Staging, Workspace

Addressed = Sequence[tuple[int, Any]]
"""(world rank, flat contiguous array) pairs."""

Starter = Callable[[int, Any], list[tuple[int, Any]]]
"""Starts the messages of an array from a rank or to it; returns (rank, request) of each."""

_ALIGN = 64
"""Staging memory of each array begins at a multiple of so many bytes."""

_BEHIND = 2
"""Stages of the pipeline behind the first."""

_LARGE, _REPEATS = 8 << 20, 5
"""Bytes of the copy that tells the speed of copies, and how often it is timed: the least time counts."""


@dataclass(eq=False)
class CopyBatch:
    """Messages that start together, when ``gate()``; and the (host, GPU) memory of those that are staged."""

    gate: Callable[[], bool]
    messages: list[tuple[int, Any]] = field(default_factory=list)
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    requests: list[tuple[int, Any]] | None = None
    """(rank, request) of its messages, once they have started."""


@dataclass(eq=False)
class GpuExchange:
    """An exchange under way.

    Attributes:
        ready: behind the kernels that write what is sent and that read what is received into.
        sends, receives: its messages.
        staging: the host memory that they use; None: MPI gets device pointers.
        fetched: how many of the receives have been copied in.
        marks: those that it borrows.
    """

    ready: device.Mark
    sends: list[CopyBatch]
    receives: list[CopyBatch]
    staging: Staging | None
    marks: list[device.Mark]
    fetched: int = 0

    @property
    def requests(self) -> list[tuple[int, Any]]:
        """(rank, request) of the messages that have started."""
        return [pair for batch in (*self.receives, *self.sends) for pair in batch.requests or ()]


class GpuMessages:
    """The exchanges of one transport, in their order.

    Args:
        send, receive: start messages.
        testall: tells whether a list of requests is complete.
        longest: returns the longest message to a rank; a part of an array has a multiple of it if it is longer.

    Attributes:
        unit: bytes that a copy could move in the time that it takes to start; the same on all ranks. 0: arrays are not
            cut.
    """

    def __init__(
        self, send: Starter, receive: Starter, testall: Callable[[list[Any]], bool], longest: Callable[[int], int]
    ) -> None:
        self._send, self._receive, self._testall, self._longest = send, receive, testall, longest
        self.unit = 0
        self._open: list[GpuExchange] = []
        self._to_send: deque[CopyBatch] = deque()
        self._to_receive: deque[CopyBatch] = deque()
        self._marks: list[device.Mark] = []

    # --- posting ------------------------------------------------------------------------------------------------------

    def post(self, sends: Addressed, receives: Addressed, workspace: Workspace | None) -> GpuExchange:
        """Queue an exchange behind the kernels that are queued now.

        Args:
            workspace: where staging memory comes from; None: MPI gets device pointers.
        """
        ready = self._mark()
        ready.set()
        if workspace is None:
            out, into = (CopyBatch(ready.passed, _filled(messages)) for messages in (sends, receives))
            exchange = GpuExchange(ready, [out], [into], None, [ready])
        else:
            exchange = self._staged(sends, receives, workspace.staging(), ready)
        self._open.append(exchange)
        self._to_receive += exchange.receives
        self._to_send += exchange.sends
        self.advance()
        return exchange

    def _staged(self, sends: Addressed, receives: Addressed, staging: Staging, ready: device.Mark) -> GpuExchange:
        """An exchange by page-locked memory, of which the copies out are queued."""
        sides = [self._parts(messages) for messages in (sends, receives)]
        (to, sent), (at, received) = map(_places, sides)
        memory = staging.take(sent + received)
        out = self._batches(sides[0], memory[:sent], to, staging.emptied)
        into = self._batches(sides[1], memory[sent:], at, staging.emptied)
        exchange, (stream, _) = GpuExchange(ready, out, into, staging, [ready]), device.copying()
        if any(batch.copies for batch in out):
            ready.hold(stream)
        for batch in out:
            for host, gpu in batch.copies:
                device.copy_later(host, gpu, stream)
            mark = self._mark()
            mark.set(stream)
            batch.gate = mark.passed
            exchange.marks.append(mark)
        return exchange

    def _parts(self, messages: Addressed) -> Addressed:
        """Arrays in the parts that are copied one by one: of all ranks in turns, in the order of each."""
        filled = _filled(messages)
        if not self.unit or all(array.nbytes < self.unit for _, array in filled):
            return filled  # each in one part
        found: dict[int, list[Any]] = {}
        for rank, array in filled:
            found.setdefault(rank, []).extend(self._cut(rank, array))
        turns = itertools.zip_longest(*([(rank, part) for part in parts] for rank, parts in found.items()))
        return [part for turn in turns for part in turn if part is not None]

    def _cut(self, rank: int, array: Any) -> list[Any]:
        """The parts of an array; both ends of its messages cut it alike."""
        step = self._step(array.nbytes)
        longest = self._longest(rank)
        step = -(-step // longest) * longest if step > longest else -(-step // _ALIGN) * _ALIGN
        if step >= array.nbytes:
            return [array]
        flat = array.view(np.uint8)
        return [flat[first : first + step] for first in range(0, array.nbytes, step)]

    def _step(self, nbytes: int) -> int:
        """Bytes of a step of the pipeline: see the head of this module."""
        if nbytes < self.unit or not self.unit:
            return max(1, nbytes)
        count = round(math.sqrt(_BEHIND * nbytes / self.unit))
        return -(-nbytes // count)

    def _batches(
        self, parts: Addressed, memory: np.ndarray, places: dict[tuple[int, int], int], gate: Callable[[], bool]
    ) -> list[CopyBatch]:
        """Parts that are copied and sent together, until they have the bytes of a step; each is copied once."""
        found, step, known = list[CopyBatch](), self._step(memory.size), dict[tuple[int, int], Any]()
        room = 0
        for rank, array in parts:
            if room <= 0:
                found.append(CopyBatch(gate))
                room = step
            host, key = array, _key(array)
            if key is not None:
                if key not in known:
                    known[key] = memory[places[key] : places[key] + array.nbytes].view(array.dtype)
                    found[-1].copies.append((known[key], array))
                    room -= array.nbytes
                host = known[key]
            found[-1].messages.append((rank, host))
        return found

    # --- going on -----------------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """Whether an exchange has begun and not ended."""
        return bool(self._open)

    def advance(self) -> None:
        """Start the messages that can start, and queue the copies of those that have arrived. Waits for nothing."""
        for waiting, start in ((self._to_receive, self._receive), (self._to_send, self._send)):
            while waiting and waiting[0].gate():
                batch = waiting.popleft()
                batch.requests = [pair for rank, array in batch.messages for pair in start(rank, array)]
        for exchange in self._open:
            self._fetch(exchange)

    def _fetch(self, exchange: GpuExchange) -> None:
        """Queue the copies of what has arrived, in the order of the messages."""
        while exchange.fetched < len(exchange.receives):
            batch = exchange.receives[exchange.fetched]
            if batch.requests is None or not self._through(batch):
                return
            _, stream = device.copying()
            if batch.copies and not any(before.copies for before in exchange.receives[: exchange.fetched]):
                exchange.ready.hold(stream)  # kernels before the exchange may still read what is written now
            for host, gpu in batch.copies:
                device.copy_later(gpu, host, stream)
            exchange.fetched += 1

    def _through(self, batch: CopyBatch) -> bool:
        return batch.requests is not None and self._testall([request for _, request in batch.requests])

    def done(self, exchange: GpuExchange) -> bool:
        """Whether all is sent and received, and the copies are queued; ``advance`` goes on."""
        return exchange.fetched == len(exchange.receives) and all(map(self._through, exchange.sends))

    def late(self, exchange: GpuExchange, me: int) -> list[int]:
        """The ranks that an exchange waits for; ``me`` if messages wait for the GPU of this one."""
        waits = [me] if any(batch.requests is None for batch in (*exchange.receives, *exchange.sends)) else []
        return waits + [rank for rank, request in exchange.requests if request and not request.Test()]

    def end(self, exchange: GpuExchange) -> None:
        """Let the kernels that come next wait for what was received; the exchange is ``done``."""
        self._open.remove(exchange)
        self._marks += exchange.marks
        if exchange.staging is None:
            return
        if any(batch.copies for batch in exchange.receives):
            exchange.staging.copied(device.copying()[1]).hold()
        exchange.staging.release()

    def forget(self) -> list[Any]:
        """Drop all exchanges, which have failed; returns what MPI may still use."""
        dropped, self._open = self._open, []
        self._to_send.clear()
        self._to_receive.clear()
        return dropped

    def _mark(self) -> device.Mark:
        return self._marks.pop() if self._marks else device.Mark()


def _key(array: Any) -> tuple[int, int] | None:
    """What tells GPU memory from other GPU memory; None on the host."""
    return None if device.device_of(array) == "cpu" else (device.address(array), array.nbytes)


def _places(parts: Addressed) -> tuple[dict[tuple[int, int], int], int]:
    """Where parts of GPU memory begin in staging memory, and the bytes of all; what goes to many is there once."""
    found, end = dict[tuple[int, int], int](), 0
    for key in (_key(array) for _, array in parts):
        if key is not None and key not in found:
            found[key], end = end, end + -(-key[1] // _ALIGN) * _ALIGN
    return found, end


def _filled(messages: Addressed) -> list[tuple[int, Any]]:
    return [(rank, array) for rank, array in messages if array.nbytes]


def measured_unit() -> int:
    """Bytes that a copy between GPU and host could move in the time in which a part of an array is begun and ended.

    That is the time to cut it out of the array, to start its copy, and to see that it has ended.
    """
    host, gpu = device.pinned(_LARGE), device.empty(_LARGE, np.uint8, "gpu")
    start, large = (min(_seconds(host, gpu, n) for _ in range(_REPEATS)) for n in (64, _LARGE))
    return round(_LARGE * start / (large - start)) if large > start else _LARGE


def _seconds(host: np.ndarray, gpu: Any, nbytes: int) -> float:
    mark, begin = device.Mark(), time.perf_counter()
    device.copy_later(host[:nbytes].view(np.uint8), gpu[:nbytes].view(np.uint8))
    mark.set()
    mark.wait()
    return time.perf_counter() - begin
