"""CUDA kernels of ``topk``, and what ``cuda.sparse`` takes from them: the k-th magnitude by radix selection, then a
copy of what reaches it, in order of index.

Magnitudes order like their 31 bits. Three passes count the values of 11, 11 and 9 bits among the elements that share
the bits found so far, and a warp picks the bin that holds the k-th largest. After the last one the k-th magnitude is
known exactly, and how many of those equal to it belong to the choice. Each warp then owns a run of consecutive
elements: one pass counts what it will write, and the next, which sums the counts of the warps before it, writes.
Values beyond ``LIMIT`` count as that and NaN as 0, as on the CPU.

No kernel waits for the host. The scratch memory (82 KB) does not depend on n and is kept for each stream, on which two
calls follow one another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from . import gpu

_BINS = 2048
_LEVELS = tuple((np.uint32(above), np.uint32(below)) for above, below in ((31, 20), (20, 9), (9, 0)))
"""The bits that a pass looks at: below the first and not below the second number."""

_WARPS = gpu.THREADS // gpu.LANES
_BLOCKS = 1024
"""Most blocks of the passes over runs: each thread of a block sums the counts of four blocks before it."""

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LARGEST = np.float32(np.finfo(np.float32).max)


class Scratch(NamedTuple):
    """Device memory, all uint32. ``histogram`` is zero between calls."""

    histogram: Any
    state: Any
    """The bits of the k-th magnitude found so far, and how many elements that share them belong to the choice.

    Then, for ``cuda.sparse``, whether they are known without a search, and k if the launch does not say it. The last
    two are 0 in ``topk``.
    """
    larger: Any
    """How many elements of each warp's run are larger than the k-th magnitude."""
    equal: Any
    """How many are equal to it."""
    larger_block: Any
    """As ``larger``, for each block."""
    equal_block: Any


def scratch_of(user: str) -> Scratch:
    """The scratch memory for one of the modules that use it."""
    sizes = (_BINS, 4, _BLOCKS * _WARPS, _BLOCKS * _WARPS, _BLOCKS, _BLOCKS)
    return gpu.scratch(f"topk for {user}", lambda: Scratch(*(gpu.sent(np.zeros(size, np.uint32)) for size in sizes)))


def encode(x: Any, residual: Any, indices: Any, values: Any) -> None:
    """Choose among ``x``, or among ``residual + x``, which ``residual`` then holds without the elements chosen."""
    scratch, keep = scratch_of("topk"), residual is not None
    source = residual if keep else x
    search(source, x, keep, indices.size, scratch)
    copy_chosen(source, source, int(keep), indices, values, scratch)


def search(source: Any, x: Any, add: bool, k: int, scratch: Scratch) -> None:
    """Find the k-th magnitude of ``source``; ``add`` first adds ``x`` to it. k = 0: what ``state`` says."""
    grid = gpu.blocks(source.size, gpu.TILE)
    for above, below in _LEVELS:
        first = bool(above == _LEVELS[0][0])
        count = _COUNT_DIGITS[add and first]
        count(grid, gpu.THREADS, source, x, scratch.histogram, scratch.state, above, below, first)
        _find_digit(1, 32, scratch.histogram, scratch.state, k, above, below, first)


