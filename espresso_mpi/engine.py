"""The engine: calls come in, ranks agree which of them run next, and their tensors travel side by side.

Every rank takes the same turns: in each, one more segment starts and those under way go on. What starts next is agreed
in *rounds*: each rank says by a bit which calls it has, and those that all have are run, by priority and then in the
order in which the ranks first met them. So ranks may make their calls in any order. The thread that waits drives the
engine; while nobody waits, a thread of the engine's own does.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import and_, or_
from typing import Any

import numpy as np

from . import buffers, device, express
from .batches import Batch, Bucket, Item, buckets_of, grouped, mixed
from .buffers import Gradient
from .collectives import ranges, reduction
from .collectives.agreement import documents, floats, gather_small
from .collectives.executor import Job, Program
from .collectives.lanes import OnLanes
from .collectives.standstill import THREAD
from .collectives.transport import Transport
from .collectives.turns import InTurns, Segment, Turns, interleave
from .collectives.waiting import sharpen_naps
from .errors import ConfigError, EspressoError, MismatchError, NonFiniteError, PlanError, RemoteError, StateError
from .feedback import NO_FEEDBACK
from .fusion import Buffer
from .guard import Check, Watch
from .memory import Keeping
from .options import Options
from .parking import Parking
from .trace import Recorder
from .types import Route
from .verdicts import Call, Content, absent_error, conflict_error, non_finite_text, problem_error, spelled, stuck_error

_LOG = logging.getLogger("espresso_mpi")

_NEWS, _BLOCKED, _STUCK, _EXPRESS = 1, 2, 4, 8
_LOOK_AGAIN = 8
"""Turns after which ranks look for new calls although segments still wait to start: one of them may be more urgent."""

_LOOK_AT_IDLE = 3
"""The same where none waits to start: a segment is under way for about so many turns more, and a round costs as much
as some of them."""

_GRACE = 1.0
"""Seconds in which no rank may have been able to go on until that counts as an error: another thread may still call."""

_IDLE = 1.0
"""Seconds without work after which the engine's thread ends; the next push starts another."""

_PAUSE = 0.5e-3
"""Seconds until ranks without a common call compare theirs again."""

_FRUITLESS = int(_GRACE / _PAUSE)
"""Rounds in a row without a common call after which operations no longer wait for gradients that should come first."""

_KNOWN = 1 << 14
"""Calls that ranks know by number; each costs a bit of every header."""

_ARRANGEMENTS, _PROGRAMS = 256, 4096
"""How many of these are kept: which small tensors share a buffer may differ from step to step."""

_ARRANGED = 512
"""Calls of the largest arrangement that is kept: the more calls run together, the less likely just they meet again."""


