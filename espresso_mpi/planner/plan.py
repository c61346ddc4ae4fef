"""Makes a plan: the search's choice, checked against simpler plans, rid of compression that noise could explain.

1. The search chooses fusion groups and a strategy for every buffer (``search``).
2. The paper's algorithms and the baselines are priced beside it; a quicker one of them is improved and taken instead.
3. Under an error budget, the choice is made to keep it (``budget``).
4. Compression whose gain does not exceed the noise of what was measured is taken back, tensor by tensor; the best plan
   without any is taken if the whole gain over it does not (``noise``).
5. What is predicted is noted for every buffer: what ``explain`` tells.

More than ``many.MANY`` tensors are joined first where they may share buffers. Where they may not, the search is a quick
one, in ``schedule`` by the figures of ``backprop``, and the paper's algorithms are left out: their time grows as the
square of the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .. import compressors as registry
from ..errors import ConfigError
from ..files import schema
from ..files.schema import Relative
from ..timetable import Schedule
from ..types import DeviceKind, Forecast, MadeFor, Outlook, Plan, Route, Strategy, buffer_name
from .model.problem import Problem, evaluated
from .model.profile import Profile
from .model.timeline import LANES, ORDERS, TIE, Lanes, Order, lanes_of
from .model.timetables import schedule_of
from .model.tree import routes as all_routes
from .model.workload import Workload
from .search.algorithms import published
from .search.baselines import baseline, usable
from .search.budget import errors, limited, total_error
from .search.found import Effort
from .search.fused_search import search_fused
from .search.many import MANY, UNITS, Units, refuse, rough, searched
from .search.noise import Doubts, Gain, best_dense, gain_over, without_noise
from .search.swaps import (
    best_of_each,
    completed,
    improved,
    joined,
    moved,
    quickest_alone,
    refined,
    swapped,
    swaps_of,
    with_free,
)

PUBLISHED = "espresso"
"""What the choice of the paper's two algorithms is called among the baselines."""

RUNNERS_UP = 12
"""Options of a tensor that are looked at for a runner-up where that takes long; see ``outlooks``."""

_ONE_FOR_ALL = ("fp32", "fp16")
"""Baselines that have nothing to do with the compressor."""


def plan(
    workload: Workload,
    profile: Profile,
    compressors: Sequence[str] | None = None,
    *,
    lanes: Lanes | str | None = None,
    order: Order | None = None,
    fusion: bool = True,
    linear: bool = True,
    devices: Sequence[DeviceKind] | None = None,
    error_budget: float | None = None,
    noise: float | None = None,
    baselines: bool = True,
) -> Plan:
    """The plan with the shortest step that is found, and what is predicted for it; see the module.

    Args:
        compressors: what may be used, by specs; ``none`` always may. None: all that the profile has on all devices.
        lanes, order: how the timeline is computed (``timeline``). None: as the executor does it, ``schedule``, with one
            lane for processor and shared memory where tensors are in host memory; for GPUs of a described cluster with
            one network, as the paper draws it.
        fusion: whether tensors may share buffers.
        linear: whether payloads of linear compressors may be summed.
        devices: where may be compressed; None: wherever the tensors can go.
        error_budget: the most that the plan may lose (``budget``); None: anything.
        noise: relative error of every time; None: what profile and workload say.
        baselines: price simpler plans as well, and take one if it is quicker.

    Raises:
        ConfigError: the profile lacks what is needed; an argument is out of its range; or the workload has more tensors
            than can be planned for in minutes.

    Example:
        >>> from espresso_mpi.planner import TESTBEDS, Workload, WorkloadTensor, plan
        >>> workload = Workload((WorkloadTensor("w", 10_000_000, 0.01),), device="gpu")
        >>> made = plan(workload, TESTBEDS["pcie-25g"].profile(), ["int8"])
        >>> made.strategy("w").compressor
        'int8'
    """
    known = defaults(workload, profile)[1] if order is None else order
    if known not in ORDERS:
        raise ConfigError(f"order={known!r}; expected one of {', '.join(ORDERS)}")
    refuse(workload, profile, fusion, known)
    many = len(workload.tensors) > MANY
    units = Units.of(workload, UNITS) if many and fusion else None
    made = _Maker.of(
        workload if units is None else units.workload, profile, compressors, lanes, known, fusion, linear, devices,
        error_budget, noise, "quick" if many else "normal",
    ).made(baselines)  # fmt: skip
    return made if units is None else units.plan(made)


