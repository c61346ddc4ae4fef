"""Which route is taken where none was named: by a session's rule, and by a profile where there is one."""

from __future__ import annotations

import numpy as np
import pytest
from planner_cases import random_profile, random_workload

from espresso_mpi import Plan, compressors
from espresso_mpi.autotune import autoplan
from espresso_mpi.autotune.payload_costs import payload_bytes
from espresso_mpi.collectives.data.layout import Topology
from espresso_mpi.options import Options
from espresso_mpi.planner.model.problem import evaluated
from espresso_mpi.planner.model.shared_messages import SharingLimits
from espresso_mpi.planner.model.tree import named_routes
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor
from espresso_mpi.tuning import Tuning
from espresso_mpi.types import ROUTES, Route, Strategy, TensorSpec

SPEC = TensorSpec("x", (1 << 18,), "float32")


def cluster(nodes, ranks):
    return Topology(tuple(tuple(range(ranks * h, ranks * (h + 1))) for h in range(nodes)))


FOUR_BY_FOUR = cluster(4, 4)


@pytest.mark.parametrize(
    "topology, level, scheme",
    [
        (cluster(1, 2), "flat", "allgather"),
        (cluster(2, 1), "flat", "allgather"),
        (cluster(1, 3), "flat", "alltoall"),
        (cluster(3, 1), "flat", "alltoall"),
        (cluster(2, 2), "hierarchical", "allgather"),
        (Topology(((0, 1), (2,))), "hierarchical", "allgather"),
        (cluster(3, 2), "hierarchical", "alltoall-packed"),
    ],
)
def test_the_rule_of_sessions(topology, level, scheme):
    """Only payloads with something in common are summed: the sums of 16-bit floats lose what no residual holds."""
    for spec in ("int8", "topk:ratio=0.01", "fp16", "bf16", "signsgd"):
        assert Options(compressor=spec).strategy(SPEC, topology) == Strategy(spec, f"{level}-{scheme}")
    for spec in ("powersgd", "randomk:ratio=0.01", "thc"):
        assert Options(compressor=spec).strategy(SPEC, topology) == Strategy(spec, f"{level}-linear")
    assert Options().strategy(SPEC, topology) == Strategy("none", level)


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("spec", ["none", "int8", "fp16", "powersgd"])
def test_named_routes_are_those_that_payloads_can_take(spec, hierarchical):
    method = None if spec == "none" else compressors.get(spec)
    endings = {"": spec == "none", "allgather": True, "alltoall": True, "alltoall-packed": True}
    endings["linear"] = spec in ("fp16", "powersgd")
    wanted = [
        name
        for name in ROUTES
        if (hierarchical or name.startswith("flat"))
        and endings[name.partition("-")[2]]
        and ("-" in name) == (spec != "none")
    ]
    assert named_routes(method, hierarchical) == tuple(map(Route.parse, wanted))


def test_a_session_that_has_a_profile_tries_compressors_along_the_named_route_that_is_quickest_by_it():
    """The route of its rule is for sessions that have measured nothing."""
    different = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        workload, profile = random_workload(rng, 4, "cpu"), random_profile(rng, compressors=("fp16",))
        limits = SharingLimits(dict.fromkeys(named_routes(compressors.get("fp16"), True), 0), 0, 0)
        options = Options(tuning=Tuning())
        maker = autoplan._Maker(FOUR_BY_FOUR, options, workload, profile, Tuning(("fp16",)), False, limits)
        tried = [plan for plans in maker.made() for plan in plans]
        like = tried[-1].forecast
        seconds = {}
        for route in named_routes(compressors.get("fp16"), True):
            problem, choice = evaluated(
                Plan(default=Strategy("fp16", route)), workload, profile, lanes=like.lanes, order=like.order
            )
            seconds[route] = problem.seconds(choice)
        best = Strategy("fp16", min(seconds, key=seconds.get))
        assert dict.fromkeys((t.name for t in workload.tensors), best) in [dict(one.strategies) for one in tried]
        different += Options(compressor="fp16").strategy(SPEC, FOUR_BY_FOUR) != best
    assert different


def test_a_tensor_that_is_barred_travels_by_the_next_smallest_payload():
    """Not dense: with most tensors barred, the first way that a session tries would take as long as dense steps."""
    bars = {"any": (), "two": ("onebit",), "eight": ("onebit", "int2"), "dense": ("onebit", "int2", "int8", "fp16")}
    sizes = {"any": 1 << 21, "two": 1 << 18, "eight": 1 << 18, "dense": 1 << 18}
    workload = Workload(tuple(WorkloadTensor(name, sizes[name], 0.0, barred=barred) for name, barred in bars.items()))
    tuning = Tuning(("fp16", "int8", "int2", "onebit"))
    plans = autoplan.fixed_ways(FOUR_BY_FOUR, Options(), tuning, workload, False)
    assert [[plan.strategies[name].compressor for name in bars] for plan in plans] == [
        ["onebit", "int2", "int8", "none"],
        ["int2", "int2", "int8", "none"],
        ["int8", "int8", "int8", "none"],
        ["fp16", "fp16", "fp16", "none"],
        ["none", "none", "none", "none"],
    ]
    nbytes = [payload_bytes(plan, workload) for plan in plans]
    assert nbytes == sorted(nbytes) and len(set(nbytes)) == len(nbytes)
    limits = SharingLimits(dict.fromkeys(named_routes(compressors.get("fp16"), True), 0), 0, 0)
    profile = random_profile(np.random.default_rng(0), compressors=tuning.compressors)
    maker = autoplan._Maker(FOUR_BY_FOUR, Options(tuning=Tuning()), workload, profile, tuning, False, limits)
    together = maker._together(Options(compressor="onebit"), ["onebit", "int2", "int8", "fp16", "none"])
    assert [together.strategies[name].compressor for name in bars] == ["onebit", "int2", "int8", "none"]


@pytest.mark.parametrize(
    ("size", "tried"), [(1 << 15, ["int2", "int8", "none"]), (1 << 20, ["onebit", "int2", "int8", "none"])]
)
def test_a_compressor_that_few_tensors_may_use_is_not_mixed_with_others(size, tried):
    """Messages of its own cost more than 2 % fewer bytes save; a quarter may be worth them."""
    most = WorkloadTensor("most", 1 << 20, 0.0, barred=("onebit",))
    workload = Workload((most, WorkloadTensor("one", size, 0.0)))
    plans = autoplan.fixed_ways(FOUR_BY_FOUR, Options(), Tuning(("int8", "int2", "onebit")), workload, False)
    assert [plan.strategies["one"].compressor for plan in plans] == tried


def test_compressors_that_make_one_plan_are_tried_once():
    """All tensors that may travel by some of them are small, and dense as such. So are names of one compressor."""
    tuning = Tuning(("topk", "topk:ratio=0.01", "int8", "int2", "onebit"))
    large = WorkloadTensor("large", 1 << 18, 0.0, barred=("topk", "int2", "onebit"))
    workload = Workload((large, WorkloadTensor("small", 100, 0.0)))
    plans = autoplan.fixed_ways(FOUR_BY_FOUR, Options(), tuning, workload, True)
    assert [(plan.strategies["large"].compressor, plan.held) for plan in plans] == [
        ("int8", False), ("int8", True), ("none", False), ("none", True),
    ]  # fmt: skip
