"""Seconds as a function of a size, with the measured points that it was fitted to."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from espresso_mpi.errors import ConfigError
from espresso_mpi.files import schema
from espresso_mpi.files.schema import Count, Positive, Relative, Seconds

from .fitting import Fit

_STEEPEST = 1e6
"""Seconds a byte or element: 11 days. Steeper ones, times the largest size, could not be told from infinity."""

_FAR = 2.0**40
"""The second knot of ``Curve.line``: so far out that its value holds the slope to the last bit or two."""


class Sample(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One measured point.

    Attributes:
        size: bytes, or float32 elements for codecs; at least 0.
        seconds: median over the repetitions, above 0.
        spread: interquartile range over the median.
        repeats: how many repetitions.

    Raises:
        ConfigError: a value is out of its range.
    """

    size: Count
    seconds: Seconds
    spread: Relative
    repeats: Positive

    def __post_init__(self) -> None:
        schema.check(self, "sample")
        if not self.seconds:
            raise ConfigError("sample: seconds: got 0; expected more; time several calls together if one is too short")

    @property
    def uncertainty(self) -> float:
        """Relative error of the median, about: the spread of so many repetitions."""
        return self.spread / math.sqrt(self.repeats)


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of size: continuous, piecewise linear, never falling, never below 0.

    Between knots it is linear; above the last one it goes on with the last piece, below the first one with the first
    piece, at least 0. One knot is a constant. Size 0 costs the start-up, not nothing.

    Attributes:
        knots: rising sizes, at least one.
        values: seconds there, never falling, at least 0.
        residual: root mean square of the samples' relative deviations from the curve.
        samples: what it was fitted to.

    Raises:
        ConfigError: the knots do not rise, a value falls, is below 0 or not finite.
    """

    knots: tuple[Seconds, ...]
    values: tuple[Seconds, ...]
    residual: Relative = 0.0
    samples: tuple[Sample, ...] = ()

    def __post_init__(self) -> None:
        schema.check(self, "curve")
        if not self.knots or len(self.knots) != len(self.values):
            raise ConfigError(
                f"curve: got {len(self.knots)} knots and {len(self.values)} values; expected at least one, and as many "
                f"of both"
            )
        if any(b <= a for a, b in pairwise(self.knots)):
            raise ConfigError(f"curve: knots {self.knots}; expected sizes that rise; sort them, each once")
        if any(b < a for a, b in pairwise(self.values)):
            raise ConfigError(f"curve: values {self.values}; expected seconds that never fall with the size")
        if max(self.slopes) > _STEEPEST:
            raise ConfigError(
                f"curve: rises by {max(self.slopes):g} s per byte or element; expected at most {_STEEPEST:g}: are two "
                f"knots too near to each other, or sizes not in bytes?"
            )

    @cached_property
    def slopes(self) -> tuple[float, ...]:
        """Seconds a byte (or element) of each piece; of a single knot 0."""
        rises = [b - a for a, b in pairwise(self.values)]
        steps = [b - a for a, b in pairwise(self.knots)]
        return tuple(rise / step for rise, step in zip(rises, steps)) or (0.0,)

    def __call__(self, size: float) -> float:
        """Seconds for one size."""
        piece = min(max(bisect_right(self.knots, size) - 1, 0), len(self.slopes) - 1)
        return max(0.0, self.values[piece] + self.slopes[piece] * (size - self.knots[piece]))

    def many(self, sizes: np.ndarray) -> np.ndarray:
        """Seconds for an array of sizes of any shape: float64, the same bits as one call each."""
        sizes = np.asarray(sizes, np.float64)
        piece = np.clip(np.searchsorted(self.knots, sizes, "right") - 1, 0, len(self.slopes) - 1)
        knots, values, slopes = map(np.asarray, (self.knots, self.values, self.slopes))
        return np.maximum(0.0, values[piece] + slopes[piece] * (sizes - knots[piece]))

    @classmethod
    def line(cls, alpha: float, beta: float) -> Curve:
        """alpha + beta · size, seconds and seconds per byte (or element), both at least 0.

        Raises:
            ConfigError: one of them is negative or not finite.
        """
        alpha, beta = schema.convert([alpha, beta], tuple[Seconds, Seconds], "line")
        return cls((0.0, _FAR), (alpha, alpha + beta * _FAR)) if beta else cls((0.0,), (alpha,))

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> Curve:
        """The curve with few knots that is nearest to the samples, in the least squares of relative errors.

        Relative, because times range over five orders of magnitude. Knots are measured sizes. Beginning with all of
        them, the knot that is missed least is taken out, again and again; of these curves the one is taken whose
        residual no further knot would lower noticeably, beside what the samples' own medians leave uncertain.

        Raises:
            ConfigError: there are no samples.
        """
        if not samples:
            raise ConfigError("curve: got no samples; expected at least one measured point")
        ordered = sorted(samples, key=lambda s: s.size)
        fit = Fit(np.array([s.size for s in ordered], np.float64), np.array([s.seconds for s in ordered]))
        knots, values = fit.best(median(s.uncertainty for s in ordered))
        rough = cls(tuple(map(float, knots)), tuple(map(float, values)))
        deviation = rough.many(fit.x) / fit.t - 1
        return cls(rough.knots, rough.values, float(np.sqrt(np.mean(deviation**2))), tuple(ordered))

    @property
    def spread(self) -> float:
        """Median of the samples' spreads; 0 without samples."""
        return median(s.spread for s in self.samples)

    @property
    def uncertainty(self) -> float:
        """Relative error of a typical sample's median; 0 without samples."""
        return median(s.uncertainty for s in self.samples)

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON; a sample is [size, seconds, spread, repeats]."""
        plain: dict[str, Any] = schema.plain(self)
        return plain

    @classmethod
    def from_json(cls, data: Any) -> Curve:
        """What ``to_json`` made.

        Raises:
            ConfigError: it is not that.
        """
        found: Curve = schema.convert(data, cls, "curve")
        return found


ZERO = Curve((0.0,), (0.0,))
"""The cost of what need not be done."""


def median(values: Iterable[float]) -> float:
    """The median; 0 of nothing."""
    return float(np.median(found)) if (found := list(values)) else 0.0
