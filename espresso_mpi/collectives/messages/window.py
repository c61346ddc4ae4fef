"""Reductions and gathers inside a node through a shared memory window: our own kernels, each rank its slice.

The window has two halves that are used alternately, each with a row for every rank. Large data pass in chunks. Every
rank writes to its row, and after a barrier reads what it needs from the other rows. A sum is written to the row of the
rank that computed it, and a second barrier makes it visible. A half is written again only after a barrier in the other
half, which no rank reaches before it has read the first; so no further barrier is needed.

Chunks are short enough that what the ranks write stays in the processor's cache until it is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from espresso_mpi.arrays.addresses import addresses

from ..data import reduction
from . import large_sums, shared_memory
from .agreed import Agreed, How
from .joint import JointArray, JointRegions
from .joint_reads import NUMBER
from .shared_arrays import NOWHERE, Lies, SharedArrays
from .sum_calls import SMALL, AgreedSums, ValueCheck
from .waiting import Waiter
from .window_kernels import WindowKernels, require_read
from .window_places import ALIGN as _ALIGN
from .window_places import BEHIND_HEADER, SLOT
from .window_places import CHUNK as _CHUNK

if TYPE_CHECKING:
    from ..data.transfers import Transfer

_BYTE = np.dtype(np.uint8)
_PAGE = 4096
Bounds = Sequence[tuple[int, int]]


class _Rows(NamedTuple):
    """A piece of every rank's row in a half, in elements of one type."""

    flat: np.ndarray
    start: int
    stride: int

    def __call__(self, rank: int, a: int, b: int) -> np.ndarray:
        """Elements [a, b) of a rank's row."""
        at = self.start + rank * self.stride
        return self.flat[at + a : at + b]

    def span(self, a: int) -> np.ndarray:
        """The memory from element ``a`` of the first row on: rows are ``stride`` apart."""
        return self.flat[self.start + a :]


