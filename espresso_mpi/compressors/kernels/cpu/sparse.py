"""What the methods share that send the elements of largest magnitude: the search, the copy, the way back.

Magnitudes order like their bits; the key of an element is the bits of what compressors carry for it (``LIMIT`` at most,
0 for NaN). One pass over the data makes the values that are to be compressed (``residual + x``, or DGC's two sums) and
one bit for each that reaches a threshold, which a sample has given. The bits then lead to those elements alone.

The sample is a run of 16 neighbours, one cache line, from each stratum of a power of two of elements; where in it the
run lies is hashed. Up to 65536 elements it is everything, beyond them at least 1/64 of the elements. It decides how
fast a search is and, in methods that say so, how many elements go, but never that a smaller one goes before a larger.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from espresso_mpi.compressors.base import LIMIT
from espresso_mpi.compressors.context import Context

from . import host

CHUNK = 8192
"""Elements whose bits and counts one turn of a parallel loop makes."""

_BLOCK = 1024
"""Elements that are made and then tested: they stay in the first cache."""

RUN = 16
WHOLE = 1 << 16
"""Up to this many elements the sample is everything."""
_WIDEST = 1024

BINS = 2048
INFINITY = np.uint32(0x7F800000)
TOP = np.uint32(np.float32(LIMIT).view(np.uint32))
"""The largest key."""

_LARGEST = np.float32(np.finfo(np.float32).max)


# --- sizes and errors -------------------------------------------------------------------------------------------------


def count(n: int, ratio: float) -> int:
    """How many of n elements a share of ``ratio`` is: at least one."""
    return min(n, max(1, round(ratio * n)))


def stratum(n: int) -> int:
    """From how many elements one run of the sample is taken; a power of two."""
    return min(_WIDEST, 1 << ((n * RUN // WHOLE).bit_length() - 1)) if n > WHOLE else RUN


def sample_size(n: int) -> int:
    """How many of n elements the sample holds."""
    return n if n <= WHOLE else RUN * (n // stratum(n))


def aim(n: int, k: int) -> int:
    """The rank in the sample whose magnitude about k elements reach."""
    return max(1, (2 * k * sample_size(n) + n) // (2 * n))


def aim_above(n: int, k: int) -> int:
    """A rank whose magnitude more than k elements reach, but for four standard deviations of their count."""
    size = sample_size(n)
    expected = k * size / n
    return k if size == n else int(expected + 4 * math.sqrt(expected) + 4)


@lru_cache
def gaussian_error(share: float) -> float:
    """``1 - 2(tφ(t) + Φ̄(t))``, ``t = Φ⁻¹(1 - share/2)``: what normal values lose when the largest ones are sent."""
    normal = NormalDist()
    t = normal.inv_cdf(1 - share / 2)
    return 1 - 2 * (t * normal.pdf(t) + normal.cdf(-t))


def sampled_error(n: int, k: int) -> float:
    """As ``gaussian_error`` where ``aim`` decides how many of at most k go: half the time, fewer than k."""
    size = sample_size(n)
    deviation = math.sqrt((1 - size / n) / max(1.0, k * size / n))
    return gaussian_error(k / n * (1 - deviation / math.sqrt(2 * math.pi)))


def scattered_traffic(n: int, k: int) -> int:
    """Bytes that changing k of n scattered float32 moves: whole cache lines, there and back."""
    return int(8 * n * (1 - (1 - k / n) ** 16)) if n else 0


# --- 64 elements at a time --------------------------------------------------------------------------------------------


_V = 64
_VECTOR = ir.VectorType(ir.IntType(32), _V)


def _constant(value: Any) -> Any:
    return ir.Constant(_VECTOR, [int(value)] * _V)


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, undefined, _constant(0))


@intrinsic
def _reach(typingctx, x, index, bits):  # type: ignore[no-untyped-def]
    """Bit i of the uint64 says whether the key of ``x[index + i]`` is at least ``bits``, for 64 elements."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), _VECTOR.as_pointer())
        magnitude = builder.and_(builder.load(pointer, align=4), _constant(0x7FFFFFFF))
        over = builder.icmp_unsigned(">", magnitude, _constant(TOP))
        nan = builder.icmp_unsigned(">", magnitude, _constant(INFINITY))
        key = builder.select(nan, _constant(0), builder.select(over, _constant(TOP), magnitude))
        return builder.bitcast(builder.icmp_unsigned(">=", key, _splat(builder, args[2])), ir.IntType(_V))

    return types.uint64(x, types.intp, types.uint32), codegen


