"""Saving and loading a session's state."""

from __future__ import annotations

import numpy as np
import pytest

from espresso_mpi.errors import MismatchError, StateError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


def steps(session, rank, first, last):
    out = []
    for step in range(first, last):
        grad = np.random.default_rng([rank, step]).standard_normal(3000).astype(np.float32)
        session.sync(grad)
        out.append(grad)
    return out


@pytest.mark.parametrize("compressor", ["onebit", "int8:rounding=stochastic", "topk:ratio=0.05"])
def test_a_restored_session_goes_on_bit_for_bit(world, open_session, compressor):
    one = open_session(compressor=compressor, seed=3)
    steps(one, world.rank, 0, 3)
    state = one.state_dict()
    expected = steps(one, world.rank, 3, 6)
    other = open_session(compressor=compressor)
    other.load_state_dict(state)
    got = steps(other, world.rank, 3, 6)
    assert all(np.array_equal(a, b) for a, b in zip(expected, got))


def test_a_state_is_a_copy(world, open_session):
    session = open_session(compressor="onebit")
    steps(session, world.rank, 0, 2)
    state = session.state_dict()
    kept = {key: value.copy() for key, value in state["memory"].items()}
    steps(session, world.rank, 2, 4)
    assert all(np.array_equal(kept[key], state["memory"][key]) for key in kept)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": 99}, "version"),
        ({"rank": 77}, "rank"),
        ({"machines": [[0]] * 9}, "machines"),
        ({"options": {"compressor": "topk"}}, "options"),
        ({"step": "x"}, "step"),
        ({"step": -1}, "step"),
        ({"step": 2**63}, "step"),
        ({"seed": True}, "seed"),
        ({"memory": {}}, "missing, added or damaged"),
        ({"memory": {"w|9|0|0:9|residual": "x"}}, "cannot be read"),
        ({"memory": {5: np.zeros(3)}}, "key 5"),
        ({"memory": {"w|9|0|0:9|residual": np.zeros(8)}}, "damaged"),
        ({"memory": {"w|2|0|0:2|residual": np.array([1, np.nan])}}, "damaged"),
        ({"memory": {"w": np.zeros(2)}}, "damaged"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(world, open_session, change, words):
    session = open_session(compressor="onebit")
    steps(session, world.rank, 0, 1)
    state = session.state_dict()
    if world.rank == world.size - 1:
        state.update(change)
    with pytest.raises(StateError, match=words):
        session.load_state_dict(state)
    steps(session, world.rank, 1, 2)


@pytest.mark.skipif("__import__('mpi4py.MPI').MPI.COMM_WORLD.size < 2", reason="needs 2 ranks")
def test_states_of_different_steps_are_refused(world, open_session):
    session = open_session(compressor="onebit")
    steps(session, world.rank, 0, 1)
    state = {**session.state_dict(), "step": world.rank}
    with pytest.raises(MismatchError, match="step 1"):
        session.load_state_dict(state)
