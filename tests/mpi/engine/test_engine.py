"""``push``, ``wait`` and the engine: any order, any thread, several sessions; one clear error on every rank."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from mpi4py import MPI
from patience import patient_barrier, until
from rank_errors import last, raised, same_error, several

import espresso_mpi
from espresso_mpi import Plan, Strategy, compressors
from espresso_mpi.engine import negotiation
from espresso_mpi.errors import (
    ConfigError,
    EspressoError,
    GradientError,
    MismatchError,
    NonFiniteError,
    PlanError,
    RankTimeoutError,
    RemoteError,
    StateError,
)

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

try:
    from ml_dtypes import bfloat16
except ImportError:
    bfloat16 = None

SHAPES = {
    "wide": ((3001,), np.float32),
    "deep": ((40, 50), np.float32),
    "half": ((700,), np.float16),
    "double": ((1001,), np.float64),
    "bias": ((7,), np.float32),
    "scalar": ((), np.float32),
    "nothing": ((0, 3), np.float32),
}
if bfloat16 is not None:
    SHAPES["brain"] = ((513,), bfloat16)

ULPS = {"float32": 2.0**-22, "float64": 2.0**-51, "float16": 2.0**-9, "bfloat16": 2.0**-6}


def gradient(rank, step, name):
    """What a rank brings of a tensor in a step."""
    shape, dtype = SHAPES.get(name, ((64,), np.float32))
    random = np.random.default_rng([rank, step, *name.encode()])
    return np.array(random.standard_normal(shape)).astype(dtype)


def means(size, step, name):
    """In float64."""
    return np.mean([gradient(rank, step, name).astype(np.float64) for rank in range(size)], axis=0)


def close_to(array, size, step, name):
    """Whether a dense result is the mean, to the rounding of its type."""
    largest = np.max([np.abs(gradient(r, step, name).astype(np.float64)) for r in range(size)], axis=0)
    error = np.abs(array.astype(np.float64) - means(size, step, name))
    return bool(np.all(error <= ULPS[array.dtype.name] * largest + 1e-7))


def bits(array):
    return np.ascontiguousarray(array).tobytes()


def identical(world, arrays):
    return len(set(world.allgather(b"".join(map(bits, arrays))))) == 1


def usable_again(world, session):
    """A session after an error: it still averages."""
    grad = np.full(100, world.rank, np.float32)
    session.push("afterwards", grad).wait()
    assert np.allclose(grad, (world.size - 1) / 2, atol=0.01)


def residual_of(world, session, name, n):
    """What all ranks together still owe of a tensor's mean."""
    total = np.zeros(n)
    for state in world.allgather(session.state_dict()):
        for key, value in state["arrays"].items():
            tensor, _, _, region, what = key.rsplit("|", 4)
            if tensor == name and what == "residual":
                start, stop = map(int, region.split(":"))
                total[start:stop] += state["weights"][key] * value.astype(np.float64)
    return total


# --- the fast path ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("sizes", [[1000], [70000], [300, 9000, 7]])
def test_equal_dense_calls_take_one_exchange(world, open_session, monkeypatch, apart, sizes):
    """From the second call on; a rank that deviates is found before its data are used, and named on every rank."""
    nodes = [[rank] for rank in range(world.size)] if apart else None
    session, by_route = open_session(nodes=nodes, fuse_bytes=1 << 20), open_session(nodes=nodes, debug=True)

    def bring(step):
        rng = np.random.default_rng([world.rank, step])
        return [rng.standard_normal(n).astype(np.float32) for n in sizes]

    def check(step):
        grads, expected = bring(step), bring(step)
        session.sync(grads)
        by_route.sync(expected)
        assert list(map(bits, grads)) == list(map(bits, expected))

    check(0)
    gathers, exchanges = [], []
    transport, gather = session._transport, negotiation.gather_small
    advance = transport.roll_call.advance
    monkeypatch.setattr(negotiation, "gather_small", lambda *g: (g[0] is transport and gathers.append(g)) or gather(*g))
    monkeypatch.setattr(transport.roll_call, "advance", lambda: exchanges.append(1) or advance())
    check(1)
    if not apart:
        assert gathers == exchanges == []
    elif sum(sizes) <= 1000:
        assert gathers == [] and exchanges == [1]
    before = bring(2)
    grads = [grad[:-1].copy() if last(world) else grad for grad in bring(2)]
    text = same_error(world, MismatchError, lambda: session.sync(grads))
    assert f"rank {world.size - 1} (" in text
    assert last(world) or list(map(bits, grads)) == list(map(bits, before))
    grads = bring(3)
    if world.rank == 0:
        grads[0][0] = np.nan
    assert "rank 0 (" in same_error(world, NonFiniteError, lambda: session.sync(grads))
    check(4)


# --- orders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", ["none", "fp16", "onebit", "topk:ratio=0.1"])
def test_any_order_gives_what_sync_gives(world, open_session, compressor):
    """Orders differ by rank and step, with computing in between: the bits of ``sync``, and the law of residuals."""
    options = {"compressor": compressor, "segment_bytes": 1500}
    pushing, syncing = open_session(**options), open_session(**options)
    random = np.random.default_rng([world.rank, 1])
    steps, given, got = 12, np.zeros(3001), np.zeros(3001)
    for step in range(steps):
        expected = {name: gradient(world.rank, step, name) for name in SHAPES}
        syncing.sync(expected)
        grads, handles = {name: gradient(world.rank, step, name) for name in SHAPES}, {}
        for name in random.permutation(list(SHAPES)):
            handles[str(name)] = pushing.push(str(name), grads[name])
            if random.random() < 0.3:
                time.sleep(random.random() * 3e-3)
        for name in random.permutation(list(SHAPES)):
            assert handles[str(name)].wait() is grads[name]
        for name, grad in grads.items():
            assert bits(grad) == bits(expected[name]), (step, name)
            if compressor == "none":
                assert close_to(grad, world.size, step, name), (step, name)
        assert identical(world, grads.values())
        given += means(world.size, step, "wide")
        got += grads["wide"]
    if compressor != "none":
        missing = given - got - residual_of(world, pushing, "wide", 3001)
        assert np.abs(missing).max() <= steps * 2.0**-20


