"""Functions that numba compiles, and keeps on disk for later processes where there is a place for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from numba import njit
from numba.core import event

T = TypeVar("T")

_warned = False


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Compile a function when it is first called; a decorator, as ``numba.njit(cache=True)``.

    Args:
        options: of ``njit``.
    """
    return cached(lambda cache: njit(cache=cache, **options)(function))


def cached(make: Callable[[bool], T]) -> T:
    """What ``make`` returns when it is told to use numba's cache, or not to, where no directory can be written.

    The log then says once that kernels are compiled in every process.
    """
    try:
        return make(True)
    except RuntimeError as error:  # numba finds no directory that it may write to
        _warn(str(error))
        return make(False)


class _Announcer(event.Listener):
    """Says once that kernels are being compiled, when that has taken a moment."""

    def __init__(self) -> None:
        self._began, self._taken = 0.0, 0.0

    def on_start(self, event: Any) -> None:
        self._began = time.perf_counter()

    def on_end(self, event: Any) -> None:
        module = getattr(event.data["dispatcher"].py_func, "__module__", "")
        if self._taken > _MOMENT_S or not module.startswith("espresso_mpi."):
            return
        self._taken += time.perf_counter() - self._began
        if self._taken > _MOMENT_S:
            logging.getLogger("espresso_mpi").info(
                "compiling kernels, which later processes load from disk; `espresso-mpi warmup` does it ahead"
            )


_MOMENT_S = 1.0


@lru_cache(maxsize=1)
def announce() -> None:
    """Log from now on, once, that kernels are compiled."""
    event.register("numba:compile", _Announcer())


def _warn(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        logging.getLogger("espresso_mpi").warning(
            "kernels are compiled anew in every process (%s); set NUMBA_CACHE_DIR to a directory that can be written",
            reason,
        )
