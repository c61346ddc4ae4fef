"""The arithmetic of error feedback: what is kept of a tensor, and how it enters the next encode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arrays import device
from ..compressors import Context
from .data import reduction
from .data.layout import Dense
from .job import Job
from .store_keys import OWN, StoreView, key_prefix


@dataclass(frozen=True)
class Residuals:
    """The feedback state of a tensor of ``n`` elements, by encode point and region."""

    job: Job
    n: int

    def prepare(self, point: int, x: Any, region: Dense) -> Any:
        """Turn a region, in place, into the input of the compressor; the next decode overwrites it.

        Args:
            x: the elements of the region.

        Returns:
            The residual that the compressor adds, or None.
        """
        feedback = self.job.feedback
        if feedback.momentum != 1 and point == 0:
            average = self._kept(str(point), region, "average", x)
            reduction.blend(average, 1 - feedback.momentum, feedback.momentum, x)
            device.copy(x, average)
        if feedback.kind == "ef21":
            reduction.blend(x, 1.0, -1.0, self._kept(str(point), region, "sent", x))
        residual = self.prepared(point, x, region)
        if feedback.decay != 1:
            reduction.blend(residual, feedback.decay, 0.0, residual)
        return residual

    def prepared(self, point: int, x: Any, region: Dense) -> Any:
        """The residual that an earlier ``prepare`` returned."""
        return self._kept(str(point), region, "residual", x) if self.job.feedback.kind == "plain" else None

    def sent(self, point: int, x: Any, region: Dense) -> Any:
        """For ef21: the sum of what was sent of a region so far; the next payload is added to it. Else None."""
        return self._kept(str(point), region, "sent", x) if self.job.feedback.kind == "ef21" else None

    def decoded(self, point: int, x: Any, region: Dense) -> None:
        """For ef21: add the decoded mean of the differences, ``x``, to the mean so far, and write it to ``x``."""
        if self.job.feedback.kind == "ef21":
            mean = self._kept(f"{point}-decoded", region, "mean", x)
            reduction.blend(mean, 1.0, 1.0, x)
            device.copy(x, mean)

    def own(self, point: int, start: int, stop: int) -> StoreView:
        """What the compressor keeps of a part."""
        return StoreView(self.job.store, self.prefix(point, start, stop) + OWN)

    def weigh(self, point: int, region: Dense, weight: float) -> None:
        """Record the weight of the residual of a region in the mean."""
        self.job.weights[self.prefix(point, region.start, region.stop) + "residual"] = weight

    def prefix(self, point: int | str, start: int, stop: int) -> str:
        """The key prefix of a region, or of a part of it."""
        return key_prefix(self.job.store_name or self.job.name, self.n, str(point), start, stop)

    def _kept(self, point: str, region: Dense, name: str, like: Any) -> Any:
        """The array of a region, on the device of ``like``."""
        kept = StoreView(self.job.store, self.prefix(point, region.start, region.stop))
        return Context(state=kept).kept(name, region.size, like)
