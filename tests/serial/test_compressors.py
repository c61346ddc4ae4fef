"""The laws that every compressor obeys, and the numbers that each must show, against oracles in plain float64.

The laws run over ``names()``: a new file in ``espresso_mpi/compressors`` is tested as it is found.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from espresso_mpi.compressors import Compressor, Context, get, names, register
from espresso_mpi.compressors._cpu import PARALLEL_MIN
from espresso_mpi.errors import ConfigError, PayloadError

SPECS = sorted(
    {*names(), "int8:block=100", "int8:rounding=stochastic", "onebit:block=64", "topk:ratio=0.3", "topk:ratio=1.0"}
)
SIZES = (0, 1, 7, 31, 33, 63, 64, 65, 1_000_003)
KEY = 0x0123_4567_89AB_CDEF
EPS = float(np.finfo(np.float32).eps)
NORMAL = NormalDist()
GUARD = 64


# --- inputs and helpers -----------------------------------------------------------------------------------------------


def gaussian(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def laplace(n: int) -> np.ndarray:
    return np.random.default_rng(1).laplace(size=n).astype(np.float32)


def one_hot(n: int) -> np.ndarray:
    x = np.zeros(n, np.float32)
    x[n // 2 : n // 2 + 1] = -3
    return x


INPUTS = {
    "gaussian": gaussian,
    "laplace": laplace,
    "constant": lambda n: np.full(n, -1.5, np.float32),
    "zero": lambda n: np.zeros(n, np.float32),
    "one-hot": one_hot,
    "denormal": lambda n: gaussian(n) * np.float32(1e-40),
    "large": lambda n: gaussian(n) * np.float32(1e30),
}


def encode(spec, x, residual=None, key=KEY):
    compressor = get(spec)
    payload = np.empty(compressor.nbytes(x.size), np.uint8)
    compressor.encode(x, payload, residual, Context(key))
    return payload


def decode(spec, payload, n):
    out = np.full(n, np.nan, np.float32)
    get(spec).decode(payload, out)
    return out


def compress(spec, x, key=KEY):
    """``x`` as the receiver sees it."""
    return decode(spec, encode(spec, x, key=key), x.size)


def vnmse(x, seen):
    wide = x.astype(np.float64)
    return float(np.sum((wide - seen) ** 2) / np.sum(wide**2))


def bits(x):
    return np.ascontiguousarray(x).view(np.uint32)


def same_bits(a, b):
    return np.array_equal(bits(a), bits(b))


class Guarded:
    """An array with a margin on both sides that must not change; its start is aligned as payloads are."""

    def __init__(self, size, dtype, fill):
        self._all = np.full(size * np.dtype(dtype).itemsize + 2 * GUARD, fill, np.uint8)
        self._margin = fill
        self.array = self._all[GUARD : self._all.size - GUARD].view(dtype)

    def intact(self):
        return bool((self._all[:GUARD] == self._margin).all() and (self._all[-GUARD:] == self._margin).all())


def guarded(values, fill=0xA5):
    made = Guarded(values.size, values.dtype, fill)
    made.array[...] = values
    return made


# --- what each method must give, in float64 ---------------------------------------------------------------------------


def blocks_of(x, block):
    return [x[start : start + block].astype(np.float64) for start in range(0, x.size, block)]


def oracle_fp16(x, compressor):
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float64)


def oracle_int8(x, compressor):
    seen = []
    for values in blocks_of(x, compressor.block):
        scale = np.abs(values).max() / 127
        seen.append(np.rint(values / scale) * scale if scale > 1e-32 else 0 * values)
    return np.concatenate(seen)


def oracle_onebit(x, compressor):
    return np.concatenate([np.abs(v).mean() * np.where(v < 0, -1.0, 1.0) for v in blocks_of(x, compressor.block)])


def oracle_topk(x, compressor):
    chosen = np.argsort(-np.abs(x.astype(np.float64)), kind="stable")[: max(1, round(compressor.ratio * x.size))]
    seen = np.zeros(x.size)
    seen[chosen] = x[chosen]
    return seen


ORACLES = {"fp16": oracle_fp16, "int8": oracle_int8, "onebit": oracle_onebit, "topk": oracle_topk}


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "constant", "one-hot", "large"])
@pytest.mark.parametrize("n", [1, 7, 65, 300, 5000])
@pytest.mark.parametrize("spec", [s for s in SPECS if get(s).name in ORACLES and "stochastic" not in s])
def test_agrees_with_the_oracle(spec, n, kind):
    x = INPUTS[kind](n)
    expected = ORACLES[get(spec).name](x, get(spec))
    seen = compress(spec, x)
    close = np.isclose(seen, expected, rtol=4 * EPS, atol=0)
    # A value half way between two codes of int8 may fall either way: there the quotient's last bit decides.
    assert np.count_nonzero(~close) <= (n // 1000 if get(spec).name == "int8" else 0)


def test_topk_takes_equal_magnitudes_in_order_of_their_index():
    x = np.array([1, -2, 2, 0, -1, 2, 1, 1], np.float32)
    payload = encode("topk:ratio=0.5", x)
    assert payload[:16].view(np.uint32).tolist() == [0, 1, 2, 5]
    assert payload[16:].view(np.float32).tolist() == [1, -2, 2, 2]


def test_onebit_packs_signs_little_endian_and_sends_zero_as_positive():
    x = np.array([-1, 0, -0.0, 1, -1] + 60 * [1], np.float32)
    payload = encode("onebit", x)
    assert payload[:16].view(np.uint64).tolist() == [0b10001, 0]
    assert payload[16:].view(np.float32).tolist() == [np.float32(63) / np.float32(65)]


def test_int8_stochastic_rounds_to_a_neighbour():
    x = gaussian(10_000)
    for values, seen in zip(blocks_of(x, 256), blocks_of(compress("int8:rounding=stochastic", x), 256), strict=True):
        scale = np.abs(values).max() / 127
        assert np.abs(values - seen).max() <= scale * 1.00001


# --- the mean squared error on Gaussian values ------------------------------------------------------------------------


def expected_fp16():
    """Uniform rounding errors of variance ulp²/12 in each binade."""
    chance = [2 * (NORMAL.cdf(2.0 ** (e + 1)) - NORMAL.cdf(2.0**e)) for e in range(-14, 5)]
    return sum(p * 4.0 ** (e - 10) / 12 for e, p in zip(range(-14, 5), chance, strict=True))


def expected_int8(block):
    """Errors of variance scale²/12, but none for the largest of the block.

    The mean square of the largest is an integral over its distribution.
    """
    step = 1e-4
    m = np.arange(step / 2, 8, step)
    below = np.array([math.erf(value / math.sqrt(2)) for value in m])
    largest_squared = float(np.sum((1 - below**block) * 2 * m) * step)
    return largest_squared / 127**2 / 12 * (1 - 1 / block)


def expected_onebit(block):
    return (1 - 2 / math.pi) * (1 - 1 / block)


def expected_topk(ratio):
    t = NORMAL.inv_cdf(1 - ratio / 2)
    return 1 - 2 * (t * NORMAL.pdf(t) + 1 - NORMAL.cdf(t))


@pytest.mark.parametrize(
    ("spec", "analytic"),
    [
        ("fp16", expected_fp16()),
        ("int8", expected_int8(256)),
        ("int8:block=64", expected_int8(64)),
        ("int8:rounding=stochastic", 2 * expected_int8(256)),
        ("onebit", expected_onebit(2048)),
        ("onebit:block=64", expected_onebit(64)),
        ("topk:ratio=0.001", expected_topk(0.001)),
        ("topk:ratio=0.01", expected_topk(0.01)),
        ("topk:ratio=0.05", expected_topk(0.05)),
        ("topk:ratio=0.1", expected_topk(0.1)),
    ],
)
def test_error_on_gaussian_values(spec, analytic):
    x = gaussian(1 << 20)
    assert vnmse(x, compress(spec, x)) == pytest.approx(analytic, rel=0.01)


@pytest.mark.parametrize(
    ("analytic", "published"),
    [
        (expected_fp16(), 4.3e-8),
        (expected_int8(256), 4.86e-5),
        (expected_onebit(2048), 0.3634),
        (expected_topk(0.01), 0.9155),
    ],
)
def test_analytic_values_are_the_documented_ones(analytic, published):
    assert analytic == pytest.approx(published, rel=0.006)


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_spelling_reads_back(spec):
    compressor = get(spec)
    assert get(str(compressor)) == compressor
    assert get(compressor) is compressor
    assert str(compressor).partition(":")[0] in names()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("spec", SPECS)
def test_writes_all_of_its_arrays_and_nothing_else(spec, n):
    compressor = get(spec)
    x = guarded(gaussian(n))
    residual = guarded(gaussian(n, 1))
    payloads = [Guarded(compressor.nbytes(n), np.uint8, fill) for fill in (0x00, 0xFF)]
    for payload in payloads:
        residual.array[...] = gaussian(n, 1)
        compressor.encode(x.array, payload.array, residual.array, Context(KEY))
    out = Guarded(n, np.float32, 0xA5)
    compressor.decode(payloads[0].array, out.array)
    assert np.isfinite(out.array).all()
    compressor.decode_add(payloads[0].array, out.array)
    assert np.array_equal(payloads[0].array, payloads[1].array), "a byte of the payload was left as it was"
    assert all(each.intact() for each in (x, residual, out, *payloads))
    assert same_bits(x.array, gaussian(n)), "the input was changed"


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("spec", SPECS)
def test_payload_and_residual_make_up_the_input(spec, n, kind):
    x = INPUTS[kind](n)
    before = x[::-1] * np.float32(0.25)
    residual = before.copy()
    seen = decode(spec, encode(spec, x, residual), n)
    total = x + before
    if get(spec).name == "topk":
        assert same_bits(np.where(seen != 0, seen, residual), total + np.float32(0))
        assert (residual[seen != 0] == 0).all()
    else:
        slack = EPS * np.maximum(np.abs(total), np.abs(seen)) + np.finfo(np.float32).smallest_subnormal
        assert (np.abs(seen.astype(np.float64) + residual - total) <= slack).all()


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("spec", SPECS)
def test_decode_add_adds(spec, n, kind):
    x = INPUTS[kind](n)
    payload = encode(spec, x)
    before = x[::-1].copy()
    out = before.copy()
    get(spec).decode_add(payload, out)
    seen = decode(spec, payload, n)
    slack = EPS * (np.abs(before) + np.abs(seen))
    assert (np.abs(out - (before.astype(np.float64) + seen)) <= slack + 1e-45).all()


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("n", [1, 65, 5000])
@pytest.mark.parametrize("spec", SPECS)
def test_contracts(spec, n, kind):
    """The error is at most (1 - δ)‖x‖²; δ = k/d for topk, above 0 for the others."""
    x = INPUTS[kind](n)
    if kind == "large" and spec == "fp16":
        pytest.skip("saturates")
    seen = compress(spec, x).astype(np.float64)
    bound = 1 - get(spec).count(n) / n if get(spec).name == "topk" else 1
    # The scale of denormal values is rounded to a multiple of 1.4e-45.
    slack = 1e-4 if kind == "denormal" else 1e-6
    assert np.sum((x - seen) ** 2) <= (bound + slack) * np.sum(x.astype(np.float64) ** 2)


@pytest.mark.parametrize("spec", SPECS)
def test_zero_stays_zero(spec):
    residual = np.zeros(1000, np.float32)
    seen = decode(spec, encode(spec, np.zeros(1000, np.float32), residual), 1000)
    assert not seen.any()
    assert not residual.any()


@pytest.mark.parametrize("power", [-6, -1, 5])
@pytest.mark.parametrize("spec", SPECS)
def test_scales_with_powers_of_two(spec, power):
    """Bit for bit, away from the denormal halves and from saturation."""
    x = gaussian(5000)
    x = np.copysign(np.maximum(np.abs(x), np.float32(0.01)), x)
    factor = np.float32(2.0**power)
    assert same_bits(compress(spec, x * factor), compress(spec, x) * factor)


@pytest.mark.parametrize("spec", [s for s in SPECS if "stochastic" not in s])
def test_compressing_twice_is_compressing_once(spec):
    once = compress(spec, gaussian(5000))
    twice = compress(spec, once)
    exact = get(spec).name in ("fp16", "topk")
    assert same_bits(once, twice) if exact else np.allclose(once, twice, rtol=4 * EPS, atol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_same_key_same_bytes_on_any_number_of_threads(spec):
    n = 3 * PARALLEL_MIN + 1003
    results = []
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        try:
            residual, out = gaussian(n, 1), gaussian(n, 2)
            payload = encode(spec, gaussian(n), residual)
            get(spec).decode_add(payload, out)
            results.append(payload.tobytes() + residual.tobytes() + out.tobytes() + encode(spec, gaussian(n)).tobytes())
        finally:
            numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    assert results[0] == results[1]


@pytest.mark.parametrize("n", [65, 5000])
@pytest.mark.parametrize("spec", SPECS)
def test_damaged_payload_stays_inside_the_array(spec, n):
    compressor = get(spec)
    for seed in range(5):
        noise = np.random.default_rng(seed).integers(0, 256, compressor.nbytes(n), np.uint8)
        out = guarded(np.zeros(n, np.float32))
        compressor.decode(noise, out.array)
        compressor.decode_add(noise, out.array)
        assert out.intact()


@settings(deadline=None, max_examples=60)
@given(
    x=hnp.arrays(
        np.float32,
        st.integers(0, 300),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
    ),
    spec=st.sampled_from(SPECS),
    key=st.integers(0, 2**64 - 1),
)
def test_any_input(x, spec, key):
    """Nothing is lost between payload and residual, whatever the values, and the same call gives the same bytes."""
    residual = np.full_like(x, -0.0)  # which adds nothing to any value; 0.0 turns -0.0 into 0.0
    payload = encode(spec, x, residual, key)
    assert np.array_equal(payload, encode(spec, x, None, key))
    seen = decode(spec, payload, x.size).astype(np.float64)
    slack = EPS * np.maximum(np.abs(x), np.abs(seen)) + np.finfo(np.float32).smallest_subnormal
    assert (np.abs(seen + residual - x) <= slack).all()


# --- what only some methods do ----------------------------------------------------------------------------------------


def test_fp16_keeps_what_exceeds_the_largest_half():
    x = np.array([1e6, -1e6, 65504, 65519, 3e38], np.float32)
    residual = np.zeros(5, np.float32)
    seen = decode("fp16", encode("fp16", x, residual), 5)
    assert seen.tolist() == [65504, -65504, 65504, 65504, 65504]
    assert same_bits(residual, x - seen)


def test_fp16_sends_the_excess_in_later_steps():
    residual, total = np.zeros(1, np.float32), 0.0
    for step in range(4):
        x = np.array([200_000.0 if step == 0 else 0.0], np.float32)
        total += float(decode("fp16", encode("fp16", x, residual), 1)[0])
    assert total == pytest.approx(200_000, rel=1e-3)


def test_int8_stochastic_is_unbiased():
    """z-test of the mean error of each element over many keys; its variance is scale² f (1 - f) for a fraction f."""
    x, keys = gaussian(2048), 500
    seen = np.mean(
        [compress("int8:rounding=stochastic", x, key * 0x9E37_79B9_7F4A_7C15 % 2**64) for key in range(keys)], 0
    )
    scale = np.repeat([np.abs(values).max() / 127 for values in blocks_of(x, 256)], 256)
    f = np.abs(x / scale) % 1
    z = (seen - x) / (scale * np.sqrt((f * (1 - f) + 1 / keys) / keys))
    assert np.abs(z).max() < 5.5
    assert abs(z.mean()) * math.sqrt(x.size) < 4.5
    assert abs(np.mean(z[:-1] * z[1:])) * math.sqrt(x.size) < 4.5, "neighbours round together"


@pytest.mark.parametrize("other", [KEY ^ 1, KEY ^ 1 << 40])
def test_another_key_gives_other_noise(other):
    """Both halves of the key count: independent roundings of a fraction f differ with probability 2 f (1 - f)."""
    x = gaussian(100_000)
    first, second = (compress("int8:rounding=stochastic", x, key) for key in (KEY, other))
    assert np.mean(first != second) == pytest.approx(1 / 3, rel=0.02)


@pytest.mark.parametrize("n", [1, 2, 50, 150, 1000])
def test_topk_sends_a_rounded_share_and_at_least_one(n):
    assert get("topk").nbytes(n) == 8 * max(1, round(0.01 * n))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", names())
def test_refuses_arrays_that_do_not_fit(spec):
    compressor, x = get(spec), gaussian(100)
    payload = np.empty(compressor.nbytes(100), np.uint8)
    wrong = [
        (x, payload[:-1], None),
        (x, np.append(payload, payload[:1]), None),
        (x, payload.view(np.int8), None),
        (x.astype(np.float64), payload, None),
        (x.reshape(10, 10), payload, None),
        (np.repeat(x, 2)[::2], payload, None),
        (x, np.repeat(payload, 2)[::2], None),
        (x, payload, np.zeros(99, np.float32)),
        (x, payload, np.zeros(100, np.float64)),
        (x, payload, np.zeros(200, np.float32)[::2]),
    ]
    for values, target, residual in wrong:
        with pytest.raises(PayloadError, match="expected"):
            compressor.encode(values, target, residual)
        if residual is None:
            with pytest.raises(PayloadError, match="expected"):
                compressor.decode(target, values)
            with pytest.raises(PayloadError, match="expected"):
                compressor.decode_add(target, values)


@pytest.mark.parametrize(
    "spelling",
    [
        "nothing-like-it",
        "",
        "int8:block=0",
        "int8:block=many",
        "int8:block",
        "int8:rounding=up",
        "int8:size=3",
        "onebit:block=100",
        "onebit:block=0",
        "topk:ratio=0",
        "topk:ratio=1.5",
        "topk:ratio=nan",
        "fp16:block=3",
    ],
)
def test_refuses_spellings_that_do_not_fit(spelling):
    with pytest.raises(ConfigError):
        get(spelling)


def test_error_names_what_is_known():
    with pytest.raises(ConfigError, match=r"'gzip' is not known; known are none, .*int8"):
        get("gzip")
    with pytest.raises(ConfigError, match="expected a spelling"):
        get(8)  # type: ignore[arg-type]


def test_a_name_is_taken_once():
    class Another(Compressor):
        name = "fp16"

    with pytest.raises(ConfigError, match="registered twice"):
        register(Another)


def test_onebit_of_huge_values_keeps_a_finite_residual():
    """A block's sum overflows float32 although every value is finite."""
    x = np.full(4096, 3e38, np.float32)
    compressor = get("onebit")
    payload, residual = np.empty(compressor.nbytes(x.size), np.uint8), np.zeros_like(x)
    compressor.encode(x, payload, residual)
    out = np.empty_like(x)
    compressor.decode(payload, out)
    assert np.isfinite(residual).all() and np.isfinite(out).all()
