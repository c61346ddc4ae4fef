"""The part of an ``Engine`` that exchanges headers with the other ranks, and runs what needs one exchange in all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..collectives.messages.transport import Transport
from ..options import Options
from ..tracing.recording import Recorder
from . import fast_path
from .calls import PendingCall
from .dense_rides import DenseRide, Prepared
from .dispatcher import Dispatcher
from .driver import Driver
from .gpu_ends import GpuEnds
from .inbox import Inbox
from .negotiation import OWN_STATE, Negotiation, Ride, RoundResult
from .table_ride import TableRide

GRACE = 1.0
"""Seconds without progress on any rank that count as an error: until then, another thread may still make a call."""


class Rounds:
    """See ``Engine``, which has the attributes."""

    broken: BaseException | None
    unfinished: dict[int, PendingCall]
    _transport: Transport
    _options: Options
    _recorder: Recorder
    _driver: Driver
    _dispatcher: Dispatcher
    _negotiation: Negotiation
    _inbox: Inbox
    _ends: GpuEnds
    _actions: list[PendingCall]
    _stuck_since: float | None
    _quiet: bool
    _since_round: int

    def submit(self, call: PendingCall, background: bool = False) -> PendingCall:
        raise NotImplementedError

    def wait_for(self, done: Callable[[], bool]) -> None:
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        raise NotImplementedError

    def _progressed(self) -> None:
        raise NotImplementedError

    def _settle(self, front: list[PendingCall], result: RoundResult, sent: Any) -> None:
        raise NotImplementedError

    def run(self, call: PendingCall) -> None:
        """Submit a call and wait for its end; at once, without progress steps, if nothing else is under way."""
        if not self.unfinished and self._dispatcher.may_ride(call):
            self._driver.run(lambda: self._at_once(call))
        if call.finished:
            return
        if id(call) not in self.unfinished:
            self.submit(call)
        self.wait_for(lambda: call.finished)

    def _at_once(self, call: PendingCall) -> None:
        """Run a call whose payload may travel with its header; submit it where that has not ended it."""
        with self._driver.changed:
            if self.broken is not None:
                return
            self.unfinished[id(call)] = call
        negotiation, sent = self._negotiation, self._transport.sent
        known = len(self.unfinished) == 1 and negotiation.knows(call)
        ride = self._dispatcher.ride(call, search=True) if known else None
        result = None if ride is None else self._timed([call], lambda: negotiation.show(call, ride))
        if result is None or result.odd:  # nothing was done
            with self._driver.changed:
                self._inbox.append(call)
            return
        negotiation.declare(call)
        self._settle([call], result, sent)

    def again(
        self, signature: tuple[Any, ...], stand_in: PendingCall, moves: Any, real: Callable[[], PendingCall]
    ) -> PendingCall | None:
        """Make a dense call once more, as the only one of this rank.

        Args:
            signature: of the call, as it was made before.
            stand_in: names it while it runs; its error is the call's.
            moves: its data.
            real: makes the pending call itself, for the case that another rank deviates; it is waited for then.

        Returns:
            What has ended: the stand-in, or the pending call; None if it may not run so: nothing was done.
        """
        driver = self._driver
        if self.unfinished or not driver.take():
            return None
        try:
            negotiation, dispatcher = self._negotiation, self._dispatcher
            header = negotiation.header_again(stand_in, signature)
            number = stand_in.number
            if header is None or number is None or self._inbox or dispatcher.pending_groups.count:
                return None
            prepared = dispatcher.prepared(number, moves)
            if prepared is None:
                return None
            self.unfinished[id(stand_in)], self._transport.waiter.what = stand_in, stand_in.title
            if moves.begin(prepared.agreed, header, OWN_STATE):
                del self.unfinished[id(stand_in)]
                self._ended_again(number, prepared)
                return stand_in
            ride, ended = DenseRide(self._transport, prepared, moves, begun=True), [stand_in]
            driver.wait_in(lambda: self._finish_again(stand_in, number, ride, ended, real))
        except BaseException as error:  # an interrupt: the others may have gone on
            self._transport.outlive(moves)
            self.fail(error)
            raise
        finally:
            driver.leave()
        if ended[0] is not stand_in:
            self.wait_for(lambda: ended[0].finished)
        return ended[0]

    def _finish_again(
        self, stand_in: PendingCall, number: int, ride: DenseRide, ended: list[PendingCall],
        real: Callable[[], PendingCall],
    ) -> None:  # fmt: skip
        """Wait for the other ranks in a call that has begun; ``ended``: receives the call itself if a rank deviates."""
        result = self._timed([stand_in], lambda: self._negotiation.show(stand_in, ride))
        del self.unfinished[id(stand_in)]
        if ride.met:
            self._ended_again(number, ride.prepared)
            stand_in.error = ride.problem(stand_in.title)
            return
        call = ended[0] = real()
        with self._driver.changed:
            self.unfinished[id(call)] = call
        call.number = number
        self._negotiation.declare(call)
        self._settle([call], result, self._transport.sent)

    def _ended_again(self, number: int, prepared: Prepared) -> None:
        self._dispatcher.count_repeated(number, prepared)
        self._quiet, self._since_round = True, 0
        self._progressed()

    def _compare(self, front: list[PendingCall]) -> RoundResult:
        """Exchange headers."""
        stuck = self._stuck_since is not None and time.perf_counter() - self._stuck_since > GRACE
        idle = not self._dispatcher.runner.busy
        blocked = self._driver.callers > 0 and not self._inbox and not self._ends  # else what waits is its GPU
        compare = self._negotiation.compare
        return self._timed(front, lambda: compare(front, idle, blocked, stuck, lambda: self._riding(front)))

    def _timed(self, front: list[PendingCall], exchange: Callable[[], RoundResult]) -> RoundResult:
        """Exchange headers, and record the time."""
        waiter = self._transport.waiter
        if front:
            waiter.what = front[0].title
        start, waited = time.perf_counter(), waiter.waited
        result = exchange()
        if isinstance(result.ride, DenseRide) and result.ride.met:
            return result  # it records the time itself
        if isinstance(result.ride, TableRide) and (result.ride.met or result.ride.odd):
            return result  # it has, or there was no exchange
        stop, waited = time.perf_counter(), waiter.waited - waited
        if isinstance(result.ride, fast_path.Ride):
            start, stop = max(start, result.ride.began), result.ride.met or stop
        self._recorder.add("agree", "", 0, 0, start, stop)
        if waited > 0:
            self._recorder.add("wait", "", 0, 0, start, min(stop, start + waited))
        return result

    def _riding(self, front: list[PendingCall]) -> Ride | None:
        """The data of the only call of this rank, if they may travel with the header."""
        if len(front) != 1 or front[0].number is None or self._actions or self._options.debug:
            return None
        if front[0].number in self._negotiation.bad:  # known to all ranks from before
            return None
        if front[0].batch is None and front[0].exchange is None:
            return None
        return self._dispatcher.ride(front[0])
