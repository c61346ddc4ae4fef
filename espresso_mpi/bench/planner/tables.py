"""Tables of what ``bench planner`` found, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..harness.columns import MS, PERCENT, PERCENT_2, RATIO, Column, Table, Unit
from .published import USE_OF_GAINS, USE_OF_SCALING
from .rows import Row, ScalingRow, Selection

Value = Callable[[Any, Sequence[Any]], float | None]

TIMES = 10
"""Our search may take this many times what both algorithms of the paper take."""


@dataclass(frozen=True)
class Part:
    """One part of the suite.

    Attributes:
        name: of its rows; title: above its table; text: what the table says, for the report.
        table: of its rows.
        notes: sentences below the table.
    """

    name: str
    title: str
    text: str
    table: Table
    notes: Callable[[Sequence[Any]], list[str]] = lambda rows: []


# --- selection time ---------------------------------------------------------------------------------------------------


def within_limit(row: Selection) -> str:
    """Whether the times are at most the allowed ones: yes, the decision only, no; nothing for models without."""
    if row.paper_decide is None or row.paper_offload is None:
        return ""
    if row.offload is None:
        allowed = TIMES * (row.paper_decide + row.paper_offload)
        return _answer(row.problem + row.decide <= allowed, row.decide <= allowed)
    offload = row.offload <= row.paper_offload
    decide = row.decide <= row.paper_decide
    return _answer(offload and row.problem + row.decide <= row.paper_decide, offload and decide)


def _answer(whole: bool, decision: bool) -> str:
    return "yes" if whole else "decision only" if decision else "no"


def allowed(row: Selection) -> str:
    """The times of the paper that a row is compared with."""
    if row.paper_decide is None or row.paper_offload is None:
        return ""
    paper = f"{row.paper_decide * 1e3:.0f} + {row.paper_offload * 1e3:.0f}"
    return paper if row.offload is not None else f"{TIMES} · ({paper})"


# --- columns ----------------------------------------------------------------------------------------------------------

_MODEL, _TESTBED = Column("model", "model", left=True), Column("testbed", "testbed", left=True)
_COMPRESSOR = Column("compressor", "compressor", left=True)
_FACTOR = replace(RATIO, none="–")


def _over(above: str, below: str) -> Value:
    """By how much one field is above another, as a share of that; None where the row has none."""

    def value(row: Any, rows: Sequence[Any]) -> float | None:
        more, less = getattr(row, above), getattr(row, below)
        return None if more is None or less is None else more / less - 1

    return value


def _missing(field: str) -> Value:
    return lambda row, rows: row.missing(getattr(row, field))


def summary(shares: Sequence[float]) -> tuple[float, float]:
    """Geometric mean and largest of what is above 1 by these shares, each less 1."""
    return float(np.exp(np.mean(np.log1p(shares)))) - 1, max(shares)


def _with_means(*columns: Column) -> Table:
    """A table with two more lines: of the columns of shares, the geometric mean and the largest."""

    def lines(rows: Sequence[Any]) -> list[list[str]]:
        return [[label, *(_mean(column, rows, place) for column in columns[1:])]
                for place, label in enumerate(("mean", "worst"))]  # fmt: skip

    return Table(columns, summary=lines)


def _mean(column: Column, rows: Sequence[Any], place: int) -> str:
    if column.unit not in (PERCENT, PERCENT_2) or isinstance(column.value, str):
        return ""
    known = [one for row in rows if (one := column.value(row, rows)) is not None]
    return column.unit.text(summary(known)[place] if known else None)


# --- scaling ----------------------------------------------------------------------------------------------------------


def exponent(rows: Sequence[ScalingRow], part: Callable[[ScalingRow], float], least: int = 100) -> float | None:
    """The power of ``at`` that seconds grow with, by least squares of logarithms over points from ``least`` on.

    None for fewer than two such points.
    """
    points = [(row.at, part(row)) for row in rows if row.at >= least and part(row) > 0]
    if len({at for at, _ in points}) < 2:
        return None
    x, y = np.log(np.array(points, np.float64)).T
    return float(np.polyfit(x, y, 1)[0])


def scaling_notes(rows: Sequence[ScalingRow]) -> list[str]:
    """The fitted exponents in words."""
    found = []
    for along in dict.fromkeys(row.along for row in rows):
        own = [row for row in rows if row.along == along]
        candidates, decide = exponent(own, lambda row: row.problem), exponent(own, lambda row: row.decide)
        if candidates is not None and decide is not None:
            found.append(f"Seconds grow as a power of the number of {along}, fitted from 100 on: candidates "
                         f"{candidates:.2f}, decision {decide:.2f}.")  # fmt: skip
    return found


# --- the tables -------------------------------------------------------------------------------------------------------

PARTS: tuple[Part, ...] = (
    Part(
        "selection",
        "Selection time",
        f"""