def test_many_steps_without_a_wait_between(world, open_session):
    """The same names again before the first were waited for: each call is a step of its own."""
    for compressor in ("none", "onebit", "powersgd:rank=1"):
        session, twin = open_session(compressor=compressor), open_session(compressor=compressor)
        random = np.random.default_rng([world.rank, 2])
        names = ["deep", "wide", "bias"]
        grads = {(step, name): gradient(world.rank, step, name) for step in range(5) for name in names}
        handles = []
        for step in range(5):
            for name in random.permutation(names):
                handles.append(session.push(str(name), grads[step, str(name)]))
        for number in random.permutation(len(handles)):
            handles[number].wait()
        for step in range(5):
            expected = {name: gradient(world.rank, step, name) for name in names}
            twin.sync(expected)
            for name in names:
                assert bits(grads[step, name]) == bits(expected[name]), (compressor, step, name)


@several
@pytest.mark.parametrize("route", ["flat-linear", "flat-allgather", "flat-alltoall"])
@pytest.mark.parametrize("compressor", ["int8", "powersgd:rank=2", "count_sketch"])
def test_one_tensor_pushed_again_at_once(world, open_session, compressor, route):
    """Several steps of one tensor under way must not mix in its residual."""
    if route == "flat-linear" and not compressors.get(compressor).element:
        pytest.skip("cannot be summed")
    apart = [[rank] for rank in range(world.size)]
    options = {"compressor": compressor, "route": route, "nodes": apart, "segment_bytes": 1000}
    session, twin = open_session(**options), open_session(**options)
    grads = [gradient(world.rank, step, "deep") for step in range(6)]
    for grad in grads:
        session.push("deep", grad)
    session.wait_all()
    for step, grad in enumerate(grads):
        expected = gradient(world.rank, step, "deep")
        twin.sync({"deep": expected})
        assert bits(grad) == bits(expected), step


def test_the_first_order_is_kept(world, open_session):
    """Rank 0's first order is that of all later steps, however ranks push then."""
    session = open_session(fuse_bytes=0)
    names = [f"layer{i}" for i in range(6)]
    calls = [(name, None) for name in names]
    assert started(world, session, calls if world.rank == 0 else calls[::-1]) == names
    assert started(world, session, calls[::-1]) == names
    assert set(session.stats().tensors) == set(names)


def test_priorities_are_honoured(world, open_session):
    session = open_session(fuse_bytes=0)
    priorities = {"a": -1, "b": 0.5, "c": 3, "d": None, "e": np.float32(2)}
    pairs = list(priorities.items())
    assert started(world, session, pairs if world.rank == 0 else pairs[::-1]) == ["c", "e", "b", "d", "a"]


def started(world, session, calls):
    """The order in which tensors travel that were all pushed before the first of them could start."""
    session._recorder.start()
    hold, gate = [], threading.Event()
    original = session._engine.progress

    def gated():
        gate.wait(60)
        return original()

    session._engine.progress = gated
    for name, priority in calls:
        hold.append(session.push(name, gradient(world.rank, 0, name), priority))
    world.Barrier()
    gate.set()
    session.wait_all()
    session._engine.progress = original
    spans, _ = session._recorder.stop()
    names = [span.tensor for span in sorted(spans, key=lambda span: span.start) if span.kind == "wire"]
    found = list(dict.fromkeys(names))
    assert len(set(world.allgather(tuple(found)))) == 1
    return found


def test_an_urgent_tensor_overtakes(world, open_session):
    """A later push with a higher priority passes what has not begun to travel."""
    session = open_session(fuse_bytes=0, segment_bytes=1000, nodes=[[rank] for rank in range(world.size)])
    big = np.ones(400_000, np.float32)
    slow = session.push("slow", big, priority=0)
    until(lambda: session._engine._dispatcher.runner.busy or slow.done())
    quick = session.push("quick", np.ones(100, np.float32), priority=9)
    assert until(quick.done)
    overtook = world.allreduce(not slow.done(), MPI.LAND)
    session.wait_all()
    assert world.size == 1 or overtook or session._seconds < 1.0


@several
def test_different_priorities_are_refused(world, open_session):
    session = open_session()
    grad = np.full(10, world.rank, np.float32)
    handle = session.push("w", grad, priority=world.rank)
    text = same_error(world, MismatchError, handle.wait)
    assert "priority" in text and "rank 0" in text and "rank 1" in text and "'w'" in text
    assert np.all(grad == world.rank)
    usable_again(world, session)


# --- what may be pushed -----------------------------------------------------------------------------------------------


def test_none_and_empty(world, open_session):
    for compressor in ("none", "onebit"):
        session = open_session(compressor=compressor)
        assert session.push("none", None).wait() is None
        empty = np.empty((3, 0), np.float32)
        assert session.push("empty", empty).wait() is empty
        scalar = np.array(float(world.rank), np.float32)
        session.push("scalar", scalar).wait()
        session.wait_all()
        assert scalar == pytest.approx((world.size - 1) / 2, abs=1.0)


@several
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "push_together: got an empty mapping; expected arrays by their names"),
        ([np.ones(3, np.float32)], "push_together: got a list; expected arrays by their names"),
        ({3: np.ones(3, np.float32)}, "the name is 3; expected text"),
    ],
)
def test_what_cannot_be_pushed_together_is_an_error_everywhere(world, open_session, given, words):
    session = open_session()
    assert words in same_error(world, GradientError, session.push_together(given).wait)
    assert session.push_together({"w": np.ones(3, np.float32)}).wait()["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "arguments, kind, words",
    [
        (("w", [np.ones(3, np.float32)]), GradientError, ["w: got list"]),
        (("w", {"a": np.ones(3, np.float32)}), GradientError, ["dict"]),
        (("w", 1.0), GradientError, ["float"]),
        (("w", np.ones(3, np.int64)), GradientError, ["int64"]),
        (("w", np.ones(3, np.float32), "high"), ConfigError, ["priority", "high"]),
        (("w", np.ones(3, np.float32), float("nan")), ConfigError, ["priority", "nan"]),
        (("w", np.ones(3, np.float32), True), ConfigError, ["priority", "True"]),
        (("w", np.ones(3, np.float32), 10**400), ConfigError, ["priority"]),
        (("w", np.ones(4, np.float32)), MismatchError, ["'w'", "[3]", "[4]"]),
        (("w", np.ones(3, np.float64)), MismatchError, ["float64"]),
        (("w", None), MismatchError, ["None"]),
    ],
    ids=["list", "dict", "float", "int", "text", "nan", "bool", "huge", "shape", "dtype", "none"],
)
def test_a_wrong_push_on_one_rank_is_an_error_everywhere(world, open_session, arguments, kind, words):
    session = open_session()
    good = np.full(3, world.rank, np.float32)
    other = session.push("other", np.full(5, world.rank, np.float32))
    handle = session.push(*(arguments if last(world) else ("w", good)))
    text = same_error(world, kind, handle.wait)
    assert f"rank {world.size - 1}" in text and all(word in text for word in words), text
    assert np.allclose(other.wait(), (world.size - 1) / 2)
    assert np.all(good == world.rank)
    usable_again(world, session)


