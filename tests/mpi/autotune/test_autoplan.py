"""Sessions that plan for themselves, that change plans, and that record workloads."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from mpi4py import MPI
from planner_cases import slow_network

from espresso_mpi import Plan, Session, Strategy, Tuning, optim
from espresso_mpi.autotune import autoplan, tuner
from espresso_mpi.autotune.autoplan import recorded
from espresso_mpi.autotune.clock import RecordedStep
from espresso_mpi.compressors import get
from espresso_mpi.engine import engine, rounds
from espresso_mpi.engine.plan_change import resharded_for_plan
from espresso_mpi.errors import ConfigError, EspressoError, GradientError, MismatchError, PlanError
from espresso_mpi.optim.rules import GradientMeans
from espresso_mpi.optim.warmup_trials import WarmupTrials
from espresso_mpi.planner import explain
from espresso_mpi.planner.model.workload import Workload
from espresso_mpi.planner.planfile import load, save
from espresso_mpi.tuning import LIKE_FP32
from espresso_mpi.types import MadeFor, TensorSpec

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

SIZE = MPI.COMM_WORLD.size
SHAPES = {"w1": (64, 48), "b1": (48,), "w2": (48, 200), "b2": (200,)}
HURRY = {"skip": 1, "steps": 3, "seconds": 0.3, "share": 1}


def gradients(rank, step, shapes=SHAPES):
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def mean(step, shapes=SHAPES):
    every = [gradients(rank, step, shapes) for rank in range(SIZE)]
    return {name: np.mean([g[name] for g in every], axis=0, dtype=np.float64) for name in shapes}


def train(session, rank, steps, first=0):
    """The sum of all results; in every step all ranks have the same bits."""
    total = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(first, first + steps):
        grads = gradients(rank, step)
        session.sync(grads)
        for name in SHAPES:
            total[name] += grads[name]
    return total


def expected(steps, first=0):
    return {
        name: np.sum([mean(step)[name] for step in range(first, first + steps)], axis=0, dtype=np.float64)
        for name in SHAPES
    }


def train_until_planned(session, rank, first=0):
    """The sum of all results until a plan is chosen, and the number of steps."""
    total, steps = train(session, rank, 1, first), 1
    while session.planning:
        part = train(session, rank, 1, first + steps)
        total = {name: total[name] + part[name] for name in SHAPES}
        steps += 1
    return total, steps


def everyone(world, value):
    assert len(set(world.allgather(value))) == 1, world.allgather(value)
    return value


# --- plan="auto" ------------------------------------------------------------------------------------------------------


def test_a_session_watches_plans_and_goes_on_by_the_plan(world, open_session):
    if SIZE == 1:
        pytest.skip("alone there is nothing to choose")
    train(open_session(), world.rank, 1)  # what compiles would make the first step long, and compress those after it
    session = open_session(plan="auto", compressors=["fp16"], tuning=Tuning(budget=60, **HURRY))
    before = train(session, world.rank, 4)
    assert session.plan is None and session.planning  # the first step has no begin, three are timed
    tried, steps = train_until_planned(session, world.rank, first=4)
    assert everyone(world, (steps, session.plan.digest)) and steps <= 81
    assert session.expected_seconds > 0
    after = train(session, world.rank, 3, first=4 + steps)
    assert set(session.plan.strategies) == set(SHAPES)
    assert {s.compressor for s in session.plan.strategies.values()} <= {"none", "fp16"}
    assert session.plan.forecast.seconds > 0
    assert session.plan.forecast.bound > 0
    for name in SHAPES:
        assert np.allclose(before[name], expected(4)[name], atol=1e-5)
        assert np.allclose(tried[name], expected(steps, 4)[name], atol=1e-2), "residuals of a plan are lost"
        assert np.allclose(after[name], expected(3, 4 + steps)[name], atol=1e-2)


@pytest.mark.parametrize("method, held", [("int8", True), ("fp16", False)])
def test_the_quickest_of_all_ways_is_chosen(world, open_session, method, held):
    """The clock of the session is moved by hand: its steps take as long as is said here, whatever they really take."""
    if SIZE == 1:
        pytest.skip("alone there is nothing to choose")
    usual = open_session(compressor=method)  # what it does is the quickest way
    way = {name: usual.strategy(TensorSpec(name, shape, "float32")) for name, shape in SHAPES.items()}
    now, lengths = [0.0], {}
    session = open_session(
        plan="auto", tuning=Tuning(("fp16", "int8"), skip=1, steps=3, seconds=0.1, budget=1e6, share=1)
    )
    session._clock._clock = lambda: now[0]
    for step in itertools.count():
        for number, (name, grad) in enumerate(gradients(world.rank, step).items()):
            session.push(name, grad)  # the first of a step changes the plan
            now[0] += 0.01 * (number + 1 < len(SHAPES))
        plan = session.plan
        if plan is not None and not session.planning:
            break
        alike = plan is not None and (dict(plan.strategies), plan.held, plan.fuse_bytes) == (way, held, None)
        seconds = 0.5 if alike and not plan.groups and plan.schedule is None else 0.65
        if plan is not None:
            lengths[plan.digest] = seconds
        now[0] += seconds
        session.wait_all()
    session.wait_all()
    assert everyone(world, lengths[session.plan.digest]) == min(lengths.values()) == 0.5
    assert session.expected_seconds == pytest.approx(0.53) and len(lengths) >= 6


def test_a_budget_that_measuring_has_spent_leaves_few_plans_to_try(world, open_session):
    if SIZE == 1:
        pytest.skip("alone there is nothing to choose")
    session = open_session(plan="auto", tuning=Tuning(budget=1e-3, skip=1, steps=9, share=1))
    _, steps = train_until_planned(session, world.rank)
    assert everyone(world, (steps, session.plan.digest))
    assert 6 <= steps <= 11, "three or four are watched after the first, one follows a plan, and perhaps a dense turn"
    assert session.plan.forecast is None, "nothing was measured"


def slow_steps(session, rank, steps):
    """What each step takes and by which plan, with a clock that is moved by hand: a step takes as long as its bytes."""
    now, dense, spent, plans = [0.0], nbytes_by(None), [], []
    session._clock._clock = lambda: now[0]
    for step in range(steps):
        for name, grad in gradients(rank, step).items():
            session.push(name, grad)
        plans.append(session.plan)
        spent.append(0.1 + 5 * nbytes_by(session.plan) / dense)
        session.wait_all()
        now[0] += spent[-1]
        session._clock._waited = now[0]
    return plans, np.array(spent)


@pytest.mark.parametrize("share", [0.05, 1])
def test_a_slow_network_is_watched_by_compressed_steps_and_trials_pause(
    world, open_session, monkeypatch, caplog, share
):
    if SIZE == 1:
        pytest.skip("alone there is nothing to choose")
    session, looks = open_session(plan="auto", tuning=Tuning(seconds=0.1, accuracy="fast", share=share)), []
    together = session._together
    monkeypatch.setattr(session._tuner, "_together", lambda name, run: looks.append(name) or together(name, run))
    with caplog.at_level("INFO", "espresso_mpi"):
        plans, spent = slow_steps(session, world.rank, 120)
    bits = [round(32 * nbytes_by(plan) / nbytes_by(None)) for plan in plans]
    assert everyone(world, tuple(bits)) and everyone(world, session.plan.digest)
    assert caplog.text.count("planning pauses") == (world.rank == 0 and share == 0.05)
    assert bits[0] == 32 and set(bits[1:5]) <= {8, 9} and set(bits[5:8]) <= {4, 5}, bits
    assert all(plan.held for plan in plans[1:5]), "what is watched is the backward pass alone"
    cost = np.cumsum([0, 0, 0, 0, 0, *(spent[5:] - spent.min())])
    over = (cost - 0.05 * np.cumsum(spent)).max()
    assert over <= 3 * (spent[1] - spent.min()), (over, bits)
    assert set(bits[8:]) <= {4, 5, 8, 9}, "what has more bytes takes too long, as that with a few more shows"
    assert (next(step for step in range(8, 120) if bits[step] > 5) > 25) == (share == 0.05), "without pauses, at once"
    assert looks.count("trial") < (60 if share == 0.05 else 120), "in a pause, ranks do not ask each other"


def test_steps_that_change_after_the_first_are_no_error_on_a_slow_network(world, open_session):
    if SIZE == 1:
        pytest.skip("alone there is nothing to choose")
    session, now = open_session(plan="auto", tuning=Tuning(("int8",))), [0.0]
    session._clock._clock = lambda: now[0]
    for step in range(12):
        grads = {"w": np.full(20000 + step, world.rank, np.float32)}
        session.sync(grads)
        now[0] += 5.0
        session._clock._waited = now[0]
        assert np.allclose(grads["w"], (SIZE - 1) / 2, atol=1e-2)
    assert not session.planning and not session.plan.strategies, "dense again: such steps cannot be planned for"


def test_a_rank_that_comes_late_is_no_slow_network(world, open_session):
    if SIZE == 1:
        pytest.skip("alone nobody is late")
    session = open_session(plan="auto", tuning=Tuning(("int8",), skip=1, steps=3, budget=400.0))
    session.sync(gradients(world.rank, 0))
    if world.rank:
        (call,) = session._clock._calls
        session._clock._calls = [call.shifted(-60.0)]  # rank 0 was a minute late
    session.sync(gradients(world.rank, 1))
    assert session.plan is None


def test_it_plans_anew_when_steps_take_longer_than_the_plan_said(world, open_session, caplog):
    if SIZE == 1:
        pytest.skip("alone there is nothing to choose")
    tuning = Tuning(("onebit",), check=2, every=2, factor=1.0001, accuracy="fast", **HURRY)
    with caplog.at_level("INFO", "espresso_mpi"):
        session = open_session(plan="auto", tuning=tuning)
        train_until_planned(session, world.rank)
        train(session, world.rank, 4)
        train_until_planned(session, world.rank)
    assert everyone(world, session.plan.digest)
    if world.rank == 0:
        assert sum("planning anew" in record.message for record in caplog.records) >= 1
        assert sum(record.message.startswith("plan: ") for record in caplog.records) >= 2
        assert any("onebit: not known to train like fp32" in record.message for record in caplog.records)


def test_pushed_gradients_are_planned_for_as_well(world, open_session):
    if SIZE == 1:
        pytest.skip("alone there is nothing to choose")
    session = open_session(plan="auto", tuning=Tuning(("int8",), **HURRY))
    for step in itertools.count():
        grads = gradients(world.rank, step)
        for name in SHAPES:
            session.push(name, grads[name])
        session.wait_all()
        if not session.planning:
            break
    assert everyone(world, session.plan.digest)
    assert len(session.plan.strategies) == len(SHAPES)


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
@pytest.mark.parametrize("missing", ["b1", "w2"])
def test_ranks_may_push_first_what_was_missing_while_plans_are_tried(world, open_session, missing):
    """Others push it after the call that ends their step, and so after the change of the plan."""
    session = open_session(plan="auto", tuning=Tuning(("int8",), **HURRY), timeout=60)
    others = [name for name in SHAPES if name != missing]
    order, step = ([missing, *others] if world.rank else [*others, missing]), 0
    while session.planning:
        grads = gradients(world.rank, step)
        for name in others if step % 2 else order:
            session.push(name, grads[name])
        session.wait_all()
        dense = session.plan is None
        for name in others if step % 2 else order:
            assert np.allclose(grads[name], mean(step)[name], atol=1e-5 if dense else 0.1), (step, name)
        everyone(world, tuple(grads[name].tobytes() for name in others))
        step += 1
    everyone(world, (step, session.plan.digest))


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
@pytest.mark.parametrize("values", ["finite", "odd"])
def test_what_a_rank_has_pushed_before_a_change_of_the_plan_travels_by_the_new_one(world, open_session, values):
    session = open_session(nonfinite="skip")
    plans = [Plan(default=Strategy("onebit", "flat-alltoall")), Plan(default=Strategy("none", "flat"))]
    for plan in (*plans, *plans):
        grads = gradients(world.rank, 0)
        if values == "odd":
            grads["w1"][0, 0] = np.inf
        handles = [] if world.rank else [session.push(name, grads[name]) for name in ("w1", "b1")]
        session._together("plan", lambda plan=plan: session._adopt(plan))
        handles += [session.push(name, grads[name]) for name in ("b1", "w1")] if world.rank else []
        for handle in handles:
            handle.wait()
        everyone(world, (grads["w1"].tobytes(), grads["b1"].tobytes()))
        signs = len(np.unique(np.abs(grads["b1"]))) <= SIZE
        assert signs == (plan is plans[0])
        assert grads["w1"].any() == (values == "finite")


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_a_part_of_a_group_does_not_keep_a_plan_from_changing(world, open_session):
    """All ranks have pushed what was missing, and the others of its group come after the change."""
    session = open_session(plan="auto", tuning=Tuning(skip=1, steps=1000, budget=1e6))
    session._together("plan", lambda: session._adopt(Plan(default=Strategy("none", "flat"), groups=(("w1", "b1"),))))
    grads = gradients(world.rank, 0)
    early = session.push("b1", grads["b1"])
    session._together("plan", lambda: session._adopt(Plan(default=Strategy("none", "flat"))))
    session.push("w1", grads["w1"]).wait()
    early.wait()
    for name in ("w1", "b1"):
        assert np.allclose(grads[name], mean(0)[name], atol=1e-6)


CHOICE = ("fp16", "int8", "onebit", "topk")


def nbytes_by(plan):
    """Of all gradients, as a plan sends them."""
    sizes = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    specs = {name: "none" if plan is None else plan.strategy(name).compressor for name in SHAPES}
    return sum(4 * n if specs[name] == "none" else get(specs[name]).nbytes(n) for name, n in sizes.items())


def by_bytes(session):
    """Steps take as long as the bytes of the session's plan say."""

    def agreed(transport, steps, count, computing, late):
        each = [float("nan") if step is None else 1e-6 * nbytes_by(session.plan) for step in steps]
        return [float("nan")] * (count - len(each)) + each, False

    return agreed


