"""Costs that explain seconds best: least squares where nothing is below 0."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from ...planner.model.curve import Curve, Sample

SHARES = np.linspace(0, 1, 101)
"""Hidden shares that are tried."""


@dataclass(frozen=True)
class Effects:
    """As ``Profile`` has them: a share from 0 to 1, a share of the backward pass, and seconds a push, not below 0."""

    hidden: float
    slowed: float
    pushed: float


def call_costs(rows: np.ndarray) -> tuple[tuple[float, float, float], float]:
    """The call, tensor and byte, none below 0, that explain calls best, and the sum of squares of relative errors.

    Args:
        rows: (tensors, bytes, seconds to be explained, what errors are relative to).
    """
    a = np.stack([np.ones(len(rows)), rows[:, 0], rows[:, 1]], axis=1) / rows[:, 3:]
    (call, tensor, byte), least = nonnegative(a, rows[:, 2] / rows[:, 3])
    return (float(call), float(tensor), float(byte)), least


def step_costs(rows: np.ndarray) -> tuple[float, float]:
    """What a call and what each of its tensors costs beyond its operations, none below 0.

    Args:
        rows: (tensors, seconds to be explained, what errors are relative to).
    """
    count, longer, scale = rows.T
    found, _ = nonnegative(np.stack([np.ones(len(rows)), count], axis=1) / scale[:, None], longer / scale)
    return float(found[0]), float(found[1])


def effects_of(rows: np.ndarray) -> Effects:
    """The effects that explain differences best.

    Args:
        rows: (what pushing saves by the timeline, seconds of computing after the first push, pushes, by how much
            pushing was longer, what errors are relative to).
    """
    saved, beside, count, longer, scale = rows.T
    a, best = np.stack([beside, count], axis=1) / scale[:, None], (np.inf, Effects(0.0, 0.0, 0.0))
    for share in SHARES:
        found, left = nonnegative(a, (longer + share * saved) / scale)
        if left < best[0]:
            best = left, Effects(float(share), float(found[0]), float(found[1]))
    return best[1]


def steeper(curve: Curve, slope: float) -> Curve:
    """A curve to which ``slope`` seconds are added for each byte."""
    values = tuple(value + slope * knot for knot, value in zip(curve.knots, curve.values))
    samples = tuple(Sample(s.size, s.seconds + slope * s.size, s.spread, s.repeats) for s in curve.samples)
    return replace(curve, values=values, samples=samples)


def nonnegative(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, float]:
    """The x, none below 0, with the least sum of squares of a @ x - b; and that sum."""
    best, least = np.zeros(a.shape[1]), float(b @ b)
    columns = range(a.shape[1])
    for chosen in (list(c) for size in columns for c in itertools.combinations(columns, size + 1)):
        found = np.zeros(a.shape[1])
        found[chosen] = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
        left = float(np.sum((a @ found - b) ** 2))
        if np.all(found >= 0) and left < least:
            best, least = found, left
    return best, least