@pytest.mark.parametrize("name", ["", None, 3, b"w"])
def test_a_wrong_name_is_an_error(world, open_session, name):
    session = open_session()
    text = same_error(world, GradientError, session.push(name, np.ones(3, np.float32)).wait)
    assert "name" in text and repr(name) in text
    usable_again(world, session)


@pytest.mark.parametrize("name", ["a|b", "ü.\n", "x" * 3000, "push", "close", "a..b (2)"])
def test_any_text_is_a_name(world, open_session, name):
    session = open_session(compressor="onebit")
    grad = np.full(300, world.rank, np.float32)
    session.push(name, grad).wait()
    assert np.allclose(grad, (world.size - 1) / 2, atol=world.size)
    world.Barrier()
    session.load_state_dict(session.state_dict())


@several
@pytest.mark.parametrize("compressor", ["none", "onebit"])
def test_a_nan_on_one_rank(world, open_session, compressor):
    session = open_session(compressor=compressor)
    bad = np.full(100, world.rank, np.float32)
    bad[3] = np.nan if last(world) else 0
    good = np.full(100, 2, np.float32)
    handles = [session.push("good", good), session.push("bad", bad)]
    text = same_error(world, NonFiniteError, handles[1].wait)
    assert f"rank {world.size - 1}" in text and "'bad'" in text
    assert np.allclose(handles[0].wait(), 2)
    assert np.isnan(bad[3]) if last(world) else np.all(bad[4:] == world.rank)
    usable_again(world, session)


@several
def test_a_nan_that_was_told_before_the_others_came(world, open_session):
    """Ranks hear of it in a round in which they bring something else, which fails; it is not forgotten in the next."""
    session = open_session()
    for _ in range(3):
        session.push("w", np.ones(5, np.float32)).wait()
    grad = np.ones(5, np.float32)
    if last(world):
        grad[2] = np.nan
        handle = session.push("w", grad)
    else:
        until(session.push("z", "text").done)
        handle = session.push("w", grad)
    assert "NaN" in same_error(world, NonFiniteError, handle.wait)
    if last(world):
        assert "str" in str(raised(session.push("z", grad).wait))
    else:
        raised(session.wait_all)
    usable_again(world, session)


@several
@pytest.mark.parametrize("compressor", ["none", "onebit"])
def test_a_nan_can_be_skipped(world, open_session, compressor):
    session = open_session(compressor=compressor, nonfinite="skip")
    for step in range(3):
        grads = {name: gradient(world.rank, step, name) for name in ("deep", "bias", "wide")}
        before = residual_of(world, session, "deep", 2000)
        if step == 1 and world.rank == 0:
            grads["deep"][5, 5] = np.inf
        for name, grad in grads.items():
            session.push(name, grad)
        session.wait_all()
        if step == 1:
            assert not grads["deep"].any() and grads["bias"].any()
            assert np.array_equal(before, residual_of(world, session, "deep", 2000))
        assert identical(world, grads.values())
    assert session.stats().skipped == {"deep": 1}


@several
def test_an_error_of_each_kind_at_once(world, open_session):
    """Each call has its own fate."""
    session = open_session()
    good = np.full(10, world.rank, np.float32)
    nan = np.full(10, np.nan if world.rank == 0 else 1, np.float32)
    handles = {
        "good": session.push("good", good),
        "nan": session.push("nan", nan),
        "list": session.push("list", [good] if last(world) else good.copy()),
        "shape": session.push("shape", np.ones(5 if last(world) else 6, np.float32)),
    }
    kinds = {"nan": NonFiniteError, "list": GradientError, "shape": MismatchError}
    with pytest.raises((NonFiniteError, GradientError, MismatchError)):
        session.wait_all()
    assert all(handle.done() for handle in handles.values())
    session.wait_all()  # all have ended, and were told of
    for name, handle in handles.items():
        if name in kinds:
            same_error(world, kinds[name], handle.wait)
            same_error(world, kinds[name], handle.wait)
    assert np.allclose(good, (world.size - 1) / 2)
    usable_again(world, session)


@several
def test_a_call_fails_before_another_rank_has_made_it(world, open_session):
    """A rank that makes a call later than the ranks for which it failed hears the same, and only once."""
    session = open_session()
    if last(world):
        handle = session.push("w", "text")
        world.Barrier()
    else:
        world.Barrier()
        time.sleep(0.3)
        handle = session.push("w", np.ones(3, np.float32))
    text = same_error(world, GradientError, handle.wait)
    assert "str" in text
    grad = np.full(3, world.rank, np.float32)
    session.push("w", grad).wait()
    assert np.allclose(grad, (world.size - 1) / 2)


FATES = {
    "list": GradientError,
    "nan": NonFiniteError,
    "shape": MismatchError,
    "none": MismatchError,
    "priority": MismatchError,
    "dtype": MismatchError,
}


def fated(world, step, name, fate, culprit):
    """The arguments of a push, and the array that must be the mean afterwards; on one rank something is wrong."""
    grad = gradient(world.rank, step, name)
    wrong = {
        "list": ([grad],),
        "nan": (np.full_like(grad, np.nan),),
        "shape": (np.ones(11, np.float32),),
        "none": (None,),
        "priority": (grad, 5),
        "dtype": (grad.astype(np.float64 if grad.dtype == np.float32 else np.float32),),
    }
    return (name, *wrong[fate]) if fate and world.rank == culprit else (name, grad)


