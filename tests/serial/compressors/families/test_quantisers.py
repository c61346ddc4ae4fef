"""What is particular to casts and block quantisers: formats to the bit, oracles in float64, published errors."""

from __future__ import annotations

import law_tools
import ml_dtypes
import numpy as np
import pytest

from espresso_mpi.compressors import Context, get
from espresso_mpi.errors import ConfigError

KEY = 0x0123_4567_89AB_CDEF
TOP = {"int8": 127, "int4": 7, "int2": 1, "fp8_e4m3": 448, "fp8_e5m2": 57344}
FLOAT8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
CASTS = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
BLOCKS = ("int8", "int4", "int2", *FLOAT8)
SIZES = (1, 7, 64, 127, 300, 5001)


def gaussian(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def spread(n):
    """Magnitudes over ten decades: 8-bit floats become subnormal and zero."""
    return (gaussian(n) * 10.0 ** np.random.default_rng(1).uniform(-8, 2, n)).astype(np.float32)


def encode(spec, x, residual=None, key=KEY):
    payload = np.empty(get(spec).nbytes(x.size), np.uint8)
    get(spec).encode(x, payload, residual, Context(key))
    return payload


def decode(spec, payload, n):
    out = np.empty(n, np.float32)
    get(spec).decode(payload, out)
    return out


def compress(spec, x, key=KEY):
    return decode(spec, encode(spec, x, key=key), x.size)


def split(spec, payload, n):
    """Scales and bytes of the codes, block by block."""
    c = get(spec)
    per = {"int4": 2, "int2": 4}.get(c.name, 1)
    starts = range(0, n, c.block)
    codes, at = [], 4 * len(starts)
    scales = payload[:at].view(np.float32)
    for start in starts:
        width = -(-min(c.block, n - start) // per)
        codes.append(payload[at : at + width])
        at += width
    assert at == payload.size
    return scales, codes


def blocks_of(spec, x):
    return [x[start : start + get(spec).block] for start in range(0, x.size, get(spec).block)]


def unpacked(spec, packed, m):
    """The m integer codes of a block: byte j holds codes j, j + s, j + 2s, ... of s bytes, lowest bits first."""
    bits = {"int8": 8, "int4": 4, "int2": 2}[get(spec).name]
    fields = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    codes = np.concatenate(fields).astype(int)
    assert not codes[m:].any(), "places without a code are not 0"
    return np.where(codes < 2 ** (bits - 1), codes, codes - 2**bits)[:m]


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("spec", ["int8", "int8:block=100", "int4", "int4:block=51", "int2", "int2:block=30"])
def test_integer_codes_are_the_rounded_quotients(spec, n):
    x = gaussian(n)
    scales, codes = split(spec, encode(spec, x), n)
    for values, scale, packed in zip(blocks_of(spec, x.astype(np.float64)), scales, codes, strict=True):
        assert scale == np.float32(np.abs(values).max()) / np.float32(TOP[get(spec).name])
        exact = values / (np.abs(values).max() / TOP[get(spec).name])
        # A value half way between two codes may fall either way: there the quotient's last bit decides.
        assert np.abs(unpacked(spec, packed, values.size) - exact).max() <= 0.5 + 1e-4


def test_integers_in_a_byte():
    """x = 0, 1, ..., 7 and their negatives, with scale 1: the codes are the values."""
    x = np.array([7, 1, -1, 2, -7, -2, 3], np.float32)
    packed = encode("int4:block=7", x)[4:]
    assert packed.tolist() == [0x97, 0xE1, 0x3F, 0x02]  # 7 and -7, 1 and -2, -1 and 3, 2 alone
    packed = encode("int2:block=6", np.array([1, -1, 0, 1, -1, -1], np.float32))[4:]
    assert packed.tolist() == [0b00_11_00_01, 0b00_11_01_11]
    assert encode("int8", np.array([-127, 5], np.float32))[4:].tolist() == [0x81, 5]


@pytest.mark.parametrize(
    ("spec", "n", "nbytes"),
    [
        ("int8", 1000, 16 + 1000),
        ("int4", 1000, 32 + 500),
        ("int2", 1000, 64 + 250),
        ("fp8_e4m3", 1000, 16 + 1000),
        ("int4:block=51", 103, 12 + 26 + 26 + 1),
        ("int2:block=30", 61, 12 + 8 + 8 + 1),
        ("bf16", 7, 14),
    ],
)
def test_sizes(spec, n, nbytes):
    assert get(spec).nbytes(n) == nbytes


@pytest.mark.parametrize("make", [gaussian, spread])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", FLOAT8)
def test_float8_codes_are_those_of_ml_dtypes(name, n, make):
    x = make(n)
    _, codes = split(name, encode(name, x), n)
    for values, packed in zip(blocks_of(name, x), codes, strict=True):
        quotients = values * (np.float32(TOP[name]) / np.abs(values).max())
        assert packed.tolist() == quotients.astype(FLOAT8[name]).view(np.uint8).tolist()


@pytest.mark.parametrize("name", FLOAT8)
def test_every_float8_code_decodes_to_its_value(name):
    codes = np.arange(256, dtype=np.uint8)
    payload = np.concatenate([np.array([0.5], np.float32).view(np.uint8), codes])
    expected = codes.view(FLOAT8[name]).astype(np.float32) / 2
    seen, finite = decode(name, payload, 256), np.isfinite(expected)
    assert finite.sum() == {"fp8_e4m3": 254, "fp8_e5m2": 248}[name]
    assert seen[finite].tobytes() == expected[finite].tobytes()
    assert (np.isfinite(seen[~finite]) & (np.abs(seen[~finite]) > TOP[name] / 2)).all()


@pytest.mark.parametrize("name", CASTS)
def test_casts_are_those_of_numpy_and_ml_dtypes(name):
    """Every exponent, ties among them, and the bits around them."""
    bits = np.arange(0x0000_0000, 0x7F00_0000, 0x0000_1000, np.uint32)
    bits = np.concatenate([bits, bits + 1, bits + 0x7FFF, bits + 0x8000, bits | 0x8000_0000])
    x = bits.view(np.float32)
    x = x[np.abs(x) <= (65504 if name == "fp16" else 2.0**126)]
    assert encode(name, x).tobytes() == x.astype(CASTS[name]).tobytes()


@pytest.mark.parametrize("name", CASTS)
def test_every_16_bit_code_decodes_to_a_finite_value(name):
    """What a sum over the ranks made infinite is the largest value, NaN is 0."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    expected = codes.view(CASTS[name]).astype(np.float32)
    largest = float(ml_dtypes.finfo(CASTS[name]).max)
    expected = np.where(np.isnan(expected), 0, np.clip(expected, -largest, largest))
    assert np.array_equal(decode(name, codes.view(np.uint8), codes.size), expected)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 1e38])
@pytest.mark.parametrize("name", BLOCKS)
def test_scales_that_no_encoder_writes_count_as_zero(name, scale):
    payload = np.full(get(name).nbytes(64), 0x55, np.uint8)
    payload[:4] = np.array([scale], np.float32).view(np.uint8)
    assert not decode(name, payload, 64).any()


@pytest.mark.parametrize("name", BLOCKS)
def test_the_largest_scale_is_accepted(name):
    x = np.array([2.0**126, 0, -(2.0**126)], np.float32)
    assert np.allclose(compress(name, x), x, rtol=1e-6)


# --- special values ---------------------------------------------------------------------------------------------------


def test_fp16_sends_the_excess_in_later_steps():
    residual, total = np.zeros(1, np.float32), 0.0
    for step in range(4):
        x = np.array([200_000.0 if step == 0 else 0.0], np.float32)
        total += float(decode("fp16", encode("fp16", x, residual), 1)[0])
    assert total == pytest.approx(200_000, rel=1e-3)


def test_fp16_sends_what_is_too_small_once_it_has_gathered():
    residual, total = np.zeros(1, np.float32), 0.0
    for _ in range(1000):
        total += float(decode("fp16", encode("fp16", np.array([1e-9], np.float32), residual), 1)[0])
    assert total == pytest.approx(1e-6, abs=2.0**-24)


def test_bf16_is_not_biased_and_stochastic_not_at_all():
    """Cutting off would lose 0.28 % of the mean magnitude."""
    x = np.abs(gaussian(1 << 18))
    for spec in ("bf16", "bf16:rounding=stochastic"):
        assert abs(compress(spec, x).mean(dtype=np.float64) / x.mean(dtype=np.float64) - 1) < 2e-5


def test_bf16_stochastic_takes_a_neighbour_with_the_right_chance():
    x = np.full(1 << 16, 1 + 2.0**-7 / 4, np.float32)
    seen = compress("bf16:rounding=stochastic", x)
    assert set(seen.tolist()) == {1.0, 1 + 2.0**-7}
    assert np.mean(seen > 1) == pytest.approx(0.25, abs=5 * np.sqrt(0.25 * 0.75 / x.size))


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_stochastic_takes_a_neighbour_with_the_right_chance(name):
    """x = a quarter of a step: 1 in a quarter of the cases, else 0; what is a code stays what it is."""
    x = np.full(1 << 16, 0.25, np.float32)
    block = get(name).block
    x[::block], x[1::block] = TOP[name], -1
    seen = compress(f"{name}:rounding=stochastic", x).round(5)
    assert (seen[::block] == TOP[name]).all() and (seen[1::block] == -1).all()
    others = seen[x == 0.25]
    assert set(others.tolist()) == {0.0, 1.0}
    assert others.mean() == pytest.approx(0.25, abs=5 * np.sqrt(0.25 * 0.75 / others.size))


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_scaled_divides_by_one_plus_omega(name):
    """The codes are those without, the scales are smaller."""
    x, spec = gaussian(3000), f"{name}:rounding=stochastic"
    plain, scaled = encode(spec, x), encode(f"{spec},scaled=True", x)
    head = 4 * -(-x.size // get(name).block)
    assert plain[head:].tobytes() == scaled[head:].tobytes()
    ratio = plain[:head].view(np.float32) / scaled[:head].view(np.float32)
    assert ratio == pytest.approx(1 + get(spec).variance(x.size), rel=1e-6)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_that_is_too_small_is_sent_as_zeros_and_kept(name):
    x, block = gaussian(1000), get(name).block
    x[:block] *= np.float32(1e-32)
    residual = np.zeros_like(x)
    seen = decode(name, encode(name, x, residual), x.size)
    assert not seen[:block].any() and seen[block:].any()
    assert np.array_equal(residual[:block], x[:block])


# --- how large the error is -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "published"),
    [
        ("fp16", 4.3e-8),
        ("bf16", 2.76e-6),
        ("bf16:rounding=stochastic", 5.5e-6),
        ("int8", 4.86e-5),
        ("int8:rounding=stochastic", 9.72e-5),
        ("int4", 0.0138),
        ("int4:rounding=stochastic", 0.0275),
    ],
)
def test_errors_on_gaussian_values_are_the_published_ones(spec, published):
    assert get(spec).gaussian_error(1 << 20) == pytest.approx(published, rel=0.006)


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
@pytest.mark.parametrize("size", [1, 2, 5, 64, 300])
def test_omega_is_the_largest_variance_of_a_block(name, size):
    """Against the worst of many blocks of one largest and equal others, exactly; it lies below size/(4·top²)."""
    top, t = TOP[name], np.linspace(0, 1, 100_001)
    worst = np.max((size - 1) * t * (1 - t) / (top**2 + (size - 1) * t**2))
    omega = get(f"{name}:block=300,rounding=stochastic").variance(size)
    assert worst == pytest.approx(omega, abs=1e-6)
    assert omega <= size / (4 * top**2) + 1e-6


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
@pytest.mark.parametrize("size", [2, 5, 64, 300])
def test_contraction_is_reached(name, size):
    """Half a step and a little, next to one that fills the range: the bound is tight."""
    x = np.full(size, 0.500001, np.float32)
    x[0] = TOP[name]
    spec = f"{name}:block=300"
    lost = np.sum((x.astype(np.float64) - compress(spec, x)) ** 2) / np.sum(x.astype(np.float64) ** 2)
    assert lost == pytest.approx(1 - get(spec).contraction(size), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(("name", "most"), [("int8", 8 * 127**2), ("int4", 8 * 49), ("int2", 8)])
def test_where_stochastic_rounding_contracts(name, most):
    """ω < 1 up to a block of 8·top²; beyond only when scaled."""
    for block, contracts in ((most, True), (most + 1, False)):
        assert (get(f"{name}:block={block},rounding=stochastic").contraction(1 << 20) > 0) == contracts
    scaled = get(f"{name}:block={most + 1},rounding=stochastic,scaled=True")
    assert scaled.contraction(1 << 20) == pytest.approx(0.5, rel=0.1)
    assert scaled.variance(1 << 20) is None


# --- names and parameters ---------------------------------------------------------------------------------------------


def test_only_the_casts_can_be_summed():
    assert [get(name).element for name in (*CASTS, *BLOCKS)] == ["float16", "bfloat16", *5 * [None]]


@pytest.mark.parametrize("spec", ["int8:block=0", "int4:rounding=up", "int2:scaled=True", "fp8_e4m3:block=-1"])
def test_refuses(spec):
    with pytest.raises(ConfigError, match="expected"):
        get(spec)


@pytest.mark.parametrize("spec", ["bf16:rounding=down", "fp16:block=3", "fp8_e5m2:rounding=nearest"])
def test_refuses_what_a_method_does_not_have(spec):
    with pytest.raises(ConfigError):
        get(spec)


@pytest.mark.parametrize("spec", ["fp16", "bf16", "int8", "int4", "fp8_e4m3"])
def test_compressing_twice_is_compressing_once(spec):
    once = law_tools.compress(get(spec), law_tools.gaussian(5000))
    twice = law_tools.compress(get(spec), once)
    assert np.array_equal(once, twice) if "16" in spec else np.allclose(once, twice, rtol=1e-6, atol=0)
