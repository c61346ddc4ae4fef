"""The CPU kernels of ``topk_chunked``: energies of chunks, the elements on their way."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from . import host, vectors
from . import linear_sparse as sparse

LANES = 16
"""Running sums of an energy: lane l sums the squares of elements l, l + 16, and so on. The format fixes this order."""

LEAST, MOST = 2.0**-100, 2.0**100
"""Energies between these are in the summary as they are."""

LEAST_BITS, MOST_BITS = (127 - 100) << 23, (127 + 100) << 23

_TOP = 65504.0


@register_jitable
def doublings_of(ranks: int) -> int:
    """The power of two that the number of ranks does not exceed."""
    found = 0
    while (1 << found) < ranks:
        found += 1
    return found


# --- normal values ----------------------------------------------------------------------------------------------------


@lru_cache
def kept_of_gaussian(length: int, share: float) -> float:
    """The share of ``‖x‖²`` in the largest chunks of independent normal values."""
    if share >= 1:
        return 1.0
    low, high = 0.0, 2.0 * length + 200
    while _beyond(length, high) > share:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _beyond(length, middle) > share else (low, middle)
    return _beyond(length + 2, low)


def _beyond(degrees: int, t: float) -> float:
    """``P(χ² > t)`` with an even number of degrees of freedom: a sum of Poisson probabilities."""
    if t <= 0:
        return 1.0
    terms = np.arange(degrees // 2)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, terms.size)))])
    return float(np.sum(np.exp(terms * math.log(t / 2) - t / 2 - logs)))


@lru_cache
def error_of_halves() -> float:
    """What rounding to 11 bits adds to normal values: a twelfth of the squared unit of each octave, by its weight."""
    octaves = range(-40, 6)
    weights = (math.erf(2.0 ** (e + 1) / math.sqrt(2)) - math.erf(2.0**e / math.sqrt(2)) for e in octaves)
    return sum(w * 4.0 ** (e - 10) / 12 for e, w in zip(octaves, weights))


# --- energies ---------------------------------------------------------------------------------------------------------


@intrinsic
def _squares(typingctx, x):  # type: ignore[no-untyped-def]
    """The sum of the squares of x, whose size is a multiple of 16: by lanes, then folded pairwise. A fused sum."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        array, vector = context.make_array(sig.args[0])(context, builder, args[0]), vectors.floats(LANES)
        (size,) = cgutils.unpack_tuple(builder, array.shape, 1)
        total = cgutils.alloca_once_value(builder, vectors.constant(vector, 0.0))
        groups = builder.udiv(size, ir.Constant(size.type, LANES))
        with cgutils.for_range(builder, groups) as loop:
            index = builder.mul(loop.index, ir.Constant(loop.index.type, LANES))
            pointer = builder.bitcast(builder.gep(array.data, [index]), vector.as_pointer())
            values = builder.load(pointer, align=4)
            builder.store(vectors.fma(builder, values, values, builder.load(total)), total)
        return vectors.tree_sum(builder, builder.load(total))

    return types.float32(x), codegen


@host.inline
def _scaled_squares(values, buffer, factor):  # type: ignore[no-untyped-def]
    """The sum of the squares of ``values·factor``, of any number of any values; ``buffer`` is as large as a chunk."""
    for i in range(values.size):
        buffer[i] = host.sanitise(values[i]) * factor
    buffer[values.size :] = np.float32(0)
    return _squares(buffer)


@host.inline
def compress(bits, shift):  # type: ignore[no-untyped-def]
    """The summary of an energy beyond the range, given as float32 bits and the power of two that they lack.

    Its bits, which are nearly its logarithm, approach the end of the range to an eighth of their distance.
    """
    end = np.int64(MOST_BITS) if shift > 0 else np.int64(LEAST_BITS)
    wide = np.int64(bits) + np.int64(shift) * np.int64(1 << 23)
    return host.bits_float(np.uint32(end + ((wide - end) >> np.int64(3))))


@host.inline
def _energy(values, buffer):  # type: ignore[no-untyped-def]
    """What the summary holds of a chunk. Values within the range need not be sanitised, and their sum is finite."""
    total = _squares(values) if values.size == buffer.size else np.float32(0)
    if np.float32(LEAST) <= total <= np.float32(MOST):
        return total
    if host.max_bits(values) == 0:
        return np.float32(0)
    total = _scaled_squares(values, buffer, np.float32(1))
    if total < np.float32(LEAST):
        rest = _scaled_squares(values, buffer, np.float32(2.0**100))
        return compress(host.float_bits(rest), -200) if rest > 0 else rest
    if total > np.float32(MOST):
        return compress(host.float_bits(_scaled_squares(values, buffer, np.float32(2.0**-100))), 200)
    return total


