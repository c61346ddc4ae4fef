"""Memory for arrays that all ranks of a node have mapped, so that sums read and write them where they lie.

A block has a part for every rank of the node; all ranks map all of it. It is a file without a name (``memfd``), which
the system frees with the last mapping: when no array in it is left, or its processes have ended in whatever way. The
mapping belongs to the arrays, so they outlive the session.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from espresso_mpi.arrays import device

from .joint_reads import NUMBER, OFFSET, PLACE, STRIDE

_PAGE = mmap.PAGESIZE
_GAP = 128
"""Bytes between parts beside whole pages, or equal places of all parts would compete in the caches."""

NOWHERE = np.zeros(PLACE, np.int64)
"""Says that an array lies in no block."""


class _Block(mmap.mmap):
    """A mapping that can be referred to weakly; it ends with the last array in it."""


class _Part(NamedTuple):
    """The part of a block that belongs to this rank.

    Attributes:
        begin, stop: addresses.
        number: of the block; stride: bytes from part to part.
    """

    begin: int
    stop: int
    number: int
    stride: int
    block: weakref.ref[_Block]


class Lies(NamedTuple):
    """Where an array lies.

    Attributes:
        place: as ``large_sums`` takes it.
        span: the block from where the array of the first rank begins, as elements of the array's type; empty if it is
            in no block.
    """

    place: np.ndarray
    span: np.ndarray


class SharedArrays:
    """The blocks that the ranks of a node have made.

    Args:
        local: mpi4py communicator of the node's ranks.
    """

    def __init__(self, local: Any) -> None:
        self._local, self._made = local, 0
        self._parts: list[_Part] = []  # by address
        self._begins: list[int] = []  # of these

    def make(self, nbytes: int) -> tuple[np.ndarray | None, str]:
        """Memory of which every rank gets so many bytes. Collective over the node.

        Returns:
            Flat uint8, the part of this rank; or None, on all of them, and why.
        """
        stride = -(-nbytes // _PAGE) * _PAGE + _GAP
        block, why = self._mapped(stride)
        problems = [problem for problem in self._local.allgather(why) if problem]
        if block is None or problems:
            return None, problems[0]
        self._made += 1
        memory = np.frombuffer(block, np.uint8, nbytes, self._local.rank * stride)
        begin = device.address(memory)
        living = [part for part in self._parts if part.block() is not None]
        self._parts = sorted([*living, _Part(begin, begin + nbytes, self._made, stride, weakref.ref(block))])
        self._begins = [part.begin for part in self._parts]
        return memory, ""

    @property
    def any(self) -> bool:
        """Whether there are blocks."""
        return bool(self._begins)

    def lies(self, x: np.ndarray, nowhere: np.ndarray) -> Lies:
        """Where a flat array lies.

        Args:
            nowhere: an empty array of its type.
        """
        found = self._found(x)
        if found is None:
            return Lies(NOWHERE, nowhere)
        part, block, offset = found
        place = np.empty(PLACE, np.int64)
        place[NUMBER], place[OFFSET], place[STRIDE] = part.number, offset, part.stride // x.itemsize
        return Lies(place, np.frombuffer(block, x.dtype, (len(block) - offset) // x.itemsize, offset))

    def joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray | None:
        """Flat arrays of one type as one that has all of their elements in their order.

        None: they do not lie so, one directly behind the other, in the part of this rank.
        """
        found = self._found(arrays[0])
        if found is None:
            return None
        part, block, offset = found
        begin = end = part.begin + offset
        for x in arrays:
            if x.size and device.begin_of(x) != end:
                return None
            end += x.nbytes
        if end > part.stop:
            return None
        kind = arrays[0].dtype
        return np.frombuffer(block, kind, (end - begin) // kind.itemsize, self._local.rank * part.stride + offset)

    def _found(self, x: np.ndarray) -> tuple[_Part, _Block, int] | None:
        """The part in which an array lies, and the byte of it at which it begins."""
        if not self._begins or not x.size:
            return None
        begin = device.begin_of(x)
        at = bisect_right(self._begins, begin) - 1
        part = self._parts[at]
        block = part.block() if at >= 0 and begin + x.nbytes <= part.stop else None
        return None if block is None or begin % x.itemsize else (part, block, begin - part.begin)

    def _mapped(self, stride: int) -> tuple[_Block | None, str]:
        """A new block, and what is wrong with it on this rank."""
        local, size = self._local, stride * self._local.size
        file, why = -1, ""
        try:
            if local.rank == 0:
                if size > _PAGE * os.sysconf("SC_PHYS_PAGES"):  # taking it would end in the killing of processes
                    raise OSError(f"{size} bytes are more than the node has")
                file = os.memfd_create("espresso_mpi")
                os.ftruncate(file, size)
        except (OSError, AttributeError) as error:
            why = f"no memory for all ranks of the node: {error}"
        told = local.bcast((os.getpid(), file, _identity(file), why))
        try:
            block = None if told[3] else self._map(told[0], told[1], told[2], stride)
            return block, told[3]
        except OSError as error:
            return None, f"no memory for all ranks of the node: {error.strerror}"
        finally:
            local.Barrier()  # all have opened it
            if file >= 0:
                os.close(file)

    def _map(self, process: int, file: int, identity: tuple[int, int], stride: int) -> _Block:
        """Map the file of another process, and take the memory of the own part, which may be more than there is."""
        rank, size = self._local.rank, self._local.size
        own = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        try:
            if _identity(own) != identity:
                raise OSError(0, "process numbers stand for other processes here (containers)")
            os.posix_fallocate(own, rank * stride, stride)
            return _Block(own, stride * size)
        finally:
            os.close(own)


def _identity(file: int) -> tuple[int, int]:
    """Of an open file: the same for all processes of a node."""
    stat = os.fstat(file) if file >= 0 else None
    return (stat.st_dev, stat.st_ino) if stat else (0, 0)
