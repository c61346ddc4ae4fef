"""Strategies, plans and their predictions. All values are frozen."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..errors import ConfigError, PlanError
from ..files.schema import Count, Finite, Positive, Seconds
from ..timetable import Schedule
from .routes import Route
from .tensors import DeviceKind

Order = Literal["backprop", "fifo", "priority", "schedule"]
"""Which operation a resource serves next in a predicted step; see planner.timeline."""


@dataclass(frozen=True)
class Strategy:
    """How one tensor is synchronised.

    Args:
        compressor: a compressor or its spec; ``none`` for dense.
        route: a route or its spec.

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
    """The name of a bucket of tensors.

    Example:
        >>> espresso_mpi.types.buffer_name(["w1"]), espresso_mpi.types.buffer_name(["w1", "b1", "w2"])
        ('w1', 'w1..w2 (3)')
    """
    return group[0] if len(group) == 1 else f"{group[0]}..{group[-1]} ({len(group)})"


@dataclass(frozen=True)
class MadeFor:
    """The tensors and the cluster for which a plan was made. For others, its choices may be wrong.

    Attributes:
        tensors: shape and element type of each tensor, by name. Where the shape was not known, the number of elements
            replaces it.
        device: the device of the tensors.
        nodes: the number of nodes of the profile.
        ranks_per_node: the number of ranks per node of the profile.
        fingerprint: versions, and whatever else the measured times depend on, as JSON values.

    Example:
        >>> made_for = espresso_mpi.types.MadeFor({"w": ((256, 128), "float32")}, nodes=2, ranks_per_node=4)
        >>> made_for.device
        'cpu'
    """

    tensors: Mapping[str, tuple[tuple[Count, ...] | Positive, str]]
    nodes: Positive
    ranks_per_node: Positive
    device: DeviceKind = "cpu"
    fingerprint: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outlook:
    """The prediction for one bucket: a tensor, or a group.

    Attributes:
        tensors: the names of the tensors, in their order in the bucket.
        seconds: the time of all operations of the bucket together.
        exposed: how much shorter the step would be if these operations took no time: at least 0, at most ``seconds``.
            Computation and other tensors overlap the rest.
        runner_up: the best other strategy, with all other buckets as planned. None if no other is worth considering.
        margin: how much longer the step would be with ``runner_up``, in seconds.
        dense_margin: how much longer the step would be with the best dense route; 0 if the bucket is dense.

    Example:
        >>> outlook = espresso_mpi.types.Outlook(("w",), seconds=0.5, exposed=0.125)
        >>> outlook.overlapped
        0.375
    """

    tensors: Annotated[tuple[str, ...], Meta(min_length=1)]
    seconds: Seconds
    exposed: Seconds
    runner_up: Strategy | None = None
    margin: Finite = 0.0
    dense_margin: Finite = 0.0

    @property
    def overlapped(self) -> float:
        """Seconds of the operations that do not make the step longer."""
        return self.seconds - self.exposed


@dataclass(frozen=True)
class Forecast:
    """The prediction of a step by a plan, in seconds.

    Attributes:
        seconds: the length of the step, from its begin to the end of the update.
        bound: no choice of strategies makes the step shorter than this. ``bound_kind`` says which choices it covers.
        compute: the length of the step if synchronising took no time.
        dense: the length of the step with the best plan without compression.
        noise: the uncertainty of the gain over ``dense``.
        forgone: the gain of the best plan with compression, if it was within its noise, so that this plan is dense;
            else 0.
        order: the order in which the lanes of the timeline serve.
        lanes: which resources share a lane.
        baselines: the length of the step with other plans, by their names.
        buffers: one entry for each tensor or group, in the order of the backward pass.
        error: the summed compression error; None if the error of a method is not known.
        dropped: the compressors from which tensors were barred before the search, with the reasons.

    Example:
        >>> from espresso_mpi.planner import TESTBEDS, model_workload, plan
        >>> made = plan(model_workload("lstm"), TESTBEDS["pcie-25g"].profile(), ["onebit"], baselines=False)
        >>> made.forecast.bound <= made.forecast.seconds < made.forecast.dense
        True
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
    dropped: tuple[str, ...] = ()

    @property
    def exposed(self) -> float:
        """What synchronising adds to a step."""
        return self.seconds - self.compute


@dataclass(frozen=True)
class Chosen:
    """How a session with ``plan="auto"`` chose a plan.

    Attributes:
        seconds: the length of a step in its trials, on the slowest rank.
        accuracy: ``Tuning.accuracy``, the limit for compressors.
        optimizer: the rule by which they were judged; see ``Tuning.optimizer``.
        compressors: ``Tuning.compressors``.
        feedback: the spec of the session's error feedback.
        finished: whether the trials have ended. If not, the plan is the quickest so far.
        tried: the length of a step by each plan that was tried, and the number of steps, by the plan's digest. Empty if
            the trials have ended.

    Example:
        >>> chosen = espresso_mpi.types.Chosen(0.25, "safe", "adam", ("int8", "int4"), "auto")
        >>> espresso_mpi.Plan(default=espresso_mpi.Strategy("none", "flat"), chosen=chosen).chosen.seconds
        0.25
    """

    seconds: Seconds
    accuracy: str
    optimizer: str
    compressors: tuple[str, ...]
    feedback: str
    finished: bool = True
    tried: Mapping[str, tuple[Seconds, Positive]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A strategy for every tensor.

    Attributes:
        strategies: the strategies of tensors, by name.
        default: the strategy of all other tensors. None if the plan knows all tensors.
        groups: names of tensors that travel together in one bucket, in this order. All tensors of a group have the same
            strategy.
        fuse_bytes: the size below which dense tensors share buckets. 0 keeps tensors apart. None leaves this to the
            session.
        made_for: the tensors and the cluster for which the plan was made.
        forecast: the prediction of the step.
        schedule: the order of operations on each lane. Without one, tensors start as they arrive, and overlap.
        held: pushes start when one of them is waited for. This is quicker if ranks have no free core for communication
            during the backward pass, and if payloads are small.
        chosen: how a session with ``plan="auto"`` chose the plan. None for other plans.

    Raises:
        PlanError: a value is no ``Strategy``; a group is empty; tensors of a group have different strategies; or a name
            stands in two groups. ``strategy`` raises it for a tensor that the plan does not know.

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
    held: bool = False
    chosen: Chosen | None = None

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
        if not isinstance(self.held, bool):
            raise PlanError(f"plan: held={self.held!r}; expected True or False")
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
        """The largest possible distance of the predicted step from the shortest one, as a share of the latter.

        None without a forecast.
        """
        if self.forecast is None or self.forecast.seconds == self.forecast.bound:
            return None if self.forecast is None else 0.0
        return self.forecast.seconds / self.forecast.bound - 1 if self.forecast.bound else math.inf

    @cached_property
    def group_of(self) -> Mapping[str, tuple[str, ...]]:
        """The group of each tensor that belongs to one."""
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
        if self.held:
            content.append("held")
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