@pytest.mark.parametrize(("accuracy", "rule"), [("safe", None), ("balanced", "adam"), ("safe", "sgd"), ("fast", None)])
def test_only_the_fast_level_may_choose_what_spoils_the_optimizers_moments(
    world, open_session, caplog, monkeypatch, accuracy, rule
):
    if SIZE == 1:
        pytest.skip("alone there is nothing to choose")
    nodes = [[rank] for rank in range(SIZE)]
    tuning = Tuning(CHOICE, accuracy=accuracy, optimizer=rule, budget=1e6, **HURRY)
    with caplog.at_level("INFO", "espresso_mpi"):
        session = open_session(plan="auto", tuning=tuning, nodes=nodes)
        monkeypatch.setattr(autoplan, "profiled", lambda *given, **options: slow_network(SIZE, CHOICE))
        monkeypatch.setattr(tuner, "_agreed", by_bytes(session))
        train_until_planned(session, world.rank)
    used = {strategy.compressor for strategy in session.plan.strategies.values()}
    dropped = everyone(world, session.plan.forecast.dropped)
    everyone(world, session.plan.digest)
    if accuracy == "fast":
        assert used & {"onebit", "topk"} and not dropped
        return
    assert "int8" in used and not used & {"onebit", "topk"}
    assert [line.partition(" ")[0] for line in dropped] == ["onebit", "topk"]
    assert all("4 of 4 tensors" in line and f"accuracy={accuracy!r}" in line for line in dropped)
    assert {f"Left out before the search: {line}." for line in dropped} <= set(explain(session.plan).words)
    if world.rank == 0:
        assert set(dropped) <= {record.message for record in caplog.records}


