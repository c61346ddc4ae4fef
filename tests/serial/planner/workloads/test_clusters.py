"""Profiles of described clusters: the formulas against counted messages and against numbers worked out by hand."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest

from espresso_mpi.compressors import get
from espresso_mpi.errors import ConfigError
from espresso_mpi.planner.model.problem import evaluated
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.planner.workloads.clusters import (
    _METHODS,
    OPS,
    TESTBEDS,
    Cluster,
    DeviceMemory,
    Link,
    Speed,
    _traffic,
)
from espresso_mpi.planner.workloads.models import MODELS, model_workload
from espresso_mpi.types import DeviceKind, Level, Plan, Route, Strategy

SHAPES = [(1, 2), (1, 5), (2, 1), (4, 1), (2, 2), (2, 3), (3, 2), (4, 3), (3, 4), (2, 8), (8, 8), (5, 3)]


# --- an oracle: the messages of each algorithm, counted ---------------------------------------------------------------


def messages(op, group, root):
    """(from, to, share of s) of every message, for a group of ranks in the order of its ring; ``root``: its place."""
    p = len(group)
    ring = [*group[root:], *group[:root]]
    following = list(zip(group, [*group[1:], group[0]]))
    if op in ("reduce_scatter", "allreduce"):
        rounds = (p - 1) * (2 if op == "allreduce" else 1)
        return [(a, b, 1 / p) for _ in range(rounds) for a, b in following]
    if op == "allgather":
        return [(a, b, 1) for _ in range(p - 1) for a, b in following]
    if op == "alltoall":
        return [(a, b, 1 / p) for a in group for b in group if a != b]
    if op == "gather":
        return [(a, group[root], 1) for a in group if a != group[root]]
    if op == "broadcast":
        return [(a, b, 1) for a, b in pairwise(ring)]
    return [(b, a, 1) for a, b in pairwise(ring)]  # reduce: the broadcast's chain backwards


def groups(nodes, ranks, level, alone):
    """Groups of a level, ranks as (node, number), with the place of each group's root."""
    if level == "flat":
        return [([(m, r) for m in range(nodes) for r in range(ranks)], 0)]
    if level == "intra":
        return [([(m, r) for r in range(ranks)], 0) for m in range(nodes)]
    return [([(m, lane) for m in range(nodes)], lane % nodes) for lane in range(1 if alone else ranks)]


def busiest(op, nodes, ranks, level, alone):
    """How often s crosses the busiest link of a rank and the busiest card of a node."""
    link, card = defaultdict(float), defaultdict(float)
    for group, root in groups(nodes, ranks, level, alone):
        for a, b, share in messages(op, group, root):
            link[a, "out"] += share
            link[b, "in"] += share
            if a[0] != b[0]:
                card[a[0], "out"] += share
                card[b[0], "in"] += share
    return max(link.values(), default=0.0), max(card.values(), default=0.0)


@pytest.mark.parametrize("nodes, ranks", SHAPES)
def test_bytes_are_those_of_the_messages(nodes, ranks):
    for op in OPS:
        for level in get_args(Level):
            for alone in (False, True) if level == "inter" else (False,):
                if {"flat": nodes * ranks, "intra": ranks, "inter": nodes}[level] == 1:
                    continue
                work = _traffic(op, nodes, ranks, level, alone)
                found = (work.link, work.card)
                assert found == pytest.approx(busiest(op, nodes, ranks, level, alone)), (op, level, alone)


@pytest.mark.parametrize("nodes, ranks", SHAPES)
def test_start_ups_of_a_ring_are_its_steps(nodes, ranks):
    """Nobody waits longer than for all steps; between nodes are as many as a round can have but one."""
    for op in OPS:
        rounds, size = (2 if op == "allreduce" else 1), nodes * ranks
        work = _traffic(op, nodes, ranks, "flat", False)
        assert work.near + work.far == rounds * (size - 1)
        assert work.far == (size - ranks if op in ("alltoall", "gather") else rounds * (nodes - 1))


# --- by hand ----------------------------------------------------------------------------------------------------------

HAND = Cluster(
    "by hand",
    nodes=2,
    gpus_per_node=4,
    intra=Link(alpha=1e-6, beta=1e-10),
    inter=Link(alpha=1e-5, beta=1e-9),
    speeds={("onebit", "cpu"): Speed(1e-6, 2e-9, 1e-9), ("fp16", "gpu"): Speed(1e-5, 1e-11, 2e-11)},
    copy=Link(2e-6, 4e-10),
    check=Link(1e-6, 1e-10),
    efficiency=0.5,
    start=1e-4,
    call=3e-6,
    tensor=4e-6,
)
"""Half of every rate: 1e-10 seconds per byte inside become 2e-10, 1e-9 between nodes become 2e-9."""


