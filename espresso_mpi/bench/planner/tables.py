"""Tables of what ``bench planner`` found, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from espresso_mpi.files.output import milliseconds, number

from .published import USE_OF_GAINS, USE_OF_SCALING
from .rows import Against, Cases, Distance, Factor, Gap, Growth, Orders, Row, Selection

Lines = list[list[str]]

TIMES = 10
"""Our search may take this many times what both algorithms of the paper take."""


@dataclass(frozen=True)
class Part:
    """One table.

    Attributes:
        name: of its rows; title: above it; text: what it says, for the report.
        header: headings; left: those of text.
        lines: what stands below them.
    """

    name: str
    title: str
    text: str
    header: tuple[str, ...]
    left: tuple[str, ...]
    lines: Callable[[Sequence[Any]], Lines]


# --- selection time ---------------------------------------------------------------------------------------------------


def verdict(row: Selection) -> str:
    """Whether the times are at most the allowed ones; nothing for models without."""
    if row.paper_decide is None or row.paper_offload is None:
        return ""
    if row.offload is None:
        allowed = TIMES * (row.paper_decide + row.paper_offload)
        return _verdict(row.problem + row.decide <= allowed, row.decide <= allowed)
    offload = row.offload <= row.paper_offload
    decide = row.decide <= row.paper_decide
    return _verdict(offload and row.problem + row.decide <= row.paper_decide, offload and decide)


def _verdict(whole: bool, search: bool) -> str:
    return "met" if whole else "decision met, with menus not" if search else "not met"


def allowed(row: Selection) -> str:
    """The times of the paper that a row is compared with."""
    if row.paper_decide is None or row.paper_offload is None:
        return ""
    paper = f"{row.paper_decide * 1e3:.0f} + {row.paper_offload * 1e3:.0f}"
    return paper if row.offload is not None else f"{TIMES} · ({paper})"


def _selection(rows: Sequence[Selection]) -> Lines:
    return [
        [
            r.model, r.testbed, r.way, str(r.tensors), str(r.menus), str(r.options), f"{r.first:.2f}",
            *map(milliseconds, (r.problem, r.decide, r.offload)), allowed(r), verdict(r),
        ]
        for r in rows
    ]  # fmt: skip


# --- gaps -------------------------------------------------------------------------------------------------------------


def summary(ratios: Sequence[float]) -> tuple[float, float]:
    """Geometric mean and largest of ratios, each less 1."""
    return float(np.exp(np.mean(np.log(ratios)))) - 1, max(ratios) - 1


def _gaps(rows: Sequence[Gap]) -> Lines:
    return [*map(_gap_line, rows), *(_gap_summary(rows, label, place) for place, label in enumerate(("mean", "worst")))]


def _gap_line(r: Gap) -> list[str]:
    return [r.model, r.testbed, r.compressor, str(r.tensors), milliseconds(r.seconds), milliseconds(r.bound),
            *map(_share, _ratios(r))]  # fmt: skip


def _gap_summary(rows: Sequence[Gap], label: str, place: int) -> list[str]:
    """Geometric means, or the largest of each column."""
    columns = [[one for one in column if one is not None] for column in zip(*map(_ratios, rows))]
    found = [1 + summary(column)[place] if column else None for column in columns]
    return [label, *[""] * 5, *map(_share, found)]


def _ratios(r: Gap) -> list[float | None]:
    fused = [None, None] if r.fused is None or r.fused_bound is None else [r.fused / r.seconds, r.fused / r.fused_bound]
    return [r.seconds / r.bound, r.algorithms / r.seconds, *fused, r.dense / r.seconds]


def _share(ratio: float | None) -> str:
    return "" if ratio is None else percent(ratio - 1, 2)


def percent(share: float | None, digits: int = 1) -> str:
    """A share in percent; nothing for None."""
    return "" if share is None else f"{100 * share:.{digits}f} %"


# --- the others -------------------------------------------------------------------------------------------------------


def _cases(rows: Sequence[Cases]) -> Lines:
    return [
        [
            r.what, str(r.cases), percent(r.optimal, 2), percent(r.worst, 2), percent(r.mean, 3),
            number(r.violations, "d"), percent(r.loosest, 2), f"{r.seconds:.1f}",
        ]
        for r in rows
    ]  # fmt: skip


def _paper(rows: Sequence[Against]) -> Lines:
    return [
        [
            r.model, r.compressor, r.testbed, r.way, milliseconds(r.seconds), f"{round(r.gain)} %",
            f"{round(r.gain_of_algorithms)} %", "–" if r.published is None else f"{r.published:.0f} %",
            "" if r.published is None else USE_OF_GAINS, r.reason,
        ]
        for r in rows
    ]  # fmt: skip


def _scaling(rows: Sequence[Factor]) -> Lines:
    return [
        [
            r.model, r.compressor, r.testbed, r.way, f"{r.factor:.2f}", number(r.published) or "–",
            "" if r.published is None else USE_OF_SCALING,
        ]
        for r in rows
    ]  # fmt: skip


def _distance(rows: Sequence[Distance]) -> Lines:
    return [
        [
            r.model, r.compressor, r.testbed, milliseconds(r.backward) or "measured", f"{r.factor:.2f}",
            number(r.published_factor) or "–", milliseconds(r.upper),
            *(percent(r.missing(s)) for s in (r.usual, r.between, r.earliest, r.search, r.bound)),
            percent(r.published, 0) or "–", *map(milliseconds, (r.gpu, r.gpu_between)),
        ]
        for r in rows
    ]  # fmt: skip


def _growth(rows: Sequence[Growth]) -> Lines:
    return [
        [
            r.along,
            r.label,
            str(r.at),
            *map(milliseconds, (r.problem, r.decide, r.problem + r.decide)),
            percent(r.gap, 2),
        ]
        for r in rows
    ]


def _orders(rows: Sequence[Orders]) -> Lines:
    lines = [
        [
            r.model, r.compressor, r.testbed, milliseconds(r.planned), percent(r.planned / r.bound - 1, 2),
            milliseconds(r.backprop), percent(r.backprop / r.relaxed_bound - 1, 2), *map(percent, _over_planned(r)),
        ]
        for r in rows
    ]  # fmt: skip
    for place, label in enumerate(("mean", "worst")):
        gaps = [[r.planned / r.bound for r in rows], [r.backprop / r.relaxed_bound for r in rows]]
        gap, other = (percent(summary(column)[place], 2) for column in gaps)
        over = [percent(summary([1 + one for one in column])[place]) for column in zip(*map(_over_planned, rows))]
        lines.append([label, "", "", "", gap, "", other, *over])
    return lines


def _over_planned(r: Orders) -> list[float]:
    """By how much the plan for the order ``backprop`` is above the plan, in every order, as shares."""
    return [seconds / r.planned - 1 for seconds in (r.backprop, r.fifo, r.priority, r.schedule)]


PARTS: tuple[Part, ...] = (
    Part(
        "selection",
        "Selection time",
        f"""
