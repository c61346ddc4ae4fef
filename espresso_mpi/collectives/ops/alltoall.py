"""Alltoall of payloads: every member sends piece j of its region to member j. The scatter of compressed data.

Each member sends (p-1)/p of its payload. Cost (p-1)·α + ((p-1)/p)·m·β.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..data.layout import Layout, Packed
from ..data.transfers import Wish
from .base import CollectiveContext, DealingOp, register


@register
class Alltoall(DealingOp):
    """Afterwards member j holds every contribution to piece j."""

    name = "alltoall"

    def wishes(self, context: CollectiveContext, states: Sequence[Layout]) -> list[Wish]:
        """Member j wants group j of the parts of every copy; members beyond ``Topology.local_size`` want nothing."""
        pieces = context.topology.pieces(context.level)
        wishes: list[Wish] = []
        for j in range(len(states)):
            wish: Wish = []
            for source, state in enumerate(states):
                assert isinstance(state, Packed)
                for copy in state.copies:
                    each = len(copy) // pieces
                    wish.append([(source, part) for part in copy[j * each : (j + 1) * each]] if j < pieces else [])
            wishes.append(wish)
        return wishes

    @staticmethod
    def reference(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        pieces = [np.array_split(x, len(inputs)) for x in inputs]
        return [np.concatenate([p[j] for p in pieces]) for j in range(len(inputs))]
