"""The compiled loops that leave out, for schedules, what needs no less of anything than another option.

What an option *needs*: its seconds on every lane, all segments together, and those of one segment from end to end. That
is all that the relaxation of a step knows of it (see ``relaxation``).
"""

from __future__ import annotations

import numpy as np

from espresso_mpi.files.compiled import compiled


@compiled
def visited(routes, index, count, slots):  # type: ignore[no-untyped-def]
    """Which of so many slots are operations of options along ``routes``, bool (slots,)."""
    found = np.zeros(slots, np.bool_)
    for option in routes:
        for place in range(count[option]):
            found[index[option, place]] = True
    return found


@compiled
def needs(routes, index, lane, count, slots, repeats, total):  # type: ignore[no-untyped-def]
    """What options along ``routes`` need, float64 (options, lanes + 1).

    Args:
        index: int32 (routes, most operations), places in ``slots``; lane: int8, the same shape, virtual lanes; count:
            int32 (routes,), operations.
        slots: float64 (slots,), seconds; repeats: segments; total: number of lanes.
    """
    found = np.zeros((routes.size, total + 1))
    for number, option in enumerate(routes):
        for place in range(count[option]):
            seconds = slots[index[option, place]]
            found[number, lane[option, place] % total] += repeats * seconds
            found[number, total] += seconds
    return found


@compiled
def needs_of(lane, seconds, count, repeats, total):  # type: ignore[no-untyped-def]
    """What the options of a problem need, float64 (options, lanes + 1)."""
    found = np.zeros((count.size, total + 1))
    for option in range(count.size):
        for place in range(count[option]):
            found[option, lane[option, place] % total] += repeats[option] * seconds[option, place]
            found[option, total] += seconds[option, place]
    return found


@compiled
def least(values):  # type: ignore[no-untyped-def]
    """The options (n, entries) that no other one is nowhere above, rising; of equal ones the first."""
    kept, size = np.empty(values.shape[0], np.int64), 0
    for option in range(values.shape[0]):
        dominated, place = False, 0
        while place < size:
            above, below = False, False
            for entry in range(values.shape[1]):
                if values[option, entry] > values[kept[place], entry]:
                    above = True
                elif values[option, entry] < values[kept[place], entry]:
                    below = True
                if above and below:
                    break
            if not below:
                dominated = True
                if place:  # what leaves out much is compared first
                    kept[place], kept[place - 1] = kept[place - 1], kept[place]
                break
            if above:
                place += 1
            else:  # the option is nowhere above it
                size -= 1
                kept[place] = kept[size]
        if not dominated:
            kept[size] = option
            size += 1
    return np.sort(kept[:size])


@compiled
def apportioned(kind, begin, shares):  # type: ignore[no-untyped-def]
    """A column for each tensor, int64 (tensors,), so that each class has of every column about as many as its share.

    Args:
        kind: int64 (tensors,), the class of each; its columns are from ``begin[kind]`` to ``begin[kind + 1]``.
    """
    found, due = np.empty(kind.size, np.int64), np.zeros(shares.size)
    for tensor in range(kind.size):
        a, b = begin[kind[tensor]], begin[kind[tensor] + 1]
        due[a:b] += shares[a:b]
        found[tensor] = a + np.argmax(due[a:b])
        due[found[tensor]] -= 1.0
    return found
