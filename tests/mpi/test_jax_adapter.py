"""``espresso_mpi.jax``: gradients averaged inside jit, and by optax."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]


@pytest.fixture
def adapter():
    return pytest.importorskip("espresso_mpi.jax")


def test_inside_jit_as_outside(world, open_session, adapter):
    """A thousand steps end, and give what ``sync`` gives."""
    inside, outside = open_session(compressor="onebit", min_bytes=0), open_session(compressor="onebit", min_bytes=0)
    own = np.random.default_rng(world.rank).standard_normal((2, 500)).astype(np.float32)

    @jax.jit
    def step(x):
        return adapter.sync({"w": x[0] * 2, "rest": (x[1], None)}, inside)

    for number in range(1000):
        found = step(own)
        if number % 100 == 0:
            jax.block_until_ready(found)
        if number < 3:
            expected = outside.sync({"['w']": own[0] * 2, "['rest'][0]": own[1].copy()})
            assert np.array_equal(found["w"], expected["['w']"])
            assert np.array_equal(found["rest"][0], expected["['rest'][0]"]) and found["rest"][1] is None
    jax.block_until_ready(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_element_types(world, open_session, adapter, dtype):
    session = open_session()
    x = jax.numpy.full((3, 5), float(world.rank), dtype)
    found = jax.jit(lambda x: adapter.sync(x, session))(x)
    assert found.dtype == x.dtype and np.allclose(np.asarray(found, np.float32), (world.size - 1) / 2)


def test_optax_trains_alike_on_all_ranks(world, open_session, adapter):
    optax = pytest.importorskip("optax")
    session = open_session(compressor="int8", min_bytes=0)
    optimizer = optax.chain(adapter.synchronize(session), optax.adamw(1e-2))
    params = {"w": jax.numpy.ones((20, 10))}
    data = jax.numpy.asarray(np.random.default_rng(world.rank).standard_normal((8, 20)), "float32")

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: jax.numpy.sum((data @ p["w"]) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(20):
        params, state = step(params, state)
    every = world.allgather(np.asarray(params["w"]).tobytes())
    assert all(one == every[0] for one in every)
    assert not np.allclose(params["w"], 1)
