"""Numbers at and beyond the ends of their ranges: exact up to the ends, refused beyond them, in files and in Python."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from espresso_mpi.compressors import get
from espresso_mpi.errors import ConfigError
from espresso_mpi.files.schema import MOST_ELEMENTS, MOST_RANKS
from espresso_mpi.planner.model.cost import Prices, Shape, price_table, walk
from espresso_mpi.planner.model.curve import Curve, Sample
from espresso_mpi.planner.model.problem import Problem
from espresso_mpi.planner.model.timeline import Lanes
from espresso_mpi.planner.model.tree import routes
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor
from espresso_mpi.planner.plan import plan
from espresso_mpi.planner.workloads.clusters import TESTBEDS, Cluster, DeviceMemory, Link
from espresso_mpi.types import Route

METHODS = ("fp16", "topk:ratio=1.0", "powersgd:rank=256")
MEMORY = {"cpu": DeviceMemory(1e11, 0.5, 1e-6, 8), "gpu": DeviceMemory(1e12, 0.5, 1e-6)}
NEAR, FAR = Link(1e-6, 1e-11), Link(1e-5, 1e-10)
LARGEST = Cluster("largest", 512, MOST_RANKS // 512, NEAR, FAR, {}, MEMORY, METHODS, NEAR)
TOO_LARGE = (2**62, 2**63, 10**400, -(10**400), float("inf"), float("nan"), Fraction(10**400, 3))


def one(size=100, ready=0.5, **more):
    return Workload((WorkloadTensor("w", size, ready, **more),), "gpu")


@pytest.mark.parametrize("method", [None, *METHODS])
def test_the_largest_tensors_on_the_largest_cluster_are_priced_exactly(method):
    """Against Python's own whole numbers, which have no end."""
    profile, compressor = LARGEST.profile(), method and get(method)
    shape = Shape(LARGEST.nodes, LARGEST.gpus_per_node, "gpu")
    every = [route for route in routes(("cpu", "gpu"))[::7] if route.compressed is (method is not None)]
    slots = list(dict.fromkeys(slot for route in every for slot in walk(route, shape)))
    prices = [Prices(profile, n, compressor, 8) for n in (1, MOST_ELEMENTS - 1, MOST_ELEMENTS)]
    assert price_table(prices, slots).tolist() == [[price.seconds(slot) for slot in slots] for price in prices]


def test_a_plan_for_the_largest_workload_takes_as_long_as_its_bytes():
    made = plan(one(MOST_ELEMENTS, dtype="float64"), LARGEST.profile(), ["fp16"], fusion=False, baselines=False)
    least = 8 * MOST_ELEMENTS * 1e-10 / 4 / LARGEST.gpus_per_node  # float16, over the card, shared or not
    assert made.forecast.seconds >= made.forecast.bound >= least


class Endless:
    """A compressor whose payloads are 16 million times as large as what they say."""

    def __str__(self):
        return "endless"

    def nbytes(self, n):
        return n << 24


def test_payloads_beyond_64_bits_are_refused():
    profile = LARGEST.profile()
    slots = walk(Route.parse("flat-allgather").on("gpu"), Shape(LARGEST.nodes, LARGEST.gpus_per_node, "gpu"))
    moved = [slot for slot in slots if slot.packed and slot.kind == "move"]
    with pytest.raises(ConfigError, match=r"endless: a rank would move .* bytes .* expected less than 2\*\*63"):
        price_table([Prices(profile, MOST_ELEMENTS, Endless())], moved)


@pytest.mark.parametrize("number", TOO_LARGE)
def test_no_number_of_a_description_is_out_of_range(number):
    """Each place alone, in Python: files are decoded into the same types."""
    curve, cluster = Curve.line(1e-6, 1e-9), LARGEST
    for make, says in (
        (lambda: one(size=number), "size: got"),
        (lambda: one(ready=number), "ready: got"),
        (lambda: replace(one(), update=number), "update: got"),
        (lambda: replace(one(), spread=number), "spread: got"),
        (lambda: Sample(number, 1.0, 0.0, 1), "size: got"),
        (lambda: Sample(1, 1.0, number, 1), "spread: got"),
        (lambda: Sample(1, 1.0, 0.0, number), "repeats: got"),
        (lambda: replace(curve, residual=number), "residual: got"),
        (lambda: Curve((0.0, 1e-300), (0.0, number)), "values.*got|rises by"),
        (lambda: replace(cluster, nodes=number), "nodes: got"),
        (lambda: replace(cluster, gpus_per_node=number), "gpus_per_node: got"),
        (lambda: replace(cluster.profile(), nodes=number), "nodes: got"),
        (lambda: replace(cluster.profile(), ranks_per_node=number), "ranks_per_node: got"),
        (lambda: replace(cluster.profile(), segment_bytes=number), "segment_bytes: got"),
        (lambda: replace(cluster.profile(), fingerprint={"a": number}), "fingerprint: "),
        (lambda: Lanes(gpu=number), "lanes: gpu: got"),
        (lambda: Lanes(compute=number), "lanes: compute: got"),
        (lambda: plan(one(), cluster.profile(), noise=number), "noise=.*; expected"),
        (lambda: plan(one(), cluster.profile(), error_budget=number), "error_budget=.*; expected"),
    ):
        if number == 2**62 and says == "fingerprint: ":
            continue
        with pytest.raises(ConfigError, match=says):
            make()


def test_numbers_that_are_too_large_together_are_refused():
    parts = tuple(WorkloadTensor(f"t{i}", MOST_ELEMENTS // 2, 0.1) for i in range(3))
    assert Workload(parts[:2]).nbytes == 4 * MOST_ELEMENTS
    with pytest.raises(ConfigError, match=f"{3 << 39} elements together; expected at most {MOST_ELEMENTS}"):
        Workload(parts)
    with pytest.raises(ConfigError, match=r"shape: .* at most 64"):
        WorkloadTensor("w", 1, 0.1, shape=(1,) * 65)
    profile = LARGEST.profile()
    for make, says in (
        (lambda: replace(LARGEST, nodes=513), f"nodes 513 and gpus_per_node 512, which make {513 * 512} ranks"),
        (lambda: replace(profile, nodes=1024), f"nodes 1024 and ranks_per_node 512, .* at most {MOST_RANKS}"),
    ):
        with pytest.raises(ConfigError, match=says):
            make()


def test_segments_and_seconds_have_an_end():
    profile, slow = replace(LARGEST.profile(), segment_bytes=1), Curve((0.0, 1.0), (0.0, 1e5))
    with pytest.raises(ConfigError, match=r"segment_bytes 1 cuts .* into 17179869184 segments; expected"):
        Problem.of(one(MOST_ELEMENTS), profile, ["fp16"])
    with pytest.raises(ConfigError, match=r"segment_bytes 1 of the profile cuts 4398046511104 bytes of gradients into"):
        plan(one(MOST_ELEMENTS), profile)
    slowest = replace(profile, segment_bytes=0, moves=dict.fromkeys(profile.moves, slow))
    with pytest.raises(ConfigError, match=r"compressor none an operation takes .* s, .* expected at most 1e"):
        plan(one(MOST_ELEMENTS), slowest)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"devices": ["tpu"]}, "devices: got 'tpu'; expected 'cpu' or 'gpu'"),
        ({"devices": "gpu"}, "devices: got 'g'"),
        ({"noise": True}, "noise=True; expected"),
    ],
)
def test_arguments_of_a_plan_are_checked(arguments, says):
    with pytest.raises(ConfigError, match=says):
        plan(one(), TESTBEDS["pcie-25g"].profile(), ["fp16"], **arguments)
