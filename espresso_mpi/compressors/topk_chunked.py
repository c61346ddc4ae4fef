"""``topk_chunked``: the J chunks of largest energy over all ranks (TopKC), values only: about 32·ratio + 32/chunk bits.

The ranks first sum their chunks' squared norms, 32/chunk bits an element. So all choose the same chunks, the payloads
are summed as they are, and what is left of all ranks together obeys ``Σ‖x - C(x)‖² ≤ (1 - δ) Σ‖x‖²`` with
``δ = J/chunks``; so does that of a rank alone. For independent normal values the squared error relative to ``‖x‖²`` is
``1 - P(χ²[chunk + 2] > t)`` with ``P(χ²[chunk] > t) = J/chunks``: little better than chance. It wins by locality, where
large values stand together, as they do in the rows of weight matrices (Han et al., 2024).

With ``values=float16`` the ranks derive a common power of two from the agreed energies: neither a value nor the sum
over the ranks can leave the range of float16, whatever the scale of the gradients. What rounding loses stays in the
residual.

A summary holds the energy E itself between 2⁻¹⁰⁰ and 2¹⁰⁰, values of magnitude 1e-15 to 1e15. Beyond, where the squares
would leave float32, it grows as the eighth root of E: the order of the chunks is still that of E, but the energies of
several ranks do not add up exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from . import _cpu
from . import _linear_sparse as sparse
from .base import Compressor, check_choice, check_number, check_positive_int
from .context import Context, Summary
from .registry import register

LANES = 16
"""Running sums of an energy: lane l sums the squares of elements l, l + 16, and so on. The format fixes this order."""

LEAST, MOST = 2.0**-100, 2.0**100
"""Energies between these are in the summary as they are."""

LEAST_BITS, MOST_BITS = (127 - 100) << 23, (127 + 100) << 23

_TOP = 65504.0


@register
@dataclass(frozen=True)
class TopKChunked(Compressor):
    """Chunked top-k. Payload: one float32 scale, J uint32 chunk indices in rising order, zeros up to a multiple of 16;
    then the J chunks' values divided by the scale, the last chunk filled up with zeros: J·chunk float32 or float16.

    The scale is 1 for float32. Equal energies are taken in order of their index.

    Args:
        ratio: share of the chunks that are sent, in (0, 1]; at least one chunk is.
        chunk: elements of a chunk, rounded up to a multiple of 16; tensors of fewer elements have one smaller chunk.
            Large chunks have a small summary, small ones choose better: at 1.6 bits an element, the summary's
            included, 256 loses least of normal values.
        values: "float32" or "float16".
    """

    ratio: float = 0.01
    chunk: int = 256
    values: str = "float32"
    name = "topk_chunked"
    examples = (
        "topk_chunked:ratio=0.3,chunk=16",
        "topk_chunked:ratio=0.1,chunk=48,values=float16",
        "topk_chunked:ratio=1.0",
    )
    common = True

    def __post_init__(self) -> None:
        check_number("topk_chunked", "ratio", self.ratio, 0, 1, above=True)
        check_positive_int("topk_chunked", "chunk", self.chunk, high=1 << 20)
        check_choice("topk_chunked", "values", self.values, ("float32", "float16"))

    # --- sizes ---

    def length(self, n: int) -> int:
        """Elements of a chunk."""
        return -(-min(self.chunk, n) // LANES) * LANES

    def chunks(self, n: int) -> int:
        return -(-n // self.length(n)) if n else 0

    def count(self, n: int) -> int:
        """How many chunks are sent."""
        chunks = self.chunks(n)
        return min(chunks, max(1, round(self.ratio * chunks)))

    def header(self, n: int) -> int:
        return sparse.padded(4 * (1 + self.count(n))) if n else 0

    def nbytes(self, n: int) -> int:
        return self.header(n) + self.count(n) * self.length(n) * self._kind.itemsize

    @property
    def element(self) -> str:
        return self.values

    @property
    def _kind(self) -> np.dtype[Any]:
        """The type of the values; halves are handled as their bits."""
        return np.dtype(np.float32 if self.values == "float32" else np.uint16)

    def summary(self, n: int) -> Summary:
        return Summary(self.chunks(n), "sum")

    # --- promises ---

    def contraction(self, n: int) -> float:
        share = self.count(n) / self.chunks(n)
        return share if self.values == "float32" else share * (1 - 2.0**-20)

    def gaussian_error(self, n: int) -> float:
        kept = _kept_of_gaussian(self.length(n), self.count(n) / self.chunks(n))
        return 1 - kept + (kept * _error_of_halves() if self.values == "float16" else 0)

    def decode_traffic(self, n: int) -> int:
        return 8 * min(n, self.count(n) * self.length(n)) + self.nbytes(n)

    # --- the work ---

    def _summarise_cpu(self, x: np.ndarray, summary: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        _summarise(x, _cpu.EMPTY if residual is None else residual, summary, self.length(x.size))

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        head, indices, values = self._split(payload, x.size)
        chosen = context.scratch("energies", indices.size, np.float32, x)
        sparse.choose(context.summary, indices, chosen, context)
        scale = np.float32(1) if self.values == "float32" else _scale(chosen, _doublings(context.ranks))
        head[0] = scale
        head[1 + indices.size :] = 0
        _take(values, indices, x, _cpu.EMPTY if residual is None else residual, scale, self.length(x.size))

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        head, indices, values = self._split(payload, out.size)
        if not add:
            sparse.zero(out)
        _put(values, indices, out, head[0], self.length(out.size), add)

    def _summarise_cuda(self, x: Any, summary: Any, residual: Any, context: Context) -> None:
        from . import _cuda_topk_chunked

        _cuda_topk_chunked.summarise(x, summary, residual, self.length(x.size))

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from . import _cuda_topk_chunked

        doublings = _doublings(context.ranks) if self.values == "float16" else None
        parts = self._split(payload, x.size)
        _cuda_topk_chunked.encode(x, residual, *parts, self.length(x.size), doublings, context)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from . import _cuda_topk_chunked

        _cuda_topk_chunked.decode(out, *self._split(payload, out.size), self.length(out.size), add)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any, Any]:
        """The payload's header as float32, its indices as uint32, its values as float32 or the bits of float16."""
        header = self.header(n)
        indices = payload[4 : 4 + 4 * self.count(n)].view(np.uint32)
        return payload[:header].view(np.float32), indices, payload[header:].view(self._kind)


