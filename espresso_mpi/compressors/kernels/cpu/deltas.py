"""Differences of neighbours as whole numbers of one step, b bits each: the CPU kernels of ``bound``.

A block of 64 elements has its first value as it is. Element i is ``first + q·step`` with ``q = round((x - first) /
step)``, and the code of i is ``q - q'``, where q' belongs to the element before. So rounding does not add up along a
block. With a largest difference of neighbours D and ``step = D / (top - 2)``, where ``top = 2**(bits - 1) - 1`` is the
largest code, no code exceeds top: ``|q - q'| ≤ D/step + 1`` but for rounding in float32, which is below one.
"""

from __future__ import annotations

import numpy as np
from numba import prange
from numba.extending import register_jitable

from espresso_mpi.compressors.context import Context

from . import entries, host
from .linear_sparse import plus

BLOCK = 64
HEADER = 4
"""Words before the first block: the step as float32, and three zeros."""
TINY = 1e-30
"""A largest difference below this counts as 0: the step would underflow."""
MAGIC = 12582912.0
"""As in ``cpu.blocks``."""

_CHUNK = 8192
_MAGIC_BITS = int(np.float32(MAGIC).view(np.int32))


@register_jitable
def words(n: int, bits: int) -> int:
    """uint32 words of the payload of n elements."""
    return HEADER + (n + BLOCK - 1) // BLOCK * (1 + 2 * bits)


