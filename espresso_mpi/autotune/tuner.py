"""When a session with ``plan="auto"`` plans: after the first steps, and anew when steps take much longer or shorter.

It watches steps, makes plans, tries them on the next steps, and goes on by the quickest.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collectives.messages.agreement import floats
from ..collectives.messages.transport import Transport
from ..errors import ConfigError, PlanError
from ..options import Options
from ..tuning import Tuning
from ..types import Plan, TensorSpec
from . import room
from .clock import CallKey, Computing, RecordedStep, StepClock
from .fidelity import OF_MOMENTA, Fidelity
from .next_run import NextRun
from .payload_costs import payload_bytes
from .trials import More, Spent, Trials
from .tried import Trial

if TYPE_CHECKING:
    from ..planner.model.workload import Workload
    from .earlier_run import EarlierRun

_LOG = logging.getLogger("espresso_mpi")


_FEWEST = 3
"""Steps that are watched at least: as many as a workload needs."""

_WATCHED = 0.25
"""The share of the least budget after which no further steps are watched."""


@dataclass(frozen=True)
class Tuned:
    """When a session planned last, in steps, and how long a step should take since."""

    at: int
    expected: float | None


class Tuner:
    """Watches steps, and plans.

    Args:
        together: does something, given its name, on all ranks when nothing else is under way.
        options: those of now, the plan among them; adopt: goes on by a plan, or without one, on all ranks.

    Attributes:
        tuned: the last plan; None before there is any.
        trials: of the plans that are being tried; None: no trials are under way.
        fidelity: what is known of the harm that compressors do to the tensors.
        first: how the watched steps travel.
    """

    def __init__(
        self, transport: Transport, tuning: Tuning, together: Callable[[str, Callable[[], Any]], Any],
        options: Callable[[], Options], adopt: Callable[[Plan | None], None],
    ) -> None:  # fmt: skip
        from .first_steps import FirstSteps

        self._transport, self._tuning = transport, tuning
        self._together, self._options, self._adopt = together, options, adopt
        self.tuned: Tuned | None = None
        self.trials: Trials | None = None
        self.fidelity = Fidelity(tuning, options().feedback)
        self.first = FirstSteps(transport, tuning, options, adopt)
        self._tensors: frozenset[TensorSpec] = frozenset()
        self._noted: RecordedStep | None = None
        self._computing, self._late = Computing(0.0, 0.0), False
        self._workload: Workload
        self._roomy: set[str] = set()
        self._pushed = False
        self._earlier: EarlierRun | None = None
        self._next_run = NextRun(transport, tuning, options, self.fidelity)
        self._since = 0
        self._pause_left = 0
        if transport.rank == 0 and tuning.doubtful and tuning.accuracy == "fast":
            _LOG.warning(
                "plan='auto' with accuracy='fast' chooses by speed, and may use %s: not known to train like fp32 under "
                "AdamW (onebit, topk and powersgd did not); compare losses first, see docs/compressors.md",
                ", ".join(tuning.doubtful),
            )

    @property
    def watching(self) -> bool:
        """Whether steps are watched to make the first plans."""
        return self.tuned is None and self.trials is None

    @property
    def _followed(self) -> EarlierRun | None:
        """The earlier run, if its plan is followed."""
        return None if self._earlier is None or self._earlier.plan is None else self._earlier

    def open(self) -> None:
        """Read the plan of an earlier run, if a file for it is named, and measure the network. Collective.

        Raises:
            ConfigError: on every rank, see ``earlier_run.EarlierRun``.
        """
        if self._tuning.plan_file is not None:
            from .earlier_run import EarlierRun

            self._earlier = EarlierRun(self._transport, self._tuning, self._options, self._adopt, self.fidelity)
        self._together("watch", self.first.open)

    def begin(self) -> None:
        """Follow the plan that was read, or that of the first step, before it. Collective if there is one."""
        if self._earlier is not None and self._earlier.waiting is not None:
            self._together("plan_file", self.follow_earlier)
        if self.first.waiting is not None:
            self._together("watch", self.first.begin)

    def follow_earlier(self) -> bool:
        """Follow the plan that was read. Collective. Returns whether there is one that fits.

        If the earlier run ended before its trials, this one watches steps by the plan, and goes on with them.
        """
        chosen = None if self._earlier is None else self._earlier.follow()
        if chosen is not None and chosen.finished:
            self.tuned = Tuned(0, chosen.seconds)
        return chosen is not None

    def undo_earlier(self) -> None:
        """Undo ``follow_earlier`` before the first step. Collective."""
        if self._earlier is not None:
            self.tuned = None
            self._earlier.undo()

    def called(self, clock: StepClock, key: CallKey, specs: Sequence[TensorSpec] | None) -> None:
        """A call has these tensors, None if it failed here: in the first step, leave a plan that has others."""
        earlier = self._followed
        if earlier is None or earlier.confirmed:
            return
        if key[0] == "sync":  # ranks that have different tensors get the error of the call
            self._together("plan_file", lambda: self._leave_if(clock, earlier, earlier.misfit_anywhere(specs or ())))
        elif (why := earlier.misfit(specs or ())) is not None:  # other ranks push such tensors, too
            self._together("plan_file", lambda: self._leave_if(clock, earlier, why))

    def _leave_if(self, clock: StepClock, earlier: EarlierRun, why: str | None) -> None:
        """Leave the plan of an earlier run for a reason, if any, and watch steps as without a file. Collective."""
        if why is None:
            return
        self.tuned, self._since = None, clock.count
        clock.steps.clear()
        earlier.leave(why)

    def closing(self) -> None:
        """The session ends."""
        earlier = self._earlier
        if earlier is not None and earlier.plan is earlier.waiting is None and (self.watching or self.trials):
            self._next_run.ends_early()

    def step_ended(self, clock: StepClock) -> None:
        """Plan when enough steps were watched, and try the plans; compare step times with the plan's from then on."""
        tuning, tuned, earlier = self._tuning, self.tuned, self._followed
        if self.watching:
            self.fidelity.samples.end_step(clock.begun)
        try:
            if self._pause_left > 0:
                self._pause_left -= 1
            elif self.trials is not None:
                trials = self.trials
                self._together("trial", lambda: self._try_next(clock, trials))
            elif earlier is not None and not earlier.confirmed:
                self._together("plan_file", lambda: self._leave_if(clock, earlier, earlier.confirm()))
            elif tuned is None:
                count = clock.count - self._since
                if count == 1:
                    self._together("watch", lambda: self._first_ended(clock))
                watched = count - max(1, tuning.skip)
                if watched >= tuning.steps:
                    self._together("plan", lambda: self._plan(clock, watched))
                elif watched >= _FEWEST:
                    self._together("watch", lambda: self._plan_if_long(clock, watched))
            elif (clock.count - tuned.at) % tuning.check == 0:
                self._together("compare", lambda: self._compare(clock, tuned))
        except (ConfigError, PlanError) as error:  # on all ranks alike
            if self._transport.rank == 0:
                _LOG.warning("%s; training goes on as before", error)

    def _first_ended(self, clock: StepClock) -> None:
        """Choose how the other steps travel that are watched. Collective."""
        self._pushed = clock.pushed
        self.first.ended(clock, self.fidelity.known_rule(self._transport) in OF_MOMENTA)

    def _plan_if_long(self, clock: StepClock, watched: int) -> None:
        """Plan at once if the steps take so long that watching more of them would cost much. Collective."""
        from . import autoplan

        seconds = sum(step.seconds for step in list(clock.steps)[-watched:])
        if autoplan.slowest(self._transport, seconds) >= _WATCHED * self._tuning.budget_for(0.0):
            self._plan(clock, watched)

    def _plan(self, clock: StepClock, watched: int) -> None:
        """Make plans from the last steps, and follow the first that is tried. Collective."""
        from . import autoplan

        start, before = time.perf_counter(), self._options().plan
        anew = self.tuned is not None and before is not None
        self.tuned = Tuned(clock.count, None)  # also if it fails: training goes on as it did
        steps = list(clock.steps)[-watched:]
        earlier = self._followed
        if earlier is not None and (why := earlier.changed(steps)) is not None:
            self._leave_if(clock, earlier, why)
            return
        self._pushed = self._pushed or steps[-1].pushed  # what held gradients were pushed by may be one call
        try:
            workload = autoplan.recorded(self._transport, steps, "recorded by the session")
            workload, tuning, dropped = self.fidelity.without_harm(self._transport, workload, self._tuning)
        except (ConfigError, PlanError):  # on all ranks alike
            if before is not None and not anew:
                self._adopt(autoplan.dense_plan(self._transport.topology))
            raise
        fixed = autoplan.fixed_ways(self._transport.topology, self._options(), tuning, workload, self._pushed)
        if before is not None and before.digest not in {plan.digest for plan in fixed} and not _harms(before, workload):
            fixed.append(before)
        self._tensors, self._noted = frozenset(steps[-1].specs), clock.steps[-1]
        spent = self._spent_on(clock, steps if anew else clock.steps, anew, time.perf_counter() - start)
        self.trials = Trials(
            fixed, tuning.trial_steps, lambda: self._modelled(workload, tuning, dropped), tuning.budget_for, spent,
            self._pushed, tuning.share, tuning.measuring_for,
            {plan.digest: payload_bytes(plan, workload) for plan in fixed},
            autoplan.compiling_seconds(self._transport),
        )  # fmt: skip
        self._workload, self._roomy = workload, set() if before is None else {before.digest}
        self._follow(self.trials)

    def _follow(self, trials: Trials) -> None:
        """Go on by the next plan for which all GPUs have memory. Collective."""
        while trials.current is not None and trials.current.digest not in self._roomy:
            try:
                room.require_room(self._transport, room.needed(trials.current, self._workload), "a plan's trial")
                self._roomy.add(trials.current.digest)
            except PlanError as error:  # on all ranks alike
                if self._transport.rank == 0:
                    _LOG.warning("%s; this plan is not tried", error)
                trials.refuse()
        if trials.current is not None:
            self._pause_left = (trials.pause or trials.ahead) - 1  # steps that no decision waits for
            if trials.current is not self._options().plan:
                self._adopt(trials.current)
            if trials.pause:
                self._next_run.pausing(trials, self._workload)

    def _modelled(self, workload: Workload, tuning: Tuning, dropped: tuple[str, ...]) -> More:
        """Measure the cluster, and make plans by the model; none where it fails. Collective."""
        from . import autoplan

        start, plans = time.perf_counter(), autoplan.Proposed([], [])
        try:
            room.require_room(self._transport, room.needed_to_measure(workload), "measurements")
            plans = autoplan.proposed(self._transport, self._options(), tuning, workload, self._pushed, dropped)
        except (ConfigError, PlanError) as error:  # on all ranks alike
            if self._transport.rank == 0:
                _LOG.warning("%s; the fixed ways are tried alone", error)
        seconds = autoplan.slowest(self._transport, time.perf_counter() - start)
        return More(plans.fixed, plans.others, seconds)

    def _spent_on(
        self, clock: StepClock, watched: Iterable[RecordedStep], anew: bool, measuring: float
    ) -> Spent:  # fmt: skip
        """What the watched steps and the measurements took on the slowest rank. Collective.

        Where steps followed a plan before it was planned anew, they cost nothing.
        """
        alike, plan = [step for step in watched if frozenset(step.specs) == self._tensors], self._options().plan
        before, measuring = map(float, floats(self._transport, clock.seconds, measuring).max(axis=0))
        count = int(floats(self._transport, len(alike)).min())  # a rank may have failed in a step of its own
        self._computing, self._late = Computing.of(alike[-count:]), False
        each = floats(self._transport, *(step.seconds for step in alike[-count:])).max(axis=0).tolist()
        measuring += 0 if anew else self.first.measuring
        elapsed = before + measuring + self.first.waited
        if self._followed is not None:
            return Spent(measuring, known=self._followed.known, elapsed=elapsed)
        if anew and plan is not None:
            return Spent(measuring, known={plan.digest: ((), each)}, elapsed=elapsed)
        ready = floats(self._transport, *(step.ready.max() for step in alike[-count:])).max(axis=0)
        usual, computing = float(np.median(each)), float(np.median(ready))
        if plan is None:
            return Spent(sum(each) + measuring, count, usual, usual - computing, elapsed=elapsed)
        waited, dense = self.first.costs(usual, computing)  # the first step may have prepared much
        total = usual + sum(each[1:]) + waited + measuring  # and so may the second
        known = {plan.digest: (each[:1], each[1:])}
        return Spent(total, count, dense_at_most=computing + dense, known=known, elapsed=elapsed)

    def _try_next(self, clock: StepClock, trials: Trials) -> None:
        """Note the times of the steps that ended, and follow the plan of the next one. Collective."""
        from . import autoplan

        plan, count = trials.current, trials.pause or trials.ahead
        new = itertools.takewhile(lambda step: step is not self._noted, reversed(clock.steps))
        alike = [step if frozenset(step.specs) == self._tensors else None for step in new][count - 1 :: -1]
        self._noted = clock.steps[-1]
        late = self._late or trials.pause > 0  # in a pause, all counts: it only tells how long the steps took
        each, self._late = _agreed(self._transport, alike, count, self._computing, late)
        for seconds in [_median(each)] if trials.pause else each:
            trials.step_ended(seconds)
            if trials.pause or trials.current is not plan:
                break
        self._follow(trials)
        if trials.current is not None:
            return
        self.trials, results = None, trials.results()
        if not results:
            self.tuned = Tuned(clock.count, None)
            raise PlanError(
                "no plan could be tried: GPUs have no room, steps have other tensors than those watched, or other work "
                "delays all of them"
            )
        autoplan.report(self._transport, results, trials.cost(results[0].seconds))
        self.tuned = Tuned(clock.count, results[0].seconds)
        clock.steps.clear()
        self._follow_chosen(results[0])

    def _follow_chosen(self, best: Trial) -> None:
        """Go on by the plan that was chosen, and write it for the next run. Collective."""
        plan, self._earlier = self._next_run.chosen(best, self._workload), None
        self._adopt(plan)
        self._next_run.write(plan)

    def _compare(self, clock: StepClock, tuned: Tuned) -> None:
        """Plan anew if steps take much longer, or shorter, than the plan said. Collective."""
        from . import autoplan

        measured, expected = autoplan.slowest(self._transport, _median_seconds(clock)), tuned.expected
        off = math.inf if expected is None else max(measured / expected, expected / measured)
        early = clock.count - tuned.at < self._tuning.every and self._followed is None
        early = early or len(clock.steps) < autoplan.FEWEST
        if off <= self._tuning.factor or early:
            return
        text = f"a step takes {measured:.4g} s, {_seconds_text(expected)} were expected"
        if self._followed is not None:  # of this run's gradients nothing is known
            self._leave_if(clock, self._followed, text)
            return
        if self._transport.rank == 0:
            _LOG.info("%s: planning anew", text)
        self._plan(clock, self._tuning.steps)


