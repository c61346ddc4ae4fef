"""The game of a player of paths against a player of options: its balance is a strong bound; see ``bound``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from espresso_mpi.files.compiled import compiled, is_compiled

from .descent import costs_in
from .networks import Network

KEPT = 8
"""Options of a tensor that a mixture is made of, at most."""


@compiled
def _ahead(mean, heads, tails, opened, final, adds, set_of, backward, heat, found):  # type: ignore[no-untyped-def]
    """Softly longest paths from every node to the end, into ``found`` (tensors + 1, nodes)."""
    nodes = final.size
    most, total = np.empty(nodes), np.empty(nodes)
    found[set_of.size] = final
    for tensor in range(set_of.size - 1, -1, -1):
        most[:], total[:] = -np.inf, 0.0
        for edge in range(heads.size):
            if opened[set_of[tensor], edge]:
                most[heads[edge]] = max(most[heads[edge]], mean[tensor, edge] + found[tensor + 1, tails[edge]])
        for edge in range(heads.size):
            head = heads[edge]
            if opened[set_of[tensor], edge] and most[head] > -np.inf:
                total[head] += np.exp((mean[tensor, edge] + found[tensor + 1, tails[edge]] - most[head]) / heat)
        for node in range(nodes):
            found[tensor, node] = -np.inf
            if total[node] > 0.0:
                found[tensor, node] = most[node] + heat * np.log(total[node]) + adds[node] * backward[tensor]


@compiled
def _flow(mean, heads, tails, opened, start, adds, set_of, backward, heat, ahead, mass, flow):  # type: ignore[no-untyped-def]
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
    for tensor in range(set_of.size):
        share[:] = 0.0
        for edge in range(heads.size):
            head, then = heads[edge], ahead[tensor + 1, tails[edge]]
            if opened[set_of[tensor], edge] and mass[tensor, head] > 0.0 and then > -np.inf:
                path = mean[tensor, edge] + then + adds[head] * backward[tensor] - ahead[tensor, head]
                flow[tensor, edge] = np.exp(path / heat)
                if flow[tensor, edge] < 1e-7:
                    flow[tensor, edge] = 0.0
                share[head] += flow[tensor, edge]
        for edge in range(heads.size):
            if flow[tensor, edge] > 0.0:
                flow[tensor, edge] *= mass[tensor, heads[edge]] / share[heads[edge]]
                mass[tensor + 1, tails[edge]] += flow[tensor, edge]


@compiled
def _answer(flow, mass, weight, start, final, adds, set_of, first, backward, best, rest):  # type: ignore[no-untyped-def]
    """The bound of a flow: ``rest`` (tensors + 1,) from each tensor on; ``best`` (tensors,): its cheapest options."""
    tensors, room = set_of.size, 0
    for place in range(first.size - 1):
        room = max(room, first[place + 1] - first[place])
    cost = np.empty(room)
    total = 0.0
    for node in range(final.size):
        if mass[tensors, node] > 0.0:
            total += mass[tensors, node] * final[node]
    rest[tensors] = total
    for tensor in range(tensors - 1, -1, -1):
        a, b = first[set_of[tensor]], first[set_of[tensor] + 1]
        costs_in(flow[tensor], weight, a, b, cost)
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


@compiled
def _admit(best, options, parts):  # type: ignore[no-untyped-def]
    """Let the cheapest options take part in the mixtures, if need be in the place of that with the least part."""
    for tensor in range(best.size):
        known = False
        for place in range(options.shape[1]):
            known |= options[tensor, place] == best[tensor]
        if not known:
            least = np.argmin(parts[tensor])
            if parts[tensor, least] == 0.0:
                options[tensor, least] = best[tensor]


@compiled
def _slope(edges, path, change, step, heat):  # type: ignore[no-untyped-def]
    """How fast the soft maximum of paths grows along a change."""
    most = -np.inf
    for place in range(edges):
        most = max(most, path[place] + step * change[place])
    total, slope = 0.0, 0.0
    for place in range(edges):
        part = np.exp((path[place] + step * change[place] - most) / heat)
        total += part
        slope += part * change[place]
    return slope / total


@compiled
def _sweep(mean, options, parts, heads, tails, weight, opened, start, adds, set_of, backward, heat, ahead):  # type: ignore[no-untyped-def]
    """Improve the mixtures tensor by tensor: move parts from the dearest option to the cheapest, by the best step.

    Every move lowers the softly longest path, a convex function of all mixtures; ``ahead`` is that of those before.
    """
    most_edges = heads.size
    behind, after = start.copy(), np.empty(start.size)
    path, change, use = np.empty(most_edges), np.empty(most_edges), np.empty(most_edges)
    edges_of = np.empty(most_edges, np.int64)
    for tensor in range(set_of.size):
        open_ = opened[set_of[tensor]]
        count = 0
        for edge in range(most_edges):
            here, then = behind[heads[edge]], ahead[tensor + 1, tails[edge]]
            if open_[edge] and here > -np.inf and then > -np.inf:
                edges_of[count] = edge
                path[count] = here + adds[heads[edge]] * backward[tensor] + mean[tensor, edge] + then
                count += 1
        for _ in range(2):
            cheap, dear = _extremes(options[tensor], parts[tensor], weight, edges_of, path, use, count, heat)
            if cheap < 0:
                break
            for entry in range(count):
                edge = edges_of[entry]
                change[entry] = weight[edge, options[tensor, cheap]] - weight[edge, options[tensor, dear]]
            limit = parts[tensor, dear]
            step = _step(count, path, change, limit, heat)
            parts[tensor, cheap] += step
            parts[tensor, dear] = 0.0 if step == limit else parts[tensor, dear] - step
            for entry in range(count):
                path[entry] += step * change[entry]
        _mix(options[tensor], parts[tensor], weight, open_, mean[tensor])
        after[:] = -np.inf
        for edge in range(most_edges):
            if open_[edge] and behind[heads[edge]] > -np.inf:
                here = behind[heads[edge]] + adds[heads[edge]] * backward[tensor] + mean[tensor, edge]
                tail = tails[edge]
                top = max(after[tail], here)
                low = min(after[tail], here)
                after[tail] = top + heat * np.log1p(np.exp((low - top) / heat)) if low > -np.inf else top
        behind[:] = after


@compiled
def _extremes(options, parts, weight, edges_of, path, use, count, heat):  # type: ignore[no-untyped-def]
    """Places of a mixture's cheapest option, and of the dearest that has a part; -1 where none is cheaper."""
    top = path[:count].max()
    for place in range(count):
        use[place] = np.exp((path[place] - top) / heat)
    cheap, dear, least, largest = -1, -1, np.inf, -np.inf
    for place in range(options.size):
        option = options[place]
        if option < 0:
            continue
        cost = 0.0
        for entry in range(count):
            cost += use[entry] * weight[edges_of[entry], option]
        if cost < least:
            cheap, least = place, cost
        if parts[place] > 0.0 and cost > largest:
            dear, largest = place, cost
    if cheap == dear or least >= largest:
        return -1, -1
    return cheap, dear