@several
@pytest.mark.parametrize("compressor", ["none", "onebit"])
def test_any_errors_in_any_order(world, open_session, compressor):
    """Drawn by lot: what goes wrong, where, and who calls and waits when; every call ends as it must, on all ranks."""
    session = open_session(compressor=compressor)
    common, own = np.random.default_rng(8), np.random.default_rng([world.rank, 8])
    names = ["wide", "bias", "half", "double", "deep"]
    for step in range(0, 24, 3):
        fates = {
            (step + i, name): (str(common.choice(list(FATES))) if common.random() < 0.3 else None, int(culprit))
            for i in range(3)
            for name, culprit in zip(names, common.integers(world.size, size=len(names)))
        }
        handles, arrays = {}, {}
        for i in range(3):
            for name in map(str, own.permutation(names)):
                arguments = fated(world, step + i, name, *fates[step + i, name])
                handles[step + i, name], arrays[step + i, name] = session.push(*arguments), arguments[1]
                if own.random() < 0.1:
                    time.sleep(own.random() * 3e-3)
            if common.random() < 0.5:
                small = np.full(5, world.rank + step, np.float32)
                assert np.allclose(session.sync(small), (world.size - 1) / 2 + step)
        keys = sorted(handles)
        found = {keys[i]: raised(handles[keys[i]].wait) for i in own.permutation(len(keys))}
        for key in keys:
            fate = fates[key][0]
            assert type(found[key]) is (FATES[fate] if fate else type(None)), (key, fates[key], found[key])
        texts = [str(found[key]) for key in keys]
        assert all(others == texts for others in world.allgather(texts))
        good = [key for key in keys if fates[key][0] is None]
        assert identical(world, [arrays[key] for key in good])
        assert compressor != "none" or all(close_to(arrays[key], world.size, *key) for key in good)


def test_small_calls_by_turns(world, open_session):
    """Calls short enough to travel with what ranks say to each other: alone, among others, changed, spoilt."""
    session = open_session(nonfinite="skip")
    random = np.random.default_rng(9)
    for step in range(60):
        name = str(random.choice(["bias", "scalar", "half", "double", "nothing"]))
        grad, other = gradient(world.rank, step, name), gradient(world.rank, step, "wide")
        kind = random.integers(6)
        if kind == 0:
            handle = session.push("wide", other)
        spoilt = kind == 1 and grad.size > 1
        if spoilt and last(world):
            grad.reshape(-1)[1] = np.inf
        if kind == 2:
            name = "bias"
            grad = gradient(world.rank, step, name)
            text = raised(lambda g=grad: session.sync({"w": g if not last(world) else g[:5].copy()}))
            assert world.size == 1 or isinstance(text, MismatchError), repr(text)
            grad = gradient(world.rank, step, name)
        if kind == 3:
            session.push(name, grad).wait()
        else:
            session.sync({"w": grad})
        if kind == 0:
            handle.wait()
            assert close_to(other, world.size, step, "wide")
        assert (not grad.any()) if spoilt else close_to(grad, world.size, step, name), (step, kind, name)
        assert identical(world, [grad])


def test_a_small_call_after_other_steps(world, open_session):
    """What arrives as one call goes on as one call after everything else that a session does between."""
    session = open_session()
    for step in range(8):
        grad = gradient(world.rank, step, "bias")
        session.sync({"bias": grad})
        assert close_to(grad, world.size, step, "bias")
        if step % 2:
            session.load_state_dict(session.state_dict())
        else:
            session.push("wide", gradient(world.rank, step, "wide"))
    session.wait_all()
    assert session.stats().steps == 8


# --- ranks that do different things -----------------------------------------------------------------------------------


@several
def test_different_names_are_an_error_after_a_moment(world, open_session):
    session = open_session()
    kept = np.full(4, world.rank, np.float32)
    handle = session.push("mine" if last(world) else "theirs", kept)
    start = time.monotonic()
    text = same_error(world, MismatchError, handle.wait)
    assert time.monotonic() - start > 0.8
    assert "rank 0" in text and "'theirs'" in text and f"rank {world.size - 1}" in text and "'mine'" in text
    assert np.all(kept == world.rank)
    usable_again(world, session)


@several
def test_one_syncs_while_the_others_push(world, open_session):
    session = open_session()
    grad = np.full(4, world.rank, np.float32)
    if last(world):
        text = same_error(world, MismatchError, lambda: session.sync({"w": grad}))
    else:
        text = same_error(world, MismatchError, session.push("w", grad).wait)
    assert "sync" in text and "push('w')" in text
    usable_again(world, session)


@several
def test_waiting_in_different_orders_is_no_error(world, open_session):
    """All wait for something that another rank pushes only after its own wait: a real deadlock, and told as one."""
    session = open_session()
    a, b = np.full(4, world.rank, np.float32), np.full(4, world.rank, np.float32)
    first, second = ("a", "b") if world.rank == 0 else ("b", "a")
    arrays = {"a": a, "b": b}
    text = same_error(world, MismatchError, session.push(first, arrays[first]).wait)
    assert "push('a')" in text and "push('b')" in text
    handles = [session.push(first, arrays[first]), session.push(second, arrays[second])]
    for handle in handles:
        handle.wait()
    assert np.allclose(a, b)


@several
def test_a_late_rank_is_waited_for(world, open_session):
    """While a rank computes between its pushes there is no error, however long it takes."""
    session = open_session()
    names = ["a", "b"] if world.rank == 0 else ["b", "a"]
    arrays = {name: np.full(4, world.rank, np.float32) for name in names}
    handles = [session.push(names[0], arrays[names[0]])]
    if world.rank == 0:
        time.sleep(2.5)
    else:
        handles.append(session.push(names[1], arrays[names[1]]))
        session.wait_all()
    if world.rank == 0:
        handles.append(session.push(names[1], arrays[names[1]]))
        session.wait_all()
    assert all(np.allclose(array, (world.size - 1) / 2) for array in arrays.values())


