"""Who drives an engine: the threads that wait for it, one at a time; while nobody waits, a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from ..arrays import device
from ..collectives.messages.standstill import THREAD
from ..collectives.messages.transport import Transport
from ..collectives.messages.waiting import sharpen_naps
from ..errors import EspressoError

_LOG = logging.getLogger("espresso_mpi")

_IDLE = 1.0
"""Seconds without work after which the engine's thread ends; the next push starts another."""

PAUSE = 0.5e-3
"""Seconds until ranks without a common call compare theirs again."""


class Left(EspressoError):  # noqa: N818 - a state, not a failure
    """The session was closed or left on this rank."""

    def __init__(self, why: str, cure: str = "open a new one") -> None:
        super().__init__(why)
        self.cure = cure


def unusable(error: BaseException) -> EspressoError:
    """What calls of a session raise once it was left or has failed with this."""
    left = isinstance(error, Left)
    why = str(error) if left else f"it failed: {type(error).__name__}: {error}"
    cure = error.cure if isinstance(error, Left) else "open a new one"
    return EspressoError(f"this session cannot be used any more: {why}; {cure}")


class Driven(Protocol):
    """What is driven. ``broken``: why it can do nothing any more."""

    broken: BaseException | None

    def turn(self) -> bool:
        """Do something; False if there is nothing to do."""

    def has_work(self) -> bool:
        """Whether a turn would do anything."""

    def fail(self, error: BaseException) -> None:
        """A turn raised this."""


class Driver:
    """Takes the turns of an engine.

    Attributes:
        changed: held while calls come in or end; notified when any did.
        driving: held by the thread that takes turns.
        thread: the engine's own, while there is one; stopping: it is to end.
        callers: how many threads wait for something; gpu: the device that turns work on.
    """

    def __init__(self, driven: Driven, transport: Transport) -> None:
        self._driven, self._transport = driven, transport
        self.changed, self.driving = threading.Condition(), threading.Lock()
        self.thread: threading.Thread | None = None
        self.stopping = False
        self.callers = 0
        self.gpu: int | None = None

    def called(self, background: bool) -> None:
        """A call came in; ``background``: start on it even if nobody waits. ``changed`` is held."""
        if background and self.thread is None:
            thread = threading.Thread(target=self._work, name=THREAD, daemon=True)
            thread.start()
            self.thread = thread
        self.changed.notify_all()

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Take turns, or let another thread take them, until something is done."""
        if done():
            return
        self._count_callers(1)
        try:
            while not done():
                self._drive_or_wait(done)
        finally:
            self._count_callers(-1)

    def nap(self, until: Callable[[], bool]) -> None:
        """Let a moment pass, or the time until something holds that ``changed`` tells of."""
        with self.changed:
            self.changed.wait_for(lambda: until() or self.stopping, timeout=PAUSE)

    def join(self) -> None:
        """Wait for the engine's thread, which is to stop."""
        with self.changed:
            self.changed.notify_all()
        thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)
            if thread.is_alive():
                _LOG.warning("the engine's thread is still at work; the end of MPI may not be clean")

    def forked(self) -> None:
        """This process is a fork: the thread is not in it, and nobody here releases what that one held."""
        self.changed, self.driving, self.thread, self.stopping = threading.Condition(), threading.Lock(), None, True

    def interrupted(self) -> None:
        """Called while waiting for other ranks: raise if there is nothing to wait for any more."""
        if self.stopping:
            raise Left("it was left")
        self._transport.check_abort()

    def _count_callers(self, change: int) -> None:
        with self.changed:
            self.callers += change
            self._transport.waiter.background = self.callers == 0  # then the process computes meanwhile
            self._transport.whereabouts.callers = self.callers

    def _drive_or_wait(self, done: Callable[[], bool]) -> None:
        if not self.driving.acquire(blocking=False):
            with self.changed:
                self.changed.wait_for(lambda: done() or not self.driving.locked(), timeout=0.1)
            return
        try:
            self._drive(done)
        finally:
            self.driving.release()
            with self.changed:
                self.changed.notify_all()

    def _work(self) -> None:
        """What the engine's own thread does: drive while there is something to do, end after a while without."""
        sharpen_naps()
        while True:
            with self.changed:
                woken = self.changed.wait_for(lambda: self.stopping or self._driven.has_work(), timeout=_IDLE)
                if self.stopping or not woken:
                    self.thread = None
                    return
            with self.driving:
                self._drive(lambda: False)
            with self.changed:
                self.changed.notify_all()

    def _drive(self, done: Callable[[], bool]) -> None:
        """Take turns until something is done or nothing is left to do."""
        try:
            if self.gpu is not None:
                device.use_gpu(self.gpu)
            while self._driven.broken is None and not done() and self._driven.turn():
                pass
        except BaseException as error:
            self._driven.fail(error)
            if not isinstance(error, Exception):
                raise
