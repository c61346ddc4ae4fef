"""The working array of half a route, or of compressed copies: an array is read, and another one gets the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import device
from ..collectives import ranges
from ..collectives.copies import Copies
from ..collectives.data import reduction
from ..collectives.data.layout import Dense
from ..collectives.executor import Program
from .batches import Bucket
from .calls import PendingCall
from .fusion import Buffer


def buffer_of(program: Program, owners: Sequence[PendingCall], bucket: Bucket, *more: Any) -> Buffer:
    """The buffer of a bucket; ``more``: as for ``Buffer``."""
    if bucket.half is None:
        return Buffer(bucket, *more)
    buffer = (CopyBuffer if isinstance(bucket.half, Copies) else PartBuffer)(bucket, *more)
    buffer.out, buffer.owned = owners[0].gradients[0].array, program.owned
    return buffer


@dataclass
class PartBuffer(Buffer):
    """The parts of all ranks, in the order in which the route deals them out.

    Attributes:
        out: receives the result; flat.
        owned: by rank, where its part lies.
    """

    out: Any = None
    owned: Sequence[Dense] = ()

    def fill(self) -> None:
        """Copy what is read: the parts of all ranks, or this rank's own."""
        for check in self.checks:
            check("before it was read")
        (source,) = self.arrays
        self.workspace = self.transport.borrow()
        dtype = np.float32 if self.bucket.compressor is not None else source.dtype
        self.x = self.workspace.array("fused", self.bucket.size, dtype, device.device_of(source))
        for mine, part in self._read(source):
            self._copy(mine, part)
        if self.store.any_pending:
            self._add_pending_residuals()
        if self.shift:
            ranges.scale(self.x, -self.shift, self.bucket.dtype)

    def empty(self) -> None:
        """Copy the result: this rank's part, or the parts of all ranks."""
        if self.begun:
            self.store.end(self.bucket.store_name, self.bucket.size)
        for check in self.checks:
            check("while it was read")
        for mine, part in self._written():
            if self.shift:
                ranges.scale(mine, self.shift, self.bucket.dtype)
            if self.bucket.dtype == "float16" and mine.dtype == np.float32:
                self._keep_clipped(self.bucket.store_name, mine, False)
            self._copy(part, mine)
        self.out = None
        self.transport.give_back(self.workspace)

    def _read(self, source: Any) -> list[tuple[Any, Any]]:
        """(place in the working array, place in the array that is read) of all that is read."""
        return self._pairs(source, self.bucket.half == "reduce_scatter")

    def _written(self) -> list[tuple[Any, Any]]:
        """The same of the array that gets the result."""
        return self._pairs(self.out, self.bucket.half == "allgather")

    def _pairs(self, array: Any, whole: bool) -> list[tuple[Any, Any]]:
        """(place in the working array, place in ``array``) of every part, or of this rank's alone."""
        ranks = range(len(self.owned)) if whole else [self.transport.rank]
        each = array.size // len(ranks)
        regions = [self.owned[rank] for rank in ranks]
        if all(region.start == number * each for number, region in enumerate(regions)) and whole:
            return [(self.x, array)]
        return [
            (self.x[region.start : region.stop], array[number * each : (number + 1) * each])
            for number, region in enumerate(regions)
        ]

    def _copy(self, target: Any, source: Any) -> None:
        if target.dtype == source.dtype:
            device.copy(target, source)
        else:
            reduction.convert(target, source, self.bucket.dtype)


class CopyBuffer(PartBuffer):
    """What is encoded for others, and then what was decoded."""

    def _read(self, source: Any) -> list[tuple[Any, Any]]:
        n = sum(self._copies.given)
        return [(self.x[:n], source[:n])] if n else []

    def _written(self) -> list[tuple[Any, Any]]:
        n = sum(self._copies.taken)
        return [(self.x[:n], self.out)] if n else []

    @property
    def _copies(self) -> Copies:
        assert isinstance(self.bucket.half, Copies)
        return self.bucket.half
