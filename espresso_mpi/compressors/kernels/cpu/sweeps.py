"""The pass of the sparse methods over the data, and what follows it for the elements that reached the threshold.

One pass makes the values that are to be compressed (``residual + x``, or DGC's two sums) and one bit for each that
reaches the threshold. It notes these elements while they are in the first cache: to find them later takes a cache miss
each. Where there is no room for all of them, the bits lead to them.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from . import host
from .magnitudes import key_of, reached, reached_of_clean

CHUNK = 8192
"""Elements of which one turn of a parallel loop counts or copies those behind the bits; spans are multiples of it."""

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
def _test(values, clean, masks, threshold):  # type: ignore[no-untyped-def]
    """Set the bits of what reaches the threshold; returns how many do."""
    reach = 0
    whole = values.size // 64
    for w in range(whole):
        mask = reached_of_clean(values, 64 * w, threshold) if clean else reached(values, 64 * w, threshold)
        reach += host.ones(mask)
        masks[w] = mask
    if whole < masks.size:
        last = np.uint64(0)
        for i in range(64 * whole, values.size):
            last |= np.uint64(key_of(values[i]) >= threshold) << np.uint64(i - 64 * whole)
        masks[whole] = last
        reach += host.ones(last)
    return reach


@host.inline
def _move(start, values, masks, zeroed, places, found):  # type: ignore[no-untyped-def]
    """Note the elements behind the bits, and where they are; ``zeroed``: the array that has zeros there then."""
    at = 0
    for w in range(masks.size):
        mask = masks[w]
        while mask:
            i = 64 * w + host.trailing_zeros(mask)
            mask &= mask - np.uint64(1)
            places[at] = start + i
            found[at] = host.sanitise(values[i])
            at += 1
            if zeroed.size:
                zeroed[i] = np.float32(0)


@host.inline
def _sweep_span(start, x, kept, momentum, clean, zeroed, masks, threshold, blend, places, found):  # type: ignore[no-untyped-def]
    """Returns how many reach the threshold, and how many of them were noted: all, or those before there was no room."""
    reach, noted = 0, 0
    for a in range(0, x.size, _BLOCK):
        b = min(x.size, a + _BLOCK)
        xb, kb, mb, bits = x[a:b], kept[a:b], momentum[a:b], masks[a // 64 : (b + 63) // 64]
        _advance(xb, kb, mb, blend[0], blend[1])
        values = kb if kept.size else (mb if momentum.size else xb)
        here = _test(values, clean, bits, threshold)
        if noted == reach and noted + here <= found.size:
            _move(start + a, values, bits, zeroed[a:b], places[noted:], found[noted:])
            noted += here
        reach += here
    return reach, noted


@host.Kernel
def sweep(x, kept, momentum, clean, zeroed, masks, threshold, blend, places, found, counts):  # type: ignore[no-untyped-def]
    """Advance the arrays and test the values. What reaches the threshold is noted, while it is in the first cache.

    Args:
        clean: whether all values are what compressors carry.
        zeroed: receives zeros where elements are noted; empty: nothing does.
        blend: the factors of the momentum and of x.
        places, found: uint32 and float32: the elements that are noted, each span in its share of the memory.
        counts: int64 of shape (2 * spans,): how many reach the threshold in each span, and how many are noted.
    """
    spans = counts.size // 2
    length, most = (x.size + spans * CHUNK - 1) // (spans * CHUNK) * CHUNK, found.size // spans
    for s in prange(spans):
        a, b, first = min(x.size, s * length), min(x.size, (s + 1) * length), s * most
        counts[2 * s], counts[2 * s + 1] = _sweep_span(
            a, x[a:b], kept[a:b], momentum[a:b], clean, zeroed[a:b], masks[a // 64 : (b + 63) // 64], threshold, blend,
            places[first : first + most], found[first : first + most],
        )  # fmt: skip


# --- the elements that were noted -------------------------------------------------------------------------------------


@host.inline
def put_back(places, found, counts, zeroed):  # type: ignore[no-untyped-def]
    """Undo what ``sweep`` did to ``zeroed``."""
    spans = counts.size // 2
    most = found.size // spans
    for s in range(spans if zeroed.size else 0):
        for j in range(s * most, s * most + counts[2 * s + 1]):
            zeroed[places[j]] = found[j]


@host.inline
def join(places, found, counts):  # type: ignore[no-untyped-def]
    """Move what spans have noted to the beginning of the memory; returns how many these are."""
    spans = counts.size // 2
    most, at = found.size // spans, counts[1]
    for s in range(1, spans):
        for j in range(s * most, s * most + counts[2 * s + 1]):
            places[at], found[at] = places[j], found[j]
            at += 1
    return at


@host.inline
def take(places, found, threshold, ties, kept, momentum, zeroed, indices, sent):  # type: ignore[no-untyped-def]
    """Move those noted that are larger than the threshold, and the first ``ties`` that are equal to it.

    Args:
        kept, momentum: have zeros there then.
        zeroed: ``kept`` if it has zeros already where elements are noted: it gets the others back; else empty.
    """
    at = 0
    for j in range(found.size):
        i, value = places[j], found[j]
        key = key_of(value)
        if key < threshold or (key == threshold and ties <= 0):
            if zeroed.size:
                zeroed[i] = value
            continue
        ties -= key == threshold
        indices[at], sent[at] = i, value
        at += 1
        if kept.size and not zeroed.size:
            kept[i] = np.float32(0)
        if momentum.size:
            momentum[i] = np.float32(0)


# --- the elements behind the bits, where not all are noted ------------------------------------------------------------


@host.Kernel
def gather(values, masks, larger, equal, places, found):  # type: ignore[no-untyped-def]
    """Note what is behind the bits; ``larger`` and ``equal`` count what stands before each chunk."""
    for c in prange(larger.size):
        a, b, at = c * CHUNK, min(values.size, (c + 1) * CHUNK), larger[c] + equal[c]
        _move(a, values[a:b], masks[a // 64 : (b + 63) // 64], values[:0], places[at:], found[at:])


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
    """Count in chunks what is larger than a threshold and what is equal, behind the bits of one that is not higher."""
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
