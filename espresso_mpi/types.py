"""The values that describe a synchronisation: tensors, steps, routes, strategies, plans. All frozen."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, TypeGuard, get_args

from msgspec import Meta

from .errors import ConfigError, PlanError
from .files.schema import Count, Finite, Positive, Seconds
from .timetable import Schedule

DeviceKind = Literal["cpu", "gpu"]
Level = Literal["flat", "intra", "inter"]
Op = Literal["allreduce", "reduce_scatter", "allgather", "alltoall", "reduce", "gather", "broadcast"]

Order = Literal["backprop", "fifo", "priority", "schedule"]
"""Which operation a resource serves next in a predicted step; see planner.timeline."""

CLOSING: dict[str, Op] = {
    "reduce_scatter": "allgather",
    "alltoall": "allgather",
    "reduce": "broadcast",
    "gather": "broadcast",
}
"""Divisible communication: what goes on with less than all data on every rank, and what brings it back together."""

SUMS = frozenset({"allreduce", "reduce_scatter", "reduce"})
"""What sums on the way: dense data, or the payloads of linear compressors."""

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes per element of the element types that can be synchronised."""


ALIGN = 64
"""Parts of a tensor begin at multiples of this many elements, so that vector loads and sign words stay whole."""


@dataclass(frozen=True)
class TensorSpec:
    """What the ranks must agree on about one tensor. ``dtype`` is None for an entry that is ``None``.

    Example:
        >>> espresso_mpi.TensorSpec("w", (3, 4), "float32").nbytes
        48
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    device: DeviceKind = "cpu"

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape) if self.dtype else 0

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the uncompressed tensor."""
        return self.size * ITEMSIZE[self.dtype] if self.dtype else 0

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.dtype else "None"


@dataclass(frozen=True)
class Encode:
    """Compress the current region on a device."""

    device: DeviceKind = "cpu"

    def __str__(self) -> str:
        return f"encode@{self.device}"


@dataclass(frozen=True)
class Decode:
    """Decompress all copies of the current region on a device and average them."""

    device: DeviceKind = "cpu"

    def __str__(self) -> str:
        return f"decode@{self.device}"


@dataclass(frozen=True)
class Collective:
    """One collective operation among the ranks of a level."""

    op: Op
    level: Level

    def __str__(self) -> str:
        return f"{self.op}@{self.level}"


Step = Encode | Decode | Collective


@dataclass(frozen=True)
class Route:
    """How a tensor travels: the steps from a local gradient to the mean on every rank.

    The executor runs it and the planner costs it. Spelled by its steps joined with ``/``, such as
    ``encode@cpu/allgather@flat/decode@cpu``, or by one of the names in ``ROUTES``.

    Example:
        >>> str(espresso_mpi.Route.parse("flat-allgather"))
        'encode@cpu/allgather@flat/decode@cpu'
    """

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        _validate(self.steps)

    @classmethod
    def parse(cls, text: str) -> Route:
        """Read a spelling or a name from ``ROUTES``.

        Raises:
            ConfigError: the text is neither, or its steps do not fit together.
        """
        return _parsed(ROUTES.get(text, text))

    @property
    def compressed(self) -> bool:
        """Whether any step compresses."""
        return any(isinstance(step, Encode) for step in self.steps)

    @property
    def sums_payloads(self) -> bool:
        """Whether compressed data is summed on the way, which only linear compressors allow."""
        return any(self._packed_at(i) and s.op in SUMS for i, s in enumerate(self.steps) if _moves(s))

    def _packed_at(self, position: int) -> bool:
        coded = [step for step in self.steps[:position] if not _moves(step)]
        return bool(coded) and isinstance(coded[-1], Encode)

    @property
    def levels(self) -> frozenset[Level]:
        """The levels on which data moves."""
        return frozenset(step.level for step in self.steps if isinstance(step, Collective))

    def on(self, device: DeviceKind) -> Route:
        """The same route with every encode and decode on ``device``."""
        return Route(tuple(s if isinstance(s, Collective) else type(s)(device) for s in self.steps))

    def __str__(self) -> str:
        return "/".join(map(str, self.steps))


