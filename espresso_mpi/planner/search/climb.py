"""The compiled loops that improve a choice together with its schedule; see ``scheduling``.

An exchange of one option is looked at in three steps, ever dearer: what the loads of all lanes say of it, in constant
time; a schedule in which everything else keeps its key, given up as soon as it must end too late; justification.
"""

from __future__ import annotations

import numpy as np

from espresso_mpi.files.compiled import compiled

from ..model.dispatch import RULES, Tables, by_rule, exchanged, forward, justified, laid_out, quicker
from .descent import summed


@compiled
def _heights(choice, needs, ready, home, heights):  # type: ignore[no-untyped-def]
    """When all is done at least, by the loads of each lane from tensors up to each on: (tensors, lanes).

    Args:
        needs: float64 (options, lanes + 1), see ``needs``.
        ready: float64 (tensors,), when gradients are ready at least.
    """
    tensors, total = heights.shape
    for lane in range(total):
        after = 0.0
        for tensor in range(tensors - 1, -1, -1):
            after += needs[choice[tensor], lane]
            heights[tensor, lane] = ready[tensor] + after
        if lane == home:
            heights[:, lane] = ready[tensors - 1] + after
        for tensor in range(1, tensors):
            heights[tensor, lane] = max(heights[tensor, lane], heights[tensor - 1, lane])


@compiled
def _hopeless(tensor, option, old, needs, ready, heights, limit):  # type: ignore[no-untyped-def]
    """Whether the loads alone say that an exchange ends beyond a limit."""
    total = heights.shape[1]
    time = ready[tensor] + needs[option, total]
    for lane in range(total):
        time = max(time, heights[tensor, lane] + needs[option, lane] - needs[old, lane])
    return time >= limit


@compiled
def climbed(  # type: ignore[no-untyped-def]
    choice, best, key, tried, begin, order, errors, limit, near, tries, rounds, enough, needs, ready, tables
):  # fmt: skip
    """Exchange one option after the other, while that helps or until ``tries`` are used up.

    Returns:
        at least F; the tries that are left, below 0 if the last exchange took more than there were.

    An exchange is looked at with all keys as they are; where it comes near to the best it is justified and compared.

    Args:
        choice: changed in place; best, key: its F, and the keys of its schedule.
        tried, begin: the options to try: those of a tensor are ``tried[begin[tensor] : begin[tensor + 1]]``.
        order: of the tensors in which they are looked at.
        errors, limit: the sum of a choice's errors, float64 (options,), stays at most the limit or does not grow.
        near: relative distance from the best within which an exchange is justified.
        tries: schedules to work out; enough: it also ends where F is no more than this.
        needs, ready: as in ``_heights``.
    """
    home, total = tables.home, tables.total
    first, _, _, took, _ = laid_out(choice, tables)
    heights = np.empty((choice.size, total))
    _heights(choice, needs, ready, home, heights)
    spent, stale, goal = summed(choice, errors), 0, best * (1 - 1e-9)
    while stale < order.size and best > enough:  # all tensors since the last improvement
        for tensor in order:
            stale += 1
            for place in range(begin[tensor], begin[tensor + 1]):
                option, old = tried[place], choice[tensor]
                more = errors[option] - errors[old]
                if option == old or (more > 0 and spent + more > limit):
                    continue
                if _hopeless(tensor, option, old, needs, ready, heights, goal):
                    continue
                if tries <= 0:
                    return best, tries
                time, new_key, places, lasts, cost = _exchange(
                    choice, tensor, option, first, key, took, best * (1 + near), goal, rounds,
                    tables,
                )  # fmt: skip
                tries -= cost
                if time < goal:
                    best, stale, goal = time, 0, time * (1 - 1e-9)
                    spent += more
                    key, first, took = new_key, places, lasts
                    _heights(choice, needs, ready, home, heights)
            if stale >= order.size or best <= enough:
                break
    return best, tries


@compiled
def _exchange(  # type: ignore[no-untyped-def]
    choice, tensor, option, first, key, took, near, goal, rounds, tables
):  # fmt: skip
    """Exchange the option of a tensor, in place, if that ends below the goal.

    Returns:
        F, inf: beyond ``near`` at first sight; keys, first places and durations of its schedule; what it cost in tries.
    """
    total, count, repeats = tables.total, tables.counts, tables.repeats
    time, new_key = exchanged(choice, tensor, option, first, key, took, tables, near)
    if time == np.inf:
        return time, key, first, took, 1
    old = choice[tensor]
    choice[tensor] = option
    places, owner, where, lasts, _ = laid_out(choice, tables)
    time = justified(choice, places, owner, where, lasts, count, repeats, total, new_key, np.empty(new_key.size), 4,
                     goal)  # fmt: skip
    cost = 9
    if time < goal:  # is it also what the rules find?
        time, new_key, _ = quicker(choice, tables, rounds, goal)
        cost = 25
    if time >= goal:
        choice[tensor] = old
    return time, new_key, places, lasts, cost


