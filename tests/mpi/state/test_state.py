"""Saving and loading a session's state: exactly on the same ranks, conserving residuals on others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from mpi4py import MPI

from espresso_mpi import Plan, Session, Strategy
from espresso_mpi.errors import ConfigError, StateError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

SIZE = MPI.COMM_WORLD.size
MOVES = sorted({(1, SIZE), (SIZE, 1), (SIZE, max(1, SIZE - 1)), (max(1, SIZE - 1), SIZE)} - {(1, 1)})
HOSTS = set(MPI.COMM_WORLD.allgather(MPI.Get_processor_name()))
N = 3000


def gradient(rank, step, n=N):
    return np.random.default_rng([rank, step]).standard_normal(n).astype(np.float32)


def steps(session, rank, first, last):
    out = []
    for step in range(first, last):
        grad = gradient(rank, step)
        session.sync(grad)
        out.append(grad)
    return out


def shared(world, path):
    """A folder that all ranks know."""
    return world.bcast(str(path))


def nodes_of(ranks, two):
    """All ranks on one node, or on two: the second has the smaller half. Real nodes stay as they are."""
    if len(HOSTS) > 1:
        return None
    half = (ranks + 1) // 2
    return [list(range(half)), list(range(half, ranks))] if two and ranks > 1 else [list(range(ranks))]


@dataclass
class Part:
    """The first ranks of the world as a world of their own; the others only watch."""

    world: MPI.Comm
    ranks: int

    def __post_init__(self):
        self.comm = self.world.Split(int(self.world.rank >= self.ranks), self.world.rank)
        self.taking_part = self.world.rank < self.ranks

    def run(self, act, **options):
        """``act(session)`` on the ranks that take part: their results, on every rank of the world."""
        result, error = None, None
        if self.taking_part:
            try:
                with Session(self.comm, **{"timeout": 20, "min_bytes": 0, **options}) as session:
                    result = act(session)
            except Exception as caught:  # the ranks that watch must hear of it
                error = caught
        results, errors = zip(*self.world.allgather((result, error and repr(error))))
        if error is not None:
            raise error
        assert not any(errors), errors
        self.comm.Free()
        return results[: self.ranks]


def residual_of(states, what="residual", n=N, point=None):
    """The oracle: weighted sum over ranks and encode points, in float64."""
    total = np.zeros(n)
    for state in states:
        for key, value in state["arrays"].items():
            *_, at, region, kind = key.rsplit("|", 4)
            if kind != what or point not in (None, at):
                continue
            start, stop = map(int, region.split(":"))
            place = key.rsplit("|", 2)[0]
            inside = [k for k in state["weights"] if k.rsplit("|", 2)[0] == place and _covers(k, start, stop)]
            weight = 1 / len(states) if at == "whole" else state["weights"][inside[0]]
            total[start:stop] += weight * value.astype(np.float64)
    return total


def _covers(key, start, stop):
    first, last = map(int, key.rsplit("|", 2)[1].split(":"))
    return first <= start and stop <= last


def trained(session):
    """Three steps; the state, and what came out in all."""
    outputs = steps(session, session.topology.size and _rank(session), 0, 3)
    return session.state_dict(), sum(out.astype(np.float64) for out in outputs)


def _rank(session):
    return session.state_dict()["rank"]


def close(a, b, scale=1e-5):
    return np.abs(a - b).max() <= scale * max(1.0, np.abs(b).max())


# --- exactly ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", ["onebit", "int8:rounding=stochastic", "topk:ratio=0.05", "acpsgd", "dgc"])
@pytest.mark.parametrize("files", [False, True])
def test_a_restored_session_goes_on_bit_for_bit(world, open_session, tmp_path, compressor, files):
    path = shared(world, tmp_path)
    one = open_session(compressor=compressor, seed=3)
    steps(one, world.rank, 0, 3)
    state = one.state_dict()
    if files:
        one.save(path)
    expected = steps(one, world.rank, 3, 6)
    other = open_session(compressor=compressor)
    if files:
        other.load(path)
    else:
        other.load_state_dict(state)
    got = steps(other, world.rank, 3, 6)
    assert all(np.array_equal(a, b) for a, b in zip(expected, got))


def test_tensors_that_sat_steps_out_go_on_bit_for_bit(world, open_session):
    def train(session, first, last):
        out = []
        for step in range(first, last):
            grads = {"a": gradient(world.rank, step), "b": gradient(world.rank, -step - 1 + 100)}
            if step % 2:
                del grads["b"]
            out += session.sync(grads).values()
        return out

    options = {"compressor": "topk:ratio=0.5~0.01@4/4", "seed": 5}
    one, other = open_session(**options), open_session(**options)
    train(one, 0, 3)
    other.load_state_dict(one.state_dict())
    expected, got = train(one, 3, 7), train(other, 3, 7)
    assert all(np.array_equal(a, b) for a, b in zip(expected, got))


def test_a_state_is_a_copy(world, open_session):
    session = open_session(compressor="onebit")
    steps(session, world.rank, 0, 2)
    state = session.state_dict()
    kept = {key: value.copy() for key, value in state["arrays"].items()}
    steps(session, world.rank, 2, 4)
    assert all(np.array_equal(kept[key], state["arrays"][key]) for key in kept)


# --- on other ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
@pytest.mark.parametrize("old, new", MOVES)
@pytest.mark.parametrize("two_nodes", [False, True], ids=["one node", "two nodes"])
@pytest.mark.parametrize("compressor", ["onebit", "topk:ratio=0.05", "randomk:ratio=0.1", "powersgd:rank=1", "thc"])
def test_residuals_are_conserved_on_other_ranks(world, tmp_path, old, new, two_nodes, compressor):
    path = shared(world, tmp_path)

    def save(session):
        result = trained(session)
        session.save(path)
        return result

    def load(session):
        session.load(path)
        before, out = session.state_dict(), np.zeros(N, np.float32)
        session.sync(out)
        return before, out, session.state_dict()

    results = Part(world, old).run(save, compressor=compressor, nodes=nodes_of(old, two_nodes))
    residual = residual_of([state for state, _ in results])
    means = sum(sum(gradient(rank, step).astype(np.float64) for rank in range(old)) / old for step in range(3))
    assert close(results[0][1] + residual, means)

    found = Part(world, new).run(load, compressor=compressor, nodes=nodes_of(new, two_nodes))
    assert close(residual_of([before for before, _, _ in found]), residual, 1e-6)
    assert all(np.array_equal(out, found[0][1]) for _, out, _ in found)
    assert close(found[0][1] + residual_of([after for _, _, after in found]), residual)
    assert not any("|whole|" in key for _, _, after in found for key in after["arrays"])
    assert {after["step"] for _, _, after in found} == {4}
    assert len({str(after["counts"]) for _, _, after in found}) == 1


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_one_rank_that_compresses_nothing_adds_all_residuals(world, tmp_path, dtype):
    path = shared(world, tmp_path)

    def save(session):
        for step in range(3):
            session.sync({"w": gradient(world.rank, step).astype(dtype), "b": np.ones(3, np.float32)})
        session.save(path)
        return session.state_dict()

    def load(session):
        session.load(path)
        grads = {"w": np.ones(N, dtype), "b": np.ones(3, np.float32)}
        session.sync(grads)
        again = session.sync(np.ones(5, np.float32))
        return grads["w"].astype(np.float64), grads["b"], again, session.state_dict()["arrays"]

    options = {"compressor": "topk:ratio=0.05", "min_bytes": 100}
    residual = residual_of(Part(world, SIZE).run(save, **options))
    ((w, b, again, memory),) = Part(world, 1).run(load, **options)
    assert close(w, 1 + residual, 1e-6 if dtype == "float64" else 1e-3)
    assert np.array_equal(b, np.ones(3))
    assert np.array_equal(again, np.ones(5))
    assert memory == {}


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_other_routes_and_segments_conserve_residuals(world, open_session):
    old = open_session(compressor="onebit", route="flat-alltoall", nodes=[[rank] for rank in range(SIZE)])
    steps(old, world.rank, 0, 3)
    residual = residual_of(world.allgather(old.state_dict()))
    new = open_session(
        compressor="onebit", route="flat-allgather", segment_bytes=64, nodes=[[rank] for rank in range(SIZE)]
    )
    new.load_state_dict(old.state_dict())
    out = np.zeros(N, np.float32)
    new.sync(out)
    state = new.state_dict()
    assert len(state["arrays"]) > 3  # segments
    assert close(out + residual_of(world.allgather(state)), residual)


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_a_loaded_state_can_be_saved_before_it_is_used(world, tmp_path):
    path = shared(world, tmp_path)

    def save(session):
        state, _ = trained(session)
        session.save(path)
        return state

    def move(session):
        session.load(path)
        session.save(path)
        return session.state_dict()

    residual = residual_of(Part(world, SIZE).run(save, compressor="onebit"))
    for ranks in (1, SIZE, max(1, SIZE - 1), SIZE):
        states = Part(world, ranks).run(move, compressor="onebit")
        assert close(residual_of(states), residual, 1e-6)


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
@pytest.mark.parametrize("old, new", [*MOVES, (1, SIZE)])
def test_momenta_are_conserved_in_the_mean(world, old, new):
    """A step with zeros adds ``mu · u`` to the residuals, and what is sent leaves them."""
    mu = 0.5

    def load(session):
        rank = _rank(session)
        session.load_state_dict([states[k] for k in range(rank, old, new)])
        out = np.zeros(N, np.float32)
        session.sync(out)
        return out, session.state_dict()

    options = {"compressor": f"dgc:ratio=0.1,mu={mu}", "route": "flat-alltoall"}
    states = [state for state, _ in Part(world, old).run(trained, **options)]
    expected = residual_of(states) + mu * residual_of(states, "own.momentum", point="0")
    assert np.abs(residual_of(states, "own.momentum", point="0")).max() > 0.1
    found = Part(world, new).run(load, **options)
    assert close(found[0][0] + residual_of([state for _, state in found]), expected)


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
@pytest.mark.parametrize("old, new", [move for move in MOVES if move[0] > 1])  # one rank compresses nothing
@pytest.mark.parametrize("feedback", ["ef21", "ef21:momentum=0.9"])
def test_ef21_goes_on_from_what_was_said(world, old, new, feedback):
    """Where gradients stay as they are it has nearly arrived, and must not begin again."""
    target = gradient(0, 0)

    def train(session):
        for _ in range(40):
            session.sync(out := target.copy())
        return session.state_dict(), np.abs(out - target).max()

    def load(session):
        rank = _rank(session)
        session.load_state_dict([states[k] for k in range(rank, old, new)])
        session.sync(out := target.copy())
        return np.abs(out - target).max()

    options = {"compressor": "topk:ratio=0.2", "feedback": feedback}
    results = Part(world, old).run(train, **options)
    states = [state for state, _ in results]
    errors = Part(world, new).run(load, **options)
    assert results[0][1] < 1e-3
    assert max(errors) < 2e-3


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_a_plan_with_other_routes_takes_a_state_over(world, tmp_path):
    path = shared(world, tmp_path)

    def save(session):
        state, _ = trained(session)
        session.save(path)
        return state

    def load(session):
        session.load(path)
        out = np.zeros(N, np.float32)
        session.sync(out)
        return out, session.state_dict()

    old, new = (Plan(default=Strategy("onebit", route)) for route in ("flat-alltoall", "flat-allgather"))
    residual = residual_of(Part(world, SIZE).run(save, plan=old))
    found = Part(world, max(2, SIZE - 1)).run(load, plan=new)
    assert close(found[0][0] + residual_of([state for _, state in found]), residual)


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_groups_of_a_plan_and_pushed_tensors_conserve_residuals(world, tmp_path):
    path = shared(world, tmp_path)
    sizes = {"a": 700, "b": 300, "c": 500}

    def one_step(session, make):
        grads = {name: make(size) for name, size in sizes.items()}
        for name, grad in grads.items():
            session.push(name, grad)
        session.wait_all()
        return np.concatenate([grads["a"], grads["b"], grads["c"]])

    def save(session):
        for step in range(3):
            one_step(session, lambda size, step=step: gradient(world.rank, step, size))
        session.save(path)
        return session.state_dict()

    def load(session):
        session.load(path)
        return one_step(session, lambda size: np.zeros(size, np.float32)), session.state_dict()

    def mean_residuals(states):
        parts = [[{**s, "arrays": _of(s["arrays"], n)} for s in states] for n in (1000, 500)]
        return np.concatenate([residual_of(part, n=n) for part, n in zip(parts, (1000, 500))])

    plan = Plan(default=Strategy("onebit", "flat-alltoall"), groups=(("a", "b"),))
    residual = mean_residuals(Part(world, SIZE).run(save, plan=plan))
    found = Part(world, max(2, SIZE - 1)).run(load, plan=plan, segment_bytes=100)
    assert np.abs(residual[:1000]).max() > 0.1
    assert close(found[0][0] + mean_residuals([state for _, state in found]), residual)


def _of(memory, n):
    return {key: value for key, value in memory.items() if key.rsplit("|", 4)[1] == str(n)}


# --- other plans ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
@pytest.mark.parametrize("compressor", ["topk:ratio=0.01", "onebit"])
def test_what_float16_cannot_hold_becomes_a_residual(world, open_session, compressor):
    """A value that was kept back for long is beyond 65504 when it is added."""
    session = open_session(plan=Plan(default=Strategy(compressor, "flat-allgather")))
    total = np.zeros(400)
    for _ in range(60):
        grad = np.full(400, 2000, np.float16)
        grad[::7] = 30000
        session.sync(grad)
        total += grad
    session.follow(Plan(default=Strategy("none", "flat")))
    for _ in range(60):
        session.sync(grad := np.zeros(400, np.float16))
        total += grad
        if not session.state_dict()["arrays"]:
            break
    expected = np.where(np.arange(400) % 7 == 0, 60 * 30000.0, 60 * 2000.0)
    assert np.abs(total / expected - 1).max() < 2e-3  # each result is rounded to 11 bits
    assert session.stats().saturated > 0


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
@pytest.mark.parametrize("between", ["load", "follow"])
def test_what_float16_cannot_hold_is_kept_by_ranks_without_a_region_too(world, open_session, between):
    """Rank 0 holds all 64 elements between the node's steps, and the residual of them."""
    plan = Plan(default=Strategy("topk:ratio=0.01", "hierarchical-allgather"))
    session = open_session(plan=plan)

    def one_step(*first):
        grad = np.zeros(64, np.float16)
        grad[: len(first)] = first
        session.sync(grad)
        return grad.astype(float)

    total = one_step(60000, 49984) + one_step(0, 49984)
    if between == "load":
        session.load_state_dict(session.state_dict())
    else:
        session.follow(Plan({"other": Strategy("none", "flat")}, default=plan.default))
    assert [*(total + one_step())[:3]] == [60000, 2 * 49984, 0]


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_a_double_keeps_its_digits_when_a_residual_is_added(world, open_session):
    session = open_session(plan=Plan(default=Strategy("topk:ratio=0.01", "flat-allgather")))
    first = np.ones(1000)
    session.sync(first)
    session.follow(Plan(default=Strategy("none", "flat")))
    grad = np.full(1000, 1 / 3)
    grad[::2] = 1e100
    session.sync(grad)
    unsent = np.where(first == 0, 1.0, 0.0)
    assert unsent.sum() == 990
    assert (np.abs(grad[::2] / 1e100 - 1) < 1e-15).all() and np.abs(grad - 1 / 3 - unsent)[1::2].max() < 1e-15


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_pending_residuals_do_not_go_through_a_momentum(world, open_session):
    """Residuals of members become the residual of a dgc group: its momentum would send tenfold of a gradient."""
    session = open_session(plan=Plan(default=Strategy("topk:ratio=0.01", "flat-allgather")))
    total = {name: np.ones(100, np.float32) for name in ("a", "b")}
    session.sync(total)
    dgc = Strategy("dgc:ratio=0.02", "flat-allgather")
    session.follow(Plan({"a": dgc, "b": dgc}, groups=(("a", "b"),)))
    for _ in range(60):
        grads = {name: np.zeros(100, np.float32) for name in total}
        session.sync(grads)
        total = {name: total[name] + grads[name] for name in total}
    assert all(np.abs(sent - 1).max() < 1e-5 for sent in total.values())


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_a_plan_is_not_followed_while_one_rank_has_pushed(world, open_session):
    plans = [Plan(default=Strategy(name, "flat-allgather")) for name in ("onebit", "int8")]
    session = open_session(plan=plans[0])
    handles = [session.push("w", gradient(world.rank, 0))] if world.rank == 0 else []
    with pytest.raises(ConfigError, match=r"rank 0.*still under way"):
        session.follow(plans[1])
    handles = handles or [session.push("w", gradient(world.rank, 0))]
    results = world.allgather(handles[0].wait())
    assert all(np.array_equal(result, results[0]) for result in results)


