"""1-bit Adam on one rank: the formula in float64, the end of the warm-up, checkpoints, bad input."""

from __future__ import annotations

import numpy as np
import pytest
from optim_oracles import typical

from espresso_mpi import Session, optim
from espresso_mpi.errors import ConfigError, GradientError, NonFiniteError, StateError
from espresso_mpi.optim import OnebitAdam

SHAPE = (96, 64)


@pytest.fixture
def session():
    with Session(compressor="onebit", min_bytes=0) as opened:
        yield opened


def gradients(count, seed=0, dtype=np.float32, late=0):
    """So many; some elements are zero in the first ``late``."""
    rng = np.random.default_rng(seed)
    found = [{"w": (rng.standard_normal(SHAPE) * 0.1).astype(dtype)} for _ in range(count)]
    for g in found[:late]:
        g["w"][:, ::5] = 0
    return found


def start(dtype=np.float32):
    return {"w": np.random.default_rng(99).standard_normal(SHAPE).astype(dtype)}


def oracle(x, grads, lrs, warmup, means, betas=(0.9, 0.99), eps=1e-8, decay=0.1, clip=1.0):
    """Algorithm 1 in float64; ``means`` are the synchronised momenta of the second stage. Yields x and messages."""
    x, m, v = x.astype(np.float64), 0.0, 0.0
    for t, (g, lr) in enumerate(zip(grads, lrs), 1):
        g = g.astype(np.float64)
        sent = betas[0] * m + (1 - betas[0]) * g
        if t <= warmup:
            m, v = sent, betas[1] * v + (1 - betas[1]) * g**2
        else:
            m = means[t - warmup - 1].astype(np.float64)
        root = np.sqrt((v if t <= warmup else typical(v)) / (1 - betas[1] ** min(t, warmup)))
        direction = m / (1 - betas[0] ** t) / (root + eps)
        x = x - lr * (np.clip(direction, -clip, clip) if t > warmup else direction) - lr * decay * x
        yield x, sent


@pytest.mark.parametrize("kind", ["float32", "float64", "torch", "float16 gradients"])
def test_agrees_with_the_algorithm(kind, session, monkeypatch):
    dtype = np.float64 if kind == "float64" else np.float32
    params, warmup, clip = start(dtype), 4, None if kind == "float64" else 0.8
    grads = gradients(10, dtype=np.float16 if kind == "float16 gradients" else np.float32, late=6)
    given = params
    if kind == "torch":
        torch = pytest.importorskip("torch")
        given = {"w": torch.from_numpy(params["w"].copy())}
    sent, means, sync = [], [], session.sync

    def watched(messages):
        sent.append(np.array(messages["w"].tolist()))
        result = sync(messages)
        means.append(np.array(result["w"].tolist()))
        return result

    monkeypatch.setattr(session, "sync", watched)
    adam = OnebitAdam(given, session, betas=(0.9, 0.99), weight_decay=0.1, warmup=warmup, update_clip=clip)
    lrs, found = [0.02 / (1 + t) for t in range(10)], []
    for g, lr in zip(grads, lrs):
        adam.lr = lr
        given = adam.step({"w": torch.from_numpy(g["w"])} if kind == "torch" else g)
        found.append(np.array(given["w"].tolist()))
    assert len(means) == 6 and adam.frozen
    expected = oracle(start(dtype)["w"], [g["w"] for g in grads], lrs, warmup, means, clip=clip or np.inf)
    for step, (x, message) in enumerate(expected):
        np.testing.assert_allclose(found[step], x, rtol=3e-6, atol=3e-6)
        if step >= warmup:
            np.testing.assert_allclose(sent[step - warmup], message, rtol=2e-5, atol=1e-6)


