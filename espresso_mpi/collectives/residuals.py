"""The arithmetic of feedback: what is kept of a tensor from step to step, and how it enters the next encode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arrays import device
from ..compressors import Context
from .data import reduction
from .data.layout import Dense
from .job import Job
from .kept import Kept, place


@dataclass(frozen=True)
class Residuals:
    """What one run keeps of a tensor of ``n`` elements, by encode point and region."""

    job: Job
    n: int

    def prepare(self, point: int, x: Any, region: Dense) -> Any:
        """Make of a region what a compressor is to compress, in place, for it is written anew at the next decode.

        Args:
            x: the elements of the region.

        Returns:
            The residual that the compressor is to add; None where there is none.
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
        """What ``prepare``, which was called before, returned."""
        return self._kept(str(point), region, "residual", x) if self.job.feedback.kind == "plain" else None

    def sent(self, point: int, x: Any, region: Dense) -> Any:
        """What payloads have told the others of a region, to which the next is to be added; None: they tell it anew."""
        return self._kept(str(point), region, "sent", x) if self.job.feedback.kind == "ef21" else None

    def decoded(self, point: int, x: Any, region: Dense) -> None:
        """Add the decoded mean of what ranks sent, ``x``, to those before, where they sent differences; in place."""
        if self.job.feedback.kind == "ef21":
            mean = self._kept(f"{point}-decoded", region, "mean", x)
            reduction.blend(mean, 1.0, 1.0, x)
            device.copy(x, mean)

    def weigh(self, point: int, region: Dense, weight: float) -> None:
        """Note what a unit of the residual of a region adds to the mean."""
        self.job.weights[self.place(point, region.start, region.stop) + "residual"] = weight

    def place(self, point: int | str, start: int, stop: int) -> str:
        """What the keys of a region, or of a part of it, begin with."""
        return place(self.job.kept or self.job.name, self.n, str(point), start, stop)

    def _kept(self, point: str, region: Dense, name: str, like: Any) -> Any:
        """The array of a region, on the device of ``like``."""
        kept = Kept(self.job.memory, self.place(point, region.start, region.stop))
        return Context(state=kept).kept(name, region.size, like)
