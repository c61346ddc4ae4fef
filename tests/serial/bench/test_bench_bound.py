"""The bound of ``bench sync``: formulas against byte counts worked out by hand, and what is counted on which link."""

from __future__ import annotations

import pytest

from espresso_mpi.bench.bound import bound, busiest_link, memory_domains, memory_traffic
from espresso_mpi.bench.mpi_own import FP16, FP32, least_sent, least_traffic
from espresso_mpi.collectives.data.layout import Topology
from espresso_mpi.compressors import get
from espresso_mpi.types import Route

N = 1 << 16
M = 4 * N
"""Elements and bytes of the tensor: all cuts are aligned, so that shares are exact."""

FOUR = Topology(((0, 1, 2, 3),))
TWO_BY_TWO = Topology(((0, 1), (2, 3)))
FOUR_BY_ONE = Topology(((0,), (1,), (2,), (3,)))


class Yardsticks:
    """Rates as if they had been measured."""

    def __init__(self, link, copy):
        self.link, self.copy = link, copy


def traffic(route, topology, spec=None, feedback=True):
    return memory_traffic(Route.parse(route), topology, N, get(spec) if spec else None, feedback)


def test_dense_allreduce_on_one_node():
    """Each of four contributions is read once, the result written once, then read and written by three others."""
    found = traffic("flat", FOUR)
    assert sum(found) == (4 + 1) * M + 2 * 3 * M
    assert len(set(found)) == 1


def test_dense_allreduce_between_nodes_also_moves_contributions():
    """As on one node, and three quarters of each contribution leave and arrive."""
    assert sum(traffic("flat", FOUR_BY_ONE)) == (4 + 1) * M + 2 * 3 * M + 2 * 3 * M


def test_dense_reduce_and_broadcast():
    """The root reads four contributions and writes one sum, which three others read and write."""
    assert sum(traffic("reduce@flat/broadcast@flat", FOUR)) == (4 + 1) * M + 2 * 3 * M
    assert sum(traffic("reduce@flat/broadcast@flat", FOUR_BY_ONE)) == (4 + 1) * M + 2 * 3 * M + 2 * 3 * M


def test_gather_and_broadcast_of_payloads():
    """Everyone encodes; three payloads move to the root, and all four from there to three others, who decode them."""
    c = get("int8")
    p = c.nbytes(N)
    found = sum(traffic("encode@cpu/gather@flat/broadcast@flat/decode@cpu", FOUR, "int8"))
    assert found == pytest.approx(4 * c.encode_traffic(N) + 2 * 3 * p + 2 * 3 * 4 * p + 4 * (4 * p + 4 * N), rel=1e-3)


def test_hierarchical_dense():
    scattered = 2 * (2 + 1) * M  # two nodes, each reads two contributions and writes one sum
    between = 2 * ((2 + 1) + 2 + 2) * M // 2  # two groups, each half the tensor: sum, arrivals, gather
    gathered = 2 * 2 * M  # two nodes, each piece read and written by the one other
    assert sum(traffic("hierarchical", TWO_BY_TWO)) == scattered + between + gathered


def test_flat_allgather_of_payloads():
    """Every rank encodes all, sends it to three others, and decodes four payloads into one result."""
    c = get("int8")
    p = c.nbytes(N)
    encoded, moved, decoded = c.encode_traffic(N), 2 * 3 * p, 4 * p + 4 * N
    assert traffic("flat-allgather", FOUR, "int8") == [encoded + moved + decoded] * 4


def test_without_feedback_the_residual_is_not_counted():
    with_, without = (sum(traffic("flat-allgather", FOUR, "int8", feedback)) for feedback in (True, False))
    assert with_ - without == 4 * 8 * N


def test_hierarchical_alltoall_packed():
    c = get("onebit")
    half, quarter = c.nbytes(N // 2), c.nbytes(N // 4)
    scattered = 2 * (2 + 1) * M
    first = 4 * 2 * c.encode_traffic(N // 4)
    dealt = 4 * 2 * quarter
    summed = 4 * (2 * quarter + 4 * N // 4)
    second = 4 * c.encode_traffic(N // 4)
    gathered = 4 * 2 * (quarter + 2 * quarter)  # between nodes its own, inside what it then has
    decoded = 4 * (4 * quarter + 4 * N)
    assert half == 2 * quarter
    found = sum(traffic("hierarchical-alltoall-packed", TWO_BY_TWO, "onebit"))
    assert found == scattered + first + dealt + summed + second + gathered + decoded


def test_linear_payloads_are_summed_without_their_header():
    c = get("randomk:ratio=0.25")
    body = c.nbytes(N) - c.header(N)
    assert c.header(N) > 0
    sums = (4 + 1) * body + 2 * 3 * body
    found = sum(traffic("flat-linear", FOUR, "randomk:ratio=0.25"))
    assert found == pytest.approx(4 * (c.encode_traffic(N) + c.nbytes(N) + 4 * N) + sums, abs=16)


def test_the_least_of_any_allreduce():
    """Two nodes each send half of their sum and half of the result; a cast reads and writes 6 bytes per element."""
    assert busiest_link(TWO_BY_TWO, least_sent(TWO_BY_TWO, M)) == M
    assert busiest_link(FOUR_BY_ONE, least_sent(FOUR_BY_ONE, M)) == 3 * M // 2
    assert sum(least_sent(FOUR, M)) == 0
    assert sum(least_traffic(FOUR, N, FP32)) == (4 + 1) * M + 2 * 3 * M
    assert (
        sum(least_traffic(TWO_BY_TWO, N, FP32))
        == (4 + 1) * M + 2 * 2 * M + 2 * 3 * M
        < sum(traffic("hierarchical", TWO_BY_TWO))
    )
    assert sum(least_traffic(FOUR, N, FP16)) == pytest.approx(4 * 2 * 6 * N + ((4 + 1) * M + 2 * 3 * M) / 2, rel=1e-3)


def test_busiest_link_is_of_a_node_not_of_a_rank():
    assert busiest_link(TWO_BY_TWO, [10, 20, 5, 7]) == 30
    assert busiest_link(Topology(((0, 1), (2,))), [1, 2, 9]) == 9


def test_nodes_of_the_lab_share_one_memory(monkeypatch):
    monkeypatch.delenv("ESPRESSO_LAB", raising=False)
    assert memory_domains(TWO_BY_TWO) == ((0, 1), (2, 3))
    monkeypatch.setenv("ESPRESSO_LAB", "nodes=2 ranks=2 rate=1gbit")
    assert memory_domains(TWO_BY_TWO) == ((0, 1, 2, 3),)


def test_bound_is_the_larger_of_wire_and_memory(monkeypatch):
    monkeypatch.delenv("ESPRESSO_LAB", raising=False)
    sent, bytes_ = [40, 60, 10, 10], [300, 100, 500, 700]
    slow_link = bound(sent, bytes_, TWO_BY_TWO, Yardsticks(10.0, [100.0, 400.0]))
    assert (slow_link.wire, slow_link.memory, slow_link.seconds) == (10.0, 4.0, 10.0)
    slow_memory = bound(sent, bytes_, TWO_BY_TWO, Yardsticks(1000.0, [100.0, 100.0]))
    assert (slow_memory.wire, slow_memory.memory, slow_memory.seconds) == (0.1, 12.0, 12.0)
    one_node = bound([0] * 4, bytes_, FOUR, Yardsticks(None, [100.0]))
    assert (one_node.wire, one_node.seconds) == (0.0, 16.0)