def test_the_warm_up_is_torchs_adamw(session):
    torch = pytest.importorskip("torch")
    ours, theirs = start(), torch.nn.Parameter(torch.from_numpy(start()["w"]))
    adam = OnebitAdam(ours, session, lr=0.01, weight_decay=0.1, warmup=8)
    reference = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1)
    for g in gradients(8):
        adam.step(g)
        theirs.grad = torch.from_numpy(g["w"].copy())
        reference.step()
    np.testing.assert_allclose(ours["w"], theirs.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_the_warm_up_ends_when_the_variance_has_settled(session):
    """With gradients of constant size, v without its bias is constant, so the first comparison ends the warm-up.

    With gradients that grow by 2 % a step it does not end.
    """
    steady = OnebitAdam(start(), session, betas=(0.9, 0.95), warmup="auto")
    growing = OnebitAdam({"v": start()["w"]}, session, betas=(0.9, 0.95), warmup="auto")
    for step, g in enumerate(gradients(60)):
        steady.step({"w": np.ones(SHAPE, np.float32)})
        growing.step({"v": g["w"] * np.float32(1.02**step)})
        assert steady.frozen == (step + 1 >= 30)  # norms at 10 and 30: 1/(1 - β₂) = 20 steps apart
    assert not growing.frozen


@pytest.mark.parametrize("warmup", [10, 1])
def test_a_bad_gradient_changes_nothing(warmup, session):
    params = start()
    adam = OnebitAdam(params, session, warmup=warmup)
    good, bad = gradients(2)
    adam.step(good)
    before, state = params["w"].copy(), adam.state_dict()
    bad["w"][3, 4] = np.nan
    with pytest.raises(NonFiniteError, match="w"):
        adam.step(bad)
    np.testing.assert_array_equal(params["w"], before)
    assert adam.state_dict()["rule"] == state["rule"]
    np.testing.assert_array_equal(adam.state_dict()["moments"]["w"]["m"], state["moments"]["w"]["m"])


def test_gradients_are_not_changed_and_none_counts_as_zero(session):
    params, twin = {**start(), "b": np.ones(3, np.float32)}, {**start(), "b": np.ones(3, np.float32)}
    adam, other = OnebitAdam(params, session, warmup=2), OnebitAdam({"t": twin}, session, warmup=2)
    for g in gradients(4):
        kept = g["w"].copy()
        adam.step({**g, "b": None})
        other.step({"t": {**g, "b": np.zeros(3, np.float32)}})
        np.testing.assert_array_equal(g["w"], kept)
    np.testing.assert_array_equal(params["b"], twin["b"])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", ["OnebitAdam", "ZeroOneAdam", "OnebitLamb"])
def test_what_has_its_first_gradient_after_the_warm_up_moves_like_the_others(name, kind, session):
    """A part of a parameter, and a whole one. With ε in the place of the root they would move 10⁶ times as far."""
    params = {**start(), "late": start()["w"]}
    if kind == "torch":
        torch = pytest.importorskip("torch")
        params = {key: torch.from_numpy(x) for key, x in params.items()}
    optimizer = getattr(optim, name)(params, session, lr=0.01, weight_decay=0, warmup=8)
    for step, g in enumerate(gradients(24, late=12)):
        if step == 18:  # the numbers are those of the variances, also for a state that is loaded
            optimizer.load_state_dict(optimizer.state_dict())
        g = {**g, "late": g["w"] * (step >= 12)}
        optimizer.step({key: torch.from_numpy(x) for key, x in g.items()} if kind == "torch" else g)
    moved = {key: np.abs(np.asarray(x) - start()["w"]) for key, x in params.items()}
    usual = moved["w"][:, 1::5].mean()
    for late in (moved["w"][:, ::5], moved["late"]):
        assert 0.05 * usual < late.mean() < 2 * usual


def test_bad_input(session):
    for options, text in [
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": 0}, "eps"),
        ({"lr": -1}, "lr"),
        ({"warmup": 0}, "warmup"),
        ({"warmup": "later"}, "warmup"),
        ({"warmup": True}, "warmup"),
        ({"update_clip": 0}, "update_clip"),
    ]:
        with pytest.raises(ConfigError, match=f"OnebitAdam: {text}="):
            OnebitAdam(start(), session, **options)
    adam = OnebitAdam(start(), session)
    with pytest.raises(GradientError, match="lacks 'w'"):
        adam.step({"v": np.ones(SHAPE, np.float32)})
    with pytest.raises(StateError, match="1 steps of which 2 are warm-up"):
        adam.load_state_dict({**adam.state_dict(), "rule": {"steps": 1, "frozen_at": 2, "norms": []}})
    with Session(nonfinite="skip") as skipping, pytest.raises(ConfigError, match="nonfinite='skip'"):
        OnebitAdam(start(), skipping)


@pytest.mark.parametrize("name", ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"])
def test_a_warm_up_without_gradients_is_followed_by_no_step_that_is_too_long(session, name):
    """No v is positive, so nothing says how long a step may be."""
    params = start()
    optimizer, before = getattr(optim, name)(params, session, lr=0.1, weight_decay=0, warmup=3), start()
    for step in range(6):
        optimizer.step({"w": np.full(SHAPE, 0.1 * (step > 2), np.float32)})
    assert np.allclose(params["w"], before["w"], rtol=1e-3)


def test_a_warm_up_without_gradients_does_not_end_by_itself(session):
    params = start()
    adam = OnebitAdam(params, session, betas=(0.9, 0.9), warmup="auto")
    for step in range(85):
        adam.step({"w": np.full(SHAPE, 0.1 * (step >= 30), np.float32)})
        assert adam.frozen == (step + 1 >= 80)  # v is c (1 - 0.9ᵏ) after k gradients: 0.964 of that 20 steps later
