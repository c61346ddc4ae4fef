"""Why Algorithms 1 and 2 end where they do: their distance from the Upper Bound, with one thing changed at a time.

The distance is the share of the Upper Bound's throughput that is missing, as the paper states it. What is changed:

- the candidates: those only that compress between nodes, and not inside them as well;
- the order: tensors in that of the backward pass, the earliest first, instead of the largest first;
- the length of the backward pass: the one whose fp32 step has the published scaling factor, not the measured one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from espresso_mpi.planner.model.problem import Problem, evaluated
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.planner.model.workload import Workload
from espresso_mpi.planner.search.algorithms import Chosen, algorithm1, algorithm2, reachable
from espresso_mpi.planner.search.baselines import baseline, upper_bound
from espresso_mpi.planner.search.search import search
from espresso_mpi.planner.workloads.models import model_workload
from espresso_mpi.types import Collective, Decode, Encode, Route

from .published import DISTANCE, GAINS, SCALING
from .rows import Distance
from .setups import profile_of

SHORTEST, LONGEST, CLOSE = 1e-3, 10.0, 1.001
"""Seconds of a backward pass that are tried for the published scaling factor, and to which factor."""


def distances(models: Sequence[str]) -> list[Distance]:
    """Of every place that the paper has a distance or scaling factors of: the backward pass as measured, and fitted."""
    rows = []
    places = [(o.model, o.testbed, o.compressor) for o in SCALING]
    places += [(o.model, o.testbed, o.compressor) for o in GAINS]
    for model, testbed, compressor in dict.fromkeys(places):
        factors = [o.factor for o in SCALING if (o.model, o.testbed, o.method) == (model, testbed, "fp32")]
        if model not in models or not (factors or model in DISTANCE):
            continue
        published = factors[0] if factors else None
        profile = profile_of(testbed)
        row = distance(model_workload(model), profile, compressor)
        kept: dict[str, Any] = {"model": model, "testbed": testbed, "compressor": compressor,
                "published": DISTANCE.get(model), "published_factor": published}  # fmt: skip
        rows.append(replace(row, **kept, backward=None))
        if published is not None and compressor in [o.compressor for o in SCALING if o.model == model]:
            backward = fitted(model, profile, compressor, published)
            row = distance(model_workload(model, backward=backward), profile, compressor)
            rows.append(replace(row, **kept, backward=backward))
    return rows


def distance(workload: Workload, profile: Profile, compressor: str) -> Distance:
    """One line, without its names."""
    upper = upper_bound(workload, profile, compressor)
    routes = reachable()
    every = Problem.of(workload, profile, [compressor], routes=routes, prune=False)
    between = tuple(route for route in routes if not compresses_inside(route))
    fewer = Problem.of(workload, profile, [compressor], routes=between, prune=False)
    usual, only = decided(every), decided(fewer)
    earliest = decided(every, range(every.tensors))
    ours = search(Problem.of(workload, profile, [compressor]))
    return Distance(
        "", "", compressor, None, workload.seconds / _fp32(workload, profile, compressor), None, upper,
        usual.seconds, only.seconds, earliest.seconds, ours.seconds, ours.bound,
        gpu_seconds(every, usual), gpu_seconds(fewer, only), None,
    )  # fmt: skip


def decided(problem: Problem, order: Sequence[int] | None = None) -> Chosen:
    """What Algorithms 1 and 2 choose."""
    return algorithm2(problem, algorithm1(problem, order))


def gpu_seconds(problem: Problem, chosen: Chosen) -> float:
    """Seconds that compression takes of the GPU in a plan."""
    options, lanes = problem.timeline.options, problem.timeline.lanes
    lane = options.lane[chosen.choice] % lanes.count
    used = np.arange(lane.shape[1]) < options.count[chosen.choice][:, None]
    each = options.seconds[chosen.choice] * options.repeats[chosen.choice][:, None]
    return float(each[used & (lane == lanes.gpu)].sum())


def compresses_inside(route: Route) -> bool:
    """Whether payloads travel inside nodes."""
    packed = False
    for step in route.steps:
        packed = isinstance(step, Encode) or (packed and not isinstance(step, Decode))
        if packed and isinstance(step, Collective) and step.level != "inter":
            return True
    return False


def fitted(model: str, profile: Profile, compressor: str, factor: float) -> float:
    """Seconds of the backward pass whose fp32 step scales by a factor; the longer it is, the better it scales."""
    low, high = SHORTEST, LONGEST
    while high > low * CLOSE:
        middle = math.sqrt(low * high)
        workload = model_workload(model, backward=middle)
        if workload.seconds / _fp32(workload, profile, compressor) < factor:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def _fp32(workload: Workload, profile: Profile, compressor: str) -> float:
    problem, choice = evaluated(baseline("fp32", workload, profile, compressor), workload, profile)
    return problem.seconds(choice)
