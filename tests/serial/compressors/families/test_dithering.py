"""``qsgd``, ``natural_dithering``, ``terngrad`` and ``natural`` against oracles in float64; their bytes, bit by bit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from espresso_mpi.compressors import LIMIT, Context, get
from espresso_mpi.errors import ConfigError

SPECS = (
    "qsgd",
    "qsgd:levels=1,norm=l2",
    "qsgd:levels=5,block=100",
    "qsgd:levels=127,norm=l2,block=64",
    "qsgd:levels=128",
    "qsgd:levels=32767",
    "natural_dithering",
    "natural_dithering:levels=1,block=65",
    "natural_dithering:levels=15,norm=l2",
    "natural_dithering:levels=27,block=1000",
    "terngrad:clip=0.0",
    "terngrad:block=100",
)


def gaussian(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n, np.float32)


def encode(spec, x, residual=None, key=1):
    payload = np.empty(get(spec).nbytes(x.size), np.uint8)
    get(spec).encode(x, payload, residual, Context(key))
    return payload


def decode(spec, payload, n):
    out = np.full(n, np.nan, np.float32)
    get(spec).decode(payload, out)
    return out


def compress(spec, x, key=1):
    return decode(spec, encode(spec, x, key=key), x.size)


def error(x, seen):
    return float(np.sum((x.astype(np.float64) - seen) ** 2) / np.sum(x.astype(np.float64) ** 2))


def blocks(x, block):
    return [x[a : a + block].astype(np.float64) for a in range(0, x.size, block)]


# --- oracles ----------------------------------------------------------------------------------------------------------


def oracle_norm(c, values):
    """What the highest level stands for, and the values after clipping."""
    largest = np.abs(values).max()
    if c.name == "terngrad" and c.clip:
        largest = min(largest, c.clip * math.sqrt(np.mean(values**2)))
    elif c.name != "terngrad" and c.norm == "l2":
        largest = math.sqrt(np.sum(values**2))
    return largest, np.clip(values, -largest, largest)


def oracle_levels(c):
    """The levels in [0, 1] as shares of the norm."""
    count = 1 if c.name == "terngrad" else c.levels
    if c.name == "natural_dithering":
        return np.array([0, *(2.0 ** (1 - j) for j in range(count, 0, -1))])
    return np.arange(count + 1) / count


@pytest.mark.parametrize("spec", SPECS)
def test_rounds_to_one_of_the_two_neighbouring_levels(spec):
    c, x = get(spec), gaussian(3001)
    for values, seen in zip(blocks(x, c.block), blocks(compress(spec, x), c.block), strict=True):
        norm, clipped = oracle_norm(c, values)
        levels = oracle_levels(c) * norm
        below, above = (np.searchsorted(levels, np.abs(clipped) * (1 + slack)) for slack in (-1e-6, 1e-6))
        near = np.array([below - 1, below, above]).clip(0, levels.size - 1)  # three, for float32 takes one for another
        off = np.min(np.abs(np.abs(seen) - levels[near]), axis=0)
        assert (off <= 1e-6 * norm).all()
        assert (seen * values >= 0).all()


@pytest.mark.parametrize("spec", ["qsgd:levels=3", "qsgd:levels=3,norm=l2", "natural_dithering:levels=4", "natural"])
def test_the_chance_of_either_neighbour_is_right_for_every_element(spec):
    x, keys = np.array([1, 0.9, -0.51, 0.4, 0.2, -0.06, 0.01, 0], np.float32), 4000
    seen = np.array([compress(spec, x, key=0x9E3779B97F4A7C15 * k % 2**64) for k in range(keys)], np.float64)
    spread = seen.std(axis=0) + 1e-9
    assert (np.abs(seen.mean(axis=0) - x) <= 4.5 * spread / math.sqrt(keys) + 1e-7).all()


# --- bytes ------------------------------------------------------------------------------------------------------------


def unpacked(words, width, size):
    """The level numbers of one block: bit j of element i is bit i of word j of its group; two's complement."""
    bits = np.unpackbits(words.reshape(-1, width).view(np.uint8), bitorder="little").reshape(-1, width, 64)
    numbers = np.tensordot(1 << np.arange(width), bits.astype(np.int64), (0, 1)).reshape(-1)
    assert not numbers[size:].any(), "padding is not zero"
    return np.where(numbers >= 1 << (width - 1), numbers - (1 << width), numbers)[:size]


