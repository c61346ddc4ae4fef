"""Values whose sum over the ranks would leave the range of their type: which are found, and what is done with them."""

from __future__ import annotations

import numpy as np
import pytest

from espresso_mpi.collectives import ranges
from espresso_mpi.collectives.data import reduction
from espresso_mpi.collectives.data.layout import Topology
from espresso_mpi.types import TensorSpec

TOPOLOGIES = [
    Topology(((0,),)),
    Topology(((0, 1),)),
    Topology(((0, 1), (2,))),
    Topology(((0, 1, 2, 3, 4), (5,), (6,))),
    Topology(tuple((2 * i, 2 * i + 1) for i in range(500))),
]
UNSIGNED = {"float16": np.uint16, "float32": np.uint32, "float64": np.uint64}


def memory(x):
    return x.view(np.uint16) if x.dtype == np.float16 else x


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_no_sum_of_values_below_the_limit_leaves_the_range(dtype, topology):
    its = ranges.limits(dtype, False, topology)
    below = np.array(its.large - 1, UNSIGNED[dtype]).view(dtype)
    wide = np.float64 if dtype == "float64" else np.float32

    def level(values, divisor):
        total = wide(0)
        for value in values:
            total = wide(total + wide(value))
        return (total / wide(divisor)).astype(dtype)

    with np.errstate(all="raise"):
        flat = level([below] * topology.size, topology.size)
        nodes = [level([below] * len(ranks), topology.divisor("intra")) for ranks in topology.nodes]
        both = level(nodes, topology.divisor("inter"))
    assert np.isclose(np.float64(flat), np.float64(below)) and np.isclose(np.float64(both), np.float64(below), 1e-3)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_the_largest_values_are_summed_when_they_are_shifted(dtype, topology):
    if topology.size == 1:
        return
    largest = np.finfo(dtype).max
    x = memory(np.array([largest, -largest, 1.5, -0.25], dtype))
    by = ranges.shift(dtype, topology)
    ranges.scale(x, -by, dtype)
    for ranks in (tuple(range(topology.size)), max(topology.nodes, key=len)):
        whole = len(ranks) == topology.size
        out, rows = x.copy(), np.stack([x] * len(ranks))
        reduction.mean_rows(out, rows, 0, topology.size if whole else topology.divisor("intra"), dtype)
        assert by == 0 or np.all(np.abs(out.view(dtype)[:2]) < largest)  # neither infinite nor cut
        if whole:
            ranges.scale(out, by, dtype)
            assert np.all(np.isfinite(out.view(dtype)))
            assert np.allclose(out.view(dtype).astype(np.float64) / [largest, -largest, 1.5, -0.25], 1, rtol=1e-3)


def test_what_is_odd_is_named_by_position():
    """Among many small tensors, which are searched together, and large ones; the same as one by one."""
    random = np.random.default_rng(0)
    topology = Topology(((0, 1), (2,)))
    tensors, arrays, expected = [], [], {}
    for position in range(3000):
        dtype = str(random.choice(["float32", "float64", "float16"]))
        compressed = bool(random.random() < 0.2)
        x = random.standard_normal(int(random.integers(1, 300))).astype(dtype)
        if random.random() < 0.01:
            odd = float(random.choice([np.nan, -np.inf, np.finfo(dtype).max, -1e38 if dtype == "float32" else 3.0]))
            x[random.integers(x.size)] = odd
        bad = int(np.count_nonzero(~np.isfinite(x.astype(np.float32) if compressed else x)))
        most = {"float32": 2.0**125, "float64": 2.0**1021, "float16": 65504 * 0.75}[dtype]
        beyond = int(np.count_nonzero(np.abs(x.astype(np.float64)) >= (2.0**124 if compressed else most)))
        if bad:
            expected[str(position)] = f"has {bad} NaN"
        elif beyond and not (compressed and dtype == "float16"):
            expected[str(position)] = f"has {beyond} value(s) of 2.13e+37" if compressed else ""
        tensors.append((position, TensorSpec("w", x.shape, dtype), compressed, True))
        arrays.append(memory(x))
    with np.errstate(over="ignore"):
        found = ranges.Search(topology).odd_values(ranges.portions(tensors), arrays)
    assert len(expected) > 10 and set(found) == set(expected)
    assert all(found[at].startswith(text) and bool(found[at]) == bool(text) for at, text in expected.items())
    one = ranges.portions([(0, TensorSpec("w", (3,), "float32"), False, True)])
    assert ranges.Search(topology).odd_values(one, [np.ones(3, np.float32)]) == {}


def test_large_and_bad_values_are_separated():
    said = {0: {"1": "", "2": "has 3 NaN"}, 2: {"4": "", "1": ""}}
    assert ranges.separated(said) == ({0: {"2": "has 3 NaN"}}, frozenset({1, 4}))
    assert ranges.separated({}) == ({}, frozenset())
