"""Compiled: the headers of a negotiation round, shown and compared by kernels that go on at once if all are equal.

A rank that has no data for the round shows its header by ``shared_memory.gather`` instead: it finds the others' in the
same places, and they find its own to differ.
"""

from __future__ import annotations

from numba import carray, types

from espresso_mpi.compressors.kernels.cpu import host
from espresso_mpi.compressors.kernels.cpu.entries import pointer_to

from .shared_memory import STEP, WAITED, move, now
from .window_places import COUNT, ME, MEMORY, SLOT, STARTS, STRIDE

HEADER, SIZE, IGNORED, WIDTH, SETUP = range(5)
"""Places of a set-up, an int64 array, and their number: address and size of the header, bits of its first byte that may
differ, and bytes between the headers that are received if they differ."""

_bytes_at = pointer_to(types.uint8)


@host.inline
def note(marks, number, log):  # type: ignore[no-untyped-def]
    """Write the clock, and the time spent in waiting so far, as nanoseconds."""
    marks[number, 0] = now()
    marks[number, 1] = log[WAITED]


@host.inline
def in_row(window, half, rank):  # type: ignore[no-untyped-def]
    """Where a rank's row begins in a half of the window."""
    return window[MEMORY] + window[STARTS + half] + rank * window[STRIDE]


@host.inline
def slot_of(window, rank, half):  # type: ignore[no-untyped-def]
    """Where the small data of a rank are in a half of the window."""
    return window[MEMORY] + window[STARTS + half] - SLOT + rank * window[STRIDE]


@host.inline
def show(setup, flags, window, half):  # type: ignore[no-untyped-def]
    """Copy the header of this rank to its slot."""
    move(slot_of(window, window[ME], half), setup[HEADER], setup[SIZE])
    flags[window[ME] * STEP + 1 + half] = setup[SIZE]


@host.inline
def equals(setup, address, size):  # type: ignore[no-untyped-def]
    """Whether a header of so many bytes is that of this rank, but for the bits that may differ."""
    if size != setup[SIZE]:
        return False
    mine, other = carray(_bytes_at(setup[HEADER]), (size,)), carray(_bytes_at(address), (size,))
    different = (mine[0] ^ other[0]) & ~setup[IGNORED]
    for i in range(1, size):
        different |= mine[i] ^ other[i]
    return different == 0


@host.inline
def same(setup, flags, window, half):  # type: ignore[no-untyped-def]
    """Whether all ranks show the header of this one, but for the bits that may differ."""
    for rank in range(window[COUNT]):
        if not equals(setup, slot_of(window, rank, half), flags[rank * STEP + 1 + half]):
            return False
    return True


@host.inline
def receive(setup, heads, sizes, flags, window, half):  # type: ignore[no-untyped-def]
    """Copy the headers of all ranks."""
    for rank in range(window[COUNT]):
        size = sizes[rank] = flags[rank * STEP + 1 + half]
        move(heads.ctypes.data + rank * setup[WIDTH], slot_of(window, rank, half), size)