@several
@pytest.mark.parametrize("what", ["push", "sync"])
def test_a_rank_that_never_comes_is_named(world, what):
    session = espresso_mpi.Session(timeout=3.0)
    if last(world):
        patient_barrier(world)  # the others have given up
        error = raised(session.push("w", np.ones(10, np.float32)).wait)
        assert isinstance(error, (RemoteError, RankTimeoutError)), repr(error)
    else:
        grads = np.ones(10, np.float32)
        act = (lambda: session.sync(grads)) if what == "sync" else session.push("w", grads).wait
        error = raised(act)
        patient_barrier(world)
        assert isinstance(error, (RankTimeoutError, RemoteError)), repr(error)
        assert f"rank {world.size - 1} " in str(error)
        assert "open a new one" in str(raised(lambda: session.push("w", grads)))
    session.close()


@several
def test_a_rank_that_pushed_something_else_and_never_comes_is_named(world):
    """Its thread answers, but it does not wait for anything itself."""
    session = espresso_mpi.Session(timeout=3.0)
    grad = np.ones(10, np.float32)
    handle = session.push("else" if last(world) else "w", grad)
    if last(world):
        patient_barrier(world)
        error = raised(handle.wait)
    else:
        error = raised(handle.wait)
        patient_barrier(world)
        assert f"rank {world.size - 1} " in str(error), repr(error)
    assert isinstance(error, (RankTimeoutError, RemoteError)), repr(error)


@several
def test_pushes_nobody_waits_for_time_out(world):
    """Also while the others only pushed: ``done`` becomes true, ``wait`` tells."""
    session = espresso_mpi.Session(timeout=3.0)
    error = None
    if not last(world):
        handle = session.push("w", np.ones(10, np.float32))
        until(handle.done)
        error = raised(handle.wait)
    patient_barrier(world)
    if not last(world):
        assert isinstance(error, (RankTimeoutError, RemoteError)), repr(error)
        assert f"rank {world.size - 1} " in str(error)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_sync_while_pushes_are_under_way(world, open_session):
    session = open_session(compressor="onebit")
    for step in range(10):
        pushed = {name: gradient(world.rank, step, name) for name in ("deep", "bias")}
        handles = [session.push(name, grad) for name, grad in pushed.items()]
        grads = {name: gradient(world.rank, step, name) for name in ("wide", "double")}
        session.sync(grads)
        for handle in reversed(handles):
            handle.wait()
        assert identical(world, [*pushed.values(), *grads.values()])


def test_one_tensor_by_push_and_by_sync(world, open_session):
    """Its steps follow each other, whichever way it goes."""
    session, twin = open_session(compressor="onebit"), open_session(compressor="onebit")
    for step in range(0, 12, 3):
        grads = [gradient(world.rank, step + i, "wide") for i in range(3)]
        handle = session.push("wide", grads[0])
        handle.wait()
        session.sync({"wide": grads[1]})
        session.push("wide", grads[2]).wait()
        for i in range(3):
            expected = gradient(world.rank, step + i, "wide")
            twin.sync({"wide": expected})
            assert bits(expected) == bits(grads[i])


def test_pushes_and_waits_from_many_threads(world, open_session):
    session = open_session(compressor="onebit")
    results, errors = {}, []

    def work(number):
        try:
            random = np.random.default_rng([world.rank, number])
            for step in range(6):
                name = f"t{number}"
                grad = gradient(world.rank, step, name)
                time.sleep(random.random() * 2e-3)
                results[name, step] = session.push(name, grad).wait()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors and not any(thread.is_alive() for thread in threads), errors
    assert identical(world, [results[key] for key in sorted(results)])
    assert len(results) == 24