@register_jitable
def room(n: int) -> int:
    """Words of scratch memory in which the extents of n elements are found."""
    return 2 * ((n + _CHUNK - 1) // _CHUNK)


def extent(x: np.ndarray, context: Context) -> tuple[float, float]:
    """The largest difference of neighbours and the largest magnitude; infinity if a value is not finite."""
    tops = tops_of(x, context)
    _extents(x, tops)
    apart, largest = tops.reshape(2, -1).max(axis=1).view(np.float32)
    return (float(apart), float(largest)) if np.isfinite(largest) else (np.inf, np.inf)


def tops_of(x: np.ndarray, context: Context) -> np.ndarray:
    """Scratch memory for the extents of an array."""
    return context.scratch("deltas-tops", room(x.size), np.uint32, x)


@host.Kernel
def _extents(x, tops):  # type: ignore[no-untyped-def]
    half = tops.size // 2
    for c in prange(half):
        a, b = c * _CHUNK, min(x.size, (c + 1) * _CHUNK)
        tops[half + c] = host.max_bits(x[a:b])
        spread = np.float32(0)
        for i in range(max(1, a), b):
            apart = abs(host.sanitise(x[i]) - host.sanitise(x[i - 1]))
            spread = max(spread, apart)
        tops[c] = host.float_bits(spread)


@host.Kernel
def _sum_into(values, x):  # type: ignore[no-untyped-def]
    """``values = sanitise(values + x)``."""
    for c in prange((x.size + _CHUNK - 1) // _CHUNK):
        a, b = c * _CHUNK, min(x.size, (c + 1) * _CHUNK)
        host.sanitised_sum(values[a:b], x[a:b])


@host.inline
def number(value, first, inverse):  # type: ignore[no-untyped-def]
    """How many steps a value lies from the first of its block."""
    shifted = host.fma(value - first, inverse, np.float32(MAGIC))
    return np.int64(np.int32(host.float_bits(shifted))) - np.int64(_MAGIC_BITS)


@host.inline
def _begin(payload, tops, bits):  # type: ignore[no-untyped-def]
    """Write the header; returns the step for the largest difference of neighbours, and its inverse."""
    top = np.uint32(0)
    for c in range(tops.size // 2):
        top = max(top, tops[c])
    spread = host.bits_float(top)
    step = np.float32(0) if spread < TINY else np.float32(spread / np.float32((np.int64(1) << (bits - 1)) - 3))
    payload[:HEADER] = np.uint32(0)
    payload[0] = host.float_bits(step)
    return step, np.float32(1) / step if step > 0 else np.float32(0)


@host.Kernel
def _write(values, rest, payload, bits, step, inverse):  # type: ignore[no-untyped-def]
    """Write the blocks; leave in ``rest``, unless it is empty, what they do not hold. It may be ``values``."""
    size, top = 1 + 2 * bits, (np.int64(1) << (bits - 1)) - 1
    for block in prange((values.size + BLOCK - 1) // BLOCK):
        out = payload[HEADER + block * size : HEADER + (block + 1) * size]
        x = values[block * BLOCK : min(values.size, (block + 1) * BLOCK)]
        first = host.sanitise(x[0])
        out[0] = host.float_bits(first)
        out[1:] = np.uint32(0)
        before, waiting, filled, word = np.int64(0), np.uint64(0), 0, 1
        for i in range(x.size):
            value = host.sanitise(x[i])
            q = number(value, first, inverse)
            waiting |= np.uint64(q - before + top) << np.uint64(filled)
            before, filled = q, filled + bits
            if filled >= 32:
                out[word] = np.uint32(waiting & np.uint64(0xFFFFFFFF))
                waiting, filled, word = waiting >> np.uint64(32), filled - 32, word + 1
            if rest.size:
                rest[block * BLOCK + i] = value - host.sanitise(host.fma(np.float32(q), step, first))
        if filled > 0:
            out[word] = np.uint32(waiting)


@host.Composite
def _encode_values(values, rest, payload, tops, bits):  # type: ignore[no-untyped-def]
    _extents(values, tops)
    step, inverse = _begin(payload, tops, bits)
    _write(values, rest, payload, bits, np.float32(step), np.float32(inverse))  # in Python, they are of float64


@host.Composite
def encode(x, residual, payload, tops, bits):  # type: ignore[no-untyped-def]
    """Write the payload of ``x + residual``; leave in the residual, unless it is empty, what that does not hold.

    Args:
        payload: uint32; tops: of ``room`` words, see ``_extents``.
    """
    if residual.size:
        _sum_into(residual, x)
        _encode_values(residual, residual, payload, tops, bits)
    else:
        _encode_values(x, residual, payload, tops, bits)


@host.Kernel
def _read(out, payload, bits, step, add):  # type: ignore[no-untyped-def]
    size, top, mask = 1 + 2 * bits, (np.int64(1) << (bits - 1)) - 1, np.uint64((1 << bits) - 1)
    for block in prange((out.size + BLOCK - 1) // BLOCK):
        read = payload[HEADER + block * size : HEADER + (block + 1) * size]
        x = out[block * BLOCK : min(out.size, (block + 1) * BLOCK)]
        first = host.sanitise(host.bits_float(read[0]))
        q, waiting, filled, word = np.int64(0), np.uint64(0), 0, 1
        for i in range(x.size):
            if filled < bits:
                waiting |= np.uint64(read[word]) << np.uint64(filled)
                filled, word = filled + 32, word + 1
            q += np.int64(waiting & mask) - top
            waiting, filled = waiting >> np.uint64(bits), filled - bits
            value = host.sanitise(host.fma(np.float32(q), step, first))
            x[i] = plus(x[i], value) if add else value


@host.inline
def _step_in(payload):  # type: ignore[no-untyped-def]
    return host.sanitise(host.bits_float(payload[0]))


@host.Composite
def decode(out, payload, bits, add):  # type: ignore[no-untyped-def]
    """Undo ``encode``."""
    _read(out, payload, bits, np.float32(_step_in(payload)), add)


# --- by address -------------------------------------------------------------------------------------------------------

_encode_serial, _decode_serial = encode.serial, decode.serial


@entries.Entry
def encode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Parameters: bits."""
    bits = np.int64(entries.doubles(parameters, 1)[0])
    tops, to = entries.words32(work, room(n)), entries.words32(payload, words(n, bits))
    _encode_serial(entries.floats(x, n), entries.floats_if(residual, n), to, tops, bits)
    return 0


@entries.Entry
def decode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Parameters: bits."""
    bits = np.int64(entries.doubles(parameters, 1)[0])
    _decode_serial(entries.floats(x, n), entries.words32(payload, words(n, bits)), bits, add != 0)
    return 0
