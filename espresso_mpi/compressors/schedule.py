"""A parameter that changes with the training step: the warm-up of sparse and low-rank methods."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

_SPEC = re.compile(r"(?P<start>[^~@/]+)~(?P<end>[^~@/]+)@(?P<steps>\d+)(?:/(?P<stages>\d+))?")


@dataclass(frozen=True)
class ParameterSchedule:
    """From ``start`` to ``end`` in equal factors: ``stages`` constant stretches over ``steps`` steps, then ``end``.

    Written ``start~end@steps/stages``. ``0.25~0.001@400`` is DGC's warm-up (Lin et al., 2018): 25, 6.3, 1.6, 0.4 % for
    a hundred steps each, then 0.1 %. Whole-number parameters are rounded.

    Raises:
        ConfigError: a value that is not above 0, a factor beyond float64, or no steps or stages.

    Example:
        >>> schedule = espresso_mpi.compressors.ParameterSchedule(0.25, 0.01, steps=400)
        >>> str(espresso_mpi.compressors.get("topk:ratio=0.25~0.01@400").ratio), schedule.at(0), schedule.at(400)
        ('0.25~0.01@400/4', 0.25, 0.01)
    """

    start: float
    end: float
    steps: int
    stages: int = 4

    def __post_init__(self) -> None:
        factor = self.end / self.start if self.start > 0 else math.inf
        if not (0 < factor < math.inf and self.steps >= 1 and 1 <= self.stages <= self.steps):
            raise ConfigError(
                f"schedule {self}: expected values above 0 and 1 <= stages <= steps, as in 0.25~0.001@400/4"
            )

    def at(self, step: int) -> float | int:
        """The value at a training step, counted from 0."""
        stage = min(step * self.stages // self.steps, self.stages)
        value = self.start * (self.end / self.start) ** (stage / self.stages) if stage < self.stages else self.end
        return round(value) if isinstance(self.end, int) else value

    def changes(self) -> list[int]:
        """The steps in which the value changes, the first one included."""
        return [-(-stage * self.steps // self.stages) for stage in range(self.stages + 1)]

    @classmethod
    def parse(cls, text: str, kind: type) -> ParameterSchedule | None:
        """Read a spec whose values are of ``kind``; None if the text is no schedule."""
        match = _SPEC.fullmatch(text)
        if match is None:
            return None
        start, end = kind(match["start"]), kind(match["end"])
        return cls(start, end, int(match["steps"]), int(match["stages"] or min(4, int(match["steps"]) or 1)))

    def __str__(self) -> str:
        return f"{self.start}~{self.end}@{self.steps}/{self.stages}"


def settled(value: Any, step: int | None = None) -> Any:
    """A parameter's value at a step, at the end of its schedule if ``step`` is None; other values as they are."""
    if not isinstance(value, ParameterSchedule):
        return value
    return value.end if step is None else value.at(step)


def settled_power(value: Any, step: int | None) -> int:
    """A power of two at a step; between the ends of a schedule the one below."""
    return 1 << (int(settled(value, step)).bit_length() - 1)
