"""Collectives that users call by themselves, on flat arrays, as progress that a runner resumes.

Bytes are moved by the operations of ``ops``: inside a node by shared memory, and between nodes so that the data of a
node crosses each link once. Sums and means of floating-point numbers take a compiled route; all other reductions are
MPI's own, so that they are exact in every type that MPI has.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ..arrays.device import copy, device_of, to_host
from ..arrays.workspace import Workspace
from .data.layout import Dense, Topology
from .data.reduction import ReduceOp
from .messages.transport import Transport
from .ops import allgather
from .ops import reduce_scatter as scatter
from .ops.base import CollectiveContext, Data, Move, idle, operations
from .progress import Progress

Spans = Sequence[tuple[int, int]]
"""(first byte, byte after the last) of each rank's part of a buffer."""


def broadcast(transport: Transport, x: Any, root: int) -> Progress:
    """Give every rank the root's bytes: from the root to a rank of each other node, and by these inside their nodes.

    A rank without a part in a phase yields as often as those that have one: all ranks must be busy for as many steps.

    Args:
        x: flat uint8; the same size on every rank.
    """
    topology, me = transport.topology, transport.rank
    first = [root if root in ranks else ranks[0] for ranks in topology.nodes]
    heads = tuple(sorted(first, key=lambda rank: rank != root))
    node = transport.node
    workspace = transport.borrow()
    if len(heads) > 1 and me in heads:
        yield from _broadcast_in(transport, heads, 0, x, workspace)
    elif len(heads) > 1:
        yield from idle(None, operations()["broadcast"].phases)
    if topology.size > len(topology.nodes):
        yield from _broadcast_in(transport, node, node.index(first[topology.node_of[me]]), x, workspace)
    transport.give_back(workspace)


def _broadcast_in(transport: Transport, group: tuple[int, ...], root: int, x: Any, workspace: Workspace) -> Progress:
    context = CollectiveContext(transport.topology, "flat", False, root)
    move = Move(context, group, group.index(transport.rank), (Dense(0, x.size),) * len(group), "uint8")
    yield from operations()["broadcast"].bind(transport, move)(Data(x, "uint8", workspace))


def gather_all(transport: Transport, x: Any, spans: Spans) -> Progress:
    """Complete a buffer on every rank of which each rank has filled its own part.

    On several nodes with several ranks each: inside each node first; then each local rank exchanges its share of the
    node's parts with those of the other nodes; then inside the nodes again.

    Args:
        x: flat uint8; spans: by rank.
    """
    topology, node = transport.topology, transport.node
    workspace = transport.borrow()
    data = Data(x, "uint8", workspace)
    if len(topology.nodes) == 1 or topology.local_size == 1:
        yield from _join(transport, tuple(range(topology.size)), [[Dense(*span)] for span in spans], data)
    else:
        yield from _join(transport, node, [[Dense(*spans[rank])] for rank in node], data)
        shares = _shares(topology, spans)
        local = node.index(transport.rank)
        if local < topology.local_size:
            group = tuple(ranks[local] for ranks in topology.nodes)
            yield from _join(transport, group, [shares[number][local] for number in range(len(group))], data)
        else:
            yield
        here = topology.node_of[transport.rank]
        others = [number for number in range(len(topology.nodes)) if number != here]
        owned = [
            [piece for number in others for piece in (shares[number][local] if local < topology.local_size else [])]
            for local in range(len(node))
        ]
        most = max(map(len, owned))
        yield from _join(transport, node, [[*pieces, *[Dense(0, 0)] * (most - len(pieces))] for pieces in owned], data)
    transport.give_back(workspace)


def _join(transport: Transport, group: tuple[int, ...], owned: Sequence[Sequence[Dense]], data: Data) -> Progress:
    context = CollectiveContext(transport.topology, "flat", True)
    before = tuple(pieces[0] if pieces else Dense(0, 0) for pieces in owned)
    move = Move(context, group, group.index(transport.rank), before, "uint8")
    yield from allgather.bind_joins(transport, move, owned)(data)


def _shares(topology: Topology, spans: Spans) -> list[list[list[Dense]]]:
    """What each local rank passes on of each node's parts: [node][local rank] -> pieces, equally many of each."""
    most = max(map(len, topology.nodes))
    found = []
    for ranks in topology.nodes:
        parts = [Dense(*spans[rank]) for rank in ranks] + [Dense(0, 0)] * (most - len(ranks))
        pieces = [_cut(part, topology.local_size) for part in parts]
        found.append([[piece[local] for piece in pieces] for local in range(topology.local_size)])
    return found


def _cut(part: Dense, count: int) -> list[Dense]:
    edges = [part.start + part.size * number // count for number in range(count + 1)]
    return [Dense(a, b) for a, b in itertools.pairwise(edges)]


def exchange(transport: Transport, x: Any, out: Any, sends: Spans, receives: Spans) -> Progress:
    """Send a part of ``x`` to each rank, and receive a part of ``out`` from each; alltoall, gather and scatter.

    Args:
        x, out: flat uint8; sends, receives: by rank, an empty span for nothing.
    """
    me = transport.rank
    a, b = sends[me]
    if b > a:
        copy(out[receives[me][0] : receives[me][1]], x[a:b])
    others = [(me + k) % transport.topology.size for k in range(1, transport.topology.size)]
    workspace = transport.borrow()
    pending = transport.post(
        [(rank, x[slice(*sends[rank])]) for rank in others if sends[rank][1] > sends[rank][0]],
        [(rank, out[slice(*receives[rank])]) for rank in others if receives[rank][1] > receives[rank][0]],
        workspace,
    )
    yield
    transport.finish(pending)
    transport.give_back(workspace)


def reduce_scatter(transport: Transport, x: Any, own: Any, dtype: str, regions: Spans, divisor: float) -> Progress:
    """Sum an array over the ranks, and leave each rank its region of the sum.

    Args:
        x: flat, 16-bit floating-point numbers as their bits; not changed in the end.
        own: receives this rank's region; dtype: the element type.
        regions: of elements, by rank; divisor: of the sums.
    """
    topology, me = transport.topology, transport.rank
    owned = [[Dense(*region)] for region in regions]
    context = CollectiveContext(topology, "flat", False)
    whole = (Dense(0, x.size),) * topology.size
    move = Move(context, tuple(range(topology.size)), me, whole, dtype, ReduceOp("sum", divisor))
    mine = x[slice(*regions[me])]
    before = mine.copy() if device_of(x) == "cpu" else to_host(mine)
    workspace = transport.borrow()
    yield from scatter.bind_sums(transport, move, owned)(Data(x, dtype, workspace))
    copy(own, mine)
    copy(mine, before)
    transport.give_back(workspace)
