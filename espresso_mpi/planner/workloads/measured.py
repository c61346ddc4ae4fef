"""Modelled times of a step, and how they are brought to the measured length of a backward pass.

The *backward pass* is the time from the moment when the first gradient is ready to the moment when the last one is:
ready times tell that much. What is computed before the first gradient (the forward pass, the loss, the last
layer's gradient) is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Times:
    """Seconds that a step computes.

    Attributes:
        forward: before the backward pass begins.
        gaps: from there to the first gradient, then from each moment at which gradients are ready to the next.
    """

    forward: float
    gaps: tuple[float, ...]

    @property
    def backward(self) -> float:
        """Seconds from the first gradient to the last."""
        return sum(self.gaps[1:])

    @property
    def ready(self) -> tuple[float, ...]:
        """Seconds from the begin of the step to each moment at which gradients are ready."""
        return tuple(accumulate(self.gaps, initial=self.forward))[1:]

    def __mul__(self, factor: float) -> Times:
        return Times(self.forward * factor, tuple(gap * factor for gap in self.gaps))


@dataclass(frozen=True)
class Measured:
    """The length of a backward pass that was measured. How it is spread over the tensors is not known: it is modelled.

    Attributes:
        backward: seconds from the first gradient to the last.
        source: who measured it.
        gap: seconds between two consecutive gradients, where that one is known; 0 where none is.
    """

    backward: float
    source: str
    gap: float = 0.0

    def scaled(self, times: Times, usual: Times) -> Times:
        """Modelled times of any batch, by the factors which give the modelled times ``usual`` the measured length.

        All factors are the same unless a gap is known. That one then is the longest modelled gap, and the others share
        what it leaves; what comes before the first gradient goes by the whole.
        """
        whole = self.backward / usual.backward
        factors = [whole] * len(usual.gaps)
        if self.gap:
            longest = max(range(1, len(usual.gaps)), key=usual.gaps.__getitem__)
            others = (self.backward - self.gap) / (usual.backward - usual.gaps[longest])
            factors[1:] = [others] * (len(factors) - 1)
            factors[longest] = self.gap / usual.gaps[longest]
        return Times(times.forward * whole, tuple(gap * factor for gap, factor in zip(times.gaps, factors)))
