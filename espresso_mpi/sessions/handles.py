"""What stands for a call under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.calls import PendingCall
    from .base import SessionBase


class Handle:
    """A call in flight. ``Session.push`` returns it, and so do collectives with ``blocking=False``.

    Example:
        >>> with espresso_mpi.Session() as session:
        ...     handle = session.push("w", np.full(2, 3.0, np.float32))
        ...     handle.wait().tolist()
        [3.0, 3.0]
    """

    def __init__(self, session: SessionBase, call: PendingCall) -> None:
        self._session, self._call = session, call

    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return self._session._ended(self._call)

    def wait(self) -> Any:
        """Wait until the result is ready.

        Returns:
            What the blocking call returns. For ``push``, this is the array, updated in place, or a new array if it is
            immutable.

        Raises:
            GradientError, MismatchError, NonFiniteError, BoundError, PlanError, ConfigError: on every rank; the text
                names rank and tensor. The tensor was not changed.
            RankTimeoutError, RemoteError, TransportError: a rank did not come, another rank failed, or MPI failed. The
                session cannot be used any more.
        """
        return self._session._wait(self._call)

    @property
    def error(self) -> BaseException | None:
        """The error that ``wait`` will raise. None while the call is in flight, and after it has succeeded."""
        return self._call.error

    def when_done(self, act: Callable[[], None]) -> None:
        """Call ``act`` once, by the thread that ends the call, or at once if it has ended.

        It may push more tensors of the same step. It must not wait for a call: that raises an EspressoError. What it
        raises in the other thread is logged.
        """
        self._call.when_finished(act)

    def __repr__(self) -> str:
        kind, name = self._call.key
        state = "under way" if not self.done() else "done" if self.error is None else "failed"
        return f"<Handle of {kind} {name!r}: {state}>"
