"""Calls: what a session takes to synchronise some tensors, beyond their steps as the curves have them.

It is shared out over the call (``call``), each tensor (``tensor``) and each byte (added to ``check``, the search for
values not finite).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...planner.model.problem import evaluated
from ...planner.model.profile import Profile
from ...planner.model.workload import Workload, WorkloadTensor
from ...types import Plan, Strategy
from ..synthetic_load import SyntheticLoad
from .fits import call_costs, steeper
from .inputs import normal
from .repeating import Point, Repeating, telescoped

_BETWEEN = 2e-3
"""Seconds of computing before each of these calls: caches are as cold, and cores as busy, as in training."""

_CALLS = (
    (1, 1 << 12), (1, 1 << 14), (1, 1 << 17), (6, 1 << 10), (6, 1 << 14), (4, 1 << 16), (32, 1 << 8), (32, 1 << 12)
)  # fmt: skip
"""(Number of tensors, elements of each) of the calls that are timed. Of many under way, one's waiting hides behind the
others, so that each takes less than one of a few."""

_SMALL = 1 << 16
"""Bytes of calls that are timed in any case: four of them, which is enough for what is to be found out."""

SessionOpener = Callable[..., AbstractContextManager[Any]]


class Calls:
    """Measures what sessions take to synchronise some tensors. Collective, as are its methods."""

    def __init__(self, repeating: Repeating, usual: Sequence[Strategy]) -> None:
        self._repeating, self._usual, self._transport = repeating, usual, repeating.transport

    def measured(self, profile: Profile, open_session: SessionOpener, reach: float) -> Profile:
        """The profile with what a call, a tensor and a byte cost beyond the steps and the check that are in it.

        Also whether tensors overlap: of the two timelines that one is taken which leaves less to be explained.

        Args:
            reach: bytes that a call has at most, if that leaves some: of large ones the link would take the time.
        """
        self._repeating.allow("calls")
        self._load = SyntheticLoad(self._transport)
        timed: list[tuple[Strategy, int, int, float]] = []
        calls = [(count, n) for count, n in _CALLS if 4 * count * n <= max(reach, _SMALL)]
        for strategy in self._repeating.while_in_time(self._usual, "calls by {}"):
            with open_session(plan=Plan(default=strategy), fuse_bytes=0) as session:
                points = [Point("", "", count * n, partial(self._call, session, count)) for count, n in calls]
                for point, (count, n) in zip(self._repeating.surveyed(points, needed=True), calls):
                    timed.append((strategy, count, n, float(np.median(point.found))))  # type: ignore[arg-type]
        fits = {}
        for lanes in ("serial", "host"):
            rows = [(count, 4 * count * n, lasted - _known(strategy, count, n, profile, lanes), lasted)
                    for strategy, count, n, lasted in timed]  # fmt: skip
            fits[lanes] = call_costs(np.array(rows))
        lanes = min(fits, key=lambda name: fits[name][1])
        (call, tensor, byte), _ = fits[lanes]
        check = steeper(profile.check, byte)
        return replace(profile, call=call, tensor=tensor, check=check, overlaps=lanes == "host")

    def _call(self, session: Any, count: int, elements: int) -> np.ndarray:
        """Seconds of calls with so many elements in all, shape (passes, 1)."""
        n = elements // count
        source = normal(n, self._transport.rank)
        grads = {f"{k} of {count}": source.copy() for k in range(count)}

        def one() -> list[float]:
            for x in grads.values():
                x[:] = source
            self._load.run(_BETWEEN)
            start = time.perf_counter()
            session.sync(grads)
            return [start, time.perf_counter()]

        return telescoped(self._repeating.passes(one)[:, :, None, :])


def _known(strategy: Strategy, count: int, n: int, profile: Profile, lanes: str) -> float:
    """Seconds of synchronising some tensors of n elements that are there at once, by the timeline.

    What is measured is a session without a plan: it has no schedule to follow, so the order is ``fifo``.
    """
    workload = Workload(tuple(WorkloadTensor(str(k), n, 0.0) for k in range(count)))
    problem, choice = evaluated(Plan(default=strategy), workload, profile, lanes=lanes, order="fifo")
    return problem.timeline.seconds(choice)
