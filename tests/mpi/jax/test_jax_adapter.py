"""``espresso_mpi.jax``: gradients averaged inside jit, and by optax."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from espresso_mpi import optim
from espresso_mpi.errors import ConfigError

jax = pytest.importorskip("jax")

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


@pytest.fixture
def adapter():
    return pytest.importorskip("espresso_mpi.jax")


def test_inside_jit_as_outside(world, open_session, adapter, pytestconfig):
    """A thousand steps end, of which a quick run does the first three hundred, and give what ``sync`` gives."""
    inside, outside = open_session(compressor="onebit", min_bytes=0), open_session(compressor="onebit", min_bytes=0)
    own = np.random.default_rng(world.rank).standard_normal((2, 500)).astype(np.float32)

    @jax.jit
    def step(x):
        return adapter.sync({"w": x[0] * 2, "rest": (x[1], None)}, inside)

    for number in range(300 if pytestconfig.getoption("quick") else 1000):
        found = step(own)
        if number % 100 == 0:
            jax.block_until_ready(found)
        if number < 3:
            expected = outside.sync({"['w']": own[0] * 2, "['rest'][0]": own[1].copy()})
            assert np.array_equal(found["w"], expected["['w']"])
            assert np.array_equal(found["rest"][0], expected["['rest'][0]"]) and found["rest"][1] is None
    jax.block_until_ready(found)


def test_calls_that_share_nothing_but_their_turn(world, open_session, adapter):
    """Two calls of a program that XLA may run at once, and programs in flight: the bits of ``sync``, on all ranks."""
    inside, outside = open_session(compressor="onebit", min_bytes=0), open_session(compressor="onebit", min_bytes=0)
    own = np.random.default_rng(world.rank).standard_normal((2, 400)).astype(np.float32)

    @jax.jit
    def step(x, token):
        first, token = adapter.sync({"a": x[0] * 2}, inside, after=token)
        second, token = adapter.sync({"b": x[1]}, inside, after=token)
        return first["a"], second["b"], token

    token, found = 0, []
    for _ in range(100):
        *means, token = step(own, token)
        found.append(means)
    means, token = adapter.sync(
        {"w": jax.numpy.full(3, float(world.rank))}, inside, after=token
    )  # outside of a program
    assert int(token) == 201 and token.dtype == "int32" and np.allclose(means["w"], (world.size - 1) / 2)
    for number in range(20):
        expected = [outside.sync({"['a']": own[0] * 2}), outside.sync({"['b']": own[1].copy()})]
        assert all(np.array_equal(a, *b.values()) for a, b in zip(found[number], expected))


def test_donated_weights_without_an_order(world, open_session, adapter):
    """Each call needs the result of the one before: the ranks' programs stay in step, also if one is started late."""
    session = open_session(compressor="fp16", min_bytes=0)
    step = jax.jit(lambda x: adapter.sync(x + 1, session, ordered=False), donate_argnums=0)
    x = jax.numpy.full(20_000, float(world.rank))
    for _ in range(300):
        x = step(x)
    assert np.allclose(np.asarray(x), 300 + (world.size - 1) / 2)


def test_an_error_of_one_rank_is_an_error_of_all(world, open_session, adapter):
    """It has the session's text, and the next step works."""
    session = open_session()
    step = jax.jit(lambda x: adapter.sync({"w": x}, session), donate_argnums=0)
    for _ in range(2):
        with pytest.raises(Exception, match=rf"NonFiniteError: .*rank {world.size - 1}.*'w'"):
            jax.block_until_ready(step(jax.numpy.full(5, np.nan if world.rank == world.size - 1 else 1.0)))
        assert float(step(jax.numpy.ones(5))["w"][0]) == 1


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