ROUTES: dict[str, str] = {
    "flat": "allreduce@flat",
    "hierarchical": "reduce_scatter@intra/allreduce@inter/allgather@intra",
    "flat-allgather": "encode@cpu/allgather@flat/decode@cpu",
    "flat-alltoall": "encode@cpu/alltoall@flat/decode@cpu/encode@cpu/allgather@flat/decode@cpu",
    "hierarchical-allgather": "reduce_scatter@intra/encode@cpu/allgather@inter/decode@cpu/allgather@intra",
    "hierarchical-alltoall": "reduce_scatter@intra/encode@cpu/alltoall@inter/decode@cpu/encode@cpu/allgather@inter"
    "/decode@cpu/allgather@intra",
    "hierarchical-alltoall-packed": "reduce_scatter@intra/encode@cpu/alltoall@inter/decode@cpu/encode@cpu"
    "/allgather@inter/allgather@intra/decode@cpu",
    "flat-linear": "encode@cpu/allreduce@flat/decode@cpu",
    "hierarchical-linear": "reduce_scatter@intra/encode@cpu/allreduce@inter/decode@cpu/allgather@intra",
}
"""Names for the usual routes. "packed" carries the payload on through the machine and decodes at the very end; "linear"
sums the payloads themselves, as linear compressors allow."""


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Route:
    """Models have thousands of tensors that travel alike: reading and checking the text takes 50 us each time."""
    return Route(tuple(_parse_step(part) for part in text.split("/")))


def _parse_step(text: str) -> Step:
    verb, _, where = text.strip().partition("@")
    if verb in ("encode", "decode") and where in get_args(DeviceKind):
        return (Encode if verb == "encode" else Decode)(where)  # type: ignore[arg-type]
    if verb in get_args(Op) and where in get_args(Level):
        return Collective(verb, where)  # type: ignore[arg-type]
    raise ConfigError(
        f"route: cannot read the step {text!r}; expected encode@ or decode@ with {' or '.join(get_args(DeviceKind))}, "
        f"or one of {', '.join(get_args(Op))} with @{', @'.join(get_args(Level))}; or the name of a route: "
        f"{', '.join(ROUTES)}"
    )


def _moves(step: Step) -> TypeGuard[Collective]:
    return isinstance(step, Collective)


def _validate(steps: tuple[Step, ...]) -> None:
    """Walk the steps and refuse an order in which they cannot be run to a mean on every rank."""
    walk = _Walk()
    for number, step in enumerate(steps):
        problem = walk.problem_with(step)
        if problem:
            raise ConfigError(f"route {'/'.join(map(str, steps))!r}: step {number + 1}, {step}: {problem}")
        walk.take(step)
    problem = walk.problem_at_the_end()
    if problem:
        raise ConfigError(f"route {'/'.join(map(str, steps))!r} {problem}")


@dataclass
class _Walk:
    """Where a walk along the steps of a route has come to.

    Attributes:
        packed: the data is compressed.
        multiplied: a rank has several payloads of the same region, which only a decode can sum.
        opened: (level, operation) of divisible communication that is still to be closed, the last one last.
        summed: levels that were averaged over.
    """

    packed: bool = False
    multiplied: bool = False
    opened: list[tuple[str, str]] = field(default_factory=list)
    summed: set[str] = field(default_factory=set)

    def problem_with(self, step: Step) -> str:
        """What is wrong with a step here, or nothing."""
        if isinstance(step, Encode):
            return "the data is compressed already" if self.packed else ""
        if isinstance(step, Decode):
            return "" if self.packed else "there is nothing to decode"
        if step.op in CLOSING.values() and step.level in [level for level, _ in self.opened]:
            return self._problem_with_closing(step)
        return self._problem_with_averaging(step)

    def _problem_with_closing(self, step: Collective) -> str:
        level, op = self.opened[-1]
        if level != step.level:
            return f"another level was scattered later and must be gathered first, by {CLOSING[op]}@{level}"
        return "" if CLOSING[op] == step.op else f"does not go with {op}@{level}; use {CLOSING[op]}@{level}"

    def _problem_with_averaging(self, step: Collective) -> str:
        if step.op == "broadcast":
            return f"nothing was reduced or gathered to one rank at level {step.level}"
        if step.op in ("alltoall", "gather") and not self.packed:
            dense = "reduce_scatter" if step.op == "alltoall" else "reduce"
            return f"moves compressed data; encode first, or use {dense}"
        if step.op == "allgather" and not self.packed:
            return f"nothing is scattered at level {step.level}"
        if step.op in SUMS and self.multiplied:
            return "payloads that were dealt out or gathered cannot be summed; decode first"
        return f"the level {step.level} is averaged twice" if step.level in self.summed else ""

    def take(self, step: Step) -> None:
        """Go on by a step that has no problem."""
        if not isinstance(step, Collective):
            self.packed, self.multiplied = isinstance(step, Encode), False
        elif step.level in [level for level, _ in self.opened]:
            self.opened.pop()
        else:
            self.summed.add(step.level)
            self.multiplied |= step.op not in SUMS
            if step.op in CLOSING:
                self.opened.append((step.level, step.op))

    def problem_at_the_end(self) -> str:
        """Why the tensor is not its mean on every rank yet, or nothing."""
        if self.packed:
            return "ends with compressed data"
        if self.opened:
            in_pieces = CLOSING[self.opened[-1][1]] == "allgather"
            return "ends with the tensor in pieces" if in_pieces else "ends with the tensor on one rank alone"
        if self.summed in ({"flat"}, {"intra", "inter"}):
            return ""
        return f"averages over {sorted(self.summed) or 'nothing'}; expected flat, or intra and inter"


