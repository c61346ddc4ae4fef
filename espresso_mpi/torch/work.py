"""What torch waits for: an operation of the process group that is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from ..errors import RankTimeoutError, TransportError
from ..sessions.handles import Handle
from .futures import KeptWorks, Promise
from .untraced import untraced

_SPIN, _PAUSE = 1e-3, 1e-4
"""Seconds for which a message is awaited without pauses, as most are short; and the pauses after these."""

_LATE: list[RequestWork] = []
"""Messages that were given up: MPI may still read or write their memory."""

_KEPT = KeptWorks()

_NO_LIMIT = timedelta(0)

_SIZES = "the tensors of send and recv must have the same size and type"

_SMALL = 64
"""Elements of results that may stay in memory for a while."""


def _events_behind(result: Sequence[torch.Tensor]) -> list[tuple[Any, Any]]:
    """An event behind what this thread has queued for GPU tensors, on each GPU: who waits may use another stream."""
    found = []
    for where in {tensor.device for tensor in result if tensor.is_cuda}:
        found.append((where, torch.cuda.Event()))
        found[-1][1].record(torch.cuda.current_stream(where))
    return found


@untraced
class HandleWork(distributed.Work):
    """Collectives of a session.

    Args:
        handles: of the collectives; result: the tensors that they write; after: what completes them, once they ended;
            limit: timeout of ``wait``, where it is not told another one; none: that of the group.
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        result: list[torch.Tensor],
        after: Sequence[Callable[[], None]] = (),
        limit: timedelta = _NO_LIMIT,
    ) -> None:
        super().__init__()
        self._limit = limit
        self.handles, self._result, self._after = handles, result, after
        self._error: BaseException | None = None
        self._copied: list[tuple[Any, Any]] = []
        self._ended, self._future = threading.Event(), Promise()
        self._left, self._lock = len(handles), threading.Lock()
        for handle in handles:
            handle.when_done(self._one_ended)
        if not handles:
            self._end()
        _KEPT.add(self)

    def _one_ended(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._end()

    def _end(self) -> None:
        """Called by the thread that ends the last collective."""
        self._error = next((h.error for h in self.handles if h.error is not None), None)
        try:
            for complete in self._after if self._error is None else ():
                complete()
            self._copied = _events_behind(self._result) if self._after and self._error is None else []
        except Exception as error:  # such as a target of another shape; ``wait`` raises it
            self._error = error
        self._ended.set()
        self._future.fulfil(self._copied_and_checked)

    def _copied_and_checked(self) -> list[torch.Tensor]:
        """As ``_checked``, for whoever gets it from a future, on any stream."""
        for _, event in self._copied:
            event.synchronize()
        return self._checked()

    def _checked(self) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; with a timeout, fail after it: the collectives go on until that of the group."""
        seconds = (timeout or self._limit).total_seconds()
        if seconds > 0 and not self._ended.wait(seconds):
            raise RankTimeoutError(
                f"waited {seconds:g} s for a collective; every rank must call it, in the same order; see "
                f"what the others do, or pass a longer timeout if they are only slow"
            )
        for handle in self.handles:
            handle.wait()
        self._ended.wait()  # for what completes them
        for where, event in self._copied:
            torch.cuda.current_stream(where).wait_event(event)
        if sum(x.numel() for x in self._result) > _SMALL:
            _KEPT.drop(self)
        self._checked()
        return True

    def is_completed(self) -> bool:
        ended = all(handle.done() for handle in self.handles) and self._ended.is_set()
        return ended and all(event.query() for _, event in self._copied)

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        return self._error

    def get_future(self) -> Any:
        _KEPT.drop(self)
        return self._future.get()

    def result(self) -> list[torch.Tensor]:
        return self._result


@untraced
class RequestWork(distributed.Work):
    """Messages of MPI.

    Args:
        requests: of MPI; tensors: the caller's; host: the memory that MPI reads or writes; receives: the caller's
            tensors get it; timeout: of ``wait``, where it is not told another one.
    """

    def __init__(
        self,
        requests: Sequence[Any],
        tensors: list[torch.Tensor],
        host: list[torch.Tensor],
        timeout: timedelta,
        receives: bool = False,
    ) -> None:
        super().__init__()
        self._timeout = timeout
        self._requests, self._tensors, self._host, self._receives = list(requests), tensors, host, receives
        self._source, self._ended = -1, False
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = (timeout or self._timeout).total_seconds()
        start = time.monotonic()
        while not self.is_completed():
            waited = time.monotonic() - start
            if waited > limit:
                _LATE.append(self)
                raise RankTimeoutError(
                    f"waited {limit:g} s for a message to be {'received' if self._receives else 'sent'}; the other "
                    f"rank must call {'send' if self._receives else 'recv'} with the same tag; see what it is doing, "
                    f"or raise timeout= of init_process_group if it is only slow"
                )
            time.sleep(0 if waited < _SPIN else _PAUSE)
        return True

    def is_completed(self) -> bool:
        from mpi4py import MPI

        if not self._ended:
            statuses = [MPI.Status() for _ in self._requests]
            try:
                through = MPI.Request.Testall(self._requests, statuses)
            except MPI.Exception as error:
                raise TransportError(f"{'recv' if self._receives else 'send'}: {error}; {_SIZES}") from error
            if through:
                self._source = statuses[0].Get_source() if statuses else -1
                self._finish([status.Get_count(MPI.BYTE) for status in statuses])
        return self._ended

    def _finish(self, counts: Sequence[int]) -> None:
        self._ended = True
        for target, count in zip(self._host, counts) if self._receives else ():
            if count != target.nbytes:
                raise TransportError(
                    f"recv: {count} bytes from rank {self._source} for a tensor of {target.nbytes}; {_SIZES}"
                )
        for target, source in zip(self._tensors, self._host) if self._receives else ():
            if target.data_ptr() != source.data_ptr():
                target.detach().copy_(source)

    def is_success(self) -> bool:
        return self.is_completed()

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        if self._future is None:
            promise = Promise()
            self._future = promise.get()
            promise.fulfil(lambda: self._tensors if self.wait() else [])
        return self._future

    def result(self) -> list[torch.Tensor]:
        return self._tensors


@untraced
class EndedWork(distributed.Work):
    """Operations that have ended: torch has waited for them in its own thread, which would have raised their error.

    Args:
        result: the tensors that they have written.
    """

    handles: Sequence[Handle] = ()

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def get_future(self) -> Any:
        promise = Promise()
        promise.fulfil(self.result)
        return promise.get()

    def result(self) -> list[torch.Tensor]:
        return self._result


def work_of(
    handles: Sequence[Handle], result: list[torch.Tensor], after: Sequence[Callable[[], None]] = ()
) -> HandleWork | EndedWork:
    """Collectives as torch waits for them; those without a handle have ended. ``after``: completes them."""
    if handles:
        return HandleWork(handles, result, after)
    for complete in after:
        complete()
    return EndedWork(result)


def done(result: list[torch.Tensor]) -> HandleWork:
    """An operation that has ended, for others than torch's Python functions: see ``futures.KeptWorks``."""
    return HandleWork([], result)