All times are those of one core. *candidates* is `Problem.of`, which prices every route for every size and leaves out
dominated options. *decide* is Algorithm 1, or our search with its bound. *offload* is Algorithm 2. The times are
medians, after kernels were compiled and the routes of the tree were built. *first s* is the first decision of a
process, which includes this work; numba's cache has the kernels once they have been compiled. *paper ms* are the
published times of Algorithm 1 and of the search of Algorithm 2. They are the limit of both algorithms. The limit of our
search is {TIMES} times their sum. In *within limit*, *yes* includes the time of the candidates, and *decision only*
does not.
""",
        Table((
            _MODEL, _TESTBED, Column("method", "method", left=True), Column("tensors", "tensors"),
            Column("sizes", "sizes"), Column("options", "options"), Column("first s", "first", RATIO),
            Column("candidates", "problem", MS), Column("decide", "decide", MS), Column("offload", "offload", MS),
            Column("paper ms", lambda row, rows: allowed(row)),
            Column("within limit", lambda row, rows: within_limit(row), left=True),
        )),
    ),
    Part(
        "gap",
        "Gap to the certified bound",
        """
*F* is the simulated step of our search without fusion, with the update. *bound* is certified: no choice from the whole
tree is quicker, with any schedule. *algorithms 1+2*, *dense* (no compression) and *with fusion* say by how much their
step is longer than F. *with fusion* below 0 means that fusion helps. *its gap* is the distance from a bound on all
fusions of neighbours. *mean* is the geometric mean.
""",
        _with_means(
            _MODEL, _TESTBED, _COMPRESSOR, Column("tensors", "tensors"), Column("F", "seconds", MS),
            Column("bound", "bound", MS), Column("gap", _over("seconds", "bound"), PERCENT_2),
            Column("algorithms 1+2", _over("algorithms", "seconds"), PERCENT_2),
            Column("with fusion", _over("fused", "seconds"), PERCENT_2),
            Column("its gap", _over("fused", "fused_bound"), PERCENT_2),
            Column("dense", _over("dense", "seconds"), PERCENT_2),
        ),
    ),
    Part(
        "cases",
        "Random cases against full enumeration",
        """
*optimal* is the share of cases in which the result is the best of all. *worst* and *mean* say how far the result is
above the best. *violations* counts cases in which the bound is above the best, each of which would be an error.
*loosest* is the largest distance of a bound below the best.
""",
        Table((
            Column("what", "what", left=True), Column("cases", "cases"), Column("optimal", "optimal", PERCENT_2),
            Column("worst", "worst", PERCENT_2), Column("mean", "mean", Unit("", 100, ".3f", " %")),
            Column("violations", "violations"), Column("loosest", "loosest", PERCENT_2),
            Column("seconds", "seconds", Unit("", 1, ".1f")),
        )),
    ),
    Part(
        "paper",
        "The paper's gains side by side",
        """
*gain* is how much more throughput the plan has than the method, simulated on 8 nodes of 8 GPUs. *of 1+2* is the gain of
the plan by Algorithms 1 and 2. The published gains were measured on the clusters of the paper. Ours are those of the
clusters in [docs/cluster.md](docs/cluster.md), with one serial network lane. The lengths of the backward passes are
measured, and their division among the tensors is modelled ([docs/models.md](docs/models.md)). *test* means that no
parameter was set by this figure. The last column gives the reason for a difference as far as the run shows it, and
"open" otherwise.
""",
        Table((
            _MODEL, _COMPRESSOR, _TESTBED, Column("over", "method", left=True), Column("its", "seconds", MS),
            Column("gain", lambda row, rows: f"{round(row.gain)} %"),
            Column("of 1+2", lambda row, rows: f"{round(row.gain_of_algorithms)} %"),
            Column("published", "published", Unit("", 1, ".0f", " %", "–")),
            Column("use", lambda row, rows: None if row.published is None else USE_OF_GAINS, left=True),
            Column("what the run says", "reason", left=True),
        )),
    ),
    Part(
        "distance",
        "How far Algorithms 1 and 2 end from the Upper Bound",
        """