def test_one_handle_waited_for_by_many_threads(world, open_session):
    session = open_session()
    for step in range(5):
        grad = np.full(5000, world.rank, np.float32)
        handle, seen = session.push("w", grad), []
        threads = [threading.Thread(target=lambda h=handle, s=seen: s.append(h.wait())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(seen) == 4 and all(found is grad for found in seen), step
    assert np.allclose(grad, (world.size - 1) / 2)


@pytest.mark.parametrize("busy", ["sleep", "python", "numpy", pytest.param("torch", marks=pytest.mark.thorough)])
def test_progress_without_wait(world, open_session, busy):
    """The thread works while the main thread does something else; ``done`` is all that is asked."""
    torch = pytest.importorskip("torch") if busy == "torch" else None
    session = open_session(compressor="fp16")
    matrix = np.random.default_rng(0).standard_normal((200, 200))
    tensor = torch.ones(200, 200) if torch else None
    acts = {
        "sleep": lambda: time.sleep(0.001),
        "python": lambda: sum(i * i for i in range(2000)),
        "numpy": lambda: matrix @ matrix,
        "torch": lambda: tensor @ tensor,
    }
    for step in range(2):
        grads = {name: gradient(world.rank, step, name) for name in ("wide", "deep", "half")}
        handles = [session.push(name, grad) for name, grad in grads.items()]
        limit = time.monotonic() + 60
        while not all(handle.done() for handle in handles) and time.monotonic() < limit:
            acts[busy]()
        assert all(handle.done() for handle in handles)
        for handle in handles:
            handle.wait()
            handle.wait()
        assert "done" in repr(handles[0]) and "wide" in repr(handles[0])
        assert identical(world, grads.values())


def test_the_callers_own_mpi_calls(world, open_session):
    """The main thread may use MPI itself while the engine's thread does."""
    session = open_session(compressor="fp16", segment_bytes=5000, nodes=[[rank] for rank in range(world.size)])
    for step in range(5):
        grads = [np.full(60_000, world.rank + number, np.float32) for number in range(3)]
        handles = [session.push(f"w{number}", grad) for number, grad in enumerate(grads)]
        for _ in range(10):
            assert world.allreduce(1) == world.size
        for number, handle in enumerate(handles):
            assert np.allclose(handle.wait(), (world.size - 1) / 2 + number), step


def test_torch_tensors(world, open_session):
    torch = pytest.importorskip("torch")
    session = open_session()
    tensor = torch.full((30, 3), float(world.rank), dtype=torch.bfloat16)
    assert session.push("t", tensor).wait() is tensor
    assert torch.allclose(tensor.float(), torch.full((30, 3), (world.size - 1) / 2), atol=0.01)


def test_the_thread_ends_when_idle_and_starts_again(world, open_session):
    session = open_session()
    for _ in range(2):
        session.push("w", np.ones(10, np.float32)).wait()
        assert until(lambda: session._engine._driver.thread is None)
    names = [thread.name for thread in threading.enumerate()]
    assert session._engine._driver.thread is None, names
    usable_again(world, session)


def test_sync_needs_no_thread(world, open_session):
    session = open_session(compressor="onebit")
    for step in range(3):
        session.sync({"w": gradient(world.rank, step, "wide")})
    assert session._engine._driver.thread is None


# --- groups and fusion ------------------------------------------------------------------------------------------------


def group_plan(compressor="onebit"):
    route = "flat" if compressor == "none" else "flat-alltoall"
    names = ("g0", "g1", "g2")
    return Plan({name: Strategy(compressor, route) for name in names}, Strategy("none", "flat"), (names,))


@pytest.mark.parametrize("compressor", ["none", "onebit"])
def test_a_group_pushed_member_by_member(world, open_session, compressor):
    session, twin = open_session(plan=group_plan(compressor)), open_session(plan=group_plan(compressor))
    random = np.random.default_rng([world.rank, 5])
    for step in range(6):
        grads = {name: gradient(world.rank, step, name) for name in ("g0", "g1", "g2", "dense")}
        for name in random.permutation(list(grads)):
            session.push(str(name), grads[str(name)])
            time.sleep(random.random() * 2e-3)
        session.wait_all()
        expected = {name: gradient(world.rank, step, name) for name in grads}
        twin.sync(expected)
        assert all(bits(grads[name]) == bits(expected[name]) for name in grads), step
        assert identical(world, grads.values())


def test_a_group_pushed_twice_before_the_wait(world, open_session):
    session, twin = open_session(plan=group_plan()), open_session(plan=group_plan())
    grads = {(name, step): gradient(world.rank, step, name) for name in ("g0", "g1", "g2") for step in range(3)}
    handles = [session.push(name, grad) for (name, _), grad in grads.items()]
    for handle in handles:
        handle.wait()
    for step in range(3):
        expected = {name: gradient(world.rank, step, name) for name in ("g0", "g1", "g2")}
        twin.sync(expected)
        assert all(bits(expected[name]) == bits(grads[name, step]) for name in expected), step


def test_a_group_that_lacks_a_member(world, open_session):
    session = open_session(plan=group_plan())
    grads = {name: np.ones(64, np.float32) for name in ("g0", "g2")}
    assert "'g1'" in same_error(world, PlanError, lambda: session.sync(grads))
    handle = session.push("g0", grads["g0"])
    text = same_error(world, MismatchError, handle.wait)
    assert "'g1'" in text and "'g2'" in text
    usable_again(world, session)
    if world.size > 1:
        handles = [session.push(name, np.ones(64, np.float32)) for name in (["g0"] if last(world) else ["g0", "g1"])]
        text = same_error(world, MismatchError, handles[-1].wait)
        assert "'g2'" in text
        raised(session.wait_all)
        usable_again(world, session)


def test_a_group_of_two_types_is_an_error_everywhere(world, open_session):
    """Each push alone is right; only together they are not."""
    session = open_session(plan=group_plan("none"))
    grads = {"g0": np.ones(64, np.float32), "g1": np.ones(64), "g2": np.ones(64)}
    for name in ("g1", "g0", "g2") if last(world) else grads:
        handle = session.push(name, grads[name])
    text = same_error(world, PlanError, handle.wait)
    assert "'g0'" in text and "'g1'" in text and "float64" in text
    assert "'g1'" in same_error(world, PlanError, session.wait_all)
    assert all((grad == 1).all() for grad in grads.values())
    usable_again(world, session)


@pytest.mark.parametrize("empty", [None, np.empty((0, 3), np.float32)], ids=["none", "empty"])
def test_a_group_with_a_member_that_has_no_elements(world, open_session, empty):
    """The others share a buffer in that step; what is kept of them and of the whole group stays apart."""
    session, twin = open_session(plan=group_plan()), open_session(plan=group_plan())
    for step in range(6):
        grads = {name: gradient(world.rank, step, name) for name in ("g0", "g1", "g2")}
        grads.update({"g0": empty} if step in (1, 2) else dict.fromkeys(grads, empty) if step == 3 else {})
        expected = {name: grad if grad is None else grad.copy() for name, grad in grads.items()}
        for name in sorted(grads, reverse=last(world)):
            session.push(name, grads[name])
        session.wait_all()
        twin.sync(expected)
        here = [name for name in grads if grads[name] is not empty]
        assert all(bits(grads[name]) == bits(expected[name]) for name in here), step
        assert identical(world, [grads[name] for name in here])
        twin.sync({"g1": empty, "other": gradient(world.rank, step, "other")})
    if world.size > 1:
        kept = {key.split(" ")[0] for key in session.state_dict()["arrays"]}
        assert kept == {"g0..g2", "g1..g2"}


@several
@pytest.mark.parametrize("compressor", ["none", "onebit"])
def test_a_skipped_member_of_a_group(world, open_session, compressor):
    """What is compressed as one is skipped as one, or its residual would be lost."""
    session = open_session(plan=group_plan(compressor), nonfinite="skip")
    for step in range(3):
        grads = {name: gradient(world.rank, step, name) for name in ("g0", "g1", "g2")}
        if step == 1 and world.rank == 0:
            grads["g1"][3] = np.nan
        before = bits(session.state_dict()["arrays"].get("g0..g2 (3)|192|0|0:192|residual", 0))
        for name, grad in grads.items():
            session.push(name, grad)
        session.wait_all()
        assert identical(world, grads.values())
        if step == 1:
            after = session.state_dict()["arrays"].get("g0..g2 (3)|192|0|0:192|residual", 0)
            assert not grads["g1"].any() and grads["g0"].any() == (compressor == "none") and bits(after) == before
    assert session.stats().skipped == ({"g1": 1} if compressor == "none" else {"g0": 1, "g1": 1, "g2": 1})


def test_fusion_does_not_change_a_bit(world, open_session):
    names = [f"small{i}" for i in range(40)] + ["wide", "half", "double"]
    random = np.random.default_rng([world.rank, 6])
    results = []
    for fuse_bytes in (0, 1 << 30, None):
        session = open_session(fuse_bytes=fuse_bytes)
        for step in range(3):
            grads = {name: gradient(world.rank, step, name) for name in names}
            for name in random.permutation(names):
                session.push(str(name), grads[str(name)])
            session.wait_all()
            assert all(close_to(grads[name], world.size, step, name) for name in names)
        synced = {name: gradient(world.rank, 2, name) for name in names}
        session.sync(synced)
        assert [bits(grads[name]) for name in names] == [bits(synced[name]) for name in names]
        results.append([bits(grads[name]) for name in names])
    assert results[0] == results[1] == results[2]


# --- failures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bomb(compressors.Compressor):
    """Sends all, until it is armed."""

    name = "test-bomb"
    armed = False

    def nbytes(self, n):
        return 4 * n

    def contraction(self, n):
        return 0.5

    def _encode_cpu(self, x, payload, residual, context):
        if Bomb.armed:
            raise ZeroDivisionError("the bomb went off")
        payload.view(np.float32)[...] = x

    def _decode_cpu(self, payload, out, add, context):
        out[...] = payload.view(np.float32) + (out if add else 0)


@pytest.fixture
def bomb():
    compressors.register(Bomb)
    Bomb.armed = False
    yield Bomb
    compressors.unregister(Bomb.name)


@several
@pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "computing"])
def test_a_failure_in_the_thread_surfaces_everywhere(world, open_session, bomb, waiting):
    session, other = open_session(compressor="test-bomb", feedback=False), open_session()
    for step in range(4):
        bomb.armed = world.rank == 1 and step == 3
        grads = {name: gradient(world.rank, step, name) for name in ("wide", "deep")}
        handles = [session.push(name, grad) for name, grad in grads.items()]
        if not waiting:
            assert until(lambda h=handles: all(handle.done() for handle in h))
        errors = [raised(handle.wait) for handle in handles]
        if step < 3:
            assert errors == [None, None]
    if world.rank == 1:
        assert all(isinstance(error, ZeroDivisionError) for error in errors), errors
    else:
        assert all(type(error) is RemoteError and "rank 1" in str(error) and "bomb" in str(error) for error in errors)
    for act in (lambda: session.push("w", grads["wide"]), lambda: session.sync(grads), session.stats, session.wait_all):
        error = raised(act)
        assert error is None or "open a new one" in str(error), error
    assert not session.usable
    session.close()
    usable_again(world, other)


