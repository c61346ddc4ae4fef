"""Plans for more tensors than a search goes through in seconds.

How long the search takes grows faster than the number of tensors; and in a step of thousands nearly all are small, and
travel in buffers anyway. So beyond ``MANY`` neighbours of one element type are joined first, to ``UNITS`` buffers or
fewer, each of about as many bytes: the search fuses these on. What a plan then says, its bound and the other plans
among it, is about these buffers, and ``bound_kind`` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from espresso_mpi.errors import ConfigError
from espresso_mpi.types import Forecast, MadeFor, Order, Plan, buffer_name

from ..model.problem import Problem
from ..model.profile import Profile
from ..model.workload import Workload, WorkloadTensor
from .bound import lower_bound
from .budget import ErrorBudget
from .buffers import joined
from .found import Effort, Found
from .search import search

MANY = 1000
"""Tensors up to which a plan is searched for all of them, each for itself at first."""

UNITS = 40
"""Buffers that more are joined to, at most. For synthetic workloads of 10 000 tensors the steps that a quick search
found with 200 were as long in ``backprop``, to 0.1 %; in ``fifo``, whose time grows as their square, those with 100
were 0.6 % shorter, and with 500 and a normal search 1.6 %."""

MOST_JOINED = 100_000
"""Tensors of a workload, where they may be joined: planned, read and written within two minutes."""

MOST_APART = 5_000
"""Tensors that are searched each for itself, where they may not be joined (``fusion=False``): in ten seconds."""

MOST_SIZES = 1000
"""Different sizes among so many: for each, all options are priced and compared."""

MOST_PIECES = 100_000
"""Segments that sessions cut all tensors into, dense: a timeline goes through them as it does through tensors."""

MOST_IN_EVENTS = MANY
"""Tensors that are searched each for itself in the orders ``fifo`` and ``priority``, where every try is a timeline."""


def refuse(workload: Workload, profile: Profile, fusion: bool, order: Order) -> None:
    """Refuse a workload that would take minutes, before anything is done.

    Raises:
        ConfigError: with what can be done about it.
    """
    count, most = len(workload.tensors), MOST_JOINED
    why, cure = "a plan for more takes minutes", "join small tensors to flat buffers before they are recorded"
    if not fusion:
        most, cure = MOST_APART, "use fusion=True, which joins neighbours first"
        why = "fusion=False searches for each tensor by itself"
        if order in ("fifo", "priority") and count <= most:
            most, cure = MOST_IN_EVENTS, "use another order, or fusion=True, which joins neighbours first"
            why = f"fusion=False with order={order!r} goes through the whole step at every try"
    if count > most:
        raise ConfigError(f"plan: got a workload of {count} tensors; expected at most {most}: {why}; {cure}")
    sizes = len({(tensor.size, tensor.dtype) for tensor in workload.tensors})
    if not fusion and count > MANY and sizes > MOST_SIZES:
        raise ConfigError(
            f"plan: got {count} tensors of {sizes} different sizes; expected at most {MOST_SIZES} sizes with "
            f"fusion=False, which prices all options for each; use fusion=True, which joins neighbours first"
        )
    pieces = workload.nbytes // profile.segment_bytes if profile.segment_bytes and profile.nodes > 1 else 0
    if pieces > MOST_PIECES:
        raise ConfigError(
            f"plan: segment_bytes {profile.segment_bytes} of the profile cuts {workload.nbytes} bytes of gradients "
            f"into {pieces} segments; expected at most {MOST_PIECES}: profile with larger segments, or 0 for none"
        )


def rough(problem: Problem) -> Problem:
    """The problem that single tensors of a step are compared in: of many in the order ``schedule`` by ``backprop``.

    There a swap costs a tensor's own operations, in a schedule those of the whole step.
    """
    many = problem.tensors > MANY and problem.timeline.order == "schedule"
    return problem.ordered("backprop") if many else problem


def searched(
    problem: Problem, effort: Effort, starts: Sequence[np.ndarray] = (), error: ErrorBudget | None = None
) -> Found:
    """``search``; for many tensors in the order ``schedule``: of the choice that is found in the order ``backprop`` and
    those given the one with the least F, and a bound by loads. The relaxation's time grows as the tensors' square.
    """
    other = rough(problem)
    found = search(other, effort=effort, starts=starts, error=error)
    if other is problem:
        return found
    allowed = [start for start in starts if error is None or error.errors[start].sum() <= error.limit]
    best = min([found.choice, *allowed], key=problem.seconds)
    seconds = problem.seconds(best)
    return Found(best, seconds, min(lower_bound(problem), seconds))


@dataclass(frozen=True)
class Units:
    """Neighbours of a workload in one buffer each.

    Attributes:
        whole: the workload.
        workload: its buffers, named by their number; members: the tensors of each by the same number.
    """

    whole: Workload
    workload: Workload
    members: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, workload: Workload, most: int) -> Units:
        """Of about as many bytes each, ``most`` of them where element types allow.

        Raises:
            ConfigError: element types change too often for that.
        """
        least = workload.nbytes // most + 1
        cut = joined(workload, least)
        while len(cut) > most and least < workload.nbytes:
            least *= 2
            cut = joined(workload, least)
        if len(cut) > MANY:
            raise ConfigError(
                f"plan: got {len(workload.tensors)} tensors whose element types change so often that neighbours can be "
                f"joined to {len(cut)} buffers only; expected at most {MANY}: give the types a workload each"
            )
        parts = [workload.tensors[a:b] for a, b in zip(cut, (*cut[1:], len(workload.tensors)))]
        buffers = [WorkloadTensor.joined(str(number), part) for number, part in enumerate(parts)]
        return cls(
            workload, replace(workload, tensors=tuple(buffers)), tuple(tuple(t.name for t in part) for part in parts)
        )

    def plan(self, made: Plan) -> Plan:
        """A plan for the whole workload, of one for its buffers."""
        assert made.forecast is not None and made.made_for is not None
        strategies = {name: made.strategies[str(n)] for n, names in enumerate(self.members) for name in names}
        groups = {group[0]: group for group in made.groups}
        alone = [(str(n),) for n in range(len(self.members)) if str(n) not in made.group_of]
        buffers = sorted([*groups.values(), *alone], key=lambda group: int(group[0]))
        fused = tuple(names for names in map(self.names, buffers) if len(names) > 1)
        renamed = {buffer_name(group): buffer_name(self.names(group)) for group in buffers}
        return replace(made, strategies=strategies, groups=fused, made_for=self._made_for(made.made_for),
                       forecast=self._forecast(made.forecast),
                       schedule=made.schedule and made.schedule.renamed(renamed))  # fmt: skip

    def names(self, group: Sequence[str]) -> tuple[str, ...]:
        """The tensors of some buffers."""
        return tuple(name for number in group for name in self.members[int(number)])

    def _made_for(self, made: MadeFor) -> MadeFor:
        return replace(made, tensors={t.name: (t.shape or t.size, t.dtype) for t in self.whole.tensors})

    def _forecast(self, forecast: Forecast) -> Forecast:
        said = f"{forecast.bound_kind}, of {len(self.members)} buffers that the tensors were joined to first"
        buffers = tuple(replace(entry, tensors=self.names(entry.tensors)) for entry in forecast.buffers)
        return replace(forecast, bound_kind=said, buffers=buffers)
