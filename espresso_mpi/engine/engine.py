"""The engine: it accepts calls, negotiates with the other ranks which ones run next, and overlaps their tensors.

Every rank makes the same progress steps: each starts one more segment and resumes the active ones. What starts next is
decided in negotiation rounds: calls that all ranks have made are run, by priority, and then in the order in which they
were first announced. So ranks may make their calls in any order. A ``driver`` decides which thread makes the progress
steps, a ``dispatcher`` splits calls into segments.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import reduce
from operator import and_, or_
from typing import Any

from ..arrays import buffers
from ..collectives.messages.transport import Transport
from ..errors import ConfigError, EspressoError, MismatchError, PlanError, RemoteError, StateError
from ..options import Options
from ..state.store import SyncState
from ..tracing.recording import Recorder
from .calls import PendingCall
from .diagnostics import stuck_error
from .dispatcher import Dispatcher
from .driver import PAUSE, Driver, SessionClosed, unusable
from .gpu_ends import GpuEnds
from .inbox import Inbox
from .negotiation import Negotiation, RoundResult, numbers_in
from .nonfinite import NonFinite
from .rounds import GRACE, Rounds

_ROUND_EVERY = 8
"""Progress steps between negotiation rounds while segments wait to start: a new call may be more urgent."""

_ROUND_EVERY_DRAINING = 3
"""The same if none waits to start: an active segment takes about so many more progress steps, and a round costs as much
as some of them."""

_FRUITLESS = int(GRACE / PAUSE)
"""Negotiation rounds without a common call after which operations no longer wait for gradients planned before them."""


class Engine(Rounds):
    """Runs the calls of one session.

    Args:
        transport: the messages; used by one engine at a time, see ``Waiter.monitored``.
        options: of the session; sync_state: residuals and counters, which every step changes.

    Attributes:
        broken: the error after which no more calls are accepted; None: the engine works.
        nonfinite: counts what was skipped because of its values.
        unfinished: the calls that are not finished, by id.
    """

    def __init__(self, transport: Transport, options: Options, sync_state: SyncState, recorder: Recorder) -> None:
        self._transport, self._options, self._recorder = transport, options, recorder
        self.broken: BaseException | None = None
        self.nonfinite = NonFinite(transport, recorder)
        self._driver = Driver(self, transport)
        self._dispatcher = Dispatcher(transport, options, sync_state, recorder, self.nonfinite, self._finish)
        self._negotiation = Negotiation(transport, self._finish, self._dispatcher.forget_numbers)
        self._inbox = Inbox(self._driver, self.nonfinite.begin)
        self._ends = GpuEnds(self._end, self.tally)
        self.unfinished: dict[int, PendingCall] = {}
        self._actions: list[PendingCall] = []
        self._quiet = self._all_wait = False
        self._fruitless = self._since_round = 0
        self._stuck_since: float | None = None
        self._last_progress = time.perf_counter()

    @property
    def sync_state(self) -> SyncState:
        """Residuals and counters."""
        return self._dispatcher.sync_state

    @property
    def seed(self) -> int:
        """The seed of all random numbers."""
        return self._dispatcher.seed

    @property
    def tally(self) -> Counter[str]:
        """Counts the values that were clipped to the range of their type."""
        return self._dispatcher.tally

    @property
    def executors(self) -> dict[str, str]:
        """What ran each compressed tensor or group the last time, in words."""
        return dict(self._dispatcher.executors)

    def load(self, sync_state: SyncState, seed: int) -> None:
        """Continue from a saved state; no segment may be active."""
        self._dispatcher.sync_state, self._dispatcher.seed = sync_state, seed

    def follow(self, options: Options, sync_state: SyncState) -> None:
        """Continue with another plan; no segment may be active. All ranks must do it between the same calls."""
        self._options = options
        self._dispatcher.follow(options, sync_state)

    # --- calls --------------------------------------------------------------------------------------------------------

    def submit(self, call: PendingCall, background: bool = False) -> PendingCall:
        """Accept a call; ``background``: start it even if no thread waits for it."""
        with self._driver.changed:
            self.require_usable()
            self.unfinished[id(call)] = call
            self._inbox.append(call)
            self._driver.called(background)
        return call

    def wait(self, call: PendingCall) -> Any:
        """The result of a call, once it has ended; or its error is raised."""
        self.wait_for(lambda: call.finished)
        if call.error is not None:
            raise call.error
        return call.result

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Drive the engine, or let another thread drive it, until ``done()``."""
        self._driver.wait_for(done)

    @property
    def busy(self) -> bool:
        """Whether there are unfinished calls."""
        return bool(self.unfinished)

    def require_usable(self) -> None:
        """Raise EspressoError if the engine has failed or was shut down."""
        if self.broken is not None:
            raise unusable(self.broken)

    def shutdown(self, why: str, notify: bool = True, remedy: str = "open a new one") -> None:
        """Stop without waiting for other ranks; ``notify`` them if they may be waiting for this one."""
        self._driver.stopping = True
        with self._driver.halted():
            if self.broken is None:
                self._break(SessionClosed(why, remedy), notify)
        self._driver.join()

    def forked(self, why: str, remedy: str) -> None:
        """This process is a fork: the engine works in its parent only."""
        self._driver.forked()
        self._recorder.forked()
        self._break(SessionClosed(why, remedy), notify=False)

    # --- progress steps -----------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether a progress step would do anything."""
        waiting = self._inbox or self._ends or self._actions or self._negotiation.declared
        return bool(waiting or self._dispatcher.runner.busy)

    def progress(self) -> bool:
        """Make one progress step; False if this rank has nothing to do."""
        self._ends.settle()
        self._transport.advance()
        self._declare_new()
        dispatcher = self._dispatcher
        idle = not dispatcher.runner.busy
        if idle and self._ends and (self._actions or not self._negotiation.declared):
            self._ends.wait(PAUSE)
            return True
        if idle and self._actions:
            self._act(self._actions.pop(0))
            return True
        if idle and self._inbox and not self._negotiation.declared:
            self._inbox.wait()
            return True
        if idle and not self._negotiation.declared and not (self._driver.callers and dispatcher.pending_groups.count):
            return False
        if self._round_is_due(idle):
            self._negotiate()
        self._since_round += 1
        all_here = self._quiet or self._all_wait or bool(self._actions) or self._fruitless > _FRUITLESS
        if not dispatcher.runner.progress(all_here) and dispatcher.runner.busy:  # it waits for what is still to come
            self._since_round = _ROUND_EVERY
            self._inbox.nap()
        return True

    def fail(self, error: BaseException) -> None:
        """A progress step raised ``error``."""
        self._break(error, notify=not isinstance(error, (RemoteError, SessionClosed)))

    def _round_is_due(self, idle: bool) -> bool:
        """Whether to start a round. The same on all ranks; if no segment is active, ranks with calls start one."""
        if idle or self._quiet or self._actions:
            return idle
        return self._since_round >= (_ROUND_EVERY if self._dispatcher.runner.waiting else _ROUND_EVERY_DRAINING)

    def _act(self, call: PendingCall) -> None:
        assert call.action is not None
        pending_groups = self._dispatcher.pending_groups
        try:
            if pending_groups.count and call.key[0] != "close":
                missing = ", ".join(map(repr, pending_groups.absent()))
                raise ConfigError(
                    f"{call.title}: tensors are still under way, which wait for {missing} of their group; call "
                    f"wait_all() before it"
                )
            call.result = call.action()
        except (ConfigError, MismatchError, PlanError, StateError) as error:  # on all ranks alike: it can continue
            call.error = error
        self._finish(call)

    def _break(self, error: BaseException, notify: bool) -> None:
        """Fail all calls, here and on the other ranks: from here on, the ranks may be out of step."""
        with self._driver.changed:  # no call comes in from here on
            first, self.broken = self.broken is None, self.broken or error
        if first and notify:
            me = self._transport.describe(self._transport.rank)
            text = str(error) if isinstance(error, SessionClosed) else f"{type(error).__name__}: {error}"
            self._transport.abort(f"{me}: {text}")
        calls = list(self.unfinished.values())
        under_way = self._dispatcher.clear()
        if calls or under_way:  # messages under way may still be written to them
            self._transport.outlive([calls, under_way])
        self._inbox.clear()
        self._ends.clear()
        self._actions = []
        self._negotiation.give_up()
        for call in calls:
            call.error = error if not isinstance(error, SessionClosed) else EspressoError(f"session: {error}")
            self._finish(call)

    def _finish(self, call: PendingCall) -> None:
        """End a call, or let it end when the GPU has done what is queued: any stream can read the result then."""
        later = call.error is None and call.gradients and call.gpu is not None
        if not (later and self._ends.add(call)):
            self._end(call)

    def _end(self, call: PendingCall) -> None:
        if call.error is None and call.gradients:
            call.result = buffers.rebuild(call.given, call.gradients)
            if call.watch is not None:
                call.watch.written()
        with self._driver.changed:
            call.gradients, call.given, call.finished = [], None, True
            self.unfinished.pop(id(call), None)
            self._driver.changed.notify_all()
        call.announce_end()

    # --- negotiation rounds -------------------------------------------------------------------------------------------

    def _declare_new(self) -> None:
        """Declare new calls whose arrays are ready, except those that have already failed because of another rank."""
        for call in self._inbox.take():
            if self._negotiation.failed_remotely(call):
                continue
            if call.batch is not None and call.problem is None:
                self.nonfinite.look_for(call, call.batch)
            self._negotiation.declare(call)

    def _negotiate(self) -> None:
        """Run one negotiation round, and start the calls that all ranks have made."""
        front, sent = self._negotiation.front, self._transport.sent
        self._settle(front, self._compare(front), sent)

    def _settle(self, front: list[PendingCall], result: RoundResult, sent: Any) -> None:
        """Do what follows from a round; ``sent``: bytes sent before it."""
        if result.fast_path:
            self._run_fast_path(front[0], result, sent)
            return
        if result.piggyback is not None:
            result.piggyback.undo()
        failed = self._negotiation.settle(front, result)
        common, union = reduce(and_, result.masks), reduce(or_, result.masks)
        self._quiet, self._since_round = result.blocked and common == union, 0
        self._all_wait, self._fruitless = result.blocked, 0 if common else self._fruitless + 1
        if common:
            self._start(common)
        if common or failed or self._dispatcher.runner.busy:
            self._progressed()
        else:
            self._negotiation.require_timely(front, result.masks, self._last_progress)
            self._without_progress(result)

    def _run_fast_path(self, call: PendingCall, result: RoundResult, sent: Any) -> None:
        """Finish the one call whose data all ranks have sent with their headers."""
        assert result.piggyback is not None
        self._dispatcher.finish_piggyback(call, result.piggyback, result.messages, self._negotiation.header_size, sent)
        self._negotiation.next_of(call.key)
        self._quiet, self._since_round = True, 0
        self._progressed()
        self._finish(call)

    def _start(self, common: int) -> None:
        """Start the calls that all ranks have made."""
        self._dispatcher.renew()
        contents, going = self._negotiation.contents, []
        for number in sorted(numbers_in(common), key=lambda number: (-contents[number].priority, number)):
            call = self._negotiation.next_of(contents[number].key)
            if call.number != number:
                raise AssertionError("the call that all ranks have is not the next one here")
            said = self._negotiation.bad.pop(number, {})
            if call.action is not None:
                self._dispatcher.remember_action(call)
                self._actions.append(call)
            elif call.exchange is not None:
                self._dispatcher.begin_exchange(call, call.exchange)
            elif (skip := self.nonfinite.settle(call, said, contents[number], self._options.nonfinite)) is None:
                self._finish(call)
            else:
                going.append((number, call, skip))
        if going:
            self._dispatcher.begin(going)

    def _progressed(self) -> None:
        self._stuck_since, self._last_progress = None, time.perf_counter()

    def _without_progress(self, result: RoundResult) -> None:
        """Handle a round without a common call while no segment is active."""
        pending_groups = self._dispatcher.pending_groups
        if result.stuck and pending_groups.count and self._options.tuning is not None:
            self._progressed()
            self._dispatcher.dissolve_groups()
            return
        if result.stuck:
            waiting = self._negotiation.keys_of(result.masks)
            self._give_up_calls(stuck_error(waiting, list(pending_groups.absent()), self._transport.describe))
            return
        if not result.blocked:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = time.perf_counter()
        self._inbox.nap()

    def _give_up_calls(self, error: EspressoError) -> None:
        """Fail all waiting calls; the session can continue, because no segment is active."""
        self._stuck_since = None
        for call in [*self._negotiation.give_up(), *self._dispatcher.give_up()]:
            call.error = error
            self._finish(call)
