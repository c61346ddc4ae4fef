"""Lower bounds on the time of a step over all fusions of its tensors into buffers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from espresso_mpi.types import ITEMSIZE

from ..model.dominance import front
from ..model.problem import Problem
from ..model.workload import Workload, WorkloadTensor
from .bound import certified
from .game import relaxed
from .networks import Network, loads, network_of_loads


def fusion_bound(problem: Problem, workload: Workload) -> float:
    """Seconds that no fusion of the tensors of a workload falls below, with no choice of compressors and routes.

    Claim: a tensor of n elements costs each lane at least n times the least that an element costs in any buffer of n
    elements or more. Proof: divide the load of every buffer among its tensors by their elements; a buffer is ready when
    its last tensor is, so what was said of loads (see ``bound``) holds for each tensor's part. The least over all
    sizes of a buffer is that over intervals of sizes: an element costs at least the load at the beginning divided by
    the size at the end, as no operation takes less time for more bytes. Sessions that cut buffers into segments pay for
    the segments' sizes, which are at least 0.3 of ``segment_bytes`` or the buffer's. A tensor takes at least as long as
    the smallest buffer that it fits in.

    Args:
        problem: of any of the fusions: what there is to choose from.
    """
    return certified(relaxed(*_fusion_network(problem, workload)).value) + problem.around


def _fusion_network(problem: Problem, workload: Workload) -> tuple[Network, np.ndarray]:
    """The network of loads of tensors in buffers, and a choice to begin with."""
    table, first, set_of = fusion_table(problem, workload)
    network = network_of_loads(table[:, :-1], table[:, -1], problem.timeline.lanes.backward, set_of, first,
                        np.ascontiguousarray(workload.backward))  # fmt: skip
    quick = [a + int(np.argmin(table[a:b, :-1].sum(axis=1))) for a, b in pairwise(first)]
    return network, np.array(quick, np.int64)[set_of]


def fusion_table(problem: Problem, workload: Workload) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What tensors cost in buffers, by the claim of ``fusion_bound``.

    Returns:
        float64 (rows, lanes + 1), seconds on each lane and of a segment; where candidate sets begin among the
        rows; the candidate set of each tensor.
    """
    units = {dtype: _units(problem, workload, dtype) for dtype in {tensor.dtype for tensor in workload.tensors}}
    limit = problem.profile.segment_bytes
    keys = [(tensor.size, tensor.dtype) for tensor in workload.tensors]
    kinds = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    blocks = []
    for size, dtype in kinds:
        unit, ends = units[dtype]
        least = min(size, 0.3 * limit / ITEMSIZE[dtype]) if limit else size
        rows = unit[ends >= least]
        blocks.append(np.hstack([rows[:, :-1] * size, rows[:, -1:]]))
    first = np.cumsum([0, *map(len, blocks)])
    set_of = np.array([kinds[key] for key in keys], np.int64)
    return np.concatenate(blocks), first, set_of


def _units(problem: Problem, workload: Workload, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """What an element costs in buffers of one type: rows of seconds on each lane and of a segment; ends of sizes."""
    sizes = [tensor.size for tensor in workload.tensors if tensor.dtype == dtype]
    limit = problem.profile.segment_bytes
    edges = _edges(int(min(min(sizes), 0.3 * limit / ITEMSIZE[dtype])) if limit else min(sizes), sum(sizes))
    alike = tuple(WorkloadTensor(str(size), size, 0.0, dtype) for size in edges)
    whole = replace(problem.profile, segment_bytes=0)
    apart = bool(limit) and problem.timeline.order == "backprop" and problem.profile.nodes > 1
    priced = Problem.of(replace(workload, tensors=alike), whole, problem.compressors, routes=problem.routes,
                        lanes=problem.timeline.lanes, order="backprop" if apart else "schedule")  # fmt: skip
    load, chain = loads(priced, apart)
    ends = np.repeat(np.array([*edges[1:], edges[-1]], np.float64), np.diff(priced.first))
    unit = np.column_stack([load / ends[:, None], chain])
    if problem.timeline.order == "schedule":  # its program takes columns as it wants them, so more cost little
        return unit, ends
    compared = np.column_stack([unit, -ends])
    kept = front(compared, np.argsort(unit[:, :-1].sum(axis=1), kind="stable"))
    return unit[kept], ends[kept]


def _edges(least: int, most: int) -> list[int]:
    """Sizes that rise to the largest: close to each other there, where the least cost of an element is."""
    found, fine = [most], most / 32
    while found[-1] > max(1, least):
        found.append(max(1, least, int(found[-1] / (1.05 if found[-1] > fine else 1.5))))
    return found[::-1]
