"""The choice that there is: for every tensor of a step a set of candidate strategies, priced and as numbers.

Options are priced (``pricing``) and collected in candidate sets (``candidates``), without those that others dominate
(``dominance``). An *option* is an index into the table of the options of all candidate sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from espresso_mpi import compressors
from espresso_mpi.compressors import Compressor
from espresso_mpi.errors import PlanError
from espresso_mpi.types import ITEMSIZE, Plan, Route, Strategy, buffer_name

from .candidates import CandidateSet, all_candidates, needed_candidates
from .compiled_routes import Compiled, compiled
from .cost import Shape, Slot, checks, slots
from .dominance import pruned
from .fusion import fused
from .pricing import Block, priced
from .profile import Profile
from .timeline import Lanes, OptionTable, Order, Timeline, lanes_of
from .tree import routes as all_routes
from .workload import Workload, WorkloadTensor

_AT_ONCE = 64
"""Sizes of tensors that are priced together: all options of ten thousand would fill the memory, before pruning."""


@dataclass(frozen=True)
class Problem:
    """Tensors in backprop order, and a candidate set for each.

    Attributes:
        workload, profile: what is planned for.
        compressors: specs; routes: both named by candidate sets.
        timeline: prices choices; a choice is an int64 array (tensors,) of options of all candidate sets together.
        set_of: int64 (tensors,), which candidate set a tensor has; tensors of one size share one.
        first: int64 (sets + 1,), where candidate sets begin among the options.
        method, route: int32 (options,), as in ``CandidateSet``.
    """

    workload: Workload
    profile: Profile
    compressors: tuple[str, ...]
    routes: tuple[Route, ...]
    timeline: Timeline
    set_of: np.ndarray
    first: np.ndarray
    method: np.ndarray
    route: np.ndarray

    @classmethod
    def of(
        cls,
        workload: Workload,
        profile: Profile,
        compressors: Sequence[str],
        *,
        routes: Sequence[Route] | None = None,
        lanes: Lanes | str = "one-network",
        order: Order = "schedule",
        prune: bool = True,
        free_codecs: bool = False,
    ) -> Problem:
        """Price every strategy of compressors and routes for every tensor.

        Args:
            compressors: specs, ``none`` among them or not: dense routes are always options. A tensor has no options
                by those that it is barred from (``WorkloadTensor.barred``).
            routes: default: all of the decision tree for the workload's device, and those that sum payloads where a
                compressor is linear.
            lanes: which resources share a lane, or the name of one of ``LANES``.
            prune: leave out what is dominated in the order; see ``dominance`` and ``candidates``.
            free_codecs: encodes and decodes take no time.

        Raises:
            ConfigError: the profile lacks a compressor or a collective; an unknown name.
        """
        given_once = dict.fromkeys(compressors)
        specs = tuple(dict.fromkeys(str(_method(text)) for text in given_once if text != "none"))
        methods = tuple(_method(text) for text in specs)
        where = lanes_of(lanes)
        given = tuple(routes) if routes is not None else _default_routes(workload, methods)
        shape = Shape(profile.nodes, profile.ranks_per_node, workload.device)
        tables = compiled(given, shape, where, checks(profile))
        barred = {bars: frozenset(map(_canonical, bars)) for bars in {tensor.barred for tensor in workload.tensors}}
        kinds = list(dict.fromkeys((barred[tensor.barred], _size(tensor)) for tensor in workload.tensors))
        places, sets = dict[tuple[frozenset[str], tuple[int, int]], int](), list[CandidateSet]()
        for bars in dict.fromkeys(bars for bars, _ in kinds):
            allowed = np.array([number for number, text in enumerate(specs) if text not in bars], np.int32)
            different = [size for other, size in kinds if other == bars]
            places |= {(bars, size): len(sets) + number for number, size in enumerate(different)}
            for begin in range(0, len(different), _AT_ONCE):
                some = different[begin : begin + _AT_ONCE]
                blocks = priced(tables, [methods[number] for number in allowed], profile, some, free_codecs)
                found = _candidates(tables, blocks, where, prune, order)
                sets += [replace(one, method=np.append(allowed, np.int32(-1))[one.method]) for one in found]
        set_of = [places[barred[tensor.barred], _size(tensor)] for tensor in workload.tensors]
        return cls.of_sets(workload, profile, specs, given, sets, set_of, where, order)

    @classmethod
    def of_sets(
        cls, workload: Workload, profile: Profile, specs: tuple[str, ...], routes: tuple[Route, ...],
        sets: Sequence[CandidateSet], set_of: Sequence[int], lanes: Lanes, order: Order,
    ) -> Problem:  # fmt: skip
        """Of candidate sets that were priced already; ``set_of``: which of them each tensor has."""
        first = np.cumsum([0] + [m.method.size for m in sets])
        table = OptionTable(  # in the order of C, for which kernels are compiled
            *(
                np.ascontiguousarray(np.concatenate([getattr(m.options, name) for m in sets]))
                for name in ("lane", "seconds", "count", "repeats")
            )
        )
        timeline = Timeline(np.ascontiguousarray(workload.backward), table, lanes, order)
        method, route = (np.concatenate([getattr(m, name) for m in sets]) for name in ("method", "route"))
        return cls(workload, profile, specs, routes, timeline, np.array(set_of, np.int64), first, method, route)

    def candidates_of(self, tensor: int) -> CandidateSet:
        """The candidate set of a tensor."""
        options = self.options(tensor)
        o, part = self.timeline.options, slice(options.start, options.stop)
        table = OptionTable(o.lane[part], o.seconds[part], o.count[part], o.repeats[part])
        return CandidateSet(table, self.method[part], self.route[part])

    def with_sets(self, workload: Workload, sets: Mapping[Any, CandidateSet], keys: Sequence[Any]) -> Problem:
        """Another workload; for each of its tensors a key names the set, which is of this problem's methods."""
        places = {key: number for number, key in enumerate(sets)}
        return Problem.of_sets(workload, self.profile, self.compressors, self.routes, list(sets.values()),
                                [places[key] for key in keys], self.timeline.lanes, self.timeline.order)  # fmt: skip

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return int(self.set_of.size)

    def options(self, tensor: int) -> range:
        """The options of a tensor."""
        number = int(self.set_of[tensor])
        return range(int(self.first[number]), int(self.first[number + 1]))

    def strategy(self, option: int) -> Strategy:
        """What an option is."""
        spec = "none" if self.method[option] < 0 else self.compressors[self.method[option]]
        return Strategy(spec, self.routes[self.route[option]])

    def operations(self, option: int) -> tuple[Slot, ...]:
        """The operations of an option, in order."""
        shape = Shape(self.profile.nodes, self.profile.ranks_per_node, self.workload.device)
        return slots(self.routes[self.route[option]], shape, checks(self.profile))

    def option(self, tensor: int, strategy: Strategy) -> int:
        """The option that a strategy is.

        Raises:
            PlanError: it is not on the tensor's candidate set.
        """
        options = self.options(tensor)
        here = slice(options.start, options.stop)
        method, route = self._methods.get(_canonical(strategy.compressor)), self._places.get(strategy.route)
        if method is not None and route is not None:
            found = np.flatnonzero((self.method[here] == method) & (self.route[here] == route))
            if found.size:
                return options[int(found[0])]
        name = self.workload.tensors[tensor].name
        raise PlanError(f"{name!r}: {strategy} is not among its options; price it with routes=[...] and prune=False")

    @cached_property
    def _methods(self) -> dict[str, int]:
        return {"none": -1, **{spec: number for number, spec in enumerate(self.compressors)}}

    @cached_property
    def _places(self) -> dict[Route, int]:
        return {route: number for number, route in enumerate(self.routes)}

    @cached_property
    def alone(self) -> np.ndarray:
        """Seconds that every option takes by itself, float64 (options,)."""
        o = self.timeline.options
        within = np.arange(o.seconds.shape[1]) < o.count[:, None]
        return np.where(within, o.seconds, 0.0).sum(axis=1) * o.repeats

    def dense(self) -> np.ndarray:
        """The choice of nothing compressed: of each tensor the dense option that is quickest by itself."""
        return self.quickest(self.method < 0)

    def quickest(self, allowed: np.ndarray) -> np.ndarray:
        """Of each tensor the option that is quickest by itself among those allowed, bool (options,).

        Raises:
            PlanError: a tensor has none.
        """
        times = np.where(allowed, self.alone, np.inf)
        best = np.array([a + int(np.argmin(times[a:b])) for a, b in zip(self.first, self.first[1:])], np.int64)
        if not np.isfinite(times[best]).all():
            raise PlanError(
                "a tensor has no such option: its candidate set lacks them, or they were left out as dominated"
            )
        return best[self.set_of]

    def seconds(self, choice: np.ndarray) -> float:
        """The time of a step: F(choice), and what every step costs besides."""
        return self.timeline.seconds(choice) + self.around

    @property
    def around(self) -> float:
        """Seconds of a step outside the timeline: the agreement of the ranks, and the update."""
        return self.profile.call + self.workload.update

    def ordered(self, order: Order) -> Problem:
        """The same with another order."""
        return replace(self, timeline=replace(self.timeline, order=order))

    def chosen(self, plan: Plan) -> np.ndarray:
        """The choice that a plan without groups makes; see ``option``."""
        strategies = [plan.strategy(tensor.name) for tensor in self.workload.tensors]
        keys = [
            (number, id(strategy)) for number, strategy in zip(self.set_of.tolist(), strategies)
        ]  # few differ, where tensors are many
        tensors = {key: number for number, key in enumerate(keys)}
        options = {key: self.option(number, strategies[number]) for key, number in tensors.items()}
        return np.array([options[key] for key in keys], np.int64)


