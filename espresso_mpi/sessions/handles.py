"""What stands for a call under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.calls import PendingCall
    from .base import SessionBase


class Handle:
    """A tensor on its way, as ``Session.push`` returns it.

    Example:
        >>> with espresso_mpi.Session() as session:
        ...     handle = session.push("w", np.full(2, 3.0, np.float32))
        ...     handle.wait().tolist()
        [3.0, 3.0]
    """

    def __init__(self, session: SessionBase, call: PendingCall) -> None:
        self._session, self._call = session, call

    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        return self._session._ended(self._call)

    def wait(self) -> Any:
        """Wait until the tensor is the mean over the ranks.

        Returns:
            the array that was pushed, updated in place; a new one if it is immutable (JAX).

        Raises:
            GradientError, MismatchError, NonFiniteError, PlanError, ConfigError: on every rank, naming rank and tensor,
                which was not changed.
            RankTimeoutError, RemoteError, TransportError: a rank did not come, or failed, or MPI did; the session
                cannot be used any more.
        """
        return self._session._wait(self._call)

    def __repr__(self) -> str:
        kind, name = self._call.key
        return f"<Handle of {kind} {name!r}: {'done' if self.done() else 'under way'}>"
