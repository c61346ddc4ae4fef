"""Lower bounds on the time of a step, over all choices: what no planner can beat.

A step is a longest path. In the order ``backprop`` the lanes' free times after a tensor are those before it times a
max-plus matrix of its option (see ``problem.matrices``), so F(S) is the longest path through one layer of nodes for
every tensor: the virtual lanes, and *done*. A *network* is such layers; it is *valid* if no choice takes less time than
the longest path along its edges.

**Claim 1.** For every unit flow y through a valid network, F(S) is at least the sum over tensors i of the least over
options o of <y_i, M_{i,o}>, plus what the flow collects of the backward pass. Proof: a unit flow is a mixture of paths;
the longest path is at least as long as their mean, which is the sum over tensors of <y_i, M_{i,S_i}>; and each term is
at least its least.

**Claim 2.** Leaving out edges keeps a network valid: there are fewer paths. So a tensor's edges are those that all of
its options have.

**Claim 3** (``exact_network``). Every lane can be left for *done* at the cost of ``excess``, the most by which an
option leaves the lane later than the tensor is there. Proof: the tensor that visited a lane last was there at least
that early, and *done* is the latest of all.

**Claim 4** (``exact_network``). From the lane of the backward pass lead the edges of all lanes. Proof: no operation of
a tensor, or of a later one, begins before its gradient is ready. So F stays the same if all lanes that are free earlier
are held to be busy until then.

**Claim 5** (``load_network``, for the other orders). Work of a tensor begins when its backward pass has ended; a lane
does one thing at a time; the backward pass is work of its lane. So F is at least the backward pass up to a tensor, and
from there on the load of all later tensors on any one lane; and at least the end of the backward pass up to a tensor
and the length of one of its segments. In the order ``backprop`` the same holds where no option has several segments: a
lane is free after the loads of all its visitors, and by claim 3 no later than the last of them is there. With segments
it holds for first and later visits of a lane apart, and for the lane of the backward pass, whose end F waits for.

Bounds are lowered by 1e-9 of themselves, far more than what rounding can add up to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numba import njit

from espresso_mpi.types import ITEMSIZE

from ..model.dominance import front, matrices
from ..model.problem import Problem
from ..model.timeline import Options
from ..model.trace import Trace, TracedTensor

SAFETY = 1e-9
"""Relative: sums of some ten thousand terms in float64 are off by less than 1e-11."""
KEPT = 8
"""Options of a tensor that a mixture is made of, at most."""


@dataclass(frozen=True)
class Network:
    """Layers of nodes and the edges between them; see the module.

    Attributes:
        heads, tails: int64 (edges,), nodes before and after a tensor.
        weight: float64 (edges, rows), seconds along an edge with each option; finite where the edge is open.
        open: bool (menus, edges), whether the tensors of a menu have the edge.
        start, final: float64 (nodes,), seconds before the first tensor and after the last; -inf: no path.
        adds: float64 (nodes,), 1 where the backward pass is waited for.
        menu, first, backward: as in ``Problem`` and its timeline.
    """

    heads: np.ndarray
    tails: np.ndarray
    weight: np.ndarray
    open: np.ndarray
    start: np.ndarray
    final: np.ndarray
    adds: np.ndarray
    menu: np.ndarray
    first: np.ndarray
    backward: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What the kernels take."""
        return (self.heads, self.tails, self.weight, self.open, self.start, self.final, self.adds, self.menu,
                self.first, self.backward)  # fmt: skip

    @classmethod
    def of(
        cls, menu: np.ndarray, first: np.ndarray, backward: np.ndarray, full: np.ndarray, start: np.ndarray,
        final: np.ndarray, adds: np.ndarray,
    ) -> Network:  # fmt: skip
        """From the matrices of all options, float64 (rows, nodes, nodes)."""
        nodes = start.size
        flat = full.reshape(full.shape[0], -1)
        common = np.logical_and.reduceat(np.isfinite(flat), first[:-1], axis=0)
        used = np.flatnonzero(common.any(axis=0))
        weight = np.ascontiguousarray(flat[:, used].T)
        return cls(used // nodes, used % nodes, weight, np.ascontiguousarray(common[:, used]), start, final, adds,
                   menu, first, backward)  # fmt: skip


