"""How a rank waits: what it logs, when it times out, and which monitor it consults."""

import logging
import time

import pytest
from numba import njit

from espresso_mpi.collectives.messages.mpi_calls import nap_of
from espresso_mpi.collectives.messages.shared_memory import poll_again
from espresso_mpi.collectives.messages.waiting import Waiter, WaitMonitor
from espresso_mpi.errors import RankTimeoutError


def test_a_long_wait_is_told_once(caplog):
    waiter = Waiter(timeout=60, oversubscribed=True)
    waiter.what, waiter.notice = "sync number 7", 0.1
    more = iter(range(300))  # polls after it was told
    with caplog.at_level(logging.INFO, "espresso_mpi"):
        waiter.until(lambda: bool(caplog.records) and next(more, None) is None, lambda: [3, 1])
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "for rank 1, rank 3 in sync number 7; the limit is 60 s" in record.getMessage()


def test_a_wait_through_others_is_told_later(caplog):
    waiter = Waiter(timeout=4.0, oversubscribed=True)
    waiter.notice = 0.25  # so long before the limit that a busy node shows it
    with pytest.raises(RankTimeoutError, match="rank 1"), waiter.patience(0.5):
        waiter.until(lambda: False, lambda: [1])
    assert "waited 0 s for rank 1" in caplog.text and waiter.notice == 0.25


class Ending(WaitMonitor):
    """Ends every wait with an error of its own name."""

    def __init__(self, name):
        self.name = name

    def check(self):
        raise ConnectionError(self.name)


def test_monitors_are_nested():
    """An engine inside another on the same transport: after it, also after an error, the outer one monitors again."""
    waiter = Waiter(timeout=60, oversubscribed=True)
    with waiter.monitored(Ending("outer")):
        with pytest.raises(ConnectionError, match="inner"), waiter.monitored(Ending("inner")):
            waiter.until(lambda: False, list)
        with pytest.raises(ConnectionError, match="outer"):
            waiter.until(lambda: False, list)
    end = time.monotonic() + 0.1
    waiter.until(lambda: time.monotonic() > end, list)


def test_a_long_pause_of_compiled_code_counts_as_several_polls():
    """The checks of the timeout come after so many polls, which must not take seconds where each one loses the core."""

    @njit
    def polls(pace):
        polled, calls = 0, 0
        while polled >= 0:
            polled = poll_again(polled, pace, pace[2])
            calls += 1
        return calls

    assert polls((5, 5, 0)) == 6  # none of them pauses
    assert polls((5, 105, 2000)) <= 5 + 100 / 20 + 1  # pauses of at least 2 ms, which count as 20 polls or more


def test_naps_beside_computing_grow_with_the_wait():
    """Microseconds; the wait so far is in nanoseconds."""
    nap = njit(lambda polled, waited, pace: nap_of(polled, waited, pace))
    background, foreground = (0, 200, 20), (5, 1000, 0)
    assert [nap(9, waited, background) for waited in (0, 500_000, 3_000_000, 9_000_000)] == [100, 250, 1500, 2000]
    assert nap(0, 9_000_000, (0, 50, 20)) == 1250, "Python is to look at something else after 5 ms"
    assert [nap(polled, 0, foreground) for polled in (0, 54, 55)] == [0, 0, 20]
    assert nap(99, 6_400_000, foreground) == 100
