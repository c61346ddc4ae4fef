"""The least time that a synchronisation could take: what its bytes cost on the busiest link, and in memory.

    bound = max(wire, memory)
    wire = bytes on the busiest link / the rate that a plain stream between nodes reaches in the same run
    memory = the least bytes that the ranks of a node must read and write / the rate that plain copies or sums reach
    in the same run

The least bytes of a step, in m bytes of result and over all members of its group together:

- encode: ``Compressor.encode_traffic`` of each part, without the residual's 8 bytes per element where there is none.
- decode: every payload once, the values that they sum to once (4 bytes per element), and what the method's
  ``decode_traffic`` has beyond a payload and 8 bytes per element.
- reduce_scatter or reduce over k members: each contribution read once, the result written once: (k + 1)·m.
- allreduce: that, and each of the other k - 1 members reads and writes the result: (k + 1)·m + 2(k - 1)·m.
- all else moves bytes: read where they are, written where they go, 2 for each byte that goes to another member.
- contributions that come from other nodes are also written where they arrive and read where they leave: 2 more.

Staging, the kernel's network stack and copies into shared memory are not in it: an implementation may do without, and
does not reach the bound if it does not. Caches may serve a part of the bytes, so that tensors which fit into them can
be below it. On the emulated cluster all nodes share one memory: the bytes of all ranks count together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..cluster import launch
from ..collectives.data.layout import PAYLOAD_ITEMSIZE, Dense, Packed, Part, Topology
from ..collectives.executor import compressor_at
from ..collectives.messages.topology import discover
from ..collectives.messages.transport import MESSAGE_BYTES
from ..collectives.ops.base import operations
from ..collectives.program import DecodeStep, EncodeStep, MoveStep, ProgramStep, compile_route
from ..compressors import Compressor
from ..types import SUMS, Route

_STREAM_SECONDS = 0.15
"""How long a stream lasts at least: a lab's link that has paused lets 2 ms of data pass unthrottled, here 1.3 %."""

_STREAM_FIRST, _STREAM_MOST = 1 << 20, 64 << 20
"""Bytes of the shortest and of the longest stream."""

_COPY_LEAST = 64 << 20
"""Bytes that a rank copies at least for one measurement: a few small copies are shorter than a barrier's skew."""

_COPY_SMALLEST = 64 << 10
"""Bytes of the smallest array that is copied: below, numpy's call takes longer than the copy."""


@dataclass(frozen=True)
class Bound:
    """Seconds below which neither the links nor the memory let a synchronisation come."""

    wire: float
    memory: float

    @property
    def seconds(self) -> float:
        """The larger of the two: they may overlap."""
        return max(self.wire, self.memory)


def bound(sent: Sequence[int], traffic: Sequence[int], topology: Topology, yardsticks: Yardsticks) -> Bound:
    """The bound of one synchronisation.

    Args:
        sent: bytes that each rank sends to other nodes.
        traffic: bytes that each rank reads and writes, see ``memory_traffic``.
    """
    busiest = busiest_link(topology, sent)
    wire = busiest / yardsticks.link if busiest and yardsticks.link else 0.0
    copies = zip(memory_domains(topology), yardsticks.copy)
    return Bound(wire, max(sum(traffic[rank] for rank in ranks) / rate for ranks, rate in copies))


def busiest_link(topology: Topology, sent: Sequence[int]) -> int:
    """Bytes that the node which sends most sends to others.

    Links carry both directions at once, and with two nodes one's arriving bytes are the other's leaving ones. With
    more, arriving bytes are not counted; routes that end at one node have more of them, so their bound is low.
    """
    return max(sum(sent[rank] for rank in ranks) for ranks in topology.nodes)


