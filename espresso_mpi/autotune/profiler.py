"""Measures this cluster: what every step of every route costs, from the code that sessions run.

**Collectives** are steps of routes that are carried out whole, one pass after the other, with the exchange of a few
bytes between passes that sessions make between calls: so links and caches are as busy as in training. A step lasts from
when the last rank began it until the last rank has ended it, on one clock for all machines. What a rank ends is
where it begins the next, so that the steps of a pass add up to the pass, and nothing is counted twice.

**Encodes and decodes** are the executor's own, without the network: every rank plays one of two, encodes, is given
another payload like its own, and decodes the sum. All ranks do so at the same time, and those of a machine meet before
each, so that ranks that share cores compete as they will in training. Such a step lasts from when the last rank of a
machine begins it until the last one has ended it, on the slowest machine. Half of the decode of two payloads is what a
decode costs a payload. (Where ranks share cores, those that compute hold up the others' way out of the collective
before: that is a part of the collective's time, and of a call's.)

**Calls.** What a session takes to synchronise some tensors, beyond their steps as the curves have them, is shared out
over the call (``call``), each tensor (``tensor``) and each byte (added to ``check``, the search for values not finite).

**Steps** of training with synthetic computing: what they take beyond all that, and what hides behind computing when
gradients are pushed as they come; see ``overlapping``.

Every point is visited again and again until its median is known well enough or the time is used up: some passes at a
time, so that a disturbance of a second does not spoil a point. Ranks decide so from numbers that all of them have.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np

from .. import compressors
from ..arrays import device
from ..cluster import environment
from ..collectives.data import reduction
from ..collectives.data.layout import Dense, Packed, State, Topology
from ..collectives.executor import Job, Program, Stage
from ..collectives.messages import clocks
from ..collectives.messages.agreement import documents, gather_small
from ..collectives.messages.transport import Transport
from ..collectives.ops import base as collective
from ..collectives.program import MoveStep
from ..compressors import Compressor
from ..errors import ConfigError
from ..feedback import AUTO, NO_FEEDBACK
from ..options import DEFAULT_SEGMENT, default_route
from ..planner.model.curve import Curve, Sample
from ..planner.model.problem import evaluated
from ..planner.model.profile import Profile
from ..planner.model.profile_keys import Codec, Move
from ..planner.model.trace import Trace, TracedTensor
from ..tracing.recording import Recorder
from ..types import CLOSING, Collective, DeviceKind, Level, Plan, Route, Strategy
from . import overlapping
from .synthetic_load import Work

BYTES = tuple(4**k for k in range(5, 13))
"""Bytes of the tensors that collectives are measured with by default: 1 KiB to 16 MiB."""

ELEMENTS = tuple(4**k for k in range(4, 12))
"""Elements that encodes and decodes are measured with by default: 256 to 4 Mi."""

PRECISION = 0.05
"""A median is known well enough if its uncertainty is at most this share of it."""

_FEWEST, _BATCH, _MOST = 2, 5, 60
"""Passes of a visit to a point where they take long, and where they do not; and in all."""

_SOON = 2 / 3
"""The share of the time that is left which the next size may take."""

_CLOCK_SECONDS = 0.5
"""After so long the clocks of other machines are compared anew."""

_POINTS = 5
"""Sizes that are measured at most where the sizes of tensors are given."""

_SHARES = {"moves": 0.42, "codecs": 0.22, "copies": 0.03, "check": 0.03, "calls": 0.1, "steps": 0.2}
"""How the time is divided; what one kind leaves goes to those that follow."""

_BETWEEN = 2e-3
"""Seconds of computing before each of these calls: caches are as cold, and cores as busy, as in training."""

_CALLS = (
    (1, 1 << 12), (1, 1 << 14), (1, 1 << 17), (6, 1 << 10), (6, 1 << 14), (4, 1 << 16), (32, 1 << 8), (32, 1 << 12)
)  # fmt: skip
"""(Number of tensors, elements of each) of the calls that are timed. Of many under way, one's waiting hides behind the
others, so that each takes less than one of a few."""

_DENSE = (
    "allreduce@flat",
    "reduce_scatter@intra/allreduce@inter/allgather@intra",
    "reduce_scatter@flat/allgather@flat",
    "reduce@flat/broadcast@flat",
    "reduce_scatter@intra/reduce_scatter@inter/allgather@inter/allgather@intra",
    "reduce_scatter@intra/reduce@inter/broadcast@inter/allgather@intra",
    "reduce@intra/allreduce@inter/broadcast@intra",
    "reduce@intra/reduce_scatter@inter/allgather@inter/broadcast@intra",
    "reduce@intra/reduce@inter/broadcast@inter/broadcast@intra",
)
_PACKED = (
    "encode@cpu/alltoall@flat/decode@cpu/encode@cpu/allgather@flat/decode@cpu",
    "encode@cpu/gather@flat/decode@cpu/encode@cpu/broadcast@flat/decode@cpu",
    "encode@cpu/alltoall@intra/decode@cpu/encode@cpu/alltoall@inter/decode@cpu/encode@cpu/allgather@inter"
    "/allgather@intra/decode@cpu",
    "encode@cpu/alltoall@intra/decode@cpu/encode@cpu/gather@inter/decode@cpu/encode@cpu/broadcast@inter"
    "/allgather@intra/decode@cpu",
    "encode@cpu/gather@intra/decode@cpu/encode@cpu/gather@inter/decode@cpu/encode@cpu/broadcast@inter"
    "/broadcast@intra/decode@cpu",
    "encode@cpu/gather@intra/decode@cpu/encode@cpu/alltoall@inter/decode@cpu/encode@cpu/allgather@inter"
    "/broadcast@intra/decode@cpu",
)
"""Routes that have every move of the decision tree among them, those of payloads as well."""

_CARRIER = "fp16"
"""What makes the payloads of those: half the bytes, at little time."""

_RESOLUTION = 1e-7
"""Seconds that a sample has at least."""

SessionOpener = Callable[..., AbstractContextManager[Any]]


def measure(
    transport: Transport,
    spellings: Sequence[str],
    *,
    open_session: SessionOpener,
    sizes: Sequence[int] | None = None,
    seconds: float = 60.0,
    tick: Callable[[float], None] = lambda share: None,
    devices: Sequence[DeviceKind] | None = None,
    segment_bytes: int = DEFAULT_SEGMENT,
    pushes: bool = True,
) -> Profile:
    """Measure what routes are made of. Collective; the same profile on every rank, made from the slowest rank's times.

    Args:
        spellings: of the compressors; "none" is ignored. Scheduled ones are measured as they are in the end.
        open_session: opens a session on the same ranks, given options: ``functools.partial(Session, comm)``.
        sizes: elements of the tensors that the profile is for; default: all sizes up to 16 MiB. With sizes the measured
            points are few, and those that such tensors bring about.
        seconds: time for all of it, once the kernels are loaded.
        tick: is called now and then with the share that is done, 0 to 1.
        devices: where encodes and decodes run; default: the CPU, and the GPU where all ranks have one.
        segment_bytes: how sessions cut tensors, for the profile.
        pushes: measure as well what hides when gradients are pushed; else the profile says that all does.

    Raises:
        ConfigError: on every rank: an argument does not fit. RankTimeoutError: a rank did not come.
    """
    request = _agreed(transport, spellings, sizes, seconds, devices)
    run = _Run(transport, request, tick)
    run.warm_up()
    moves, codecs, copies, check = run.moves(), run.codecs(), run.copies(), run.check()
    machines, lanes = len(transport.topology.machines), transport.topology.lanes
    steps = Profile(machines, lanes, codecs, moves, copies, check, segment_bytes=segment_bytes)
    profile = run.calls(steps, open_session)
    profile = run.whole_steps(profile, open_session, pushes)
    here, fingerprint = _surroundings(transport, request, run.left_out)
    tick(1.0)
    return replace(profile, environment=here, fingerprint=fingerprint)


# --- what is asked for ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    """What is to be measured, the same on every rank."""

    methods: Mapping[str, Compressor]
    nbytes: tuple[int, ...]
    elements: tuple[int, ...]
    seconds: float
    devices: tuple[DeviceKind, ...]


def _agreed(
    transport: Transport,
    spellings: Sequence[str],
    sizes: Sequence[int] | None,
    seconds: float,
    devices: Sequence[DeviceKind] | None,
) -> _Request:
    """The arguments, checked on all ranks: what is wrong on one is an error on all."""
    request, problem = None, ""
    try:
        request = _checked(transport.topology, spellings, sizes, seconds, devices)
    except ConfigError as error:
        problem = str(error)
    except Exception as error:  # a method of the user's own may raise anything
        problem = f"profile: {type(error).__name__}: {error}"
    asked = repr(request if devices is not None or request is None else replace(request, devices=()))
    mine = {"problem": problem, "request": asked, "devices": request.devices if request else []}
    notes = documents(transport, _json(mine))
    problems = [f"{transport.describe(rank)}: {note['problem']}" for rank, note in enumerate(notes) if note["problem"]]
    if problems:
        raise ConfigError(problems[0])
    assert request is not None
    common = [d for d in request.devices if all(d in note["devices"] for note in notes)]
    different = [rank for rank, note in enumerate(notes) if note["request"] != notes[0]["request"]]
    if different:
        raise ConfigError(
            f"profile: {transport.describe(different[0])} was asked to measure something else than rank 0; pass the "
            f"same arguments on every rank"
        )
    return replace(request, devices=tuple(common)) if devices is None else request


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _checked(
    topology: Topology,
    spellings: Sequence[str],
    sizes: Sequence[int] | None,
    seconds: float,
    devices: Sequence[DeviceKind] | None,
) -> _Request:
    if isinstance(spellings, str):
        raise ConfigError(f"profile: compressors={spellings!r}; expected a sequence of spellings, such as ['onebit']")
    methods = {str(m): m.at(None) for m in (compressors.get(s) for s in spellings if s != "none")}
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise ConfigError(f"profile: seconds={seconds!r}; expected a number above 0")
    if devices is not None and (not devices or not set(devices) <= set(get_args(DeviceKind))):
        raise ConfigError(f"profile: devices={devices!r}; expected some of {', '.join(get_args(DeviceKind))}")
    found = _devices() if devices is None else tuple(dict.fromkeys(devices))
    if sizes is None:
        return _Request(methods, BYTES, ELEMENTS, seconds, found)
    wrong = [n for n in sizes if isinstance(n, bool) or not isinstance(n, int) or n < 1]
    if wrong or not sizes:
        raise ConfigError(f"profile: sizes={list(sizes)!r}; expected elements of tensors, whole numbers above 0")
    regions = _regions(sizes, topology)
    moved = {4 * n for n in sizes} | {m.nbytes(n) for m in methods.values() for n in regions}
    return _Request(methods, _spread(moved), _spread(regions), seconds, found)


def _regions(sizes: Iterable[int], topology: Topology) -> set[int]:
    """Elements of the payloads that tensors of these sizes are cut into along the routes."""
    cuts = {1, topology.size, topology.lanes, len(topology.machines), topology.lanes * len(topology.machines)}
    return {-(-n // cut) for n in sizes for cut in cuts}


def _spread(values: Iterable[int]) -> tuple[int, ...]:
    """At most ``_POINTS`` of some sizes, the least and the largest among them, evenly by their logarithm."""
    rising = np.array(sorted(set(values)))
    if rising.size <= _POINTS:
        return tuple(int(v) for v in rising)
    wanted = np.linspace(math.log(rising[0]), math.log(rising[-1]), _POINTS)
    nearest = [int(rising[np.argmin(np.abs(np.log(rising) - w))]) for w in wanted]
    return tuple(sorted(set(nearest)))


def _ends_first(sizes: Sequence[int]) -> list[int]:
    """The least size, the middle one, the largest, and then what halves the gaps.

    So a curve spans the sizes however early the time is up.
    """
    order, gaps = [0, len(sizes) - 1], [(0, len(sizes) - 1)]
    for low, high in gaps:
        middle = (low + high) // 2
        if middle > low:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    order[1:3] = order[1:3][::-1]
    return [sizes[i] for i in dict.fromkeys(order)]


def _devices() -> tuple[DeviceKind, ...]:
    """The CPU, and the GPU if this rank has one; numba's simulator is none."""
    from numba import cuda

    try:
        return ("cpu", "gpu") if cuda.is_available() and not device.simulated() else ("cpu",)
    except Exception:  # a driver that is broken is none
        return ("cpu",)


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass
class _Point:
    """Something that is measured at one size.

    Attributes:
        what: in words; family: what costs about as much for each unit of the size.
        visit: makes some passes and returns their seconds, shape (passes, steps).
        found: what the visits brought; lasted: seconds of the latest.
    """

    what: str
    family: Any
    size: int
    visit: Callable[[], np.ndarray]
    found: np.ndarray | None = None
    lasted: float = 0.0

    @property
    def settled(self) -> bool:
        """Whether its median is known well enough: by its interquartile range over sqrt(n).

        The steps of a pass are judged by what they are of the pass, so that one of a microsecond does not hold up all.
        """
        if self.found is None or len(self.found) >= _MOST:
            return True
        if len(self.found) < _BATCH:
            return False
        low, middle, high = np.percentile(self.found, [25, 50, 75], axis=0)
        return bool(np.sum(high - low) <= PRECISION * math.sqrt(len(self.found)) * np.sum(middle))


