"""The latest dense sum of one array, made again: what is to be looked at before it, and counted after it.

Most of what ``Rounds.repeat`` looks at cannot have changed since the call before. For a small array, that takes longer
than the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..collectives.messages.agreed_nodes import NodeSums
from ..collectives.messages.sum_calls import NO_CHECK, AgreedSums, ValueCheck
from .batches import Batch
from .calls import PendingCall
from .dense_piggyback import DensePiggyback, PreparedCall, Summing
from .negotiation import OWN_STATE
from .rounds import Rounds


@dataclass(frozen=True)
class LatestSum:
    """A ``sync`` of one array that was one compiled call.

    Attributes:
        signature, placeholder, batch: of the call, as of ``Rounds.repeat``.
        prepared: what runs it; sums: its kernel.
        check: of its values; unsearched: whether the header says that they are not searched yet.
        name: the name of the array, if it has one.
        shape: of the array, which is float32.
    """

    signature: tuple[Any, ...]
    placeholder: PendingCall
    batch: Batch
    prepared: PreparedCall
    sums: AgreedSums | NodeSums
    check: ValueCheck
    unsearched: bool
    name: str | None
    shape: tuple[int, ...]

    def fits(self, name: str | None, x: np.ndarray) -> bool:
        """Whether an array is like that of the call, contiguous and writable."""
        alike = x.shape == self.shape and x.dtype == np.float32 and name == self.name
        return alike and x.flags.c_contiguous and x.flags.aligned and x.flags.writeable


class LatestSums(Rounds):
    """See ``Engine``, which sets the attributes."""

    value_check: Callable[[Batch], ValueCheck]

    def latest_sum(
        self, signature: tuple[Any, ...], placeholder: PendingCall, batch: Batch, name: str | None, x: np.ndarray
    ) -> LatestSum | None:
        """What ``sum_again`` takes for calls like the one that has just ended; None: ``repeat`` must make them.

        That is so where several threads search the values. Other types than float32 are summed as other arrays, such
        as their bits.

        Args:
            signature, placeholder, batch: as of ``repeat``, which has made the call.
            name, x: the array.
        """
        prepared = self._dispatcher.known_sum(placeholder.number)
        if prepared is None or not isinstance(prepared.agreed, AgreedSums | NodeSums) or x.dtype != np.float32:
            return None
        check = self.value_check(batch)
        unsearched = check.pending
        if isinstance(prepared.agreed, NodeSums):  # which searches before it shows anything
            check = self.nonfinite.value_check(batch)
        if batch.portions and not check.pending:
            return None
        return LatestSum(signature, placeholder, batch, prepared, prepared.agreed, check, unsearched, name, x.shape)

    def sum_again(
        self, latest: LatestSum, x: np.ndarray, title: str, real: Callable[[], PendingCall]
    ) -> PendingCall | None:
        """As ``repeat``, of an array that fits; ``title``: of the call in messages."""
        driver, placeholder, prepared, check = self._driver, latest.placeholder, latest.prepared, latest.check
        if self.unfinished or not driver.take():
            return None
        try:
            x = x if x.ndim == 1 else x.ravel()
            header = self._repeatable(placeholder, latest.signature, latest.unsearched)
            if header is None or not self._may_sum_again(latest, header[0], header[1].size):
                return None
            self.unfinished[id(placeholder)] = placeholder
            placeholder.title = self._transport.waiter.what = title
            if latest.sums.reduce(header[1], OWN_STATE, x, True, check):
                del self.unfinished[id(placeholder)]
                if isinstance(latest.sums, NodeSums):
                    self._negotiation.came(header[0])
                self._end_repeated(header[0], prepared)
                return placeholder
            moves = Summing(x, True)
            moves.check = check if latest.unsearched else NO_CHECK
            ended = self._await_repeated(placeholder, DensePiggyback(self._transport, prepared, moves, False), real)
        except BaseException as error:
            self._failed_repeat(x, error)
            raise
        finally:
            driver.leave()
        return self._ended_repeated(placeholder, ended)

    def _may_sum_again(self, latest: LatestSum, number: int, header_size: int) -> bool:
        """Whether nothing has changed that a sum depends on, and the ranks expect no other call."""
        if not self._dispatcher.still_sums(number, latest.prepared):
            return False
        if not isinstance(latest.sums, NodeSums):  # inside a node, ranks expect no calls
            return True
        return latest.sums.takes(header_size) and self._negotiation.expected(idle=True) is None
