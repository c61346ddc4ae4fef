"""The threads that drive an engine: those that wait for it, one at a time; else a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ..arrays import device
from ..collectives.messages.deadlock import THREAD
from ..collectives.messages.transport import Transport
from ..collectives.messages.waiting import WaitMonitor, sharpen_naps
from ..errors import EspressoError

_LOG = logging.getLogger("espresso_mpi")

_IDLE = 1.0
"""Seconds without work after which the engine's thread ends; the next push starts a new one."""

_STOP_S = 60.0
"""Longest wait for that thread when the session is closed. It looks at every wait whether it is to stop, but not while
numba compiles a kernel, and a process that ends meanwhile crashes."""

PAUSE = 0.5e-3
"""Seconds between the negotiation rounds of ranks without a common call."""


class SessionClosed(EspressoError):  # noqa: N818 - a state, not a failure
    """The session was closed on this rank, in whatever way."""

    def __init__(self, why: str, remedy: str = "open a new one") -> None:
        super().__init__(why)
        self.remedy = remedy


def unusable(error: BaseException) -> EspressoError:
    """The error that calls of a session raise after it was shut down or has failed with ``error``."""
    closed = isinstance(error, SessionClosed)
    why = str(error) if closed else f"it failed: {type(error).__name__}: {error}"
    remedy = error.remedy if isinstance(error, SessionClosed) else "open a new one"
    return EspressoError(f"this session cannot be used any more: {why}; {remedy}")


class Driven(Protocol):
    """What a driver drives: the engine. ``broken``: why it takes no more calls."""

    broken: BaseException | None

    def progress(self) -> bool:
        """Make one progress step; False if there is nothing to do."""

    def has_work(self) -> bool:
        """Whether a progress step would do anything."""

    def fail(self, error: BaseException) -> None:
        """A progress step raised ``error``."""


