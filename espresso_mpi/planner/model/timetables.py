"""The schedule of a choice: from the options of a timeline to what a plan keeps and the executor carries out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from espresso_mpi.timetable import Lanes, Schedule, Timetable
from espresso_mpi.types import Plan

from .dispatch import laid_out
from .problem import Problem, evaluated
from .profile import Profile
from .timeline import Order
from .workload import Workload


def schedule_of(problem: Problem, choice: np.ndarray, names: Sequence[str]) -> Schedule | None:
    """The schedule by which F of a choice is reached.

    None in the order ``backprop``, which has none; and where one lane does everything but the backward pass, for then F
    is the same in every order in which the lane never waits while there is something to do.

    Args:
        choice: int64 (buffers,), options of the problem; names: of its buffers, as a plan calls them.
    """
    timeline = problem.timeline
    lanes = timeline.lanes
    first, _, where, took, _ = laid_out(choice, timeline.tables)
    used = set(np.delete(where, first[:-1]).tolist())
    if timeline.order == "backprop" or (len(used) == 1 and lanes.backward not in used):
        return None
    starts = timeline.starts(choice)
    count = timeline.options.count[choice]
    buffers = {}
    for number, name in enumerate(names):
        part, stop, length = int(first[number]), int(first[number + 1]), int(count[number])
        once = slice(part + 1, part + 1 + length)
        rows = starts[part + 1 : stop].reshape(-1, length) if length else np.zeros((1, 0))
        operations = tuple(slot.what for slot in problem.operations(int(choice[number])))
        buffers[name] = Timetable(
            float(starts[part]), float(took[part]), operations, tuple(where[once].tolist()),
            tuple(took[once].tolist()), tuple(map(tuple, rows.tolist())),
        )  # fmt: skip
    return Schedule(replace(lanes, compute=lanes.backward), buffers)


def with_schedule(plan: Plan, workload: Workload, profile: Profile, lanes: Lanes | str, order: Order) -> Plan:
    """The plan with the schedule by which its step is predicted.

    Raises:
        PlanError: the plan does not know a tensor; ConfigError: the profile lacks what it needs.
    """
    problem, choice = evaluated(plan, workload, profile, lanes=lanes, order=order)
    return replace(plan, schedule=schedule_of(problem, choice, [buffer.name for buffer in problem.workload.tensors]))