@pytest.mark.parametrize("name", ["OnebitAdam", "MomentumSGD"])
def test_momenta_may_travel_by_fewer_bits_than_gradients(world, open_session, monkeypatch, name):
    """The optimizer says what it sends. Two bits are within the limit for what changes by a tenth in each step."""
    if SIZE == 1:
        pytest.skip("alone there is nothing to choose")
    known = (*LIKE_FP32, "int2", "onebit")
    session = open_session(plan="auto", tuning=Tuning(budget=1e6, **HURRY), nodes=[[rank] for rank in range(SIZE)])
    monkeypatch.setattr(autoplan, "profiled", lambda *given, **options: slow_network(SIZE, known))
    monkeypatch.setattr(tuner, "_agreed", by_bytes(session))
    params = {key: np.ones(shape, np.float32) for key, shape in SHAPES.items()}
    warmup = {"warmup": 4} if name == "OnebitAdam" else {}
    optimizer, step = getattr(optim, name)(params, session, lr=1e-3, **warmup), 0
    while session.planning:
        optimizer.step(gradients(world.rank, step))
        step += 1
    used = {strategy.compressor for strategy in session.plan.strategies.values()}
    everyone(world, session.plan.digest)
    dropped = everyone(world, session.plan.forecast.dropped)
    assert used & {"int2", "onebit"} and not used & {"fp16", "int8"}
    rule = {"OnebitAdam": "adam-momentum", "MomentumSGD": "sgd-momentum"}[name]
    assert all(f"({rule})" in line for line in dropped)


