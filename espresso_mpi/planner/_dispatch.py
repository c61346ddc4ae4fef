"""The compiled loops of schedules: operations of a step on lanes that do one thing at a time; see ``schedule``.

The operations of a step stand in one row: for each tensor its part of the backward pass, then those of its segments.
``first`` (tensors + 1,) is where a tensor's begin. A *key* of an operation says when it should begin at the latest: of
those that wait for a lane the one with the least key is served, of equal ones the first in the row.
"""

from __future__ import annotations

import numpy as np
from numba import njit

RULES = 3
"""Ways to begin: see ``by_rule``."""


@njit(cache=True)
def laid_out(choice, backward, home, total, lane, seconds, count, repeats):  # type: ignore[no-untyped-def]
    """The operations of a choice: (first, owner, where, took, tail).

    Returns:
        owner: int64 (operations,), the tensor; where: int64, the lane; took: float64, seconds; tail: float64, seconds
        from its begin until its segment is there if nothing else is in the way; of a part of the backward pass until
        its tensor and all later ones are.
    """
    first = np.zeros(choice.size + 1, np.int64)
    for tensor in range(choice.size):
        row = choice[tensor]
        first[tensor + 1] = first[tensor] + 1 + repeats[row] * count[row]
    size = first[choice.size]
    owner, where = np.empty(size, np.int64), np.empty(size, np.int64)
    took, tail = np.empty(size), np.empty(size)
    rest = 0.0
    for tensor in range(choice.size - 1, -1, -1):
        row, part = choice[tensor], first[tensor]
        begin = part + 1
        for _ in range(repeats[row]):
            left = 0.0
            for position in range(count[row] - 1, -1, -1):
                place = begin + position
                owner[place], where[place] = tensor, lane[row, position] % total
                took[place] = seconds[row, position]
                left += seconds[row, position]
                tail[place] = left
            rest = max(rest, left)
            begin += count[row]
        rest += backward[tensor]
        owner[part], where[part], took[part], tail[part] = tensor, home, backward[tensor], rest
    return first, owner, where, took, tail


@njit(cache=True)
def by_rule(rule, first, owner, tail, key):  # type: ignore[no-untyped-def]
    """Keys to begin with: 0: by tensor; 1: the backward pass first, then by tensor; 2: the longest tail first."""
    longest = tail.max() if tail.size else 0.0
    for place in range(key.size):
        key[place] = -tail[place]
        if rule < 2:
            key[place] += 2 * longest * owner[place]
            if rule == 1 and place == first[owner[place]]:
                key[place] -= 4 * longest * first.size


