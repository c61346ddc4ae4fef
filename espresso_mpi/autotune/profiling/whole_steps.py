"""Measures whole steps of training: what they take beyond what timelines expect.

A call costs more after the computing of a step than in a row of calls: ranks that share cores do not end computing at
the same time, caches are cold, and the session follows a plan's schedule. The time beyond the operations of the tensors
is divided between the call and each tensor.

Two kinds of steps take turns. One pushes while it computes; the other computes as much and synchronises everything at
its end. By the timeline the first is shorter by what it hides. If ranks have no spare cores for the thread that
communicates, the first hides less, its computing gets slower, and each push costs something. The hidden share, the
slowdown and the cost of a push are those that explain the measured differences best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from ...collectives.messages.agreement import floats
from ...collectives.messages.transport import Transport
from ...errors import ConfigError
from ...planner.model.problem import evaluated
from ...planner.model.profile import Profile
from ...planner.model.timetables import with_schedule
from ...planner.model.workload import Workload, WorkloadTensor
from ...planner.plan import defaults
from ...types import Plan, Strategy
from .fits import Effects, effects_of, step_costs
from .repeating import Repeating

_PRODUCTS = 100
"""Matrix products by which their rate is measured."""

_ROWS = 4
"""Steps by some strategy from which effects are worked out, at least: there are three, and noise."""

_PASSES = 6
"""Passes of a step for which there must be time: one that warms up and two that count, each as long as two."""


@dataclass(frozen=True)
class SyntheticStep:
    """``count`` tensors of ``size`` float32 elements, with so many seconds of computing shared out before them."""

    count: int
    size: int
    seconds: float

    def workload(self, pushed: bool) -> Workload:
        """The step as a planner sees it."""
        ready = [self.seconds * (k + 1) / self.count if pushed else self.seconds for k in range(self.count)]
        return Workload(tuple(WorkloadTensor(name, self.size, at) for name, at in zip(self.names, ready)))

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return 4 * self.count * self.size

    @property
    def names(self) -> list[str]:
        """Of its tensors."""
        return [f"{self.count} of {self.size}: {k}" for k in range(self.count)]


STEPS = tuple(
    SyntheticStep(*one) for one in ((5, 1 << 15, 0.01), (10, 1 << 13, 0.02), (30, 1 << 11, 0.01), (30, 1 << 8, 0.005))
)


def measured(
    repeating: Repeating,
    usual: Sequence[Strategy],
    profile: Profile,
    open_session: Callable[..., AbstractContextManager[Any]],
    pushes: bool,
    reach: float,
) -> Profile:
    """The profile with what whole steps take beyond what timelines expect. Collective.

    Args:
        usual: strategies of the tensors while this is measured; profile: what else is known of the cluster.
        pushes: whether steps that push are measured as well, where this MPI allows it.
        reach: bytes that a step sends at most, if that leaves some.
    """
    transport = repeating.transport
    try:
        transport.require_threads()
    except ConfigError:
        pushes = False
    repeating.allow("steps")
    kinds = (False, True) if pushes else (False,)
    steps = [step for step in STEPS if step.nbytes <= max(reach, STEPS[-2].nbytes)]
    if not repeating.time_for(_PASSES * len(kinds) * sum(step.seconds for step in steps)):
        repeating.left_out.append("whole steps")
        return profile
    layers, late, early = _SyntheticLayers(transport), [], []
    for strategy in repeating.while_in_time(usual, "steps by {}"):
        with ExitStack() as stack:
            plans = [[_planned(strategy, step.workload(pushed), profile) for pushed in kinds] for step in steps]
            sessions = [[stack.enter_context(open_session(plan=plan)) for plan, _ in both] for both in plans]
            found = repeating.interleaved([partial(_steps, both, layers, transport.rank, step)
                           for both, step in zip(sessions, steps)])  # fmt: skip
        for step, both, seconds in zip(steps, plans, found):
            computing, after, *pushed = np.median(seconds, axis=0)
            at_end = both[0][1]
            known = at_end - step.seconds - profile.call - step.count * profile.tensor
            late.append((step.count, after - known, after))
            if pushes:
                whole, most = computing + after, step.seconds * (1 - 1 / step.count)
                early.append((at_end - both[1][1], most, step.count, pushed[0] - whole, whole))
    if len(late) < _ROWS:
        repeating.left_out.append("effects of whole steps")
        return profile
    call, tensor = step_costs(np.array(late))
    effects = effects_of(np.array(early)) if pushes else Effects(profile.hidden, profile.slowed, profile.pushed)
    return replace(profile, call=call, tensor=tensor, **vars(effects))


class _SyntheticLayers:
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

    def run(self, seconds: float) -> None:
        """Compute for about so long, at least one product."""
        self._multiply(max(1, round(seconds * self._rate)))

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            np.matmul(self._a, self._b, out=self._c)


def _steps(sessions: Sequence[Any], layers: _SyntheticLayers, rank: int, step: SyntheticStep) -> list[float]:
    """Begin and end of computing, of the call after it, and of a step that pushes, if there is a second session."""
    late, *early = sessions
    grads = {
        name: np.random.default_rng([rank, k]).standard_normal(step.size, np.float32)
        for k, name in enumerate(step.names)
    }
    gap, marks = step.seconds / step.count, [perf_counter()]
    for _ in grads:
        layers.run(gap)
    marks += [perf_counter()] * 2
    late.sync(grads)
    marks.append(perf_counter())
    for session in early:
        marks.append(marks[-1])
        for name, x in grads.items():
            layers.run(gap)
            session.push(name, x)
        session.wait_all()
        marks.append(perf_counter())
    return marks


def _planned(strategy: Strategy, workload: Workload, profile: Profile) -> tuple[Plan, float]:
    """A plan by which every tensor travels by itself, and the seconds of its step by the timeline."""
    lanes, order = defaults(workload, profile)
    plan = with_schedule(Plan(default=strategy, fuse_bytes=0), workload, profile, lanes, order)
    problem, choice = evaluated(plan, workload, profile, lanes=lanes, order=order)
    return plan, problem.seconds(choice)
