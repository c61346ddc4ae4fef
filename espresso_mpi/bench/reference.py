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

from ..collectives.executor import ALL_RANKS, encode_key
from ..collectives.layout import ALIGN, Topology
from ..compressors import Compressor, Context
from ..options import DEFAULT_SEGMENT
from ..types import Collective, Encode, Level, Route, Step

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
    several = len(topology.machines) > 1 and segment_bytes > 0 and not (compressor and compressor.whole)
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
        self.copies: list[list[list[Piece]]] = [[] for _ in inputs]
        self.divisor, self.scattered, self.packed = 1.0, list[str](), False
        self.keys, self.points, self.averaged = keys, 0, 1

    def run(self) -> list[np.ndarray]:
        for position, step in enumerate(self.route.steps):
            if isinstance(step, Collective):
                for group in self.topology.groups(step.level):
                    self.collective(step, group)
                self.after(step)
            elif isinstance(step, Encode):
                self.encode(self.route.steps[position + 1 :])
            else:
                self.decode()
        return self.dense

    def encode(self, later: Sequence[Step]) -> None:
        decode = next(i for i, step in enumerate(later) if not isinstance(step, Collective))
        moves = [s for s in later[:decode] if isinstance(s, Collective)]
        cuts = [self.pieces(s.level) for s in moves if s.op == "alltoall"]
        levels = {s.level for s in moves if s.level not in self.scattered}
        self.averaged = max(1, round(math.prod(self.topology.divisor(level) for level in levels)))
        summaries = self.summaries([s.level for s in moves if s.op == "allreduce"])
        for rank, x in enumerate(self.dense):
            pieces = [self.bounds[rank]]
            for count in cuts:
                pieces = [piece for whole in pieces for piece in _cut(whole, count)]
            self.copies[rank] = [[(a, b, self.payload(rank, a, x[a:b], summaries[rank])) for a, b in pieces]]
        self.packed, self.divisor, self.points = True, 1.0, self.points + 1

    def summaries(self, levels: Sequence[Level]) -> list[np.ndarray | None]:
        """What the ranks agree on before they encode, if payloads are to be summed: reduced level by level."""
        assert self.compressor is not None
        found: list[np.ndarray | None] = [None] * len(self.dense)
        for rank, (a, b) in enumerate(self.bounds):
            wanted = self.compressor.summary(b - a) if levels and b > a else None
            if wanted is not None:
                found[rank] = np.empty(wanted.size, np.float32)
                context = self.keys.context(rank, self.points, a)
                self.compressor.summarise(self.dense[rank][a:b], found[rank], None, context)
        for level in levels:
            for group in self.topology.groups(level):
                of_group = [s for s in (found[rank] for rank in group) if s is not None]
                for rank in group:
                    a, b = self.bounds[rank]
                    wanted = self.compressor.summary(b - a) if b > a else None
                    if wanted is not None:
                        found[rank] = functools.reduce(np.add if wanted.operator == "sum" else np.maximum, of_group)
        return found

    def payload(self, rank: int, first: int, x: np.ndarray, summary: np.ndarray | None) -> np.ndarray:
        assert self.compressor is not None
        payload = np.empty(self.compressor.nbytes(x.size), np.uint8)
        context = self.keys.context(rank, self.points, first)
        context.summary, context.ranks, context.share = summary, self.averaged, x.size / self.keys.n
        compressor = self.compressor if self.points == 0 else self.compressor.again()
        compressor.encode(x, payload, None, context)
        return payload

    def decode(self) -> None:
        assert self.compressor is not None
        for rank, copies in enumerate(self.copies):
            for number, copy in enumerate(copies):
                add = self.compressor.decode_add if number else self.compressor.decode
                for a, b, payload in copy:
                    add(payload, self.dense[rank][a:b])
            pieces = copies[0] if copies else []
            a, b = (pieces[0][0], pieces[-1][1]) if pieces else (0, 0)
            self.dense[rank][a:b] /= np.float32(self.divisor)
            self.compressor.conclude(self.dense[rank][a:b])
            self.bounds[rank] = (a, b)
        self.packed = False

    def collective(self, step: Collective, group: Sequence[int]) -> None:
        if self.packed:
            self.move_payloads(step, group)
        elif step.op == "allgather":
            self.join(group)
        else:
            self.reduce(step, group)

    def move_payloads(self, step: Collective, group: Sequence[int]) -> None:
        held = [self.copies[rank] for rank in group]
        if step.op == "allreduce":
            self.sum_payloads(group)
        elif step.op == "alltoall":
            count = self.pieces(step.level)
            for j, rank in enumerate(group):
                self.copies[rank] = [
                    copy[j * (len(copy) // count) : (j + 1) * (len(copy) // count)] for h in held for copy in h
                ]
        elif step.level in self.scattered:
            joined = [[p for h in held if c < len(h) for p in h[c]] for c in range(max(map(len, held)))]
            for rank in group:
                self.copies[rank] = joined
        else:
            for rank in group:
                self.copies[rank] = [copy for h in held for copy in h]

    def sum_payloads(self, group: Sequence[int]) -> None:
        """Payloads of one part each; what follows the header is added up."""
        assert self.compressor is not None and self.compressor.element is not None
        pieces = [self.copies[rank][0] for rank in group]
        for position, (a, b, first) in enumerate(pieces[0]):
            header = self.compressor.header(b - a)
            bodies = [held[position][2][header:] for held in pieces]
            total = np.concatenate([first[:header], _total(bodies, self.compressor.element)])
            for rank in group:
                self.copies[rank] = [[(a, b, total)]]

    def join(self, group: Sequence[int]) -> None:
        whole = [self.bounds[rank] for rank in group if self.bounds[rank][1] > self.bounds[rank][0]]
        for target in group:
            for source in group:
                a, b = self.bounds[source]
                self.dense[target][a:b] = self.dense[source][a:b]
        for rank in group:
            self.bounds[rank] = (min(a for a, _ in whole), max(b for _, b in whole)) if whole else (0, 0)

    def reduce(self, step: Collective, group: Sequence[int]) -> None:
        a, b = self.bounds[group[0]]
        total = self.dense[group[0]][a:b].copy()
        for rank in group[1:]:
            total += self.dense[rank][a:b]
        total /= np.float32(self.topology.divisor(step.level))
        count = self.pieces(step.level)
        parts = _cut((a, b), count) + [(b, b)] * (len(group) - count) if step.op == "reduce_scatter" else None
        for j, rank in enumerate(group):
            self.bounds[rank] = parts[j] if parts else (a, b)
            self.dense[rank][a:b] = total

    def pieces(self, level: str) -> int:
        return {
            "flat": self.topology.size,
            "intra": self.topology.lanes,
            "inter": len(self.topology.machines),
        }[level]

    def after(self, step: Collective) -> None:
        if step.op in ("alltoall", "reduce_scatter"):
            self.scattered.append(step.level)
        joins = step.op == "allgather" and step.level in self.scattered
        if joins:
            self.scattered.remove(step.level)
        elif self.packed:
            self.divisor *= self.topology.divisor(step.level)


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