One core. *menus* is `Problem.of`: every route priced for every size, and what is dominated left out. *decide* is
Algorithm 1, or all of our search with its bound; *offload* is Algorithm 2. Medians, with everything compiled and the
tree's routes walked; *first s* is the first decision of the process with that (kernels come from numba's cache once
they have been compiled). *paper ms* are the published times of Algorithm 1 and of Algorithm 2's search; our search may
take {TIMES} times both. *met* counts the menus with the decision.
""",
        ("model", "testbed", "way", "tensors", "sizes", "options", "first s", "menus ms", "decide ms", "offload ms",
         "paper ms", "verdict"),
        ("model", "testbed", "way", "verdict"),
        _selection,
    ),
    Part(
        "gap",
        "Gap to the certified bound",
        """
*F* is the simulated step, update included, of our search without fusion; *bound* is proved: no choice from the whole
tree is quicker, by whatever schedule. *algorithms 1+2*, *dense* (nothing compressed) and *with fusion* (below 0: fusing
helps) are over F; *its gap* is to a bound on all fusions of neighbours. *mean* is the geometric one.
""",
        ("model", "testbed", "compressor", "tensors", "F ms", "bound ms", "gap", "algorithms 1+2", "with fusion",
         "its gap", "dense"),
        ("model", "testbed", "compressor"),
        _gaps,
    ),
    Part(
        "cases",
        "Random cases against full enumeration",
        """