class Driver(WaitMonitor):
    """Makes the progress steps of an engine, and monitors the waits in them.

    Attributes:
        changed: held while calls arrive or end; notified afterwards.
        driving: held by the thread that makes progress steps.
        thread: the engine's own thread, while there is one.
        stopping: whether that thread is to end.
        callers: number of user threads that wait for calls.
        background: as in ``WaitMonitor``: no user thread waits, so they compute.
        gpu: number of the GPU that progress steps work on; None before the first GPU tensor.
    """

    def __init__(self, driven: Driven, transport: Transport) -> None:
        self._driven, self._transport = driven, transport
        self.changed, self.driving = threading.Condition(), threading.Lock()
        self._sleeping = 0
        self.thread: threading.Thread | None = None
        self.stopping, self.callers = False, 0
        self.background = True
        self.gpu: int | None = None
        self._stream: device.OwnStream | None = None
        self._driving_thread: int | None = None

    @property
    def drives(self) -> bool:
        """Whether this thread makes a progress step now, such as one that has called an action of the user."""
        return self._driving_thread == threading.get_ident()

    @contextmanager
    def driving_here(self) -> Iterator[None]:
        """In the with-block this thread counts as the one that makes progress: nobody else does, as the engine ends."""
        before, self._driving_thread = self._driving_thread, threading.get_ident()
        try:
            yield
        finally:
            self._driving_thread = before

    def called(self, background: bool) -> None:
        """A call has arrived; ``background``: start it even if no thread waits. ``changed`` is held."""
        if background and self.thread is None:
            thread = threading.Thread(target=self._work, name=THREAD, daemon=True)
            thread.start()
            self.thread = thread
        self.notify()

    def notify(self) -> None:
        """Wake the threads that wait for a change, if there are any. ``changed`` is held."""
        if self._sleeping:
            self.changed.notify_all()

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Make progress steps, or let another thread make them, until ``done()``."""
        if done():
            return
        self._count_callers(1)
        try:
            while not done():
                self._drive_or_wait(done)
        finally:
            self._count_callers(-1)

    def run(self, act: Callable[[], None]) -> None:
        """As ``wait_in``, if no other thread makes progress steps."""
        if self.take():
            try:
                self.wait_in(act)
            finally:
                self.leave()

    def take(self) -> bool:
        """Make no progress steps until this thread calls ``leave``; False: another thread makes some, or none is to."""
        if self.stopping or not self.driving.acquire(blocking=False):
            return False
        self._driving_thread = threading.get_ident()
        return True

    def leave(self) -> None:
        """The end of what ``take`` has begun."""
        self._driving_thread = None
        self.driving.release()
        if self.callers or self.thread is not None:  # they may be waiting to drive
            with self.changed:
                self.notify()

    def wait_in(self, act: Callable[[], None]) -> None:
        """Do something in which this thread waits, between ``take`` and ``leave``; an error fails the engine."""
        self._count_callers(1)
        try:
            self._guarded(act)
        finally:
            self._count_callers(-1)

    def nap(self, until: Callable[[], bool]) -> None:
        """Wait for ``PAUSE`` seconds, or until a condition holds that ``changed`` is notified of."""
        self._sleep(lambda: until() or self.stopping, PAUSE)

    def _sleep(self, until: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition holds that ``changed`` is notified of; returns whether it does."""
        with self.changed:
            self._sleeping += 1
            try:
                return self.changed.wait_for(until, timeout=seconds)
            finally:
                self._sleeping -= 1

    def enter_gpu(self, number: int) -> None:
        """Let the thread that makes progress steps work on a GPU, on the session's own stream."""
        device.use_gpu(number)  # this may not be the caller's thread
        self.gpu, self._stream = number, self._stream or device.OwnStream()
        device.enter_stream(self._stream)

    @contextmanager
    def halted(self) -> Iterator[None]:
        """Inside the with-block no other thread makes a progress step, unless one does not end in ``_STOP_S`` seconds.

        ``stopping`` is set. Who keeps the memory of messages alive would otherwise miss what a step still posts.
        """
        held = not self.drives and self.driving.acquire(timeout=_STOP_S)
        try:
            yield
        finally:
            if held:
                self.driving.release()

    def join(self) -> None:
        """Wait for the engine's thread, which was told to stop."""
        with self.changed:
            self.notify()
        thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=_STOP_S)
            if thread.is_alive():
                _LOG.warning("the engine's thread did not stop within %d s; MPI_Finalize may fail", _STOP_S)

    def forked(self) -> None:
        """This process is a fork: it has no copy of the thread, so locks that the thread held are replaced."""
        self.changed, self.driving, self._sleeping = threading.Condition(), threading.Lock(), 0
        self.thread, self.stopping = None, True

    def check(self) -> None:
        """End a wait for other ranks if the engine was shut down, or another rank has sent an abort."""
        if self.stopping:
            raise SessionClosed("it was closed")
        self._transport.check_abort()

    def _count_callers(self, change: int) -> None:
        with self.changed:
            self.callers += change
            self.background = self.callers == 0
            if change < 0:  # another thread may be waiting to drive
                self.notify()

    def _drive_or_wait(self, done: Callable[[], bool]) -> None:
        if self.stopping or not self.driving.acquire(blocking=False):
            self._sleep(lambda: done() or not self.driving.locked(), 0.1)
            return
        try:
            self._drive(done)
        finally:
            self.driving.release()
            with self.changed:
                self.notify()

    def _work(self) -> None:
        """The engine's own thread: drives while there is work, ends after ``_IDLE`` seconds without."""
        sharpen_naps()
        while True:
            with self.changed:
                woken = self._sleep(lambda: self.stopping or self._driven.has_work(), _IDLE)
                if self.stopping or not woken:
                    self.thread = None
                    return
            with self.driving:
                self._drive(lambda: False)
            with self.changed:
                self.notify()

    def _drive(self, done: Callable[[], bool]) -> None:
        """Make progress steps until ``done()``, or until there is nothing to do, or the session is being closed."""

        def steps() -> None:
            if self.gpu is not None:
                self.enter_gpu(self.gpu)
            while not self.stopping and self._driven.broken is None and not done() and self._driven.progress():
                pass

        self._guarded(steps)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Do something in this thread, which makes progress meanwhile; an error fails the engine."""
        self._driving_thread = threading.get_ident()
        try:
            with device.leaving_stream(), self._transport.waiter.monitored(self):
                act()
        except SessionClosed as error:
            if not self.stopping:  # who stops this one does the rest
                self._driven.fail(error)
        except BaseException as error:
            self._driven.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._driving_thread = None
