"""The working array of a bucket: filled from the caller's tensors, and copied back to them."""

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
from ..collectives.progress import interleave
from ..feedback import NO_FEEDBACK
from ..state.store import StateStore
from ..tracing.recording import Recorder
from ..types import Route
from .batches import Bucket
from .guard import Check
from .measured_limits import MeasuredLimits

_LARGEST_HALF = np.float32(65504)
_BEYOND_HALF = int(_LARGEST_HALF.view(np.uint32)) + 1
"""The bits of the least float32 that is clipped."""


@dataclass
class Buffer:
    """The flat working array of a bucket: the caller's own, or a copy of several arrays or in float32.

    Attributes:
        bucket, arrays: the tensors, and flat arrays over the caller's memory, in the same order.
        skip: which of them are skipped.
        transport: lends scratch memory.
        store: the state; what float16 cannot hold becomes a pending residual there.
        tally: counts "saturated": values that were clipped to the largest float16.
        checks: in debug mode: verify that the caller's memory has not changed.
        shift: the array is divided by two to this power while it travels.
    """

    bucket: Bucket
    arrays: Sequence[Any]
    skip: Sequence[bool]
    transport: Transport
    store: StateStore
    tally: Counter[str]
    checks: Sequence[Check] = ()
    shift: int = 0
    x: Any = None
    workspace: Any = None
    begun: bool = False

    def fill(self) -> None:
        """Fill the array. In debug mode it is always a copy, so that the caller's memory can be checked."""
        for check in self.checks:
            check("before it was read")
        first, bucket = self.arrays[0], self.bucket
        narrow = bucket.compressor is not None and bucket.dtype != "float32"
        if len(self.arrays) == 1 and not narrow and not self.checks:
            self.x = first
        else:
            self.workspace = self.transport.borrow(self._kind)
            dtype = np.float32 if narrow else first.dtype
            self.x = self.workspace.array("fused", bucket.size, dtype, device.device_of(first))
            if narrow or any(self.skip):
                self._fill_one_by_one(narrow)
            else:
                device.join(self.x, self.arrays)
        if self.store.any_pending:
            self._add_pending_residuals()
        if self.shift:
            ranges.scale(self.x, -self.shift, bucket.dtype)

    def _fill_one_by_one(self, narrow: bool) -> None:
        """Fill the array if tensors are converted, or some are skipped: their part is zero."""
        for (part, array), skipped in zip(self._pieces(), self.skip):
            if skipped:
                device.copy(part, device.zeros(part.size, part.dtype, device.device_of(part)))
            elif narrow:
                reduction.convert(part, array, self.bucket.dtype)
            else:
                device.copy(part, array)

    def _add_pending_residuals(self) -> None:
        """Add pending residuals to the tensors, or to the residual of the bucket if its method has a momentum as well.

        Members of a group may have pending residuals of their own, from before they were compressed as one.
        """
        bucket = self.bucket
        if bucket.compressor is None:
            for name, first, residual in self._pending_of_members():
                self._add(name, self.x[first : first + residual.size], residual, bucket.dtype)
            return
        extra = self._pending_of_group() if len(self.arrays) > 1 else None  # a single tensor has the bucket's name
        split = bucket.feedback.kind == "plain" and bucket.compressor.averages_over_time
        rest = self.store.begin(bucket.store_name, bucket.size, split, extra)
        self.begun = True
        if rest is not None:
            self._add(bucket.store_name, self.x, rest, "float32")

    def _pending_of_group(self) -> np.ndarray | None:
        """The pending residuals of all members, side by side; None if there are none."""
        whole = None
        for _, first, residual in self._pending_of_members():
            whole = np.zeros(self.bucket.size, np.float32) if whole is None else whole
            whole[first : first + residual.size] = residual
        return whole

    def _pending_of_members(self) -> list[tuple[str, int, np.ndarray]]:
        """(name, first element in the buffer, pending residual) of the members that are not skipped."""
        found, first = [], 0
        for item, skipped in zip(self.bucket.members, self.skip):
            name, n = item.spec.name, item.spec.size
            pending = self.store.take_pending(name, n) if not skipped and self.store.has_pending(name, n) else {}
            if "residual" in pending:
                found.append((name, first, pending["residual"]))
            first += n
        return found

    def empty(self) -> None:
        """Copy the result to the caller's arrays."""
        if self.begun:
            self.store.end(self.bucket.store_name, self.bucket.size)
        for check in self.checks:
            check("before its mean was written")
        if self.shift:
            ranges.scale(self.x, self.shift, self.bucket.dtype)
        if self.workspace is None:
            return
        if self.bucket.dtype == "float16" and self.x.dtype == np.float32:
            self._keep_clipped(self.bucket.store_name, self.x, self.bucket.feedback.kind == "plain")
        if self.bucket.uniform and self.x.dtype == self.arrays[0].dtype and not any(self.skip):
            device.part(self.x, self.arrays)
        else:
            self._empty_one_by_one()
        self.transport.give_back(self.workspace, self._kind)

    @property
    def _kind(self) -> tuple[str, int]:
        """Copies of like sizes share scratch memory: many are in flight, and none may grow to the largest of all."""
        return "copy", self.bucket.size.bit_length()

    def _empty_one_by_one(self) -> None:
        """Copy the result back if tensors are converted, or some are skipped."""
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

    def _add(self, name: str, x: Any, residual: Any, dtype: str) -> None:
        """``x += residual`` (float32) for a part of any element type; what float16 cannot hold stays pending."""
        if dtype == "float64":
            _add_to_doubles(x, residual)
            return
        where = device.device_of(x)
        here = device.empty(residual.size, np.float32, where)
        device.copy(here, residual)
        if dtype == "float32":
            reduction.blend(x, 1.0, 1.0, here)
            return
        wide = device.empty(x.size, np.float32, where)
        reduction.convert(wide, x, dtype)
        reduction.blend(wide, 1.0, 1.0, here)
        if dtype == "float16":
            self._keep_clipped(name, wide, True)
        reduction.convert(x, wide, dtype)

    def _keep_clipped(self, name: str, wide: Any, kept: bool) -> None:
        """Count the values that float16 cannot hold; ``kept``: the clipped parts become a pending residual."""
        cut = reduction.count_from(wide, "float32", _BEYOND_HALF)
        self.tally["saturated"] += cut
        if cut and kept:
            values = np.empty(wide.size, np.float32)
            device.copy(values, wide)
            self.store.add_pending_residual(name, values - np.clip(values, -_LARGEST_HALF, _LARGEST_HALF))


def _add_to_doubles(x: Any, residual: Any) -> None:
    """``x += residual`` for float64, of which float32 holds neither all digits nor all magnitudes.

    Rare, therefore simple: a GPU's values pass through the host.
    """
    here = np.empty(x.size, np.float64)
    device.copy(here, x)
    here += residual
    device.copy(x, here)


def measured_limit(transport: Transport, route: Route) -> int:
    """The number of bytes whose copies to and from a buffer take as long as an empty collective. Collective.

    Measured once for a transport and a route, however many engines use them: plan="auto" opens many.
    """
    return _LIMITS.of(transport, route, lambda: _measured(transport, route))


_LIMITS = MeasuredLimits("dense tensors below %d bytes share a buffer (measured)")


def _measured(transport: Transport, route: Route) -> int:
    """Several collectives overlap in the measurement, as those of the tensors of a model do."""
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