*optimal* counts cases in which what was found is the best of all; *worst* and *mean* say how far it is above the best.
*violations* counts cases in which the bound is above the best: each would be an error. *loosest* is how far a bound
was below the best.
""",
        ("what", "cases", "optimal", "worst", "mean", "violations", "loosest", "seconds"),
        ("what",),
        _cases,
    ),
    Part(
        "paper",
        "The paper's gains side by side",
        """
*gain* is how much more throughput the plan has than that way, all simulated, on 8 nodes of 8 GPUs; *of 1+2* is that
of the plan by Algorithms 1 and 2. The published ones were measured on the paper's clusters; ours are as
[docs/cluster.md](docs/cluster.md) describes them, with one serial network lane. How long the backward passes take is
measured, how they are spread over tensors is modelled ([docs/models.md](docs/models.md)). *test*: nothing was set for
this figure. The last column says what the run shows of a difference, and "open" where it shows nothing.
""",
        ("model", "compressor", "testbed", "over", "its ms", "gain", "of 1+2", "published", "use", "what the run says"),
        ("model", "compressor", "testbed", "over", "use", "what the run says"),
        _paper,
    ),
    Part(
        "distance",
        "How far Algorithms 1 and 2 end from the Upper Bound",
        """
As shares of the Upper Bound's throughput that are missing. *1+2*: as published; *between*: with candidates only that
compress between nodes, and not inside them as well; *earliest*: deciding in the order of the backward pass instead
of the largest first; *search*: ours; *proved*: no plan misses less. *backward ms* is how long the backward pass is:
*measured* as in [docs/models.md](docs/models.md), or so that the fp32 scaling factor comes out as published. *GPU ms*:
what compression takes of the GPU, in the plans *1+2* and *between*. What follows stands in
[docs/planner-evaluation.md](docs/planner-evaluation.md).
""",
        ("model", "compressor", "testbed", "backward ms", "fp32 factor", "published factor", "Upper Bound ms", "1+2",
         "between", "earliest", "search", "proved", "published", "GPU ms", "GPU ms, between"),
        ("model", "compressor", "testbed"),
        _distance,
    ),
    Part(
        "scaling",
        "Scaling factors side by side",
        """
The step of one GPU alone over that of 64 together: 1 is perfect. The paper's GPU and CPU factors stand beside all of
our baselines that compress there. All published ones are *calibration*: the testbeds' speeds of compression were set
for them, with modelled steps ([docs/cluster.md](docs/cluster.md)); they are no test of the model. The steps of this
table have measured backward passes, which were set for nothing.
""",
        ("model", "compressor", "testbed", "way", "factor", "published", "use"),
        ("model", "compressor", "testbed", "way", "use"),
        _scaling,
    ),
    Part(
        "growth",
        "How selection time grows",
        """
Synthetic models with the sizes of a real one, in its order. *tensors*: sizes repeat as they do in the real one; *in
backprop*: the same, planned for the order `backprop`.
*tensors of different sizes*: none repeats, so every tensor needs a menu of its own. *options*: the real model, with
more and more to choose from; *at* is the number of options of a tensor before any is left out.
""",
        ("along", "", "at", "menus ms", "decide ms", "both ms", "gap"),
        ("along", ""),
        _growth,
    ),
    Part(
        "orders",
        "Plans for schedules and plans for `backprop`",
        """
*F* and *gap* are of the plan of our search, in the order `schedule`, and of the bound on every choice and every
schedule: what all other tables show. Beside it stands the plan that is made for the order `backprop`, in which a lane
may do two things at once, so that no executor can keep it: its F there and the gap to the bound there; then by how much
it is above *F*: its own figure in `backprop` (below 0: it promises what cannot be kept), and what it takes in the
orders that can be executed.
""",
        ("model", "compressor", "testbed", "F ms", "gap", "backprop ms", "its gap", "promised", "fifo", "priority",
         "schedule"),
        ("model", "compressor", "testbed"),
        _orders,
    ),
)  # fmt: skip


def parts(rows: Sequence[Row]) -> list[tuple[Part, list[Row]]]:
    """The tables that there are rows for, each with its rows."""
    found = [(part, [row for row in rows if row.part == part.name]) for part in PARTS]
    return [(part, own) for part, own in found if own]
