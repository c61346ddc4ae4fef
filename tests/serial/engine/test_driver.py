"""Which thread makes the progress steps of an engine, and what waits in them know of the others."""

import threading
from types import SimpleNamespace

import pytest

from espresso_mpi.collectives.messages.waiting import Waiter
from espresso_mpi.engine.calls import PendingCall
from espresso_mpi.engine.driver import Driver

pytestmark = pytest.mark.timeout(60)


class Engine:
    """Has one progress step to make, and notes how a wait in it polls."""

    broken = None

    def __init__(self):
        self.waiter = Waiter(1.0, oversubscribed=False)
        self.steps, self.driver = [], Driver(self, SimpleNamespace(waiter=self.waiter))
        self.made = threading.Event()

    def has_work(self):
        return not self.steps

    def progress(self):
        self.steps.append((self.driver.background, self.waiter.pace[2] > 0))
        self.made.set()
        return False

    def fail(self, error):
        raise error


def test_steps_that_no_call_waits_for_are_in_the_background():
    """Also before any call has waited: such a session yields the core to a thread that computes, for a time slice."""
    engine = Engine()
    with engine.driver.changed:
        engine.driver.called(background=True)
    assert engine.made.wait(30)
    engine.driver.stopping = True
    engine.driver.join()
    assert engine.steps == [(True, True)]


def test_steps_of_a_thread_that_waits_are_not():
    engine = Engine()
    engine.driver.wait_for(lambda: bool(engine.steps))
    assert engine.steps == [(False, False)]


def test_what_waits_for_the_end_of_a_call_is_called_once():
    """Also where it begins to wait at the very moment of the end, in another thread."""
    for number in range(400):
        call, called, start = PendingCall(("push", "w")), [], threading.Barrier(2)

        def watch(call=call, called=called, start=start):
            start.wait()
            for one in range(20):
                call.when_finished(lambda one=one: called.append(one))

        thread = threading.Thread(target=watch)
        thread.start()
        start.wait()
        for _ in range(number % 40):
            pass
        call.announce_end()
        thread.join()
        assert sorted(called) == list(range(20))


def test_what_fails_at_the_end_of_a_call_is_logged(caplog):
    call, called = PendingCall(("push", "w")), []
    for act in (lambda: 1 / 0, lambda: called.append(1)):
        call.when_finished(act)
    call.announce_end()
    assert called == [1]
    assert (
        "push('w'): what was to be called at its end has failed" in caplog.text and "ZeroDivisionError" in caplog.text
    )
