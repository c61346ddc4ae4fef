"""What ``bench planner`` finds, as rows; every kind of row names the part that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espresso_mpi.files import schema


@dataclass(frozen=True)
class Selection:
    """How long one method of deciding takes for one model.

    Attributes:
        method: ``algorithms 1+2``, ``search`` or ``search, fused``.
        tensors: of the model; sizes: different ones among them; options: of all sizes together, after pruning.
        first: seconds of the first decision in this process: kernels loaded or compiled, routes walked.
        problem: median seconds to price the candidates and to leave out what is dominated.
        decide: median seconds of the decision itself: Algorithm 1, or all of the search.
        offload: median seconds of Algorithm 2.
        paper_decide, paper_offload: the paper's; None for models that it does not have.
    """

    model: str
    testbed: str
    compressor: str
    method: str
    tensors: int
    sizes: int
    options: int
    repeats: int
    first: float
    problem: float
    decide: float
    offload: float | None
    paper_decide: float | None
    paper_offload: float | None
    part: str = "selection"


@dataclass(frozen=True)
class Gap:
    """How far a decision is above what is proved of every decision.

    Attributes:
        seconds: F of our search; bound: certified; algorithms: F of Algorithms 1 and 2; dense: F of nothing compressed.
        fused: F of our search over buffers as well; fused_bound: on all fusions of neighbours; None where not run.
    """

    model: str
    testbed: str
    compressor: str
    tensors: int
    seconds: float
    bound: float
    algorithms: float
    fused: float | None
    fused_bound: float | None
    dense: float
    part: str = "gap"


@dataclass(frozen=True)
class Cases:
    """Random cases against full enumeration.

    Attributes:
        what: what was compared.
        optimal: share of cases in which F is that of the best.
        worst: largest F / best - 1; mean: of all cases.
        violations: cases in which the bound is above the best; None where there is no bound.
        loosest: largest best / bound - 1; None likewise.
        seconds: that all took.
    """

    what: str
    cases: int
    optimal: float
    worst: float
    mean: float
    violations: int | None
    loosest: float | None
    seconds: float
    part: str = "cases"


@dataclass(frozen=True)
class Against:
    """The simulated step of one method beside the plan's, and what the paper says.

    Attributes:
        method: a baseline, or ``upper bound``.
        seconds: F of that method; plan: F of our search; algorithms: F of Algorithms 1 and 2; compute: seconds of a
            step whose synchronisation takes no time.
        published: the gain over that method in percent, None where the paper gives none.
        reason: where they differ, what the run says of it.
    """

    model: str
    testbed: str
    compressor: str
    method: str
    seconds: float
    plan: float
    algorithms: float
    compute: float
    published: float | None
    reason: str
    part: str = "paper"

    @property
    def gain(self) -> float:
        """Percent of throughput that the plan gains over that method."""
        return 100 * (self.seconds / self.plan - 1)

    @property
    def gain_of_algorithms(self) -> float:
        """The same for the decision of Algorithms 1 and 2."""
        return 100 * (self.seconds / self.algorithms - 1)


@dataclass(frozen=True)
class Factor:
    """A scaling factor, ours and the published one: the step on one GPU over that on all."""

    model: str
    testbed: str
    compressor: str
    method: str
    factor: float
    published: float | None
    part: str = "factors"


@dataclass(frozen=True)
class Distance:
    """Seconds of a step as Algorithms 1 and 2 decide it, beside the Upper Bound's, with one thing changed at a time.

    Attributes:
        backward: seconds of the backward pass; None: as measured.
        factor, published_factor: scaling factor of fp32; None where not published.
        upper: the Upper Bound. usual: both algorithms as published. between: with candidates only that compress
            between nodes. earliest: with the earliest tensors first. search: of our search; bound: proved of all.
        gpu, gpu_between: seconds of compression on the GPU in the plans ``usual`` and ``between``.
        published: distance from the Upper Bound, as a share of its throughput; None where the paper gives none.
    """

    model: str
    testbed: str
    compressor: str
    backward: float | None
    factor: float
    published_factor: float | None
    upper: float
    usual: float
    between: float
    earliest: float
    search: float
    bound: float
    gpu: float
    gpu_between: float
    published: float | None
    part: str = "distance"

    def missing(self, seconds: float) -> float:
        """The share of the Upper Bound's throughput that a step of so many seconds misses."""
        return 1 - self.upper / seconds


@dataclass(frozen=True)
class ScalingRow:
    """How long deciding takes for one size of problem.

    Attributes:
        along: ``tensors``, ``tensors of different sizes`` or ``options``.
        label: what was added last, where options grow.
        at: number of tensors, or of options of each size before pruning.
        problem, decide: median seconds, as in ``Selection``; gap: F / bound - 1 of what was found.
    """

    along: str
    label: str
    at: int
    problem: float
    decide: float
    gap: float
    repeats: int
    part: str = "scaling"


@dataclass(frozen=True)
class Orders:
    """The plan that is made for the order ``schedule``, and in every order the one that is made for ``backprop``.

    Attributes:
        backprop, fifo, priority, schedule: F of the latter; relaxed_bound: certified, in the order ``backprop``.
        planned: F of the former; bound: certified, on every choice and every schedule.
    """

    model: str
    testbed: str
    compressor: str
    backprop: float
    fifo: float
    priority: float
    schedule: float
    planned: float
    bound: float
    relaxed_bound: float
    part: str = "orders"


Row = Selection | Gap | Cases | Against | Factor | Distance | ScalingRow | Orders

KINDS: dict[str, type[Row]] = {
    kind.part: kind for kind in (Selection, Gap, Cases, Against, Factor, Distance, ScalingRow, Orders)
}  # fmt: skip


def read(raw: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows from what a JSON file holds.

    Raises:
        KeyError: an unknown part. ConfigError: a row has other fields.
    """
    return [schema.convert(row, KINDS[row["part"]], f"rows: part {row['part']}") for row in raw]