def evaluated(plan: Plan, workload: Workload, profile: Profile, *, lanes: Lanes | str = "one-network",
              order: Order = "schedule", free_codecs: bool = False) -> tuple[Problem, np.ndarray]:  # fmt: skip
    """The problem whose tensors are the buffers of a plan, and the choice that the plan makes in it.

    Raises:
        ConfigError, PlanError: the plan does not know a tensor; the profile lacks what it needs.
    """
    buffers = fused(workload, plan.groups)
    leader = {group[0]: buffer_name(group) for group in plan.groups if len(group) > 1}
    by_buffer = {leader.get(t.name, t.name): plan.strategy(t.name) for t in workload.tensors}
    strategies = {t.name: by_buffer[t.name] for t in buffers.tensors}
    specs = [s.compressor for s in strategies.values()]
    routes = tuple(dict.fromkeys(s.route for s in strategies.values()))
    problem = Problem.of(buffers, profile, specs, routes=routes, lanes=lanes, order=order, prune=False,
                         free_codecs=free_codecs)  # fmt: skip
    return problem, problem.chosen(Plan(strategies))


def _candidates(
    tables: Compiled, blocks: Sequence[Block], lanes: Lanes, prune: bool, order: Order
) -> list[CandidateSet]:
    """The options of every size; pruned: without those that others dominate."""
    if prune and order == "schedule":
        return needed_candidates(tables, blocks, lanes.count)
    return pruned(tables, all_candidates(tables, blocks), lanes) if prune else all_candidates(tables, blocks)


def _default_routes(workload: Workload, methods: Sequence[Compressor]) -> tuple[Route, ...]:
    """All routes that tensors on this device can take with these methods."""
    return all_routes(("cpu", "gpu") if workload.device == "gpu" else ("cpu",), any(m.linear for m in methods))


def _method(spec: str) -> Compressor:
    return compressors.get(spec).at(None)


def _canonical(spec: str) -> str:
    return spec if spec == "none" else str(_method(spec))


def _size(tensor: WorkloadTensor) -> tuple[int, int]:
    return tensor.size, ITEMSIZE[tensor.dtype]