def test_a_plan_is_not_followed_while_tensors_wait_for_their_group(world, open_session):
    group = Plan(default=Strategy("none", "flat"), groups=(("a", "b"),))
    session = open_session(plan=group)
    a, b = np.full(5, world.rank, np.float32), np.full(7, world.rank, np.float32)
    session.push("a", a)
    with pytest.raises(ConfigError, match="still under way"):
        session.follow(Plan(default=Strategy("none", "flat"), groups=(("a", "b", "c"),)))
    session.push("b", b)
    session.wait_all()
    assert (a == (SIZE - 1) / 2).all() and (b == (SIZE - 1) / 2).all()


@pytest.mark.parametrize("call", ["save", "rescale", "measure"])
def test_half_a_group_is_finished_before_anything_else(world, open_session, tmp_path, call):
    path = shared(world, tmp_path)
    session = open_session(plan=Plan(default=Strategy("none", "flat"), groups=(("a", "b"),)))
    session.push("a", np.ones(5, np.float32))
    acts = {
        "save": lambda: session.save(path),
        "rescale": lambda: session.rescale(2.0),
        "measure": lambda: session.measure(["fp16"]),
    }
    with pytest.raises(ConfigError, match=f"{call}: tensors are still under way, which wait for 'b'"):
        acts[call]()
    session.push("b", np.ones(5, np.float32))
    session.wait_all()


