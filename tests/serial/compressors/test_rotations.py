"""``drive``, ``eden``, ``thc`` against oracles in float64: the transform, the payloads bit by bit, what is promised."""

from __future__ import annotations

import math

import numpy as np
import pytest

from espresso_mpi.compressors import LIMIT, Context, ParameterSchedule, get
from espresso_mpi.compressors.eden import centroids, distortion
from espresso_mpi.compressors.kernels.cpu import hadamard as cpu_hadamard
from espresso_mpi.compressors.thc import best_clip, quantisation_error
from espresso_mpi.errors import ConfigError

KEY, SHARED = 0x0123_4567_89AB_CDEF, 0xFEDC_BA98_7654_3210


def gaussian(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n, np.float32)


def encode(spec, x, residual=None, key=KEY):
    payload = np.empty(get(spec).nbytes(x.size), np.uint8)
    get(spec).encode(x, payload, residual, Context(key, SHARED))
    return payload


def decode(spec, payload, n):
    out = np.full(n, np.nan, np.float32)
    get(spec).decode(payload, out)
    return out


def compress(spec, x, key=KEY):
    return decode(spec, encode(spec, x, key=key), x.size)


def error(x, seen):
    return float(np.sum((x.astype(np.float64) - seen) ** 2) / np.sum(x.astype(np.float64) ** 2))


# --- the rotation, written anew ---------------------------------------------------------------------------------------


def hadamard(d):
    """The orthonormal Walsh-Hadamard matrix in Sylvester's order."""
    matrix = np.ones((1, 1))
    while matrix.shape[0] < d:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix / math.sqrt(d)


