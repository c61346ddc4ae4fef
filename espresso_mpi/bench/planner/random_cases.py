"""Random small problems for the planner, whose optimum can be enumerated."""

from __future__ import annotations

import numpy as np

from espresso_mpi.files.compiled import compiled
from espresso_mpi.planner.model.curve import Curve
from espresso_mpi.planner.model.dispatch import scheduled, served
from espresso_mpi.planner.model.problem import Problem
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.planner.model.timeline import (
    ORDERS,
    ROUNDS,
    Lanes,
    OptionTable,
    Order,
    Timeline,
    backprop_time,
    virtual,
)
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor
from espresso_mpi.types import Route

_ROUTE = Route.parse("flat")


def random_case(
    rng: np.random.Generator, tensors: int, options: int, *, order: Order = "schedule", lanes: Lanes | None = None
) -> Problem:
    """A problem without a cluster: its options are random operations, 1 to ``options`` of them for each tensor.

    Durations are from 0 to 1, whole tenths in half of the cases, so that ties and zeros occur; backward times likewise.
    Some options have several segments. Without ``lanes`` they are random too.
    """
    where = _lanes(rng) if lanes is None else lanes
    counts = rng.integers(1, options + 1, tensors)
    table = _options(rng, int(counts.sum()), where, bool(rng.integers(2)))
    backward = rng.uniform(0, 1, tensors) * rng.choice([0.0, 0.3, 1.0], tensors)
    workload = Workload(tuple(WorkloadTensor(f"t{i}", 1, float(ready)) for i, ready in enumerate(np.cumsum(backward))))
    timeline = Timeline(np.ascontiguousarray(workload.backward), table, where, order)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    rows = table.count.size
    profile, set_of = Profile(1, 1, {}, {}, {}, Curve.line(0, 0)), np.arange(tensors, dtype=np.int64)
    dense, route = np.full(rows, -1, np.int32), np.zeros(rows, np.int32)
    return Problem(workload, profile, (), (_ROUTE,), timeline, set_of, first, dense, route)


def _lanes(rng: np.random.Generator) -> Lanes:
    gpu, cpu, intra, inter = (int(lane) for lane in rng.integers(0, int(rng.integers(1, 5)), 4))
    names = sorted({gpu, cpu, intra, inter})
    place = {lane: number for number, lane in enumerate(names)}
    compute = None if rng.integers(3) == 0 else place[gpu]
    return Lanes(place[gpu], place[cpu], place[intra], place[inter], compute)


def _options(rng: np.random.Generator, rows: int, lanes: Lanes, whole: bool) -> OptionTable:
    most, total = 5, lanes.count
    count = rng.integers(0, most + 1, rows).astype(np.int32)
    lane = rng.integers(0, total, (rows, most)).astype(np.int8)
    for row in range(rows):
        lane[row] = virtual(lane[row], int(count[row]), total, lanes.backward)
    seconds = rng.uniform(0, 1, (rows, most)) * (rng.uniform(0, 1, (rows, most)) < 0.8)
    repeats = np.where(rng.uniform(0, 1, rows) < 0.7, 1, rng.integers(1, 4, rows)).astype(np.int32)
    return OptionTable(lane, np.round(seconds, 1) if whole else seconds, count, repeats)


def enumerated(problem: Problem) -> tuple[float, np.ndarray]:
    """The least time of a step over all choices, one after the other, and the first that has it."""
    timeline = problem.timeline
    first = problem.first[:-1][problem.set_of]
    sizes = np.diff(problem.first)[problem.set_of]
    best, choice = _least(first, sizes, ORDERS.index(timeline.order), ROUNDS, timeline.tables)
    return best + problem.around, choice


@compiled
def _least(first, sizes, order, rounds, tables):  # type: ignore[no-untyped-def]
    """F of every choice; ``order``: its place in ``ORDERS``."""
    choice, found, best = first.copy(), first.copy(), np.inf
    while True:
        if order == 0:
            time = backprop_time(choice, tables)
        elif order == 3:
            time = scheduled(choice, tables, rounds)[0]
        else:
            time = served(choice, tables, order == 2)[0]
        if time < best:
            best = time
            found[:] = choice
        place = 0
        while place < choice.size:  # count up, the first tensor quickest
            choice[place] += 1
            if choice[place] < first[place] + sizes[place]:
                break
            choice[place] = first[place]
            place += 1
        if place == choice.size:
            return best, found
