"""The choice that there is: for every tensor of a step a menu of strategies, priced and as numbers.

A menu holds what no other option of it dominates. The way of an option through the lanes is a max-plus matrix: when
each lane is free afterwards, as the maximum over lanes of when it was free before plus a time. An option whose matrix
is nowhere above another's is never worse than it, whatever comes before and after (in the order ``backprop``).

In the order ``schedule`` a menu holds much less: only options than which no other one needs less on every lane and from
end to end (see ``needs``). The bound of a search holds for what was left out all the same, as that is all that the
relaxation knows of an option. That no option left out is in a better schedule is no theorem: it may visit the lanes in
another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numba import njit

from espresso_mpi import compressors
from espresso_mpi.compressors import Compressor
from espresso_mpi.errors import ConfigError, PlanError
from espresso_mpi.types import ITEMSIZE, Plan, Route, Strategy, buffer_name

from .cost import Prices, Shape, Slot, price_table, slots
from .needs import least, needs, visited
from .profile import Profile
from .timeline import LANES, Lanes, Options, Order, Timeline, follow, virtual
from .trace import Trace, TracedTensor
from .tree import routes as all_routes

LONGEST = 1e15
"""Seconds of an option, 30 million years: sums and products of as many as there are, and of errors, stay finite."""

_AT_ONCE = 64
"""Sizes of tensors that are priced together: all options of ten thousand would fill the memory, before pruning."""


@dataclass(frozen=True)
class Compiled:
    """Routes in numbers, for one shape of cluster: their operations as places in a list of slots.

    Attributes:
        routes; slots: of all of them.
        index: int32 (routes, most operations), places in ``slots``; beyond ``count`` undefined.
        lane: int8, the same shape, virtual lanes; count: int32 (routes,).
        packed: bool (routes,), whether they compress; sums: whether they sum payloads.
        run: int8, like ``lane``: operations that follow each other on one virtual lane have the same number.
        pattern: int32 (routes,), equal for routes that visit the same lanes in the same order, by runs; steps: the same
            by operations.
    """

    routes: tuple[Route, ...]
    slots: tuple[Slot, ...]
    index: np.ndarray
    lane: np.ndarray
    count: np.ndarray
    packed: np.ndarray
    sums: np.ndarray
    run: np.ndarray
    pattern: np.ndarray
    steps: np.ndarray


def compiled(routes: tuple[Route, ...], shape: Shape, lanes: Lanes, checked: bool) -> Compiled:
    """See ``Compiled``. ``checked``: every tensor is checked before it travels. Kept for the next call."""
    return _compiled_same(Same(routes), shape, lanes, checked)


class Same:
    """Routes as a key by identity: to hash thousands of them takes longer than all that is done with them here."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self.routes = routes

    def __hash__(self) -> int:
        return id(self.routes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.routes is other.routes


@lru_cache(maxsize=64)
def _compiled_same(same: Same, shape: Shape, lanes: Lanes, checked: bool) -> Compiled:
    return _compiled(same.routes, shape, lanes, checked)


@lru_cache(maxsize=64)
def _compiled(routes: tuple[Route, ...], shape: Shape, lanes: Lanes, checked: bool) -> Compiled:
    walks = [slots(route, shape, checked) for route in routes]
    places: dict[Slot, int] = {}
    width = max(map(len, walks), default=0) or 1
    index, lane = np.zeros((len(walks), width), np.int32), np.zeros((len(walks), width), np.int8)
    for row, way in enumerate(walks):
        index[row, : len(way)] = [places.setdefault(slot, len(places)) for slot in way]
        own = np.array([lanes.of(slot.resource) for slot in way], np.int8)
        lane[row, : len(way)] = virtual(own, len(way), lanes.count, lanes.backward)
    return Compiled(
        routes, tuple(places), index, lane, np.array([len(slots) for slots in walks], np.int32),
        np.array([route.compressed for route in routes], bool),
        np.array([route.sums_payloads for route in routes], bool),
        *_patterns(lane, np.array([len(slots) for slots in walks])),
    )  # fmt: skip


def _patterns(lane: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``run``, ``pattern`` and ``steps`` of ``Compiled``."""
    within = np.arange(lane.shape[1]) < count[:, None]
    new = np.ones(lane.shape, bool)
    new[:, 1:] = lane[:, 1:] != lane[:, :-1]
    run = (new.cumsum(axis=1) - 1).astype(np.int8)
    merged = np.full(lane.shape, -1, np.int8)
    at, place = np.nonzero(new & within)
    merged[at, run[at, place]] = lane[at, place]
    by_run, by_step = (
        np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int32)
        for rows in (merged, np.where(within, lane, -1))
    )
    return run, by_run, by_step


@dataclass(frozen=True)
class Menu:
    """The options of tensors of one size.

    Attributes:
        options: priced.
        method: int32 (options,), which of the compressors, -1: none; route: int32, which of the routes.
    """

    options: Options
    method: np.ndarray
    route: np.ndarray

    def only(self, rows: np.ndarray) -> Menu:
        """Some of the options."""
        o = self.options
        kept = Options(o.lane[rows], o.seconds[rows], o.count[rows], o.repeats[rows])
        return Menu(kept, self.method[rows], self.route[rows])


@dataclass(frozen=True)
class Problem:
    """Tensors in backprop order, and a menu for each.

    Attributes:
        trace, profile: what is planned for.
        compressors: spellings; routes: both named by menus.
        timeline: prices choices; a choice is an int64 array (tensors,) of rows of all menus together.
        menu: int64 (tensors,), which menu a tensor has; first: int64 (menus + 1,), where menus begin among the rows.
        method, route: int32 (rows,), as in ``Menu``.
    """

    trace: Trace
    profile: Profile
    compressors: tuple[str, ...]
    routes: tuple[Route, ...]
    timeline: Timeline
    menu: np.ndarray
    first: np.ndarray
    method: np.ndarray
    route: np.ndarray

    @classmethod
    def of(
        cls,
        trace: Trace,
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
            compressors: spellings, ``none`` among them or not: dense routes are always options.
            routes: default: all of the decision tree for the trace's device, and those that sum payloads where a
                compressor is linear.
            lanes: which resources share a lane, or the name of one of ``LANES``.
            prune: leave out what is dominated in the order; see the module.
            free_codecs: encodes and decodes take no time.

        Raises:
            ConfigError: the profile lacks a compressor or a collective; a name that there is not.
        """
        given_once = dict.fromkeys(compressors)
        spellings = tuple(dict.fromkeys(str(_method(text)) for text in given_once if text != "none"))
        methods = tuple(_method(text) for text in spellings)
        where = lanes_of(lanes)
        given = tuple(routes) if routes is not None else default_routes(trace, methods)
        shape = Shape(profile.machines, profile.ranks_per_machine, trace.device)
        tables = compiled(given, shape, where, _checks(profile))
        sizes: dict[tuple[int, int], int] = {}
        menu = [sizes.setdefault(_size(tensor), len(sizes)) for tensor in trace.tensors]
        different, menus = list(sizes), list[Menu]()
        for begin in range(0, len(different), _AT_ONCE):
            priced = _priced(tables, methods, profile, different[begin : begin + _AT_ONCE], free_codecs)
            if prune and order == "schedule":
                menus += _needed(tables, priced, where.count)
            else:
                menus += pruned(tables, _menus(tables, priced), where) if prune else _menus(tables, priced)
        return cls._joined(trace, profile, spellings, given, menus, menu, where, order)

    @classmethod
    def _joined(
        cls, trace: Trace, profile: Profile, spellings: tuple[str, ...], routes: tuple[Route, ...],
        menus: Sequence[Menu], menu: Sequence[int], lanes: Lanes, order: Order,
    ) -> Problem:  # fmt: skip
        first = np.cumsum([0] + [m.method.size for m in menus])
        options = Options(
            *(
                np.concatenate([getattr(m.options, name) for m in menus])
                for name in ("lane", "seconds", "count", "repeats")
            )
        )
        timeline = Timeline(np.ascontiguousarray(trace.backward), options, lanes, order)
        method, route = (np.concatenate([getattr(m, name) for m in menus]) for name in ("method", "route"))
        return cls(trace, profile, spellings, routes, timeline, np.array(menu, np.int64), first, method, route)

    def menu_of(self, tensor: int) -> Menu:
        """The menu of a tensor."""
        rows = self.rows(tensor)
        o, part = self.timeline.options, slice(rows.start, rows.stop)
        options = Options(o.lane[part], o.seconds[part], o.count[part], o.repeats[part])
        return Menu(options, self.method[part], self.route[part])

    def with_menus(self, trace: Trace, menus: Mapping[Any, Menu], keys: Sequence[Any]) -> Problem:
        """Another trace, for each of whose tensors a key names the menu; menus are of this problem's methods."""
        places = {key: number for number, key in enumerate(menus)}
        return Problem._joined(trace, self.profile, self.compressors, self.routes, list(menus.values()),
                               [places[key] for key in keys], self.timeline.lanes, self.timeline.order)  # fmt: skip

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return int(self.menu.size)

    def rows(self, tensor: int) -> range:
        """The options of a tensor."""
        menu = int(self.menu[tensor])
        return range(int(self.first[menu]), int(self.first[menu + 1]))

    def strategy(self, row: int) -> Strategy:
        """What an option is."""
        spelling = "none" if self.method[row] < 0 else self.compressors[self.method[row]]
        return Strategy(spelling, self.routes[self.route[row]])

    def operations(self, row: int) -> tuple[Slot, ...]:
        """The operations of an option, in order."""
        shape = Shape(self.profile.machines, self.profile.ranks_per_machine, self.trace.device)
        return slots(self.routes[self.route[row]], shape, _checks(self.profile))

    def row(self, tensor: int, strategy: Strategy) -> int:
        """The option that a strategy is.

        Raises:
            PlanError: it is not on the tensor's menu.
        """
        rows = self.rows(tensor)
        here = slice(rows.start, rows.stop)
        method, route = self._methods.get(_canonical(strategy.compressor)), self._places.get(strategy.route)
        if method is not None and route is not None:
            found = np.flatnonzero((self.method[here] == method) & (self.route[here] == route))
            if found.size:
                return rows[int(found[0])]
        name = self.trace.tensors[tensor].name
        raise PlanError(f"{name!r}: {strategy} is not among its options; price it with routes=[...] and prune=False")

    @cached_property
    def _methods(self) -> dict[str, int]:
        return {"none": -1, **{spelling: number for number, spelling in enumerate(self.compressors)}}

    @cached_property
    def _places(self) -> dict[Route, int]:
        return {route: number for number, route in enumerate(self.routes)}

    @cached_property
    def alone(self) -> np.ndarray:
        """Seconds that every option takes by itself, float64 (rows,)."""
        o = self.timeline.options
        within = np.arange(o.seconds.shape[1]) < o.count[:, None]
        return np.where(within, o.seconds, 0.0).sum(axis=1) * o.repeats

    def dense(self) -> np.ndarray:
        """The choice of nothing compressed: of each tensor the dense option that is quickest by itself."""
        return self.quickest(self.method < 0)

    def quickest(self, allowed: np.ndarray) -> np.ndarray:
        """Of each tensor the option that is quickest by itself among those allowed, bool (rows,).

        Raises:
            PlanError: a tensor has none.
        """
        times = np.where(allowed, self.alone, np.inf)
        best = np.array([a + int(np.argmin(times[a:b])) for a, b in zip(self.first, self.first[1:])], np.int64)
        if not np.isfinite(times[best]).all():
            raise PlanError("a tensor has no such option: its menu lacks them, or they were left out as dominated")
        return best[self.menu]

    def seconds(self, choice: np.ndarray) -> float:
        """The time of a step: F(choice), and what every step costs besides."""
        return self.timeline.seconds(choice) + self.around

    @property
    def around(self) -> float:
        """Seconds of a step outside the timeline: the agreement of the ranks, and the update."""
        return self.profile.call + self.trace.update

    def ordered(self, order: Order) -> Problem:
        """The same with another order."""
        return replace(self, timeline=replace(self.timeline, order=order))

    def chosen(self, plan: Plan) -> np.ndarray:
        """The choice that a plan without groups makes; see ``row``."""
        ways = [plan.strategy(tensor.name) for tensor in self.trace.tensors]
        keys = [(menu, id(way)) for menu, way in zip(self.menu.tolist(), ways)]  # few differ, where tensors are many
        tensors = {key: number for number, key in enumerate(keys)}
        rows = {key: self.row(number, ways[number]) for key, number in tensors.items()}
        return np.array([rows[key] for key in keys], np.int64)


def evaluated(plan: Plan, trace: Trace, profile: Profile, *, lanes: Lanes | str = "one-network",
              order: Order = "schedule", free_codecs: bool = False) -> tuple[Problem, np.ndarray]:  # fmt: skip
    """The problem whose tensors are the buffers of a plan, and the choice that the plan makes in it.

    Raises:
        ConfigError, PlanError: the plan does not know a tensor; the profile lacks what it needs.
    """
    buffers = fused(trace, plan.groups)
    leader = {group[0]: buffer_name(group) for group in plan.groups if len(group) > 1}
    by_buffer = {leader.get(t.name, t.name): plan.strategy(t.name) for t in trace.tensors}
    strategies = {t.name: by_buffer[t.name] for t in buffers.tensors}
    spellings = [s.compressor for s in strategies.values()]
    ways = tuple(dict.fromkeys(s.route for s in strategies.values()))
    problem = Problem.of(buffers, profile, spellings, routes=ways, lanes=lanes, order=order, prune=False,
                         free_codecs=free_codecs)  # fmt: skip
    return problem, problem.chosen(Plan(strategies))


# --- fusion -----------------------------------------------------------------------------------------------------------


def fused(trace: Trace, groups: Sequence[Sequence[str]]) -> Trace:
    """The trace with the tensors of every group as one buffer, which is ready when its last tensor is.

    Raises:
        PlanError: a name that the trace does not have; different element types in a group.
    """
    known = {tensor.name: tensor for tensor in trace.tensors}
    missing = [name for group in groups for name in group if name not in known]
    if missing:
        raise PlanError(f"groups name {', '.join(map(repr, missing[:3]))}, which the trace does not have")
    grouped = {name for group in groups for name in group}
    buffers = [_buffer([known[name] for name in group]) for group in groups]
    buffers += [tensor for tensor in trace.tensors if tensor.name not in grouped]
    return replace(trace, tensors=tuple(sorted(buffers, key=lambda tensor: tensor.ready)))


def _buffer(members: Sequence[TracedTensor]) -> TracedTensor:
    kinds = {tensor.dtype for tensor in members}
    if len(kinds) > 1:
        raise PlanError(f"group of {members[0].name!r}: element types {', '.join(sorted(kinds))}; they must be equal")
    name = buffer_name([tensor.name for tensor in members])
    size = sum(tensor.size for tensor in members)
    if len(members) == 1:
        return members[0]
    return TracedTensor(name, size, max(tensor.ready for tensor in members), members[0].dtype)


# --- menus ------------------------------------------------------------------------------------------------------------


def lanes_of(lanes: Lanes | str) -> Lanes:
    """The lanes of a name.

    Raises:
        ConfigError: a name that there is not.
    """
    if isinstance(lanes, Lanes):
        return lanes
    if lanes not in LANES:
        raise ConfigError(f"lanes={lanes!r}; expected one of {', '.join(LANES)}, or a Lanes")
    return LANES[lanes]


def default_routes(trace: Trace, methods: Sequence[Compressor]) -> tuple[Route, ...]:
    """All routes that tensors on this device can take with these methods."""
    return all_routes(("cpu", "gpu") if trace.device == "gpu" else ("cpu",), any(m.linear for m in methods))


def _method(spelling: str) -> Compressor:
    return compressors.get(spelling).at(None)


def _canonical(spelling: str) -> str:
    return spelling if spelling == "none" else str(_method(spelling))


def _checks(profile: Profile) -> bool:
    return profile.tensor > 0 or any(profile.check.values)


def _size(tensor: TracedTensor) -> tuple[int, int]:
    return tensor.size, ITEMSIZE[tensor.dtype]


@dataclass(frozen=True)
class _Block:
    """The dense options, or those of one compressor, at every size.

    Attributes:
        method: as in ``Menu``; rows: int64 (options,), their routes.
        slots: float64 (sizes, slots), seconds of the operations; repeats: of each size the number of segments.
    """

    method: int
    rows: np.ndarray
    slots: np.ndarray
    repeats: list[int]


def _priced(
    tables: Compiled, methods: Sequence[Compressor], profile: Profile, sizes: Sequence[tuple[int, int]],
    free_codecs: bool,
) -> list[_Block]:  # fmt: skip
    """The operations of all options of tensors of each size: the dense ones, then of one compressor after the other.

    Args:
        sizes: (elements, bytes of one of them).
    """
    groups: list[tuple[int, Compressor | None, np.ndarray]] = [(-1, None, ~tables.packed)]
    groups += [(number, m, tables.packed & (m.linear | ~tables.sums)) for number, m in enumerate(methods)]
    return [
        _block(
            tables, number, np.flatnonzero(rows),
            [Prices(profile, size[0], method, size[1], free_codecs) for size in sizes],
        )
        for number, method, rows in groups
    ]  # fmt: skip


def _menus(tables: Compiled, blocks: Sequence[_Block]) -> list[Menu]:
    """All options of tensors of each size, unpruned."""
    rows = np.concatenate([block.rows for block in blocks])
    method = np.repeat(np.array([block.method for block in blocks], np.int32), [block.rows.size for block in blocks])
    seconds = np.concatenate([block.slots[:, tables.index[block.rows]] for block in blocks], axis=1)
    repeats = np.concatenate(
        [np.repeat(np.array(block.repeats, np.int32)[:, None], block.rows.size, axis=1) for block in blocks], axis=1
    )
    lane, count, route = tables.lane[rows], tables.count[rows], rows.astype(np.int32)
    return [Menu(Options(lane, s, count, r), method, route) for s, r in zip(seconds, repeats)]


def _needed(tables: Compiled, blocks: Sequence[_Block], total: int) -> list[Menu]:
    """Of every size the options that no other one needs less than; see the module."""
    rows = np.concatenate([block.rows for block in blocks])
    method = np.repeat(np.array([block.method for block in blocks], np.int32), [block.rows.size for block in blocks])
    menus = []
    for size in range(len(blocks[0].repeats)):
        values = [
            needs(block.rows, tables.index, tables.lane, tables.count, block.slots[size], block.repeats[size], total)
            for block in blocks
        ]
        kept = least(np.concatenate(values))
        route = rows[kept]
        slots = np.stack([block.slots[size] for block in blocks])
        seconds = slots[method[kept, None] + 1, tables.index[route]]  # the first block is that of the dense options
        repeats = np.array([block.repeats[size] for block in blocks], np.int32)[method[kept] + 1]
        options = Options(tables.lane[route], seconds, tables.count[route], repeats)
        menus.append(Menu(options, method[kept], route.astype(np.int32)))
    return menus


def _block(tables: Compiled, method: int, rows: np.ndarray, prices: Sequence[Prices]) -> _Block:
    """The operations of options of one compressor, or of the dense ones, at every size."""
    segments = [one.segments() for one in prices]
    used = np.flatnonzero(visited(rows, tables.index, tables.count, len(tables.slots)))
    seconds = np.zeros((len(prices), max(1, len(tables.slots))))  # a single rank may have nothing to do
    seconds[:, used] = price_table([one for _, one in segments], [tables.slots[place] for place in used])
    repeats = [count for count, _ in segments]
    longest = float((seconds.max(axis=1, initial=0.0) * np.array(repeats)).max(initial=0.0))
    if not longest <= LONGEST:
        raise ConfigError(
            f"profile: with compressor {prices[0].compressor or 'none'} an operation takes {longest:.3g} s, by the "
            f"curves for tensors of up to {max(one.n for one in prices)} elements; expected at most {LONGEST:g}: is a "
            f"curve or a size in the wrong unit?"
        )
    return _Block(method, rows, seconds, repeats)


# --- dominance --------------------------------------------------------------------------------------------------------


def matrices(options: Options, lanes: Lanes) -> np.ndarray:
    """The max-plus matrix of every option, float64 (options, 2 · lanes, 2 · lanes + 1).

    Entry [a, b] is how much later virtual lane b is free than a was, at least; -inf where b does not depend on a. The
    last column is when the tensor is there; the gradient is ready when the lane of the backward pass is free.
    """
    return _matrices(options.lane, options.seconds, options.count, options.repeats, lanes.count, lanes.backward)


@njit(cache=True)
def _matrices(lane, seconds, count, repeats, total, home):  # type: ignore[no-untyped-def]
    found, nothing = np.empty((count.size, 2 * total, 2 * total + 1)), np.empty((0, 0))
    for option in range(count.size):
        for a in range(2 * total):
            state = found[option, a, : 2 * total]
            state[:] = -np.inf
            state[a] = 0.0
            ready = 0.0 if a == home else -np.inf
            end = follow(state, ready, lane[option], seconds[option], count[option], repeats[option], nothing)
            found[option, a, 2 * total] = end
    return found


def pruned(tables: Compiled, menus: Sequence[Menu], lanes: Lanes) -> list[Menu]:
    """The menus without their dominated options; all menus have the same rows.

    Routes that visit the same lanes in the same order need no matrices: what is quicker on every run, and has no more
    segments, dominates. Operations of one run merge only where nothing has several segments.
    """
    if not menus:
        return []
    orders = {}
    kept = []
    for menu in menus:
        o = menu.options
        whole = bool((o.repeats == 1).all())
        if whole not in orders:
            kinds = (tables.pattern if whole else tables.steps)[menu.route]
            orders[whole] = kinds, np.argsort(kinds, kind="stable")
        run = tables.run if whole else np.broadcast_to(np.arange(o.lane.shape[1], dtype=np.int8), tables.run.shape)
        kinds, order = orders[whole]
        first = menu.only(_quicker(o.seconds, o.count, o.repeats, menu.route, np.ascontiguousarray(run), kinds, order))
        kept.append(first.only(undominated(first.options, lanes)))
    return kept


@njit(cache=True)
def _quicker(seconds, count, repeats, route, run, kinds, order):  # type: ignore[no-untyped-def]
    """The rows that no other of their kind dominates, rising; ``order``: rows by kind."""
    width = seconds.shape[1]
    sums, total = np.zeros(seconds.shape), np.zeros(count.size)
    for row in range(count.size):
        for place in range(count[row]):
            sums[row, run[route[row], place]] += seconds[row, place]
            total[row] += seconds[row, place]
    keep, kept = np.ones(count.size, np.bool_), np.empty(count.size, np.int64)
    begin = 0
    while begin < order.size:
        end = begin
        while end < order.size and kinds[order[end]] == kinds[order[begin]]:
            end += 1
        members = order[begin:end]
        ranked, size = members[np.argsort(total[members], kind="mergesort")], 0
        for row in ranked:
            dominated = False
            for place in range(size):
                other = kept[place]
                worse = repeats[other] > repeats[row]
                for entry in range(width):
                    if sums[other, entry] > sums[row, entry]:
                        worse = True
                        break
                if not worse:
                    dominated = True
                    break
            if dominated:
                keep[row] = False
            else:
                kept[size] = row
                size += 1
        begin = end
    return np.flatnonzero(keep)


def undominated(options: Options, lanes: Lanes) -> np.ndarray:
    """The options that no other one dominates, in rising order; of equal ones the first."""
    o = options
    flat, weight = _compared(o.lane, o.seconds, o.count, o.repeats, lanes.count, lanes.backward)
    return np.sort(front(flat, np.argsort(weight, kind="stable")))


@njit(cache=True)
def _compared(lane, seconds, count, repeats, total, home):  # type: ignore[no-untyped-def]
    """The entries of the options' matrices in which they differ, (options, entries), and the sum of finite ones."""
    nothing, virtual = np.empty((0, 0)), 2 * total
    flat, weight = np.empty((count.size, virtual * (virtual + 1))), np.zeros(count.size)
    differ, visited = np.zeros(flat.shape[1], np.bool_), np.empty(virtual, np.bool_)
    for option in range(count.size):
        visited[:] = False
        visited[home] = True
        for place in range(count[option]):
            visited[lane[option, place]] = True
            visited[lane[option, place] % total] = True
        for a in range(virtual):
            begin = a * (virtual + 1)
            state = flat[option, begin : begin + virtual]
            state[:] = -np.inf
            state[a] = 0.0
            end = -np.inf
            if visited[a]:
                ready = 0.0 if a == home else -np.inf
                end = follow(state, ready, lane[option], seconds[option], count[option], repeats[option], nothing)
            flat[option, begin + virtual] = end
        for entry in range(flat.shape[1]):
            value = flat[option, entry]
            differ[entry] |= value != flat[0, entry]
            if value > -np.inf:
                weight[option] += value
    used = np.flatnonzero(differ)
    slim = np.empty((count.size, used.size))
    for option in range(count.size):
        for place in range(used.size):
            slim[option, place] = flat[option, used[place]]
    return slim, weight


@njit(cache=True)
def front(flat, order):  # type: ignore[no-untyped-def]
    kept, size = np.empty(order.size, np.int64), 0
    finite = np.zeros(order.size, np.int64)  # a bit an entry: what depends on more lanes dominates nothing
    for row in range(order.size):
        for entry in range(min(63, flat.shape[1])):
            if flat[row, entry] > -np.inf:
                finite[row] |= 1 << entry
    for row in order:
        dominated, missing = False, ~finite[row]
        for place in range(size):
            other = kept[place]
            if finite[other] & missing:
                continue
            worse = False
            for entry in range(flat.shape[1]):
                if flat[other, entry] > flat[row, entry]:
                    worse = True
                    break
            if not worse:
                dominated = True
                if place:  # what dominates much is tried first
                    kept[place], kept[place - 1] = kept[place - 1], kept[place]
                break
        if not dominated:
            kept[size] = row
            size += 1
    return kept[:size]