class SharedWindow(WindowKernels):
    """The window of one node's ranks. Collective to make; every method is called by all, in the same order.

    Args:
        local: mpi4py communicator of the node's ranks.
        half_bytes: bytes of a rank's row for large data.
        waiter: how to wait for the others.
        ranks: world ranks of the members, for messages.
    """

    def __init__(self, local: Any, half_bytes: int, waiter: Waiter, ranks: Sequence[int]) -> None:
        from mpi4py import MPI

        self._waiter, self._ranks, self._me, self._count = waiter, tuple(ranks), local.rank, local.size
        self._half = -(-half_bytes // _ALIGN) * _ALIGN
        self._stride = _stride(self._half)
        flags, size = local.size * shared_memory.LINE, window_size(half_bytes, local.size)
        self._win = MPI.Win.Allocate_shared(size if local.rank == 0 else 0, 1, comm=local)
        self._win.Lock_all(MPI.MODE_NOCHECK)
        memory = np.asarray(self._win.Shared_query(0)[0]).view(np.uint8)
        memory = memory[-memory.ctypes.data % _PAGE :]  # the same on every rank: maps begin at pages
        self._flags, self._memory = memory[:flags].view(np.int64), memory[flags : size - _PAGE]
        self._known: dict[tuple[np.dtype[Any], int, int], _Rows] = {}
        self._sums: dict[tuple[np.dtype[Any], How], AgreedSums] = {}
        self._epoch = self._uses = 0
        self.bytes_sent, self.arrays = 0, SharedArrays(local)
        if local.rank == 0:
            self._flags[:] = 0
        local.Barrier()

    def reduce_scatter(
        self, x: np.ndarray, dtype: str, regions: Bounds, reduce_op: reduction.ReduceOp, own: np.ndarray | None = None
    ) -> int:
        """``x[region j] = reduced over the ranks`` at rank j; the rest stays. Returns how many integers saturated.

        Args:
            own: receives the sum in place of this rank's region of x, with whose values it comes; all ranks or none.
        """
        if reduce_op.operator == "max":
            self._reduce_small(x[regions[0][0] : regions[-1][1]], dtype, reduce_op)  # summaries are small
            return 0
        mine = x[slice(*regions[self._me])] if own is None else own
        if reduce_op.combine is not None:
            self._combine(x, dtype, regions, reduce_op, mine)
            return 0
        how = reduction.arithmetic(reduce_op.divisor, dtype)
        if own is None and self._may_read(x, regions):
            self._by_reads([x], JointRegions.of([regions]), how)
            saturated = 0  # only integers are cut
        else:
            log = self._by_chunks(shared_memory.reduce_scatter, x, regions, self._room(x, self._count), mine, how)
            saturated = int(log[shared_memory.SATURATED])
        self.bytes_sent += sum(b - a for j, (a, b) in enumerate(regions) if j != self._me) * x.itemsize
        return saturated

    def allgather(self, x: np.ndarray, regions: Bounds) -> None:
        """Every rank's region of x at every rank."""
        if self._may_read(x, regions):
            self._by_reads([x], JointRegions.of([regions]))
        else:
            self._by_chunks(shared_memory.allgather, x, regions, self._room(x, 1))
        a, b = regions[self._me]
        self.bytes_sent += (b - a) * x.itemsize * (self._count - 1)

    def reduce_scatter_joint(self, arrays: Sequence[np.ndarray], regions: JointRegions, divisor: float) -> None:
        """As ``reduce_scatter`` for each of several float32 arrays."""
        how = reduction.arithmetic(divisor, "float32")
        if self.reads_memory(4 * regions.total, len(arrays)):
            self._by_reads(arrays, regions, how)
        else:
            self._joint(shared_memory.scatter_joint, arrays, regions, self._room(arrays[0], self._count), how)
        self.bytes_sent += (regions.total - regions.elements(self._me)) * arrays[0].itemsize

    def allgather_joint(self, arrays: Sequence[np.ndarray], regions: JointRegions) -> None:
        """As ``allgather`` for each of several float32 arrays."""
        if self.reads_memory(4 * regions.total, len(arrays)):
            self._by_reads(arrays, regions)
        else:
            self._joint(shared_memory.gather_joint, arrays, regions, self._room(arrays[0], 1))
        self.bytes_sent += regions.elements(self._me) * arrays[0].itemsize * (self._count - 1)

    def allreduce(self, x: np.ndarray, dtype: str, region: tuple[int, int], reduce_op: reduction.ReduceOp) -> int:
        """``x[region] = reduced over the ranks`` at every rank. Returns how many integers of its share saturated."""
        part = x[region[0] : region[1]]
        if part.nbytes <= SMALL or reduce_op.operator == "max":
            saturated = self._reduce_small(part, dtype, reduce_op)
            return saturated if self._me == 0 else 0  # all have seen the same ones
        if reduce_op.combine is not None:
            self._combine_everywhere(part, dtype, reduce_op)
            return 0
        return self._reduce_large(part, dtype, reduce_op, readers=range(self._count))

    def allreduce_joint(self, joint: JointArray, how: How) -> int:
        """Each array becomes the sum of those of all ranks. Returns how many integers of its share saturated.

        Args:
            how: from ``reduction.arithmetic``.
        """
        nowhere = self.elements(joint.arrays[0].dtype)[:0]
        return self._sum_large(nowhere, joint, Lies(NOWHERE, nowhere), how, range(self._count))

    def reduce(
        self, x: np.ndarray, dtype: str, region: tuple[int, int], reduce_op: reduction.ReduceOp, root: int
    ) -> int:
        """``x[region] = reduced over the ranks`` at member ``root``; elsewhere it is undefined afterwards.

        Returns as ``allreduce``.
        """
        if reduce_op.operator != "sum":
            return self.allreduce(x, dtype, region, reduce_op)
        return self._reduce_large(x[region[0] : region[1]], dtype, reduce_op, readers=range(root, root + 1))

    def broadcast(self, x: np.ndarray, region: tuple[int, int], root: int) -> None:
        """``x[region]`` of member ``root`` at every rank."""
        empty = (region[0], region[0])
        self.allgather(x, [region if j == root else empty for j in range(self._count)])

    def exchange(self, source: np.ndarray, target: np.ndarray, incoming: Sequence[Transfer], longest: int) -> None:
        """Bytes of the members' source buffers into their target buffers; all flat uint8.

        Args:
            incoming: what this member gets, its own bytes included; places in bytes.
            longest: bytes of the largest source buffer of any member, the same on every rank.
        """
        for t in incoming:
            if t.source == self._me:
                own = source[t.source_offset : t.source_offset + t.nbytes]
                target[t.target_offset : t.target_offset + t.nbytes] = own
        room = self._room(source, 1)
        for first in range(0, longest, room):
            rows = self._rows(_BYTE)
            piece = source[first : first + room]
            rows(self._me, 0, piece.size)[:] = piece
            self._barrier()
            for t in incoming:
                if t.source != self._me:
                    self.bytes_sent += _take(target, rows, t, first, room)

    def gather(self, mine: np.ndarray, out: np.ndarray, sizes: np.ndarray) -> None:
        """The bytes of every member at every member.

        Args:
            mine: flat uint8, at most ``SLOT``; lengths may differ.
            out: flat uint8 with equal room for every member, which receives its bytes at the start of it.
            sizes: int64 of shape (members,); receives their lengths.
        """
        half, rows = self._uses % 2, self._rows(_BYTE, 0)
        self.bytes_sent += mine.size * (self._count - 1)
        room = out.size // self._count
        self._run(shared_memory.gather, 1, mine, out, room, sizes, rows.flat, rows.start, rows.stride, half)

    def agreed_allreduce(self, header: np.ndarray, ignored: int, x: np.ndarray, how: How, check: ValueCheck) -> Agreed:
        """See ``AgreedSums.reduce``; ``how``: from ``reduction.arithmetic``."""
        sums = self._agreed(x.dtype, how)
        return sums.done() if sums.reduce(header, ignored, x, check=check) else sums.finish()

    def agreed_allreduce_joint(
        self, header: np.ndarray, ignored: int, joint: JointArray, how: How, check: ValueCheck
    ) -> Agreed:
        """As ``agreed_allreduce``, of several arrays."""
        sums = self._agreed(joint.arrays[0].dtype, how)
        return sums.done() if sums.reduce_joint(header, ignored, joint, check) else sums.finish()

    @property
    def handle(self) -> Any:
        """mpi4py's window, locked for all."""
        return self._win

    def free(self) -> None:
        """Give the memory back. Collective over the node."""
        self._win.Unlock_all()
        self.forget_places()
        del self._flags, self._memory, self._known, self._sums
        self._win.Free()

    def _agreed(self, dtype: np.dtype[Any], how: How) -> AgreedSums:
        sums = self._sums.get((dtype, how))
        if sums is None:
            sums = self._sums[dtype, how] = AgreedSums(self, self._waiter, dtype, how)
        return sums

    def _reduce_small(self, x: np.ndarray, dtype: str, reduce_op: reduction.ReduceOp) -> int:
        """Each rank sums all rows; what does not fit a slot in pieces."""
        saturated, room = 0, (SLOT - BEHIND_HEADER) // x.itemsize
        for first in range(0, x.size, room):
            part = x[first : first + room]
            rows = self._rows(x.dtype, BEHIND_HEADER)
            if reduce_op.operator != "sum":
                rows(self._me, 0, part.size)[:] = part
                self._barrier()
                self._reduce(part, rows, 0, reduce_op, dtype)
            else:
                how = reduction.arithmetic(reduce_op.divisor, dtype)
                log = self._run(shared_memory.reduce_small, 1, part, rows.flat, rows.start, rows.stride, how)
                saturated += int(log[shared_memory.SATURATED])
        self.bytes_sent += x.nbytes * (self._count - 1)
        return saturated

    def _reduce_large(self, x: np.ndarray, dtype: str, reduce_op: reduction.ReduceOp, readers: range) -> int:
        """Every rank sums its share of it, and the readers get the shares of the others."""
        if x.size == 0:
            return 0
        how, lies = reduction.arithmetic(reduce_op.divisor, dtype), self.arrays.lies(x, self.elements(x.dtype)[:0])
        return self._sum_large(x, JointArray.of([x]), lies, how, readers)

    def _sum_large(self, x: np.ndarray, joint: JointArray, lies: Lies, how: How, readers: range) -> int:
        """The joint array, of which x is the only part or which is in no block; arguments as of ``_reduce_large``."""
        first = joint.arrays[0]
        _, (rows, starts, room, stride) = self._chunks(first.dtype, joint.size, self._room(first, 1))
        reads, place = self._me in readers, lies.place
        if not place[NUMBER] and joint.nbytes >= self.read_limit and joint.places.nbytes <= self._half:
            place = self.readable
        with self._kept(joint.arrays):
            log = self._run(large_sums.reduce_large, 0, x, joint.places, joint.edges, place, lies.span, rows, starts,
                            room, stride, how, reads)  # fmt: skip
        self._epoch += int(log[shared_memory.STAGE])
        require_read(log)
        mine = joint.nbytes // self._count  # to a cache line
        self.bytes_sent += joint.nbytes - mine + mine * (len(readers) - reads)
        return int(log[shared_memory.SATURATED])

    def _combine(
        self, x: np.ndarray, dtype: str, regions: Bounds, reduce_op: reduction.ReduceOp, own: np.ndarray
    ) -> None:
        """As ``reduce_scatter``, by an operator that compiled code does not know."""
        room = self._room(x, self._count)
        for first in range(0, max(b - a for a, b in regions), room):
            rows = self._rows(x.dtype)
            for member, (a, b) in enumerate(regions):
                if member != self._me:
                    part = x[min(b, a + first) : min(b, a + first + room)]
                    rows(self._me, member * room, member * room + part.size)[:] = part
            self._barrier()
            self._reduce(own[first : first + room], rows, self._me * room, reduce_op, dtype)
        self.bytes_sent += sum(b - a for j, (a, b) in enumerate(regions) if j != self._me) * x.itemsize

    def _combine_everywhere(self, x: np.ndarray, dtype: str, reduce_op: reduction.ReduceOp) -> None:
        """Every rank reduces its share, and gets those of the others."""
        share = -(-x.size // self._count)
        shares = [(min(x.size, j * share), min(x.size, (j + 1) * share)) for j in range(self._count)]
        self._combine(x, dtype, shares, reduce_op, x[slice(*shares[self._me])])
        self.allgather(x.view(np.uint8), [(a * x.itemsize, b * x.itemsize) for a, b in shares])

    def _by_chunks(
        self, kernel: Callable[..., bool], x: np.ndarray, regions: Bounds, room: int, *how: Any
    ) -> np.ndarray:
        """Run a kernel that passes regions of x in chunks of ``room`` elements, with one barrier each."""
        longest = max((b - a for a, b in regions), default=0)
        chunks, place = self._chunks(x.dtype, longest, room)
        return self._run(kernel, chunks, x, np.array(regions, np.int64).reshape(-1), longest, *place, *how)

    def _joint(
        self, kernel: Callable[..., bool], arrays: Sequence[np.ndarray], regions: JointRegions, room: int, *how: Any
    ) -> None:
        """As ``_by_chunks``, for regions of several arrays."""
        chunks, place = self._chunks(arrays[0].dtype, regions.longest, room)
        self._run(kernel, chunks, addresses(arrays), regions.begins, regions.edges, regions.longest, *place, *how)

    def _chunks(self, dtype: np.dtype[Any], longest: int, room: int) -> tuple[int, tuple[Any, ...]]:
        """The number of chunks of ``room`` elements, and where kernels put them."""
        chunks = -(-longest // room)
        rows, other = self._rows(dtype), self._rows(dtype)
        self._uses += chunks  # having looked at both changed nothing; each chunk does
        return chunks, (rows.flat, (rows.start, other.start), room, rows.stride)

    def _reduce(self, out: np.ndarray, rows: _Rows, a: int, reduce_op: reduction.ReduceOp, dtype: str) -> int:
        """``out``, in place of elements [a, a + size) of this rank's row, reduced with those of the others."""
        return reduction.reduce_span(out, rows.span(a), rows.stride, self._count, self._me, reduce_op, dtype)

    def _room(self, x: np.ndarray, parts: int) -> int:
        """Elements of x a row takes at a time, in so many equal parts, each of them aligned."""
        return min(self._half, _CHUNK) // parts // x.itemsize // _ALIGN * _ALIGN

    def _rows(self, dtype: np.dtype[Any], at: int = SLOT) -> _Rows:
        """The rows in the half to use now, from a byte on; small data have a place of their own, before ``SLOT``."""
        key = (dtype, self._uses % 2, at)
        self._uses += 1
        rows = self._known.get(key)
        if rows is None:
            start = key[1] * self._count * self._stride + at
            flat = self._memory.view(dtype)
            rows = self._known[key] = _Rows(flat, start // dtype.itemsize, self._stride // dtype.itemsize)
        return rows

    def _barrier(self) -> None:
        """Wait until all ranks have arrived as often as this one."""
        self._run(shared_memory.barrier, 1)


def _stride(half: int) -> int:
    """Bytes from row to row: one line more than needed, or equal places of all rows would compete in the caches."""
    return SLOT + half + _ALIGN


def window_size(half_bytes: int, count: int) -> int:
    """Bytes of shared memory that the window of so many ranks takes."""
    return _PAGE + count * (shared_memory.LINE + 2 * _stride(-(-half_bytes // _ALIGN) * _ALIGN))


def _take(target: np.ndarray, rows: _Rows, t: Transfer, first: int, room: int) -> int:
    """Copy what a chunk brings of a transfer; returns the number of bytes."""
    a, b = max(first, t.source_offset), min(first + room, t.source_offset + t.nbytes)
    if a >= b:
        return 0
    to = t.target_offset + a - t.source_offset
    target[to : to + b - a] = rows(t.source, a - first, b - first)
    return b - a


def shared_memory_free() -> int:
    """Bytes left where MPI keeps shared windows; a window beyond that would kill the process at first touch."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize
