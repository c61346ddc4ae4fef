"""Kernels by address of ``topk_chunked``: energies, the choice of chunks, and their values.

Parameters are the numbers of FORM; of an encode, ranks and share before them and those of the choice behind them.
"""

from __future__ import annotations

import numpy as np

from . import entries, host, kept_entries, topk_chunked
from .linear_sparse import padded
from .sparse import zero

LENGTH, CHUNKS, K, HEADER, HALVES, FORM = range(6)
"""Places of the numbers, and how many they are: elements of a chunk, chunks, how many of these are sent, bytes of the
header, and whether values are float16."""

_summarise, _zero = topk_chunked.summarise.serial, zero.serial
_take, _take_halves = topk_chunked.take_chunks.serial, topk_chunked.take_chunks_as_halves.serial
_put, _put_halves = topk_chunked.put_chunks.serial, topk_chunked.put_chunks_of_halves.serial


@host.inline
def _payload_at(payload, form):  # type: ignore[no-untyped-def]
    """The header, the indices, where values begin, and how many they are."""
    header, k = np.int64(form[HEADER]), np.int64(form[K])
    head, indices = entries.floats(payload, header // 4), entries.words32(payload + 4, k)
    return head, indices, payload + header, k * np.int64(form[LENGTH])


@entries.Entry
def summarise_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    length = np.int64(entries.doubles(parameters, FORM)[LENGTH])
    summary = entries.floats(entries.integers(state, 1)[0] + 4 * (first // length), (n + length - 1) // length)
    _summarise(entries.floats(x, n), entries.floats_if(residual, n), summary, length)
    return 0


@entries.Entry
def encode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    ranks, numbers = np.int64(entries.doubles(parameters, 1)[0]), parameters + 16
    form = entries.doubles(numbers, FORM)
    summary = entries.floats(entries.integers(state, 1)[0], np.int64(form[CHUNKS]))
    head, indices, begin, size = _payload_at(payload, form)
    chosen, length = entries.floats(work, indices.size), np.int64(form[LENGTH])
    kept_entries.choose_at(summary, indices, chosen, work + padded(4 * chosen.size), numbers + 8 * FORM)
    scale = topk_chunked.scale_of(chosen, topk_chunked.doublings_of(ranks)) if form[HALVES] != 0 else np.float32(1)
    head[0] = scale
    head[1 + indices.size :] = np.float32(0)
    values, kept = entries.floats(x, n), entries.floats_if(residual, n)
    if form[HALVES] != 0:
        _take_halves(entries.codes16(begin, size), indices, values, kept, length, scale, np.float32(1) / scale)
    else:
        _take(entries.floats(begin, size), indices, values, kept, length)
    return 0


@entries.Entry
def decode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    form, out = entries.doubles(parameters, FORM), entries.floats(x, n)
    head, indices, begin, size = _payload_at(payload, form)
    if add == 0:
        _zero(out)
    if form[HALVES] != 0:
        _put_halves(entries.codes16(begin, size), indices, out, np.int64(form[LENGTH]), head[0], add != 0)
    else:
        _put(entries.floats(begin, size), indices, out, np.int64(form[LENGTH]), add != 0)
    return 0
