"""The discrete cosine transform of blocks of neighbours (DCT-II, orthonormal), and its inverse, on the CPU.

A block of d elements, d a power of two, has the coefficients ``y[j] = Σᵢ c[i, j]·x[i]`` with
``c[i, j] = √(2/d)·cos(π(2i + 1)j/(2d))``, and 1/√d for j = 0. What is kept of y is y/p with ``p = 2**⌈log₂(d)/2⌉``: it
is never larger than the largest of x, so nothing leaves the range of values. A tensor is cut into blocks; the last one
is padded with zeros to the next power of two.

Both directions are products with a table, whose sums run in order of index with fused products. That order is part of
the format, and the CUDA kernels keep it. A table takes d fused products for an element, which vectorise; the inverse
takes only as many as there are coefficients.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numba import prange

from . import host

MOST = 256
"""Elements of a block, at most: the work grows with it, and a table of more leaves the cache of a core."""

_BLOCK = 8192
"""Elements that a thread takes at a time."""

STORE, ADD, SUBTRACT = 0, 1, 2
"""What becomes of the values of the inverse."""


def padded(n: int, block: int) -> int:
    """How many elements the blocks of n have together."""
    whole, rest = divmod(n, block)
    return whole * block + (1 << (rest - 1).bit_length() if rest else 0)


@lru_cache
def tables(size: int) -> tuple[np.ndarray, np.ndarray]:
    """For blocks of ``size``: c/p by rows of elements, and c·p/d by rows of coefficients, as flat float32 arrays."""
    bits = size.bit_length() - 1
    angles = [[(2 * i + 1) * j % (4 * size) for j in range(size)] for i in range(size)]
    cosines = np.array([math.cos(math.pi * a / (2 * size)) for a in range(4 * size)])[np.array(angles)]
    c = np.where(np.arange(size) == 0, math.sqrt(1 / size), math.sqrt(2 / size)) * cosines
    power = 2.0 ** (-(-bits // 2))
    forward, back = (c / power).astype(np.float32), (c.T * (power / size)).astype(np.float32)
    return forward.reshape(-1), back.reshape(-1)


def tables_of(n: int, block: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The tables of both directions: each for whole blocks and for the last one of n elements."""
    last = padded(n, block) % block or block
    whole, rest = tables(block), tables(last)
    return (whole[0], rest[0]), (whole[1], rest[1])


# --- forward ----------------------------------------------------------------------------------------------------------


@host.inlined
def _row(table, i, d):  # type: ignore[no-untyped-def]
    return table[i * d : (i + 1) * d]


@host.inlined
def _add_four(out, p, q, r, s, a, b, c, e):  # type: ignore[no-untyped-def]
    """Add four rows times their factors, one after the other."""
    for j in range(out.size):
        total = host.fma(q[j], b, host.fma(p[j], a, out[j]))
        out[j] = host.fma(s[j], e, host.fma(r[j], c, total))


@host.inlined
def _add_one(out, row, a):  # type: ignore[no-untyped-def]
    for j in range(out.size):
        out[j] = host.fma(row[j], a, out[j])


@host.inline
def _multiply(out, x, table):  # type: ignore[no-untyped-def]
    """``out[j] = Σᵢ table[i, j]·x[i]``; four terms at a time, in the same order."""
    d, fours = out.size, x.size // 4 * 4
    for j in range(d):
        out[j] = np.float32(0)
    for i in range(0, fours, 4):
        _add_four(out, _row(table, i, d), _row(table, i + 1, d), _row(table, i + 2, d), _row(table, i + 3, d),
                  x[i], x[i + 1], x[i + 2], x[i + 3])  # fmt: skip
    for i in range(fours, x.size):
        _add_one(out, _row(table, i, d), x[i])


@host.Kernel
def forward(x, residual, out, block, whole, rest):  # type: ignore[no-untyped-def]
    """The coefficients of ``x + residual``, which stays in the residual, if that is not empty."""
    blocks, each = (x.size + block - 1) // block, max(1, _BLOCK // block)
    for task in prange((blocks + each - 1) // each):
        room = np.empty(block, np.float32)
        for b in range(task * each, min(blocks, (task + 1) * each)):
            start, stop = b * block, min(x.size, (b + 1) * block)
            values = room[: stop - start]
            if residual.size:
                values = residual[start:stop]
                host.sanitised_sum(values, x[start:stop])
            else:
                host.sanitise_into(values, x[start:stop])
            table = whole if stop - start == block else rest
            _multiply(out[start : min(out.size, start + block)], values, table)


# --- back -------------------------------------------------------------------------------------------------------------


@host.inline
def _multiply_back(out, coefficients, table, places):  # type: ignore[no-untyped-def]
    """``out[i] = Σⱼ table[j, i]·coefficients[j]`` over those that are not zero; four at a time, in the same order."""
    d, count = out.size, 0
    for j in range(d):
        places[count] = j
        count += coefficients[j] != 0
    for i in range(d):
        out[i] = np.float32(0)
    for n in range(0, count // 4 * 4, 4):
        i, j, k, m = places[n], places[n + 1], places[n + 2], places[n + 3]
        _add_four(out, _row(table, i, d), _row(table, j, d), _row(table, k, d), _row(table, m, d),
                  coefficients[i], coefficients[j], coefficients[k], coefficients[m])  # fmt: skip
    for n in range(count // 4 * 4, count):
        _add_one(out, _row(table, places[n], d), coefficients[places[n]])


@host.inline
def _put(out, values, factor, how):  # type: ignore[no-untyped-def]
    if how == STORE:
        for i in range(out.size):
            out[i] = host.sanitise(values[i] * factor)
    elif how == ADD:
        for i in range(out.size):
            out[i] = out[i] + host.sanitise(values[i] * factor)
    else:
        for i in range(out.size):
            out[i] = out[i] - host.sanitise(values[i] * factor)


@host.Kernel
def back(out, coefficients, block, whole, rest, how):  # type: ignore[no-untyped-def]
    """Store the values of the coefficients, add them, or subtract them."""
    blocks, each = (out.size + block - 1) // block, max(1, _BLOCK // block)
    for task in prange((blocks + each - 1) // each):
        room, places = np.empty(block, np.float32), np.empty(block, np.int64)
        for b in range(task * each, min(blocks, (task + 1) * each)):
            start, stop = b * block, min(out.size, (b + 1) * block)
            some = coefficients[start : min(coefficients.size, start + block)]
            table, sums = whole if stop - start == block else rest, room[: some.size]
            _multiply_back(sums, some, table, places)
            _put(out[start:stop], sums, np.float32(sums.size), how)
