"""Routes and plans: spelling, and what is refused."""

from __future__ import annotations

import pytest

from espresso_mpi.errors import ConfigError, PlanError
from espresso_mpi.types import ROUTES, Plan, Route, Strategy, TensorSpec


@pytest.mark.parametrize("name", ROUTES)
def test_a_route_parses_back(name):
    route = Route.parse(name)
    assert Route.parse(str(route)) == route
    assert str(route) == ROUTES[name]
    assert route.compressed == ("encode" in ROUTES[name])


def test_a_route_moves_to_another_device():
    assert str(Route.parse("flat-allgather").on("gpu")) == "encode@gpu/allgather@flat/decode@gpu"


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "cannot read"),
        ("encode", "encode"),
        ("encode@tpu/allgather@flat/decode@cpu", "encode@tpu"),
        ("allreduce@nowhere", "allreduce@nowhere"),
        ("encode@cpu/allgather@flat", "compressed"),
        ("reduce_scatter@flat", "pieces"),
        ("reduce_scatter@intra/allgather@intra", "averages over"),
        ("allreduce@flat/allreduce@flat", "twice"),
        ("allreduce@intra/allreduce@flat", "averages over"),
        ("encode@cpu/reduce_scatter@flat/decode@cpu", "scattered by a sum"),
        ("alltoall@flat/allgather@flat", "encode first"),
        ("encode@cpu/encode@cpu/allgather@flat/decode@cpu", "already"),
        ("decode@cpu/allreduce@flat", "nothing to decode"),
        ("allgather@flat", "nothing is scattered"),
        ("reduce_scatter@intra/reduce_scatter@inter/allgather@intra/allgather@inter", "another level"),
    ],
)
def test_a_route_that_cannot_run_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        Route.parse(text)


def test_strategy_needs_matching_parts():
    with pytest.raises(ConfigError, match="none"):
        Strategy("none", Route.parse("flat-allgather"))
    with pytest.raises(ConfigError, match="onebit"):
        Strategy("onebit", Route.parse("flat"))


def test_plan_refuses_unknown_tensors_and_has_a_digest():
    one = Plan({"w": Strategy("none", Route.parse("flat"))})
    same = Plan({"w": Strategy("none", Route.parse("allreduce@flat"))})
    other = Plan({"w": Strategy("onebit", Route.parse("flat-alltoall"))})
    assert one.digest == same.digest != other.digest
    assert one.strategy("w").compressor == "none"
    with pytest.raises(PlanError, match="'v'"):
        one.strategy("v")


def test_tensor_sizes():
    assert TensorSpec("a", (3, 4), "bfloat16").nbytes == 24
    assert TensorSpec("a", (), "float64").size == 1
    assert TensorSpec("a", (0, 4), "float32").size == 0
    assert TensorSpec("a", (), None).size == 0
