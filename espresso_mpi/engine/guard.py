"""Finds tensors that are changed, or passed to another call, while they are in flight.

The mean of such a tensor is undefined and differs between ranks, so it is an error. Torch counts in-place changes, so
they are cheap to find (``Watch``). Memory that belongs to two calls at a time is found for all arrays (``Claims``).
In debug mode, checksums find all other changes.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from ..arrays import device
from ..arrays.buffers import Gradient
from ..arrays.same_memory import is_alone
from ..errors import GradientError

_ADVICE = (
    "do not touch a tensor between the call and its wait; when gradients are accumulated, push them in the backward "
    "pass of the last micro-batch only, or call wait_all() before the next one"
)

_FEW = 16
"""From two up to this number of tensors, spans are computed at once: a check whether they are needed takes as long."""

_MANY = 64
"""Above this number, spans are inserted or removed all at once: one by one, each moves those behind it."""

_FORGOTTEN = 4
"""Pushes of one tensor without a wait that cause a warning. Two are normal if steps overlap."""

_START = attrgetter("start")

_WORK = 1 << 16
"""Effort limit of numpy's test whether two strided arrays share memory; beyond it, they count as if they did."""


Check = Callable[[str], None]


def changed_error(name: str, title: str, when: str) -> GradientError:
    """The error for a tensor that was changed while it was in flight."""
    return GradientError(
        f"{name}: its memory was changed {when}, while it was in flight in {title}: the mean is undefined on all "
        f"ranks; {_ADVICE}"
    )


# --- changes ----------------------------------------------------------------------------------------------------------


class Watch:
    """The versions and checksums of the tensors of one call, taken when it was made.

    Args:
        title: the call in messages.
        gradients: its tensors.
        spans: its claimed memory.
        debug: use checksums, which read all memory five times and need a copy of each tensor; else only torch's
            counters are used.
    """

    def __init__(self, title: str, gradients: Sequence[Gradient], spans: Spans = (), debug: bool = False) -> None:
        self._title, self.spans, self.debug = title, spans, debug
        self._versions = [(g.spec.name, g.version, g.version()) for g in gradients if g.version is not None]
        self._name = gradients[0].spec.name if gradients else ""
        self.whole = len(gradients) == 1 and gradients[0].whole
        self.reader: Callable[[], Any] = lambda: None
        self._watched = [g for g in gradients if g.rebuild is None and g.array.size] if debug else []
        self._sums = {g.spec.name: _checksum(g) for g in self._watched} if debug else {}

    def lost(self, pending: Any) -> str | None:
        """A warning if no object but ``pending.result`` refers to the result of a push; else None. Ends the watch.

        The number of references is known for torch tensors only.
        """
        self._versions, self._watched, self.spans = [], [], ()  # which refer to the tensors
        if not (self.whole and self.reader() is None and is_alone(pending)):
            return None
        return (
            f"{self._name}: its mean is lost, since nothing refers to the tensor any more when {self._title} is waited "
            f"for; leave p.grad as it is until then (zero_grad() sets it to None), and of a copy use what "
            f"handle.wait() returns; others may be lost as well (said once)"
        )

    def check_of(self, gradient: Gradient) -> Check | None:
        """In debug mode: a function that verifies that a tensor has not changed. Its argument says when."""
        return partial(self.verify, gradient) if gradient.spec.name in self._sums else None

    def verify(self, gradient: Gradient, when: str) -> None:
        """Verify that the memory of a tensor has not changed.

        Raises:
            GradientError: it has.
        """
        if gradient.spec.name in self._sums and _checksum(gradient) != self._sums[gradient.spec.name]:
            raise changed_error(gradient.spec.name, self._title, when)

    def written(self) -> None:
        """In debug mode: take new checksums, because the memory holds the result now."""
        self._sums = {g.spec.name: _checksum(g) for g in self._watched}

    def require_untouched(self) -> None:
        """Verify that the caller has not changed a tensor before the wait.

        Raises:
            GradientError: it has.
        """
        for name, read, before in self._versions:
            if read() != before:
                raise changed_error(name, self._title, "before it was waited for")
        for gradient in self._watched:
            self.verify(gradient, "before it was waited for")


def _checksum(gradient: Gradient) -> int:
    memory = gradient.array if gradient.source is None else gradient.source
    if isinstance(memory, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(memory).view(np.uint8).data)
    device.synchronize()  # whatever stream the caller's kernels are on
    if gradient.source is not None:
        return zlib.crc32(memory.cpu().contiguous().numpy().view(np.uint8).data)
    here = np.empty(memory.size, memory.dtype)
    device.copy(here, memory)
    return zlib.crc32(here.view(np.uint8).data)


# --- memory -----------------------------------------------------------------------------------------------------------


