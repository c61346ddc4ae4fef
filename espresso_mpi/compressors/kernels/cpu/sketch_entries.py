"""Kernels by address of ``count_sketch``.

Parameters are the numbers of FORM; of an encode, then those of the choice. The key is the one that all ranks share.
"""

from __future__ import annotations

import numpy as np

from . import count_sketch, entries, host, kept_entries, linear_sparse, sparse

K, DEPTH, BUCKETS, HEADER, EXPLORE, FORM = range(6)
"""Places of the numbers, and how many they are: elements that are sent, rows of the sketch, buckets of a row, bytes of
the header, and the share of elements that is drawn at random."""

_sum, _sketch, _estimate = linear_sparse.sanitised_sum.serial, count_sketch.sketch.serial, count_sketch.estimate.serial
_take, _decode = count_sketch.take.serial, sparse.decode.serial


def scratch_of(n: int) -> int:
    """Bytes of scratch memory that an encode needs for the scores of n elements."""
    return linear_sparse.padded(4 * n)


@host.inline
def _summary_at(state, form):  # type: ignore[no-untyped-def]
    return entries.floats(entries.integers(state, 1)[0], np.int64(form[DEPTH]) * np.int64(form[BUCKETS]))


@host.inline
def _payload_at(payload, form):  # type: ignore[no-untyped-def]
    """The indices, and the values."""
    k = np.int64(form[K])
    return entries.words32(payload, k), entries.floats(payload + np.int64(form[HEADER]), k)


@entries.Entry
def summarise_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    form, values = entries.doubles(parameters, FORM), entries.floats(x, n)
    if residual:
        kept = entries.floats(residual, n)
        _sum(kept, values)
        values = kept
    _sketch(values, _summary_at(state, form), np.int64(form[DEPTH]), np.uint64(key), 1)
    return 0


@entries.Entry
def encode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    form, scores, seed = entries.doubles(parameters, FORM), entries.floats(work, n), np.uint64(key)
    indices, values = _payload_at(payload, form)
    _estimate(scores, _summary_at(state, form), np.int64(form[DEPTH]), seed)
    count_sketch.mark(scores, count_sketch.draws_of(indices.size, form[EXPLORE], seed), seed)
    kept_entries.choose_at(scores, indices, values, work + linear_sparse.padded(4 * n), parameters + 8 * FORM)
    end = 4 * indices.size
    entries.bytes_at(payload + end, np.int64(form[HEADER]) - end)[:] = np.uint8(0)
    _take(values, indices, entries.floats(x, n), entries.floats_if(residual, n))
    return 0


@entries.Entry
def decode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    indices, values = _payload_at(payload, entries.doubles(parameters, FORM))
    _decode(entries.floats(x, n), indices, values, add != 0)
    return 0
