"""A pending call on one rank: its arguments, its state and its result."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays.buffers import Gradient
from ..arrays.device import Arrival
from ..collectives.messages.agreement import fingerprint, gather_small
from ..collectives.messages.part_sizes import size_error, unequal
from ..collectives.messages.transport import Transport
from ..collectives.progress import Progress, Segment
from ..collectives.ranges import GpuSearch
from ..errors import EspressoError
from .batches import Batch
from .dense_piggyback import PiggybackData
from .diagnostics import CallKey, Content, described
from .guard import Watch

_LOG = logging.getLogger("espresso_mpi")


@dataclass(frozen=True)
class Exchange:
    """What a call does that is no mean of gradients.

    Attributes:
        said: what must be equal on all ranks, as JSON values.
        tensors: [name, type and shape, device] of each tensor, which must be equal as well.
        progress: runs once all ranks have made the call.
        moves: its data, where they may be piggybacked on the header of the round; None: they may not.
        follows: whether ``progress`` is to run after ``moves`` all the same, because ranks only agree by them.
        over: makes ``progress`` for other arrays of the same shapes and types: for what is given, and for the result.
        early: whether the first progress step waits for nothing.
        sizes: as of ``part_sizes.shown``, which all ranks compare before data move; None: they fit.
    """

    said: Any
    tensors: tuple[tuple[str, str, str], ...]
    progress: Callable[[Transport], Progress]
    moves: PiggybackData | None = None
    follows: bool = False
    over: Callable[[Any, Any], Callable[[Transport], Progress]] | None = None
    early: bool = False
    sizes: np.ndarray | None = None

    @cached_property
    def digest(self) -> bytes:
        """Short for ``said``."""
        return fingerprint([self.said, [list(tensor) for tensor in self.tensors]])

    def segment(self, call: PendingCall, transport: Transport, done: Callable[[list[PendingCall]], None]) -> Segment:
        """What a runner runs; ``done`` is called at its end."""
        if call.gpu is not None:
            transport.choose_device_way()

        def progress() -> Progress:
            if self.sizes is not None:
                found = unequal(gather_small(transport, self.sizes, self.sizes.size))
                call.error = None if found is None else size_error(call.title, transport, found)
            if call.error is None:
                yield from self.progress(transport)
            done([call])

        return Segment(call.title, 0, iter([progress()]), lambda: True)


class PendingCall:
    """One call of ``sync`` or ``push``, or a collective action, from its arrival to its end.

    Attributes:
        key: identifies the matching calls of other ranks.
        title: the call in messages.
        given: what the caller passed.
        gradients: flat arrays over ``given``.
        batch: what is known about the tensors.
        sizes: as of ``Batch``.
        problem: why this rank cannot make the call; None: it can.
        bad: values that cannot be summed, see ``ranges.Findings``.
        large: positions of dense tensors whose sums could leave their range; known when the call starts.
        priority: calls of a higher priority start earlier.
        action: instead of tensors: runs by itself, with no active segments, once all ranks have made the call.
        gpu: number of the GPU that the tensors are on.
        arrival: when that GPU has passed what the caller had queued before; None: it has.
        search: for odd values of the tensors on that GPU; None: there is none, or it has not begun.
        number: the call's bit in headers, once all ranks know it.
        shown: of what stands for a call that is made again: its header, and for which version of the headers.
        announced: whether its description was sent to the other ranks.
        noticed: whether the log has a notice that it waits for long.
        since: when it was made.
        left: number of buckets that are not finished.
        waiting_tensors: number of tensors that wait for the rest of their group.
        finished, error, result: how it ended.
        watch: finds tensors that the caller changes in the meantime; None if it cannot.
        exchange: instead of a batch: what the call does.
    """

    def __init__(
        self,
        key: CallKey,
        given: Any = None,
        gradients: Sequence[Gradient] = (),
        batch: Batch | None = None,
        problem: EspressoError | None = None,
        priority: float = 0.0,
        action: Callable[[], Any] | None = None,
        title: str = "",
        gpu: int | None = None,
        arrival: Arrival | None = None,
        watch: Watch | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.key, self.given, self.gradients, self.batch = key, given, list(gradients), batch
        self.sizes = None if batch is None else batch.sizes
        self.title = title or described(key)
        self.problem, self.priority, self.action = problem, priority, action
        self.gpu, self.arrival, self.watch, self.exchange = gpu, arrival, watch, exchange
        self.search: GpuSearch | None = None
        self.number: int | None = None
        self.shown: tuple[tuple[int, bool], np.ndarray | None] = (-1, False), None
        self.bad: dict[str, str] = {}
        self.large: frozenset[int] = frozenset()
        self.announced = self.noticed = False
        self.since = time.perf_counter()
        self.left = self.waiting_tensors = 0
        self.finished = False
        self._watchers: list[Callable[[], None]] | None = []
        self.error: BaseException | None = None
        self.result: Any = given

    def when_finished(self, act: Callable[[], None]) -> None:
        """Call ``act`` once, by the thread that ends the call; at once if it has ended."""
        waiting = self._watchers
        if waiting is not None:
            waiting.append(act)
            if self._watchers is not None:
                return
            try:  # the call has ended meanwhile: who removes it calls it
                waiting.remove(act)
            except ValueError:
                return
        act()

    def announce_end(self) -> None:
        """Call what waits for the end of the call; what it raises is logged, for nobody could catch it."""
        waiting, self._watchers = self._watchers, None
        while waiting is not None:
            try:
                act = waiting.pop(0)
            except IndexError:
                return
            try:
                act()
            except Exception:
                _LOG.exception("%s: what was to be called at its end has failed", self.title)

    def renew(self, batch: Batch | None, problem: EspressoError | None) -> None:
        """Travel in another way, before the call has begun."""
        self.batch, self.problem = batch, problem
        self.sizes = None if batch is None else batch.sizes
        self.number, self.announced, self.search, self.bad = None, False, None, {}

    @property
    def content(self) -> Content:
        """What must be equal on all ranks."""
        if self.exchange is not None:
            return Content(self.key, self.priority, self.exchange.tensors, self._digest.hex())
        known = None if self.batch is None else self.batch.tensors
        tensors = known or tuple((g.spec.name, str(g.spec), g.spec.device) for g in self.gradients)
        return Content(self.key, self.priority, tensors, self._digest.hex())

    @property
    def signature(self) -> tuple[Any, ...]:
        """A short form of ``content``."""
        return (self.key, self.priority, self._digest)

    @property
    def _digest(self) -> bytes:
        known = self.batch or self.exchange
        return known.digest if known is not None else b""

    def note(self) -> dict[str, Any]:
        """The description for other ranks of a call that is new to them, or that has a problem."""
        if self.problem is not None:
            return {"call": list(self.key), "problem": [type(self.problem).__name__, str(self.problem)]}
        sizes = {} if self.sizes is None else {"sizes": self.sizes}
        return {**self.content.note(), "problem": None, "bad": self.bad, **sizes}
