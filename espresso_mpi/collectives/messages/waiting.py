"""How a rank waits for others: it polls, so that a rank that never comes is named instead of waited for forever."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from espresso_mpi.errors import RankTimeoutError

_SPINS = 200
_COMPILED_SPINS, _COMPILED_YIELDS, _COMPILED_NAPS = 5000, 1000, 50
_YIELDS = 50
_CHECK_EVERY = 64
_NAP = 20e-6
_NAPS = {False: (1 / 16, 0.2e-3), True: (1 / 8, 1e-3)}
"""By ``background``: the share of the wait so far that a nap may add to it, and seconds that it lasts at most."""
_PR_SET_TIMERSLACK = 29

_ASK, _ASK_EVERY = 2.0, 1.0
"""Seconds of waiting after which a rank asks where the others are, and how often it does."""

NOTICE = 10.0
"""Seconds of waiting after which the log says for whom: long before the timeout, which leaves time for slow ranks."""

_LOG = logging.getLogger("espresso_mpi")


class Waiter:
    """Polls a condition until it holds or a timeout passes.

    Where a node has at least as many ranks as cores a rank that polls takes the core from a rank that works, so it
    gives way at once; otherwise it polls hard for a moment first, which answers sooner. A thread that gives way by
    yielding lets another thread that computes run its whole time slice, some 3 ms; one that naps is back in 0.1 ms, but
    naps are 50 us too long where nobody computes. So it yields while its process has nothing else to do, and naps in
    the ``background``. (2 ranks on 2 cores, a barrier, us: 1 yielding, 55 napping; beside computing threads 1500, 83.)

    Args:
        timeout: seconds until a rank counts as missing.
        oversubscribed: whether ranks share cores.
        describe: the text for a rank in messages.
    """

    def __init__(self, timeout: float, oversubscribed: bool, describe: Callable[[int], str] = "rank {}".format) -> None:
        self.timeout, self.notice = timeout, NOTICE
        self._oversubscribed = oversubscribed
        self.background = False
        """Whether the process computes in other threads while this one waits: set by whoever knows."""
        self._describe = describe
        self.what = "the session to open"
        self.waited = 0.0
        """Seconds spent in ``until`` so far: statistics take differences of it."""
        self.interrupted: Callable[[], None] | None = None
        """Called now and then while waiting; raises if there is nothing to wait for any more."""
        self.ask: Callable[[float, str, Sequence[int]], None] | None = None
        """Called about every second of a long wait with its start, its title and the ranks waited for; may raise."""
        self.where: Callable[[int], str] = lambda rank: ""
        """Where a rank is that is waited for, as far as it is known."""
        self._asked = 0.0

    def until(self, done: Callable[[], bool], late: Callable[[], Sequence[int]]) -> None:
        """Return when ``done()``; after the timeout raise RankTimeoutError naming the ranks of ``late()``.

        After ``notice`` seconds the log names them, once.
        """
        if done():
            return
        polls, start, noticed = 0, time.perf_counter(), False
        spins = 0 if self._oversubscribed or self.background else _SPINS
        try:
            while not done():
                polls += 1
                if polls > spins:
                    self._give_way(polls - spins, start)
                if polls % _CHECK_EVERY == 0:
                    noticed = self._check(start, late, noticed)
        finally:
            self.waited += time.perf_counter() - start

    def _check(self, start: float, late: Callable[[], Sequence[int]], noticed: bool) -> bool:
        """Look for bad news and at the clock; returns whether the log knows of this wait."""
        if self.interrupted is not None:
            self.interrupted()
        now = time.perf_counter()
        waited = now - start
        if self.ask is not None and waited > _ASK and now - self._asked > _ASK_EVERY:
            self._asked = now
            self.ask(start, self.what, late())
        if waited > self.timeout:
            raise self._timeout(late())
        if noticed or waited < self.notice:
            return noticed
        self.say(waited, late(), self.what)
        return True

    def say(self, waited: float, late: Sequence[int], what: str) -> None:
        """Write to the log who is waited for."""
        _LOG.warning("waited %.0f s for %s in %s; the limit is %g s", waited, self._names(late), what, self.timeout)

    @contextmanager
    def patience(self, factor: float) -> Iterator[None]:
        """Wait so much longer: for ranks that wait themselves, and must be the first to give up."""
        before = self.timeout, self.notice
        self.timeout, self.notice = self.timeout * factor, self.notice * factor
        try:
            yield
        finally:
            self.timeout, self.notice = before

    @property
    def pace(self) -> tuple[int, int, int]:
        """How compiled code polls: how often hard, how often in all, and the microseconds to nap; 0 yields instead.

        It then returns to Python, where somebody looks at the clock and for bad news.
        """
        if self.background:
            return 0, _COMPILED_NAPS, round(_NAP * 1e6)
        spins = 0 if self._oversubscribed else _COMPILED_SPINS
        return spins, spins + _COMPILED_YIELDS, 0

    def _give_way(self, polls: int, start: float) -> None:
        """Yield or nap: the longer the wait so far, the longer the nap, for each poll takes a core 10 us or more."""
        if polls < _YIELDS and not self.background:
            os.sched_yield()
            return
        share, longest = _NAPS[self.background]
        time.sleep(min(max(_NAP, share * (time.perf_counter() - start)), longest))

    def _timeout(self, late: Sequence[int]) -> RankTimeoutError:
        return RankTimeoutError(
            f"waited {self.timeout:g} s for {self._names(late)} in {self.what}; every rank must call it, in the same "
            f"order; see what that rank is doing, or raise timeout= if it is only slow"
        )

    def _names(self, late: Sequence[int]) -> str:
        names = [
            f"{self._describe(rank)}{f' [{place}]' if (place := self.where(rank)) else ''}"
            for rank in sorted(set(late))
        ]
        return ", ".join(names) or "a rank (not known which)"


def sharpen_naps() -> None:
    """Let naps of the calling thread end on time: Linux adds up to 50 us to those of ordinary threads.

    For threads of our own. Elsewhere than on Linux nothing happens.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
