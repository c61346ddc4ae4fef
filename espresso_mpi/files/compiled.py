"""Functions that numba compiles, and keeps on disk for later processes where there is a place for them.

Each is compiled by one process at a time: the ranks of a node, which need the same kernels in the same moment, would
otherwise compile them all at once, and numba's index of a function's files loses entries when two processes write it.
What is on disk is used as long as all sources stay as they are from which it was compiled, see ``sources``.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from numba import config, njit, types
from numba.core import event
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock

from .one_process import OneProcess
from .sources import with_digest

T = TypeVar("T")

_warned = False

_KEPT_S = 14 * 86400.0
"""Seconds for which files of other sources are kept: who changes between branches needs them again."""


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Compile a function when it is first called; a decorator, as ``numba.njit(cache=True)``.

    C code cannot call it: a wrapper for that takes 7 % of the time in which functions are compiled, and ``c_function``
    compiles its own.

    Args:
        options: of ``njit``.
    """
    named = with_digest(function)
    return cached(lambda cache: _shared(_without_literals(njit(no_cfunc_wrapper=True, **options)(named)), named, cache))


def c_function(signature: Any, function: Callable[..., Any], **options: Any) -> Any:
    """Compile a function that C code calls by its ``address``, as ``numba.cfunc(signature, cache=True)`` does.

    Args:
        signature: of numba, such as ``int64(int64)``; not as a string.
        function: it is compiled now, but was made ``with_digest`` where it is defined.
        options: of ``cfunc``.
    """

    def make(cache: bool) -> Any:
        made = CFunc(function, (signature.args, signature.return_type), locals={}, options=options)
        _shared(made, function, cache).compile()
        return made

    return cached(make)


def is_compiled(function: Any) -> bool:
    """Whether what ``compiled`` returned was compiled in this process, or for this processor by one that kept it."""
    if getattr(function, "overloads", True):  # without numba, all is Python
        return True
    files = getattr(function._cache, "_cache_file", None)  # none where no directory can be written
    if files is None:
        return False
    try:
        processor = function.targetctx.codegen().magic_tuple()
        return any(
            key[1] == processor and Path(files._data_path(name)).exists() for key, name in files._load_index().items()
        )
    except Exception:  # what another process is writing, or an index of another version of numba
        return False


def _without_literals(dispatcher: Any) -> Any:
    """Let a function be compiled once for all numbers: in compiled code, numba tells arguments 0 and 1 from others."""
    find = dispatcher.get_call_template

    def find_for_any(args: Any, kwargs: Any) -> Any:
        return find(
            [types.unliteral(arg) for arg in args], {name: types.unliteral(arg) for name, arg in kwargs.items()}
        )

    if not config.DISABLE_JIT:
        dispatcher.get_call_template = find_for_any
    return dispatcher


class _SharedCache(FunctionCache):
    """numba's cache of a function, in which a process that finds nothing waits for those that are compiling it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.lock = OneProcess(Path(self._impl.locator.get_cache_path(), f"{self._impl.filename_base}.lock"))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None:
            self._impl.locator.ensure_cache_path()
            self.lock.acquire()
            found = super().load_overload(sig, target_context)
        if found is None:
            self._forget_others()
        return found

    def _forget_others(self) -> None:
        """Remove what other sources of the function have left long ago."""
        own = self._impl.filename_base.rpartition("-")[0]
        name, _, digest = own.rpartition("_")
        paths = Path(self._impl.locator.get_cache_path()).glob(f"{name}_{'[0-9a-f]' * len(digest)}-*.nb[ci]")
        for path in sorted(paths, reverse=True):  # an index before what it refers to
            with suppress(OSError):  # another process was first, or files of others may not be removed
                if not path.name.startswith(f"{own}-") and time.time() - path.stat().st_mtime > _KEPT_S:
                    path.unlink()


def _shared(made: Any, function: Callable[..., Any], cache: bool) -> Any:
    """Give what numba has made of a function a cache in which it is compiled by one process at a time."""
    if not cache or config.DISABLE_JIT:
        return made
    made._cache = shared = _SharedCache(function)  # as its `enable_caching` does
    compile_now = made.compile

    def compile_once(*sig: Any) -> Any:
        with global_compiler_lock, _no_collection():
            depth = shared.lock.depth
            try:
                return compile_now(*sig)
            finally:
                while shared.lock.depth > depth:
                    shared.lock.release()

    made.compile = compile_once
    return made


@contextmanager
def _no_collection() -> Iterator[None]:
    """Switch the garbage collector off, for all threads: while numba compiles, it takes 8 % of the time.

    Compiling for 24 s without it takes 9 MB more.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def cached(make: Callable[[bool], T]) -> T:
    """What ``make`` returns when it is told to use numba's cache, or not to, where no directory can be written.

    The log then says once that kernels are compiled in every process. What ``make`` compiles is a function
    ``with_digest``.
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
