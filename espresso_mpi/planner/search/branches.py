"""The compiled loops of the search; see ``search``."""

from __future__ import annotations

import numpy as np
from numba import njit

from ..model.dispatch import served
from ..model.timeline import follow

# --- one tensor at a time ---------------------------------------------------------------------------------------------


@njit(cache=True)
def to_go(choice, full, backward, home, ahead):  # type: ignore[no-untyped-def]
    """Time from each lane before each tensor to the end, into ``ahead`` (tensors + 1, virtual lanes)."""
    virtual = full.shape[1]
    ahead[choice.size] = -np.inf
    ahead[choice.size, home] = 0.0
    for tensor in range(choice.size - 1, -1, -1):
        row = choice[tensor]
        for lane in range(virtual):
            longest = full[row, lane, virtual]
            for then in range(virtual):
                longest = max(longest, full[row, lane, then] + ahead[tensor + 1, then])
            ahead[tensor, lane] = longest
        ahead[tensor, home] += backward[tensor]


@njit(cache=True)
def descend(  # type: ignore[no-untyped-def]
    choice, tried, begin, errors, limit, price, passes, full, mass,
    lane, seconds, count, repeats, backward, home, menu, first
):  # fmt: skip
    """Give every tensor its best option while the others keep theirs, until nothing changes.

    Tried are the rows ``tried[begin[tensor] : begin[tensor + 1]]``. The best: least F plus ``price`` a unit of
    ``errors`` (rows,), among those that leave the sum of errors at most ``limit`` or do not add to it. Of equal ones
    that which leaves the lanes free earlier, weighed by ``mass`` (tensors + 1, nodes).
    """
    spent = 0.0
    for tensor in range(choice.size):
        spent += errors[choice[tensor]]
    virtual = full.shape[1]
    ahead = np.empty((choice.size + 1, virtual))
    nothing = np.empty((0, 0))
    state, after, best_state = np.empty(virtual), np.empty(virtual), np.empty(virtual)
    best_all, stale = np.inf, 0
    for _ in range(passes):
        to_go(choice, full, backward, home, ahead)
        state[:] = 0.0
        end, changed = 0.0, False
        for tensor in range(choice.size):
            state[home] += backward[tensor]
            best, least, weighed, best_end = -1, np.inf, np.inf, 0.0
            slack = 1e-9 * ahead[0].max()
            for place in range(begin[tensor] - 1, begin[tensor + 1]):
                row = choice[tensor] if place < begin[tensor] else tried[place]  # what it has comes first
                if errors[row] > errors[choice[tensor]] and spent - errors[choice[tensor]] + errors[row] > limit:
                    continue
                after[:] = state
                there = max(end, follow(after, state[home], lane[row], seconds[row], count[row], repeats[row], nothing))
                time = there
                for node in range(virtual):
                    time = max(time, after[node] + ahead[tensor + 1, node])
                time += price * errors[row]
                if time > least + slack:
                    continue
                weight = there * mass[tensor + 1, virtual]
                for node in range(virtual):
                    weight += mass[tensor + 1, node] * max(after[node], after[home])
                if time < least - slack or weight < weighed - slack:
                    best, weighed, best_end = row, weight, there
                    least = min(least, time)
                    best_state[:] = after
            changed |= choice[tensor] != best
            spent += errors[best] - errors[choice[tensor]]
            choice[tensor] = best
            state[:] = best_state
            end = best_end
        time = max(end, state[home]) + price * spent
        stale = 0 if time < best_all * (1 - 1e-9) else stale + 1
        best_all = min(best_all, time)
        if not changed or stale > 2:  # what only leaves lanes free earlier may help others in the next pass
            return


