"""Gather of bytes: the parts of all ranks at one of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ..arrays.device import device_of
from . import calls
from .messages.transport import Transport
from .progress import Progress

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
    last = transport.post(
        [], [(first, beyond[a:b]) for (first, _), (a, b) in zip(far, itertools.pairwise(edges))], workspace
    )
    if collects:
        together[node.index(me)] = own
    yield
    transport.finish(near)
    onward = transport.post([(root, together.reshape(-1))] if collects and me != root else [], [], workspace)
    yield
    transport.finish(last)
    transport.finish(onward)
    if me == root:
        rows = every.reshape(topology.size, size)
        rows[list(node)] = together
        for (_, ranks), (a, b) in zip(far, itertools.pairwise(edges)):
            rows[list(ranks)] = beyond[a:b].reshape(-1, size)
    transport.give_back(workspace)
