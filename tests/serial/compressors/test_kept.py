"""How the methods that send the largest magnitudes store them with ``values=…``: coded positions, rounded values."""

from __future__ import annotations

import numpy as np
import pytest
from kept_payloads import read_positions

from espresso_mpi.compressors import Context, get
from espresso_mpi.compressors.kernels.cpu import positions
from espresso_mpi.errors import ConfigError

SPECS = (
    *("topk:ratio=0.01", "topk_sampled:ratio=0.1", "dgc:ratio=0.05", "threshold:value=3.0,ratio=0.02"),
    "topk_in_chunks:chunk=4000,k=30",
)
VALUES = ("fp16", "int8", "int4", "int2", "onebit")


def gaussian(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def encode(spec, x, residual=None):
    compressor = get(spec)
    payload = np.full(compressor.nbytes(x.size), 0xA5, np.uint8)
    compressor.encode(x, payload, residual, Context())
    return payload


def plain(spec, payload, n):
    """The indices that go and all slots of values, of a payload with ``values=fp32``."""
    k, head = get(spec).count(n), 8 * type(get(spec)).counted
    indices, values = payload[head : head + 4 * k].view(np.uint32), payload[head + 4 * k :].view(np.float32)
    return indices[: payload[:4].view(np.uint32)[0]] if head else indices, values


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("n", [1, 70, 9000, 150_001])
def test_holds_what_the_plain_payload_holds(spec, values, n):
    """The same elements; their values as the method of that name writes them; the residual is what is missing."""
    x, before = gaussian(n), gaussian(n, 1)
    left, k = before.copy(), get(spec).count(n)
    indices, kept = plain(spec, encode(spec, x, before), n)
    payload = encode(f"{spec},values={values}", x, left)
    found, rest = read_positions(payload, n, k, positions.layout(n, k).low)
    assert np.array_equal(found, indices)
    coder, seen = get(values), np.empty(k, np.float32)
    expected = np.empty(coder.nbytes(k), np.uint8)
    coder.encode(kept, expected)
    coder.decode(expected, seen)
    assert np.array_equal(rest, expected)
    out, wanted = np.empty(n, np.float32), np.zeros(n, np.float32)
    get(f"{spec},values={values}").decode(payload, out)
    wanted[indices] = seen[: indices.size]
    assert np.array_equal(out, wanted)
    before[indices] = kept[: indices.size] - seen[: indices.size]
    assert np.array_equal(left, before)


@pytest.mark.parametrize("places", ["first", "last", "apart", "ends"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (100, 100), (5000, 33), (200_000, 4000), (1 << 20, 3)])
def test_positions_anywhere(n, k, places):
    """However they lie, they fit: the size depends on n and k alone."""
    ends = np.r_[np.arange(k // 2), np.arange(n - (k - k // 2), n)]
    indices = {
        "first": np.arange(k),
        "last": np.arange(n - k, n),
        "apart": np.arange(k) * n // k,
        "ends": ends,
    }[places].astype(np.uint32)
    where = positions.layout(n, k)
    payload = np.full(where.nbytes, 0xA5, np.uint8)
    positions.write(indices, k, *where.split(payload), where.low)
    assert np.array_equal(read_positions(payload, n, k, where.low)[0], indices)
    out, values = np.ones(n, np.float32), np.arange(1, k + 1, dtype=np.float32)
    positions.scatter(*where.split(payload), where.low, values, out, False, Context())
    assert np.array_equal(np.flatnonzero(out), indices) and np.array_equal(out[indices], values)


@pytest.mark.parametrize(
    ("ratio", "values", "most"), [(0.01, "int4", 12.9), (0.01, "onebit", 9.7), (0.1, "int8", 13.5)]
)
def test_bits_of_an_element_kept(ratio, values, most):
    n = 1 << 20
    method = get(f"topk:ratio={ratio},values={values}")
    bits = 8 * method.nbytes(n) / method.count(n)
    entropy = -(ratio * np.log2(ratio) + (1 - ratio) * np.log2(1 - ratio)) / ratio
    assert entropy <= bits - 8 * get(values).nbytes(method.count(n)) / method.count(n) <= entropy + 1
    assert bits <= most


def test_a_bitmap_of_ones_stays_inside():
    spec = "topk:ratio=0.1,values=int8"
    payload = encode(spec, gaussian(1000))
    where = positions.layout(1000, 100)
    payload[: where.nbytes] = 0xFF
    out = np.ones(1000, np.float32)
    get(spec).decode_add(payload, out)
    assert np.isfinite(out).all()
    get(spec).decode(payload, out)
    assert 0 < np.count_nonzero(out) <= 100


@pytest.mark.parametrize("name", ["topk", "topk_sampled", "dgc", "threshold", "topk_in_chunks", "dct_topk"])
def test_refuses_unknown_values(name):
    with pytest.raises(ConfigError, match="expected one of fp32, fp16, int8"):
        get(f"{name}:values=powersgd")
