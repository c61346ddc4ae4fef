"""The compiled loops that explore all choices together, tensor by tensor; see ``search``."""

from __future__ import annotations

import numpy as np
from numba import njit

from ..model.timeline import follow


@njit(cache=True)
def explore(  # type: ignore[no-untyped-def]
    width, target, errors, limit_of_errors, lane, seconds, count, repeats, backward, home, menu, first,
    masses, rests, flows, weight
):  # fmt: skip
    """States of the lanes, tensor by tensor; returns (F, choice, least bound of what was left out for want of room).

    Args:
        width: states to keep; target: only what may be below is of interest.
        errors: float64 (rows,), of which a choice may sum up to ``limit_of_errors``.
        masses, rests, flows: (cuts, ...) as in ``bound.Flow``; weight: of the network's edges.
    """
    tensors, cuts, nodes = menu.size, masses.shape[0], masses.shape[2]
    virtual, pool = nodes - 1, 4 * width
    nothing = np.empty((0, 0))
    states, size = np.zeros((width, nodes + 1)), 1  # the last: errors so far
    parents, taken = np.zeros((tensors, width), np.int32), np.zeros((tensors, width), np.int64)
    children, value = np.empty((pool, nodes + 1)), np.empty(pool)
    born, by = np.empty(pool, np.int32), np.empty(pool, np.int64)
    slot = np.empty(pool, np.int64)
    bases, child = np.empty(cuts), np.empty(nodes + 1)
    left_out = np.inf
    room = 0
    for place in range(first.size - 1):
        room = max(room, first[place + 1] - first[place])
    above, order = np.empty((cuts, room)), np.empty(room, np.int64)
    still = np.zeros(tensors + 1)  # errors that the rest makes at least
    for tensor in range(tensors - 1, -1, -1):
        still[tensor] = still[tensor + 1] + errors[first[menu[tensor]] : first[menu[tensor] + 1]].min()
    for tensor in range(tensors):
        a, b = first[menu[tensor]], first[menu[tensor] + 1]
        for cut in range(cuts):
            above[cut, : b - a] = rests[cut, tensor + 1] - rests[cut, tensor]
            for node in range(nodes):
                if node == home:
                    above[cut, : b - a] += masses[cut, tensor, node] * backward[tensor]
            for edge in range(weight.shape[0]):
                part = flows[cut, tensor, edge]
                if part > 0.0:
                    for row in range(a, b):
                        above[cut, row - a] += part * weight[edge, row]
        order[: b - a] = np.argsort(above[0, : b - a])
        filled, limit, overflow = 0, target, False
        for parent in range(size):
            for cut in range(cuts):
                bases[cut] = rests[cut, tensor]
                for node in range(nodes):
                    bases[cut] += masses[cut, tensor, node] * states[parent, node]
            for place in range(b - a):
                option = order[place]
                if bases[0] + above[0, option] >= limit:
                    break
                row = a + option
                hopeless = states[parent, nodes] + errors[row] + still[tensor + 1] > limit_of_errors
                for cut in range(1, cuts):
                    hopeless |= bases[cut] + above[cut, option] >= limit
                if hopeless:
                    continue
                child[:] = states[parent]
                child[home] += backward[tensor]
                there = follow(child[:virtual], child[home], lane[row], seconds[row], count[row], repeats[row], nothing)
                child[virtual] = max(child[virtual], there)
                child[nodes] += errors[row]
                least = child[home] if tensor == tensors - 1 else child[home] + backward[tensor + 1]
                for node in range(nodes):
                    if node != home:
                        child[node] = max(child[node], least)
                hope = 0.0
                for cut in range(cuts):
                    sum_ = rests[cut, tensor + 1]
                    for node in range(nodes):
                        if masses[cut, tensor + 1, node] > 0.0:
                            sum_ += masses[cut, tensor + 1, node] * child[node]
                    hope = max(hope, sum_)
                if tensor == tensors - 1:
                    hope = max(child[virtual], child[home])
                if hope >= limit:
                    continue
                if filled < pool:
                    where = filled
                    filled += 1
                else:
                    overflow = True
                    where = slot[0]
                children[where] = child
                value[where] = hope
                born[where], by[where] = parent, row
                if filled < pool:
                    slot[where] = where
                elif not overflow:  # just full: from now on the largest on top
                    slot[where] = where
                    ranked = np.argsort(-value)
                    slot[:] = ranked
                    limit = min(limit, value[slot[0]])
                else:
                    settle(slot, value, pool)
                    limit = min(limit, value[slot[0]])
        if filled == pool:
            left_out = min(left_out, limit)
        ranked = np.argsort(value[:filled])
        size = 0
        for rank in range(filled):
            where = ranked[rank]
            dominated = False
            for other in range(size):
                worse = False
                for node in range(nodes + 1):
                    if states[other, node] > children[where, node]:
                        worse = True
                        break
                if not worse:
                    dominated = True
                    break
            if dominated:
                continue
            if size == width:
                left_out = min(left_out, value[where])
                break
            states[size] = children[where]
            parents[tensor, size], taken[tensor, size] = born[where], by[where]
            size += 1
        if size == 0:
            return np.inf, np.empty(0, np.int64), left_out
    choice, at = np.empty(tensors, np.int64), 0
    best = max(states[0, virtual], states[0, home])
    for tensor in range(tensors - 1, -1, -1):
        choice[tensor] = taken[tensor, at]
        at = parents[tensor, at]
    return best, choice, left_out


@njit(cache=True)
def settle(slot, value, size):  # type: ignore[no-untyped-def]
    """Let the top of a heap of places, the one with the largest value on top, sink."""
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            return
        if child + 1 < size and value[slot[child + 1]] > value[slot[child]]:
            child += 1
        if value[slot[child]] <= value[slot[place]]:
            return
        slot[place], slot[child] = slot[child], slot[place]
        place = child