@pytest.mark.parametrize("name, quicker", [("OnebitAdam", "int8"), ("ZeroOneAdam", "none"), ("OnebitLamb", "none")])
def test_gradients_of_a_warm_up_travel_by_what_is_quicker(world, open_session, monkeypatch, name, quicker):
    """Ranks measure other times; the slowest counts. What they leave over is no part of the plans for the momenta."""
    if SIZE == 1:
        pytest.skip("alone there is nothing to choose")
    sent, push, after = [], GradientMeans.push, WarmupTrials.after
    slow = {"int8": 1.0, "none": 2.0} if quicker == "int8" else {"int8": 2.0, "none": 1.0}

    def measured(self, seconds):
        last, first = sent[-1], len(self._seconds) % 2 == 0
        return after(self, 9.0 if first else slow[last] if world.rank == SIZE - 1 else 3.0 - 2.0 * (last == quicker))

    monkeypatch.setattr(WarmupTrials, "after", measured)
    monkeypatch.setattr(
        GradientMeans, "push", lambda self, key, x: (sent.append(self._compressor), push(self, key, x))[1]
    )
    session = open_session(plan="auto", tuning=Tuning(("int4",), budget=1e6, **HURRY), min_bytes=0)
    params = {key: np.ones(shape, np.float32) for key, shape in SHAPES.items()}
    optimizer, step = getattr(optim, name)(params, session, warmup=8), 0
    while step < 10 or session.planning:
        optimizer.step(gradients(world.rank, step))
        step += 1
    optimizer.step(gradients(world.rank, step))
    each = [sent[first] for first in range(0, len(sent), len(SHAPES))]
    assert everyone(world, tuple(each[:4])) == ("int8", "int8", "none", "none") and set(each[4:]) == {quicker}
    assert not session._engine.sync_state.store.any_pending, "residuals of gradients that nobody sends again"
    optimizer = getattr(optim, name)(params, open_session(compressor="onebit"), warmup=8)
    optimizer.step(gradients(world.rank, step))
    assert sent[-1] == "none"


