"""The steps of buckets: which is the next one, and the job that runs it."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

from ..collectives.job import Job
from ..state.store import SyncState
from .batches import Bucket

_LOG = logging.getLogger("espresso_mpi")


class Jobs:
    """Counts the steps of buckets.

    Args:
        tally: receives counts of values that were clipped.
        warns: whether this rank logs that a residual was dropped.
    """

    def __init__(self, tally: Counter[str], warns: bool) -> None:
        self._tally, self._warns = tally, warns
        self._dense_steps: Counter[str] = Counter()
        self._state: Callable[[], SyncState | None] = lambda: None
        """A weak reference to the state of the latest step."""
        self._used: tuple[int, set[tuple[str, int]]] = 0, set()
        """What was used, with its size, since this state has changed the last time: it is noted already."""

    def job(self, bucket: Bucket, step: int, state: SyncState, seed: int) -> Job:
        """The job of a step of a bucket."""
        name = bucket.store_name
        return Job(bucket.name, state.store, bucket.feedback, seed, step, state.weights, self._tally, name)

    def count(self, bucket: Bucket, state: SyncState) -> int:
        """Count the next step of a bucket; returns its number."""
        counts = self._dense_steps if bucket.compressor is None else state.counts
        step = counts[bucket.name]
        counts[bucket.name] += 1
        if bucket.compressor is not None:
            self.use(bucket, state)
        return step

    def use(self, bucket: Bucket, state: SyncState) -> None:
        """Note that a compressed bucket is about to be used with its size."""
        changes, same = self._used
        if self._state() is not state or changes != state.changes:
            same = set()
        use = bucket.store_name, bucket.size
        if use in same:
            return
        before = state.changes
        self._warn_of_dropped(state.use(bucket.store_name, bucket.sizes))
        same = same if before == state.changes else set()
        same.add(use)
        self._state, self._used = weakref.ref(state), (state.changes, same)

    def count_all(self, names: Sequence[str], state: SyncState) -> list[int]:
        """As ``count`` for compressed tensors of which each had the size before that it has now."""
        counts = state.counts
        steps = [counts[name] for name in names]
        for name, step in zip(names, steps):
            counts[name] = step + 1
        return steps

    def _warn_of_dropped(self, dropped: tuple[str, int] | None) -> None:
        """Warn, once per session, that a residual was dropped."""
        if dropped is not None and self._warns:
            self._warns = False
            _LOG.warning(
                "%s has had too many sizes: the state of its oldest size, %d elements, is dropped, and so will be that "
                "of others; give tensors of different sizes different names, or do not compress them",
                *dropped,
            )
