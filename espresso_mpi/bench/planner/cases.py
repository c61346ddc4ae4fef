"""Random cases, each against every choice that there is: our search and its bound, and Algorithm 2's offload."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from espresso_mpi.files.compiled import compiled
from espresso_mpi.planner.model.dispatch import scheduled
from espresso_mpi.planner.model.problem import Problem
from espresso_mpi.planner.model.timeline import ROUNDS, Order, Timeline, backprop_time
from espresso_mpi.planner.model.tree import routes
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor
from espresso_mpi.planner.search.algorithms import Chosen, algorithm1, algorithm2, on_cpu
from espresso_mpi.planner.search.bound import lower_bound
from espresso_mpi.planner.search.search import search
from espresso_mpi.planner.workloads.clusters import Cluster, DeviceMemory, Link

from .random_cases import enumerated, random_case
from .rows import Cases

TENSORS, OPTIONS = 6, 6
"""At most, in a random case."""

SAME = 1e-9
"""Times that differ by less of themselves are equal: they are sums of the same numbers in another order."""


# --- enumeration ------------------------------------------------------------------------------------------------------


@compiled
def _least(options, sizes, rounds, tables):  # type: ignore[no-untyped-def]
    """The least F over all choices: counts through them like an odometer, and prices each from its begin.

    Args:
        options: int64 (tensors, most options), of each tensor; sizes: int64 (tensors,), how many of them count.
        rounds: of justifying schedules; below 0: in the order ``backprop``.
    """
    tensors = sizes.size
    at, choice = np.zeros(tensors, np.int64), options[:, 0].copy()
    best = np.inf
    while True:
        time = backprop_time(choice, tables) if rounds < 0 else scheduled(choice, tables, rounds)[0]
        best = min(best, time)
        place = 0
        while place < tensors:
            at[place] += 1
            if at[place] < sizes[place]:
                choice[place] = options[place, at[place]]
                break
            at[place] = 0
            choice[place] = options[place, 0]
            place += 1
        if place == tensors:
            return best


def least(timeline: Timeline, options: list[list[int]]) -> float:
    """The least F, in the orders ``schedule`` and ``backprop``, if each tensor may take any of its options. For small
    cases."""
    sizes = np.array([len(own) for own in options], np.int64)
    padded = np.array([own + own[:1] * (sizes.max() - len(own)) for own in options], np.int64)
    return float(_least(padded, sizes, ROUNDS if timeline.order == "schedule" else -1, timeline.tables))


# --- our search -------------------------------------------------------------------------------------------------------


def searched(cases: int, tick: Callable[[], None], seed: int = 0, order: Order = "schedule") -> list[Cases]:
    """Our search and its bound in random cases of up to 6 tensors with up to 6 options each."""
    begin, rng = time.perf_counter(), np.random.default_rng(seed)
    over, under = [], []
    for _ in range(cases):
        problem = random_case(rng, int(rng.integers(1, TENSORS + 1)), OPTIONS, order=order)
        found = search(problem)
        best, _ = enumerated(problem)
        bound = max(found.bound, lower_bound(problem))  # the search never says more than what it found; this might
        over.append(_ratio(found.seconds, best))
        under.append(_ratio(best, bound))
        tick()
    what = f"our search, order {order}, against every choice"
    return [_row(what, over, under, time.perf_counter() - begin)] if cases else []


def _ratio(a: float, b: float) -> float:
    """a / b; steps that take no time are equal."""
    return 1.0 if a == b else a / b if b else float("inf")


def _row(what: str, over: list[float], under: list[float] | None, seconds: float) -> Cases:
    excess = np.array(over) - 1
    slack = None if under is None else np.array(under) - 1
    return Cases(
        what, excess.size, float(np.mean(excess <= SAME)), float(excess.max()), float(np.maximum(excess, 0).mean()),
        None if slack is None else int((slack < -SAME).sum()), None if slack is None else float(slack.max()), seconds,
    )  # fmt: skip


# --- Algorithm 2 ------------------------------------------------------------------------------------------------------


def offloaded(cases: int, tick: Callable[[], None], seed: int = 0, order: Order = "schedule") -> list[Cases]:
    """Algorithm 2 after Algorithm 1 in random cases of up to 6 tensors, against all subsets of the compressed ones."""
    begin, over = time.perf_counter(), []
    for problem, first in _compressing(np.random.default_rng(seed), cases, order):
        moved = on_cpu(problem, first.choice)
        subsets = [[int(a), int(b)] if a != b else [int(a)] for a, b in zip(first.choice, moved)]
        best = least(problem.timeline, subsets) + problem.around
        over.append(algorithm2(problem, first).seconds / best)
        tick()
    what = f"Algorithm 2, order {order}, against every subset to offload"
    return [_row(what, over, None, time.perf_counter() - begin)] if cases else []


def _compressing(rng: np.random.Generator, cases: int, order: Order) -> Iterator[tuple[Problem, Chosen]]:
    """So many random cases in which Algorithm 1 compresses at least two tensors, and what it chooses."""
    while cases:
        problem = offload_case(rng, order)
        first = algorithm1(problem)
        if (problem.method[first.choice] >= 0).sum() > 1:
            cases -= 1
            yield problem, first


def offload_case(rng: np.random.Generator, order: Order = "schedule") -> Problem:
    """A few tensors on GPUs, often of equal sizes, on a random cluster; dense routes, and some to compress along."""
    sizes = (10 ** rng.uniform(4, 7, size=rng.integers(1, 4))).astype(int)
    tensors, at = [], rng.uniform(0, 0.01)
    for number in range(int(rng.integers(3, 7))):
        at += 10 ** rng.uniform(-4, -2)
        tensors.append(WorkloadTensor(f"t{number}", int(rng.choice(sizes)), float(at)))
    on_gpu = routes(("gpu",))
    packed = [route for route in on_gpu if route.compressed]
    some = [packed[place] for place in rng.choice(len(packed), size=8, replace=False)]
    every = [*(route for route in on_gpu if not route.compressed), *some, *(route.on("cpu") for route in some)]
    workload = Workload(tuple(tensors), device="gpu")
    return Problem.of(workload, _cluster(rng).profile(), ["onebit"], routes=every, order=order, prune=False)


def _cluster(rng: np.random.Generator) -> Cluster:
    """Nodes, links and processors of speeds that differ by orders of magnitude."""
    return Cluster(
        "random", int(rng.integers(2, 9)), int(rng.integers(1, 9)),
        intra=Link(3e-6, 10 ** rng.uniform(-11, -10)), inter=Link(1e-5, 10 ** rng.uniform(-10, -8.5)),
        memory={
            "gpu": DeviceMemory(10 ** rng.uniform(10, 12), 0.5, launch=2e-5),
            "cpu": DeviceMemory(10 ** rng.uniform(9.5, 11), 0.5, launch=5e-6),
        },
        compressors=("onebit",), copy=Link(1e-5, 1 / 10 ** rng.uniform(9.5, 10.5)),
    )  # fmt: skip