def test_a_restored_session_drops_the_size_that_was_not_used_longest(world, open_session):
    one, other = open_session(compressor="onebit"), open_session(compressor="onebit")
    for n in [*range(1000, 1008), 1000]:
        one.sync(gradient(world.rank, 0, n))
    other.load_state_dict(one.state_dict())
    for session in (one, other):
        session.sync(gradient(world.rank, 0, 2000))
    kept = [{key.split("|")[1] for key in session.state_dict()["arrays"]} for session in (one, other)]
    assert kept[0] == kept[1]
    assert SIZE == 1 or ("1000" in kept[0] and "1001" not in kept[0])


def refused_alike(world, kind, act):
    """An error of one rank is one on all, with one text."""
    said = None
    try:
        act()
    except Exception as error:  # whatever it is: the other ranks wait
        said = type(error), str(error)
    said = world.allgather(said)
    assert len(set(said)) == 1 and said[0] and said[0][0] is kind, said


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_rescaling_beyond_all_floats_is_refused(world, open_session):
    session = open_session(compressor="topk:ratio=0.01")
    session.sync(np.full(1000, 1e30, np.float32))
    before = session.state_dict()["arrays"]
    with pytest.raises(ConfigError, match="loss scale is too large"):
        session.rescale(2.0**40)
    for wrong in (np.nan, 0, 1e-50, 1e50):  # float32 multiplies: 1e-50 would clear, 1e50 break what is kept
        refused_alike(world, ConfigError, lambda wrong=wrong: session.rescale(wrong if world.rank == SIZE - 1 else 2.0))
    memory, odd = session._engine.sync_state.store, "w|9|0|0:9|own.odd"  # kept by a method that does not name it
    if world.rank == SIZE - 1:
        memory[odd] = np.ones(9, np.float32)
    refused_alike(world, StateError, lambda: session.rescale(2.0))
    memory.pop(odd, None)
    after = session.state_dict()["arrays"]
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_pending_residuals_after_a_recording_are_the_same_on_every_rank(world, open_session, tmp_path):
    """Of float16 sums that were cut while steps were recorded; on a hierarchical route ranks take shares of it."""
    halves = [[rank for rank in range(SIZE) if rank % 2 == half] for half in (0, 1)]
    plan = Plan(default=Strategy("topk:ratio=0.01", "hierarchical-allgather"))
    session, n = open_session(plan=plan, nodes=halves), 200
    path = world.bcast(str(tmp_path / "workload.json"))
    given, got = np.zeros(n), np.zeros(n)

    def step(value, dtype=np.float16):
        grad = np.full(n, value, dtype)
        given[:] += world.allreduce(grad.astype(float)) / SIZE
        session.sync({"w": grad})
        got[:] += grad.astype(float)

    step(50000)  # nearly all of it stays a residual
    session.follow(Plan(default=Strategy("topk:ratio=0.02", "hierarchical-allgather")))  # whole, from now on
    with session.record_workload(path):
        for _ in range(5):
            step(60000 if world.rank == SIZE - 1 else 0)
    step(0)
    session.follow(Plan(default=Strategy("none", "flat")))
    step(0, np.float32)
    np.testing.assert_allclose(got, given, rtol=2e-3)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_states_do_not_change_under_tensors_that_are_under_way(world, open_session, tmp_path):
    session = open_session(compressor="onebit", min_bytes=0)
    state, path = session.state_dict(), world.bcast(str(tmp_path / "state"))
    session.push("w", np.ones(50_000, np.float32)).wait()
    acts = (lambda: session.load_state_dict(state), lambda: session.rescale(2.0))
    for act in acts:
        if world.rank == 0:
            session._engine.unfinished[0] = None  # as if a push were under way, for as long as it takes
        refused_alike(world, ConfigError, act)
        session._engine.unfinished.pop(0, None)
    with session.record_workload(world.bcast(str(tmp_path / "workload.json"))):
        for act in (
            lambda: session.save(path),
            acts[0],
            session.state_dict,
            lambda: session.follow(Plan(default=Strategy("none", "flat"))),
        ):
            refused_alike(world, ConfigError, act)
        for _ in range(5):
            session.sync({"w": np.ones(10, np.float32)})