The columns show by which share the throughput is below that of the Upper Bound.

- *1+2* is the published algorithms. *between* has only candidates that compress between nodes and not inside them.
  *earliest* decides in the order of the backward pass instead of the largest tensor first. *search* is our search.
- *proved* is a bound: no plan has a smaller share.
- *backward ms* is the length of the backward pass. It is *measured* as in [docs/models.md](docs/models.md), or chosen
  so that the fp32 scaling factor is the published one.
- *GPU ms* is the time of compression on the GPU, in the plans *1+2* and *between*.

[docs/planner-evaluation.md](docs/planner-evaluation.md) draws the conclusions.
""",
        Table((
            _MODEL, _COMPRESSOR, _TESTBED, Column("backward", "backward", replace(MS, none="measured")),
            Column("fp32 factor", "factor", RATIO), Column("published factor", "published_factor", _FACTOR),
            Column("Upper Bound", "upper", MS), Column("1+2", _missing("usual"), PERCENT),
            Column("between", _missing("between"), PERCENT), Column("earliest", _missing("earliest"), PERCENT),
            Column("search", _missing("search"), PERCENT), Column("proved", _missing("bound"), PERCENT),
            Column("published", "published", Unit("", 100, ".0f", " %", "–")), Column("GPU", "gpu", MS),
            Column("GPU ms, between", "gpu_between", replace(MS, name="")),
        )),
    ),
    Part(
        "factors",
        "Scaling factors side by side",
        """
The scaling factor is the step of one GPU alone over that of 64 GPUs together, so 1 is perfect. The table shows the GPU
and CPU factors of the paper beside all of our baselines that compress on the same processor. All published factors are
*calibration*: the speeds of compression of the testbeds were set by them, with modelled steps
([docs/cluster.md](docs/cluster.md)). They are no test of the model. The steps of this table have measured backward
passes, which were not set by any figure.
""",
        Table((
            _MODEL, _COMPRESSOR, _TESTBED, Column("method", "method", left=True), Column("factor", "factor", RATIO),
            Column("published", "published", _FACTOR),
            Column("use", lambda row, rows: None if row.published is None else USE_OF_SCALING, left=True),
        )),
    ),
    Part(
        "scaling",
        "How selection time grows",
        """
These are synthetic models with the sizes of a real model, in its order.

- *tensors*: sizes repeat as in the real model. *in backprop* is the same, planned for the order `backprop`.
- *tensors of different sizes*: no size repeats, so every tensor needs candidates of its own.
- *options*: the real model with a growing number of options. *at* is the number of options of a tensor before any is
  left out.
""",
        Table((
            Column("along", "along", left=True), Column("", "label", left=True), Column("at", "at"),
            Column("candidates", "problem", MS), Column("decide", "decide", MS),
            Column("both", lambda row, rows: row.problem + row.decide, MS), Column("gap", "gap", PERCENT_2),
        )),
        scaling_notes,
    ),
    Part(
        "orders",
        "Plans for schedules and plans for `backprop`",
        """
*F* and *gap* are those of our search in the order `schedule`, with the bound on every choice and every schedule. All
other tables show these, too. The next columns show the plan that is made for the order `backprop`. In this order, a
lane can do two operations at the same time, so no executor can follow the plan. The columns have its F and its gap in
`backprop`. The others say by how much its step is above *F*: first its own figure in `backprop`, then its step in the
orders that can be executed. A figure below 0 promises a step that no executor can reach.
""",
        _with_means(
            _MODEL, _COMPRESSOR, _TESTBED, Column("F", "planned", MS),
            Column("gap", _over("planned", "bound"), PERCENT_2),
            Column("backprop", "backprop", MS), Column("its gap", _over("backprop", "relaxed_bound"), PERCENT_2),
            Column("promised", _over("backprop", "planned"), PERCENT),
            Column("fifo", _over("fifo", "planned"), PERCENT),
            Column("priority", _over("priority", "planned"), PERCENT),
            Column("schedule", _over("schedule", "planned"), PERCENT),
        ),
    ),
)  # fmt: skip


def parts(rows: Sequence[Row]) -> list[tuple[Part, list[Row]]]:
    """The tables that there are rows for, each with its rows."""
    found = [(part, [row for row in rows if row.part == part.name]) for part in PARTS]
    return [(part, own) for part, own in found if own]
