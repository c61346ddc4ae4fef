"""What error feedback is for: three problems where compressed descent fails without it and converges with it.

The compressors work in float32; everything around them is float64. Before a vector is compressed it is scaled by a
power of two to a magnitude near 1 and scaled back afterwards: both are exact, so that steps may shrink far below what
float32 holds, as the float64 oracles do. What float32 adds is an error relative to the vector compressed, which goes to
zero with it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

from espresso_mpi.compressors import get


class Wire:
    """``C(v)`` in float64 for the rows of v, by a float32 compressor."""

    def __init__(self, spec: str, n: int) -> None:
        self._compressor = get(spec)
        self._payload = np.empty(self._compressor.nbytes(n), np.uint8)
        self._out = np.empty(n, np.float32)

    def __call__(self, v: np.ndarray) -> np.ndarray:
        return np.stack([self._row(row) for row in v])

    def _row(self, row: np.ndarray) -> np.ndarray:
        exponent = np.frexp(np.abs(row).max())[1]
        self._compressor.encode(np.ldexp(row, -exponent).astype(np.float32), self._payload)
        self._compressor.decode(self._payload, self._out)
        return np.ldexp(self._out.astype(np.float64), exponent)


def plain(gradients, x, rate, wire, steps):
    """Descent on the mean of the workers' compressed gradients."""
    for _ in range(steps):
        x = x - rate * wire(gradients(x)).mean(0)
        yield x


def fed_back(gradients, x, rate, wire, steps):
    """EF14: what is lost is added to the next gradient."""
    residual = np.zeros_like(gradients(x))
    for _ in range(steps):
        wanted = gradients(x) + residual
        sent = wire(wanted)
        residual = wanted - sent
        x = x - rate * sent.mean(0)
        yield x


def ef21(gradients, x, rate, wire, steps):
    """EF21: the difference to what is known of the gradient is sent."""
    known = np.zeros_like(gradients(x))
    for _ in range(steps):
        known = known + wire(gradients(x) - known)
        x = x - rate * known.mean(0)
        yield x


def last(path):
    """The end of a path of x."""
    for x in path:
        end = x
    return end


# --- three workers who pull apart (Beznosikov et al., 2020) -----------------------------------------------------------

PULLS = np.array([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]])


def pulling(x):
    """Gradients of ``⟨a,x⟩² + ¼‖x‖²`` for each a."""
    return 2 * (PULLS @ x)[:, None] * PULLS + x / 2


def pull(x):
    return float(np.mean((PULLS @ x) ** 2) + x @ x / 4)


def test_top1_without_feedback_grows():
    """Every worker sends the component that its own term pulls the wrong way: x grows by 1 + 11γ/6 in each step."""
    end = last(plain(pulling, np.ones(3), 0.01, Wire("topk:ratio=0.3", 3), 100))
    assert end == pytest.approx(3 * [(1 + 0.11 / 6) ** 100], rel=1e-5)
    assert end[0] == pytest.approx(6.1517, rel=1e-4)


@pytest.mark.parametrize("method", [fed_back, ef21])
def test_top1_with_feedback_converges(method):
    path = method(pulling, np.ones(3), 0.01, Wire("topk:ratio=0.3", 3), 4000)
    assert pull(last(path)) <= 1e-30


# --- the valley that signs do not see (Karimireddy et al., 2019) ------------------------------------------------------


def valley(x):
    return abs(x[0] + x[1]) / 2 + abs(x[0] - x[1])


def down_the_valley(x):
    """A subgradient of ``½|x₁+x₂| + |x₁-x₂|`` for one worker."""
    across, along = (1.0 if value >= 0 else -1.0 for value in (x[0] - x[1], x[0] + x[1]))
    return np.array([[along / 2 + across, along / 2 - across]])


def test_sign_without_feedback_stays():
    """The signs of the gradient are always opposite, so x₁ + x₂ never changes."""
    path = plain(down_the_valley, np.ones(2), 5e-4, Wire("onebit", 2), 1000)
    assert min(valley(x) for x in path) == pytest.approx(1)


def test_sign_with_feedback_converges():
    values = [valley(x) for x in fed_back(down_the_valley, np.ones(2), 5e-4, Wire("onebit", 2), 5000)]
    assert min(values) <= 7e-4
    assert max(values[-1000:]) <= 5e-3  # it stays within a few steps' length


# --- logistic regression, every worker with data of its own -----------------------------------------------------------

LAMBDA = 1e-3
OPTIMUM = 0.14039711


@cache
def rows():
    """Per worker, its samples times their labels, padded with zeros; and the weight of each sample."""
    data = load_breast_cancer()
    features = (data.data - data.data.mean(0)) / data.data.std(0)
    signed = np.c_[features, np.ones(len(features))] * (2.0 * data.target - 1)[:, None] / np.sqrt(31)
    parts = np.array_split(np.random.default_rng(0).permutation(len(signed)), 4)
    samples, weights = np.zeros((4, len(parts[0]), 31)), np.zeros((4, len(parts[0])))
    for rank, part in enumerate(parts):
        samples[rank, : len(part)], weights[rank, : len(part)] = signed[part], 1 / len(part)
    return samples, weights


def logistic(x):
    samples, weights = rows()
    return float(np.sum(np.logaddexp(0, -samples @ x) * weights) / 4 + LAMBDA / 2 * x @ x)


def logistic_gradients(x):
    samples, weights = rows()
    pulls = weights / (1 + np.exp(samples @ x))
    return LAMBDA * x - (pulls[:, None, :] @ samples)[:, 0, :]


def gap(method):
    """``f - f*`` after 3000 steps with top-1, and the bound on it that the last gradient gives."""
    x = last(method(logistic_gradients, np.zeros(31), 6.0, Wire("topk:ratio=0.01", 31), 3000))
    slope = logistic_gradients(x).mean(0)
    return logistic(x) - OPTIMUM, float(slope @ slope) / (2 * LAMBDA)


def test_logistic_regression_without_feedback_stalls():
    assert gap(plain)[0] == pytest.approx(8.4e-3, rel=0.05)


def test_logistic_regression_with_feedback_comes_close():
    assert 1e-6 <= gap(fed_back)[0] <= 1e-4  # where EF14 hovers: 2.9e-5, give or take


def test_logistic_regression_with_ef21_converges():
    """f is strongly convex, so ‖∇f‖²/2λ bounds what is missing, more finely than f itself can be computed."""
    missing, bound = gap(ef21)
    assert missing == pytest.approx(0, abs=1e-8)  # OPTIMUM is known to eight digits
    assert bound <= 1e-16