def test_pushes_that_nobody_waits_for_are_noticed(world, open_session, caplog):
    session = open_session()
    for _ in range(10):
        session.push("w", np.ones(10, np.float32)).wait()
    assert "were not waited for" not in caplog.text
    kept = [np.ones(10, np.float32) for _ in range(6)]
    for array in kept:
        session.push("w", array)
    session.wait_all()
    assert caplog.text.count("were not waited for") == (world.rank == 0)


def refused(world, session, states, words):
    with pytest.raises(StateError, match=words) as caught:
        session.load_state_dict(states)
    assert len(set(world.allgather(str(caught.value)))) == 1
    steps(session, world.rank, 0, 1)  # the session can go on


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": 99}, "newer espresso_mpi"),
        ({"rank": 77}, "rank is 77"),
        ({"step": -1}, "step is -1"),
        ({"arrays": {"w|9|0|0:9|residual": np.zeros(9, np.float32)}}, "checksum"),
        ({"arrays": {"w|9|0|0:9|residual": "x"}}, "is str"),
        ({"arrays": {"w|2|0|0:2|residual": np.array([1, np.nan], np.float32)}}, "not finite"),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused(world, open_session, change, words):
    session = open_session(compressor="onebit")
    steps(session, world.rank, 0, 1)
    state = session.state_dict()
    if world.rank == world.size - 1:
        state.update(change)
    refused(world, session, state, words)


def test_the_state_of_another_compressor_is_refused(world, open_session):
    one = open_session(compressor="topk")
    steps(one, world.rank, 0, 1)
    refused(world, open_session(compressor="onebit"), one.state_dict(), "compressor 'topk', this session has 'onebit'")


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_states_of_different_steps_are_refused(world, open_session):
    session = open_session(compressor="onebit")
    steps(session, world.rank, 0, 1)
    early = session.state_dict()
    steps(session, world.rank, 1, 2)
    refused(world, session, session.state_dict() if world.rank else early, "not of one checkpoint: step is 1")


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_a_missing_state_is_refused(world, open_session):
    session = open_session(compressor="onebit")
    steps(session, world.rank, 0, 1)
    states = [] if world.rank == SIZE - 1 else session.state_dict()
    refused(world, session, states, f"that of rank {SIZE - 1} is missing")


def test_a_missing_folder_is_refused(world, open_session, tmp_path):
    session = open_session(compressor="onebit")
    path = shared(world, tmp_path)
    with pytest.raises(StateError, match=r"espresso-state\.json: not found"):
        session.load(path)
    steps(session, world.rank, 0, 1)
