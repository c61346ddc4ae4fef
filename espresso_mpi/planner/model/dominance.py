"""Options that are never better than another one: what a candidate set leaves out in the order ``backprop``.

A candidate set holds what no other option of it dominates. An option's path through the lanes is a max-plus matrix:
when each lane is free afterwards, as the maximum over lanes of when it was free before plus a time. An option whose
matrix is nowhere above another's is never worse than it, whatever comes before and after (in the order ``backprop``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from espresso_mpi.files.compiled import compiled

from .candidates import CandidateSet
from .compiled_routes import Compiled
from .timeline import Lanes, OptionTable, follow


def matrices(options: OptionTable, lanes: Lanes) -> np.ndarray:
    """The max-plus matrix of every option, float64 (options, 2 · lanes, 2 · lanes + 1).

    Entry [a, b] is how much later virtual lane b is free than a was, at least; -inf where b does not depend on a. The
    last column is when the tensor is there; the gradient is ready when the lane of the backward pass is free.
    """
    return _matrices(options.lane, options.seconds, options.count, options.repeats, lanes.count, lanes.backward)


@compiled
def _matrices(lane, seconds, count, repeats, total, home):  # type: ignore[no-untyped-def]
    found, nothing = np.empty((count.size, 2 * total, 2 * total + 1)), np.empty((0, 0))
    for option in range(count.size):
        for a in range(2 * total):
            state = found[option, a, : 2 * total]
            state[:] = -np.inf
            state[a] = 0.0
            ready = 0.0 if a == home else -np.inf
            end = follow(state, ready, lane[option], seconds[option], count[option], repeats[option], nothing)
            found[option, a, 2 * total] = end
    return found


def pruned(tables: Compiled, sets: Sequence[CandidateSet], lanes: Lanes) -> list[CandidateSet]:
    """The candidate sets without their dominated options; all candidate sets have the same options.

    Routes that visit the same lanes in the same order need no matrices: what is quicker on every run, and has no more
    segments, dominates. Operations of one run merge only where nothing has several segments.
    """
    if not sets:
        return []
    orders = {}
    kept = []
    for candidates in sets:
        o = candidates.options
        whole = bool((o.repeats == 1).all())
        if whole not in orders:
            kinds = (tables.pattern if whole else tables.steps)[candidates.route]
            orders[whole] = kinds, np.argsort(kinds, kind="stable")
        run = tables.run if whole else np.broadcast_to(np.arange(o.lane.shape[1], dtype=np.int8), tables.run.shape)
        kinds, order = orders[whole]
        first = candidates.only(
            _quicker(o.seconds, o.count, o.repeats, candidates.route, np.ascontiguousarray(run), kinds, order)
        )
        kept.append(first.only(undominated(first.options, lanes)))
    return kept


@compiled
def nowhere_above(left, i, right, j):  # type: ignore[no-untyped-def]
    """Whether no entry of row ``i`` of ``left`` is above that of row ``j`` of ``right``: so row i dominates row j."""
    for entry in range(left.shape[1]):  # noqa: SIM110  numba compiles no quick all()
        if left[i, entry] > right[j, entry]:
            return False
    return True


@compiled
def _quicker(seconds, count, repeats, route, run, kinds, order):  # type: ignore[no-untyped-def]
    """The options that no other of their kind dominates, rising; ``order``: options by kind."""
    sums, total = np.zeros(seconds.shape), np.zeros(count.size)
    for option in range(count.size):
        for place in range(count[option]):
            sums[option, run[route[option], place]] += seconds[option, place]
            total[option] += seconds[option, place]
    keep, kept = np.ones(count.size, np.bool_), np.empty(count.size, np.int64)
    begin = 0
    while begin < order.size:
        end = begin
        while end < order.size and kinds[order[end]] == kinds[order[begin]]:
            end += 1
        members = order[begin:end]
        ranked, size = members[np.argsort(total[members], kind="mergesort")], 0
        for option in ranked:
            dominated = False
            for place in range(size):
                other = kept[place]
                if repeats[other] <= repeats[option] and nowhere_above(sums, other, sums, option):
                    dominated = True
                    break
            if dominated:
                keep[option] = False
            else:
                kept[size] = option
                size += 1
        begin = end
    return np.flatnonzero(keep)


def undominated(options: OptionTable, lanes: Lanes) -> np.ndarray:
    """The options that no other one dominates, in rising order; of equal ones the first."""
    o = options
    flat, weight = _compared(o.lane, o.seconds, o.count, o.repeats, lanes.count, lanes.backward)
    return np.sort(front(flat, np.argsort(weight, kind="stable")))


@compiled
def _compared(lane, seconds, count, repeats, total, home):  # type: ignore[no-untyped-def]
    """The entries of the options' matrices in which they differ, (options, entries), and the sum of finite ones."""
    nothing, virtual = np.empty((0, 0)), 2 * total
    flat, weight = np.empty((count.size, virtual * (virtual + 1))), np.zeros(count.size)
    differ, visited = np.zeros(flat.shape[1], np.bool_), np.empty(virtual, np.bool_)
    for option in range(count.size):
        visited[:] = False
        visited[home] = True
        for place in range(count[option]):
            visited[lane[option, place]] = True
            visited[lane[option, place] % total] = True
        for a in range(virtual):
            begin = a * (virtual + 1)
            state = flat[option, begin : begin + virtual]
            state[:] = -np.inf
            state[a] = 0.0
            end = -np.inf
            if visited[a]:
                ready = 0.0 if a == home else -np.inf
                end = follow(state, ready, lane[option], seconds[option], count[option], repeats[option], nothing)
            flat[option, begin + virtual] = end
        for entry in range(flat.shape[1]):
            value = flat[option, entry]
            differ[entry] |= value != flat[0, entry]
            if value > -np.inf:
                weight[option] += value
    used = np.flatnonzero(differ)
    slim = np.empty((count.size, used.size))
    for option in range(count.size):
        for place in range(used.size):
            slim[option, place] = flat[option, used[place]]
    return slim, weight


@compiled
def front(flat, order):  # type: ignore[no-untyped-def]
    kept, size = np.empty(order.size, np.int64), 0
    finite = np.zeros(order.size, np.int64)  # a bit an entry: what depends on more lanes dominates nothing
    for option in range(order.size):
        for entry in range(min(63, flat.shape[1])):
            if flat[option, entry] > -np.inf:
                finite[option] |= 1 << entry
    for option in order:
        dominated, missing = False, ~finite[option]
        for place in range(size):
            other = kept[place]
            if finite[other] & missing:
                continue
            if nowhere_above(flat, other, flat, option):
                dominated = True
                if place:  # what dominates much is tried first
                    kept[place], kept[place - 1] = kept[place - 1], kept[place]
                break
        if not dominated:
            kept[size] = option
            size += 1
    return kept[:size]