def test_ranks_judge_alike_if_only_some_know_the_optimizer(world, open_session):
    if SIZE == 1:
        pytest.skip("alone there is nothing to choose")
    session = open_session(plan="auto", tuning=Tuning(("int4",), **HURRY))
    train(session, world.rank, 1)
    if world.rank == 0:
        session.judge_for("sgd")
    with pytest.raises(ConfigError, match="rule='momentum'; expected 'adam' or 'sgd' or 'adam-momentum'"):
        session.judge_for("momentum")
    train_until_planned(session, world.rank, first=1)
    everyone(world, session.plan.digest)


def test_steps_that_differ_cannot_be_planned_for_and_training_goes_on(world, open_session, caplog):
    if SIZE == 1:
        pytest.skip("alone there is nothing to choose")
    session = open_session(plan="auto", tuning=Tuning(("int8",), **HURRY))
    with caplog.at_level("WARNING", "espresso_mpi"):
        for size in range(10, 18):
            grads = {"w": np.full(size, world.rank, np.float32)}
            session.sync(grads)
            assert np.allclose(grads["w"], (SIZE - 1) / 2)
    assert not (session.plan or Plan()).strategies
    if world.rank == 0:
        assert any("other tensors" in record.message for record in caplog.records)


def test_an_error_of_one_rank_does_not_bring_the_steps_apart(world, open_session):
    if SIZE == 1:
        pytest.skip("alone there is nobody to be apart from")
    session = open_session(plan="auto", tuning=Tuning(("fp16",), **HURRY))
    for step in itertools.count():
        grads = gradients(world.rank, step)
        if step in (2, 6):  # while steps are watched, and while plans are tried; after pushes
            wrong = "no array" if world.rank == SIZE - 1 else grads["w1"]
            with pytest.raises(GradientError):
                session.sync({**grads, "w1": wrong})
            continue
        if step in (1, 5):
            for name in SHAPES:
                session.push(name, grads[name])
            session.wait_all()
        else:
            session.sync(grads)
        if not session.planning:
            break
    assert everyone(world, (step, session.plan.digest))


