"""Collectives that users call by themselves, on flat arrays, as progress that a runner resumes.

Bytes are moved by the operations of ``ops``: inside a node by shared memory, and between nodes so that the data of a
node crosses each link once. Reductions take a compiled route; those that are no sums or means of floating-point numbers
apply MPI's operators, so that they are exact in every type that MPI has.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from ..arrays.device import copy, device_of, to_host
from ..arrays.workspace import Workspace
from ..types import Route
from . import by_nodes
from .data.layout import Dense, Topology
from .data.reduction import ReduceOp
from .messages.transport import Transport
from .ops import allgather
from .ops import reduce_scatter as scatter
from .ops.base import CollectiveContext, Data, Move, idle, operations
from .program import IdleStep, MoveStep, compile_route, segment_of, segments
from .progress import Progress, interleaved

_ONE_COPY = 128 << 10
"""Bytes from which messages between two ranks of a node beat the window: see ``_is_pair``."""

_MANY = 24
"""Ranks from which an alltoall of short equal parts goes by nodes: fewer messages, but one after the other. In turns on
an emulated cluster of 4 to 24 ranks at 1 Gbit (two busy cores), with 8 KiB to 2 MiB of a rank, messages to all targets
at once took 0.8 to 1.06 of that time; the gain shrinks with the ranks, of which 24 are the most that were measured."""

_SEGMENTS, _SHORTEST, _LONGEST = 16, 120 << 10, 1 << 20
"""Segments of a broadcast or an allgather between nodes, where these have so many bytes: while one is between the
nodes, another one passes through them. Fewer bytes would take no fewer messages. In turns on 2 x 2 emulated ranks at
1 Gbit (two busy cores), with 512 KiB to 24 MiB: one segment took 0.98 to 1.17 of the time, and segments from 16 KiB on
up to 1.43 of it at 512 KiB. Of 4 and 64 segments, 480 KiB at least, and 256 KiB and 4 MiB at most, which took 0.7 to
1.2, none was quicker at all sizes."""

Spans = Sequence[tuple[int, int]]
"""(first byte, byte after the last) of each rank's part of a buffer."""


def broadcast(transport: Transport, x: Any, root: int) -> Progress:
    """Give every rank the root's bytes: from the root to a rank of each other node, and by these inside their nodes.

    Long arrays go in segments, so that one passes through the nodes while another is between them.

    Args:
        x: flat uint8; the same size on every rank.
    """
    several = crosses(transport.topology)
    pieces = segments(x.size, x.size, transport.topology, _segment(x.size) if several else 0)
    yield from interleaved(_broadcast(transport, x[piece.start : piece.stop], root, x.size) for piece in pieces)


