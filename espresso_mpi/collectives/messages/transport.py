"""Messages between ranks: with ``gpu_messages`` the only module that knows MPI messages and their legal sizes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from espresso_mpi.arrays import device
from espresso_mpi.arrays.workspace import Workspace
from espresso_mpi.cluster.launch import cores
from espresso_mpi.errors import ConfigError, EspressoError, RemoteError
from espresso_mpi.types import ALIGN

from . import leftovers, opening, single_copy
from .compiled_calls import DATA_TAG
from .deadlock import DeadlockDetector
from .failures import failure, named
from .gpu_calls import GpuCalls
from .gpu_messages import Addressed, GpuExchange, GpuMessages
from .host_messages import HostExchange, HostMessages
from .leftovers import Leftover
from .mpi_calls import Messages
from .opening import Identity
from .read_limit import read_limit
from .roll_call import RollCall
from .topology import discover
from .waiting import Waiter
from .window import SharedWindow, shared_memory_free, window_size

MESSAGE_BYTES = 60 << 10
"""Default of the longest message between nodes. Open MPI sends up to 64 KiB over TCP at once and asks the receiver
first beyond; when both ends then send long messages at the same time, the directions of a link take turns. Measured on
a 1 Gbit link, 8 MiB both ways on each of two ranks: 140 ms in pieces of 60 KiB, 200 to 270 in one, wire 134."""

_ABORT_TAG = 0x5E56
_ABORT_BYTES = 2000
_LOG = logging.getLogger("espresso_mpi")


@dataclass(frozen=True)
class TransportSettings:
    """How a transport works.

    Attributes:
        timeout: seconds after which a rank counts as missing.
        window_bytes: bytes of a half segment of the node's shared window; 0 uses messages instead.
        message_bytes: longest message between nodes, in bytes.
        nodes: groups of ranks to treat as nodes; default as MPI finds them.
        device_aware: whether device pointers go to MPI; otherwise messages are staged by the host. None: staged until
            ``choose_device_way`` has found out.
        by_tables: whether segments in host memory run as tables of operations; otherwise Python runs them.
        single_copy: whether ranks of a node read each other's memory where the system allows it.
    """

    timeout: float
    window_bytes: int
    message_bytes: int = MESSAGE_BYTES
    nodes: Sequence[Sequence[int]] | None = None
    device_aware: bool | None = None
    by_tables: bool = True
    single_copy: bool = True


class Transport(GpuCalls):
    """Messages and shared memory between the ranks of one communicator, which it owns.

    Args:
        comm: an mpi4py intracommunicator for this object alone; freed by ``close``.
        settings: see ``TransportSettings``.
        identity: its identity in messages; without one, its communicators are freed by ``close`` only.
    """

    def __init__(self, comm: Any, settings: TransportSettings, identity: Identity | None = None) -> None:
        from mpi4py import MPI

        self._mpi, self._comm, self._message_bytes = MPI, comm, settings.message_bytes
        self.rank = comm.rank
        self.topology, self._local = discover(comm, settings.nodes)
        self._near = frozenset(self.node)
        _check_window(settings.window_bytes, max(map(len, self.topology.nodes)))
        self.hostnames = comm.allgather(MPI.Get_processor_name())
        oversubscribed = self._local.size >= cores()
        # A core that nodes of an emulated cluster share is oversubscribed as well; the launcher says so.
        oversubscribed = oversubscribed or bool(os.environ.get("ESPRESSO_LAB"))
        who = identity or Identity("", 0, [""] * comm.size)
        self._deadlocks = DeadlockDetector(comm, who.number, who.processes, self.describe)
        self.roll_call = RollCall(self._deadlocks, self.rank)
        self.gathers: dict[int, Any] = {}
        """What exchanges small messages between nodes, by the most bytes of one; see ``leader_gather``."""
        self.measured: dict[Any, dict[Any, int]] = {}
        """Numbers of bytes that sessions measure, see ``measured_limits`` of the engine."""
        self._host_messages = HostMessages(partial(Messages, comm, DATA_TAG), self._longest)
        testall = MPI.Request.Testall
        self.gpu_messages = GpuMessages(self._send_gpu, self._receive_gpu, testall, self._longest_gpu)
        self.waiter = Waiter(
            settings.timeout, oversubscribed, self.describe, self, self.advance, lambda: self.gpu_messages.under_way
        )
        fewest = min(self._local.allgather(cores()))
        self.waiter.cores = fewest if self._local.size > fewest else 0
        self.workspace = Workspace()
        self._workspaces: list[Workspace] = []  # all, so that those of a failed session live on
        self._free_workspaces: dict[Any, list[Workspace]] = {}
        self.device_aware = settings.device_aware
        self.gpu_message_bytes = settings.message_bytes
        self._length_given = settings.message_bytes != MESSAGE_BYTES
        self.by_tables = settings.by_tables
        self.posted = {"intra": 0, "inter": 0}  # bytes of messages; the window counts its own
        self.shown: dict[str, int] | None = None
        self._window = self._open_window(settings.window_bytes)
        self.single_copy = single_copy.of_node(self._local, self._window is not None, settings.single_copy)
        if self._window is not None:
            self._window.single = self.single_copy
        if self._window is not None and len(self.topology.nodes) > 1:  # on one node, calls choose by their own times
            shared = self.waiter.cores > 0 or bool(os.environ.get("ESPRESSO_LAB"))
            self._window.read_limit = read_limit(self._local, self._window, shared)
        served = self._window is not None or self._local.size == 1
        self.windows_everywhere: bool = comm.allreduce(served, MPI.LAND)
        """Whether on every node all ranks share a window."""
        window = self._window.handle if self._window is not None else None
        leftover = Leftover(who.name, comm.size, comm, self._local, window)
        self._freeing = leftovers.follow(self, leftover) if identity else None

    @classmethod
    def open(
        cls,
        comm: Any,
        settings: TransportSettings,
        agree: Callable[[list[Any]], None],
        note: Callable[[], Any] = lambda: None,
    ) -> Transport:
        """A transport on a duplicate of ``comm`` (default: all ranks). Collective.

        Args:
            note: returns what this rank tells the others first; called when MPI is loaded.
            agree: called with the notes of all ranks, in rank order; what it raises is raised on all ranks.

        Raises:
            ConfigError, StateError: as ``opening.parent_of``.
            RankTimeoutError: some rank of ``comm`` did not come.
            TransportError: MPI failed.
        """
        MPI, comm = opening.parent_of(comm)
        try:
            own = opening.duplicate(MPI, comm, settings.timeout)
            # From here on all ranks are known to be present, and take the same way.
            try:
                return cls(own, settings, opening.handshake(MPI, own, note(), agree))
            except EspressoError:
                own.Free()
                raise
        except MPI.Exception as error:
            raise failure(f"rank {comm.rank} ({MPI.Get_processor_name()})", "opening a session", error) from error

    @property
    def sent(self) -> dict[str, int]:
        """Bytes sent to other ranks so far, inside the node and between nodes."""
        return self.counted() if self.shown is None else dict(self.shown)

    def counted(self) -> dict[str, int]:
        """The same, with what ``uncounted`` is about to take back."""
        shared = self._window.bytes_sent if self._window else 0
        return {"intra": self.posted["intra"] + shared, "inter": self.posted["inter"]}

    def borrow(self, kind: Any = None) -> Workspace:
        """Scratch memory for one active segment.

        Args:
            kind: a key for segments that need equally much memory. Memory of one kind is not lent to another, so that
                it does not grow to the largest need of all.
        """
        free = self._free_workspaces.setdefault(kind, [])
        if not free:
            self._workspaces.append(Workspace())
            free.append(self._workspaces[-1])
        return free.pop()

    def give_back(self, workspace: Workspace, kind: Any = None) -> None:
        """Return scratch memory; the segment that borrowed it has finished."""
        self._free_workspaces[kind].append(workspace)

    def forget_kinds(self) -> None:
        """Release the scratch memory of all kinds. No segment may be active."""
        kept = self._free_workspaces.get(None, [])
        self._workspaces, self._free_workspaces = list(kept), {None: kept}

    @named("making memory for the ranks of a node")
    def shared_memory(self, nbytes: int) -> np.ndarray | None:
        """Bytes for this rank that the others of its node have mapped, too; None if they share none. Collective."""
        if self._window is None:
            return None
        memory, why = self._window.arrays.make(nbytes)
        if memory is None and self._local.rank == 0:
            _LOG.warning("%s; sums of such arrays take the way of all others", why)
        return memory

    def exchange(self, sends: Addressed, receives: Addressed) -> None:
        """Send and receive at once, and wait; see ``post``."""
        self.finish(self.post(sends, receives, self.workspace))

    @named("starting to exchange messages")
    def post(self, sends: Addressed, receives: Addressed, workspace: Workspace) -> HostExchange | GpuExchange:
        """Start to send and receive. Both ends must list their messages and post their exchanges in the same order.

        The messages of GPU memory start later: see ``gpu_messages``. If one end has GPU memory in an exchange, so has
        the other.

        Args:
            workspace: where staging memory comes from; it has two buffers, so one more exchange may be posted before
                this one is finished.
        """
        self._count(sends)
        if any(device.device_of(a) == "gpu" for _, a in (*sends, *receives)):
            return self._post_gpu(sends, receives, workspace)
        exchange = self._host_messages.start(sends, receives)
        if exchange.error:
            self.outlive(exchange)
            self.raise_failed(exchange.error)
        return exchange

    @named("exchanging messages")
    def finish(self, pending: HostExchange | GpuExchange) -> None:
        """Wait until everything is sent and received; kernels on the current stream can use GPU memory then.

        Raises:
            RankTimeoutError: a rank did not send or receive within the timeout.
        """
        if isinstance(pending, GpuExchange):
            self._finish_gpu(pending)
            return
        try:
            if self.gpu_messages.under_way or not pending.polled(self.waiter):
                if pending.error:
                    self.raise_failed(pending.error)
                self.waiter.until(pending.messages.through, pending.late)
        except BaseException:
            self.outlive(pending)
            raise
        self._host_messages.end(pending)

    def require_threads(self) -> None:
        """Raise ConfigError unless a second thread may call MPI."""
        level = self._mpi.Query_thread()
        if level < self._mpi.THREAD_MULTIPLE:
            raise ConfigError(
                "push: this MPI was started without MPI_THREAD_MULTIPLE, so a second thread may not call it; use sync, "
                "or leave mpi4py.rc.threads and mpi4py.rc.thread_level as they are"
            )

    def abort(self, text: str) -> None:
        """Tell all ranks that this one cannot continue; they raise RemoteError at their next wait. Does not wait."""
        note = np.frombuffer(text.encode()[:_ABORT_BYTES], np.uint8)
        others = [rank for rank in range(self.topology.size) if rank != self.rank]
        try:
            self.outlive([note, [self._comm.Isend([note, self._mpi.BYTE], rank, _ABORT_TAG) for rank in others]])
        except self._mpi.Exception as error:  # MPI itself may be what failed: the others will run into their timeout
            _LOG.warning("the other ranks could not be notified: %s", error)

    @named("looking for news of other ranks")
    def check_abort(self) -> None:
        """Raise RemoteError if another rank has sent an abort."""
        status = self._mpi.Status()
        if self._comm.Iprobe(self._mpi.ANY_SOURCE, _ABORT_TAG, status):
            note = bytearray(status.Get_count(self._mpi.BYTE))
            self._comm.Recv([note, self._mpi.BYTE], status.Get_source(), _ABORT_TAG)
            raise RemoteError(f"another rank cannot continue: {note.decode(errors='replace')}")

    def register_calls(self, calls: Mapping[int, Any]) -> None:
        """Name the unfinished calls of the session that owns this transport, for deadlock detection."""
        self._deadlocks.calls = calls

    @named("looking for a deadlock")
    def long_wait(self, since: float, what: str, late: Sequence[int], callers: int) -> None:
        """See ``waiting.DeadlockCheck``."""
        self._deadlocks.long_wait(since, what, late, callers)

    def location(self, rank: int) -> str:
        """See ``waiting.DeadlockCheck``."""
        return self._deadlocks.location(rank)

    def _count(self, sends: Addressed) -> None:
        for rank, array in sends:
            self.posted["intra" if rank in self._near else "inter"] += array.nbytes

    def _open_window(self, half_bytes: int) -> SharedWindow | None:
        """The node's window, if wanted, useful and possible on all of its ranks."""
        if half_bytes == 0 or self._local.size == 1:
            return None
        free, wanted = self._local.bcast(shared_memory_free()), window_size(half_bytes, self._local.size)
        if free < 2 * wanted:
            _LOG.warning(
                "shared memory: %d bytes free in /dev/shm, %d wanted; using messages inside the node",
                free,
                wanted,
            )
            return None
        window, why = None, ""
        try:
            window = SharedWindow(self._local, half_bytes, self.waiter, self.node)
        except self._mpi.Exception as error:
            why = str(error)
        failures = [text for text in self._local.allgather(why) if text]
        if failures:  # a window that other ranks lack cannot be freed, for that takes all of them
            _LOG.warning("shared memory: %s; using messages inside the node", failures[0])
            return None
        return window

    @named("freeing its communicators")
    def close(self) -> None:
        """Free the window and the communicators. Collective; freeing cannot time out, so a barrier precedes it."""
        everyone = [(rank, np.zeros(1, np.uint8)) for rank in range(self.topology.size) if rank != self.rank]
        self.exchange(everyone, [(rank, np.empty(1, np.uint8)) for rank, _ in everyone])
        self._deadlocks.close()
        if self._freeing is not None:
            leftovers.forget(self._freeing)
        if self._window:
            self._window.free()
        self._local.Free()
        self._comm.Free()


def _check_window(half_bytes: int, ranks: int) -> None:
    """Raises the same on every rank: a half must hold an aligned group of elements for each rank of a node."""
    least = 8 * ALIGN * ranks
    if 0 < half_bytes < least:
        raise ConfigError(f"window_bytes={half_bytes}; expected at least {least} for {ranks} ranks per node, or 0")
