"""The latest dense sum of one array, made once more: what is to be looked at before it and counted behind it.

Most of what the ordinary path looks at cannot have changed since the call before. For a small array it takes longer
than the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..collectives.messages.sum_calls import AgreedSums, ValueCheck
from .batches import Batch
from .calls import PendingCall
from .dense_piggyback import DensePiggyback, PreparedCall, Summing
from .negotiation import OWN_STATE
from .rounds import Rounds

_READY = 0x1 | 0x100 | 0x400
"""numpy's flags of an array that is C-contiguous, aligned and writable."""


@dataclass(frozen=True)
class LatestSum:
    """A sum that was made by one compiled call.

    Attributes:
        signature, placeholder, batch: of the call, as of ``Rounds.repeat``.
        prepared: what runs it; sums: its kernel.
        check: of its values.
        told: what tells it apart from others, such as a name.
        shape, dtype: of the array, which is summed as it is.
    """

    signature: tuple[Any, ...]
    placeholder: PendingCall
    batch: Batch
    prepared: PreparedCall
    sums: AgreedSums
    check: ValueCheck
    told: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def fits(self, told: Any, x: np.ndarray) -> bool:
        """Whether an array is like that of the call."""
        alike = x.shape == self.shape and x.dtype == self.dtype and told == self.told
        return alike and x.flags.num & _READY == _READY


class SumsAgain(Rounds):
    """See ``Engine``, which sets the attributes."""

    def latest_sum(
        self, signature: tuple[Any, ...], placeholder: PendingCall, batch: Batch, told: Any, x: np.ndarray
    ) -> LatestSum | None:
        """What ``sum_again`` takes for calls like the one that has just ended; None: these take the other way.

        Args:
            signature, placeholder, batch: as of ``repeat``, which has made it.
            told, x: as of ``LatestSum``.
        """
        prepared, check = self._dispatcher.known_sum(placeholder.number), self.value_check(batch)
        if prepared is None or not isinstance(prepared.agreed, AgreedSums) or x.dtype != np.float32:
            return None
        if batch.portions and not check.pending:  # the values are searched before the sum
            return None
        return LatestSum(signature, placeholder, batch, prepared, prepared.agreed, check, told, x.shape, x.dtype)

    def sum_again(self, latest: LatestSum, x: np.ndarray, real: Callable[[], PendingCall]) -> PendingCall | None:
        """As ``repeat``, of an array that fits."""
        driver, placeholder, prepared = self._driver, latest.placeholder, latest.prepared
        if self.unfinished or not driver.take():
            return None
        x = x if x.ndim == 1 else x.ravel()
        try:
            dispatcher, check = self._dispatcher, latest.check
            header = self._negotiation.repeated_header(placeholder, latest.signature, check.pending)
            number = placeholder.number
            if header is None or number is None or self._inbox or dispatcher.pending_groups.count:
                return None
            if not dispatcher.still_sums(number, prepared):
                return None
            self.unfinished[id(placeholder)], self._transport.waiter.what = placeholder, placeholder.title
            if latest.sums.reduce(header, OWN_STATE, x, True, check):
                del self.unfinished[id(placeholder)]
                self._end_repeated(number, prepared)
                return placeholder
            moves = Summing(x, True)
            moves.check = check
            ended = self._await_repeated(placeholder, DensePiggyback(self._transport, prepared, moves, False), real)
        except BaseException as error:  # an interrupt: the others may have gone on
            self._transport.outlive(x)
            self.fail(error)
            raise
        finally:
            driver.leave()
        return self._ended_repeated(placeholder, ended)