@pytest.mark.parametrize("sign", [True, False])
def test_demo_of_optax_takes_the_steps_of_the_class(world, open_session, adapter, sign):
    optax = pytest.importorskip("optax")
    options = {"compressor": "dct_topk:chunk=32,k=4", "feedback": "plain:decay=0.9", "min_bytes": 0}
    optimizer = optax.chain(
        adapter.scale_by_demo(open_session(**options), sign=sign), optax.scale_by_learning_rate(1e-2)
    )
    params = {"w": np.zeros(96, np.float32)}
    demo = optim.DeMo({"w": params["w"].copy()}, open_session(**options), lr=1e-2, sign=sign)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for step in range(4):
        grads = {"w": np.random.default_rng([world.rank, step]).standard_normal(96).astype(np.float32)}
        updates, state = update(grads, state)
        params = optax.apply_updates(params, updates)
        assert np.allclose(params["w"], demo.step(grads)["w"], atol=1e-7)


SHAPES = {"b": (9,), "empty": (0,), "w": (40, 70)}
WARMUP = {"warmup": 3, "warmup_compressor": "int8"}
ROUNDS = {"warmup": 4, "kappa": 2, "double_every": 3, "longest": 4, "warmup_compressor": "int8", "update_clip": 0.3}
"""0/1 Adam: the steps 1, 2 and 4 update the variance, 3 and 5 to 7 send momenta, from 8 on there are local steps."""

DILOCO = {
    "DiLoCo": {"every": 4, "fragments": 2},
    "Streaming": {"every": 5, "fragments": 2, "delay": 2},  # in step 7, a fragment is due and the other one leaves
}


