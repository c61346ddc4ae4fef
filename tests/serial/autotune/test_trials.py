"""Which plans are tried for how many steps, with steps of known lengths."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from espresso_mpi import Plan, Strategy
from espresso_mpi.autotune.payload_costs import compresses
from espresso_mpi.autotune.trials import More, Spent, Trials
from espresso_mpi.timetable import Lanes, Schedule

DENSE, FP16 = Strategy("none", "flat"), Strategy("fp16", "flat-allgather")


def candidate(name, strategy=FP16, predicted=1.0):
    plan = Plan({name: strategy})
    object.__setattr__(plan, "forecast", SimpleNamespace(seconds=predicted))
    return plan


def name_of(plan):
    return next(iter(plan.strategies))


def modelled(plans, most, fixed=(), **given):
    """Trials of plans that the model makes."""
    return Trials(fixed, most, lambda: More((), plans), **given)


def tried(plans, lengths, most=100, noise=0.02):
    """The names of the plans of all steps, and the results; ``lengths``: seconds of a step, by name."""
    trials, names = modelled(plans, most), []
    while not trials.ended:
        names.append(name_of(trials.current))
        trials.step_ended(lengths[names[-1]] * (1 + noise * (len(names) % 3)))
    return names, trials.results()


def test_the_quickest_is_found_in_few_steps():
    plans = [candidate(f"p{k}", DENSE if k == 6 else FP16, 1 + 0.01 * k) for k in range(10)]
    plans.append(candidate("hopeless", FP16, predicted=1.6))
    names, (best, *others) = tried(plans, {f"p{k}": 1.0 + 0.2 * ((k + 8) % 10) for k in range(10)})
    assert name_of(best.plan) == "p2" and best.seconds == pytest.approx(1.02, rel=0.03)
    assert {name_of(one.plan) for one in others} == {f"p{k}" for k in range(10)} - {"p2"}
    assert "hopeless" not in names and len(names) < 60
    assert names.count("p7") < names.count("p1") < names.count("p2"), "what is far behind has one step that counts"


def test_no_step_comes_between_two_plans():
    names, _ = tried([candidate("a"), candidate("b"), candidate("dense", DENSE, 1.4)], {"a": 1, "b": 1.01, "dense": 1})
    turns = [name for name, _ in itertools.groupby(names)]
    assert turns[:3] == ["a", "b", "dense"] and {("a", "b"), ("b", "dense")} <= set(itertools.pairwise(names))


def test_a_plan_whose_first_step_is_far_too_long_has_no_other():
    plans = [candidate("a"), candidate("slow", predicted=1.1), candidate("dense", DENSE, 1.2)]
    names, results = tried(plans, {"a": 1.0, "slow": 1.9, "dense": 1.2})
    assert names.count("slow") == 1 and names.count("dense") > 1 and len(results) == 3
    assert name_of(results[-1].plan) == "slow"


def first_steps(plans, lengths, longer, **given):
    """As ``tried``, without noise; the first step of each turn takes ``longer``."""
    trials, names = modelled(plans, 100, **given), []
    while not trials.ended:
        names.append(name_of(trials.current))
        trials.step_ended(lengths[names[-1]] + (longer if names[-2:-1] != names[-1:] else 0.0))
    return names, trials


@pytest.mark.parametrize("refused", ["a", "ab", "abd"])
def test_plans_that_are_refused_have_no_step(refused):
    """Neither at first nor among the finalists; if it is all of them, the trials end."""
    fixed = [candidate("a"), candidate("b"), candidate("d", DENSE)]
    trials, names = Trials(fixed, 100, pushed=True), []
    while not trials.ended:
        name = name_of(trials.current)
        if name in refused:
            trials.refuse()
        else:
            names.append(name)
            trials.step_ended(1.0 + 0.3 * (name == "d"))
    assert set(names) == set("abd") - set(refused)
    assert {name_of(one.plan) for one in trials.results()} == set(names)


def test_what_preparing_takes_is_not_held_against_a_plan():
    plans = [candidate("a"), candidate("b", predicted=1.1), candidate("dense", DENSE, 1.2)]
    names, _ = first_steps(plans, {"a": 1.0, "b": 0.8, "dense": 1.2}, longer=3.0)
    assert names.count("b") > 2


def test_a_first_step_that_compiles_is_not_held_against_smaller_payloads():
    """Steps before the trials followed a plan with larger payloads, which had little to prepare."""
    small, watched = candidate("small"), candidate("watched")
    spent = Spent(9.0, 9, known={watched.digest: ([1.0], [1.0] * 8)})
    lengths = {"small": 0.3, "large": 1.2, "watched": 1.0, "dense": 9.0}
    large, dense = candidate("large"), candidate("dense", DENSE)
    nbytes = {plan.digest: n for plan, n in ((small, 1.0), (watched, 2.0), (large, 3.0), (dense, 9.0))}
    names, trials = first_steps(
        [], lengths, 5.0, fixed=[small, watched, large, dense], spent=spent, payload_bytes=nbytes
    )
    assert names.count("small") > 1 and name_of(trials.results()[0].plan) == "small"
    assert names.count("watched") > 1, "what it took before the trials may be due to the first steps of the run"
    assert not {"large", "dense"} & {*names}, "their messages alone would make them far too long"


def payload_cases(lengths, compiles=None, **given):
    """The names of the plans of all steps, with the seconds until each; the first step of a plan takes one more.

    ``lengths``: seconds of a step, by name, or by name and whether pushes are held.
    """
    names = ("int4", "int8", "fp16", "dense")
    plans, nbytes = [], {}
    for size, name in enumerate(names):
        for held in (False, True) if (name, True) in lengths else (False,):
            plans.append(replace(candidate(name, DENSE if name == "dense" else FP16), held=held))
            nbytes[plans[-1].digest] = 2.0**size
    trials = Trials(plans, 400, payload_bytes=nbytes, **given)
    now, found, known = 0.0, [], set()
    while not trials.ended:
        name, steps = name_of(trials.current), max(1, trials.pause)
        seconds = lengths.get((name, trials.current.held)) or lengths[name]
        first = 0.0 if name in known else 6.0 if name == compiles else 1.0
        found.append((name, now))
        now += seconds * steps + first
        trials.step_ended(seconds + first)
        known.add(name)
    return found


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ({"int4": 0.5, "int8": 0.8, "fp16": 1.4, "dense": 2.6}, {"int4", "int8"}),
        ({"int4": 0.5, "int8": 0.6, "fp16": 0.7, "dense": 0.4}, {"int4", "int8", "fp16", "dense"}),
        ({"int4": 0.8, "int8": 0.5, "fp16": 0.6, "dense": 0.55}, {"int4", "int8", "fp16", "dense"}),
        (
            {("int4", False): 0.9, ("int4", True): 0.5, ("int8", False): 1.2, ("int8", True): 0.9, "fp16": 2.0,
             "dense": 3.6},
            {"int4", "int8"},
        ),
    ],
    ids=["messages", "no difference", "encodes", "held"],
)  # fmt: skip
def test_what_is_far_too_long_by_its_messages_is_not_tried(lengths, expected):
    assert {name for name, _ in payload_cases(lengths)} == expected


def test_the_smallest_payloads_are_tried_with_pushes_at_both_times_before_a_pause():
    """Where pushes are slow, a plan with larger payloads is the quickest until then, and preparing has cost much."""
    lengths = {("int4", False): 0.43, ("int4", True): 0.30, ("int8", False): 0.45, ("int8", True): 0.35}
    names = payload_cases({**lengths, "fp16": 0.4, "dense": 0.5}, share=0.05)
    assert [name for name, _ in names[:6]] == ["int4"] * 6 and names[5][1] < 5


def test_what_compiles_says_nothing_of_messages_nor_do_they_if_dense_steps_were_quick():
    lengths = {"int4": 0.5, "int8": 0.55, "fp16": 0.4, "dense": 0.3}
    assert {name for name, _ in payload_cases(lengths, compiles="int8")} == {*lengths}
    lengths["int8"] = 0.8
    assert {name for name, _ in payload_cases(lengths, spent=Spent(dense=0.35))} == {*lengths}


def test_what_can_wait_is_prepared_when_that_is_within_the_share():
    lengths = dict.fromkeys(("int4", "int8", "fp16", "dense"), 0.1)
    first = {}
    for name, now in reversed(payload_cases(lengths, share=0.05)):
        first[name] = now
    assert first["int4"] == 0.0
    for number, name in enumerate(("int8", "fp16"), 2):
        assert number / 0.05 - 2 < first[name] < number / 0.05 + 4
    assert first["dense"] < first["fp16"] + 20, "it prepares nothing"


@pytest.mark.parametrize("later", ["int4", "int8"])
def test_plans_that_are_about_as_quick_in_the_first_steps_are_compared_again_after_a_pause(later):
    """Before the plans whose turns are expensive: dense steps are long. Earlier steps then count no more."""
    plans = [candidate(name, DENSE if name == "dense" else FP16) for name in ("int4", "int8", "dense")]
    spent = Spent(dense=2.0, known={plan.digest: ([1.2], [1.2] * 5) for plan in plans[:2]})
    trials, before, steps, pauses, dense = Trials(plans, 300, share=0.03, spent=spent), "", 0, [], math.inf
    while not trials.ended:
        name = name_of(trials.current)
        if trials.pause:
            pauses.append((name, steps))
        elif name == "dense":
            dense = min(dense, steps)
        steps += max(1, trials.pause)
        slow = 0.2 if steps < 10 else 0.0 if name == later else 0.1
        trials.step_ended(2.0 if name == "dense" else 1.0 + slow + 0.4 * (name != before and not trials.pause))
        before = name
    compared = pauses[0][1] + 16 + 5
    followed = [name for name, at in pauses if compared <= at < dense]
    assert len(followed) > 1 and {*followed} == {later}
    assert trials.results()[0].seconds == pytest.approx(1.0)


@pytest.mark.parametrize("disturbed", [1, 4, 5, 7])
def test_a_step_that_other_work_makes_longer_does_not_decide(disturbed):
    plans = [candidate("a"), candidate("b", predicted=1.1), candidate("dense", DENSE, 1.2)]
    lengths, names = {"a": 1.0, "b": 0.8, "dense": 1.2}, []
    trials = modelled(plans, 9)  # the first round alone
    while not trials.ended:
        names.append(name_of(trials.current))
        trials.step_ended(lengths[names[-1]] * (2 if len(names) == disturbed + 1 else 1))
    assert name_of(trials.results()[0].plan) == "b"


def test_trials_end_when_their_budget_is_spent():
    lengths = {"a": 1.0, "b": 1.25, "c": 1.2, "dense": 1.5}
    plans = [candidate("a"), candidate("b"), candidate("c"), candidate("dense", DENSE, 1.1)]
    spent = Spent(seconds=9.0, steps=4, dense=1.5)  # 5 s beyond four steps of a second
    names, trials = first_steps([], lengths, 0.0, budget=lambda step: 5.3 * step, spent=spent, fixed=plans)
    assert names == ["a", "a", "a", "b", "b"], "the second step of b makes it 5.5 s, seen after 5.25"
    assert trials.cost(1.0) == pytest.approx(5.5)
    assert name_of(trials.results()[0].plan) == "a", "dense steps were watched before: 1.5 s"


def test_no_plan_without_compression_is_tried_where_dense_steps_were_hopeless():
    plans = [candidate("a"), candidate("dense", DENSE, 1.1)]
    for exposed, known in ((1.6, {"a"}), (1.4, {"a", "dense"})):
        names, trials = first_steps(plans, {"a": 1.0, "dense": 1.5}, 0.0, spent=Spent(dense=2.0, exposed=exposed))
        assert set(names) == known and name_of(trials.results()[0].plan) == "a"


def test_a_budget_that_is_spent_before_leaves_the_best_prediction_and_dense_steps():
    plans = [candidate("a"), candidate("b", predicted=1.1), candidate("dense", DENSE, 1.2)]
    for dense, best in ((1.5, "a"), (0.9, "dense")):
        _, trials = first_steps(plans, {"a": 1.0}, 0.0, budget=lambda step: 1.0, spent=Spent(9.0, 2, dense))
        assert name_of(trials.results()[0].plan) == best


def test_compression_is_chosen_only_if_it_gains_more_than_the_noise():
    lengths = {"a": 0.999, "dense": 1.0}
    assert name_of(tried([candidate("a"), candidate("dense", DENSE)], lengths)[1][0].plan) == "dense"
    assert name_of(tried([candidate("a"), candidate("dense", DENSE)], {"a": 0.9, "dense": 1.0})[1][0].plan) == "a"


def varying_steps(plans, varying, lengths):
    """Results of trials in which the steps of one plan that count vary; all others take a second."""
    trials, before, length = Trials(plans, 60), None, itertools.cycle(lengths)
    while not trials.ended:
        plan = trials.current
        trials.step_ended(next(length) if plan is before is varying else 1.0)
        before = plan
    return trials.results()


def test_dense_steps_that_are_noisy_are_not_chosen_for_their_noise():
    dense = candidate("dense", DENSE)
    best, other = varying_steps([candidate("a"), dense], dense, [1.2, 1.22, 3.7, 1.22, 3.7, 3.7])
    assert other.uncertain > other.seconds - best.seconds and compresses(best.plan)


def test_the_usual_step_decides_not_the_quickest_ones():
    """Steps during which gradients travel vary: some are quicker than all others, and more of them slower."""
    varying = candidate("varying")
    plans = [candidate("even"), varying, candidate("dense", DENSE)]
    assert name_of(varying_steps(plans, varying, [0.9, 1.2, 0.9, 1.2, 1.2])[0].plan) != "varying"
    assert name_of(varying_steps(plans, varying, [0.9, 1.2, 0.9, 0.9, 1.2])[0].plan) == "varying"


def test_the_best_plan_with_a_schedule_is_tried_without_it():
    plans = [candidate("a", FP16, 1.0), candidate("dense", DENSE)]
    scheduled = replace(plans[0], schedule=Schedule(Lanes(), {}))
    trials = modelled([scheduled, plans[1]], 100)
    while not trials.ended:
        dense = not compresses(trials.current)
        trials.step_ended(1.0 if dense else 0.8 if trials.current.schedule else 0.5)
    best, *others = trials.results()
    assert best.plan.schedule is None and best.seconds == 0.5 and len(others) == 2


@pytest.mark.parametrize("pushed", [False, True])
def test_the_quickest_plans_are_tried_after_the_backward_pass_if_gradients_are_pushed(pushed):
    plans = [candidate("a"), candidate("b"), candidate("far", predicted=1.1), candidate("dense", DENSE)]
    trials = modelled(plans, 100, pushed=pushed)
    lengths, held = {"a": 1.0, "b": 1.1, "far": 9.0, "dense": 1.2}, {"a": 1.05, "b": 0.8, "dense": 1.3}
    while not trials.ended:
        name = name_of(trials.current)
        trials.step_ended((held if trials.current.held else lengths)[name])
    found = [(name_of(one.plan), one.plan.held) for one in trials.results()]
    assert found[0] == (("b", True) if pushed else ("a", False))
    assert len(set(found)) == len(found) == (7 if pushed else 4)


def fixed_and_others(lengths, **given):
    """The names of the plans of all steps, and the best; of fixed ways and others of known lengths."""
    fixed = [candidate(n, DENSE if n == "dense" else FP16, 3.0) for n in ("dense", "int8", "int4")]
    others = [candidate(n, FP16, 1.0) for n in ("x", "y")] + [candidate("plain", DENSE, 1.2)]
    trials, names = modelled(others, 100, fixed, **given), []
    while not trials.ended:
        names.append(name_of(trials.current))
        trials.step_ended(lengths[names[-1]])
    return names, name_of(trials.results()[0].plan)


@pytest.mark.parametrize("quickest", ["dense", "int8", "int4", "x", "plain"])
def test_fixed_ways_are_tried_first_whatever_is_predicted(quickest):
    lengths = dict.fromkeys(("dense", "int8", "int4", "x", "y", "plain"), 1.0) | {quickest: 0.8}
    names, best = fixed_and_others(lengths)
    turns = [name for name, _ in itertools.groupby(names)]
    assert best == quickest and list(dict.fromkeys(turns)) == ["dense", "int8", "int4", "x", "y", "plain"]


def test_fixed_ways_are_told_apart_before_the_model_is_asked():
    """Measuring for it may take all of the budget."""
    fixed, noise = [candidate("dense", DENSE), candidate("int8"), candidate("int4")], itertools.cycle([0, 0.3, 0.1])
    trials = Trials(fixed, 100, lambda: More((), [candidate("x")], seconds=1e6), budget=lambda step: 100.0)
    names = []
    while not trials.ended:
        names.append(name_of(trials.current))
        trials.step_ended({"dense": 1.4, "int8": 1.2, "int4": 1.0}[names[-1]] + next(noise))
    assert min(map(names.count, ("int8", "int4"))) > 5 and name_of(trials.results()[0].plan) == "int4"


def test_the_last_part_of_the_budget_is_for_the_finalists():
    lengths = {"dense": 1.0, "int8": 0.95, "int4": 0.9, "x": 0.5, "y": 0.5, "plain": 0.5}
    spent = Spent(seconds=8.0)
    names, best = fixed_and_others(lengths, budget=lambda step: 11.0, spent=spent)
    assert best == "int4" and not {"x", "y", "plain"} & set(names) and names.count("int4") > 3


def test_no_other_plan_of_a_compressor_is_tried_whose_fixed_ways_are_far_behind():
    lengths = {"dense": 0.5, "int8": 1.0, "int4": 1.0, "x": 0.4, "y": 0.4, "plain": 0.6}
    names, best = fixed_and_others(lengths)
    assert best == "dense" and "plain" in names and not {"x", "y"} & set(names)


def test_a_fixed_way_that_is_held_is_no_new_plan_at_the_end():
    fixed = [candidate("a"), candidate("dense", DENSE)]
    fixed += [replace(one, held=True) for one in fixed]
    trials, names = Trials(fixed, 100, pushed=True), []
    while not trials.ended:
        names.append((name_of(trials.current), trials.current.held))
        trials.step_ended(0.7 if names[-1] == ("a", True) else 1.0)
    found = [(name_of(one.plan), one.plan.held) for one in trials.results()]
    assert found[0] == ("a", True) and len(found) == len(set(found)) == 4


def test_trials_end_after_so_many_steps_and_other_steps_are_none():
    plans = [candidate("a"), candidate("dense", DENSE)]
    names, results = tried(plans, {"a": math.nan, "dense": math.nan}, most=7)
    assert len(names) == 7 and len(set(names)) == 1 and not results, "no step had the tensors of the plans"
    names, results = tried(plans, {"a": 0.9, "dense": 1.0}, most=5)
    assert len(names) == 5 and name_of(results[0].plan) == "a", "the last turn is not over, but was begun"


def training(trials, lengths, steps):
    """The name of the plan of each step of a training that follows the trials, and then the best plan."""
    names = []
    while not trials.ended and len(names) < steps:
        names += [name_of(trials.current)] * max(1, trials.pause)
        trials.step_ended(lengths[names[-1]])
    best = name_of(trials.results()[0].plan)
    return [*names, *[best] * (steps - len(names))][:steps]


def paced(lengths, share):
    """6000 steps on a slow network: the names of their plans, what planning has cost before each, and its share."""
    fixed = [candidate(n, DENSE if n == "dense" else FP16, 3.0) for n in ("int4", "int8", "fp16", "dense")]
    trials = Trials(
        fixed, 100, lambda: More((), [candidate("x")], seconds=1.25), budget=lambda step: 25.0,
        spent=Spent(5 * 2.5, 5, 2.5, 0.0, elapsed=5 * 2.5), share=share, measuring=lambda step: 1.25,
    )  # fmt: skip
    names = training(trials, lengths, 6000)
    assert trials.ended
    seconds = np.array([lengths[name] for name in names])
    best = np.minimum.accumulate(seconds)  # of what was tried
    measured = 1.25 * (np.arange(6000) >= names.index("x"))
    return names, np.cumsum(seconds - best) + measured, share * (5 * 2.5 + np.cumsum(seconds) + measured)


@pytest.mark.parametrize("quickest", ["int4", "int8", "fp16", "dense", "x"])
def test_trials_pause_when_they_have_cost_their_share(quickest):
    lengths = {"int4": 0.9, "int8": 1.1, "fp16": 1.3, "dense": 2.5, "x": 1.0} | {quickest: 0.8}
    most = {}
    for share in (0.01, 0.1, 1):
        names, cost, allowed = paced(lengths, share)
        assert names[-1] == quickest
        assert (cost - allowed).max() <= 6 * (max(lengths.values()) - 0.8), "one turn more, at most"
        most[share] = (cost - 0.01 * allowed / share).max()
    assert most[0.01] < most[1], "without pauses, planning costs as much earlier"


def test_a_plan_that_was_followed_before_the_trials_has_no_other_turn():
    fixed = [candidate("int4"), candidate("int8"), candidate("dense", DENSE)]
    spent = Spent(9.0, 5, dense_at_most=5.0, known={fixed[1].digest: ([1.9], [1.6, 1.7])}, elapsed=13.0)
    trials = Trials(fixed, 100, budget=lambda step: 20.0, spent=spent, share=0.05)
    names = training(trials, {"int4": 0.9, "int8": 1.65, "dense": 5.0}, 400)
    assert names[:40] == ["int4"] * 40, "it is far quicker than what was watched, and dense is known to be long"
    assert names.index("dense") > 40 and names.count("dense") == 1 and names[-1] == "int4"
    assert {name_of(one.plan): one.seconds for one in trials.results()} == {"int4": 0.9, "int8": 1.6, "dense": 5.0}


def test_what_is_far_too_long_is_not_tried_with_pushes_at_another_time():
    fixed = [candidate("int4"), candidate("fp16")]
    fixed = [replace(one, held=held) for one in fixed for held in (False, True)] + [candidate("dense", DENSE)]
    names = training(Trials(fixed, 100, pushed=True), {"int4": 1.0, "fp16": 1.6, "dense": 1.2}, 60)
    assert names.count("fp16") == 1


def test_planning_ends_when_the_tensors_change_in_a_pause():
    fixed = [candidate("int4"), candidate("dense", DENSE)]
    trials, steps = Trials(fixed, 30, spent=Spent(elapsed=1.0, dense=5.0), share=0.01), 0
    while not trials.ended:
        count = max(1, trials.pause)
        trials.step_ended(1.0 if steps < 4 else math.nan)
        steps += count
    assert 4 < steps < 60


def test_a_plan_that_is_slow_in_the_first_steps_alone_is_not_passed_over():
    """Everything is slower in the first steps of a run, which are those of the plan with the smallest payloads."""
    fixed, names = [candidate("int4"), candidate("int8"), candidate("dense", DENSE)], []
    trials = Trials(fixed, 100, budget=lambda step: 5.0, spent=Spent(1.0, 5, 0.4, 0.0, elapsed=1.0), share=0.05)
    while not trials.ended and len(names) < 300:
        names += [name_of(trials.current)] * max(1, trials.pause)
        trials.step_ended({"int4": 0.2, "int8": 0.25, "dense": 0.4}[names[-1]] + 0.1 * (len(names) < 5))
    assert names[30:300].count("int8") < 10


def test_a_plan_without_room_ends_a_pause():
    """The one that was watched, where another program has taken the memory since."""
    fixed = [candidate("int8"), candidate("int4"), candidate("dense", DENSE)]
    spent = Spent(1.0, 5, known={fixed[0].digest: ([1.0], [1.0, 1.0])}, elapsed=1.0, dense=9.0, exposed=1.0)
    trials, names = Trials(fixed, 100, spent=spent, share=0.01), []
    while not trials.ended and len(names) < 500:
        name = name_of(trials.current)
        if name == "int8":
            trials.refuse()
        else:
            names.append(name)
            trials.step_ended(1.5)
    assert trials.ended and set(names) <= {"int4", "dense"} and names


@pytest.mark.parametrize("compiling", [0.0, 8.0])
def test_dense_plans_are_tried_early_where_they_may_be_the_quickest(compiling):
    """Whatever it took to compile the compressors, which is all of the budget."""
    fixed = [replace(candidate(n), held=held) for n in ("int4", "int8") for held in (False, True)]
    fixed += [replace(candidate("dense", DENSE), held=held) for held in (False, True)]
    spent = Spent(1.0, 5, dense_at_most=0.2, known={fixed[3].digest: ([8.0], [0.115, 0.115])}, elapsed=9.0)
    trials, names = Trials(fixed, 100, budget=lambda step: 5.0, spent=spent, pushed=True, share=0.05), []
    while not trials.ended and len(names) < 900:
        names += [name_of(trials.current)] * max(1, trials.pause)
        first = compiling * (names.count("int4") == 1)
        trials.step_ended({"int4": 0.12, "int8": 0.115, "dense": 0.09}[names[-1]] + first)
    assert names[0] == "dense" and name_of(trials.results()[0].plan) == "dense"


def test_planning_anew_expects_the_first_step_of_a_plan_to_prepare_it():
    fixed = [candidate("int4"), candidate("int8"), candidate("dense", DENSE)]
    spent = Spent(0.1, known={fixed[1].digest: ((), [0.3] * 5)}, elapsed=500.0)
    names, trials = first_steps([], {"int4": 0.2, "int8": 0.3, "dense": 0.6}, 0.3, fixed=fixed, spent=spent)
    assert names.count("int4") > 2 and name_of(trials.results()[0].plan) == "int4"


def test_there_is_a_pause_before_the_first_plan_if_it_is_known_to_be_long():
    fixed = [candidate("int8"), candidate("dense", DENSE)]
    spent = Spent(1.0, 5, dense_at_most=20.0, known={fixed[0].digest: ([2.5], [2.5] * 3)}, elapsed=30.0)
    assert training(Trials(fixed, 100, spent=spent, share=0.05), {"int8": 2.5, "dense": 20.0}, 60)[:60] == ["int8"] * 60


def test_a_step_that_other_work_delays_earns_no_budget_nor_does_it_hide_what_preparing_takes():
    trials, names = modelled([candidate("a"), candidate("b", predicted=1.1), candidate("dense", DENSE, 1.2)], 100), []
    before = trials.cost(1.0)
    trials.step_ended(math.nan)
    assert name_of(trials.current) == "a" and trials.cost(1.0) == before
    lengths = {"a": 1.0, "b": 0.8, "dense": 1.2}
    while not trials.ended:
        names.append(name_of(trials.current))
        prepares = names[-1] != "a" and names.count(names[-1]) == 1  # a step that does not count has prepared "a"
        trials.step_ended(lengths[names[-1]] + 3.0 * prepares)
    assert names.count("b") > 2 and name_of(trials.results()[0].plan) == "b"


@pytest.mark.parametrize(
    ("steps", "best"),
    [
        ({}, "onebit"),
        ({"int2": 0.2}, "int2"),
        ({"onebit": 0.9, "int2": 0.7}, "int4"),
        ({"onebit": 0.5, "int2": 0.66, "int4": 0.4, "int8": 0.7}, "int4"),
        ({"onebit": 0.5, "int2": 0.66, "int4": 0.64, "int8": 0.64, "fp16": 0.3}, "fp16"),
    ],
    ids=["smallest", "quicker", "slow", "known", "far"],
)
def test_momenta_travel_first_by_the_smallest_payloads(steps, best):
    """What ``onebit`` and ``int2`` differ by rules out no larger payloads."""
    names = ("onebit", "int2", "int4", "int8", "fp16")
    lengths = {"onebit": 0.3, "int2": 0.5, "int4": 0.6, "int8": 1.0, "fp16": 1.5, "dense": 9.0, **steps}
    plans = {name: candidate(name, Strategy(name, "flat-allgather")) for name in names}
    dense = candidate("dense", DENSE)
    known = {plans["int8"].digest: ([lengths["int8"]], [lengths["int8"]] * 5)}
    nbytes = {plan.digest: size for plan, size in zip((*plans.values(), dense), (1, 2, 4, 8, 16, 32))}
    spent = Spent(6.0, 6, dense_at_most=9.0, known=known, elapsed=6.0)
    trials = Trials([*plans.values(), dense], 100, spent=spent, payload_bytes=nbytes, share=0.03)
    followed = training(trials, lengths, 800)
    assert followed[:5] == ["onebit"] * 5 and followed[-1] == best


def both_ways(*names):
    """Plans of each name that push, and then those that hold what is pushed."""
    return [plan for name in names for plan in (candidate(name), replace(candidate(name), held=True))]


def after_held_steps(disturbed=0, held=0.9):
    """Trials after steps with larger payloads that were held; pushes take twice as long. The plans of all steps."""
    plans = [*both_ways("small", "large"), candidate("dense", DENSE)]
    nbytes = {plan.digest: n for plan, n in zip(plans, (1, 1, 2, 2, 9))}
    spent = Spent(6.0, 6, dense_at_most=9.0, known={plans[3].digest: ([1.0], [1.0] * 5)})
    trials, steps = Trials(plans, 100, spent=spent, payload_bytes=nbytes), []
    while not trials.ended:
        steps.append((name_of(trials.current), trials.current.held))
        waits = 9.0 if name_of(trials.current) == "dense" else 0.0 if trials.current.held else 1.1
        other_work = 0.7 if steps[-1] == ("small", True) and steps.count(steps[-1]) <= disturbed else 0.0
        trials.step_ended((held if steps[-1][0] == "small" else 1.0) + waits + other_work)
    best = trials.results()[0].plan
    return steps, (name_of(best), best.held)


@pytest.mark.parametrize("disturbed", [0, 3])
def test_smaller_payloads_at_the_same_time_are_tried_first_and_not_ruled_out_by_a_disturbance(disturbed):
    """That pushes take twice as long says nothing of what is held."""
    steps, best = after_held_steps(disturbed)
    assert steps[:3] == [("small", True)] * 3 and best == ("small", True)


def test_smaller_payloads_that_are_slower_are_left():
    steps, best = after_held_steps(held=1.6)
    assert best == ("large", True) and steps.count(("small", True)) < 12


def test_what_another_twin_gained_speaks_for_one_that_was_left_out():
    """Without payloads that are known: "b" is far too long while it is pushed, and then the quickest."""
    plans = [*both_ways("b", "a"), candidate("dense", DENSE)]
    lengths = {("a", False): 1.0, ("a", True): 0.4, ("b", False): 0.95, ("b", True): 0.35, ("dense", False): 0.5}
    watched = {plans[3].digest: ([0.4], [0.4] * 5)}
    trials, tried = Trials(plans, 100, spent=Spent(2.4, 6, known=watched)), set()
    while not trials.ended:
        found = name_of(trials.current), trials.current.held
        tried.add(found)
        trials.step_ended(lengths[found])
    best = trials.results()[0].plan
    assert tried >= {("a", False), ("b", False), ("b", True)} and (name_of(best), best.held) == ("b", True)


def test_steps_that_no_decision_needs_come_in_a_row():
    """Of plans that had a turn before, and of smaller payloads; never beyond the last step of the trials."""
    for most in (7, 100):
        trials = Trials([*both_ways("a", "b"), candidate("dense", DENSE)], most)
        turns, taken, known = [], 0, set()
        while not trials.ended:
            plan, ahead = trials.current, trials.pause or trials.ahead
            assert taken + ahead <= most and (ahead == 1 or plan.digest in known)
            turns.append(ahead)
            for _ in range(ahead):
                assert trials.current is plan
                trials.step_ended(1.0 + 0.1 * (taken % 3))
                taken += 1
            known.add(plan.digest)
        assert (max(turns) > 1) == (most == 100)


@pytest.mark.parametrize(("compiling", "budget", "asked"), [(0.0, 5.0, 1), (3.0, 5.0, 0), (3.0, 9.0, 1)])
def test_the_model_is_asked_if_what_it_compiles_fits_into_half_of_the_budget(compiling, budget, asked):
    calls = []
    fixed = [candidate("a"), candidate("dense", DENSE)]
    trials = Trials(fixed, 100, lambda: calls.append(1) or More(), lambda step: budget, compiling=compiling)
    while not trials.ended:
        trials.step_ended(0.1)
    assert len(calls) == asked


def test_a_smaller_plan_that_is_far_too_long_has_two_steps():
    steps, best = after_held_steps(held=2.5)
    assert steps[:2] == [("small", True)] * 2 and steps.count(("small", True)) == 2 and best == ("large", True)


def test_a_smaller_plan_that_is_refused_is_not_tried_again():
    plans = [*both_ways("small", "large"), candidate("dense", DENSE)]
    nbytes = {plan.digest: n for plan, n in zip(plans, (1, 1, 2, 2, 9))}
    spent = Spent(6.0, 6, known={plans[3].digest: ([1.0], [1.0] * 5)})
    trials, refused = Trials(plans, 100, spent=spent, payload_bytes=nbytes), 0
    while not trials.ended:
        if trials.current.digest == plans[1].digest:
            refused += 1
            trials.refuse()
        else:
            trials.step_ended(1.0)
    assert refused == 1


def test_a_budget_that_is_spent_within_a_row_ends_the_trials_after_it():
    """Its steps have run, so their times count."""
    plans = [candidate("a"), candidate("b"), candidate("dense", DENSE)]
    trials, ahead, known = Trials(plans, 100, budget=lambda step: 3.0), 1, {"a": 1.0, "b": 1.01, "dense": 1.02}
    while ahead == 1:
        trials.step_ended(known[name_of(trials.current)])
        ahead = trials.ahead
    for left in range(ahead, 0, -1):
        assert trials.ahead == left and not trials.ended
        trials.step_ended(9.0)
    assert trials.ended and trials.cost(1.0) > 8.0 * ahead
