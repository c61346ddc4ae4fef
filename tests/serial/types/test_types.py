"""Routes and plans: spec, and what is refused."""

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
        ("encode@cpu/reduce_scatter@flat/decode@cpu", "pieces"),
        ("reduce@flat", "one rank alone"),
        ("reduce@flat/allgather@flat", "use broadcast@flat"),
        ("reduce_scatter@flat/broadcast@flat", "use allgather@flat"),
        ("encode@cpu/gather@flat/decode@cpu/allgather@flat", "use broadcast@flat"),
        ("broadcast@flat", "nothing was reduced"),
        ("gather@flat/broadcast@flat", "use reduce"),
        ("encode@cpu/alltoall@intra/allreduce@inter/allgather@intra/decode@cpu", "dealt out"),
        ("encode@cpu/gather@intra/reduce@inter/broadcast@inter/broadcast@intra/decode@cpu", "dealt out"),
        ("encode@cpu/allgather@intra/allreduce@inter/decode@cpu", "dealt out"),
        ("reduce@intra/reduce_scatter@inter/broadcast@intra/allgather@inter", "another level"),
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


def test_payloads_may_be_summed_again_once_they_are_one():
    summed = "encode@cpu/reduce_scatter@intra/reduce@inter/broadcast@inter/allgather@intra/decode@cpu"
    assert Route.parse(summed).sums_payloads
    again = "encode@cpu/alltoall@intra/decode@cpu/encode@cpu/allreduce@inter/allgather@intra/decode@cpu"
    assert Route.parse(again).sums_payloads
    assert not Route.parse("reduce@flat/encode@cpu/broadcast@flat/decode@cpu").sums_payloads


def test_plan_groups():
    dense, other = Strategy("none", "flat"), Strategy("none", "reduce@flat/broadcast@flat")
    strategies = {"a": dense, "b": dense, "c": other}
    grouped = Plan(strategies, groups=(("b", "a"),))
    assert grouped.groups == (("b", "a"),)
    assert Plan(strategies, groups=[["b", "a"]]) == grouped  # type: ignore[arg-type]
    digests = {
        Plan(strategies, groups=groups).digest for groups in ((), (("a", "b"),), (("b", "a"),), (("a",), ("b",)))
    }
    assert len(digests) == 4
    assert Plan({}, default=dense, groups=(("x", "y"),)).groups


@pytest.mark.parametrize(
    "groups, words",
    [
        (((),), "empty"),
        ((("a", "b"), ("b",)), "'b' stands in groups twice"),
        ((("a", "a"),), "twice"),
        ((("a", "c"),), "another strategy"),
        ((("a", "unknown"),), "no strategy for tensor 'unknown'"),
        (("a", "b"), "expected tuples of names"),
    ],
)
def test_plan_groups_that_cannot_travel_together(groups, words):
    dense, other = Strategy("none", "flat"), Strategy("none", "reduce@flat/broadcast@flat")
    with pytest.raises(PlanError, match=words):
        Plan({"a": dense, "b": dense, "c": other}, groups=groups)


def test_tensor_sizes():
    assert TensorSpec("a", (3, 4), "bfloat16").nbytes == 24
    assert TensorSpec("a", (), "float64").size == 1
    assert TensorSpec("a", (0, 4), "float32").size == 0
    assert TensorSpec("a", (), None).size == 0
