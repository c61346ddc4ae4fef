"""Magnitudes of floats, which order like their bits: the search for large ones among those on the host."""

from __future__ import annotations

import numpy as np
from numba import carray, prange, types

from espresso_mpi.compressors.kernels.cpu import host
from espresso_mpi.compressors.kernels.cpu.entries import pointer_to

_BLOCK = 2048

_UNSIGNED = {t.itemsize: (t, t.type((1 << (8 * t.itemsize - 1)) - 1)) for t in map(np.dtype, ("u2", "u4", "u8"))}
"""By bytes of an element: the type of its bits, and those without the sign."""


def count_from(x: np.ndarray, least: int) -> int:
    """How many elements of a flat array have a magnitude with these bits or larger ones."""
    unsigned, magnitude = _UNSIGNED[x.itemsize]
    bits = x.view(unsigned)
    if _largest(bits, magnitude) < least:
        return 0
    return int(np.count_nonzero((bits & magnitude) >= least))


@host.inline
def _largest_of_two(a, b, magnitude):  # type: ignore[no-untyped-def]
    """Of two blocks of one size, read side by side: two streams keep more of the memory's latency hidden than one."""
    first, second = a[0] & magnitude, b[0] & magnitude
    for i in range(a.size):
        first = max(first, a[i] & magnitude)
        second = max(second, b[i] & magnitude)
    return max(first, second)


@host.Kernel
def _largest(bits, magnitude):  # type: ignore[no-untyped-def]
    """The largest of ``bits & magnitude``: an integer maximum runs at the speed of memory, counting floats does not."""
    top = bits[0] & magnitude
    blocks = bits.size // (2 * _BLOCK)
    for b in prange(blocks):
        start, other = b * _BLOCK, (blocks + b) * _BLOCK
        top = max(top, _largest_of_two(bits[start : start + _BLOCK], bits[other : other + _BLOCK], magnitude))
    for i in range(2 * blocks * _BLOCK, bits.size):
        top = max(top, bits[i] & magnitude)
    return top


# --- float32 by address -----------------------------------------------------------------------------------------------

_words_at = pointer_to(types.uint32)


@host.inline
def in_range(address, size, least):  # type: ignore[no-untyped-def]
    """Whether the magnitudes of all float32 values at an address have bits below ``least``."""
    bits, top = carray(_words_at(address), (size,)), np.uint32(0)
    for i in range(size):
        top = max(top, bits[i] & np.uint32(0x7FFFFFFF))
    return top < least


@host.inline
def all_in_range(addresses, sizes, least):  # type: ignore[no-untyped-def]
    """The same of several arrays; int64 each."""
    number = 0
    while number < addresses.size and in_range(addresses[number], sizes[number], least[number]):
        number += 1
    return number == addresses.size
