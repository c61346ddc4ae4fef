"""Which compressed tensors share messages."""

import itertools

import numpy as np
import pytest

from espresso_mpi.collectives.messages.joint import JointRegions
from espresso_mpi.sharing import form


def named(*items):
    """(kind, name, payload) as items of small tensors."""
    return [(name, kind, name, payload, 0) for kind, name, payload in items]


def formed(items, limit=80):
    return ["".join(bucket) for bucket in form(items, lambda item: limit)]


def test_the_first_bucket_is_an_eighth_of_the_others():
    assert formed(named(*[("way", chr(97 + i), 5) for i in range(20)])) == ["ab", "cdefghijklmnopqr", "st"]


def test_beside_other_messages_the_first_bucket_is_as_large_as_the_others():
    items = named(*[("way", chr(97 + i), 5) for i in range(20)])
    assert ["".join(bucket) for bucket in form(items, lambda item: 80, under_way=True)] == ["abcdefghijklmnop", "qrst"]


def test_only_tensors_of_one_kind_share_and_none_that_is_too_large():
    items = named(("one", "a", 1), (None, "b", 1), ("two", "c", 1), ("one", "d", 81), ("one", "e", 1), ("two", "f", 1))
    assert formed(items) == ["ae", "b", "cf", "d"]


def test_a_name_that_comes_again_belongs_to_the_next_step():
    assert formed(named(("way", "a", 1), ("way", "b", 1), ("way", "a", 1), ("way", "c", 1))) == ["ab", "ac"]


def test_large_tensors_with_small_payloads_fill_a_bucket():
    items = [(name, "way", name, 1, 1 << 20) for name in "abcdef"]
    assert formed(items) == ["ab", "cdef"]


@pytest.mark.parametrize("seed", range(5))
def test_regions_of_several_arrays_count_as_one(seed):
    random = np.random.default_rng(seed)
    cuts = [np.sort(random.integers(0, 50, 4)) for _ in range(6)]
    regions = JointRegions.of([list(itertools.pairwise(cut)) for cut in cuts])
    for member in range(3):
        sizes = [int(cut[member + 1] - cut[member]) for cut in cuts]
        assert np.diff(regions.edges[:, member]).tolist() == sizes
        assert regions.begins[:, member].tolist() == [int(cut[member]) for cut in cuts]
        assert regions.elements(member) == sum(sizes)
    assert regions.total == sum(int(cut[-1] - cut[0]) for cut in cuts)
    assert regions.longest == max(regions.elements(member) for member in range(3))
