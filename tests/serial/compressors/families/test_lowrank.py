"""``powersgd`` and ``acpsgd`` against linear algebra in float64, their payloads, and the values that they must show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from espresso_mpi.compressors import Context, get
from espresso_mpi.errors import ConfigError

SHARED = 0x0123_4567_89AB_CDEF
EPS = float(np.finfo(np.float32).eps)


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def step(c, x, context, residual=None):
    """One step of one rank alone: the payload, and what it decodes to."""
    payload = np.empty(c.nbytes(x.size), np.uint8)
    c.encode(x, payload, residual, context)
    c.update_from_aggregate(payload, x.size, context)
    return payload, decoded(c, payload, x.size)


def decoded(c, payload, n):
    out = np.empty(n, np.float32)
    c.decode(payload, out)
    return out


def steps(c, x, count, shared=SHARED):
    """The relative squared error in every step, for the same values again and again."""
    context, wide, found = Context(0, shared), x.astype(np.float64), []
    for number in range(count):
        _, seen = step(c, x, replace(context, step=number))
        found.append(float(np.sum((wide - seen) ** 2) / np.sum(wide**2)))
    return found


def as_matrix(c, x):
    """The values as the method sees them, in float64, and the rank."""
    m = c.matrix(x.size)
    full = np.zeros(m.rows * m.cols)
    full[: x.size] = x
    return full.reshape(m.rows, m.cols), m.rank


def factors(c, payload, n):
    """The header's factor and the other one of a ``powersgd`` payload, a vector in each column."""
    m, head = c.matrix(n), c.header(n)
    p = payload[:head].view(np.float32)[: m.rank * m.rows].reshape(m.rank, m.rows)
    return p.T.astype(np.float64), payload[head:].view(np.float32).reshape(m.rank, m.cols).T.astype(np.float64)


# --- against an oracle ------------------------------------------------------------------------------------------------

SHAPES = [("", 1), ("", 50), ("", 5000), ("cols=48", 48 * 37), ("cols=100", 6611), ("cols=1000", 30_500)]


def with_columns(name, rank, cols):
    return get(f"{name}:rank={rank}" + (f",{cols}" if cols else ""))


@pytest.mark.parametrize("rank", [1, 3, 4, 9])
@pytest.mark.parametrize("cols, n", SHAPES)
def test_powersgd_projects_on_what_the_power_iteration_finds(cols, n, rank):
    c, x = with_columns("powersgd", rank, cols), gaussian(n)
    M, rank = as_matrix(c, x)
    q = gaussian(rank, M.shape[1], seed=1)
    payload, seen = step(c, x, Context(state={"q": q.ravel().copy()}))
    P, _ = np.linalg.qr(M @ q.T.astype(np.float64))
    expected = (P @ (P.T @ M)).ravel()[:n]
    assert np.linalg.norm(seen - expected) <= 1e-5 * np.linalg.norm(x)
    left, right = factors(c, payload, n)
    assert np.abs(left.T @ left - np.eye(rank)).max() <= 4 * EPS
    assert np.linalg.norm(right - M.T @ left) <= 1e-6 * np.linalg.norm(M)


@pytest.mark.parametrize("rank", [1, 3, 4, 9])
@pytest.mark.parametrize("cols, n", SHAPES)
def test_acpsgd_projects_rows_and_columns_by_turns(cols, n, rank):
    c, x = with_columns("acpsgd", rank, cols), gaussian(n)
    M, rank = as_matrix(c, x)
    given = {"p": gaussian(rank, M.shape[0], seed=1), "q": gaussian(rank, M.shape[1], seed=2)}
    P, Q = (np.linalg.qr(given[name].T.astype(np.float64))[0] for name in "pq")
    for number, expected in enumerate((M @ Q @ Q.T, P @ (P.T @ M))):
        state = {name: factor.ravel().copy() for name, factor in given.items()}
        state["turn"] = np.array([number], np.float32)
        _, seen = step(c, x, Context(state=state))
        assert np.linalg.norm(seen - expected.ravel()[:n]) <= 1e-5 * np.linalg.norm(x)
        learned, other = (state["q"], M.T @ P) if number else (state["p"], M @ Q)
        size = np.linalg.norm(other)
        assert abs(np.linalg.norm(learned) - size) <= 1e-5 * size, "not what the next step starts from"


@pytest.mark.parametrize("name", ["powersgd", "acpsgd"])
def test_residual_is_what_the_projection_leaves(name):
    c, x, context = get(name), gaussian(4096), Context(0, SHARED)
    residual = np.zeros_like(x)
    _, seen = step(c, x, context, residual)
    assert np.array_equal(residual, x - seen)
    assert abs(float(residual.astype(np.float64) @ seen)) <= 1e-4 * float(x @ x), "not orthogonal to what was sent"


# --- payload and parameters -------------------------------------------------------------------------------------------


