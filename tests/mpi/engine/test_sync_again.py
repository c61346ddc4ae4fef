"""A ``sync`` of several arrays, or of compressed ones, made again: what it must find out, and what deviates."""

import time
import weakref

import numpy as np
import pytest

from espresso_mpi.engine.engine import Engine
from espresso_mpi.engine.sync_again import SyncsAgain
from espresso_mpi.errors import EspressoError, GradientError, NonFiniteError

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(60)]

KINDS = {
    "dense, one": ({"compressor": "none"}, {"a": (3, 50)}),
    "dense, several": ({"compressor": "none"}, {"a": (3, 50), "b": (70,), "c": (300,)}),
    "onebit, one": ({"compressor": "onebit", "min_bytes": 0}, {"a": (30, 50)}),
    "int8, several": ({"compressor": "int8", "min_bytes": 0}, {"a": (30, 50), "b": (700,)}),
}


@pytest.fixture
def made(monkeypatch):
    """What came of calls that were tried so: True, or False if they took another way after all."""
    found = []

    def watched(again, self, known, *rest):
        ended = again(self, known, *rest)
        found.append(ended is known.placeholder)
        return ended

    for name in ("sync_again", "sum_again"):
        monkeypatch.setattr(Engine, name, _wrapped(watched, getattr(SyncsAgain, name)))
    return found


def _wrapped(watched, again):
    return lambda self, *rest: watched(again, self, *rest)


@pytest.fixture(params=["one node", "nodes", "pairs"])
def opened(request, world, open_session):
    """Opens a session of a kind, and one beside it that never makes calls in this way."""

    def run(kind, **more):
        options, shapes = KINDS[kind]
        if request.param != "one node" and kind == "dense, several":
            pytest.skip("made so inside a node only")
        if request.param == "pairs" and world.size != 4:
            pytest.skip("needs 4 ranks")
        if request.param != "one node":
            more["nodes"] = [[0, 1], [2, 3]] if request.param == "pairs" else [[rank] for rank in range(world.size)]
        ordinary = open_session(**options, **more)
        ordinary._repeat_sync = lambda grads, title: NotImplemented
        return open_session(**options, **more), ordinary, shapes

    return run


def gradients(world, step, shapes):
    rng = np.random.default_rng((world.rank, step))
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def bits(grads):
    return [x.view(np.int32).tolist() for x in grads.values()]


def together(world, fine):
    """Whether this holds on all ranks."""
    return all(world.allgather(bool(fine)))


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_ordinary_calls(world, opened, made, kind):
    """Other arrays and the same ones, strided, of other shapes, names and types, and calls between."""
    session, ordinary, shapes = opened(kind)
    kept = gradients(world, 0, shapes)
    for step in range(30):
        mine, other = gradients(world, step, shapes), gradients(world, step, shapes)
        if step % 3 == 0:
            for name, x in mine.items():
                kept[name][...] = x
            mine = dict(kept)
        if step == 9:
            mine["a"] = np.asfortranarray(mine["a"])
        if step == 11:
            mine, other = ({name: x[:2].copy() for name, x in one.items()} for one in (mine, other))
        if step == 13:
            mine, other = ({name: x.astype(np.float64) for name, x in one.items()} for one in (mine, other))
        if step == 15:
            mine, other = ({"z": one.pop("a"), **one} for one in (mine, other))
        if step == 18:
            session.load_state_dict(session.state_dict())
        if step in (20, 23):
            handle = session.push("p", np.ones(9, np.float32))
            if step == 20:
                handle.wait()
        session.sync(mine)
        ordinary.sync(other)
        assert together(world, bits(mine) == bits(other)), step
        if step == 23:
            handle.wait()
    assert together(world, made.count(True) >= 8)


def policies():
    """A value that is not finite takes the same way in compressed tensors: each policy has one."""
    for kind in KINDS:
        for policy in ("raise", "skip", "skip_all"):
            other = kind == "onebit, one" and policy != "raise"
            yield pytest.param(kind, policy, marks=pytest.mark.thorough if other else ())


@pytest.mark.parametrize(("kind", "policy"), [*policies()])
def test_values_that_cannot_be_summed(world, opened, made, kind, policy):
    session, ordinary, shapes = opened(kind, nonfinite=policy)
    last, name = world.size - 1, next(reversed(shapes))
    for step in range(12):
        mine, other = gradients(world, step, shapes), gradients(world, step, shapes)
        if step in (5, 6, 9) and world.rank == last:
            mine[name].flat[-1] = other[name].flat[-1] = np.nan
        before, said = bits(mine), []
        for one, grads in ((session, mine), (ordinary, other)):
            try:
                one.sync(grads)
            except NonFiniteError as error:
                said.append(str(error))
        assert together(world, len(said) == 2 * (policy == "raise" and step in (5, 6, 9))), (step, said)
        assert together(world, all(f"rank {last}" in text for text in said)), said
        assert together(world, bits(mine) == (before if said else bits(other))), step
    assert together(world, made.count(True) >= 3)


