"""Orthonormal factors of the low-rank methods: Gram-Schmidt, twice. ``cpu.matrices`` fixes the order of the sums."""

from __future__ import annotations

import math

import numpy as np

from . import host
from .matrices import LANES

INDEPENDENT = 2.0**-20
"""A vector of which less than this is left when the others' directions are taken out depends on them: what is left
is rounding."""


@host.inline
def _dot(a, b, lanes):  # type: ignore[no-untyped-def]
    """The product of two vectors in float64, by lanes and tree."""
    lanes[:] = 0.0
    whole = a.size // LANES * LANES
    for start in range(0, whole, LANES):
        ab, bb = a[start : start + LANES], b[start : start + LANES]
        for i in range(LANES):
            lanes[i] += np.float64(ab[i]) * np.float64(bb[i])
    for i in range(a.size - whole):
        lanes[i] += np.float64(a[whole + i]) * np.float64(b[whole + i])
    width = LANES // 2
    while width:
        for i in range(width):
            lanes[i] += lanes[i + width]
        width //= 2
    return lanes[0]


@host.inline
def _normalised(vector, least, lanes):  # type: ignore[no-untyped-def]
    """Give the vector length 1; False if it is not longer than ``least``. In float64 no length over- or underflows."""
    norm = math.sqrt(_dot(vector, vector, lanes))
    if not norm > least:
        return False
    for i in range(vector.size):
        vector[i] = np.float32(np.float64(vector[i]) / norm)
    return True


@host.inline
def _without_others(target, at, length, products, lanes):  # type: ignore[no-untyped-def]
    """Take the directions of the vectors before number ``at`` out of it: classical Gram-Schmidt, one sweep."""
    vector = target[at * length : (at + 1) * length]
    for k in range(at):
        products[k] = np.float32(_dot(vector, target[k * length : (k + 1) * length], lanes))
    for i in range(length):
        rest = np.float64(vector[i])
        for k in range(at):
            rest -= np.float64(products[k]) * np.float64(target[k * length + i])
        vector[i] = np.float32(rest)


@host.inline
def _independent(target, at, length, products, lanes):  # type: ignore[no-untyped-def]
    """Make vector ``at`` orthonormal to those before it, by two sweeps; False if nothing of it is left."""
    vector = target[at * length : (at + 1) * length]
    if not _normalised(vector, 0.0, lanes):
        return False
    for _ in range(2):
        _without_others(target, at, length, products, lanes)
        if not _normalised(vector, INDEPENDENT, lanes):
            return False
    return True


@host.inline
def orthonormalise(source, target, ranks, length, fill, low, high, lanes):  # type: ignore[no-untyped-def]
    products = np.empty(ranks, np.float32)
    for j in range(ranks):
        for i in range(j * length, (j + 1) * length):
            target[i] = host.sanitise(source[i])
        good = _independent(target, j, length, products, lanes)
        if fill and not good:
            for i in range(j * length, (j + 1) * length):
                target[i] = np.float32(2.0) * host.uniform(host.counter(i, low), high) - np.float32(1.0)
            good = _independent(target, j, length, products, lanes)
        if not good:
            target[j * length : (j + 1) * length] = np.float32(0.0)
    target[ranks * length :] = np.float32(0.0)
