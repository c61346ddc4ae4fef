"""Waiting for other ranks: by polling, with a timeout, so that an error names the rank that does not come.

A ``WaitMonitor`` stands for the caller that waits. ``Waiter.monitored`` installs it for a with-block, and restores the
previous one afterwards. So one engine can run inside another on the same transport.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from espresso_mpi.errors import RankTimeoutError

from .naps import AT_BARRIER, BACKGROUND, FOREGROUND, YIELDS

_SPINS = 200
_COMPILED_SPINS, _COMPILED_YIELDS, _COMPILED_NAPS, _FEW_NAPS = 5000, 1000, 200, 50
"""Polls of compiled code. A pause counts as one more for each 0.1 ms that it lasts: naps end after about 20 ms, or 5 ms
where something else is to be advanced. In Python, each poll takes a core longer."""

_CHECK_EVERY, _CHECK_AFTER = 64, 5e-3
"""Polls and seconds after which a wait checks the time and the monitor."""

_PR_SET_TIMERSLACK = 29

_LOOK, _LOOK_EVERY = 2.0, 1.0
"""Seconds of waiting after which a rank looks for a deadlock, and the interval at which it does so."""

NOTICE = 10.0
"""Seconds of waiting after which the log names the late ranks, long before the timeout."""

_LOG = logging.getLogger("espresso_mpi")


class WaitMonitor:
    """The caller on whose behalf a rank waits. This one never interrupts; subclasses override what they need.

    Attributes:
        background: whether the process computes in other threads while this one waits.
        callers: number of user threads that this wait blocks.
    """

    background: bool = False
    callers: int = 0

    def check(self) -> None:
        """Called repeatedly while a rank waits. What it raises ends the wait: there is nothing left to wait for."""


class DeadlockCheck(Protocol):
    """What a long wait consults about the ranks that are late."""

    def long_wait(self, since: float, what: str, late: Sequence[int], callers: int) -> None:
        """Called about every second of a long wait; what it raises ends the wait.

        Args:
            since: when the wait began.
            what: the call that waits.
            late: the ranks that it waits for.
            callers: as in ``WaitMonitor``.
        """

    def location(self, rank: int) -> str:
        """Where a rank waits itself, as far as it is known; else an empty text."""


class Waiter:
    """Polls a condition until it holds or a timeout passes.

    If a node has at least as many ranks as cores, a rank that polls takes the core from a rank that works, so it gives
    the core away at once. Otherwise it polls hard for a moment first, which answers sooner. There are two ways to give
    the core away. A thread that yields lets another thread that computes run its whole time slice, about 3 ms. A thread
    that naps is back as soon as it wants, but a nap is 50 us too long if no thread computes. So it first yields while
    its process has nothing else to do, and only naps in the ``background`` (see ``naps``). A barrier of 2 ranks on 2
    cores takes 1 us yielding and 55 us napping; beside computing threads 1500 us and 83 us.

    Args:
        timeout: seconds until a rank counts as missing.
        oversubscribed: whether ranks share cores.
        describe: returns the text for a rank in messages.
        deadlocks: what to consult in long waits; None: nothing.
        advance: called before every poll: starts what can start by now.
        advances: whether it has something to start.

    Attributes:
        cores: of which the ranks of the node share each; 0: each rank has one. The same on all ranks of the node.
    """

    def __init__(
        self,
        timeout: float,
        oversubscribed: bool,
        describe: Callable[[int], str] = "rank {}".format,
        deadlocks: DeadlockCheck | None = None,
        advance: Callable[[], None] = lambda: None,
        advances: Callable[[], bool] = lambda: False,
    ) -> None:
        self.timeout, self.notice = timeout, NOTICE
        self._oversubscribed, self._describe, self._deadlocks = oversubscribed, describe, deadlocks
        self._monitor = WaitMonitor()
        self._advance, self._advances = advance, advances
        self.cores = 0
        self.what = "the session to open"
        self.waited = 0.0
        """Seconds spent in ``until`` so far: statistics take differences of it."""
        self._looked = 0.0

    def monitored(self, monitor: WaitMonitor) -> AbstractContextManager[None]:
        """Wait on behalf of ``monitor`` inside the with-block; afterwards, the previous monitor is in place again."""
        return _Monitored(self, monitor)

    def swap(self, monitor: WaitMonitor) -> WaitMonitor:
        """Wait on behalf of another monitor from now on; returns the previous one."""
        before, self._monitor = self._monitor, monitor
        return before

    def until(self, done: Callable[[], bool], late: Callable[[], Sequence[int]]) -> None:
        """Return when ``done()``; after the timeout raise RankTimeoutError naming the ranks of ``late()``.

        After ``notice`` seconds the log names them, once.
        """
        self._advance()
        if done():
            return
        polls, start, noticed = 0, time.perf_counter(), False
        checked = start
        spins = 0 if self._oversubscribed or self._monitor.background else _SPINS
        try:
            while not done():
                polls += 1
                if polls > spins:
                    self._give_way(polls - spins, start)
                if polls % _CHECK_EVERY == 0 or (polls > spins and time.perf_counter() - checked > _CHECK_AFTER):
                    noticed, checked = self._check(start, late, noticed), time.perf_counter()
                self._advance()
        finally:
            self.waited += time.perf_counter() - start

    def _check(self, start: float, late: Callable[[], Sequence[int]], noticed: bool) -> bool:
        """Check the monitor, for deadlocks and the time; returns whether the log has a notice of this wait."""
        self._monitor.check()
        now = time.perf_counter()
        waited = now - start
        if self._deadlocks is not None and waited > _LOOK and now - self._looked > _LOOK_EVERY:
            self._looked = now
            self._deadlocks.long_wait(start, self.what, late(), self._monitor.callers)
        if waited > self.timeout:
            raise self._timeout(late())
        if noticed or waited < self.notice:
            return noticed
        self.log_notice(waited, late(), self.what)
        return True

    def log_notice(self, waited: float, late: Sequence[int], what: str) -> None:
        """Log which ranks are late."""
        _LOG.warning("waited %.0f s for %s in %s; the limit is %g s", waited, self._names(late), what, self.timeout)

    @contextmanager
    def patience(self, factor: float) -> Iterator[None]:
        """Use a longer timeout in the with-block, for ranks that wait themselves and must time out first."""
        before = self.timeout, self.notice
        self.timeout, self.notice = self.timeout * factor, self.notice * factor
        try:
            yield
        finally:
            self.timeout, self.notice = before

    @property
    def pace(self) -> tuple[int, int, int]:
        """How compiled code polls: number of hard polls, of all polls, and microseconds of a nap; 0 yields instead.

        Afterwards it returns to Python, which checks the time and the monitor.
        """
        if self._monitor.background:
            return 0, _FEW_NAPS if self._advances() else _COMPILED_NAPS, round(AT_BARRIER * 1e6)
        spins = 0 if self._oversubscribed else _COMPILED_SPINS
        return spins, spins + _COMPILED_YIELDS, 0

    def _give_way(self, polls: int, start: float) -> None:
        """Yield or nap. Naps become longer with the wait."""
        background = self._monitor.background
        if polls < YIELDS and not background:
            os.sched_yield()
            return
        least, share, longest = BACKGROUND if background else FOREGROUND
        time.sleep(min(max(least, share * (time.perf_counter() - start)), longest))

    def _timeout(self, late: Sequence[int]) -> RankTimeoutError:
        return RankTimeoutError(
            f"waited {self.timeout:g} s for {self._names(late)} in {self.what}; every rank must call it, in the same "
            f"order; see what that rank is doing, or raise the timeout (timeout=) if it is only slow"
        )

    def _names(self, late: Sequence[int]) -> str:
        return ", ".join(map(self._name, sorted(set(late)))) or "a rank (not known which)"

    def _name(self, rank: int) -> str:
        place = self._deadlocks.location(rank) if self._deadlocks is not None else ""
        return f"{self._describe(rank)} [{place}]" if place else self._describe(rank)


class _Monitored(AbstractContextManager[None]):
    """See ``Waiter.monitored``; every call enters one, and a class is quicker to enter than a generator."""

    __slots__ = ("_monitor", "_waiter")

    def __init__(self, waiter: Waiter, monitor: WaitMonitor) -> None:
        self._waiter, self._monitor = waiter, monitor

    def __enter__(self) -> None:
        self._monitor = self._waiter.swap(self._monitor)

    def __exit__(self, *error: object) -> None:
        self._waiter.swap(self._monitor)


def sharpen_naps() -> None:
    """Make naps of the calling thread precise: Linux adds up to 50 us to those of ordinary threads.

    To be called by this package's own threads. It does nothing on other systems.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