def described(given: Plan, like: Plan, workload: Workload, profile: Profile) -> Plan:
    """A plan of one's own, with what is predicted for it.

    Args:
        like: what ``plan`` made of the same workload and profile: the bound, the best dense time and the noise are its.

    Raises:
        PlanError: the plan does not know a tensor; ConfigError: the profile lacks what it needs.
    """
    assert like.forecast is not None
    lanes, order = like.forecast.lanes, like.forecast.order
    problem, choice = evaluated(given, workload, profile, lanes=lanes, order=order)
    specs = profiled(profile, ("cpu", "gpu") if workload.device == "gpu" else ("cpu",))
    others = Problem.of(problem.workload, profile, specs, lanes=lanes, order=order)
    draft = Draft(_by_buffer(problem.workload, given.groups), problem, choice)
    draft = draft.on(joined([problem, completed(others)]))
    forecast = replace(
        like.forecast, seconds=draft.seconds, bound=min(like.forecast.bound, draft.seconds),
        buffers=outlooks(draft), forgone=0.0, baselines={},
        error=total_error(draft.problem, draft.choice),
    )  # fmt: skip
    return replace(given, made_for=like.made_for, forecast=forecast, schedule=draft.schedule())


@dataclass(frozen=True)
class Draft:
    """A choice that becomes a plan. ``groups``: of all buffers, those of one tensor too."""

    groups: tuple[tuple[str, ...], ...]
    problem: Problem
    choice: np.ndarray

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.problem.seconds(self.choice)

    @property
    def packed(self) -> bool:
        """Whether it compresses anything."""
        return bool((self.problem.method[self.choice] >= 0).any())

    def on(self, problem: Problem) -> Draft:
        """The same on candidate sets that begin with these."""
        return replace(self, problem=problem, choice=moved(self.choice, self.problem, problem))

    def schedule(self) -> Schedule | None:
        """What the executor is to do when."""
        return schedule_of(self.problem, self.choice, [buffer_name(group) for group in self.groups])

    def strategies(self) -> list[tuple[tuple[str, ...], Strategy]]:
        """The tensors of each buffer and how it travels."""
        return [(group, self.problem.strategy(int(option))) for group, option in zip(self.groups, self.choice)]


