"""What a transport does with GPU memory: whether MPI gets it or a copy, and the exchanges by ``gpu_messages``."""

from __future__ import annotations

import ctypes
import logging
import time
from typing import Any

import numpy as np

from espresso_mpi.arrays import device
from espresso_mpi.arrays.workspace import Workspace

from . import probe
from .compiled_calls import CompiledCalls
from .failures import named
from .gpu_messages import Addressed, GpuExchange, GpuMessages, measured_unit
from .switches import SWITCH

GPU_TAG = 0x5E5D
"""The tag of exchanges of GPU memory, of which messages start when the GPU is ready."""

_LOG = logging.getLogger("espresso_mpi")

_ABANDONED: list[Any] = []
"""Transports that failed, with the memory of messages that MPI may still write to: it must outlive the session."""
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_ABANDONED))  # and Python itself: MPI_Finalize comes after its last object

LENGTHS = (512 << 10, 4 << 20)
"""Bytes of messages that are tried beside the usual ones."""

_RING_BYTES, _RING_TURNS = 4 << 20, 3
"""Bytes that every node sends and receives for each try, and how often: the least time counts."""

_QUICKER = 0.9
"""Another length than the usual one is taken if it takes at most this share of its time: the rest may be noise."""


class GpuCalls(CompiledCalls):
    """The part of a ``Transport`` that GPU memory needs.

    Attributes:
        device_aware: whether device pointers go to MPI; None: not known yet, and not done.
        gpu_messages: the exchanges.
        gpu_message_bytes: the longest message of GPU memory between nodes, staged or not.
    """

    device_aware: bool | None
    gpu_messages: GpuMessages
    gpu_message_bytes: int
    _length_given: bool
    _device_way_chosen = False

    def outlive(self, memory: Any) -> None:
        """Keep memory alive after a failure: abandoned messages may still write to it. No others start."""
        _ABANDONED.append((self, memory, self.gpu_messages.forget()))

    def _receive_gpu(self, rank: int, array: Any) -> list[tuple[int, Any]]:
        return self._messages_of("Irecv", rank, array, GPU_TAG, self._longest_gpu(rank))

    def _send_gpu(self, rank: int, array: Any) -> list[tuple[int, Any]]:
        return self._messages_of("Isend", rank, array, GPU_TAG, self._longest_gpu(rank))

    def _longest_gpu(self, rank: int) -> int:
        """Bytes of the longest message of GPU memory to a rank."""
        return self._longest(rank) if rank in self._near else self.gpu_message_bytes

    def _post_gpu(self, sends: Addressed, receives: Addressed, workspace: Workspace) -> GpuExchange:
        return self.gpu_messages.post(sends, receives, None if self.device_aware else workspace)

    @named("starting messages of GPU memory")
    def advance(self) -> None:
        """Start the messages of GPU memory that can start by now. Waits for nothing."""
        if self.gpu_messages.under_way:
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
        if len(set(self.hostnames)) > 1 and not self._length_given:
            self.gpu_message_bytes = self._quickest_length()
        if self.rank == 0:
            way = "device pointers go to MPI" if self.device_aware else "staged through page-locked host memory"
            _LOG.info("messages of GPU tensors: %s: %s", way, why)
            if not self.device_aware:
                _LOG.info("staging: a copy moves %d bytes in the time in which it starts", self.gpu_messages.unit)
            _LOG.info("between nodes, messages of GPU memory have at most %d bytes", self.gpu_message_bytes)

    def _quickest_length(self) -> int:
        """The length of messages between nodes that takes least time on the network that MPI uses; the same everywhere.

        Measured with what is sent later: GPU memory if device pointers go to MPI, else page-locked memory.
        """
        lengths = (self.gpu_message_bytes, *LENGTHS)
        mine = [[self._ring(length) for length in lengths] for _ in range(_RING_TURNS)]
        usual, *others = np.min(np.max(self._gathered(mine), axis=0), axis=0).tolist()
        seconds, length = min(zip(others, LENGTHS))
        return length if seconds <= _QUICKER * usual else self.gpu_message_bytes

    @named("measuring messages between nodes")
    def _ring(self, length: int) -> float:
        """Seconds in which the first rank of a node sends to that of the next one, and receives; 0 on the others."""
        leaders = [node[0] for node in self.topology.nodes]
        self._gathered(None)  # all begin together
        if self.rank not in leaders:
            return 0.0
        me = leaders.index(self.rank)
        aware = self.device_aware
        out, into = (device.empty(_RING_BYTES, np.uint8, "gpu") if aware else device.pinned(_RING_BYTES) for _ in "io")
        start = time.perf_counter()
        pairs = self._messages_of("Irecv", leaders[me - 1], into, GPU_TAG, length)
        pairs += self._messages_of("Isend", leaders[(me + 1) % len(leaders)], out, GPU_TAG, length)
        requests = [request for _, request in pairs]
        try:
            self.waiter.until(lambda: self._mpi.Request.Testall(requests), lambda: [rank for rank, _ in pairs])
        except BaseException:
            self.outlive([out, into, requests])
            raise
        return time.perf_counter() - start

    @named("probing device pointers")
    def _probe_devices(self) -> str:
        """Probe on one rank of each node, then between nodes; set ``device_aware`` if all works; how it went."""
        limit = min(probe.LIMIT_S, self.waiter.timeout / 2)  # the others must not take the prober for lost
        mine = probe.probe_gpu(limit) if self.rank == self.node[0] else None
        results = [(rank, result) for rank, result in enumerate(self._gathered(mine)) if result is not None]
        failed = next(((rank, result) for rank, result in results if not result.works), None)
        self.device_aware = failed is None
        if failed is not None:
            return f"the probe failed on {self.describe(failed[0])}: {failed[1]}"
        why, hostnames = f"the probe passed on every node ({results[0][1]})", list(dict.fromkeys(self.hostnames))
        if len(hostnames) == 1:
            return why
        between = self._gathered(probe.probe_nodes(hostnames, limit) if self.rank == 0 else None)[0]
        self.device_aware = between.works
        if between.works:
            return f"{why} and between nodes ({between})"
        return f"{why}, but not between nodes: {between}; {SWITCH}=1 sends device pointers all the same"

    @named("comparing what ranks have found")
    def _gathered(self, mine: Any) -> list[Any]:
        """A value of each rank."""
        request = self._comm.Ibarrier()
        self.waiter.until(request.Test, list)
        return self._comm.allgather(mine)
