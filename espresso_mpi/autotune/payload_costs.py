"""Which plans need no trial, by the bytes of their messages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..compressors import get
from ..tuning import FOR_MOMENTA, LIKE_FP32
from ..types import Plan
from .tried import BEHIND, Tried

if TYPE_CHECKING:
    from ..planner.model.workload import Workload

HOPELESS = 1.5
"""A plan is not tried if its predicted step is this many times the shortest predicted one: the model errs, but less.
Nor is it tried any further if its first step, without what preparing takes, is this many times the shortest median; nor
one without compression, if what the dense steps before could not hide is. Nor is a plan tried whose messages alone, by
what those of smaller plans took, make its step this long."""

_WORTH = 0.95
"""The share of the bytes below which another compressor for some tensors is worth its messages: with 1.5 % fewer bytes,
steps of a ResNet took 7 % longer (four ranks, 100 Mbit/s)."""


class PayloadCosts:
    """Compares plans by the bytes of their payloads.

    Args:
        payload_bytes: of a step, by the digest of the plan, where it is known.
        tried: the plans of the trials; the list may grow.
        dense: median seconds of dense steps before the trials; infinite if there were none.
    """

    def __init__(self, payload_bytes: Mapping[str, float], tried: Sequence[Tried], dense: float) -> None:
        self._bytes, self._tried, self._dense = payload_bytes, tried, dense

    def is_smaller(self, one: Tried) -> bool:
        """Whether its payloads are known to be smaller than those of the quickest plan so far."""
        return self._bytes_of(one) < self._quickest_bytes

    def is_no_larger(self, one: Tried) -> bool:
        """Whether they are known to be of that size at most."""
        return self._bytes_of(one) <= self._quickest_bytes

    def is_larger(self, one: Tried) -> bool:
        """Whether they are known to be larger."""
        return self._bytes_of(one) > self._quickest_bytes

    def is_too_large(self, one: Tried) -> bool:
        """Whether messages alone make a plan far too long, by what the bytes of others have taken.

        Two plans that send at the same time in the step show it if the larger one takes clearly longer, unless another
        compressor with as many bytes as this plan, or more, took less than that. ``onebit`` and ``int2`` differ by too
        few bytes to show it. A plan without compression may save as much by its missing encodes as the quickest takes.
        """
        best = min(self._tried, key=lambda other: other.seconds)
        limit = HOPELESS * best.seconds * (1 if compresses(one.plan) else 2)
        if min(self._dense, self.at_most(one)) <= limit:
            return False
        more = self._bytes_of(one) - self._bytes_of(best)
        return any(
            self._bytes_of(large) <= self._bytes_of(one)
            and best.seconds + more * self._seconds_per_byte(small, large) > limit
            for small, large in itertools.permutations(filter(_tells_of_messages, self._tried), 2)
            if self._is_slower_by_bytes(large, small) and _families(large.plan) <= {*LIKE_FP32}
        )

    def at_most(self, one: Tried) -> float:
        """About what a plan takes at most: the time of one that sends more at the same time, with encodes as quick."""
        larger = [
            other.least
            for other in self._tried
            if other.times
            and other.plan.held == one.plan.held
            and self._bytes_of(one) <= self._bytes_of(other)
            and _encodes_quickly(other.plan)
        ]
        return min(larger, default=math.inf) if _encodes_quickly(one.plan) else math.inf

    def may_be_quickest(self, one: Tried) -> bool:
        """Whether a plan should be, by one with larger payloads: if it is not, other work may have disturbed it."""
        return self.at_most(one) <= min(other.least for other in self._tried) < math.inf

    def can_tell(self, one: Tried) -> bool:
        """Whether the step of a plan can show that larger ones need no trial."""
        larger = any(not other.times and self._bytes_of(other) > self._bytes_of(one) for other in self._tried)
        return larger and _encodes_quickly(one.plan)

    def would_tell(self, one: Tried) -> bool:
        """Whether a turn of a plan that was followed before the trials, when all was slower, would show it."""
        return (
            self.can_tell(one)
            and len(one.times) == one.given[1]
            and any(self._is_slower_by_bytes(one, small) for small in filter(_tells_of_messages, self._tried))
        )

    def _is_slower_by_bytes(self, large: Tried, small: Tried) -> bool:
        """Whether a plan takes clearly longer than one with smaller payloads that sends at the same time."""
        alike = large.plan.held == small.plan.held and self._bytes_of(small) < self._bytes_of(large)
        return alike and large.seconds >= BEHIND * small.seconds

    def _seconds_per_byte(self, small: Tried, large: Tried) -> float:
        return (large.seconds - small.seconds) / (self._bytes_of(large) - self._bytes_of(small))

    def _bytes_of(self, one: Tried) -> float:
        """Of its payloads in a step; NaN if they are not known."""
        return self._bytes.get(one.plan.digest, math.nan)

    @property
    def _quickest_bytes(self) -> float:
        return self._bytes_of(min(self._tried, key=lambda other: other.least))


def _tells_of_messages(one: Tried) -> bool:
    """Whether a plan had a turn, and its encodes take about as long as those of others."""
    first, times = one.given
    return len(one.first) > first and len(one.times) > times and _encodes_quickly(one.plan)


def _encodes_quickly(plan: Plan) -> bool:
    """Whether its compressors take about the same time, so that messages are what makes plans of this kind differ."""
    found = _families(plan)
    return bool(found) and found <= {*FOR_MOMENTA}


def _families(plan: Plan) -> set[str]:
    """The names of its compressors, without parameters."""
    return {spec.partition(":")[0] for spec in methods(plan)}


def payload_bytes(plan: Plan, workload: Workload) -> float:
    """The bytes of all gradients as a plan encodes them."""
    total = 0
    for tensor in workload.tensors:
        strategy = plan.strategies.get(tensor.name, plan.default)
        if strategy is None or strategy.compressor == "none":
            total += tensor.nbytes
        else:
            total += get(strategy.compressor).at(None).nbytes(tensor.size)
    return float(total)


def without_needless(plans: Sequence[Plan], workload: Workload) -> list[Plan]:
    """Plans, the smallest payloads first, but for those that mix more compressors than a later one for few bytes.

    Each compressor has messages of its own.
    """
    nbytes = [payload_bytes(plan, workload) for plan in plans]
    return [
        plan
        for place, plan in enumerate(plans)
        if not any(
            methods(later) < methods(plan) and nbytes[place] > _WORTH * more
            for later, more in zip(plans[place + 1 :], nbytes[place + 1 :])
        )
    ]


def methods(plan: Plan) -> frozenset[str]:
    """The compressors of a plan."""
    return frozenset(strategy.compressor for strategy in plan.strategies.values()) - {"none"}


def compresses(plan: Plan) -> bool:
    """Whether any tensor is compressed."""
    return bool(methods(plan))
