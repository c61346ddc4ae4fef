"""``Session.sync`` against the float64 mean, on every route, topology and element type."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from session_cases import COMPRESSED, DENSE, exact_mean, held, identical, layouts_seen_by, node_layouts, values

from espresso_mpi import optim
from espresso_mpi.bench.reference import synchronised
from espresso_mpi.compressors import get
from espresso_mpi.errors import ConfigError, GradientError, MismatchError, RemoteError
from espresso_mpi.types import Plan, Route, Strategy

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

COMPRESSORS = ("fp16", "int8", "int8:rounding=stochastic", "onebit", "topk:ratio=0.1")
OFTEN = ("onebit", "topk:ratio=0.1", *(pytest.param(c, marks=pytest.mark.thorough) for c in COMPRESSORS[:3]))
"""For many steps: what a method does to a residual is in test_methods, and the same at every step."""


PAIRS = {
    ("float32", "flat", 0, 0), ("float32", "hierarchical", 8192, 3000), ("float64", "flat", 8192, 0),
    ("float64", "hierarchical", 0, 3000), ("float16", "flat", 0, 3000), ("float16", "hierarchical", 8192, 0),
}  # fmt: skip
"""Each two values of two parameters are together in one of these."""
DENSE_CASES = [
    pytest.param(*case, marks=() if case in PAIRS else pytest.mark.thorough)
    for case in itertools.product(["float32", "float64", "float16"], DENSE, [0, 8192], [0, 3000])
]


@pytest.mark.parametrize("dtype, route, window_bytes, segment_bytes", DENSE_CASES)
def test_dense_is_the_mean(world, open_session, dtype, route, window_bytes, segment_bytes):
    ulps = {"float32": 2.0**-22, "float64": 2.0**-51, "float16": 2.0**-9}[dtype]
    for nodes in node_layouts(world.size):
        session = open_session(
            route=route, nodes=nodes, window_bytes=window_bytes, segment_bytes=segment_bytes, message_bytes=999
        )
        for n in (0, 1, 7, 65, 4099):
            grad = values(world.rank, n, n, dtype)
            session.sync(grad)
            scale = np.max([np.abs(values(r, n, n, dtype)) for r in range(world.size)], axis=0).astype(np.float64)
            assert np.all(
                np.abs(grad - exact_mean(world.size, n, n, dtype)) <= ulps * scale + 1e-7 * (dtype == "float16")
            )
            assert identical(world, grad)


@pytest.mark.parametrize("route", COMPRESSED)
@pytest.mark.parametrize("compressor", OFTEN)
def test_conservation_law(world, open_session, compressor, route):
    """Given = received + what the residuals still hold, to float32 rounding, over many steps."""
    n, steps = 1537, 30
    for nodes in layouts_seen_by(route, world.size):
        session = open_session(compressor=compressor, route=route, nodes=nodes, segment_bytes=300)
        given, got, largest = np.zeros(n), np.zeros(n), 0.0
        for step in range(steps):
            grad = values(world.rank, step, n)
            given += exact_mean(world.size, step, n)
            session.sync(grad)
            got += grad
            largest = max(largest, float(np.abs(grad).max()))
        assert identical(world, grad)
        missing = given - got - held(world, session, n, nodes)
        assert np.abs(missing).max() <= steps * 2.0**-22 * max(1.0, largest)
        if compressor != "fp16" and world.size > 1:
            assert np.abs(given - got).max() > 1e-4, "nothing was lost: did anything get compressed?"


@pytest.mark.parametrize("route", COMPRESSED)
@pytest.mark.parametrize("compressor", [c for c in COMPRESSORS if "stochastic" not in c])
def test_every_bit_is_the_sum_of_decoded_payloads(world, open_session, compressor, route):
    """Against a simulation of all ranks in one process, bit for bit, which the ranks share."""
    wrong = []
    for nodes in layouts_seen_by(route, world.size):
        options = {"nodes": nodes, "segment_bytes": 1000}
        session = open_session(compressor=compressor, route=route, feedback=False, **options)
        for number, n in enumerate((1, 65, 4099)):
            grad = values(world.rank, 0, n)
            session.sync(grad)
            if not identical(world, grad):
                wrong.append((nodes, n, "ranks differ"))
            if world.size > 1 and number % world.size == world.rank:
                inputs = [values(r, 0, n) for r in range(world.size)]
                expected = synchronised(Route.parse(route), session.topology, inputs, get(compressor), 1000)
                if not all(np.array_equal(grad, bits) for bits in expected):
                    wrong.append((nodes, n))
    assert not wrong


@pytest.mark.parametrize("compressor", ["none", *COMPRESSORS])
def test_identical_gradients_come_back(world, open_session, compressor):
    """The same gradient on all ranks comes back unchanged up to compression error."""
    n = 5000
    grad = values(0, 0, n)
    expected = grad.copy()
    open_session(compressor=compressor).sync(grad)
    tolerance = {"none": 1e-6, "fp16": 1e-3, "int8": 0.05, "int8:rounding=stochastic": 0.1}.get(compressor)
    if tolerance or world.size == 1:
        tolerance = tolerance or 0
        assert np.abs(grad - expected).max() <= tolerance
    else:
        assert np.linalg.norm(grad - expected) < np.linalg.norm(expected)


@pytest.mark.parametrize("compressor", ["none", "onebit"])
def test_containers_are_updated_in_place(world, open_session, compressor):
    session = open_session(compressor=compressor, min_bytes=512)
    big, small, half = (
        values(world.rank, 1, 3000),
        values(world.rank, 2, 5),
        values(world.rank, 3, 9, np.float16),
    )
    grads = {"layer": {"w": big.reshape(30, 100), "b": small}, "rest": [half, None, (np.float32(2) * small,)]}
    assert session.sync(grads) is grads
    assert np.allclose(small, exact_mean(world.size, 2, 5), atol=1e-6)
    assert np.allclose(half, exact_mean(world.size, 3, 9, np.float16), atol=2e-3)
    assert identical(world, big)
    assert session.stats().steps == 1


@pytest.mark.mpi(min_size=2)
def test_what_some_ranks_do_not_have_counts_as_zero(world, open_session):
    """None on one rank, on all but one, and on all; the mean is written to new arrays where there were none."""
    session, last = open_session(), world.size - 1
    mine = {
        "most": None if world.rank == last else np.full((2, 3), 1.0, np.float32),
        "one": [np.full(4, 8.0) if world.rank == 0 else None],
        "none": None,
        "all": np.full(3, world.rank, np.float16),
    }
    found = session.sync(mine, missing="zero")
    assert found["none"] is None
    assert np.allclose(found["most"], last / world.size) and found["most"].shape == (2, 3)
    assert np.allclose(found["one"][0], 8 / world.size) and found["one"][0].dtype == np.float64
    assert found["all"] is mine["all"] and np.allclose(found["all"], last / 2)
    if world.rank != last:
        assert found["most"] is mine["most"]
    whole = {"all": mine["all"]}
    assert session.sync(whole, missing="zero") is whole
    with pytest.raises(ConfigError, match="expected 'error' or 'zero'"):
        session.sync(whole, missing="none")


@pytest.mark.mpi(min_size=2)
def test_bad_gradients_with_missing_zero_are_errors_on_every_rank(world, open_session):
    """Containers that cannot be read, and what is no array, on one rank alone; the session goes on."""
    session, good = open_session(), np.ones(3, np.float32)
    clash, listed = {"a.b": good, "a": {"b": good}}, {"w": [[1, 2]], "v": {1.5: good}}
    for bad in (clash, listed):
        with pytest.raises((GradientError, RemoteError), match=r"rank 0|key"):
            session.sync(bad if world.rank == 0 else {"w": None}, missing="zero")
    with pytest.raises((GradientError, MismatchError)):
        session.sync({"w": object() if world.rank == 0 else None}, missing="zero")
    assert session.sync({"w": good.copy()}, missing="zero")["w"].tolist() == [1, 1, 1]


def test_steady_state_moves_the_advertised_bytes(world, open_session):
    session = open_session(compressor="onebit", route="flat-alltoall", nodes=[[r] for r in range(world.size)])
    n = 64 * 64 * world.size
    grad = values(world.rank, 0, n)
    session.sync(grad)
    first = session.stats().bytes_by_level["inter"]
    session.sync(grad)
    moved = session.stats().bytes_by_level["inter"] - first
    header = 64 * (world.size - 1)  # at most: what ranks say to each other before data moves
    piece = n // world.size // 8 + 4 * -(-(n // world.size) // 2048)
    padded = -(-piece // 16) * 16
    payload = 2 * (world.size - 1) * padded
    assert payload <= moved <= payload + header


def test_sub_communicators_do_not_mix(world, open_session):
    """Two sessions on two halves of the world average over their own ranks."""
    colour = world.rank % 2
    half = world.Split(colour, world.rank)
    grad = np.full(1000, float(colour), np.float32)
    open_session(half, compressor="fp16").sync(grad)
    half.Free()
    assert np.all(grad == colour)


def test_without_feedback_nothing_is_kept(world, open_session):
    session = open_session(compressor="onebit", feedback=False)
    session.sync(values(world.rank, 0, 1000))
    assert session.state_dict()["arrays"] == {}


# --- advice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", ["onebit", "int2", "eden:bits=1", "eden", "int8", "small tensors", "told", "momenta", "adam", "plan"]
)
def test_a_loop_with_a_compressor_that_does_not_train_under_adamw_is_told_once(world, open_session, caplog, case):
    small = 20_000 if case == "small tensors" else 0
    plan = Plan(default=Strategy("onebit", "flat-allgather")) if case == "plan" else None
    compressor = "none" if case == "plan" else case if case in ("int2", "eden:bits=1", "eden", "int8") else "onebit"
    session = open_session(compressor=compressor, min_bytes=small, plan=plan)
    params = {"w": np.ones(4000, np.float32)}
    if case in ("told", "adam"):
        session.judge_for("adam" if case == "adam" else None)
    step = optim.MomentumSGD(params, session).step if case == "momenta" else session.sync
    for _ in range(2):
        step({"w": np.ones_like(params["w"])})
        session.push("w", np.ones_like(params["w"])).wait()
    found = [text for record in caplog.records if "1 % above" in (text := record.getMessage())]
    assert len(found) == (
        case in ("onebit", "int2", "eden:bits=1", "adam", "plan") and world.rank == 0 < world.size - 1
    )
    assert all("AdamW" in text and ("MomentumSGD" in text) == (case in ("onebit", "plan")) for text in found)
