"""The engine: calls come in, ranks agree which of them run next, and their tensors travel side by side.

Every rank takes the same turns: in each, one more segment starts and those under way go on. What starts next is agreed
in *rounds* (``negotiation``): those calls that all ranks have are run, by priority and then in the order in which the
ranks first met them. So ranks may make their calls in any order. A ``driver`` decides which thread takes the turns, a
``dispatcher`` makes segments of calls.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import reduce
from operator import and_, or_
from typing import Any

from ..arrays import buffers, device
from ..collectives.messages.transport import Transport
from ..errors import ConfigError, EspressoError, MismatchError, PlanError, RemoteError, StateError
from ..options import Options
from ..state.memory import Keeping
from ..tracing.recording import Recorder
from .calls import Unit
from .diagnostics import stuck_error
from .dispatcher import Dispatcher, arrays_of
from .driver import PAUSE, Driver, Left, unusable
from .negotiation import Heard, Negotiation, numbers_in
from .nonfinite import NonFinite

_LOOK_AGAIN = 8
"""Turns after which ranks look for new calls although segments still wait to start: one of them may be more urgent."""

_LOOK_AT_IDLE = 3
"""The same where none waits to start: a segment is under way for about so many turns more, and a round costs as much
as some of them."""

_GRACE = 1.0
"""Seconds in which no rank may have been able to go on until that counts as an error: another thread may still call."""

_FRUITLESS = int(_GRACE / PAUSE)
"""Rounds in a row without a common call after which operations no longer wait for gradients that should come first."""


class Engine:
    """Runs the calls of one session.

    Args:
        transport: for this engine alone.
        keeping: residuals and counters; changed by every step.

    Attributes:
        broken: why no more calls are taken.
        nonfinite: what was left out for its values.
    """

    def __init__(self, transport: Transport, options: Options, keeping: Keeping, recorder: Recorder) -> None:
        self._transport, self._options, self._recorder = transport, options, recorder
        self.broken: BaseException | None = None
        self.nonfinite = NonFinite(transport, recorder)
        self._driver = Driver(self, transport)
        self._dispatcher = Dispatcher(transport, options, keeping, recorder, self.nonfinite, self._finish)
        self._negotiation = Negotiation(transport, self._finish, self._dispatcher.forget_numbers)
        self._inbox: list[Unit] = []
        self._unfinished: dict[int, Unit] = {}
        self._actions: list[Unit] = []
        self._quiet = self._all_wait = False
        self._fruitless = self._since_round = 0
        self._stuck_since: float | None = None
        self._progress = time.perf_counter()
        transport.waiter.interrupted, transport.whereabouts.calls = self._driver.interrupted, self._unfinished

    @property
    def keeping(self) -> Keeping:
        """Residuals and counters."""
        return self._dispatcher.keeping

    @property
    def seed(self) -> int:
        """What random numbers are drawn from."""
        return self._dispatcher.seed

    @property
    def tally(self) -> Counter[str]:
        """How many values were cut to fit their type."""
        return self._dispatcher.tally

    def load(self, keeping: Keeping, seed: int) -> None:
        """Go on with a state that was saved; nothing may be under way."""
        self._dispatcher.keeping, self._dispatcher.seed = keeping, seed

    def follow(self, options: Options, keeping: Keeping) -> None:
        """Go on by another plan; nothing may be under way. All ranks must do it between the same calls."""
        self._options = options
        self._dispatcher.follow(options, keeping)

    # --- calls --------------------------------------------------------------------------------------------------------

    def submit(self, unit: Unit, background: bool = False) -> Unit:
        """Take a call in; ``background``: start on it even if nobody waits."""
        with self._driver.changed:
            self.require_usable()
            self._unfinished[id(unit)] = unit
            self._inbox.append(unit)
            self._driver.called(background)
        return unit

    def wait(self, unit: Unit) -> Any:
        """The result of a call; what it raises is raised here."""
        self.wait_for(lambda: unit.finished)
        if unit.error is not None:
            raise unit.error
        return unit.result

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Drive the engine, or let its thread drive it, until something is done."""
        self._driver.wait_for(done)

    @property
    def busy(self) -> bool:
        """Whether calls are not finished yet."""
        return bool(self._unfinished)

    def require_usable(self) -> None:
        """Raise EspressoError if ranks may be out of step."""
        if self.broken is not None:
            raise unusable(self.broken)

    def leave(self, why: str, tell: bool = True, cure: str = "open a new one") -> None:
        """Stop without waiting for anybody; ``tell`` the other ranks if they may be waiting for this one."""
        self._driver.stopping = True
        if self.broken is None:
            self._break(Left(why, cure), tell)
        self._driver.join()

    def forked(self, why: str, cure: str) -> None:
        """This process is a fork: the engine works in its parent only."""
        self._driver.forked()
        self._recorder.forked()
        self._break(Left(why, cure), tell=False)

    # --- turns --------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether a turn would do anything."""
        return bool(self._inbox or self._dispatcher.runner.busy or self._actions or self._negotiation.declared)

    def turn(self) -> bool:
        """One turn; False if this rank has nothing to do."""
        self._take_in()
        dispatcher = self._dispatcher
        idle = not dispatcher.runner.busy
        if idle and self._actions:
            self._act(self._actions.pop(0))
            return True
        if idle and not self._negotiation.declared and not (self._driver.callers and dispatcher.parked.count):
            return False
        if self._time_for_a_round(idle):
            self._round()
        self._since_round += 1
        all_here = self._quiet or self._all_wait or bool(self._actions) or self._fruitless > _FRUITLESS
        if not dispatcher.runner.turn(all_here) and dispatcher.runner.busy:  # it waits for what is still to come
            self._since_round = _LOOK_AGAIN
            self._nap()
        return True

    def fail(self, error: BaseException) -> None:
        """A turn raised this."""
        self._break(error, tell=not isinstance(error, (RemoteError, Left)))

    def _time_for_a_round(self, idle: bool) -> bool:
        """The same on all ranks, but where nothing is under way: then those with calls begin."""
        if idle or self._quiet or self._actions:
            return idle
        return self._since_round >= (_LOOK_AGAIN if self._dispatcher.runner.waiting else _LOOK_AT_IDLE)

    def _act(self, unit: Unit) -> None:
        assert unit.action is not None
        parked = self._dispatcher.parked
        try:
            if parked.count and unit.call[0] != "close":
                missing = ", ".join(map(repr, parked.absent()))
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
        with self._driver.changed:  # no call comes in from here on
            first, self.broken = self.broken is None, self.broken or error
        if first and tell:
            me = self._transport.describe(self._transport.rank)
            text = str(error) if isinstance(error, Left) else f"{type(error).__name__}: {error}"
            self._transport.abort(f"{me}: {text}")
        units = list(self._unfinished.values())
        under_way = self._dispatcher.clear()
        if units or under_way:  # messages under way may still be written to them
            self._transport.outlive([units, under_way])
        self._inbox, self._actions = [], []
        self._negotiation.give_up()
        for unit in units:
            unit.error = error if not isinstance(error, Left) else EspressoError(f"session: {error}")
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        if unit.error is None and unit.gradients:
            if unit.gpu is not None:
                device.drain()  # whoever reads on any stream finds finished data
            unit.result = buffers.rebuild(unit.given, unit.gradients)
            if unit.watch is not None:
                unit.watch.written()
        with self._driver.changed:
            unit.gradients, unit.given, unit.finished = [], None, True
            self._unfinished.pop(id(unit), None)
            self._driver.changed.notify_all()

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Declare what came in, unless another rank's half of the call has failed before."""
        if not self._inbox:
            return
        with self._driver.changed:
            units, self._inbox = self._inbox, []
        for unit in units:
            if self._negotiation.doomed(unit):
                continue
            if unit.gpu is not None:
                self._driver.gpu = unit.gpu
                device.use_gpu(unit.gpu)  # this may not be the caller's thread
                device.synchronize()  # whatever stream the caller's kernels are on
            if unit.batch is not None and unit.problem is None:
                self.nonfinite.look_for(unit, unit.batch)
            self._negotiation.declare(unit)

    def _round(self) -> None:
        """Learn which calls the other ranks have, and start those that all have."""
        front, sent = self._negotiation.front, self._transport.sent
        heard = self._compare(front)
        if heard.express:
            self._run_express(front[0], heard, sent)
            return
        failed = self._negotiation.settle(front, heard)
        common, union = reduce(and_, heard.masks), reduce(or_, heard.masks)
        self._quiet, self._since_round = heard.blocked and common == union, 0
        self._all_wait, self._fruitless = heard.blocked, 0 if common else self._fruitless + 1
        if common:
            self._start(common)
        if common or failed or self._dispatcher.runner.busy:
            self._got_on()
        else:
            self._negotiation.require_patience(front, heard.masks, self._progress)
            self._without_progress(heard)

    def _compare(self, front: list[Unit]) -> Heard:
        """Exchange headers, and record how long that takes."""
        waiter = self._transport.waiter
        if front:
            waiter.what = front[0].title
        start, waited = time.perf_counter(), waiter.waited
        stuck = self._stuck_since is not None and start - self._stuck_since > _GRACE
        idle, blocked = not self._dispatcher.runner.busy, self._driver.callers > 0
        heard = self._negotiation.compare(front, idle, blocked, stuck, lambda: self._small(front))
        stop, waited = time.perf_counter(), waiter.waited - waited
        self._recorder.add("agree", "", 0, 0, start, stop)
        if waited > 0:
            self._recorder.add("wait", "", 0, 0, start, min(stop, start + waited))
        return heard

    def _small(self, front: list[Unit]) -> list[Any] | None:
        """The arrays of the only call of this rank, if it is so small that they go along with the header."""
        if len(front) != 1 or front[0].number is None or self._actions or self._options.debug:
            return None
        if front[0].number in self._negotiation.bad or front[0].batch is None:  # bad: known to all ranks from before
            return None
        bucket = self._dispatcher.small(front[0])
        return None if bucket is None else arrays_of(front * len(bucket.members), bucket)

    def _run_express(self, unit: Unit, heard: Heard, sent: Any) -> None:
        """All ranks sent the data of this one call with their headers."""
        bucket = self._dispatcher.small(unit)
        assert bucket is not None
        self._dispatcher.run_small(unit, bucket, heard.messages, self._negotiation.header_size, sent)
        self._negotiation.next_of(unit.call)
        self._quiet, self._since_round = True, 0
        self._got_on()
        self._finish(unit)

    def _start(self, common: int) -> None:
        """Queue the tensors of the calls that all ranks have made."""
        self._dispatcher.renew()
        contents, going = self._negotiation.contents, []
        for number in sorted(numbers_in(common), key=lambda number: (-contents[number].priority, number)):
            unit = self._negotiation.next_of(contents[number].call)
            if unit.number != number:
                raise AssertionError("the call that all ranks have is not the next one here")
            if unit.action is not None:
                self._actions.append(unit)
                continue
            said = self._negotiation.bad.pop(number, {})
            skip = self.nonfinite.settle(unit, said, contents[number], self._options.nonfinite)
            if skip is None:
                self._finish(unit)
            else:
                going.append((number, unit, skip))
        if going:
            self._dispatcher.begin(going)

    def _got_on(self) -> None:
        self._stuck_since, self._progress = None, time.perf_counter()

    def _without_progress(self, heard: Heard) -> None:
        """No call is common to all ranks and nothing is under way."""
        parked = self._dispatcher.parked
        if heard.stuck and parked.count and self._options.tuning is not None:
            self._got_on()
            self._dispatcher.dissolve_groups()
            return
        if heard.stuck:
            calls = self._negotiation.calls_of(heard.masks)
            self._give_up_calls(stuck_error(calls, list(parked.absent()), self._transport.describe))
            return
        if not heard.blocked:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = time.perf_counter()
        self._nap()

    def _nap(self) -> None:
        """Let a moment pass, or the time until a call comes in."""
        self._driver.nap(lambda: bool(self._inbox))

    def _give_up_calls(self, error: EspressoError) -> None:
        """All calls that wait fail; the session can go on, for nothing is under way."""
        self._stuck_since = None
        for unit in [*self._negotiation.give_up(), *self._dispatcher.give_up()]:
            unit.error = error
            self._finish(unit)