def test_pushes_go_on_when_a_tensor_of_a_group_is_frozen(world, open_session, monkeypatch):
    """Nobody asked for the groups of such a plan: they are dissolved once, and the next steps do not wait."""
    session = open_session(plan="auto", tuning=Tuning(skip=1, steps=1000, budget=1e6))
    grouped = Plan(default=TOPK, groups=(("w1", "b1", "b2"), ("w2", "other")))
    session._together("plan", lambda: session._adopt(grouped))
    total, steps = {name: np.zeros(shape) for name, shape in SHAPES.items()}, 12
    for step in range(steps):
        if step == 4:  # from now on, a wait for a tensor that does not come is longer than the test may take
            monkeypatch.setattr(rounds, "GRACE", 3600.0)
            monkeypatch.setattr(engine, "_FRUITLESS", 10**9)
        grads = gradients(world.rank, step)
        for name in grads:
            if name != "b1" or step == 0:
                session.push(name, grads[name])
        session.wait_all()
        for name in SHAPES:
            total[name] += 0 if name == "b1" and step else grads[name]
    session._together("plan", lambda: session._adopt(Plan(default=Strategy("none", "flat"))))
    rest = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    session.sync(rest)
    for name in ("w1", "w2", "b2"):
        everyone(world, total[name].tobytes())
        assert np.allclose(total[name] + rest[name], expected(steps)[name], atol=2e-4), name


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_a_call_that_fails_before_it_is_made_gives_its_memory_back(world, open_session, monkeypatch):
    session, grads = open_session(plan="auto"), gradients(world.rank, 0)
    session.sync(grads)

    def fail(*arguments):
        raise MismatchError("ranks wait for each other in different calls")

    with monkeypatch.context() as patch:
        patch.setattr(session._tuner, "step_ended", fail)
        with pytest.raises(MismatchError):
            session.sync(grads)
    session.sync(grads)
    everyone(world, grads["w1"].tobytes())


def test_tensors_that_come_after_the_plan_travel_dense(world, open_session):
    if SIZE == 1:
        pytest.skip("alone there is nothing to choose")
    session = open_session(plan="auto", tuning=Tuning(("onebit",), **HURRY))
    train_until_planned(session, world.rank)
    late = {"metric": np.full(3, world.rank, np.float32), "b1": np.full(48, world.rank, np.float32)}
    session.sync({"metric": late["metric"]})
    assert np.allclose(late["metric"], (SIZE - 1) / 2)
    session.sync(late)  # a part of what may be a group


@pytest.mark.parametrize(
    "options",
    [
        {"plan": "auto", "compressor": "fp16"},
        {"plan": "auto", "compressors": "fp16"},
        {"plan": "auto", "compressors": ["fp61"]},
        {"plan": "auto", "tuning": 3},
        {"plan": "auto", "accuracy": "good"},
        {"plan": "auto", "accuracy": 1},
        {"accuracy": "safe"},
        {"plan": "auto", "compressors": ["signsgd"]},
        {"plan": "auto", "feedback": "ef21:momentum=0.1"},
        {"compressors": ["fp16"]},
        {"tuning": Tuning()},
        {"plan": "no such file.json"},
    ],
)
def test_options_that_do_not_go_together_are_refused_on_every_rank(world, options):
    with pytest.raises(ConfigError):
        Session(world, **options)


def test_ranks_with_other_settings_are_told(world):
    if SIZE == 1:
        pytest.skip("alone there is nobody to differ from")
    with pytest.raises(MismatchError, match="tuning"):
        Session(world, plan="auto", tuning=Tuning(steps=5 + world.rank))


# --- changing plans ---------------------------------------------------------------------------------------------------

WAY = "flat-alltoall"
ONEBIT, TOPK = Strategy("onebit", WAY), Strategy("topk:ratio=0.1", WAY)
PLANS = [
    Plan(dict.fromkeys(SHAPES, ONEBIT), groups=(("w1", "b1"), ("w2", "b2"))),
    Plan(dict.fromkeys(SHAPES, TOPK)),
    Plan(dict.fromkeys(SHAPES, ONEBIT), groups=(("b1", "w2", "b2"),)),
    Plan({**dict.fromkeys(SHAPES, Strategy("none", "flat")), "w2": TOPK}, groups=(("w1", "b1"),)),
    Plan(dict.fromkeys(SHAPES, Strategy("none", "flat"))),
]


def test_no_residual_is_lost_when_plans_change(world, open_session):
    """Σ means = Σ results in the end, since the last plan is dense and adds all residuals."""
    session = open_session(plan=PLANS[0])
    total = train(session, world.rank, 3)
    for number, plan in enumerate(PLANS[1:], 1):
        before = sum(session._transport.sent.values())
        session.follow(plan)
        assert sum(session._transport.sent.values()) - before < 4 * 48 * 64, "no residual travels"
        part = train(session, world.rank, 3, first=3 * number)
        total = {name: total[name] + part[name] for name in SHAPES}
    steps = 3 * len(PLANS)
    for name in SHAPES:
        everyone(world, total[name].tobytes())
        assert np.allclose(total[name], expected(steps)[name], atol=2e-4), name
    assert not session._engine.sync_state.store


def test_what_travels_as_before_keeps_its_residual_bit_for_bit(world, open_session):
    session = open_session(plan=PLANS[1])
    train(session, world.rank, 2)
    before = {k: v.copy() for k, v in session._engine.sync_state.store.items() if k.startswith("w2|")}
    session.follow(PLANS[3])
    after = session._engine.sync_state.store
    assert before
    assert all(np.array_equal(after[key], value) for key, value in before.items())
    assert SIZE == 1 or any(key.startswith("w1|") and "|whole|" in key for key in after)


