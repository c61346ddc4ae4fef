"""Trials of plans on the steps of the training itself: which plan the next step follows, and which was the quickest."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from ..types import Plan
from .finalists import close, finalists, told_apart
from .payload_costs import HOPELESS, PayloadCosts, compresses, methods
from .tried import BEHIND, COUNTED, Trial, Tried, are_twins, by_its_twin, scale

_PERHAPS = 2.0
"""Dense steps may be the quickest if little is known of them but that they take at most this many times as long."""

_MODELLED, _FIRST_ROUND = 0.5, 0.7
"""The shares of the budget after which the model is not asked for further plans, and after which no further ones are
tried: the finalists need the rest."""

_SEARCHED = 2.0
"""How many times as long measuring and the search for plans by the model take together as measuring alone. Measured:
2.1 (1.5 and 1.7 s; 43 tensors, 4 ranks on 2 cores)."""

_TOLERATED = 0.05
"""A plan without compression is chosen if it is no slower than the best by more than the noise, nor by more than this
share: where its steps are noisy, little would be lost by compressing."""

_LONGEST_PAUSE = 16
"""Steps of a pause after which it is seen anew how long steps take: as many as a session remembers."""

_SETTLING, _LONG = 2, 3
"""Steps of a turn that do not count, and those that do, of a plan that had a turn before, or should be the quickest.
After a change, the first step takes up to 60 % longer where ranks share cores, and the second one some percent."""

_DISTURBED = 2.0
"""How many times as long other work may make a step: one that is still longer has another reason."""


@dataclass(frozen=True)
class Spent:
    """What planning has taken before the trials.

    Attributes:
        seconds: of measurements, and of the ``steps`` until then.
        dense: median seconds of the steps that were dense; infinite if none were.
        exposed: of these, what computing cannot hide, however much travels beside it.
        dense_at_most: about what a dense step takes at most, if only the first one was dense, or none; else 0.
        known: seconds of steps, by the digest of the plan that they followed: of those that prepared it, and others.
        elapsed: of the training until then.
    """

    seconds: float = 0.0
    steps: int = 0
    dense: float = math.inf
    exposed: float = 0.0
    dense_at_most: float = 0.0
    known: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    elapsed: float = 0.0

    @property
    def about_dense(self) -> float:
        """Seconds of a dense step, or about what it takes at most; 0: nothing is known."""
        return self.dense if self.dense < math.inf else self.dense_at_most


@dataclass(frozen=True)
class More:
    """What the model makes: the fixed ways with forecasts, other plans, and the seconds that it took."""

    fixed: Sequence[Plan] = ()
    others: Sequence[Plan] = ()
    seconds: float = 0.0


class _Refused(Exception):  # noqa: N818 - no error: thrown into the rounds
    """The plan that was to be followed cannot be."""


class Trials:
    """Decides which plan each step of the training follows, until one plan is the quickest.

    All ranks have the same plans, and are given the same times. So they decide the same, without messages.

    Every plan has a turn: first the fixed ways, then those that the model makes. After either, the quickest go on in
    turns, together with the quickest one without compression, until they can be told apart, or until a part of the
    budget is spent, and in the end all of it. Spent is what the measurements took, and by how much all steps took
    longer than as many steps of the quickest plan.

    Trials may cost a share of the time so far, besides what was spent before them. Before a plan would cost more, there
    is a pause: the next steps follow the quickest plan so far. The first steps of a run take longer. So a plan that is
    somewhat quicker than all before has a second turn after another one of these. And the first long pause tells by
    which share; plans that were about as quick have another turn then, and their earlier steps count no more.

    Args:
        fixed: candidates that need no model. All are tried, in this order.
        most: steps after which the trials end.
        more: makes the other candidates, with forecasts, once the fixed ways were tried, unless the budget is short.
            Collective. One of these or of ``fixed`` at least compresses nothing.
        budget: seconds that may be spent, given the seconds of a step of the quickest plan; default: any.
        spent: what was spent before.
        pushed: whether the steps push gradients, so that it makes a difference when pushes start.
        share: of the time so far that trials may cost.
        measuring: seconds that ``more`` will take, given the seconds of a step of the quickest plan.
        payload_bytes: of a step, by the digest of the plan, where it is known.
        compiling: seconds that ``more`` takes besides, because it has to be compiled. They have to fit into the budget.

    Attributes:
        current: the plan of the next step; None when the trials have ended.
        pause: how many steps are to follow it before the next ``step_ended``; 0: one, which is a trial.
    """

    def __init__(
        self, fixed: Sequence[Plan], most: int, more: Callable[[], More] = lambda: More(),
        budget: Callable[[float], float] = lambda step: math.inf, spent: Spent | None = None, pushed: bool = False,
        share: float = 1.0, measuring: Callable[[float], float] = lambda step: 0.0,
        payload_bytes: Mapping[str, float] | None = None, compiling: float = 0.0,
    ) -> None:  # fmt: skip
        self._spent = self._watched = spent or Spent()
        self._fixed = [Tried.before(plan, *self._spent.known.get(plan.digest, ((), ()))) for plan in fixed]
        self._tried, self._more = list(self._fixed), more
        self._most, self._steps, self._pushed = most, 0, pushed
        self._budget, self._share, self._measuring, self._compiling = budget, share, measuring, compiling
        self._payloads = PayloadCosts(payload_bytes or {}, self._tried, self._spent.dense)
        self._seconds, self._in_pauses, self._known, self._lost = 0.0, 0.0, 0, False
        self.pause, self._row, self._within, self._scaled = 0, 1, False, False
        self._rounds = self._all_rounds()
        self.current: Plan | None = None
        self._next_plan(None)

    @property
    def ended(self) -> bool:
        """Whether no further step is needed; ``current`` is then None."""
        return self.current is None

    def step_ended(self, seconds: float) -> None:
        """A step by the ``current`` plan took so long on the slowest rank; NaN: that says nothing of the plan.

        After a pause: each of its steps did. NaN are steps with other tensors, and those that other work delayed.
        """
        alike, paused = not math.isnan(seconds), self.pause
        self._lost = self._lost or not alike
        self._steps += 0 if paused and alike else max(1, paused)
        if alike:
            self._known += 0 if paused else 1
            self._seconds += 0.0 if paused else seconds
            self._in_pauses += paused * seconds
            self._next_plan(seconds)
        best = self.quickest
        spent = best < math.inf and self.cost(best) >= self._budget(best) and not self._owes_dense
        if self._steps >= self._most or (spent and not self._within):
            self.current = None

    def refuse(self) -> None:
        """The ``current`` plan cannot be followed: go on by the next one, if there is any."""
        try:
            self.current = self._rounds.throw(_Refused())
        except StopIteration:
            self.current = None

    @property
    def ahead(self) -> int:
        """How many steps ``current`` has from now on, whatever they take: none of them needs to wait for a decision."""
        return max(1, min(self._row, self._most - self._steps))

    @property
    def quickest(self) -> float:
        """The shortest median so far, of the dense steps before the trials too; infinite before a plan had a step."""
        found = min((one.seconds for one in self._tried), default=math.inf)
        return min(found, self._spent.dense) if found < math.inf else found

    def cost(self, step: float) -> float:
        """Seconds spent beyond as many steps that take ``step`` seconds each."""
        return self._spent.seconds + self._seconds - (self._spent.steps + self._known) * step

    def results(self) -> list[Trial]:
        """Of all plans that had a step, the best first: with compression only if the gain exceeds the noise.

        If no plan without compression had a step, its time is that of the dense steps before the trials.
        """
        return _ranked(self._tried, self._spent)

    @property
    def times(self) -> dict[str, tuple[float, int]]:
        """Seconds and number of steps by the digests of plans; of dense ones before the trials, if these were long."""
        spent, found = self._spent, {one.plan.digest: (one.seconds, one.steps) for one in self.results()}
        dense = spent.about_dense
        plain = [one.plan.digest for one in self._tried if not compresses(one.plan)]
        return {**dict.fromkeys(plain, (dense, 1)), **found} if dense > BEHIND * self.quickest else found

    def _next_plan(self, seconds: float | None) -> None:
        try:
            self.current = next(self._rounds) if seconds is None else self._rounds.send(seconds)
        except StopIteration:
            self.current = None

    def _all_rounds(self) -> Generator[Plan, float, None]:
        """The plan of each step; is sent its seconds."""
        dense_first = sorted(self._fixed, key=lambda one: compresses(one.plan))
        smaller = [one for one in self._fixed if not one.times and self._payloads.may_be_quickest(one)]
        for one in (*smaller, *(dense_first if self._owes_dense else self._fixed)):
            untried = not (one.times or one.refused)
            if (untried or self._payloads.would_tell(one)) and self._promises(one):
                yield from self._tries(one)
        for one in self._fixed:  # what is known of other pairs by now may speak for one that was left out
            if not (one.times or one.refused) and self._promises(one):
                yield from self._tries(one)
        if self._fixed:
            yield from self._compare(_MODELLED)
        if not self._beyond(_MODELLED, self._compiling):
            yield from self._pauses(_SEARCHED * self._measuring(self.quickest) + self._compiling)
        for one in self._others():
            if self._promises(one):
                yield from self._tries(one)
        yield from self._compare(1.0)

    @property
    def _owes_dense(self) -> bool:
        """Whether a dense plan may be among the quickest, and has no step to tell, nor had dense steps before."""
        if not 0 < self._spent.dense_at_most <= _PERHAPS * self.quickest < math.inf:
            return False
        dense = [one for one in self._tried if not compresses(one.plan)]
        return not any(one.times or one.refused or self._payloads.is_too_large(one) for one in dense)

    def _tries(self, one: Tried) -> Generator[Plan, float, None]:
        """A turn of a new plan. It and the best of the others have another one if it is somewhat quicker, or should be.

        No pause is before it if it may soon pay, and is prepared: with no more bytes than the quickest, and pushes at
        another time.
        """
        prepared = any(other.times and are_twins(one.plan, other.plan) for other in self._tried)
        if not (prepared and self._payloads.is_no_larger(one)):
            yield from self._pauses(self._expected(one))
        others = [other for other in self._tried if other.times and not other.refused]
        should_be = self._payloads.may_be_quickest(one)
        yield from self._turn(one)
        best = min(others, key=lambda other: other.seconds, default=one)
        disturbed = should_be and best.seconds <= one.seconds <= HOPELESS * best.seconds
        if one.seconds < best.seconds <= HOPELESS * one.seconds or disturbed:
            yield from self._turn(best)
            yield from self._turn(one)

    def _pauses(self, ahead: float) -> Generator[Plan, float, None]:
        """Steps by the quickest plan so far, until so many seconds more are within the share that may be spent."""
        while steps := self._steps_until(ahead):
            self.pause = steps
            try:
                seconds = yield (plan := self.results()[0].plan)
            except _Refused:
                return
            finally:
                self.pause = 0
            if not self._scaled and steps == _LONGEST_PAUSE:
                yield from self._compare_again(plan, seconds)

    def _compare_again(self, plan: Plan, seconds: float) -> Generator[Plan, float, None]:
        """Turns of plans that were about as quick as that of the pause, whose steps take so many seconds by now."""
        self._scaled = True
        scale(self._tried, plan, seconds)
        for one in [one for one in close(self._tried) if one.plan is not plan]:
            one.early = len(one.times)
            yield from self._turn(one)

    def _steps_until(self, ahead: float) -> int:
        """How many steps of a pause are missing for that."""
        best, found = self.quickest, self.results()
        if not found or best <= 0 or self._share == 1:
            return 0
        measured = self._spent.seconds - self._watched.seconds
        spent = measured + sum(one.cost(best) for one in self._tried)
        elapsed = self._watched.elapsed + measured + self._seconds + self._in_pauses
        missing = (spent + ahead) / self._share - elapsed
        return max(0, min(_LONGEST_PAUSE, math.ceil(missing / best)))

    def _expected(self, one: Tried) -> float:
        return _expected(one, self._tried, self._payloads, self._spent, self.quickest)

    def _compare(self, share: float) -> Generator[Plan, float, None]:
        """Turns of the finalists until they can be told apart, or so much of the budget, or of the steps, is spent."""
        going = finalists(self._tried, self._payloads, self._pushed)
        while len(going) > 1 and not told_apart(going) and not self._beyond(share):
            if self._steps >= share * self._most:
                return
            for one in going:
                yield from self._pauses(self._expected(one))
                yield from self._turn(one)
            limit = BEHIND * min(one.seconds for one in going)
            going = [one for one in going if one.seconds <= limit and not one.refused]

    def _others(self) -> list[Tried]:
        """The plans that the model makes. It also has forecasts for the fixed ways."""
        if self._beyond(_MODELLED, self._compiling):
            return []
        more = self._more()
        self._spent = replace(self._spent, seconds=self._spent.seconds + more.seconds)
        known = {plan.digest: plan for plan in more.fixed}
        for one in self._fixed:
            one.plan = known.get(one.plan.digest, one.plan)
        tried = {one.plan.digest for one in self._tried}
        others = [Tried(plan) for plan in _hopeful(more.others, more.fixed) if plan.digest not in tried]
        self._tried += others
        return others

    def _beyond(self, share: float, ahead: float = 0.0) -> bool:
        """Whether more than a share of the budget is spent, or will be with so many seconds ahead."""
        best = self.quickest
        return best < math.inf and self.cost(best) + ahead > share * self._budget(best)

    def _promises(self, one: Tried) -> bool:
        """Whether a plan is worth a turn.

        Dense plans are not if the dense steps before the trials were far too long. A plan is not if its messages alone
        make it far too long, nor if it is far too long with pushes at another time: unless others gain so much by this
        change that it may not be, or larger messages at the same time are quicker. A plan with one compressor is not if
        the fixed ways with this compressor are far behind.
        """
        best = min(other.seconds for other in self._tried)
        if self._payloads.is_too_large(one) or (not compresses(one.plan) and self._spent.exposed > HOPELESS * best):
            return False
        if min(by_its_twin(one, self._tried), self._payloads.at_most(one)) > HOPELESS * best:
            return False
        if any(one is other for other in self._fixed):
            return True
        if self._beyond(_FIRST_ROUND):
            return False
        if len(methods(one.plan)) > 1:
            return True
        alike = [other.least for other in self._fixed if methods(other.plan) == methods(one.plan)]
        return not alike or min(alike) <= BEHIND * min(other.least for other in self._tried)

    def _turn(self, one: Tried) -> Generator[Plan, float, None]:
        """Steps by a plan, unless it is refused; more if it had some, or should be the quickest."""
        long = one.times or self._payloads.may_be_quickest(one)
        try:
            yield from self._long_turn(one) if long else self._steps_by(one)
        except _Refused:
            one.refused = True
        finally:
            self._row, self._within = 1, False

    def _steps_by(self, one: Tried) -> Generator[Plan, float, None]:
        """A step to prepare, and those that count; a plan that is far behind has one of these.

        It has none if its first step is so long that preparing cannot explain it, by what that took with other plans.
        If its payloads are smaller than those of the quickest, messages cannot explain it: its kernels may have been
        compiled. What this took says nothing of others. It also has one that counts if that can spare others theirs.
        """
        best = min(other.least for other in self._tried)
        if self.current is not one.plan:
            self._lost = False
            first = yield one.plan
            known = [other.preparing for other in self._tried if other.first and other.times and not other.excused]
            too_long = bool(known) and first - max(known) > HOPELESS * best
            one.excused = one.excused or (too_long and self._payloads.is_smaller(one))
            if too_long and not one.excused and not self._payloads.can_tell(one):
                one.times.append(first)
                return
            if not self._lost:  # otherwise the step before it prepared the plan, and nobody knows how long that took
                one.first.append(first)
        for _ in range(COUNTED):
            one.times.append((yield one.plan))
            if one.least > BEHIND * best:
                return

    def _long_turn(self, one: Tried) -> Generator[Plan, float, None]:
        """Steps that need no decision between them; but a new plan ends after those that do not count if it is slow."""
        best, new = min(other.least for other in self._tried), not one.times
        settling = 0 if self.current is one.plan else _SETTLING
        for step in range(settling + _LONG):
            first = step < settling
            self._row = settling - step if new and first else settling + _LONG - step
            self._within = step not in (0, settling if new else 0)
            seconds = yield one.plan
            too_long = new and first and seconds > _DISTURBED * best
            one.excused = one.excused or too_long
            if too_long and step + 1 == settling:
                one.times.append(seconds)
                return
            (one.first if first else one.times).append(seconds)


def _expected(one: Tried, tried: Sequence[Tried], payloads: PayloadCosts, spent: Spent, quickest: float) -> float:
    """What a turn of a plan is expected to cost. That of one that was never tried may be 0.

    If it compresses, to larger payloads than those of the quickest, it can wait until preparing it is within the share,
    too.
    """
    if one.times:
        return (_SETTLING + _LONG) * max(0.0, one.seconds - quickest)
    if not compresses(one.plan):
        return max(0.0, spent.about_dense - quickest)
    known = [other.preparing for other in tried if other.times and len(other.first) > other.given[0]]
    return max(0.0, median(known)) if known and payloads.is_larger(one) else 0.0


def _ranked(tried: Sequence[Tried], spent: Spent) -> list[Trial]:
    """See ``Trials.results``."""
    order = sorted((one for one in tried if one.times), key=lambda one: (one.out, one.seconds))
    found = [one.result() for one in order]
    if not found:
        return []
    dense = next(one.plan for one in tried if not compresses(one.plan))
    watched = Trial(dense, spent.dense, 0.0, spent.steps)
    best, plain = found[0], next((one for one in found if not compresses(one.plan)), watched)
    noise = min(math.hypot(plain.uncertain, best.uncertain), _TOLERATED * best.seconds)
    if plain.seconds - best.seconds <= noise:
        best = plain
    return [best, *(one for one in found if one is not best)]


def _hopeful(plans: Sequence[Plan], fixed: Sequence[Plan]) -> list[Plan]:
    """The plans whose predicted step is not much longer than the shortest, in order; the best without compression."""
    order = sorted(plans, key=_predicted)
    plain = next((plan for plan in order if not compresses(plan)), None)
    limit = HOPELESS * min(map(_predicted, (*plans, *fixed)), default=math.inf)
    return [plan for plan in order if plan is plain or _predicted(plan) <= limit]


def _predicted(plan: Plan) -> float:
    return 0.0 if plan.forecast is None else plan.forecast.seconds
