"""The part of an ``Engine`` that exchanges headers with the other ranks, and runs what needs one exchange in all."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from . import fast_path
from .calls import PendingCall
from .dense_piggyback import DensePiggyback, PreparedCall, is_unsearched
from .negotiation import OWN_STATE, Piggyback, RoundResult
from .settling import Settling
from .table_piggyback import TablePiggyback

GRACE = 1.0
"""Seconds without progress on any rank that count as an error: until then, another thread may still make a call."""


class Rounds(Settling):
    """See ``Engine``, which sets the attributes."""

    def run(self, call: PendingCall) -> None:
        """Submit a call and wait for its end; at once, without progress steps, if nothing else is under way."""
        if not self.unfinished and self._dispatcher.may_piggyback(call):
            self._driver.run(lambda: self._at_once(call))
        if call.finished:
            return
        if id(call) not in self.unfinished:
            self.submit(call)
        self.wait_for(lambda: call.finished)

    def _at_once(self, call: PendingCall) -> None:
        """Run a call whose payload may be piggybacked on its header; submit it where that has not ended it."""
        with self._driver.changed:
            if self.broken is not None:
                return
            self.unfinished[id(call)] = call
        negotiation, sent = self._negotiation, self._transport.sent
        known = len(self.unfinished) == 1 and negotiation.knows(call)
        expected = negotiation.expected(idle=True) if known else None
        piggyback = self._dispatcher.piggyback(call, expected, search=True) if known else None
        if expected is not None and not _is_expected(piggyback):
            piggyback = None  # it is declined first, in an ordinary round
        result = None if piggyback is None else self._timed([call], lambda: negotiation.show(call, piggyback))
        self._settle_shown(call, result, sent)

    def _settle_shown(self, call: PendingCall, result: RoundResult | None, sent: Any) -> None:
        """As ``_settle``, after a round with the data of a call, whose values may not have been searched before it."""
        if result is None or result.odd or result.not_made:
            self._make_anew(call, result, sent)
            return
        self._negotiation.declare(call)
        self._settle([call], result, sent)

    def _make_anew(self, call: PendingCall, result: RoundResult | None, sent: Any) -> None:
        """Make a call on the ordinary path: it could not be piggybacked, or nothing has come of that.

        Args:
            result: of the round in which it was not made, if there was one.
        """
        if result is not None and result.not_made and not result.odd:  # the headers differ
            assert call.batch is not None
            self.nonfinite.not_made(call.batch)
            self._settle([], result, sent)
        with self._driver.changed:
            self._inbox.append(call)

    def repeat(
        self, signature: tuple[Any, ...], placeholder: PendingCall, moves: Any, real: Callable[[], PendingCall]
    ) -> PendingCall | None:
        """Make a dense call once more, as the only one of this rank.

        Args:
            signature: of the call, as it was made before.
            placeholder: names it while it runs; its error is the call's.
            moves: its data.
            real: makes the pending call itself, for the case that another rank deviates; it is waited for then.

        Returns:
            What has ended: the placeholder, or the pending call; None if it may not run so: nothing was done.
        """
        driver = self._driver
        if self.unfinished or not driver.take():
            return None
        try:
            negotiation = self._negotiation
            header = self._repeatable(placeholder, signature, is_unsearched(moves))
            if header is None:
                return None
            number, prepared = header[0], self._dispatcher.prepared(header[0], moves, header[1].size)
            if prepared is None:
                return None
            self.unfinished[id(placeholder)], self._transport.waiter.what = placeholder, placeholder.title
            expected = negotiation.expected(idle=True)
            done = moves.begin(prepared.agreed, header[1], OWN_STATE) if expected is None else None
            if done and moves.rest is None and prepared.rest is None:
                del self.unfinished[id(placeholder)]
                negotiation.came(number)
                self._end_repeated(number, prepared)
                return placeholder
            piggyback = DensePiggyback(self._transport, prepared, moves, begun=done)
            ended = self._await_repeated(placeholder, piggyback, real, expected)
        except BaseException as error:
            self._failed_repeat(moves, error)
            raise
        finally:
            driver.leave()
        return self._ended_repeated(placeholder, ended)

    def _repeatable(
        self, placeholder: PendingCall, signature: tuple[Any, ...], unsearched: bool
    ) -> tuple[int, np.ndarray] | None:
        """The number and the header of a call that may be made again now; None: it takes the ordinary path.

        Args:
            placeholder, signature: as of ``repeat``; unsearched: as of ``Negotiation.repeated_header``.
        """
        header, number = self._negotiation.repeated_header(placeholder, signature, unsearched), placeholder.number
        if header is None or number is None or self.unfinished or self._inbox:
            return None
        return None if self._dispatcher.pending_groups.count else (number, header)

    def _failed_repeat(self, held: Any, error: BaseException) -> None:
        """A call has raised an error, such as an interrupt: the other ranks may have gone on with what is ``held``."""
        self._transport.outlive(held)
        self.fail(error)

    def _await_repeated(
        self, placeholder: PendingCall, piggyback: DensePiggyback, real: Callable[[], PendingCall],
        expected: int | None = None,
    ) -> PendingCall:  # fmt: skip
        """Wait for the other ranks in a call of this one; returns as ``repeat``.

        Args:
            piggyback: its data; begun, unless another call is ``expected``.
        """
        ended = [placeholder]
        self._driver.wait_in(lambda: self._finish_repeated(placeholder, piggyback, ended, real, expected))
        return ended[0]

    def _ended_repeated(self, placeholder: PendingCall, ended: PendingCall) -> PendingCall:
        """What was returned for a call, once it has ended."""
        if ended is not placeholder or id(placeholder) in self.unfinished:  # the session may be closed meanwhile
            self.wait_for(lambda: ended.finished)
        return ended

    def _finish_repeated(
        self, placeholder: PendingCall, piggyback: DensePiggyback, ended: list[PendingCall],
        real: Callable[[], PendingCall], expected: int | None,
    ) -> None:  # fmt: skip
        """As ``_await_repeated``; ``ended`` receives the call itself if a rank deviates, or values cannot be summed."""
        number = placeholder.number
        assert number is not None
        if expected is not None:
            self._decline(expected, piggyback)
        result = self._timed([placeholder], lambda: self._negotiation.show(placeholder, piggyback))
        if result.odd or result.not_made:
            self._make_anew(self._take_over(placeholder, real, ended), result, self._transport.sent)
            return
        if piggyback.met:
            for _ in piggyback.rest(self._transport):
                pass
        if piggyback.met:
            self._end_repeated(number, piggyback.prepared)
            placeholder.error = piggyback.problem(placeholder.title)
            del self.unfinished[id(placeholder)]
            return
        call = self._take_over(placeholder, real, ended)
        self._negotiation.declare(call)
        self._settle([call], result, self._transport.sent)

    def _take_over(
        self, placeholder: PendingCall, real: Callable[[], PendingCall], ended: list[PendingCall]
    ) -> PendingCall:
        """The call itself takes the place of what stood for it, in ``ended`` as well."""
        call = real()
        call.number = placeholder.number
        with self._driver.changed:
            self.unfinished[id(call)] = call
            del self.unfinished[id(placeholder)]
        ended[0] = call
        return call

    def _end_repeated(self, number: int, prepared: PreparedCall) -> None:
        self._dispatcher.count_repeated(number, prepared)
        self._quiet, self._since_round = True, 0
        self._progressed()

    def _compare(self, front: list[PendingCall]) -> RoundResult:
        """Exchange headers."""
        stuck = self._stuck_since is not None and time.perf_counter() - self._stuck_since > GRACE
        idle = not self._dispatcher.runner.busy
        blocked = self._driver.callers > 0 and not self._inbox and not self._ends  # else what waits is its GPU
        compare, find = self._negotiation.compare, partial(self._piggyback_of, front)
        return self._timed(front, lambda: compare(front, idle, blocked, stuck, find, self._decline))

    def _decline(self, expected: int, piggyback: Piggyback | None) -> None:
        """Take part in the call that the ranks expect, unless the data are those of this call."""
        if not _is_expected(piggyback):
            self._dispatcher.decline(expected, self._negotiation.header_size)

    def _timed(self, front: list[PendingCall], exchange: Callable[[], RoundResult]) -> RoundResult:
        """Exchange headers, and record the time."""
        waiter = self._transport.waiter
        if front:
            waiter.what = front[0].title
        start, waited = time.perf_counter(), waiter.waited
        result = exchange()
        if result.odd or (isinstance(result.piggyback, DensePiggyback | TablePiggyback) and result.piggyback.met):
            return result  # the call is made anew, or records the time itself
        stop, waited = time.perf_counter(), waiter.waited - waited
        if isinstance(result.piggyback, fast_path.Piggyback):
            if result.piggyback.began:
                self._recorder.add("check", "", 0, 0, start, result.piggyback.began)
            start, stop = max(start, result.piggyback.began), result.piggyback.met or stop
        self._recorder.add("agree", "", 0, 0, start, stop)
        if waited > 0:
            self._recorder.add("wait", "", 0, 0, start, min(stop, start + waited))
        return result

    def _piggyback_of(self, front: list[PendingCall], expected: int | None) -> Piggyback | None:
        """The data of the only call of this rank, if they may be piggybacked on the header."""
        if len(front) != 1 or front[0].number is None or self._actions or self._options.debug:
            return None
        if front[0].number in self._negotiation.bad:  # known to all ranks from before
            return None
        if front[0].batch is None and front[0].exchange is None:
            return None
        return self._dispatcher.piggyback(front[0], expected)


def _is_expected(piggyback: Piggyback | None) -> bool:
    """Whether these are the data of a call that all ranks expect."""
    return isinstance(piggyback, TablePiggyback) and piggyback.expected
