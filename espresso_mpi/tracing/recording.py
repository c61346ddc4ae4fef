"""Records what a rank does: always the sums by tensor, and single spans while a trace is recorded. No MPI here.

The executor reports every span to a ``Recorder``. ``collectives.traces`` gathers the spans of all ranks, and
``trace_file`` writes them.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from ..errors import StateError
from .ledger import Ledger

Kind = Literal["check", "agree", "encode", "wire", "wait", "decode"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TENSOR_KINDS: tuple[Kind, ...] = ("encode", "wire", "decode", "wait")
"""The kinds that belong to one tensor. ``wait`` is a part of ``wire``; the others do not overlap on one thread."""

MAX_EVENTS = 1_000_000
"""Spans of all ranks in one trace: some 250 MB of JSON, about the most that a browser still shows."""


@dataclass(frozen=True)
class Span:
    """One interval on this rank.

    Attributes:
        kind: ``wire`` lasts from posting a collective's messages until they are finished, its sums included; other work
            may run in it. ``wait`` is a part of a wire span in which the rank did nothing but wait.
        tensor: name, or "" for what concerns all tensors of a call.
        step: how often the tensor was synchronised before; segment: number of the piece of the tensor.
        start, stop: seconds of ``time.perf_counter``.
        what: the step of the route, such as ``alltoall@inter``.
        level: "flat", "intra", "inter", or "" where nothing moves.
        nbytes: bytes that this rank sent in it; nbytes_inter: those of them that left the node.
    """

    kind: Kind
    tensor: str
    step: int
    segment: int
    start: float
    stop: float
    what: str = ""
    level: str = ""
    nbytes: int = 0
    nbytes_inter: int = 0


@dataclass(frozen=True)
class StepStats:
    """One step of one tensor on this rank.

    Attributes:
        step: its number.
        seconds_by: seconds of ``encode``, ``wire``, ``decode`` and ``wait``.
        bytes_by_level: bytes sent to other ranks inside the node (``intra``) and between nodes (``inter``).
    """

    step: int
    seconds_by: Mapping[str, float]
    bytes_by_level: Mapping[str, int]


@dataclass(frozen=True)
class TensorStats:
    """The statistics of one tensor on this rank so far.

    Attributes:
        steps: the number of its synchronisations.
        seconds_by: seconds of ``encode``, ``wire``, ``decode`` and ``wait``; ``wait`` is a part of ``wire``. Tensors
            travel at the same time, so the sum over tensors can exceed the time that passed.
        bytes_by_level: bytes sent to other ranks inside the node (``intra``) and between nodes (``inter``).
        last: the statistics of the latest step.
        residual_norm: the Euclidean norm of the residual of the tensor on this rank; None if it has none.

    Example:
        >>> with espresso_mpi.Session(compressor="int8", min_bytes=0) as session:
        ...     grads = session.sync({"w": np.ones(1000, np.float32)})
        ...     session.stats().tensors["w"].steps
        1
    """

    steps: int
    seconds_by: Mapping[str, float]
    bytes_by_level: Mapping[str, int]
    last: StepStats
    residual_norm: float | None = None


class _Sums:
    """The sums of one tensor: of finished steps, and of the current step. Lists, because ``add`` is hot."""

    __slots__ = ("current", "current_sent", "done", "done_sent", "step", "steps")

    def __init__(self, step: int) -> None:
        self.step, self.steps = step, 1
        self.done: dict[str, float] = dict.fromkeys(TENSOR_KINDS, 0.0)
        self.current: dict[str, float] = dict.fromkeys(TENSOR_KINDS, 0.0)
        self.done_sent, self.current_sent = [0, 0], [0, 0]

    def begin(self, step: int) -> None:
        """Add the current step to the finished ones."""
        for kind in TENSOR_KINDS:
            self.done[kind] += self.current[kind]
            self.current[kind] = 0.0
        self.done_sent = [a + b for a, b in zip(self.done_sent, self.current_sent)]
        self.current_sent = [0, 0]
        self.step, self.steps = step, self.steps + 1

    def stats(self, residual_norm: float | None) -> TensorStats:
        """A copy as a value."""
        total: dict[str, float] = {kind: self.done[kind] + self.current[kind] for kind in TENSOR_KINDS}
        sent = [a + b for a, b in zip(self.done_sent, self.current_sent)]
        last = StepStats(self.step, dict(self.current), _by_level(self.current_sent))
        return TensorStats(self.steps, total, _by_level(sent), last, residual_norm)


def _by_level(sent: Sequence[int]) -> dict[str, int]:
    return {"intra": sent[0], "inter": sent[1]}


class Recorder:
    """Collects the spans of a rank. Thread-safe.

    Attributes:
        tracing: whether single spans are kept as well.
    """

    def __init__(self) -> None:
        self.tracing = False
        self._seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self._ledgers: dict[Ledger, None] = {}  # those with runs that are not summed up
        self._in_ledgers: dict[str, None] = {}  # their tensors
        self._tensors: dict[str, _Sums] = {}
        self._spans: list[Span] = []
        self._raw: list[tuple[Any, ...]] = []
        self._limit, self._dropped = MAX_EVENTS, 0
        self._lock = threading.Lock()

    @property
    def seconds(self) -> dict[str, float]:
        """Sums by kind since the session opened; a copy."""
        with self._lock:
            self._sum_up()
            return dict(self._seconds)

    def forked(self) -> None:
        """A forked child has no thread that would release the lock."""
        self._lock = threading.Lock()

    def add(
        self,
        kind: Kind,
        tensor: str,
        step: int,
        segment: int,
        start: float,
        stop: float,
        what: str = "",
        level: str = "",
        nbytes_intra: int = 0,
        nbytes_inter: int = 0,
    ) -> None:
        """Account one interval; the arguments are those of ``Span``, bytes split by level.

        ``tensor=""`` counts for the totals only. Spans of an older step than the tensor's latest count for its sums.
        """
        with self._lock:
            if tensor in self._in_ledgers:
                self._sum_up()
            self.add_held(kind, tensor, step, segment, start, stop, what, level, nbytes_intra, nbytes_inter)

    def add_all(self, intervals: Iterable[tuple[Any, ...]]) -> None:
        """Account several intervals: each has the arguments of ``add``."""
        with self._lock:
            for interval in intervals:
                if interval[1] in self._in_ledgers:
                    self._sum_up()
                self.add_held(*interval)

    def add_held(
        self, kind: Kind, tensor: str, step: int, segment: int, start: float, stop: float, what: str = "",
        level: str = "", nbytes_intra: int = 0, nbytes_inter: int = 0,
    ) -> None:  # fmt: skip
        """As ``add``, for a ``Ledger``, which is called with the lock held."""
        self._seconds[kind] += stop - start
        if tensor and kind in TENSOR_KINDS:
            self._account(kind, tensor, step, stop - start, nbytes_intra, nbytes_inter)
        if self.tracing:
            if len(self._raw) < self._limit:
                sent = nbytes_intra + nbytes_inter
                self._raw.append((kind, tensor, step, segment, start, stop, what, level, sent, nbytes_inter))
            else:
                self._dropped += 1

    def keep(self, ledger: Ledger, steps: Sequence[int]) -> None:
        """A run of a ledger has ended, see ``Ledger.note``; this counts as reported."""
        with self._lock:
            if ledger not in self._ledgers:
                if not ledger.tensors.isdisjoint(self._in_ledgers):
                    self._sum_up()  # those steps came before
                self._ledgers[ledger] = None
                self._in_ledgers.update(dict.fromkeys(ledger.tensors))
            full = ledger.take(steps)
            if self.tracing:  # nothing else is kept
                self._ledgers.clear()
                self._in_ledgers.clear()
                ledger.write_out()
            elif full:
                self._sum_up()

    def _sum_up(self) -> None:
        """Add what ledgers keep, before anything of later steps is added."""
        for ledger in self._ledgers:
            for kind, tensor, steps, before, latest, intra, inter in ledger.sums():
                self._seconds[kind] += before + latest
                if tensor:
                    self._account_runs(kind, tensor, steps, before, latest, intra, inter)
        self._ledgers.clear()
        self._in_ledgers.clear()

    def _account_runs(
        self, kind: str, tensor: str, steps: Sequence[int], before: float, latest: float, intra: int, inter: int
    ) -> None:
        """``_account`` for several runs of one tensor: of all steps but the last, and of the last one."""
        sums = self._tensors.get(tensor)
        if sums is None:
            sums = self._tensors[tensor] = _Sums(steps[0])
        new = len(steps) - bisect_right(steps, sums.step)
        if new:
            sums.begin(steps[-1])
            sums.steps += new - 1
        sums.done[kind] += before
        sums.current[kind] += latest
        for done, each in enumerate((intra, inter)):
            sums.done_sent[done] += each * (len(steps) - 1)
            sums.current_sent[done] += each

    def _account(self, kind: Kind, tensor: str, step: int, took: float, intra: int, inter: int) -> None:
        sums = self._tensors.get(tensor)
        if sums is None:
            sums = self._tensors[tensor] = _Sums(step)
        elif step > sums.step:
            sums.begin(step)
        late = step < sums.step
        (sums.done if late else sums.current)[kind] += took
        if intra or inter:
            sent = sums.done_sent if late else sums.current_sent
            sent[0] += intra
            sent[1] += inter

    @contextmanager
    def timing(self, kind: Kind, tensor: str = "", step: int = 0, segment: int = 0, what: str = "") -> Iterator[None]:
        """Account the time of a with-block, also if it fails."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, tensor, step, segment, start, time.perf_counter(), what)

    def tensors(self, residual_norms: Mapping[str, float] | None = None) -> dict[str, TensorStats]:
        """Statistics by tensor, in the order in which they first travelled; norms are given by the session."""
        norms = residual_norms or {}
        with self._lock:
            self._sum_up()
            return {name: sums.stats(norms.get(name)) for name, sums in self._tensors.items()}

    def rewind(self) -> None:
        """Restart the step numbers, as after loading a checkpoint; the sums stay."""
        with self._lock:
            self._sum_up()
            for sums in self._tensors.values():
                sums.step = -1

    def start(self, limit: int = MAX_EVENTS) -> None:
        """Keep spans from now on, at most ``limit``; the rest is counted.

        Raises:
            StateError: they are kept already.
        """
        if self.tracing:
            raise StateError("trace: this session is being traced already; leave that with-block first")
        with self._lock:
            self._sum_up()
            self._raw, self._dropped, self._limit = [], 0, limit
            self.tracing = True

    def stop(self) -> tuple[list[Span], int]:
        """Stop keeping spans: those kept, in the order of their reports, and how many there was no room for."""
        self.tracing = False
        with self._lock:
            raw, self._raw = self._raw, []
        return [Span(*values) for values in raw], self._dropped

    def rows(self) -> dict[tuple[str, int], StepStats]:
        """Statistics by tensor and step of what was traced so far; nothing when not tracing."""
        with self._lock:
            raw = list(self._raw)
        return rows(Span(*values) for values in raw)


