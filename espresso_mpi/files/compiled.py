"""Functions that numba compiles, and keeps on disk for later processes where there is a place for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

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


def _warn(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        logging.getLogger("espresso_mpi").warning(
            "kernels are compiled anew in every process (%s); set NUMBA_CACHE_DIR to a directory that can be written",
            reason,
        )
