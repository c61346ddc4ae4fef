"""``Tuning.plan_file``: the plan that one run chose, followed by the next one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI
from session_cases import gradients, summed

from espresso_mpi import Plan, Session, Strategy, Tuning
from espresso_mpi.errors import ConfigError, MismatchError, NonFiniteError, StateError
from espresso_mpi.planner import explain
from espresso_mpi.planner.planfile import load, save
from espresso_mpi.state.snapshots import sealed

SIZE = MPI.COMM_WORLD.size
pytestmark = [
    pytest.mark.mpi, pytest.mark.timeout(300), pytest.mark.skipif(SIZE == 1, reason="alone there is nothing to choose")
]  # fmt: skip

SHAPES = {"w1": (64, 48), "b1": (48,), "w2": (48, 200)}
METHOD = "int4"
BOTH = (METHOD, "int8")


@pytest.fixture
def path(world, tmp_path):
    return world.bcast(str(tmp_path / "plan.json"))


def tuning(path, **changes):
    how = {"skip": 1, "steps": 3, "seconds": 0.2, "share": 1, "budget": 0.5, "trial_steps": 12, "plan_file": path}
    return Tuning(**{"compressors": (METHOD,), "accuracy": "fast", **how, **changes})


train = partial(summed, shapes=SHAPES)


def planned(session, shapes=SHAPES):
    """Train until a plan is chosen."""
    for step in itertools.count():
        train(session, 1, step, shapes=shapes)
        if not session.planning:
            break


def close(found, wanted, bound):
    return all(np.abs(found[name] - wanted[name]).max() < bound for name in found)


def test_the_plan_that_was_chosen_is_written(world, open_session, path):
    session = open_session(plan="auto", tuning=tuning(path))
    planned(session)
    if world.rank == 0:
        assert load(path) == session.plan
    assert session.plan.chosen.seconds == session.expected_seconds > 0
    assert session.plan.made_for.fingerprint["espresso_mpi"]


@pytest.fixture(scope="module")
def plan():
    """A plan with ``METHOD`` and a bucket, as if a session with these settings had chosen it."""
    with Session(plan="auto", tuning=tuning(None)) as session:
        planned(session)
        strategies = dict.fromkeys(SHAPES, Strategy(METHOD, "flat-allgather"))
        how = {"groups": (("w1", "b1"),), "fuse_bytes": 0, "schedule": None, "forecast": None, "held": False}
        return replace(session.plan, strategies=strategies, **how)


@pytest.fixture
def chosen(world, path, plan):
    """The same, in the file."""
    if world.rank == 0:
        save(plan, path)
    world.Barrier()
    return plan


@pytest.mark.parametrize("pushes", [False, True])
def test_the_next_run_follows_the_plan_from_the_first_step_on(open_session, path, chosen, pushes):
    session = open_session(plan="auto", tuning=tuning(path))
    out, wanted = train(session, 1, pushes=pushes)
    assert not session.planning and session.plan.digest == chosen.digest
    assert not close(out, wanted, 1e-4)  # compressed
    more, also = train(session, 6, first=1, pushes=pushes)
    assert session.plan == chosen and session.expected_seconds == chosen.chosen.seconds
    assert close({n: out[n] + more[n] for n in out}, {n: wanted[n] + also[n] for n in out}, 1.0)  # one residual
    assert any("chose it" in line for line in explain(session.plan).words)


@pytest.mark.parametrize("older", [False, True])
def test_a_state_of_the_earlier_run_continues_bit_for_bit(open_session, path, chosen, older):
    first = open_session(plan="auto", tuning=tuning(path))
    train(first, 3)
    state = first.state_dict()
    if older:  # states also told what the plan was made for
        told = {**state["options"], "plan": f"{state['options']['plan']}, made for 3 tensors"}
        state = sealed({**{key: value for key, value in state.items() if key != "checksum"}, "options": told})
    then = train(first, 2, first=3)[0]
    second = open_session(plan="auto", tuning=tuning(path))
    second.load_state_dict(state)
    again = train(second, 2, first=3)[0]
    assert all(np.array_equal(then[name], again[name]) for name in then)


def test_a_state_without_a_plan_is_loaded_and_the_plan_followed_after_it(open_session, path, chosen):
    fresh = open_session(plan="auto", tuning=tuning(path)).state_dict()
    session = open_session(plan="auto", tuning=tuning(path))
    session.load_state_dict(fresh)
    train(session, 2)
    assert session.plan == chosen


def test_a_state_of_another_plan_is_refused_and_changes_nothing(open_session, path, chosen):
    other = open_session(plan=Plan(default=Strategy("onebit", "flat-allgather")))
    train(other, 2)
    session = open_session(plan="auto", tuning=tuning(path))
    with pytest.raises(StateError, match="onebit"):
        session.load_state_dict(other.state_dict())
    assert session.plan is None
    train(session, 2)
    assert session.plan == chosen


OTHERS = {"new": {"w1": (64, 48), "v": (10, 10)}, "shape": {**SHAPES, "w2": (5, 5)}}


@pytest.mark.parametrize("pushes", [False, True])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_plan_for_other_tensors_is_left_in_the_first_step(world, open_session, path, chosen, other, pushes):
    session = open_session(plan="auto", tuning=tuning(path))
    out, wanted = train(session, 2, shapes=other, pushes=pushes)
    assert session.watching and session.plan is None
    more, also = train(session, 1, first=2, shapes=other)  # a dense step delivers the residual as well
    assert close({n: out[n] + more[n] for n in out}, {n: wanted[n] + also[n] for n in out}, 1e-4)
    planned(session, other)
    assert set(session.plan.strategies) == set(other)
    if world.rank == 0:
        assert load(path) == session.plan


def test_tensors_may_be_missing_in_the_first_step(world, open_session, path, chosen):
    session = open_session(plan="auto", tuning=tuning(path))
    train(session, 1, shapes={"w2": SHAPES["w2"]})
    handles = [session.push(name, np.full(shape, np.nan, np.float32)) for name, shape in SHAPES.items()]
    for handle in handles:
        with pytest.raises(NonFiniteError):
            handle.wait()
    out, wanted = train(session, 4)
    assert session.plan == chosen
    assert close(out, wanted, 1.0)


def test_ranks_with_other_tensors_in_the_first_step_hear_which(world, open_session, path, chosen):
    session = open_session(plan="auto", tuning=tuning(path))
    with pytest.raises(MismatchError, match=r"w1.*mine|mine.*w1"):
        session.sync({"mine" if world.rank else "w1": np.ones((64, 48), np.float32)})


@pytest.fixture
def unfinished(world, open_session, path):
    """The plan of a run that ended before its trials, in the file."""
    how = {"share": 1e-9, "budget": 100, "trial_steps": 1000, "compressors": BOTH}
    session = open_session(plan="auto", tuning=tuning(path, **how))
    train(session, 40)
    assert session.planning
    return world.bcast(load(path) if world.rank == 0 else None)


@pytest.mark.parametrize("pushes", [False, True])
def test_the_next_run_goes_on_with_trials_that_have_not_ended(world, open_session, path, unfinished, pushes, caplog):
    assert not unfinished.chosen.finished
    assert unfinished.chosen.tried[unfinished.digest][0] == unfinished.chosen.seconds
    with caplog.at_level("INFO", "espresso_mpi"):
        session = open_session(plan="auto", tuning=tuning(path, factor=1e6, compressors=BOTH))
        out, wanted = train(session, 1, pushes=pushes)
        assert session.planning and session.plan.digest == unfinished.digest
        more, also = train(session, 4, first=1, pushes=pushes)
        planned(session)
    assert close({n: out[n] + more[n] for n in out}, {n: wanted[n] + also[n] for n in out}, 1.0)
    assert session.plan.chosen.finished and not session.plan.chosen.tried
    assert session._tuner._followed is None  # steps are compared with its own trials from now on
    if world.rank == 0:
        assert load(path) == session.plan
        assert len([r for r in caplog.records if r.message.startswith("tried: ")]) > len(unfinished.chosen.tried)


def test_trials_begin_anew_where_steps_take_another_time(world, open_session, path, unfinished):
    if world.rank == 0:
        save(replace(unfinished, chosen=replace(unfinished.chosen, seconds=1e-9)), path)
    world.Barrier()
    session = open_session(plan="auto", tuning=tuning(path, compressors=BOTH))
    train(session, 5)
    assert session.watching and session.plan is None
    planned(session)
    assert session.plan.chosen.seconds > 1e-9


def test_a_run_that_is_too_short_says_that_it_wrote_no_plan(world, path, caplog):
    with caplog.at_level("WARNING", "espresso_mpi"), Session(plan="auto", tuning=tuning(path)) as session:
        train(session, 2)
    said = [record.message for record in caplog.records if "no plan was written" in record.message]
    assert len(said) == (world.rank == 0)


def test_a_tensor_of_another_type_is_no_error(world, open_session, path, chosen):
    session = open_session(plan="auto", tuning=tuning(path))
    grads = gradients(world.rank, 0, SHAPES)
    grads["b1"] = grads["b1"].astype(np.float16)  # one of a group, whose tensors have one type
    handles = [session.push(name, grad) for name, grad in grads.items()]
    for handle in handles:
        handle.wait()
    assert session.watching and session.plan is None


@pytest.mark.parametrize("told", ["sgd", "adam", None])
def test_the_optimizer_may_be_told_after_the_first_step(world, open_session, path, chosen, told):
    if world.rank == 0:
        save(replace(chosen, chosen=replace(chosen.chosen, optimizer="sgd")), path)
    world.Barrier()
    session = open_session(plan="auto", tuning=tuning(path))
    train(session, 1)
    assert session.plan.digest == chosen.digest
    if told is not None:
        session.judge_for(told)
    train(session, 1)
    assert session.watching == (told != "sgd")


@pytest.mark.parametrize(
    "changes", [{"accuracy": "safe"}, {"optimizer": "sgd"}, {"compressors": ("int8",)}], ids=lambda c: next(iter(c))
)
def test_a_plan_that_was_chosen_by_other_settings_is_not_followed(world, open_session, path, chosen, caplog, changes):
    with caplog.at_level("INFO", "espresso_mpi"):
        session = open_session(plan="auto", tuning=tuning(path, **changes))
        out, wanted = train(session, 1)
    assert session.watching and close(out, wanted, 1e-4)
    if world.rank == 0:
        assert any("not followed" in r.message and next(iter(changes)) in r.message for r in caplog.records)


def test_a_plan_for_other_nodes_is_not_followed(world, open_session, path, chosen):
    if world.rank == 0:
        save(replace(chosen, made_for=replace(chosen.made_for, nodes=7)), path)
    world.Barrier()
    session = open_session(plan="auto", tuning=tuning(path))
    out, wanted = train(session, 1)
    assert session.watching and close(out, wanted, 1e-4)


def test_it_plans_anew_where_steps_take_longer_than_in_the_earlier_run(world, open_session, path, chosen):
    if world.rank == 0:
        save(replace(chosen, chosen=replace(chosen.chosen, seconds=1e-9)), path)
    world.Barrier()
    session = open_session(plan="auto", tuning=tuning(path, check=5))
    out, wanted = train(session, 6)
    assert session.watching and session.plan is None
    more, also = train(session, 1, first=6)
    assert close({n: out[n] + more[n] for n in out}, {n: wanted[n] + also[n] for n in out}, 1e-4)
    planned(session)
    assert session.plan.chosen.seconds > 1e-9


@pytest.mark.parametrize("what", ["plan", "text", "folder"])
def test_a_file_that_cannot_be_used_is_refused_on_every_rank(world, path, what):
    if what == "folder":
        path += "/of/nothing.json"
    elif world.rank == 0:
        if what == "plan":
            save(Plan(default=Strategy("int8", "flat-allgather")), path)
        else:
            with open(path, "w") as file:
                file.write("no plan")
    world.Barrier()
    with pytest.raises(
        ConfigError, match={"plan": "no session", "text": "JSON.*was removed", "folder": "does not exist"}[what]
    ):
        Session(plan="auto", tuning=tuning(path))
