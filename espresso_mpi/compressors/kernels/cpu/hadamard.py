"""Blocks turned by a random rotation: random signs, then a fast Walsh-Hadamard transform. CPU kernels and sizes.

Every vector of d elements (d a power of two from 64) becomes ``w = H·D·v`` with a diagonal D of random signs and H the
Walsh-Hadamard matrix in Sylvester's order *without* its factor 1/√d, so ``H·H = d·1``: the factors go into the scales,
where a power of two costs no rounding. Whatever v was, the elements of w look like samples of one normal distribution,
so a quantiser made for that serves every v.

A tensor is cut into blocks of ``block`` elements; the last one is padded with zeros to a power of two. Before it is
turned a block is multiplied by a power of two so that its largest magnitude is in [1, 2): sums cannot overflow. The
butterflies run from stride 1 upwards, and sums over a block run in 64 lanes (element i in lane i mod 64) that then are
folded upper half onto lower half: these orders are part of the format, and the CUDA kernels keep them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from espresso_mpi.compressors.base import LIMIT, check_positive_int
from espresso_mpi.compressors.schedule import Schedule, settled
from espresso_mpi.errors import ConfigError

from . import host

SMALLEST, LARGEST = 64, 4096
"""Sizes of a block. Smaller ones do not fill the vectors, larger ones not twice the shared memory of a GPU's block."""

TINY = 1e-30
"""A block whose largest magnitude is below this is sent as zeros: its scale could underflow."""

TINY_BITS = int(np.float32(TINY).view(np.uint32))
LIMIT_BITS = int(np.float32(LIMIT).view(np.uint32))
CHUNK = 16384  # elements between two visits to the scheduler


def check_block(owner: str, block: Any) -> None:
    """Raise ConfigError unless ``block`` is a power of two in [SMALLEST, LARGEST]."""
    check_positive_int(owner, "block", block, SMALLEST, LARGEST)
    for size in (block.start, block.end) if isinstance(block, Schedule) else (block,):
        if int(size).bit_count() != 1:
            raise ConfigError(f"{owner}: block={block}; expected a power of two from {SMALLEST} to {LARGEST}")


def settled_block(block: Any, step: int | None) -> int:
    """A block size at a step; between the ends of a schedule the power of two below."""
    return 1 << (int(settled(block, step)).bit_length() - 1)


def count(n: int, block: int) -> int:
    """How many blocks n elements make."""
    return -(-n // block)


def padded(n: int, block: int) -> int:
    """How many elements they have together, with the padding of the last one."""
    whole, rest = divmod(n, block)
    return whole * block + (max(SMALLEST, 1 << (rest - 1).bit_length()) if rest else 0)


# --- vector instructions ----------------------------------------------------------------------------------------------

_W = 16  # floats in a vector of AVX-512; LLVM cuts them up for smaller ones
_F32, _I32, _I16, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64)
_VEC, _VEC_I, _MASK = ir.VectorType(_F32, _W), ir.VectorType(_I32, _W), ir.VectorType(ir.IntType(1), _W)
_FOUR = range(4)  # vectors in a group of 64 elements


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, pointee: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), pointee.as_pointer())


def _offset(builder: Any, index: Any, by: int) -> Any:
    return builder.add(index, ir.Constant(index.type, by))


def _splat(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, _W)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(_VEC_I, [0] * _W))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a · b + c`` of vectors, rounded once; llvmlite's own is for scalars."""
    signature = ir.FunctionType(_VEC, [_VEC] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, "llvm.fma.v16f32"), [a, b, c])


