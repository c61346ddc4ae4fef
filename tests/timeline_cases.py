"""Random steps, and a simulation of them that is slow and plain."""

from __future__ import annotations

import itertools

import numpy as np

from espresso_mpi.planner.model.timeline import LANES, Lanes, OptionTable, Timeline, virtual
from espresso_mpi.timetable import RESOURCES

# --- the slow simulation ----------------------------------------------------------------------------------------------


def visits(lanes, home):
    """Of each operation whether its visit of its lane is a later one; the backward pass is the first of its own."""
    been, now, late = {home}, home, []
    for lane in lanes:
        if lane == now:
            late.append(late[-1] if late else False)
        else:
            late.append(lane in been)
        been.add(lane)
        now = lane
    return late


def in_backprop_order(backward, paths, home):
    """Starts by (tensor, segment, position), as the earliest that everything that has to come before allows.

    Args:
        paths: of each tensor ([(lane, seconds)], repeats).
    """
    takes, before, queues = {}, {}, {}

    def add(key, seconds, queue, *others):
        takes[key] = seconds
        before[key] = list(others) + queues.setdefault(queue, [])[-1:]
        queues[queue].append(key)

    for tensor, (path, repeats) in enumerate(paths):
        add((-1, 0, tensor), backward[tensor], ("first", home))
        late = visits([lane for lane, _ in path], home)
        for segment in range(repeats):
            previous = (-1, 0, tensor)
            for position, (lane, seconds) in enumerate(path):
                key = (tensor, segment, position)
                add(key, seconds, ("late" if late[position] else "first", lane), previous)
                previous = key
        for lane in {lane for lane, _ in path}:  # the lane is shared: its time goes away from it, at once
            share = repeats * sum(s for (where, s), again in zip(path, late) if again and where == lane)
            if share:
                add(("share", tensor, lane), share, ("first", lane))
    start = dict.fromkeys(takes, 0.0)
    while True:  # until nothing has to be moved to later
        moved = {key: max((start[b] + takes[b] for b in before[key]), default=0.0) for key in start}
        if moved == start:
            break
        start = moved
    end = max(start[key] + takes[key] for key in start if key[0] != "share" or key[2] == home)
    return {key: at for key, at in start.items() if key[0] != "share"}, end


def in_order_of_events(backward, paths, home, by_tensor, rank=None):
    """Starts by (tensor, segment, position), one operation at a time on a lane, to its end; ``rank``: another rule."""
    jobs = [
        {"tensor": t, "segment": s, "path": path, "at": 0} for t, (path, n) in enumerate(paths) for s in range(n)
    ]  # fmt: skip
    waiting = [(0.0, 0, len(jobs), None)] if backward.size else []  # since when, tensor, number, job
    running, starts, now, end = {}, {}, 0.0, 0.0
    while waiting or running:
        done = [lane for lane, (until, _) in running.items() if until == now]
        for lane in sorted(done):
            end = max(end, now)
            _, (_, tensor, number, job) = running.pop(lane)
            if job is None:
                if tensor + 1 < len(backward):
                    waiting.append((now, tensor + 1, number, None))
                free = [(i, one) for i, one in enumerate(jobs) if one["tensor"] == tensor]
            else:
                job["at"] += 1
                free = [(number, job)]
            waiting += [(now, one["tensor"], i, one) for i, one in free if one["at"] < len(one["path"])]

        def lane_of(entry):
            return home if entry[3] is None else entry[3]["path"][entry[3]["at"]][0]

        for lane in {lane_of(entry) for entry in waiting} - set(running):
            here = [entry for entry in waiting if lane_of(entry) == lane]
            first = min(here, key=rank or (lambda entry: entry[1:3] if by_tensor else entry[:3]))
            waiting.remove(first)
            _, tensor, _, job = first
            takes = backward[tensor] if job is None else job["path"][job["at"]][1]
            key = (-1, 0, tensor) if job is None else (tensor, job["segment"], job["at"])
            starts[key] = now
            running[lane] = (now + takes, first)
        now = min((until for until, _ in running.values()), default=now)
    return starts, end


