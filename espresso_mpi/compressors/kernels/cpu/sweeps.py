"""The pass of the sparse methods over the data, and what follows it for the elements that reached the threshold.

One pass makes the values that are to be compressed (``residual + x``, or DGC's two sums) and one bit for each that
reaches the threshold. The bits then lead to those elements alone.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from . import host
from .magnitudes import key_of, reached

CHUNK = 8192
"""Elements whose bits and counts one turn of a parallel loop makes."""

_BLOCK = 1024
"""Elements that are made and then tested: they stay in the first cache."""


# --- the pass over the data -------------------------------------------------------------------------------------------


@host.inline
def _advance(x, kept, momentum, decay, factor):  # type: ignore[no-untyped-def]
    """``kept`` and ``momentum``, those that there are, after this step's gradient; as ``samples`` makes it."""
    if momentum.size and kept.size:
        for i in range(x.size):
            value = host.fma(decay, momentum[i], x[i] * factor)
            kept[i] = host.sanitise(kept[i] + value)
            momentum[i] = host.sanitise(value)
    elif momentum.size:
        for i in range(x.size):
            momentum[i] = host.sanitise(host.fma(decay, momentum[i], x[i] * factor))
    elif kept.size:
        host.sanitised_sum(kept, x)


@host.inline
def _test(values, masks, threshold):  # type: ignore[no-untyped-def]
    """Set the bits of what reaches the threshold; returns how many do, and how many are larger."""
    reach, larger = 0, 0
    whole = values.size // 64
    for w in range(whole):
        mask = reached(values, 64 * w, threshold)
        larger += host.ones(reached(values, 64 * w, np.uint32(threshold + np.uint32(1))))
        reach += host.ones(mask)
        masks[w] = mask
    if whole < masks.size:
        last = np.uint64(0)
        for i in range(64 * whole, values.size):
            key = key_of(values[i])
            last |= np.uint64(key >= threshold) << np.uint64(i - 64 * whole)
            larger += key > threshold
        masks[whole] = last
        reach += host.ones(last)
    return reach, larger


@host.inline
def _sweep_chunk(x, kept, momentum, masks, threshold, decay, factor):  # type: ignore[no-untyped-def]
    reach, larger = 0, 0
    for a in range(0, x.size, _BLOCK):
        b = min(x.size, a + _BLOCK)
        xb, kb, mb = x[a:b], kept[a:b], momentum[a:b]
        _advance(xb, kb, mb, decay, factor)
        values = kb if kept.size else (mb if momentum.size else xb)
        here, above = _test(values, masks[a // 64 : (b + 63) // 64], threshold)
        reach += here
        larger += above
    return reach, larger


@host.Kernel
def sweep(x, kept, momentum, masks, larger, equal, threshold, decay, factor):  # type: ignore[no-untyped-def]
    """Advance the arrays and test the values; ``larger`` and ``equal`` count for each chunk."""
    for c in prange(larger.size):
        a, b = c * CHUNK, min(x.size, (c + 1) * CHUNK)
        xb, kb, mb, bits = x[a:b], kept[a:b], momentum[a:b], masks[a // 64 : (b + 63) // 64]
        reach, above = _sweep_chunk(xb, kb, mb, bits, threshold, decay, factor)
        larger[c], equal[c] = above, reach - above


# --- the elements that reached the threshold --------------------------------------------------------------------------


@host.inline
def _gather_chunk(values, masks, found):  # type: ignore[no-untyped-def]
    at = 0
    for w in range(masks.size):
        mask = masks[w]
        while mask:
            found[at] = host.sanitise(values[64 * w + host.trailing_zeros(mask)])
            at += 1
            mask &= mask - np.uint64(1)


@host.Kernel
def gather(values, masks, larger, equal, found):  # type: ignore[no-untyped-def]
    """The values behind the bits; ``larger`` and ``equal`` count what stands before each chunk."""
    for c in prange(larger.size):
        a, b = c * CHUNK, min(values.size, (c + 1) * CHUNK)
        _gather_chunk(values[a:b], masks[a // 64 : (b + 63) // 64], found[larger[c] + equal[c] :])


@host.inline
def _count_chunk(values, masks, threshold):  # type: ignore[no-untyped-def]
    larger, equal = 0, 0
    for w in range(masks.size):
        mask = masks[w]
        while mask:
            key = key_of(values[64 * w + host.trailing_zeros(mask)])
            larger += key > threshold
            equal += key == threshold
            mask &= mask - np.uint64(1)
    return larger, equal


@host.Kernel
def recount(values, masks, larger, equal, threshold):  # type: ignore[no-untyped-def]
    """As ``sweep`` counts, for a threshold that is not below the one of the bits."""
    for c in prange(larger.size):
        a, b = c * CHUNK, min(values.size, (c + 1) * CHUNK)
        larger[c], equal[c] = _count_chunk(values[a:b], masks[a // 64 : (b + 63) // 64], threshold)


@host.inline
def sums_before(counts):  # type: ignore[no-untyped-def]
    """Replace counts by the sums of those before them; returns the sum of all."""
    total = 0
    for c in range(counts.size):
        total, counts[c] = total + counts[c], total
    return total


@host.inline
def _copy_chunk(start, values, kept, momentum, masks, threshold, ties, indices, sent):  # type: ignore[no-untyped-def]
    at = 0
    for w in range(masks.size):
        mask = masks[w]
        while mask:
            i = 64 * w + host.trailing_zeros(mask)
            mask &= mask - np.uint64(1)
            value = host.sanitise(values[i])
            key = key_of(value)
            if key < threshold or (key == threshold and ties <= 0):
                continue
            ties -= key == threshold
            indices[at] = start + i
            sent[at] = value
            at += 1
            if kept.size:
                kept[i] = np.float32(0)
            if momentum.size:
                momentum[i] = np.float32(0)


@host.Kernel
def copy(values, kept, momentum, masks, larger, equal, threshold, ties, indices, sent):  # type: ignore[no-untyped-def]
    """Move what is larger than the threshold, and the first ``ties`` that are equal to it, in order of index."""
    for c in prange(larger.size):
        a, b = c * CHUNK, min(values.size, (c + 1) * CHUNK)
        bits, at, left = masks[a // 64 : (b + 63) // 64], larger[c] + min(equal[c], ties), ties - equal[c]
        _copy_chunk(a, values[a:b], kept[a:b], momentum[a:b], bits, threshold, left, indices[at:], sent[at:])
