"""Measures what of the overlap that timelines expect comes true when gradients are pushed as they come.

A step that computes and pushes takes turns with one that computes as much and hands everything over at its end. By the
timeline the first is shorter by what it hides. Where ranks have no cores to spare for the thread that communicates it
hides less, computing gets slower beside it, and each push costs something: the share that is hidden, the slowdown and
that cost are what explains the differences of all steps best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from .collectives.agreement import floats
from .collectives.transport import Transport
from .planner.plan import defaults
from .planner.problem import evaluated
from .planner.profile import Profile
from .planner.trace import Trace, TracedTensor
from .types import Plan, Strategy

_PRODUCTS = 100
"""Matrix products by which their rate is measured."""

SHARES = np.linspace(0, 1, 101)
"""Hidden shares that are tried."""

Pass = Callable[[], list[float]]
"""Returns begin and end of a step that hands over at its end, and of one that pushes."""


@dataclass(frozen=True)
class Step:
    """``count`` tensors of ``size`` float32 elements, with so many seconds of computing shared out before them."""

    count: int
    size: int
    seconds: float

    def trace(self, pushed: bool) -> Trace:
        """The step as a planner sees it."""
        ready = [self.seconds * (k + 1) / self.count if pushed else self.seconds for k in range(self.count)]
        return Trace(tuple(TracedTensor(str(k), self.size, at) for k, at in enumerate(ready)))


@dataclass(frozen=True)
class Effects:
    """As ``Profile`` has them: a share from 0 to 1, a share of the backward pass, and seconds a push, not below 0."""

    hidden: float
    slowed: float
    pushed: float


STEPS = (Step(5, 1 << 15, 0.01), Step(10, 1 << 13, 0.02), Step(30, 1 << 11, 0.01), Step(30, 1 << 8, 0.005))


def measured(
    transport: Transport,
    usual: Sequence[Strategy],
    profile: Profile,
    open_session: Callable[..., AbstractContextManager[Any]],
    timed: Callable[[Sequence[Pass]], Sequence[np.ndarray]],
) -> Effects:
    """How pushing differs from what timelines expect. Collective.

    Args:
        usual: ways that tensors travel while this is measured; profile: what else is known of the cluster.
        timed: repeats passes, on all ranks at once; returns seconds of shape (repetitions, 2) for each.
    """
    layers, rows = _Layers(transport), []
    for strategy in usual:
        with open_session(plan=Plan(default=strategy), fuse_bytes=0) as session:
            found = timed([partial(_both, session, layers, transport.rank, step) for step in STEPS])
        for step, seconds in zip(STEPS, found):
            late, pushed = np.median(seconds, axis=0)
            beside = step.seconds * (1 - 1 / step.count)
            rows.append((_expected(strategy, step, profile), beside, step.count, pushed - late, late))
    return shared_out(np.array(rows))


class _Layers:
    """Matrix products as small layers make them, in the place of a backward pass. Collective.

    Each is one call that leaves the interpreter to other threads: how often they have to take turns decides how much
    two threads of one process slow each other down.
    """

    def __init__(self, transport: Transport) -> None:
        self._a, self._b = np.ones((128, 64), np.float32), np.ones((64, 256), np.float32)
        self._c = np.empty((128, 256), np.float32)
        rates = []
        for _ in range(5):
            floats(transport, 0.0)  # ranks begin together
            start = perf_counter()
            self._multiply(_PRODUCTS)
            rates.append(_PRODUCTS / (perf_counter() - start))
        self._rate = float(floats(transport, float(np.median(rates))).min())

    def last(self, seconds: float) -> None:
        """Compute for about so long, at least one product."""
        self._multiply(max(1, round(seconds * self._rate)))

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            np.matmul(self._a, self._b, out=self._c)


def _both(session: Any, layers: _Layers, rank: int, step: Step) -> list[float]:
    grads = {
        f"{step.count} of {step.size}: {k}": np.random.default_rng([rank, k]).standard_normal(step.size, np.float32)
        for k in range(step.count)
    }
    gap, marks = step.seconds / step.count, [perf_counter()]
    for _ in grads:
        layers.last(gap)
    session.sync(grads)
    marks += [perf_counter()] * 2
    for name, x in grads.items():
        layers.last(gap)
        session.push(name, x)
    session.wait_all()
    return [*marks, perf_counter()]


def _expected(strategy: Strategy, step: Step, profile: Profile) -> float:
    """Seconds that pushing saves by the timeline."""
    late, early = (_seconds(strategy, step.trace(pushed), profile) for pushed in (False, True))
    return late - early


def _seconds(strategy: Strategy, trace: Trace, profile: Profile) -> float:
    lanes, order = defaults(trace, profile)
    problem, choice = evaluated(Plan(default=strategy), trace, profile, lanes=lanes, order=order)
    return problem.seconds(choice)


def shared_out(rows: np.ndarray) -> Effects:
    """The effects that explain differences best.

    Args:
        rows: (what pushing saves by the timeline, seconds of computing after the first push, pushes, by how much
            pushing was longer, what errors are relative to).
    """
    saved, beside, count, longer, scale = rows.T
    a, best = np.stack([beside, count], axis=1) / scale[:, None], (np.inf, Effects(0.0, 0.0, 0.0))
    for share in SHARES:
        b = (longer + share * saved) / scale
        for chosen in ([], [0], [1], [0, 1]):
            found = np.zeros(2)
            found[chosen] = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
            left = float(np.sum((a @ found - b) ** 2))
            if np.all(found >= 0) and left < best[0]:
                best = left, Effects(float(share), float(found[0]), float(found[1]))
    return best[1]
