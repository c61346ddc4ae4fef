"""Whether gradients travel during the backward pass: as told, or what is quicker in the first steps of a run."""

from __future__ import annotations

import statistics
import time
from typing import Literal

import numpy as np

from ..errors import ConfigError
from ..session import Session

_WARM = 4
"""Steps that are not measured: kernels are compiled, buffers grow."""

_EACH = 6
"""Steps of either kind that are compared, in turns: what disturbs one meets the other as well."""


class Overlap:
    """Decides for each step. The same on every rank.

    Attributes:
        now: whether gradients of this step travel during the backward pass.
    """

    def __init__(self, told: bool | Literal["auto"], session: Session) -> None:
        if told not in (True, False, "auto"):
            raise ConfigError(f"GradientSync: overlap={told!r}; expected True, False or 'auto'")
        self._session, self.now = session, bool(told)
        tries = told == "auto" and not session.planned  # a plan is made for pushes, or is being made of them
        self._seconds: dict[bool, list[float]] | None = {True: [], False: []} if tries else None
        self._steps, self._last = 0, 0.0

    def step_ended(self) -> None:
        """A step has ended on every rank; collective when the last one that is measured has."""
        if self._seconds is None:
            return
        self._steps += 1
        now, before = time.perf_counter(), self._last
        if self._steps > _WARM:
            self._seconds[self.now].append(now - before)
        self._last = now
        if self._steps < _WARM + 2 * _EACH:
            self.now = self._steps % 2 == 0
            return
        mine = np.array([statistics.median(self._seconds[way]) for way in (True, False)])
        self._session.allreduce(mine, op="sum", name="GradientSync.overlap")
        self.now, self._seconds = bool(mine[0] <= mine[1]), None
