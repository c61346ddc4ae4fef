"""What ends at one rank: a gather of bytes, and a reduction between nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays.device import device_of
from . import calls
from .data.layout import Dense
from .data.reduction import ReduceOp
from .messages.transport import Transport
from .ops import reduce_scatter as scatter
from .ops.base import CollectiveContext, Data, Move, exchange, idle, operations
from .program import segment_of, segments
from .progress import Progress, interleaved

_LARGE, _LEAST = 512 << 10, 256 << 10
"""Bytes from which the other nodes sum an array for the root, in pieces, and the fewest of one: see ``_piece``."""

_TOGETHER = 4 << 10
"""Bytes of a node up to which they travel as one message: their latency costs more than a copy."""


def gather(transport: Transport, own: Any, every: Any, root: int) -> Progress:
    """Give the root the parts of all ranks, in rank order.

    On several nodes with several ranks, a rank of each node collects short parts and passes them on as one message.
    Long ones go to the root at once: they cross each link once either way.

    Args:
        own: flat uint8, of the same size on every rank; every: flat uint8, where they arrive on the root.
    """
    topology, size = transport.topology, own.size
    most = max(map(len, topology.nodes))
    if calls.crosses(topology) and device_of(own) == "cpu" and 0 < most * size <= _TOGETHER:
        yield from _by_nodes(transport, own, every, root)
        return
    ranks = range(topology.size)
    here = transport.rank == root
    sends = [(0, size) if rank == root else (0, 0) for rank in ranks]
    receives = [(rank * size, (rank + 1) * size) if here else (0, 0) for rank in ranks]
    yield from calls.exchange(transport, own, every, sends, receives)


def _by_nodes(transport: Transport, own: Any, every: Any, root: int) -> Progress:
    """Yields equally often on every rank."""
    topology, me, node, size = transport.topology, transport.rank, transport.node, own.size
    heads = [root if root in ranks else ranks[0] for ranks in topology.nodes]
    head, workspace = heads[topology.node_of[me]], transport.borrow()
    collects = me == head
    together = workspace.array("together", len(node) * size if collects else 0, np.uint8, "cpu").reshape(-1, size)
    mates = [rank for rank in node if rank != head] if collects else []
    far = [(first, ranks) for first, ranks in zip(heads, topology.nodes) if me == root and first != root]
    edges = list(itertools.accumulate((len(ranks) * size for _, ranks in far), initial=0))
    beyond = workspace.array("beyond", edges[-1], np.uint8, "cpu")
    near = transport.post(
        [] if collects else [(head, own)], [(rank, together[node.index(rank)]) for rank in mates], workspace
    )
    if collects:
        together[node.index(me)] = own
    yield
    transport.finish(near)
    onward = [(root, together.reshape(-1))] if collects and me != root else []
    rest = [(first, beyond[a:b]) for (first, _), (a, b) in zip(far, itertools.pairwise(edges))]
    last = transport.post(onward, rest, workspace)
    yield
    transport.finish(last)
    if me == root:
        rows = every.reshape(topology.size, size)
        rows[list(node)] = together
        for (_, ranks), (a, b) in zip(far, itertools.pairwise(edges)):
            rows[list(ranks)] = beyond[a:b].reshape(-1, size)
    transport.give_back(workspace)


def reduce(
    transport: Transport, x: Any, dtype: str, root: int, reduce_op: ReduceOp | None, segment_bytes: int
) -> Progress:
    """Reduce an array of host memory over ranks on several nodes; the root gets what an allreduce would give it.

    Inside each node, each local rank sums a share; the root's node gets the shares of the others, and the root those of
    its node. So nothing comes back from the root's node, as it would in an allreduce. On three nodes or more, large
    arrays go in pieces, which the other nodes sum for the root: every link carries the array once in each direction.

    Args:
        x: flat, of a type whose sums are never cut; replaced at the root, undefined afterwards on other ranks.
        reduce_op: None for the mean; segment_bytes: as of ``calls.allreduce``.
    """
    topology = transport.topology
    large = len(topology.nodes) > 2 and x.nbytes >= _LARGE
    segment = min(segment_bytes, _piece(x.nbytes)) if large else segment_of(x.nbytes, segment_bytes)
    between = _by_others if large else _by_operation
    pieces = segments(x.size, x.nbytes, topology, segment)
    yield from interleaved(_reduced(transport, x, dtype, root, reduce_op, piece, between) for piece in pieces)


def _piece(nbytes: int) -> int:
    """The bytes of a piece: an array has four, and eight where these have 512 KiB or more, for each takes core time.

    In turns on 4 x 2 emulated ranks at 1 Gbit (two busy cores), 0.5, 1, 2, 4 and 16 MiB took 0.93, 0.82, 0.83, 0.77 and
    0.75 of the time in which each node sums a part. In another run, 2 MiB in eight pieces took 0.96, and 4 MiB in four
    0.89.
    """
    return max(nbytes // 8, min(max(nbytes // 4, _LEAST), 2 * _LEAST))


_Between = Callable[[Transport, "Move | None", Data], Progress]
"""Reduces a region between nodes; yields equally often on every rank. None stands for a rank that takes no part."""


def _reduced(
    transport: Transport, x: Any, dtype: str, root: int, reduce_op: ReduceOp | None, piece: Dense, between: _Between
) -> Progress:
    """Yields equally often on every rank."""
    topology, me, node, known = transport.topology, transport.rank, transport.node, operations()
    local, target = node.index(me), topology.nodes[topology.node_of[root]]
    data = Data(x, dtype, transport.borrow())
    if calls.crosses(topology):
        inside = CollectiveContext(topology, "intra", False)
        move = Move(inside, node, local, (piece,) * len(node), dtype, reduce_op)
        for _ in known["reduce_scatter"].bind(transport, move)(data):
            pass  # what goes between the nodes is to start at once
    shares = piece.split(topology.local_size, topology.local_size)
    rail = None
    if local < topology.local_size:
        group = tuple(ranks[local] for ranks in topology.nodes)
        context = CollectiveContext(topology, "inter", False, topology.node_of[root])
        rail = Move(context, group, group.index(me), (shares[local],) * len(group), dtype, reduce_op)
    yield from between(transport, rail, data)
    if calls.crosses(topology):
        owned = [(rank, x[share.start : share.stop]) for rank, share in zip(target, shares) if rank != root]
        sends = [(root, part) for rank, part in owned if rank == me]
        pending = transport.post(sends, owned if me == root else [], data.workspace)
        yield
        transport.finish(pending)
    transport.give_back(data.workspace)


def _by_operation(transport: Transport, move: Move | None, data: Data) -> Progress:
    """By the operation of routes."""
    operation = operations()["reduce"]
    return idle(data, operation.phases) if move is None else operation.bind(transport, move)(data)


def _by_others(transport: Transport, move: Move | None, data: Data) -> Progress:
    """Each member but the root sums a part of the region, and the root gets these parts.

    Every link carries the region once in each direction, whereas 2 (n - 1) / n of it would go to a root that summed one
    of n parts itself. The two steps use different directions, so one piece does the second while another does the
    first.
    """
    if move is None:
        yield from idle(data, operations()["reduce"].phases)
        return
    root, me, region = move.context.root, move.index, move.before[move.index]
    assert isinstance(region, Dense)
    others = [member for member in range(len(move.group)) if member != root]
    parts = dict(zip(others, region.split(len(others), len(others))))
    owned = [[parts.get(member, Dense(0, 0))] for member in range(len(move.group))]
    yield from scatter.bind_sums(transport, move, owned)(data)
    sums = {member: data.x[part.start : part.stop] for member, part in parts.items()}
    sends = [] if me == root else [(move.group[root], sums[me])]
    receives = [(move.group[member], array) for member, array in sums.items()] if me == root else []
    yield from exchange(transport, sends, receives, data.workspace)
