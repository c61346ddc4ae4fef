"""What the CUDA kernels of the linear sparsifiers share; the twins of ``cpu.linear_sparse``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from ..cpu.linear_sparse import LARGEST
from . import gpu


def sanitised_sum(residual: Any, x: Any) -> None:
    """``residual = sanitise(residual + x)``."""
    _sanitised_sum(gpu.blocks(x.size, gpu.TILE), gpu.THREADS, residual, x)


# --- draws ------------------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@cuda.jit(device=True)
def below(random, n):  # type: ignore[no-untyped-def]
    wide, half = np.uint64(n), np.uint64(32)
    low = ((random & np.uint64(0xFFFFFFFF)) * wide) >> half
    return np.int64(((random >> half) * wide + low) >> half)


@cuda.jit(device=True)
def plan(seed, n):  # type: ignore[no-untyped-def]
    words = mix(seed + np.uint64(0x3C6EF372FE94F82A))
    start = below(mix(seed + np.uint64(0x9E3779B97F4A7C15)), n)
    return start, np.uint32(words & np.uint64(0xFFFFFFFF)), np.uint32(words >> np.uint64(32))


@cuda.jit(device=True)
def position(i, n, k, start, low, high):  # type: ignore[no-untyped-def]
    """The position that stretch i gives."""
    begin, end = i * n // k, (i + 1) * n // k
    h = gpu.counter(i, low)
    h = np.uint32((h ^ (h >> np.uint32(16)) ^ high) * np.uint32(0x7FEB352D))
    h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    h = np.uint32(h ^ (h >> np.uint32(16)))
    at = start + begin + ((np.int64(h) * np.int64(end - begin)) >> np.int64(32))
    return at - n if at >= n else at


@cuda.jit(device=True)
def plus(a, b):  # type: ignore[no-untyped-def]
    """As ``cpu.linear_sparse.plus``."""
    total = a + b
    total = LARGEST if total > LARGEST else total
    return -LARGEST if total < -LARGEST else total


# --- kernels ----------------------------------------------------------------------------------------------------------


@gpu.kernel("float32[::1], float32[::1]")
def _sanitised_sum(residual, x):  # type: ignore[no-untyped-def]
    step = gpu.THREADS
    for tile in range(gpu.TILE * cuda.blockIdx.x, x.size, gpu.TILE * cuda.gridDim.x):
        i = tile + cuda.threadIdx.x
        if tile + gpu.TILE <= x.size:
            p, q = residual[i] + x[i], residual[i + step] + x[i + step]
            r, s = residual[i + 2 * step] + x[i + 2 * step], residual[i + 3 * step] + x[i + 3 * step]
            residual[i], residual[i + step] = gpu.sanitise(p), gpu.sanitise(q)
            residual[i + 2 * step], residual[i + 3 * step] = gpu.sanitise(r), gpu.sanitise(s)
        else:
            for j in range(i, x.size, step):
                residual[j] = gpu.sanitise(residual[j] + x[j])
