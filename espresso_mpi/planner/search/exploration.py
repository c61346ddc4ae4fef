"""The compiled loops that explore all choices together, tensor by tensor; see ``search``.

A *state* is when each virtual lane is free, when the tensors so far are there, and the sum of their errors. States grow
into *children* by every option of the next tensor; those that may still lead below the target form a pool, which keeps
the most promising, and of them those that no other one dominates are the states of the next round.
"""

from __future__ import annotations

import numpy as np

from espresso_mpi.files.compiled import compiled

from ..model.dominance import nowhere_above
from ..model.timeline import follow


@compiled
def explore(  # type: ignore[no-untyped-def]
    width, target, errors, limit_of_errors, lane, seconds, count, repeats, backward, home, set_of, first,
    masses, rests, flows, weight
):  # fmt: skip
    """States of the lanes, tensor by tensor; returns (F, choice, least bound of what was left out for want of room).

    Args:
        width: states to keep; target: only what may be below is of interest.
        errors: float64 (options,), of which a choice may sum up to ``limit_of_errors``.
        masses, rests, flows: (cuts, ...) as in ``game.Flow``; weight: of the network's edges.
    """
    tensors, cuts, nodes = set_of.size, masses.shape[0], masses.shape[2]
    virtual, pool = nodes - 1, 4 * width
    states, size = np.zeros((width, nodes + 1)), 1
    parents, taken = np.zeros((tensors, width), np.int32), np.zeros((tensors, width), np.int64)
    children, value = np.empty((pool, nodes + 1)), np.empty(pool)
    born, by, heap = np.empty(pool, np.int32), np.empty(pool, np.int64), np.empty(pool, np.int64)
    above, still, left_out = np.empty((cuts, _longest(first))), _to_come(errors, set_of, first), np.inf
    for tensor in range(tensors):
        a, b = first[set_of[tensor]], first[set_of[tensor] + 1]
        _lifts(tensor, a, b, backward, home, masses, rests, flows, weight, above)
        filled, limit = _grown(
            tensor, a, b, above, states[:size], target, errors, still[tensor + 1], limit_of_errors,
            lane, seconds, count, repeats, backward, home, masses, rests, children, value, born, by, heap,
        )  # fmt: skip
        if filled == pool:
            left_out = min(left_out, limit)
        size, dropped = _kept(filled, children, value, born, by, states, parents[tensor], taken[tensor])
        left_out = min(left_out, dropped)
        if size == 0:
            return np.inf, np.empty(0, np.int64), left_out
    choice, at = np.empty(tensors, np.int64), 0
    for tensor in range(tensors - 1, -1, -1):
        choice[tensor] = taken[tensor, at]
        at = parents[tensor, at]
    return max(states[0, virtual], states[0, home]), choice, left_out


@compiled
def _longest(first):  # type: ignore[no-untyped-def]
    """Options of the longest candidate set."""
    most = 0
    for place in range(first.size - 1):
        most = max(most, first[place + 1] - first[place])
    return most


@compiled
def _to_come(errors, set_of, first):  # type: ignore[no-untyped-def]
    """Errors that the tensors from each one on make at least, (tensors + 1,)."""
    still = np.zeros(set_of.size + 1)
    for tensor in range(set_of.size - 1, -1, -1):
        still[tensor] = still[tensor + 1] + errors[first[set_of[tensor]] : first[set_of[tensor] + 1]].min()
    return still


@compiled
def _lifts(tensor, a, b, backward, home, masses, rests, flows, weight, above):  # type: ignore[no-untyped-def]
    """By how much each option from ``a`` to ``b`` lifts the bound of each cut, into ``above``."""
    for cut in range(masses.shape[0]):
        above[cut, : b - a] = rests[cut, tensor + 1] - rests[cut, tensor]
        above[cut, : b - a] += masses[cut, tensor, home] * backward[tensor]
        for edge in range(weight.shape[0]):
            part = flows[cut, tensor, edge]
            if part > 0.0:
                for option in range(a, b):
                    above[cut, option - a] += part * weight[edge, option]