@intrinsic
def _ones(typingctx, mask):  # type: ignore[no-untyped-def]
    """How many bits of a uint64 are one."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


@host.inline
def _key(value):  # type: ignore[no-untyped-def]
    bits = np.uint32(host.float_bits(value) & np.uint32(0x7FFFFFFF))
    return np.uint32(0) if bits > INFINITY else min(bits, TOP)


# --- the sample -------------------------------------------------------------------------------------------------------


@host.inline
def _make(values, x, kept, momentum, decay, factor):  # type: ignore[no-untyped-def]
    """What is to be compressed of a few elements, without a trace in the arrays."""
    for i in range(x.size):
        value = x[i]
        if momentum.size:
            value = host.fma(decay, momentum[i], value * factor)
        values[i] = host.tame(kept[i] + value if kept.size else value)


@host.Kernel
def _take_sample(sample, x, kept, momentum, width, decay, factor):  # type: ignore[no-untyped-def]
    for r in prange((sample.size + RUN - 1) // RUN):
        spot = (np.uint32(r) * host.STEP >> np.uint32(16)) & np.uint32(width // RUN - 1)
        a, at = r * width + RUN * np.int64(spot), r * RUN
        b = min(x.size, a + RUN)
        _make(sample[at : at + b - a], x[a:b], kept[a:b], momentum[a:b], decay, factor)


@host.inline
def _kth(values, rank, bins):  # type: ignore[no-untyped-def]
    """The rank-th largest key (rank counts from 1) and how many are larger: 11, 11 and 9 bits at a time."""
    found, left = np.uint32(0), rank
    for level in range(3):
        above = np.uint32(31 if level == 0 else (20 if level == 1 else 9))
        below = np.uint32(20 if level == 0 else (9 if level == 1 else 0))
        bins[:] = 0
        for i in range(values.size):
            key = _key(values[i])
            if key >> above == found >> above:
                bins[(key >> below) & np.uint32(BINS - 1 if level < 2 else BINS // 4 - 1)] += 1
        digit = BINS - 1
        while bins[digit] < left:
            left -= bins[digit]
            digit -= 1
        found |= np.uint32(digit) << below
    return found, rank - left


# --- the pass over the data -------------------------------------------------------------------------------------------


@host.inline
def _advance(x, kept, momentum, decay, factor):  # type: ignore[no-untyped-def]
    """``kept`` and ``momentum``, those that there are, after this step's gradient; as ``_make`` gives it."""
    if momentum.size and kept.size:
        for i in range(x.size):
            value = host.fma(decay, momentum[i], x[i] * factor)
            kept[i] = host.tame(kept[i] + value)
            momentum[i] = host.tame(value)
    elif momentum.size:
        for i in range(x.size):
            momentum[i] = host.tame(host.fma(decay, momentum[i], x[i] * factor))
    elif kept.size:
        host.tame_sum(kept, x)


@host.inline
def _test(values, masks, threshold):  # type: ignore[no-untyped-def]
    """Set the bits of what reaches the threshold; returns how many do, and how many are larger."""
    reach, larger = 0, 0
    whole = values.size // 64
    for w in range(whole):
        mask = _reach(values, 64 * w, threshold)
        larger += _ones(_reach(values, 64 * w, np.uint32(threshold + np.uint32(1))))
        reach += _ones(mask)
        masks[w] = mask
    if whole < masks.size:
        last = np.uint64(0)
        for i in range(64 * whole, values.size):
            key = _key(values[i])
            last |= np.uint64(key >= threshold) << np.uint64(i - 64 * whole)
            larger += key > threshold
        masks[whole] = last
        reach += _ones(last)
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
def _sweep(x, kept, momentum, masks, larger, equal, threshold, decay, factor):  # type: ignore[no-untyped-def]
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
            found[at] = host.tame(values[64 * w + host.trailing_zeros(mask)])
            at += 1
            mask &= mask - np.uint64(1)