class _Array:
    """An array argument inside an intrinsic: loads and stores of vectors."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any, number: int) -> None:
        self._place = (context, builder, signature.args[number], args[number])
        self._builder = builder

    def load(self, index: Any, pointee: Any = _VEC) -> Any:
        return self._builder.load(_pointer(*self._place, index, pointee), align=2 if pointee is _I16 else 4)

    def store(self, value: Any, index: Any) -> None:
        self._builder.store(value, _pointer(*self._place, index, value.type), align=4)

    def group(self, index: Any, pointee: Any = _VEC) -> list[Any]:
        """The four vectors of 64 elements from ``index`` on."""
        return [self.load(_offset(self._builder, index, _W * k), pointee) for k in _FOUR]

    def store_group(self, vectors: list[Any], index: Any) -> None:
        for k in _FOUR:
            self.store(vectors[k], _offset(self._builder, index, _W * k))

    def splat(self, index: int) -> Any:
        """One element of the array in all lanes."""
        return _splat(self._builder, self.load(ir.Constant(_I64, index), _F32))


def _lanes(builder: Any, mask: Any) -> list[Any]:
    """A uint64 as four vectors of bits."""
    parts = [builder.trunc(builder.lshr(mask, ir.Constant(_I64, _W * k)), _I16) for k in _FOUR]
    return [builder.bitcast(part, _MASK) for part in parts]


def _word(builder: Any, masks: list[Any]) -> Any:
    """Four vectors of bits as a uint64."""
    word = ir.Constant(_I64, 0)
    for k in _FOUR:
        part = builder.zext(builder.bitcast(masks[k], _I16), _I64)
        word = builder.or_(word, builder.shl(part, ir.Constant(_I64, _W * k)))
    return word


def _index(builder: Any, loop: Any) -> Any:
    """The first element of the group that a loop over groups has arrived at."""
    return builder.mul(loop.index, ir.Constant(loop.index.type, 4 * _W))


def _tree(builder: Any, four: list[Any], combine: Any) -> Any:
    """Fold the upper half of 64 lanes onto the lower half until one is left."""
    low, high = combine(four[0], four[2]), combine(four[1], four[3])
    lanes, width = combine(low, high), _W
    while width > 1:
        width //= 2
        undefined = ir.Constant(lanes.type, ir.Undefined)
        halves = [
            builder.shuffle_vector(lanes, undefined, ir.Constant(ir.VectorType(_I32, width), list(part)))
            for part in (range(width), range(width, 2 * width))
        ]
        lanes = combine(*halves)
    return builder.extract_element(lanes, ir.Constant(_I32, 0))


def _accumulators(builder: Any, vector: Any, zero: Any) -> list[Any]:
    return [cgutils.alloca_once_value(builder, ir.Constant(vector, [zero] * _W)) for _ in _FOUR]


def _larger(builder: Any) -> Any:
    return lambda a, b: builder.select(builder.icmp_unsigned(">", a, b), a, b)


def _note_largest(builder: Any, tops: list[Any], values: list[Any]) -> None:
    """Keep the largest magnitudes' bits, lane by lane."""
    no_sign = ir.Constant(_VEC_I, [0x7FFFFFFF] * _W)
    for k in _FOUR:
        bits = builder.and_(builder.bitcast(values[k], _VEC_I), no_sign)
        builder.store(_larger(builder)(bits, builder.load(tops[k])), tops[k])


@intrinsic
def _largest(typingctx, x, groups):  # type: ignore[no-untyped-def]
    """The bits of the largest magnitude among ``64 * groups`` elements."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        tops, source = _accumulators(builder, _VEC_I, 0), _Array(context, builder, sig, args, 0)
        with cgutils.for_range(builder, args[1]) as loop:
            _note_largest(builder, tops, source.group(_index(builder, loop)))
        return _tree(builder, [builder.load(t) for t in tops], _larger(builder))

    return types.uint32(x, types.intp), codegen


@intrinsic
def _add_largest(typingctx, kept, x, groups):  # type: ignore[no-untyped-def]
    """``kept += x`` over ``64 * groups`` elements; the bits of the largest magnitude of the sums."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        tops = _accumulators(builder, _VEC_I, 0)
        target, source = (_Array(context, builder, sig, args, k) for k in (0, 1))
        with cgutils.for_range(builder, args[2]) as loop:
            at = _index(builder, loop)
            sums = [builder.fadd(a, b) for a, b in zip(target.group(at), source.group(at))]
            target.store_group(sums, at)
            _note_largest(builder, tops, sums)
        return _tree(builder, [builder.load(t) for t in tops], _larger(builder))

    return types.uint32(kept, x, types.intp), codegen


def _flipped(builder: Any, signs: _Array, at: Any, scale: Any) -> list[Any]:
    """For 64 elements the scale, or minus the scale where the bit of the sign words is set."""
    plus, minus = _splat(builder, scale), _splat(builder, builder.fneg(scale))
    word = builder.udiv(at, ir.Constant(at.type, 32))
    low, high = (builder.zext(signs.load(_offset(builder, word, k), _I32), _I64) for k in (0, 1))
    mask = builder.or_(low, builder.shl(high, ir.Constant(_I64, 32)))
    return [builder.select(lanes, minus, plus) for lanes in _lanes(builder, mask)]


