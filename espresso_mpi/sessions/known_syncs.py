"""Calls of ``sync`` whose arrays, of numpy, are like those of a call before: how they were given, and what is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays.addresses import addresses
from ..arrays.buffers import adopt_gradient
from ..engine.batches import Batch
from ..engine.calls import PendingCall
from ..engine.sync_again import RepeatedSync
from .repeated import PLAIN, WRITABLE

_KNOWN = 256
"""Calls that are remembered at a time."""

_TRIED, _PAUSE = 3, 64
"""Failures after which a call is tried more rarely, and calls without a try from then on."""

_FIT, _ONE_TYPE = PLAIN | WRITABLE, {np.ndarray}


class KnownSync:
    """A ``sync`` as it was made before.

    Args:
        sync: makes it again.
        values: its arrays.
    """

    def __init__(self, sync: RepeatedSync, values: Sequence[np.ndarray]) -> None:
        self.sync = sync
        self._sizes = np.array([x.nbytes for x in values])
        self._flat = all(x.ndim == 1 for x in values)
        self._left_out = 0

    def arrays(self, values: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        """The arrays of a call, of the shapes of those before, flat; None: it is not to be made so.

        They must be contiguous and writable float32, and share no memory.
        """
        if self.sync.failures >= _TRIED and self._leaves_out():
            return None
        if not all(x.dtype == np.float32 and x.flags.num & _FIT == _FIT for x in values):
            return None
        if len(values) > 1 and not _are_apart(values, self._sizes):
            return None
        return list(values) if self._flat else [x.ravel() for x in values]

    def call(self, grads: Any, title: str) -> PendingCall:
        """The call itself."""
        return synced(grads, _given(grads)[1], self.sync.batch, title)

    def _leaves_out(self) -> bool:
        """Whether to leave out a try."""
        self._left_out = (self._left_out + 1) % _PAUSE
        return self._left_out > 0


class KnownSyncs:
    """The calls that a rank has made, by how their arrays were given."""

    def __init__(self) -> None:
        self._known: dict[Any, KnownSync] = {}

    def forget(self) -> None:
        """Other options decide from now on what is done with arrays."""
        self._known.clear()

    def find(self, grads: Any) -> tuple[KnownSync | None, list[np.ndarray]]:
        """The call with these arrays, and they; (None, []): there is none."""
        if not self._known:
            return None, []
        key, values = _given(grads)
        known = self._known.get(key) if key is not None else None
        arrays = None if known is None else known.arrays(values)
        return (None, []) if arrays is None else (known, arrays)

    def remember(self, grads: Any, call: PendingCall, make: Callable[[PendingCall], RepeatedSync | None]) -> None:
        """A call has ended well; ``make``: what makes it again, if anything does."""
        sync = make(call)
        if sync is None:
            return
        key, values = _given(grads)
        known = self._known.get(key)
        if key is None or (known is not None and known.sync.batch is call.batch):
            return
        if not all(x.dtype == np.float32 and x.size for x in values):
            return
        if type(key[0]) is tuple and not all(type(name) is str for name in key[0]):  # 1 and True would be the same
            return
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known[key] = KnownSync(sync, values)


def synced(grads: Any, arrays: Sequence[np.ndarray], batch: Batch, title: str) -> PendingCall:
    """The call of ``sync`` with some arrays, which a caller gave as ``grads``."""
    adopted = [adopt_gradient(spec.name, x) for spec, x in zip(batch.specs, arrays)]
    return PendingCall(("sync", ""), grads, adopted, batch, title=title)


def _given(grads: Any) -> tuple[tuple[Any, Any] | None, Sequence[Any]]:
    """What tells calls apart, and their arrays of numpy: alone, in a list or tuple, or in a dict; else (None, ())."""
    kind, values = type(grads), grads
    names: tuple[Any, ...] | int | None = None
    if kind is np.ndarray:
        values = (grads,)
    elif kind is dict:
        names, values = tuple(grads), list(grads.values())
    elif kind is list or kind is tuple:
        names = len(grads)
    else:
        return None, ()
    if set(map(type, values)) != _ONE_TYPE:
        return None, ()
    return (names, tuple([x.shape for x in values])), values


def _are_apart(values: Sequence[np.ndarray], sizes: np.ndarray) -> bool:
    """Whether no two arrays share memory; ``sizes``: their bytes."""
    begins = addresses(values)
    order = begins.argsort()
    begins, ends = begins[order], (begins + sizes)[order]
    return bool((ends[:-1] <= begins[1:]).all())