@pytest.mark.parametrize(
    "op, level, alone, alpha, beta",
    [
        # start + steps; bytes by hand, for 2 nodes of 4
        ("allreduce", "intra", False, 1e-4 + 6e-6, 1.5 * 2e-10),
        ("allgather", "intra", False, 1e-4 + 3e-6, 3 * 2e-10),
        ("broadcast", "intra", False, 1e-4 + 3e-6, 2e-10),
        ("allreduce", "inter", True, 1e-4 + 2e-5, 1 * 2e-9),  # 2 · 1/2 of s over a card of one's own
        ("allreduce", "inter", False, 1e-4 + 2e-5, 4 * 2e-9),  # four ranks share it
        ("allgather", "inter", False, 1e-4 + 1e-5, 4 * 2e-9),
        ("alltoall", "inter", False, 1e-4 + 1e-5, 4 / 2 * 2e-9),  # half of what a rank holds stays on its node
        ("alltoall", "inter", True, 1e-4 + 1e-5, 1 / 2 * 2e-9),
        ("gather", "inter", False, 1e-4 + 1e-5, 2 * 2e-9),  # each node is root of two lanes, and sends for two
        ("reduce", "inter", False, 1e-4 + 1e-5, 2 * 2e-9),
        ("gather", "inter", True, 1e-4 + 1e-5, 1 * 2e-9),
        ("allreduce", "flat", False, 1e-4 + 12e-6 + 2e-5, 2 * 7 / 8 * 2e-9),  # 14 steps, 2 of them between nodes
        ("allgather", "flat", False, 1e-4 + 6e-6 + 1e-5, 7 * 2e-9),
        ("alltoall", "flat", False, 1e-4 + 3e-6 + 4e-5, 4 * 4 / 8 * 2e-9),  # 4 ranks send 4 of 8 payloads over
        ("gather", "flat", False, 1e-4 + 3e-6 + 4e-5, 4 * 2e-9),
    ],
)
def test_times_by_hand(op, level, alone, alpha, beta):
    curve = HAND.profile().move(op, level, alone)
    assert curve(0) == pytest.approx(alpha, rel=1e-12)
    for size in (1, 4096, 10**9):
        assert curve(size) == pytest.approx(alpha + beta * size, rel=1e-12)


def test_a_rank_s_link_may_be_the_slower_one():
    slow = replace(HAND, intra=Link(0.0, 1e-8)).profile()
    assert slow.move("allgather", "inter", True)(1) == pytest.approx(1e-4 + 1e-5 + 2e-8)
    assert slow.move("allgather", "inter")(1) == pytest.approx(1e-4 + 1e-5 + 2e-8)  # 4 · 2e-9 is less


def test_the_rest_of_the_profile():
    made = HAND.profile()
    assert (made.nodes, made.ranks_per_node, made.measured) == (2, 4, False)
    assert (made.call, made.tensor, made.segment_bytes) == (3e-6, 4e-6, 0)
    assert made.codec("onebit", "cpu", "encode")(1000) == pytest.approx(1e-6 + 2e-6)
    assert made.codec("onebit", "cpu", "decode")(1000) == pytest.approx(1e-6 + 1e-6)
    assert made.codec("fp16", "gpu", "decode")(1000) == pytest.approx(1e-5 + 2e-8)
    assert made.copy("to_host")(1000) == made.copy("to_gpu")(1000) == pytest.approx(2e-6 + 8e-7)
    assert made.check(1000) == pytest.approx(1e-6 + 1e-7)
    assert made.noise() == 0
    assert made.fingerprint["cluster"] == "by hand"
    assert Cluster.from_json(made.environment["cluster"]) == HAND


def test_levels_with_one_member_have_no_curves():
    assert {level for _, level, _ in replace(HAND, nodes=1).profile().moves} == {"flat", "intra"}
    assert {level for _, level, _ in replace(HAND, gpus_per_node=1).profile().moves} == {"flat", "inter"}
    single = replace(HAND, nodes=1, gpus_per_node=1, copy=None, check=None).profile()
    assert (single.moves, single.copies, single.check(1 << 30)) == ({}, {}, 0)
    assert replace(HAND, nodes=1).profile().move("allreduce", "flat") == HAND.profile().move("allreduce", "intra")


