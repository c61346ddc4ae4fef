"""CUDA kernels of ``topk_chunked``: half a warp sums the squares of a chunk, in the order that the format fixes.

The chunks are chosen by the radix selection of ``topk``. No kernel waits for the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from ..cpu.topk_chunked import LANES, LEAST, LEAST_BITS, MOST, MOST_BITS
from . import gpu, topk
from . import linear_sparse as sparse

_WARPS = gpu.THREADS // gpu.LANES
_TOP = np.float32(65504.0)


def summarise(x: Any, summary: Any, residual: Any, length: int) -> None:
    """The energies of the chunks of ``x``, or of ``residual + x``, which ``residual`` then holds."""
    grid = gpu.blocks(-(-summary.size // 2), _WARPS)
    _SUMMARISE[residual is not None](grid, gpu.THREADS, x, x if residual is None else residual, summary, length)


def encode(
    x: Any, residual: Any, head: Any, indices: Any, values: Any, length: int, doublings: int | None, context: Any
) -> None:
    """Choose by ``context.summary``, then move the chunks; ``doublings`` only for values in float16."""
    halves = doublings is not None
    chosen = context.scratch("energies", indices.size, np.float32, x)
    topk.encode(context.summary, None, indices, chosen)
    _write_head[halves](1, gpu.THREADS, head, chosen, doublings or 0)
    keep = residual is not None
    values = values.view(np.float16) if halves else values
    grid = gpu.blocks(indices.size, _WARPS)
    _TAKE[keep, halves](grid, gpu.THREADS, residual if keep else x, head, indices, values, length)


def decode(out: Any, head: Any, indices: Any, values: Any, length: int, add: bool) -> None:
    """Write the chunks at their places and zero elsewhere, or add them."""
    if not add:
        gpu.zero(out)
    halves = values.dtype == np.uint16
    values = values.view(np.float16) if halves else values
    _PUT[add, halves](gpu.blocks(indices.size, _WARPS), gpu.THREADS, out, head, indices, values, length)


# --- energies ---------------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _fold(total):  # type: ignore[no-untyped-def]
    """The sum over 16 lanes, in all of them."""
    total += cuda.shfl_xor_sync(gpu.FULL, total, 8)
    total += cuda.shfl_xor_sync(gpu.FULL, total, 4)
    total += cuda.shfl_xor_sync(gpu.FULL, total, 2)
    return total + cuda.shfl_xor_sync(gpu.FULL, total, 1)


@cuda.jit(device=True)
def _scaled(source, i, stop, factor):  # type: ignore[no-untyped-def]
    return gpu.sanitise(source[i]) * factor if i < stop else np.float32(0)


@cuda.jit(device=True)
def _scaled_squares(source, start, stop, lane, length, factor):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for i in range(start + lane, start + length, LANES):
        p = _scaled(source, i, stop, factor)
        total = cuda.fma(p, p, total)
    return _fold(total)


@cuda.jit(device=True)
def _compress(value, shift, end):  # type: ignore[no-untyped-def]
    """As ``cpu.topk_chunked.compress``."""
    wide = np.int64(gpu.float_bits(value)) + np.int64(shift) * np.int64(1 << 23)
    return gpu.bits_float(np.uint32(end + ((wide - end) >> np.int64(3))))


def _make_summarise(keep):  # type: ignore[no-untyped-def]
    fetch = gpu.make_fetch(keep)

    @cuda.jit(device=True)
    def store(residual, i, stop, value):  # type: ignore[no-untyped-def]
        if keep and i < stop:
            residual[i] = value

    @cuda.jit(device=True)
    def squares(x, residual, start, stop, lane, length):  # type: ignore[no-untyped-def]
        total = np.float32(0)
        for i in range(start + lane, start + length, 4 * LANES):
            p, q = fetch(x, residual, i, stop), fetch(x, residual, i + LANES, stop)
            r, s = fetch(x, residual, i + 2 * LANES, stop), fetch(x, residual, i + 3 * LANES, stop)
            store(residual, i, stop, p)
            store(residual, i + LANES, stop, q)
            store(residual, i + 2 * LANES, stop, r)
            store(residual, i + 3 * LANES, stop, s)
            total = cuda.fma(s, s, cuda.fma(r, r, cuda.fma(q, q, cuda.fma(p, p, total))))
        return _fold(total)

    @gpu.kernel("float32[::1], float32[::1], float32[::1], int64", keep=keep)
    def summarise(x, residual, summary, length):  # type: ignore[no-untyped-def]
        lane, side = cuda.laneid & 15, cuda.laneid >> 4
        for pair in range(cuda.grid(1) // 32, (summary.size + 1) // 2, cuda.gridsize(1) // 32):
            c = 2 * pair + side
            start, stop = c * length, min(x.size, (c + 1) * length)
            total = squares(x, residual, start, stop, lane, length)
            # All lanes of the warp go this way, or the exchange between them would hang.
            if gpu.ballot(total < np.float32(LEAST) or total > np.float32(MOST)):
                low = _scaled_squares(residual, start, stop, lane, length, np.float32(2.0**100))
                high = _scaled_squares(residual, start, stop, lane, length, np.float32(2.0**-100))
                if total < np.float32(LEAST):
                    total = _compress(low, -200, LEAST_BITS) if low > np.float32(0) else low
                elif total > np.float32(MOST):
                    total = _compress(high, 200, MOST_BITS)
            if lane == 0 and c < summary.size:
                summary[c] = total

    return summarise


# --- the payload ------------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _scale(top, doublings):  # type: ignore[no-untyped-def]
    """As in ``topk_chunked``."""
    if top > MOST_BITS:
        top = MOST_BITS + ((top + 1 - MOST_BITS) << 3)
    elif top < LEAST_BITS:
        top = LEAST_BITS + ((top + 1 - LEAST_BITS) << 3)
    exponent = (top >> 23) - 126 + doublings
    power = ((exponent + 1) >> 1) - 15
    return gpu.bits_float(np.uint32((min(max(power, -125), 126) + 127) << 23))


def _make_write_head(halves):  # type: ignore[no-untyped-def]
    @gpu.kernel("float32[::1], float32[::1], int64", halves=halves)
    def write_head(head, chosen, doublings):  # type: ignore[no-untyped-def]
        """One block: the scale, from the largest energy, and the zeros after the indices."""
        top = cuda.shared.array(1, np.int32)
        if cuda.threadIdx.x == 0:
            top[0] = 0
        cuda.syncthreads()
        if halves:
            mine = np.int32(0)
            for j in range(cuda.threadIdx.x, chosen.size, gpu.THREADS):
                mine = max(mine, np.int32(gpu.float_bits(chosen[j]) & np.uint32(0x7FFFFFFF)))
            cuda.atomic.max(top, 0, mine)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            head[0] = _scale(np.int64(top[0]), doublings) if halves else np.float32(1)
            for i in range(1 + chosen.size, head.size):
                head[i] = np.float32(0)

    return write_head


def _make_take(keep, halves):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def fetch(source, i, stop):  # type: ignore[no-untyped-def]
        return gpu.sanitise(source[i]) if i < stop else np.float32(0)

    @cuda.jit(device=True)
    def put(source, i, stop, values, at, value, scale):  # type: ignore[no-untyped-def]
        if halves:
            code = np.float16(min(max(value * (np.float32(1) / scale), -_TOP), _TOP))
            values[at] = code
            if keep and i < stop:
                source[i] = cuda.fma(-np.float32(code), scale, value)
        else:
            values[at] = value
            if keep and i < stop:
                source[i] = np.float32(0)

    kind = "float16" if halves else "float32"

    @gpu.kernel(f"float32[::1], float32[::1], uint32[::1], {kind}[::1], int64", keep=keep, halves=halves)
    def take(source, head, indices, values, length):  # type: ignore[no-untyped-def]
        scale = head[0]
        for j in range(cuda.grid(1) // 32, indices.size, cuda.gridsize(1) // 32):
            start = np.int64(indices[j]) * length
            stop, away = min(source.size, start + length), j * length - start
            for i in range(start + cuda.laneid, start + length, 128):
                p, q = fetch(source, i, stop), fetch(source, i + 32, stop)
                r, s = fetch(source, i + 64, stop), fetch(source, i + 96, stop)
                put(source, i, stop, values, i + away, p, scale)
                if i + 32 < start + length:
                    put(source, i + 32, stop, values, i + 32 + away, q, scale)
                if i + 64 < start + length:
                    put(source, i + 64, stop, values, i + 64 + away, r, scale)
                if i + 96 < start + length:
                    put(source, i + 96, stop, values, i + 96 + away, s, scale)

    return take


def _make_put(add, halves):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def put(out, i, value, scale):  # type: ignore[no-untyped-def]
        value = gpu.sanitise(np.float32(value) * scale if halves else value)
        out[i] = sparse.plus(out[i], value) if add else value

    kind = "float16" if halves else "float32"

    @gpu.kernel(f"float32[::1], float32[::1], uint32[::1], {kind}[::1], int64", add=add, halves=halves)
    def put_chunks(out, head, indices, values, length):  # type: ignore[no-untyped-def]
        scale = head[0]
        for j in range(cuda.grid(1) // 32, indices.size, cuda.gridsize(1) // 32):
            start = np.int64(indices[j]) * length
            stop, away = min(out.size, start + length), j * length - start  # nothing beyond the array, if damaged
            for i in range(start + cuda.laneid, stop, 32):
                put(out, i, values[i + away], scale)

    return put_chunks


_BOTH = (False, True)
_SUMMARISE = {keep: _make_summarise(keep) for keep in _BOTH}
_write_head = {halves: _make_write_head(halves) for halves in _BOTH}
_TAKE = {(keep, halves): _make_take(keep, halves) for keep in _BOTH for halves in _BOTH}
_PUT = {(add, halves): _make_put(add, halves) for add in _BOTH for halves in _BOTH}
