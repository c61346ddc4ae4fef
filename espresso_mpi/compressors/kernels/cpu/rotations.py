"""Blocks rotated by a random rotation: random signs, then a fast Walsh-Hadamard transform.

Every vector of d elements (d a power of two from 64) becomes ``w = H·D·v`` with a diagonal D of random signs and H the
Walsh-Hadamard matrix in Sylvester's order *without* its factor 1/√d, so ``H·H = d·1``: the factors go into the scales,
where a power of two costs no rounding. Whatever v was, the elements of w look like samples of one normal distribution,
so a quantiser made for that serves every v.

A tensor is cut into blocks of ``block`` elements; the last one is padded with zeros to a power of two. Before it is
rotated a block is multiplied by a power of two so that its largest magnitude is in [1, 2): sums cannot overflow. The
butterflies run from stride 1 upwards, and sums over a block run in 64 lanes (element i in lane i mod 64) that then are
folded upper half onto lower half: these orders are part of the format, and the CUDA kernels keep them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from espresso_mpi.compressors.checks import check_power_of_two
from espresso_mpi.compressors.limit import LIMIT

from . import host
from .flips import add_largest, flip, flip_add, flip_subtract, largest
from .hadamard import transform

SMALLEST, LARGEST = 64, 4096
"""Sizes of a block. Smaller ones do not fill the vectors, larger ones not twice the shared memory of a GPU's block."""

TINY = 1e-30
"""A block whose largest magnitude is below this is sent as zeros: its scale could underflow."""

TINY_BITS = int(np.float32(TINY).view(np.uint32))
CHUNK = 16384  # elements between two visits to the scheduler


def check_block(owner: str, block: Any) -> None:
    """Raise ConfigError unless ``block`` is a power of two in [SMALLEST, LARGEST]."""
    check_power_of_two(owner, "block", block, SMALLEST, LARGEST)


def count(n: int, block: int) -> int:
    """How many blocks n elements make."""
    return -(-n // block)


def padded(n: int, block: int) -> int:
    """How many elements they have together, with the padding of the last one."""
    whole, rest = divmod(n, block)
    return whole * block + (max(SMALLEST, 1 << (rest - 1).bit_length()) if rest else 0)


def _make_room(element: Any, size: int, what: str) -> Any:
    @intrinsic
    def room(typingctx):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            with builder.goto_entry_block():  # and not by cgutils, which would fill it with zeros
                array = builder.alloca(ir.ArrayType(context.get_value_type(element), size))
            array.align = 64
            return builder.bitcast(array, context.get_value_type(element).as_pointer())

        return types.CPointer(element)(), codegen

    room.__doc__ = what
    return room


# Memory on the stack of the function that they are called in: to be called by kernels themselves, in their loops.
float_room = _make_room(types.float32, 3 * LARGEST, "For three blocks of values.")
word_room = _make_room(types.uint32, LARGEST // 32, "For the sign bits of a block.")
sum_room = _make_room(types.float32, 2, "For two sums.")


# --- one block --------------------------------------------------------------------------------------------------------


@host.inline
def fill_signs(signs, first, low, high):  # type: ignore[no-untyped-def]
    """The sign bits of a block whose first word is number ``first`` of the tensor's."""
    for k in range(signs.size):
        signs[k] = host.random_bits(host.counter(first + k, low), high)


@host.inline
def block_size(rest, block):  # type: ignore[no-untyped-def]
    """The size of a block of which ``rest`` elements exist."""
    size = block
    while size // 2 >= max(rest, SMALLEST):
        size //= 2
    return size


@host.inline
def pad(room, values):  # type: ignore[no-untyped-def]
    """A copy of the values with zeros behind."""
    for i in range(values.size):
        room[i] = values[i]
    for i in range(values.size, room.size):
        room[i] = np.float32(0)
    return room


@host.inline
def copy(out, values):  # type: ignore[no-untyped-def]
    """As many values as ``out`` has room for. (Numba takes a second to compile an assignment to a slice.)"""
    for i in range(out.size):
        out[i] = values[i]


@host.inline
def clear(out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = 0


@host.inline
def powers(top):  # type: ignore[no-untyped-def]
    """The power of two by which to multiply a block whose largest magnitude has these bits, and its inverse."""
    exponent = np.uint32(top >> np.uint32(23))
    down = np.uint32(np.uint32(254) - exponent) << np.uint32(23)
    return host.bits_float(np.uint32(down)), host.bits_float(np.uint32(exponent << np.uint32(23)))


@host.inline
def take(values, kept, spare, keep):  # type: ignore[no-untyped-def]
    """The sanitised values to compress, in ``kept`` (added to it) if there is one; their largest magnitude's bits."""
    groups = values.size // 64
    if keep:
        top = add_largest(kept, values, groups)
        if top > np.uint32(host.LIMIT_BITS):
            host.sanitise_into(kept, kept)
            top = largest(kept, groups)
        return kept, top
    top = largest(values, groups)
    if top > np.uint32(host.LIMIT_BITS):
        host.sanitise_into(spare, values)
        return spare, largest(spare, groups)
    return values, top


@host.inline
def rotate(buffer, values, signs, power):  # type: ignore[no-untyped-def]
    """``buffer = power · H·D·values``."""
    flip(buffer, values, values.size // 64, signs, power)
    transform(buffer)


@host.inline
def scaled_back(buffer, scale, bound):  # type: ignore[no-untyped-def]
    """The factor by which to multiply the rotated back codes: scale, unless a product could leave the range.

    Then, which damaged payloads can bring about as well, the products are made, and sanitised, here. No element of the
    buffer is above ``bound`` in magnitude.
    """
    if abs(scale) <= np.float32(LIMIT) / bound:
        return scale
    for i in range(buffer.size):
        buffer[i] = host.sanitise(buffer[i] * scale)
    return np.float32(1)


STORE, ADD, SUBTRACT = 0, 1, 2


@host.inline
def put(out, buffer, room, signs, scale, how):  # type: ignore[no-untyped-def]
    """Multiply by the signs and the scale, and store, add or subtract that; of a padded block through ``room``."""
    groups = buffer.size // 64
    target = out
    if out.size < buffer.size:
        target = pad(room, out)
    if how == ADD:
        flip_add(target, buffer, groups, signs, scale)
    elif how == SUBTRACT:
        flip_subtract(target, buffer, groups, signs, scale)
    else:
        flip(target, buffer, groups, signs, scale)
    if out.size < buffer.size:
        copy(out, target)
