"""The payloads of ``compressors.kept`` by address: the choice of the largest elements, their values, the way back.

Parameters are the numbers about the payload, then, of an encode, those about the choice, and then, where another method
stores the values, the addresses and the parameters of its two kernels, see ``KernelCall.calls``.
"""

from __future__ import annotations

import math

import numpy as np

from . import chunk_choice, clipping, dct, entries, host, linear_sparse, positions, samples, sparse
from .magnitudes import BINS
from .sparse import Room

SLOTS, COUNTED, FIRST, LOW, HIGHS, LOWS, FORM = range(7)
"""Places of the numbers about the payload, and how many these are: slots for elements; whether a plain payload says how
many of them are used; how many numbers the first kernel of the values has, 0 if these are stored as they are; and the
layout of the positions: low bits of one, words of the bitmap, words of low bits."""

MOST, LEAST, FEW, SMALLEST, LEAST_KEY, RANK, WIDTH, SAMPLE, FOUND, DECAY, CHOICE = range(11)
"""Those about the choice by ``sparse.choose``: its quota, least key, rank and width, the lengths of its scratch memory,
and the factor of the momentum."""

CHUNK, K, CHOICE_IN_CHUNKS = range(3)
"""Those about the choice by ``chunk_choice.choose``."""

LENGTH, FORWARD, FORWARD_REST, BACK, BACK_REST, CHOICE_OF_COEFFICIENTS = range(CHOICE_IN_CHUNKS, CHOICE_IN_CHUNKS + 6)
"""What follows these where the values are cosine coefficients: how many these are, and the tables of ``dct.tables``."""


def choice_of(
    n: int, quota: sparse.Quota, least_key: int, sample: samples.Sample, decay: float = 0.0
) -> tuple[float, ...]:  # fmt: skip
    """What ``encode_at`` is told of a choice among n elements; see ``sparse.choose``. ``decay``: of the momentum."""
    return *quota, least_key, *sample, sparse.most_found(n, quota.most), decay


