"""What a synchronisation must yield, worked out without MPI: all ranks of a route in one process, with plain numpy.

Sums are taken in float32 in rank order, as the executor does, so that a compressed result is comparable bit for bit.
Written apart from the schedules that the executor runs, so that a mistake there shows here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..collectives.data.layout import Topology
from ..collectives.job import ALL_RANKS, encode_key
from ..compressors import Compressor, Context
from ..options import DEFAULT_SEGMENT
from ..types import ALIGN, Collective, Encode, Level, Route, RouteStep

Piece = tuple[int, int, np.ndarray]
"""Elements [start, stop) and their payload."""


def synchronised(
    route: Route,
    topology: Topology,
    inputs: Sequence[np.ndarray],
    compressor: Compressor | None,
    segment_bytes: int = DEFAULT_SEGMENT,
    name: str = "grads",
    seed: int = 0,
) -> list[np.ndarray]:
    """The result on every rank of averaging float32 ``inputs`` (one a rank) along a route, without feedback.

    It is that of a session's first step with a tensor of this name; ``compressor`` is made for its shape.
    """
    n = inputs[0].size
    several = len(topology.nodes) > 1 and segment_bytes > 0 and not (compressor and compressor.whole)
    nbytes = compressor.at(None).nbytes(n) if compressor else 4 * n
    pieces = _cut((0, n), max(1, min(round(nbytes / segment_bytes), -(-n // ALIGN))) if several else 1)
    now = compressor and compressor.at(0)
    results = [
        _Simulation(route, topology, [x[a:b] for x in inputs], now, _Keys(seed, name, a, n)).run() for a, b in pieces
    ]
    return [np.concatenate(pieces) for pieces in zip(*results)]


@dataclass(frozen=True)
class _Keys:
    """Keys of encodes in a segment that begins at element ``start`` of a tensor of n elements."""

    seed: int
    name: str
    start: int
    n: int

    def context(self, rank: int, point: int, first: int) -> Context:
        own, shared = (encode_key(self.seed, 0, who, point, self.start + first, self.name) for who in (rank, ALL_RANKS))
        return Context(own, shared)


class _Simulation:
    """All ranks on their way along one route. What a rank holds is a region of its array, or copies of payloads."""

    def __init__(
        self,
        route: Route,
        topology: Topology,
        inputs: Sequence[np.ndarray],
        compressor: Compressor | None,
        keys: _Keys,
    ) -> None:
        self.route, self.topology, self.compressor = route, topology, compressor
        self.dense = [x.copy() for x in inputs]
        self.bounds = [(0, x.size) for x in inputs]
        self.heard = [frozenset({rank}) for rank in range(len(inputs))]
        """Whose gradients are in what a rank holds: ranks with the same region and the same sources hold the same."""
        self.copies: list[list[list[Piece]]] = [[] for _ in inputs]
        self.divisor, self.averaged, self.packed = 1.0, set[str](), False
        self.keys, self.points, self.together = keys, 0, 1

    def run(self) -> list[np.ndarray]:
        for position, step in enumerate(self.route.steps):
            if isinstance(step, Collective):
                for group in self.topology.groups(step.level):
                    self.collective(step, group)
                if self.packed and step.level not in self.averaged:
                    self.divisor *= self.topology.divisor(step.level)
                self.averaged.add(step.level)
            elif isinstance(step, Encode):
                self.encode(self.route.steps[position + 1 :])
            else:
                self.decode()
        return self.dense

    # --- encode and decode ---

    def encode(self, later: Sequence[RouteStep]) -> None:
        decode = next(i for i, step in enumerate(later) if not isinstance(step, Collective))
        moves = [s for s in later[:decode] if isinstance(s, Collective)]
        levels = {s.level for s in moves} - self.averaged
        self.together = max(1, round(math.prod(self.topology.divisor(level) for level in levels)))
        regions = [self.parts(bounds, moves) for bounds in self.bounds]
        who = [self.first_with_the_same(rank) for rank in range(len(self.dense))]
        summaries = self.summaries(regions, who, [s.level for s in moves if s.op in SUMMING])
        for rank, x in enumerate(self.dense):
            self.copies[rank] = [
                [(a, b, self.payload(who[rank], a, x[a:b], summaries[rank].get(a))) for a, b in regions[rank]]
            ]
        self.packed, self.divisor, self.points = True, 1.0, self.points + 1

    def parts(self, bounds: tuple[int, int], moves: Sequence[Collective]) -> list[tuple[int, int]]:
        """The regions that get a payload each, so that every scatter to come has something to hand to each member."""
        parts = [bounds]
        for move in moves:
            if move.op in ("alltoall", "reduce_scatter"):
                parts = [part for whole in parts for part in _cut(whole, self.pieces(move.level))]
        return [(a, b) for a, b in parts if a < b]

    def first_with_the_same(self, rank: int) -> int:
        same = [
            other
            for other in range(len(self.dense))
            if (self.bounds[other], self.heard[other]) == (self.bounds[rank], self.heard[rank])
        ]
        return min(same)

    def summaries(
        self, regions: Sequence[list[tuple[int, int]]], who: Sequence[int], levels: Sequence[Level]
    ) -> list[dict[int, np.ndarray]]:
        """What the ranks agree on before they encode, if payloads are to be summed, by first element of the part."""
        assert self.compressor is not None
        found: list[dict[int, np.ndarray]] = [{} for _ in self.dense]
        if not levels:
            return found
        for rank, parts in enumerate(regions):
            for a, b in parts:
                wanted = self.compressor.summary(b - a)
                if wanted is not None:
                    found[rank][a] = np.empty(wanted.size, np.float32)
                    context = self.keys.context(who[rank], self.points, a)
                    self.compressor.summarise(self.dense[rank][a:b], found[rank][a], None, context)
        for group in self.topology.groups("flat" if len(levels) > 1 else levels[0]):
            for a, b in regions[group[0]]:
                wanted = self.compressor.summary(b - a)
                if wanted is not None:
                    reduce = np.add if wanted.operator == "sum" else np.maximum
                    agreed = functools.reduce(reduce, [found[rank][a] for rank in group])
                    for rank in group:
                        found[rank][a] = agreed
        return found

    def payload(self, who: int, first: int, x: np.ndarray, summary: np.ndarray | None) -> np.ndarray:
        assert self.compressor is not None
        payload = np.empty(self.compressor.nbytes(x.size), np.uint8)
        context = self.keys.context(who, self.points, first)
        context.summary, context.ranks, context.share = summary, self.together, x.size / self.keys.n
        compressor = self.compressor if self.points == 0 else self.compressor.second_pass()
        compressor.encode(x, payload, None, context)
        return payload

    def decode(self) -> None:
        assert self.compressor is not None
        for rank, copies in enumerate(self.copies):
            for number, copy in enumerate(copies):
                add = self.compressor.decode_add if number else self.compressor.decode
                for a, b, payload in copy:
                    add(payload, self.dense[rank][a:b])
            a, b = _hull([(a, b) for copy in copies for a, b, _ in copy])
            self.dense[rank][a:b] /= np.float32(self.divisor)
            self.compressor.finalize(self.dense[rank][a:b])
            self.bounds[rank] = (a, b)
        self.packed = False

    # --- collectives ---

    def collective(self, step: Collective, group: Sequence[int]) -> None:
        if self.packed:
            self.move_payloads(step, group)
        elif step.op in ("allgather", "broadcast"):
            self.join(group)
        else:
            self.reduce(step, group)
        everyone = frozenset().union(*(self.heard[rank] for rank in group))
        for rank in group:
            self.heard[rank] = everyone

    def move_payloads(self, step: Collective, group: Sequence[int]) -> None:
        held = [self.copies[rank] for rank in group]
        if step.op in SUMMING:
            held = [[self.total([copies[0] for copies in held])]]
        if step.op == "allgather" and step.level in self.averaged:
            count = max(map(len, held))
            every = [[piece for copies in held if c < len(copies) for piece in copies[c]] for c in range(count)]
        else:
            every = [copy for copies in held for copy in copies]
        if step.op == "broadcast":
            every = self.copies[self.root(step, group)]
        for rank, region in zip(group, self.shares(step, group, _hull([(a, b) for copy in every for a, b, _ in copy]))):
            self.copies[rank] = [[p for p in copy if region[0] <= p[0] and p[1] <= region[1]] for copy in every]

    def total(self, held: Sequence[list[Piece]]) -> list[Piece]:
        """The sum of one copy from each member: what follows the headers is added up."""
        assert self.compressor is not None and self.compressor.element is not None
        summed = []
        for of_part in zip(*held):
            a, b, first = of_part[0]
            header = self.compressor.header(b - a)
            body = _total([payload[header:] for _, _, payload in of_part], self.compressor.element)
            summed.append((a, b, np.concatenate([first[:header], body])))
        return summed

    def join(self, group: Sequence[int]) -> None:
        held = {rank: self.bounds[rank] for rank in group}
        for target in group:
            for source, (a, b) in held.items():
                self.dense[target][a:b] = self.dense[source][a:b]
            self.bounds[target] = _hull(list(held.values()))

    def reduce(self, step: Collective, group: Sequence[int]) -> None:
        a, b = self.bounds[group[0]]
        total = self.dense[group[0]][a:b].copy()
        for rank in group[1:]:
            total += self.dense[rank][a:b]
        total /= np.float32(self.topology.divisor(step.level))
        for rank, (first, last) in zip(group, self.shares(step, group, (a, b))):
            self.dense[rank][a:b] = np.nan  # what is not the rank's own must not be used
            self.dense[rank][first:last] = total[first - a : last - a]
            self.bounds[rank] = (first, last)

    def shares(self, step: Collective, group: Sequence[int], region: tuple[int, int]) -> list[tuple[int, int]]:
        """Which part of a region each member goes on with."""
        if step.op in ("reduce_scatter", "alltoall"):
            cut = _cut(region, self.pieces(step.level))
            return cut + [(0, 0)] * (len(group) - len(cut))
        if step.op in ("reduce", "gather"):
            return [region if rank == self.root(step, group) else (0, 0) for rank in group]
        return [region] * len(group)

    def root(self, step: Collective, group: Sequence[int]) -> int:
        """The first rank, or the first of the node; between nodes lanes choose their node by turns."""
        if step.level != "inter":
            return min(group)
        lane = next(ranks.index(group[0]) for ranks in self.topology.nodes if group[0] in ranks)
        return group[lane % len(self.topology.nodes)]

    def pieces(self, level: str) -> int:
        return {
            "flat": self.topology.size,
            "intra": self.topology.local_size,
            "inter": len(self.topology.nodes),
        }[level]


SUMMING = ("allreduce", "reduce_scatter", "reduce")


def _hull(regions: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The region that those which are not empty make together."""
    full = [(a, b) for a, b in regions if a < b]
    return (min(a for a, _ in full), max(b for _, b in full)) if full else (0, 0)


def _cut(region: tuple[int, int], count: int) -> list[tuple[int, int]]:
    """``count`` pieces of equal size but for the last, each a multiple of ALIGN elements."""
    a, b = region
    each = (-(-(b - a) // count) + ALIGN - 1) // ALIGN * ALIGN
    return [(min(b, a + i * each), min(b, a + (i + 1) * each)) for i in range(count)]


def _total(bodies: Sequence[np.ndarray], element: str) -> np.ndarray:
    """The sum of payload bodies, as bytes: integers saturate, 16-bit floats are summed in float32."""
    if element.startswith("int"):
        limits = np.iinfo(element)
        wide = np.sum([body.view(element).astype(np.int64) for body in bodies], axis=0)
        return np.clip(wide, limits.min, limits.max).astype(element).view(np.uint8)
    total = functools.reduce(np.add, [_as_float32(body, element) for body in bodies])
    if element == "float16":
        return np.clip(total, -65504, 65504).astype(np.float16).view(np.uint8)
    if element == "bfloat16":
        bits = total.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)
    return total.view(np.uint8)


def _as_float32(body: np.ndarray, element: str) -> np.ndarray:
    if element == "bfloat16":
        return (body.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return body.view(element).astype(np.float32)
