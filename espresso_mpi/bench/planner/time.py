"""How long deciding takes: for the models, and as tensors and options grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from espresso_mpi.planner.model.problem import Problem
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.planner.model.timeline import Order
from espresso_mpi.planner.model.tree import routes
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor
from espresso_mpi.planner.search.algorithms import algorithm1, algorithm2
from espresso_mpi.planner.search.fused_search import search_fused
from espresso_mpi.planner.search.search import search
from espresso_mpi.types import Route

from .published import SELECTION
from .rows import ScalingRow, Selection
from .setups import Setup, Timer

METHODS = ALGORITHMS, SEARCH, FUSED = "algorithms 1+2", "search", "search, fused"

# --- selection --------------------------------------------------------------------------------------------------------


def selection(setup: Setup, timer: Timer, methods: Sequence[str]) -> Iterator[Selection]:
    """The methods to decide about a setup."""
    paper = SELECTION.get(setup.model)
    for method, decide in ((method, _METHODS[method]) for method in methods):
        begin = time.perf_counter()
        decide(setup, Timer(1, 1, 0.0))
        first = time.perf_counter() - begin
        took = decide(setup, timer)
        yield Selection(
            setup.model, setup.testbed, setup.compressor, method, len(setup.workload.tensors), took.sizes, took.options,
            took.repeats, first, took.problem, took.decide, took.offload,
            paper.decide if paper else None, paper.offload if paper else None,
        )  # fmt: skip


@dataclass(frozen=True)
class _Durations:
    """Seconds of the parts of a decision, and how large its problem was."""

    sizes: int
    options: int
    repeats: int
    problem: float
    decide: float
    offload: float | None = None


def _algorithms(setup: Setup, timer: Timer) -> _Durations:
    problem, pricing, repeats = timer(setup.reached)
    first, decide, _ = timer(lambda: algorithm1(problem))
    _, offload, _ = timer(lambda: algorithm2(problem, first))
    return _Durations(problem.first.size - 1, _options(problem), repeats, pricing, decide, offload)


def _search(setup: Setup, timer: Timer) -> _Durations:
    problem, pricing, repeats = timer(setup.candidates)
    _, decide, _ = timer(lambda: search(problem))
    return _Durations(problem.first.size - 1, _options(problem), repeats, pricing, decide)


def _fused(setup: Setup, timer: Timer) -> _Durations:
    """Buffers have candidates of their own, which are priced within the search."""
    found, decide, repeats = replace(timer, least=1)(
        lambda: search_fused(setup.workload, setup.profile, [setup.compressor])
    )
    problem = found[1]
    return _Durations(problem.first.size - 1, _options(problem), repeats, 0.0, decide)


_METHODS: dict[str, Callable[[Setup, Timer], _Durations]] = {ALGORITHMS: _algorithms, SEARCH: _search, FUSED: _fused}


def _options(problem: Problem) -> int:
    return int(problem.first[-1])


# --- scaling ----------------------------------------------------------------------------------------------------------

TENSORS, DIFFERENT, OPTIONS = "tensors", "tensors of different sizes", "options"
RELAXED = "tensors, in backprop"


def synthetic(workload: Workload, tensors: int, different: bool = False) -> Workload:
    """A model of so many tensors, with the sizes of a real one in its order, each with its part of the backward pass.

    Args:
        different: a size that was there before grows by as many elements as it was, so that none repeats.
    """
    places = np.arange(tensors) * len(workload.tensors) // tensors
    sizes = [workload.tensors[place].size for place in places]
    if different:
        seen: set[int] = set()
        for number, size in enumerate(sizes):
            while size in seen:
                size += 1
            seen.add(size)
            sizes[number] = size
    ready = np.cumsum(workload.backward[places])
    made = tuple(WorkloadTensor(f"t{i}", size, float(at)) for i, (size, at) in enumerate(zip(sizes, ready)))
    return replace(workload, tensors=made, source=f"{tensors} tensors after {workload.source}")


def by_tensors(
    setup: Setup, counts: Sequence[int], different: bool, timer: Timer, tick: Callable[[], None],
    order: Order = "schedule",
) -> list[ScalingRow]:  # fmt: skip
    """Search in synthetic models of more and more tensors."""
    rows, along = [], DIFFERENT if different else TENSORS if order == "schedule" else RELAXED
    search(Problem.of(synthetic(setup.workload, 3), setup.profile, [setup.compressor], order=order))  # compiles
    for count in counts:
        workload = synthetic(setup.workload, count, different)
        rows.append(_grown(along, "", count, workload, setup.profile, [setup.compressor], None, timer, order))
        tick()
    return rows


@dataclass(frozen=True)
class Choice:
    """What there is to choose from: compressors and routes, None: all of the tree."""

    label: str
    compressors: tuple[str, ...]
    routes: tuple[Route, ...] | None = None


def choices(compressor: str, others: Sequence[str]) -> list[Choice]:
    """More and more to choose from; ``others`` are added one by one."""
    on_gpu = routes(("gpu",))
    found = [
        Choice("dense", (), tuple(route for route in on_gpu if not route.compressed)),
        Choice(f"and {compressor} on the GPU", (compressor,), on_gpu),
        Choice("and on the CPU: the whole tree", (compressor,)),
    ]
    for count, other in enumerate(others, 1):
        found.append(Choice(f"and {other}", (compressor, *others[:count])))
    return found


def by_options(setup: Setup, given: Sequence[Choice], timer: Timer, tick: Callable[[], None]) -> list[ScalingRow]:
    """Search in one model with more and more to choose from."""
    rows = []
    for choice in given:
        single = replace(setup.workload, tensors=setup.workload.tensors[-1:])
        full = Problem.of(single, setup.profile, choice.compressors, routes=choice.routes, prune=False)
        rows.append(_grown(OPTIONS, choice.label, _options(full), setup.workload, setup.profile, choice.compressors,
                           choice.routes, timer))  # fmt: skip
        tick()
    return rows


def _grown(
    along: str, label: str, at: int, workload: Workload, profile: Profile, compressors: Sequence[str],
    given: Sequence[Route] | None, timer: Timer, order: Order = "schedule",
) -> ScalingRow:  # fmt: skip
    Problem.of(workload, profile, compressors, routes=given)  # walks the routes
    problem, pricing, repeats = timer(lambda: Problem.of(workload, profile, compressors, routes=given, order=order))
    found, decide, _ = timer(lambda: search(problem))
    return ScalingRow(along, label, at, pricing, decide, found.seconds / found.bound - 1, repeats)


def draw(rows: Sequence[ScalingRow], path: Path) -> None:
    """Write a PNG: seconds against tensors and against options."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _panel(left, [row for row in rows if row.along == TENSORS], "o-", "")
    _panel(left, [row for row in rows if row.along == DIFFERENT], "s:", ", sizes all different")
    _panel(right, [row for row in rows if row.along == OPTIONS], "o-", "")
    left.set(xlabel="tensors", ylabel="milliseconds", title="Selection time against tensors")
    right.set(xlabel="options of a tensor", title="and against options")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, format="png")


def _panel(axes: Any, rows: Sequence[ScalingRow], style: str, what: str) -> None:
    at = [row.at for row in rows]
    axes.plot(at, [row.problem * 1e3 for row in rows], style, color="C0", label=f"candidates{what}")
    axes.plot(at, [row.decide * 1e3 for row in rows], style, color="C1", label=f"decision{what}")
