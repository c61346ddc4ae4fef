"""The first steps of tensors that are dense before they are compressed: ``dense_steps`` of a session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..collectives.data.layout import Topology
from ..feedback import NO_FEEDBACK
from ..options import dense_strategy
from .batches import Batch


def without_compression(batch: Batch, steps: int, counts: Mapping[str, int], topology: Topology) -> Batch:
    """The batch with those tensors dense that were synchronised fewer than ``steps`` times; itself if there is none.

    Args:
        counts: number of synchronisations of each tensor; the same on every rank, because calls start in one order.
    """
    if not any(item.gradual and counts[item.spec.name] < steps for item in batch.items):
        return batch
    dense = dense_strategy(topology)
    items = [
        replace(item, strategy=dense, compressor=None, feedback=NO_FEEDBACK)
        if item.gradual and counts[item.spec.name] < steps
        else item
        for item in batch.items
    ]
    return replace(batch, items=tuple(items))


def count_dense(
    batches: Sequence[Batch], now: Sequence[Batch], skips: Sequence[frozenset[int]], counts: Counter[str]
) -> None:
    """Count the dense steps that begin. Those of compressed tensors are counted where they begin."""
    for batch, other, skip in zip(batches, now, skips):
        for item, changed in zip(batch.items, other.items):
            if changed is not item and item.index not in skip:
                counts[item.spec.name] += 1