@pytest.mark.parametrize("kind", KINDS)
def test_another_call_of_a_rank(world, opened, made, kind):
    """It is found before data are used, and both calls are named; arrays and residuals stay."""
    session, _, shapes = opened(kind, timeout=20)
    for step in range(6):
        session.sync(gradients(world, step, shapes))
    state = session.state_dict()
    mine = gradients(world, 6, shapes if world.rank else {"a": (7, 50)})
    before = bits(mine)
    with pytest.raises(EspressoError) as caught:
        session.sync(mine)
    texts = world.allgather(str(caught.value))
    first = list(shapes["a"])
    assert all("[7, 50]" in text and str(first) in text for text in texts), texts
    assert together(world, bits(mine) == before)
    after = session.state_dict()
    assert together(world, all(np.array_equal(state["arrays"][key], x) for key, x in after["arrays"].items()))
    assert together(world, True in made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_comes_late_and_one_that_takes_the_ordinary_path(world, opened, made, kind):
    session, ordinary, shapes = opened(kind)
    for step in range(12):
        mine, other = gradients(world, step, shapes), gradients(world, step, shapes)
        if step > 3 and world.rank == step % world.size:
            time.sleep(0.02)
            if step > 7:
                mine["a"] = np.asfortranarray(mine["a"])
        session.sync(mine)
        ordinary.sync(other)
        assert together(world, bits(mine) == bits(other)), step
    assert together(world, True in made)


def test_arrays_that_share_memory_are_refused(world, opened, made):
    session, _, shapes = opened("int8, several")
    for step in range(5):
        session.sync(gradients(world, step, shapes))
    memory = np.ones(2000, np.float32)
    with pytest.raises(GradientError, match="share memory"):
        session.sync({"a": memory[:1500].reshape(30, 50), "b": memory[1300:]})
    assert together(world, True in made)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_are_in_flight_or_read_only_are_refused(world, opened, made, kind):
    session, _, shapes = opened(kind)
    for step in range(5):
        session.sync(gradients(world, step, shapes))
    mine = gradients(world, 5, shapes)
    handle = session.push("w", mine["a"])
    world.barrier()
    time.sleep(0.1)  # the push has ended then: only the claim of its memory is in the way
    with pytest.raises(GradientError, match="in flight"):
        session.sync(mine)
    handle.wait()
    mine["a"].flags.writeable = False
    with pytest.raises(GradientError, match="read-only"):
        session.sync(mine)
    assert together(world, True in made)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_times_are_counted_and_arrays_are_let_go(world, opened, made, kind):
    session, ordinary, shapes = opened(kind)
    for step in range(20):
        mine = gradients(world, step, shapes)
        session.sync(mine)
        ordinary.sync(gradients(world, step, shapes))
    known = [weakref.ref(x) for x in mine.values()]
    del mine
    assert together(world, [ref() for ref in known] == [None] * len(known))
    found, expected = (one.stats() for one in (session, ordinary))
    assert found.steps == expected.steps == 20
    assert found.tensors.keys() == expected.tensors.keys() and found.tensors
    for name, one in found.tensors.items():
        assert one.steps == expected.tensors[name].steps == 20
        headers = 20 * 64 * world.size if kind == "dense, one" else 0  # which the ordinary path counts as its bytes
        for level, nbytes in one.bytes_by_level.items():
            assert 0 <= expected.tensors[name].bytes_by_level[level] - nbytes <= headers
    assert together(world, made.count(True) > 10)


def test_compressors_with_a_schedule_and_dense_first_steps(world, open_session, made):
    options = {"compressor": "topk:ratio=0.5~0.1@6", "min_bytes": 0, "dense_steps": 3}
    session, ordinary = open_session(**options), open_session(**options)
    ordinary._repeat_sync = lambda grads, title: NotImplemented
    for step in range(15):
        mine, other = (gradients(world, step, {"a": (30, 50)}) for _ in range(2))
        session.sync(mine)
        ordinary.sync(other)
        assert together(world, bits(mine) == bits(other)), step
    assert together(world, made.count(True) > 5)