def test_sizes_of_payloads():
    powersgd, acpsgd = get("powersgd:rank=3,cols=50"), get("acpsgd:rank=3,cols=50")
    n = 50 * 30 - 7  # 30 rows
    assert (powersgd.header(n), powersgd.nbytes(n)) == (368, 368 + 3 * 50 * 4)  # 360 filled up to 16 bytes
    assert powersgd.summary(n).size == 3 * 30 and powersgd.summary(n).operator == "sum"
    assert (acpsgd.header(n), acpsgd.nbytes(n)) == (16 + 608, 16 + 608 + 3 * 50 * 4)  # room for the larger factor
    assert acpsgd.summary(n) is None
    assert powersgd.element == acpsgd.element == "float32" and powersgd.common and acpsgd.common
    assert powersgd.nbytes(0) == acpsgd.nbytes(0) == 0


def test_vectors_are_seen_nearly_square():
    assert get("powersgd").matrix(2000)[:2] == (45, 45)
    assert get("powersgd").matrix(1 << 20) == (1024, 1024, 4)
    assert get("powersgd:rank=200").matrix(100).rank == 10


def test_takes_the_row_length_from_the_shape():
    c = get("powersgd:rank=2")
    assert c.shaped((64, 3, 5, 5)) == get("powersgd:rank=2,cols=75")
    assert c.shaped((100,)) == c and c.shaped(()) == c
    assert c.shaped((64, 75)).matrix(64 * 75) == (64, 75, 2)
    assert c.shaped((10_000, 2)).matrix(20_000)[:2] == c.matrix(20_000)[:2], "its factors would be larger than it is"


@pytest.mark.parametrize("name", ["powersgd", "acpsgd"])
@pytest.mark.parametrize("wrong", ["rank=0", "rank=257", "rank=-1", "cols=-2"])
def test_parameters_refused(name, wrong):
    with pytest.raises(ConfigError, match=name):
        get(f"{name}:{wrong}")


def test_rank_may_be_scheduled():
    c = get("powersgd:rank=8~2@100")
    assert (c.at(0).rank, c.at(None).rank) == (8, 2)
    assert c.shaped((30, 40)).at(None) == get("powersgd:rank=2,cols=40")


# --- several ranks ----------------------------------------------------------------------------------------------------


def synchronise(c, xs, contexts, residuals):
    """One step of several ranks: the mean that all decode to."""
    n = xs[0].size
    if c.summary(n) is not None:
        summaries = [np.empty(c.summary(n).size, np.float32) for _ in xs]
        for x, summary, residual, context in zip(xs, summaries, residuals, contexts):
            c.summarise(x, summary, residual, context)
        contexts = [replace(context, summary=np.sum(summaries, axis=0)) for context in contexts]
    payloads = [np.empty(c.nbytes(n), np.uint8) for _ in xs]
    for x, payload, residual, context in zip(xs, payloads, residuals, contexts):
        c.encode(x, payload, residual, context)
    head = c.header(n)
    assert len({payload[:head].tobytes() for payload in payloads}) == 1, "the ranks do not agree on the header"
    total = payloads[0].copy()
    total[head:].view(np.float32)[...] = np.sum([p[head:].view(np.float32) for p in payloads], axis=0)
    for context in contexts:
        c.update_from_aggregate(total, n, context)
    return decoded(c, total, n) / len(xs)


@pytest.mark.parametrize("name", ["powersgd", "acpsgd"])
def test_ranks_together_send_the_projection_of_their_mean(name):
    n, ranks = 40 * 60, 3
    c, residuals = get(f"{name}:cols=60"), [np.zeros(n, np.float32) for _ in range(ranks)]
    contexts, sent, given = [Context(rank, SHARED, ranks=ranks) for rank in range(ranks)], np.zeros(n), np.zeros(n)
    for number in range(6):
        xs = [gaussian(n, seed=10 * number + rank) for rank in range(ranks)]
        contexts = [replace(context, step=number) for context in contexts]
        sent += synchronise(c, xs, contexts, residuals)
        given += np.mean(xs, axis=0, dtype=np.float64)
        left = np.mean(residuals, axis=0, dtype=np.float64)
        assert np.abs(given - sent - left).max() <= 1e-5, "something was lost or invented"
        states = {context.state["q" if name == "powersgd" or number % 2 else "p"].tobytes() for context in contexts}
        assert len(states) == 1, "the ranks learned different factors"


@pytest.mark.parametrize("name", ["powersgd", "acpsgd"])
def test_feedback_sends_everything_in_the_end(name):
    """Of a constant gradient of full rank, rank 2 at a time."""
    c, x = get(f"{name}:rank=2"), gaussian(400)
    context, residual, sent = Context(0, SHARED), np.zeros_like(x), np.zeros(x.size)
    for number in range(400):
        sent += step(c, x, replace(context, step=number, shared=number), residual)[1]
    assert np.linalg.norm(sent / 400 - x) <= 0.1 * np.linalg.norm(x)


