"""What ``qsgd``, ``natural_dithering`` and ``terngrad`` share: stochastic levels of a block's norm, packed in bits.

An element becomes a level number k, -s ≤ k ≤ s, that stands for ``k · step`` (linear) or ``±2^(|k|-1) · step``, 0 for
k = 0 (powers of two), with ``step = norm / top``, where top is what the highest level counts: s or 2^(s-1). The payload
holds the numbers of each block, in two's complement of ``width`` bits, and one float32 step a block.

A group of 64 elements becomes ``width`` words of 64 bits: bit i of word j is bit j of element i. So every width is
packed by vector comparisons on a CPU and by votes of a warp on a GPU. Each block starts a new group.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from espresso_mpi.compressors.base import LIMIT

from . import host

TINY = 2.0**-100
"""A block of a smaller norm is sent as zeros: its step, and the inverse of it, might not be normal numbers."""

LIMIT_BITS = 0x7E800000
"""LIMIT as float32 bits: magnitudes with larger ones are not tame."""

MAX, L2, CLIP = 0, 1, 2
"""What a level is a share of: the largest magnitude, the Euclidean norm, or the largest one after clipping."""

_SPAN = 8192  # elements that a thread takes at a time, unless a block is larger
_PIECE = 1024  # elements whose level numbers are held at a time


# --- what is promised -------------------------------------------------------------------------------------------------


class Quantiser(NamedTuple):
    """A rule of rounding: ``levels`` above zero, equidistant or ``powers`` of two, of a block's ``norm``.

    ``clip``, in root mean squares, is for norm = CLIP alone. ``scaled`` divides what is sent by 1 + ω.
    """

    block: int
    levels: int
    powers: bool = False
    norm: int = MAX
    clip: float = 0.0
    scaled: bool = False

    @property
    def width(self) -> int:
        """Bits of a level number: they take 2·levels + 1 values."""
        return (2 * self.levels).bit_length()

    @property
    def top(self) -> float:
        """The highest level as a multiple of the lowest."""
        return 2.0 ** (self.levels - 1) if self.powers else float(self.levels)

    def groups(self, n: int) -> int:
        """Groups of 64 elements that hold n."""
        return n // self.block * -(-self.block // 64) + -(-(n % self.block) // 64)

    def omega(self, n: int) -> float:
        """ω with ``E‖x - C(x)‖² ≤ ω‖x‖²`` for blocks of n elements or of ``block``, before scaling, after clipping.

        In units of the step an element t < 1 has the variance t(1 - t), a larger one at most 1/4, or t²/8 between
        powers of two. So with λ ≥ f (f = 0, or 1/8 for powers) none exceeds ``λt² + 1/(4(1 + λ))``, and the largest
        element of a block, t = top, has no variance with the maximum norm. There the least λ with
        ``(B - 1)/(4(1 + λ)) ≤ λ·top²`` is ω, and is reached unless f is more; for the Euclidean norm it is the least
        value of ``λ + B/(4(1 + λ)·top²)``.
        """
        count, floor = min(n, self.block), 0.125 if self.powers else 0.0
        if self.norm != L2:
            return max(floor, (math.sqrt(1 + (count - 1) / self.top**2) - 1) / 2)
        half = math.sqrt(count) / (2 * self.top)
        return 2 * half - 1 if half >= 1 + floor else floor + half**2 / (1 + floor)

    def shrink(self, n: int) -> float:
        """What the decoded values are multiplied by."""
        return 1 / (1 + self.omega(n)) if self.scaled else 1.0

    def contraction(self, n: int) -> float:
        """δ = 1 - ω, scaled 1/(1 + ω), of what clipping leaves: least for a vector of one element, √B times its RMS."""
        if self.norm == CLIP and not self.scaled:
            return 0.0
        count = min(n, self.block)
        kept = self.clip / math.sqrt(count) if self.norm == CLIP else 1.0
        left = 2 * kept - kept**2 if kept < 1 else 1.0
        return left / (1 + self.omega(n)) if self.scaled else max(0.0, 1 - self.omega(n))

    def variance(self, n: int) -> float | None:
        """ω, where nothing biases."""
        return None if self.scaled or self.norm == CLIP else self.omega(n)

    def gaussian_error(self, n: int) -> float:
        """``E‖x - C(x)‖² / ‖x‖²`` for normal values."""
        count, a = min(n, self.block), self.shrink(n)
        if self.norm == CLIP:
            return _clipped_error(self.clip, count, a)
        error = _l2_error if self.norm == L2 else _max_error
        return (1 - a) ** 2 + a**2 * error(self.top, self.powers, count)


def rounding_variance(t: np.ndarray, powers: bool) -> np.ndarray:
    """The variance of stochastic rounding of t ≥ 0 to the whole numbers, or to 0 and the powers of two from 1 on."""
    if not powers:
        return (t - np.floor(t)) * (np.floor(t) + 1 - t)
    below = np.exp2(np.floor(np.log2(np.maximum(t, 1))))
    return np.where(t < 1, t * (1 - t), (t - below) * (2 * below - t))


def _mean_variance(t: np.ndarray, weights: np.ndarray, top: float, powers: bool) -> np.ndarray:
    """The weighted mean of the rounding variance; among many equidistant levels it is 1/6."""
    variance = np.full_like(t, 1 / 6) if top > 256 and not powers else rounding_variance(t, powers)
    return weights @ variance / weights.sum(axis=-1)


@lru_cache
def _l2_error(top: float, powers: bool, block: int) -> float:
    """The share c = sin θ of one element in the norm of ``block`` has the density cos^(block-2) θ."""
    if block == 1:
        return 0.0
    reach = math.asin(min(1.0, 12 / math.sqrt(block)))
    angle = (np.arange(1 << 16) + 0.5) * (reach / (1 << 16))
    density = np.cos(angle) ** (block - 2)
    return float(block / top**2 * _mean_variance(top * np.sin(angle), density, top, powers))


def _largest(block: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest of ``block`` normal magnitudes: values m and their probabilities."""
    edges = np.linspace(0, 9, 901)
    below = np.array([math.erf(m / math.sqrt(2)) ** block for m in edges])
    chance = np.diff(below)
    likely = chance > 1e-8
    return ((edges[1:] + edges[:-1]) / 2)[likely], chance[likely]


