"""The compiled loops that improve a choice one tensor at a time; see ``search``."""

from __future__ import annotations

import numpy as np

from espresso_mpi.files.compiled import compiled

from ..model.timeline import follow


@compiled
def to_go(choice, full, backward, home, ahead):  # type: ignore[no-untyped-def]
    """Time from each lane before each tensor to the end, into ``ahead`` (tensors + 1, virtual lanes)."""
    virtual = full.shape[1]
    ahead[choice.size] = -np.inf
    ahead[choice.size, home] = 0.0
    for tensor in range(choice.size - 1, -1, -1):
        option = choice[tensor]
        for lane in range(virtual):
            longest = full[option, lane, virtual]
            for then in range(virtual):
                longest = max(longest, full[option, lane, then] + ahead[tensor + 1, then])
            ahead[tensor, lane] = longest
        ahead[tensor, home] += backward[tensor]


@compiled
def descend(  # type: ignore[no-untyped-def]
    choice, tried, begin, errors, limit, price, passes, full, mass,
    lane, seconds, count, repeats, backward, home, set_of, first
):  # fmt: skip
    """Give every tensor its best option while the others keep theirs, until nothing changes.

    Tried are the options ``tried[begin[tensor] : begin[tensor + 1]]``. The best: least F plus ``price`` a unit of
    ``errors`` (options,), among those that leave the sum of errors at most ``limit`` or do not add to it. Of equal ones
    that which leaves the lanes free earlier, weighed by ``mass`` (tensors + 1, nodes).
    """
    spent, virtual = summed(choice, errors), full.shape[1]
    ahead = np.empty((choice.size + 1, virtual))
    nothing = np.empty((0, 0))
    state, after, best_state = np.empty(virtual), np.empty(virtual), np.empty(virtual)
    best_all, stale = np.inf, 0
    for _ in range(passes):
        to_go(choice, full, backward, home, ahead)
        state[:] = 0.0
        end, changed, slack = 0.0, False, 1e-9 * ahead[0].max()
        for tensor in range(choice.size):
            state[home] += backward[tensor]
            old = choice[tensor]
            best, end = _best(
                old, tried[begin[tensor] : begin[tensor + 1]], errors, spent, limit, price, slack, end, state,
                ahead[tensor + 1], mass[tensor + 1], lane, seconds, count, repeats, home, after, best_state, nothing,
            )  # fmt: skip
            changed |= old != best
            spent += errors[best] - errors[old]
            choice[tensor] = best
            state[:] = best_state
        time = max(end, state[home]) + price * spent
        stale = 0 if time < best_all * (1 - 1e-9) else stale + 1
        best_all = min(best_all, time)
        if not changed or stale > 2:  # what only leaves lanes free earlier may help others in the next pass
            return


@compiled
def summed(choice, errors):  # type: ignore[no-untyped-def]
    """The sum of a choice's errors."""
    spent = 0.0
    for option in choice:
        spent += errors[option]
    return spent


@compiled
def _best(  # type: ignore[no-untyped-def]
    old, tried, errors, spent, limit, price, slack, end, state, ahead, mass,
    lane, seconds, count, repeats, home, after, best_state, nothing
):  # fmt: skip
    """The best option of a tensor, as in ``descend``, and when all so far are there; its state into ``best_state``."""
    best, least, weighed, best_end, virtual = -1, np.inf, np.inf, 0.0, state.size
    for place in range(-1, tried.size):
        option = old if place < 0 else tried[place]  # what it has comes first
        if errors[option] > errors[old] and spent - errors[old] + errors[option] > limit:
            continue
        after[:] = state
        there = max(
            end, follow(after, state[home], lane[option], seconds[option], count[option], repeats[option], nothing)
        )
        time = there
        for node in range(virtual):
            time = max(time, after[node] + ahead[node])
        time += price * errors[option]
        if time > least + slack:
            continue
        weight = there * mass[virtual]
        for node in range(virtual):
            weight += mass[node] * max(after[node], after[home])
        if time < least - slack or weight < weighed - slack:
            best, weighed, best_end = option, weight, there
            least = min(least, time)
            best_state[:] = after
    return best, best_end


