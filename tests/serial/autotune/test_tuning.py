"""Telling the steps of a training loop apart, with a clock of our own; the settings of plan='auto'."""

from __future__ import annotations

import math

import numpy as np
import pytest

from espresso_mpi.autotune import tuner
from espresso_mpi.autotune.clock import Computing, RecordedStep, StepClock
from espresso_mpi.errors import ConfigError
from espresso_mpi.tuning import Tuning
from espresso_mpi.types import TensorSpec

A, B = TensorSpec("a", (4,), "float32"), TensorSpec("b", (8,), "float32")


class Time:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def called(clock, specs, kind="sync"):
    names = [spec.name for spec in specs]
    if clock.begins(names):
        clock.end_step((kind, names[0]), names)
    clock.called((kind, specs[0].name), specs)


def a_step(*ready, seconds=5.0):
    return RecordedStep((A, B)[: len(ready)], np.array(ready), seconds)


def test_a_step_that_other_work_delays_does_not_count_unless_all_are_late(monkeypatch):
    """Neither messages that slow the backward pass down, nor tensors that come together, are other work."""
    usual = Computing.of([a_step(1.0, 3.0), a_step(1.1, 2.9), a_step(4.0, 9.0)])
    assert usual == Computing(1.1, 3.0)
    for ready in ((1.0, 3.0), (1.1, 9.0), (9.0, 3.0), (3.9, 5.8)):
        assert not usual.is_late(a_step(*ready))
    late, punctual = a_step(5.1, 6.9, seconds=9.0), a_step(1.1, 3.0)
    assert usual.is_late(late) and not usual.is_late(a_step(5.1, 6.9, seconds=90.0)), "messages take longer by far"
    others: list[list[float]] = []
    monkeypatch.setattr(tuner, "floats", lambda transport, *mine: np.array([*others, mine]))

    def agreed(*steps, count=3, before=False):
        seconds, last = tuner._agreed(None, steps, count, usual, before)
        return [None if math.isnan(one) else one for one in seconds], last

    assert agreed(None, late, punctual, count=4) == ([None, None, None, 5.0], False)
    assert agreed(punctual, late, late) == ([5.0, None, 9.0], True)
    assert agreed(late, punctual, late, before=True) == ([9.0, 5.0, None], True)
    others = [[5.5, 0.0, 9.5, 0.0, 5.5, 1.0]]  # a rank that waited for this one, and then had other work itself
    assert agreed(punctual, late, punctual) == ([5.5, None, 5.5], True)


def test_steps_of_sync_begin_where_the_last_wait_ended():
    time = Time()
    clock = StepClock(clock=time)
    for _ in range(3):
        time.now += 2.0  # computing
        called(clock, (A, B))
        time.now += 0.5  # synchronising
        clock.waited(time.now - 0.5)
    clock.end_step()
    assert clock.count == 3
    assert [(step.specs, step.seconds) for step in clock.steps] == [((A, B), 2.5)] * 2  # the first has no begin
    assert all(np.array_equal(step.ready, [2.0, 2.0]) for step in clock.steps)


def test_pushed_tensors_are_ready_one_after_the_other():
    time = Time()
    clock = StepClock(clock=time)
    for _ in range(2):
        for spec in (B, A):
            time.now += 1.0
            called(clock, (spec,), "push")
        time.now += 3.0
        clock.waited(time.now - 3.0)
    clock.end_step()
    (step,) = clock.steps
    assert step.specs == (B, A)
    assert np.array_equal(step.ready, [1.0, 2.0])
    assert step.seconds == 5.0
    assert step.pushed


def test_waiting_within_a_step_is_no_computing():
    time = Time()
    clock = StepClock(clock=time)
    for _ in range(2):
        for spec in (A, B):
            time.now += 1.0
            called(clock, (spec,))
            time.now += 5.0
            clock.waited(time.now - 5.0)
    clock.end_step()
    (step,) = clock.steps
    assert np.array_equal(step.ready, [1.0, 2.0])
    assert (step.seconds, step.pushed) == (12.0, False)