def copy_chosen(source: Any, other: Any, clears: int, indices: Any, values: Any, scratch: Scratch) -> None:
    """Copy what reaches the magnitude found; zero it in ``source`` (``clears`` = 1) and in ``other`` as well (2)."""
    run = -(-source.size // (_BLOCKS * _WARPS * 128)) * 128
    grid = -(-source.size // (run * _WARPS))
    _count_runs(grid, gpu.THREADS, source, *scratch[1:], run)
    _COPY_RUNS[clears](grid, gpu.THREADS, source, other, indices, values, *scratch[1:], run)


def decode(indices: Any, values: Any, out: Any, add: bool) -> None:
    """Add the values to ``out`` at their indices, or write them there and zeros elsewhere."""
    scatter(indices, indices, values, out, False, add)


def scatter(head: Any, indices: Any, values: Any, out: Any, counted: bool, add: bool) -> None:
    """As ``decode``; ``counted``: the first word of ``head`` says how many of them there are."""
    if not add:
        gpu.zero(out)
    kernel = _SCATTER[counted, add]
    kernel(gpu.blocks(indices.size, gpu.THREADS), gpu.THREADS, out, head, indices, values)


@cuda.jit(device=True)
def magnitude(value):  # type: ignore[no-untyped-def]
    """The bits of the magnitude that compressors carry for a value."""
    return np.uint32(gpu.float_bits(gpu.sanitise(value)) & _MAGNITUDE)


@cuda.jit(device=True)
def _key(source, i):  # type: ignore[no-untyped-def]
    """The magnitude bits of an element plus one; 0 beyond the end."""
    return np.uint32(magnitude(source[i]) + np.uint32(1)) if i < source.size else np.uint32(0)


@cuda.jit(device=True)
def _count_digit(shared, value, prefix, above, below):  # type: ignore[no-untyped-def]
    bits = magnitude(value)
    if (bits >> above) == (prefix >> above):
        digit = (bits >> below) & ((np.uint32(1) << (above - below)) - np.uint32(1))
        cuda.atomic.add(shared, np.int32(digit), np.uint32(1))


def _make_count_digits(add):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def fetch(source, x, i):  # type: ignore[no-untyped-def]
        return gpu.sanitise(source[i] + x[i]) if add else source[i]

    @gpu.kernel("float32[::1], float32[::1], uint32[::1], uint32[::1], uint32, uint32, boolean", add=add)
    def count_digits(source, x, histogram, state, above, below, first):  # type: ignore[no-untyped-def]
        """Add to the histogram; ``add`` also does ``source += x``."""
        if state[2]:
            return
        shared = cuda.shared.array(_BINS, np.uint32)
        step = gpu.THREADS
        for b in range(cuda.threadIdx.x, _BINS, step):
            shared[b] = 0
        cuda.syncthreads()
        prefix = np.uint32(0) if first else state[0]
        for tile in range(gpu.TILE * cuda.blockIdx.x, source.size, gpu.TILE * cuda.gridDim.x):
            i = tile + cuda.threadIdx.x
            if tile + gpu.TILE <= source.size:
                p, q = fetch(source, x, i), fetch(source, x, i + step)
                r, s = fetch(source, x, i + 2 * step), fetch(source, x, i + 3 * step)
                if add:
                    source[i], source[i + step], source[i + 2 * step], source[i + 3 * step] = p, q, r, s
                _count_digit(shared, p, prefix, above, below)
                _count_digit(shared, q, prefix, above, below)
                _count_digit(shared, r, prefix, above, below)
                _count_digit(shared, s, prefix, above, below)
            else:
                for j in range(i, source.size, step):
                    p = fetch(source, x, j)
                    if add:
                        source[j] = p
                    _count_digit(shared, p, prefix, above, below)
        cuda.syncthreads()
        for b in range(cuda.threadIdx.x, _BINS, step):
            if shared[b]:
                cuda.atomic.add(histogram, b, shared[b])

    return count_digits


@gpu.kernel("uint32[::1], uint32[::1], int64, uint32, uint32, boolean")
def _find_digit(histogram, state, k, above, below, first):  # type: ignore[no-untyped-def]
    """One warp: the bin with the k-th largest element (k counts within the bits found before), then clear all bins."""
    if state[2]:
        return
    lane = cuda.laneid
    each = np.int64((np.uint32(1) << (above - below)) >> np.uint32(5))
    start = (31 - lane) * each  # lane 0 has the largest digits
    mine = np.int64(0)
    for b in range(start, start + each):
        mine += np.int64(histogram[b])
    through = gpu.warp_prefix_sum(mine, lane)
    wanted = np.int64(state[1])
    if first:
        wanted = np.int64(k) if k else np.int64(state[3])
    prefix = np.uint32(0) if first else state[0]
    cuda.syncwarp()
    if through - mine < wanted and wanted <= through:
        wanted -= through - mine
        digit = start + each - 1
        while np.int64(histogram[digit]) < wanted:
            wanted -= np.int64(histogram[digit])
            digit -= 1
        state[0] = prefix | np.uint32(np.uint32(digit) << below)
        state[1] = np.uint32(wanted)
    cuda.syncwarp()
    for b in range(lane, _BINS, 32):
        histogram[b] = np.uint32(0)


@gpu.kernel("float32[::1], uint32[::1], uint32[::1], uint32[::1], uint32[::1], uint32[::1], int64")
def _count_runs(source, state, larger, equal, larger_block, equal_block, run):  # type: ignore[no-untyped-def]
    """How many elements of each warp's run are larger than the k-th magnitude, and how many equal to it."""
    sums = cuda.shared.array(2, np.uint32)
    if cuda.threadIdx.x < 2:
        sums[cuda.threadIdx.x] = np.uint32(0)
    cuda.syncthreads()
    warp, threshold = cuda.grid(1) // 32, np.uint32(state[0] + np.uint32(1))
    above, same = np.int32(0), np.int32(0)
    for tile in range(warp * run, min(source.size, (warp + 1) * run), 128):
        i = tile + cuda.laneid
        p, q, r, s = _key(source, i), _key(source, i + 32), _key(source, i + 64), _key(source, i + 96)
        above = np.int32(above + (p > threshold) + (q > threshold) + (r > threshold) + (s > threshold))
        same = np.int32(same + (p == threshold) + (q == threshold) + (r == threshold) + (s == threshold))
    above, same = gpu.warp_sum(above), gpu.warp_sum(same)
    if cuda.laneid == 0:
        larger[warp], equal[warp] = np.uint32(above), np.uint32(same)
        cuda.atomic.add(sums, 0, np.uint32(above))
        cuda.atomic.add(sums, 1, np.uint32(same))
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        larger_block[cuda.blockIdx.x], equal_block[cuda.blockIdx.x] = sums[0], sums[1]


@cuda.jit(device=True)
def _before(counts, block_counts, sums, which):  # type: ignore[no-untyped-def]
    """The sum of the counts of all warps before this one; ``sums[which]`` is scratch for the block and zero."""
    mine = np.uint32(0)
    for b in range(cuda.threadIdx.x, cuda.blockIdx.x, gpu.THREADS):
        mine = np.uint32(mine + block_counts[b])
    cuda.atomic.add(sums, which, mine)
    cuda.syncthreads()
    total = np.int64(sums[which])
    for w in range(cuda.blockIdx.x * _WARPS, cuda.grid(1) // 32):
        total += np.int64(counts[w])
    return total


def _make_copy_runs(clears):  # type: ignore[no-untyped-def]
    @cuda.jit(device=True)
    def copy(source, other, i, key, threshold, wanted, indices, values, before, ties):  # type: ignore[no-untyped-def]
        """Write element i if it was chosen, given how many larger ones and ties stand before this warp's elements.

        Returns those two numbers for the next elements of the warp. Of the ties the first ``wanted`` were chosen.
        """
        is_larger, is_tie = key > threshold, key == threshold
        larger, equal = gpu.ballot(is_larger), gpu.ballot(is_tie)
        mask = gpu.lanes_below(cuda.laneid)
        ties_before = ties + cuda.popc(np.uint32(equal & mask))
        if is_larger or (is_tie and ties_before < wanted):
            at = before + cuda.popc(np.uint32(larger & mask)) + min(ties_before, wanted)
            indices[at] = np.uint32(i)
            values[at] = gpu.sanitise(source[i])
            if clears >= 1:
                source[i] = np.float32(0)
            if clears == 2:
                other[i] = np.float32(0)
        return before + cuda.popc(larger), ties + cuda.popc(equal)

    signature = "float32[::1], float32[::1], uint32[::1], float32[::1], " + 5 * "uint32[::1], " + "int64"

    @gpu.kernel(signature, clears=clears)
    def copy_runs(  # type: ignore[no-untyped-def]
        source, other, indices, values, state, larger, equal, larger_block, equal_block, run
    ):
        """Each warp copies the chosen elements of its run to their place, and zeroes them where it is to."""
        sums = cuda.shared.array(2, np.uint32)
        if cuda.threadIdx.x < 2:
            sums[cuda.threadIdx.x] = np.uint32(0)
        cuda.syncthreads()
        before, ties = _before(larger, larger_block, sums, 0), _before(equal, equal_block, sums, 1)
        threshold, wanted = np.uint32(state[0] + np.uint32(1)), np.int64(state[1])
        start = cuda.grid(1) // 32 * run
        for tile in range(start, min(source.size, start + run), 128):
            i = tile + cuda.laneid
            p, q, r, s = _key(source, i), _key(source, i + 32), _key(source, i + 64), _key(source, i + 96)
            before, ties = copy(source, other, i, p, threshold, wanted, indices, values, before, ties)
            before, ties = copy(source, other, i + 32, q, threshold, wanted, indices, values, before, ties)
            before, ties = copy(source, other, i + 64, r, threshold, wanted, indices, values, before, ties)
            before, ties = copy(source, other, i + 96, s, threshold, wanted, indices, values, before, ties)

    return copy_runs


def _make_scatter(counted, add):  # type: ignore[no-untyped-def]
    @gpu.kernel("float32[::1], uint32[::1], uint32[::1], float32[::1]", counted=counted, add=add)
    def scatter(out, head, indices, values):  # type: ignore[no-untyped-def]
        count = min(np.int64(head[0]), np.int64(indices.size)) if counted else np.int64(indices.size)
        for j in range(cuda.grid(1), count, cuda.gridsize(1)):
            i = indices[j]
            if i < out.size:  # a damaged payload must not write outside the array
                value = gpu.sanitise(values[j])
                if add:  # nor may one that repeats an index add up to infinity
                    value = min(max(out[i] + value, -_LARGEST), _LARGEST)
                out[i] = value

    return scatter


_COUNT_DIGITS = {add: _make_count_digits(add) for add in (False, True)}
_COPY_RUNS = {clears: _make_copy_runs(clears) for clears in (0, 1, 2)}
_SCATTER = {(counted, add): _make_scatter(counted, add) for counted in (False, True) for add in (False, True)}
