"""Saved states of all optimizers: a run that goes on has the same bits; what does not fit is refused."""

from __future__ import annotations

import numpy as np
import pytest

from espresso_mpi import Session, optim
from espresso_mpi.errors import StateError

SHAPES = {"a": (70, 40), "b": (5,)}

MAKERS = {
    "Clan": lambda params, session: optim.Clan(params, lr=0.05),
    "OnebitAdam": lambda params, session: optim.OnebitAdam(params, session, warmup=3),
    "OnebitLamb": lambda params, session: optim.OnebitLamb(params, session, warmup=3),
    "MomentumSGD": lambda params, session: optim.MomentumSGD(params, session, warmup=3),
    "ZeroOneAdam": lambda params, session: optim.ZeroOneAdam(params, session, warmup=5, kappa=2, double_every=2),
    "DeMo": lambda params, session: optim.DeMo(params, session, weight_decay=0.1),
    "DiLoCo": lambda params, session: optim.DiLoCo(params, session, every=5, fragments=2, delay=1),
}


def fresh():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(step):
    rng = np.random.default_rng(step + 1)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def train(optimizer, params, steps):
    for step in steps:
        if isinstance(optimizer, optim.DiLoCo):
            for name, g in gradients(step).items():
                params[name] -= np.float32(0.1) * g
            optimizer.step()
        else:
            optimizer.step(gradients(step))
    if hasattr(optimizer, "average"):
        optimizer.average()


@pytest.fixture
def session():
    with Session(compressor="onebit", min_bytes=0) as opened:
        yield opened


def arrays(state):
    """All arrays of a state, by their keys."""
    if not isinstance(state, dict):
        return {(): np.asarray(state)}
    return {(key, *rest): array for key, value in state.items() for rest, array in arrays(value).items()}


def equal(first, second):
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("stop", [2, 7])
@pytest.mark.parametrize("name", MAKERS)
def test_a_checkpoint_goes_on_with_the_same_bits_and_is_a_copy(name, stop, session, tmp_path):
    whole, first = fresh(), fresh()
    one = MAKERS[name](whole, session)
    train(one, whole, range(stop))
    train(one, whole, range(stop, 11))
    with Session(compressor="onebit", min_bytes=0) as other:
        optimizer = MAKERS[name](first, other)
        train(optimizer, first, range(stop))
        state, kept = optimizer.state_dict(), {key: array.copy() for key, array in first.items()}
        np.save(tmp_path / "state.npy", state, allow_pickle=True)
        train(optimizer, first, range(stop, 11))
    saved = np.load(tmp_path / "state.npy", allow_pickle=True).item()
    assert equal(arrays(state), arrays(saved)), "training has changed a saved state"
    with Session(compressor="onebit", min_bytes=0) as other:
        optimizer = MAKERS[name](kept, other)
        optimizer.load_state_dict(saved)
        train(optimizer, kept, range(stop, 11))
    assert equal(arrays(state), arrays(saved)), "training has changed a loaded state"
    for key in SHAPES:
        np.testing.assert_array_equal(whole[key], first[key])
        np.testing.assert_array_equal(whole[key], kept[key])


def tensors_of(state):
    """The part of a state with an entry for each tensor."""
    return state.get("moments", state.get("tensors", state))


def counters_of(state):
    """The part with the counters."""
    return (
        state["rule"] if "rule" in state else state["b"] if "moments" not in state and "tensors" not in state else state
    )


DAMAGES = [
    (lambda s: tensors_of(s).pop("b"), "lacks 'b'"),
    (lambda s: tensors_of(s).update(c=tensors_of(s)["b"]), "has 'c'"),
    (lambda s: tensors_of(s)["b"].update({_key(s): np.zeros(4)}), r"b: got .* of shape \(4,\)"),
    (lambda s: tensors_of(s)["b"].update({_key(s): np.full(5, np.nan)}), "b: got .*expected finite"),
    (lambda s: tensors_of(s)["b"].update({_key(s): "x"}), "b: cannot read"),
    (lambda s: tensors_of(s)["b"].pop(_key(s)), "b: cannot read"),
    (lambda s: counters_of(s).update(steps=-1), "steps"),
    (lambda s: counters_of(s).update(steps="x"), "steps"),
    (lambda s: counters_of(s).pop("steps"), "steps"),
]

WITHOUT_ARRAYS = ("DeMo",)
"""Optimizers whose state is a counter."""


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [(n, *case) for n in MAKERS for case in DAMAGES if n not in WITHOUT_ARRAYS or not case[1].startswith("b:")],
)
def test_a_state_that_does_not_fit_changes_nothing(name, damage, message, session):
    params = fresh()
    optimizer = MAKERS[name](params, session)
    train(optimizer, params, range(4))
    state, before = optimizer.state_dict(), arrays(optimizer.state_dict())
    tensors_of(state)["a"] = {key: 2 * value for key, value in tensors_of(state)["a"].items()}
    damage(state)
    with pytest.raises(StateError, match=message):
        optimizer.load_state_dict(state)
    assert equal(arrays(optimizer.state_dict()), before)


def _key(state):
    """The name of an array."""
    return "m" if "m" in tensors_of(state)["b"] else "anchor"


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_no_state_is_refused(name, session):
    optimizer = MAKERS[name](fresh(), session)
    for state in ({}, {"moments": {}}, {"tensors": {}}, 7, None):
        with pytest.raises(StateError, match=name):
            optimizer.load_state_dict(state)


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in ("DeMo", "DiLoCo", "MomentumSGD")])
def test_a_variance_is_not_negative(name, session):
    optimizer = MAKERS[name](fresh(), session)
    state = optimizer.state_dict()
    tensors_of(state)["b"]["v"] = -np.ones(5)
    with pytest.raises(StateError, match="none below zero"):
        optimizer.load_state_dict(state)
