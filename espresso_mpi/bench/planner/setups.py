"""What ``bench planner`` decides about: a model, a cluster, a compressor; each decided once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TypeVar

import numpy as np

from espresso_mpi.planner.model.problem import Problem, evaluated
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.planner.model.workload import Workload
from espresso_mpi.planner.search.algorithms import Chosen, algorithm1, algorithm2, reachable
from espresso_mpi.planner.search.baselines import baseline, upper_bound
from espresso_mpi.planner.search.found import Found
from espresso_mpi.planner.search.fused_search import search_fused
from espresso_mpi.planner.search.search import search
from espresso_mpi.planner.workloads.clusters import TESTBEDS
from espresso_mpi.planner.workloads.models import model_workload
from espresso_mpi.types import Plan

T = TypeVar("T")


@cache
def profile_of(testbed: str) -> Profile:
    """The profile of one of the paper's clusters."""
    return TESTBEDS[testbed].profile()


@cache
def workload_of(model: str) -> Workload:
    """The workload of a model, its gradients on the GPU."""
    return model_workload(model)


@dataclass(frozen=True)
class Setup:
    """A model on a cluster with one compressor; what is decided about it is kept."""

    model: str
    testbed: str
    compressor: str

    @property
    def workload(self) -> Workload:
        """The model's step."""
        return workload_of(self.model)

    @property
    def profile(self) -> Profile:
        """The cluster's."""
        return profile_of(self.testbed)

    @property
    def compute(self) -> float:
        """Seconds of a step whose synchronisation takes no time: what one GPU takes alone."""
        return self.workload.seconds

    # --- the methods to decide ---

    def candidates(self) -> Problem:
        """Everything that our search may choose from."""
        return Problem.of(self.workload, self.profile, [self.compressor])

    def reached(self) -> Problem:
        """What Algorithms 1 and 2 choose from."""
        return Problem.of(self.workload, self.profile, [self.compressor], routes=reachable(), prune=False)

    @cached_property
    def problem(self) -> Problem:
        """``candidates``, once."""
        return self.candidates()

    @cached_property
    def found(self) -> Found:
        """What our search finds."""
        return search(self.problem)

    @cached_property
    def relaxed(self) -> Found:
        """What our search finds in the order ``backprop``."""
        return search(self.problem.ordered("backprop"))

    @cached_property
    def fused(self) -> Found:
        """What our search finds when tensors may travel together."""
        return search_fused(self.workload, self.profile, [self.compressor])[-1]

    @cached_property
    def algorithms(self) -> Chosen:
        """What Algorithms 1 and 2 choose."""
        problem = self.reached()
        return algorithm2(problem, algorithm1(problem))

    @cached_property
    def dense(self) -> float:
        """F of nothing compressed, each tensor by the dense route that is quickest by itself."""
        return self.problem.seconds(self.problem.dense())

    def by(self, method: str, buffer: int = 0) -> float:
        """F of a baseline, or of the Upper Bound.

        Args:
            buffer: bytes that neighbours of one strategy are brought together in buffers of; 0: each by itself.
        """
        if method == UPPER_BOUND:
            return upper_bound(self.workload, self.profile, self.compressor)
        plan = baseline(method, self.workload, self.profile, self.compressor)
        if buffer:
            plan = replace(plan, groups=together(plan, self.workload, buffer))
        problem, choice = evaluated(plan, self.workload, self.profile)
        return problem.seconds(choice)


def together(plan: Plan, workload: Workload, buffer: int) -> tuple[tuple[str, ...], ...]:
    """Neighbours with the same strategy in groups that end when they hold so many bytes."""
    groups: list[list[str]] = []
    size = 0
    for before, tensor in zip((None, *workload.tensors), workload.tensors):
        alike = before is not None and plan.strategy(before.name) == plan.strategy(tensor.name)
        if not alike or size >= buffer:
            groups.append([])
            size = 0
        groups[-1].append(tensor.name)
        size += tensor.nbytes
    return tuple(tuple(group) for group in groups if len(group) > 1)


UPPER_BOUND = "upper bound"


@cache
def setup(model: str, testbed: str, compressor: str) -> Setup:
    """The one setup of these names, with all that was decided about it."""
    return Setup(model, testbed, compressor)


# --- time -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timer:
    """How often something is repeated: at least ``least`` times, then until ``seconds`` or ``most`` are reached."""

    least: int = 5
    most: int = 25
    seconds: float = 1.0

    def __call__(self, run: Callable[[], T]) -> tuple[T, float, int]:
        """What ``run`` returned last, the median of the seconds it took, and how often it ran."""
        times: list[float] = []
        while len(times) < self.least or (len(times) < self.most and sum(times) < self.seconds):
            begin = time.perf_counter()
            result = run()
            times.append(time.perf_counter() - begin)
        return result, float(np.median(times)), len(times)


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this process on one of the cores that it may use, where the system can."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
