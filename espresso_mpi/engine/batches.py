"""From descriptions of tensors to buckets: which tensors share a buffer, and how they travel. Nothing is sent here."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .. import compressors
from ..cluster import environment
from ..collectives import ranges
from ..collectives.copies import Copies
from ..collectives.data.layout import Topology
from ..collectives.halves import Half
from ..collectives.messages.agreement import fingerprint
from ..collectives.messages.part_sizes import Sizes
from ..collectives.program import check_route
from ..compressors import Compressor
from ..errors import ConfigError, PlanError
from ..feedback import NO_FEEDBACK, Feedback
from ..options import Options
from ..sharing import fused, way_of
from ..types import MadeFor, Plan, Strategy, TensorSpec, buffer_name


@dataclass(frozen=True)
class Shares:
    """A compressed tensor that may share messages with others of the same way.

    Attributes:
        way: equal for tensors that may share messages.
        payload, dense: bytes of its payload, and of the tensor as float32.
    """

    way: tuple[bool | str, ...]
    payload: int
    dense: int


@dataclass(frozen=True)
class Item:
    """One tensor and how it travels.

    Attributes:
        index: position in the call.
        spec: its description.
        strategy: its compressor and route.
        compressor: the compressor for the tensor's shape, with parameter schedules not yet evaluated.
        feedback: its error feedback.
        group: the tensors of the plan that share a buffer with it, itself included.
        total: the result is the sum over the ranks instead of their mean.
        half: the half of the route that it takes, or how it is copied; the result is the call's array 0 then. None: it
            takes all of its route.
        gradual: it is dense in the first steps of a session with ``dense_steps``, and compressed after these.
    """

    index: int
    spec: TensorSpec
    strategy: Strategy
    compressor: Compressor | None
    feedback: Feedback
    group: tuple[str, ...] = ()
    total: bool = False
    half: Half | Copies | None = None
    gradual: bool = False

    @property
    def dtype(self) -> str:
        """Element type of the tensor."""
        return str(self.spec.dtype)

    @cached_property
    def shares(self) -> Shares | None:
        """With which other tensors it may share messages; None: with none."""
        route = self.strategy.route
        if self.compressor is None or self.group or self.half is not None:
            return None
        where = self.spec.device
        if any(getattr(step, "device", where) != where for step in route.steps):
            return None  # its payload changes its place
        way = way_of(route, self.compressor)
        if way is None or (route.sums_payloads and where != "cpu"):
            return None
        return Shares((self.total, *way), self.compressor.at(None).nbytes(self.spec.size), 4 * self.spec.size)

    @cached_property
    def kind(self) -> tuple[str | bool, ...] | None:
        """Equal for dense tensors that may share a buffer; None: it is not dense, or takes a half of its route."""
        if self.compressor is not None or self.half is not None:
            return None
        return self.dtype, self.spec.device, self.total, str(self.strategy.route)

    @cached_property
    def alone(self) -> Bucket:
        """The bucket of this tensor by itself."""
        return Bucket((self,), self.strategy, self.compressor, self.feedback)

    @property
    def target(self) -> int:
        """Position in the call of the array that gets the result."""
        return self.index if self.half is None else 0


@dataclass(frozen=True)
class Batch:
    """What is known about the tensors of a call: prepared once, and used for every call with equal tensors.

    ``empty``: (name, group) of the members of groups that are None or have no elements. ``exact``: values that are not
    finite are summed like others; ``exact_dense``: those of dense tensors are. ``tensors``: (name, type and shape,
    device) of the arrays, as they must be equal on all ranks, where the arrays themselves may differ. ``sizes``:
    elements of the parts that this rank sends to each rank and expects from each, where ranks may have different ones.
    """

    specs: tuple[TensorSpec, ...]
    items: tuple[Item, ...]
    digest: bytes
    empty: tuple[tuple[str, tuple[str, ...]], ...] = ()
    exact: bool = False
    exact_dense: bool = False
    tensors: tuple[tuple[str, str, str], ...] | None = None
    sizes: Sizes | None = None

    @cached_property
    def portions(self) -> tuple[ranges.Portion, ...]:
        """The portions in which the values are searched for those that cannot be summed."""
        if self.exact:
            return ()
        return ranges.portions(
            (item.index, item.spec, item.compressor is not None, item.half is None)
            for item in self.items
            if item.compressor is not None or not self.exact_dense
        )

    @cached_property
    def grouped(self) -> bool:
        """Whether some tensors belong to groups of the plan."""
        return bool(self.empty) or any(item.group for item in self.items)

    @cached_property
    def bounded(self) -> tuple[Item, ...]:
        """The tensors whose methods have a bound on the error of every element."""
        return tuple(item for item in self.items if item.compressor is not None and item.compressor.bounded)


class Batches:
    """A cache of prepared batches, for at most ``limit`` tensors in all.

    The latest batch of each call is compared first: specs of the same tensors are the same objects, so this is fast.
    """

    def __init__(self, limit: int = 1 << 17) -> None:
        self._limit, self._room = limit, limit
        self._known: dict[tuple[tuple[TensorSpec, ...], bool], Batch] = {}
        self._latest: dict[tuple[str, str], Batch] = {}

    def find(
        self, call: tuple[str, str], specs: tuple[TensorSpec, ...], prepare: Callable[[tuple[TensorSpec, ...]], Batch]
    ) -> Batch:
        """The batch of a call with these tensors; ``prepare`` makes a missing one."""
        latest = self._latest.get(call)
        if latest is not None and latest.specs == specs:
            return latest
        key = (specs, call[0] == "sync")
        batch = self._known.get(key)
        if batch is None:
            batch = prepare(specs)
            if self._room < 0:
                self.clear()
            self._known[key] = batch
            self._room -= 1 + len(specs)
        self._latest[call] = batch
        return batch

    def values(self) -> Iterable[Batch]:
        """All cached batches."""
        return self._known.values()

    def clear(self) -> None:
        """Empty the cache."""
        self._known.clear()
        self._latest.clear()
        self._room = self._limit


@dataclass(frozen=True)
class Bucket:
    """Tensors that share a buffer, or a single tensor.

    ``members``: in the order of the buffer. ``label``: a name for dense tensors that share a buffer, because their
    choice may differ from step to step.
    """

    members: tuple[Item, ...]
    strategy: Strategy
    compressor: Compressor | None = None
    feedback: Feedback = NO_FEEDBACK
    label: str = ""

    @cached_property
    def name(self) -> str:
        """The name in statistics and in the keys of random numbers."""
        return self.label or buffer_name([item.spec.name for item in self.members])

    @cached_property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """(name, elements) of the tensors."""
        return tuple((item.spec.name, item.spec.size) for item in self.members)

    @cached_property
    def store_name(self) -> str:
        """The name of a compressed bucket in the store.

        Groups with other members or sizes have other names, because their residual has another meaning.
        """
        if len(self.members) == 1:
            return self.name
        return f"{self.name} {zlib.crc32(repr(self.sizes).encode()):08x}"

    @property
    def total(self) -> bool:
        """Whether the result is the sum over the ranks instead of their mean."""
        return self.members[0].total

    @property
    def half(self) -> Half | Copies | None:
        """The half of the route that its tensor takes, or how it is copied; None: it takes all of its route."""
        return self.members[0].half

    @cached_property
    def size(self) -> int:
        """Elements of the buffer."""
        return sum(item.spec.size for item in self.members)

    @property
    def dtype(self) -> str:
        """Element type of the tensors."""
        return str(self.members[0].spec.dtype)

    @property
    def shares(self) -> Shares | None:
        """As of its tensor."""
        return self.members[0].shares

    @cached_property
    def uniform(self) -> bool:
        """Whether all tensors are of one type and in one place."""
        return len({(item.spec.dtype, item.spec.device) for item in self.members}) == 1


def strategy_of(spec: TensorSpec, options: Options, topology: Topology) -> Strategy:
    """The strategy of a tensor in a session with these options.

    Raises:
        PlanError: the plan does not know it; ConfigError: its route needs a GPU that the tensor is not on, or sums
            payloads that cannot be summed.
    """
    plan = options.plan_for(spec)
    chosen = plan.strategy(spec.name) if plan is not None else options.strategy(spec, topology)
    compressor = None if chosen.compressor == "none" else compressors.get(chosen.compressor)
    check_route(chosen.route, topology, compressor)
    wants_gpu = any(getattr(step, "device", "cpu") == "gpu" for step in chosen.route.steps)
    if wants_gpu and spec.device == "cpu":
        raise ConfigError(
            f"{spec.name}: route {str(chosen.route)!r} encodes on the GPU, but the tensor is in host memory"
        )
    return chosen


def batch_of(specs: tuple[TensorSpec, ...], options: Options, topology: Topology, alone: bool = True) -> Batch:
    """Prepare the tensors of one call.

    Args:
        specs: the tensors.
        options: the options of the session.
        topology: the ranks.
        alone: whether the call must contain whole groups of the plan, because no other call is made before it ends.

    Raises:
        as ``strategy_of``; PlanError: tensors of a group of the plan differ in type or place, or are missing.
    """
    check_fit(specs, options, topology)
    groups = options.plan.group_of if options.plan is not None else {}
    items = [
        _item(index, spec, groups.get(spec.name, ()), options, topology)
        for index, spec in enumerate(specs)
        if spec.size
    ]
    _check_groups(items)
    empty = [(spec.name, groups[spec.name]) for spec in specs if not spec.size and spec.name in groups]
    if alone:
        missing = _missing(items, empty)
        if options.tuning is not None:
            items = _without_incomplete(items, missing)
        else:
            _check_complete(items, missing)
        empty = [(name, group) for name, group in empty if missing.get(group[:1]) == []]  # the others come, and all
    how = [options.plan.digest] if options.plan is not None else [options.compressor, str(options.route)]
    digest = fingerprint([how, *((s.name, s.shape, s.dtype, s.device) for s in specs)])
    return Batch(specs, tuple(items), digest, tuple(empty), exact_dense=options.nonfinite == "propagate")


def check_fit(specs: Sequence[TensorSpec], options: Options, topology: Topology) -> None:
    """Refuse tensors or ranks that a plan was not made for. A call may have only a part of the plan's tensors."""
    plan = options.plan
    if plan is None or plan.made_for is None:
        return
    from ..planner.planfile import misfits  # sessions without such a plan need nothing of the planner

    found = misfits(plan, specs, len(topology.nodes), topology.local_size, complete=False)
    if found:
        raise PlanError(f"the plan does not fit: {'; '.join(found)}; make one for this by espresso-mpi plan")


