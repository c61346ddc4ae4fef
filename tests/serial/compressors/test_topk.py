"""What only the methods that send the largest magnitudes do; the laws that all obey are in ``test_laws.py``."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from espresso_mpi.compressors import LIMIT, Context, get
from espresso_mpi.compressors.kernels.cpu import clipping, samples
from espresso_mpi.errors import ConfigError

LARGE = 150_001
"""Enough for the sample not to be everything."""


def gaussian(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def integers(n):
    """Many equal magnitudes."""
    return np.rint(2 * gaussian(n))


def burst(n):
    """Non-zero in one place only, which a sample sees as nothing or as much."""
    x = np.zeros(n, np.float32)
    x[n // 2 : n // 2 + max(1, n // 60)] = gaussian(max(1, n // 60))
    return x


def in_sample(n, width):
    """Where a sample with strata of this width looks."""
    places = np.arange(n)
    spots = (places // width * 0x9E3779B9 % 2**32 >> 16) % (width // 16)
    return places % width // 16 == spots


def hidden(n, width=None):
    """Large exactly where the sample does not look, so that too many reach what it says."""
    return (gaussian(n) * np.where(in_sample(n, width or samples.stratum(n)), 1, 4)).astype(np.float32)


def shown(n, width=None):
    """Large exactly where the sample looks, so that too few reach what it says."""
    return (gaussian(n) * np.where(in_sample(n, width or samples.stratum(n)), 64, 1)).astype(np.float32)


def hidden_from_search(n):
    return hidden(n, samples.searching(n, 1).width)


def shown_to_search(n):
    return shown(n, samples.searching(n, 1).width)


INPUTS = {
    "gaussian": gaussian,
    "integers": integers,
    "burst": burst,
    "hidden": hidden,
    "shown": shown,
    "hidden from a search": hidden_from_search,
    "shown to a search": shown_to_search,
    "rising": lambda n: np.arange(n, dtype=np.float32),
    "constant": lambda n: np.full(n, -1.5, np.float32),
    "zero": lambda n: np.zeros(n, np.float32),
    "wild": lambda n: np.where(np.arange(n) % 7 == 0, np.float32(np.nan), np.tanh(gaussian(n)) * np.float32(3e38)),
}


def encode(spec, x, residual=None, context=None):
    compressor = get(spec)
    payload = np.full(compressor.nbytes(x.size), 0xA5, np.uint8)
    with np.errstate(all="ignore"):
        compressor.encode(x, payload, residual, context or Context())
    return payload


def sent(spec, payload, n):
    """(indices, values) as the documentation of the formats says."""
    k = get(spec).count(n)
    if get(spec).name == "topk":
        return payload[: 4 * k].view(np.uint32), payload[4 * k :].view(np.float32)
    count = int(payload[:8].view(np.uint64)[0])
    indices, values = payload[8 : 8 + 4 * k].view(np.uint32), payload[8 + 4 * k :].view(np.float32)
    assert count <= k and not indices[count:].any() and not values[count:].view(np.uint32).any()
    return indices[:count], values[:count]


def sanitised(x):
    return np.clip(np.where(np.isnan(x), np.float32(0), x), np.float32(-LIMIT), np.float32(LIMIT))


def largest(v, m):
    """The m largest magnitudes, equal ones in order of their index; in order of their index."""
    return np.sort(np.argsort(-np.abs(v.astype(np.float64)), kind="stable")[:m])


def expected_count(spec, v):
    """From how many elements to how many go."""
    compressor, nonzero = get(spec), np.count_nonzero(v)
    k = compressor.count(v.size)
    if compressor.name == "threshold":
        reach = np.count_nonzero(np.abs(v) >= np.float32(compressor.value))
        return (min(k, max(1, reach)),) * 2
    least = {"topk": k, "topk_sampled": -(-k // 2), "dgc": -(-4 * k // 5)}[compressor.name]
    return (k if compressor.name == "topk" else min(least, nonzero)), k


SPECS = (
    "topk",
    "topk:ratio=0.3",
    "topk_sampled:ratio=0.001",
    "topk_sampled:ratio=0.05",
    "topk_sampled:ratio=1.0",
    "dgc:ratio=0.01",
    "threshold:value=3.0,ratio=0.01",
    "threshold:value=0.5,ratio=0.3",
    "threshold:value=1e6,ratio=0.3",
)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("n", [70, 9000, LARGE])
@pytest.mark.parametrize("spec", SPECS)
def test_sends_the_largest(spec, n, kind):
    x = INPUTS[kind](n)
    v = sanitised(x)
    indices, values = sent(spec, encode(spec, x), n)
    least, most = expected_count(spec, v)
    assert least <= indices.size <= most
    assert np.array_equal(indices, largest(v, indices.size))
    assert np.array_equal(values, v[indices])


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("spec", SPECS)
def test_residual_is_zero_where_it_was_sent(spec, kind):
    x, before = INPUTS[kind](LARGE), gaussian(LARGE, 1) / 1000
    residual = before.copy()
    indices, values = sent(spec, encode(spec, x, residual), LARGE)
    with np.errstate(all="ignore"):
        v = sanitised(x + before)
    assert np.array_equal(values, v[indices])
    v[indices] = 0
    assert np.array_equal(residual, v)


def test_ties_go_in_order_of_their_index():
    x = np.array([1, -2, 2, 0, -1, 2, 1, 1], np.float32)
    payload = encode("topk:ratio=0.5", x)
    assert payload[:16].view(np.uint32).tolist() == [0, 1, 2, 5]
    assert payload[16:].view(np.float32).tolist() == [1, -2, 2, 2]


def test_counted_layout():
    payload = encode("threshold:value=2.0,ratio=0.5", np.array([1, -2, 3, 0, -1, 0, 1, 1], np.float32))
    assert payload[:8].view(np.uint32).tolist() == [2, 0]
    assert payload[8:24].view(np.uint32).tolist() == [1, 2, 0, 0]
    assert payload[24:].view(np.float32).tolist() == [-2, 3, 0, 0]


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "topk_sampled:ratio=0.1"])
def test_repeated_and_foreign_indices_stay_finite(spec):
    payload = encode(spec, gaussian(1000))
    head = 0 if spec.startswith("topk:") else 8
    payload[head : head + 200].view(np.uint32)[...] = 7
    payload[head + 200 : head + 400].view(np.uint32)[...] = 0xFFFFFFFF
    payload[head + 400 :].view(np.float32)[...] = 3e38
    out = np.ones(1000, np.float32)
    get(spec).decode_add(payload, out)
    assert np.isfinite(out).all() and (np.delete(out, 7) == 1).all()
    get(spec).decode(payload, out)
    assert out[7] == LIMIT and not np.delete(out, 7).any()


def test_count_beyond_the_slots_is_the_slots():
    payload = encode("topk_sampled:ratio=0.1", gaussian(1000))
    payload[:8] = 0xFF
    out = np.empty(1000, np.float32)
    get("topk_sampled:ratio=0.1").decode(payload, out)
    assert np.count_nonzero(out) == 100


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "published"), [(0.001, 0.9873), (0.01, 0.9155), (0.05, 0.7209), (0.1, 0.5607)])
def test_error_is_the_published_one(ratio, published):
    n = 1 << 20
    assert get(f"topk:ratio={ratio}").gaussian_error(n) == pytest.approx(published, abs=6e-5)
    for name in ("topk_sampled", "dgc"):
        assert get(f"{name}:ratio={ratio}").gaussian_error(n) == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(("ratio", "published"), [(0.01, 0.8379), (0.1, 0.4047)])
def test_error_on_laplace_values(ratio, published):
    x = np.random.default_rng(0).laplace(size=1 << 20).astype(np.float32)
    out = np.empty_like(x)
    get(f"topk:ratio={ratio}").decode(encode(f"topk:ratio={ratio}", x), out)
    lost = np.sum((x - out).astype(np.float64) ** 2) / np.sum(x.astype(np.float64) ** 2)
    assert lost == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(("value", "ratio"), [(1.0, 0.5), (3.0, 0.5), (0.1, 0.02)])
def test_threshold_error(value, ratio):
    x, spec = gaussian(1 << 20), f"threshold:value={value},ratio={ratio}"
    out = np.empty_like(x)
    get(spec).decode(encode(spec, x), out)
    lost = np.sum((x - out).astype(np.float64) ** 2) / np.sum(x.astype(np.float64) ** 2)
    assert lost == pytest.approx(get(spec).gaussian_error(x.size), rel=0.01)


# --- the sample -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 65_535, 65_536, 65_537, 100_000, 1 << 20, 1 << 22, 1 << 26, (1 << 30) + 5])
def test_sample_is_large_enough_and_inside(n):
    size, width = samples.sample_size(n), samples.stratum(n)
    assert size >= min(n, 1 << 16) * 0.99 and size >= n / 64 * 0.99 and size <= n
    assert width & (width - 1) == 0 and (n <= 1 << 16 or size // 16 * width <= n)


def test_sample_misleads_rarely():
    counts = []
    for seed in range(10):
        x = gaussian(LARGE, seed)
        counts.append(sent("topk_sampled:ratio=0.01", encode("topk_sampled:ratio=0.01", x), LARGE)[0].size)
    assert min(counts) >= 0.85 * 1500 and 0.95 * 1500 <= np.mean(counts) <= 1500


# --- dgc --------------------------------------------------------------------------------------------------------------


def test_dgc_over_many_steps():
    """mu = 0.5 makes the products exact, so plain float32 gives the same bits."""
    n, spec, context = 5000, "dgc:ratio=0.05,mu=0.5", Context()
    residual, u, v = (np.zeros(n, np.float32) for _ in range(3))
    for step in range(20):
        g = gaussian(n, step)
        u = np.float32(0.5) * u + g
        v = v + u
        indices, values = sent(spec, encode(spec, g, residual, context), n)
        assert np.array_equal(indices, largest(v, indices.size)) and np.array_equal(values, v[indices])
        u[indices] = v[indices] = 0
        assert np.array_equal(residual, v) and np.array_equal(context.state["momentum"], u)


def test_dgc_without_a_residual_sends_the_top_of_its_momentum():
    n, spec, context = 5000, "dgc:ratio=0.05,mu=0.5", Context()
    u = np.zeros(n, np.float32)
    for step in range(5):
        g = gaussian(n, step)
        u = np.float32(0.5) * u + g
        indices, values = sent(spec, encode(spec, g, None, context), n)
        assert np.array_equal(indices, largest(u, indices.size)) and np.array_equal(values, u[indices])
        u[indices] = 0
        assert np.array_equal(context.state["momentum"], u)


def test_dgc_momentum_accelerates_what_is_not_sent():
    """A constant gradient g of an element that never goes adds up to g, 1.9 g, 2.71 g: the sum of the momenta."""
    context, residual = Context(), np.zeros(100, np.float32)
    g = np.ones(100, np.float32)
    g[0] = 100
    for expected in (1, 2.9, 5.61):
        encode("dgc:ratio=0.01", g, residual, context)
        assert residual[0] == 0 and residual[1:] == pytest.approx(expected)
    assert context.state["momentum"][0] == 0


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1.0, 1e30])
def test_dgc_clips_the_norm(scale, ranks):
    g = (gaussian(10_000) * scale).astype(np.float32)
    norm = math.sqrt(np.sum(g.astype(np.float64) ** 2))
    for share in (0.5, 2.0):
        context, clip = Context(ranks=ranks), share * norm * math.sqrt(ranks)
        encode(f"dgc:clip={clip!r}", g, np.zeros_like(g), context)
        u = context.state["momentum"].astype(np.float64)
        indices, values = sent("dgc", encode(f"dgc:clip={clip!r}", g, np.zeros_like(g), Context(ranks=ranks)), g.size)
        u[indices] = values
        assert math.sqrt(np.sum(u**2)) == pytest.approx(min(share, 1) * norm, rel=1e-4 if scale > 1e-40 else 1e-2)


def test_dgc_clips_the_same_on_any_order():
    """The sum of squares is one of integers: without an order, so the same on a GPU."""
    g = gaussian(LARGE)
    assert clipping.clip_factor(g, 1.0, Context()) == clipping.clip_factor(g[::-1].copy(), 1.0, Context())


@pytest.mark.parametrize(("step", "k"), [(0, 2500), (100, 629), (200, 158), (300, 40), (400, 10), (None, 10)])
def test_dgc_warms_up(step, k):
    compressor = get("dgc:ratio=0.25~0.001@400").at(step)
    assert compressor.count(10_000) == k and compressor.nbytes(10_000) == 8 + 8 * k


def test_dgc_is_homogeneous_unless_it_clips():
    assert get("dgc").homogeneous and not get("dgc:clip=1.0").homogeneous


# --- GPU --------------------------------------------------------------------------------------------------------------

_STEPS_ON_THE_SIMULATOR = """
import cuda_simulator, sys
cuda_simulator.install()
import numpy as np
from numba import cuda
from espresso_mpi.compressors import Context, get
from espresso_mpi.compressors.kernels.cpu import samples
samples.WHOLE = 64  # so that a sample is one
compressor, n = get(sys.argv[1]), 700
on_cpu, on_gpu = Context(), Context()
residual = np.zeros(n, np.float32)
residual_gpu, payload = cuda.to_device(residual), np.empty(compressor.nbytes(n), np.uint8)
payload_gpu = cuda.to_device(payload)
for step in range(3):
    x = np.random.default_rng(step).standard_normal(n).astype(np.float32) * np.float32(10.0 ** step)
    x[:300] = np.rint(x[:300]) * np.float32(step != 2)
    x[::9] = np.nan if step == 1 else x[::9]
    compressor.encode(x, payload, residual, on_cpu)
    compressor.encode(cuda.to_device(x), payload_gpu, residual_gpu, on_gpu)
    pairs = [(payload, payload_gpu), (residual, residual_gpu)]
    pairs += [(on_cpu.state[name], on_gpu.state[name]) for name in on_cpu.state]
    assert all(a.tobytes() == b.copy_to_host().tobytes() for a, b in pairs), step