def test_a_method_with_a_momentum_gets_the_mean_of_the_residuals(world, open_session):
    """It would count a gradient in many steps: there the ranks compute what is missing. The others keep their own."""
    session = open_session(plan=PLANS[0])
    train(session, world.rank, 2)
    transport, state = session._transport, session._engine.sync_state

    def resharded(plan):
        return session._together("change", lambda: resharded_for_plan(transport, state, PLANS[0], plan)).store

    own, same = resharded(PLANS[1]), resharded(Plan(default=Strategy("dgc:ratio=0.1", WAY)))
    assert set(own) == set(same) and any(key.startswith("w2|") for key in own)
    for key in sorted(same):
        every = world.allgather(np.array(own[key]))
        everyone(world, same[key].tobytes())
        assert np.allclose(np.mean(every, axis=0), same[key], atol=1e-5), key
        assert SIZE == 1 or not np.allclose(every[0], every[1], atol=1e-3)


# --- plans that do not fit --------------------------------------------------------------------------------------------


def made_for(**changes):
    tensors = {name: (shape, "float32") for name, shape in SHAPES.items()}
    return MadeFor(**{"tensors": tensors, "nodes": 1, "ranks_per_node": SIZE, **changes})


def test_a_plan_from_a_file_is_followed(world, open_session, tmp_path):
    path = world.bcast(str(tmp_path / "plan.json"))
    if world.rank == 0:
        save(PLANS[1], path)
    world.Barrier()
    session = open_session(plan=path)
    assert session.strategy(TensorSpec("w1", (64, 48), "float32")) == TOPK
    assert load(path).digest == session.plan.digest


def test_pushes_of_a_plan_that_holds_them_travel_when_one_is_waited_for(world, open_session):
    default = Strategy("int8", "flat-alltoall")
    found = []
    for held in (True, False):
        session, grads = open_session(plan=Plan(default=default, held=held)), gradients(world.rank, 0)
        handles = [session.push(name, grad) for name, grad in grads.items()]
        if held:
            time.sleep(0.05)
            before = gradients(world.rank, 0)
            assert not session._engine.busy and all(np.array_equal(grads[name], before[name]) for name in grads)
        handles[1].wait()
        session.wait_all()
        found.append({name: grad.tobytes() for name, grad in grads.items()})
    assert found[0] == found[1]


def test_a_plan_for_other_ranks_is_refused(world):
    plan = Plan(PLANS[1].strategies, made_for=made_for(nodes=1, ranks_per_node=SIZE + 1))
    with pytest.raises(PlanError, match="ranks on each node"):
        Session(world, plan=plan)


def test_a_plan_for_other_versions_is_refused(world):
    plan = Plan(PLANS[1].strategies, made_for=made_for(fingerprint={"espresso_mpi": "0.0.1"}))
    with pytest.raises(ConfigError, match=r"0\.0\.1"):
        Session(world, plan=plan)


def test_a_plan_for_other_tensors_is_refused(world, open_session):
    nodes = [list(range(SIZE))]
    session = open_session(plan=Plan(PLANS[1].strategies, made_for=made_for()), nodes=nodes)
    session.sync(gradients(world.rank, 0))
    with pytest.raises(PlanError, match=r"w1.*\[64, 48\].*\[48, 64\]"):
        session.sync({"w1": np.zeros((48, 64), np.float32)})
    with pytest.raises(PlanError, match="'w3'"):
        session.sync({"w3": np.zeros(4, np.float32)})


# --- workloads --------------------------------------------------------------------------------------------------------


def test_a_workload_is_recorded_of_dense_steps(world, open_session, tmp_path):
    path = world.bcast(str(tmp_path / "workload.json"))
    session = open_session(compressor="onebit")
    with session.record_workload(path):
        results = train(session, world.rank, 5)
    for name in SHAPES:
        assert np.allclose(results[name], expected(5)[name], atol=1e-5)
    world.Barrier()
    workload = Workload.load(path)
    assert {t.name: t.shape for t in workload.tensors} == SHAPES
    assert all(t.ready > 0 for t in workload.tensors)
    lossy = gradients(world.rank, 0)
    session.sync(lossy)
    assert SIZE == 1 or not np.allclose(lossy["w1"], mean(0)["w1"], atol=1e-3)  # compressed again


