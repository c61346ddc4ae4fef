"""How the steps travel that ``plan="auto"`` watches, on networks that it finds slow, or not, when it opens."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI
from session_cases import summed

from espresso_mpi import Session, Tuning, optim
from espresso_mpi.autotune import first_steps
from espresso_mpi.autotune.clock import StepClock
from espresso_mpi.compressors import get
from espresso_mpi.errors import NonFiniteError, StateError
from espresso_mpi.optim.rules import GradientMeans
from espresso_mpi.types import TensorSpec

SIZE = MPI.COMM_WORLD.size
pytestmark = [
    pytest.mark.mpi, pytest.mark.timeout(300), pytest.mark.skipif(SIZE == 1, reason="alone there is no network")
]  # fmt: skip

SHAPES = {"w": (90, 80), "metric": (48,)}
NODES = [[rank] for rank in range(SIZE)]
SLOW, NOT_SLOW = (1.0, 1e-9), (1e-9, 1e-9)
MODERATE = (1e-6, 1e-9)
"""Seconds per byte of sums, and of encoding and decoding. By the last, dense steps of these tensors are short."""

MEASURED = first_steps._network_and_codec


@pytest.fixture
def network(monkeypatch):
    """Sets what a session finds when it opens."""
    return lambda found: monkeypatch.setattr(first_steps, "_network_and_codec", lambda *given: found)


def opened(open_session, **changes):
    tuning = {"skip": 1, "steps": 3, "seconds": 0.2, "share": 1, **changes}
    return open_session(plan="auto", tuning=Tuning(**tuning), nodes=NODES, min_bytes=1000)


train = partial(summed, shapes=SHAPES)


def error(found, name="w"):
    out, wanted = found
    return np.abs(out[name] - wanted[name]).max()


def added(*found):
    return tuple({name: sum(one[part][name] for one in found) for name in SHAPES} for part in (0, 1))


@pytest.mark.parametrize("pushes", [False, True])
def test_the_first_step_is_compressed_on_a_slow_network(world, open_session, network, caplog, pushes):
    network(SLOW)
    session = opened(open_session)
    assert session.slow_network and session.watching and session.plan is None
    with caplog.at_level("INFO", "espresso_mpi"):
        first = train(session, 1, pushes=pushes)
    assert caplog.text.count("travel by int8") == (world.rank == 0)
    assert 1e-3 < error(first) < 0.1, "compressed"
    assert error(first, "metric") < 1e-6, "what is small may be no gradient"
    more = train(session, 2, first=1, pushes=pushes)
    assert session.watching and session.plan.strategies["w"].compressor == "int8"
    both = added(first, more)
    assert error(both) < 0.1 and error(both, "metric") < 1e-5, "the residual is kept"
    for step in itertools.count(3):
        both = added(both, train(session, 1, first=step, pushes=pushes))
        if not session.planning:
            break
    assert len(set(world.allgather(session.plan.digest))) == 1
    assert error(both) < 1.0, "no step is lost, however many plans were followed"


def test_a_network_that_is_not_slow_has_a_dense_first_step(open_session, network):
    network(NOT_SLOW)
    session = opened(open_session)
    assert not session.slow_network and session.plan is None
    assert error(train(session, 1)) < 1e-6


def test_steps_are_dense_again_if_they_would_not_wait_long(open_session, network):
    network(MODERATE)
    session = opened(open_session)
    first = train(session, 1)
    assert session.slow_network and error(first) > 1e-3
    found = added(first, train(session, 1, first=1))
    assert session.plan is None and session.watching
    assert error(found) < 1e-5, "the residual of the first step is sent by the second"


@pytest.mark.parametrize("why", ["gpu", "node", "compressors", "min_bytes"])
def test_nothing_is_measured_where_the_first_step_must_be_dense(world, open_session, monkeypatch, why):
    monkeypatch.setattr(first_steps, "_network_and_codec", lambda *given: pytest.fail("measured"))
    if why == "gpu" and world.rank == SIZE - 1:  # on one rank
        monkeypatch.setattr(first_steps, "devices_of_rank", lambda: ("cpu", "gpu"))
    tuning = Tuning(("onebit",) if why == "compressors" else ("int8",), skip=1, steps=3, accuracy="fast")
    nodes, least = None if why == "node" else NODES, 1 << 30 if why == "min_bytes" else 0
    session = open_session(plan="auto", tuning=tuning, nodes=nodes, min_bytes=least)
    assert not session.slow_network and error(train(session, 1)) < 1e-6


def test_an_error_of_one_rank_in_the_first_step(world, open_session, network):
    network(SLOW)
    session = opened(open_session)
    x = np.full(SHAPES["w"], np.nan if world.rank == 0 else 1.0, np.float32)
    with pytest.raises(NonFiniteError):
        session.sync({"w": x})
    assert 1e-3 < error(train(session, 1)) < 0.1
    assert error(train(session, 3, first=1)) < 0.1 and session.plan.strategies["w"].compressor == "int8"


def test_states_are_loaded_and_saved_before_the_first_step(open_session, network):
    network(NOT_SLOW)
    before, other = opened(open_session, budget=1e6), opened(open_session)  # no wait is long
    train(before, 2)
    network(SLOW)
    session = opened(open_session)
    other.load_state_dict(session.state_dict())
    with pytest.raises(StateError):
        session.load_state_dict({**before.state_dict(), "step": -1})
    session.load_state_dict(before.state_dict())
    assert 1e-3 < error(train(session, 1, first=2)) < 0.1


def test_the_plan_of_an_earlier_run_comes_before_that_of_the_first_step(world, open_session, network, tmp_path):
    path = world.bcast(str(tmp_path / "plan.json"))
    network(SLOW)
    how = {"compressors": ("int8",), "accuracy": "fast", "budget": 0.5, "plan_file": path}
    first = opened(open_session, **how)
    for step in itertools.count():
        train(first, 1, first=step)
        if not first.planning:
            break
    world.Barrier()
    second = opened(open_session, **how)
    found = train(second, 1)
    assert second.slow_network and not second.watching and second.plan.digest == first.plan.digest
    assert error(found) < 1.0
    third = opened(open_session, **{**how, "compressors": ("int8", "fp16")})  # for these, the file has no plan
    assert 1e-3 < error(train(third, 1)) < 0.1 and third.watching


@pytest.mark.parametrize(
    ("rate", "waited", "compressed"),
    [(2e-6, 1.0, True), (2e-6, 0.01, False), (1e-6, 1.0, False), (0.0, 0.09, True), (0.0, 0.05, False)],
)
def test_what_a_dense_step_waits_is_the_lesser_of_what_is_measured(network, rate, waited, compressed):
    """Seconds per byte, 0: not known; three steps of 29 kB may wait 0.1 s by this rate, and 0.25 s without it."""
    network((rate, 1e-6))
    with Session(nodes=NODES) as session:
        adopted = []
        first = first_steps.FirstSteps(
            session._transport, Tuning(skip=1, steps=3), lambda: session._options, adopted.append
        )
        first.open()
        assert not first.slow and first.waiting is None
        clock = StepClock()
        clock.specs, clock.wait = tuple(TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()), waited
        first.ended(clock, momenta=False)
    assert [plan.strategy("w").compressor for plan in adopted] == ["int8"] * compressed


def test_a_sum_is_measured_three_times_or_twice_if_it_is_long(world, monkeypatch):
    """And the least counts: one that other work disturbs says nothing."""
    for times, least in (([0.05, 0.01, 0.02, 0.001], 0.01), ([0.5, 0.02, 0.001], 0.02), ([0.2, 0.5, 0.001], 0.2)):
        left = iter(times)
        monkeypatch.setattr(first_steps, "seconds_of", lambda *given, left=left: next(left))
        with Session(nodes=NODES) as session:
            assert first_steps._sum_seconds(session._transport, 64) == least


def test_a_warm_up_sends_no_dense_gradients_on_a_slow_network(open_session, network, monkeypatch):
    network(SLOW)
    sent, push = [], GradientMeans.push
    monkeypatch.setattr(
        GradientMeans, "push", lambda self, key, x: (sent.append(self._compressor), push(self, key, x))[1]
    )
    session = opened(open_session)
    params = {"w": np.ones(SHAPES["w"], np.float32)}
    optimizer = optim.OnebitAdam(params, session, warmup=6)
    for step in range(6):
        optimizer.step({"w": np.full(SHAPES["w"], step + 1.0, np.float32)})
    assert sent == ["int8"] * 6
    compressors = []
    for step in range(6, 9):
        optimizer.step({"w": np.full(SHAPES["w"], step + 1.0, np.float32)})
        compressors.append(session.plan.strategy("w").compressor)
    assert compressors == ["int8", "int4", "int4"], "momenta are watched by four bits"


@pytest.mark.parametrize(("rate", "last"), [(2e6, 1 << 16), (50e6, 1 << 18), (60e6, 1 << 20), (5e9, 1 << 18)])
def test_the_rate_has_neither_latency_nor_burst_and_long_sums_are_few(monkeypatch, rate, last):
    """By these seconds of the compressor, the second and the third network are within twice of what is slow."""
    sizes = []

    def seconds(transport, n):
        sizes.append(n)
        return 0.001 + max(0, 4 * n - 20_000) / rate

    monkeypatch.setattr(first_steps, "_sum_seconds", seconds)
    monkeypatch.setattr(first_steps, "_codec_per_byte", lambda method: 1e-10)
    with Session(nodes=NODES) as session:
        per_byte, codec = MEASURED(session._transport, get("int8"))
    assert per_byte == pytest.approx(1 / rate, rel=1e-6) and codec == pytest.approx(1e-10) and sizes[-1] == last