def normal(*seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def late(rank, number):
    """Gradients of which "b" and a part of "w" are zero at first, so that v is zero after a warm-up."""
    grads = normal(rank, number)
    if number < 10:
        grads["w"][:, ::5] = grads["b"][...] = 0
    return grads


def pair(name, adapter, optax, rate, params, inside, outside):
    """A transformation with a schedule for its rate, and a function that takes the same step with plain arrays."""
    adam, last = {"b2": 0.99, "weight_decay": 0.1}, optax.scale_by_learning_rate(rate)
    plain = {"betas": (0.9, 0.99), "weight_decay": 0.1}
    if name == "Clan":
        made, own = (
            optax.chain(adapter.synchronize(inside), adapter.scale_by_clan(**adam), last),
            optim.Clan(params, **plain),
        )
        return made, own, lambda grads: own.step(outside.sync(grads))

    def local(grads):
        for key, grad in grads.items():
            params[key] -= np.float32(0.1) * grad
        own.step()

    if name in DILOCO:
        own = optim.DiLoCo(params, outside, **DILOCO[name])
        return adapter.diloco(optax.sgd(0.1), inside, learning_rate=rate, **DILOCO[name]), own, local
    if name == "SparseLoCo":
        own = optim.DiLoCo.sparse(params, outside, every=4)
        return adapter.sparseloco(optax.sgd(0.1), inside, every=4, learning_rate=rate), own, local
    if name == "OnebitLamb":
        own = optim.OnebitLamb(params, outside, **plain, **WARMUP)
        return optax.chain(adapter.scale_by_onebit_lamb(inside, **adam, **WARMUP), last), own, own.step
    own = optim.ZeroOneAdam(params, outside, **plain, **ROUNDS)
    return adapter.zero_one_adam(rate, inside, **adam, **ROUNDS), own, own.step


OTHERS = ["DiLoCo", "OnebitLamb", "SparseLoCo", "Streaming", "ZeroOneAdam"]


@pytest.mark.parametrize(
    ("name", "compressor"),
    [
        *((name, "onebit") for name in ["Clan", *OTHERS]),
        ("Clan", "none"),
        *(pytest.param(name, "none", marks=pytest.mark.thorough) for name in OTHERS),  # the session compresses
    ],
)
def test_optimizers_have_the_steps_of_plain_arrays(world, open_session, adapter, name, compressor):
    """Inside jit, through all stages, with the same messages; a bad gradient of one rank is an error of all."""
    optax = pytest.importorskip("optax")
    feedback = "plain:decay=0.95" if name == "SparseLoCo" else "auto"
    inside, outside = (open_session(compressor=compressor, feedback=feedback, min_bytes=0) for _ in range(2))
    rate, params, theirs = optax.linear_schedule(0.05, 0.01, 16), normal(7), normal(7)
    params["b"][...] = theirs["b"][...] = 0  # whose norm scales no step
    made, own, plain = pair(name, adapter, optax, rate, params, inside, outside)
    state, worst, local = made.init(theirs), 0.0, name in (*DILOCO, "SparseLoCo", "ZeroOneAdam")

    @jax.jit
    def step(params, state, grads):
        updates, state = made.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(18):
        own.lr = float(rate(number))
        plain(late(world.rank, number))
        theirs, state = step(theirs, state, late(world.rank, number))
        worst = max(worst, *(float(np.abs(np.asarray(theirs[key]) - params[key]).max(initial=0)) for key in SHAPES))
    differed = len({bytes(one) for one in world.allgather(np.asarray(theirs["w"]).tobytes())}) > 1
    if local:
        updates, state = jax.jit(lambda s, p: made.update(p, s, p, average=True))(state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        own.average()
        worst = max(worst, *(float(np.abs(np.asarray(theirs[key]) - params[key]).max(initial=0)) for key in SHAPES))
    same = world.allgather(np.asarray(state.anchor["w"] if local else theirs["w"]).tobytes())
    bad = normal(world.rank, 18)
    bad["w"][3, 3] = np.nan if world.rank == world.size - 1 else 1.0

    def steps(params, state):  # of which one synchronises
        for _ in range(5):
            params, state = jax.block_until_ready(step(params, state, bad))

    with pytest.raises(Exception, match="NonFiniteError"):
        steps(theirs, state)
    assert worst < 5e-6 and differed == (local and world.size > 1) and len(set(same)) == 1


def test_a_bad_gradient_of_a_local_step_is_the_error_of_all_ranks_later(world, open_session, adapter):
    """Where it came, its parameter stays; once all ranks have dropped the note of it, they are equal again."""
    optax = pytest.importorskip("optax")
    made = adapter.zero_one_adam(0.01, open_session(compressor="onebit", min_bytes=0), **ROUNDS)
    params, update = normal(7), jax.jit(made.update, static_argnames="average")
    state = made.init(params)

    def step(number, average=False):
        grads = normal(world.rank, number)
        if number == 13 and world.rank == world.size - 1:
            grads["w"][3, 3] = np.inf
        updates, after = update(grads, state, params, average=average)
        return optax.apply_updates(params, updates), jax.block_until_ready(after)

    for number in range(13):
        params, state = step(number)
    before = params
    params, state = step(13)
    stayed = [np.array_equal(params[key], before[key]) for key in ("b", "w")]
    for _ in range(2):
        with pytest.raises(Exception, match="NonFiniteError"):
            step(14, average=True)
    state = optax.tree_utils.tree_set(state, spoilt=jax.numpy.zeros((), bool))
    params, state = step(14, average=True)
    same = world.allgather(np.asarray(state.anchor["w"]).tobytes())
    close = np.allclose(params["w"], state.anchor["w"], atol=1e-6)
    assert stayed == [False, world.rank == world.size - 1] and len(set(same)) == 1 and close


def test_a_warm_up_that_ends_by_itself_ends_as_that_of_plain_arrays(world, open_session, adapter, monkeypatch):
    """In the same step, with the same updates; and on no rank while v has not settled on one of them."""
    pytest.importorskip("optax")
    options = {"warmup": "auto", "warmup_compressor": "int8"}
    params, at, worst = normal(7), [], 0.0
    plain = open_session(compressor="onebit", min_bytes=0)
    own = optim.OnebitAdam(params, plain, lr=0.1, betas=(0.9, 0.9), weight_decay=0.0, **options)
    made, other = (
        adapter.scale_by_onebit_adam(open_session(compressor="onebit", min_bytes=0), b2=0.9, **options) for _ in "ab"
    )
    state, never = made.init(params), other.init(params)
    update = jax.jit(made.update).lower(params, state).compile()
    if world.rank == world.size - 1:
        monkeypatch.setattr(adapter.optimizers, "settled", lambda before, now: now < 0)
    another = jax.jit(other.update).lower(params, never).compile()
    for number in range(55):
        grads = {name: grad * np.float32(1 if number < 5 else 3) for name, grad in normal(world.rank, number).items()}
        before = {name: array.copy() for name, array in params.items()}
        own.step(grads)
        updates, state = update(grads, state)
        _, never = another(grads, never)
        found = {name: before[name] - np.float32(0.1) * np.asarray(updates[name]) for name in SHAPES}
        worst = max(worst, *(float(np.abs(found[name] - params[name]).max(initial=0)) for name in SHAPES))
        at += [number + 1] if own.frozen and not at else []
    assert at == [50] and int(state.frozen_at) == 50 and int(never.frozen_at) == 0 and worst < 5e-6


def test_a_message_travels_while_steps_run(world, open_session, adapter):
    """It arrives before the step in which it is due, and is found again by its state; else all ranks raise an error."""
    optax, session, handles = pytest.importorskip("optax"), open_session(), []
    push = session.push_together
    session.push_together = lambda arrays: handles.append(push(arrays)) or handles[-1]
    made = adapter.diloco(optax.sgd(0.1), session, every=3, delay=2, mix=0)
    grads = {name: jax.numpy.full(20_000, world.rank + 1.0) for name in "ab"}

    @jax.jit
    def step(params, state):
        updates, state = made.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    start = jax.tree.map(jax.numpy.zeros_like, grads)
    at = [(start, made.init(start))]
    for _ in range(4):
        at.append(jax.block_until_ready(step(*at[-1])))
    end = time.monotonic() + 60
    while not handles[0].done() and time.monotonic() < end:
        time.sleep(0.01)
    arrived = len(handles) == 1 and handles[0].done()
    for _ in range(2):
        params, state = step(*at[4])
        same = world.allgather(np.asarray(state.anchor["a"]).tobytes())
        assert arrived and len(set(same)) == 1 and np.allclose(params["b"], state.anchor["b"]) and not state.under.any()
    params, state = at[4]
    lost = state._replace(under=state.under + (world.rank == world.size - 1))
    with pytest.raises(
        Exception, match=r"StateError: diloco: the state waits for a message .*'a'.* rank does not have"
    ):
        jax.block_until_ready(step(params, lost))
    jax.block_until_ready(step(*at[2]))  # sends a later one
    with pytest.raises(Exception, match="StateError: diloco: the state waits for a message"):
        jax.block_until_ready(step(params, state))
    without = optax.tree_utils.tree_set(state, under=jax.numpy.zeros_like(state.under))
    assert np.allclose(step(params, without)[0]["a"], params["a"] - 0.1 * grads["a"])


def test_two_calls_of_a_session_at_once_are_an_error(world, adapter, open_session):
    """JAX orders the effects of one thread only. The first call is held by the other ranks, or by this test."""
    session, begun, end = open_session(), threading.Event(), threading.Event()

    def held(arrays):
        begun.set()
        end.wait()
        return arrays

    session.sync = held
    program = jax.jit(lambda x: adapter.sync(x, session))
    thread = threading.Thread(target=lambda: jax.block_until_ready(program(jax.numpy.ones(4))))
    thread.start()
    begun.wait()
    try:
        with pytest.raises(Exception, match="two calls of one session run at the same time"):
            jax.block_until_ready(jax.jit(lambda x: adapter.sync(x + 1, session))(jax.numpy.ones(4)))
    finally:
        end.set()
        thread.join()
    assert not session.usable


@pytest.mark.parametrize("after", [1.0, True, [1, 2]])
def test_a_token_is_a_whole_number(adapter, open_session, after):
    with pytest.raises(ConfigError, match="the token of the call before"):
        adapter.sync({"w": jax.numpy.ones(4)}, open_session(), after=np.asarray(after))
