"""NaN, infinity, values too large to be summed, and values that could break an error bound.

They are found when a call arrives, and handled on all ranks alike.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import device
from ..arrays.buffers import Gradient
from ..collectives import ranges
from ..collectives.data import reduction
from ..collectives.messages.sum_calls import NO_CHECK, ValueCheck
from ..collectives.messages.transport import Transport
from ..compressors.context import Context, Journey
from ..errors import BoundError, NonFiniteError
from ..tracing.recording import Recorder
from ..types import Encode
from .batches import Batch, Item
from .calls import PendingCall
from .diagnostics import Content, non_finite_text
from .guard import Check

_LOG = logging.getLogger("espresso_mpi")

_BEYOND = "cannot keep its error bound: "
"""How the findings begin that are no matter of the option ``nonfinite``: a tensor left out would break the bound."""


_CHECKS = 256
"""Batches of which it is kept how sums search their values."""

_TRIED = 3
"""How often ranks find that others make another call, or the same one in another way, before they search first."""


_NONE = frozenset[int]()


class NonFinite:
    """Finds values that are not finite, and decides what becomes of their calls.

    Attributes:
        skipped: how often each tensor was skipped.
        skipped_calls: how many calls were skipped as a whole.
    """

    def __init__(self, transport: Transport, recorder: Recorder) -> None:
        self._transport, self._recorder = transport, recorder
        self._search = ranges.Search(transport.topology)
        self._context = Context()
        self._checks: dict[int, tuple[Batch, ValueCheck]] = {}  # by id of the batch, alive
        self._not_made: Counter[int] = Counter()
        self.skipped: Counter[str] = Counter()
        self.skipped_calls = 0

    def begin(self, call: PendingCall) -> None:
        """Queue the search of the tensors of a call that are on a GPU, where all are ready; ``call.search`` tells."""
        if call.batch is not None and call.problem is None:
            call.search = self._search.begin(call.batch.portions, [gradient.array for gradient in call.gradients])

    def look_for(self, calls: Sequence[tuple[PendingCall, Batch]]) -> None:
        """Search calls for NaN, infinity (also after a conversion to float32), and values too large to be summed."""
        start = time.perf_counter()
        for call, batch in self._not_cleared(calls):
            self._look_for(call, batch)
        self._recorder.add("check", "", 0, 0, start, time.perf_counter())

    def _not_cleared(self, calls: Sequence[tuple[PendingCall, Batch]]) -> Sequence[tuple[PendingCall, Batch]]:
        """The calls that are left when one compiled call has searched those of a single array on the host."""
        single = [batch.portions if len(call.gradients) == 1 and not batch.bounded else () for call, batch in calls]
        clean = self._search.all_clean(single, [call.gradients[0].array for call, _ in calls if call.gradients])
        return () if clean else calls

    def _look_for(self, call: PendingCall, batch: Batch) -> None:
        arrays = [gradient.array for gradient in call.gradients]
        call.bad = self._search.odd_values(batch.portions, arrays, call.search)
        for item in batch.bounded:
            text = "" if str(item.index) in call.bad else self._refusal(item, call.gradients[item.index].array)
            if text:
                call.bad[str(item.index)] = _BEYOND + text

    def value_check(self, batch: Batch) -> ValueCheck:
        """How the sum of a call searches its values, in place of ``look_for``; not ``pending``: it does not."""
        if batch.bounded or batch.exact_dense or not batch.portions:
            return NO_CHECK
        known = self._checks.get(id(batch))
        if known is None:
            if len(self._checks) >= _CHECKS:
                self._checks.clear()
                self._not_made.clear()
            known = self._checks[id(batch)] = batch, ValueCheck(*self._search.common_limit(batch.portions))
        return known[1]

    def not_made(self, batch: Batch) -> None:
        """A call was not made in a round, because its values were still to be searched: it takes a round more."""
        self._not_made[id(batch)] += 1
        if self._not_made[id(batch)] == _TRIED:
            self._checks[id(batch)] = batch, ValueCheck(self.value_check(batch).limit)

    def finds_nothing(self, batch: Batch, x: np.ndarray) -> bool:
        """Whether the only tensor of a call, dense and flat on the host, has no values that ``look_for`` would find."""
        start = time.perf_counter()
        clean = self._search.is_clean(batch.portions, x)
        self._recorder.add("check", "", 0, 0, start, time.perf_counter())
        return clean

    def _refusal(self, item: Item, array: Any) -> str:
        """Why the values of a tensor could break the bound of its method; nothing if they cannot."""
        assert item.compressor is not None
        topology = self._transport.topology
        encodes = sum(isinstance(step, Encode) for step in item.strategy.route.steps)
        journey = Journey(encodes, topology.size, ranges.excess(topology), item.total, item.dtype)
        if item.dtype != "float32":
            wide = self._context.scratch("wide", array.size, np.float32, array)
            reduction.convert(wide, array, item.dtype)
            array = wide
        return item.compressor.refusal(array, journey, self._context)

    def settle(
        self, call: PendingCall, said: dict[int, dict[str, str]], content: Content, policy: str
    ) -> frozenset[int] | None:
        """The positions of the tensors to skip; None if the call fails.

        Args:
            call: the call.
            said: the findings of each rank, see ``ranges.Findings``.
            content: content of the call.
            policy: the option ``nonfinite`` of the session.
        """
        if not said:
            return _NONE
        bad, call.large = ranges.separated(said)
        if not bad:
            return _NONE
        text = non_finite_text(content, bad, self._transport.describe)
        if any(found.startswith(_BEYOND) for texts in bad.values() for found in texts.values()):
            call.error = BoundError(text)
            return None
        if policy in ("raise", "propagate"):
            call.error = NonFiniteError(
                text + "; lower the loss scale or the learning rate, or pass nonfinite='skip', or 'skip_all' if a loss "
                "scaler is to hear of it"
            )
            return None
        skip, how = frozenset(int(position) for counts in bad.values() for position in counts), "skipped"
        if policy == "skip_all" and call.batch is not None:
            skip, how = frozenset(item.index for item in call.batch.items), "skipped with all tensors of the call"
            self.skipped_calls += 1
        for position in skip:
            self.skipped[call.gradients[position].spec.name] += 1
        if self._transport.rank == 0:
            _LOG.warning("%s: %s: %s", call.title, how, text)
        return skip


def blank(gradient: Gradient, check: Check | None, policy: str) -> None:
    """Overwrite a skipped tensor."""
    if check is not None:
        check("before it was skipped")
    array, value = gradient.array, np.nan if policy == "skip_all" else 0.0
    filled: Any = reduction.filled(array.size, value, str(gradient.spec.dtype))
    device.copy(array, filled)