@dataclass(frozen=True)
class _Maker:
    """What ``plan`` was asked for."""

    workload: Workload
    profile: Profile
    compressors: tuple[str, ...]
    lanes: Lanes
    order: Order
    fusion: bool
    routes: tuple[Route, ...]
    budget: float | None
    noise: float | None
    given: Mapping[str, str]
    effort: Effort

    @classmethod
    def of(
        cls, workload: Workload, profile: Profile, compressors: Sequence[str] | None, lanes: Lanes | str | None,
        order: Order, fusion: bool, linear: bool, devices: Sequence[DeviceKind] | None,
        budget: float | None, noise: float | None, effort: Effort,
    ) -> _Maker:  # fmt: skip
        where = tuple(devices) if devices is not None else ("cpu", "gpu") if workload.device == "gpu" else ("cpu",)
        _check(workload, where, budget, noise)
        given = profiled(profile, where) if compressors is None else compressors
        given_specs = {str(registry.get(text).at(None)): str(registry.get(text)) for text in given if text != "none"}
        specs = tuple(given_specs)
        usual_lanes, _ = defaults(workload, profile)
        sums = linear and any(registry.get(text).linear for text in specs)
        return cls(workload, profile, specs, lanes_of(usual_lanes if lanes is None else lanes),
                   order, fusion, all_routes(where, sums), budget, noise, given_specs, effort)  # fmt: skip

    # --- the steps of the module ---

    def made(self, with_baselines: bool) -> Plan:
        draft, bound = self.searched(self.compressors)
        rivals = dict(self.rivals()) if with_baselines else {}
        draft = self.quickest(draft, list(rivals.values()))
        draft = draft.on(completed(draft.problem, self.compressors if self.budget is not None else ()))
        if self.budget is not None:
            limit = limited(draft.problem, self.budget)
            found = searched(draft.problem, self.effort, [draft.choice], limit)
            draft = replace(draft, choice=found.choice)
        draft = self.settled(self.sure(draft))
        plain, _ = self.searched(())
        dense = min([plain, *(rival for rival in rivals.values() if not rival.packed)], key=lambda one: one.seconds)
        dense = self.settled(dense)
        draft, gain, forgone = self.worth_it(draft, dense)
        forecast = Forecast(
            draft.seconds, min(bound, draft.seconds), self.workload.seconds, dense.seconds, gain.noise, self.order,
            self.lanes_name, self.claim, forgone, {name: rival.seconds for name, rival in rivals.items()},
            outlooks(draft), total_error(draft.problem, draft.choice),
        )  # fmt: skip
        return self.plan_of(draft, forecast)

    def searched(self, specs: Sequence[str]) -> tuple[Draft, float]:
        """What the search finds with these compressors, and the bound on all that it chose from."""
        if self.fusion:
            groups, problem, found = search_fused(self.workload, self.profile, specs, routes=self.routes,
                                                  lanes=self.lanes, order=self.order, effort=self.effort)  # fmt: skip
        else:
            groups, problem = (), self.problem(self.workload, specs)
            found = searched(problem, self.effort)
        return Draft(_by_buffer(problem.workload, groups), problem, found.choice), found.bound

    def problem(self, buffers: Workload, specs: Sequence[str]) -> Problem:
        """All that may be done with some buffers."""
        return Problem.of(buffers, self.profile, specs, routes=self.routes, lanes=self.lanes, order=self.order)

    def rivals(self) -> Iterator[tuple[str, Draft]]:
        """The plans of others; without those that this profile cannot price, for want of a compressor or of copies."""
        others = [name for name in usable(self.workload) if name not in _ONE_FOR_ALL]
        others += [PUBLISHED] if len(self.workload.tensors) <= MANY else []
        named = [(name, spec) for spec in self.compressors for name in others]
        for name, spec in [*named, *((name, "fp16") for name in _ONE_FOR_ALL)]:
            try:
                found = self.rival(name, spec)
            except ConfigError:
                continue
            yield (name if name in _ONE_FOR_ALL else f"{name} {spec}"), found

    def rival(self, name: str, spec: str) -> Draft:
        """A baseline, or the choice of the published algorithms."""
        free = self.workload.without_bars
        if name == PUBLISHED:
            problem, chosen = published(free, self.profile, spec, lanes=self.lanes, order=self.order)
            return Draft(_by_buffer(self.workload, ()), problem, chosen.choice)
        other = baseline(name, free, self.profile, spec, lanes=self.lanes, order=self.order)
        problem, choice = evaluated(other, free, self.profile, lanes=self.lanes, order=self.order)
        return Draft(_by_buffer(self.workload, ()), problem, choice)

    def allowed(self, rival: Draft) -> bool:
        """Whether a draft uses nothing that is not to be used."""
        if any(tensor.barred for tensor in self.workload.tensors):  # the rules of others know no bars
            return False
        used = {rival.problem.strategy(int(option)) for option in np.unique(rival.choice)}
        return all(s.compressor in {*self.compressors, "none"} and s.route in self.routes for s in used)

    def quickest(self, draft: Draft, rivals: Sequence[Draft]) -> Draft:
        """The draft, or the quickest rival after it was improved, if that is quicker."""
        rivals = [rival for rival in rivals if rival.seconds < draft.seconds and self.allowed(rival)]
        if not rivals:
            return draft
        best = min(rivals, key=lambda rival: rival.seconds)
        complete = joined([best.problem, self.problem(best.problem.workload, self.compressors)])
        best = best.on(complete)
        return replace(best, choice=min(improved(rough(complete), best.choice), best.choice, key=complete.seconds))

    def sure(self, draft: Draft) -> Draft:
        """The draft without compression that noise could explain."""
        choice = without_noise(Doubts(rough(draft.problem), self.noise), draft.choice)
        doubts = Doubts(draft.problem, self.noise)  # of many tensors single ones are compared in another order
        lost = gain_over((doubts, draft.choice), (doubts, choice), draft.choice != choice)
        return draft if lost.real else replace(draft, choice=choice)

    def settled(self, draft: Draft) -> Draft:
        """The draft by better routes of single tensors, where there are any: those of its neighbours have changed."""
        problem = draft.problem
        if problem.tensors > MANY:  # only in another order could so many be compared
            return draft
        lost = np.zeros(problem.alone.size) if self.budget is None else errors(problem)
        return replace(draft, choice=refined(problem, draft.choice, quickest_alone(problem, RUNNERS_UP), lost))

    def worth_it(self, draft: Draft, dense: Draft) -> tuple[Draft, Gain, float]:
        """The draft, or the dense one if the gain over it is not real; the gain and its noise; what was forgone."""
        doubts = (Doubts(draft.problem, self.noise), draft.choice), (Doubts(dense.problem, self.noise), dense.choice)
        gain = gain_over(*doubts, spread=self.workload.spread if self.noise is None else self.noise)
        if (draft.packed and gain.real) or (not draft.packed and gain.seconds > 0):
            return draft, gain, 0.0
        whole = self.problem(dense.problem.workload, self.compressors)  # runners-up may be compressed
        return dense.on(joined([dense.problem, whole])), gain, max(0.0, gain.seconds)

    # --- what is said about it ---

    @property
    def lanes_name(self) -> str:
        """The name of the lanes."""
        return next((name for name, known in LANES.items() if known == self.lanes), str(self.lanes))

    @property
    def claim(self) -> str:
        """What the bound is on."""
        choices = "all fusions of neighbours and all routes" if self.fusion else "all routes, no fusion"
        return f"{choices}, with {', '.join(self.compressors) or 'no compressor'}"

    def as_given(self, strategy: Strategy) -> Strategy:
        """A strategy with the compressor as it was given: the search knows it with all schedules at their end."""
        return Strategy(self.given.get(strategy.compressor, strategy.compressor), strategy.route)

    def plan_of(self, draft: Draft, forecast: Forecast) -> Plan:
        by_name = {name: self.as_given(strategy) for group, strategy in draft.strategies() for name in group}
        tensors = {t.name: (t.shape or t.size, t.dtype) for t in self.workload.tensors}
        p = self.profile
        made = MadeFor(tensors, p.nodes, p.ranks_per_node, self.workload.device, p.fingerprint)
        strategies = {t.name: by_name[t.name] for t in self.workload.tensors}
        return Plan(strategies, groups=tuple(g for g in draft.groups if len(g) > 1), fuse_bytes=0, made_for=made,
                    forecast=forecast, schedule=draft.schedule())  # fmt: skip


