"""The first steps of tensors that are dense before they are compressed: ``dense_steps`` of a session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..collectives.data.layout import Topology
from ..feedback import NO_FEEDBACK
from ..options import dense_strategy
from ..types import Strategy
from .batches import Batch


def begun(
    batches: Sequence[Batch], skips: Sequence[frozenset[int]], steps: int, counts: Counter[str], topology: Topology
) -> Sequence[Batch]:
    """The batches of calls that begin, with those tensors dense that have had fewer than ``steps`` synchronisations.

    Args:
        skips: the positions of the tensors of each batch that are skipped: they do not count.
        counts: number of synchronisations of each tensor; the same on every rank, because calls start in one order.
            Dense steps are added; those of compressed tensors are counted where they begin.

    Returns:
        ``batches`` itself if there is no such tensor.
    """
    if not steps or not any(
        item.gradual and counts[item.spec.name] < steps for batch in batches for item in batch.items
    ):
        return batches
    dense = dense_strategy(topology)
    found = [_without_compression(batch, steps, counts, dense) for batch in batches]
    for batch, now, skip in zip(batches, found, skips):
        for item, other in zip(batch.items, now.items):
            if other is not item and item.index not in skip:
                counts[item.spec.name] += 1
    return found


def _without_compression(batch: Batch, steps: int, counts: Mapping[str, int], dense: Strategy) -> Batch:
    items = [
        replace(item, strategy=dense, compressor=None, feedback=NO_FEEDBACK)
        if item.gradual and counts[item.spec.name] < steps
        else item
        for item in batch.items
    ]
    return replace(batch, items=tuple(items))
