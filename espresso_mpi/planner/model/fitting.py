"""Piecewise linear fits to measured times, in the least squares of relative errors, with as few knots as will do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

_LEAST_NOISE = 1e-3
"""Relative error that a median of times has at least, however small its spread: clocks change, neighbours come."""

_WORTH_OF_A_KNOT = 0.5
"""A further knot must lower the logarithm of the squared residual by this: the residual itself by 22 %."""


class Fit:
    """Piecewise linear fits to points (x [n], t [n]), x rising, t > 0."""

    def __init__(self, x: np.ndarray, t: np.ndarray) -> None:
        self.x, self.t = x, t

    def best(self, noise: float) -> tuple[np.ndarray, np.ndarray]:
        """Knots and values of the fit with the least score; ``noise``: what the times leave uncertain, relative."""
        least = max(_LEAST_NOISE, noise)
        return min(self.thinned(), key=lambda found: self.score(found[0], found[1], least))

    def thinned(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Knots and values of the fits with all sizes as knots, then ever fewer, down to a line."""
        knots = np.unique(self.x)
        yield knots, self.values(knots)
        while len(knots) > 2:
            fewer = [np.delete(knots, i) for i in range(1, len(knots) - 1)]
            knots, values = min(((k, self.values(k)) for k in fewer), key=lambda found: self.squares(*found))
            yield knots, values

    def values(self, knots: np.ndarray) -> np.ndarray:
        """Seconds at the knots, by least squares of relative errors among those that never fall."""
        ramps = [np.clip((self.x - a) / (b - a), 0, 1) for a, b in pairwise(knots)]
        columns = np.stack([np.ones_like(self.x), *ramps], axis=1) / self.t[:, None]
        return np.cumsum(_least_squares_from_zero(columns, np.ones_like(self.t)))

    def squares(self, knots: np.ndarray, values: np.ndarray) -> float:
        """Sum of the squared relative errors."""
        return float(np.sum((np.interp(self.x, knots, values) / self.t - 1) ** 2))

    def score(self, knots: np.ndarray, values: np.ndarray, noise: float) -> float:
        """What is least for the right number of knots: residual for the freedom that is left, noise, and each knot."""
        free = max(1, len(self.x) - len(knots))
        return math.log(self.squares(knots, values) / free + noise**2) + _WORTH_OF_A_KNOT * len(knots)


def _least_squares_from_zero(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |a·x - b|², by Lawson and Hanson's active sets (Solving Least Squares Problems, 23)."""
    x, used = np.zeros(a.shape[1]), np.zeros(a.shape[1], bool)
    for _ in range(3 * len(x) + 1):
        gain = np.where(used, -np.inf, a.T @ (b - a @ x))
        if gain.max() <= 1e-12 * np.abs(a.T @ b).max():
            break
        used[gain.argmax()] = True
        while True:
            wanted = np.zeros_like(x)
            wanted[used] = np.linalg.lstsq(a[:, used], b, rcond=None)[0]
            if wanted[used].min(initial=0.0) >= 0:
                break
            falling = used & (wanted < 0)
            steps = np.where(falling, x / np.where(falling, x - wanted, 1.0), np.inf)
            x = x + steps.min() * (wanted - x)
            used &= ~(falling & (steps == steps.min())) & ((x > 0) | ~falling)
            x[~used] = 0.0
        x = wanted
    return x