@host.Kernel
def summarise(x, residual, summary, length):  # type: ignore[no-untyped-def]
    each = max(1, sparse.CHUNK // length)
    for block in prange((summary.size + each - 1) // each):
        buffer = np.empty(length, np.float32)
        first, last = block * each, min(summary.size, (block + 1) * each)
        a, b = first * length, min(x.size, last * length)
        values = x[a:b]
        if residual.size:
            host.sanitised_sum(residual[a:b], values)
            values = residual[a:b]
        for c in range(first, last):
            summary[c] = _energy(values[(c - first) * length : min(values.size, (c + 1 - first) * length)], buffer)


@host.inline
def scale_of(energies, doublings):  # type: ignore[no-untyped-def]
    """A power of two s with ``ranks·max E ≤ (32768·s)²``, the least but for a factor of two: sums stay below 65504."""
    top = np.int64(host.max_bits(energies))
    if top > MOST_BITS:
        top = MOST_BITS + ((top + 1 - MOST_BITS) << 3)
    elif top < LEAST_BITS:
        top = LEAST_BITS + ((top + 1 - LEAST_BITS) << 3)
    exponent = (top >> 23) - 126 + doublings  # ranks · E < 2 ** exponent
    power = ((exponent + 1) >> 1) - 15
    return host.bits_float(np.uint32((min(max(power, -125), 126) + 127) << 23))


# --- values -----------------------------------------------------------------------------------------------------------


@host.inline
def _take_singles(values, x, kept):  # type: ignore[no-untyped-def]
    """Write a chunk and leave in ``kept``, unless it is empty, what is not written."""
    for i in range(x.size):
        values[i] = host.sanitise(kept[i] if kept.size else x[i])
    values[x.size :] = np.float32(0)
    kept[:] = np.float32(0)


@host.inline
def _half(value, inverse):  # type: ignore[no-untyped-def]
    """The bits of ``value·inverse`` as float16; the limit is reached only if a summary is not that of the values."""
    scaled = value * inverse
    scaled = np.float32(_TOP) if scaled > np.float32(_TOP) else scaled
    return host.to_half(np.float32(-_TOP) if scaled < np.float32(-_TOP) else scaled)


@host.inline
def _take_halves(values, x, kept, scale, inverse):  # type: ignore[no-untyped-def]
    if kept.size:
        for i in range(x.size):
            value = kept[i]
            values[i] = _half(value, inverse)
            kept[i] = host.fma(-host.from_half(values[i]), scale, value)
    else:
        for i in range(x.size):
            values[i] = _half(host.sanitise(x[i]), inverse)
    values[x.size :] = 0


@host.Kernel
def take_chunks(values, indices, x, residual, length):  # type: ignore[no-untyped-def]
    for j in prange(indices.size):
        a, b = indices[j] * length, min(x.size, (indices[j] + 1) * length)
        _take_singles(values[j * length : (j + 1) * length], x[a:b], residual[a:b])


@host.Kernel
def take_chunks_as_halves(values, indices, x, residual, length, scale, inverse):  # type: ignore[no-untyped-def]
    for j in prange(indices.size):
        a, b = indices[j] * length, min(x.size, (indices[j] + 1) * length)
        _take_halves(values[j * length : (j + 1) * length], x[a:b], residual[a:b], scale, inverse)


def take(values: Any, indices: Any, x: Any, residual: Any, scale: np.float32, length: int) -> None:
    if values.dtype == np.float32:
        take_chunks(values, indices, x, residual, length)
    else:
        take_chunks_as_halves(values, indices, x, residual, length, scale, np.float32(1) / scale)


@host.inline
def _put_singles(out, values, add):  # type: ignore[no-untyped-def]
    """Write a chunk, or add it."""
    if add:
        for i in range(out.size):
            out[i] = sparse.plus(out[i], host.sanitise(values[i]))
    else:
        for i in range(out.size):
            out[i] = host.sanitise(values[i])


@host.inline
def _put_halves(out, values, scale, add):  # type: ignore[no-untyped-def]
    if add:
        for i in range(out.size):
            out[i] = sparse.plus(out[i], host.sanitise(host.from_half(values[i]) * scale))
    else:
        for i in range(out.size):
            out[i] = host.sanitise(host.from_half(values[i]) * scale)


@host.Kernel
def put_chunks(values, indices, out, length, add):  # type: ignore[no-untyped-def]
    for j in prange(indices.size):
        if indices[j] * length < out.size:  # a damaged payload must not write outside the array
            a, b = indices[j] * length, min(out.size, (indices[j] + 1) * length)
            _put_singles(out[a:b], values[j * length : (j + 1) * length], add)


@host.Kernel
def put_chunks_of_halves(values, indices, out, length, scale, add):  # type: ignore[no-untyped-def]
    for j in prange(indices.size):
        if indices[j] * length < out.size:
            a, b = indices[j] * length, min(out.size, (indices[j] + 1) * length)
            _put_halves(out[a:b], values[j * length : (j + 1) * length], scale, add)


def put(values: Any, indices: Any, out: Any, scale: np.float32, length: int, add: bool) -> None:
    if values.dtype == np.float32:
        put_chunks(values, indices, out, length, add)
    else:
        put_chunks_of_halves(values, indices, out, length, scale, add)