def signs(n, key):
    """The diagonal of D: bit i % 32 of the hash of word i // 32."""
    mask = 0xFFFFFFFF
    bits = []
    for word in range(-(-n // 32)):
        at = (word * 0x9E3779B9 + (key & mask)) & mask
        h = (at ^ (at >> 16) ^ (key >> 32)) * 0x7FEB352D & mask
        h = (h ^ (h >> 15)) * 0x846CA68B & mask
        h ^= h >> 16
        bits += [-1.0 if h >> k & 1 else 1.0 for k in range(32)]
    return np.array(bits[:n])


def sizes(n, block):
    """The blocks of n elements: all of the full size but the last, which is the next power of two."""
    rest = n % block
    return [block] * (n // block) + ([max(64, 2 ** math.ceil(math.log2(rest)))] if rest else [])


def rotated(x, block, key):
    """The blocks of x, rotated."""
    parts, total = [], sum(sizes(x.size, block))
    values = np.zeros(total)
    values[: x.size] = x
    values *= signs(total, key)
    for start, d in zip(np.cumsum([0, *sizes(x.size, block)]), sizes(x.size, block)):
        parts.append(hadamard(d) @ values[start : start + d])
    return parts


def turned_back(parts, n, key):
    values = np.concatenate([hadamard(part.size) @ part for part in parts])
    return (values * signs(values.size, key))[:n]


@pytest.mark.parametrize("d", [64, 128, 256, 512, 1024, 2048, 4096])
def test_the_transform_is_hadamards(d):
    x = gaussian(d)
    y = x.copy()
    cpu_hadamard.transform(y)
    assert np.allclose(y / math.sqrt(d), hadamard(d) @ x, rtol=0, atol=1e-5)
    cpu_hadamard.transform(y)
    assert np.allclose(y / d, x, rtol=0, atol=1e-5), "twice is the identity, but for the factor"


@pytest.mark.parametrize("d", [64, 1024, 4096])
def test_the_transform_is_orthonormal(d):
    columns = np.empty((d, d), np.float32)
    for k, unit in enumerate(np.eye(d, dtype=np.float32)):
        cpu_hadamard.transform(unit)
        columns[k] = unit
    assert set(np.unique(columns)) == {-1, 1}
    assert np.array_equal(columns @ columns.T, d * np.eye(d))


def test_signs_are_balanced_and_independent_between_blocks_and_keys():
    n = 1 << 16
    one, other = signs(n, KEY), signs(n, KEY ^ (1 << 40))
    for bits in (one, other, one * other, one[1:] * one[:-1], one[1024:] * one[:-1024]):
        assert abs(bits.sum()) < 5 * math.sqrt(n)


# --- drive and eden ---------------------------------------------------------------------------------------------------


def nearest_level(y, bits):
    levels = np.array([*(-c for c in reversed(centroids(bits))), *centroids(bits)])
    return levels[np.argmin(np.abs(y[:, None] - levels), axis=1)]


def oracle(x, c, bits, key):
    """What the receiver of ``drive`` or ``eden`` sees."""
    parts = []
    for y in rotated(x, c.block, key):
        level = nearest_level(y / np.sqrt(np.mean(y * y)), bits)
        scale = y @ y / (level @ y) if c.scale == "unbiased" else level @ y / (level @ level)
        parts.append(scale * level)
    return turned_back(parts, x.size, key)


SPECS = [
    ("drive", 1),
    ("drive:block=64", 1),
    ("drive:scale=unbiased,block=4096", 1),
    ("eden:bits=1", 1),
    ("eden", 2),
    ("eden:scale=unbiased,block=128", 2),
    ("eden:bits=3", 3),
    ("eden:bits=4,block=512,scale=unbiased", 4),
]


@pytest.mark.parametrize("n", [1, 7, 64, 65, 1000, 5000])
@pytest.mark.parametrize("spec, bits", SPECS)
def test_agrees_with_the_oracle(spec, bits, n):
    for x in (gaussian(n), gaussian(n) ** 3, np.full(n, 3e20, np.float32) + gaussian(n) * np.float32(1e20)):
        expected, seen = oracle(x, get(spec), bits, KEY), compress(spec, x)
        assert np.allclose(seen, expected, rtol=0, atol=2e-5 * np.abs(x).max())


def test_layout_of_drive():
    """Seed, words of signs, scales: from the payload alone the values can be read."""
    n, block = 1500, 1024
    payload = encode("drive", gaussian(n))
    assert payload[:8].view(np.uint64)[0] == KEY
    negative = np.unpackbits(payload[8 : 8 + 1536 // 8], bitorder="little").astype(bool)
    scales = payload[8 + 1536 // 8 :].view(np.float32)
    assert scales.size == 2
    parts = np.split(np.where(negative, -1.0, 1.0), [block])
    # The scale is meant for the transform without its factor.
    values = turned_back([s * math.sqrt(p.size) * p for s, p in zip(scales, parts)], n, KEY)
    assert np.allclose(values, decode("drive", payload, n), atol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_layout_of_eden(bits):
    """A group of 64 has a word of signs, then one for each bit of the level's number, the highest first."""
    n = 128
    payload = encode(f"eden:bits={bits},block=64", gaussian(n))
    planes = np.unpackbits(payload[8 : 8 + n * bits // 8], bitorder="little").reshape(2, bits, 64)
    scales = payload[8 + n * bits // 8 :].view(np.float32)
    weights = 2 ** np.arange(bits - 2, -1, -1)
    numbers = np.tensordot(weights, planes[:, 1:], (0, 1))
    levels = np.where(planes[:, 0], -1, 1) * np.array(centroids(bits))[numbers]
    values = turned_back([8 * s * part for s, part in zip(scales, levels)], n, KEY)
    assert np.allclose(values, decode(f"eden:bits={bits},block=64", payload, n), atol=1e-5)


@pytest.mark.parametrize("block", [64, 1024])
@pytest.mark.parametrize("scale", ["mse", "unbiased"])
def test_drive_is_eden_with_one_bit(scale, block):
    x = gaussian(3000)
    parameters = f"scale={scale},block={block}"
    assert np.array_equal(encode(f"drive:{parameters}", x), encode(f"eden:bits=1,{parameters}", x))


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("drive", 0.3634),
        ("drive:scale=unbiased", 0.5708),
        ("eden:bits=1,scale=unbiased", 0.5705),
        ("eden:bits=2,scale=unbiased", 0.1334),
        ("eden:bits=3,scale=unbiased", 0.0358),
        ("eden:bits=4,scale=unbiased", 0.00961),
        ("eden:bits=2", 0.1175),
        ("eden:bits=4", 0.0095),
    ],
)
@pytest.mark.parametrize("kind", ["gaussian", "laplace", "uniform"])
def test_error_is_the_published_one_whatever_the_distribution(spec, expected, kind):
    n = 1 << 20
    rng = np.random.default_rng(0)
    x = {"gaussian": rng.standard_normal, "laplace": lambda n: rng.laplace(size=n), "uniform": rng.random}[kind](n)
    x = x.astype(np.float32)
    assert error(x, compress(spec, x)) == pytest.approx(expected, rel=0.015)
    assert get(spec).gaussian_error(n) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_centroids_are_means_of_their_cells(bits):
    y = np.linspace(-12, 12, 2_000_001)
    mass = np.exp(-y * y / 2) / np.sum(np.exp(-y * y / 2))
    cell = nearest_level(y[::100], bits)  # coarse: only the levels are needed
    assert set(np.round(np.abs(cell), 12)) == set(np.round(centroids(bits), 12))
    edges = [0.0, *((a + b) / 2 for a, b in zip(centroids(bits), centroids(bits)[1:])), np.inf]
    lost = 0.0
    for low, high, centre in zip(edges, edges[1:], centroids(bits)):
        inside = (np.abs(y) >= low) & (np.abs(y) < high)
        assert np.sum(mass[inside] * np.abs(y[inside])) / np.sum(mass[inside]) == pytest.approx(centre, abs=1e-4)
        lost += np.sum(mass[inside] * (np.abs(y[inside]) - centre) ** 2)
    assert distortion(bits) == pytest.approx(lost, abs=1e-5)


def test_the_bound_of_one_bit_is_attained_by_two_equal_elements():
    x = np.zeros(1024, np.float32)
    x[[3, 700]] = 1, -1
    for key in range(20):
        assert error(x, compress("drive", x, key)) == pytest.approx(0.5, rel=1e-6)
        assert error(x, compress("drive:scale=unbiased", x, key)) == pytest.approx(1.0, rel=1e-6)
    assert get("drive").contraction(1024) == 0.5
    assert get("drive:scale=unbiased").contraction(1024) == 0.0


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_contraction_holds_for_sums_of_few_signs(bits):
    """Where rotated elements are farthest from normal: one to twelve equal elements, over many rotations."""
    c = get(f"eden:bits={bits},block=256")
    for ones in range(1, 13):
        x = np.zeros(256, np.float32)
        x[:: 256 // ones] = 1
        worst = np.mean([error(x, compress(str(c), x, key * 0x1_0001_0001)) for key in range(64)])
        assert worst <= (1 - c.contraction(256)) * (1 + 1e-5)


def test_unbiased_scale_keeps_the_component_along_the_input():
    x = gaussian(1024) ** 3
    for spec in ("drive:scale=unbiased", "eden:scale=unbiased", "eden:bits=4,scale=unbiased"):
        seen = compress(spec, x).astype(np.float64)
        assert seen @ x == pytest.approx(x.astype(np.float64) @ x, rel=1e-5)


@pytest.mark.parametrize("spec", ["drive:scale=unbiased", "eden:scale=unbiased", "eden:bits=3,scale=unbiased"])
def test_unbiased_scale_has_the_mean_over_the_rotations(spec):
    x, keys = gaussian(1024), 400
    mean = np.mean([compress(spec, x, key * 0x9E37_79B9_7F4A_7C15 % 2**64) for key in range(keys)], axis=0)
    expected = get(spec).gaussian_error(x.size) / keys
    assert error(x, mean) == pytest.approx(expected, rel=0.2)


# --- thc --------------------------------------------------------------------------------------------------------------


def thc_payloads(spec, xs, residuals=None):
    """Payloads of several ranks that have agreed on their norms, and those norms."""
    c, n = get(spec), xs[0].size
    residuals = residuals or [None] * len(xs)
    own = [np.empty(c.summary(n).size, np.float32) for _ in xs]
    for x, norms, residual in zip(xs, own, residuals):
        c.summarise(x, norms, residual)
    agreed, payloads = np.max(own, axis=0), []
    for rank, (x, residual) in enumerate(zip(xs, residuals)):
        payloads.append(np.empty(c.nbytes(n), np.uint8))
        c.encode(x, payloads[-1], residual, Context(KEY + rank, SHARED, summary=agreed))
    return payloads, agreed


def body(spec, payload, n):
    return payload[get(spec).header(n) :].view(get(spec).element)


def summed(spec, payloads, n):
    """The payload of the sum, and how many of its elements were saturated."""
    exact = np.sum([body(spec, p, n) for p in payloads], axis=0, dtype=np.int64)
    total, limits = payloads[0].copy(), np.iinfo(get(spec).element)
    body(spec, total, n)[...] = np.clip(exact, limits.min, limits.max)
    return total, int(np.sum(body(spec, total, n) != exact))


@pytest.mark.parametrize("n", [1, 65, 1500])
@pytest.mark.parametrize("spec", ["thc", "thc:block=64,levels=31,clip=3.0", "thc:element=int16,levels=1000"])
def test_thc_agrees_with_the_oracle(spec, n):
    c, x = get(spec), gaussian(n)
    payload = encode(spec, x)
    norms = payload[16 : 16 + 4 * len(sizes(n, c.block))].view(np.float32)
    codes = np.split(body(spec, payload, n), np.cumsum(sizes(n, c.block))[:-1])
    parts = []
    for y, norm, code in zip(rotated(x, c.block, SHARED), norms, codes):
        assert norm == pytest.approx(np.sqrt(np.mean(y * y)), rel=1e-5)
        top = c.clipped_at * norm
        exact = np.clip(y, -top, top) / top * c.levels
        assert np.abs(code - exact).max() <= 1 + 1e-3, "rounded up or down"
        parts.append(code * top / c.levels)
    expected = turned_back(parts, n, SHARED)
    assert np.allclose(decode(spec, payload, n), expected, atol=1e-5)


def test_layout_of_thc():
    n = 1500
    payload = encode("thc", gaussian(n))
    assert get("thc").header(n) == 32 and payload.size == 32 + 1536
    assert payload[:8].view(np.uint64)[0] == SHARED
    assert not payload[8:16].any() and not payload[24:32].any()
    assert np.abs(body("thc", payload, n)).max() == 7


@pytest.mark.parametrize("spec, ranks", [("thc", 16), ("thc:levels=31", 4), ("thc:element=int16,levels=1000", 32)])
def test_the_sum_of_payloads_decodes_to_the_sum(spec, ranks):
    n = 3000
    xs = [gaussian(n, rank) * np.float32(rank % 3 + 1) for rank in range(ranks)]
    residuals = [np.zeros(n, np.float32) for _ in xs]
    payloads, agreed = thc_payloads(spec, xs, residuals)
    total, saturated = summed(spec, payloads, n)
    assert saturated == 0 and len({p[: get(spec).header(n)].tobytes() for p in payloads}) == 1
    whole = np.sum([decode(spec, p, n).astype(np.float64) for p in payloads], axis=0)
    seen = decode(spec, total, n)
    assert np.allclose(seen, whole, atol=1e-5 * ranks * agreed.max())
    exact = np.sum(xs, axis=0, dtype=np.float64)
    assert np.allclose(seen + np.sum(residuals, axis=0, dtype=np.float64), exact, atol=1e-5 * ranks * agreed.max())


def test_sums_of_ranks_that_are_alike_saturate_beyond_the_safe_number():
    """16 equal ranks: safe at G = 7, because 16 * 7 <= 127; at G = 127 most elements saturate and the mean is wrong."""
    n, ranks, x = 1 << 16, 16, gaussian(1 << 16)
    for levels, expected in ((7, 0.0222 / ranks), (127, 0.75)):
        spec = f"thc:levels={levels}"
        total, saturated = summed(spec, thc_payloads(spec, [x] * ranks)[0], n)
        assert (saturated == 0) if levels == 7 else (saturated > 0.7 * n)
        # Clipping is the same on all ranks, only the rounding averages out.
        assert expected / 1.3 < error(x, decode(spec, total, n) / ranks) < max(1.1 * expected, 0.01)


def test_thc_gives_every_rank_the_largest_norm():
    n = 1024
    payloads, agreed = thc_payloads("thc", [gaussian(n), gaussian(n, 1) * np.float32(10), np.zeros(n, np.float32)])
    assert agreed[0] == pytest.approx(10, rel=0.1)
    assert np.abs(body("thc", payloads[0], n)).max() <= 2
    assert not body("thc", payloads[2], n).any(), "zeros are sent as zeros without noise"


@pytest.mark.parametrize("levels", [1, 7, 31])
def test_clipping_is_the_best_and_its_error_is_what_is_measured(levels):
    best = best_clip(levels, 1024)
    errors = [quantisation_error(best * f, levels, 1024) for f in (0.97, 1.0, 1.03)]
    assert errors[1] == min(errors)
    rng = np.random.default_rng(0)
    y = rng.standard_normal(1 << 21)
    scaled = np.clip(y, -best, best) * levels / best
    codes = np.floor(scaled + rng.random(y.size))
    assert np.mean((y - codes * best / levels) ** 2) == pytest.approx(errors[1], rel=0.02)


def test_thc_without_residual_rounds_without_bias():
    x, keys = gaussian(1024) * np.float32(0.5), 300
    spec = "thc:levels=3,clip=8.0"  # nothing is clipped
    errors = [compress(spec, x, key * 0x9E37_79B9_7F4A_7C15 % 2**64) - x for key in range(keys)]
    deviation = np.std(errors, axis=0) / math.sqrt(keys)
    assert np.abs(np.mean(errors, axis=0) / deviation).max() < 5.5


# --- all three --------------------------------------------------------------------------------------------------------

ALL = ["drive", "drive:block=64,scale=unbiased", "eden:bits=3", "thc", "thc:element=int16"]


@pytest.mark.parametrize("spec", ALL)
def test_values_at_the_limit_and_beyond_do_not_overflow(spec):
    n = 2500
    constant = np.full(n, LIMIT, np.float32)
    alternating = np.where(np.arange(n) % 2, np.float32(np.inf), np.float32(-3e38))
    for x in (constant, alternating, np.clip(gaussian(n), -3, 3) * np.float32(1e38)):
        residual = np.zeros(n, np.float32)
        seen = decode(spec, encode(spec, x, residual), n)
        sanitised = np.clip(x, -np.float32(LIMIT), np.float32(LIMIT))
        assert np.isfinite(seen).all() and np.isfinite(residual).all()
        assert np.abs(seen).max() <= LIMIT
        assert error(sanitised / LIMIT, seen / LIMIT) < 0.6


@pytest.mark.parametrize("spec", ALL)
def test_blocks_are_scaled_one_by_one(spec):
    """A tiny, a zero, a normal and a huge block beside each other are as good as alone."""
    block = get(spec).block
    x = gaussian(4 * block)
    for part, scale in zip(np.split(x, 4), (1e-28, 0, 1, 1e36)):
        part *= np.float32(scale)
    for wanted, seen in zip(np.split(x, 4), np.split(compress(spec, x), 4)):
        top = float(np.abs(wanted).max()) or 1.0
        assert np.square((wanted - seen) / top).sum() <= 0.7 * np.square(wanted / top).sum()


@pytest.mark.parametrize("spec", ALL)
def test_damaged_scales_decode_to_finite_values(spec):
    c, n = get(spec), 1500
    for word in (np.nan, np.inf, -np.inf, 3.4e38, -3.4e38):
        payload = encode(spec, gaussian(n))
        where = payload[16 : c.header(n)] if c.common else payload[-8:]
        where.view(np.float32)[...] = word
        assert np.isfinite(decode(spec, payload, n)).all()


@pytest.mark.parametrize(
    "block, n, elements", [(1024, 0, 0), (1024, 1, 64), (1024, 1025, 1088), (64, 130, 192), (4096, 2049, 4096)]
)
def test_sizes(block, n, elements):
    blocks = -(-n // block)
    head = 8 if n else 0
    assert get(f"drive:block={block}").nbytes(n) == head + elements // 8 + 4 * blocks
    assert get(f"eden:block={block},bits=3").nbytes(n) == head + 3 * elements // 8 + 4 * blocks
    header = 16 + -(-blocks // 4) * 16 if n else 0
    assert get(f"thc:block={block}").nbytes(n) == header + elements
    assert get(f"thc:block={block},element=int16").nbytes(n) == header + 2 * elements


def test_scheduled_blocks_stay_powers_of_two():
    method = get("drive:block=64~4096@100")
    assert [method.at(step).block for step in (0, 30, 60, 90, 100, None)] == [64, 128, 512, 1024, 4096, 4096]
    eden = get("eden:bits=4~1@40")
    assert isinstance(eden.bits, ParameterSchedule) and eden.at(0).bits == 4 and eden.at(None).bits == 1


@pytest.mark.parametrize(
    "spec",
    [
        "drive:block=100",
        "drive:block=32",
        "drive:block=8192",
        "drive:block=64~1000@8",
        "drive:scale=max",
        "eden:bits=0",
        "eden:bits=5",
        "eden:block=96",
        "thc:levels=0",
        "thc:levels=128",
        "thc:element=int32",
        "thc:element=int16,levels=32768",
        "thc:clip=-1.0",
        "thc:block=7",
    ],
)
def test_parameters_that_do_not_fit_are_refused(spec):
    with pytest.raises(ConfigError, match="expected"):
        get(spec)
