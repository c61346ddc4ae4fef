"""How quickly plain kernels move bytes, as a yardstick for compressors: reading, and reading and writing.

A copy is no yardstick. Before the processor writes lines that it has not read, it reads them. A copy thus moves 12
bytes for the 8 that count, and a compressor that changes what it has read would appear to be quicker than it.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
from numba import prange

from ..compressors.kernels.cpu.host import Kernel

_BLOCK = 1 << 14
"""Elements that one thread works on at a time."""

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

_ASSUMED = 32 << 20
"""Bytes of the last-level cache where the system does not tell."""


@cache
def last_level_cache(caches: Path = _CACHES) -> int:
    """Bytes of the largest cache of the first core; 32 MiB where the system does not tell."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    texts = [path.read_text().strip() for path in caches.glob("index*/size")]
    sizes = [int(text[:-1]) * units[text[-1]] for text in texts if text[:-1].isdigit() and text[-1] in units]
    if not sizes and "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names:
        sizes = [os.sysconf("SC_LEVEL3_CACHE_SIZE")]
    return max(sizes, default=0) or _ASSUMED


@Kernel
def read(x):  # type: ignore[no-untyped-def]
    """Add up uint32 values, modulo 2³² in each block: 4 bytes per element."""
    total = np.uint64(0)
    for block in prange((x.size + _BLOCK - 1) // _BLOCK):
        part, own = x[block * _BLOCK : (block + 1) * _BLOCK], np.uint32(0)
        for i in range(part.size):
            own = np.uint32(own + part[i])
        total += np.uint64(own)
    return total


@Kernel
def update(x):  # type: ignore[no-untyped-def]
    """Change the sign of float32 values: 8 bytes per element."""
    for block in prange((x.size + _BLOCK - 1) // _BLOCK):
        part = x[block * _BLOCK : (block + 1) * _BLOCK]
        for i in range(part.size):
            part[i] = -part[i]


@Kernel
def accumulate(x, y):  # type: ignore[no-untyped-def]
    """``x = y - x`` on float32 values, as an encode changes its residual: 12 bytes per element."""
    for block in prange((x.size + _BLOCK - 1) // _BLOCK):
        part, other = x[block * _BLOCK : (block + 1) * _BLOCK], y[block * _BLOCK : (block + 1) * _BLOCK]
        for i in range(part.size):
            part[i] = other[i] - part[i]
