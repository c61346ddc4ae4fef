"""Several codes of a block in a byte: four bytes at a time where the blocks allow it.

``cpu.blocks`` describes the format. The codes are int8, the first and the last block of an array begin and end with it.
"""

from __future__ import annotations

import numpy as np

from . import host


@host.inlined
def pack(codes, packed, block, per):  # type: ignore[no-untyped-def]
    """Put the codes of consecutive blocks into bytes: four bytes at a time where the blocks allow it."""
    whole = codes.size // block if block % (4 * per) == 0 else 0
    words, parts = _words(packed, whole * block // per), _words(codes, whole * block)
    if per == 2:
        _pack_4(parts, words, block // 8, whole)
    else:
        _pack_2(parts, words, block // 16, whole)
    at = whole * (block // per)
    for start in range(whole * block, codes.size, block):
        some = codes[start : min(codes.size, start + block)]
        _pack_any(some, packed[at : at + -(-some.size // per)], 8 // per)
        at += -(-block // per)


@host.inlined
def unpack(packed, codes, block, per):  # type: ignore[no-untyped-def]
    """Take the codes of consecutive blocks out of their bytes."""
    whole = codes.size // block if block % (4 * per) == 0 else 0
    words, parts = _words(packed, whole * block // per), _words(codes, whole * block)
    if per == 2:
        _unpack_4(words, parts, block // 8, whole)
    else:
        _unpack_2(words, parts, block // 16, whole)
    at = whole * (block // per)
    for start in range(whole * block, codes.size, block):
        some = codes[start : min(codes.size, start + block)]
        _unpack_any(packed[at : at + -(-some.size // per)], some, 8 // per)
        at += -(-block // per)


@host.inlined
def _words(array, size):  # type: ignore[no-untyped-def]
    """The first ``size`` bytes, a multiple of 4, as uint32."""
    return array[:size].view(np.uint32)


@host.inlined
def _pack_4(parts, words, w, blocks):  # type: ignore[no-untyped-def]
    mask = np.uint32(0x0F0F0F0F)
    for b in range(blocks):
        low, high, out = parts[2 * b * w :][:w], parts[(2 * b + 1) * w :][:w], words[b * w :][:w]
        for i in range(out.size):
            out[i] = np.uint32((low[i] & mask) | ((high[i] & mask) << np.uint32(4)))


@host.inlined
def _pack_2(parts, words, w, blocks):  # type: ignore[no-untyped-def]
    mask = np.uint32(0x03030303)
    for b in range(blocks):
        codes, out = parts[4 * b * w :], words[b * w :][:w]
        c0, c1, c2, c3 = codes[:w], codes[w:][:w], codes[2 * w :][:w], codes[3 * w :][:w]
        for i in range(out.size):
            first = np.uint32((c0[i] & mask) | ((c1[i] & mask) << np.uint32(2)))
            second = np.uint32((c2[i] & mask) | ((c3[i] & mask) << np.uint32(2)))
            out[i] = np.uint32(first | np.uint32(second << np.uint32(4)))


@host.inlined
def _unpack_4(words, parts, w, blocks):  # type: ignore[no-untyped-def]
    for b in range(blocks):
        low, high, word = parts[2 * b * w :][:w], parts[(2 * b + 1) * w :][:w], words[b * w :][:w]
        for i in range(word.size):
            low[i] = _signed_4(word[i])
            high[i] = _signed_4(np.uint32(word[i] >> np.uint32(4)))


@host.inlined
def _unpack_2(words, parts, w, blocks):  # type: ignore[no-untyped-def]
    for b in range(blocks):
        codes, word = parts[4 * b * w :], words[b * w :][:w]
        c0, c1, c2, c3 = codes[:w], codes[w:][:w], codes[2 * w :][:w], codes[3 * w :][:w]
        for i in range(word.size):
            c0[i] = _signed_2(word[i])
            c1[i] = _signed_2(np.uint32(word[i] >> np.uint32(2)))
            c2[i] = _signed_2(np.uint32(word[i] >> np.uint32(4)))
            c3[i] = _signed_2(np.uint32(word[i] >> np.uint32(6)))


@host.inlined
def _signed_4(word):  # type: ignore[no-untyped-def]
    """The lower halves of four bytes as signed bytes: with its sign bit flipped c is c + 8, and 8 + 120 = 128."""
    flipped = np.uint32(np.uint32(word & np.uint32(0x0F0F0F0F)) ^ np.uint32(0x08080808))
    return np.uint32(np.uint32(flipped + np.uint32(0x78787878)) ^ np.uint32(0x80808080))


@host.inlined
def _signed_2(word):  # type: ignore[no-untyped-def]
    """The lowest two bits of four bytes as signed bytes: with its sign bit flipped c is c + 2, and 2 + 126 = 128."""
    flipped = np.uint32(np.uint32(word & np.uint32(0x03030303)) ^ np.uint32(0x02020202))
    return np.uint32(np.uint32(flipped + np.uint32(0x7E7E7E7E)) ^ np.uint32(0x80808080))


@host.inlined
def _pack_any(codes, packed, bits):  # type: ignore[no-untyped-def]
    packed[:] = 0
    mask = (1 << bits) - 1
    for i in range(codes.size):
        packed[i % packed.size] |= np.int8((codes[i] & mask) << (i // packed.size * bits))


@host.inlined
def _unpack_any(packed, codes, bits):  # type: ignore[no-untyped-def]
    top = 32 - bits
    for i in range(codes.size):
        moved = np.int32(np.int32(packed[i % packed.size]) << (top - i // packed.size * bits))
        codes[i] = np.int8(moved >> top)
