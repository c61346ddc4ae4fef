"""From how many bytes on the ranks of a node read each other's memory, instead of copies through the shared window."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..data import reduction
from .window import SharedWindow

_SIZES = tuple(1 << power for power in range(19, 23))
"""Bytes of the arrays that are measured. Smaller ones are piggybacked on headers by the window."""

_REPEATS = 3

_FAIR = 1.6
"""How many times the window's time reads may take where ranks share cores. There the window's barriers, one for each
chunk, take from no time to most of the time, by which ranks share one: 64 MiB on 2 x 2 ranks of 2 cores took 17 or 67
to 71 ms by the window and 15 to 19 by reads. A short measurement finds the one or the other. With 1.3, two of three
sessions chose the window, and then took 83 and 91 ms for 64 MiB by onebit where the third one took 48."""

_LOG = logging.getLogger("espresso_mpi")
_KNOWN: dict[tuple[tuple[int, ...], int, bool], float] = {}
"""By the processes of the node, all of which have measured it together, the bytes of a chunk, and who shares cores."""


def read_limit(local: Any, window: SharedWindow, cores_shared: bool) -> float:
    """The least bytes of which a reduce-scatter and an allgather are quicker by reads; infinite if none are.

    Collective over the node. Measured once for the same processes and windows. The steps of tables read shorter parts
    (``passes.TILE``) than what is measured here.

    Args:
        local: mpi4py communicator of the node's ranks.
        window: of the node, which knows whether they may read.
        cores_shared: whether ranks share cores.
    """
    processes = window.single.processes
    if len(processes) < 2:
        return math.inf
    key = processes, window.room, cores_shared
    known: list[float | None] = local.allgather(_KNOWN.get(key))  # another thread may be opening a session
    found = [limit for limit in known if limit is not None]
    if len(found) == local.size:
        return max(found)
    with window.uncounted():
        limit = _KNOWN[key] = _measured(local, window, _FAIR if cores_shared else 1.0)
    if local.rank == 0:
        _LOG.info("dense collectives read the memory of other ranks from %.0f bytes on (measured)", limit)
    return limit


def _measured(local: Any, window: SharedWindow, fair: float) -> float:
    x, limit = np.ones(_SIZES[-1] // 4, np.float32), math.inf
    for nbytes in reversed(_SIZES):
        by_window, by_reads = (_seconds(local, window, x[: nbytes // 4], way) for way in (math.inf, 0.0))
        if by_reads >= fair * by_window:
            break
        limit = float(nbytes)
    window.read_limit = math.inf
    return limit


def _seconds(local: Any, window: SharedWindow, x: np.ndarray, limit: float) -> float:
    """The least time of a few, of the rank that takes longest: other load only adds to it."""
    window.read_limit = limit
    edges = np.linspace(0, x.size, local.size + 1).astype(int).tolist()
    regions, reduce_op = list(itertools.pairwise(edges)), reduction.ReduceOp("sum", float(local.size))

    def run() -> None:
        window.reduce_scatter(x, "float32", regions, reduce_op)
        window.allgather(x, regions)

    times = [_time_of(run) for _ in range(_REPEATS)]
    slowest = local.allgather(times)
    return min(map(max, zip(*slowest)))


def _time_of(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
