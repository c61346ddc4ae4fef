"""The part of an ``Engine`` that does what follows from a negotiation round: calls start, or are given up."""

from __future__ import annotations

import time
from functools import reduce
from operator import and_, or_
from typing import Any

from ..errors import EspressoError
from ..options import Options
from .call_failures import numbers_in
from .calls import PendingCall
from .diagnostics import stuck_error
from .lifecycle import Lifecycle
from .negotiation import RoundResult
from .nonfinite import NonFinite


class Settling(Lifecycle):
    """See ``Engine``, which sets the attributes."""

    nonfinite: NonFinite
    _options: Options
    _quiet: bool
    _all_wait: bool
    _fruitless: int
    _since_round: int
    _stuck_since: float | None
    _last_progress: float

    def _settle(self, front: list[PendingCall], result: RoundResult, sent: Any) -> None:
        """Do what follows from a round; ``sent``: bytes sent before it."""
        if result.odd:  # of another rank, which looks for such values now, as this one has done
            return
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
        elif not result.unsearched:
            self._negotiation.require_timely(front, result.masks, self._last_progress)
            self._without_progress(result)

    def _run_fast_path(self, call: PendingCall, result: RoundResult, sent: Any) -> None:
        """Finish the one call whose data all ranks have sent with their headers."""
        self._end_fast_path(call, result, sent)
        self._negotiation.next_of(call.key)
        self._finish(call)

    def _end_fast_path(self, call: PendingCall, result: RoundResult, sent: Any) -> None:
        """The data of a call have come with the headers of all ranks."""
        assert result.piggyback is not None
        self._dispatcher.finish_piggyback(call, result.piggyback, result.messages, self._negotiation.header_size, sent)
        self._quiet, self._since_round = True, 0
        self._progressed()

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