def rows(spans: Iterable[Span]) -> dict[tuple[str, int], StepStats]:
    """Sums by tensor and step, in the order of first appearance; spans without a tensor are left out."""
    found: dict[tuple[str, int], StepStats] = {}
    for span in spans:
        if not span.tensor or span.kind not in TENSOR_KINDS:
            continue
        row = found.get((span.tensor, span.step))
        if row is None:
            row = StepStats(span.step, dict.fromkeys(TENSOR_KINDS, 0.0), _by_level([0, 0]))
            found[span.tensor, span.step] = row
        seconds, sent = cast("dict[str, float]", row.seconds_by), cast("dict[str, int]", row.bytes_by_level)
        seconds[span.kind] += span.stop - span.start
        sent["intra"] += span.nbytes - span.nbytes_inter
        sent["inter"] += span.nbytes_inter
    return found


# --- between ranks: JSON, because whatever can be pickled can be anything --------------------------------------------


def dump(spans: Sequence[Span]) -> dict[str, Any]:
    """Spans as a JSON value: texts are written once, times are nanoseconds."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    table = [
        [number(s.kind), number(s.tensor), s.step, s.segment, nanoseconds(s.start), nanoseconds(s.stop), number(s.what),
         number(s.level), s.nbytes, s.nbytes_inter]
        for s in spans
    ]  # fmt: skip
    return {"texts": list(texts), "spans": table}


def restore(value: Mapping[str, Any], clock: Callable[[float], float] = lambda seconds: seconds) -> list[Span]:
    """The spans of ``dump``, their times passed through ``clock``, which must keep their order."""
    texts = value["texts"]
    return [
        Span(texts[kind], texts[tensor], step, segment, clock(start / 1e9), clock(stop / 1e9), texts[what],
             texts[level], *nbytes)
        for kind, tensor, step, segment, start, stop, what, level, *nbytes in value["spans"]
    ]  # fmt: skip


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds: sums and differences of them are exact, so that what nests goes on nesting."""
    return round(seconds * 1e9)
