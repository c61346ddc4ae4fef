"""``espresso_mpi.jax`` on one rank: the foreign-function call, its errors, its lifetime, and what replaces it."""

from __future__ import annotations

import gc
import logging
import weakref

import numpy as np
import pytest

from espresso_mpi import ConfigError, Session

jax = pytest.importorskip("jax")
import espresso_mpi.jax as adapter  # noqa: E402
from espresso_mpi.jax import abi, primitive, sync, synchronize  # noqa: E402


@pytest.fixture
def session():
    with Session() as opened:
        yield opened


@pytest.fixture
def calls(monkeypatch):
    """What ``Session.sync`` was given, in order; it doubles the arrays, as if there were other ranks."""
    seen = []

    def doubled(self, grads):
        seen.append({name: float(array.flat[0]) if array.size else None for name, array in grads.items()})
        for array in grads.values():
            array *= 2
        return grads

    monkeypatch.setattr(Session, "sync", doubled)
    return seen


def test_calls_of_a_program_keep_their_order(session, calls):
    """Independent calls, within loops and branches, and of programs that follow each other."""

    @jax.jit
    def program(x):
        first = sync({"a": x}, session)
        _, each = jax.lax.scan(lambda c, v: (c, sync({"b": v}, session)["b"]), 0, jax.numpy.arange(3.0))
        branch = jax.lax.cond(x[0] > 0, lambda: sync({"c": x + 1}, session), lambda: {"c": x})
        return first["a"], each, branch["c"], sync({"d": x + 2, "e": x + 2, "f": x[:0]}, session)

    expected = [{"['a']": 1.0}, *({"['b']": float(i)} for i in range(3)), {"['c']": 2.0}]
    expected.append({"['d']": 3.0, "['e']": 3.0, "['f']": None})
    for _ in range(3):
        found = jax.block_until_ready(program(jax.numpy.ones(5)))
    assert calls == expected * 3
    assert found[0][0] == 2 and found[1].tolist() == [0, 2, 4] and found[2][0] == 4
    assert found[3]["d"][0] == 6 and found[3]["e"][0] == 6 and found[3]["f"].shape == (0,)


def test_calls_follow_their_turns(session, calls):
    """Calls that share no array but the token, in a loop and a branch, and in programs that are in flight together."""

    @jax.jit
    def program(x, token):
        first, token = sync({"a": x}, session, after=token)
        token, _ = jax.lax.scan(lambda t, v: sync({"b": v}, session, after=t)[::-1], token, jax.numpy.arange(3.0))
        branch, token = jax.lax.cond(
            x[0] > 0, lambda t: sync({"c": x + 1}, session, after=t), lambda t: ({"c": x}, t), token
        )
        return first["a"], branch["c"], token

    expected, token = [{"['a']": 1.0}, *({"['b']": float(i)} for i in range(3)), {"['c']": 2.0}], 0
    lowered = program.lower(jax.numpy.ones(5), 0).as_text()
    assert "token" not in lowered and "xla_python_cpu_callback" not in lowered
    for _ in range(20):
        *_, token = program(jax.numpy.ones(5), token)
    assert int(token) == 100 and calls == expected * 20


def test_a_second_optimizer_of_a_session_is_told(session, calls, monkeypatch, caplog):
    optax = pytest.importorskip("optax")
    monkeypatch.setitem(session.topology.__dict__, "size", 2)
    first, second = (optax.chain(synchronize(session), optax.sgd(1.0)) for _ in "ab")
    x = {"w": jax.numpy.ones(3)}
    for optimizer, lines in ((first, 0), (first, 0), (second, 1)):
        caplog.clear()
        updates, (state, _) = jax.jit(optimizer.update)(x, optimizer.init(x))
        assert updates["w"].tolist() == [-2, -2, -2] and int(state.token) == 1
        assert caplog.text.count("a second optimizer") == lines


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_only_donated_arguments_change(session, calls, monkeypatch, dtype, ordered):
    """They are averaged in their own memory, in every order of axes."""
    moved = []
    monkeypatch.setattr(primitive.ctypes, "memmove", lambda *move: moved.append(move))
    x = jax.numpy.arange(6).reshape(2, 3).astype(dtype)
    kept, y = np.array(x, np.float32), jax.numpy.copy(x)
    plain = jax.jit(lambda x: sync(x.T, session, ordered=ordered))
    donated = jax.jit(lambda x: sync(x, session, ordered=ordered), donate_argnums=0)
    assert np.array_equal(np.array(plain(x), np.float32), 2 * kept.T) and np.array_equal(np.array(x, np.float32), kept)
    address = y.unsafe_buffer_pointer()
    for factor in (2, 4, 8):
        y = donated(y)
        assert y.dtype == x.dtype and np.array_equal(np.array(y, np.float32), factor * kept)
    assert y.unsafe_buffer_pointer() == address and not moved