@host.Kernel
def _gather(values, masks, larger, equal, found):  # type: ignore[no-untyped-def]
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
            key = _key(values[64 * w + host.trailing_zeros(mask)])
            larger += key > threshold
            equal += key == threshold
            mask &= mask - np.uint64(1)
    return larger, equal


@host.Kernel
def _recount(values, masks, larger, equal, threshold):  # type: ignore[no-untyped-def]
    """As ``_sweep`` counts, for a threshold that is not below the one of the bits."""
    for c in prange(larger.size):
        a, b = c * CHUNK, min(values.size, (c + 1) * CHUNK)
        larger[c], equal[c] = _count_chunk(values[a:b], masks[a // 64 : (b + 63) // 64], threshold)


@host.inline
def _before(counts):  # type: ignore[no-untyped-def]
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
            value = host.tame(values[i])
            key = _key(value)
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
def _copy(values, kept, momentum, masks, larger, equal, threshold, ties, indices, sent):  # type: ignore[no-untyped-def]
    """Move what is larger than the threshold, and the first ``ties`` that are equal to it, in order of index."""
    for c in prange(larger.size):
        a, b = c * CHUNK, min(values.size, (c + 1) * CHUNK)
        bits, at, left = masks[a // 64 : (b + 63) // 64], larger[c] + min(equal[c], ties), ties - equal[c]
        _copy_chunk(a, values[a:b], kept[a:b], momentum[a:b], bits, threshold, left, indices[at:], sent[at:])


# --- the search -------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """How many elements go.

    All that reach the threshold do if they are from ``least`` to ``most``, or everything but zeros. Otherwise the
    ``most`` largest go if there were too many, and the ``few`` largest if there were too few.
    """

    most: int
    least: int
    few: int
    smallest: int = 1
    """The smallest threshold: 0 where zeros count."""


class Momentum(NamedTuple):
    """``momentum = decay · momentum + factor · x`` takes the place of x."""

    values: np.ndarray
    decay: float
    factor: float


class _Search:
    """One encode's arrays and what is known so far."""

    def __init__(self, x: np.ndarray, residual: np.ndarray | None, momentum: Momentum | None, context: Context) -> None:
        self.x = x
        self.kept = host.EMPTY if residual is None else residual
        self.momentum = host.EMPTY if momentum is None else momentum.values
        self.decay, self.factor = (
            (np.float32(0), np.float32(1))
            if momentum is None
            else (np.float32(momentum.decay), np.float32(momentum.factor))
        )
        self.values = self.kept if self.kept.size else self.momentum if self.momentum.size else x
        n, chunks = x.size, -(-x.size // CHUNK)
        self._context = context
        self.masks = context.scratch("sparse-masks", -(-n // 64), np.uint64, x)
        counts = context.scratch("sparse-counts", 2 * chunks + BINS, np.int64, x)
        self.larger, self.equal, self._bins = counts[:chunks], counts[chunks : 2 * chunks], counts[2 * chunks :]
        self.threshold = np.uint32(0)
        self.above = self.reach = 0

    def sampled(self, rank: int, advanced: bool = False) -> int:
        """The key of this rank in the sample; ``advanced``: after ``sweep``, when the values are there."""
        n = self.x.size
        sample = self._context.scratch("sparse-sample", sample_size(n), np.float32, self.x)
        kept, momentum = (host.EMPTY, host.EMPTY) if advanced else (self.kept, self.momentum)
        _take_sample(sample, self.values if advanced else self.x, kept, momentum, stratum(n), self.decay, self.factor)
        return int(_kth(sample, rank, self._bins)[0]) if rank <= sample.size else 0

    def sweep(self, threshold: int) -> None:
        """Make the values and test them."""
        self.threshold = np.uint32(threshold)
        arrays = (self.x, self.kept, self.momentum, self.masks, self.larger, self.equal)
        _sweep(*arrays, self.threshold, self.decay, self.factor)
        self._sum_counts()

    def test(self, threshold: int) -> None:
        """Test the values, which are there."""
        self.threshold = np.uint32(threshold)
        arrays = (self.values, host.EMPTY, host.EMPTY, self.masks, self.larger, self.equal)
        _sweep(*arrays, self.threshold, self.decay, self.factor)
        self._sum_counts()

    def narrow(self, k: int) -> None:
        """Make the k-th largest key the threshold. At least k elements reach the present one."""
        if self.above < k <= self.reach:
            return
        candidates = self.values  # too many to be worth a copy, as when many are equal
        if self.reach <= max(4 * k, WHOLE):
            candidates = self._context.scratch("sparse-found", self.reach, np.float32, self.x)
            _gather(self.values, self.masks, self.larger, self.equal, candidates)
        self.threshold = np.uint32(_kth(candidates, k, self._bins)[0])
        _recount(self.values, self.masks, self.larger, self.equal, self.threshold)
        self._sum_counts()

    def bracket(self, k: int) -> None:
        """Find a threshold that at least k elements reach, and not many more if they differ."""
        rank = aim_above(self.x.size, k)
        found = self.reach >= k and (self.above < k or self.reach <= max(4 * k, WHOLE))
        while not found:
            self.test(self.sampled(rank, advanced=True))
            found, rank = self.reach >= k, 4 * rank

    def copy(self, wanted: int, indices: np.ndarray, sent: np.ndarray) -> None:
        """Move the ``wanted`` largest to the payload."""
        arrays = (self.values, self.kept, self.momentum, self.masks, self.larger, self.equal)
        _copy(*arrays, self.threshold, wanted - self.above, indices, sent)

    def _sum_counts(self) -> None:
        self.above = _before(self.larger)
        self.reach = self.above + _before(self.equal)


def encode(
    x: np.ndarray,
    residual: np.ndarray | None,
    momentum: Momentum | None,
    rule: Rule,
    threshold: int | None,
    rank: int,
    indices: np.ndarray,
    sent: np.ndarray,
    context: Context,
) -> int:
    """Move large elements of what is to be compressed to the payload, in order of index; returns how many.

    Args:
        threshold: the key to reach; None: that of ``rank`` in the sample.
        rank: with a threshold, what to look at first: if too many reach that, they need not be told from the others.
        indices, sent: receive them; of ``rule.most`` elements. What is not used of them becomes zero.
    """
    search = _Search(x, residual, momentum, context)
    sampled = search.sampled(rank)
    search.sweep(max(rule.smallest, sampled, threshold or 0))
    if threshold is not None and search.threshold > threshold and search.reach <= rule.most:
        search.test(threshold)
    wanted = search.reach
    enough = search.reach >= rule.least or (search.threshold <= 1 and rule.smallest == 1)
    if search.reach > rule.most or not enough:
        wanted = rule.most if enough else rule.few
        search.bracket(wanted)
        search.narrow(wanted)
    search.copy(wanted, indices, sent)
    indices[wanted:] = 0
    sent[wanted:] = 0
    return wanted


def split(payload: Any) -> tuple[Any, Any, Any]:
    """The parts of a payload with a count, as (uint32 count and zero, uint32 indices, float32 values) views."""
    middle = 8 + (payload.size - 8) // 2
    return payload[:8].view(np.uint32), payload[8:middle].view(np.uint32), payload[middle:].view(np.float32)


def encode_counted(
    x: np.ndarray,
    residual: np.ndarray | None,
    momentum: Momentum | None,
    rule: Rule,
    threshold: int | None,
    rank: int,
    payload: np.ndarray,
    context: Context,
) -> None:
    """As ``encode``, into a payload that begins with the count."""
    head, indices, sent = split(payload)
    head[0] = encode(x, residual, momentum, rule, threshold, rank, indices, sent, context)
    head[1] = 0


# --- the way back -----------------------------------------------------------------------------------------------------


@host.Kernel
def _zero(out):  # type: ignore[no-untyped-def]
    for c in prange((out.size + CHUNK - 1) // CHUNK):
        out[c * CHUNK : (c + 1) * CHUNK] = np.float32(0)


@host.Kernel
def _scatter(indices, sent, out, add):  # type: ignore[no-untyped-def]
    for c in prange((indices.size + CHUNK - 1) // CHUNK):
        for j in range(c * CHUNK, min(indices.size, (c + 1) * CHUNK)):
            i = indices[j]
            if i < out.size:  # a damaged payload must not write outside the array
                value = host.tame(sent[j])
                # Nor may one that repeats an index add up to infinity.
                out[i] = min(max(out[i] + value, -_LARGEST), _LARGEST) if add else value


def decode(indices: np.ndarray, sent: np.ndarray, out: np.ndarray, add: bool) -> None:
    """Add the values to ``out`` at their indices, or write them there and zeros elsewhere."""
    if not add:
        _zero(out)
    _scatter(indices, sent, out, add)


def decode_counted(payload: np.ndarray, out: np.ndarray, add: bool) -> None:
    """As ``decode``, of a payload that begins with the count."""
    head, indices, sent = split(payload)
    m = min(int(head[0]), indices.size)
    decode(indices[:m], sent[:m], out, add)


# --- the norm that DGC clips by ---------------------------------------------------------------------------------------


def norm_shift(n: int) -> int:
    """By how many bits, an even number, squares of 24-bit numbers are shifted so that n of them fit 62 bits."""
    return max(0, (n.bit_length() - 13) // 2 * 2)


@host.inline
def aligned(key, exponent):  # type: ignore[no-untyped-def]
    """The 24-bit mantissa of a key, shifted down to a larger exponent: sums of integers have no order."""
    own = key >> np.uint32(23)
    mantissa = (key & np.uint32(0x7FFFFF)) | (np.uint32(0x800000) if own else np.uint32(0))
    return mantissa >> min(exponent - max(own, np.uint32(1)), np.uint32(31))


@host.inline
def _largest_key(x):  # type: ignore[no-untyped-def]
    top = np.uint32(0)
    for i in range(x.size):
        key = _key(x[i])
        top = key if key > top else top
    return top


@host.Kernel
def _largest_keys(x, tops):  # type: ignore[no-untyped-def]
    for c in prange(tops.size):
        tops[c] = _largest_key(x[c * CHUNK : min(x.size, (c + 1) * CHUNK)])


@host.inline
def _squares_chunk(x, exponent, shift):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for i in range(x.size):
        q = np.uint64(aligned(_key(x[i]), exponent))
        total += (q * q) >> shift
    return total


@host.Kernel
def _squares(x, sums, exponent, shift):  # type: ignore[no-untyped-def]
    for c in prange(sums.size):
        sums[c] = _squares_chunk(x[c * CHUNK : min(x.size, (c + 1) * CHUNK)], exponent, shift)


def clip_factor(x: np.ndarray, limit: float, context: Context) -> float:
    """What x is to be multiplied by so that its norm is at most ``limit``; a float32."""
    sums = context.scratch("sparse-sums", -(-x.size // CHUNK), np.uint64, x)
    _largest_keys(x, sums)
    exponent = max(1, int(sums.max()) >> 23)
    shift = norm_shift(x.size)
    _squares(x, sums, np.uint32(exponent), np.uint64(shift))
    norm = math.sqrt(float(int(sums.sum()))) * 2.0 ** (exponent - 150 + shift // 2)
    return float(np.float32(limit / norm)) if norm > limit else 1.0
