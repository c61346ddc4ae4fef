"""Alltoall of payloads: every member sends piece j of its region to member j. The scatter of compressed data.

Each member sends (p-1)/p of its payload. Cost (p-1)·α + ((p-1)/p)·m·β.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..data.layout import Layout, Packed
from ..data.transfers import Sources
from .base import CollectiveContext, GatheringOp, register


@register
class Alltoall(GatheringOp):
    """Afterwards member j holds every contribution to piece j."""

    name = "alltoall"

    def sources(self, context: CollectiveContext, layouts: Sequence[Layout]) -> list[Sources]:
        """Member j gets group j of the parts of every copy; members beyond ``Topology.local_size`` get nothing."""
        pieces = context.topology.pieces(context.level)
        found: list[Sources] = []
        for j in range(len(layouts)):
            of_member: Sources = []
            for source, layout in enumerate(layouts):
                assert isinstance(layout, Packed)
                for copy in layout.copies:
                    each = len(copy) // pieces
                    of_member.append([(source, part) for part in copy[j * each : (j + 1) * each]] if j < pieces else [])
            found.append(of_member)
        return found

    @staticmethod
    def reference(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        pieces = [np.array_split(x, len(inputs)) for x in inputs]
        return [np.concatenate([p[j] for p in pieces]) for j in range(len(inputs))]