@dataclass(frozen=True)
class Strategy:
    """How one tensor is synchronised: a compressor or its spelling (``none`` for dense), a route or its spelling.

    Raises:
        ConfigError: the route encodes but the compressor is ``none``, or the other way round.

    Example:
        >>> strategy = espresso_mpi.Strategy("topk:ratio=0.01", "flat-allgather")
        >>> strategy.route.compressed
        True
    """

    compressor: str
    route: Route

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, str):
            object.__setattr__(self, "compressor", str(self.compressor))
        if isinstance(self.route, str):
            object.__setattr__(self, "route", Route.parse(self.route))
        if self.route.compressed != (self.compressor != "none"):
            raise ConfigError(
                f"compressor {self.compressor!r} does not go with route {str(self.route)!r}; a route that encodes "
                f"needs a compressor and one that does not needs 'none'"
            )


def buffer_name(group: Sequence[str]) -> str:
    """What the tensors of a group are called together."""
    return group[0] if len(group) == 1 else f"{group[0]}..{group[-1]} ({len(group)})"


@dataclass(frozen=True)
class MadeFor:
    """What a plan was made for; elsewhere its choices may be wrong, or its groups incomplete.

    Attributes:
        tensors: by name (shape, or the number of elements where the shape was not known; element type).
        device: where the tensors are.
        machines: of the profile.
        ranks_per_machine: of the profile.
        fingerprint: of the profile: versions and whatever else the measured times depend on; JSON values.
    """

    tensors: Mapping[str, tuple[tuple[Count, ...] | Positive, str]]
    machines: Positive
    ranks_per_machine: Positive
    device: DeviceKind = "cpu"
    fingerprint: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outlook:
    """What is predicted for one buffer: a tensor, or a group.

    Attributes:
        tensors: their names, in the buffer's order.
        seconds: of all its operations together.
        exposed: how much shorter the step would be if its operations took no time: at least 0, at most ``seconds``. The
            rest is overlapped by computation and by other tensors.
        runner_up: the best other way for it, all other buffers going as planned; None: nothing else is worth a look.
        margin: how much longer the step would be that way, in seconds.
        dense_margin: how much longer the step would be if it travelled by the best dense route; 0 where it does.
    """

    tensors: Annotated[tuple[str, ...], Meta(min_length=1)]
    seconds: Seconds
    exposed: Seconds
    runner_up: Strategy | None = None
    margin: Finite = 0.0
    dense_margin: Finite = 0.0

    @property
    def overlapped(self) -> float:
        """Seconds of its operations that do not make the step longer."""
        return self.seconds - self.exposed


@dataclass(frozen=True)
class Forecast:
    """What is predicted for a step by a plan, in seconds.

    Attributes:
        seconds: of the step, from its begin to the end of the update.
        bound: no strategies make a step shorter than this; ``bound_kind`` says among which.
        compute: of the step if synchronising took no time.
        dense: of the step by the best plan without compression; noise: what is uncertain in the gain over it.
        forgone: what the best plan with compression would have gained, where that was not above its noise and the plan
            is dense therefore; else 0.
        order: in which the lanes of the timeline serve.
        lanes: which resources share a lane there.
        baselines: seconds of the step by other plans, by their names.
        buffers: one entry for each tensor or group, in the order of the backward pass.
        error: summed compression error (planner.budget); None where a method's is not known.
    """

    seconds: Seconds
    bound: Seconds
    compute: Seconds
    dense: Seconds
    noise: Seconds
    order: Order
    lanes: str
    bound_kind: str
    forgone: Seconds = 0.0
    baselines: Mapping[str, Seconds] = field(default_factory=dict)
    buffers: tuple[Outlook, ...] = ()
    error: Seconds | None = None

    @property
    def exposed(self) -> float:
        """What synchronising adds to a step."""
        return self.seconds - self.compute