def outlooks(draft: Draft) -> tuple[Outlook, ...]:
    """What is predicted for each buffer of a draft whose candidate sets are complete.

    In orders in which every swap is a timeline of its own, and where tensors are many, only the options of each that
    take least by themselves are looked at for a runner-up. Many tensors are swapped in the order ``backprop``.
    """
    choice, size, problem = draft.choice, draft.choice.size, rough(draft.problem)
    plain, everyone = problem.timeline.seconds(choice), np.arange(size)
    free, nothing = with_free(problem.timeline)
    exposed = _settled(plain - swapped(free, choice, everyone, np.full(size, nothing)), plain)
    every = problem.timeline.order == "backprop" and size <= MANY
    tensors, options = swaps_of(problem, None if every else quickest_alone(problem, RUNNERS_UP))
    others = options != choice[tensors]
    tensors, options = tensors[others], options[others]
    longer = _settled(swapped(problem.timeline, choice, tensors, options) - plain, plain)
    for place in np.flatnonzero(longer < 0):  # with the keys as they are; a plan would have a schedule of its own
        trial = np.where(everyone == tensors[place], options[place], choice)
        longer[place] = _settled(np.array(problem.timeline.seconds(trial) - plain), plain)
    second = best_of_each(tensors, longer, problem.alone[options], size)
    dense = _settled(swapped(problem.timeline, choice, everyone, best_dense(problem, choice)) - plain, plain)
    dense[problem.method[choice] < 0] = 0.0
    return tuple(
        Outlook(
            group, float(problem.alone[choice[i]]), float(np.clip(exposed[i], 0.0, problem.alone[choice[i]])),
            problem.strategy(int(options[second[i]])) if second[i] >= 0 else None,
            float(longer[second[i]]) if second[i] >= 0 else 0.0, float(dense[i]),
        )
        for i, group in enumerate(draft.groups)
    )  # fmt: skip


def _settled(differences: np.ndarray, of: float) -> np.ndarray:
    """Differences of times, 0 where rounding alone makes them."""
    return np.where(np.abs(differences) <= TIE * of, 0.0, differences)


def _by_buffer(buffers: Workload, groups: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """The tensors of every buffer of a workload of buffers, in its order."""
    members = {buffer_name(group): tuple(group) for group in groups}
    return tuple(members.get(buffer.name, (buffer.name,)) for buffer in buffers.tensors)


# --- arguments --------------------------------------------------------------------------------------------------------


def defaults(workload: Workload, profile: Profile) -> tuple[str, Order]:
    """The lanes and the order of the timeline, unless told otherwise; see ``plan``."""
    if workload.device == "cpu":
        return "host" if profile.overlaps else "serial", "schedule"
    return "separate" if profile.measured else "one-network", "schedule"


def profiled(profile: Profile, devices: Sequence[DeviceKind]) -> tuple[str, ...]:
    """The compressors that a profile has both curves of, on all of some devices."""
    specs = dict.fromkeys(spec for spec, _, _ in profile.codecs)
    wanted = [(device, direction) for device in devices for direction in ("encode", "decode")]
    return tuple(s for s in specs if all((s, *rest) in profile.codecs for rest in wanted))


def _check(workload: Workload, devices: Sequence[DeviceKind], budget: float | None, noise: float | None) -> None:
    for device in devices:
        schema.convert(device, DeviceKind, "devices")
    if workload.device == "cpu" and "gpu" in devices:
        raise ConfigError("devices: the tensors of this workload are in host memory; expected ('cpu',)")
    for name, value in (("error_budget", budget), ("noise", noise)):
        try:
            schema.convert(value.item() if isinstance(value, np.generic) else value, Relative | None, name)
        except ConfigError:
            said = schema.shown(value)
            raise ConfigError(f"{name}={said}; expected a number from 0 to 1e6, or None") from None
