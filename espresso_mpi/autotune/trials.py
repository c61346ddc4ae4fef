"""Trials of plans: replays of a training step, in turns, of fewer and fewer plans."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..collectives.messages.agreement import floats
from ..collectives.messages.transport import Transport
from ..options import Options
from ..planner.model.workload import Workload
from ..types import Plan
from .replay import Replayed, arrays_of

_FINALISTS = 3
"""Plans that are replayed until they can be told apart."""

_LEAST, _MOST = 3, 100
"""Steps of a finalist, at least and at most."""

_HOPELESS = 2.0
"""Times the shortest predicted step from which a plan is not replayed: the model errs, but not by so much."""


_BEHIND = 1.3
"""Times the shortest median from which a plan with two steps or more is given up."""


@dataclass(frozen=True)
class Replay:
    """Median seconds of a plan's step, and their uncertainty. ``plan`` None: what the session did before."""

    plan: Plan | None
    seconds: float = 0.0
    uncertain: float = 0.0


def tried(
    transport: Transport, options: Options, plans: Sequence[Plan], workload: Workload, seconds: float, pushed: bool
) -> tuple[Replay, list[Replay]]:
    """Replays of what the session does now, and of the plans, the best first. Collective.

    Every plan is replayed for a step, and the better half once more, until few are left. These, the best without
    compression, and what the session does now go on in turns. Finalists with a schedule also run without it: turns hide
    latencies of small operations, which the timeline counts in full.

    Args:
        seconds: after which no further round begins, but for the first few.
    """
    with _Trials(transport, options, workload, pushed).opened() as trials:
        first = [None, *_hopeful(plans)]
        trials.add(first)
        going: list[Plan | None] = [plan for plan in first if plan is not None]
        while len(going) > _FINALISTS:
            going = trials.better(going)[: max(_FINALISTS, (len(going) + 1) // 2)]
            trials.run(going)
        plain = [plan for plan in trials.better(first[1:]) if not compresses(plan)][:1]
        final = going + [plan for plan in plain if plan not in going]
        unscheduled = [replace(plan, schedule=None) for plan in final if plan is not None and plan.schedule]
        trials.add(unscheduled)
        trials.run([None])
        trials.settle([None, *final, *unscheduled], seconds)
        again = [trials.result(plan) for plan in (None, *final, *unscheduled)]
        rest = [trials.result(plan) for plan in trials.better(first[1:]) if plan not in final]
    best = _best(again[1:])
    return again[0], [best, *(one for one in again[1:] if one != best), *rest]


def _hopeful(plans: Sequence[Plan]) -> list[Plan]:
    """The plans whose predicted step is not much longer than the shortest."""
    known = [plan.forecast.seconds for plan in plans if plan.forecast is not None]
    limit = _HOPELESS * min(known, default=0.0)
    return [plan for plan in plans if plan.forecast is None or plan.forecast.seconds <= limit]


class _Trials:
    """Plans under trial. Their engines stay, so that each warms up once."""

    def __init__(self, transport: Transport, options: Options, workload: Workload, pushed: bool) -> None:
        self._transport, self._options, self._workload, self._pushed = transport, options, workload, pushed
        self._arrays = arrays_of(workload, transport.rank)
        self._known: list[tuple[Plan | None, Replayed]] = []
        self._start = time.perf_counter()

    @contextmanager
    def opened(self) -> Iterator[_Trials]:
        """For a with-block, after which all engines are shut down."""
        try:
            yield self
        finally:
            for _, replayed in self._known:
                replayed.close()
            self._transport.forget_kinds()

    def add(self, plans: Sequence[Plan | None]) -> None:
        """Replay more plans for a step."""
        for plan in plans:
            one = Replayed(
                self._transport, self._options, plan or self._options.plan, self._workload, self._pushed, self._arrays
            )
            self._known.append((plan, one))
            one.warm_up()
            one.run()

    def run(self, plans: Sequence[Plan | None]) -> None:
        """Replay these plans for a step each."""
        for plan in plans:
            self._of(plan).run()

    def settle(self, plans: Sequence[Plan | None], seconds: float) -> None:
        """Replay plans in turns until the best of them is known, or the time is up."""
        for _ in range(_MOST):
            limit = _BEHIND * min(self._of(plan).seconds for plan in plans if len(self._of(plan).times) > 1)
            going = [p for p in plans if len(self._of(p).times) < 2 or self._of(p).seconds <= limit]
            enough = all(len(self._of(plan).times) >= _LEAST for plan in going)
            elapsed = float(floats(self._transport, time.perf_counter() - self._start)[0, 0])  # rank 0's clock
            if enough and (elapsed > seconds or self._told_apart(going)):
                return
            self.run(going)

    def _told_apart(self, plans: Sequence[Plan | None]) -> bool:
        best, *others = self.better(plans)
        mine = self._of(best)
        return all(one.seconds - mine.seconds > 2 * (one.uncertain + mine.uncertain) for one in map(self._of, others))

    def better(self, plans: Sequence[Plan | None]) -> list[Plan | None]:
        """The plans, the quickest first."""
        return sorted(plans, key=lambda plan: self._of(plan).seconds)

    def result(self, plan: Plan | None) -> Replay:
        """What the replays of a plan have shown."""
        replayed = self._of(plan)
        return Replay(plan, replayed.seconds, replayed.uncertain)

    def _of(self, plan: Plan | None) -> Replayed:
        return next(replayed for known, replayed in self._known if known is plan)


def _best(replays: Sequence[Replay]) -> Replay:
    """The plan with the shortest step; with compression only if that is shorter by more than the replays' noise."""
    best = min(replays, key=lambda one: one.seconds)
    dense = [one for one in replays if not compresses(one.plan)]
    plain = min(dense, key=lambda one: one.seconds, default=best)
    return best if plain.seconds - best.seconds > plain.uncertain + best.uncertain else plain


def compresses(plan: Plan | None) -> bool:
    """Whether any tensor is compressed."""
    return plan is not None and any(strategy.compressor != "none" for strategy in plan.strategies.values())