def _doublings(ranks: int) -> int:
    """The power of two that the number of ranks does not exceed."""
    return max(0, ranks - 1).bit_length()


# --- normal values ----------------------------------------------------------------------------------------------------


@lru_cache
def _kept_of_gaussian(length: int, share: float) -> float:
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
def _error_of_halves() -> float:
    """What rounding to 11 bits adds to normal values: a twelfth of the squared unit of each octave, by its weight."""
    octaves = range(-40, 6)
    weights = (math.erf(2.0 ** (e + 1) / math.sqrt(2)) - math.erf(2.0**e / math.sqrt(2)) for e in octaves)
    return sum(w * 4.0 ** (e - 10) / 12 for e, w in zip(octaves, weights))


# --- energies ---------------------------------------------------------------------------------------------------------


_VECTOR = ir.VectorType(ir.FloatType(), LANES)


@intrinsic
def _squares(typingctx, x):  # type: ignore[no-untyped-def]
    """The sum of the squares of x, whose size is a multiple of 16: by lanes, then folded pairwise. A fused sum."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        array = context.make_array(sig.args[0])(context, builder, args[0])
        (size,) = cgutils.unpack_tuple(builder, array.shape, 1)
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
        total = cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [0.0] * LANES))
        groups = builder.udiv(size, ir.Constant(size.type, LANES))
        with cgutils.for_range(builder, groups) as loop:
            index = builder.mul(loop.index, ir.Constant(loop.index.type, LANES))
            pointer = builder.bitcast(builder.gep(array.data, [index]), _VECTOR.as_pointer())
            values = builder.load(pointer, align=4)
            builder.store(builder.call(fma, [values, values, builder.load(total)]), total)
        return _cpu.tree_sum(builder, builder.load(total))

    return types.float32(x), codegen


@_cpu.inline
def _scaled_squares(values, buffer, factor):  # type: ignore[no-untyped-def]
    """The sum of the squares of ``values·factor``, of any number of any values; ``buffer`` is as large as a chunk."""
    for i in range(values.size):
        buffer[i] = _cpu.tame(values[i]) * factor
    buffer[values.size :] = np.float32(0)
    return _squares(buffer)


@_cpu.inline
def compress(bits, shift):  # type: ignore[no-untyped-def]
    """The summary of an energy beyond the range, given as float32 bits and the power of two that they lack.

    Its bits, which are nearly its logarithm, approach the end of the range to an eighth of their distance.
    """
    end = np.int64(MOST_BITS) if shift > 0 else np.int64(LEAST_BITS)
    wide = np.int64(bits) + np.int64(shift) * np.int64(1 << 23)
    return _cpu.bits_float(np.uint32(end + ((wide - end) >> np.int64(3))))


@_cpu.inline
def _energy(values, buffer):  # type: ignore[no-untyped-def]
    """What the summary holds of a chunk. Values within the range need not be tamed, and their sum is finite."""
    total = _squares(values) if values.size == buffer.size else np.float32(0)
    if np.float32(LEAST) <= total <= np.float32(MOST):
        return total
    if _cpu.max_bits(values) == 0:
        return np.float32(0)
    total = _scaled_squares(values, buffer, np.float32(1))
    if total < np.float32(LEAST):
        rest = _scaled_squares(values, buffer, np.float32(2.0**100))
        return compress(_cpu.float_bits(rest), -200) if rest > 0 else rest
    if total > np.float32(MOST):
        return compress(_cpu.float_bits(_scaled_squares(values, buffer, np.float32(2.0**-100))), 200)
    return total


@_cpu.Kernel
def _summarise(x, residual, summary, length):  # type: ignore[no-untyped-def]
    each = max(1, sparse.CHUNK // length)
    for block in prange((summary.size + each - 1) // each):
        buffer = np.empty(length, np.float32)
        first, last = block * each, min(summary.size, (block + 1) * each)
        a, b = first * length, min(x.size, last * length)
        values = x[a:b]
        if residual.size:
            _cpu.tame_sum(residual[a:b], values)
            values = residual[a:b]
        for c in range(first, last):
            summary[c] = _energy(values[(c - first) * length : min(values.size, (c + 1 - first) * length)], buffer)


@_cpu.inline
def _scale(energies, doublings):  # type: ignore[no-untyped-def]
    """A power of two s with ``ranks·max E ≤ (32768·s)²``, the least but for a factor of two: sums stay below 65504."""
    top = np.int64(_cpu.max_bits(energies))
    if top > MOST_BITS:
        top = MOST_BITS + ((top + 1 - MOST_BITS) << 3)
    elif top < LEAST_BITS:
        top = LEAST_BITS + ((top + 1 - LEAST_BITS) << 3)
    exponent = (top >> 23) - 126 + doublings  # ranks · E < 2 ** exponent
    power = ((exponent + 1) >> 1) - 15
    return _cpu.bits_float(np.uint32((min(max(power, -125), 126) + 127) << 23))


# --- values -----------------------------------------------------------------------------------------------------------


@_cpu.inline
def _take_singles(values, x, kept):  # type: ignore[no-untyped-def]
    """Write a chunk and leave in ``kept``, unless it is empty, what is not written."""
    for i in range(x.size):
        values[i] = _cpu.tame(kept[i] if kept.size else x[i])
    values[x.size :] = np.float32(0)
    kept[:] = np.float32(0)


@_cpu.inline
def _half(value, inverse):  # type: ignore[no-untyped-def]
    """The bits of ``value·inverse`` as float16; the limit is reached only if a summary is not that of the values."""
    scaled = value * inverse
    scaled = np.float32(_TOP) if scaled > np.float32(_TOP) else scaled
    return _cpu.to_half(np.float32(-_TOP) if scaled < np.float32(-_TOP) else scaled)


@_cpu.inline
def _take_halves(values, x, kept, scale, inverse):  # type: ignore[no-untyped-def]
    if kept.size:
        for i in range(x.size):
            value = kept[i]
            values[i] = _half(value, inverse)
            kept[i] = _cpu.fma(-_cpu.from_half(values[i]), scale, value)
    else:
        for i in range(x.size):
            values[i] = _half(_cpu.tame(x[i]), inverse)
    values[x.size :] = 0


@_cpu.Kernel
def _take_chunks(values, indices, x, residual, length):  # type: ignore[no-untyped-def]
    for j in prange(indices.size):
        a, b = indices[j] * length, min(x.size, (indices[j] + 1) * length)
        _take_singles(values[j * length : (j + 1) * length], x[a:b], residual[a:b])


@_cpu.Kernel
def _take_chunks_as_halves(values, indices, x, residual, length, scale, inverse):  # type: ignore[no-untyped-def]
    for j in prange(indices.size):
        a, b = indices[j] * length, min(x.size, (indices[j] + 1) * length)
        _take_halves(values[j * length : (j + 1) * length], x[a:b], residual[a:b], scale, inverse)


def _take(values: Any, indices: Any, x: Any, residual: Any, scale: np.float32, length: int) -> None:
    if values.dtype == np.float32:
        _take_chunks(values, indices, x, residual, length)
    else:
        _take_chunks_as_halves(values, indices, x, residual, length, scale, np.float32(1) / scale)


@_cpu.inline
def _put_singles(out, values, add):  # type: ignore[no-untyped-def]
    """Write a chunk, or add it."""
    if add:
        for i in range(out.size):
            out[i] = sparse.plus(out[i], _cpu.tame(values[i]))
    else:
        for i in range(out.size):
            out[i] = _cpu.tame(values[i])


@_cpu.inline
def _put_halves(out, values, scale, add):  # type: ignore[no-untyped-def]
    if add:
        for i in range(out.size):
            out[i] = sparse.plus(out[i], _cpu.tame(_cpu.from_half(values[i]) * scale))
    else:
        for i in range(out.size):
            out[i] = _cpu.tame(_cpu.from_half(values[i]) * scale)


@_cpu.Kernel
def _put_chunks(values, indices, out, length, add):  # type: ignore[no-untyped-def]
    for j in prange(indices.size):
        if indices[j] * length < out.size:  # a damaged payload must not write outside the array
            a, b = indices[j] * length, min(out.size, (indices[j] + 1) * length)
            _put_singles(out[a:b], values[j * length : (j + 1) * length], add)


@_cpu.Kernel
def _put_chunks_of_halves(values, indices, out, length, scale, add):  # type: ignore[no-untyped-def]
    for j in prange(indices.size):
        if indices[j] * length < out.size:
            a, b = indices[j] * length, min(out.size, (indices[j] + 1) * length)
            _put_halves(out[a:b], values[j * length : (j + 1) * length], scale, add)


def _put(values: Any, indices: Any, out: Any, scale: np.float32, length: int, add: bool) -> None:
    if values.dtype == np.float32:
        _put_chunks(values, indices, out, length, add)
    else:
        _put_chunks_of_halves(values, indices, out, length, scale, add)
