"""``topk_in_chunks`` and ``dct_topk`` against numpy in float64: which elements go, and what they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from kept_payloads import read_positions
from law_tools import gaussian, sanitised

from espresso_mpi.compressors import Context, get
from espresso_mpi.compressors.kernels.cpu import dct, positions
from espresso_mpi.errors import ConfigError


def encoded(spec, x, residual=None):
    method = get(spec)
    payload = np.full(method.nbytes(x.size), 0xA5, np.uint8)
    method.encode(x, payload, residual, Context())
    return payload


def largest(values, k):
    """Where the k largest magnitudes are, the first of equal ones first; in order."""
    return np.sort(np.argsort(-np.abs(values), kind="stable")[:k])


@pytest.mark.parametrize("n", [1, 6, 50, 99, 50_000, 130_007])
@pytest.mark.parametrize("spec", ["topk_in_chunks:chunk=50,k=7", "topk_in_chunks", "topk_in_chunks:chunk=3,k=9"])
def test_sends_the_largest_of_each_chunk_and_the_first_of_equal_ones(spec, n):
    method, x = get(spec), np.round(gaussian(n), 1)  # with many equal magnitudes
    residual = np.round(gaussian(n, 1), 1)
    v = sanitised(x, residual)
    chunks = [(start, v[start : start + method.chunk]) for start in range(0, n, method.chunk)]
    expected = np.concatenate([start + largest(chunk, method.k) for start, chunk in chunks])
    payload = encoded(spec, x, residual)
    indices, values = np.split(payload.view(np.uint32), 2)
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values.view(np.float32), v[expected])
    v[expected] = 0
    np.testing.assert_array_equal(residual, v)


def matrix(size):
    """The orthonormal DCT-II by its definition: row j is the cosine of frequency j."""
    i, j = np.arange(size), np.arange(size)[:, None]
    cosines = np.cos(np.pi * (2 * i + 1) * j / (2 * size)) * np.sqrt(2 / size)
    cosines[0] = np.sqrt(1 / size)
    return cosines


def blocks_of(n, chunk):
    """(start, elements, size with padding) of each block."""
    for start in range(0, n, chunk):
        length = min(chunk, n - start)
        yield start, length, chunk if length == chunk else 1 << (length - 1).bit_length()


@pytest.mark.parametrize("n", [1, 7, 64, 130, 1301])
@pytest.mark.parametrize("values", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("chunk, k", [(64, 8), (128, 1), (256, 40), (1, 1)])
def test_sends_the_largest_coefficients(chunk, k, values, n):
    """Those of the transform in float64, but for coefficients that rounding cannot tell apart."""
    spec, x, residual = f"dct_topk:chunk={chunk},k={k},values={values}", gaussian(n), gaussian(n, 1)
    method, v = get(spec), sanitised(x, residual).astype(np.float64)
    payload = encoded(spec, x, residual)
    count, padded = method.count(n), sum(size for _, _, size in blocks_of(n, chunk))
    where = positions.layout(padded, count)
    found, rest = read_positions(payload, padded, count, where.low)
    seen = np.empty(count, np.float32)
    if values == "fp32":
        seen[...] = rest.view(np.float32)
    else:
        get(values).decode(rest, seen)
    out, expected, at = np.empty(n, np.float32), np.empty(n), 0
    for start, length, size in blocks_of(n, chunk):
        y = matrix(size)[:, :length] @ v[start : start + length]
        mine = found[at : at + min(k, size)] - start
        weakest, power = np.sort(np.abs(y))[-mine.size], 2.0 ** np.ceil(np.log2(size) / 2)
        assert (np.diff(mine) > 0).all() and np.abs(y[mine]).min() >= weakest * (1 - 1e-5)
        if values == "fp32":
            np.testing.assert_allclose(seen[at : at + mine.size] * power, y[mine], atol=1e-5)
        kept = np.zeros(size)
        kept[mine] = seen[at : at + mine.size] * power
        expected[start : start + length] = (matrix(size).T @ kept)[:length]
        at += mine.size
    assert at == count
    method.decode(payload, out)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(residual, v - expected, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 32, 256])
def test_tables_are_the_transform_and_its_inverse(size):
    forward, back = (table.reshape(size, size).astype(np.float64) for table in dct.tables(size))
    power = 2.0 ** np.ceil(np.log2(size) / 2)
    np.testing.assert_allclose(forward * power, matrix(size).T, atol=1e-7)
    np.testing.assert_allclose(back * size / power, matrix(size), atol=1e-7)


def test_a_slow_wave_is_in_few_coefficients():
    wave = np.sin(np.arange(6400) / 20).astype(np.float32)
    lost = {}
    for name in ("dct_topk", "topk_in_chunks"):
        method, out = get(f"{name}:chunk=64,k=4"), np.empty_like(wave)
        method.decode(encoded(str(method), wave), out)
        lost[name] = np.sum((wave - out) ** 2) / np.sum(wave**2)
    assert lost["dct_topk"] < 0.01 < 0.5 < lost["topk_in_chunks"]


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        ("topk_in_chunks:chunk=4096,k=64,values=int2", 8 + 2 + 32 / 64),
        ("topk_in_chunks:chunk=256,k=16,values=onebit", 6 + 1 + 32 / 2048),
        ("dct_topk:chunk=64,k=8", 5 + 32),
        ("dct_topk:chunk=64,k=8,values=int4", 5 + 4 + 32 / 128),
    ],
)
def test_bits_of_an_element_that_goes(spec, bits):
    n, method = 1 << 20, get(spec)
    assert 8 * method.nbytes(n) == pytest.approx(bits * method.count(n), rel=1e-4)
    assert method.count(n) == n // method.chunk * method.k


@pytest.mark.parametrize("power", [-126, 126])
def test_the_ends_of_the_range_of_values(power):
    """Blocks of the largest value, whose coefficients are larger, and of denormal ones."""
    x = np.full(130, 2.0**power, np.float32) * np.where(np.arange(130) < 64, 1, np.sign(gaussian(130)))
    x, out = x.astype(np.float32), np.empty(130, np.float32)
    get("dct_topk:k=64").decode(encoded("dct_topk:k=64", x), out)
    np.testing.assert_allclose(out, x, rtol=1e-5, atol=2.0**-133)


@pytest.mark.parametrize("arguments", ["chunk=48", "chunk=512", "k=0", "chunk=64~48@10"])
def test_refuses_what_it_cannot_do(arguments):
    with pytest.raises(ConfigError, match=r"dct_topk: (chunk|k)="):
        get(f"dct_topk:{arguments}")