def scratch_to_choose(n: int, quota: sparse.Quota, sample: samples.Sample) -> int:
    """Bytes of scratch memory that ``encode_at`` needs for such a choice."""
    words = -(-n // 64) + 2 * sparse.chunks_of(n) + BINS + 2
    return 8 * words + 4 * sample.size + 8 * sparse.most_found(n, quota.most)


def choice_of_largest(n: int, k: int) -> tuple[tuple[float, ...], int]:
    """What ``choose_at`` is told of a choice of the k largest of n, and the bytes of scratch memory that it needs."""
    quota, sample = linear_sparse.quota_of(k), samples.searching(n, k)
    return choice_of(n, quota, 0, sample), scratch_to_choose(n, quota, sample)


def scratch_to_store(k: int) -> int:
    """Bytes more that encodes need where another method stores k values: for their positions, and twice for them."""
    return 12 * k


def scratch_to_decode(k: int, highs: int) -> int:
    """Bytes that ``decode_at`` needs where another method stores the values; ``highs``: words of the bitmap."""
    return 8 * positions.parts_of(highs) + 4 * k


_choose, _choose_in_chunks, _decode = sparse.choose.serial, chunk_choice.choose.serial, sparse.decode.serial
_write, _settle, _put = positions.write.serial, positions.settle.serial, positions.put.serial


@host.inline
def _plain_at(payload, counted, k):  # type: ignore[no-untyped-def]
    """Indices and values of a plain payload."""
    start = payload + 8 * counted
    return entries.words32(start, k), entries.floats(start + 4 * k, k)


@host.inline
def _coded_at(payload, form):  # type: ignore[no-untyped-def]
    """As ``positions.Layout.split``; and where the values begin."""
    highs, lows = np.int64(form[HIGHS]), np.int64(form[LOWS])
    begin, nbytes = 8 * highs, (8 * highs + 4 * lows + 15) // 16 * 16
    words = entries.words32(payload + begin, (nbytes - begin) // 4)
    return entries.words(payload, highs), words, payload + nbytes


@host.inline
def _values_call(way, x, k, payload, form, parameters):  # type: ignore[no-untyped-def]
    """Encode values by another method, ``way`` 0, or decode them, 1; returns how many it cut."""
    place = parameters + 8 * np.int64(form[FIRST]) * way
    address = np.int64(entries.doubles(place, 1)[0])
    return entries.call(address, x, k, payload, 0, 0, 0, 0, 0, place + 8, 0, k)


@host.inline
def _store(indices, sent, count, residual, payload, work, form, parameters):  # type: ignore[no-untyped-def]
    """The payload with coded positions of what was chosen; its rounding stays in the residual."""
    highs, lows, values = _coded_at(payload, form)
    k = sent.size
    _write(indices, count, highs, lows, np.int64(form[LOW]))
    cut = _values_call(0, work + 4 * k, k, values, form, parameters)
    if residual.size:
        _values_call(1, work + 8 * k, k, values, form, parameters)
        _settle(indices[:count], sent, entries.floats(work + 8 * k, k), residual)
    return cut


@host.inline
def _places(payload, k, work, form):  # type: ignore[no-untyped-def]
    """Where the chosen elements go: into a plain payload, or into scratch memory."""
    if form[FIRST] == 0:
        return _plain_at(payload, np.int64(form[COUNTED]), k)
    return entries.words32(work, k), entries.floats(work + 4 * k, k)


@host.inline
def _room_at(work, n, choice):  # type: ignore[no-untyped-def]
    """The scratch memory of a choice, and where it ends."""
    words, chunks = (n + 63) // 64, sparse.chunks_of(n)
    sample, found = np.int64(choice[SAMPLE]), np.int64(choice[FOUND])
    larger = work + 8 * words
    bins = larger + 16 * chunks
    counts = bins + 8 * BINS
    begin = counts + 16
    places = begin + 4 * (sample + found)
    end = places + 4 * found
    room = Room(
        entries.floats(begin, sample), entries.floats(begin + 4 * sample, found), entries.words32(places, found),
        entries.integers(counts, 2), entries.words(work, words), entries.integers(larger, chunks),
        entries.integers(larger + 8 * chunks, chunks), entries.integers(bins, BINS),
    )  # fmt: skip
    return room, end


@host.inline
def _choose_by(choice, arrays, factor, room, indices, sent):  # type: ignore[no-untyped-def]
    """``sparse.choose`` among values, a residual and a momentum, in which x has this factor; returns how many."""
    quota = (np.int64(choice[MOST]), np.int64(choice[LEAST]), np.int64(choice[FEW]), np.int64(choice[SMALLEST]))
    least_key, rank, width = np.int64(choice[LEAST_KEY]), np.int64(choice[RANK]), np.int64(choice[WIDTH])
    blend, (x, kept, momentum) = (np.float32(choice[DECAY]), factor), arrays
    return _choose(x, kept, momentum, blend, quota, least_key, rank, width, room, indices, sent)


@host.inline
def choose_at(scores, indices, values, work, parameters):  # type: ignore[no-untyped-def]
    """The largest scores, as ``linear_sparse.choose``; ``parameters``: where what this is told begins."""
    choice, empty = entries.doubles(parameters, CHOICE), scores[:0]
    room, _ = _room_at(work, scores.size, choice)
    _choose_by(choice, (scores, empty, empty), np.float32(1), room, indices, values)


@host.inline
def _encode_with(factor, x, n, payload, residual, state, work, parameters):  # type: ignore[no-untyped-def]
    """``encode_at``; ``factor``: of x."""
    form, choice = entries.doubles(parameters, FORM), entries.doubles(parameters + 8 * FORM, CHOICE)
    kept, momentum = entries.floats_if(residual, n), entries.floats_if(state, n)
    room, work = _room_at(work, n, choice)
    indices, sent = _places(payload, np.int64(form[SLOTS]), work, form)
    count = _choose_by(choice, (entries.floats(x, n), kept, momentum), factor, room, indices, sent)
    if form[FIRST] != 0:
        return _store(indices, sent, count, kept, payload, work, form, parameters + 8 * (FORM + CHOICE))
    if form[COUNTED] != 0:
        entries.words(payload, 1)[0] = np.uint64(count)
    return 0


@entries.Entry
def encode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """The state is the momentum, if there is one."""
    return _encode_with(np.float32(1), x, n, payload, residual, state, work, parameters)


@entries.Entry
def encode_clipped_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """After ranks and share: the largest norm on all ranks together, then as for ``encode_at``."""
    given = entries.doubles(parameters, 3)
    limit = given[2] * math.sqrt(given[1] / given[0])
    factor = clipping.factor_of(entries.floats(x, n), limit, entries.words(work, clipping.sums_of(n)))
    return _encode_with(np.float32(factor), x, n, payload, residual, state, work, parameters + 24)


@entries.Entry
def encode_in_chunks_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    form, choice = entries.doubles(parameters, FORM), entries.doubles(parameters + 8 * FORM, CHOICE_IN_CHUNKS)
    kept = entries.floats_if(residual, n)
    indices, sent = _places(payload, np.int64(form[SLOTS]), work, form)
    _choose_in_chunks(entries.floats(x, n), kept, indices, sent, np.int64(choice[CHUNK]), np.int64(choice[K]))
    if form[FIRST] != 0:
        return _store(indices, sent, sent.size, kept, payload, work, form, parameters + 8 * (FORM + CHOICE_IN_CHUNKS))
    return 0


@entries.Entry
def decode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    form, out = entries.doubles(parameters, FORM), entries.floats(x, n)
    k = np.int64(form[SLOTS])
    if form[FIRST] != 0:
        highs, lows, values = _coded_at(payload, form)
        parts = positions.parts_of(highs.size)
        seen = work + 8 * parts
        _values_call(1, seen, k, values, form, parameters + 8 * FORM)
        before = entries.integers(work, parts)
        _put(out, highs, lows, np.int64(form[LOW]), entries.floats(seen, k), before, add != 0)
        return 0
    indices, sent = _plain_at(payload, np.int64(form[COUNTED]), k)
    count = min(np.int64(entries.words32(payload, 1)[0]), k) if form[COUNTED] != 0 else k
    _decode(out, indices[:count], sent, add != 0)
    return 0


# --- cosine coefficients ----------------------------------------------------------------------------------------------

_forward, _back = dct.forward.serial, dct.back.serial


def scratch_for_coefficients(length: int, k: int, highs: int) -> int:
    """Bytes of scratch memory in which ``length`` coefficients are made and read, of which k are sent."""
    encoding, decoding = 8 * k, 8 * positions.parts_of(highs) + 4 * k  # one after the other
    return 4 * length + max(encoding, decoding)


@host.inline
def _table_at(choice, place, size):  # type: ignore[no-untyped-def]
    return entries.floats(np.int64(choice[place]), size * size)


@host.inline
def _rest_of(n, block, length):  # type: ignore[no-untyped-def]
    """The size of the last block."""
    return length - (n - 1) // block * block


@host.inline
def _back_at(out, payload, work, form, choice, parameters, how):  # type: ignore[no-untyped-def]
    """Add what a payload holds, store it, or subtract it; ``parameters``: of the kernels of the values."""
    k, length, block = np.int64(form[SLOTS]), np.int64(choice[LENGTH]), np.int64(choice[CHUNK])
    highs, lows, values = _coded_at(payload, form)
    before = entries.integers(work, positions.parts_of(highs.size))
    coefficients = entries.floats(work + 8 * before.size, length)
    if form[FIRST] != 0:
        seen = work + 8 * before.size + 4 * length
        _values_call(1, seen, k, values, form, parameters)
        values = seen
    _put(coefficients, highs, lows, np.int64(form[LOW]), entries.floats(values, k), before, False)
    whole, rest = _table_at(choice, BACK, block), _table_at(choice, BACK_REST, _rest_of(out.size, block, length))
    _back(out, coefficients, block, whole, rest, how)


@entries.Entry
def encode_coefficients_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """The numbers of a choice in chunks, then those about the coefficients."""
    form, choice = entries.doubles(parameters, FORM), entries.doubles(parameters + 8 * FORM, CHOICE_OF_COEFFICIENTS)
    kept, k, length = entries.floats_if(residual, n), np.int64(form[SLOTS]), np.int64(choice[LENGTH])
    (highs, lows, values), block = _coded_at(payload, form), np.int64(choice[CHUNK])
    coefficients, indices = entries.floats(work, length), entries.words32(work + 4 * length, k)
    after, cut = parameters + 8 * (FORM + CHOICE_OF_COEFFICIENTS), np.int64(0)
    at = values if form[FIRST] == 0 else work + 4 * (length + k)
    table, rest = _table_at(choice, FORWARD, block), _table_at(choice, FORWARD_REST, _rest_of(n, block, length))
    _forward(entries.floats(x, n), kept, coefficients, block, table, rest)
    _choose_in_chunks(coefficients, coefficients[:0], indices, entries.floats(at, k), block, np.int64(choice[K]))
    _write(indices, k, highs, lows, np.int64(form[LOW]))
    if form[FIRST] != 0:
        cut = _values_call(0, at, k, values, form, after)
    if kept.size:
        _back_at(kept, payload, work, form, choice, after, dct.SUBTRACT)
    return cut


@entries.Entry
def decode_coefficients_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    form, choice = entries.doubles(parameters, FORM), entries.doubles(parameters + 8 * FORM, CHOICE_OF_COEFFICIENTS)
    after = parameters + 8 * (FORM + CHOICE_OF_COEFFICIENTS)
    _back_at(entries.floats(x, n), payload, work, form, choice, after, dct.ADD if add != 0 else dct.STORE)
    return 0
