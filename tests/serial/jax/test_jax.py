"""``espresso_mpi.jax`` on one rank: the foreign-function call, its errors, its lifetime, and what replaces it."""

from __future__ import annotations

import gc
import logging
import weakref

import numpy as np
import pytest

from espresso_mpi import ConfigError, Session

jax = pytest.importorskip("jax")
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