@njit(cache=True)
def soften(  # type: ignore[no-untyped-def]
    choice, tried, begin, errors, limit, heat, full,
    lane, seconds, count, repeats, backward, home, menu, first
):  # fmt: skip
    """A pass like those of ``descend``, but towards the least soft maximum of all that follows.

    A maximum alone does not see what is nearly critical; ``heat``, in seconds, is how near that is.
    """
    virtual, tensors = full.shape[1], choice.size
    ahead, ways = np.empty((tensors + 1, virtual)), np.empty(virtual + 1)
    ahead[tensors] = -np.inf
    ahead[tensors, home] = 0.0
    spent = errors[choice[tensors - 1]]
    for tensor in range(tensors - 1, -1, -1):
        spent += errors[choice[tensor - 1]] if tensor else 0.0
        row = choice[tensor]
        for node in range(virtual):
            for then in range(virtual):
                ways[then] = full[row, node, then] + ahead[tensor + 1, then]
            ways[virtual] = full[row, node, virtual]
            ahead[tensor, node] = soft_most(ways, heat)
        ahead[tensor, home] += backward[tensor]
    nothing, end = np.empty((0, 0)), 0.0
    state, after, best_state = np.zeros(virtual), np.empty(virtual), np.empty(virtual)
    for tensor in range(tensors):
        state[home] += backward[tensor]
        best, least, best_end, old = -1, np.inf, 0.0, choice[tensor]
        for place in range(begin[tensor] - 1, begin[tensor + 1]):
            row = old if place < begin[tensor] else tried[place]
            if errors[row] > errors[old] and spent - errors[old] + errors[row] > limit:
                continue
            after[:] = state
            there = max(end, follow(after, state[home], lane[row], seconds[row], count[row], repeats[row], nothing))
            hard = there
            for node in range(virtual):
                ways[node] = after[node] + ahead[tensor + 1, node]
                hard = max(hard, ways[node])
            if hard >= least:  # a soft maximum is above the hard one
                continue
            ways[virtual] = there
            time = soft_most(ways, heat)
            if time < least:
                best, least, best_end = row, time, there
                best_state[:] = after
        spent += errors[best] - errors[old]
        choice[tensor] = best
        state[:] = best_state
        end = best_end


@njit(cache=True)
def soft_most(ways, heat):  # type: ignore[no-untyped-def]
    """The soft maximum: ``heat`` times the logarithm of the sum of exponentials."""
    most, total = ways.max(), 0.0
    if most == -np.inf:
        return most
    for way in ways:
        total += np.exp((way - most) / heat)
    return most + heat * np.log(total)


@njit(cache=True)
def candidates(flow, slack, weight, menu, first):  # type: ignore[no-untyped-def]
    """Rows that a choice with a time below the bound of a flow plus ``slack`` can have: (rows, where tensors begin)."""
    room = 0
    for tensor in range(menu.size):
        room += first[menu[tensor] + 1] - first[menu[tensor]]
    tried, begin, size = np.empty(room, np.int64), np.zeros(menu.size + 1, np.int64), 0
    cost = np.empty(room)
    for tensor in range(menu.size):
        a, b = first[menu[tensor]], first[menu[tensor] + 1]
        cost[: b - a] = 0.0
        for edge in range(weight.shape[0]):
            part = flow[tensor, edge]
            if part > 0.0:
                for row in range(a, b):
                    cost[row - a] += part * weight[edge, row]
        limit = cost[: b - a].min() + slack
        for row in range(a, b):
            if cost[row - a] <= limit:
                tried[size] = row
                size += 1
        begin[tensor + 1] = size
    return tried[:size].copy(), begin


# --- all choices together ---------------------------------------------------------------------------------------------


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


# --- by trying --------------------------------------------------------------------------------------------------------


@njit(cache=True)
def try_all(choice, candidates, errors, limit, tries, backward, home, total, lane, seconds, count, repeats, by_tensor):  # type: ignore[no-untyped-def]
    """Exchange one option, and where that no longer helps two, until nothing helps or ``tries`` are used up; returns F.

    Args:
        candidates: int64 (tensors, most), rows to try, -1 none.
        errors, limit: the sum of a choice's errors stays at most the limit.
    """
    best = served(choice, backward, home, total, lane, seconds, count, repeats, by_tensor)[0]
    spent = 0.0
    for tensor in range(choice.size):
        spent += errors[choice[tensor]]
    improved = True
    while improved and tries > 0:
        improved = False
        for one in range(choice.size):
            for a in range(candidates.shape[1]):
                row, old = candidates[one, a], choice[one]
                if row < 0 or row == old or tries <= 0 or spent + errors[row] - errors[old] > limit:
                    continue
                choice[one] = row
                tries -= 1
                time = served(choice, backward, home, total, lane, seconds, count, repeats, by_tensor)[0]
                if time < best:
                    best, improved = time, True
                    spent += errors[row] - errors[old]
                else:
                    choice[one] = old
        if improved:
            continue
        for one in range(choice.size):
            for other in range(one + 1, choice.size):
                for a in range(candidates.shape[1]):
                    for b in range(candidates.shape[1]):
                        row, then = candidates[one, a], candidates[other, b]
                        old, was = choice[one], choice[other]
                        if row < 0 or then < 0 or row == old or then == was or tries <= 0:
                            continue
                        more = errors[row] + errors[then] - errors[old] - errors[was]
                        if spent + more > limit:
                            continue
                        choice[one], choice[other] = row, then
                        tries -= 1
                        time = served(choice, backward, home, total, lane, seconds, count, repeats, by_tensor)[0]
                        if time < best:
                            best, improved = time, True
                            spent += more
                        else:
                            choice[one], choice[other] = old, was
    return best