def test_a_call_that_failed_is_no_part_of_a_step():
    """One rank could not make the call: both count the same steps."""
    clocks = [StepClock(), StepClock()]
    for step in range(4):
        for rank, clock in enumerate(clocks):
            bad = step == 2
            if clock.repeats(("sync", "a")) if bad and rank else clock.begins("a"):
                clock.end_step()
            if not (bad and rank):
                clock.called(("sync", "a"), (A,))
            clock.waited(0.0, ("sync", "a"), failed=bad)
    assert clocks[0].count == clocks[1].count == 2
    assert clocks[0].begins("a")
    assert clocks[1].begins("a")


def test_what_is_done_aside_is_no_part_of_a_step():
    time = Time()
    clock = StepClock(clock=time)
    called(clock, (A,))
    clock.waited(time.now)
    time.now += 1.0  # computed before the pause
    clock.end_step()
    with clock.aside():
        time.now += 60.0
    called(clock, (A,))
    time.now += 0.25
    clock.waited(time.now - 0.25)
    clock.end_step()
    assert clock.steps[-1].seconds == 1.25
    assert clock.steps[-1].ready[0] == 1.0


@pytest.mark.parametrize("order", [(B, A), (A, B)])
def test_a_tensor_that_was_missing_is_of_the_step_that_other_ranks_count_it_to(order):
    """It comes before the one that ends the step before, or after it."""
    time = Time()
    clock = StepClock(clock=time)
    for tensors in ((A,), (A,), order, (A,)):
        for spec in tensors:
            time.now += 1.0
            if clock.begins([spec.name]):
                clock.end_step(("push", spec.name), [spec.name])
                with clock.aside():
                    time.now += 60.0
            clock.called(("push", spec.name), (spec,))
            with clock.within():
                time.now += 10.0
        time.now += 3.0
        clock.waited(time.now - 3.0)
    clock.end_step()
    assert clock.count == 4
    assert [step.specs for step in clock.steps] == [(A,), order, (A,)]
    assert [step.ready.tolist() for step in clock.steps] == [[1.0], [1.0, 2.0], [1.0]]
    assert [step.seconds for step in clock.steps] == [4.0, 5.0, 4.0]
    assert clock.wait == 13.0


def test_calls_that_nobody_has_waited_for_are_of_the_step_in_which_they_came():
    clock = StepClock()
    for _ in range(3):
        called(clock, (A,), "push")
        called(clock, (B,), "push")
    assert (clock.count, clock.specs, clock.begun) == (2, (A, B), {"a", "b"})


def test_only_the_last_steps_are_kept():
    clock = StepClock(keep=4)
    for _ in range(10):
        called(clock, (A,))
        clock.waited(0.0)
    assert (len(clock.steps), clock.count) == (4, 9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"compressors": "onebit"},
        {"compressors": ("onebite",)},
        {"compressors": ("fp16", "signsgd")},
        {"steps": 2},
        {"steps": 3.5},
        {"skip": -1},
        {"check": 0},
        {"every": True},
        {"trial_steps": 0},
        {"seconds": 0},
        {"accuracy": "good"},
        {"accuracy": None},
        {"optimizer": "adamw"},
        {"factor": 1.0},
        {"factor": float("nan")},
        {"share": 0},
        {"share": 1.5},
        {"share": float("nan")},
        {"share": True},
    ],
)
def test_settings_out_of_their_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"expected|not known|no mean"):
        Tuning(**wrong)


def test_only_methods_that_train_like_fp32_are_chosen_unasked():
    assert Tuning().compressors == ("fp16", "bf16", "int8", "int4") and not Tuning().doubtful
    assert Tuning(("int8:block=64", "onebit", "topk:ratio=0.1")).doubtful == ("onebit", "topk:ratio=0.1")


def test_settings_are_described_for_the_comparison_among_ranks():
    assert str(Tuning(("topk",), steps=5)) != str(Tuning(("topk",), steps=6))
    assert "none" not in Tuning(("none", "fp16")).compressors