@dataclass(frozen=True)
class Plan:
    """A strategy for every tensor by name; ``default`` (if any) serves names that are not listed.

    Attributes:
        groups: names of tensors that travel together in one buffer, in this order, by the strategy that all of a
            group have.
        schedule: in which order operations are done; None: tensors start as they come, and take turns.

    Raises:
        PlanError: something is no Strategy; a group is empty, its tensors have different strategies, or a name stands
            in groups twice. (From ``strategy``:) the plan does not know the tensor.

    Example:
        >>> plan = espresso_mpi.Plan(
        ...     {"head": espresso_mpi.Strategy("int8", "flat-allgather")}, default=espresso_mpi.Strategy("none", "flat")
        ... )
        >>> plan.strategy("head").compressor, plan.strategy("another").compressor
        ('int8', 'none')
    """

    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    default: Strategy | None = None
    groups: tuple[tuple[str, ...], ...] = ()
    fuse_bytes: int | None = None
    made_for: MadeFor | None = None
    forecast: Forecast | None = None
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        fuse = self.fuse_bytes
        if fuse is not None and (isinstance(fuse, bool) or not isinstance(fuse, int) or fuse < 0):
            raise PlanError(f"plan: fuse_bytes={fuse!r}; expected a number of bytes, 0 to keep tensors apart, or None")
        for name, strategy in [*self.strategies.items(), ("default", self.default)]:
            if not isinstance(strategy, Strategy) and (name != "default" or strategy is not None):
                raise PlanError(
                    f"plan: {name!r}: got {strategy!r}; expected a Strategy such as Strategy('onebit', 'flat-alltoall')"
                )
        if self.schedule is not None and not isinstance(self.schedule, Schedule):
            raise PlanError(f"plan: schedule={self.schedule!r}; expected a Schedule, or None")
        if isinstance(self.groups, str) or any(isinstance(group, str) for group in self.groups):
            raise PlanError(
                f"plan: groups={self.groups!r}; expected tuples of names, such as (('w1', 'b1'), ('w2', 'b2'))"
            )
        object.__setattr__(self, "groups", tuple(tuple(group) for group in self.groups))
        self._check_groups()

    def _check_groups(self) -> None:
        seen: set[str] = set()
        for number, group in enumerate(self.groups):
            if not group:
                raise PlanError(f"plan: group {number} is empty; leave it out")
            for name in group:
                if name in seen:
                    raise PlanError(f"plan: tensor {name!r} stands in groups twice; a tensor travels in one buffer")
                seen.add(name)
                if self.strategy(name) != self.strategy(group[0]):
                    raise PlanError(
                        f"plan: {name!r} is in a group with {group[0]!r} but has another strategy, "
                        f"{self.strategy(name)} instead of {self.strategy(group[0])}; tensors that travel together "
                        f"need the same"
                    )

    def strategy(self, name: str) -> Strategy:
        """The strategy of a tensor."""
        found = self.strategies.get(name, self.default)
        if found is None:
            raise PlanError(
                f"the plan has no strategy for tensor {name!r}; it knows {', '.join(self.strategies) or 'none'}"
            )
        return found

    @property
    def gap(self) -> float | None:
        """By how much the predicted step is at most longer than the shortest possible one, as a share of that.

        None without a forecast.
        """
        if self.forecast is None or self.forecast.seconds == self.forecast.bound:
            return None if self.forecast is None else 0.0
        return self.forecast.seconds / self.forecast.bound - 1 if self.forecast.bound else math.inf

    @cached_property
    def group_of(self) -> Mapping[str, tuple[str, ...]]:
        """The group of each tensor that is in one."""
        return {name: group for group in self.groups for name in group}

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what the plan does. Equal plans have equal digests on every rank."""
        rows = {name: [s.compressor, str(s.route)] for name, s in self.strategies.items()}
        default = [self.default.compressor, str(self.default.route)] if self.default else None
        content: list[object] = [rows, default, self.groups]
        if self.fuse_bytes is not None:
            content.append(self.fuse_bytes)
        if self.schedule is not None:
            content.append(asdict(self.schedule))
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