"""


@pytest.mark.parametrize(
    "spec", ["dgc:ratio=0.1,clip=20.0", "topk_sampled:ratio=0.02", "threshold:value=3.0,ratio=0.1"]
)
def test_gpu_gives_the_same_bytes_over_many_steps(spec):
    command = [sys.executable, "-c", _STEPS_ON_THE_SIMULATOR, spec]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stdout + run.stderr


# --- threshold --------------------------------------------------------------------------------------------------------


def test_threshold_leaves_less_than_the_value():
    residual = np.zeros(1000, np.float32)
    for step in range(30):
        encode("threshold:value=2.0,ratio=1.0", gaussian(1000, step), residual)
        assert np.abs(residual).max() < 2


def test_threshold_beyond_its_capacity_goes_in_later_steps():
    residual, x = np.zeros(1000, np.float32), gaussian(1000) + np.float32(10)
    for step in range(10):
        indices, _ = sent("threshold:ratio=0.1", encode("threshold:ratio=0.1", x * (step == 0), residual), 1000)
        assert indices.size == 100
    assert not residual.any()


@pytest.mark.parametrize(
    "spec",
    [
        "topk:ratio=0",
        "topk:ratio=1.5",
        "topk:ratio=nan",
        "topk:ratio=0.5~2@10",
        "topk_sampled:ratio=-1",
        "dgc:ratio=0",
        "dgc:mu=1.0",
        "dgc:mu=-0.1",
        "dgc:clip=-1",
        "dgc:clip=inf",
        "threshold:value=0",
        "threshold:value=inf",
        "threshold:ratio=0",
    ],
)
def test_refuses_parameters_that_do_not_fit(spec):
    with pytest.raises(ConfigError):
        get(spec)


@pytest.mark.parametrize("n", [1, 2, 50, 150, 1000])
def test_topk_sends_a_rounded_share_and_at_least_one(n):
    assert get("topk").nbytes(n) == 8 * max(1, round(0.01 * n))
