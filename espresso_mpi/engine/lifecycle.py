"""The part of an ``Engine`` that accepts calls and ends them, with a result or with an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arrays import buffers
from ..collectives.messages.transport import Transport
from ..errors import EspressoError, RemoteError
from ..tracing.recording import Recorder
from .calls import PendingCall
from .dispatcher import Dispatcher
from .driver import Driver, SessionClosed, unusable
from .gpu_ends import GpuEnds
from .inbox import Inbox
from .negotiation import Negotiation


class Lifecycle:
    """See ``Engine``, which sets the attributes."""

    broken: BaseException | None
    unfinished: dict[int, PendingCall]
    _transport: Transport
    _recorder: Recorder
    _driver: Driver
    _dispatcher: Dispatcher
    _negotiation: Negotiation
    _inbox: Inbox
    _ends: GpuEnds
    _actions: list[PendingCall]

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

    def require_usable(self, waits: bool = False) -> None:
        """Raise EspressoError if the engine has failed or was shut down, or if this thread ``waits`` and cannot."""
        if self.broken is not None:
            raise unusable(self.broken)
        if waits:
            self.require_other_thread()

    def require_other_thread(self, call: PendingCall | None = None) -> None:
        """Raise EspressoError if this thread makes the progress of the engine, and so cannot wait for a call of it."""
        if self._driver.drives and (call is None or not call.finished):
            raise EspressoError(
                "session: an action of when_done() waits for a call, and the thread that runs the action has to make "
                "the progress of all calls; let the action push(), or let another thread wait"
            )

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

    def fail(self, error: BaseException) -> None:
        """A progress step raised ``error``."""
        self._break(error, notify=not isinstance(error, (RemoteError, SessionClosed)))

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
        with self._driver.driving_here():
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
            if call.watch is not None and call.watch.debug:
                call.watch.written()
        with self._driver.changed:
            call.gradients, call.given, call.finished = [], None, True
            self.unfinished.pop(id(call), None)
            self._driver.notify()
        call.announce_end()