class _Times(dict[Any, dict[int, list[float]]]):
    """Observed seconds by what they are of, and by size."""

    def note(self, key: Any, size: int, seconds: Iterable[float]) -> None:
        self.setdefault(key, {}).setdefault(size, []).extend(seconds)

    def curves(self) -> dict[Any, Curve]:
        """A curve for each key."""
        return {
            key: Curve.fit([_sample(size, seconds) for size, seconds in sorted(by_size.items())])
            for key, by_size in self.items()
        }


def _sample(size: int, seconds: Sequence[float]) -> Sample:
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    middle = max(float(middle), _RESOLUTION)
    return Sample(size, middle, float(high - low) / middle, len(seconds))


class _Run:
    """Carries out what was asked for. Collective, as are its methods."""

    def __init__(self, transport: Transport, request: _Request, tick: Callable[[float], None]) -> None:
        self.transport, self.request, self._tick = transport, request, tick
        self.left_out: list[str] = []
        self._start = time.perf_counter()
        self._offsets = np.zeros(transport.topology.size)
        self._read = -math.inf
        self._deadline, self._limit = 0.0, math.inf
        self._neighbours = _meeting(transport)
        transport.waiter.what = "the profile"

    def warm_up(self) -> None:
        """Load every kernel, or compile it, before time counts."""
        for tour in self._tours():
            self._tour(tour, self.request.nbytes[0])
        for method in self.request.methods.values():
            for where in self.request.devices:
                self._codec(method, self.request.elements[0], where)
        self._check(self.request.elements[0])
        self._start = time.perf_counter()

    # --- kinds of measurements ---

    def moves(self) -> dict[Move, Curve]:
        """A curve for every operation at every level."""
        self._allow("moves")
        tours = self._tours()
        points = [
            _Point(f"{tour.route} at {nbytes} bytes", tour, nbytes, partial(self._tour, tour, nbytes))
            for nbytes in _ends_first(self.request.nbytes)
            for tour in tours
        ]
        times = _Times()
        for point in self._surveyed(points):
            tour: _Tour = point.family
            sizes = self._put_in(tour.program(self.transport, point.size))
            assert point.found is not None
            for key, size, seconds in zip(tour.keys, sizes, point.found.T):
                if key is not None and size > 0:
                    times.note(key, size, seconds)
        return times.curves()

    def codecs(self) -> dict[Codec, Curve]:
        """A curve for encode and decode of every method on every device."""
        self._allow("codecs")
        points = [
            _Point(f"{name} on the {where} with {n} elements", (name, where), n, partial(self._codec, method, n, where))
            for n in _ends_first(self.request.elements)
            for name, method in self.request.methods.items()
            for where in self.request.devices
        ]
        times = _Times()
        for point in self._surveyed(points):
            assert point.found is not None
            times.note((*point.family, "encode"), point.size, point.found[:, 0])
            times.note((*point.family, "decode"), point.size, point.found[:, 1] / 2)
        return times.curves()

    def copies(self) -> dict[Any, Curve]:
        """Between host and GPU, page-locked on the host as the session's are."""
        if "gpu" not in self.request.devices:
            return {}
        self._allow("copies")
        points = [
            _Point(f"copies of {4 * n} bytes", "", 4 * n, partial(self._copy, n))
            for n in _ends_first(self.request.elements)
        ]
        times = _Times()
        for point in self._surveyed(points):
            assert point.found is not None
            times.note("to_host", point.size, point.found[:, 0])
            times.note("to_gpu", point.size, point.found[:, 1])
        return times.curves()

    def check(self) -> Curve:
        """The search for values that are not finite."""
        self._allow("check")
        points = [
            _Point(f"check of {4 * n} bytes", "", 4 * n, partial(self._check, n))
            for n in _ends_first(self.request.elements)
        ]
        times = _Times()
        for point in self._surveyed(points):
            assert point.found is not None
            times.note("check", point.size, point.found[:, 0])
        return times.curves()["check"]

    # --- visits ---

    def _tours(self) -> list[_Tour]:
        """The routes whose moves are asked for, each with the moves that are looked at."""
        topology = self.transport.topology
        wanted = {level for level in get_args(Level) if _members(topology, level) > 1}
        tours = [_Tour(Route.parse(text), _keys(Route.parse(text), topology)) for text in (*_DENSE, *_PACKED)]
        tours = [replace(t, keys=tuple(k if k and k[1] in wanted else None for k in t.keys)) for t in tours]
        return [tour for tour in tours if any(tour.keys)]

    def _tour(self, tour: _Tour, nbytes: int) -> np.ndarray:
        """Passes along a route."""
        program, n = tour.program(self.transport, nbytes), tour.elements(nbytes)
        job = _job(tour.method, n)
        source = _normal(n, self.transport.rank)
        x = source.copy()

        def one() -> list[float]:
            x[:] = source
            self._round()
            return _marks(program.stages(0, x, job, Recorder()))

        marks = self._passes(one)
        return _telescoped(marks.reshape(*marks.shape[:2], -1, 2))

    def _put_in(self, program: Program) -> list[int]:
        """Bytes that the rank with most puts into each step."""
        mine = np.array([_nbytes(step) for step in program.steps(0)], np.int64)
        every = gather_small(self.transport, mine.view(np.uint8), mine.nbytes)
        return [int(most) for most in np.max([row.view(np.int64) for row in every], axis=0)]

    def _codec(self, method: Compressor, n: int, where: DeviceKind) -> np.ndarray:
        """Encodes, and decodes of two payloads."""
        shaped = method.shaped((n,))
        route = Route.parse("encode@cpu/allgather@flat/decode@cpu").on(where)
        program = Program(_pair(self.transport), route, shaped, n, "float32")
        source = _normal(n, self.transport.rank)
        x, job = device.zeros(n, np.float32, where), _job(shaped, n)

        def acts() -> Iterator[Callable[[], None]]:
            device.copy(x, source)
            for stage in program.stages(0, x, job, Recorder()):
                if isinstance(stage.step, MoveStep):
                    _multiply(stage)
                else:
                    yield partial(_finish, stage, where)

        return self._side_by_side(acts)

    def _copy(self, n: int) -> np.ndarray:
        host, gpu = device.pinned(4 * n).view(np.float32), device.zeros(n, np.float32, "gpu")
        return self._side_by_side(lambda: iter((partial(_copied, host, gpu), partial(_copied, gpu, host))))

    def _check(self, n: int) -> np.ndarray:
        x = _normal(n, 0)

        def count() -> None:
            reduction.count_non_finite(x, "float32", False)

        return self._side_by_side(lambda: iter((count,)))

    def _side_by_side(self, acts: Callable[[], Iterator[Callable[[], None]]]) -> np.ndarray:
        """Seconds of what all ranks do by themselves at the same time, shape (passes, acts)."""
        meet = self._neighbours

        def one() -> list[float]:
            marks = []
            for act in acts():
                meet()
                start = time.perf_counter()
                act()
                marks += [start, time.perf_counter()]
            return marks

        marks = self._passes(one)
        marks = marks.reshape(*marks.shape[:2], -1, 2)
        return np.max([_telescoped(marks[list(ranks)]) for ranks in self.transport.topology.machines], axis=0)

    # --- calls ---

    def calls(self, profile: Profile, open_session: SessionOpener) -> Profile:
        """The profile with what a call, a tensor and a byte cost beyond the steps and the check that are in it.

        Also whether tensors overlap: of the two timelines that one is taken which leaves less to be explained.
        """
        self._allow("calls")
        self._work = Work(self.transport, "cpu")
        timed: list[tuple[Strategy, int, int, float]] = []
        for strategy in self._usual():
            with open_session(plan=Plan(default=strategy), fuse_bytes=0) as session:
                points = [_Point("", "", count * n, partial(self._call, session, count, n)) for count, n in _CALLS]
                for point, (count, n) in zip(self._surveyed(points, needed=True), _CALLS):
                    timed.append((strategy, count, n, float(np.median(point.found))))  # type: ignore[arg-type]
        fits = {}
        for lanes in ("serial", "host"):
            rows = [(count, 4 * count * n, lasted - _known(strategy, count, n, profile, lanes), lasted)
                    for strategy, count, n, lasted in timed]  # fmt: skip
            fits[lanes] = _shared_out(np.array(rows))
        lanes = min(fits, key=lambda name: fits[name][1])
        (call, tensor, byte), _ = fits[lanes]
        check = _steeper(profile.check, byte)
        return replace(profile, call=call, tensor=tensor, check=check, overlaps=lanes == "host")

    def _usual(self) -> list[Strategy]:
        """The ways that sessions choose by themselves: dense, and of the first and the last method."""
        topology = self.transport.topology
        found = [Strategy("none", Route.parse(default_route(topology, compressed=False)))]
        methods = list(self.request.methods.items())
        for name, method in dict([*methods[:1], *methods[-1:]]).items():
            route = default_route(topology, compressed=True, summed=method.common)
            found.append(Strategy(name, Route.parse(route)))
        return found

    def _call(self, session: Any, count: int, n: int) -> np.ndarray:
        """Seconds of calls, shape (passes, 1)."""
        source = _normal(n, self.transport.rank)
        grads = {f"{k} of {count}": source.copy() for k in range(count)}

        def one() -> list[float]:
            for x in grads.values():
                x[:] = source
            self._work.last(_BETWEEN)
            start = time.perf_counter()
            session.sync(grads)
            return [start, time.perf_counter()]

        return _telescoped(self._passes(one)[:, :, None, :])

    def whole_steps(self, profile: Profile, open_session: SessionOpener, pushes: bool) -> Profile:
        """The profile with what whole steps take; those that push only where this MPI allows it."""
        try:
            self.transport.require_threads()
        except ConfigError:
            pushes = False
        self._allow("steps")
        return overlapping.measured(self.transport, self._usual(), profile, open_session, self._in_turns, pushes)

    def _in_turns(self, passes: Sequence[Callable[[], list[float]]]) -> list[np.ndarray]:
        """Seconds of the steps of some passes, each of shape (repetitions, steps)."""
        points = [_Point("", "", number, partial(self._steps, one)) for number, one in enumerate(passes)]
        return [point.found for point in self._surveyed(points, needed=True) if point.found is not None]

    def _steps(self, one: Callable[[], list[float]]) -> np.ndarray:
        marks = self._passes(one)
        return _telescoped(marks.reshape(*marks.shape[:2], -1, 2))

    # --- repeating ---

    def _surveyed(self, points: Sequence[_Point], needed: bool = False) -> list[_Point]:
        """Visit all points, and again those that are not settled while there is time; those that were visited.

        Args:
            needed: visit all once, whatever it takes; else those that would take too long are left out.
        """
        costs: dict[Any, dict[int, float]] = {}
        visited: list[_Point] = []
        for number, point in enumerate(points):
            alike = sum(1 for other in points[number:] if other.size == point.size)
            known = costs.setdefault(point.family, {})
            self._limit = _SOON * self._left() / alike if known and not needed else math.inf
            try:
                if _guess(known, point.size) * _FEWEST > self._limit * _BATCH:
                    raise _TooLongError
                self._visit(point)
            except _TooLongError:
                self.left_out.append(point.what)
                continue
            known[point.size] = point.lasted
            visited.append(point)
        self._limit = math.inf
        self._visit_again(visited)
        return visited

    def _visit_again(self, points: Sequence[_Point]) -> None:
        """Until all are settled or the time is up."""
        rough = [point for point in points if not point.settled]
        while rough:
            going = False
            for point in rough:
                if point.lasted <= self._left():
                    self._visit(point)
                    going = True
            rough = [point for point in rough if going and not point.settled]

    def _visit(self, point: _Point) -> None:
        start = time.perf_counter()
        self._compare_clocks()
        seconds = point.visit()
        point.found = seconds if point.found is None else np.concatenate([point.found, seconds])
        point.lasted = self._agreed_time(start)
        self._tick(min(1.0, (time.perf_counter() - self._start) / self.request.seconds))

    def _passes(self, one: Callable[[], list[float]]) -> np.ndarray:
        """The marks of some passes, after one that warms up, on rank 0's clock; shape (ranks, passes, marks).

        Raises:
            _TooLongError: on all ranks, if that one shows that they would take longer than they may.
        """
        start = time.perf_counter()
        one()
        count = int(min(_BATCH, self._limit / self._agreed_time(start)))
        if count < _FEWEST:
            raise _TooLongError
        return self._of_all(np.array([one() for _ in range(count)])) + self._offsets[:, None, None]

    def _of_all(self, mine: np.ndarray) -> np.ndarray:
        """The float64 arrays of all ranks, which have the same shape; shape (ranks, *shape)."""
        every = gather_small(self.transport, np.ascontiguousarray(mine).reshape(-1).view(np.uint8), mine.nbytes)
        return np.array([row.view(np.float64).reshape(mine.shape) for row in every])

    def _round(self) -> None:
        """What sessions do between calls: an exchange of a few bytes."""
        gather_small(self.transport, np.zeros(8, np.uint8), 8)

    def _compare_clocks(self) -> None:
        """Find out anew how far the other machines' clocks are from rank 0's, if that is long ago."""
        now = self._agreed_time(0.0)
        if now - self._read < _CLOCK_SECONDS:
            return
        self._read = now
        offsets = self._of_all(np.array([clocks.read(self.transport).offset]))[:, 0]
        topology = self.transport.topology
        self._offsets = offsets[[topology.machines[machine][0] for machine in topology.machine_of]]

    def _agreed_time(self, since: float) -> float:
        """Seconds since a moment, by rank 0's clock."""
        return float(self._of_all(np.array([time.perf_counter() - since]))[0, 0])

    def _allow(self, kind: str) -> None:
        """Begin with a kind of measurement: until when it may take."""
        kinds = list(_SHARES)
        until = sum(_SHARES[k] for k in kinds[: kinds.index(kind) + 1])
        self._deadline = until * self.request.seconds

    def _left(self) -> float:
        """Seconds left for this kind."""
        return max(0.0, self._deadline - self._agreed_time(self._start))