@several
def test_a_block_left_by_an_exception_tells_the_others(world):
    grads, error = np.ones(2000, np.float32), None
    try:
        with espresso_mpi.Session(timeout=60) as session:
            session.push("w", grads).wait()
            if last(world):
                raise KeyError("mine")
            session.push("v", grads).wait()
    except (KeyError, RemoteError) as caught:
        error = caught
    if last(world):
        assert isinstance(error, KeyError)
    else:
        assert isinstance(error, RemoteError) and f"rank {world.size - 1}" in str(error) and "mine" in str(error)
    assert not session.usable
    world.Barrier()


def test_a_block_left_while_its_thread_works(world):
    """Leaving in the middle of pushes: threads end, waits that are under way elsewhere return."""
    for _ in range(5):
        seen, session = [], espresso_mpi.Session(timeout=60, segment_bytes=2000)
        handles = [session.push(f"w{i}", np.ones(50_000, np.float32)) for i in range(8)]
        waiter = threading.Thread(target=lambda h=handles[-1], s=seen: s.append(raised(h.wait)))
        waiter.start()
        session.__exit__(KeyError, KeyError("all at once"), None)
        waiter.join(60)
        assert not waiter.is_alive() and len(seen) == 1
        assert seen[0] is None or isinstance(seen[0], EspressoError), seen
        assert all(until(handle.done) for handle in handles)
        assert until(lambda s=session: s._engine._driver.thread is None)
        world.Barrier()


def test_close_finishes_what_was_pushed(world):
    grads = [np.full(20_000, world.rank, np.float32) for _ in range(4)]
    session = espresso_mpi.Session(timeout=60)
    for number, grad in enumerate(grads):
        session.push(f"w{number}", grad)
    session.close()
    assert all(np.allclose(grad, (world.size - 1) / 2) for grad in grads)
    session.close()
    for act in (lambda: session.push("w", grads[0]), lambda: session.sync(grads[0])):
        assert "closed" in str(raised(act))
    session.wait_all()
    with espresso_mpi.Session(timeout=60) as session:
        handle = session.push("w", grads[0])
    assert handle.done() and handle.wait() is grads[0]


@several
def test_close_tells_of_errors_nobody_waited_for(world):
    session = espresso_mpi.Session(timeout=60)
    session.push("w", "text" if last(world) else np.ones(3, np.float32))
    assert "str" in same_error(world, GradientError, session.close)
    assert not session.usable


def test_a_session_that_is_dropped(world):
    session = espresso_mpi.Session(timeout=60)
    grad = np.full(30_000, world.rank, np.float32)
    handle = session.push("w", grad)
    del session
    handle.wait()
    assert np.allclose(grad, (world.size - 1) / 2)
    second = espresso_mpi.Session(timeout=60).push("v", grad)
    engine = second._session._engine
    assert until(second.done)
    del second, handle
    assert until(lambda: engine._driver.thread is None)


@several
def test_a_call_interrupted_by_a_signal_like_exception(world, open_session):
    """A wait that is left by an exception of the caller's leaves the tensor under way: it can be waited for again."""
    session, grad = open_session(), np.full(10, world.rank, np.float32)
    if last(world):
        world.Barrier()
        time.sleep(0.3)
    handle = session.push("w", grad)
    if not last(world):
        original, calls = session._engine._driver.changed.wait_for, itertools.count()

        def interrupted(*args, **kwargs):
            if threading.current_thread() is threading.main_thread() and next(calls) == 1:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        session._engine._driver.changed.wait_for = interrupted
        world.Barrier()
        try:
            until(lambda: session._engine._driver.driving.locked(), 2)
            handle.wait()
        except KeyboardInterrupt:
            pass
        session._engine._driver.changed.wait_for = original
    session.wait_all()
    assert handle.done() and np.allclose(grad, (world.size - 1) / 2)


