"""How a rank waits for others: it polls, so that a rank that never comes is named instead of waited for forever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from ..errors import RankTimeoutError

_SPINS = 200
_CHECK_EVERY = 64
_NAP = 20e-6


class Waiter:
    """Polls a condition until it holds or a timeout passes.

    Where a machine has at least as many ranks as cores a rank that polls takes the core from a rank that works, so it
    gives way at once; otherwise it polls hard for a moment first, which answers sooner.

    Args:
        timeout: seconds until a rank counts as missing.
        crowded: whether ranks share cores.
        describe: the text for a rank in messages.
    """

    def __init__(self, timeout: float, crowded: bool, describe: Callable[[int], str] = "rank {}".format) -> None:
        self.timeout = timeout
        self._spins = 0 if crowded else _SPINS
        self._describe = describe
        self.what = "the session to open"

    def until(self, done: Callable[[], bool], late: Callable[[], Sequence[int]]) -> None:
        """Return when ``done()``; after the timeout raise RankTimeoutError naming the ranks of ``late()``."""
        polls, start = 0, time.perf_counter()
        while not done():
            polls += 1
            if polls > self._spins:
                self._give_way(polls - self._spins)
            if polls % _CHECK_EVERY == 0 and time.perf_counter() - start > self.timeout:
                raise self._timeout(late())

    @staticmethod
    def _give_way(polls: int) -> None:
        if polls < 50:
            os.sched_yield()
        else:
            time.sleep(_NAP)

    def _timeout(self, late: Sequence[int]) -> RankTimeoutError:
        names = ", ".join(self._describe(rank) for rank in sorted(set(late))) or "a rank (not known which)"
        return RankTimeoutError(
            f"waited {self.timeout:g} s for {names} in {self.what}; every rank must call it, in the same order; "
            f"see what that rank is doing, or raise timeout= if it is only slow"
        )