def test_speeds_from_memory():
    """8 and 12 bytes per element and the payload (1/8, and 4 bytes per block), half of 10 GB/s, for one of 5 ranks."""
    onebit, memory = get("onebit"), DeviceMemory(10e9, efficiency=0.5, launch=7e-6, shared_by=5)
    payload = onebit.nbytes(1 << 24) / (1 << 24)
    speed = memory.speed(onebit)
    assert (speed.launch, speed.encode) == (7e-6, pytest.approx((12 + payload) / 1e9, rel=1e-4))
    assert speed.decode == pytest.approx((8 + payload) / 1e9, rel=1e-4)
    made = replace(HAND, memory={"cpu": memory}, compressors=("onebit", "int8")).profile()
    assert made.codec("onebit", "cpu", "encode")(0) == 1e-6  # given speeds come first
    assert made.codec("int8", "cpu", "encode")(0) == 7e-6


# --- the testbeds -----------------------------------------------------------------------------------------------------


def test_the_testbeds_are_complete():
    assert list(TESTBEDS) == ["nvlink-100g", "pcie-25g"] and len(TESTBEDS) == 2
    for name, bed in TESTBEDS.items():
        made = bed.profile()
        assert (bed.name, made.nodes, made.ranks_per_node) == (name, 8, 8)
        for op in OPS:
            for level in get_args(Level):
                assert made.move(op, level)(1 << 20) > 0
            assert made.move(op, "inter", True)(1 << 20) <= made.move(op, "inter")(1 << 20)
        for spec in _METHODS:
            for device in get_args(DeviceKind):
                assert made.codec(spec, device, "encode")(1 << 20) > made.codec(spec, device, "decode")(1 << 20)
            assert made.codec(spec, "gpu", "encode")(1 << 24) < made.codec(spec, "cpu", "encode")(1 << 24)
        assert "Assumed" in bed.text


def test_dense_gradients_on_the_testbeds_by_hand():
    """100 MB, hierarchically: twice 7/8 of it over links inside, and over the card between."""
    nvlink, pcie = (TESTBEDS[name].profile() for name in TESTBEDS)
    for made, card, link in ((nvlink, 12.5e9, 150e9), (pcie, 3.125e9, 12.5e9)):
        inside = 7 / 8 * 100e6 / (0.88 * link)
        assert made.move("reduce_scatter", "intra")(100e6) == pytest.approx(inside, rel=0.2)
        between = 2 * 7 / 8 * 100e6 / (0.88 * card)
        assert made.move("allreduce", "inter")(100e6 / 8) == pytest.approx(between, rel=0.02)


GATHERED = "reduce_scatter@intra/encode@{0}/allgather@inter/decode@{0}/allgather@intra"
TWO_PASSES = (
    "reduce_scatter@intra/encode@{0}/alltoall@inter/decode@{0}/encode@{0}/allgather@inter/decode@{0}/allgather@intra"
)
FLAT = "encode@{0}/allgather@flat/decode@{0}"
AT_ROOTS = "reduce@intra/encode@{0}/alltoall@inter/decode@{0}/encode@{0}/allgather@inter/decode@{0}/broadcast@intra"


@pytest.mark.parametrize(
    "bed, model, batch, compressor, route, published",
    [
        ("nvlink-100g", "bert-base", 8, "none", "hierarchical", 0.51),
        ("nvlink-100g", "bert-base", 8, "onebit", TWO_PASSES.format("gpu"), 0.55),
        ("nvlink-100g", "bert-base", 8, "onebit", TWO_PASSES.format("cpu"), 0.61),
        ("nvlink-100g", "gpt2", 13, "none", "hierarchical", 0.58),
        ("nvlink-100g", "gpt2", 13, "dgc:ratio=0.01", GATHERED.format("gpu"), 0.67),
        ("nvlink-100g", "gpt2", 13, "dgc:ratio=0.01", GATHERED.format("cpu"), 0.64),
        ("pcie-25g", "lstm", 32, "dgc:ratio=0.01", FLAT.format("gpu"), 0.43),
        ("pcie-25g", "lstm", 32, "dgc:ratio=0.01", AT_ROOTS.format("cpu"), 0.42),
    ],
)
def test_published_scaling_factors_come_out_roughly(bed, model, batch, compressor, route, published):
    """What the testbeds were set by, with modelled steps and in the order ``backprop``; docs/cluster.md says which
    batches and routes are guesses."""
    workload = model_workload(model, batch=batch, speed=MODELS[model].speed)
    plan = Plan({}, default=Strategy(compressor, Route.parse(route)))
    problem, choice = evaluated(plan, workload, TESTBEDS[bed].profile(), lanes="separate", order="backprop")
    alone = workload.tensors[-1].ready + workload.update
    assert alone / problem.seconds(choice) == pytest.approx(published, abs=0.06)