@compiled
def soften(  # type: ignore[no-untyped-def]
    choice, tried, begin, errors, limit, heat, full,
    lane, seconds, count, repeats, backward, home, set_of, first
):  # fmt: skip
    """A pass like those of ``descend``, but towards the least soft maximum of all that follows.

    A maximum alone does not see what is nearly critical; ``heat``, in seconds, is how near that is.
    """
    virtual, tensors = full.shape[1], choice.size
    ahead, paths = np.empty((tensors + 1, virtual)), np.empty(virtual + 1)
    ahead[tensors] = -np.inf
    ahead[tensors, home] = 0.0
    spent = errors[choice[tensors - 1]]
    for tensor in range(tensors - 1, -1, -1):
        spent += errors[choice[tensor - 1]] if tensor else 0.0
        option = choice[tensor]
        for node in range(virtual):
            for then in range(virtual):
                paths[then] = full[option, node, then] + ahead[tensor + 1, then]
            paths[virtual] = full[option, node, virtual]
            ahead[tensor, node] = soft_most(paths, heat)
        ahead[tensor, home] += backward[tensor]
    nothing, end = np.empty((0, 0)), 0.0
    state, after, best_state = np.zeros(virtual), np.empty(virtual), np.empty(virtual)
    for tensor in range(tensors):
        state[home] += backward[tensor]
        best, least, best_end, old = -1, np.inf, 0.0, choice[tensor]
        for place in range(begin[tensor] - 1, begin[tensor + 1]):
            option = old if place < begin[tensor] else tried[place]
            if errors[option] > errors[old] and spent - errors[old] + errors[option] > limit:
                continue
            after[:] = state
            there = max(
                end, follow(after, state[home], lane[option], seconds[option], count[option], repeats[option], nothing)
            )
            hard = there
            for node in range(virtual):
                paths[node] = after[node] + ahead[tensor + 1, node]
                hard = max(hard, paths[node])
            if hard >= least:  # a soft maximum is above the hard one
                continue
            paths[virtual] = there
            time = soft_most(paths, heat)
            if time < least:
                best, least, best_end = option, time, there
                best_state[:] = after
        spent += errors[best] - errors[old]
        choice[tensor] = best
        state[:] = best_state
        end = best_end


@compiled
def soft_most(paths, heat):  # type: ignore[no-untyped-def]
    """The soft maximum: ``heat`` times the logarithm of the sum of exponentials."""
    most, total = paths.max(), 0.0
    if most == -np.inf:
        return most
    for path in paths:
        total += np.exp((path - most) / heat)
    return most + heat * np.log(total)


@compiled
def costs_in(flow, weight, begin, end, cost):  # type: ignore[no-untyped-def]
    """What the options from ``begin`` to ``end`` cost in a tensor's flow (edges,), into the begin of ``cost``."""
    cost[: end - begin] = 0.0
    for edge in range(weight.shape[0]):
        part = flow[edge]
        if part > 0.0:
            for option in range(begin, end):
                cost[option - begin] += part * weight[edge, option]


@compiled
def candidates(flow, slack, weight, set_of, first):  # type: ignore[no-untyped-def]
    """Options of choices with a time below the bound of a flow plus ``slack``: (options, where tensors begin)."""
    room = 0
    for tensor in range(set_of.size):
        room += first[set_of[tensor] + 1] - first[set_of[tensor]]
    tried, begin, size = np.empty(room, np.int64), np.zeros(set_of.size + 1, np.int64), 0
    cost = np.empty(room)
    for tensor in range(set_of.size):
        a, b = first[set_of[tensor]], first[set_of[tensor] + 1]
        costs_in(flow[tensor], weight, a, b, cost)
        limit = cost[: b - a].min() + slack
        for option in range(a, b):
            if cost[option - a] <= limit:
                tried[size] = option
                size += 1
        begin[tensor + 1] = size
    return tried[:size].copy(), begin