class _TooLongError(Exception):
    """A point would take more time than there is for it."""


def _guess(known: Mapping[int, float], size: int) -> float:
    """What a visit will take, by the line through the two next smaller sizes; 0 if fewer are known."""
    smaller = sorted(other for other in known if other < size)[-2:]
    if len(smaller) < 2:
        return 0.0
    low, high = smaller
    return known[high] + max(0.0, known[high] - known[low]) * (size - high) / (high - low)


def _telescoped(marks: np.ndarray) -> np.ndarray:
    """Seconds from when the last rank began a step until the last one has ended it, shape (passes, steps).

    Args:
        marks: beginnings and ends, shape (ranks, passes, steps, 2).
    """
    ends = np.max(marks, axis=0)
    return np.maximum(ends[..., 1] - ends[..., 0], 0.0)


def _known(strategy: Strategy, count: int, n: int, profile: Profile, lanes: str) -> float:
    """Seconds of synchronising some tensors of n elements that are there at once, by the timeline.

    What is measured is a session without a plan: it has no schedule to follow, so the order is ``fifo``.
    """
    trace = Trace(tuple(TracedTensor(str(k), n, 0.0) for k in range(count)))
    problem, choice = evaluated(Plan(default=strategy), trace, profile, lanes=lanes, order="fifo")
    return problem.timeline.seconds(choice)