@compiled
def annealed(  # type: ignore[no-untyped-def]
    choice, tried, begin, errors, limit, heats, draws, near, rounds, needs, ready, tables
):  # fmt: skip
    """Exchange options at random, also for what is a little slower, ever less so; the best by any rule, in place.

    Args:
        near, rounds: schedules are justified in so many rounds, if they end within that relative distance of what is
            accepted; no rounds: they are compared as rules make them.
        tried, begin, errors, limit, needs, ready: as in ``climbed``.
        heats: float64 (steps,), seconds; draws: float64 (steps, 3), from 0 to 1.
    """
    home, total, count, repeats = tables.home, tables.total, tables.counts, tables.repeats
    spent, now, best, last = summed(choice, errors), np.inf, np.inf, 0
    heights = np.empty((choice.size, total))
    _heights(choice, needs, ready, home, heights)
    found = choice.copy()
    for step in range(draws.shape[0]):
        tensor = min(choice.size - 1, int(draws[step, 0] * choice.size))
        size = begin[tensor + 1] - begin[tensor]
        option, old = tried[begin[tensor] + min(size - 1, int(draws[step, 1] * size))], choice[tensor]
        if step == 0:
            option = old
        more = errors[option] - errors[old]
        goal = now - heats[step] * np.log(max(draws[step, 2], 1e-300))  # what is above it is not accepted
        if (option == old and step) or (more > 0 and spent + more > limit):
            continue
        if step and _hopeless(tensor, option, old, needs, ready, heights, goal):
            continue
        choice[tensor] = option
        first, owner, where, took, tail = laid_out(choice, tables)
        key, start, time = np.empty(took.size), np.empty(took.size), np.inf
        for turn in range(RULES):
            rule = (last + turn) % RULES  # what was best for the choice before comes first
            by_rule(rule, first, owner, tail, key)
            time = forward(choice, first, owner, where, took, count, key, False, total, goal * (1 + near), start)
            if time < np.inf:
                last = rule
                break
        if rounds and time < np.inf:
            time = justified(choice, first, owner, where, took, count, repeats, total, key, start, rounds, -np.inf)
        if time > goal or time == np.inf:
            choice[tensor] = old
            continue
        now = time
        spent += more
        _heights(choice, needs, ready, home, heights)
        if time < best:
            best = time
            found[:] = choice
    choice[:] = found


@compiled
def replaced(  # type: ignore[no-untyped-def]
    choice, key, first, took, begin, end, options, parts, limit, rounds, tables
):  # fmt: skip
    """A schedule in which other tensors stand in the place of some neighbours, and everything else keeps its key.

    Args:
        key, first, took: of the choice and its schedule.
        begin, end: the neighbours, of which the last is left out.
        options, parts: int64 and float64 (others,), the options of the others and their parts of the backward pass.

    Returns:
        when all is done, inf: at first beyond the limit; the choice with the others; its keys.
    """
    backward, home, total, lane, seconds, count, repeats = tables
    others = choice.size - end + begin + options.size
    tensors, waits = np.empty(others, np.int64), np.empty(others)
    tensors[:begin], waits[:begin] = choice[:begin], backward[:begin]
    tensors[begin : begin + options.size], waits[begin : begin + options.size] = options, parts
    tensors[begin + options.size :], waits[begin + options.size :] = choice[end:], backward[end:]
    due = -np.inf
    for place in range(first[begin], first[end]):
        due = max(due, key[place] + took[place])
    places, owner, where, lasts, tail = laid_out(tensors, Tables(waits, home, total, lane, seconds, count, repeats))
    keys, start = np.empty(lasts.size), np.empty(lasts.size)
    keys[: places[begin]] = key[: first[begin]]
    keys[places[begin + options.size] :] = key[first[end] :]
    for place in range(places[begin], places[begin + options.size]):
        keys[place] = key[first[begin]] if place == places[owner[place]] else due - tail[place]
    time = forward(tensors, places, owner, where, lasts, count, keys, False, total, limit, start)
    if time < np.inf:
        time = justified(tensors, places, owner, where, lasts, count, repeats, total, keys, start, rounds, -np.inf)
    return time, tensors, keys