# --- degenerate gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("name", ["powersgd", "acpsgd"])
def test_zero_gives_zero_and_the_next_step_is_as_good_as_the_first(name, rank):
    """PyTorch's hook gives NaN for zeros with rank 1; and what was zero must not stay zero."""
    c, n, context = get(f"{name}:rank={rank}"), 1024, Context(0, SHARED)
    for number in range(2):
        _, seen = step(c, np.zeros(n, np.float32), replace(context, step=number))
        assert not seen.any()
    low = (gaussian(32, rank) @ gaussian(rank, 32, seed=1)).ravel()
    seen = [step(c, low, replace(context, step=number))[1] for number in range(2, 5)][-1]
    assert np.linalg.norm(seen - low) <= 1e-5 * np.linalg.norm(low)


@pytest.mark.parametrize("name", ["powersgd", "acpsgd"])
def test_dependent_vectors_are_replaced(name):
    """After a gradient of rank 1 all four vectors are at work again for one of rank 4."""
    c, context = get(name), Context(0, SHARED)
    for number in range(4):
        step(c, np.outer(gaussian(32), gaussian(32, seed=1)).ravel(), replace(context, step=number))
    low = (gaussian(32, 4, seed=2) @ gaussian(4, 32, seed=3)).ravel()
    seen = [step(c, low, replace(context, step=number))[1] for number in range(4, 8)][-1]
    assert np.linalg.norm(seen - low) <= 1e-5 * np.linalg.norm(low)


def test_vectors_are_orthonormal_however_alike():
    """Columns that differ in the fifth digit, and of very different lengths."""
    base = gaussian(1, 4096)
    x = (base * (1 + 1e-5 * gaussian(64, 4096, seed=1)) * np.geomspace(1e-15, 1e15, 64, dtype=np.float32)[:, None]).T
    c = get("powersgd:rank=8,cols=64")
    payload, _ = step(c, np.ascontiguousarray(x).ravel(), Context(0, SHARED))
    P, _ = factors(c, payload, x.size)
    gram, used = P.T @ P, np.abs(P).max(axis=0) > 0
    assert np.abs(gram - np.diag(used)).max() <= 4 * EPS
    assert used.any()


# --- the values that they must show -----------------------------------------------------------------------------------


def test_noise_needs_several_steps():
    """Rank 4 of 256x256 noise: the best there is has an error of .942."""
    x = gaussian(256 * 256)
    best = 1 - np.sum(np.linalg.svd(x.reshape(256, 256), compute_uv=False)[:4] ** 2) / np.sum(x.astype(float) ** 2)
    assert best == pytest.approx(0.942, abs=0.001)
    every = [steps(get("powersgd"), x, 5, shared) for shared in range(20)]
    assert all(found == sorted(found, reverse=True) and found[-1] > best for found in every)
    first, *_, fifth = np.mean(every, axis=0)
    assert first == pytest.approx(get("powersgd").gaussian_error(x.size), abs=0.001) == pytest.approx(0.969, abs=0.0005)
    assert fifth == pytest.approx(0.948, abs=0.001)


@pytest.mark.parametrize("name, warm", [("powersgd", 1), ("acpsgd", 3)])
def test_exact_rank_is_found_to_rounding(name, warm):
    for seed in range(5):
        x = (gaussian(256, 4, seed=seed) @ gaussian(4, 256, seed=seed + 50)).ravel()
        found = steps(get(name), x, warm + 1, shared=seed)
        assert found[warm] <= 5e-14, "what rounding of the values and of the factors explains"
        if name == "powersgd":
            assert found[0] <= 1e-11, "the first P is as badly conditioned as random vectors are"


def test_leading_direction_of_a_falling_spectrum():
    """diag(1/i), rank 1: from far away to the best, .389, in a few steps."""
    values, x = 1 / np.arange(1, 129), np.diag(1 / np.arange(1, 129)).astype(np.float32).ravel()
    context, q = Context(state={"q": gaussian(128, seed=2045)}), gaussian(128, seed=2045).astype(np.float64)
    for published in (0.806, 0.406, 0.390, 0.389):
        _, seen = step(get("powersgd:rank=1"), x, context)
        p = values * q / np.linalg.norm(values * q)
        q = values * p
        error = float(np.sum((x - seen.astype(np.float64)) ** 2) / np.sum(values**2))
        assert error == pytest.approx(1 - q @ q / (values @ values), rel=1e-5) == pytest.approx(published, abs=0.0021)


@pytest.mark.parametrize("number, share", [(0, 4 / 60), (1, 4 / 40)])
def test_acpsgd_keeps_the_same_share_of_any_matrix(number, share):
    """On average over the shared seeds, exactly rank/cols in even and rank/rows in odd steps."""
    one = np.zeros(2400, np.float32)
    one[77] = 1
    for x in (one, gaussian(2400)):
        c, total = get("acpsgd:cols=60"), np.sum(x.astype(np.float64) ** 2)
        kept = []
        for shared in np.random.default_rng(0).integers(0, 1 << 63, 300):
            _, seen = step(c, x, Context(0, int(shared), state={"turn": np.array([number], np.float32)}))
            kept.append(1 - np.sum((x.astype(np.float64) - seen) ** 2) / total)
        assert abs(np.mean(kept) - share) <= 5 * np.std(kept) / np.sqrt(len(kept)) + 1e-6
    assert get("acpsgd:cols=60").contraction(2400) == pytest.approx(4 / 60, rel=1e-5)
