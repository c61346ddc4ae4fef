"""Gather of payloads: one member, the root, ends with the payloads of all; the others with nothing.

Each member sends all it has, s bytes, to the root. Cost (p-1)·α + (p-1)·s·β at the root.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..data.layout import Layout, Packed
from ..data.transfers import Sources
from .base import CollectiveContext, GatheringOp, register


@register
class Gather(GatheringOp):
    """The copies multiply at the root, to be summed by a decode there or, after a broadcast, everywhere."""

    name = "gather"

    def sources(self, context: CollectiveContext, layouts: Sequence[Layout]) -> list[Sources]:
        """The root gets every part of every copy, the others nothing."""
        packed = [s for s in layouts if isinstance(s, Packed)]
        everything = [[(source, part) for part in copy] for source, s in enumerate(packed) for copy in s.copies]
        return [everything if member == context.root else [[]] for member in range(len(layouts))]

    @staticmethod
    def reference(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate(list(inputs)), *[np.empty(0)] * (len(inputs) - 1)]
