"""Alltoall and reduce-scatter on several nodes with several ranks each.

The ranks with the same local rank, one of each node, are a *rail*. Rails carry what goes from node to node: the ranks
of a node pass their data to the rail of its target first. A rank beyond the smallest node's number has no rail of its
own; its data take one of the others, from which it gets them in the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..arrays.device import copy, device_of
from ..arrays.workspace import Workspace
from ..types import Level
from .data.layout import Dense, Topology
from .data.reduction import ReduceOp
from .messages.transport import Transport
from .ops import reduce_scatter as scatter
from .ops.base import CollectiveContext, Data, Move
from .progress import Progress

Spans = Sequence[tuple[int, int]]

_TOGETHER = 32 << 10
"""Bytes from a node to a rank up to which they travel as one message: their latency costs more than a copy."""


def _rail(topology: Topology, rank: int) -> int:
    return topology.nodes[topology.node_of[rank]].index(rank) % topology.local_size


def _uneven(topology: Topology) -> bool:
    return any(len(ranks) != topology.local_size for ranks in topology.nodes)


# --- reduce-scatter ---------------------------------------------------------------------------------------------------


def reduce_scatter(
    transport: Transport, x: Any, own: Any, dtype: str, regions: Spans, reduce_op: ReduceOp | None
) -> Progress:
    """Inside each node, each rail sums what its ranks will own; then the rails sum over the nodes.

    Args: as of ``calls.reduce_scatter``.
    """
    topology, node, me = transport.topology, transport.node, transport.rank
    by_rail = [[[r for r in ranks if _rail(topology, r) == rail] for ranks in topology.nodes]
               for rail in range(topology.local_size)]  # fmt: skip
    local, workspace = node.index(me), transport.borrow()
    rail = by_rail[local] if local < topology.local_size else []
    mine = [rank for ranks in rail for rank in ranks]
    edges = list(itertools.accumulate((regions[rank][1] - regions[rank][0] for rank in mine), initial=0))
    sums = workspace.array("rail", edges[-1], x.dtype, device_of(x))
    pieces = {rank: Dense(a, b) for rank, (a, b) in zip(mine, itertools.pairwise(edges))}
    for rank, piece in pieces.items():
        copy(sums[piece.start : piece.stop], x[slice(*regions[rank])])
    owned = [[Dense(*regions[rank]) for ranks in rail for rank in ranks] for rail in by_rail]
    yield from _sums(transport, node, "intra", reduce_op, owned, Data(x, dtype, workspace),
                     [sums[p.start : p.stop] for p in pieces.values()], sums[:0])  # fmt: skip
    if rail:
        group = tuple(ranks[local] for ranks in topology.nodes)
        shares = [[pieces[rank] for rank in ranks] for ranks in rail]
        yield from _sums(transport, group, "inter", reduce_op, shares, Data(sums, dtype, workspace))
    else:
        yield
    if me in pieces:
        copy(own, sums[pieces[me].start : pieces[me].stop])
    if _uneven(topology):
        beyond = {r: sums[p.start : p.stop] for r, p in pieces.items() if r in node and r != me}
        source = [(node[_rail(topology, me)], own)] if not rail else []
        pending = transport.post(list(beyond.items()), source, workspace)
        yield
        transport.finish(pending)
    transport.give_back(workspace)


def _sums(
    transport: Transport, group: tuple[int, ...], level: Level, reduce_op: ReduceOp | None,
    owned: Sequence[Sequence[Dense]], data: Data, into: Sequence[Any] = (), nothing: Any = None,
) -> Iterator[None]:  # fmt: skip
    """Sum each member's regions at that member; all get equally many, some of which are empty.

    Args:
        into, nothing: as of ``bind_sums``, and an empty array to go with empty regions; or None for sums in place.
    """
    count = max(map(len, owned))
    filled = [[*regions, *[Dense(0, 0)] * (count - len(regions))] for regions in owned]
    filled += [[Dense(0, 0)] * count] * (len(group) - len(filled))
    context = CollectiveContext(transport.topology, level, False)
    whole = (Dense(0, data.x.size),) * len(group)
    move = Move(context, group, group.index(transport.rank), whole, data.dtype, reduce_op)
    targets = None if nothing is None else [*into, *[nothing] * (count - len(into))]
    return scatter.bind_sums(transport, move, filled, targets)(data)


# --- alltoall ---------------------------------------------------------------------------------------------------------


def merges(topology: Topology, block: int) -> bool:
    """Whether what each node has for a rank travels as one message, if a rank has so many bytes for each."""
    return all(_together(ranks, block) for ranks in topology.nodes)


def _together(ranks: Sequence[int], block: int) -> bool:
    return ranks[-1] - ranks[0] == len(ranks) - 1 and len(ranks) * block <= _TOGETHER


def alltoall(transport: Transport, x: Any, out: Any, sends: Spans, receives: Spans) -> Progress:
    """Ranks pass to each rail of their node what goes to that rail of others; the rails exchange it.

    A rank sends what it has for its own rail at once, so that the links are busy while the node passes on the rest.

    Args: as of ``calls.alltoall``, in host memory, with parts of one size.
    """
    workspace = transport.borrow()
    yield from _Alltoall(transport, x, out, sends, receives, workspace).progress()
    transport.give_back(workspace)


Place = tuple[Any, int, int]
"""A buffer, and where in it a block begins and ends."""


class _Alltoall:
    """One alltoall of one rank.

    Two ranks send each other messages in one order: by target, in the order of nodes, then by source.
    """

    def __init__(
        self, transport: Transport, x: Any, out: Any, sends: Spans, receives: Spans, workspace: Workspace
    ) -> None:
        self.transport, self.x, self.out, self.workspace = transport, x, out, workspace
        self.sends, self.receives, self.block = sends, receives, sends[0][1] - sends[0][0]
        topology, self.me, self.node = transport.topology, transport.rank, transport.node
        self.uneven, self.far = _uneven(topology), [ranks for ranks in topology.nodes if ranks != self.node]
        local = self.node.index(self.me)
        self.leads = local < topology.local_size
        self.rail = {rank: _rail(topology, rank) for rank in range(topology.size)}
        """Of each rank, in all nodes."""
        mine = {rank for rank, rail in self.rail.items() if rail == local}
        self.onward = [s for ranks in self.far for s in ranks if s in mine]
        """The ranks of other nodes to which this one passes on what its node has for them."""
        self.inward = [s for s in self.node if s in mine]
        """The ranks of this node for which this one receives from the others: itself, and those without a rail."""
        self.staged = self._reserved("passed on", [(s, r) for s in self.onward for r in self.node])
        foreign = [(s, r) for s in self.inward if s != self.me for ranks in self.far for r in ranks]
        self.arriving = self._reserved("handed on", foreign)
        self.arriving |= {(self.me, r): (out, *receives[r]) for ranks in self.far for r in ranks}

    def _reserved(self, name: str, blocks: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Place]:
        """Memory for blocks, one after the other: by target and source."""
        memory = self.workspace.array(name, len(blocks) * self.block, np.uint8, "cpu")
        return {place: (memory, n * self.block, (n + 1) * self.block) for n, place in enumerate(blocks)}

    def progress(self) -> Progress:
        """Yields equally often on every rank."""
        transport = self.transport
        near = transport.post(self._into_node(), self._from_node(), self.workspace)
        early = [(s, self._block(s)) for s in self.onward if not _together(self.node, self.block)]
        receives, late = self._from_far()
        first = transport.post([(self._head(s), b) for s, b in early], receives, self.workspace)
        _view((self.out, *self.receives[self.me]))[:] = self._block(self.me)
        yield
        transport.finish(near)
        rest = transport.post(self._onward(), late, self.workspace)
        yield
        transport.finish(first)
        transport.finish(rest)
        if self.uneven:
            pending = transport.post(*self._handed_on(), self.workspace)
            yield
            transport.finish(pending)

    def _block(self, rank: int) -> Any:
        return self.x[slice(*self.sends[rank])]

    def _head(self, rank: int) -> int:
        """The rank that receives for another one, on its node."""
        ranks = next(ranks for ranks in self.far if rank in ranks)
        return ranks[self.rail[rank]]

    def _into_node(self) -> list[tuple[int, Any]]:
        """What goes to ranks of this node, and then what they pass on."""
        mates = [rank for rank in self.node if rank != self.me]
        onward = [(self.node[self.rail[s]], s) for ranks in self.far for s in ranks]
        return [(t, self._block(t)) for t in mates] + [(t, self._block(s)) for t, s in onward if t != self.me]

    def _from_node(self) -> list[tuple[int, Any]]:
        mates = [rank for rank in self.node if rank != self.me]
        own = [(r, _view((self.out, *self.receives[r]))) for r in mates]
        return own + [(r, _view(self.staged[s, r])) for s in self.onward for r in mates]

    def _onward(self) -> list[tuple[int, Any]]:
        """What this rank passes on from its node."""
        found = []
        for s in self.onward:
            if _together(self.node, self.block):
                _view(self.staged[s, self.me])[:] = self._block(s)
                found.append((self._head(s), _joined([self.staged[s, r] for r in self.node])))
            else:
                found += [(self._head(s), _view(self.staged[s, r])) for r in self.node if r != self.me]
        return found

    def _from_far(self) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
        """What comes from the other nodes: what ``progress`` sends first, then the rest."""
        first, rest = [], []
        for ranks in self.far if self.leads else []:
            head = ranks[self.rail[self.me]]
            for s in self.inward:
                if _together(ranks, self.block):
                    rest.append((head, _joined([self.arriving[s, r] for r in ranks])))
                    continue
                first.append((head, _view(self.arriving[s, head])))
                rest += [(head, _view(self.arriving[s, r])) for r in ranks if r != head]
        return first, rest

    def _handed_on(self) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
        """What this rank has received for others, and what another one has received for it."""
        far = [r for ranks in self.far for r in ranks]
        given = [(s, _view(self.arriving[s, r])) for s in self.inward if s != self.me for r in far]
        taken = [] if self.leads else [(self.node[self.rail[self.me]], _view(self.arriving[self.me, r])) for r in far]
        return given, taken


def _view(place: Place) -> Any:
    memory, a, b = place
    return memory[a:b]


def _joined(places: Sequence[Place]) -> Any:
    """Blocks that lie one after the other, as one."""
    return places[0][0][places[0][1] : places[-1][2]]
