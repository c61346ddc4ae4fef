"""What a step takes whose tensors share messages as in a session without a plan: the rules of ``sharing``, priced.

Tensors that start together, because their gradients are ready at the same time or because the plan holds them until the
last one is, form dense buffers and payload buckets. A payload bucket costs

- the check, the encodes and the decodes of its tensors, each by its own size;
- each collective of payloads once, with the bytes of all its tensors, and so each dense ``reduce_scatter`` or
  ``allgather`` inside the nodes;
- other dense collectives once for each tensor.

It has no schedule: lanes serve what comes first.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from espresso_mpi import compressors
from espresso_mpi.compressors import Compressor
from espresso_mpi.sharing import form, fused, way_of
from espresso_mpi.types import ITEMSIZE, Plan, Route, Strategy, buffer_name

from .beside import beside
from .cost import FLOAT32, Prices, Shape, Slot, checks, slots
from .profile import Profile
from .timeline import Lanes, OptionTable, Timeline, lanes_of
from .workload import Workload, WorkloadTensor


@dataclass(frozen=True)
class SharingLimits:
    """How much travels together, in bytes.

    Attributes:
        payloads: of a payload bucket, by its route; of each that the plan compresses by.
        fuse: from which a dense tensor is alone; room: of a dense buffer.
    """

    payloads: Mapping[Route, int]
    fuse: int
    room: int


@dataclass(frozen=True)
class _Unit:
    """Tensors that travel together, or one: what they are called, when they start, and how they travel."""

    tensors: tuple[WorkloadTensor, ...]
    ready: float
    strategy: Strategy
    method: Compressor | None


def shared_seconds(
    plan: Plan, workload: Workload, profile: Profile, limits: SharingLimits, lanes: Lanes | str = "host"
) -> float:
    """The predicted seconds of a step by a plan without schedule and groups.

    Raises:
        PlanError: the plan does not know a tensor; ConfigError: the profile lacks what is needed.
    """
    if not plan.held:
        workload, profile = beside(workload, profile)
    units = list(_units(plan, workload, limits))
    rows = [_operations(unit, profile, workload, lanes_of(lanes)) for unit in units]
    width = max((len(row) for row, _ in rows), default=0) or 1
    table = OptionTable(
        np.array([[lane for lane, _ in row] + [0] * (width - len(row)) for row, _ in rows], np.int8),
        np.array([[seconds for _, seconds in row] + [0.0] * (width - len(row)) for row, _ in rows]),
        np.array([len(row) for row, _ in rows], np.int32),
        np.array([repeats for _, repeats in rows], np.int32),
    )
    backward = np.diff([unit.ready for unit in units], prepend=0.0)
    timeline = Timeline(backward, table, lanes_of(lanes), "fifo")
    return timeline.seconds(np.arange(len(units))) + profile.call + workload.update


def _units(plan: Plan, workload: Workload, limits: SharingLimits) -> Iterator[_Unit]:
    """What travels together, in the order in which it starts. Behind the first tensors, other messages count as under
    way: where the network is the limit, they are."""
    end = workload.tensors[-1].ready
    held = [replace(tensor, ready=end) for tensor in workload.tensors] if plan.held else workload.tensors
    for number, (ready, together) in enumerate(itertools.groupby(held, key=lambda tensor: tensor.ready)):
        alone = [_Unit((tensor,), ready, *_way(plan.strategy(tensor.name))) for tensor in together]
        buffers = fused(((u, _kind(u), u.tensors[0].nbytes) for u in alone), limits.fuse, limits.room)
        after = [_buffer(units) if len(units) > 1 else units[0] for units in buffers]
        told = [_told(unit) for unit in after]
        for bucket in form(told, lambda u: limits.payloads[u.strategy.route], under_way=number > 0):
            yield replace(bucket[0], tensors=tuple(tensor for unit in bucket for tensor in unit.tensors))


def _way(strategy: Strategy) -> tuple[Strategy, Compressor | None]:
    dense = strategy.compressor == "none"
    return strategy, None if dense else compressors.get(strategy.compressor).at(None)


def _kind(unit: _Unit) -> Hashable | None:
    """Equal for dense tensors that may share a buffer."""
    return None if unit.method is not None else (unit.tensors[0].dtype, unit.strategy)


def _buffer(units: Sequence[_Unit]) -> _Unit:
    """Dense tensors in one buffer."""
    tensors = [unit.tensors[0] for unit in units]
    size, name = sum(tensor.size for tensor in tensors), buffer_name([tensor.name for tensor in tensors])
    return replace(units[0], tensors=(WorkloadTensor(name, size, units[0].ready, tensors[0].dtype),))


def _told(unit: _Unit) -> tuple[_Unit, Hashable | None, str, int, int]:
    """What ``form`` is told."""
    way = None if unit.method is None else way_of(unit.strategy.route, unit.method)
    if unit.method is None or way is None:
        return unit, None, "", 0, 0
    (tensor,) = unit.tensors
    return unit, way, tensor.name, unit.method.nbytes(tensor.size), FLOAT32 * tensor.size


def _operations(unit: _Unit, profile: Profile, workload: Workload, lanes: Lanes) -> tuple[list[tuple[int, float]], int]:
    """(lane, seconds) of the operations of what travels together, or of one segment of it; the number of segments."""
    shape = Shape(profile.nodes, profile.ranks_per_node, workload.device)
    prices = [Prices(profile, t.size, unit.method, ITEMSIZE[t.dtype]) for t in unit.tensors]
    repeats = 1
    if len(prices) == 1:  # none of several is cut into segments
        repeats, one = prices[0].segments()
        prices = [one]
    found = [(lanes.of(s.resource), _seconds(prices, s)) for s in slots(unit.strategy.route, shape, checks(profile))]
    return found, repeats


def _seconds(prices: Sequence[Prices], slot: Slot) -> float:
    """Seconds of one operation for tensors that travel together."""
    by_regions = slot.level == "intra" and slot.op in ("reduce_scatter", "allgather")
    if slot.kind == "move" and (slot.packed or by_regions):
        return prices[0].curve(slot)(sum(one.nbytes(slot) for one in prices))
    return sum(one.seconds(slot) for one in prices)
