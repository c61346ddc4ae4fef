"""When everything of a training step happens: F(S), from the operations of every tensor on shared resources.

A tensor's gradient is ready when its part of the backward pass ends; its operations then follow each other, each on one
resource: GPU, CPU, the network inside nodes and between them. Which operation a resource serves next is the *order*:

``backprop``
    The tensors' order, fixed. A tensor's first visit to a resource is served in that order. Later visits (a decode on
    the processor that encoded, a second collective) run beside in the same order, and take their time from the resource
    right after the first visit. The resource is shared, and no tensor waits for one that will come back. The completion
    times are maxima and sums of durations (a max-plus system). They never fall when a duration grows; exact search and
    certified bounds need that.
``fifo``
    What became ready first is served first, one at a time, to its end; of several the earlier tensor.
``priority``
    Of what is ready, the tensor that is earlier in the backward pass.
``schedule``
    One operation at a time, by the best schedule that is found for the choice; see ``scheduling``.

The backward pass itself occupies the processor that computes it, so compression there delays it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np

from espresso_mpi.errors import ConfigError
from espresso_mpi.files.compiled import compiled
from espresso_mpi.timetable import Lanes as Lanes
from espresso_mpi.types import Order as Order

from .dispatch import Tables, laid_out, scheduled, served

ORDERS: tuple[Order, ...] = get_args(Order)

TIE = 1e-12
"""Times that differ by less of themselves are equal: sums of the same numbers in another order differ by that."""

ROUNDS = 30
"""How often a schedule is justified, at most; it ends where that no longer helps."""


SEPARATE = Lanes()
"""Every resource for itself; the GPU computes."""
ONE_NETWORK = Lanes(inter=2)
"""The network is one serial lane, as the paper draws it."""
HOST = Lanes(gpu=0, cpu=1, intra=1, inter=2, compute=None)
"""Tensors in host memory: one thread of a rank encodes, sums and copies, so the CPU and shared memory are one lane."""

SERIAL = Lanes(gpu=0, cpu=1, intra=1, inter=1, compute=None)
"""One operation at a time: tensors in host memory, where ranks share cores and one's waiting is another's work."""

LANES: dict[str, Lanes] = {"separate": SEPARATE, "one-network": ONE_NETWORK, "host": HOST, "serial": SERIAL}


def lanes_of(lanes: Lanes | str) -> Lanes:
    """The lanes of a name.

    Raises:
        ConfigError: an unknown name.
    """
    if isinstance(lanes, Lanes):
        return lanes
    if lanes not in LANES:
        raise ConfigError(f"lanes={lanes!r}; expected one of {', '.join(LANES)}, or a Lanes")
    return LANES[lanes]


@dataclass(frozen=True)
class OptionTable:
    """All options of all candidate sets, as numbers: a row an option.

    Attributes:
        lane: int8 (options, most operations), the virtual lane of each operation: that of its resource, plus the number
            of lanes where the tensor was there before.
        seconds: float64, the same shape.
        count: int32 (options,), operations; repeats: segments that follow each other.
    """

    lane: np.ndarray
    seconds: np.ndarray
    count: np.ndarray
    repeats: np.ndarray


@dataclass(frozen=True)
class Interval:
    """What one tensor did on one lane, in seconds since the step began. ``tensor`` -1: the backward pass."""

    tensor: int
    segment: int
    position: int
    lane: int
    start: float
    stop: float


def virtual(lanes: np.ndarray, count: int, total: int, backward: int) -> np.ndarray:
    """The virtual lanes of one option's operations: ``total`` is added where a tensor comes back to a lane.

    The backward pass is the first visit to its lane; operations that follow it at once belong to it.
    """
    found, seen, last, late = lanes.copy(), {backward}, backward, False
    for position in range(count):
        lane = int(lanes[position])
        if lane != last:
            late = lane in seen
        found[position] = lane + total * late
        seen.add(lane)
        last = lane
    return found


# --- kernels ----------------------------------------------------------------------------------------------------------


@compiled
def follow(state, ready, lane, seconds, count, repeats, starts):  # type: ignore[no-untyped-def]
    """Lead one tensor through the lanes in the order ``backprop``; returns when it is there.

    Args:
        state: float64 (2 · lanes,), when each virtual lane is free; advanced in place.
        ready: when the gradient is there; lane, seconds: (most operations,) of its option.
        starts: float64 (segments, most operations), receives the start of each operation; of no size: not wanted.
    """
    total = state.size // 2
    end = ready
    for segment in range(repeats):
        now = ready
        for position in range(count):
            where = lane[position]
            start = max(now, state[where])
            if starts.size:
                starts[segment, position] = start
            now = start + seconds[position]
            state[where] = now
        end = max(end, now)
    for position in range(count):
        where = lane[position]
        if where >= total:
            state[where - total] += repeats * seconds[position]
    return end


@compiled
def backprop_time(choice, tables):  # type: ignore[no-untyped-def]
    """F in the order ``backprop``: when the last tensor is there and the lane of the backward pass has done all of its.

    That is no less than the sum of what is done on that lane, also of what ran beside something else at the very end.

    Args:
        choice: int64 (tensors,), the option of each; backward: float64 (tensors,), seconds of the backward pass that
            end with its gradient; home: the lane of the backward pass; total: number of lanes.
    """
    backward, home, total, lane, seconds, count, repeats = tables
    state, nothing, end = np.zeros(2 * total), np.empty((0, 0)), 0.0
    for tensor in range(choice.size):
        option = choice[tensor]
        state[home] += backward[tensor]
        there = follow(state, state[home], lane[option], seconds[option], count[option], repeats[option], nothing)
        end = max(end, there)
    return max(end, state[home])


# --- in Python --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """F of the choices for one step, in one order.

    Attributes:
        backward: float64 (tensors,), seconds of the backward pass that end with each gradient.
        options: of all tensors together; a choice names an option.
        lanes: which resources are one.

    Raises:
        ConfigError: an unknown order.
    """

    backward: np.ndarray
    options: OptionTable
    lanes: Lanes = SEPARATE
    order: Order = "schedule"

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ConfigError(f"order={self.order!r}; expected one of {', '.join(ORDERS)}")

    def seconds(self, choice: np.ndarray) -> float:
        """The iteration time: from the beginning of the step until every tensor is there and the backward pass over."""
        if self.order == "backprop":
            return float(backprop_time(choice, self.tables))
        return float(self._served(choice)[0])

    def _served(self, choice: np.ndarray) -> tuple[float, np.ndarray]:
        """F and the begin of every operation where a lane does one thing at a time."""
        if self.order == "schedule":
            time, _, start = scheduled(choice, self.tables, ROUNDS)
            return time, start
        found: tuple[float, np.ndarray] = served(choice, self.tables, self.order == "priority")
        return found

    def starts(self, choice: np.ndarray) -> np.ndarray:
        """When every operation begins, float64 (operations,), in the order of ``dispatch``; not in ``backprop``."""
        return self._served(choice)[1]

    @cached_property
    def tables(self) -> Tables:
        """What the kernels take after a choice."""
        return Tables(self.backward, self.lanes.backward, self.lanes.count, *self._arrays)

    @property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        o = self.options
        return o.lane, o.seconds, o.count, o.repeats

    def intervals(self, choice: np.ndarray) -> list[Interval]:
        """Everything that happens, by tensor; the backward pass as tensor -1, its parts as positions."""
        return self._backprop_intervals(choice) if self.order == "backprop" else self._served_intervals(choice)

    def _served_intervals(self, choice: np.ndarray) -> list[Interval]:
        _, starts = self._served(choice)
        first, _, where, took, _ = laid_out(choice, self.tables)
        found = []
        for tensor, option in enumerate(choice):
            part, stop = int(first[tensor]), int(first[tensor + 1])
            for place in range(part, stop):
                segment, position = divmod(place - part - 1, max(1, int(self.options.count[option])))
                what = (tensor, segment, position) if place > part else (-1, 0, tensor)
                begin = float(starts[place])
                found.append(Interval(*what, int(where[place]), begin, begin + float(took[place])))
        return found

    def _backprop_intervals(self, choice: np.ndarray) -> list[Interval]:
        home, total, found = self.lanes.backward, self.lanes.count, list[Interval]()
        state = np.zeros(2 * total)
        for tensor, option in enumerate(choice):
            found.append(Interval(-1, 0, tensor, home, state[home], state[home] + self.backward[tensor]))
            state[home] += self.backward[tensor]
            lane, seconds, count, repeats = (array[option] for array in self._arrays)
            starts = np.zeros((repeats, lane.size))
            follow(state, state[home], lane, seconds, count, repeats, starts)
            found += self._of_tensor(tensor, option, starts)
        return found

    def _of_tensor(self, tensor: int, option: int, starts: np.ndarray) -> list[Interval]:
        o, total = self.options, self.lanes.count
        return [
            Interval(tensor, segment, position, int(o.lane[option, position]) % total, float(row[position]),
                     float(row[position] + o.seconds[option, position]))
            for segment, row in enumerate(starts)
            for position in range(o.count[option])
        ]  # fmt: skip