class Unit:
    """One call on this rank: tensors handed over together, and what becomes of them.

    Attributes:
        call: what the calls of the ranks are matched by; title: the call in messages.
        given, gradients, batch: what the caller passed, the flat arrays over it, and what is known about them.
        problem: why this rank cannot make the call; bad: what is odd about its values, see ``ranges.Said``.
        large: positions of dense tensors whose sums could leave their range, as all ranks know when the call starts.
        priority: the higher, the sooner.
        action: run by itself, when nothing else is under way, once all ranks have made the call.
        gpu: the number of the GPU that the tensors are on.
        number: the call's bit in headers, once all know it; told: whether the others were told what is new about it;
            noticed: whether the log was told that it waits for long.
        since: when it was made.
        left: buckets that are not finished yet; parked: tensors that wait for the rest of their group.
        finished, error, result: how it ended.
        watch: finds tensors that the caller changes meanwhile; None where nobody could.
    """

    def __init__(
        self,
        call: Call,
        given: Any = None,
        gradients: Sequence[Gradient] = (),
        batch: Batch | None = None,
        problem: EspressoError | None = None,
        priority: float = 0.0,
        action: Callable[[], Any] | None = None,
        title: str = "",
        gpu: int | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.call, self.given, self.gradients, self.batch = call, given, list(gradients), batch
        self.title = title or spelled(call)
        self.problem, self.priority, self.action = problem, priority, action
        self.gpu, self.watch = gpu, watch
        self.number: int | None = None
        self.bad: dict[str, str] = {}
        self.large: frozenset[int] = frozenset()
        self.told = self.noticed = False
        self.since = time.perf_counter()
        self.left = self.parked = 0
        self.finished = False
        self.error: BaseException | None = None
        self.result: Any = given

    @property
    def content(self) -> Content:
        """What other ranks must have as well."""
        tensors = tuple((g.spec.name, str(g.spec), g.spec.device) for g in self.gradients)
        return Content(self.call, self.priority, tensors, self.batch.digest.hex() if self.batch else "")

    @property
    def key(self) -> tuple[Any, ...]:
        """Short for ``content``."""
        return (self.call, self.priority, self.batch.digest if self.batch else b"")


class Engine:
    """Runs the calls of one session.

    Args:
        transport: for this engine alone.
        keeping: residuals and counters; changed by every step.
    """

    def __init__(self, transport: Transport, options: Options, keeping: Keeping, recorder: Recorder) -> None:
        self._transport, self._options, self.keeping, self._recorder = transport, options, keeping, recorder
        self.tally: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self._dropped = False
        self.skipped_calls = 0
        self._dense_steps: Counter[str] = Counter()
        self.seed = options.seed
        self.broken: BaseException | None = None
        self._changed, self._driver = threading.Condition(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._callers = 0
        self._inbox: list[Unit] = []
        self._unfinished: dict[int, Unit] = {}
        self._declared: dict[Call, deque[Unit]] = {}
        self._doomed: dict[Call, deque[EspressoError]] = {}
        self._contents: list[Content] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._bits: dict[Call, int] = {}
        self._rivals = 0
        self._bad: dict[int, dict[int, dict[str, str]]] = {}
        self._runner = self._runner_of(options)
        self._outdated = False
        self._running: dict[Unit, None] = {}
        self._actions: list[Unit] = []
        self._parked: Parking[Unit] = Parking()
        self._latest: dict[str, list[int]] = {}
        self._search = ranges.Search(transport.topology)
        self._quiet = self._all_wait = False
        self._fruitless = 0
        self._since_round = 0
        self._stuck_since: float | None = None
        self._progress = time.perf_counter()
        self._arrangements: dict[tuple[int, ...], tuple[Bucket, ...]] = {}
        self._small: dict[int, Bucket | None] = {}
        self._programs: dict[tuple[Any, ...], Program] = {}
        self._fuse_bytes = options.fusion
        self._gpu: int | None = None
        transport.waiter.interrupted, transport.whereabouts.calls = self._interrupted, self._unfinished

    def follow(self, options: Options, keeping: Keeping) -> None:
        """Go on by another plan; nothing may be under way. All ranks must do it between the same calls."""
        if options.fusion != self._options.fusion:  # what was measured is measured once
            self._fuse_bytes = options.fusion
        self._options, self.keeping = options, keeping
        self._arrangements.clear()
        self._small.clear()
        self._parked = Parking()  # it knows the groups of the plan before
        self._outdated = True
        if not self._runner.busy:  # else what is under way goes on as it began: a recording ended by an error
            self._renew_runner()

    def _renew_runner(self) -> None:
        self._runner, self._outdated = self._runner_of(self._options), False
        self._transport.forget_kinds()

    def _runner_of(self, options: Options) -> OnLanes | InTurns:
        """How segments go on: by the schedule of the plan, if it has one."""
        schedule = options.plan and options.plan.schedule
        return OnLanes(schedule, _LOG.warning if self._transport.rank == 0 else _say_nothing) if schedule else InTurns()

    # --- calls --------------------------------------------------------------------------------------------------------

    def submit(self, unit: Unit, background: bool = False) -> Unit:
        """Take a call in; ``background``: start on it even if nobody waits."""
        with self._changed:
            self.require_usable()
            self._unfinished[id(unit)] = unit
            self._inbox.append(unit)
            if background and self._thread is None:
                thread = threading.Thread(target=self._work, name=THREAD, daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify_all()
        return unit

    def wait(self, unit: Unit) -> Any:
        """The result of a call; what it raises is raised here."""
        self.wait_for(lambda: unit.finished)
        if unit.error is not None:
            raise unit.error
        return unit.result

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Drive the engine, or let its thread drive it, until something is done."""
        if done():
            return
        self._count_callers(1)
        try:
            while not done():
                self._drive_or_wait(done)
        finally:
            self._count_callers(-1)

    def _count_callers(self, change: int) -> None:
        with self._changed:
            self._callers += change
            self._transport.waiter.background = self._callers == 0  # then the process computes meanwhile
            self._transport.whereabouts.callers = self._callers

    def _drive_or_wait(self, done: Callable[[], bool]) -> None:
        if not self._driver.acquire(blocking=False):
            with self._changed:
                self._changed.wait_for(lambda: done() or not self._driver.locked(), timeout=0.1)
            return
        try:
            self._drive(done)
        finally:
            self._driver.release()
            with self._changed:
                self._changed.notify_all()

    def require_usable(self) -> None:
        """Raise EspressoError if ranks may be out of step."""
        if self.broken is not None:
            cure = self.broken.cure if isinstance(self.broken, _Left) else "open a new one"
            raise EspressoError(f"this session cannot be used any more: {self._why()}; {cure}")

    def _why(self) -> str:
        error = self.broken
        return str(error) if isinstance(error, _Left) else f"it failed: {type(error).__name__}: {error}"

    @property
    def busy(self) -> bool:
        """Whether calls are not finished yet."""
        return bool(self._unfinished)

    def _has_work(self) -> bool:
        """Whether a turn would do anything."""
        return bool(self._inbox or self._runner.busy or self._actions or self._declared)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """What the engine's own thread does: drive while there is something to do, end after a while without."""
        sharpen_naps()
        while True:
            with self._changed:
                woken = self._changed.wait_for(lambda: self._stopping or self._has_work(), timeout=_IDLE)
                if self._stopping or not woken:
                    self._thread = None
                    return
            with self._driver:
                self._drive(lambda: False)
            with self._changed:
                self._changed.notify_all()

    def leave(self, why: str, tell: bool = True, cure: str = "open a new one") -> None:
        """Stop without waiting for anybody; ``tell`` the other ranks if they may be waiting for this one."""
        self._stopping = True
        if self.broken is None:
            self._break(_Left(why, cure), tell)
        with self._changed:
            self._changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)
            if thread.is_alive():
                _LOG.warning("the engine's thread is still at work; the end of MPI may not be clean")

    def forked(self, why: str, cure: str) -> None:
        """This process is a fork: it has no thread of the engine, and nobody here releases what that one held."""
        self._changed, self._driver, self._thread, self._stopping = threading.Condition(), threading.Lock(), None, True
        self._recorder.forked()
        self._break(_Left(why, cure), tell=False)

    def _interrupted(self) -> None:
        """Called while waiting for other ranks."""
        if self._stopping:
            raise _Left("it was left")
        self._transport.check_abort()

    # --- driving ------------------------------------------------------------------------------------------------------

    def _drive(self, done: Callable[[], bool]) -> None:
        """Take turns until something is done or nothing is left to do."""
        try:
            if self._gpu is not None:
                device.use_gpu(self._gpu)
            while self.broken is None and not done() and self._turn():
                pass
        except BaseException as error:
            self._break(error, tell=not isinstance(error, (RemoteError, _Left)))
            if not isinstance(error, Exception):
                raise

    def _turn(self) -> bool:
        """One turn; False if this rank has nothing to do."""
        self._take_in()
        idle = not self._runner.busy
        if idle and self._actions:
            self._act(self._actions.pop(0))
            return True
        if idle and not self._declared and not (self._callers and self._parked.count):
            return False
        if self._time_for_a_round(idle):
            self._round()
        self._since_round += 1
        all_here = self._quiet or self._all_wait or bool(self._actions) or self._fruitless > _FRUITLESS
        if not self._runner.turn(all_here) and self._runner.busy:  # it waits for what is still to come
            self._since_round = _LOOK_AGAIN
            self._nap()
        return True

    def _time_for_a_round(self, idle: bool) -> bool:
        """The same on all ranks, but where nothing is under way: then those with calls begin."""
        if idle:
            return True
        if self._quiet or self._actions:
            return False
        return self._since_round >= (_LOOK_AGAIN if self._runner.waiting else _LOOK_AT_IDLE)

    def _act(self, unit: Unit) -> None:
        assert unit.action is not None
        try:
            if self._parked.count and unit.call[0] != "close":
                missing = ", ".join(map(repr, self._parked.absent()))
                raise ConfigError(
                    f"{unit.title}: tensors are still under way, which wait for {missing} of their group; call "
                    f"wait_all() before it"
                )
            unit.result = unit.action()
        except (ConfigError, MismatchError, PlanError, StateError) as error:  # on all ranks alike: it can go on
            unit.error = error
        self._finish(unit)

    def _break(self, error: BaseException, tell: bool) -> None:
        """Ranks may be out of step from here on: all calls fail, here and on the other ranks."""
        with self._changed:  # no call comes in from here on
            first, self.broken = self.broken is None, self.broken or error
        if first and tell:
            me = self._transport.describe(self._transport.rank)
            text = str(error) if isinstance(error, _Left) else f"{type(error).__name__}: {error}"
            self._transport.abort(f"{me}: {text}")
        units = list(self._unfinished.values())
        under_way = self._runner.clear()
        if units or under_way:  # messages under way may still be written to them
            self._transport.outlive([units, under_way])
        self._inbox, self._declared, self._running, self._actions = [], {}, {}, []
        for unit in units:
            unit.error = error if not isinstance(error, _Left) else EspressoError(f"session: {error}")
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        if unit.error is None and unit.gradients:
            if unit.gpu is not None:
                device.drain()  # whoever reads on any stream finds finished data
            unit.result = buffers.rebuild(unit.given, unit.gradients)
            if unit.watch is not None:
                unit.watch.written()
        with self._changed:
            unit.gradients, unit.given = [], None
            unit.finished = True
            self._unfinished.pop(id(unit), None)
            self._changed.notify_all()

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Declare what came in, unless another rank's half of the call has failed before."""
        if not self._inbox:
            return
        with self._changed:
            units, self._inbox = self._inbox, []
        for unit in units:
            doomed = self._doomed.get(unit.call)
            if doomed:
                unit.error = doomed.popleft()
                self._finish(unit)
                continue
            if unit.gpu is not None:
                self._gpu = unit.gpu
                device.use_gpu(unit.gpu)  # this may not be the caller's thread
                device.synchronize()  # whatever stream the caller's kernels are on
            if unit.batch is not None and unit.problem is None:
                self._look_for_non_finite(unit, unit.batch)
            self._declared.setdefault(unit.call, deque()).append(unit)

    def _look_for_non_finite(self, unit: Unit, batch: Batch) -> None:
        """NaN and infinity (or what is that in the float32 of a compressor), and values too large to be summed."""
        start = time.perf_counter()
        unit.bad = self._search.odd_values(batch.portions, [gradient.array for gradient in unit.gradients])
        self._recorder.add("check", "", 0, 0, start, time.perf_counter())

    def _round(self) -> None:
        """Learn which calls the other ranks have, and start those that all have."""
        front = [units[0] for units in self._declared.values()]
        if front:
            self._transport.waiter.what = front[0].title
        start, waited, sent = time.perf_counter(), self._transport.waiter.waited, self._transport.sent
        flags, masks, notes, messages = self._compare(front)
        stop, waited = time.perf_counter(), self._transport.waiter.waited - waited
        self._recorder.add("agree", "", 0, 0, start, stop)
        if waited > 0:
            self._recorder.add("wait", "", 0, 0, start, min(stop, start + waited))
        if messages and not notes and all(flag & _EXPRESS for flag in flags) and len(set(masks)) == 1:
            self._run_express(front[0], messages, sent)
            return
        for rank, note in notes:
            self._hear(rank, note, masks)
        for unit in front:
            unit.number = self._numbers.get(unit.key)
        failed = self._fail_broken(notes, masks)
        failed = self._fail_conflicts(masks) or failed
        common, union = reduce(and_, masks), reduce(or_, masks)
        everyone_blocked = all(flag & _BLOCKED for flag in flags)
        self._quiet, self._since_round = everyone_blocked and common == union, 0
        self._all_wait, self._fruitless = everyone_blocked, 0 if common else self._fruitless + 1
        if common:
            self._start(common)
        if common or failed or self._runner.busy:
            self._stuck_since, self._progress = None, time.perf_counter()
        else:
            self._require_patience(front, masks)
            self._without_progress(everyone_blocked and all(flag & _STUCK for flag in flags), everyone_blocked, masks)

    def _compare(self, front: Sequence[Unit]) -> tuple[list[int], list[int], list[tuple[int, Any]], list[np.ndarray]]:
        """Every rank's flags and the bits of its calls, (rank, note) of what is new, and everyone's message."""
        for unit in front:
            if unit.number is None:
                unit.number = self._numbers.get(unit.key)
        news = [unit for unit in front if not unit.told and (unit.number is None or unit.bad or unit.problem)]
        idle = not self._runner.busy
        if idle and len(self._contents) >= _KNOWN:
            self._forget(front)
        size = self._header_size
        small = self._express(front) if idle and not news else None
        flag = _NEWS * bool(news) | _BLOCKED * (self._callers > 0) | _STUCK * self._stuck() | _EXPRESS * bool(small)
        mine = [unit.number for unit in front if unit.number is not None and unit.problem is None]
        message = np.frombuffer(bytes([flag]) + _bits_of(mine, size - 1), np.uint8)
        if small:
            message = express.packed(message, self._arrays(front[0], small))
        messages = gather_small(self._transport, message, express.room(size) if idle else size)
        rows = [row[:size].tobytes() for row in messages]
        flags, masks = [row[0] for row in rows], [int.from_bytes(row[1:], "little") for row in rows]
        notes: list[tuple[int, Any]] = []
        if any(flag & _NEWS for flag in flags):
            text = json.dumps([_note(unit) for unit in news]).encode()
            notes = [(rank, n) for rank, found in enumerate(documents(self._transport, text)) for n in found]
            for unit in news:
                unit.told = True
        return flags, masks, notes, messages

    def _forget(self, front: Sequence[Unit]) -> None:
        """Let all ranks learn the calls anew: where they differ from step to step, most will never come again."""
        for known in (self._contents, self._numbers, self._bits, self._small, self._bad, self._arrangements):
            known.clear()
        self._rivals = 0
        for unit in front:
            unit.number, unit.told = None, False

    @property
    def _header_size(self) -> int:
        """Flags, and a bit for each call that the ranks know."""
        return 1 + (len(self._contents) + 7) // 8

    def _express(self, front: Sequence[Unit]) -> Bucket | None:
        """The bucket of the only call of this rank, if it is so small that it goes along with the header."""
        if len(front) != 1 or front[0].number is None or self._actions or self._options.debug:
            return None
        number = front[0].number
        if number in self._bad:  # known to all ranks from a round before
            return None
        if number not in self._small:
            buckets = self._arrangements.get((number,), ())  # settled when the call went the long way, the first time
            ok = len(buckets) == 1 and express.fits(buckets[0], self._transport.topology)
            if not buckets:
                return None
            self._small[number] = buckets[0] if ok and not any(i.group for i in front[0].batch.items) else None  # type: ignore[union-attr]
        bucket, memory = self._small[number], self.keeping.memory
        owed = bucket is not None and any(memory.owes(item.spec.name, item.spec.size) for _, item in bucket.members)
        return None if owed else bucket

    @staticmethod
    def _arrays(unit: Unit, bucket: Bucket) -> list[Any]:
        return [unit.gradients[item.index].array for _, item in bucket.members]

    def _run_express(self, unit: Unit, messages: Sequence[np.ndarray], before: Mapping[str, int]) -> None:
        """All ranks sent the data of this one call with their headers; ``before``: bytes sent until then."""
        bucket = self._express([unit])
        assert bucket is not None
        start, step = time.perf_counter(), self._dense_steps[bucket.name]
        arrays = self._arrays(unit, bucket)
        express.unpack_mean(messages, self._header_size, bucket, self._transport.topology, arrays)
        intra, inter = (self._transport.sent[level] - before[level] for level in ("intra", "inter"))
        self._recorder.add("wire", bucket.name, step, 0, start, time.perf_counter(), "express", "flat", intra, inter)
        self._dense_steps[bucket.name] += 1
        self._next_of(unit.call)
        self._quiet, self._since_round, self._stuck_since, self._progress = True, 0, None, time.perf_counter()
        del arrays
        self._finish(unit)

    def _hear(self, rank: int, note: Mapping[str, Any], masks: list[int]) -> None:
        """A call that a rank brings for the first time, or with values that are not finite."""
        if note["problem"]:
            return
        content = Content.read(note)
        key = (content.call, content.priority, bytes.fromhex(content.digest))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._contents)
            self._contents.append(content)
            known = self._bits.get(content.call, 0)
            self._bits[content.call] = known | 1 << number
            if known:
                self._rivals |= known | 1 << number
        masks[rank] |= 1 << number
        if note["bad"]:
            self._bad.setdefault(number, {})[rank] = note["bad"]

    def _fail_broken(self, notes: Sequence[tuple[int, Any]], masks: list[int]) -> bool:
        """Calls that a rank could not make fail on all ranks."""
        said: dict[Call, list[tuple[int, Any]]] = {}
        for rank, note in notes:
            if note["problem"]:
                said.setdefault((note["call"][0], note["call"][1]), []).append((rank, note["problem"]))
        for call, problems in said.items():
            self._fail(call, problem_error(problems, len(masks), self._transport.describe), masks)
        return bool(said)

    def _fail_conflicts(self, masks: list[int]) -> bool:
        """Calls of one name that differ between ranks fail on all ranks."""
        rest = reduce(or_, masks) & ~reduce(and_, masks) & self._rivals
        calls = {self._contents[number].call for number in _numbers_in(rest)}
        found = False
        for call in sorted(calls):
            mine = {rank: mask & self._bits[call] for rank, mask in enumerate(masks) if mask & self._bits[call]}
            if len(set(mine.values())) > 1:
                contents = {rank: self._contents[_numbers_in(bits)[0]] for rank, bits in mine.items()}
                self._fail(call, conflict_error(contents, self._transport.describe), masks)
                found = True
        return found

    def _fail(self, call: Call, error: EspressoError, masks: list[int]) -> None:
        """The call that is next on each rank fails, also where it is still to come."""
        bits = self._bits.get(call, 0)
        for rank, mask in enumerate(masks):
            masks[rank] = mask & ~bits
        for number in _numbers_in(bits):
            self._bad.pop(number, None)
        if call not in self._declared:
            self._doomed.setdefault(call, deque()).append(error)
            return
        unit = self._next_of(call)
        unit.error = error
        self._finish(unit)

    def _next_of(self, call: Call) -> Unit:
        """Take the first of the declared calls of that name."""
        units = self._declared[call]
        unit = units.popleft()
        if not units:  # every round looks at what is there
            del self._declared[call]
        return unit

    def _stuck(self) -> bool:
        return self._stuck_since is not None and time.perf_counter() - self._stuck_since > _GRACE

    def _require_patience(self, front: Sequence[Unit], masks: Sequence[int]) -> None:
        """Raise RankTimeoutError if a rank that answers has not made a call of this one for too long."""
        waiter, now = self._transport.waiter, time.perf_counter()
        for unit in front:
            waited = now - max(unit.since, self._progress)
            if unit.number is None or waited < min(waiter.notice, waiter.timeout):
                continue
            missing = [rank for rank, mask in enumerate(masks) if not mask >> unit.number & 1]
            if waited > waiter.timeout:
                raise absent_error(waiter.timeout, unit.title, missing, self._transport.describe)
            if not unit.noticed:
                unit.noticed = True
                waiter.say(waited, missing, unit.title)

    def _without_progress(self, all_stuck: bool, all_blocked: bool, masks: Sequence[int]) -> None:
        """No call is common to all ranks and nothing is under way."""
        if all_stuck and self._parked.count and self._options.tuning is not None:
            self._dissolve_groups()
            return
        if all_stuck:
            calls = {r: [self._contents[i].call for i in _numbers_in(mask)] for r, mask in enumerate(masks)}
            self._give_up_calls(stuck_error(calls, list(self._parked.absent()), self._transport.describe))
            return
        if not all_blocked:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = time.perf_counter()
        self._nap()

    def _nap(self) -> None:
        """Let a moment pass, or the time until a call comes in."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._inbox) or self._stopping, timeout=_PAUSE)

    def _dissolve_groups(self) -> None:
        """Of a plan that the session made nobody asked for the groups: a step may lack some of their tensors."""
        if self._transport.rank == 0:
            missing = ", ".join(map(repr, self._parked.absent()))
            _LOG.info("the plan's groups miss %s: their other tensors travel alone from now on", missing)
        self._stuck_since, self._progress = None, time.perf_counter()
        self._queue_runs([self._group_run([part]) for part in self._parked.dissolve()])

    def _give_up_calls(self, error: EspressoError) -> None:
        """All calls that wait fail; the session can go on, for nothing is under way."""
        units = [*itertools.chain.from_iterable(self._declared.values()), *self._running]
        self._declared, self._running, self._bad, self._stuck_since = {}, {}, {}, None
        self._parked.clear()
        for unit in units:
            unit.error = error
            self._finish(unit)

    # --- starting -----------------------------------------------------------------------------------------------------

    def _start(self, common: int) -> None:
        """Queue the tensors of the calls that all ranks have made."""
        if self._outdated and not self._runner.busy:
            self._renew_runner()
        numbers = sorted(_numbers_in(common), key=lambda number: (-self._contents[number].priority, number))
        units, going = [], []
        for number in numbers:
            unit = self._next_of(self._contents[number].call)
            if unit.number != number:
                raise AssertionError("the call that all ranks have is not the next one here")
            units.append(unit)
            if unit.action is not None:
                self._actions.append(unit)
                continue
            skip = self._settle_non_finite(number, unit)
            if skip is not None:
                going.append((number, unit, skip))
        if going:
            self._queue_buckets([n for n, _, _ in going], [u for _, u, _ in going], [s for _, _, s in going])

    def _settle_non_finite(self, number: int, unit: Unit) -> frozenset[int] | None:
        """Positions to skip; None if the call fails."""
        bad, unit.large = ranges.told_apart(self._bad.pop(number, {}))
        if not bad:
            return frozenset()
        text = non_finite_text(self._contents[number], bad, self._transport.describe)
        if self._options.nonfinite == "raise":
            unit.error = NonFiniteError(
                text + "; lower the loss scale or the learning rate, or pass nonfinite='skip', or 'skip_all' if a loss "
                "scaler is to hear of it"
            )
            self._finish(unit)
            return None
        skip, how = frozenset(int(position) for counts in bad.values() for position in counts), "skipped"
        if self._options.nonfinite == "skip_all" and unit.batch is not None:
            skip, how = frozenset(item.index for item in unit.batch.items), "skipped with all tensors of the call"
            self.skipped_calls += 1
        for position in skip:
            self.skipped[unit.gradients[position].spec.name] += 1
        if self._transport.rank == 0:
            _LOG.warning("%s: %s: %s", unit.title, how, text)
        return skip

    def _queue_buckets(self, numbers: Sequence[int], units: Sequence[Unit], skips: Sequence[frozenset[int]]) -> None:
        self._running.update(dict.fromkeys(units))
        if any(unit.gpu is not None for unit in units):
            self._transport.choose_device_way()
        batches = [unit.batch for unit in units if unit.batch is not None]
        runs = [(bucket, *_brought(bucket, units, skips)) for bucket in self._arranged(tuple(numbers), batches)]
        self._queue_runs([*runs, *self._unparked(units, batches, skips)], units)

    def _queue_runs(self, runs: Sequence[tuple[Bucket, list[Unit], list[bool]]], new: Sequence[Unit] = ()) -> None:
        """Queue buckets; ``new``: the calls that start now, some of which may have nothing in them."""
        for _, members, _ in runs:
            for unit in dict.fromkeys(members):
                unit.left += 1
        for unit in new:
            if unit.left == 0:
                self._done(unit)
        for bucket, members, skip in runs:
            self._queue_bucket(bucket, members, skip)

    def _arranged(self, numbers: tuple[int, ...], batches: Sequence[Batch]) -> tuple[Bucket, ...]:
        found = self._arrangements.get(numbers)
        if found is None:
            if len(self._arrangements) >= _ARRANGEMENTS:
                self._arrangements.clear()
            limit = self._fusion_limit(batches)
            room = max(limit, self._options.segment_bytes)
            found = buckets_of(batches, limit, room)
            if len(numbers) <= _ARRANGED:
                self._arrangements[numbers] = found
        return found

    def _unparked(
        self, units: Sequence[Unit], batches: Sequence[Batch], skips: Sequence[frozenset[int]]
    ) -> list[tuple[Bucket, list[Unit], list[bool]]]:
        """The plan's groups that are complete now."""
        ready = []
        for unit, batch, skip in zip(units, batches, skips):
            found = [self._parked.add(unit, item, item.index in skip) for item in batch.items if item.group]
            found += [self._parked.add_empty(name, group) for name, group in batch.empty]
            ready += [self._group_run(members) for members in found if members]
        return ready

    def _group_run(self, members: Sequence[tuple[Unit, Item, bool]]) -> tuple[Bucket, list[Unit], list[bool]]:
        """What is compressed as one is skipped as one: only then its residual stays as it was."""
        bucket, skip = grouped([(0, item) for _, item, _ in members]), [skipped for _, _, skipped in members]
        if any(skip) and (bucket.compressor is not None or self._options.nonfinite == "skip_all"):
            self.skipped.update(item.spec.name for _, item, skipped in members if not skipped)
            skip = [True] * len(skip)
        return bucket, [unit for unit, _, _ in members], skip

    def _queue_bucket(self, bucket: Bucket, units: list[Unit], skip: list[bool]) -> None:
        owners = list(dict.fromkeys(units))
        problem = mixed(bucket) if len(owners) > 1 and bucket.members[0][1].group else None
        if problem is not None:
            for unit in owners:
                unit.error = unit.error or problem
            self._bucket_done(owners)
            return
        gradients = [unit.gradients[item.index] for unit, (_, item) in zip(units, bucket.members)]
        arrays, checks = [gradient.array for gradient in gradients], list[Check]()
        if any(skip) or any(unit.watch is not None and unit.watch.debug for unit in owners):
            for unit, gradient, skipped in zip(units, gradients, skip):
                check = unit.watch.check_of(gradient) if unit.watch is not None else None
                if skipped:
                    self._blank(gradient, check)
                elif check is not None:
                    checks.append(check)
        if all(skip):
            self._bucket_done(owners)
            return
        priority = max(unit.priority for unit in owners)
        large = any(unit.large for unit in owners) and any(
            item.index in unit.large for unit, (_, item) in zip(units, bucket.members)
        )
        for segment in self._segments(bucket, arrays, skip, owners, checks, large):
            self._runner.add(segment, priority)

    def _blank(self, gradient: Gradient, check: Check | None) -> None:
        """What a tensor that is skipped becomes."""
        if check is not None:
            check("before it was skipped")
        array, value = gradient.array, np.nan if self._options.nonfinite == "skip_all" else 0.0
        device.copy(array, reduction.filled(array.size, value, str(gradient.spec.dtype)))

    # --- one bucket ---------------------------------------------------------------------------------------------------

    def _segments(
        self,
        bucket: Bucket,
        arrays: Sequence[Any],
        skip: list[bool],
        owners: list[Unit],
        checks: Sequence[Check],
        large: bool,
    ) -> list[Segment]:
        """The segments of a bucket; the first makes its buffer, the last to end brings the result home."""
        shift = ranges.shift(bucket.dtype, self._transport.topology) if large and bucket.compressor is None else 0
        buffer = Buffer(bucket, arrays, skip, self._transport, self.keeping.memory, self.tally, checks, shift)
        counts = self._dense_steps if bucket.compressor is None else self.keeping.counts
        step = counts[bucket.name]
        counts[bucket.name] += 1
        if bucket.compressor is not None:
            self._warn_of_dropped(self.keeping.use(bucket.kept, bucket.sizes))
        program, keeping = self._program(bucket, step), self.keeping
        job = Job(
            bucket.name, keeping.memory, bucket.feedback, self.seed, step, keeping.weights, self.tally, bucket.kept
        )
        operations = program.operations(device.device_of(arrays[0])) if isinstance(self._runner, OnLanes) else ()
        kind = bucket.name if isinstance(self._runner, OnLanes) and self._runner.knows(bucket.name) else None
        before, left = self._latest.get(bucket.name), [program.count]
        self._latest[bucket.name] = left

        def turns_of_operations(number: int) -> Iterator[Turns]:
            if buffer.x is None:
                buffer.fill()
            yield from program.turns_of_operations(number, buffer.x, job, self._recorder, operations, kind)
            left[0] -= 1
            if left[0] == 0:
                if self._latest.get(bucket.name) is left:
                    del self._latest[bucket.name]
                buffer.empty()
                buffer.arrays, buffer.x, buffer.checks = (), None, ()  # from now on the caller's alone: see ``guard``
                self._bucket_done(owners)

        def free() -> bool:  # what is kept belongs to the step before until that ends
            return before is None or before[0] == 0

        return [
            Segment(bucket.name, number, turns_of_operations(number), free, operations)
            for number in range(program.count)
        ]

    def _warn_of_dropped(self, dropped: tuple[str, int] | None) -> None:
        """Once a session: a residual that is dropped is lost."""
        if dropped is not None and not self._dropped and self._transport.rank == 0:
            _LOG.warning(
                "%s comes in ever new sizes: what is kept of its oldest size, %d elements, is dropped, and so will be "
                "that of others; give tensors of different sizes different names, or do not compress them",
                *dropped,
            )
        self._dropped = self._dropped or dropped is not None

    def _bucket_done(self, owners: Sequence[Unit]) -> None:
        for unit in owners:
            unit.left -= 1
            if unit.left == 0:
                self._done(unit)

    def _done(self, unit: Unit) -> None:
        if unit.parked:
            return
        self._running.pop(unit, None)
        self._finish(unit)

    def _program(self, bucket: Bucket, step: int) -> Program:
        compressor = bucket.compressor and bucket.compressor.at(step)
        dtype = bucket.dtype if compressor is None else "float32"
        key = (bucket.compressor, compressor, bucket.strategy.route, bucket.size, dtype)
        program = self._programs.get(key)
        if program is None:
            final = None if bucket.compressor is None else bucket.compressor.at(None).nbytes(bucket.size)
            program = Program(
                self._transport,
                bucket.strategy.route,
                compressor,
                bucket.size,
                dtype,
                self._options.segment_bytes,
                final,
            )
            if len(self._programs) >= _PROGRAMS:
                self._programs.clear()
            self._programs[key] = program
        return program

    def _fusion_limit(self, batches: Sequence[Batch]) -> int:
        """Bytes below which dense tensors share a buffer: where copying in and out costs less than a collective."""
        dense = sum(1 for batch in batches for item in batch.items if item.compressor is None)
        if self._fuse_bytes is None and dense > 1:
            route = next(i.strategy.route for b in batches for i in b.items if i.compressor is None)
            self._fuse_bytes = measured_fusion(self._transport, route)
            if self._transport.rank == 0:
                _LOG.info("dense tensors below %d bytes share a buffer (measured)", self._fuse_bytes)
        return self._fuse_bytes or 0


class _Left(EspressoError):  # noqa: N818 - a state, not a failure
    """The session was closed or left on this rank."""

    def __init__(self, why: str, cure: str = "open a new one") -> None:
        super().__init__(why)
        self.cure = cure


def measured_fusion(transport: Transport, route: Route) -> int:
    """The bytes whose copying in and out of a buffer takes as long as a collective on nothing. Collective.

    Collectives follow each other closely, as those of the tensors of a model do.
    """
    tiny, program = np.zeros(64, np.float32), Program(transport, route, None, 64, "float32")
    job, recorder = Job("measuring", {}, NO_FEEDBACK, seed=0, step=0), Recorder()
    several = 16

    def run() -> None:
        interleave(program.segment(0, tiny, job, recorder) for _ in range(several))

    run()
    collective = _median_seconds(run) / several
    source, target = np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    copying = _median_seconds(lambda: device.copy(target, source)) / source.size
    return int(floats(transport, collective / (2 * copying)).max())


def _say_nothing(text: str) -> None:
    """What ranks other than the first do with warnings."""


def _median_seconds(act: Callable[[], None], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


def _brought(bucket: Bucket, units: Sequence[Unit], skips: Sequence[frozenset[int]]) -> tuple[list[Unit], list[bool]]:
    """The call that brings each tensor of a bucket, and whether it is skipped."""
    count = len(bucket.members)
    calls = [units[0]] * count if len(units) == 1 else [units[call] for call, _ in bucket.members]
    return calls, [item.index in skips[call] for call, item in bucket.members] if any(skips) else [False] * count


def _note(unit: Unit) -> dict[str, Any]:
    """What this rank tells the others about a call that they do not know, or that is not as it should be."""
    if unit.problem is not None:
        return {"call": list(unit.call), "problem": [type(unit.problem).__name__, str(unit.problem)]}
    return {**unit.content.note(), "problem": None, "bad": unit.bad}


def _numbers_in(mask: int) -> list[int]:
    """The places of the bits that are set."""
    row = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
    found: list[int] = np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist()
    return found


def _bits_of(numbers: Iterable[int], size: int) -> bytes:
    """The bits at these places, in so many bytes: the inverse of ``_numbers_in``, least significant byte first."""
    row = bytearray(size)
    for number in numbers:
        row[number >> 3] |= 1 << (number & 7)
    return bytes(row)
