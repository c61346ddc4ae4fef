"""What a synchronisation must yield, worked out without MPI: all ranks of a route in one process, with plain numpy.

Sums are taken in float32 in rank order, as the executor does, so that a compressed result is comparable bit for bit.
Written apart from the schedules that the executor runs, so that a mistake there shows here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..collectives.layout import ALIGN, Topology
from ..compressors import Compressor
from ..options import DEFAULT_SEGMENT
from ..types import Collective, Encode, Route, Step

Piece = tuple[int, int, np.ndarray]
"""Elements [start, stop) and their payload."""


def synchronised(
    route: Route,
    topology: Topology,
    inputs: Sequence[np.ndarray],
    compressor: Compressor | None,
    segment_bytes: int = DEFAULT_SEGMENT,
) -> list[np.ndarray]:
    """The result on every rank of averaging float32 ``inputs`` (one a rank) along a route, without feedback."""
    n = inputs[0].size
    several = len(topology.machines) > 1 and segment_bytes > 0
    nbytes = compressor.nbytes(n) if compressor else 4 * n
    pieces = _cut((0, n), max(1, min(round(nbytes / segment_bytes), -(-n // ALIGN))) if several else 1)
    results = [_Simulation(route, topology, [x[a:b] for x in inputs], compressor).run() for a, b in pieces]
    return [np.concatenate(pieces) for pieces in zip(*results)]


class _Simulation:
    def __init__(
        self, route: Route, topology: Topology, inputs: Sequence[np.ndarray], compressor: Compressor | None
    ) -> None:
        self.route, self.topology, self.compressor = route, topology, compressor
        self.dense = [x.copy() for x in inputs]
        self.bounds = [(0, x.size) for x in inputs]
        self.copies: list[list[list[Piece]]] = [[] for _ in inputs]
        self.divisor, self.scattered, self.packed = 1.0, list[str](), False

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
        cuts = [self.pieces(s.level) for s in later[:decode] if isinstance(s, Collective) and s.op == "alltoall"]
        for rank, x in enumerate(self.dense):
            pieces = [self.bounds[rank]]
            for count in cuts:
                pieces = [piece for whole in pieces for piece in _cut(whole, count)]
            self.copies[rank] = [[(a, b, self.payload(x[a:b])) for a, b in pieces]]
        self.packed, self.divisor = True, 1.0

    def payload(self, x: np.ndarray) -> np.ndarray:
        assert self.compressor is not None
        payload = np.empty(self.compressor.nbytes(x.size), np.uint8)
        self.compressor.encode(x, payload)
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
        if step.op == "alltoall":
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
