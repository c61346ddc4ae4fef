"""Blocks of all ranks by dissemination: any number of ranks, few messages."""

from __future__ import annotations

import math

import pytest

from espresso_mpi.collectives.messages.dissemination import rounds_of


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 16])
def test_all_ranks_get_all_blocks_in_few_messages(count):
    group = [3 * number for number in range(count)]  # leaders are any ranks
    plans = {rank: rounds_of(group, rank) for rank in group}
    held = {rank: [rank] for rank in group}
    assert {len(plan) for plan in plans.values()} == {math.ceil(math.log2(count))}
    for number in range(len(plans[0])):
        before = {rank: list(blocks) for rank, blocks in held.items()}
        for rank in group:
            target, source, blocks = plans[rank][number]
            assert plans[source][number].target == rank, "a message that nobody sends"
            assert plans[target][number].source == rank, "a message that nobody receives"
            assert blocks == plans[source][number].blocks
            held[rank] += before[source][:blocks]
    for me, rank in enumerate(group):
        assert held[rank] == group[me:] + group[:me]
