"""Several arrays that count as one, one after the other, where they pass the shared window of a node.

A chunk of the window holds parts of as many arrays as fit. So small arrays share barriers, and they are copied into the
window only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from espresso_mpi.arrays.addresses import addresses

Bounds = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class JointArray:
    """Arrays of one element type, each of which has elements.

    Attributes:
        arrays: flat, on the host.
        places: int64 of shape (arrays,): where they begin in memory.
        edges: int64 of shape (arrays + 1,): where each begins in the joint array, and where that ends.
    """

    arrays: Sequence[np.ndarray]
    places: np.ndarray
    edges: np.ndarray

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> JointArray:
        """From the arrays, which live on with it."""
        edges = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([array.size for array in arrays], out=edges[1:])
        return cls(arrays, addresses(arrays), edges)

    @property
    def aligned(self) -> bool:
        """Whether all begin at a multiple of the size of their elements."""
        return not (self.places % self.arrays[0].itemsize).any()

    @property
    def size(self) -> int:
        """Elements of all arrays."""
        return int(self.edges[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.size * self.arrays[0].itemsize


@dataclass(frozen=True)
class JointRegions:
    """The regions of the members of a group in several arrays.

    Attributes:
        begins: int64 of shape (arrays, members): where each member's region begins in each array.
        edges: int64 of shape (arrays + 1, members): the same in the order in which they count as one.
    """

    begins: np.ndarray
    edges: np.ndarray

    @classmethod
    def of(cls, regions: Sequence[Bounds]) -> JointRegions:
        """From (begin, end) of each member's region in each array."""
        bounds = np.array(regions, np.int64).reshape(len(regions), -1, 2)
        sizes = bounds[:, :, 1] - bounds[:, :, 0]
        edges = np.concatenate([np.zeros((1, sizes.shape[1]), np.int64), np.cumsum(sizes, axis=0)])
        return cls(np.ascontiguousarray(bounds[:, :, 0]), edges)

    @property
    def longest(self) -> int:
        """Elements of the member that has most."""
        return int(self.edges[-1].max())

    def elements(self, member: int) -> int:
        """Elements of a member."""
        return int(self.edges[-1, member])

    @property
    def total(self) -> int:
        """Elements of all members."""
        return int(self.edges[-1].sum())