@intrinsic
def _flip(typingctx, out, x, groups, signs, scale):  # type: ignore[no-untyped-def]
    """``out = ±scale · x`` for ``64 * groups`` elements, minus where the sign words have a one."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        target, source, words = (_Array(context, builder, sig, args, k) for k in (0, 1, 3))
        with cgutils.for_range(builder, args[2]) as loop:
            at = _index(builder, loop)
            factors = _flipped(builder, words, at, args[4])
            target.store_group([builder.fmul(a, b) for a, b in zip(source.group(at), factors)], at)
        return context.get_dummy_value()

    return types.none(out, x, types.intp, signs, types.float32), codegen


def _make_flip_onto(combine: Any) -> Any:
    @intrinsic
    def flip_onto(typingctx, out, x, groups, signs, scale):  # type: ignore[no-untyped-def]
        """Combine ``out`` with ``±scale · x`` for ``64 * groups`` elements, minus where the sign words have a one."""

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            target, source, words = (_Array(context, builder, sig, args, k) for k in (0, 1, 3))
            with cgutils.for_range(builder, args[2]) as loop:
                at = _index(builder, loop)
                factors = _flipped(builder, words, at, args[4])
                parts = zip(source.group(at), factors, target.group(at))
                target.store_group([combine(builder, a, b, c) for a, b, c in parts], at)
            return context.get_dummy_value()

        return types.none(out, x, types.intp, signs, types.float32), codegen

    return flip_onto


def _less(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``c - a·b`` with the product rounded, as the receiver rounds it."""
    return builder.fsub(c, builder.fmul(a, b))


_flip_add = _make_flip_onto(_fma)
_flip_subtract = _make_flip_onto(_less)


@intrinsic
def square_sum(typingctx, x, groups, power):  # type: ignore[no-untyped-def]
    """Sum of ``(power · x)²`` over ``64 * groups`` elements: 64 running lane sums, then a pairwise tree over them."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        totals, source = _accumulators(builder, _VEC, 0.0), _Array(context, builder, sig, args, 0)
        factor = _splat(builder, args[2])
        with cgutils.for_range(builder, args[1]) as loop:
            values = source.group(_index(builder, loop))
            for value, total in zip(values, totals):
                scaled = builder.fmul(value, factor)
                builder.store(_fma(builder, scaled, scaled, builder.load(total)), total)
        return _tree(builder, [builder.load(t) for t in totals], builder.fadd)

    return types.float32(x, types.intp, types.float32), codegen


def _stages(builder: Any, vectors: list[Any]) -> list[Any]:
    """The butterflies between the vectors of a list: strides of one vector, two, four, ..."""
    stride = 1
    while stride < len(vectors):
        done = list(vectors)
        for k in range(len(vectors)):
            if not k & stride:
                done[k] = builder.fadd(vectors[k], vectors[k + stride])
                done[k + stride] = builder.fsub(vectors[k], vectors[k + stride])
        vectors, stride = done, 2 * stride
    return vectors


def _inner_stages(builder: Any, vector: Any) -> Any:
    """The butterflies inside a vector: strides 1, 2, 4, 8. ``±1 · v + partner`` is their sum or difference exactly."""
    for stride in (1, 2, 4, 8):
        partner = builder.shuffle_vector(
            vector, ir.Constant(_VEC, ir.Undefined), ir.Constant(_VEC_I, [lane ^ stride for lane in range(_W)])
        )
        signs = ir.Constant(_VEC, [-1.0 if lane & stride else 1.0 for lane in range(_W)])
        vector = _fma(builder, vector, signs, partner)
    return vector


@intrinsic
def _near_stages(typingctx, x, groups):  # type: ignore[no-untyped-def]
    """The butterflies of strides 1 to 32 in ``64 * groups`` elements."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        array = _Array(context, builder, sig, args, 0)
        with cgutils.for_range(builder, args[1]) as loop:
            at = _index(builder, loop)
            inner = [_inner_stages(builder, vector) for vector in array.group(at)]
            array.store_group(_stages(builder, inner), at)
        return context.get_dummy_value()

    return types.none(x, types.intp), codegen