@pytest.mark.parametrize("ordered", [True, False])
def test_errors_have_the_text_and_the_next_call_works(session, ordered):
    program = jax.jit(lambda x: sync(x, session, ordered=ordered))
    for _ in range(2):
        with pytest.raises(Exception, match=r"NonFiniteError: .*grads"):
            jax.block_until_ready(program(np.full(3, np.nan, np.float32)))
        assert float(program(np.ones(3, np.float32))[0]) == 1
    with pytest.raises(Exception, match=r"GradientError: .*int32"):
        jax.block_until_ready(jax.jit(lambda x: sync(x.astype("int32"), session, ordered=ordered))(np.ones(3)))


def test_transformations_are_refused(session):
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ConfigError, match=r"sync\(jax.vmap\(f\)\(x\)\)"):
        jax.vmap(lambda v: sync(v, session))(x)
    with pytest.raises(ConfigError, match=r"sync\(jax.grad\(f\)\(x\)\)"):
        jax.grad(lambda v: sync(v, session).sum())(x)


def test_a_program_holds_its_session(calls):
    before, opened = set(primitive._sites), [Session()]
    compiled = jax.jit(lambda x: sync(x, opened.pop())).lower(np.ones(3, np.float32)).compile()
    (number,) = set(primitive._sites) - before
    held = weakref.ref(primitive._sites[number].session)
    jax.clear_caches()
    gc.collect()
    assert held() is not None and float(compiled(np.ones(3, np.float32))[0]) == 2
    held().close()
    del compiled
    jax.clear_caches()
    gc.collect()
    assert number not in primitive._sites and held() is None


@pytest.mark.parametrize("part", ["MINOR", "_METADATA_SIZE"])
def test_another_version_of_jaxlib(session, calls, monkeypatch, caplog, part):
    """A version that jaxlib refuses, and structures of other sizes: an io_callback, and a line in the log."""
    monkeypatch.setattr(abi, part, 99)
    monkeypatch.setattr(primitive, "_TARGET", f"espresso_mpi_other_{part}")
    with caplog.at_level(logging.WARNING):
        replaced = primitive._primitive.__wrapped__()
    assert replaced is None and "cannot make foreign-function calls" in caplog.text
    monkeypatch.setattr(primitive, "_primitive", lambda: replaced)
    program = jax.jit(lambda x: sync({"w": x}, session)["w"])
    found, token = jax.jit(lambda x: sync(x, session, after=4))(np.ones(3, np.float32))
    assert float(found[0]) == 2 and int(token) == 5
    assert (
        float(program(np.ones(3, np.float32))[0]) == 2 and "python_cpu_callback" in program.lower(np.ones(3)).as_text()
    )


def test_arrays_that_messages_could_write_to_are_copied(session, calls, monkeypatch):
    """A message that comes after an error must not find memory that XLA has freed."""
    monkeypatch.setattr(primitive.Site, "_kept_to_node", False)
    program = jax.jit(lambda x: sync({"w": x}, session)["w"])
    assert [float(program(np.full(3, v, np.float32))[0]) for v in (1, 2)] == [2, 4]


@pytest.fixture
def optax():
    return pytest.importorskip("optax")


