"""The sign methods against their definitions in float64; ``test_laws`` has what holds for every method."""

from __future__ import annotations

import math

import numpy as np
import pytest

from espresso_mpi.compressors import LIMIT, Context, get
from espresso_mpi.errors import ConfigError

BLOCKED = ("onebit", "onebit:block=64", "onebit_sgd", "onebit_sgd:block=64")
UNSCALED = ("signsgd", "signum", "signum:beta=0")
SIZES = (1, 63, 64, 65, 300, 5000)
EPS = float(np.finfo(np.float32).eps)


def gaussian(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def lognormal(n: int) -> np.ndarray:
    return np.exp(gaussian(n)) * np.sign(gaussian(n, 1))


INPUTS = {
    "gaussian": gaussian,
    "lognormal": lognormal,
    "shifted": lambda n: gaussian(n) + np.float32(1),
    "all positive": lambda n: np.abs(gaussian(n)) + np.float32(1),
    "all negative": lambda n: -np.abs(gaussian(n)) - np.float32(1),
    "large": lambda n: gaussian(n) * np.float32(1e30),
}


def encode(spec, x, residual=None, context=None):
    compressor = get(spec)
    payload = np.full(compressor.nbytes(x.size), 0xA5, np.uint8)
    compressor.encode(x, payload, residual, context)
    return payload


def decode(spec, payload, n):
    out = np.empty(n, np.float32)
    get(spec).decode(payload, out)
    return out


def compress(spec, x):
    return decode(spec, encode(spec, x), x.size)


def vnmse(x, seen):
    wide = x.astype(np.float64)
    return float(np.sum((wide - seen) ** 2) / np.sum(wide**2))


def error_on(spec, x):
    return vnmse(x, compress(spec, x))


# --- what each method must give ---------------------------------------------------------------------------------------


def scaled_sign(values):
    return np.where(values < 0, -1, 1) * np.abs(values).mean()


def mean_of_each_sign(values):
    seen = np.empty_like(values)
    for group in (values < 0, values >= 0):
        if group.any():
            seen[group] = values[group].mean()
    return seen


ORACLES = {"onebit": scaled_sign, "onebit_sgd": mean_of_each_sign}


def expected(spec, x):
    """The oracle on each block of the method, in float64."""
    compressor = get(spec)
    wide = x.astype(np.float64)
    parts = [wide[at : at + compressor.block] for at in range(0, x.size, compressor.block)]
    return np.concatenate([ORACLES[compressor.name](part) for part in parts])


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("spec", BLOCKED)
def test_agrees_with_the_definition(spec, n, kind):
    x = INPUTS[kind](n)
    np.testing.assert_allclose(compress(spec, x), expected(spec, x), rtol=8 * EPS, atol=0)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("spec", UNSCALED)
def test_unscaled_signs_are_one(spec, n):
    x = gaussian(n)
    x[::7] = 0
    x[3::7] = -0.0
    assert np.array_equal(compress(spec, x), np.where(x < 0, -1, 1))


# --- layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [*BLOCKED, *UNSCALED])
@pytest.mark.parametrize("n", SIZES)
def test_sign_bits_are_little_endian_and_padded_with_zeros(spec, n):
    x = gaussian(n)
    words = encode(spec, x)[: 8 * -(-n // 64)]
    bits = np.unpackbits(words, bitorder="little")
    assert np.array_equal(bits[:n], x < 0)
    assert not bits[n:].any()


def test_payloads_by_hand():
    x = np.array([-1, 0, -0.0, 3, -2] + 60 * [1], np.float32)
    signs, total = [0b10001, 0], 63 + 3
    assert encode("onebit", x)[:16].view(np.uint64).tolist() == signs
    assert encode("onebit", x)[16:].view(np.float32).tolist() == [np.float32(total) / np.float32(65)]
    assert encode("onebit_sgd", x)[:16].view(np.uint64).tolist() == signs
    assert encode("onebit_sgd", x)[16:].view(np.float32).tolist() == [1.0, -1.5]
    assert encode("signsgd", x).view(np.uint64).tolist() == signs


def test_blocks_follow_one_another():
    x = np.repeat(np.array([1, -2, 3], np.float32), 64)
    assert encode("onebit:block=64", x)[24:].view(np.float32).tolist() == [1, 2, 3]
    assert encode("onebit_sgd:block=64", x)[24:].view(np.float32).tolist() == [1, 0, 3, 0, -2, 0]


@pytest.mark.parametrize(
    ("spec", "n", "size"),
    [
        ("onebit", 4096, 512 + 8),
        ("onebit", 4097, 520 + 12),
        ("onebit_sgd:block=128", 1000, 128 + 64),
        ("signsgd", 65, 16),
        ("signum", 64, 8),
    ],
)
def test_sizes(spec, n, size):
    assert get(spec).nbytes(n) == size


# --- published values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("onebit:block=1048576", 1 - 2 / math.pi),
        ("onebit_sgd:block=1048576", 1 - 2 / math.pi),
        ("signsgd", 2 - 2 * math.sqrt(2 / math.pi)),
        ("signum", 2 - 2 * math.sqrt(2 / math.pi)),
    ],
)
def test_error_on_gaussian_values(spec, value):
    assert get(spec).gaussian_error(1 << 20) == pytest.approx(value, rel=1e-5)
    assert error_on(spec, gaussian(1 << 20)) == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize("n", [1, 2, 64, 100])
@pytest.mark.parametrize("spec", ["onebit:block=64", "onebit_sgd:block=64"])
def test_gaussian_error_is_exact_for_small_sizes(spec, n):
    """The expected error of a block is known to the last element; here by the mean over many draws."""
    draws = np.random.default_rng(2).standard_normal((3000, n))
    total = sum(np.sum((x - expected(spec, x)) ** 2) for x in draws)
    assert total / draws.size == pytest.approx(get(spec).gaussian_error(n), rel=0.08, abs=1e-9)


@pytest.mark.parametrize("spec", ["onebit:block=1048576", "onebit_sgd:block=1048576"])
def test_error_on_other_distributions(spec):
    laplace = np.random.default_rng(3).laplace(size=1 << 20).astype(np.float32)
    assert error_on(spec, laplace) == pytest.approx(0.5, rel=5e-3)
    assert error_on(spec, np.exp(gaussian(1 << 20))) == pytest.approx(1 - math.exp(-1), rel=0.02)


def test_two_values_follow_a_shift_that_one_scale_cannot():
    x = gaussian(1 << 16) + np.float32(0.5)
    assert error_on("onebit_sgd", x) < 0.95 * error_on("onebit", x)


# --- laws of these methods --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("spec", BLOCKED)
def test_compressing_twice_is_compressing_once(spec, kind):
    once = compress(spec, INPUTS[kind](5000))
    np.testing.assert_allclose(compress(spec, once), once, rtol=4 * EPS, atol=0)


@pytest.mark.parametrize("spec", ["onebit:block=64", "onebit_sgd:block=64"])
def test_the_error_is_orthogonal_to_what_is_sent(spec):
    """Both are projections; so ``‖x‖² = ‖C(x)‖² + ‖x - C(x)‖²``."""
    x = lognormal(5000)
    seen = compress(spec, x).astype(np.float64)
    assert abs(np.dot(x - seen, seen)) <= 1e-6 * np.dot(seen, seen)


@pytest.mark.parametrize("n", [1, 10, 64, 5000])
@pytest.mark.parametrize("spec", BLOCKED)
def test_the_contraction_is_the_best_that_can_be_promised(spec, n):
    """One element alone in its block loses all that the bound allows."""
    x, block = np.zeros(n, np.float32), min(n, get(spec).block)
    x[0] = 7
    assert error_on(spec, x) == pytest.approx(1 - 1 / block, rel=1e-5, abs=1e-6)
    assert get(spec).contraction(n) == pytest.approx(1 / block)


def test_what_cannot_feed_back_says_so():
    assert all(get(spec).contraction(1000) == 0 and not get(spec).homogeneous for spec in UNSCALED)


@pytest.mark.parametrize("n", [3, 64, 2048, 5000])
@pytest.mark.parametrize("spec", BLOCKED)
def test_values_at_the_limit_keep_a_finite_scale(spec, n):
    """Sums of such values exceed float32. The scale is then too small, but it still contracts."""
    for x in (np.full(n, LIMIT, np.float32), np.full(n, np.inf, np.float32), -np.full(n, LIMIT, np.float32)):
        seen = compress(spec, x).astype(np.float64)
        assert np.isfinite(seen).all()
        clipped = np.clip(x.astype(np.float64), -LIMIT, LIMIT)
        error = np.sum((clipped / LIMIT - seen / LIMIT) ** 2)
        assert error <= (1 - get(spec).contraction(n)) * n


@pytest.mark.parametrize("spec", BLOCKED)
def test_one_bad_element_spoils_its_block_only(spec):
    x = gaussian(5000)
    bad = x.copy()
    bad[4999] = np.nan
    assert np.array_equal(compress(spec, bad)[:4096], compress(spec, x)[:4096])
    bad[4999] = 0
    assert np.array_equal(compress(spec, bad), compress(spec, np.where(np.isnan(bad), 0, bad)))


@pytest.mark.parametrize("spec", BLOCKED)
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, 3e38])
def test_damaged_scales_decode_to_zero(spec, scale):
    payload = encode(spec, gaussian(300))
    payload[8 * 5 :].view(np.float32)[...] = scale
    assert not decode(spec, payload, 300).any()
    out = gaussian(300)
    get(spec).decode_add(payload, out)
    assert np.array_equal(out, gaussian(300))