def memory_domains(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """The ranks that share a memory: those of a node; on the emulated cluster all, as it is one node."""
    return (tuple(range(topology.size)),) if os.environ.get("ESPRESSO_LAB") else topology.nodes


def topology_of(comm: Any) -> Topology:
    """Which ranks share a node. Collective."""
    topology, local = discover(comm)
    local.Free()
    return topology


# --- least bytes ------------------------------------------------------------------------------------------------------


def memory_traffic(
    route: Route, topology: Topology, n: int, compressor: Compressor | None = None, feedback: bool = True
) -> list[int]:
    """The least bytes that each rank must read and write to average n float32 along a route.

    What a member reads from the others' memory for its result counts as its own.

    Args:
        compressor: with its schedules settled; None for routes that do not encode.
        feedback: whether encodes read and write a residual.
    """
    compiled = [
        compile_route(route, topology, Dense(0, n), "float32", rank, compressor) for rank in range(topology.size)
    ]
    return [sum(_step_traffic(step, compressor, feedback) for step in steps) for steps in compiled]


def _step_traffic(step: ProgramStep, compressor: Compressor | None, feedback: bool) -> int:
    if isinstance(step, MoveStep):
        return _move_traffic(step)
    if isinstance(step, EncodeStep) and compressor is not None:
        method, residual = compressor_at(step.point, compressor), 0 if feedback else 8
        return sum(method.encode_traffic(_size(p)) - residual * _size(p) for p in _parts(step.packed))
    if isinstance(step, DecodeStep) and compressor is not None:
        method = compressor_at(step.point, compressor)
        payloads = sum(max(p.nbytes, method.decode_traffic(_size(p)) - 8 * _size(p)) for p in _parts(step.packed))
        return payloads + 4 * step.region.size
    return 0


def _move_traffic(step: MoveStep) -> int:
    move, node_of = step.move, step.move.context.topology.node_of
    if step.op not in SUMS:
        return 2 * operations()[step.op].sent(move)
    members = [r for r, state in zip(move.group, move.before) if _nbytes(state, move.dtype)]
    me = move.group[move.index]
    far = sum(node_of[rank] != node_of[me] for rank in members)
    after = operations()[step.op].advance(move.context, move.before)[move.index]
    result = _nbytes(after, move.dtype)
    if step.op != "allreduce":
        return result * (len(members) + 1 + 2 * far)
    # Every member ends with the whole result; summing it is shared out among them.
    return result * (len(members) + 1 + 2 * far + 2 * (len(members) - 1)) // max(1, len(members))


def _nbytes(state: Dense | Packed, dtype: str) -> int:
    """Bytes of what is summed: a dense region, or payloads without their headers."""
    if isinstance(state, Dense):
        return state.size * PAYLOAD_ITEMSIZE[dtype]
    return sum(part.nbytes - part.header for part in _parts(state))


def _parts(packed: Packed) -> list[Part]:
    return [part for copy in packed.copies for part in copy]


def _size(part: Part) -> int:
    return part.stop - part.start


# --- yardsticks, measured in the same run -----------------------------------------------------------------------------


class Yardsticks:
    """What a plain stream and a plain copy or sum reach while the methods are measured.

    Of the streams the quickest counts: a link has its rate, and a stream can only fall short of it where processors are
    busy. Of the copies it is the median: their speed varies both ways.

    Args:
        comm: all ranks. topology: of these ranks. nbytes: of the arrays that are copied.
    """

    def __init__(self, comm: Any, topology: Topology, nbytes: int) -> None:
        self._copy = _Copy(comm, topology, nbytes)
        self._stream = _Stream(comm, topology) if len(topology.nodes) > 1 else None
        self._rates: list[float] = []
        self._copies: list[list[float]] = []

    def measure(self) -> None:
        """Take both once more. Collective."""
        self._copies.append(self._copy.rates())
        if self._stream:
            self._rates.append(self._stream.rate())

    @property
    def link(self) -> float | None:
        """Bytes per second of a node's link, in each of its directions at the same time; None on one node."""
        return max(self._rates, default=None)

    @property
    def copy(self) -> list[float]:
        """Bytes per second that the ranks of each memory domain together read and write when all copy at once."""
        return [float(rate) for rate in np.median(np.array(self._copies), axis=0)]

    def close(self) -> None:
        """Give back what they hold. Collective."""
        self._copy.close()
        if self._stream:
            self._stream.close()


class _Stream:
    """One rank of each node sends to the next node's, all at once, as an exchange of gradients does.

    MPI may be quicker with one long message or with many short ones (see ``MESSAGE_BYTES``): the quicker counts.
    """

    def __init__(self, comm: Any, topology: Topology) -> None:
        self._comm = comm.Dup()
        self._leaders = [ranks[0] for ranks in topology.nodes]
        self._nbytes = _STREAM_FIRST
        self._buffers = (np.ones(0, np.uint8),) * 2
        self._seconds(MESSAGE_BYTES)  # the first message opens the connection
        while self._seconds(MESSAGE_BYTES) < _STREAM_SECONDS and self._nbytes < _STREAM_MOST:
            self._nbytes *= 2

    def rate(self) -> float:
        """Bytes per second of the slowest link."""
        return self._nbytes / min(self._seconds(MESSAGE_BYTES), self._seconds(self._nbytes))

    def close(self) -> None:
        self._comm.Free()

    def _seconds(self, longest: int) -> float:
        """Of the slowest pair, with messages of at most ``longest`` bytes."""
        from mpi4py import MPI

        self._comm.Barrier()
        start = time.perf_counter()
        if self._comm.rank in self._leaders:
            self._exchange(longest)
        seconds = time.perf_counter() - start
        _wait_idly(self._comm)
        return self._comm.allreduce(seconds if self._comm.rank in self._leaders else 0.0, MPI.MAX)

    def _exchange(self, longest: int) -> None:
        from mpi4py import MPI

        if self._buffers[0].size != self._nbytes:
            self._buffers = np.ones(self._nbytes, np.uint8), np.ones(self._nbytes, np.uint8)
        source, target = self._buffers
        place, count = self._leaders.index(self._comm.rank), len(self._leaders)
        cuts = [slice(i, i + longest) for i in range(0, self._nbytes, longest)]
        requests = [self._comm.Irecv(target[cut], self._leaders[place - 1]) for cut in cuts]
        requests += [self._comm.Isend(source[cut], self._leaders[(place + 1) % count]) for cut in cuts]
        MPI.Request.Waitall(requests)


def _wait_idly(comm: Any) -> None:
    """A barrier that leaves the cores to those who still work."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


class _Copy:
    """All ranks copy an array, or add it to another, at the same time, each with its share of the cores.

    The quicker counts: a copy of what is in no cache also reads the lines that it writes, which does not count.
    """

    def __init__(self, comm: Any, topology: Topology, nbytes: int) -> None:
        self._comm, self._domains = comm, memory_domains(topology)
        mine = next(ranks for ranks in self._domains if comm.rank in ranks)
        self._threads = launch.threads_per_rank(len(mine))
        self._pool = ThreadPoolExecutor(self._threads)
        copied = max(nbytes, _COPY_SMALLEST)
        self._source, self._target = (np.ones(copied // 4, np.float32) for _ in range(2))
        self._times = max(1, -(-_COPY_LEAST // copied))
        self.rates()  # wakes the threads

    def rates(self) -> list[float]:
        """Bytes per second that are read and written, of each memory domain."""
        return [max(both) for both in zip(self._rates(_copied, 2), self._rates(_added, 3))]

    def _rates(self, work: Callable[[np.ndarray, np.ndarray], None], passes: int) -> list[float]:
        pieces = list(zip(*(np.array_split(x, self._threads) for x in (self._target, self._source))))
        self._comm.Barrier()
        start = time.perf_counter()
        if self._threads == 1:
            self._repeated(work, pieces[0])
        else:
            list(self._pool.map(partial(self._repeated, work), pieces))
        spans = self._comm.allgather((start, time.perf_counter()))
        moved = passes * self._source.nbytes * self._times
        return [len(ranks) * moved / _together([spans[rank] for rank in ranks]) for ranks in self._domains]

    def _repeated(self, work: Callable[[np.ndarray, np.ndarray], None], piece: tuple[np.ndarray, np.ndarray]) -> None:
        for _ in range(self._times):
            work(*piece)

    def close(self) -> None:
        self._pool.shutdown()


def _copied(target: np.ndarray, source: np.ndarray) -> None:
    np.copyto(target, source)


def _added(target: np.ndarray, source: np.ndarray) -> None:
    np.add(target, source, out=target)


def _together(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds from the first start to the last stop; the ranks of a domain share a clock."""
    return max(stop for _, stop in spans) - min(start for start, _ in spans)