def exact_network(problem: Problem, full: np.ndarray | None = None) -> Network:
    """The network of the order ``backprop``: nodes are the virtual lanes and *done*. ``full``: see ``matrices``."""
    lanes = problem.timeline.lanes
    found = matrices(problem.timeline.options, lanes) if full is None else full
    rows, virtual, _ = found.shape
    square = np.full((rows, virtual + 1, virtual + 1), -np.inf)
    square[:, :virtual] = found
    square[:, lanes.backward] = square[:, :virtual].max(axis=1)
    square[:, virtual, virtual] = 0.0
    excess, idle = _excess(found)
    places = np.arange(virtual)
    leaving = square[:, places, virtual]
    square[:, places, virtual] = np.where(idle, np.maximum(leaving, -excess), leaving)
    adds = np.zeros(virtual + 1)
    adds[lanes.backward] = 1.0
    return Network.of(problem.menu, problem.first, problem.timeline.backward, square, np.zeros(virtual + 1),
                      np.append(-excess, 0.0), adds)  # fmt: skip


def _excess(full: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How much later than the tensor each virtual lane may be left, float64 (virtual,); which rows leave it alone."""
    rows, virtual, _ = full.shape
    idle, excess = np.zeros((rows, virtual), bool), np.zeros(virtual)
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
    return _of_loads(load, chain, timeline.lanes.backward, problem.menu, problem.first, timeline.backward)


def _of_loads(
    load: np.ndarray, chain: np.ndarray, home: int, menu: np.ndarray, first: np.ndarray, backward: np.ndarray
) -> Network:
    """See ``loads``; home: the lane of the backward pass."""
    rows, total = load.shape
    square = np.full((rows, total + 2, total + 2), -np.inf)
    square[:, 0, 0] = square[:, total + 1, total + 1] = 0.0
    square[:, 0, total + 1] = chain
    for lane in range(total):
        square[:, lane + 1, lane + 1] = load[:, lane]
        if lane != home:
            square[:, 0, lane + 1] = load[:, lane]
    adds, start, final = np.zeros(total + 2), np.full(total + 2, -np.inf), np.zeros(total + 2)
    adds[0] = adds[home + 1] = 1.0
    start[0] = start[home + 1] = 0.0
    return Network.of(menu, first, backward, square, start, final, adds)


def loads(problem: Problem, apart: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of every option on every lane, float64 (rows, lanes), and of one of its segments by itself, (rows,).

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


# --- the game: a player of paths against a player of options ----------------------------------------------------------


@njit(cache=True)
def _ahead(mean, heads, tails, opened, final, adds, menu, backward, heat, found):  # type: ignore[no-untyped-def]
    """Softly longest ways from every node to the end, into ``found`` (tensors + 1, nodes)."""
    nodes = final.size
    most, total = np.empty(nodes), np.empty(nodes)
    found[menu.size] = final
    for tensor in range(menu.size - 1, -1, -1):
        most[:], total[:] = -np.inf, 0.0
        for edge in range(heads.size):
            if opened[menu[tensor], edge]:
                most[heads[edge]] = max(most[heads[edge]], mean[tensor, edge] + found[tensor + 1, tails[edge]])
        for edge in range(heads.size):
            head = heads[edge]
            if opened[menu[tensor], edge] and most[head] > -np.inf:
                total[head] += np.exp((mean[tensor, edge] + found[tensor + 1, tails[edge]] - most[head]) / heat)
        for node in range(nodes):
            found[tensor, node] = -np.inf
            if total[node] > 0.0:
                found[tensor, node] = most[node] + heat * np.log(total[node]) + adds[node] * backward[tensor]


@njit(cache=True)
def _flow(mean, heads, tails, opened, start, adds, menu, backward, heat, ahead, mass, flow):  # type: ignore[no-untyped-def]
    """The unit flow of the soft longest paths: ``mass`` (tensors + 1, nodes), ``flow`` (tensors, edges).

    What arrives at a node leaves it by shares that are divided by their sum, so the flow is one up to rounding.
    """
    nodes = start.size
    mass[:], flow[:] = 0.0, 0.0
    most = (start + ahead[0]).max()
    for node in range(nodes):
        if start[node] + ahead[0, node] > -np.inf:
            mass[0, node] = np.exp((start[node] + ahead[0, node] - most) / heat)
    mass[0] /= mass[0].sum()
    share = np.zeros(nodes)
    for tensor in range(menu.size):
        share[:] = 0.0
        for edge in range(heads.size):
            head, then = heads[edge], ahead[tensor + 1, tails[edge]]
            if opened[menu[tensor], edge] and mass[tensor, head] > 0.0 and then > -np.inf:
                way = mean[tensor, edge] + then + adds[head] * backward[tensor] - ahead[tensor, head]
                flow[tensor, edge] = np.exp(way / heat)
                if flow[tensor, edge] < 1e-7:
                    flow[tensor, edge] = 0.0
                share[head] += flow[tensor, edge]
        for edge in range(heads.size):
            if flow[tensor, edge] > 0.0:
                flow[tensor, edge] *= mass[tensor, heads[edge]] / share[heads[edge]]
                mass[tensor + 1, tails[edge]] += flow[tensor, edge]


@njit(cache=True)
def _answer(flow, mass, weight, start, final, adds, menu, first, backward, best, rest):  # type: ignore[no-untyped-def]
    """The bound of a flow: ``rest`` (tensors + 1,) from each tensor on; ``best`` (tensors,): its cheapest rows."""
    tensors, room = menu.size, 0
    for place in range(first.size - 1):
        room = max(room, first[place + 1] - first[place])
    cost = np.empty(room)
    total = 0.0
    for node in range(final.size):
        if mass[tensors, node] > 0.0:
            total += mass[tensors, node] * final[node]
    rest[tensors] = total
    for tensor in range(tensors - 1, -1, -1):
        a, b = first[menu[tensor]], first[menu[tensor] + 1]
        cost[: b - a] = 0.0
        for edge in range(weight.shape[0]):
            part = flow[tensor, edge]
            if part > 0.0:
                for row in range(a, b):
                    cost[row - a] += part * weight[edge, row]
        least = np.argmin(cost[: b - a])
        best[tensor] = a + least
        total += cost[least]
        for node in range(final.size):
            total += mass[tensor, node] * adds[node] * backward[tensor]
        rest[tensor] = total
    for node in range(final.size):
        if mass[0, node] > 0.0:
            total += mass[0, node] * start[node]
    return total


@njit(cache=True)
def _admit(best, rows, parts):  # type: ignore[no-untyped-def]
    """Let the cheapest rows take part in the mixtures: in the place of the row with the least part, if need be."""
    for tensor in range(best.size):
        known = False
        for place in range(rows.shape[1]):
            known |= rows[tensor, place] == best[tensor]
        if not known:
            least = np.argmin(parts[tensor])
            if parts[tensor, least] == 0.0:
                rows[tensor, least] = best[tensor]


@njit(cache=True)
def _slope(edges, way, change, step, heat):  # type: ignore[no-untyped-def]
    """How fast the soft maximum of ways grows along a change."""
    most = -np.inf
    for place in range(edges):
        most = max(most, way[place] + step * change[place])
    total, slope = 0.0, 0.0
    for place in range(edges):
        part = np.exp((way[place] + step * change[place] - most) / heat)
        total += part
        slope += part * change[place]
    return slope / total


@njit(cache=True)
def _sweep(mean, rows, parts, heads, tails, weight, opened, start, adds, menu, backward, heat, ahead):  # type: ignore[no-untyped-def]
    """Improve the mixtures one tensor after the other: move parts from its dearest row to its cheapest, the best step.

    Every move lowers the softly longest path, a convex function of all mixtures; ``ahead`` is that of those before.
    """
    nodes, most_edges = start.size, heads.size
    behind, after = start.copy(), np.empty(nodes)
    way, change, use = np.empty(most_edges), np.empty(most_edges), np.empty(most_edges)
    edges_of = np.empty(most_edges, np.int64)
    for tensor in range(menu.size):
        count = 0
        for edge in range(most_edges):
            here, then = behind[heads[edge]], ahead[tensor + 1, tails[edge]]
            if opened[menu[tensor], edge] and here > -np.inf and then > -np.inf:
                edges_of[count] = edge
                way[count] = here + adds[heads[edge]] * backward[tensor] + mean[tensor, edge] + then
                count += 1
        for _ in range(2):
            top = way[:count].max()
            for place in range(count):
                use[place] = np.exp((way[place] - top) / heat)
            cheap, dear, least, largest = -1, -1, np.inf, -np.inf
            for place in range(rows.shape[1]):
                row = rows[tensor, place]
                if row < 0:
                    continue
                cost = 0.0
                for entry in range(count):
                    cost += use[entry] * weight[edges_of[entry], row]
                if cost < least:
                    cheap, least = place, cost
                if parts[tensor, place] > 0.0 and cost > largest:
                    dear, largest = place, cost
            if cheap == dear or least >= largest:
                break
            for entry in range(count):
                edge = edges_of[entry]
                change[entry] = weight[edge, rows[tensor, cheap]] - weight[edge, rows[tensor, dear]]
            limit = parts[tensor, dear]
            low, high = 0.0, limit
            if _slope(count, way, change, limit, heat) > 0.0:
                for _ in range(10):
                    middle = 0.5 * (low + high)
                    if _slope(count, way, change, middle, heat) > 0.0:
                        high = middle
                    else:
                        low = middle
                high = low
            parts[tensor, cheap] += high
            parts[tensor, dear] = 0.0 if high == limit else parts[tensor, dear] - high
            for entry in range(count):
                way[entry] += high * change[entry]
        for edge in range(most_edges):
            if opened[menu[tensor], edge]:
                value = 0.0
                for place in range(rows.shape[1]):
                    if parts[tensor, place] > 0.0:
                        value += parts[tensor, place] * weight[edge, rows[tensor, place]]
                mean[tensor, edge] = value
        after[:] = -np.inf
        for edge in range(most_edges):
            if opened[menu[tensor], edge] and behind[heads[edge]] > -np.inf:
                here = behind[heads[edge]] + adds[heads[edge]] * backward[tensor] + mean[tensor, edge]
                tail = tails[edge]
                top = max(after[tail], here)
                low = min(after[tail], here)
                after[tail] = top + heat * np.log1p(np.exp((low - top) / heat)) if low > -np.inf else top
        behind[:] = after


@njit(cache=True)
def _played(  # type: ignore[no-untyped-def]
    mean, rows, parts, heats, sweeps, heads, tails, weight, opened, start, final, adds, menu, first, backward
):  # fmt: skip
    """A round at every heat: the flow that answers the mixtures, then ``sweeps`` improvements of them.

    Returns:
        of every round as in ``Flow``: value, mass, rest, flow.
    """
    tensors, nodes = menu.size, start.size
    value, mass = np.empty(heats.size), np.zeros((heats.size, tensors + 1, nodes))
    rest, flow = np.zeros((heats.size, tensors + 1)), np.zeros((heats.size, tensors, heads.size))
    ahead, best = np.empty((tensors + 1, nodes)), np.empty(tensors, np.int64)
    for number, heat in enumerate(heats):
        _ahead(mean, heads, tails, opened, final, adds, menu, backward, heat, ahead)
        _flow(mean, heads, tails, opened, start, adds, menu, backward, heat, ahead, mass[number], flow[number])
        value[number] = _answer(
            flow[number], mass[number], weight, start, final, adds, menu, first, backward, best, rest[number]
        )
        _admit(best, rows, parts)
        for sweep in range(sweeps[number]):
            if sweep:
                _ahead(mean, heads, tails, opened, final, adds, menu, backward, heat, ahead)
            _sweep(mean, rows, parts, heads, tails, weight, opened, start, adds, menu, backward, heat, ahead)
    return value, mass, rest, flow


@dataclass(frozen=True)
class Flow:
    """A bound, and what is to come from anywhere: ``mass[i] · state + rest[i]`` is at most F of every completion.

    Attributes:
        value: seconds.
        mass: float64 (tensors + 1, nodes); rest: float64 (tensors + 1,); flow: float64 (tensors, edges).
    """

    value: float
    mass: np.ndarray
    rest: np.ndarray
    flow: np.ndarray


@dataclass
class Game:
    """Mixtures of options, improved until they and the flow against them are in balance.

    Attributes:
        network: of what.
        mean: float64 (tensors, edges), the weights of the mixtures.
        rows: int64 (tensors, KEPT), what they are made of, -1 none; parts: float64, of each how much.
    """

    network: Network
    mean: np.ndarray
    rows: np.ndarray
    parts: np.ndarray

    @classmethod
    def begin(cls, network: Network, choice: np.ndarray) -> Game:
        """With a choice of one option for each tensor."""
        rows = np.full((choice.size, KEPT), -1, np.int64)
        rows[:, 0] = choice
        parts = np.zeros(rows.shape)
        parts[:, 0] = 1.0
        return cls(network, np.ascontiguousarray(network.weight[:, choice].T), rows, parts)

    def played(self, heats: np.ndarray, sweeps: np.ndarray) -> list[Flow]:
        """A round at every heat: the flow that answers the mixtures, then so many improvements of them."""
        n = self.network
        found = _played(self.mean, self.rows, self.parts, heats, sweeps, n.heads, n.tails, n.weight, n.open, n.start,
                        n.final, n.adds, n.menu, n.first, n.backward)  # fmt: skip
        return [Flow(float(value), *arrays) for value, *arrays in zip(*found)]

    def rounded(self) -> np.ndarray:
        """Of every mixture the row with the largest part."""
        largest = self.parts.argmax(axis=1)
        return self.rows[np.arange(largest.size), largest]

    def spread(self) -> np.ndarray:
        """By how many seconds the options of each mixture differ from it in the mean, float64 (tensors,)."""
        weight = np.where(np.isfinite(self.network.weight), self.network.weight, 0.0)
        away = np.abs(weight[:, self.rows] - np.where(np.isfinite(self.mean), self.mean, 0.0).T[:, :, None])
        return (away.max(axis=0) * self.parts).sum(axis=1)

    def longest(self) -> float:
        """The longest path of the mixtures, at least 1e-12: a scale for heats."""
        return max(1e-12, float((self.network.start + self._ahead(1e-12)[0]).max()))

    def _ahead(self, heat: float) -> np.ndarray:
        n = self.network
        found = np.empty((n.menu.size + 1, n.start.size))
        _ahead(self.mean, n.heads, n.tails, n.open, n.final, n.adds, n.menu, n.backward, heat, found)
        return found


# --- bounds -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relaxation:
    """The balance of the game.

    Attributes:
        network: of what; game: the mixtures at the end.
        flows: those against them on the way, the best bound first.
    """

    network: Network
    game: Game
    flows: tuple[Flow, ...]

    @property
    def value(self) -> float:
        """The best of the flows' bounds, in seconds without ``Problem.around``; rounding is not taken off."""
        return self.flows[0].value


def relaxed(network: Network, choice: np.ndarray, *, rounds: int = 24, heat: float = 0.02, cooling: float = 0.7,
            coldest: float = 2e-4) -> Relaxation:  # fmt: skip
    """Play the game, ever colder: a heat is how many seconds make a path e times less likely.

    Args:
        choice: to begin with.
        heat, coldest: the first and the last, relative to the longest path of the choice.
    """
    game = Game.begin(network, choice)
    heats = np.append(np.maximum(heat * cooling ** np.arange(rounds), coldest), coldest) * game.longest()
    flows = game.played(heats, np.append(np.full(rounds, 3), 0))
    flows.sort(key=lambda flow: -flow.value)
    return Relaxation(network, game, tuple(flows))


def lower_bound(problem: Problem) -> float:
    """Seconds that no choice of the problem's options falls below, whatever the search: certified.

    In the order ``backprop`` by the exact network, else by the network of loads; see the module for the proofs. In the
    order ``backprop`` it holds for options left out of the menus as dominated too, which are never better; in the
    others it does where nothing has several segments: a matrix that is nowhere lower has no lower load and no shorter
    chain.
    """
    quick = problem.quickest(np.ones(problem.method.size, bool))
    return certified(relaxed(network_of(problem), quick).value) + problem.around


def network_of(problem: Problem) -> Network:
    """The tightest network that is valid in the problem's order."""
    return exact_network(problem) if problem.timeline.order == "backprop" else load_network(problem)


def certified(value: float) -> float:
    """A bound less what rounding may have added; times are never negative."""
    return max(0.0, value - SAFETY * abs(value))


def branched(
    problem: Problem, full: np.ndarray, relaxation: Relaxation, best: np.ndarray, time: float, most: int
) -> float:
    """The bound when the tensor whose options mix most may not mix them, in seconds like ``Relaxation.value``.

    Claim: the least over the options of one tensor of bounds in which it has this option alone is a bound. An option
    that lifts the flow's cost by r cannot be had below the bound plus r; so those come first that lift it least.

    Args:
        full: of ``matrices``; best: a choice, time: its F: no bound is wanted above it.
        most: options to try; with more of them left, nothing is tried.
    """
    flow, network = relaxation.flows[0], relaxation.network
    tensor = int(np.argmax(relaxation.game.spread()))
    rows, used = np.array(problem.rows(tensor)), flow.flow[tensor] > 0
    above = flow.flow[tensor][used] @ network.weight[used, rows[0] : rows[-1] + 1]
    above -= above.min()
    order = np.argsort(above, kind="stable")
    order = order[above[order] < time - flow.value]
    if order.size > most:
        return flow.value
    alone = _each_alone(problem, full, rows[order])
    found = time
    for place, option in enumerate(order):
        if flow.value + above[option] >= found:
            break
        menu, choice = problem.menu.copy(), best.copy()
        menu[tensor], choice[tensor] = problem.first.size - 1 + place, problem.method.size + place
        found = min(found, relaxed(replace(alone, menu=menu), choice, rounds=11, heat=0.004, cooling=0.65).value)
    return max(flow.value, found)


def _each_alone(problem: Problem, full: np.ndarray, rows: np.ndarray) -> Network:
    """The exact network with a menu more for each of some rows, which is all that is on it."""
    o, index = problem.timeline.options, np.concatenate([np.arange(problem.method.size), rows])
    first = np.concatenate([problem.first, problem.first[-1] + 1 + np.arange(rows.size)])
    options = Options(o.lane[index], o.seconds[index], o.count[index], o.repeats[index])
    wider = replace(problem, timeline=replace(problem.timeline, options=options), first=first,
                    method=problem.method[index], route=problem.route[index])  # fmt: skip
    return exact_network(wider, full[index])


# --- fusion -----------------------------------------------------------------------------------------------------------


def fusion_bound(problem: Problem, trace: Trace) -> float:
    """Seconds that no fusion of the tensors of a trace falls below, with no choice of compressors and routes.

    Claim: a tensor of n elements costs each lane at least n times the least that an element costs in any buffer of n
    elements or more. Proof: divide the load of every buffer among its tensors by their elements; a buffer is ready when
    its last tensor is, so what was said of loads (see the module) holds for each tensor's part. The least over all
    sizes of a buffer is that over intervals of sizes: an element costs at least the load at the beginning divided by
    the size at the end, as no operation takes less time for more bytes. Sessions that cut buffers into segments pay for
    the segments' sizes, which are at least 0.3 of ``segment_bytes`` or the buffer's. A tensor takes at least as long as
    the smallest buffer that it fits in.

    Args:
        problem: of any of the fusions: what there is to choose from.
    """
    return certified(relaxed(*_fusion_network(problem, trace)).value) + problem.around


def _fusion_network(problem: Problem, trace: Trace) -> tuple[Network, np.ndarray]:
    """The network of loads of tensors in buffers, and a choice to begin with."""
    table, first, menu = fusion_table(problem, trace)
    network = _of_loads(table[:, :-1], table[:, -1], problem.timeline.lanes.backward, menu, first,
                        np.ascontiguousarray(trace.backward))  # fmt: skip
    quick = [a + int(np.argmin(table[a:b, :-1].sum(axis=1))) for a, b in pairwise(first)]
    return network, np.array(quick, np.int64)[menu]


def fusion_table(problem: Problem, trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What tensors cost in buffers, by the claim of ``fusion_bound``.

    Returns:
        float64 (rows, lanes + 1), seconds on each lane and of a segment; where menus begin among the rows; the menu of
        each tensor.
    """
    units = {dtype: _units(problem, trace, dtype) for dtype in {tensor.dtype for tensor in trace.tensors}}
    limit = problem.profile.segment_bytes
    keys = [(tensor.size, tensor.dtype) for tensor in trace.tensors]
    kinds = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    blocks = []
    for size, dtype in kinds:
        unit, ends = units[dtype]
        least = min(size, 0.3 * limit / ITEMSIZE[dtype]) if limit else size
        rows = unit[ends >= least]
        blocks.append(np.hstack([rows[:, :-1] * size, rows[:, -1:]]))
    first = np.cumsum([0, *map(len, blocks)])
    menu = np.array([kinds[key] for key in keys], np.int64)
    return np.concatenate(blocks), first, menu


def _units(problem: Problem, trace: Trace, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """What an element costs in buffers of one type: rows of seconds on each lane and of a segment; ends of sizes."""
    sizes = [tensor.size for tensor in trace.tensors if tensor.dtype == dtype]
    limit = problem.profile.segment_bytes
    edges = _edges(int(min(min(sizes), 0.3 * limit / ITEMSIZE[dtype])) if limit else min(sizes), sum(sizes))
    alike = tuple(TracedTensor(str(size), size, 0.0, dtype) for size in edges)
    whole = replace(problem.profile, segment_bytes=0)
    apart = bool(limit) and problem.timeline.order == "backprop" and problem.profile.machines > 1
    priced = Problem.of(replace(trace, tensors=alike), whole, problem.compressors, routes=problem.routes,
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
