"""When a session with ``plan="auto"`` plans: after the first steps, and anew when steps take much longer or shorter."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..collectives.messages.transport import Transport
from ..errors import ConfigError, PlanError
from ..options import Options, Tuning
from ..types import Plan
from .clock import StepClock

_LOG = logging.getLogger("espresso_mpi")


@dataclass(frozen=True)
class Tuned:
    """When a session planned last, in steps, and how long a step should take since."""

    at: int
    expected: float | None


class Tuner:
    """Watches steps, and plans.

    Args:
        together: does something, given its name, on all ranks when nothing else is under way.
        options: those of now, the plan among them; adopt: goes on by a plan, on all ranks.

    Attributes:
        tuned: the last plan; None before there is any.
    """

    def __init__(
        self, transport: Transport, tuning: Tuning, together: Callable[[str, Callable[[], Any]], Any],
        options: Callable[[], Options], adopt: Callable[[Plan], None],
    ) -> None:  # fmt: skip
        self._transport, self._tuning = transport, tuning
        self._together, self._options, self._adopt = together, options, adopt
        self.tuned: Tuned | None = None
        if transport.rank == 0 and tuning.doubtful:
            _LOG.warning(
                "plan='auto' chooses by speed, and may use %s: not known to train like fp32 under AdamW (onebit, topk "
                "and powersgd did not); compare losses first, see docs/compressors.md",
                ", ".join(tuning.doubtful),
            )

    def step_ended(self, clock: StepClock) -> None:
        """Plan when enough steps were watched; compare step times with the plan's from then on."""
        tuning, tuned = self._tuning, self.tuned
        try:
            if tuned is None:
                if clock.count == max(1, tuning.skip) + tuning.steps:
                    self._together("plan", lambda: self._plan(clock))
            elif (clock.count - tuned.at) % tuning.check == 0:
                self._together("compare", lambda: self._compare(clock, tuned))
        except (ConfigError, PlanError) as error:  # on all ranks alike
            if self._transport.rank == 0:
                _LOG.warning("%s; training goes on as before", error)

    def _plan(self, clock: StepClock) -> None:
        """Make a plan and go on by it. Collective."""
        from . import autoplan

        self.tuned = Tuned(clock.count, None)  # also if it fails: training goes on as it did
        options, tuning = self._options(), self._tuning
        made = autoplan.make(self._transport, options, tuning, list(clock.steps)[-tuning.steps :])
        autoplan.report(self._transport, made)
        again = options.plan is not None and options.plan.digest == made.plan.digest
        expected = autoplan.slowest(self._transport, _median_seconds(clock)) if again else made.seconds
        self.tuned = Tuned(clock.count, expected)
        if not again:
            self._adopt(made.plan)
        clock.steps.clear()

    def _compare(self, clock: StepClock, tuned: Tuned) -> None:
        """Plan anew if steps take much longer, or shorter, than the plan said. Collective."""
        from . import autoplan

        measured, expected = autoplan.slowest(self._transport, _median_seconds(clock)), tuned.expected
        off = math.inf if expected is None else max(measured / expected, expected / measured)
        early = clock.count - tuned.at < self._tuning.every or len(clock.steps) < autoplan.FEWEST
        if off <= self._tuning.factor or early:
            return
        if self._transport.rank == 0:
            _LOG.info("a step takes %.4g s, %s were expected: planning anew", measured, _spelled(expected))
        self._plan(clock)


def _spelled(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds:.4g} s"


def _median_seconds(clock: StepClock) -> float:
    return float(np.median([step.seconds for step in clock.steps]))