def other_versions(plan: Plan | None) -> str | None:
    """The problem of a plan that was made with other versions than those of this rank; None: there is none."""
    found = differing_versions(plan)
    return f"the plan does not fit: {'; '.join(found)}; make one for this by espresso-mpi plan" if found else None


def differing_versions(plan: Plan | None) -> list[str]:
    """The versions with which a plan was made and those of this rank, in words, where they differ."""
    if plan is None or plan.made_for is None:
        return []
    from ..planner.planfile import misfits

    made = plan.made_for
    tensors = [TensorSpec(name, (), None) for name in made.tensors]
    return misfits(plan, tensors, made.nodes, made.ranks_per_node, _here(made))


def _here(made: MadeFor) -> dict[str, Any]:
    """The versions in a plan's fingerprint, as they are on this rank."""
    known = versions()
    return {key: known.get(key, value) for key, value in made.fingerprint.items()}


def versions() -> dict[str, Any]:
    """The versions on this rank, by the keys that they have in a plan's fingerprint."""
    mpi = environment.mpi()
    known = f"{mpi['library']} {mpi['version']}" if mpi else None
    return {"mpi": known, "espresso_mpi": environment.version("espresso-mpi")}


def _item(index: int, spec: TensorSpec, group: tuple[str, ...], options: Options, topology: Topology) -> Item:
    strategy = strategy_of(spec, options, topology)
    if strategy.compressor == "none":
        return Item(index, spec, strategy, None, NO_FEEDBACK, group)
    shape = (spec.size,) if group else spec.shape
    compressor = compressors.get(strategy.compressor).shaped(shape)
    feedback, gradual = options.feedback.resolved(compressor, spec.size), options.dense_steps > 0
    return Item(index, spec, strategy, compressor, feedback, group, gradual=gradual)