class MemorySpan(NamedTuple):
    """The memory of a tensor, from its first byte to behind its last one. ``strided``: it may have gaps."""

    start: int
    stop: int
    name: str
    title: str = ""
    strided: Any = None

    def shares(self, other: MemorySpan) -> bool:
        """Whether the spans share a byte."""
        if self.stop <= other.start or other.stop <= self.start:
            return False
        if self.strided is None and other.strided is None:
            return True
        try:
            return bool(np.shares_memory(self._bytes(), other._bytes(), max_work=_WORK))  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True

    def _bytes(self) -> np.ndarray:
        """An array for numpy's test of shared memory; its values cannot be read, because the memory may be a GPU's."""
        if self.strided is None:
            return np.asarray(_Place((self.stop - self.start,), (1,), self.start))
        return np.asarray(self.strided)


class _Place:
    """An array of bytes at an address, for numpy."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], start: int, itemsize: int = 1) -> None:
        self.__array_interface__ = {
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
            "data": (start, True),
            "version": 3,
        }


class Owned:
    """The memory of a call whose arrays share none. The spans are computed on demand."""

    def __init__(self, gradients: Sequence[Gradient], title: str) -> None:
        self._gradients, self._title, self._made = gradients, title, list[MemorySpan]()

    def spans(self) -> list[MemorySpan]:
        """The spans, sorted by start; always the same objects. For one thread at a time."""
        if not self._made:
            self._made = _spans(self._gradients, self._title)
        return self._made


class Alone(Owned):
    """The memory of a call with a few numpy arrays, the only one that claims any."""

    def __init__(self, arrays: Sequence[Any], title: str) -> None:
        self._arrays, self._title, self._made = arrays, title, list[MemorySpan]()

    def spans(self) -> list[MemorySpan]:
        """See ``Owned``."""
        if not self._made:
            places = {device.address(x): x.nbytes for x in self._arrays if x is not None and x.size}
            self._made = [MemorySpan(at, at + places[at], self._title, self._title) for at in sorted(places)]
        return self._made


def _packed_of(spans: Sequence[MemorySpan], strided: Callable[[MemorySpan], None]) -> list[MemorySpan]:
    """The packed ones of some spans; ``strided`` is called with each of the others."""
    packed = [span for span in spans if span.strided is None]
    if len(packed) < len(spans):
        for span in spans:
            if span.strided is not None:
                strided(span)
    return packed


Spans = Sequence[MemorySpan] | Owned
"""The memory of a call."""


def spans(gradients: Sequence[Gradient], title: str) -> Spans:
    """The memory that receives the results of a call, sorted by start.

    Raises:
        GradientError: two tensors share memory, which would be averaged twice.
    """
    if len(gradients) > _FEW or len(gradients) == 1:
        owners = {id(g.owner) for g in gradients}
        if len(owners) == len(gradients) and id(None) not in owners:
            return Owned(gradients, title)
        if all(g.start or not g.array.size for g in gradients):
            edges = sorted((g.start, g.start + g.array.nbytes) for g in gradients if g.start)
            if all(one[1] <= following[0] for one, following in itertools.pairwise(edges)):
                return Owned(gradients, title)
    return _spans(gradients, title)


def _spans(gradients: Iterable[Gradient], title: str) -> list[MemorySpan]:
    found = [_span(g, title) for g in gradients if g.rebuild is None and g.spec.size]
    if len(found) < 2:
        return found
    found.sort(key=_START)
    if all(one.stop <= following.start for one, following in itertools.pairwise(found)):
        return found
    under_way: list[MemorySpan] = []
    for span in found:
        under_way = [other for other in under_way if other.stop > span.start]
        for other in under_way:
            if other.shares(span):
                raise GradientError(f"{other.name} and {span.name} share memory; pass it once, or pass copies")
        under_way.append(span)
    return found


def _span(gradient: Gradient, title: str) -> MemorySpan:
    spec, source = gradient.spec, gradient.source
    if source is None:
        start = gradient.start or device.begin_of(gradient.array)
        return MemorySpan(start, start + spec.nbytes, spec.name, title)
    if isinstance(source, np.ndarray):
        start, strides = device.address(source), source.strides
    else:
        start, strides = source.data_ptr(), tuple(stride * source.element_size() for stride in source.stride())
    reach = [stride * (length - 1) for stride, length in zip(strides, spec.shape)]
    place = _Place(spec.shape, strides, start, spec.nbytes // spec.size)
    first, last = start + sum(r for r in reach if r < 0), start + sum(r for r in reach if r > 0)
    return MemorySpan(first, last + spec.nbytes // spec.size, spec.name, title, place)


class _Extents:
    """Strided spans, which may overlap without sharing bytes. They are grouped by the power of two above their length:
    in a group, only spans that start within this length before an address can reach it.
    """

    def __init__(self) -> None:
        self._by_power: dict[int, tuple[list[int], list[MemorySpan]]] = {}  # where they begin, and they, in that order

    def __bool__(self) -> bool:
        return bool(self._by_power)

    def near(self, span: MemorySpan) -> Iterator[MemorySpan]:
        """All spans that may share memory with another span."""
        for power, (starts, found) in self._by_power.items():
            yield from found[bisect_left(starts, span.start - (1 << power)) : bisect_left(starts, span.stop)]

    def add(self, span: MemorySpan) -> None:
        """Add a span that shares no memory with the others, so that none has the same start."""
        starts, spans = self._by_power.setdefault((span.stop - span.start).bit_length(), ([], []))
        at = bisect_left(starts, span.start)
        starts.insert(at, span.start)
        spans.insert(at, span)

    def remove(self, span: MemorySpan) -> None:
        """Remove a span, if it is there."""
        power = (span.stop - span.start).bit_length()
        starts, spans = self._by_power.get(power, ([], []))
        at = bisect_left(starts, span.start)
        if at < len(spans) and spans[at] is span:
            del starts[at], spans[at]
            if not spans:
                del self._by_power[power]


class Pending:
    """The calls of push that were not waited for, in the order in which they were made."""

    def __init__(self) -> None:
        self._units: dict[int, Any] = {}
        self._pushes: Counter[str] = Counter()
        self._told = False

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._units.values()))

    def __len__(self) -> int:
        return len(self._units)

    def add(self, call: Any) -> bool:
        """Add a call; returns True, once, if there are so many of one tensor that a wait seems to be missing."""
        name = call.key[1]
        self._units[id(call)] = call
        self._pushes[name] += 1
        first = self._pushes[name] == _FORGOTTEN and not self._told
        self._told = self._told or first
        return first

    def remove(self, call: Any) -> None:
        """Remove a call that was waited for; other calls are ignored."""
        if self._units.pop(id(call), None) is not None:
            self._pushes[call.key[1]] -= 1


_all: weakref.WeakSet[Claims] = weakref.WeakSet()


class Claims:
    """The memory of all calls that were not waited for. Thread-safe by ``lock``."""

    def __init__(self) -> None:
        self._owned: Owned | None = None  # as long as it is all that is claimed
        self._packed: list[MemorySpan] = []
        self._starts: list[int] = []  # of these, in the same order: whole numbers are quick to search
        self._strided = _Extents()
        self.lock = threading.RLock()
        _all.add(self)

    def claim(self, wanted: Spans) -> None:
        """Claim the memory of a call.

        Raises:
            GradientError: a call that was not waited for is to write to it; nothing was claimed.
        """
        with self.lock:
            if isinstance(wanted, Owned):
                if self._owned is None and not self._packed and not self._strided:
                    self._owned = wanted
                    return
                wanted = wanted.spans()
            if self._owned is not None:
                owned, self._owned = self._owned.spans(), None
                self._add(owned)
            if len(wanted) == 1 and not self._strided and wanted[0].strided is None:
                self._claim_one(wanted[0])
                return
            if self._packed or self._strided:
                self._refuse(wanted)
            self._add(wanted)

    def _claim_one(self, span: MemorySpan) -> None:
        """Claim packed memory where all that is claimed is packed, and thus sorted by its ends as well."""
        at = bisect_left(self._starts, span.start)
        follows = at == 0 or self._packed[at - 1].stop <= span.start
        if not follows or (at < len(self._starts) and self._starts[at] < span.stop):
            self._refuse((span,))
        self._starts.insert(at, span.start)
        self._packed.insert(at, span)

    def claim_alone(self, wanted: Owned) -> bool:
        """Claim the memory of a call if nothing is claimed; returns whether it was."""
        with self.lock:
            if self._owned is not None or self._packed or self._strided:
                return False
            self._owned = wanted
            return True

    def _add(self, wanted: Sequence[MemorySpan]) -> None:
        packed = _packed_of(wanted, self._strided.add)
        if len(packed) > _MANY:
            self._packed = sorted([*self._packed, *packed], key=_START)
            self._starts = [span.start for span in self._packed]
            return
        for span in packed:
            at = bisect_left(self._starts, span.start)
            self._starts.insert(at, span.start)
            self._packed.insert(at, span)

    def _refuse(self, wanted: Sequence[MemorySpan]) -> None:
        for span in wanted:
            for other in itertools.chain(self._near(span), self._strided.near(span)):
                if other.shares(span):
                    raise GradientError(
                        f"{span.name}: its memory is that of {other.name}, which is in flight in {other.title} and "
                        f"was not waited for: it may have been changed since; {_ADVICE}"
                    )

    def _near(self, span: MemorySpan) -> Iterable[MemorySpan]:
        """The packed spans that may overlap a span. They do not overlap each other, so their ends are sorted too."""
        first = bisect_left(self._starts, span.start)
        return self._packed[max(first - 1, 0) : bisect_left(self._starts, span.stop, first)]

    def drop(self, held: Spans) -> None:
        """Release the memory of a call."""
        with self.lock:
            if isinstance(held, Owned):
                if self._owned is held:
                    self._owned = None
                    return
                held = held.spans()
            packed = held if len(held) == 1 and held[0].strided is None else _packed_of(held, self._strided.remove)
            if len(packed) > _MANY:
                gone = set(map(id, packed))
                self._packed = [span for span in self._packed if id(span) not in gone]
                self._starts = [span.start for span in self._packed]
                return
            for span in packed:
                at = bisect_left(self._starts, span.start)
                if at < len(self._packed) and self._packed[at] is span:
                    del self._packed[at], self._starts[at]


def _after_fork() -> None:
    """Runs in the child: replaces locks, because a thread that does not exist there may have held them."""
    for claims in list(_all):
        claims.lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