OPTIMIZERS = {
    "clan": lambda session, optax, **options: adapter.scale_by_clan(**options),
    "lamb": lambda session, optax, **options: adapter.scale_by_onebit_lamb(session, **{"warmup": 2, **options}),
    "zero_one": lambda session, optax, **options: adapter.zero_one_adam(
        **{"learning_rate": 0.1, "session": session, "warmup": 2, "double_every": 1, **options}
    ),
    "diloco": lambda session, optax, **options: adapter.diloco(
        **{"inner": optax.sgd(0.1), "session": session, "every": 2, **options}
    ),
    "streaming": lambda session, optax, **options: adapter.diloco(
        optax.sgd(0.1), session, **{"every": 4, "fragments": 2, "delay": 1, **options}
    ),
    "muloco": lambda session, optax, **options: adapter.diloco(optax.contrib.muon(0.1), session, every=2),
    "sparseloco": lambda session, optax, **options: adapter.sparseloco(optax.sgd(0.1), session, **options),
    "onebit": lambda session, optax, **options: adapter.scale_by_onebit_adam(session, **options),
}


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("clan", {"b1": 1.0}, r"betas=\(1.0, 0.999\); expected two numbers"),
        ("clan", {"weight_decay": -1}, "weight_decay=-1; expected a number"),
        ("lamb", {"warmup": 0}, "warmup=0; expected a whole number from 1 on"),
        ("lamb", {"coefficients": (2, 1)}, r"coefficients=\(2, 1\); expected the least and the largest"),
        ("lamb", {"warmup_compressor": "int9"}, "int9"),
        ("zero_one", {"learning_rate": "fast"}, "learning_rate='fast'; expected a number"),
        ("zero_one", {"longest": 0.5}, "longest=0.5; expected a whole number"),
        ("diloco", {"inner": 0.1}, "inner=0.1; expected an optimizer of optax"),
        ("diloco", {"momentum": 1}, "momentum=1; expected a number from 0 to below 1"),
        ("diloco", {"fragments": 3}, "every=2, fragments=3, delay=0; expected at most one fragment in a step"),
        ("streaming", {"delay": 2}, "every=4, fragments=2, delay=2; .* delay < every/fragments"),
        ("streaming", {"mix": 2}, "diloco: mix=2; expected a number from 0 to 1"),
        ("sparseloco", {}, "sparseloco: the session has feedback='auto'; expected 'plain:decay=0.95'"),
        ("onebit", {"warmup": "soon"}, "warmup='soon'; expected a whole number"),
        ("onebit", {"b2": 1 - 1e-9}, "warmup='auto', which compares norms .* expected at most 0.999999"),
    ],
)
def test_arguments_that_are_not_valid(session, optax, name, options, text):
    with pytest.raises(ConfigError, match=text):
        OPTIMIZERS[name](session, optax, **options)


@pytest.mark.parametrize("name", ["lamb", "zero_one", "diloco"])
def test_a_session_that_skips_is_refused(optax, name):
    with Session(nonfinite="skip") as skipping, pytest.raises(ConfigError, match="expected 'raise'"):
        OPTIMIZERS[name](skipping, optax)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"onebit", "sparseloco"}))
def test_an_update_needs_the_parameters(session, optax, name):
    optimizer, x = OPTIMIZERS[name](session, optax), {"w": jax.numpy.ones(3)}
    with pytest.raises(ConfigError, match="got no params"):
        optimizer.update(x, optimizer.init(x))


@pytest.mark.parametrize("name", ["clan", "lamb", "zero_one"])
def test_weight_decay_follows_its_mask(session, optax, name):
    """With gradients of zero, a parameter moves by its decay alone."""
    params = {"b": jax.numpy.ones(3), "w": jax.numpy.ones((2, 3))}
    none = jax.tree.map(jax.numpy.zeros_like, params)
    for mask in ({"b": False, "w": True}, lambda params: jax.tree.map(lambda p: p.ndim > 1, params)):
        optimizer = OPTIMIZERS[name](session, optax, mask=mask, weight_decay=0.5)
        updates, _ = jax.jit(optimizer.update)(none, optimizer.init(params), params)
        assert not np.any(updates["b"]) and np.all(np.asarray(updates["w"]) != 0)
    optimizer = OPTIMIZERS[name](session, optax, mask={"w": True})
    with pytest.raises(ConfigError, match="mask does not fit the parameters"):
        optimizer.update(none, optimizer.init(params), params)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"sparseloco"}))
