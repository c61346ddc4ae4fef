"""Tensors that stay dense, always or in their first steps: the bits of a dense session, then those of a fresh one."""

from __future__ import annotations

import numpy as np
import pytest

from espresso_mpi import Plan, Strategy
from espresso_mpi.errors import ConfigError, NonFiniteError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

STEPS = 3


def gradients(rank, step):
    rng = np.random.default_rng([rank, step])
    return {"w": rng.standard_normal((70, 30)).astype(np.float32), "b": rng.standard_normal(2000).astype(np.float32)}


def same(first, second):
    return all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("nodes", "restart"), [(None, 5), ("two", 2)])
def test_the_first_steps_are_dense_and_leave_no_residual(world, open_session, nodes, restart):
    """A tensor that joins later has its own count, and a step that is refused does not count."""
    if nodes == "two":
        nodes = [list(range(world.size // 2)), list(range(world.size // 2, world.size))]
    options = {"compressor": "onebit", "nodes": nodes}
    session, dense = open_session(**options, dense_steps=STEPS), open_session(nodes=nodes)
    compressed = [open_session(**options) for _ in range(2)]
    wrong = []
    for step in range(8):
        if step == restart:
            state = session.state_dict()
            session = open_session(**options, dense_steps=STEPS)
            session.load_state_dict(state)
        if step == 1:
            bad = gradients(world.rank, 100)
            bad["w"][0, 0] = np.nan if world.rank == world.size - 1 else 1
            with pytest.raises(NonFiniteError):
                session.sync(bad)
        found, expected = gradients(world.rank, step), gradients(world.rank, step)
        if step < 2:  # b joins two steps later, and is pushed
            del found["b"], expected["b"]
        pushed = {name: session.push(name, found[name]) for name in found if name == "b"}
        session.sync({"w": found["w"]})
        for handle in pushed.values():
            handle.wait()
        for name, other, late in zip("wb", compressed, (0, 2)):
            if name in expected:
                (dense if step < STEPS + late else other).sync({name: expected[name]})
        wrong += [] if same(found, expected) else [step]
    assert not wrong
    norms = world.allgather(session.stats(residuals=True).tensors["w"].residual_norm)
    assert max(norm or 0 for norm in norms) > 0, norms  # a rank that takes no part between nodes has none


def test_schedules_count_dense_steps(world, open_session):
    """A ratio of all elements in step 3, of a tenth later: the step in which elements are lost tells the count."""
    session = open_session(compressor="topk:ratio=1.0~0.1@4/1", dense_steps=2)
    lost = []
    for step in range(6):
        g = gradients(world.rank, step)["b"]
        mean = world.allreduce(g.astype(np.float64)) / world.size
        session.sync({"b": g})
        lost.append(bool(np.abs(g - mean).max() > 1e-3))
    assert lost == [False] * 4 + [world.size > 1] * 2


def test_named_tensors_stay_dense(world, open_session):
    session, dense = open_session(compressor="onebit", dense=["b", "head.*"]), open_session()
    compressed, wrong = open_session(compressor="onebit"), []
    for step in range(3):
        found = {"body": gradients(world.rank, step), "head": gradients(world.rank, step + 10)}
        expected = {"body": gradients(world.rank, step), "head": gradients(world.rank, step + 10)}
        session.sync(found)
        dense.sync({"head": expected["head"]})
        compressed.sync({"body": expected["body"]})
        wrong += [] if same(found["body"], expected["body"]) and same(found["head"], expected["head"]) else [step]
    assert not wrong
    kept = session.stats(residuals=True).tensors
    assert {name for name, tensor in kept.items() if tensor.residual_norm} == {"body.w", "body.b"}
    plan = Plan(default=Strategy("topk:ratio=0.1", "flat-allgather"))
    after = open_session(compressor="onebit", dense=["head.*"], dense_steps=9)
    after.follow(plan)  # the plan says what is dense
    after.sync({"head": gradients(world.rank, 0)})
    assert after.stats(residuals=True).tensors["head.w"].residual_norm > 0
    other = open_session(compressor="onebit", dense=["*.w"])  # what has become dense gets its residual at once
    other.load_state_dict(session.state_dict())
    zeros = {"body": {name: np.zeros_like(g) for name, g in gradients(0, 0).items()}}
    other.sync(zeros)
    kept = other.stats(residuals=True).tensors
    assert np.abs(zeros["body"]["w"]).max() > 0 and "body.w" not in {n for n, t in kept.items() if t.residual_norm}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dense": "head"}, "expected a list of names or patterns"),
        ({"dense": [3]}, "expected a list of names or patterns"),
        ({"dense_steps": -1}, "dense_steps=-1"),
        ({"compressor": "signsgd", "feedback": "none", "dense_steps": 3}, "no plain mean"),
        ({"compressor": "onebit", "feedback": "ef21:momentum=0.1", "dense": ["b"]}, "no plain mean"),
        ({"compressor": "none", "plan": "auto", "dense_steps": 3}, r"Session\.follow"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_an_error_on_every_rank(open_session, options, words):
    with pytest.raises(ConfigError, match=words):
        open_session(**options)