# --- votes and momentum -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 65, 200_000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_majority_decides(n, ranks):
    compressor = get("signsgd")
    xs = [gaussian(n, seed) for seed in range(ranks)]
    mean = np.zeros(n, np.float32)
    for x in xs:
        compressor.decode_add(encode(compressor, x), mean)
    mean /= ranks
    compressor.finalize(mean)
    votes = sum(np.where(x < 0, -1, 1) for x in xs)
    assert np.array_equal(mean, np.where(votes < 0, -1, 1)), "a draw counts as positive"


@pytest.mark.parametrize("spec", UNSCALED)
def test_a_vote_on_a_vote_changes_nothing(spec):
    x = np.array([-0.0, 0, -1, 1, -1e-45, 0.25], np.float32)
    get(spec).finalize(x)
    assert x.tolist() == [1, 1, -1, 1, -1, 1]
    get(spec).finalize(x)
    assert x.tolist() == [1, 1, -1, 1, -1, 1]


@pytest.mark.parametrize("spec", BLOCKED)
def test_scaled_signs_are_averaged_and_not_voted_on(spec):
    x = gaussian(10)
    get(spec).finalize(x)
    assert np.array_equal(x, gaussian(10))


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_momentum_is_the_papers_but_for_a_factor(beta):
    """``m ← β m + (1 - β) g`` in float64 has the same signs, and is 1 - β times what is kept."""
    context, m = Context(), np.zeros(5000)
    for step in range(20):
        g = gaussian(5000, step)
        m = beta * m + (1 - beta) * g
        seen = decode("signum", encode(f"signum:beta={beta}", g, None, context), 5000)
        clear = np.abs(m) > 1e-6
        assert np.array_equal(seen[clear], np.where(m < 0, -1, 1)[clear])
        np.testing.assert_allclose((1 - beta) * context.state["momentum"], m, atol=1e-5)