def _make_far_stages(radix: int) -> Any:
    @intrinsic
    def far_stages(typingctx, x, index, stride):  # type: ignore[no-untyped-def]
        """The butterflies of strides ``stride`` to ``stride · radix / 2``, for 16 columns from ``index`` on."""

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            array, at = _Array(context, builder, sig, args, 0), [args[1]]
            while len(at) < radix:
                at.append(builder.add(at[-1], args[2]))
            for place, value in zip(at, _stages(builder, [array.load(place) for place in at])):
                array.store(value, place)
            return context.get_dummy_value()

        return types.none(x, types.intp, types.intp), codegen

    return far_stages


_far_2, _far_4, _far_8, _far_16 = (_make_far_stages(radix) for radix in (2, 4, 8, 16))


@host.inline
def transform(x):  # type: ignore[no-untyped-def]
    """``x = H·x`` for a power of two of at least 64 elements."""
    _near_stages(x, x.size // 64)
    stride = 64
    while stride < x.size:
        radix = min(16, x.size // stride)
        for first in range(0, x.size, radix * stride):
            for i in range(first, first + stride, 16):
                if radix == 16:
                    _far_16(x, i, stride)
                elif radix == 8:
                    _far_8(x, i, stride)
                elif radix == 4:
                    _far_4(x, i, stride)
                else:
                    _far_2(x, i, stride)
        stride *= radix


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
    """The sign bits of a block whose first word is number ``first`` of the tensor's: ``host.uniform``'s 32 bits."""
    for k in range(signs.size):
        at = host.counter(first + k, low)
        h = np.uint32((at ^ (at >> np.uint32(16)) ^ high) * np.uint32(0x7FEB352D))
        h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
        signs[k] = np.uint32(h ^ (h >> np.uint32(16)))


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
def _tame_all(out, values):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        out[i] = host.tame(values[i])


@host.inline
def powers(top):  # type: ignore[no-untyped-def]
    """The power of two by which to multiply a block whose largest magnitude has these bits, and its inverse."""
    exponent = np.uint32(top >> np.uint32(23))
    down = np.uint32(np.uint32(254) - exponent) << np.uint32(23)
    return host.bits_float(np.uint32(down)), host.bits_float(np.uint32(exponent << np.uint32(23)))


@host.inline
def take(values, kept, spare, keep):  # type: ignore[no-untyped-def]
    """The tame values to compress, in ``kept`` (added to it) if there is one; their largest magnitude's bits."""
    groups = values.size // 64
    if keep:
        top = _add_largest(kept, values, groups)
        if top > np.uint32(LIMIT_BITS):
            _tame_all(kept, kept)
            top = _largest(kept, groups)
        return kept, top
    top = _largest(values, groups)
    if top > np.uint32(LIMIT_BITS):
        _tame_all(spare, values)
        return spare, _largest(spare, groups)
    return values, top


@host.inline
def rotate(buffer, values, signs, power):  # type: ignore[no-untyped-def]
    """``buffer = power · H·D·values``."""
    _flip(buffer, values, values.size // 64, signs, power)
    transform(buffer)


@host.inline
def scaled_back(buffer, scale, bound):  # type: ignore[no-untyped-def]
    """The factor by which to multiply the turned back codes: scale, unless a product could leave the range.

    Then, which damaged payloads can bring about as well, the products are made, and tamed, here. No element of the
    buffer is above ``bound`` in magnitude.
    """
    if abs(scale) <= np.float32(LIMIT) / bound:
        return scale
    for i in range(buffer.size):
        buffer[i] = host.tame(buffer[i] * scale)
    return np.float32(1)


# --- quantisation to the levels of a table ----------------------------------------------------------------------------


def _pick(builder: Any, masks: list[Any], choices: list[Any]) -> Any:
    """The choice whose number has these bits, the highest first."""
    if len(choices) == 1:
        return choices[0]
    half = len(choices) // 2
    low, high = _pick(builder, masks[1:], choices[:half]), _pick(builder, masks[1:], choices[half:])
    return builder.select(masks[0], high, low)


def _search(builder: Any, magnitude: Any, thresholds: list[Any]) -> list[Any]:
    """The bits, the highest first, of how many of the 2ᵏ - 1 thresholds are at most the magnitude: binary search."""
    masks: list[Any] = []
    step = (len(thresholds) + 1) // 2
    while step:
        nearest = _pick(builder, masks, thresholds[step - 1 :: 2 * step])
        masks.append(builder.fcmp_ordered(">=", magnitude, nearest))
        step //= 2
    return masks


def _make_quantise(bits: int) -> Any:
    levels = 1 << (bits - 1)

    @intrinsic
    def quantise(typingctx, w, groups, inverse, table, planes, sums):  # type: ignore[no-untyped-def]
        """Replace each w by the level c of ``inverse · |w|``, with w's sign; write its bits, and the sums c·w and c².

        The table holds the levels, then the thresholds between them. Each group of 64 has ``bits`` words: the signs,
        then the bits of the levels' numbers, the highest first.
        """

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            array, constants, words, out = (_Array(context, builder, sig, args, k) for k in (0, 3, 4, 5))
            inverse = _splat(builder, args[2])
            table = [constants.splat(k) for k in range(2 * levels - 1)]
            zero, no_sign = ir.Constant(_VEC, [0.0] * _W), ir.Constant(_VEC_I, [0x7FFFFFFF] * _W)
            with_values, squares = _accumulators(builder, _VEC, 0.0), _accumulators(builder, _VEC, 0.0)
            with cgutils.for_range(builder, args[1]) as loop:
                at, masks, chosen = _index(builder, loop), [], []
                for k, value in enumerate(array.group(at)):
                    size = builder.bitcast(builder.and_(builder.bitcast(value, _VEC_I), no_sign), _VEC)
                    found = _search(builder, builder.fmul(size, inverse), table[levels:])
                    level, negative = _pick(builder, found, table[:levels]), builder.fcmp_ordered("<", value, zero)
                    masks.append([negative, *found])
                    chosen.append(builder.select(negative, builder.fneg(level), level))
                    for total, other in ((with_values[k], size), (squares[k], level)):
                        builder.store(_fma(builder, level, other, builder.load(total)), total)
                array.store_group(chosen, at)
                first = builder.mul(loop.index, ir.Constant(loop.index.type, bits))
                for k in range(bits):
                    words.store(_word(builder, [mask[k] for mask in masks]), _offset(builder, first, k))
            for k, totals in enumerate((with_values, squares)):
                total = _tree(builder, [builder.load(t) for t in totals], builder.fadd)
                out.store(total, ir.Constant(_I64, k))
            return context.get_dummy_value()

        return types.none(w, types.intp, types.float32, table, planes, sums), codegen

    return quantise


def _make_expand(bits: int) -> Any:
    levels = 1 << (bits - 1)

    @intrinsic
    def expand(typingctx, out, groups, table, planes):  # type: ignore[no-untyped-def]
        """Write the signed levels of ``64 * groups`` elements that ``quantise`` has packed."""

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            array, constants, words = (_Array(context, builder, sig, args, k) for k in (0, 2, 3))
            table = [constants.splat(k) for k in range(levels)]
            with cgutils.for_range(builder, args[1]) as loop:
                first = builder.mul(loop.index, ir.Constant(loop.index.type, bits))
                planes = [_lanes(builder, words.load(_offset(builder, first, k), _I64)) for k in range(bits)]
                signed = []
                for negative, *found in zip(*planes):
                    level = _pick(builder, found, table)
                    signed.append(builder.select(negative, builder.fneg(level), level))
                array.store_group(signed, _index(builder, loop))
            return context.get_dummy_value()

        return types.none(out, types.intp, table, planes), codegen

    return expand


_quantise_1, _quantise_2, _quantise_3, _quantise_4 = (_make_quantise(bits) for bits in (1, 2, 3, 4))
_expand_1, _expand_2, _expand_3, _expand_4 = (_make_expand(bits) for bits in (1, 2, 3, 4))


@host.inline
def _quantise(w, bits, inverse, table, planes, sums):  # type: ignore[no-untyped-def]
    groups = w.size // 64
    if bits == 1:
        _quantise_1(w, groups, inverse, table, planes, sums)
    elif bits == 2:
        _quantise_2(w, groups, inverse, table, planes, sums)
    elif bits == 3:
        _quantise_3(w, groups, inverse, table, planes, sums)
    else:
        _quantise_4(w, groups, inverse, table, planes, sums)


@host.inline
def _expand(out, bits, table, planes):  # type: ignore[no-untyped-def]
    groups = out.size // 64
    if bits == 1:
        _expand_1(out, groups, table, planes)
    elif bits == 2:
        _expand_2(out, groups, table, planes)
    elif bits == 3:
        _expand_3(out, groups, table, planes)
    else:
        _expand_4(out, groups, table, planes)


@host.inline
def _code(w, power, bits, unbiased, table, planes, sums):  # type: ignore[no-untyped-def]
    """Quantise a turned block; its scale: what its levels, turned back by H, are to be multiplied by."""
    size = np.float32(w.size)
    squares, inverse = np.float32(1), np.float32(1)
    if unbiased or bits > 1:
        squares = square_sum(w, w.size // 64, np.float32(1))
        inverse = np.sqrt(size / squares)
    _quantise(w, bits, inverse, table, planes, sums)
    factor = squares / sums[0] if unbiased else sums[0] / sums[1]
    return factor * (power / size)


@host.inline
def _encode_block(values, kept, buffer, spare, signs, keep, bits, unbiased, table, planes, sums, bound):  # type: ignore[no-untyped-def]
    values, top = take(values, kept, spare, keep)
    if top < np.uint32(TINY_BITS):
        clear(planes)
        return np.float32(0)
    down, up = powers(top)
    rotate(buffer, values, signs, down)
    scale = _code(buffer, up, bits, unbiased, table, planes, sums)
    if keep:
        transform(buffer)
        _flip_subtract(kept, buffer, buffer.size // 64, signs, scaled_back(buffer, scale, bound))
    return scale


@host.Kernel
def encode(x, residual, planes, scales, block, bits, unbiased, table, low, high):  # type: ignore[no-untyped-def]
    """Quantise x (+ residual) to the levels of a table, ``bits`` bits an element with the sign. See ``_code``."""
    keep, each = residual.size > 0, max(1, CHUNK // block)
    for chunk in prange((scales.size + each - 1) // each):
        room, words = carray(float_room(), 3 * LARGEST), carray(word_room(), LARGEST // 32)
        sums = carray(sum_room(), 2)
        for b in range(chunk * each, min(scales.size, (chunk + 1) * each)):
            start, stop = b * block, min(x.size, (b + 1) * block)
            size = block_size(stop - start, block)
            buffer, spare, signs = room[:size], room[block : block + size], words[: size // 32]
            packed = planes[start // 64 * bits : (start + size) // 64 * bits]
            bound = table[table.size // 2] * np.float32(size)
            fill_signs(signs, start // 32, low, high)
            values, kept = x[start:stop], residual[start:stop]
            if size > stop - start:
                values = pad(room[2 * block : 2 * block + size], values)
                if keep:
                    kept = pad(spare, kept)  # which is not used for anything else then
            scales[b] = _encode_block(
                values, kept, buffer, spare, signs, keep, bits, unbiased, table, packed, sums, bound
            )
            if keep and size > stop - start:
                copy(residual[start:stop], kept)


STORE, ADD, SUBTRACT = 0, 1, 2


@host.inline
def put(out, buffer, room, signs, scale, how):  # type: ignore[no-untyped-def]
    """Multiply by the signs and the scale, and store, add or subtract that; of a padded block through ``room``."""
    groups = buffer.size // 64
    target = out
    if out.size < buffer.size:
        target = pad(room, out)
    if how == ADD:
        _flip_add(target, buffer, groups, signs, scale)
    elif how == SUBTRACT:
        _flip_subtract(target, buffer, groups, signs, scale)
    else:
        _flip(target, buffer, groups, signs, scale)
    if out.size < buffer.size:
        copy(out, target)


@host.Kernel
def decode(out, planes, scales, block, bits, table, add, low, high):  # type: ignore[no-untyped-def]
    """Undo ``encode``."""
    each = max(1, CHUNK // block)
    for chunk in prange((scales.size + each - 1) // each):
        room, words = carray(float_room(), 3 * LARGEST), carray(word_room(), LARGEST // 32)
        for b in range(chunk * each, min(scales.size, (chunk + 1) * each)):
            start, stop = b * block, min(out.size, (b + 1) * block)
            size = block_size(stop - start, block)
            buffer, signs = room[:size], words[: size // 32]
            fill_signs(signs, start // 32, low, high)
            _expand(buffer, bits, table, planes[start // 64 * bits : (start + size) // 64 * bits])
            transform(buffer)
            factor = scaled_back(buffer, scales[b], table[table.size // 2] * np.float32(size))
            put(out[start:stop], buffer, room[block : block + size], signs, factor, ADD if add else STORE)
