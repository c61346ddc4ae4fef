"""Kernels with barriers on the shared window of a node, and collectives by reads, which use it for addresses only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from espresso_mpi.arrays.addresses import addresses

from . import shared_memory
from .joint import Bounds, JointRegions
from .single_copy import refusal
from .window_places import WindowPlaces


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
        return x.dtype == np.float32 and self.reads(4 * sum(b - a for a, b in regions))

    def _by_reads(
        self, kernel: Callable[..., bool], arrays: Sequence[np.ndarray], regions: JointRegions, *how: Any
    ) -> None:
        """Run a kernel of ``region_reads``."""
        half, self._uses = self._uses % 2, self._uses + 2  # one for each barrier, as in tables
        log = self._run(
            kernel, 2, addresses(arrays), regions.begins, regions.edges, *how, self.readable, self.places, half
        )
        if log[shared_memory.REFUSED]:
            raise refusal(int(log[shared_memory.REFUSED]))
