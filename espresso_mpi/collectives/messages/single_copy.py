"""Whether the ranks of a node may read each other's memory: one copy in place of two through the shared window.

Linux lets a process read another one's memory by ``process_vm_readv`` (cross-memory attach) if it might also trace it:
of the same user, not forbidden by Yama (``kernel.yama.ptrace_scope``) or a container's seccomp profile, and in the same
namespace of process numbers. Nothing of this is guessed: every rank tries it with all others of its node.
"""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .switches import SINGLE_COPY

_BYTES = 64
_LOG = logging.getLogger("espresso_mpi")
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True)
class SingleCopy:
    """Whether the ranks of a node read each other's memory.

    Attributes:
        processes: the numbers of their processes, by index in the node; empty: they do not.
        why: in words, for people.
    """

    processes: tuple[int, ...]
    why: str

    def __bool__(self) -> bool:
        return bool(self.processes)


class _Piece(ctypes.Structure):
    """The system's ``struct iovec``."""

    _fields_ = (("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@lru_cache(maxsize=1)
def functions() -> tuple[int, int]:
    """The addresses of the functions that read, and that say where the error number is; 0: this system has none."""
    library = ctypes.CDLL(None)
    try:
        found = library.process_vm_readv, library.__errno_location
    except AttributeError:
        return 0, 0
    read, errno = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found)
    return read, errno


def read_from(process: int, address: int, nbytes: int) -> bytes:
    """Read the memory of another process.

    Raises:
        OSError: the system refuses.
    """
    here = ctypes.create_string_buffer(nbytes)
    library = ctypes.CDLL(None, use_errno=True)
    local, remote = _Piece(ctypes.addressof(here), nbytes), _Piece(address, nbytes)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    found = library.process_vm_readv(
        ctypes.c_int(process), ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(remote), ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )  # fmt: skip
    if found < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return here.raw[:found]


def of_node(local: Any, served: bool, wanted: bool) -> SingleCopy:
    """Whether the ranks of a node read each other's memory. Collective over them.

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
        way = "are read from each other's memory where that is quicker" if found else "pass through the shared window"
        _LOG.info("dense collectives inside the node %s: %s", way, found.why)
    return found


def probe(local: Any) -> SingleCopy:
    """Find out by trying it, on all ranks of a node. Collective over them.

    Args:
        local: mpi4py communicator of the node's ranks.

    Returns:
        The same on all of them.
    """
    token = np.frombuffer(bytearray(os.urandom(_BYTES)), np.uint8)
    everyone = local.allgather((os.getpid(), token.ctypes.data, token.tobytes()))
    failures = [text for text in local.allgather(_refusal(everyone)) if text]  # until then the tokens live
    if failures:
        return SingleCopy((), failures[0])
    return SingleCopy(tuple(process for process, *_ in everyone), f"{local.size} ranks have read each other's memory")


def _refusal(everyone: list[tuple[int, int, bytes]]) -> str:
    """Why this rank cannot read from all others; empty: it can."""
    if not all(functions()):
        return "this system has no process_vm_readv"
    for process, address, token in everyone:
        try:
            found = read_from(process, address, _BYTES)
        except OSError as error:
            return f"process_vm_readv of another rank: {error.strerror}{_hint()}"
        if found != token:
            return "process numbers of other ranks stand for other processes here (containers)"
    return ""


def _hint() -> str:
    scope = _YAMA.read_text().strip() if _YAMA.exists() else "0"
    return "" if scope == "0" else f" (kernel.yama.ptrace_scope={scope})"
