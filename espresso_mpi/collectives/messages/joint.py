"""The regions of a node's ranks in several arrays, which count as one region of each rank, one after the other.

A chunk of the shared window holds parts of as many arrays as fit. So small arrays share barriers, and they are copied
into the window only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from espresso_mpi.arrays import device

Bounds = Sequence[tuple[int, int]]


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


def addresses(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Where flat arrays begin in memory; they must outlive the use of it."""
    return np.array([device.begin_of(array) for array in arrays], np.int64)
