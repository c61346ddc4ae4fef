"""Networks: layers of nodes, one for every tensor, whose longest path no choice is quicker than; see ``bound``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..model.dominance import matrices
from ..model.problem import Problem


@dataclass(frozen=True)
class Network:
    """Layers of nodes and the edges between them; see ``bound``.

    Attributes:
        heads, tails: int64 (edges,), nodes before and after a tensor.
        weight: float64 (edges, options), seconds along an edge with each option; finite where the edge is open.
        open: bool (candidate sets, edges), whether the tensors of a candidate set have the edge.
        start, final: float64 (nodes,), seconds before the first tensor and after the last; -inf: no path.
        adds: float64 (nodes,), 1 where the backward pass is waited for.
        candidate set, first, backward: as in ``Problem`` and its timeline.
    """

    heads: np.ndarray
    tails: np.ndarray
    weight: np.ndarray
    open: np.ndarray
    start: np.ndarray
    final: np.ndarray
    adds: np.ndarray
    set_of: np.ndarray
    first: np.ndarray
    backward: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What the kernels take."""
        return (self.heads, self.tails, self.weight, self.open, self.start, self.final, self.adds, self.set_of,
                self.first, self.backward)  # fmt: skip

    @classmethod
    def of(
        cls, set_of: np.ndarray, first: np.ndarray, backward: np.ndarray, full: np.ndarray, start: np.ndarray,
        final: np.ndarray, adds: np.ndarray,
    ) -> Network:  # fmt: skip
        """From the matrices of all options, float64 (options, nodes, nodes)."""
        nodes = start.size
        flat = full.reshape(full.shape[0], -1)
        common = np.logical_and.reduceat(np.isfinite(flat), first[:-1], axis=0)
        used = np.flatnonzero(common.any(axis=0))
        weight = np.ascontiguousarray(flat[:, used].T)
        return cls(used // nodes, used % nodes, weight, np.ascontiguousarray(common[:, used]), start, final, adds,
                   set_of, first, backward)  # fmt: skip


def exact_network(problem: Problem, full: np.ndarray | None = None) -> Network:
    """The network of the order ``backprop``: nodes are the virtual lanes and *done*. ``full``: see ``matrices``."""
    lanes = problem.timeline.lanes
    found = matrices(problem.timeline.options, lanes) if full is None else full
    options, virtual, _ = found.shape
    square = np.full((options, virtual + 1, virtual + 1), -np.inf)
    square[:, :virtual] = found
    square[:, lanes.backward] = square[:, :virtual].max(axis=1)
    square[:, virtual, virtual] = 0.0
    excess, idle = _excess(found)
    places = np.arange(virtual)
    leaving = square[:, places, virtual]
    square[:, places, virtual] = np.where(idle, np.maximum(leaving, -excess), leaving)
    adds = np.zeros(virtual + 1)
    adds[lanes.backward] = 1.0
    return Network.of(problem.set_of, problem.first, problem.timeline.backward, square, np.zeros(virtual + 1),
                      np.append(-excess, 0.0), adds)  # fmt: skip


def _excess(full: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How much later than the tensor each virtual lane may be left, float64 (virtual,); what leaves it alone."""
    options, virtual, _ = full.shape
    idle, excess = np.zeros((options, virtual), bool), np.zeros(virtual)
    for lane in range(virtual):
        column, end = full[:, :, lane], full[:, :, virtual]
        others = np.delete(column, lane, axis=1)
        idle[:, lane] = (column[:, lane] == 0.0) & (others == -np.inf).all(axis=1)
        with np.errstate(invalid="ignore"):
            late = np.where(column == -np.inf, -np.inf, column - end)
        late[idle[:, lane]] = -np.inf
        excess[lane] = max(0.0, late.max(initial=0.0))
    return excess, idle


def load_network(problem: Problem) -> Network:
    """The network of loads: nodes are the clock of the backward pass, the lanes, and *done*."""
    timeline = problem.timeline
    apart = timeline.order == "backprop" and bool((timeline.options.repeats > 1).any())
    load, chain = loads(problem, apart)
    return network_of_loads(load, chain, timeline.lanes.backward, problem.set_of, problem.first, timeline.backward)


def network_of_loads(
    load: np.ndarray, chain: np.ndarray, home: int, set_of: np.ndarray, first: np.ndarray, backward: np.ndarray
) -> Network:
    """See ``loads``; home: the lane of the backward pass."""
    options, total = load.shape
    square = np.full((options, total + 2, total + 2), -np.inf)
    square[:, 0, 0] = square[:, total + 1, total + 1] = 0.0
    square[:, 0, total + 1] = chain
    for lane in range(total):
        square[:, lane + 1, lane + 1] = load[:, lane]
        if lane != home:
            square[:, 0, lane + 1] = load[:, lane]
    adds, start, final = np.zeros(total + 2), np.full(total + 2, -np.inf), np.zeros(total + 2)
    adds[0] = adds[home + 1] = 1.0
    start[0] = start[home + 1] = 0.0
    return Network.of(set_of, first, backward, square, start, final, adds)


def loads(problem: Problem, apart: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of options on every lane, float64 (options, lanes), and of one segment by itself, (options,).

    Args:
        apart: on every virtual lane instead; that of the backward pass has all its load.
    """
    o, lanes = problem.timeline.options, problem.timeline.lanes
    within = np.arange(o.seconds.shape[1]) < o.count[:, None]
    seconds = np.where(within, o.seconds, 0.0)
    by_lane = [np.where(o.lane == lane, seconds, 0.0).sum(axis=1) for lane in range(2 * lanes.count)]
    first, later = np.stack(by_lane[: lanes.count], axis=1), np.stack(by_lane[lanes.count :], axis=1)
    if apart:
        first[:, lanes.backward] += later[:, lanes.backward]
        load = np.hstack([first, later])
    else:
        load = first + later
    return load * o.repeats[:, None], seconds.sum(axis=1)


def network_of(problem: Problem) -> Network:
    """The tightest network that is valid in the problem's order."""
    return exact_network(problem) if problem.timeline.order == "backprop" else load_network(problem)
