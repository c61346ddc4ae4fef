"""CUDA kernels of the methods that ``cpu.sparse`` serves: ``topk_sampled``, ``dgc`` and ``threshold``.

The sample is gathered and its threshold found by the radix selection of ``cuda.topk``. One pass then makes the values
that are to be compressed and counts those that reach it, a thread decides by ``cpu.sparse.Quota`` what goes, and if
that is not what the threshold says, the selection runs over all values. Its launches are always queued, since no kernel
waits for the host; a word in memory lets them end at once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from espresso_mpi.compressors.context import Context

from ..cpu import clipping, samples, sparse
from . import gpu, topk


class Momentum(NamedTuple):
    """``momentum = decay · momentum + factor · x`` takes the place of x."""

    values: Any
    decay: float
    factor: Any
    """One float32 on the GPU; None: 1."""


def _totals() -> Any:
    """How many values reach the threshold, and how many are larger."""
    return gpu.scratch("sparse totals", lambda: gpu.sent(np.zeros(2, np.uint32)))


def _one() -> Any:
    return gpu.scratch("sparse one", lambda: gpu.sent(np.ones(1, np.float32)))


def encode(
    x: Any,
    residual: Any,
    momentum: Momentum | None,
    quota: sparse.Quota,
    threshold: int,
    rank: int,
    payload: Any,
    context: Context,
) -> None:
    """As ``cpu.sparse.encode``, into a payload that begins with the count; ``rank``: in the sample that decides."""
    scratch, totals = topk.scratch_of("sparse"), _totals()
    head, indices, sent = sparse.split(payload)
    gpu.zero(payload.view(np.float32))
    _start(1, 1, scratch.state, totals, np.uint32(threshold))
    keep, moving = residual is not None, momentum is not None
    moved = x if momentum is None else momentum.values
    factor = _one() if momentum is None or momentum.factor is None else momentum.factor
    decay = np.float32(0 if momentum is None else momentum.decay)
    arrays = (x, residual if keep else x, moved, factor, decay)
    if not threshold:
        sample = context.scratch("sparse-sample", samples.sample_size(x.size), np.float32, x)
        grid = gpu.blocks(sample.size, gpu.THREADS)
        _SAMPLE[keep, moving](grid, gpu.THREADS, *arrays, sample, samples.stratum(x.size))
        topk.search(sample, sample, False, rank, scratch)
    _SWEEP[keep, moving](gpu.blocks(x.size, gpu.TILE), gpu.THREADS, *arrays, scratch.state, totals)
    _decide(1, 1, scratch.state, totals, head, quota.most, quota.least, quota.few)
    source = arrays[1] if keep else moved
    topk.search(source, source, False, 0, scratch)
    topk.copy_chosen(source, moved, keep + moving, indices, sent, scratch)


@gpu.kernel("uint32[::1], uint32[::1], uint32")
def _start(state, totals, threshold):  # type: ignore[no-untyped-def]
    state[0], state[2] = threshold, np.uint32(0)
    totals[0], totals[1] = np.uint32(0), np.uint32(0)


@gpu.kernel("uint32[::1], uint32[::1], uint32[::1], int64, int64, int64")
def _decide(state, totals, head, most, least, few):  # type: ignore[no-untyped-def]
    """Whether the threshold says what goes (and how many of those equal to it), or how many are to be searched for."""
    threshold, reach, above = max(state[0], np.uint32(1)), np.int64(totals[0]), np.int64(totals[1])
    enough = reach >= least or threshold <= np.uint32(1)
    wanted = min(reach, most) if enough else few
    known = enough and above <= wanted
    if known:
        state[0], state[1] = threshold, np.uint32(wanted - above)
    state[2], state[3] = np.uint32(known), np.uint32(wanted)
    head[0], head[1] = np.uint32(wanted), np.uint32(0)


def _make_passes(keep, moving):  # type: ignore[no-untyped-def]
    """The kernels that see the values: ``keep`` with a residual, ``moving`` with a momentum."""

    @cuda.jit(device=True)
    def step(x, momentum, factor, decay, i):  # type: ignore[no-untyped-def]
        return cuda.fma(decay, momentum[i], x[i] * factor) if moving else x[i]

    @cuda.jit(device=True)
    def total(kept, i, step):  # type: ignore[no-untyped-def]
        return gpu.sanitise(kept[i] + step) if keep else gpu.sanitise(step)

    @cuda.jit(device=True)
    def put(kept, momentum, i, step, total):  # type: ignore[no-untyped-def]
        if keep:
            kept[i] = total
        if moving:
            momentum[i] = gpu.sanitise(step)

    arrays = "float32[::1], float32[::1], float32[::1], float32[::1], float32, "

    @gpu.kernel(arrays + "float32[::1], int64", keep=keep, moving=moving)
    def take_sample(x, kept, momentum, factors, decay, sample, width):  # type: ignore[no-untyped-def]
        factor, spots = factors[0], np.uint32(width // _RUN - 1)
        for s in range(cuda.grid(1), sample.size, cuda.gridsize(1)):
            run = s // _RUN
            spot = np.uint32(np.uint32(np.uint32(run) * _STEP) >> np.uint32(16)) & spots
            i = run * width + _RUN * np.int64(spot) + s % _RUN
            sample[s] = total(kept, i, step(x, momentum, factor, decay, i))

    @gpu.kernel(arrays + "uint32[::1], uint32[::1]", keep=keep, moving=moving)
    def sweep(x, kept, momentum, factors, decay, state, totals):  # type: ignore[no-untyped-def]
        """Make the values, in ``kept`` and ``momentum``, and count those that reach the threshold."""
        sums = cuda.shared.array(2, np.uint32)
        if cuda.threadIdx.x < 2:
            sums[cuda.threadIdx.x] = np.uint32(0)
        cuda.syncthreads()
        factor, threshold, each = factors[0], max(state[0], np.uint32(1)), gpu.THREADS
        reach, above = np.int32(0), np.int32(0)
        for tile in range(gpu.TILE * cuda.blockIdx.x, x.size, gpu.TILE * cuda.gridDim.x):
            i = tile + cuda.threadIdx.x
            if tile + gpu.TILE <= x.size:
                j, k, m = i + each, i + 2 * each, i + 3 * each
                p, q = step(x, momentum, factor, decay, i), step(x, momentum, factor, decay, j)
                r, s = step(x, momentum, factor, decay, k), step(x, momentum, factor, decay, m)
                a, b, c, d = total(kept, i, p), total(kept, j, q), total(kept, k, r), total(kept, m, s)
                put(kept, momentum, i, p, a)
                put(kept, momentum, j, q, b)
                put(kept, momentum, k, r, c)
                put(kept, momentum, m, s, d)
                e, f, g, h = magnitude(a), magnitude(b), magnitude(c), magnitude(d)
                reach = np.int32(reach + (e >= threshold) + (f >= threshold) + (g >= threshold) + (h >= threshold))
                above = np.int32(above + (e > threshold) + (f > threshold) + (g > threshold) + (h > threshold))
            else:
                for j in range(i, x.size, each):
                    p = step(x, momentum, factor, decay, j)
                    a = total(kept, j, p)
                    put(kept, momentum, j, p, a)
                    reach = np.int32(reach + (magnitude(a) >= threshold))
                    above = np.int32(above + (magnitude(a) > threshold))
        reach, above = gpu.warp_sum(reach), gpu.warp_sum(above)
        if cuda.laneid == 0:
            cuda.atomic.add(sums, 0, np.uint32(reach))
            cuda.atomic.add(sums, 1, np.uint32(above))
        cuda.syncthreads()
        if cuda.threadIdx.x < 2:
            cuda.atomic.add(totals, cuda.threadIdx.x, sums[cuda.threadIdx.x])

    return take_sample, sweep


# --- the norm that DGC clips by ---------------------------------------------------------------------------------------


class _Norm(NamedTuple):
    """Device memory: the largest key and the sum of squares, int64; the factor, float32."""

    parts: Any
    factor: Any


def _norm() -> _Norm:
    return gpu.scratch("norm", lambda: _Norm(gpu.sent(np.zeros(2, np.int64)), gpu.sent(np.ones(1, np.float32))))


def clip_factor(x: Any, limit: float, context: Context) -> Any:
    """As ``cpu.clipping.clip_factor``; one float32 on the GPU."""
    norm, shift = _norm(), clipping.norm_shift(x.size)
    grid = gpu.blocks(x.size, gpu.TILE)
    _no_norm(1, 1, norm.parts)
    _largest(grid, gpu.THREADS, x, norm.parts)
    _squares(grid, gpu.THREADS, x, norm.parts, shift)
    _make_factor(1, 1, norm.parts, norm.factor, float(limit), shift)
    return norm.factor


@gpu.kernel("int64[::1]")
def _no_norm(parts):  # type: ignore[no-untyped-def]
    parts[0], parts[1] = 0, 0


@gpu.kernel("float32[::1], int64[::1]")
def _largest(x, parts):  # type: ignore[no-untyped-def]
    top, step = np.int64(0), cuda.gridsize(1)
    for i in range(cuda.grid(1), x.size, 4 * step):
        p, q, r, s = _key(x, i), _key(x, i + step), _key(x, i + 2 * step), _key(x, i + 3 * step)
        top = max(max(top, max(p, q)), max(r, s))
    top = gpu.warp_max(top)
    if cuda.laneid == 0:
        cuda.atomic.max(parts, 0, top)


@gpu.kernel("float32[::1], int64[::1], int64")
def _squares(x, parts, shift):  # type: ignore[no-untyped-def]
    total, step, exponent = np.int64(0), cuda.gridsize(1), max(parts[0] >> 23, np.int64(1))
    for i in range(cuda.grid(1), x.size, 4 * step):
        p, q, r, s = _key(x, i), _key(x, i + step), _key(x, i + 2 * step), _key(x, i + 3 * step)
        total += _square(p, exponent, shift) + _square(q, exponent, shift)
        total += _square(r, exponent, shift) + _square(s, exponent, shift)
    total = gpu.warp_sum(total)
    if cuda.laneid == 0:
        cuda.atomic.add(parts, 1, total)


@gpu.kernel("int64[::1], float32[::1], float64, int64")
def _make_factor(parts, factor, limit, shift):  # type: ignore[no-untyped-def]
    norm = math.sqrt(np.float64(parts[1]))
    power = max(parts[0] >> 23, np.int64(1)) - 150 + shift // 2
    for _ in range(abs(power)):  # exact, as 2.0 ** power is
        norm *= 2.0 if power > 0 else 0.5
    factor[0] = np.float32(limit / norm) if norm > limit else np.float32(1.0)


@cuda.jit(device=True)
def _key(x, i):  # type: ignore[no-untyped-def]
    return np.int64(magnitude(x[i])) if i < x.size else np.int64(0)


@cuda.jit(device=True)
def _square(key, exponent, shift):  # type: ignore[no-untyped-def]
    """The square of the 24-bit mantissa of a key, shifted down to a larger exponent."""
    own = key >> 23
    mantissa = (key & 0x7FFFFF) | (0x800000 if own else 0)
    aligned = mantissa >> min(exponent - max(own, np.int64(1)), np.int64(31))
    return (aligned * aligned) >> shift


_RUN = samples.RUN
_STEP = np.uint32(0x9E3779B9)
magnitude = topk.magnitude

_PASSES = {(keep, moving): _make_passes(keep, moving) for keep in (False, True) for moving in (False, True)}
_SAMPLE = {key: passes[0] for key, passes in _PASSES.items()}
_SWEEP = {key: passes[1] for key, passes in _PASSES.items()}
