"""Blocks of all ranks by dissemination: any number of ranks, few messages. Each rank is a thread with queues."""

from __future__ import annotations

import math
import queue
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from espresso_mpi.collectives.messages.dissemination import gather_blocks
from espresso_mpi.collectives.messages.waiting import Waiter


class Request:
    def __init__(self, complete):
        self.complete = complete

    @staticmethod
    def Testall(requests):  # noqa: N802 - as mpi4py has it
        for request in requests:
            request.complete()
        return True


class Roll:
    def begin(self, group, timeout):
        return self


class Ranks:
    """A transport in what ``gather_blocks`` uses; counts the messages of each rank."""

    def __init__(self, rank, queues):
        self.rank, self.queues, self.sends, self.roll_call, self.waiter = rank, queues, 0, Roll(), Waiter(60, False)

    def trade_later(self, sends, receives):
        (to, sent), (source, room) = sends[0], receives[0]
        self.sends += 1
        self.queues[self.rank, to].put(sent.copy())

        def receive():
            message = self.queues[source, self.rank].get(timeout=30)
            room[: message.size] = message

        return [(source, Request(receive)), (to, Request(lambda: None))]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 16])
def test_all_ranks_get_all_blocks_in_few_messages(count):
    group = [3 * number for number in range(count)]  # leaders are any ranks
    queues = {(a, b): queue.Queue() for a in group for b in group}
    blocks = {rank: np.arange(1 + rank % 5, dtype=np.uint8) + rank for rank in group}
    for rank in group:
        blocks[rank][0] = blocks[rank].size
    transports = [Ranks(rank, queues) for rank in group]

    def run(transport):
        return gather_blocks(
            transport, group, blocks[transport.rank], 8, lambda found: (int(found[0]), found[: found[0]])
        )

    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(run, transports))
    for found in results:
        assert [block.tolist() for block in found] == [blocks[rank].tolist() for rank in group]
    assert [transport.sends for transport in transports] == [math.ceil(math.log2(count))] * count