@pytest.mark.parametrize("n", [1, 64, 65, 700])
@pytest.mark.parametrize("spec", SPECS)
def test_payload_is_planes_of_bits_and_steps(spec, n):
    c, x = get(spec), gaussian(n)
    payload = encode(spec, x)
    width, count = math.ceil(math.log2(2 * oracle_levels(c).size - 1)), -(-n // c.block)
    steps, words = payload[payload.size - 4 * count :].view(np.float32), payload[: payload.size - 4 * count]
    words, at = words.view(np.uint64), 0
    for step, seen in zip(steps, blocks(decode(spec, payload, n), c.block), strict=True):
        end = at + -(-seen.size // 64) * width
        numbers = unpacked(words[at:end], width, seen.size)
        multiples = numbers
        if c.name == "natural_dithering":
            multiples = np.where(numbers == 0, 0, np.sign(numbers) * 2.0 ** (np.abs(numbers) - 1))
        assert np.allclose(seen, multiples * float(step), rtol=1e-7, atol=0)
        at = end
    assert at == words.size


@pytest.mark.parametrize(
    ("spec", "bits"), [("qsgd", 4.25), ("qsgd:levels=127,block=2048", 8 + 1 / 64), ("terngrad", 2 + 1 / 64)]
)
def test_bits_an_element(spec, bits):
    assert get(spec).nbytes(1 << 16) * 8 == bits * (1 << 16)


def test_natural_sends_sign_and_exponent():
    x = np.array([1, -0.5, 0, 2, -(2.0**-124), 2.0**-125, 2.0**-149], np.float32)
    payload = encode("natural", x)
    assert payload[:6].tolist() == [126, 128 | 125, 0, 127, 128 | 2, 1]
    assert payload[7:].view(np.int8).tolist() == [1]
    assert np.array_equal(decode("natural", payload, 7)[:6], x[:6])


def test_natural_loses_nothing_of_powers_of_two_however_small():
    """127 of them fit a block."""
    x = np.float32(2) ** np.arange(-149, -22).astype(np.float32)
    assert np.array_equal(compress("natural", x), x)


def test_natural_is_right_in_the_mean_below_its_lowest_power():
    """There the neighbours are 0 and 2^-126 times the largest power."""
    x = np.full(1 << 16, 0.25 * 2.0**-126 * 2.0**40, np.float32)
    x[::2048] = 2.0**40
    seen = np.delete(compress("natural", x), slice(None, None, 2048)).astype(np.float64) / 2.0**-86
    assert set(seen) == {0, 1}
    assert seen.mean() == pytest.approx(0.25, abs=0.01)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "published"),
    [
        ("qsgd:levels=1,norm=l2", 8.03),
        ("qsgd:levels=7,norm=l2", 0.436),
        ("qsgd:levels=127,norm=l2", 0.00132),
        ("qsgd:levels=1,block=2048", 1.89),
        ("qsgd:levels=7,block=2048", 0.0450),
        ("qsgd:levels=127,block=2048", 1.37e-4),
        ("terngrad", 1.0095),
        ("natural", 0.0818),
    ],
)
def test_error_on_gaussian_values(spec, published):
    x = gaussian(1 << 20)
    assert error(x, compress(spec, x)) == pytest.approx(published, rel=0.015)
    assert get(spec).gaussian_error(1 << 20) == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize("block", [64, 100, 2048])
@pytest.mark.parametrize("clip", [1.0, 2.5, 4.0])
def test_error_of_terngrad_on_gaussian_values(clip, block):
    x, spec = gaussian(1 << 20), f"terngrad:clip={clip},block={block}"
    assert error(x, compress(spec, x)) == pytest.approx(get(spec).gaussian_error(1 << 20), rel=0.02)


@pytest.mark.parametrize(("levels", "block"), [(1, 64), (1, 2048), (7, 128), (7, 4096)])
def test_variance_for_the_maximum_norm_is_reached(levels, block):
    """One element 1 and the others at the worst share of the first level: t = √(c² + c) - c, c = s²/(B - 1)."""
    c = levels**2 / (block - 1)
    x = np.full(block * 64, (math.sqrt(c * c + c) - c) / levels, np.float32)
    x[::block] = 1
    spec = f"qsgd:levels={levels},block={block}"
    errors = [error(x, compress(spec, x, key)) for key in range(20)]
    assert np.mean(errors) == pytest.approx(get(spec).variance(x.size), rel=0.02)


@pytest.mark.parametrize("levels", [1, 7, 127])
@pytest.mark.parametrize("block", [2, 64, 128, 2048])
def test_variances_are_no_larger_than_those_of_the_paper(levels, block):
    largest, euclidean = (get(f"qsgd:levels={levels},block={block},norm={norm}") for norm in ("max", "l2"))
    assert largest.variance(1 << 20) <= block / (4 * levels**2)
    assert euclidean.variance(1 << 20) <= min(block / levels**2, math.sqrt(block) / levels)


