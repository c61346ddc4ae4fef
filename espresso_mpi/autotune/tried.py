"""Plans that were tried, with the times of their steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..types import Plan

BEHIND = 1.3
"""A plan is given up when its steps are this many times the shortest."""

COUNTED = 2
"""Steps of a turn whose times count. The step before them does not count: it prepares what the plan needs."""

ENOUGH = 2 * COUNTED
"""Steps that count, two turns, after which plans can be told apart."""


@dataclass(frozen=True)
class Trial:
    """A plan with the seconds of its steps, by which plans are compared. Without steps, they are infinite.

    Attributes:
        seconds: their median; of one turn the least, because other work on a node makes steps longer. A lower quantile
            of many steps would suffer less from that. But steps of plans that send during the backward pass vary more
            by themselves, and it would prefer these plans also where their steps usually take longer.
        uncertain: how far the median may be from that of many steps.
        steps: how many of them there were.
    """

    plan: Plan
    seconds: float
    uncertain: float
    steps: int


@dataclass
class Tried:
    """A plan with the times of its steps.

    Attributes:
        times: of those that count; first: of the first steps of turns, which do not.
        given: how many of ``first`` and of ``times`` came before the trials.
        early: how many of ``times`` count only while there are no later ones.
        out: it was behind when the finalists were chosen. They have more steps; the least of its few says little.
        excused: its first step was far too long, but preparing may explain it.
        refused: it cannot be followed.
    """

    plan: Plan
    times: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    given: tuple[int, int] = (0, 0)
    early: int = 0
    out: bool = False
    excused: bool = False
    refused: bool = False

    @classmethod
    def before(cls, plan: Plan, first: Sequence[float], times: Sequence[float]) -> Tried:
        """A plan that steps before the trials followed."""
        return cls(plan, list(times), list(first), (len(first), len(times)))

    def cost(self, step: float) -> float:
        """Seconds that its steps in the trials have cost beyond others that take ``step`` seconds.

        One that other work made longer is taken for one like the least of them: it would have met another plan.
        """
        each = max(0.0, min(self.times, default=step) - step)
        first, times = self.given
        preparing = sum(max(0.0, seconds - step) for seconds in self.first[first:])
        return each * (len(self.times) - times) + preparing

    @property
    def preparing(self) -> float:
        """Seconds by which the first steps of turns took longer, at most; it needs one, and a step that counts."""
        return max(self.first) - self.seconds

    def result(self) -> Trial:
        """The plan with the seconds by which it is compared."""
        if not self.times:
            return Trial(self.plan, math.inf, math.inf, 0)
        times = self.times[self.early :] or self.times
        low, middle, high = np.percentile(times, [25, 50, 75])
        usual = middle if len(times) > COUNTED else min(times)
        return Trial(self.plan, float(usual), float(high - low) / math.sqrt(len(times)), len(times))

    @property
    def seconds(self) -> float:
        """Those of ``result``."""
        return self.result().seconds

    @property
    def least(self) -> float:
        """Of all its steps, for comparisons while there are few."""
        return min([*self.first, *self.times], default=math.inf)


def scale(tried: Sequence[Tried], plan: Plan, seconds: float) -> None:
    """Take the times that are known for what they would be now, if a step by this plan takes so many seconds."""
    share = seconds / next((one.seconds for one in tried if one.plan is plan and one.times), seconds)
    for one in tried:
        one.times = [each * share for each in one.times]
        one.first = [each * share for each in one.first]


def are_twins(one: Plan, other: Plan) -> bool:
    """Whether two plans differ only in when pushes begin to travel."""
    return one.held != other.held and replace(one, held=other.held).digest == other.digest


def by_its_twin(one: Tried, tried: Sequence[Tried]) -> float:
    """Seconds that a plan may take by its twin, less what this change has gained at most between other twins.

    Traffic beside the backward pass can double the time of every step where ranks have no free core. 0: it has no twin
    that was tried.
    """
    known = [other for other in tried if other.times]
    slowest = max((other.least for other in known if are_twins(one.plan, other.plan)), default=0.0)
    pairs = ((like, other) for like in known for other in known if are_twins(like.plan, other.plan))
    gained = max((other.least - like.least for like, other in pairs if like.plan.held == one.plan.held), default=0.0)
    return slowest - max(0.0, gained)
