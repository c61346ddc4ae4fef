"""What a transport does with GPU memory: whether MPI gets it or a copy, and the exchanges by ``gpu_messages``."""

from __future__ import annotations

import logging
from typing import Any

from espresso_mpi.arrays.workspace import Workspace

from . import probe
from .compiled_calls import CompiledCalls
from .failures import named
from .gpu_messages import Addressed, GpuExchange, GpuMessages, measured_unit
from .switches import SWITCH

_LOG = logging.getLogger("espresso_mpi")


class GpuCalls(CompiledCalls):
    """The part of a ``Transport`` that GPU memory needs.

    Attributes:
        device_aware: whether device pointers go to MPI; None: not known yet, and not done.
        gpu_messages: the exchanges.
    """

    rank: int
    device_aware: bool | None
    gpu_messages: GpuMessages
    _device_way_chosen = False

    @property
    def node(self) -> tuple[int, ...]:
        """World ranks of this node."""
        raise NotImplementedError

    def describe(self, rank: int) -> str:
        """See ``Transport.describe``."""
        raise NotImplementedError

    def outlive(self, memory: Any) -> None:
        """See ``Transport.outlive``."""
        raise NotImplementedError

    def _post_gpu(self, sends: Addressed, receives: Addressed, workspace: Workspace) -> GpuExchange:
        self.waiter.meanwhile = self._advance
        return self.gpu_messages.post(sends, receives, None if self.device_aware else workspace)

    @named("starting messages of GPU memory")
    def _advance(self) -> None:
        self.gpu_messages.advance()

    def _finish_gpu(self, exchange: GpuExchange) -> None:
        messages = self.gpu_messages
        try:
            self.waiter.until(lambda: messages.done(exchange), lambda: messages.late(exchange, self.rank))
        except BaseException:
            self.outlive(exchange)
            raise
        messages.end(exchange)

    def choose_device_way(self) -> None:
        """Decide whether device pointers go to MPI, and log it on rank 0; only the first call does anything.

        Collective: all ranks call it when the first GPU tensor appears. See ``probe``.
        """
        if self._device_way_chosen:
            return
        self._device_way_chosen, forced = True, self.device_aware is not None
        why = f"forced by {SWITCH}={int(bool(self.device_aware))}" if forced else self._probe_devices()
        if not self.device_aware:
            self.gpu_messages.unit = max(self._gathered(measured_unit()))
        if self.rank == 0:
            way = "device pointers go to MPI" if self.device_aware else "staged through page-locked host memory"
            _LOG.info("messages of GPU tensors: %s: %s", way, why)
            if not self.device_aware:
                _LOG.info("staging: a copy moves %d bytes in the time in which it starts", self.gpu_messages.unit)

    @named("probing device pointers")
    def _probe_devices(self) -> str:
        """Probe on one rank of each node, set ``device_aware`` if it works on all, and say how it went."""
        limit = min(probe.LIMIT_S, self.waiter.timeout / 2)  # the others must not take the prober for lost
        mine = probe.probe_gpu(limit) if self.rank == self.node[0] else None
        results = [(rank, result) for rank, result in enumerate(self._gathered(mine)) if result is not None]
        failed = next(((rank, result) for rank, result in results if not result.works), None)
        self.device_aware = failed is None
        if failed is None:
            return f"the probe passed on every node ({results[0][1].why})"
        return f"the probe failed on {self.describe(failed[0])}: {failed[1].why}"

    @named("comparing what ranks have found")
    def _gathered(self, mine: Any) -> list[Any]:
        """A value of each rank."""
        request = self._comm.Ibarrier()
        self.waiter.until(request.Test, list)
        return self._comm.allgather(mine)