@njit(cache=True)
def _push(keys, places, size, key, place):  # type: ignore[no-untyped-def]
    """Put an operation into a heap, the least key on top."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if keys[above] < key or (keys[above] == key and places[above] < place):
            break
        keys[at], places[at] = keys[above], places[above]
        at = above
    keys[at], places[at] = key, place


@njit(cache=True)
def _pop(keys, places, size):  # type: ignore[no-untyped-def]
    """Take the top of a heap of so many."""
    top, last = places[0], size - 1
    key, place, at = keys[last], places[last], 0
    while True:
        child = 2 * at + 1
        if child >= last:
            break
        other = child + 1
        if other < last and (
            keys[other] < keys[child] or (keys[other] == keys[child] and places[other] < places[child])
        ):
            child = other
        if key < keys[child] or (key == keys[child] and place < places[child]):
            break
        keys[at], places[at] = keys[child], places[child]
        at = child
    keys[at], places[at] = key, place
    return top


@njit(cache=True)
def _wait(keys, places, waiting, lane, key, place):  # type: ignore[no-untyped-def]
    """An operation is ready, and waits for its lane."""
    _push(keys[lane], places[lane], waiting[lane], key, place)
    waiting[lane] += 1


@njit(cache=True)
def _serve(keys, places, waiting, running, until, now, took, start):  # type: ignore[no-untyped-def]
    """Lanes that are free begin with what waits for them; returns when the next operation ends, inf: none does."""
    soonest = np.inf
    for lane in range(running.size):
        if running[lane] < 0 and waiting[lane]:
            place = _pop(keys[lane], places[lane], waiting[lane])
            waiting[lane] -= 1
            running[lane], until[lane], start[place] = place, now + took[place], now
        soonest = min(soonest, until[lane])
    return soonest


@njit(cache=True)
def forward(choice, first, owner, where, took, count, key, by_arrival, total, limit, start):  # type: ignore[no-untyped-def]
    """Serve every lane whenever it is free; returns when all is done, inf beyond ``limit``.

    Args:
        by_arrival: the key is when an operation became ready, whatever ``key`` says.
        start: float64 (operations,), receives when each begins.
    """
    size, tensors = took.size, choice.size
    keys, places = np.empty((total, size)), np.empty((total, size), np.int64)
    waiting = np.zeros(total, np.int64)
    running, until = np.full(total, -1, np.int64), np.full(total, np.inf)
    now = 0.0
    if size:
        _wait(keys, places, waiting, where[0], key[0], 0)
    while True:
        soonest = _serve(keys, places, waiting, running, until, now, took, start)
        if soonest == np.inf:
            return now
        now = soonest
        if now > limit:
            return np.inf
        for lane in range(total):
            if until[lane] != now:
                continue
            place = running[lane]
            running[lane], until[lane] = -1, np.inf
            tensor = owner[place]
            length, part = count[choice[tensor]], first[tensor]
            if place == part:
                if tensor + 1 < tensors:
                    then = first[tensor + 1]
                    _wait(keys, places, waiting, where[then], now if by_arrival else key[then], then)
                begin, step, stop = part + 1, max(1, length), first[tensor + 1]
            elif (place - part) % length:
                begin, step, stop = place + 1, 1, place + 2
            else:  # the last of its segment
                continue
            for then in range(begin, stop, step):
                _wait(keys, places, waiting, where[then], now if by_arrival else key[then], then)


@njit(cache=True)
def reverse(choice, first, owner, where, took, count, repeats, key, total, start):  # type: ignore[no-untyped-def]
    """The same from the end: what comes last is served first; ``start`` receives times before the end."""
    size, tensors = took.size, choice.size
    keys, places = np.empty((total, size)), np.empty((total, size), np.int64)
    waiting, missing = np.zeros(total, np.int64), np.zeros(tensors, np.int64)
    running, until = np.full(total, -1, np.int64), np.full(total, np.inf)
    for tensor in range(tensors):
        row = choice[tensor]
        missing[tensor] = (tensor + 1 < tensors) + (repeats[row] if count[row] else 0)
        for place in range(first[tensor] + max(1, count[row]), first[tensor + 1], max(1, count[row])):
            _wait(keys, places, waiting, where[place], key[place], place)
        if missing[tensor] == 0:
            place = first[tensor]
            _wait(keys, places, waiting, where[place], key[place], place)
    now = 0.0
    while True:
        soonest = _serve(keys, places, waiting, running, until, now, took, start)
        if soonest == np.inf:
            return now
        now = soonest
        for lane in range(total):
            if until[lane] != now:
                continue
            place = running[lane]
            running[lane], until[lane] = -1, np.inf
            tensor = owner[place]
            part = first[tensor]
            if place != part and (place - part - 1) % count[choice[tensor]]:
                then = place - 1
            else:
                before = tensor - 1 if place == part else tensor
                if before < 0:
                    continue
                missing[before] -= 1
                if missing[before]:
                    continue
                then = first[before]
            _wait(keys, places, waiting, where[then], key[then], then)


@njit(cache=True)
def served(choice, backward, home, total, lane, seconds, count, repeats, by_tensor):  # type: ignore[no-untyped-def]
    """In the orders ``fifo`` and ``priority`` (``by_tensor``): (seconds, when each operation begins)."""
    first, owner, where, took, _ = laid_out(choice, backward, home, total, lane, seconds, count, repeats)
    start = np.empty(took.size)
    key = owner.astype(np.float64)
    time = forward(choice, first, owner, where, took, count, key, not by_tensor, total, np.inf, start)
    return time, start


@njit(cache=True)
def justified(choice, first, owner, where, took, count, repeats, total, key, start, rounds):  # type: ignore[no-untyped-def]
    """Push everything to the right as late as it can be, then to the left by that order, as long as it helps.

    Args:
        key, start: in: keys to begin with; out: those of the best schedule, and when its operations begin.

    Returns:
        when all is done.
    """
    now, back, mine = start.copy(), start.copy(), key.copy()
    best = forward(choice, first, owner, where, took, count, key, False, total, np.inf, start)
    now[:] = start
    stale = 0
    for _ in range(rounds):
        for place in range(took.size):
            mine[place] = -(now[place] + took[place])
        end = reverse(choice, first, owner, where, took, count, repeats, mine, total, back)
        for place in range(took.size):
            mine[place] = end - back[place] - took[place]
        time = forward(choice, first, owner, where, took, count, mine, False, total, np.inf, now)
        stale += 1
        if time < best * (1 - 1e-12):
            stale = 0 if time < best * (1 - 1e-6) else stale
            best = time
            key[:] = mine
            start[:] = now
        if stale == 2:
            break
    return best


@njit(cache=True)
def scheduled(choice, backward, home, total, lane, seconds, count, repeats, rounds):  # type: ignore[no-untyped-def]
    """The best schedule of a choice that is found from every rule: (seconds, key, start)."""
    first, owner, where, took, tail = laid_out(choice, backward, home, total, lane, seconds, count, repeats)
    best, key, start = np.inf, np.empty(took.size), np.empty(took.size)
    mine, now = np.empty(took.size), np.empty(took.size)
    for rule in range(RULES):
        by_rule(rule, first, owner, tail, mine)
        time = justified(choice, first, owner, where, took, count, repeats, total, mine, now, rounds)
        if time < best:
            best = time
            key[:], start[:] = mine, now
    return best, key, start


@njit(cache=True)
def exchanged(choice, tensor, row, first, key, took, backward, home, total, lane, seconds, count, repeats, limit):  # type: ignore[no-untyped-def]
    """When all is done if a tensor travels by another row and everything else keeps its key; and the new keys.

    The tensor's own operations get keys by which it would be there when it should be now. Beyond ``limit``: inf.

    Args:
        first, key, took: of the choice.
    """
    part, stop = first[tensor], first[tensor + 1]
    due = key[part] + took[part]
    for place in range(part + 1, stop):
        due = max(due, key[place] + took[place])
    old = choice[tensor]
    choice[tensor] = row
    new_first, owner, where, new_took, tail = laid_out(choice, backward, home, total, lane, seconds, count, repeats)
    new_key = np.empty(new_took.size)
    new_key[: part + 1] = key[: part + 1]
    then = new_first[tensor + 1]
    new_key[then:] = key[stop:]
    for place in range(part + 1, then):
        new_key[place] = due - tail[place]
    start = np.empty(new_took.size)
    time = forward(choice, new_first, owner, where, new_took, count, new_key, False, total, limit, start)
    choice[tensor] = old
    return time, new_key


@njit(cache=True)
def climbed(  # type: ignore[no-untyped-def]
    choice, best, key, tried, begin, turns, errors, limit, near, tries, rounds,
    backward, home, total, lane, seconds, count, repeats
):  # fmt: skip
    """Exchange one option after the other, while that helps or until ``tries`` are used up; returns F.

    An exchange is looked at with all keys as they are; where it comes near to the best it is justified and compared.

    Args:
        choice: changed in place; best, key: its F, and the keys of its schedule.
        tried, begin: the rows to try: those of a tensor are ``tried[begin[tensor] : begin[tensor + 1]]``.
        turns: the tensors in the order in which they are looked at.
        errors, limit: the sum of a choice's errors, float64 (rows,), stays at most the limit or does not grow.
        near: relative distance from the best within which an exchange is justified.
    """
    first, _, _, took, _ = laid_out(choice, backward, home, total, lane, seconds, count, repeats)
    spent, improved = 0.0, True
    for tensor in range(choice.size):
        spent += errors[choice[tensor]]
    while improved:
        improved = False
        for tensor in turns:
            for place in range(begin[tensor], begin[tensor + 1]):
                row, old = tried[place], choice[tensor]
                more = errors[row] - errors[old]
                if row == old or (more > 0 and spent + more > limit):
                    continue
                if tries <= 0:
                    return best
                time, new_key = exchanged(choice, tensor, row, first, key, took, backward, home, total, lane, seconds,
                                          count, repeats, best * (1 + near))  # fmt: skip
                tries -= 1
                if time == np.inf:
                    continue
                choice[tensor] = row
                parts = laid_out(choice, backward, home, total, lane, seconds, count, repeats)
                time = justified(choice, parts[0], parts[1], parts[2], parts[3], count, repeats, total, new_key,
                                 np.empty(new_key.size), 4)  # fmt: skip
                tries -= 6
                new_best = np.inf
                if time < best * (1 - 1e-9):  # is it also what the rules find?
                    new_best, new_key, _ = scheduled(
                        choice, backward, home, total, lane, seconds, count, repeats, rounds
                    )
                if new_best < best * (1 - 1e-9):
                    best, improved = new_best, True
                    spent += more
                    key, first, took = new_key, parts[0], parts[3]
                else:
                    choice[tensor] = old
    return best


@njit(cache=True)
def annealed(  # type: ignore[no-untyped-def]
    choice, tried, begin, errors, limit, heats, draws, backward, home, total, lane, seconds, count, repeats
):  # fmt: skip
    """Exchange options at random, also for what is a little slower, ever less so; the best by any rule, in place.

    Args:
        tried, begin, errors, limit: as in ``climbed``.
        heats: float64 (steps,), seconds; draws: float64 (steps, 3), from 0 to 1.
    """
    spent, now, best = 0.0, np.inf, np.inf
    for tensor in range(choice.size):
        spent += errors[choice[tensor]]
    found = choice.copy()
    for step in range(draws.shape[0]):
        tensor = min(choice.size - 1, int(draws[step, 0] * choice.size))
        size = begin[tensor + 1] - begin[tensor]
        row, old = tried[begin[tensor] + min(size - 1, int(draws[step, 1] * size))], choice[tensor]
        more = errors[row] - errors[old]
        if (row == old and step) or (more > 0 and spent + more > limit):
            continue
        choice[tensor] = row
        first, owner, where, took, tail = laid_out(choice, backward, home, total, lane, seconds, count, repeats)
        key, start, time = np.empty(took.size), np.empty(took.size), np.inf
        for rule in range(RULES):
            by_rule(rule, first, owner, tail, key)
            time = min(time, forward(choice, first, owner, where, took, count, key, False, total, time, start))
        if time > now and draws[step, 2] >= np.exp((now - time) / heats[step]):
            choice[tensor] = old
            continue
        now = time
        spent += more
        if time < best:
            best = time
            found[:] = choice
    choice[:] = found