@lru_cache
def _max_error(top: float, powers: bool, block: int) -> float:
    """The others of a block whose largest magnitude is m are normal and below m."""
    m, chance = _largest(block)
    share = (np.arange(8192) + 0.5) / 8192
    variance = np.array([_mean_variance(top * share, np.exp(-((m_ * share) ** 2) / 2), top, powers) for m_ in m])
    return float((block - 1) / block * np.sum(chance * (m / top) ** 2 * variance))


@lru_cache
def _clipped_error(clip: float, block: int, a: float) -> float:
    """``‖x‖² - 2a⟨x, y⟩ + a²·M·‖y‖₁`` for x clipped to y with largest magnitude M, decoded values scaled by a."""
    with_x, with_m = (_sampled_clipping if block < 512 else _integrated_clipping)(clip, block)
    return 1 - 2 * a * with_x + a**2 * with_m


def _integrated_clipping(clip: float, block: int) -> tuple[float, float]:
    """``⟨x, y⟩`` and ``M·‖y‖₁`` relative to ``‖x‖²``; the block's RMS is taken as 1 and its elements as independent."""
    x = (np.arange(4096) + 0.5) * (9 / 4096)
    density = np.exp(-(x**2) / 2)
    density /= density.sum()
    below, y = np.cumsum(density), np.minimum(x, clip)
    others = np.cumsum(density * y) / below  # the mean of those below the largest one, x
    largest = np.diff(below**block, prepend=0)
    return float(density @ (x * y)), float(largest @ (y * ((block - 1) * others + y))) / block


