"""Which plans are replayed how often, with steps of known lengths."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from espresso_mpi import Plan, Route, Strategy
from espresso_mpi.autotune import trials

DENSE, FP16 = Strategy("none", Route.parse("flat")), Strategy("fp16", Route.parse("flat-allgather"))


@pytest.fixture
def replayed(monkeypatch):
    """What takes how long, by the plan's name; filled by the test. Counts the steps of each."""
    clock, lengths, steps = [0.0], {}, {}

    class Steps:
        def __init__(self, transport, options, plan, *_):
            self.name = "now" if plan is None else plan.name + ("" if plan.schedule else " in turns")
            self.times, steps[self.name] = [], 0

        def warm_up(self):
            steps[self.name] += 1
            clock[0] += lengths[self.name]

        def run(self):
            self.warm_up()
            self.times.append(lengths[self.name] * (1 + 0.02 * (len(self.times) % 3)))

        seconds = property(lambda self: float(np.median(self.times)))
        uncertain = property(lambda self: float(np.ptp(self.times)) / len(self.times) ** 0.5)

        def close(self):
            steps[self.name] = -steps[self.name]

    monkeypatch.setattr(trials, "Replayed", Steps)
    monkeypatch.setattr(trials, "arrays_of", lambda *_: {})
    monkeypatch.setattr(trials, "floats", lambda transport, value: np.array([[value]]))
    monkeypatch.setattr(trials, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    return lengths, steps


def candidate(name, strategy=FP16, predicted=1.0, schedule=True):
    plan = Plan({name: strategy})
    object.__setattr__(plan, "name", name)
    object.__setattr__(plan, "forecast", SimpleNamespace(seconds=predicted))
    object.__setattr__(plan, "schedule", schedule)
    return plan


def test_the_quickest_is_found_with_few_steps(replayed, monkeypatch):
    lengths, steps = replayed
    monkeypatch.setattr(
        trials, "replace", lambda plan, schedule: candidate(plan.name, plan.strategies[plan.name], 1.0, None)
    )
    plans = [candidate(f"p{k}", DENSE if k == 6 else FP16) for k in range(10)]
    plans.append(candidate("hopeless", FP16, predicted=2.5))
    lengths |= {"now": 3.0, **{f"p{k}": 1.0 + 0.2 * k for k in range(10)}}
    lengths |= {f"p{k} in turns": 2.0 for k in range(10)} | {"p1 in turns": 0.5}
    transport = SimpleNamespace(rank=0, forget_kinds=lambda: None)
    now, (best, *others) = trials.tried(transport, SimpleNamespace(plan=None), plans, None, 8.0, True)
    assert (best.plan.name, best.plan.schedule) == ("p1", None) and best.seconds == pytest.approx(0.51, rel=0.05)
    assert now.plan is None and len(others) == 10 + 4 - 1, "the dense plan and three finalists, also in turns"
    assert "hopeless" not in steps and all(count < 0 for count in steps.values()), "all are closed"
    assert -steps["p9"] == 2 and -sum(steps.values()) <= 55, "the slower half is replayed for one step after warming up"


def test_dense_wins_what_noise_could_explain(replayed):
    lengths, _ = replayed
    lengths |= {"now": 1.0, "a in turns": 0.999, "b in turns": 1.0}
    plans = [candidate("a", schedule=None), candidate("b", DENSE, schedule=None)]
    transport = SimpleNamespace(rank=0, forget_kinds=lambda: None)
    _, (best, *_) = trials.tried(transport, SimpleNamespace(plan=None), plans, None, 0.0, True)
    assert best.plan.name == "b"
