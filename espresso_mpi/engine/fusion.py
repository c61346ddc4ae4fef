"""The array that travels for a bucket: filled from the caller's tensors, emptied into them; and when that pays."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import device
from ..collectives import ranges
from ..collectives.data import reduction
from ..collectives.executor import Program
from ..collectives.job import Job
from ..collectives.messages.agreement import floats
from ..collectives.messages.transport import Transport
from ..collectives.turns import interleave
from ..feedback import NO_FEEDBACK
from ..state.memory import Memory
from ..tracing.recording import Recorder
from ..types import Route
from .batches import Bucket
from .guard import Check

_LARGEST_HALF = np.float32(65504)
_BEYOND_HALF = int(_LARGEST_HALF.view(np.uint32)) + 1
"""The bits of the least float32 that is cut."""


@dataclass
class Buffer:
    """The flat array that travels for a bucket: the caller's own, or a copy of several or in float32.

    Attributes:
        bucket, arrays: the tensors, and flat arrays over the caller's memory, in the same order.
        skip: which of them are left out.
        memory: what is kept; tensors are owed there what float16 cannot hold.
        tally: counts "saturated": values that were cut to the largest float16.
        checks: in debug mode: make sure that the caller's memory is as it was.
        shift: the array travels divided by two to this power.
    """

    bucket: Bucket
    arrays: Sequence[Any]
    skip: Sequence[bool]
    transport: Transport
    memory: Memory
    tally: Counter[str]
    checks: Sequence[Check] = ()
    shift: int = 0
    x: Any = None
    workspace: Any = None
    begun: bool = False

    def fill(self) -> None:
        """Make it. In debug mode it is a copy: then the caller's memory can be checked until the mean replaces it."""
        for check in self.checks:
            check("before it was read")
        first, bucket = self.arrays[0], self.bucket
        narrow = bucket.compressor is not None and bucket.dtype != "float32"
        if len(self.arrays) == 1 and not narrow and not self.checks:
            self.x = first
        else:
            self.workspace = self.transport.borrow()
            dtype = np.float32 if narrow else first.dtype
            self.x = self.workspace.array("fused", bucket.size, dtype, device.device_of(first))
            if narrow or any(self.skip):
                self._fill_one_by_one(narrow)
            else:
                device.join(self.x, self.arrays)
        if self.memory.waiting:
            self._take_what_is_owed()
        if self.shift:
            ranges.scale(self.x, -self.shift, bucket.dtype)

    def _fill_one_by_one(self, narrow: bool) -> None:
        """Where tensors are converted, or some are skipped: their part is zero."""
        for (part, array), skipped in zip(self._pieces(), self.skip):
            if skipped:
                device.copy(part, device.zeros(part.size, part.dtype, device.device_of(part)))
            elif narrow:
                reduction.convert(part, array, self.bucket.dtype)
            else:
                device.copy(part, array)

    def _take_what_is_owed(self) -> None:
        """Add it to dense tensors; of those that are compressed it is the bucket's, as a residual if there is one.

        Members of a group may be owed something from before they were compressed as one.
        """
        bucket = self.bucket
        if bucket.compressor is None:
            for name, first, owed in self._owed_to_members():
                self._add(name, self.x[first : first + owed.size], owed, bucket.dtype)
            return
        more = self._owed_to_group() if len(self.arrays) > 1 else None  # a single tensor has the bucket's name
        rest = self.memory.begin(bucket.kept, bucket.size, bucket.feedback.kind == "plain", more)
        self.begun = True
        if rest is not None:
            self._add(bucket.kept, self.x, rest, "float32")

    def _owed_to_group(self) -> np.ndarray | None:
        """What all members together are owed, side by side; None: nothing."""
        whole = None
        for _, first, owed in self._owed_to_members():
            whole = np.zeros(self.bucket.size, np.float32) if whole is None else whole
            whole[first : first + owed.size] = owed
        return whole

    def _owed_to_members(self) -> list[tuple[str, int, np.ndarray]]:
        """(name, first element in the buffer, residual) of the tensors that are owed something and not skipped."""
        found, first = [], 0
        for (_, item), skipped in zip(self.bucket.members, self.skip):
            name, n = item.spec.name, item.spec.size
            owed = self.memory.take(name, n) if not skipped and self.memory.owes(name, n) else {}
            if "residual" in owed:
                found.append((name, first, owed["residual"]))
            first += n
        return found

    def empty(self) -> None:
        """Bring the result to the caller's arrays."""
        if self.begun:
            self.memory.end(self.bucket.kept, self.bucket.size)
        for check in self.checks:
            check("before its mean was written")
        if self.shift:
            ranges.scale(self.x, self.shift, self.bucket.dtype)
        if self.workspace is None:
            return
        if self.bucket.dtype == "float16" and self.x.dtype == np.float32:
            self._owe_what_is_cut(self.bucket.kept, self.x, self.bucket.feedback.kind == "plain")
        if self.bucket.uniform and self.x.dtype == self.arrays[0].dtype and not any(self.skip):
            device.part(self.x, self.arrays)
        else:
            self._empty_one_by_one()
        self.transport.give_back(self.workspace)

    def _empty_one_by_one(self) -> None:
        """Where tensors are converted, or some are skipped."""
        for (part, array), skipped in zip(self._pieces(), self.skip):
            if skipped:
                continue
            if part.dtype != array.dtype:
                reduction.convert(array, part, self.bucket.dtype)
            else:
                device.copy(array, part)

    def _pieces(self) -> Iterator[tuple[Any, Any]]:
        start = 0
        for array in self.arrays:
            yield self.x[start : start + array.size], array
            start += array.size

    def _add(self, name: str, x: Any, owed: Any, dtype: str) -> None:
        """``x += owed`` (float32) for a part of any element type; what float16 cannot hold stays owed."""
        if dtype == "float64":
            _add_to_doubles(x, owed)
            return
        where = device.device_of(x)
        here = device.empty(owed.size, np.float32, where)
        device.copy(here, owed)
        if dtype == "float32":
            reduction.blend(x, 1.0, 1.0, here)
            return
        wide = device.empty(x.size, np.float32, where)
        reduction.convert(wide, x, dtype)
        reduction.blend(wide, 1.0, 1.0, here)
        if dtype == "float16":
            self._owe_what_is_cut(name, wide, True)
        reduction.convert(x, wide, dtype)

    def _owe_what_is_cut(self, name: str, wide: Any, kept: bool) -> None:
        """Count the values that float16 cannot hold; ``kept``: what is cut from them is added the next time."""
        cut = reduction.count_from(wide, "float32", _BEYOND_HALF)
        self.tally["saturated"] += cut
        if cut and kept:
            values = np.empty(wide.size, np.float32)
            device.copy(values, wide)
            self.memory.owe(name, values - np.clip(values, -_LARGEST_HALF, _LARGEST_HALF))


def _add_to_doubles(x: Any, owed: Any) -> None:
    """``x += owed`` for float64, of which float32 holds neither all digits nor all magnitudes.

    Rare, therefore simple: a GPU's values pass through the host.
    """
    here = np.empty(x.size, np.float64)
    device.copy(here, x)
    here += owed
    device.copy(x, here)


def measured_limit(transport: Transport, route: Route) -> int:
    """The bytes whose copying in and out of a buffer takes as long as a collective on nothing. Collective.

    Collectives follow each other closely, as those of the tensors of a model do.
    """
    tiny, program = np.zeros(64, np.float32), Program(transport, route, None, 64, "float32")
    job, recorder = Job("measuring", {}, NO_FEEDBACK, seed=0, step=0), Recorder()
    several = 16

    def run() -> None:
        interleave(program.segment(0, tiny, job, recorder) for _ in range(several))

    run()
    collective = _median_seconds(run) / several
    source, target = np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    copying = _median_seconds(lambda: device.copy(target, source)) / source.size
    return int(floats(transport, collective / (2 * copying)).max())


def _median_seconds(act: Callable[[], None], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]
