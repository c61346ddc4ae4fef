"""Small random clusters and training steps, for the tests of the planner."""

from __future__ import annotations

from typing import get_args

import numpy as np

from espresso_mpi.planner.model.curve import Curve
from espresso_mpi.planner.model.problem import Problem
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor
from espresso_mpi.planner.search.algorithms import reachable
from espresso_mpi.types import Level, Op

COMPRESSOR = "topk:ratio=0.01"


def random_line(rng, start, rate):
    """A start-up and a rate, each within a factor of three."""
    return Curve.line(start * 3 ** rng.uniform(-1, 1), 3 ** rng.uniform(-1, 1) / rate)


def random_profile(rng, nodes=4, ranks=4, compressors=(COMPRESSOR,), **more):
    """A cluster in which every operation has a speed of its own: no two options take exactly the same."""
    keys = [
        (op, level, alone) for op in get_args(Op) for level in ("flat", "intra", "inter") for alone in (False, True)
    ]
    rates = {"flat": 4e8, "intra": 8e9, "inter": 8e8}
    moves = {key: random_line(rng, 2e-5, rates[key[1]]) for key in keys if not key[2] or key[1] == "inter"}
    speeds = {"gpu": (3e-5, 3e9), "cpu": (1e-5, 4e8)}
    codecs = {
        (spec, device, direction): random_line(rng, *speeds[device])
        for spec in compressors
        for device in speeds
        for direction in ("encode", "decode")
    }
    copies = {direction: random_line(rng, 1e-5, 1e10) for direction in ("to_host", "to_gpu")}
    return Profile(nodes, ranks, codecs, moves, copies, Curve.line(0, 0), **more)


def slow_network(nodes, compressors):
    """One rank on each node, bytes that take long, and kernels that take next to nothing: the fewest bytes win."""
    keys = [(op, level, False) for op in get_args(Op) for level in get_args(Level)]
    keys += [(op, "inter", True) for op in get_args(Op)]
    codecs = {(spec, "cpu", way): Curve.line(0, 1e-12) for spec in compressors for way in ("encode", "decode")}
    return Profile(nodes, 1, codecs, dict.fromkeys(keys, Curve.line(1e-5, 1e-6)), {}, Curve.line(0, 0))


def random_workload(rng, tensors, device="gpu", sizes=3):
    """Tensors of a few different sizes, a few milliseconds apart."""
    known = [int(10 ** rng.uniform(4.5, 6.8)) for _ in range(sizes)]
    ready = np.cumsum(rng.exponential(2e-3, tensors))
    return Workload(
        tuple(WorkloadTensor(f"t{i}", known[rng.integers(sizes)], float(at)) for i, at in enumerate(ready)), device
    )


def random_problem(seed, tensors=5, routes=None, **more):
    """Of all routes that the published algorithms reach, unpruned."""
    rng = np.random.default_rng(seed)
    profile, workload = random_profile(rng), random_workload(rng, tensors)
    return Problem.of(workload, profile, [COMPRESSOR], routes=routes or reachable(), prune=False, **more)