def _sampled_clipping(clip: float, block: int) -> tuple[float, float]:
    """The same for small blocks, whose largest magnitude and RMS depend on one another: the mean of many."""
    x = np.abs(np.random.default_rng(0).standard_normal(((1 << 19) // block, block)))
    y = np.minimum(x, clip * np.sqrt(np.mean(x**2, axis=1, keepdims=True)))
    total = np.sum(x**2)
    return float(np.sum(x * y) / total), float(np.sum(y.max(axis=1) * y.sum(axis=1)) / total)


# --- the contract -----------------------------------------------------------------------------------------------------


def largest_step(q: Quantiser) -> np.float32:
    """What no step exceeds: a decoder takes larger ones, and such as are not numbers, for damage and for 0."""
    return np.float32(LIMIT / q.top * (1 + 1e-6))


_NARROW, _WIDE = np.empty(0, np.int8), np.empty(0, np.int16)


def kind(width: int) -> np.ndarray:
    """An array of the type that holds level numbers of that width."""
    return _NARROW if width <= 8 else _WIDE


# --- bits of 64 level numbers -----------------------------------------------------------------------------------------


def _vector(array_type: Any) -> tuple[Any, Any]:
    """The vector of 64 elements of an integer array, and the type of one."""
    one = ir.IntType(array_type.dtype.bitwidth)
    return ir.VectorType(one, 64), one


def _word(context: Any, builder: Any, array_type: Any, array: Any, at: Any, offset: Any) -> Any:
    return host._at(context, builder, array_type, array, builder.add(at, offset), ir.IntType(64))


@intrinsic
def _pack_group(typingctx, codes, index, words, at, width):  # type: ignore[no-untyped-def]
    """``words[at + j]`` holds bit j of the 64 level numbers ``codes[index:]``, for j < width."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        vector, one = _vector(sig.args[0])
        values = builder.load(host._at(context, builder, sig.args[0], args[0], args[1], vector), align=1)
        with cgutils.for_range(builder, args[4]) as loop:
            bit = builder.shl(ir.Constant(one, 1), builder.trunc(loop.index, one))
            bits = builder.and_(values, host._splat(builder, bit, vector))
            plane = builder.icmp_unsigned("!=", bits, ir.Constant(vector, [0] * 64))
            place = _word(context, builder, sig.args[2], args[2], args[3], loop.index)
            builder.store(builder.bitcast(plane, ir.IntType(64)), place, align=8)
        return context.get_dummy_value()

    return types.none(codes, types.intp, words, types.intp, types.intp), codegen


def _numbers(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """The level numbers in ``width`` words from ``at`` on, as 64 of the kind that holds them."""
    words, at, _, width = args[:4]
    vector, one = _vector(sig.args[2])
    zero = ir.Constant(vector, [0] * 64)
    total = cgutils.alloca_once_value(builder, zero)
    last = builder.sub(width, ir.Constant(width.type, 1))

    def add(j: Any, weight: Any) -> None:
        word = builder.load(_word(context, builder, sig.args[0], words, at, j), align=8)
        mask = builder.bitcast(word, ir.VectorType(ir.IntType(1), 64))
        part = builder.select(mask, host._splat(builder, weight, vector), zero)
        builder.store(builder.add(builder.load(total), part), total)

    with cgutils.for_range(builder, last) as loop:
        add(loop.index, builder.shl(ir.Constant(one, 1), builder.trunc(loop.index, one)))
    add(last, builder.shl(ir.Constant(one, -1), builder.trunc(last, one)))  # of two's complement: counts negatively
    return builder.load(total)


def _multiples(builder: Any, numbers: Any, levels: Any) -> Any:
    """As ``_power`` for 64 level numbers."""
    ints, zero = numbers.type, ir.Constant(numbers.type, [0] * 64)
    level = builder.select(builder.icmp_signed("<", numbers, zero), builder.neg(numbers), numbers)
    most = host._splat(builder, levels, ints)
    level = builder.select(builder.icmp_signed("<", level, most), level, most)
    bits = builder.shl(builder.add(level, ir.Constant(ints, [126] * 64)), ir.Constant(ints, [23] * 64))
    bits = builder.or_(bits, builder.and_(numbers, ir.Constant(ints, [-(1 << 31)] * 64)))
    bits = builder.select(builder.icmp_signed(">", level, zero), bits, zero)
    return builder.bitcast(bits, ir.VectorType(ir.FloatType(), 64))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v64f32"), [a, b, c])


@intrinsic
def _apply_group(typingctx, words, at, kind, width, levels, step, powers, add, out, index):  # type: ignore[no-untyped-def]
    """Write what the 64 level numbers from ``words[at]`` on stand for to ``out[index:]``, or add it."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        vector = ir.VectorType(ir.FloatType(), 64)
        step, powers, add, out, index = args[5:]
        numbers = _numbers(context, builder, sig, args)
        multiples = cgutils.alloca_once(builder, vector)
        with builder.if_else(powers) as (some, others):
            with some:
                wide = builder.sext(numbers, ir.VectorType(ir.IntType(32), 64))
                builder.store(_multiples(builder, wide, args[4]), multiples)
            with others:
                builder.store(builder.sitofp(numbers, vector), multiples)
        pointer = host._at(context, builder, sig.args[8], out, index, vector)
        factors = builder.load(multiples), host._splat(builder, step, vector)
        with builder.if_else(add) as (some, others):
            with some:
                builder.store(_fma(builder, *factors, builder.load(pointer, align=4)), pointer, align=4)
            with others:
                builder.store(builder.fmul(*factors), pointer, align=4)
        return context.get_dummy_value()

    numbers = (words, types.intp, kind, types.intp, types.int32, types.float32)
    return types.none(*numbers, types.boolean, types.boolean, out, types.intp), codegen


@host.inline
def _pack(codes, size, words, at, width):  # type: ignore[no-untyped-def]
    """Pack the first ``size`` level numbers into words from ``at`` on, the last group filled up with zeros.

    Returns where the words end.
    """
    groups = (size + 63) // 64
    for i in range(size, 64 * groups):
        codes[i] = 0
    for g in range(groups):
        _pack_group(codes, 64 * g, words, at + g * width, width)
    return at + groups * width


# --- norms ------------------------------------------------------------------------------------------------------------


@intrinsic
def _square_sum_groups(typingctx, x, groups, factor):  # type: ignore[no-untyped-def]
    """Sum of ``(factor · x)²`` over ``64 * groups`` elements: 64 running lane sums, then a pairwise tree over them."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        vector = ir.VectorType(ir.FloatType(), 64)
        total = cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * 64))
        factors = host._splat(builder, args[2], vector)
        with cgutils.for_range(builder, args[1]) as loop:
            index = builder.mul(loop.index, ir.Constant(loop.index.type, 64))
            values = builder.load(host._at(context, builder, sig.args[0], args[0], index, vector), align=4)
            scaled = builder.fmul(values, factors)
            builder.store(_fma(builder, scaled, scaled, builder.load(total)), total)
        return host.tree_sum(builder, builder.load(total))

    return types.float32(x, types.intp, types.float32), codegen


@host.inline
def _root_square(values, bits, mean):  # type: ignore[no-untyped-def]
    """The Euclidean norm, or the root mean square, of values whose largest magnitude has these bits.

    They are divided by its power of two first, so that no square is too large or too small. The format fixes the order
    of the sum: whole groups of 64 by lanes and tree, then the rest one by one.
    """
    power = np.uint32(bits & np.uint32(0x7F800000))
    factor = host.bits_float(np.uint32(np.uint32(0x7F000000) - power))
    groups = values.size // 64
    total = _square_sum_groups(values, groups, factor)
    for i in range(64 * groups, values.size):
        scaled = np.float32(values[i] * factor)
        total = host.fma(scaled, scaled, total)
    if mean:
        total = np.float32(total / np.float32(values.size))
    return np.float32(np.float32(math.sqrt(total)) * host.bits_float(power))


@host.inline
def _norm(values, bits, norm, clip):  # type: ignore[no-untyped-def]
    """What the levels are shares of; at most LIMIT, and never below a magnitude that is to be kept."""
    largest = host.bits_float(bits)
    if norm == MAX or largest < np.float32(TINY):
        return largest
    if norm == L2:
        return min(max(_root_square(values, bits, False), largest), np.float32(LIMIT))
    return min(np.float32(clip * _root_square(values, bits, True)), largest)


# --- levels -----------------------------------------------------------------------------------------------------------


@host.inline
def _round_linear(values, codes, inverse, top, at, high):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        value = values[i]
        level = min(host.fma(abs(value), inverse, host.uniform(at, high)), top)
        sign = np.uint32(host.float_bits(value) & np.uint32(0x80000000))
        codes[i] = np.int32(host.bits_float(np.uint32(host.float_bits(level) | sign)))
        at = np.uint32(at + host.STEP)


@host.inline
def _round_powers(values, codes, inverse, top, at, high):  # type: ignore[no-untyped-def]
    """Random bits added to the fraction round a float to a power of two, up as often as the fraction says.

    Below the lowest level, 1 and 2 stand for 0 and 1.
    """
    for i in range(values.size):
        value = values[i]
        t = min(np.float32(abs(value) * inverse), top)
        shifted = t + t if t >= np.float32(1) else t + np.float32(1)
        noise = np.uint32(np.int32(host.uniform(at, high) * np.float32(8388608.0)))
        level = np.int32(np.uint32(host.float_bits(shifted) + noise) >> np.uint32(23)) - np.int32(127)
        codes[i] = -level if value < 0 else level
        at = np.uint32(at + host.STEP)


@host.inline
def _power(code, levels):  # type: ignore[no-untyped-def]
    """The multiple of the step that a level number stands for."""
    number = np.int32(code)
    level = min(np.int32(abs(number)), levels)
    sign = np.uint32(np.uint32(number) & np.uint32(0x80000000))
    bits = np.uint32(np.uint32(level + np.int32(126)) << np.uint32(23))
    return host.bits_float(np.uint32(bits | sign)) if level > 0 else np.float32(0)


@host.inline
def _number(words, at, i, width):  # type: ignore[no-untyped-def]
    """The level number of one element of a group."""
    total = np.int32(0)
    for j in range(width):
        bit = np.int32((words[at + j] >> np.uint64(i)) & np.uint64(1))
        total = np.int32(total + (-(bit << j) if j == width - 1 else bit << j))
    return total


@host.inline
def _apply(out, words, at, steps, kind, block, width, levels, largest, sign, powers, add):  # type: ignore[no-untyped-def]
    """Write what the level numbers of some blocks stand for to ``out``, or add it; steps beyond ``largest`` are 0.

    ``at`` is where their words begin.
    """
    for b in range(steps.size):
        i, stop = b * block, min(out.size, (b + 1) * block)
        step = np.float32(steps[b] * sign) if abs(steps[b]) <= largest else np.float32(0)
        while i + 64 <= stop:
            _apply_group(words, at, kind, width, levels, step, powers, add, out, i)
            i += 64
            at += width
        if i < stop:
            _apply_rest(out, i, stop, words, at, width, step, powers, levels, add)
            at += width


@host.inline
def _apply_rest(out, start, stop, words, at, width, step, powers, levels, add):  # type: ignore[no-untyped-def]
    """The same for less than a group."""
    for i in range(start, stop):
        number = _number(words, at, i - start, width)
        multiple = _power(number, levels) if powers else np.float32(number)
        out[i] = host.fma(multiple, step, out[i]) if add else np.float32(multiple * step)


# --- kernels ----------------------------------------------------------------------------------------------------------


@host.inline
def tame_copy(values):  # type: ignore[no-untyped-def]
    """The tame values of an array, for encoders without a residual to hold them: rare, for it is slow."""
    tamed = np.empty_like(values)
    for i in range(values.size):
        tamed[i] = host.tame(values[i])
    return tamed


@host.inline
def _encode_blocks(values, more, words, at, steps, kind, block, width, powers, norm, clip, top, shrink, count, high):  # type: ignore[no-untyped-def]
    """Encode some blocks of values, after adding ``more`` if it is not empty, into words from ``at`` on.

    A call for each would cost a fifth of the time. The sum is made here, block by block, so that memory is read while
    the block before is rounded. Without ``more`` the values must be tame.
    """
    codes = np.empty(_PIECE, kind.dtype)
    for b in range(steps.size):
        stop = min(values.size, (b + 1) * block)
        whole = values[b * block : stop]
        if more.size:
            host.tame_sum(whole, more[b * block : stop])
        length = _norm(whole, host.max_bits(whole), norm, clip)
        step, inverse = np.float32(0), np.float32(0)
        if length >= np.float32(TINY):
            step, inverse = np.float32(np.float32(length / top) * shrink), np.float32(top / length)
        steps[b] = step
        for a in range(b * block, stop, _PIECE):
            piece = values[a : min(stop, a + _PIECE)]
            if powers:
                _round_powers(piece, codes, inverse, top, host.counter(a, count), high)
            else:
                _round_linear(piece, codes, inverse, top, host.counter(a, count), high)
            at = _pack(codes, piece.size, words, at, width)


@host.Kernel
def encode(x, residual, words, steps, kind, block, width, powers, levels, norm, clip, top, shrink, low, high):  # type: ignore[no-untyped-def]
    each, per, keep = (block + 63) // 64 * width, max(1, _SPAN // block), residual.size > 0
    for chunk in prange((steps.size + per - 1) // per):
        first, last = chunk * per, min(steps.size, (chunk + 1) * per)
        a, e, at, count = first * block, min(x.size, last * block), first * each, host.counter(first * block, low)
        values, some = x[a:e], steps[first:last]
        rule = (kind, block, width, powers, norm, clip, top, shrink)
        if keep:
            kept = residual[a:e]
            _encode_blocks(kept, values, words, at, some, *rule, count, high)
            _apply(kept, words, at, some, kind, block, width, levels, np.float32(np.inf), np.float32(-1), powers, True)
        elif host.max_bits(values) <= np.uint32(LIMIT_BITS):
            _encode_blocks(values, values[:0], words, at, some, *rule, count, high)
        else:
            _encode_blocks(tame_copy(values), values[:0], words, at, some, *rule, count, high)


@host.Kernel
def decode(out, words, steps, kind, block, width, powers, levels, largest, add):  # type: ignore[no-untyped-def]
    each, per = (block + 63) // 64 * width, max(1, _SPAN // block)
    for chunk in prange((steps.size + per - 1) // per):
        first, last = chunk * per, min(steps.size, (chunk + 1) * per)
        part, some = out[first * block : min(out.size, last * block)], steps[first:last]
        _apply(part, words, first * each, some, kind, block, width, levels, largest, np.float32(1), powers, add)
