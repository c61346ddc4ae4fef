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

from ..collectives.messages.transport import Transport
from ..errors import ConfigError, MismatchError, PlanError, StateError
from ..options import Options
from ..state.store import SyncState
from ..tracing.recording import Recorder
from .calls import PendingCall
from .diagnostics import OF_GRADIENTS
from .dispatcher import Dispatcher
from .driver import PAUSE, Driver
from .gpu_ends import GpuEnds
from .inbox import Inbox
from .negotiation import Negotiation
from .nonfinite import NonFinite
from .rounds import GRACE
from .sync_again import SyncsAgain

_ROUND_EVERY = 8
"""Progress steps between negotiation rounds while segments wait to start: a new call may be more urgent."""

_ROUND_EVERY_DRAINING = 3
"""The same if none waits to start: an active segment takes about so many more progress steps, and a round costs as much
as some of them."""

_FRUITLESS = int(GRACE / PAUSE)
"""Negotiation rounds without a common call after which operations no longer wait for gradients planned before them."""


class Engine(SyncsAgain):
    """Runs the calls of one session.

    Args:
        transport: the messages; used by one engine at a time, see ``Waiter.monitored``.
        options: of the session; sync_state: residuals and counters, which every step changes.

    Attributes:
        broken: the error after which no more calls are accepted; None: the engine works.
        nonfinite: counts what was skipped because of its values.
        unfinished: the calls that are not finished, by id.
        value_check: tells how the sum of a dense call searches its values itself; not ``pending``: it does not.
    """

    def __init__(self, transport: Transport, options: Options, sync_state: SyncState, recorder: Recorder) -> None:
        self._transport, self._options, self._recorder = transport, options, recorder
        self.broken: BaseException | None = None
        self.nonfinite = NonFinite(transport, recorder)
        self._driver = Driver(self, transport)
        self._dispatcher = Dispatcher(transport, options, sync_state, recorder, self.nonfinite, self._finish)
        self.value_check = self._dispatcher.value_check
        self._negotiation = Negotiation(transport, self._finish, self._dispatcher)
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
        self._dispatcher.forget_arrays()

    def follow(self, options: Options, sync_state: SyncState) -> None:
        """Continue with another plan; no segment may be active. All ranks must do it between the same calls."""
        self._options = options
        self._dispatcher.follow(options, sync_state)

    def renew(self, prepare: Callable[[PendingCall], None]) -> None:
        """Prepare the gradients anew that have not begun, because the plan has changed. In an action of all ranks.

        A rank may have pushed a tensor that others push later.
        """
        with self._driver.changed:
            self._inbox.put_back(self._negotiation.withdraw(OF_GRADIENTS))
            for call in self._inbox:
                if call.key[0] in OF_GRADIENTS:
                    prepare(call)

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
                if self._options.tuning is not None:  # a tensor that was missing in the last step was pushed early
                    self._dispatcher.dissolve_groups()
                    self._actions.insert(0, call)
                    return
                missing = ", ".join(map(repr, pending_groups.absent()))
                raise ConfigError(
                    f"{call.title}: tensors are still under way, which wait for {missing} of their group; call "
                    f"wait_all() before it"
                )
            call.result = call.action()
        except (ConfigError, MismatchError, PlanError, StateError) as error:  # on all ranks alike: it can continue
            call.error = error
        self._finish(call)

    # --- negotiation rounds -------------------------------------------------------------------------------------------

    def _declare_new(self) -> None:
        """Declare new calls whose arrays are ready, except those that have already failed because of another rank."""
        if not self._inbox:
            return
        calls = [call for call in self._inbox.take() if not self._negotiation.failed_remotely(call)]
        searched = [(call, call.batch) for call in calls if call.batch is not None and call.problem is None]
        if searched:
            self.nonfinite.look_for(searched)
        for call in calls:
            self._negotiation.declare(call)

    def _negotiate(self) -> None:
        """Run one negotiation round, and start the calls that all ranks have made."""
        front, sent = self._negotiation.front, self._transport.sent
        self._settle(front, self._compare(front), sent)