# --- files and bad input ----------------------------------------------------------------------------------------------


def test_a_description_comes_back_from_disk(tmp_path):
    for cluster in (HAND, *TESTBEDS.values()):
        cluster.save(tmp_path / "c.json")
        assert Cluster.load(tmp_path / "c.json") == cluster
        cluster.profile().save(tmp_path / "p.json")
        assert Profile.load(tmp_path / "p.json") == cluster.profile()


SPEED = {"launch": 1, "encode": 1, "decode": 1}

SMALL = """
kind = "espresso_mpi cluster"
version = 1
name = "two boxes"
nodes = 2
gpus_per_node = 4
compressors = ["onebit", "topk:ratio=0.01"]
intra = { alpha = 3e-6, gbit = 400 }
inter = { alpha = 2e-5, gbit = 25 }

[memory.cpu]
bandwidth = 100e9
efficiency = 0.5
launch = 5e-6
shared_by = 4
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no TOML in this Python")
def test_a_description_in_toml(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(SMALL)
    cluster = Cluster.load(path)
    assert cluster.inter.beta == pytest.approx(8 / 25e9) and cluster.memory["cpu"].shared_by == 4
    assert cluster.profile().codec("topk", "cpu", "encode")(0) == 5e-6
    path.write_text("name = ")
    with pytest.raises(ConfigError, match=r"c\.toml: expected TOML"):
        Cluster.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Cluster.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("kind", "espresso_mpi profile", "espresso_mpi profile"),
        ("version", 3, "version 3"),
        ("name", 3, "name"),
        ("nodes", 0, "nodes: got 0"),
        ("gpus_per_node", 1.5, "gpus_per_node"),
        ("intra", None, "intra: got None; expected an object .alpha, beta, gbit"),
        ("inter", {"alpha": 1}, "inter: got alpha; expected alpha, and either beta or gbit"),
        ("inter", {"alpha": 1, "gbit": 0}, "gbit: got 0"),
        ("inter", {"alpha": 1, "gbit": 1, "beta": 1}, "got alpha, beta, gbit; expected"),
        ("inter", {"alpha": -1, "beta": 1}, "alpha: got -1"),
        ("copy", 3, "copy"),
        ("efficiency", 1.1, "at most 1"),
        ("efficiency", 0, "efficiency: got 0"),
        ("start", -1, "start"),
        ("compressors", "onebit", "compressors"),
        ("compressors", ["onebyte"], "onebyte"),
        ("compressors", [3], r"compressors\[0\]: got 3"),
        ("memory", {"tpu": {}}, "tpu"),
        ("memory", {"cpu": {"bandwidth": 1}}, "memory: cpu: missing required field `efficiency`"),
        ("memory", {"cpu": {"bandwidth": 0, "efficiency": 1, "launch": 0}}, "bandwidth: got 0"),
        ("memory", {"cpu": {"bandwidth": 1, "efficiency": 1, "launch": 0, "shared_by": 0}}, "shared_by"),
        ("speeds", [], "speeds"),
        ("speeds", {"onebit": SPEED}, "got the key 'onebit'; expected one such as"),
        ("speeds", {"onebit|tpu": SPEED}, "got 'tpu'; expected 'cpu' or 'gpu'"),
        ("speeds", {"onebit|cpu": {"launch": 1, "encode": 1}}, "missing required field `decode`"),
        ("speeds", {"onebit|cpu": {"launch": 1, "encode": 1, "decode": -1}}, "decode: got -1"),
        ("colour", "red", "unknown field `colour`"),
    ],
)
def test_what_describes_no_cluster(tmp_path, key, value, says):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**HAND.to_json(), key: value}))
    with pytest.raises(ConfigError, match=says) as raised:
        Cluster.load(path)
    assert str(path) in str(raised.value)


def test_what_is_refused_when_made():
    for changes, says in (
        ({"compressors": ("onebit",), "memory": {}}, "without memory"),
        ({"compressors": "onebit"}, "got 'onebit'; expected a list"),
        ({"memory": {"cpu": 3}}, "memory: cpu: got 3; expected an object"),
        ({"speeds": {("onebit", "cpu"): 3}}, "got 3; expected an object .launch"),
        ({"speeds": {("onebit", "disk"): Speed(0, 0, 0)}}, "got 'disk'; expected 'cpu' or 'gpu'"),
        ({"inter": None}, "inter: got None; expected an object .alpha, beta"),
    ):
        with pytest.raises(ConfigError, match=says):
            replace(HAND, **changes)
    with pytest.raises(KeyError):
        TESTBEDS["infiniband"]