def _check_groups(items: Sequence[Item]) -> None:
    first: dict[str, Item] = {}  # by the group's first tensor, for no tensor is in two groups
    for item in items:
        if item.group:
            problem = _misfit(first.setdefault(item.group[0], item), item)
            if problem is not None:
                raise problem


def _misfit(other: Item, item: Item) -> PlanError | None:
    """Why two tensors cannot share a buffer."""
    if len(item.group) > 1 and item.compressor is not None and item.compressor.bounded:
        return PlanError(
            f"plan: {item.spec.name!r} has compressor {item.strategy.compressor!r} and shares a buffer with "
            f"{', '.join(repr(name) for name in item.group if name != item.spec.name)}; expected a buffer of its own, "
            f"for an error bound depends on neighbours; take it out of the plan's groups"
        )
    if (item.spec.dtype, item.spec.device) == (other.spec.dtype, other.spec.device):
        return None
    return PlanError(
        f"plan: one group has {item.spec.name!r} ({item.spec} on {item.spec.device}) and "
        f"{other.spec.name!r} ({other.spec} on {other.spec.device}); put different types and devices into "
        f"groups of their own"
    )


def mixed(bucket: Bucket) -> PlanError | None:
    """Why the tensors of a group, which came in several calls, cannot share a buffer; the same on every rank."""
    return next(filter(None, (_misfit(bucket.members[0], item) for item in bucket.members)), None)


