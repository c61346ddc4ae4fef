"""The CPU kernels of ``drive`` and ``eden``: rotated blocks quantised to the levels of a table."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from . import entries, group64, host, rotations, vectors
from .flips import flip_subtract, square_sum
from .hadamard import transform


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
            array, constants, words, out = (group64.Array(context, builder, sig, args, k) for k in (0, 3, 4, 5))
            inverse = vectors.splat(builder, args[2], group64.WIDTH)
            table = [constants.splat(k) for k in range(2 * levels - 1)]
            zero, no_sign = vectors.constant(group64.VECTOR, 0.0), vectors.constant(group64.VECTOR_I, 0x7FFFFFFF)
            with_values, squares = (
                group64.accumulators(builder, group64.VECTOR, 0.0),
                group64.accumulators(builder, group64.VECTOR, 0.0),
            )
            with cgutils.for_range(builder, args[1]) as loop:
                at, masks, chosen = group64.start_of(builder, loop), [], []
                for k, value in enumerate(array.group(at)):
                    size = builder.bitcast(
                        builder.and_(builder.bitcast(value, group64.VECTOR_I), no_sign), group64.VECTOR
                    )
                    found = _search(builder, builder.fmul(size, inverse), table[levels:])
                    level, negative = _pick(builder, found, table[:levels]), builder.fcmp_ordered("<", value, zero)
                    masks.append([negative, *found])
                    chosen.append(builder.select(negative, builder.fneg(level), level))
                    for total, other in ((with_values[k], size), (squares[k], level)):
                        builder.store(vectors.fma(builder, level, other, builder.load(total)), total)
                array.store_group(chosen, at)
                first = builder.mul(loop.index, ir.Constant(loop.index.type, bits))
                for k in range(bits):
                    words.store(
                        group64.word_of(builder, [mask[k] for mask in masks]), group64.offset(builder, first, k)
                    )
            for k, totals in enumerate((with_values, squares)):
                total = group64.fold(builder, [builder.load(t) for t in totals], builder.fadd)
                out.store(total, ir.Constant(group64.I64, k))
            return context.get_dummy_value()

        return types.none(w, types.intp, types.float32, table, planes, sums), codegen

    return quantise


def _make_expand(bits: int) -> Any:
    levels = 1 << (bits - 1)

    @intrinsic
    def expand(typingctx, out, groups, table, planes):  # type: ignore[no-untyped-def]
        """Write the signed levels of ``64 * groups`` elements that ``quantise`` has packed."""

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            array, constants, words = (group64.Array(context, builder, sig, args, k) for k in (0, 2, 3))
            table = [constants.splat(k) for k in range(levels)]
            with cgutils.for_range(builder, args[1]) as loop:
                first = builder.mul(loop.index, ir.Constant(loop.index.type, bits))
                planes = [
                    group64.bits_of(builder, words.load(group64.offset(builder, first, k), group64.I64))
                    for k in range(bits)
                ]
                signed = []
                for negative, *found in zip(*planes):
                    level = _pick(builder, found, table)
                    signed.append(builder.select(negative, builder.fneg(level), level))
                array.store_group(signed, group64.start_of(builder, loop))
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
    """Quantise a rotated block; its scale: what its levels, rotated back by H, are to be multiplied by."""
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
    values, top = rotations.take(values, kept, spare, keep)
    if top < np.uint32(rotations.TINY_BITS):
        rotations.clear(planes)
        return np.float32(0)
    down, up = rotations.powers(top)
    rotations.rotate(buffer, values, signs, down)
    scale = _code(buffer, up, bits, unbiased, table, planes, sums)
    if keep:
        transform(buffer)
        flip_subtract(kept, buffer, buffer.size // 64, signs, rotations.scaled_back(buffer, scale, bound))
    return scale


@host.Kernel
def encode(x, residual, planes, scales, block, bits, unbiased, table, low, high):  # type: ignore[no-untyped-def]
    """Quantise x (+ residual) to the levels of a table, ``bits`` bits per element with the sign. See ``_code``."""
    keep, each = residual.size > 0, max(1, rotations.CHUNK // block)
    for chunk in prange((scales.size + each - 1) // each):
        room, words = (
            carray(rotations.float_room(), 3 * rotations.LARGEST),
            carray(rotations.word_room(), rotations.LARGEST // 32),
        )
        sums = carray(rotations.sum_room(), 2)
        for b in range(chunk * each, min(scales.size, (chunk + 1) * each)):
            start, stop = b * block, min(x.size, (b + 1) * block)
            size = rotations.block_size(stop - start, block)
            buffer, spare, signs = room[:size], room[block : block + size], words[: size // 32]
            packed = planes[start // 64 * bits : (start + size) // 64 * bits]
            bound = table[table.size // 2] * np.float32(size)
            rotations.fill_signs(signs, start // 32, low, high)
            values, kept = x[start:stop], residual[start:stop]
            if size > stop - start:
                values = rotations.pad(room[2 * block : 2 * block + size], values)
                if keep:
                    kept = rotations.pad(spare, kept)  # which is not used for anything else then
            scales[b] = _encode_block(
                values, kept, buffer, spare, signs, keep, bits, unbiased, table, packed, sums, bound
            )
            if keep and size > stop - start:
                rotations.copy(residual[start:stop], kept)


@host.Kernel
def decode(out, planes, scales, block, bits, table, add, low, high):  # type: ignore[no-untyped-def]
    """Undo ``encode``."""
    each = max(1, rotations.CHUNK // block)
    for chunk in prange((scales.size + each - 1) // each):
        room, words = (
            carray(rotations.float_room(), 3 * rotations.LARGEST),
            carray(rotations.word_room(), rotations.LARGEST // 32),
        )
        for b in range(chunk * each, min(scales.size, (chunk + 1) * each)):
            start, stop = b * block, min(out.size, (b + 1) * block)
            size = rotations.block_size(stop - start, block)
            buffer, signs = room[:size], words[: size // 32]
            rotations.fill_signs(signs, start // 32, low, high)
            _expand(buffer, bits, table, planes[start // 64 * bits : (start + size) // 64 * bits])
            transform(buffer)
            factor = rotations.scaled_back(buffer, scales[b], table[table.size // 2] * np.float32(size))
            rotations.put(
                out[start:stop],
                buffer,
                room[block : block + size],
                signs,
                factor,
                rotations.ADD if add else rotations.STORE,
            )


# --- by address -------------------------------------------------------------------------------------------------------

_encode_serial, _decode_serial = encode.serial, decode.serial


@host.inline
def _groups(n, block):  # type: ignore[no-untyped-def]
    """Groups of 64 in the blocks of n elements."""
    rest = n % block
    return (n - rest + (rotations.block_size(rest, block) if rest else 0)) // 64


@host.inline
def _parts_at(payload, n, block, bits, first, whole):  # type: ignore[no-untyped-def]
    """The planes and the scales of n elements of a payload."""
    planes = payload + 8
    scales = planes + 8 * bits * _groups(whole, block) + 4 * (first // block)
    words = entries.words(planes + 8 * bits * (first // 64), bits * _groups(n, block))
    return words, entries.floats(scales, (n + block - 1) // block)


@host.inline
def _described(payload, n, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Block, bits and table, which are the first parameters, and the planes and scales of n elements of a payload."""
    p = entries.doubles(parameters, 3)
    block, bits = np.int64(p[0]), np.int64(p[1])
    planes, scales = _parts_at(payload, n, block, bits, first, whole)
    return block, bits, entries.floats(np.int64(p[2]), (1 << bits) - 1), planes, scales


@entries.Entry
def encode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Parameters: those of ``_described``, then unbiased."""
    block, bits, table, planes, scales = _described(payload, n, parameters, first, whole)
    entries.words(payload, 1)[0] = np.uint64(key)
    low, high = host.key_from(key, first // 32)
    values, kept, unbiased = (
        entries.floats(x, n),
        entries.floats_if(residual, n),
        entries.doubles(parameters, 4)[3] != 0,
    )
    _encode_serial(values, kept, planes, scales, block, bits, unbiased, table, low, high)
    return 0


@entries.Entry
def decode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    block, bits, table, planes, scales = _described(payload, n, parameters, first, whole)
    low, high = host.key_from(entries.integers(payload, 1)[0], first // 32)
    _decode_serial(entries.floats(x, n), planes, scales, block, bits, table, add != 0, low, high)
    return 0