# --- several sessions -------------------------------------------------------------------------------------------------


def test_two_sessions_at_once(world, open_session):
    """Pushes interleaved differently on every rank, waited for in different orders."""
    sessions = [open_session(compressor="onebit"), open_session()]
    random = np.random.default_rng([world.rank, 7])
    for step in range(6):
        grads = {(i, name): gradient(world.rank, step, name) for i in range(2) for name in ("wide", "bias", "half")}
        keys = list(grads)
        handles = {keys[i]: None for i in random.permutation(len(keys))}
        for number, name in handles:
            handles[number, name] = sessions[number].push(name, grads[number, name])
        for i in random.permutation(len(keys)):
            handles[keys[i]].wait()
        assert identical(world, grads.values())
        assert all(close_to(grads[1, name], world.size, step, name) for name in ("wide", "bias", "half"))


@several
def test_sub_communicators(world, open_session):
    half = world.Split(world.rank % 2, world.rank)
    everyone, own = open_session(), open_session(half)
    half.Free()
    for step in range(4):
        a, b = np.full(300, world.rank, np.float32), np.full(300, world.rank % 2, np.float32)
        pair = [(everyone, a), (own, b)]
        handles = [session.push(f"w{step}", grad) for session, grad in (pair if world.rank % 2 else pair[::-1])]
        for handle in handles:
            handle.wait()
        assert np.allclose(a, (world.size - 1) / 2) and np.all(b == world.rank % 2)


# --- looking on -------------------------------------------------------------------------------------------------------


def test_looking_while_tensors_are_under_way(world, open_session, tmp_path):
    session = open_session(compressor="onebit", segment_bytes=1000)
    path = world.bcast(str(tmp_path / "trace.json"))
    with session.trace(path):
        for step in range(4):
            handles = [session.push(f"w{i}", gradient(world.rank, step, "wide")) for i in range(4)]
            while not all(handle.done() for handle in handles):
                session.stats(residuals=True)
                error = raised(session.state_dict)
                assert error is None or isinstance(error, (ConfigError, StateError)), repr(error)
            session.wait_all()
    assert set(session.stats().tensors) == {"w0", "w1", "w2", "w3"}
    assert session.state_dict()["counts"] == {f"w{i}": 4 for i in range(4)}


def test_saving_while_pushes_wait(world, open_session, tmp_path):
    """Collective calls fit between pushes, whatever else a rank has pushed already."""
    session = open_session(compressor="onebit")
    folder = world.bcast(str(tmp_path / "state"))
    for step in range(3):
        grads = {name: gradient(world.rank, step, name) for name in ("wide", "deep")}
        if world.rank == 0:
            session.push("wide", grads["wide"])
        session.save(folder)
        if world.rank != 0:
            session.push("wide", grads["wide"])
        session.sync({"deep": grads["deep"]})
        session.wait_all()
        session.load(folder)
        assert identical(world, grads.values())


def test_nothing_piles_up(world, open_session):
    """Handles that are only asked whether they are done are not kept."""
    session = open_session()
    for _ in range(20):
        handle = session.push("w", np.ones(10, np.float32))
        assert until(handle.done)
    assert len(session._pending) <= 1


def test_calls_are_forgotten_in_time(world, open_session, monkeypatch):
    """Names that keep changing do not make headers grow; what waits while the ranks forget is not lost."""
    from espresso_mpi.engine import negotiation

    monkeypatch.setattr(negotiation, "_KNOWN", 4)
    session = open_session()
    for step in range(12):
        names = [f"t{step}-{i}" for i in range(3)]
        grads = {name: gradient(world.rank, step, name) for name in names}
        for name in names if world.rank % 2 else reversed(names):
            session.push(name, grads[name])
        session.wait_all()
        assert all(close_to(grads[name], world.size, step, name) for name in names)
        wide = gradient(world.rank, step, "wide")
        session.sync({f"w{step}": wide})
        assert close_to(wide, world.size, step, "wide")
    assert len(session._engine._negotiation.contents) <= 4 + 3


def test_thousands_of_tensors(world, open_session):
    """In time that grows as their number does, not as its square: ten thousand took half a minute then."""
    few, many = 500, 4000
    session = open_session(fuse_bytes=1 << 20)
    session.sync({f"w{i}": np.ones(100, np.float32) for i in range(few)})  # kernels are loaded
    seconds = {}
    for count in (few, many):
        grads = {f"{count}.{i}": np.full(100, world.rank + i, np.float32) for i in range(count)}
        before = {name: grad.copy() for name, grad in grads.items()}
        start = time.process_time()  # other work on the node does not count
        session.sync(grads)
        synced, again = time.process_time(), {f"p{name}": np.full(100, grad[0]) for name, grad in before.items()}
        for name, grad in again.items():
            session.push(name, grad)
        session.wait_all()
        seconds[count] = np.array([synced - start, time.process_time() - synced])
        means = np.arange(count, dtype=np.float32) + np.float32((world.size - 1) / 2)
        for found in (grads, again):
            assert np.allclose([grad.sum() for grad in found.values()], 100 * means, rtol=1e-6)
    assert world.allreduce(bool(np.all(seconds[many] < 40 * seconds[few])), MPI.LAND), seconds  # 64 times as a square


def test_a_closed_session_is_freed(world):
    """Residuals and scratch memory do not outlive a session that was closed in order."""
    import gc
    import weakref

    session = espresso_mpi.Session(compressor="onebit", min_bytes=0)
    session.sync(gradient(world.rank, 0, "wide"))
    session.push("deep", gradient(world.rank, 0, "deep")).wait()
    engine = weakref.ref(session._engine)
    session.close()
    del session
    # Its thread ends after a second without work.
    assert until(lambda: gc.collect() >= 0 and engine() is None, every=0.05)