def test_a_residual_does_not_enter_the_momentum():
    with_residual, without = Context(), Context()
    residual, total = np.zeros(1000, np.float32), np.zeros(1000)
    for step in range(5):
        g = gaussian(1000, step)
        before = residual.copy()
        seen = decode("signum", encode("signum", g, residual, with_residual), 1000)
        encode("signum", g, None, without)
        assert np.array_equal(with_residual.state["momentum"], without.state["momentum"])
        total = with_residual.state["momentum"].astype(np.float64) + before
        np.testing.assert_allclose(seen + residual, total, atol=1e-5)


def test_momentum_stays_finite_and_forgets_a_bad_element():
    context, x = Context(), gaussian(100)
    encode("signum", x, None, context)
    bad = x.copy()
    bad[3], bad[4], bad[5] = np.nan, np.inf, -3e38
    encode("signum", bad, None, context)
    momentum = context.state["momentum"]
    assert momentum[3:6].tolist() == [0, LIMIT, -LIMIT]
    np.testing.assert_allclose(momentum[6:], 1.9 * x[6:], rtol=1e-6)


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "onebit:block=100",
        "onebit:block=0",
        "onebit_sgd:block=32",
        "onebit_sgd:block=65",
        "onebit:block=64~100@8",
        "signum:beta=1",
        "signum:beta=-0.1",
        "signsgd:beta=0.5",
    ],
)
def test_parameters_that_do_not_fit_are_refused(spec):
    with pytest.raises(ConfigError, match=r"expected|takes"):
        get(spec)


def test_a_scheduled_block_stays_a_multiple_of_64():
    scheduled = get("onebit:block=64~2048@10/5")
    blocks = [scheduled.at(step).block for step in range(12)]
    assert blocks[0] == 64 and blocks[-1] == scheduled.at(None).block == 2048
    assert all(block % 64 == 0 for block in blocks) and blocks == sorted(blocks)
