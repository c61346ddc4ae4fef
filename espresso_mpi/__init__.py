"""Compressed gradient synchronisation over MPI.

>>> import espresso_mpi
>>> espresso_mpi.sync(grads)                                # mean over all ranks, in place   # doctest: +SKIP
>>> session = espresso_mpi.Session(compressor="onebit")     # with compression                # doctest: +SKIP

Importing this package starts nothing: MPI, numba and CUDA are loaded by the first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Handle": "sessions.handles",
    "Session": "session",
    "Stats": "tracing.stats",
    "sync": "default",
    "default_session": "default",
    "BoundError": "errors",
    "ConfigError": "errors",
    "EspressoError": "errors",
    "Feedback": "feedback",
    "GradientError": "errors",
    "MismatchError": "errors",
    "NonFiniteError": "errors",
    "RankTimeoutError": "errors",
    "Plan": "types",
    "Route": "types",
    "ROUTES": "types",
    "Strategy": "types",
    "TensorSpec": "types",
    "Tuning": "tuning",
}
_MODULES = ("collectives", "compressors", "errors", "optim", "planner")

__all__ = [*_HOMES, *_MODULES, "__version__"]

if TYPE_CHECKING:
    from . import collectives as collectives
    from . import compressors as compressors
    from . import errors as errors
    from . import optim as optim
    from . import planner as planner
    from .default import default_session as default_session
    from .default import sync as sync
    from .errors import BoundError as BoundError
    from .errors import ConfigError as ConfigError
    from .errors import EspressoError as EspressoError
    from .errors import GradientError as GradientError
    from .errors import MismatchError as MismatchError
    from .errors import NonFiniteError as NonFiniteError
    from .errors import RankTimeoutError as RankTimeoutError
    from .feedback import Feedback as Feedback
    from .session import Session as Session
    from .sessions.handles import Handle as Handle
    from .tracing.stats import Stats as Stats
    from .tuning import Tuning as Tuning
    from .types import ROUTES as ROUTES
    from .types import Plan as Plan
    from .types import Route as Route
    from .types import Strategy as Strategy
    from .types import TensorSpec as TensorSpec


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
