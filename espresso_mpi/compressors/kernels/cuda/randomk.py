"""CUDA kernels of ``randomk``: a thread for each position drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from . import gpu
from . import linear_sparse as sparse


def encode(x: Any, residual: Any, head: Any, values: Any, seed: int, factor: np.float32) -> None:
    """Send the values of ``x``, or of ``residual + x``, which ``residual`` then holds without what is sent."""
    if residual is not None:
        sparse.sanitised_sum(residual, x)
    source, seed = x if residual is None else residual, seed & 0xFFFFFFFFFFFFFFFF
    grid = gpu.blocks(values.size, gpu.THREADS)
    _TAKE[residual is not None](grid, gpu.THREADS, source, head, values, np.uint64(seed), factor)


def decode(out: Any, head: Any, values: Any, factor: np.float32, add: bool) -> None:
    """Write the values, times a factor, at their positions and zero elsewhere, or add them."""
    if not add:
        gpu.zero(out)
    _PUT[add](gpu.blocks(values.size, gpu.THREADS), gpu.THREADS, out, head, values, factor)


def _make_take(keep):  # type: ignore[no-untyped-def]
    @gpu.kernel("float32[::1], uint32[::1], float32[::1], uint64, float32", keep=keep)
    def take(source, head, values, seed, factor):  # type: ignore[no-untyped-def]
        if cuda.grid(1) == 0:
            head[0], head[1] = np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32))
            head[2], head[3] = np.uint32(0), np.uint32(0)
        n, k = np.int64(source.size), np.int64(values.size)
        start, low, high = sparse.plan(seed, n)
        for i in range(cuda.grid(1), k, cuda.gridsize(1)):
            at = sparse.position(i, n, k, start, low, high)
            value = gpu.sanitise(source[at])
            values[i] = value
            if keep:
                source[at] = value - gpu.sanitise(value * factor)

    return take


def _make_put(add):  # type: ignore[no-untyped-def]
    @gpu.kernel("float32[::1], uint32[::1], float32[::1], float32", add=add)
    def put(out, head, values, factor):  # type: ignore[no-untyped-def]
        n, k = np.int64(out.size), np.int64(values.size)
        seed = np.uint64(head[0]) | (np.uint64(head[1]) << np.uint64(32))
        start, low, high = sparse.plan(seed, n)
        for i in range(cuda.grid(1), k, cuda.gridsize(1)):
            at = sparse.position(i, n, k, start, low, high)
            value = gpu.sanitise(values[i] * factor)
            out[at] = out[at] + value if add else value

    return put


_TAKE = {keep: _make_take(keep) for keep in (False, True)}
_PUT = {add: _make_put(add) for add in (False, True)}