def _shared_out(rows: np.ndarray) -> tuple[tuple[float, float, float], float]:
    """The call, tensor and byte, none below 0, that explain calls best, and the sum of squares of relative errors.

    Args:
        rows: (tensors, bytes, seconds to be explained, what errors are relative to).
    """
    a = np.stack([np.ones(len(rows)), rows[:, 0], rows[:, 1]], axis=1) / rows[:, 3:]
    (call, tensor, byte), least = overlapping.nonnegative(a, rows[:, 2] / rows[:, 3])
    return (float(call), float(tensor), float(byte)), least


def _steeper(curve: Curve, slope: float) -> Curve:
    """A curve to which ``slope`` seconds are added for each byte."""
    values = tuple(value + slope * knot for knot, value in zip(curve.knots, curve.values))
    samples = tuple(Sample(s.size, s.seconds + slope * s.size, s.spread, s.repeats) for s in curve.samples)
    return replace(curve, values=values, samples=samples)


# --- single passes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tour:
    """A route, and for each step of its schedule the move that it tells about."""

    route: Route
    keys: tuple[Move | None, ...]

    @property
    def method(self) -> Compressor | None:
        """What makes the payloads."""
        return compressors.get(_CARRIER) if self.route.compressed else None

    def elements(self, nbytes: int) -> int:
        """Elements of a tensor that is so many bytes on its way."""
        return max(1, nbytes // (2 if self.route.compressed else 4))

    def program(self, transport: Transport, nbytes: int) -> Program:
        """The route made ready."""
        return Program(transport, self.route, self.method, self.elements(nbytes), "float32")


def _keys(route: Route, topology: Topology) -> tuple[Move | None, ...]:
    """The moves along a route, as the profile names them; None for encodes and decodes."""
    found: list[Move | None] = []
    one_goes_on = False
    for step in route.steps:
        if not isinstance(step, Collective):
            found.append(None)
            continue
        if step.level == "intra":
            one_goes_on = CLOSING.get(step.op) == "broadcast" and topology.lanes > 1
        found.append((step.op, step.level, step.level == "inter" and one_goes_on))
    return tuple(found)


def _members(topology: Topology, level: Level) -> int:
    """Ranks that communicate with each other at a level, on the smallest machine."""
    return {"flat": topology.size, "intra": topology.lanes, "inter": len(topology.machines)}[level]


def _marks(stages: Iterator[Stage]) -> list[float]:
    """Carry the steps out; returns when each began, which is when the one before ended, and when it ended."""
    marks = [time.perf_counter()]
    for stage in stages:
        for _ in stage.turns():
            pass
        marks += [time.perf_counter()] * 2
    return marks[:-1]


def _finish(stage: Stage, where: DeviceKind) -> None:
    """Carry out an encode or a decode to its end."""
    for _ in stage.turns():
        pass
    if where == "gpu":
        device.drain()


def _meeting(transport: Transport) -> Callable[[], None]:
    """What lets the ranks of each machine wait for each other: the least that a collective among them does."""
    group, scene = transport.machine, collective.Scene(transport.topology, "intra", False)
    region = (Dense(0, 1),) * len(group)
    move = collective.Move(scene, group, group.index(transport.rank), region, "float32", reduction.Rule("sum"))
    action = collective.operations()["allreduce"].bind(transport, move)
    data = collective.Data(np.zeros(1, np.float32), "float32", transport.workspace)

    def meet() -> None:
        for _ in action(data):
            pass

    return meet if len(group) > 1 else lambda: None


def _multiply(stage: Stage) -> None:
    """Do as if an allgather had brought a payload of each member."""
    data, move = stage.data, stage.step.move  # type: ignore[union-attr]
    own = data.payload
    every = data.workspace.other_payload(own, own.size * len(move.group))
    for member in range(len(move.group)):
        device.copy(every[member * own.size : (member + 1) * own.size], own)
    data.payload = every


@dataclass
class _Pair:
    """The transport as one of two ranks would see it that nobody else talks to."""

    transport: Transport
    topology: Topology
    rank: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


def _pair(transport: Transport) -> Any:
    return _Pair(transport, Topology(((0, 1),)), 0)


def _nbytes(step: Any) -> int:
    """Bytes that this rank puts into a collective: the root, into a broadcast."""
    if not isinstance(step, MoveStep):
        return 0
    before, move = step.move.before, step.move
    held = before[move.scene.root] if step.op == "broadcast" else before[move.index]
    return _size(held, move.bytes_of)


def _size(state: State, bytes_of: Callable[[Any], int]) -> int:
    if isinstance(state, Packed):
        return sum(part.nbytes for copy in state.copies for part in copy)
    return bytes_of(state)


def _job(method: Compressor | None, n: int) -> Job:
    feedback = NO_FEEDBACK if method is None else AUTO.resolved(method, n)
    return Job("measuring", {}, feedback, seed=0, step=0)


def _normal(n: int, seed: int) -> np.ndarray:
    """Normal float32 values."""
    return np.random.default_rng(seed).standard_normal(n, np.float32)


def _copied(target: Any, source: Any) -> None:
    device.copy(target, source)
    device.drain()


# --- surroundings -----------------------------------------------------------------------------------------------------


def _surroundings(
    transport: Transport, request: _Request, left_out: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The environment of rank 0, and the fingerprint: what a plan made with these figures depends on.

    What changes from job to job on the same cluster (hosts, date) is in the environment alone, and so is what changes
    the speed of kernels by little (the versions of Python and numba).
    """
    facts = environment.environment()
    mine = {"environment": facts, "cpu": facts["cpu"]}
    every = documents(transport, _json(mine))
    mpi = every[0]["environment"]["mpi"]
    here = {**every[0]["environment"], "left_out": list(left_out), "hosts": sorted(set(transport.hosts))}
    fingerprint = {
        "machines": len(transport.topology.machines),
        "ranks_per_machine": transport.topology.lanes,
        "mpi": f"{mpi['library']} {mpi['version']}",
        "espresso_mpi": environment.version("espresso-mpi"),
        "devices": list(request.devices),
        "cpu": ", ".join(sorted({note["cpu"] for note in every})),
    }
    return here, fingerprint
