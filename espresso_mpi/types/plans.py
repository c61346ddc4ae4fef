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
    """How one tensor is synchronised: a compressor or its spec (``none`` for dense), a route or its spec.

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
    """What a plan was made for. Elsewhere, its choices may be wrong, or its groups incomplete.

    Attributes:
        tensors: by name (shape, or the number of elements where the shape was not known; element type).
        device: where the tensors are.
        nodes: of the profile.
        ranks_per_node: of the profile.
        fingerprint: of the profile: versions and whatever else the measured times depend on; JSON values.
    """

    tensors: Mapping[str, tuple[tuple[Count, ...] | Positive, str]]
    nodes: Positive
    ranks_per_node: Positive
    device: DeviceKind = "cpu"
    fingerprint: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outlook:
    """The prediction for one buffer: a tensor, or a group.

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
    """The prediction of a step by a plan, in seconds.

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
        dropped: which compressors tensors were barred from before the search, and why, in words.
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
class Plan:
    """A strategy for every tensor by name; ``default`` (if any) serves names that are not listed.

    Attributes:
        groups: names of tensors that travel together in one buffer, in this order, by the strategy that all of a
            group have.
        schedule: in which order operations are done; None: tensors start as they arrive, and overlap.
        held: pushes start when one of them is waited for: quicker where ranks have no core free for communication
            during the backward pass, and payloads are small.

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
    held: bool = False

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
        if self.held:
            content.append("held")
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