def test_states_keep_their_types_in_a_scan(session, optax, name, dtype):
    """Through all stages in one program; without gradients, DiLoCo and a decay of zero leave the parameters."""
    options = {} if name in ("diloco", "muloco", "streaming", "onebit") else {"weight_decay": 0.0}
    optimizer, params = OPTIMIZERS[name](session, optax, **options), {"w": jax.numpy.ones((2, 3), dtype)}

    def step(carry, grads):
        updates, state = optimizer.update(grads, carry[1], carry[0])
        assert updates["w"].dtype == dtype
        return (optax.apply_updates(carry[0], updates), state), None

    grads = {"w": jax.numpy.zeros((6, 2, 3), dtype)}
    (found, state), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, grads))((params, optimizer.init(params)))
    assert int(state.count) == 6 and found["w"].dtype == dtype and np.all(np.asarray(found["w"], np.float32) == 1)


def test_momenta_outlive_local_steps_at_a_rate_of_zero(session, optax):
    """As those of the class: a synchronisation sends the momentum of the rank, and an average does."""

    def rate(count):
        return jax.numpy.where(count > 6, 0.0, 0.01)

    optimizer = OPTIMIZERS["zero_one"](session, optax, learning_rate=rate, longest=2)
    params = {"w": jax.numpy.ones((2, 3))}
    grads, state = jax.tree.map(lambda p: p / 2, params), optimizer.init(params)
    for _ in range(12):
        _, state = jax.jit(optimizer.update)(grads, state, params)
    assert int(state.synced_at) < 12, "the last step was a local one"
    _, state = optimizer.update(grads, state, params, average=True)
    np.testing.assert_allclose(state.mu["w"], 0.5 * (1 - 0.9**12), rtol=0.05)


@pytest.mark.parametrize(
    ("name", "before", "after", "text"),
    [
        ("streaming", {"delay": 0}, {}, "a transformation without a delay, but delay=1"),
        ("streaming", {}, {"delay": 0}, "a transformation with a delay, but delay=0"),
        ("streaming", {"fragments": 1}, {}, "the state is of 1 fragments; expected 2"),
        ("onebit", {}, {"warmup": 9}, "warmup='auto' with 101 norms of v; expected one of a warm-up of fixed length"),
        ("onebit", {"b2": 0.9}, {}, "warmup='auto' with 3 norms of v; .* with 101 norms of v"),
    ],
)
def test_states_of_other_options_are_refused(session, optax, name, before, after, text):
    x = {"a": jax.numpy.ones(3), "b": jax.numpy.ones(3)}
    state = OPTIMIZERS[name](session, optax, **before).init(x)
    with pytest.raises(ConfigError, match=text):
        jax.eval_shape(OPTIMIZERS[name](session, optax, **after).update, x, state, x)


@pytest.mark.parametrize("name", ["streaming", "onebit"])
def test_callbacks_do_what_foreign_calls_do(session, optax, monkeypatch, name):
    """With a message that is due in another program, and the comparison of a norm."""
    options = {"streaming": {}, "onebit": {"b2": 0.9}}[name]
    found = []
    for _ in range(2):
        optimizer, params = (
            OPTIMIZERS[name](session, optax, **options),
            {"a": jax.numpy.ones(3), "b": jax.numpy.ones(3)},
        )
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for _ in range(31):
            updates, state = update(params, state, params)
            params = optax.apply_updates(params, jax.tree.map(lambda u: -0.1 * u, updates))
        found.append([np.asarray(leaf) for leaf in jax.tree.leaves((params, state))])
        monkeypatch.setattr(primitive, "_primitive", lambda: None)
    assert all(np.array_equal(*pair) for pair in zip(*found)) and session.usable


@pytest.mark.parametrize("name", ["zero_one", "streaming"])
def test_parameters_and_state_can_be_donated(session, optax, name):
    """Also those of the start, whose anchor has the values of the parameters."""
    optimizer, params = OPTIMIZERS[name](session, optax), {"w": jax.numpy.ones(3)}
    step = jax.jit(lambda params, state: optimizer.update({"w": np.ones(3)}, state, params), donate_argnums=(0, 1))
    _, state = step(params, optimizer.init(params))
    assert int(state.count) == 1