@compiled
def _step(count, path, change, limit, heat):  # type: ignore[no-untyped-def]
    """How far paths go along a change, at most to the limit, until their soft maximum rises."""
    if not _slope(count, path, change, limit, heat) > 0.0:
        return limit
    low, high = 0.0, limit
    for _ in range(10):
        middle = 0.5 * (low + high)
        if _slope(count, path, change, middle, heat) > 0.0:
            high = middle
        else:
            low = middle
    return low


@compiled
def _mix(options, parts, weight, opened, mean):  # type: ignore[no-untyped-def]
    """The weights of a mixture into ``mean``."""
    for edge in range(opened.size):
        if opened[edge]:
            value = 0.0
            for place in range(options.size):
                if parts[place] > 0.0:
                    value += parts[place] * weight[edge, options[place]]
            mean[edge] = value


@compiled
def _played(  # type: ignore[no-untyped-def]
    mean, options, parts, heats, sweeps, heads, tails, weight, opened, start, final, adds, set_of, first, backward
):  # fmt: skip
    """A round at every heat: the flow that answers the mixtures, then ``sweeps`` improvements of them.

    Returns:
        of every round as in ``Flow``: value, mass, rest, flow.
    """
    tensors, nodes = set_of.size, start.size
    value, mass = np.empty(heats.size), np.zeros((heats.size, tensors + 1, nodes))
    rest, flow = np.zeros((heats.size, tensors + 1)), np.zeros((heats.size, tensors, heads.size))
    ahead, best = np.empty((tensors + 1, nodes)), np.empty(tensors, np.int64)
    for number, heat in enumerate(heats):
        _ahead(mean, heads, tails, opened, final, adds, set_of, backward, heat, ahead)
        _flow(mean, heads, tails, opened, start, adds, set_of, backward, heat, ahead, mass[number], flow[number])
        value[number] = _answer(
            flow[number], mass[number], weight, start, final, adds, set_of, first, backward, best, rest[number]
        )
        _admit(best, options, parts)
        for sweep in range(sweeps[number]):
            if sweep:
                _ahead(mean, heads, tails, opened, final, adds, set_of, backward, heat, ahead)
            _sweep(mean, options, parts, heads, tails, weight, opened, start, adds, set_of, backward, heat, ahead)
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
        options: int64 (tensors, KEPT), what they are made of, -1 none; parts: float64, of each how much.
    """

    network: Network
    mean: np.ndarray
    options: np.ndarray
    parts: np.ndarray

    @classmethod
    def begin(cls, network: Network, choice: np.ndarray) -> Game:
        """With a choice of one option for each tensor."""
        options = np.full((choice.size, KEPT), -1, np.int64)
        options[:, 0] = choice
        parts = np.zeros(options.shape)
        parts[:, 0] = 1.0
        return cls(network, np.ascontiguousarray(network.weight[:, choice].T), options, parts)

    def played(self, heats: np.ndarray, sweeps: np.ndarray) -> list[Flow]:
        """A round at every heat: the flow that answers the mixtures, then so many improvements of them."""
        n = self.network
        found = _played(self.mean, self.options, self.parts, heats, sweeps, n.heads, n.tails, n.weight, n.open, n.start,
                        n.final, n.adds, n.set_of, n.first, n.backward)  # fmt: skip
        return [Flow(float(value), *arrays) for value, *arrays in zip(*found)]

    def rounded(self) -> np.ndarray:
        """Of every mixture the option with the largest part."""
        largest = self.parts.argmax(axis=1)
        return self.options[np.arange(largest.size), largest]

    def spread(self) -> np.ndarray:
        """By how many seconds the options of each mixture differ from it in the mean, float64 (tensors,)."""
        weight = np.where(np.isfinite(self.network.weight), self.network.weight, 0.0)
        away = np.abs(weight[:, self.options] - np.where(np.isfinite(self.mean), self.mean, 0.0).T[:, :, None])
        return (away.max(axis=0) * self.parts).sum(axis=1)

    def longest(self) -> float:
        """The longest path of the mixtures, at least 1e-12: a scale for heats."""
        return max(1e-12, float((self.network.start + self._ahead(1e-12)[0]).max()))

    def _ahead(self, heat: float) -> np.ndarray:
        n = self.network
        found = np.empty((n.set_of.size + 1, n.start.size))
        _ahead(self.mean, n.heads, n.tails, n.open, n.final, n.adds, n.set_of, n.backward, heat, found)
        return found


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


def is_ready() -> bool:
    """Whether the kernels of the search are compiled, here or on disk: this one is among the last of them."""
    return is_compiled(_played)
