"""Futures of torch for operations that other threads end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

_IDLE = 1.0
"""Seconds after which a thread without callbacks ends."""

_MOST_KEPT = 64


class Promise:
    """A future that is made when somebody asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._result: Callable[[], Any] | None = None
        self._ended: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def get(self) -> Any:
        with self._lock:
            if self._future is not None:
                return self._future
            self._ended = torch.futures.Future()
            # To C++, an exception that Python sets is a result, which DDP takes for tensors; one raised by ``then`` no
            self._future = self._ended.then(lambda _: self._result and self._result())
            ended = self._result is not None
        if ended:  # nobody can have added a callback
            self._ended.set_result(None)
        return self._future

    def fulfil(self, result: Callable[[], Any]) -> None:
        """Give the future its result, or what ``result`` raises; it may wait, and so may the future's callbacks."""
        with self._lock:
            self._result = result
            ended = self._ended
        if ended is not None:
            _CALLBACKS.run(lambda: ended.set_result(None))


class _Callbacks:
    """Threads for callbacks of futures.

    A callback may wait for another future, as that of torch's PowerSGD does: the thread that would end it, and one
    whose callback waits, cannot run it. So there are as many threads as callbacks that run at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._free = 0  # threads that wait, and for which no task is waiting

    def run(self, task: Callable[[], None]) -> None:
        with self._lock:
            free = self._free > 0
            self._free -= free
        if free:
            self._tasks.put(task)
        else:
            threading.Thread(target=self._work, args=(task,), name="espresso_mpi futures", daemon=True).start()

    def _work(self, task: Callable[[], None]) -> None:
        while True:
            task()
            with self._lock:
                self._free += 1
            while True:
                try:
                    task = self._tasks.get(timeout=_IDLE)
                    break
                except queue.Empty:
                    with self._lock:
                        if self._free:
                            self._free -= 1
                            return


_CALLBACKS = _Callbacks()


class KeptWorks:
    """The last works whose Python objects C++ may still need.

    C++ finds the methods of a work only while its Python object lives, but DDP's joining of uneven inputs keeps only
    the work of C++; it waits for it, and then asks for the future.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[int, Any] = {}

    def add(self, work: Any) -> None:
        with self._lock:
            self._works[id(work)] = work
            if len(self._works) > _MOST_KEPT:
                del self._works[next(iter(self._works))]

    def drop(self, work: Any) -> None:
        with self._lock:
            self._works.pop(id(work), None)