def _harms(plan: Plan, workload: Workload) -> bool:
    """Whether a tensor travels by a compressor from which it is barred."""
    return any(plan.strategy(tensor.name).compressor in tensor.barred for tensor in workload.tensors)


def _agreed(
    transport: Transport, steps: Sequence[RecordedStep | None], count: int, computing: Computing, late: bool
) -> tuple[list[float], bool]:  # fmt: skip
    """Seconds of steps on the slowest rank, and whether other work delayed the last one on any. Collective.

    NaN: a step was not recorded, had other tensors (None), or other work delayed it, and not the step before as well:
    if all are late, this is how long steps take now.

    Args:
        steps: the last of ``count``; late: whether the step before was.
    """
    known = [(math.nan, 0.0) if step is None else (step.seconds, float(computing.is_late(step))) for step in steps]
    rows = [(math.nan, 0.0)] * (count - len(known)) + known
    seconds, delayed = floats(transport, *np.ravel(rows)).max(axis=0).reshape(-1, 2).T
    alone = (delayed > 0) & ~(np.append(float(late), delayed[:-1]) > 0)
    return np.where(alone, math.nan, seconds).tolist(), bool(delayed[-1])


def _median(times: Sequence[float]) -> float:
    """Of those that are known; NaN if none is. A step that failed, or was delayed, has none."""
    known = [seconds for seconds in times if not math.isnan(seconds)]
    return float(np.median(known)) if known else math.nan


def _seconds_text(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds:.4g} s"


def _median_seconds(clock: StepClock) -> float:
    return float(np.median([step.seconds for step in clock.steps]))
