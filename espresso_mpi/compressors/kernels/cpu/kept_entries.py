"""The payloads of ``compressors.kept`` by address: the choice of the largest elements, their values, the way back.

Parameters are ``FORM`` numbers about the payload, in an encode those about the choice, and where another method stores
the values, the addresses and the parameters of its two kernels, see ``KernelCall.calls``.
"""

from __future__ import annotations

import numpy as np

from . import chunk_choice, entries, host, positions, samples, sparse
from .magnitudes import BINS
from .sparse import Room

FORM = 6
"""Slots for elements; whether a plain payload says how many of them are used; how many numbers the first of the kernels
of the values has, 0 if these are stored as they are; low bits of a position, words of the bitmap, words of low bits."""

CHOICE = 10
"""How many numbers ``choice_of`` returns."""


def choice_of(n: int, quota: sparse.Quota, least_key: int, rank: int, decay: float = 0.0) -> tuple[float, ...]:
    """What ``encode_at`` is told of a choice among n elements; see ``sparse.choose``. ``decay``: of the momentum."""
    room = samples.stratum(n), samples.sample_size(n), sparse.most_found(n, quota.most)
    return *quota, least_key, rank, *room, decay


_choose, _choose_in_chunks, _zero, _scatter = (
    sparse.choose.serial, chunk_choice.choose.serial, sparse.zero.serial, sparse.scatter.serial
)  # fmt: skip
_write, _settle, _put = positions.write.serial, positions.settle.serial, positions.put.serial


@host.inline
def _plain_at(payload, counted, k):  # type: ignore[no-untyped-def]
    """Indices and values of a plain payload."""
    start = payload + 8 * counted
    return entries.words32(start, k), entries.floats(start + 4 * k, k)


@host.inline
def _coded_at(payload, form):  # type: ignore[no-untyped-def]
    """The positions of a payload, as bitmap and low bits, and where its values begin."""
    highs, lows = np.int64(form[4]), np.int64(form[5])
    words = (8 * highs + 4 * lows + 15) // 16 * 4 - 2 * highs
    begin = payload + 8 * highs
    return entries.words(payload, highs), entries.words32(begin, words), begin + 4 * words


@host.inline
def _values_call(way, x, k, payload, form, parameters):  # type: ignore[no-untyped-def]
    """Encode values by another method, ``way`` 0, or decode them, 1; returns how many it cut."""
    place = parameters + 8 * np.int64(form[2]) * way
    address = np.int64(entries.doubles(place, 1)[0])
    return entries.call(address, x, k, payload, 0, 0, 0, 0, place + 8, 0, k)


@host.inline
def _store(indices, sent, count, residual, payload, form, parameters):  # type: ignore[no-untyped-def]
    """The payload with coded positions of what was chosen; its rounding stays in the residual."""
    highs, lows, values = _coded_at(payload, form)
    _write(indices, count, highs, lows, np.int64(form[3]))
    cut = _values_call(0, sent.ctypes.data, sent.size, values, form, parameters)
    if residual.size:
        seen = np.empty(sent.size, np.float32)
        _values_call(1, seen.ctypes.data, sent.size, values, form, parameters)
        _settle(indices[:count], sent, seen, residual)
    return cut


@host.inline
def _places(payload, k, form):  # type: ignore[no-untyped-def]
    """Where the chosen elements go: into a plain payload, or memory of their own."""
    if form[2] == 0:
        return _plain_at(payload, np.int64(form[1]), k)
    return np.empty(k, np.uint32), np.empty(k, np.float32)


@entries.Entry
def encode_at(x, n, payload, residual, state, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Numbers about the choice: as ``choice_of`` has them."""
    form, p = entries.doubles(parameters, FORM), entries.doubles(parameters + 8 * FORM, CHOICE)
    values, kept = entries.floats(x, n), entries.floats(residual, n if residual else 0)
    momentum, blend = entries.floats(state, n if state else 0), (np.float32(p[9]), np.float32(1))
    k, chunks = np.int64(form[0]), sparse.chunks_of(n)
    room = Room(
        np.empty(np.int64(p[7]), np.float32), np.empty(np.int64(p[8]), np.float32), np.empty((n + 63) // 64, np.uint64),
        np.empty(chunks, np.int64), np.empty(chunks, np.int64), np.empty(BINS, np.int64),
    )  # fmt: skip
    quota = (np.int64(p[0]), np.int64(p[1]), np.int64(p[2]), np.int64(p[3]))
    indices, sent = _places(payload, k, form)
    key, rank, width = np.int64(p[4]), np.int64(p[5]), np.int64(p[6])
    count = _choose(values, kept, momentum, blend, quota, key, rank, width, room, indices, sent)
    if form[2] != 0:
        return _store(indices, sent, count, kept, payload, form, parameters + 8 * (FORM + CHOICE))
    if form[1] != 0:
        entries.words(payload, 1)[0] = np.uint64(count)
    return 0


@entries.Entry
def encode_in_chunks_at(x, n, payload, residual, state, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    """Numbers about the choice: the chunk, and k."""
    form, p = entries.doubles(parameters, FORM), entries.doubles(parameters + 8 * FORM, 2)
    values, kept = entries.floats(x, n), entries.floats(residual, n if residual else 0)
    indices, sent = _places(payload, np.int64(form[0]), form)
    _choose_in_chunks(values, kept, indices, sent, np.int64(p[0]), np.int64(p[1]))
    if form[2] != 0:
        return _store(indices, sent, sent.size, kept, payload, form, parameters + 8 * (FORM + 2))
    return 0


@entries.Entry
def decode_at(x, n, payload, residual, state, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    form, out = entries.doubles(parameters, FORM), entries.floats(x, n)
    k = np.int64(form[0])
    if form[2] != 0:
        highs, lows, values = _coded_at(payload, form)
        seen = np.empty(k, np.float32)
        _values_call(1, seen.ctypes.data, k, values, form, parameters + 8 * FORM)
        before = np.empty(positions.parts_of(highs.size), np.int64)
        _put(out, highs, lows, np.int64(form[3]), seen, before, add != 0)
        return 0
    indices, sent = _plain_at(payload, np.int64(form[1]), k)
    count = min(entries.words32(payload, 1)[0], k) if form[1] != 0 else k
    if add == 0:
        _zero(out)
    _scatter(indices[:count], sent, out, add != 0)
    return 0
