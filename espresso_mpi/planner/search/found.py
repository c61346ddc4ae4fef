"""What a search is asked for, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Effort = Literal["quick", "normal", "thorough"]


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        choice: int64 (tensors,), options of the problem.
        seconds: its time of a step; bound: no choice takes less.
        claim: of what: of the ``choices`` of this problem, or also of all ``fusions`` of neighbours into buffers.
    """

    choice: np.ndarray
    seconds: float
    bound: float
    claim: Literal["choices", "fusions"] = "choices"

    @property
    def gap(self) -> float:
        """By how much the time may be above the least, relative to the bound."""
        return self.seconds / self.bound - 1 if self.bound > 0 else (0.0 if self.seconds <= 0 else float("inf"))
