"""Payloads with coded positions, read bit by bit."""

from __future__ import annotations

import numpy as np


def read_positions(payload, n, k, low):
    """Elias and Fano's code, bit by bit, and what stands after it."""
    high_bytes, low_bytes = -(-(((n - 1) >> low) + k) // 64) * 8, -(-k * low // 32) * 4
    ones = np.flatnonzero(np.unpackbits(payload[:high_bytes], bitorder="little"))
    bits = np.unpackbits(payload[high_bytes : high_bytes + low_bytes], bitorder="little")
    lows = bits[: k * low].reshape(k, low) @ (1 << np.arange(low)) if low else np.zeros(k, np.int64)
    end = -(-(high_bytes + low_bytes) // 16) * 16
    assert not bits[k * low :].any() and not payload[high_bytes + low_bytes : end].any()
    return ((ones - np.arange(ones.size)) << low) + lows[: ones.size], payload[end:]
