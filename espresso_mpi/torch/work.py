"""What torch waits for: an operation of the process group that is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from ..sessions.handles import Handle


class HandleWork(distributed.Work):
    """Collectives of a session.

    Args:
        handles: of the collectives; result: the tensors that they write; after: what completes them, once they ended.
    """

    def __init__(
        self, handles: Sequence[Handle], result: list[torch.Tensor], after: Sequence[Callable[[], None]] = ()
    ) -> None:
        super().__init__()
        self.handles, self._result, self._after = handles, result, after
        self._error: BaseException | None = None
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        # To C++, an exception that Python sets is a result, which DDP takes for tensors; one raised by ``then`` is none
        self._future = self._ended.then(self._checked)
        self._left = len(handles)
        for handle in handles:
            handle.when_done(self._one_ended)
        if not handles:
            self._end()

    def _one_ended(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._end()

    def _end(self) -> None:
        """Called by the thread that ends the last collective."""
        self._error = next((h.error for h in self.handles if h.error is not None), None)
        for complete in self._after if self._error is None else ():
            complete()
        self._ended.set_result(None)

    def _checked(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta | None = None) -> bool:
        for handle in self.handles:
            handle.wait()
        self._ended.wait()  # for what completes them
        return True

    def is_completed(self) -> bool:
        return all(handle.done() for handle in self.handles) and bool(self._ended.done())

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        return self._error

    def get_future(self) -> Any:
        return self._future

    def result(self) -> list[torch.Tensor]:
        return self._result


class RequestWork(distributed.Work):
    """Messages of MPI.

    Args:
        requests: of MPI; tensors: the caller's; host: the memory that MPI reads or writes; receives: the caller's
            tensors get it.
    """

    def __init__(
        self, requests: Sequence[Any], tensors: list[torch.Tensor], host: list[torch.Tensor], receives: bool = False
    ) -> None:
        super().__init__()
        self._requests, self._tensors, self._host, self._receives = list(requests), tensors, host, receives
        self._source, self._ended = -1, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        from mpi4py import MPI

        if not self._ended:
            statuses = [MPI.Status() for _ in self._requests]
            MPI.Request.Waitall(self._requests, statuses)
            self._source = statuses[0].Get_source() if statuses else -1
            self._finish()
        return True

    def is_completed(self) -> bool:
        from mpi4py import MPI

        if not self._ended:
            statuses = [MPI.Status() for _ in self._requests]
            if MPI.Request.Testall(self._requests, statuses):
                self._source = statuses[0].Get_source() if statuses else -1
                self._finish()
        return self._ended

    def _finish(self) -> None:
        self._ended = True
        for target, source in zip(self._tensors, self._host) if self._receives else ():
            if target.data_ptr() != source.data_ptr():
                target.detach().copy_(source)

    def is_success(self) -> bool:
        return self.is_completed()

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self.wait()
        future.set_result(self._tensors)
        return future

    def result(self) -> list[torch.Tensor]:
        return self._tensors


def done(result: list[torch.Tensor]) -> HandleWork:
    """An operation that has ended."""
    return HandleWork([], result)