@compiled
def _grown(  # type: ignore[no-untyped-def]
    tensor, a, b, above, states, target, errors, still, limit_of_errors, lane, seconds, count, repeats, backward, home,
    masses, rests, children, value, born, by, heap
):  # fmt: skip
    """The children of all states into the pool; returns how many, and below what their bounds are."""
    order, bases = np.argsort(above[0, : b - a]), np.empty(masses.shape[0])
    child, nothing = np.empty(states.shape[1]), np.empty((0, 0))
    filled, limit = 0, target
    for parent in range(states.shape[0]):
        _bounds(tensor, states[parent], masses, rests, bases)
        for place in order:
            if bases[0] + above[0, place] >= limit:
                break
            option = a + place
            hopeless = states[parent, -1] + errors[option] + still > limit_of_errors
            for cut in range(1, bases.size):
                hopeless |= bases[cut] + above[cut, place] >= limit
            if hopeless:
                continue
            child[:] = states[parent]
            child[-1] += errors[option]
            hope = _advanced(
                child,
                tensor,
                lane[option],
                seconds[option],
                count[option],
                repeats[option],
                backward,
                home,
                masses,
                rests,
                nothing,
            )
            if hope < limit:
                where = filled if filled < heap.size else heap[0]
                children[where], value[where], born[where], by[where] = child, hope, parent, option
                filled, limit = _noted(where, filled, limit, heap, value)
    return filled, limit


@compiled
def _bounds(tensor, state, masses, rests, bases):  # type: ignore[no-untyped-def]
    """What every completion of a state takes at least, by each cut, into ``bases``."""
    for cut in range(bases.size):
        bases[cut] = rests[cut, tensor]
        for node in range(masses.shape[2]):
            bases[cut] += masses[cut, tensor, node] * state[node]


@compiled
def _advanced(child, tensor, lane, seconds, count, repeats, backward, home, masses, rests, nothing):  # type: ignore[no-untyped-def]
    """Let a tensor travel by an option, in place; returns what every completion takes at least."""
    cuts, layers, nodes = masses.shape
    last, virtual = tensor == layers - 2, nodes - 1
    child[home] += backward[tensor]
    there = follow(child[:virtual], child[home], lane, seconds, count, repeats, nothing)
    child[virtual] = max(child[virtual], there)
    least = child[home] if last else child[home] + backward[tensor + 1]
    for node in range(nodes):
        if node != home:
            child[node] = max(child[node], least)
    if last:
        return max(child[virtual], child[home])
    hope = 0.0
    for cut in range(cuts):
        sum_ = rests[cut, tensor + 1]
        for node in range(nodes):
            if masses[cut, tensor + 1, node] > 0.0:
                sum_ += masses[cut, tensor + 1, node] * child[node]
        hope = max(hope, sum_)
    return hope


@compiled
def _noted(where, filled, limit, heap, value):  # type: ignore[no-untyped-def]
    """Count in a child at a place of the pool; a full pool is a heap, the worst on top, and lowers the limit."""
    pool = heap.size
    if filled == pool:
        _settle(heap, value, pool)
        return filled, min(limit, value[heap[0]])
    heap[where] = where
    if filled + 1 == pool:
        heap[:] = np.argsort(-value)
        limit = min(limit, value[heap[0]])
    return filled + 1, limit


@compiled
def _settle(heap, value, size):  # type: ignore[no-untyped-def]
    """Let the top of a heap of places, the one with the largest value on top, sink."""
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            return
        if child + 1 < size and value[heap[child + 1]] > value[heap[child]]:
            child += 1
        if value[heap[child]] <= value[heap[place]]:
            return
        heap[place], heap[child] = heap[child], heap[place]
        place = child


@compiled
def _kept(filled, children, value, born, by, states, parents, taken):  # type: ignore[no-untyped-def]
    """The best of the pool that no better one dominates become the states.

    Returns:
        how many, and the least bound of what there was no room for, else inf.
    """
    width, size = states.shape[0], 0
    for where in np.argsort(value[:filled]):
        dominated = False
        for other in range(size):
            if nowhere_above(states, other, children, where):
                dominated = True
                break
        if dominated:
            continue
        if size == width:
            return size, value[where]
        states[size] = children[where]
        parents[size], taken[size] = born[where], by[where]
        size += 1
    return size, np.inf
