"""Every collective alone, against its textbook result: each by messages and, if it can, through the shared window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from route_tools import open_transport

from espresso_mpi.collectives.data.layout import Dense, Packed, Part
from espresso_mpi.collectives.data.reduction import ReduceOp, stored
from espresso_mpi.collectives.ops.base import CollectiveContext, Data, Move, operations
from espresso_mpi.types import ALIGN, CLOSING, ITEMSIZE, SUMS

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

PACKED = sorted({*CLOSING, "allgather"} - SUMS)
"""Operations that move payloads from all to all, or to one."""


def small(rank, size, dtype):
    """Integers of a rank, whose sums every type holds exactly."""
    numbers = np.random.default_rng(rank).integers(-9, 10, size).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else numbers.astype(dtype)


def widened(x, dtype):
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.view(dtype).astype(np.float64)


def run(link, op, move, data):
    """Run one collective; it yields as often, and sends as much, as it says."""
    before = sum(link.sent.values())
    assert len(list(op.bind(link, move)(data))) == op.phases, op.name
    if link.window_for(move.group, data.x if data.payload is None else data.payload) is None:
        assert sum(link.sent.values()) - before == op.sent(move), op.name


def dense_cases(whole, members):
    """(operation, what the members hold before): sums hold all, and what closes them what the sum has left."""
    for name in sorted(SUMS):
        yield name, (whole,) * members
    for opening in sorted(SUMS & set(CLOSING)):
        yield CLOSING[opening], opening


@pytest.fixture(params=[0, 1 << 16], ids=["messages", "window"])
def link(request):
    transport = open_transport(None, request.param)
    yield transport
    transport.close()


@pytest.mark.parametrize("n", [ALIGN, 40 * ALIGN])
def test_arrays(link, n):
    """A small array, which sums send whole, and a large one."""
    group = tuple(range(link.topology.size))
    me, whole = link.rank, Dense(0, n * len(group))
    context = CollectiveContext(link.topology, "flat", True, link.topology.root("flat", group))
    for dtype in ITEMSIZE:
        for name, held in dense_cases(whole, len(group)):
            op = operations()[name]
            if isinstance(held, str):
                held = tuple(operations()[held].advance(replace(context, joins=False), (whole,) * len(group)))
            given = [small(rank, whole.size, dtype) for rank in group]
            data = Data(given[me].view(stored(dtype)).copy(), dtype, link.workspace)
            run(link, op, Move(context, group, me, held, dtype, ReduceOp("sum")), data)
            expected = op.reference([widened(x, dtype)[r.start : r.stop] for x, r in zip(given, held)])[me]
            after = op.advance(context, held)[me]
            assert np.array_equal(widened(data.x, dtype)[after.start : after.stop], expected), (name, dtype)


@pytest.mark.parametrize("name", PACKED)
def test_payloads(link, name):
    group, me, op = tuple(range(link.topology.size)), link.rank, operations()[name]
    size = 4096
    parts = tuple(Part(k * ALIGN, (k + 1) * ALIGN, k * size, size) for k in group)
    held = (Packed((parts,)),) * len(group)
    context = CollectiveContext(link.topology, "flat", False, link.topology.root("flat", group))
    given = [np.random.default_rng(rank).integers(0, 256, size * len(group)).astype(np.uint8) for rank in group]
    payload = link.workspace.payload(size * len(group), "cpu")
    payload[: given[me].size] = given[me]
    data = Data(np.empty(0, np.float32), "float32", link.workspace, payload)
    run(link, op, Move(context, group, me, held, "float32"), data)
    assert np.array_equal(data.payload[: op.advance(context, held)[me].nbytes], op.reference(given)[me])
