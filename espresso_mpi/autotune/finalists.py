"""Which of the plans that were tried go on in turns, and whether they can be told apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..types import Plan
from .payload_costs import PayloadCosts, compresses
from .tried import BEHIND, ENOUGH, Tried

_FINALISTS = 3
"""Plans that go on in turns after the first round, besides the best plan without compression."""

_CLOSE = 0.1
"""Plans are about as quick if their steps differ by this share of the shortest. In the first 15 to 25 steps of a run,
which take longer, the quicker one cannot be seen (``int8`` and ``int4``, 2 nodes with 2 ranks on 2 cores, 1 Gbit/s: 166
and 167 ms, and 155 and 130 ms later)."""

_ALIKE = 0.02
"""Plans whose steps are known to this share of the shortest need no further step: little is lost by the wrong one."""


def finalists(tried: list[Tried], payloads: PayloadCosts, pushed: bool) -> list[Tried]:
    """The quickest plans, and the quickest without compression.

    The best also runs without its schedule, if it has one: turns hide latencies of small operations, which the
    timeline counts in full. And if gradients are pushed, the quickest also run after the backward pass: traffic
    beside it slows it down, most where ranks share cores, which the model does not see.
    """
    order = sorted(tried, key=lambda one: one.least)
    plain = [one for one in order if not compresses(one.plan)][:1]
    final = [one for one in order if one in order[:_FINALISTS] or one in plain or payloads.may_be_quickest(one)]
    known = {one.plan.digest for one in tried}
    variants = [Tried(plan) for plan in _variants(order, pushed) if plan.digest not in known]
    tried += variants
    limit = BEHIND * order[0].least
    going = [one for one in final if one.least <= limit and not one.refused]
    going += variants
    for one in tried:
        one.out = not any(one is other for other in going)
    return going


def told_apart(going: Sequence[Tried]) -> bool:
    """Whether one plan is quicker than the others by twice their uncertainty, or that is small; after two turns."""
    if any(len(one.times) < ENOUGH for one in going):
        return False
    best, *others = sorted((one.result() for one in going), key=lambda one: one.seconds)
    uncertain = [one.uncertain + best.uncertain for one in others]
    apart = [one.seconds - best.seconds > 2 * by for one, by in zip(others, uncertain)]
    return all(known or by <= _ALIKE * best.seconds for known, by in zip(apart, uncertain))


def close(tried: Sequence[Tried]) -> list[Tried]:
    """The quickest plan and those that are about as quick, the quickest first."""
    going = [one for one in tried if one.times and not (one.refused or one.out)]
    order = sorted(going, key=lambda one: one.seconds)[:_FINALISTS]
    return [one for one in order if one.seconds <= (1 + _CLOSE) * order[0].seconds]


def _variants(order: Sequence[Tried], pushed: bool) -> Iterable[Plan]:
    """The best plan without its schedule, if it has one, and the finalists with pushes that are held."""
    plans = [replace(order[0].plan, schedule=None)] if order[0].plan.schedule else []
    if pushed:
        plans += [replace(one.plan, schedule=None, held=True) for one in order[:_FINALISTS]]
    return {plan.digest: plan for plan in plans}.values()
