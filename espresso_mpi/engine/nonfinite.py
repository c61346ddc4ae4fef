"""What is done about NaN, infinity, and values too large to be summed: found when a call comes in, settled together."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

import numpy as np

from ..arrays import device
from ..arrays.buffers import Gradient
from ..collectives import ranges
from ..collectives.data import reduction
from ..collectives.messages.transport import Transport
from ..errors import NonFiniteError
from ..tracing.recording import Recorder
from .batches import Batch
from .calls import Unit
from .diagnostics import Content, non_finite_text
from .guard import Check

_LOG = logging.getLogger("espresso_mpi")


class NonFinite:
    """Values that are not finite, and what becomes of their calls.

    Attributes:
        skipped: how often each tensor was left out; skipped_calls: how many calls were, as wholes.
    """

    def __init__(self, transport: Transport, recorder: Recorder) -> None:
        self._transport, self._recorder = transport, recorder
        self._search = ranges.Search(transport.topology)
        self.skipped: Counter[str] = Counter()
        self.skipped_calls = 0

    def look_for(self, unit: Unit, batch: Batch) -> None:
        """NaN and infinity (or what is that in the float32 of a compressor), and values too large to be summed."""
        start = time.perf_counter()
        unit.bad = self._search.odd_values(batch.portions, [gradient.array for gradient in unit.gradients])
        self._recorder.add("check", "", 0, 0, start, time.perf_counter())

    def settle(
        self, unit: Unit, said: dict[int, dict[str, str]], content: Content, policy: str
    ) -> frozenset[int] | None:
        """Positions to skip; None if the call fails.

        Args:
            said: by rank, what is odd about its values; content: of the call; policy: ``nonfinite`` of the session.
        """
        bad, unit.large = ranges.told_apart(said)
        if not bad:
            return frozenset()
        text = non_finite_text(content, bad, self._transport.describe)
        if policy == "raise":
            unit.error = NonFiniteError(
                text + "; lower the loss scale or the learning rate, or pass nonfinite='skip', or 'skip_all' if a loss "
                "scaler is to hear of it"
            )
            return None
        skip, how = frozenset(int(position) for counts in bad.values() for position in counts), "skipped"
        if policy == "skip_all" and unit.batch is not None:
            skip, how = frozenset(item.index for item in unit.batch.items), "skipped with all tensors of the call"
            self.skipped_calls += 1
        for position in skip:
            self.skipped[unit.gradients[position].spec.name] += 1
        if self._transport.rank == 0:
            _LOG.warning("%s: %s: %s", unit.title, how, text)
        return skip


def blank(gradient: Gradient, check: Check | None, policy: str) -> None:
    """Write what a tensor that is skipped becomes."""
    if check is not None:
        check("before it was skipped")
    array, value = gradient.array, np.nan if policy == "skip_all" else 0.0
    filled: Any = reduction.filled(array.size, value, str(gradient.spec.dtype))
    device.copy(array, filled)