_Missing = Mapping[tuple[str, ...], Sequence[str]]
"""The missing tensors of groups, by a tuple of the group's first tensor: no tensor is in two groups."""


def _without_incomplete(items: Sequence[Item], missing: _Missing) -> list[Item]:
    """Let tensors of groups that are incomplete in the call travel alone; for plans that the session made itself."""
    return [dataclasses.replace(item, group=()) if missing.get(item.group[:1]) else item for item in items]


def _check_complete(items: Sequence[Item], found: _Missing) -> None:
    for item in items:
        missing = found.get(item.group[:1])
        if missing:
            raise PlanError(
                f"plan: {item.spec.name!r} travels in one buffer with {', '.join(map(repr, missing))}, which the call "
                f"does not have; pass the whole group, with None for what all ranks have no gradient of, or take them "
                f"out of the plan's groups"
            )


def _missing(items: Sequence[Item], empty: Iterable[tuple[str, tuple[str, ...]]]) -> _Missing:
    here = {item.spec.name for item in items} | {name for name, _ in empty}
    groups = {item.group[:1]: item.group for item in items}
    return {first: [name for name in group if name not in here] for first, group in groups.items()}


Arranged = tuple[Bucket, tuple[int, ...]]
"""A bucket, and the index of the call of each of its tensors."""


def buckets_of(batches: Sequence[Batch], fuse_bytes: int, room: int) -> tuple[Arranged, ...]:
    """The buckets of calls that run together, without the tensors of a plan's groups; for these see ``grouped``.

    Dense tensors below ``fuse_bytes`` of one type, device and route share buffers of at most ``room`` bytes. They pay
    the latency of a message once, and copies overlap with other buffers. Every other tensor is a bucket by itself.
    """
    members = members_of(batches)
    kinds = (((call, item), item.kind, item.spec.nbytes) for call, item in members if not item.group)
    found = fused(kinds, fuse_bytes, room)
    return tuple(_arranged(members, number) for number, members in enumerate(found))


def _arranged(members: Sequence[tuple[int, Item]], number: int) -> Arranged:
    calls, items = zip(*members)
    first = items[0]
    if len(items) == 1:
        return first.alone, calls
    return Bucket(items, first.strategy, first.compressor, first.feedback, f"{first.dtype} tensors {number}"), calls


def members_of(batches: Sequence[Batch]) -> Iterable[tuple[int, Item]]:
    """(index of the call, item) of all tensors of several calls."""
    return itertools.chain.from_iterable(((call, item) for item in batch.items) for call, batch in enumerate(batches))


def grouped(members: Sequence[Item]) -> Bucket:
    """The bucket of a complete group of the plan."""
    first, size = members[0], sum(item.spec.size for item in members)
    if first.compressor is None:
        return Bucket(tuple(members), first.strategy)
    compressor = compressors.get(first.strategy.compressor).shaped((size,))
    return Bucket(tuple(members), first.strategy, compressor, first.feedback)
