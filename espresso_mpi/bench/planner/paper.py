"""Gaps to the bound, one plan in every order, and the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from espresso_mpi.planner.model.timeline import ORDERS

from ..harness.columns import size_text
from .published import DISTANCE, GAINS, SCALING, PublishedGain
from .rows import Against, Factor, Gap, Orders
from .setups import UPPER_BOUND, Setup, setup

CLOSE = 10.0
"""Percentage points within which a gain counts as the published one."""

BUFFER = 25 << 20
"""Bytes of a buffer in which PyTorch's DDP sends gradients, unless told otherwise."""


def gap(at: Setup, fused: bool) -> Gap:
    """Our search beside its bound, Algorithms 1 and 2, and fusion."""
    return Gap(
        at.model, at.testbed, at.compressor, len(at.workload.tensors), at.found.seconds, at.found.bound,
        at.algorithms.seconds, at.fused.seconds if fused else None, at.fused.bound if fused else None, at.dense,
    )  # fmt: skip


def orders(at: Setup) -> Orders:
    """The plan of our search, and in every order the one that is made for the order ``backprop``."""
    made, other = at.found, at.relaxed
    backprop, fifo, priority, schedule = (at.problem.ordered(order).seconds(other.choice) for order in ORDERS)
    return Orders(at.model, at.testbed, at.compressor, backprop, fifo, priority, schedule, made.seconds, made.bound,
                  other.bound)  # fmt: skip


# --- gains ------------------------------------------------------------------------------------------------------------


def against(published: PublishedGain) -> Against:
    """One published gain and ours, and why they differ."""
    at = setup(published.model, published.testbed, published.compressor)
    bare = _against(at, published.baseline, published.percent, "")
    return replace(bare, reason=reason(at, bare))


def _against(at: Setup, method: str, percent: float | None, why: str) -> Against:
    return Against(at.model, at.testbed, at.compressor, method, at.by(method), at.found.seconds, at.algorithms.seconds,
                   at.compute, percent, why)  # fmt: skip


def reason(at: Setup, row: Against) -> str:
    """What the run says of a gain that is not the published one; what it does not show is left open."""
    assert row.published is not None
    if abs(row.gain - row.published) <= CLOSE:
        return f"within {CLOSE:.0f} points"
    most, words = 100 * (row.seconds / row.compute - 1), []
    if row.published > most:
        words.append(f"at most {most:.0f} % here, by a step whose synchronisation takes no time")
    if row.gain > row.published:
        fused = 100 * (at.by(row.method, BUFFER) / row.plan - 1)
        words.append(f"in buffers of {size_text(BUFFER)} the gain is {fused:.0f} %")
    return "; ".join(words + _beside_fp32(at, row)) or "open"


def _beside_fp32(at: Setup, row: Against) -> list[str]:
    """What a compressing method's step takes of fp32's, published and ours, where the paper has both."""
    known = {g.baseline: g.percent for g in GAINS if (g.model, g.testbed, g.compressor) == _place(at)}
    if row.method == "fp32" or "fp32" not in known or row.published is None:
        return []
    theirs, ours = (100 + row.published) / (100 + known["fp32"]), row.seconds / at.by("fp32")
    return [f"its step takes {ours:.2f} of fp32's here, {theirs:.2f} in the paper"]


def _place(at: Setup) -> tuple[str, str, str]:
    return at.model, at.testbed, at.compressor


def distance(at: Setup) -> Against:
    """The Upper Bound beside the plan: its gain is the plan's distance, below 0."""
    published = DISTANCE.get(at.model)
    row = _against(at, UPPER_BOUND, None if published is None else -100 * published, "")
    least = max(0.0, 100 * (1 - row.seconds / at.found.bound))
    return replace(row, reason=f"proved: every plan is at least {least:.1f} % away, at these speeds of compression")


def gains(models: Sequence[str]) -> list[Against]:
    """Every published gain of these models, and their distance from the Upper Bound."""
    wanted = [one for one in GAINS if one.model in models]
    rows = [against(one) for one in wanted]
    places = [(g.model, g.testbed, g.compressor) for g in GAINS] + [(s.model, s.testbed, s.compressor) for s in SCALING]
    return rows + [distance(setup(*place)) for place in dict.fromkeys(places) if place[0] in models]


METHODS = {
    "fp32": ("fp32",),
    "on the GPU": ("everything-gpu", "hitopkcomm", "hipress"),
    "on the CPU": ("everything-cpu", "byteps-compress"),
}
"""What the paper's scaling factors are of, and our baselines that do likewise."""


def factors(models: Sequence[str]) -> list[Factor]:
    """Every published scaling factor of these models, and the plan's beside them."""
    rows = []
    for one in SCALING:
        if one.model in models:
            at = setup(one.model, one.testbed, one.compressor)
            rows += [_factor(at, method, at.by(method), one.factor) for method in METHODS[one.method]]
    for place in dict.fromkeys((one.model, one.testbed, one.compressor) for one in SCALING if one.model in models):
        at = setup(*place)
        rows += [_factor(at, "our plan", at.found.seconds, None), _factor(at, UPPER_BOUND, at.by(UPPER_BOUND), None)]
    return sorted(rows, key=lambda row: (row.testbed, row.model))


def _factor(at: Setup, method: str, seconds: float, published: float | None) -> Factor:
    return Factor(at.model, at.testbed, at.compressor, method, at.compute / seconds, published)
