"""Every mistake is the same clear error on every rank, before any data moves, and the session goes on."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from mpi4py import MPI
from patience import patient_barrier
from rank_errors import same_error, several

import espresso_mpi
from espresso_mpi.collectives.messages import compiled_calls
from espresso_mpi.errors import (
    ConfigError,
    EspressoError,
    GradientError,
    MismatchError,
    NonFiniteError,
    PlanError,
    RankTimeoutError,
    RemoteError,
    TransportError,
)

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


def last_rank_differs(world, mine, other):
    return other if world.rank == world.size - 1 else mine


@several
@pytest.mark.parametrize(
    "other, words",
    [
        ({"a": np.ones(8, np.float32), "b": np.ones((2, 4), np.float32)}, ["'a'", "[8]", "[2, 3]"]),
        ({"b": np.ones((2, 4), np.float32), "a": np.ones((2, 3), np.float32)}, ["'a'", "'b'", "order"]),
        ({"a": np.ones((2, 3), np.float64), "b": np.ones((2, 4), np.float32)}, ["'a'", "float64", "float32"]),
        ({"a": np.ones((2, 3), np.float32)}, ["'b'"]),
        ({"a": None, "b": np.ones((2, 4), np.float32)}, ["'a'", "None"]),
    ],
    ids=["shape", "order", "dtype", "missing", "none"],
)
def test_mismatch_names_rank_and_tensor(world, open_session, other, words):
    session = open_session()
    mine = {"a": np.ones((2, 3), np.float32), "b": np.ones((2, 4), np.float32)}
    grads = last_rank_differs(world, mine, other)
    text = same_error(world, MismatchError, lambda: session.sync(grads))
    assert f"rank {world.size - 1}" in text
    assert all(word in text for word in words), text
    session.sync({"a": np.ones(3, np.float32)})


@pytest.mark.parametrize(
    "wrong, words",
    [
        (3.0, "float"),
        ("text", "str"),
        (np.ones(4, np.int32), "int32"),
        (np.lib.stride_tricks.as_strided(np.ones(8, np.float32), (4,), (0,)), "expanded"),
        (np.lib.stride_tricks.as_strided(np.ones(8, np.float32), (3, 2), (4, 8)), "overlapping"),
        (np.broadcast_to(np.float32(1), (4,)), "read-only"),
        (np.ones(4, ">f4"), ">f4"),
        (np.ma.masked_array(np.ones(4, np.float32), [0, 0, 1, 0]), "mask"),
        ({1.5: np.ones(4, np.float32)}, "key"),
    ],
    ids=["float", "str", "int", "expanded", "overlapping", "readonly", "endian", "masked", "key"],
)
def test_wrong_arrays_are_refused_everywhere(world, open_session, wrong, words):
    session = open_session()
    good = np.ones(4, np.float32)
    grads = {"good": np.ones(4, np.float32), "bad": last_rank_differs(world, good, wrong)}
    text = same_error(world, GradientError, lambda: session.sync(grads))
    assert f"rank {world.size - 1}" in text
    assert words in text
    assert np.all(grads["good"] == 1)
    session.sync(good)


def test_the_same_memory_twice_is_refused(world, open_session):
    x = np.ones(10, np.float32)
    text = same_error(world, GradientError, lambda: open_session().sync({"a": x, "b": x.reshape(2, 5)}))
    assert "share memory" in text
    text = same_error(world, GradientError, lambda: open_session().sync({"a": x[:6], "b": x[5:]}))
    assert "share memory" in text


class Explodes:
    def __dlpack__(self, **options):
        raise RuntimeError("boom")

    def __dlpack_device__(self):
        return (1, 0)


def test_an_array_that_raises_is_an_error_everywhere(world, open_session):
    grads = last_rank_differs(world, np.ones(3, np.float32), Explodes())
    assert "boom" in same_error(world, GradientError, lambda: open_session().sync(grads))


@several
def test_a_rank_that_does_not_close_is_named(world):
    """The first to lose patience says so; a rank that is later may hear it from that one."""
    session, said, late = espresso_mpi.Session(timeout=3.0), None, world.size - 1
    if world.rank != late:
        try:
            session.close()
        except EspressoError as error:
            said = type(error), str(error)
    heard = world.allgather(said)[:late]
    assert all(one is not None and f"rank {late}" in one[1] and "close" in one[1] for one in heard), heard
    assert RankTimeoutError in [kind for kind, _ in heard]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("compressor", ["none", "onebit"])
def test_non_finite_raises_everywhere_and_poisons_nothing(world, open_session, compressor, dtype, bad):
    session = open_session(compressor=compressor)
    grads = {"ok": np.ones(100, dtype), "w": np.ones(300, dtype)}
    session.sync(grads)
    before = session.state_dict()["arrays"]
    if world.rank == world.size - 1:
        grads["w"][7] = bad
    text = same_error(world, NonFiniteError, lambda: session.sync(grads))
    assert f"rank {world.size - 1}" in text and "'w'" in text and "1 NaN" in text
    after = session.state_dict()["arrays"]
    assert all(np.array_equal(after[key], before[key]) for key in before)
    session.sync({"ok": np.ones(100, dtype), "w": np.ones(300, dtype)})


def test_non_finite_can_be_skipped(world, open_session):
    session = open_session(compressor="onebit", nonfinite="skip", min_bytes=1000)
    grads = {
        "big": np.ones(5000, np.float32),
        "small": np.ones(10, np.float32),
        "tiny": np.full(3, 2, np.float32),
    }
    session.sync(grads)
    if world.rank == world.size - 1:
        grads["big"][4], grads["small"][2] = np.nan, np.inf
    session.sync(grads)
    assert not grads["big"].any() and not grads["small"].any()
    assert np.allclose(grads["tiny"], 2)
    assert session.stats().skipped == {"big": 1, "small": 1}


def test_float64_beyond_float32_is_refused_for_compressors(world, open_session):
    grad = np.full(100, 1e300)
    open_session().sync(grad)
    assert np.allclose(grad, 1e300)
    same_error(world, NonFiniteError, lambda: open_session(compressor="onebit").sync(grad))


@several
@pytest.mark.parametrize(
    "option, mine, other",
    [
        ("compressor", "onebit", "fp16"),
        ("seed", 1, 2),
        ("min_bytes", 0, 9),
        ("window_bytes", 0, 1 << 20),
        ("segment_bytes", 0, 1 << 20),
        ("nodes", None, [[0]]),
        ("debug", False, True),
    ],
)
def test_different_options_are_an_error_everywhere(world, option, mine, other):
    value = last_rank_differs(world, mine, other)
    text = same_error(world, MismatchError, lambda: espresso_mpi.Session(**{option: value}, timeout=60))
    assert option in text and f"rank {world.size - 1}" in text


@pytest.mark.parametrize(
    "options, words",
    [
        ({"compressor": "onebitt"}, "onebitt"),
        ({"compressor": "topk:ratio=2"}, "ratio"),
        ({"compressor": "topk:k=2"}, "k=2"),
        ({"route": "encode@cpu/decode@cpu"}, "nothing"),
        ({"route": "sideways"}, "sideways"),
        ({"compressor": "onebit", "route": "flat"}, "onebit"),
        ({"route": "flat-alltoall"}, "none"),
        ({"timeout": 0}, "timeout"),
        ({"nonfinite": "ignore"}, "ignore"),
        ({"plan": {}}, "Plan"),
        ({"nodes": "xx"}, "nodes"),
        ({"window_bytes": -1}, "window_bytes"),
    ],
)
def test_a_wrong_option_on_one_rank_is_an_error_everywhere(world, options, words):
    given = last_rank_differs(world, {}, options)
    text = same_error(world, ConfigError, lambda: espresso_mpi.Session(**{"timeout": 20, **given}))
    assert words in text and (f"rank {world.size - 1}" in text or world.size == 1)


@pytest.mark.parametrize(
    "strategy, words",
    [
        (("onbit", "flat-allgather"), "did you mean 'onebit'?"),
        (("topk", "flat-linear"), "cannot be summed"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_at_opening(world, strategy, words):
    plan = espresso_mpi.Plan({"b": espresso_mpi.Strategy(*strategy)}, espresso_mpi.Strategy("none", "flat"))
    assert words in same_error(world, ConfigError, lambda: espresso_mpi.Session(world, plan=plan, timeout=60))


def test_a_plan_of_anything_but_strategies_is_refused(world):
    with pytest.raises(PlanError, match="expected a Strategy"):
        espresso_mpi.Plan({"a": "topk"})


@pytest.mark.skipif("__import__('mpi4py.MPI').MPI.COMM_WORLD.size < 3", reason="needs uneven nodes")
@pytest.mark.parametrize(
    "route",
    [
        "allreduce@intra/allreduce@inter",
        "allreduce@inter/allreduce@intra",
        "reduce_scatter@inter/allreduce@intra/allgather@inter",
    ],
)
def test_routes_that_lose_ranks_of_uneven_nodes_are_refused(world, open_session, route):
    uneven = open_session(route=route, nodes=[list(range(world.size - 1)), [world.size - 1]])
    assert "reduce_scatter@intra" in same_error(world, ConfigError, lambda: uneven.sync(np.ones(999, np.float32)))
    if world.size == 4:
        grad = np.full(999, world.rank, np.float32)
        open_session(route=route, nodes=[[0, 1], [2, 3]]).sync(grad)
        assert np.allclose(grad, 1.5)


@several
def test_the_default_session(world):
    grad = np.full(5, world.rank, np.float32)
    assert espresso_mpi.sync(grad) is grad
    assert np.allclose(grad, (world.size - 1) / 2)
    with pytest.raises(ConfigError, match="open already"):
        espresso_mpi.default_session(seed=3)
    espresso_mpi.default_session().close()
    assert espresso_mpi.default_session(seed=3).usable
    espresso_mpi.sync([grad])
    espresso_mpi.default_session().close()


def test_a_plan_must_know_the_tensor(world, open_session):
    plan = espresso_mpi.Plan({"w": espresso_mpi.Strategy("onebit", espresso_mpi.Route.parse("flat-alltoall"))})
    session = open_session(plan=plan)
    session.sync({"w": np.ones(100, np.float32)})
    text = same_error(world, PlanError, lambda: session.sync({"v": np.ones(100, np.float32)}))
    assert "'v'" in text


@several
def test_a_rank_that_never_comes_is_named(world):
    session = espresso_mpi.Session(timeout=3.0)
    if world.rank == world.size - 1:
        patient_barrier(world)
        return
    with pytest.raises(EspressoError) as caught:
        session.sync(np.ones(10, np.float32))
    patient_barrier(world)
    # A rank that the node starves for the whole timeout hears of it from another one.
    assert caught.type in (RankTimeoutError, RemoteError) and "RankTimeoutError" in repr(caught.value)
    assert f"rank {world.size - 1} " in str(caught.value)
    with pytest.raises(EspressoError, match="open a new one"):
        session.sync(np.ones(10, np.float32))


def test_closed_sessions_say_so(world):
    with espresso_mpi.Session(timeout=60) as session:
        session.sync(np.ones(3, np.float32))
    with pytest.raises(espresso_mpi.errors.EspressoError, match="closed"):
        session.sync(np.ones(3, np.float32))


BROKEN = MPI.Exception(MPI.ERR_OTHER)


@several
def test_a_failure_of_mpi_names_rank_and_phase(world, monkeypatch):
    """Compiled code calls MPI with a tag that it does not allow."""
    session, bad = espresso_mpi.Session(timeout=60, window_bytes=0), world.rank == world.size - 1
    if bad:
        monkeypatch.setattr(compiled_calls, "DATA_TAG", -77)
    with pytest.raises(TransportError if bad else RemoteError) as caught:
        session.sync(np.ones(10, np.float32))
    text = str(caught.value)
    assert f"rank {world.size - 1} (" in text and "MPI failed while" in text and "in sync number 1: " in text
    assert "tag" in text.lower()
    assert bad or "TransportError" in text
    assert bad == isinstance(caught.value.__cause__, MPI.Exception)
    world.Barrier()


def test_a_failure_of_mpi_at_opening_is_named(world):
    class Broken(MPI.Intracomm):
        def Idup(self):  # noqa: N802
            raise BROKEN

    with pytest.raises(TransportError) as caught:
        espresso_mpi.Session(Broken(world), timeout=60)
    assert f"rank {world.rank} (" in str(caught.value) and f"while opening a session: {BROKEN}" in str(caught.value)


@several
def test_an_action_at_the_end_of_a_call_may_push_and_may_not_wait(world, open_session):
    session, found, pushed = open_session(), [], threading.Event()
    later, last = np.full(3, world.rank, np.float32), world.rank == world.size - 1

    def act():
        for wait in (lambda: session.sync(later), lambda: session.allreduce(later), session.barrier, session.close):
            try:
                wait()
            except EspressoError as error:
                found.append(str(error))
        found.append(session.push("b", later))
        pushed.set()

    if not last:
        handle = session.push("a", np.ones(3, np.float32))
        handle.when_done(act)
    world.Barrier()
    if last:
        handle = session.push("a", np.ones(3, np.float32))
        second = session.push("b", later)
    handle.wait()
    assert repr(handle) == "<Handle of push 'a': done>"
    assert last or pushed.wait(60)
    (second if last else found.pop()).wait()
    assert np.allclose(later, (world.size - 1) / 2)
    assert last or (len(found) == 4 and all("an action of when_done() waits for a call" in text for text in found))
