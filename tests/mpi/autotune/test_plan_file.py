"""``Tuning.plan_file``: the plan that one run chose, followed by the next one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI

from espresso_mpi import Plan, Session, Strategy, Tuning
from espresso_mpi.errors import ConfigError
from espresso_mpi.planner import explain
from espresso_mpi.planner.planfile import load, save

SIZE = MPI.COMM_WORLD.size
pytestmark = [
    pytest.mark.mpi, pytest.mark.timeout(300), pytest.mark.skipif(SIZE == 1, reason="alone there is nothing to choose")
]  # fmt: skip

SHAPES = {"w1": (64, 48), "b1": (48,), "w2": (48, 200)}
METHOD = "int4"


@pytest.fixture
def path(world, tmp_path):
    return world.bcast(str(tmp_path / "plan.json"))


def tuning(path, **changes):
    how = {"skip": 1, "steps": 3, "seconds": 0.2, "share": 1, "budget": 0.5, "trial_steps": 12, "plan_file": path}
    return Tuning(**{"compressors": (METHOD,), "accuracy": "fast", **how, **changes})


def gradients(rank, step, shapes):
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def train(session, steps, first=0, shapes=SHAPES, pushes=False):
    """What came out and what went in, both summed over these steps, and the mean over the ranks of the latter."""
    world = MPI.COMM_WORLD
    out, wanted = ({name: np.zeros(shape) for name, shape in shapes.items()} for _ in range(2))
    for step in range(first, first + steps):
        every = [gradients(rank, step, shapes) for rank in range(world.size)]
        grads = every[world.rank]
        for name in shapes:
            wanted[name] += np.mean([g[name].astype(np.float64) for g in every], axis=0)
        if pushes:
            names = list(shapes) if world.rank % 2 == 0 else list(shapes)[::-1]
            handles = [session.push(name, grads[name]) for name in names]
            for handle in handles:
                handle.wait()
        else:
            session.sync(grads)
        for name in shapes:
            out[name] += grads[name]
    return out, wanted


def planned(session, shapes=SHAPES):
    """Train until a plan is chosen."""
    for step in itertools.count():
        train(session, 1, step, shapes)
        if not session.planning:
            break


def close(found, wanted, bound):
    return all(np.abs(found[name] - wanted[name]).max() < bound for name in found)


@pytest.fixture
def chosen(world, open_session, path):
    """A plan with ``METHOD``, as a session with these settings writes it."""
    session = open_session(plan="auto", tuning=tuning(path))
    planned(session)
    route = "flat-allgather"
    plan = replace(
        session.plan, strategies=dict.fromkeys(SHAPES, Strategy(METHOD, route)), groups=(), schedule=None,
        forecast=None, held=False,
    )  # fmt: skip
    if world.rank == 0:
        assert load(path) == session.plan  # what it wrote is what it follows
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


def test_a_state_of_the_earlier_run_continues_bit_for_bit(open_session, path, chosen):
    first = open_session(plan="auto", tuning=tuning(path))
    train(first, 3)
    state = first.state_dict()
    then = train(first, 2, first=3)[0]
    second = open_session(plan="auto", tuning=tuning(path))
    second.load_state_dict(state)
    again = train(second, 2, first=3)[0]
    assert all(np.array_equal(then[name], again[name]) for name in then)


def test_a_plan_for_other_tensors_is_left_after_the_first_step(world, open_session, path, chosen):
    other = {"w1": (64, 48), "v": (10, 10)}
    session = open_session(plan="auto", tuning=tuning(path))
    out, wanted = train(session, 2, shapes=other)
    assert session.watching and session.plan is None
    more, also = train(session, 1, first=2, shapes=other)  # a dense step delivers the residual as well
    assert close({n: out[n] + more[n] for n in out}, {n: wanted[n] + also[n] for n in out}, 1e-4)
    planned(session, other)
    assert set(session.plan.strategies) == set(other)
    if world.rank == 0:
        assert load(path) == session.plan


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
    with pytest.raises(ConfigError, match={"plan": "no session", "text": "JSON", "folder": "does not exist"}[what]):
        Session(plan="auto", tuning=tuning(path))
