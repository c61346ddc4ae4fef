"""``espresso_mpi.sync`` and the default session of a process."""

from __future__ import annotations

from typing import Any, Literal

from .errors import ConfigError
from .session import Session

_SESSION: Session | None = None


def default_session(**options: Any) -> Session:
    """The default session of the process, over ``MPI.COMM_WORLD``. The first call opens it, with ``Session`` options.

    If it was closed or has failed, a new one replaces it, without its residuals.

    Raises:
        ConfigError: options are passed although it is open already.

    Example:
        >>> session = espresso_mpi.default_session()
        >>> session is espresso_mpi.default_session()
        True
    """
    global _SESSION
    if _SESSION is None or not _SESSION.usable:
        _SESSION = Session(**options)
    elif options:
        raise ConfigError("the default session is open already; pass its options in the first call, or open a Session")
    return _SESSION


def sync(grads: Any, missing: Literal["error", "zero"] = "error") -> Any:
    """Average gradients over all ranks of ``MPI.COMM_WORLD``, in place; see ``Session.sync``.

    The gradients are dense unless ``default_session(compressor=...)`` was called before.

    Example:
        >>> grads = {"w": np.full(2, 3.0, np.float32)}  # every rank has its own
        >>> espresso_mpi.sync(grads)["w"].tolist()
        [3.0, 3.0]
    """
    return default_session().sync(grads, missing)
