"""Whether the ranks of a node may copy from and to each other's memory: once, not twice as through the shared window.

Linux lets a process do so by ``process_vm_readv`` and ``process_vm_writev`` (cross-memory attach) if it might trace the
other one, too: of the same user, not forbidden by Yama (``kernel.yama.ptrace_scope``) or a container's seccomp profile,
and in the same namespace of process numbers. Nothing of this is guessed: every rank tries it with all others.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from espresso_mpi.errors import TransportError

from .cross_memory import copy_across, functions
from .joint_reads import ERRNO, NUMBER, PLACE, READ, READABLE
from .switches import SINGLE_COPY

_BYTES = 64
_OTHERS = "process numbers of other ranks stand for other processes here (containers)"
_LOG = logging.getLogger("espresso_mpi")
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True)
class SingleCopy:
    """Whether the ranks of a node copy from and to each other's memory.

    Attributes:
        processes: the numbers of their processes, by index in the node; empty: they do not.
        why: in words, for people.
    """

    processes: tuple[int, ...]
    why: str

    def __bool__(self) -> bool:
        return bool(self.processes)


def readable(single: SingleCopy) -> np.ndarray:
    """What says that an array of this rank may be read by the others, see ``joint_reads.PLACE``; empty: it may not."""
    if not single:
        return np.empty(0, np.int64)
    place = np.zeros(PLACE + len(single.processes), np.int64)
    place[NUMBER] = READABLE
    place[READ], _, place[ERRNO] = functions()
    place[PLACE:] = single.processes
    return place


def refusal(error: int) -> TransportError:
    """What is raised if a read has failed; ``error``: its number, or -1 - m if that of member m has."""
    why = os.strerror(error) if error > 0 else f"refused at member {-1 - error} of the node"
    return TransportError(f"reading the memory of another rank: {why}; set {SINGLE_COPY}=0 to do without it")


def of_node(local: Any, served: bool, wanted: bool) -> SingleCopy:
    """Whether the ranks of a node copy from and to each other's memory. Collective over them.

    Args:
        local: mpi4py communicator of the node's ranks.
        served: whether they have a shared window, through which they agree; wanted: whether nobody has forbidden it.
    """
    if not served:
        return SingleCopy((), "the node has no shared window")
    if not wanted:
        return SingleCopy((), f"switched off by {SINGLE_COPY}=0")
    found = probe(local)
    if local.rank == 0:
        way = "are copied once where that is quicker" if found else "pass through the shared window"
        _LOG.info("dense collectives inside the node %s: %s", way, found.why)
    return found


def probe(local: Any) -> SingleCopy:
    """Find out by trying it, on all ranks of a node. Collective over them.

    Args:
        local: mpi4py communicator of the node's ranks.

    Returns:
        The same on all of them.
    """
    memory = np.frombuffer(bytearray(os.urandom(_BYTES * (1 + local.size))), np.uint8)
    mine, written = memory[:_BYTES], memory[_BYTES:].reshape(local.size, _BYTES)
    everyone = local.allgather((os.getpid(), memory.ctypes.data, mine.tobytes()))
    failures = local.allgather(_refusal(everyone, mine, local.rank))  # behind it, all have read and written
    if not any(failures) and any(row.tobytes() != token for row, (_, _, token) in zip(written, everyone)):
        failures[local.rank] = _OTHERS
    failures = local.allgather(failures[local.rank])
    why = next((text for text in failures if text), "")
    if why:
        return SingleCopy((), why)
    return SingleCopy(tuple(process for process, *_ in everyone), f"{local.size} ranks have tried it with each other")


def _refusal(everyone: list[tuple[int, int, bytes]], mine: np.ndarray, me: int) -> str:
    """Read from all ranks and write to them; returns why that does not work, empty: it does."""
    reading, writing, errno = functions()
    if not (reading and writing and errno):
        return "this system has no process_vm_readv"
    here = np.empty(_BYTES, np.uint8)
    for process, address, token in everyone:
        try:
            copy_across(reading, process, here.ctypes.data, address, _BYTES)
            if here.tobytes() != token:
                return _OTHERS
            copy_across(writing, process, mine.ctypes.data, address + _BYTES * (1 + me), _BYTES)
        except OSError as error:
            return f"the memory of another rank: {error.strerror}{_hint()}"
    return ""


def _hint() -> str:
    scope = _YAMA.read_text().strip() if _YAMA.exists() else "0"
    return "" if scope == "0" else f" (kernel.yama.ptrace_scope={scope})"
