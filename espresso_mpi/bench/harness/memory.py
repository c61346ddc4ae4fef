"""Whether what is about to be measured fits into the memory of the nodes: else the system would end the ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

_SPARED = 0.9
"""Share of the free memory that may be taken."""

_GIB = 1 << 30


def free_bytes() -> int | None:
    """Bytes that processes of this node can still take, under the limit of its control group; None: unknown."""
    found = [value for value in (_available(), _under_limit()) if value is not None]
    return min(found, default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return sizes[0] if sizes else None


def _under_limit() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # there is no limit: "max"
        return None


def lack(comm: Any, nbytes: int) -> str:
    """Why arrays do not fit, the same on all ranks; empty: they do. Collective.

    Args:
        nbytes: what this rank would take.
    """
    kernel = Path("/proc/sys/kernel/random/boot_id")  # the nodes of an emulated cluster share one memory
    here = kernel.read_text() if kernel.exists() else str(comm.rank)
    everyone = comm.allgather((here, nbytes, free_bytes()))
    needed: Counter[str] = Counter()
    for kernel_of, wanted, _ in everyone:
        needed[kernel_of] += wanted
    for kernel_of, _, free in everyone:
        if free is not None and needed[kernel_of] > _SPARED * free:
            wanted_gib, free_gib = needed[kernel_of] / _GIB, free / _GIB
            return f"about {wanted_gib:.1f} GiB of the memory of a node, of which {free_gib:.1f} are free"
    return ""
