"""A ``sync`` that is made again with arrays like those before, where its data travel with the header.

That holds for compressed arrays and for several dense ones. What is done with them was decided and agreed on before,
so that the call need not be taken apart again. A single dense array has a quicker way, see ``latest_sum``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .batches import Batch
from .calls import PendingCall
from .latest_sum import LatestSums
from .negotiation import Piggyback


@dataclass
class RepeatedSync:
    """A ``sync`` that may be made again.

    Attributes:
        signature, batch: of the call.
        placeholder: names it while it runs.
        unsearched: whether only the sum looks for values that must not be summed.
        failures: how often the data could not travel with the header since they did, for example because the ranks
            share the arrays.
    """

    signature: tuple[object, ...]
    batch: Batch
    unsearched: bool
    failures: int = 0
    placeholder: PendingCall = field(default_factory=lambda: PendingCall(("sync", "")))


class SyncsAgain(LatestSums):
    """See ``Engine``, which sets the attributes."""

    def repeated_sync(self, call: PendingCall) -> RepeatedSync | None:
        """What ``sync_again`` takes to make a call again that has ended well; None: it cannot."""
        number, batch = call.number, call.batch
        if number is None or batch is None or not self._dispatcher.may_repeat(number, batch):
            return None
        by_table = self._dispatcher.goes_by_table(number)
        if len(batch.specs) == 1 and not by_table:
            return None
        return RepeatedSync(call.signature, batch, not by_table)

    def sync_again(
        self, known: RepeatedSync, arrays: Sequence[np.ndarray], title: str, real: Callable[[], PendingCall]
    ) -> PendingCall | None:
        """Make a ``sync`` once more, as the only call of this rank; returns as ``repeat``.

        Args:
            arrays: as in the call before; flat, contiguous and writable float32.
            title: of the call in messages.
            real: as of ``repeat``.
        """
        driver, placeholder = self._driver, known.placeholder
        if self.unfinished or not driver.take():
            return None
        ended = [placeholder]
        try:
            header = self._repeatable(placeholder, known.signature, known.unsearched)
            if header is None:
                return None
            piggyback = self._piggyback_again(header[0], known, arrays)
            if piggyback is None:
                return None
            self.unfinished[id(placeholder)], placeholder.title = placeholder, title
            driver.wait_in(lambda: self._exchange_again(placeholder, header[1], piggyback, ended, real))
        except BaseException as error:
            self._failed_repeat(arrays, error)
            raise
        finally:
            driver.leave()
        known.failures = 0
        return self._ended_repeated(placeholder, ended[0])

    def _piggyback_again(self, number: int, known: RepeatedSync, arrays: Sequence[np.ndarray]) -> Piggyback | None:
        """The data of a call; None if they do not travel with the header now."""
        expected = self._negotiation.expected(idle=True)
        if expected != (number if self._dispatcher.expects(number) else None):
            return None
        piggyback = self._dispatcher.piggyback_sync(number, known.batch, arrays, expected, search=True)
        if piggyback is None or piggyback.unsearched != known.unsearched:
            known.failures += 1
            return None
        return piggyback

    def _exchange_again(
        self, placeholder: PendingCall, header: np.ndarray, piggyback: Piggyback, ended: list[PendingCall],
        real: Callable[[], PendingCall],
    ) -> None:  # fmt: skip
        """Exchange the data; ``ended`` receives the call itself if a rank deviates, or values cannot be summed."""
        negotiation, sent = self._negotiation, self._transport.sent
        result = self._timed([placeholder], lambda: negotiation.show(placeholder, piggyback, header))
        if result.fast_path:
            self._end_fast_path(placeholder, result, sent)
            del self.unfinished[id(placeholder)]
            return
        call = self._take_over(placeholder, real, ended)
        self._settle_shown(call, result, sent)