# --- norms that are hard to take --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-29, 1e-20, 1e20, 4e37])
@pytest.mark.parametrize("n", [5, 64, 128, 129, 5000])
def test_euclidean_norm_neither_overflows_nor_underflows(size, n):
    x = (np.tanh(gaussian(n)) * size).astype(np.float32)
    spec = "qsgd:levels=3,norm=l2"
    payload, count = encode(spec, x), -(-n // 128)
    norms = payload[payload.size - 4 * count :].view(np.float32).astype(np.float64) * 3
    assert norms == pytest.approx([min(math.sqrt(np.sum(v**2)), LIMIT) for v in blocks(x, 128)], rel=1e-6, abs=0)


@pytest.mark.parametrize("spec", ["qsgd:levels=1,norm=l2,block=2048", "natural_dithering:norm=l2", "terngrad"])
def test_a_norm_beyond_the_limit_is_sent_as_the_limit_and_stays_unbiased(spec):
    x = np.full(2048, np.inf, np.float32)
    x[::2] = -LIMIT / 2
    seen = compress(spec, x).astype(np.float64)
    assert (seen[1::2] == LIMIT).all()
    assert seen[::2].mean() == pytest.approx(-LIMIT / 2, rel=0.2)


def test_small_blocks_become_zeros_and_stay_in_the_residual():
    x = np.full(256, 2.0**-101, np.float32)
    x[128:] = 2.0**-100
    residual = np.zeros(256, np.float32)
    seen = decode("qsgd", encode("qsgd", x, residual), 256)
    assert np.array_equal(seen, np.where(np.arange(256) < 128, np.float32(0), x))
    assert np.array_equal(residual[:128], x[:128])
    assert np.abs(residual[128:]).max() <= np.spacing(x[200])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, LIMIT * 1.01])
def test_a_damaged_step_decodes_to_zeros(bad):
    payload = encode("qsgd:levels=1", gaussian(200))
    payload[-8:-4].view(np.float32)[0] = bad
    seen = decode("qsgd:levels=1", payload, 200)
    assert not seen[:128].any()
    assert seen[128:].any()


# --- clipping, scaling, feedback --------------------------------------------------------------------------------------


def test_terngrad_clips_at_root_mean_squares():
    x = gaussian(2048)
    x[7], x[9] = 50, -60
    seen = compress("terngrad", x)
    expected = 2.5 * math.sqrt(np.mean(x.astype(np.float64) ** 2))
    assert seen[7] == pytest.approx(expected, rel=1e-6) and seen[9] == -seen[7]
    assert set(np.abs(seen)) == {np.float32(0), seen[7]}


def test_terngrad_keeps_a_constant():
    """Its standard deviation is 0, but its root mean square is not."""
    x = np.full(3000, -1.5, np.float32)
    assert np.array_equal(compress("terngrad", x), x)


@pytest.mark.parametrize("spec", ["qsgd:levels=1,block=2048", "natural_dithering:levels=1", "terngrad:clip=0.0"])
def test_scaled_divides_by_one_plus_omega(spec):
    c, x = get(spec), gaussian(5000)
    plain, scaled = compress(spec, x), compress(f"{spec},scaled=true", x)
    assert scaled == pytest.approx(plain / (1 + c.variance(5000)), rel=1e-6)
    assert c.contraction(5000) == 0
    assert get(f"{spec},scaled=true").contraction(5000) == pytest.approx(1 / (1 + c.variance(5000)))
    assert get(f"{spec},scaled=true").variance(5000) is None


def test_terngrad_contracts_a_one_hot_vector_as_it_promises():
    """The worst case of clipping: what is left is clip / √block of it."""
    c, x = get("terngrad:scaled=true"), np.zeros(2048, np.float32)
    x[5] = 1
    left = 2.5 / math.sqrt(2048)
    seen = compress(str(c), x)
    a = 1 / (1 + get("terngrad:clip=0.0").variance(2048))
    assert seen[5] == pytest.approx(a * left, rel=1e-6)
    assert error(x, seen) <= 1 - c.contraction(2048)
    assert c.contraction(2048) == pytest.approx(a * (2 * left - left**2))


def feedback(spec, steps=60, n=1 << 15):
    """The root mean square of the residual after steps of Gaussian gradients of size 1."""
    c, residual = get(spec), np.zeros(n, np.float32)
    payload = np.empty(c.nbytes(n), np.uint8)
    for step in range(steps):
        c.encode(gaussian(n, step), payload, residual, Context(1000 + step))
    return math.sqrt(np.mean(residual.astype(np.float64) ** 2))


def test_feedback_diverges_where_omega_exceeds_one_unless_scaled():
    """Levels 0 and 1 of the Euclidean norm of 2048 elements: ω = 44."""
    spec = "qsgd:levels=1,norm=l2,block=2048"
    assert get(spec).contraction(1 << 15) == 0
    assert feedback(spec) > 1e6
    assert feedback(f"{spec},scaled=true") == pytest.approx(5.4, rel=0.05)


@pytest.mark.parametrize("spec", ["qsgd", "natural_dithering", "natural"])
def test_feedback_is_safe_with_the_defaults(spec):
    assert get(spec).contraction(1 << 15) > 0.5
    assert feedback(spec) < 0.5


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "qsgd:levels=0",
        "qsgd:levels=32768",
        "qsgd:norm=l1",
        "qsgd:block=0",
        "natural_dithering:levels=28",
        "natural_dithering:norm=linf",
        "natural:block=0",
        "terngrad:clip=-1.0",
        "terngrad:block=0",
        "terngrad:levels=2",
    ],
)
def test_refuses(spec):
    with pytest.raises(ConfigError, match=spec.partition(":")[0]):
        get(spec)