def in_sequence(backward, paths, sequences):
    """Starts if every lane does its operations one after the other, in the order given: the executor's."""
    takes = {(-1, 0, tensor): seconds for tensor, seconds in enumerate(backward)}
    before = {(-1, 0, tensor): [(-1, 0, tensor - 1)] if tensor else [] for tensor in range(len(backward))}
    for tensor, (path, repeats) in enumerate(paths):
        for segment, position in itertools.product(range(repeats), range(len(path))):
            takes[tensor, segment, position] = path[position][1]
            previous = (tensor, segment, position - 1) if position else (-1, 0, tensor)
            before[tensor, segment, position] = [previous]
    for sequence in sequences:
        for one, then in itertools.pairwise(sequence):
            before[then].append(one)
    start = dict.fromkeys(takes, 0.0)
    for _ in range(len(takes) + 1):
        moved = {key: max((start[b] + takes[b] for b in before[key]), default=0.0) for key in start}
        if moved == start:
            return start, max((start[key] + takes[key] for key in start), default=0.0)
        start = moved
    raise AssertionError("the lanes wait for each other: nobody can execute that")


def in_list(backward, paths, home, rule):
    """The time if every lane, whenever it is free, takes what is first by a rule: the slow way of ``by_rule``."""
    rest, tails = 0.0, []
    for seconds, (path, repeats) in reversed(list(zip(backward, paths))):
        rest = max([rest, *[sum(s for _, s in path)] * bool(repeats)]) + seconds
        tails.insert(0, rest)

    def rank(entry):
        tensor, job, at = entry[1], entry[3], 0 if entry[3] is None else entry[3]["at"]
        tail = tails[tensor] if job is None else sum(s for _, s in job["path"][at:])
        return ((rule == 1 and job is not None, tensor, -tail) if rule < 2 else (-tail,)), tensor, job is not None

    return in_order_of_events(backward, paths, home, False, rank)[1]


def simulated(timeline, choice):
    o, home, paths = timeline.options, timeline.lanes.backward, []
    for row in choice:
        lanes = [int(lane) % timeline.lanes.count for lane in o.lane[row, : o.count[row]]]
        paths.append((list(zip(lanes, map(float, o.seconds[row]))), int(o.repeats[row])))
    if timeline.order == "backprop":
        return in_backprop_order(timeline.backward, paths, home)
    if timeline.order == "schedule":
        found = sorted(timeline.intervals(choice), key=lambda one: (one.start, one.stop))
        lanes = range(timeline.lanes.count)
        sequences = [[(one.tensor, one.segment, one.position) for one in found if one.lane == lane] for lane in lanes]
        starts, end = in_sequence(timeline.backward, paths, sequences)
        assert end <= min(in_list(timeline.backward, paths, home, rule) for rule in range(3)) + 1e-9
        return starts, end
    return in_order_of_events(timeline.backward, paths, home, timeline.order == "priority")


# --- random cases -----------------------------------------------------------------------------------------------------


def random_options(rng, lanes, rows=6, most=5, whole=False):
    """Options of random operations; ``whole``: of whole seconds, 0 among them, so that many things happen at once."""
    lane, count = np.zeros((rows, most), np.int8), rng.integers(0, most + 1, rows).astype(np.int32)
    for row in range(rows):
        own = np.array([lanes.of(RESOURCES[r]) for r in rng.integers(0, 4, most)], np.int8)
        lane[row] = virtual(own, count[row], lanes.count, lanes.backward)
    seconds = rng.integers(0, 4, (rows, most)).astype(float) if whole else rng.exponential(1.0, (rows, most))
    return OptionTable(lane, seconds, count, rng.integers(1, 4, rows).astype(np.int32))


def random_case(seed, order, whole=False):
    rng = np.random.default_rng([seed, len(order)])
    lanes = [*LANES.values(), Lanes(0, 0, 0, 0, 0), Lanes(0, 1, 2, 3, None)][rng.integers(5)]
    options = random_options(rng, lanes, whole=whole)
    tensors = int(rng.integers(1, 7))
    backward = rng.integers(0, 3, tensors).astype(float) if whole else rng.exponential(1.0, tensors)
    return Timeline(backward, options, lanes, order), rng.integers(0, options.count.size, tensors)
