"""The compiled loops of schedules: operations of a step on lanes that do one thing at a time; see ``schedule``.

The operations of a step stand in one row: for each tensor its part of the backward pass, then those of its segments.
``first`` (tensors + 1,) is where a tensor's begin. A *key* of an operation says when it should begin at the latest: of
those that wait for a lane the one with the least key is served, of equal ones the first in the row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from espresso_mpi.files.compiled import compiled

RULES = 3
"""Ways to begin: see ``by_rule``."""


class Tables(NamedTuple):
    """What the kernels take of a step beside a choice.

    Attributes:
        backward: float64 (tensors,), seconds of the backward pass that end with each gradient.
        home, total: the lane of the backward pass, and the number of lanes.
        lane, seconds, counts, repeats: those of ``OptionTable``, where ``counts`` is ``count``, a method of tuples.
    """

    backward: np.ndarray
    home: int
    total: int
    lane: np.ndarray
    seconds: np.ndarray
    counts: np.ndarray
    repeats: np.ndarray


@compiled
def laid_out(choice, tables):  # type: ignore[no-untyped-def]
    """The operations of a choice: (first, owner, where, took, tail).

    Returns:
        owner: int64 (operations,), the tensor; where: int64, the lane; took: float64, seconds; tail: float64, seconds
        from its begin until its segment is there if nothing else is in the way; of a part of the backward pass until
        its tensor and all later ones are.
    """
    backward, home, total, lane, seconds, count, repeats = tables
    first = np.zeros(choice.size + 1, np.int64)
    for tensor in range(choice.size):
        option = choice[tensor]
        first[tensor + 1] = first[tensor] + 1 + repeats[option] * count[option]
    size = first[choice.size]
    owner, where = np.empty(size, np.int64), np.empty(size, np.int64)
    took, tail = np.empty(size), np.empty(size)
    rest = 0.0
    for tensor in range(choice.size - 1, -1, -1):
        option, part = choice[tensor], first[tensor]
        begin = part + 1
        for _ in range(repeats[option]):
            left = 0.0
            for position in range(count[option] - 1, -1, -1):
                place = begin + position
                owner[place], where[place] = tensor, lane[option, position] % total
                took[place] = seconds[option, position]
                left += seconds[option, position]
                tail[place] = left
            rest = max(rest, left)
            begin += count[option]
        rest += backward[tensor]
        owner[part], where[part], took[part], tail[part] = tensor, home, backward[tensor], rest
    return first, owner, where, took, tail


@compiled
def by_rule(rule, first, owner, tail, key):  # type: ignore[no-untyped-def]
    """Keys to begin with: 0: by tensor; 1: the backward pass first, then by tensor; 2: the longest tail first."""
    longest = tail.max() if tail.size else 0.0
    for place in range(key.size):
        key[place] = -tail[place]
        if rule < 2:
            key[place] += 2 * longest * owner[place]
            if rule == 1 and place == first[owner[place]]:
                key[place] -= 4 * longest * first.size


@compiled
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


@compiled
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


@compiled
def _wait(keys, places, waiting, lane, key, place):  # type: ignore[no-untyped-def]
    """An operation is ready, and waits for its lane."""
    _push(keys[lane], places[lane], waiting[lane], key, place)
    waiting[lane] += 1


@compiled
def _serve(keys, places, waiting, running, until, now, took, start, late):  # type: ignore[no-untyped-def]
    """Lanes that are free begin with what waits for them; returns when the next operation ends, inf: none does.

    Args:
        late: float64 (lanes,), when each must begin with what it has left; -inf is returned if one begins later.
    """
    soonest = np.inf
    for lane in range(running.size):
        if running[lane] < 0 and waiting[lane]:
            if now > late[lane]:
                return -np.inf
            place = _pop(keys[lane], places[lane], waiting[lane])
            waiting[lane] -= 1
            running[lane], until[lane], start[place] = place, now + took[place], now
            late[lane] += took[place]
        soonest = min(soonest, until[lane])
    return soonest


@compiled
def forward(choice, first, owner, where, took, count, key, by_arrival, total, limit, start):  # type: ignore[no-untyped-def]
    """Serve every lane whenever it is free; returns when all is done, inf beyond ``limit``.

    Beyond the limit it ends as soon as a lane that begins with something has too much left to be done by then.

    Args:
        by_arrival: the key is when an operation became ready, whatever ``key`` says.
        start: float64 (operations,), receives when each begins.
    """
    size, tensors = took.size, choice.size
    keys, places = np.empty((total, size)), np.empty((total, size), np.int64)
    waiting = np.zeros(total, np.int64)
    running, until = np.full(total, -1, np.int64), np.full(total, np.inf)
    now, late = 0.0, np.full(total, limit * (1 + 1e-12))
    if limit < np.inf:
        for place in range(size):
            late[where[place]] -= took[place]
    if size:
        _wait(keys, places, waiting, where[0], key[0], 0)
    while True:
        soonest = _serve(keys, places, waiting, running, until, now, took, start, late)
        if soonest == np.inf:
            return now
        now = soonest
        if now > limit or now < 0:
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


@compiled
def reverse(choice, first, owner, where, took, count, repeats, key, total, start):  # type: ignore[no-untyped-def]
    """The same from the end: what comes last is served first; ``start`` receives times before the end."""
    size, tensors = took.size, choice.size
    keys, places = np.empty((total, size)), np.empty((total, size), np.int64)
    waiting, missing = np.zeros(total, np.int64), np.zeros(tensors, np.int64)
    running, until = np.full(total, -1, np.int64), np.full(total, np.inf)
    for tensor in range(tensors):
        option = choice[tensor]
        missing[tensor] = (tensor + 1 < tensors) + (repeats[option] if count[option] else 0)
        for place in range(first[tensor] + max(1, count[option]), first[tensor + 1], max(1, count[option])):
            _wait(keys, places, waiting, where[place], key[place], place)
        if missing[tensor] == 0:
            place = first[tensor]
            _wait(keys, places, waiting, where[place], key[place], place)
    now, late = 0.0, np.full(total, np.inf)
    while True:
        soonest = _serve(keys, places, waiting, running, until, now, took, start, late)
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


@compiled
def served(choice, tables, by_tensor):  # type: ignore[no-untyped-def]
    """In the orders ``fifo`` and ``priority`` (``by_tensor``): (seconds, when each operation begins)."""
    total, count = tables.total, tables.counts
    first, owner, where, took, _ = laid_out(choice, tables)
    start = np.empty(took.size)
    key = owner.astype(np.float64)
    time = forward(choice, first, owner, where, took, count, key, not by_tensor, total, np.inf, start)
    return time, start


@compiled
def justified(choice, first, owner, where, took, count, repeats, total, key, start, rounds, enough):  # type: ignore[no-untyped-def]
    """Push everything to the right as late as it can be, then to the left by that order, as long as it helps.

    Args:
        key, start: in: keys to begin with; out: those of the best schedule, and when its operations begin.
        enough: it also ends when all is done earlier than this.

    Returns:
        when all is done.
    """
    now, back, mine = start.copy(), start.copy(), key.copy()
    best = forward(choice, first, owner, where, took, count, key, False, total, np.inf, start)
    now[:] = start
    stale = 0
    for _ in range(rounds):
        if best < enough:
            break
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


@compiled
def scheduled(choice, tables, rounds):  # type: ignore[no-untyped-def]
    """The best schedule of a choice that is found from every rule: (seconds, key, start)."""
    return quicker(choice, tables, rounds, -np.inf)


@compiled
def quicker(choice, tables, rounds, enough):  # type: ignore[no-untyped-def]
    """The same, or the first schedule on the way that takes less than ``enough``: F is at most its time."""
    total, count, repeats = tables.total, tables.counts, tables.repeats
    first, owner, where, took, tail = laid_out(choice, tables)
    best, key, start = np.inf, np.empty(took.size), np.empty(took.size)
    mine, now = np.empty(took.size), np.empty(took.size)
    for rule in range(RULES):
        by_rule(rule, first, owner, tail, mine)
        time = justified(choice, first, owner, where, took, count, repeats, total, mine, now, rounds, enough)
        if time < best:
            best = time
            key[:], start[:] = mine, now
        if best < enough:
            break
    return best, key, start


@compiled
def exchanged(choice, tensor, option, first, key, took, tables, limit):  # type: ignore[no-untyped-def]
    """When all is done if a tensor travels by another row and everything else keeps its key; and the new keys.

    The tensor's own operations get keys by which it would be there when it should be now. Beyond ``limit``: inf.

    Args:
        first, key, took: of the choice.
    """
    total, count = tables.total, tables.counts
    part, stop = first[tensor], first[tensor + 1]
    due = key[part] + took[part]
    for place in range(part + 1, stop):
        due = max(due, key[place] + took[place])
    old = choice[tensor]
    choice[tensor] = option
    new_first, owner, where, new_took, tail = laid_out(choice, tables)
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
