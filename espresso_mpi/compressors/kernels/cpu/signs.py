"""What the sign methods share: the block, and the CPU kernels that pack and unpack sign bits and take the vote.

Element i is bit i % 64 of word i / 64, a one where it is negative: 0, -0 and NaN count as positive. The bits of the
last word that stand for no element are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import prange

from espresso_mpi.compressors.limit import LIMIT
from espresso_mpi.compressors.schedule import ParameterSchedule

from . import entries, host

CHUNK = 1 << 14
"""Elements that a thread takes at a time in methods without blocks; a multiple of 64."""

LARGEST = np.finfo(np.float32).max

NONE = host.EMPTY
"""Instead of scales: every scale is 1, or the negative values have the scale of the others."""


def ends(value: Any) -> Sequence[Any]:
    return (value.start, value.end) if isinstance(value, ParameterSchedule) else (value,)


def word_bytes(n: int) -> int:
    """Bytes of the sign words of n elements."""
    return 8 * -(-n // 64)


@host.inline
def pack(values, words):  # type: ignore[no-untyped-def]
    """The sign words of one block."""
    whole = values.size // 64
    for w in range(whole):
        words[w] = host.negative_mask(values, 64 * w)
    if whole < words.size:
        last = np.uint64(0)
        for i in range(64 * whole, values.size):
            last |= np.uint64(values[i] < 0) << np.uint64(i - 64 * whole)
        words[whole] = last


@host.inline
def add(out, words, plus, minus):  # type: ignore[no-untyped-def]
    """Add ``minus`` to the elements of a block whose sign bit is set, ``plus`` to the others."""
    whole = out.size // 64
    for w in range(whole):
        host.add_chosen(out, 64 * w, words[w], plus, minus)
    for i in range(64 * whole, out.size):
        out[i] += minus if (words[whole] >> np.uint64(i - 64 * whole)) & np.uint64(1) else plus


@host.inline
def put(out, words, plus, minus):  # type: ignore[no-untyped-def]
    """As ``add``, but what ``out`` holds is overwritten."""
    whole = out.size // 64
    for w in range(whole):
        host.store_chosen(out, 64 * w, words[w], plus, minus)
    for i in range(64 * whole, out.size):
        out[i] = minus if (words[whole] >> np.uint64(i - 64 * whole)) & np.uint64(1) else plus


@host.inline
def sanitised(values, inplace):  # type: ignore[no-untyped-def]
    """One block with every value sanitised; a copy unless ``inplace``. Only for blocks that need it."""
    target = values if inplace else np.empty(values.size, np.float32)
    host.sanitise_into(target, values)
    return target


@host.inline
def sane(scale):  # type: ignore[no-untyped-def]
    """A scale as an encoder may have written it: 0 instead of one from a damaged payload."""
    return scale if abs(scale) <= np.float32(LIMIT) else np.float32(0.0)


@host.Kernel
def decode(out, words, scales, lows, block, adding):  # type: ignore[no-untyped-def]
    """Write or add the values: ``scales`` for positive elements; ``lows``, or the negated scales, for negative ones."""
    for b in prange((out.size + block - 1) // block):
        start, stop = b * block, min(out.size, (b + 1) * block)
        signs = words[start // 64 : (stop + 63) // 64]
        plus = sane(scales[b]) if scales.size else np.float32(1.0)
        minus = sane(lows[b]) if lows.size else -plus
        if adding:
            add(out[start:stop], signs, plus, minus)
        else:
            put(out[start:stop], signs, plus, minus)


_decode_serial = decode.serial


@host.inline
def parts_at(payload, n, block, first, whole, sides):  # type: ignore[no-untyped-def]
    """Of n elements of a payload: the sign words, the scales, and those of negative elements.

    ``sides``: magnitudes of a block: 0: there are none, 1: one, 2: negative elements have their own.
    """
    head, before, blocks = 8 * ((whole + 63) // 64), first // block, (n + block - 1) // block
    scales, lows = payload + head + 4 * before, payload + head + 4 * ((whole + block - 1) // block + before)
    words = entries.words(payload + first // 8, (n + 63) // 64)
    return words, entries.floats(scales, blocks if sides else 0), entries.floats(lows, blocks if sides == 2 else 0)


@entries.Entry
def decode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Parameters: block, and the magnitudes of a block."""
    p = entries.doubles(parameters, 2)
    block = np.int64(p[0])
    words, scales, lows = parts_at(payload, n, block, first, whole, np.int64(p[1]))
    _decode_serial(entries.floats(x, n), words, scales, lows, block, add != 0)
    return 0


@host.Kernel
def vote(out):  # type: ignore[no-untyped-def]
    for c in prange((out.size + CHUNK - 1) // CHUNK):
        block = out[c * CHUNK : min(out.size, (c + 1) * CHUNK)]
        for i in range(block.size):
            block[i] = np.float32(-1.0) if block[i] < 0 else np.float32(1.0)


_vote_serial = vote.serial


@entries.Entry
def vote_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Of the mean of signs."""
    _vote_serial(entries.floats(x, n))
    return 0
