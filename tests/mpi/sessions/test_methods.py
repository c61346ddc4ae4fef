"""Every registered method in real sessions: the laws of a synchronisation hold whatever the method."""

from __future__ import annotations

import numpy as np
import pytest
from session_cases import exact_mean, held, identical, layouts_seen_by, values

from espresso_mpi import Feedback, TensorSpec
from espresso_mpi.bench.reference import synchronised
from espresso_mpi.compressors import get, names
from espresso_mpi.types import Route

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

SHAPE = (29, 53)
N = SHAPE[0] * SHAPE[1]
MOMENTUM = {"dgc", "signum"}
"""Methods that send an average of past gradients: what they have not sent is more than the residual."""

TIGHT = "bound:rel=0.5,bits=4"
"""Refuses normal values where more than two ranks encode twice: neighbours differ too much (``test_bound.py``)."""

GATHER, DEAL_OUT = "flat-allgather", "hierarchical-alltoall-packed"


def routes(method):
    linear = ("flat-linear", "hierarchical-linear") if get(method).linear else ()
    return (GATHER, DEAL_OUT, *linear)


def gradient(rank, step):
    return values(rank, step, N).reshape(SHAPE)


def in_a_session(spec):
    """What a session treats methods differently by."""
    method = get(spec).at(None).shaped(SHAPE)
    summary = method.summary(N)
    return (
        method.linear, method.sparse, method.whole, method.common, method.element, method.homogeneous,
        method.header(N) > 0, summary and summary.operator, method.variance(N) is None,
    )  # fmt: skip


def specs():
    """Methods and their variants; those that a session treats as the method itself are `thorough`."""
    for name in names():
        yield name
        for spec in type(get(name)).examples:
            same = in_a_session(spec) == in_a_session(name)
            yield pytest.param(spec, marks=pytest.mark.thorough if same else ())


@pytest.mark.parametrize("method", [*specs(), "dgc:ratio=0.1,clip=1.0"])
def test_every_bit_is_what_the_route_says(world, open_session, method):
    """Against a simulation of all ranks in one process, bit for bit. It takes longer than the sync: ranks share it."""
    if world.size == 1 or (world.size > 2 and method == TIGHT):
        return
    wrong, inputs, compressor = [], [values(r, 0, N) for r in range(world.size)], get(method).shaped(SHAPE)
    ways = [(route, nodes) for route in routes(method) for nodes in layouts_seen_by(route, world.size)]
    for number, (route, nodes) in enumerate(ways):
        session = open_session(compressor=method, route=route, nodes=nodes, feedback="none", segment_bytes=1000, seed=5)
        grad = gradient(world.rank, 0)
        session.sync(grad)
        if not identical(world, grad):
            wrong.append((nodes, route, "ranks differ"))
        if number % world.size == world.rank:
            expected = synchronised(Route.parse(route), session.topology, inputs, compressor, 1000, seed=5)
            if not all(np.array_equal(grad.reshape(-1), bits) for bits in expected):
                wrong.append((nodes, route))
    assert not wrong


@pytest.mark.parametrize("method", [name for name in names() if name not in MOMENTUM])
def test_conservation_law(world, open_session, method):
    """Given = received + what the residuals still hold, wherever a method may feed back what it loses."""
    if world.size == 1 or Feedback().resolved(get(method), N).kind == "none":
        return
    steps = 8
    for route in (None, GATHER):
        for nodes in layouts_seen_by(route, world.size):
            session = open_session(compressor=method, route=route, nodes=nodes, segment_bytes=1000)
            given, got, largest = np.zeros(N), np.zeros(N), 1.0
            for step in range(steps):
                grad = gradient(world.rank, step)
                given += exact_mean(world.size, step, N)
                session.sync(grad)
                got += grad.reshape(-1)
                largest = max(largest, float(np.abs(grad).max()))
            missing = given - got - held(world, session, N, nodes)
            assert np.abs(missing).max() <= steps * 2.0**-20 * largest, (nodes, route)
            assert identical(world, grad)


@pytest.mark.parametrize("method", names())
def test_a_restored_session_goes_on_bit_for_bit(world, open_session, method):
    """Whatever a method keeps is part of the state."""
    one, other = (open_session(compressor=method, seed=seed) for seed in (3, 4))
    for step in range(3):
        one.sync(gradient(world.rank, step))
    other.load_state_dict(one.state_dict())
    for step in range(3, 5):
        grad, same = gradient(world.rank, step), gradient(world.rank, step)
        one.sync(grad)
        other.sync(same)
        assert np.array_equal(grad, same)
        assert np.isfinite(grad).all()


@pytest.mark.parametrize("method", [name for name in names() if get(name).common])
def test_payloads_with_something_in_common_are_summed_by_default(world, open_session, method):
    if world.size == 1:
        return
    session = open_session(compressor=method)
    assert session.strategy(TensorSpec("w", SHAPE, "float32")).route.sums_payloads


@pytest.mark.parametrize("method", ["powersgd", "acpsgd"])
def test_a_low_rank_gradient_arrives_after_a_few_steps(world, open_session, method):
    """A matrix of rank 2 in its own shape: the factors learned from the sums span it."""
    generator = np.random.default_rng(0)
    factors = [generator.standard_normal((29, 2)) @ generator.standard_normal((2, 53)) for _ in range(1)]
    expected = np.mean([factors[0] * (r + 1) for r in range(world.size)], 0)
    session = open_session(compressor=f"{method}:rank=3", feedback="none")
    for _ in range(4):
        grad = (factors[0] * (world.rank + 1)).astype(np.float32)
        session.sync(grad)
    assert np.abs(grad - expected).max() <= 1e-4 * np.abs(expected).max()


def test_majority_vote(world, open_session):
    """Every rank ends with the sign that most ranks have; between equally many the positive one."""
    if world.size == 1:
        return
    signs = np.sign(np.stack([values(r, 0, N) for r in range(world.size)]))
    expected = np.where(signs.sum(0) >= 0, 1.0, -1.0)
    for route in (GATHER, "flat-alltoall"):
        grad = values(world.rank, 0, N)
        open_session(compressor="signsgd", route=route).sync(grad)
        assert np.array_equal(grad, expected)


def test_the_second_encode_has_no_momentum(world, open_session):
    """The gradients went through it at the first; the mean must not go through it again."""
    assert get("signum").second_pass() == get("signsgd")
    assert get("dgc:ratio=0.1,clip=2.0").second_pass() == get("dgc:ratio=0.1,mu=0.0")
    if world.size == 1:
        return
    session = open_session(compressor="signum", route="flat-alltoall")
    for step in range(3):
        session.sync(gradient(world.rank, step))
    points = {key.rsplit("|", 3)[1] for key in session.state_dict()["arrays"]}
    assert points == {"0"}