def _segment(nbytes: int) -> int:
    return min(max(nbytes // _SEGMENTS, _SHORTEST), _LONGEST)


def _broadcast(transport: Transport, x: Any, root: int, nbytes: int) -> Progress:
    """A rank without a part in a phase yields as often as those that have one: all must be busy for as many steps."""
    topology, me = transport.topology, transport.rank
    first = [root if root in ranks else ranks[0] for ranks in topology.nodes]
    heads = tuple(sorted(first, key=lambda rank: rank != root))
    node = transport.node
    workspace = transport.borrow()
    if len(heads) > 1 and me in heads:
        yield from _broadcast_in(transport, heads, 0, x, nbytes, workspace)
    elif len(heads) > 1:
        yield from idle(None, operations()["broadcast"].phases)
    if topology.size > len(topology.nodes):
        yield from _broadcast_in(transport, node, node.index(first[topology.node_of[me]]), x, nbytes, workspace)
    transport.give_back(workspace)


def _broadcast_in(
    transport: Transport, group: tuple[int, ...], root: int, x: Any, nbytes: int, workspace: Workspace
) -> Progress:
    """``nbytes``: of the whole array."""
    phases = operations()["broadcast"].phases
    if _is_pair(group, nbytes):
        other = [(rank, x) for rank in group if rank != transport.rank]
        sends = transport.rank == group[root]
        pending = transport.post(other if sends else [], [] if sends else other, workspace)
        yield
        transport.finish(pending)
        yield from idle(None, phases - 1)
        return
    context = CollectiveContext(transport.topology, "flat", False, root)
    move = Move(context, group, group.index(transport.rank), (Dense(0, x.size),) * len(group), "uint8")
    yield from operations()["broadcast"].bind(transport, move)(Data(x, "uint8", workspace))


def gather_all(transport: Transport, x: Any, spans: Spans) -> Progress:
    """Complete a buffer on every rank of which each rank has filled its own part.

    On several nodes with equally many ranks, several each, every rank sends its part at once to the ranks with its
    local rank, and what arrives is joined inside the node, piece by piece. Where nodes differ, the parts are joined
    inside each node first; then each local rank exchanges its share of them, and the shares are joined.

    Args:
        x: flat uint8; spans: by rank.
    """
    topology = transport.topology
    workspace = transport.borrow()
    data = Data(x, "uint8", workspace)
    if len(topology.nodes) == 1 or topology.local_size == 1:
        yield from _join(transport, tuple(range(topology.size)), [[Dense(*span)] for span in spans], data)
    elif all(len(ranks) == topology.local_size for ranks in topology.nodes):
        yield from _gather_by_rails(transport, spans, data)
    else:
        yield from _gather_by_shares(transport, spans, data)
    transport.give_back(workspace)


def _gather_by_rails(transport: Transport, spans: Spans, data: Data) -> Progress:
    node, x = transport.node, data.x
    far = [ranks for ranks in transport.topology.nodes if ranks != node]
    largest = max(b - a for a, b in spans)
    count = max(1, round(largest / _segment(largest))) if device_of(x) == "cpu" else 1  # staging lends two buffers
    pieces = [_cut(Dense(*span), count) for span in spans]
    rail = [ranks[node.index(transport.rank)] for ranks in far]

    def of(rank: int, number: int) -> Any:
        return x[pieces[rank][number].start : pieces[rank][number].stop]

    under_way = [
        transport.post(
            [(rank, of(transport.rank, n)) for rank in rail], [(rank, of(rank, n)) for rank in rail], data.workspace
        )
        for n in range(count)
    ]
    yield from _join(transport, node, [[Dense(*spans[rank])] for rank in node], data)
    for n, pending in enumerate(under_way):
        transport.finish(pending)
        arrived = [[pieces[ranks[local]][n] for ranks in far] for local in range(len(node))]
        yield from _join(transport, node, arrived, data)


def _gather_by_shares(transport: Transport, spans: Spans, data: Data) -> Progress:
    topology, node = transport.topology, transport.node
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


def _join(transport: Transport, group: tuple[int, ...], owned: Sequence[Sequence[Dense]], data: Data) -> Progress:
    context = CollectiveContext(transport.topology, "flat", True)
    before = tuple(pieces[0] if pieces else Dense(0, 0) for pieces in owned)
    move = Move(context, group, group.index(transport.rank), before, "uint8")
    largest = max(sum(piece.size for piece in pieces) for pieces in owned)
    yield from allgather.bind_joins(transport, move, owned, not _is_pair(group, largest))(data)


def _is_pair(group: tuple[int, ...], nbytes: int) -> bool:
    """Whether two ranks copy so much that messages are quicker than the shared window, if they are on one node.

    MPI copies long messages once, and the two need not wait for each other at every chunk. More ranks share the copies
    into the window.
    """
    return len(group) == 2 and nbytes >= _ONE_COPY


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
    """Send a part of ``x`` to each rank, and receive a part of ``out`` from each, by a message each; as for a gather.

    Args:
        x, out: flat uint8; sends, receives: by rank, an empty span for nothing.
    """
    me = transport.rank
    others = [(me + k) % transport.topology.size for k in range(1, transport.topology.size)]
    others.sort(key=transport.node.__contains__)  # the links are busy while those of the node are copied
    workspace = transport.borrow()
    pending = transport.post(
        [(rank, x[slice(*sends[rank])]) for rank in others if sends[rank][1] > sends[rank][0]],
        [(rank, out[slice(*receives[rank])]) for rank in others if receives[rank][1] > receives[rank][0]],
        workspace,
    )
    a, b = sends[me]
    if b > a:
        copy(out[receives[me][0] : receives[me][1]], x[a:b])
    yield
    transport.finish(pending)
    transport.give_back(workspace)


def alltoall(transport: Transport, x: Any, out: Any, sends: Spans, receives: Spans, equal: bool) -> Progress:
    """As ``exchange``; on nodes with several ranks, many in all, by ``by_nodes.alltoall`` if that saves messages.

    Both ways, data cross each link once.

    Args:
        equal: whether the parts of all ranks are of one size; otherwise no rank knows what the others send.
    """
    topology, block = transport.topology, sends[0][1] - sends[0][0]
    short = equal and crosses(topology) and topology.size >= _MANY and by_nodes.merges(topology, block)
    if short and device_of(x) == "cpu":
        yield from by_nodes.alltoall(transport, x, out, sends, receives)
    else:
        yield from exchange(transport, x, out, sends, receives)


def allreduce(transport: Transport, x: Any, reduce_op: ReduceOp, route: Route, segment_bytes: int) -> Progress:
    """Reduce an array of numbers on every rank, along the route of a dense sum.

    Args:
        x: flat; replaced. On a GPU, a copy in host memory is reduced.
    """
    here = x if device_of(x) == "cpu" else to_host(x)
    pieces = segments(x.size, x.nbytes, transport.topology, segment_of(x.nbytes, segment_bytes))
    yield from interleaved(_along(transport, here, piece, reduce_op, route) for piece in pieces)
    if here is not x:
        copy(x, here)


def _along(transport: Transport, x: Any, piece: Dense, reduce_op: ReduceOp, route: Route) -> Progress:
    workspace = transport.borrow()
    for step in _steps(route, transport.topology, piece, str(x.dtype), transport.rank):
        if isinstance(step, MoveStep):
            move = replace(step.move, override=reduce_op)
            yield from operations()[step.op].bind(transport, move)(Data(x, str(x.dtype), workspace))
        elif isinstance(step, IdleStep):
            yield from idle(None, operations()[step.op].phases)
    transport.give_back(workspace)


_steps = lru_cache(maxsize=512)(compile_route)


def reduce_scatter(
    transport: Transport, x: Any, own: Any, dtype: str, regions: Spans, reduce_op: ReduceOp | None
) -> Progress:
    """Reduce an array over the ranks, and leave each rank its region of the result.

    Args:
        x: flat, 16-bit floating-point numbers as their bits; not changed.
        own: receives this rank's region; dtype: the element type.
        regions: of elements, by rank.
        reduce_op: None for the mean. On a GPU, MPI's operators are applied to a copy in host memory.
    """
    topology, me = transport.topology, transport.rank
    if reduce_op is not None and reduce_op.combine is not None and device_of(x) == "gpu":
        here = np.empty(own.size, own.dtype)
        yield from reduce_scatter(transport, to_host(x), here, dtype, regions, reduce_op)
        copy(own, here)
        return
    if crosses(topology):
        yield from by_nodes.reduce_scatter(transport, x, own, dtype, regions, reduce_op)
        return
    owned = [[Dense(*region)] for region in regions]
    context, whole = CollectiveContext(topology, "flat", False), (Dense(0, x.size),) * topology.size
    move = Move(context, tuple(range(topology.size)), me, whole, dtype, reduce_op)
    copy(own, x[slice(*regions[me])])
    workspace = transport.borrow()
    yield from scatter.bind_sums(transport, move, owned, [own])(Data(x, dtype, workspace))
    transport.give_back(workspace)


def crosses(topology: Topology) -> bool:
    """Whether there are several nodes, of which some have several ranks."""
    return 1 < len(topology.nodes) < topology.size