def test_pushed_tensors_are_recorded_in_their_order(world, open_session, tmp_path):
    path = world.bcast(str(tmp_path / "workload.json"))
    session = open_session()
    order = ["w2", "b2", "w1", "b1"]
    with session.record_workload(path):
        for step in range(5):
            grads = gradients(world.rank, step)
            for name in order:
                np.linalg.norm(np.ones((80, 80)))  # time passes
                session.push(name, grads[name])
            session.wait_all()
    world.Barrier()
    assert [t.name for t in Workload.load(path).tensors] == order


@pytest.mark.mpi(min_size=2)
def test_what_is_pushed_while_recording_travels_when_it_is_waited_for(world, open_session, tmp_path):
    """So the backward pass is recorded as it is without traffic beside it; whoever only asks is not kept waiting."""
    path, moved, right = world.bcast(str(tmp_path / "workload.json")), [], []
    session = open_session()
    with session.record_workload(path):
        for step in range(6):
            grad, before = gradients(world.rank, step)["w1"], dict(session._transport.sent)
            handle = session.push("w1", grad)
            time.sleep(0.1)
            moved.append(session._transport.sent != before)
            while step % 2 and not handle.done():
                time.sleep(1e-3)
            handle.wait()
            right.append(np.allclose(grad, mean(step)["w1"], atol=1e-6))
    assert not any(moved)
    assert all(right)


def test_a_tensor_is_ready_when_the_last_rank_has_it_in_each_step(world, open_session):
    """Every step another rank is late: the median of any one rank would miss it."""
    session, specs = open_session(), (TensorSpec("a", (4,), "float32"), TensorSpec("b", (5,), "float32"))

    def step(number):
        late = number % SIZE == world.rank
        return RecordedStep(specs, np.array([2.0, 3.0 if late else 1.0]), 4.0 + late)

    steps = [step(number) for number in range(3 * SIZE)]
    workload = session._together("workload", lambda: recorded(session._transport, steps, "made up"))
    assert [(t.name, t.ready) for t in workload.tensors] == [("a", 2.0), ("b", 3.0)]
    assert workload.spread == 0
    everyone(world, str(workload))


def test_too_few_steps_are_no_workload(world, open_session, tmp_path):
    session = open_session(compressor="onebit")
    path = world.bcast(str(tmp_path / "workload.json"))
    with pytest.raises(PlanError, match="expected 3 or more"), session.record_workload(path):
        train(session, world.rank, 2)
    lossy = gradients(world.rank, 0)
    session.sync(lossy)
    assert SIZE == 1 or not np.allclose(lossy["w1"], mean(0)["w1"], atol=1e-3)  # compressed again


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_a_push_under_way_at_the_end_of_a_recording(world, open_session, tmp_path):
    """All ranks go back to what the session does otherwise between the same calls."""
    path = world.bcast(str(tmp_path / "workload.json"))
    session = open_session(compressor="onebit", route="flat-alltoall")

    def grad(step):
        return np.random.default_rng([world.rank, step]).standard_normal(500).astype(np.float32)

    with session.record_workload(path):
        for step in range(5):
            session.push("w", grad(step))
            session.wait_all()
        if world.rank:
            time.sleep(0.3)
        handle = session.push("w", grad(5))
        if world.rank:
            handle.wait()
    dense = handle.wait()
    assert np.allclose(dense, np.mean(world.allgather(grad(5)), axis=0), atol=1e-6)
    lossy, problem = grad(6), None
    try:
        session.push("w", lossy).wait()
    except EspressoError as error:  # the other ranks may not have it
        problem = str(error)
    assert not any(world.allgather(problem)), problem
    everyone(world, (dense.tobytes(), lossy.tobytes()))
    assert not np.allclose(lossy, np.mean(world.allgather(grad(6)), axis=0), atol=1e-3)

    handle, given = None if world.rank else session.push("w", grad(7)), grad(7)  # dense, as on the other ranks
    with pytest.raises(PlanError, match="0 step"), session.record_workload(path):
        given = (handle or session.push("w", given)).wait()
    assert np.allclose(given, np.mean(world.allgather(grad(7)), axis=0), atol=1e-6)
    everyone(world, session.push("w", grad(8)).wait().tobytes())


def test_a_workload_that_cannot_be_written_is_refused_at_once(world, open_session):
    session = open_session()
    with pytest.raises(ConfigError, match="no/such"), session.record_workload("/no/such/folder/workload.json"):
        raise AssertionError("the block was entered")
    train(session, world.rank, 1)
