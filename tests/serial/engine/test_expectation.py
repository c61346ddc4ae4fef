"""Which call the ranks expect, and whether all of them can make it so."""

import pytest

from espresso_mpi.collectives.data.layout import Topology
from espresso_mpi.collectives.tables.expected import fit
from espresso_mpi.engine.expectation import Expectation


@pytest.mark.parametrize("cycle", ["a", "ab", "aab", "abac", "aabb"])
def test_a_cycle_is_foreseen_from_its_third_time_on(cycle):
    expectation = Expectation()
    for _ in range(2):
        for call in cycle:
            expectation.came(ord(call))
    foreseen = []
    for call in cycle:
        foreseen.append(expectation.next)
        expectation.came(ord(call))
    assert foreseen == [ord(call) for call in cycle]
    expectation.came(None)
    assert expectation.next is None


def test_ranks_fit_if_each_hears_of_all_and_is_heard():
    pairs = Topology(((0, 1), (2, 3)))
    rails = [(True, (2,)), (True, (3,)), (True, (0,)), (True, (1,))]
    assert fit(rails, pairs)
    assert fit([(False, tuple(set(range(4)) - {rank})) for rank in range(4)], pairs)
    assert not fit([*rails[:3], None], pairs)
    assert not fit([*rails[:3], (False, (1,))], pairs), "its header would not stand for its node"
    assert not fit([(True, (2, 3)), *rails[1:]], pairs), "rank 3 would not answer"
