"""Small problems of the planner, whose choices can be counted out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from espresso_mpi.planner.model.curve import Curve
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor


def small_profile(**changes: object) -> Profile:
    """2 x 2 ranks with formulas as of the textbook, and one compressor."""
    moves = {}
    for level, members, alpha, beta in (("intra", 2, 1e-6, 1e-10), ("inter", 2, 1e-5, 1e-9), ("flat", 4, 1e-5, 1e-9)):
        for op in ("allreduce", "reduce_scatter", "allgather", "alltoall", "reduce", "gather", "broadcast"):
            for alone in (False, True) if level == "inter" else (False,):
                times = 2 if op == "allreduce" else 1
                moves[op, level, alone] = Curve.line(times * (members - 1) * alpha, times * beta * (1 if alone else 2))
    codecs = {
        ("int8", "cpu", direction): Curve.line(2e-6, rate) for direction, rate in (("encode", 5e-10), ("decode", 2e-10))
    }
    profile = Profile(2, 2, codecs, moves, {}, Curve.line(0.0, 1e-11), call=1e-5, tensor=2e-6)
    return replace(profile, **changes)


def small_workload(tensors: int, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    ready = np.cumsum(rng.uniform(0, 2e-4, tensors))
    sizes = (10 ** rng.uniform(2, 5, tensors)).astype(int)
    return Workload(tuple(WorkloadTensor(f"t{i}", int(n), float(t)) for i, (n, t) in enumerate(zip(sizes, ready))))


def contiguous(tensors: int) -> list[tuple[tuple[int, ...], ...]]:
    """All ways to cut some tensors into neighbours."""
    found = []
    for cuts in itertools.product((False, True), repeat=tensors - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), tensors]
        found.append(tuple(tuple(range(a, b)) for a, b in itertools.pairwise(edges)))
    return found
