"""Kernels with barriers on the shared window of a node, and collectives by reads, which use it for addresses only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from espresso_mpi.arrays.addresses import addresses

from ..data.reduction import arithmetic
from . import region_reads, shared_memory
from .agreed import How
from .joint import Bounds, JointRegions
from .single_copy import refusal
from .window_places import WindowPlaces

_ABANDONED: list[Sequence[np.ndarray]] = []


class WindowKernels(WindowPlaces):
    """The part of a ``SharedWindow`` that runs kernels."""

    def _run(self, kernel: Callable[..., bool], barriers: int, *arguments: Any) -> np.ndarray:
        """Run a kernel with this number of barriers, again whenever it stops waiting; returns its log."""
        log, waiter = np.zeros(shared_memory.LOG, np.int64), self._waiter
        while not kernel(*arguments, self._flags, self._me, self._count, self._epoch, waiter.pace, log):
            self._wait(self._epoch + int(log[shared_memory.STAGE]) + 1)
        self._epoch += barriers
        waiter.waited += float(log[shared_memory.WAITED]) * 1e-9
        return log

    def _may_read(self, x: np.ndarray, regions: Bounds) -> bool:
        """Whether the members read regions of one array from each other's memory."""
        return x.dtype == np.float32 and self.reads_memory(4 * sum(b - a for a, b in regions))

    def _by_reads(self, arrays: Sequence[np.ndarray], regions: JointRegions, how: How | None = None) -> None:
        """A reduce-scatter, or an allgather if ``how`` is None, see ``region_reads``."""
        half, self._uses = self._uses % 2, self._uses + 2  # one for each barrier, as in tables
        sums, how = how is not None, how or arithmetic(1.0, "float32")
        places = addresses(arrays)
        with self._kept(arrays):
            log = self._run(
                region_reads.run, 2, sums, places, regions.begins, regions.edges, how, self.readable, self.places, half
            )
        require_read(log)

    @contextmanager
    def _kept(self, arrays: Sequence[np.ndarray]) -> Iterator[None]:
        """Arrays that other members read: after a failure they outlive the call, for these may not have noticed it."""
        try:
            yield
        except BaseException:
            _ABANDONED.append(arrays)
            raise


def require_read(log: np.ndarray) -> None:
    """Raise if a member could not read; ``log``: of a kernel."""
    if log[shared_memory.REFUSED]:
        raise refusal(int(log[shared_memory.REFUSED]))
