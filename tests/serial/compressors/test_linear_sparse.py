"""What is particular to ``randomk``, ``topk_chunked`` and ``count_sketch``; ``laws.py`` has the laws of all methods."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from espresso_mpi.compressors import Context, get
from espresso_mpi.compressors.count_sketch import _drawn
from espresso_mpi.compressors.kernels.cpu import count_sketch as sketching
from espresso_mpi.errors import ConfigError

SHARED = 0xFEDC_BA98_7654_3210
N = 1 << 20


def gaussian(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n, np.float32)


def encode(c, x, residual=None, **context):
    payload = np.empty(c.nbytes(x.size), np.uint8)
    c.encode(x, payload, residual, Context(**{"shared": SHARED, **context}))
    return payload


def decode(c, payload, n):
    out = np.full(n, np.nan, np.float32)
    c.decode(payload, out)
    return out


def vnmse(x, seen):
    wide = x.astype(np.float64)
    return float(np.sum((wide - seen) ** 2) / np.sum(wide**2))


def agree(c, xs, residuals=None):
    """The payloads of several ranks that encode with the sum of their summaries."""
    n, ranks = xs[0].size, len(xs)
    residuals = residuals or [np.zeros(n, np.float32) for _ in xs]
    summaries = np.empty((ranks, c.summary(n).size), np.float32)
    context = Context(shared=SHARED, ranks=ranks)
    for x, summary, residual in zip(xs, summaries, residuals):
        c.summarise(x, summary, residual, context)
    total = summaries.sum(axis=0)
    return [encode(c, x, residual, ranks=ranks, summary=total.copy()) for x, residual in zip(xs, residuals)]


def add_up(c, payloads, n):
    """The sum of the bodies behind the common header."""
    head, kind = c.header(n), np.dtype(c.element)
    assert len({p[:head].tobytes() for p in payloads}) == 1
    body = sum(p[head:].view(kind).astype(np.float32) for p in payloads).astype(kind)
    return np.concatenate([payloads[0][:head], body.view(np.uint8)])


# --- the draw, in whole numbers of Python -----------------------------------------------------------------------------


def mix(z):
    z &= 2**64 - 1
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def jitter(i, length, words):
    h = (i * 0x9E3779B9 + words) % 2**32
    h = (h ^ h >> 16 ^ words >> 32) * 0x7FEB352D % 2**32
    h = (h ^ h >> 15) * 0x846CA68B % 2**32
    return (h ^ h >> 16) * length >> 32


def draw(seed, n, k):
    """k of n positions: one from each of k stretches of a circle that begins at a random position."""
    start, words = mix(seed + 0x9E3779B97F4A7C15) * n >> 64, mix(seed + 0x3C6EF372FE94F82A)
    cuts = [i * n // k for i in range(k + 1)]
    return [(start + a + jitter(i, b - a, words)) % n for i, (a, b) in enumerate(pairwise(cuts))]


@pytest.mark.parametrize("n", [1, 2, 31, 1000, 8191, 8192, 40_000, 200_003])
@pytest.mark.parametrize("ratio", [1e-6, 0.01, 0.3, 0.9, 1.0])
def test_randomk_sends_what_is_drawn(n, ratio):
    c, x = get(f"randomk:ratio={ratio}"), gaussian(n)
    k = c.count(n)
    positions = draw(SHARED, n, k)
    payload = encode(c, x)
    assert payload.size == 16 + 4 * k
    assert payload[:16].view(np.uint64).tolist() == [SHARED, 0]
    assert payload[16:].view(np.float32).tolist() == x[positions].tolist()
    assert len(set(positions)) == k, "an element is drawn twice"


@pytest.mark.parametrize(("n", "k"), [(10, 3), (11, 7), (100, 1), (37, 36)])
def test_randomk_draws_every_element_equally_often(n, k):
    """Seeds in sequence, as a careless caller would count them."""
    c, trials = get(f"randomk:ratio={k / n}"), 4000
    counts, marks = np.zeros(n), np.arange(1, n + 1, dtype=np.float32)
    for seed in range(trials):
        sent = encode(c, marks, shared=seed)[16:].view(np.float32)
        counts[sent.astype(int) - 1] += 1
    share = k / n
    assert counts.sum() == trials * k
    assert np.abs(counts - trials * share).max() < 5 * np.sqrt(trials * share * (1 - share))


def test_randomk_errors():
    x = gaussian(N)
    for ratio in (0.01, 0.1):
        plain, scaled = get(f"randomk:ratio={ratio}"), get(f"randomk:ratio={ratio},scaled=true")
        seen = decode(plain, encode(plain, x), N)
        unbiased = decode(scaled, encode(scaled, x), N)
        assert vnmse(x, seen) == pytest.approx(1 - ratio, rel=0.01)
        assert vnmse(x, unbiased) == pytest.approx(1 / ratio - 1, rel=0.05)
        assert np.array_equal(unbiased, seen * np.float32(N / plain.count(N)))
        assert np.array_equal(seen[seen != 0], x[seen != 0])


def test_randomk_promises():
    plain, scaled = get("randomk:ratio=0.01"), get("randomk:ratio=0.01,scaled=true")
    assert plain.contraction(1000) == 0.01 and plain.variance(1000) is None
    assert scaled.contraction(1000) == 0 and scaled.variance(1000) == pytest.approx(99)
    assert get("randomk:ratio=0.8,scaled=true").contraction(1000) == pytest.approx(0.75)


def test_randomk_leaves_random_generators_alone():
    before = np.random.get_state()[1].tolist(), np.random.get_state()[2]
    encode(get("randomk"), gaussian(100_000))
    assert (np.random.get_state()[1].tolist(), np.random.get_state()[2]) == before


def test_randomk_sums_what_the_ranks_send():
    c, n = get("randomk:ratio=0.2"), 5000
    xs = [gaussian(n, rank) for rank in range(4)]
    total = add_up(c, [encode(c, x, key=rank) for rank, x in enumerate(xs)], n)
    expected = sum(decode(c, encode(c, x), n).astype(np.float64) for x in xs)
    assert np.allclose(decode(c, total, n), expected, rtol=1e-6, atol=1e-6)
    assert np.count_nonzero(expected) == 1000


# --- topk_chunked -----------------------------------------------------------------------------------------------------


def energies(x, length):
    padded = np.zeros(-(-x.size // length) * length)
    padded[: x.size] = x
    return np.square(padded.reshape(-1, length)).sum(axis=1)


def chosen(c, payload, n):
    return payload[4 : 4 + 4 * c.count(n)].view(np.uint32).astype(np.int64)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 100, 255, 257, 1000, 70_001])
@pytest.mark.parametrize("length", [16, 48, 256])
def test_topk_chunked_layout(n, length):
    c, x = get(f"topk_chunked:ratio=0.2,chunk={length}"), gaussian(n)
    length = min(length, -(-n // 16) * 16)
    chunks = -(-n // length)
    count = max(1, round(0.2 * chunks))
    best = np.sort(np.argsort(-energies(x, length), kind="stable")[:count])
    residual = np.zeros(n, np.float32)
    payload = encode(c, x, residual)
    head = -(-(4 + 4 * count) // 16) * 16
    assert payload.size == head + 4 * count * length and c.header(n) == head
    assert payload[:4].view(np.float32) == 1 and not payload[4 + 4 * count : head].any()
    assert chosen(c, payload, n).tolist() == best.tolist()
    padded = np.zeros(chunks * length, np.float32)
    padded[:n] = x
    assert np.array_equal(payload[head:].view(np.float32), padded.reshape(chunks, length)[best].ravel())
    padded.reshape(chunks, length)[best] = 0
    assert np.array_equal(residual, padded[:n])


def test_topk_chunked_takes_equal_chunks_by_index():
    c = get("topk_chunked:ratio=0.25,chunk=16")
    assert chosen(c, encode(c, np.full(160, -2, np.float32)), 160).tolist() == [0, 1]
    x = np.ones(160, np.float32)
    x[80:96] = 3
    assert chosen(c, encode(c, x), 160).tolist() == [0, 5]


@pytest.mark.parametrize(("length", "expected"), [(64, 0.9300), (128, 0.9362), (256, 0.9404)])
def test_topk_chunked_on_normal_values(length, expected):
    """Little better than chance, which would lose 0.95."""
    c, x = get(f"topk_chunked:ratio=0.05,chunk={length}"), gaussian(N)
    assert c.gaussian_error(N) == pytest.approx(expected, abs=2e-4)
    assert vnmse(x, decode(c, encode(c, x), N)) == pytest.approx(expected, rel=0.01)


def topk_error(x, bits):
    """What top-k loses at 64 bits for each element sent."""
    squares = np.sort(np.square(x.astype(np.float64)))[::-1]
    return 1 - squares[: round(bits / 64 * x.size)].sum() / squares.sum()


def test_topk_chunked_wins_by_locality():
    """Values whose scale changes from place to place: better than top-k at equal bits, much worse when permuted."""
    rng = np.random.default_rng(0)
    x = gaussian(N) * np.repeat(np.exp(1.5 * rng.standard_normal(N // 512)), 512).astype(np.float32)
    c = get("topk_chunked:ratio=0.05,chunk=256")
    bits = 8 * (c.nbytes(N) + 4 * c.summary(N).size) / N
    local = vnmse(x, decode(c, encode(c, x), N))
    permuted = rng.permutation(x)
    scattered = vnmse(permuted, decode(c, encode(c, permuted), N))
    assert local < topk_error(x, bits)
    assert scattered > local + 0.3


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e-16, 1e-15, 1.0, 1e15, 1e16, 1e25, 8e37])
@pytest.mark.parametrize("values", ["float32", "float16"])
def test_topk_chunked_finds_the_largest_chunk_at_any_scale(scale, values):
    c, x = get(f"topk_chunked:ratio=0.01,chunk=16,values={values}"), np.zeros(1600, np.float32)
    x[::16] = 0.7 * scale
    x[16 * 61 + 5] = x[16 * 61] = 0.9 * scale
    payload = encode(c, x)
    assert chosen(c, payload, 1600).tolist() == [61]
    assert decode(c, payload, 1600)[16 * 61] == pytest.approx(x[16 * 61], rel=1e-3)


def test_topk_chunked_summary_orders_all_energies():
    """Over the whole range, across the ends of where it is the energy itself."""
    c, scales = get("topk_chunked:ratio=1.0,chunk=16"), 2.0 ** np.arange(-148, 126, 0.25)
    x = np.repeat(scales, 16).astype(np.float32)
    summary = np.empty(scales.size, np.float32)
    c.summarise(x, summary)
    within = (scales > 1e-14) & (scales < 1e14)
    expected = energies(x[np.repeat(within, 16)], 16)
    assert np.allclose(summary[within], expected, rtol=1e-6, atol=0)
    normal = scales[1:] > 1e-38  # a denormal has too few bits for quarters of a power of two
    assert (np.diff(summary)[normal] > 0).all() and (np.diff(summary) >= 0).all()
    assert summary[0] > 0 and summary[-1] < 2.0**121


@pytest.mark.parametrize("values", ["float32", "float16"])
@pytest.mark.parametrize("scale", [1e-36, 1e-20, 1e-3, 1.0, 1e5, 1e20, 1e36])
def test_topk_chunked_sums_in_range(values, scale):
    """Eight ranks with nearly the same gradient: the sum stays finite, also in float16, and is right."""
    c, n = get(f"topk_chunked:ratio=0.2,chunk=32,values={values}"), 3000
    xs = [((gaussian(n) + gaussian(n, rank) * np.float32(0.1)) * np.float32(scale)) for rank in range(1, 9)]
    residuals = [np.zeros(n, np.float32) for _ in xs]
    payloads = agree(c, xs, residuals)
    for x, payload, residual in zip(xs, payloads, residuals):
        assert np.array_equal(decode(c, payload, n) + residual, x)
    got = decode(c, add_up(c, payloads, n), n)
    expected = np.sum(xs, axis=0, dtype=np.float64) * (got != 0)
    assert np.count_nonzero(got) >= 0.15 * n
    assert np.abs(got - expected).max() < (1e-6 if values == "float32" else 2e-3) * np.abs(expected).max()


def test_topk_chunked_contracts_over_all_ranks():
    """A chunk may be chosen that is small on a rank; over the ranks together the promise holds."""
    c, n = get("topk_chunked:ratio=0.1,chunk=16"), 1600
    xs = [gaussian(n, rank) * np.repeat(gaussian(n // 16, 9 + rank) ** 4, 16) for rank in range(3)]
    total = sum(energies(x, 16) for x in xs)
    payloads = agree(c, xs)
    assert chosen(c, payloads[0], n).tolist() == np.sort(np.argsort(-total, kind="stable")[:10]).tolist()
    lost = sum(np.sum((x - decode(c, p, n)) ** 2, dtype=np.float64) for x, p in zip(xs, payloads))
    assert lost <= (1 - c.contraction(n)) * total.sum()


def test_topk_chunked_halves_keep_their_promise_where_float16_ends():
    """Values far beyond 65504 and below 6e-8: the common scale makes room for them."""
    c = get("topk_chunked:ratio=1.0,chunk=16,values=float16")
    for scale in (1e-30, 1e30):
        x = gaussian(2000) * np.float32(scale)
        assert vnmse(x, decode(c, encode(c, x), 2000)) == pytest.approx(4.3e-8, rel=0.1)


# --- count_sketch -----------------------------------------------------------------------------------------------------


def buckets_of(seed, row, segments, buckets):
    """By how much a row rotates each segment, and its signs."""
    random = [mix(mix(seed) + (8 * s + row + 1) * 0x9E3779B97F4A7C15) for s in range(segments)]
    return np.array([r * buckets >> 64 for r in random]), np.array([-1 if r & 1 else 1 for r in random])


def places(seed, rows, n, buckets):
    """Bucket and sign of each element in each row."""
    segment, offset = np.divmod(np.arange(n), buckets)
    for row in range(rows):
        by, sign = buckets_of(seed, row, segment[-1] + 1, buckets)
        yield (offset + by[segment]) % buckets, sign[segment]


@pytest.mark.parametrize("n", [1, 20, 100, 1000, 70_001, 300_000])
@pytest.mark.parametrize("rows", [1, 3, 5, 7])
def test_count_sketch_is_a_count_sketch(n, rows):
    c, x = get(f"count_sketch:rows={rows},columns=0.03"), gaussian(n)
    buckets = min(n, max(16, round(0.03 * n)))
    table = np.empty(c.summary(n).size, np.float32)
    c.summarise(x, table, None, Context(shared=SHARED))
    expected = np.zeros((rows, buckets))
    for row, (bucket, sign) in zip(expected, places(SHARED, rows, n, buckets)):
        np.add.at(row, bucket, sign * x.astype(np.float64))
    assert np.allclose(table.reshape(rows, buckets) * 2.0**32, expected, rtol=1e-5, atol=1e-5)
    scores, estimates = np.empty(n, np.float32), []
    sketching.estimate(scores, table, rows, np.uint64(SHARED))
    for row, (bucket, sign) in zip(table.reshape(rows, buckets), places(SHARED, rows, n, buckets)):
        estimates.append(row[bucket] * sign)
    assert np.array_equal(scores, np.abs(np.median(estimates, axis=0)))


def test_count_sketch_estimates():
    """Each row without bias and with variance ‖x‖²/buckets; the median is rarely off by 3‖x‖/√buckets."""
    n, buckets, rows, errors, medians = 4000, 80, 5, [], []
    x = np.random.default_rng(0).standard_t(2, n)
    norm = np.sqrt(np.sum(x**2))
    for seed in range(60):
        estimates = np.empty((rows, n))
        for row, (bucket, sign) in enumerate(places(seed, rows, n, buckets)):
            estimates[row] = (np.bincount(bucket, sign * x, buckets)[bucket]) * sign
        errors.append((estimates - x) / norm)
        medians.append(np.abs(np.median(estimates, axis=0) - x) / norm)
    errors = np.array(errors).reshape(-1, n)
    assert np.mean(errors**2) == pytest.approx(1 / buckets, rel=0.1)
    assert np.abs(errors.mean(axis=0)).max() < 5 * np.sqrt(1 / buckets / len(errors))
    assert np.mean(np.array(medians) > 3 / np.sqrt(buckets)) < 1e-3


def test_count_sketch_finds_what_is_large_in_the_sum():
    """Elements that stand out on no rank, and others that do but cancel each other."""
    c, n, ranks = get("count_sketch:ratio=0.01"), 50_000, 8
    rng = np.random.default_rng(1)
    planted, cancelling = rng.permutation(n)[:80].reshape(2, 40)
    xs = [gaussian(n, rank) * np.float32(0.02) for rank in range(ranks)]
    for rank, x in enumerate(xs):
        x[planted] += 1
        x[cancelling] += 4 * (-1) ** rank
    payloads = agree(c, xs)
    indices = payloads[0][: 4 * c.count(n)].view(np.uint32)
    assert np.array_equal(indices, np.unique(indices)) and indices.size == 500
    assert set(planted) <= set(indices.tolist())
    assert len(set(cancelling) & set(indices.tolist())) <= 10
    got = decode(c, add_up(c, payloads, n), n)
    assert np.allclose(got[indices], np.sum(xs, axis=0)[indices], rtol=1e-5, atol=1e-5)
    assert np.count_nonzero(got) <= 500


def test_count_sketch_with_a_bucket_for_each_element_is_topk():
    c, x = get("count_sketch:ratio=0.05,rows=1,columns=1.0,explore=0.0"), gaussian(3000)
    payload = encode(c, x)
    best = np.sort(np.argsort(-np.abs(x), kind="stable")[:150])
    assert payload[:600].view(np.uint32).tolist() == best.tolist()
    assert np.array_equal(payload[c.header(3000) :].view(np.float32), x[best])


def test_count_sketch_explores():
    """Those drawn at random go, whatever the sketch says; their number is right on average if it is no whole one."""
    c, n = get("count_sketch:ratio=0.1,explore=0.5"), 1000
    for seed in (1, 2, 3):
        indices = encode(c, gaussian(n), shared=seed)[:400].view(np.uint32)
        assert set(draw(seed, n, 50)) <= set(indices.tolist())
    assert c.contraction(n) == pytest.approx(0.05)
    few = get("count_sketch:ratio=0.001,explore=0.3")
    drawn = [_drawn(few, 1000, Context(shared=seed)) for seed in range(2000)]
    assert set(drawn) == {0, 1} and np.mean(drawn) == pytest.approx(0.3, abs=0.05)
    assert get("count_sketch:explore=0.0").contraction(n) == 0


# --- all three --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "randomk:ratio=0",
        "randomk:ratio=1.5",
        "topk_chunked:ratio=-1",
        "topk_chunked:chunk=0",
        "topk_chunked:values=float64",
        "count_sketch:rows=0",
        "count_sketch:rows=8",
        "count_sketch:columns=0",
        "count_sketch:explore=1.1",
    ],
)
def test_refuses(spec):
    with pytest.raises(ConfigError, match="expected"):
        get(spec)


@pytest.mark.parametrize("spec", ["randomk:ratio=0.1", "topk_chunked:ratio=0.1", "count_sketch:ratio=0.1"])
def test_sends_values_exactly(spec):
    c, x, residual = get(spec), gaussian(70_000), gaussian(70_000, 1)
    v = x + residual
    seen = decode(c, encode(c, x, residual), x.size)
    assert (((seen == v) & (residual == 0)) | ((seen == 0) & (residual == v))).all()
    assert np.count_nonzero(seen) > 0.09 * x.size
