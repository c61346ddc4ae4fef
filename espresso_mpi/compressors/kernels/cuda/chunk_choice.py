"""CUDA kernels of ``cpu.chunk_choice``: magnitudes stay where they were read, in registers, until they are chosen.

A warp takes a chunk of up to 256 elements. A block of threads takes one of up to 16 for each of its threads: the k-th
largest of the threads' own largest magnitudes is a bound that the k largest of the chunk reach, and few others, so that
it is these few among which the choice is made. Longer chunks are read again for each bit of the threshold.

The threshold is found by bisection, from the largest magnitude downward: whatever the way there, the same elements
reach it. Finite numbers without a sign compare as their bits do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from . import gpu

_MOST_WARPS = gpu.THREADS // gpu.LANES
"""Warps of a block, at most."""

_EACH = 16
"""Elements of a chunk that a thread holds where a block of threads takes a chunk."""

_HELD = _EACH * gpu.THREADS
"""Elements that a block holds."""

_ALL = 0x7FFFFFFF
"""As many as there are."""

_SLOTS, _PLACES = _EACH * _MOST_WARPS, gpu.LANES * _MOST_WARPS
"""A word for each warp and each element of its threads; a number for each warp and lane."""

_FEW, _MORE = 2, 8
"""Elements that a lane holds where a warp takes a chunk."""


def threads_for(chunk: int) -> int:
    """As many threads as a chunk has use for: whole warps."""
    return min(gpu.THREADS, -(-chunk // gpu.LANES) * gpu.LANES)


def choose(x: Any, residual: Any, indices: Any, sent: Any, chunk: int, k: int) -> None:
    """As ``cpu.chunk_choice.choose``; the residual may be None."""
    keep, chunks = residual is not None, -(-x.size // chunk)
    args = (x, residual if keep else x, indices, sent, chunk, k)
    if chunk <= _MORE * gpu.LANES:
        grid = gpu.blocks(chunks, gpu.THREADS // gpu.LANES)
        _IN_WARPS[keep, _FEW if chunk <= _FEW * gpu.LANES else _MORE](grid, gpu.THREADS, *args)
    elif chunk <= _EACH * gpu.THREADS:
        # Twice as many threads as go, or their largest bound nothing.
        threads = threads_for(max(-(-chunk // _EACH), min(2 * k, chunk // 4)))
        _IN_BLOCKS[keep](gpu.blocks(chunks, 1), threads, *args)
    else:
        _FROM_MEMORY[keep](gpu.blocks(chunks, 1), gpu.THREADS, *args)


def _make_load(keep):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def load(x, residual, i):  # type: ignore[no-untyped-def]
        """An element among which to choose. The residual holds it only later: a store would hold up the next loads."""
        return gpu.sanitise(x[i] + residual[i] if keep else x[i])

    return load


# --- the threshold ----------------------------------------------------------------------------------------------------


def _make_search(reach):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def search(values, count, sums, top, wanted):  # type: ignore[no-untyped-def]
        """The bits of a threshold that ``wanted`` magnitudes reach, or more, and how many equal to it go at most.

        Args:
            values, count, sums: for ``reach``, which says how many magnitudes are at least that large.
            top: the bits of the largest magnitude.
            wanted: one or more.
        """
        low, high, step = np.uint32(0), np.uint32(top + np.uint32(1)), np.uint32(1 << 23)
        above = np.int32(0)
        while np.uint32(high - low) > np.uint32(1):
            # Down from the largest by 1, 4, 11, 26, ... powers of two, until enough are reached.
            if low == np.uint32(0) and step < high:
                middle = np.uint32(high - step)
                step = np.uint32(step | np.uint32(step << np.uint32(1)))
            else:
                middle = np.uint32(np.uint32(low + high) >> np.uint32(1))
            found = np.int32(reach(values, count, sums, gpu.bits_float(middle)))
            if found == wanted:
                return middle, np.int32(_ALL)
            if found > wanted:
                low = middle
            else:
                high, above = middle, found
        return low, np.int32(wanted - above)

    return search


# --- a warp for a chunk -----------------------------------------------------------------------------------------------


def _make_in_warps(keep, each):  # type: ignore[no-untyped-def]
    load = _make_load(keep)

    @cuda.jit(device=True)
    def reach(values, count, sums, least):  # type: ignore[no-untyped-def]
        found = np.int32(0)
        for r in range(each):
            found = np.int32(found + cuda.popc(gpu.ballot(abs(values[r]) >= least)))
        return found

    search = _make_search(reach)

    @gpu.kernel("float32[::1], float32[::1], uint32[::1], float32[::1], int64, int64", keep=keep, each=each)
    def choose_in_warps(x, residual, indices, sent, chunk, k):  # type: ignore[no-untyped-def]
        values, below = cuda.local.array(each, np.float32), gpu.lanes_below(cuda.laneid)
        for c in range(cuda.grid(1) // 32, (x.size + chunk - 1) // chunk, cuda.gridsize(1) // 32):
            start, size = np.uint32(c * chunk), np.uint32(min(chunk, x.size - c * chunk))
            at, wanted = np.uint32(c * min(k, chunk)), np.int32(min(k, np.int64(size)))
            top = np.float32(0)
            for r in range(each):
                i = np.uint32(r * 32 + cuda.laneid)
                values[r] = load(x, residual, np.uint32(start + i)) if i < size else np.float32(0)
                top = max(top, abs(values[r]))
            for r in range(each if keep else 0):
                i = np.uint32(r * 32 + cuda.laneid)
                if i < size:
                    residual[np.uint32(start + i)] = values[r]
            least, equal = search(values, 0, 0, gpu.float_bits(gpu.warp_max(top)), wanted)
            least = gpu.bits_float(least)
            for r in range(each):
                # What lies behind the chunk comes last among the ties, if it is one: none of it goes.
                tie = abs(values[r]) == least
                ties = gpu.ballot(tie)
                goes = abs(values[r]) > least or (tie and np.int32(cuda.popc(ties & below)) < equal)
                equal = np.int32(equal - np.int32(cuda.popc(ties)))
                going = gpu.ballot(goes)
                if goes:
                    i, to = np.uint32(start + r * 32 + cuda.laneid), np.uint32(at + cuda.popc(going & below))
                    indices[to], sent[to] = i, values[r]
                    if keep:
                        residual[i] = np.float32(0)
                at = np.uint32(at + cuda.popc(going))

    return choose_in_warps


# --- a block of threads for a chunk -----------------------------------------------------------------------------------


# Indices are unsigned, or every access would ask whether it counts from the end.


@cuda.jit(device=True)
def _block_sum(mine, sums):  # type: ignore[no-untyped-def]
    """The sum over all threads, in each of them."""
    mine = np.int32(gpu.warp_sum(mine))
    cuda.syncthreads()
    if cuda.laneid == 0:
        sums[np.uint32(cuda.threadIdx.x // 32)] = mine
    cuda.syncthreads()
    total = np.int32(0)
    for warp in range(np.int32(cuda.blockDim.x // 32)):
        total = np.int32(total + sums[np.uint32(warp)])
    return total


@cuda.jit(device=True)
def _before(mine, sums):  # type: ignore[no-untyped-def]
    """How many threads of lower number say yes, and how many there are."""
    mask, warp = gpu.ballot(mine), np.int32(cuda.threadIdx.x // 32)
    cuda.syncthreads()
    if cuda.laneid == 0:
        sums[np.uint32(warp)] = np.int32(cuda.popc(mask))
    total = np.int32(cuda.syncthreads_count(np.int32(mine)))
    below = np.int32(cuda.popc(mask & gpu.lanes_below(cuda.laneid)))
    for other in range(warp):
        below = np.int32(below + sums[np.uint32(other)])
    return below, total


@cuda.jit(device=True)
def _reach_by_one(value, count, sums, least):  # type: ignore[no-untyped-def]
    """How many threads hold such a magnitude."""
    return cuda.syncthreads_count(np.int32(abs(value) >= least))


@cuda.jit(device=True)
def _reach_in_shared(values, count, sums, least):  # type: ignore[no-untyped-def]
    """How many of the block's list are that large."""
    if count <= cuda.blockDim.x:
        mine = cuda.threadIdx.x < count and abs(values[np.uint32(cuda.threadIdx.x)]) >= least
        return np.int32(cuda.syncthreads_count(np.int32(mine)))
    total = np.int32(0)
    for j in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        if abs(values[np.uint32(j)]) >= least:
            total = np.int32(total + np.int32(1))
    return _block_sum(total, sums)


