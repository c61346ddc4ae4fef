"""The baselines: what each chooses, told from its description, and that none beats the Upper Bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import COMPRESSOR, random_profile, random_workload

from espresso_mpi import Plan, compressors
from espresso_mpi.errors import ConfigError
from espresso_mpi.planner import TESTBEDS, model_workload, routes
from espresso_mpi.planner.model.cost import operations
from espresso_mpi.planner.model.problem import evaluated
from espresso_mpi.planner.search.algorithms import published
from espresso_mpi.planner.search.baselines import BASELINES, BYTEPS_SMALLEST, NEEDS_GPU, baseline, upper_bound, usable
from espresso_mpi.types import ROUTES, Encode, Route, Strategy

SHAPES = [(4, 4), (4, 1), (1, 4)]


def case(seed=0, shape=(4, 4), device="gpu", tensors=6):
    rng = np.random.default_rng(seed)
    return random_workload(rng, tensors, device), random_profile(rng, *shape, compressors=(COMPRESSOR, "fp16"))


def strategies(plan, workload):
    return [plan.strategy(tensor.name) for tensor in workload.tensors]


def alone(strategy, tensor, profile, device="gpu"):
    return sum(one.seconds for one in operations(strategy, tensor.size, profile, device))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_usable_baseline_has_a_plan_that_can_be_priced(shape, device):
    workload, profile = case(1, shape, device)
    for name in usable(workload):
        plan = baseline(name, workload, profile, COMPRESSOR)
        problem, choice = evaluated(plan, workload, profile)
        assert workload.tensors[-1].ready < problem.seconds(choice) < 100
        assert not plan.groups and set(plan.strategies) == {tensor.name for tensor in workload.tensors}


def quickest_named(workload, profile, spec, device):
    """Seconds of the named routes of a compressor, told by their names alone, if all tensors take them."""
    shapes = ("flat-", "hierarchical-") if profile.nodes > 1 and profile.ranks_per_node > 1 else ("flat-",)
    method, found = compressors.get(spec), {}
    for name in (name for name in ROUTES if name.startswith(shapes)):
        if name.endswith("-linear") if method.common else method.linear or not name.endswith("-linear"):
            strategy = Strategy(spec, Route.parse(name).on(device))
            problem, choice = evaluated(Plan(default=strategy), workload, profile)
            found[strategy] = problem.seconds(choice)
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", [COMPRESSOR, "fp16", "onebit", "powersgd", "randomk:ratio=0.01"])
def test_everything_travels_by_the_named_route_that_is_quickest_on_this_cluster(shape, spec):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        workload, profile = random_workload(rng, 6), random_profile(rng, *shape, compressors=(spec, "fp16"))
        for by, name, device in (("fp16", "fp16", "gpu"), *((spec, f"everything-{d}", d) for d in ("cpu", "gpu"))):
            (strategy,) = set(strategies(baseline(name, workload, profile, spec), workload))
            seconds = quickest_named(workload, profile, by, device)
            assert seconds[strategy] == min(seconds.values())


def test_fp16_is_no_slower_than_its_linear_route_on_a_described_cluster():
    """Where the payload is carried on through the node, every rank decodes 64 payloads of each tensor."""
    workload, profile = model_workload("resnet101"), TESTBEDS["nvlink-100g"].profile()
    (strategy,) = set(strategies(baseline("fp16", workload, profile, "fp16"), workload))
    seconds = quickest_named(workload, profile, "fp16", "gpu")
    assert seconds[strategy] == min(seconds.values())
    assert 2 * seconds[strategy] < seconds[Strategy("fp16", Route.parse("hierarchical-alltoall-packed").on("gpu"))]


@pytest.mark.parametrize("shape", SHAPES)
def test_myopic_takes_what_is_quickest_alone(shape):
    workload, profile = case(3, shape)
    every = [
        Strategy(COMPRESSOR if route.compressed else "none", route) for d in ("gpu", "cpu") for route in routes((d,))
    ]
    for tensor, strategy in zip(
        workload.tensors, strategies(baseline("myopic", workload, profile, COMPRESSOR), workload)
    ):
        assert alone(strategy, tensor, profile) == pytest.approx(
            min(alone(w, tensor, profile) for w in every), rel=1e-12
        )


def test_hipress_compresses_where_that_alone_is_quicker():
    seen = set()
    for seed in range(6):
        workload, profile = case(seed)
        small = replace(workload.tensors[0], name="small", size=100)
        workload = replace(workload, tensors=(small, *workload.tensors))
        dense, packed = Strategy("none", "hierarchical"), Strategy(COMPRESSOR, "hierarchical-alltoall")
        packed = Strategy(COMPRESSOR, packed.route.on("gpu"))
        for tensor, strategy in zip(
            workload.tensors, strategies(baseline("hipress", workload, profile, COMPRESSOR), workload)
        ):
            assert strategy == (packed if alone(packed, tensor, profile) < alone(dense, tensor, profile) else dense)
            seen.add(strategy)
    assert len(seen) == 2


def test_hitopkcomm_gathers_payloads_between_nodes():
    workload, profile = case(4)
    (strategy,) = set(strategies(baseline("hitopkcomm", workload, profile, COMPRESSOR), workload))
    assert str(strategy.route) == "reduce_scatter@intra/encode@gpu/allgather@inter/decode@gpu/allgather@intra"


def test_byteps_compresses_on_the_cpu_what_is_large_enough():
    workload, profile = case(5)
    sizes = [BYTEPS_SMALLEST // 4 - 1, BYTEPS_SMALLEST // 4]
    few = replace(workload, tensors=tuple(replace(t, size=n) for t, n in zip(workload.tensors, sizes)))
    small, large = strategies(baseline("byteps-compress", few, profile, COMPRESSOR), few)
    assert small == Strategy("none", "hierarchical")
    assert large == Strategy(COMPRESSOR, "hierarchical-alltoall")
    assert {s.device for s in large.route.steps if isinstance(s, Encode)} == {"cpu"}


@pytest.mark.parametrize("order", ["backprop", "fifo"])
def test_nothing_beats_the_upper_bound(order):
    for seed in range(3):
        workload, profile = case(seed)
        bound = upper_bound(workload, profile, COMPRESSOR, order=order)
        assert workload.seconds < bound
        for name in BASELINES:
            if name != "fp16":
                problem, choice = evaluated(
                    baseline(name, workload, profile, COMPRESSOR), workload, profile, order=order
                )
                assert bound <= problem.seconds(choice) * (1 + 1e-9), name
        assert bound <= published(workload, profile, COMPRESSOR, order=order)[1].seconds * (1 + 1e-9)


def test_the_baselines_that_need_a_gpu():
    host, profile = case(6, device="cpu")
    gpu, _ = case(6)
    assert usable(gpu) == tuple(BASELINES)
    assert set(usable(gpu)) - set(usable(host)) == NEEDS_GPU == {"everything-gpu", "hipress", "hitopkcomm"}
    for name in NEEDS_GPU:
        with pytest.raises(ConfigError, match=r"host memory; expected one of fp32, fp16, everything-cpu"):
            baseline(name, host, profile, COMPRESSOR)


def test_bad_names():
    workload, profile = case(7)
    with pytest.raises(ConfigError, match="'horovod': there is none of that name; expected one of fp32"):
        baseline("horovod", workload, profile, COMPRESSOR)
    with pytest.raises(ConfigError, match="'none' compresses nothing"):
        baseline("myopic", workload, profile, "none")
    with pytest.raises(ConfigError, match="topkk"):
        baseline("fp32", workload, profile, "topkk")