_bound, _threshold = _make_search(_reach_by_one), _make_search(_reach_in_shared)


@cuda.jit(device=True)
def _order(flags, words, places):  # type: ignore[no-untyped-def]
    """Number the elements whose flags are set, in order of index; how many there are.

    Row r of the chunk is bit r of all threads' flags. Its bits in a warp go to ``words``; the number of the first of
    them goes to ``places``, where only the same warp reads it. Every warp does the same sums, so they wait but once.
    """
    warp, lane, mine = np.uint32(cuda.threadIdx.x // 32), np.uint32(cuda.laneid), np.uint32(0)
    for r in range(_EACH):
        word = gpu.ballot((flags >> np.uint32(r)) & np.uint32(1) != 0)
        if lane == r:
            mine = word
    cuda.syncthreads()
    if lane < _EACH:
        words[np.uint32(lane * _MOST_WARPS + warp)] = mine
    cuda.syncthreads()
    before, row = np.int32(0), np.int32(0)
    if lane < _EACH:
        for other in range(np.int32(cuda.blockDim.x // 32)):
            number = np.int32(cuda.popc(words[np.uint32(np.uint32(lane * _MOST_WARPS) + np.uint32(other))]))
            row = np.int32(row + number)
            if np.int32(other) < np.int32(warp):
                before = np.int32(before + number)
    upto = np.int32(gpu.warp_prefix_sum(row, cuda.laneid))
    places[np.uint32(lane * _MOST_WARPS + warp)] = upto - row + before
    cuda.syncwarp()
    return places[np.uint32(31 * _MOST_WARPS + warp)]


def _make_collect(keep):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def collect(x, residual, start, flags, words, places, values, offsets):  # type: ignore[no-untyped-def]
        """The elements with flags, and where they lie in the chunk, into lists in order of index."""
        warp, below = np.uint32(cuda.threadIdx.x // 32), gpu.lanes_below(cuda.laneid)
        while flags:
            r = np.uint32(cuda.popc(np.uint32(np.uint32(flags - np.uint32(1)) & ~flags)))  # the lowest one
            flags = np.uint32(flags & np.uint32(flags - np.uint32(1)))
            slot = np.uint32(r * np.uint32(_MOST_WARPS) + warp)
            to = np.uint32(places[slot] + cuda.popc(words[slot] & below))
            offset = np.uint32(r * np.uint32(cuda.blockDim.x) + np.uint32(cuda.threadIdx.x))
            i = np.uint32(start + offset)
            offsets[to] = np.uint16(offset)
            values[to] = residual[i] if keep else gpu.sanitise(x[i])

    return collect


def _make_send(keep):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def send(residual, start, at, count, least, equal, lists, sums, indices, sent):  # type: ignore[no-untyped-def]
        """Write those of the lists that are large enough, and of equal ones the first."""
        values, offsets = lists
        some = equal < _ALL
        first = np.int32(0)
        while first < count:  # a range of unknown step would divide
            j = np.uint32(first + cuda.threadIdx.x)
            value = values[j] if j < count else np.float32(0)
            tie = j < count and abs(value) == least
            ties, tied = np.int32(0), np.int32(0)
            if some:  # the same in all threads, or they would wait for each other forever
                ties, tied = _before(tie, sums)
            goes = j < count and (abs(value) > least or (tie and ties < equal))
            before, gone = _before(goes, sums)
            if goes:
                i, to = np.uint32(start + offsets[j]), np.uint32(at + before)
                indices[to], sent[to] = i, value
                if keep:
                    residual[i] = np.float32(0)
            at = np.uint32(at + gone)
            equal = np.int32(equal - tied)
            first = np.int32(first + cuda.blockDim.x)

    return send


def _make_in_blocks(keep):  # type: ignore[no-untyped-def]
    load = _make_load(keep)

    collect, send = _make_collect(keep), _make_send(keep)

    @gpu.kernel("float32[::1], float32[::1], uint32[::1], float32[::1], int64, int64", keep=keep)
    def choose_in_blocks(x, residual, indices, sent, chunk, k):  # type: ignore[no-untyped-def]
        values = cuda.shared.array(_HELD, np.float32)
        offsets = cuda.shared.array(_HELD, np.uint16)
        words = cuda.shared.array(_SLOTS, np.uint32)
        places = cuda.shared.array(_PLACES, np.int32)
        sums = cuda.shared.array(_MOST_WARPS, np.int32)
        tops = cuda.shared.array(_MOST_WARPS, np.float32)
        mine = cuda.local.array(_EACH, np.float32)
        for c in range(cuda.blockIdx.x, (x.size + chunk - 1) // chunk, cuda.gridDim.x):
            start, size = np.uint32(c * chunk), np.uint32(min(chunk, x.size - c * chunk))
            at, wanted = np.uint32(c * min(k, chunk)), np.int32(min(k, np.int64(size)))
            largest, flags = np.float32(0), np.uint32(0)
            # Counted on from element to element, or the compiler would keep 16 places in as many registers.
            step, i = np.uint32(cuda.blockDim.x), np.uint32(start + cuda.threadIdx.x)
            left = np.int32(np.int32(size) - np.int32(cuda.threadIdx.x))
            for four in range(0, _EACH, 4):
                j, more = i, left
                for r in range(four, four + 4):
                    mine[r] = load(x, residual, i) if left > 0 else np.float32(0)
                    flags = np.uint32(flags | np.uint32(1 << r)) if left > 0 else flags
                    largest = max(largest, abs(mine[r]))
                    i, left = np.uint32(i + step), np.int32(left - np.int32(step))
                for r in range(four, four + 4 if keep else four):
                    if more > 0:
                        residual[j] = mine[r]
                    j, more = np.uint32(j + step), np.int32(more - np.int32(step))
            top, bound = gpu.float_bits(gpu.block_max(tops, largest)), np.float32(0)
            if wanted <= cuda.blockDim.x:
                bits, _ = _bound(largest, 0, 0, top, wanted)
                bound = gpu.bits_float(bits)
            for r in range(_EACH):
                if abs(mine[r]) < bound:
                    flags = np.uint32(flags & np.uint32(0xFFFFFFFF ^ (1 << r)))
            count = _order(flags, words, places)
            collect(x, residual, start, flags, words, places, values, offsets)
            cuda.syncthreads()
            bits, equal = _threshold(values, count, sums, top, wanted)
            send(residual, start, at, count, gpu.bits_float(bits), equal, (values, offsets), sums, indices, sent)

    return choose_in_blocks


# --- chunks that no block of threads can hold -------------------------------------------------------------------------


def _make_kth(keep):  # type: ignore[no-untyped-def]
    """Device functions: an element, its magnitude's bits, how many reach some bits, the bits of the k-th largest."""

    @cuda.jit(device=True)
    def value(x, residual, i):  # type: ignore[no-untyped-def]
        return residual[i] if keep else gpu.sanitise(x[i])

    @cuda.jit(device=True)
    def bits(x, residual, i):  # type: ignore[no-untyped-def]
        return np.uint32(gpu.float_bits(value(x, residual, i)) & np.uint32(0x7FFFFFFF))

    @cuda.jit(device=True)
    def reach(x, residual, start, stop, least, sums):  # type: ignore[no-untyped-def]
        mine = np.int32(0)
        for i in range(start + cuda.threadIdx.x, stop, cuda.blockDim.x):
            if bits(x, residual, i) >= least:
                mine = np.int32(mine + np.int32(1))
        return _block_sum(mine, sums)

    @cuda.jit(device=True)
    def kth(x, residual, start, stop, k, sums):  # type: ignore[no-untyped-def]
        least = np.uint32(0)
        for turn in range(31):
            higher = np.uint32(least | np.uint32(np.uint32(1) << np.uint32(30 - turn)))
            found = reach(x, residual, start, stop, higher, sums)
            if found >= k:
                least = higher
                if found == k:
                    break
        return least

    return value, bits, reach, kth


def _make_from_memory(keep):  # type: ignore[no-untyped-def]
    value, bits, reach, kth = _make_kth(keep)

    @gpu.kernel("float32[::1], float32[::1], uint32[::1], float32[::1], int64, int64", keep=keep)
    def choose_from_memory(x, residual, indices, sent, chunk, k):  # type: ignore[no-untyped-def]
        sums = cuda.shared.array(_MOST_WARPS, np.int32)
        for c in range(cuda.blockIdx.x, (x.size + chunk - 1) // chunk, cuda.gridDim.x):
            start, stop, at = c * chunk, min(x.size, (c + 1) * chunk), c * min(k, chunk)
            wanted = min(k, stop - start)
            if keep:
                for i in range(start + cuda.threadIdx.x, stop, cuda.blockDim.x):
                    residual[i] = gpu.sanitise(x[i] + residual[i])
            least = kth(x, residual, start, stop, wanted, sums)
            equal = np.int32(wanted - reach(x, residual, start, stop, np.uint32(least + np.uint32(1)), sums))
            for first in range(start, stop, cuda.blockDim.x):
                i = first + cuda.threadIdx.x
                mine = bits(x, residual, i) if i < stop else np.uint32(0)
                ties, tied = _before(i < stop and mine == least, sums)
                goes = i < stop and (mine > least or (mine == least and ties < equal))
                before, gone = _before(goes, sums)
                if goes:
                    indices[at + before] = np.uint32(i)
                    sent[at + before] = value(x, residual, i)
                    if keep:
                        residual[i] = np.float32(0)
                at += gone
                equal = np.int32(max(np.int32(0), np.int32(equal - tied)))

    return choose_from_memory


_BOTH = (False, True)
_IN_WARPS = {(keep, each): _make_in_warps(keep, each) for keep in _BOTH for each in (_FEW, _MORE)}
_IN_BLOCKS = {keep: _make_in_blocks(keep) for keep in _BOTH}
_FROM_MEMORY = {keep: _make_from_memory(keep) for keep in _BOTH}
