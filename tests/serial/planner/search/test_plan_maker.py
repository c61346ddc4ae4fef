"""Plans that the planner makes: never worse than simpler ones, free of noise, foretold as brute force says."""

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import COMPRESSOR, random_problem, random_profile, random_workload

from espresso_mpi.errors import ConfigError
from espresso_mpi.planner.model.curve import Curve, Sample
from espresso_mpi.planner.model.problem import Problem, evaluated
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.planner.model.tree import routes
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor
from espresso_mpi.planner.plan import Draft, _Maker, defaults, outlooks, plan, profiled
from espresso_mpi.planner.search.baselines import baseline, usable
from espresso_mpi.planner.search.budget import errors, total_error
from espresso_mpi.planner.search.noise import Doubts, best_dense, gain_over, relative_error, without_noise
from espresso_mpi.planner.search.relaxation import relaxed
from espresso_mpi.planner.search.search import search
from espresso_mpi.planner.search.swaps import completed, improved, moved, swapped, swaps_of
from espresso_mpi.planner.workloads.clusters import TESTBEDS
from espresso_mpi.planner.workloads.models import model_workload
from espresso_mpi.types import ROUTES, Route, Strategy

ORDERS = ("backprop", "fifo", "priority", "schedule")
EXACT = ORDERS[:3]
"""Those in which a swap is what the timeline says of the swapped choice; in the last, the keys stay as they are."""
SEVERAL = (COMPRESSOR, "fp16", "onebit")


def chosen(problem, seed):
    """A random choice."""
    rng = np.random.default_rng(seed)
    return np.array([rng.choice(problem.options(i)) for i in range(problem.tensors)], np.int64)


def swap(choice, tensor, row):
    other = choice.copy()
    other[tensor] = row
    return other


# --- swaps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", EXACT)
def test_swaps_are_what_the_timeline_says(order):
    problem = random_problem(1, tensors=6, order=order)
    choice = chosen(problem, 2)
    tensors, rows = (part[::7] for part in swaps_of(problem))
    expected = [problem.timeline.seconds(swap(choice, i, row)) for i, row in zip(tensors, rows)]
    np.testing.assert_allclose(swapped(problem.timeline, choice, tensors, rows), expected, rtol=1e-12)


def test_a_swap_with_the_same_keys_is_a_schedule_of_the_swapped_choice():
    """Not below what loads and chains of that choice alone demand, and near to the best schedule of it."""
    problem = random_problem(1, tensors=6, order="schedule")
    choice = chosen(problem, 2)
    tensors, rows = (part[::7] for part in swaps_of(problem))
    times = swapped(problem.timeline, choice, tensors, rows)
    for tensor, row, time in zip(tensors, rows, times):
        alone = swap(choice, tensor, row)
        sets = {i: problem.candidates_of(i).only(_place(problem, i, r)) for i, r in enumerate(alone)}
        only = problem.with_sets(problem.workload, sets, list(sets))
        assert relaxed(only).value <= time * (1 + 1e-12)
        assert time <= 1.5 * problem.timeline.seconds(alone)
        assert row != choice[tensor] or time == problem.timeline.seconds(choice)


def _place(problem, tensor, row):
    return np.array([row - problem.options(tensor).start])


@pytest.mark.parametrize("order", EXACT)
def test_improved_choices_have_no_better_neighbour(order):
    problem = random_problem(3, order=order)
    start = chosen(problem, 4)
    found = improved(problem, start)
    assert problem.seconds(found) <= problem.seconds(start)
    assert swapped(problem.timeline, found, *swaps_of(problem)).min() >= problem.timeline.seconds(found) * (1 - 1e-12)


def test_improved_choices_have_no_much_better_neighbour_by_schedules():
    """Most neighbours are ruled out by rougher figures there."""
    above = []
    for seed in range(6):
        problem = random_problem([seed, 3], order="schedule")
        start = chosen(problem, seed)
        found = improved(problem, start)
        assert problem.seconds(found) <= problem.seconds(start)
        neighbours = [swap(found, i, row) for i in range(problem.tensors) for row in problem.options(i)]
        above.append(problem.seconds(found) / min(map(problem.seconds, neighbours)) - 1)
    assert np.mean(above) <= 0.01 and min(above) <= 1e-12


def test_completed_candidates_hold_more_and_the_same_choice():
    rng = np.random.default_rng(5)
    profile, workload = random_profile(rng, compressors=SEVERAL), random_workload(rng, 4)
    problem = Problem.of(workload, profile, [COMPRESSOR, "onebit"], routes=routes(("cpu",), linear=True))
    choice = chosen(problem, 6)
    whole = completed(problem, SEVERAL)
    same = moved(choice, problem, whole)
    assert [problem.strategy(row) for row in choice] == [whole.strategy(row) for row in same]
    assert problem.seconds(choice) == whole.seconds(same)
    for i in range(whole.tensors):
        candidates = [whole.strategy(row) for row in whole.options(i)]
        assert len(set(candidates)) == len(candidates)
        assert {strategy.compressor for strategy in candidates} == {"none", "topk", "fp16", "onebit"}
        alone = replace(workload, tensors=workload.tensors[i : i + 1])
        fp16 = Problem.of(alone, profile, ["fp16"], routes=problem.routes)
        assert {fp16.strategy(row) for row in fp16.options(0)} <= set(candidates)


# --- what is foretold -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", EXACT)
@pytest.mark.parametrize("seed", [7, 8])
def test_outlooks_are_what_brute_force_finds(order, seed):
    rng = np.random.default_rng(seed)
    workload = random_workload(rng, 4)
    few = [
        Route.parse(text)
        for text in (*ROUTES.values(),)
        if "allreduce@inter/dec" not in text and "allreduce@flat/dec" not in text
    ]
    problem = Problem.of(workload, random_profile(rng), [COMPRESSOR], routes=few, prune=False, order=order)
    choice = chosen(problem, seed)
    draft = Draft(tuple((t.name,) for t in workload.tensors), problem, choice)
    plain = problem.timeline.seconds(choice)
    for i, entry in enumerate(outlooks(draft)):
        others = {row: problem.timeline.seconds(swap(choice, i, row)) for row in problem.options(i) if row != choice[i]}
        dense = [s for row, s in others.items() if problem.method[row] < 0]
        assert entry.seconds == pytest.approx(problem.alone[choice[i]])
        assert entry.margin == pytest.approx(min(others.values()) - plain, abs=1e-12)
        runner_up = problem.option(i, entry.runner_up)
        assert others[runner_up] == pytest.approx(min(others.values()))
        expected = min(dense) - plain if problem.method[choice[i]] >= 0 else 0.0
        assert entry.dense_margin == pytest.approx(expected, abs=1e-12)
        assert entry.exposed == pytest.approx(np.clip(plain - without(problem, choice, i), 0, entry.seconds), abs=1e-12)


def without(problem, choice, tensor):
    """F with the operations of one tensor free, from a timeline in which its option takes no time."""
    o = problem.timeline.options
    row = choice[tensor]
    same = [i for i in range(choice.size) if choice[i] == row and i != tensor]
    if same:  # an option of its own for the others, so that only this tensor is free
        width = slice(row, row + 1)
        grown = replace(o, **{name: np.concatenate([getattr(o, name), getattr(o, name)[width]])
                              for name in ("lane", "seconds", "count", "repeats")})  # fmt: skip
        choice = choice.copy()
        choice[same] = o.count.size
        o = grown
    seconds = o.seconds.copy()
    seconds[row] = 0.0
    return replace(problem.timeline, options=replace(o, seconds=seconds)).seconds(choice)


# --- noise ------------------------------------------------------------------------------------------------------------


def wide(profile, key, factor):
    """The profile with one curve scaled: the independent way to a scaled timeline."""
    kind, *rest = key
    if kind == "move":
        return replace(profile, moves={**profile.moves, tuple(rest): scaled(profile.moves[tuple(rest)], factor)})
    if kind == "copy":
        return replace(profile, copies={**profile.copies, rest[0]: scaled(profile.copies[rest[0]], factor)})
    if kind == "check":
        return replace(profile, check=scaled(profile.check, factor))
    codecs = {k: scaled(c, factor) if (k[1], k[2]) == (rest[1], kind) else c for k, c in profile.codecs.items()}
    return replace(profile, codecs=codecs)


def scaled(curve, factor):
    return Curve(curve.knots, tuple(value * factor for value in curve.values))


def test_the_noise_of_a_gain_is_what_scaled_profiles_say():
    rng = np.random.default_rng(9)
    profile, workload = random_profile(rng, tensor=1e-4), random_workload(rng, 5)
    few = [Route.parse(t) for t in ("flat", "hierarchical", "hierarchical-alltoall", "flat-allgather")]
    problem = Problem.of(workload, profile, [COMPRESSOR], routes=few, prune=False)
    ours, other = chosen(problem, 1), problem.dense()
    doubts = Doubts(problem, 0.1)
    keys = {key for row in (*ours, *other) for key in doubts.curves(int(row))} - {("check",)}
    gain = problem.seconds(other) - problem.seconds(ours)
    squares = 0.0
    for key in keys:
        most = 0.0
        for factor in (1.1, 0.9):
            again = Problem.of(workload, wide(profile, key, factor), [COMPRESSOR], routes=few, prune=False)
            most = max(most, abs(again.seconds(other) - again.seconds(ours) - gain))
        squares += most**2
    found = gain_over((doubts, ours), (doubts, other))
    assert found.seconds == pytest.approx(gain)
    # what every tensor costs whatever it does is scaled as well, with no more effect than on both alike
    assert found.noise == pytest.approx(np.sqrt(squares), rel=0.02)
    assert found.noise > 0


@pytest.mark.parametrize("order", EXACT)
def test_gains_of_single_tensors_are_those_of_choices_that_differ_in_one(order):
    problem = random_problem(10, order=order)
    choice, doubts = chosen(problem, 11), Doubts(problem, 0.2)
    dense = best_dense(problem, choice)
    for i, gain in enumerate(doubts.single(choice, dense)):
        if choice[i] == dense[i]:
            assert gain is None
            continue
        which = np.arange(choice.size) == i
        expected = gain_over((doubts, choice), (doubts, swap(choice, i, dense[i])), which)
        assert gain.seconds == pytest.approx(expected.seconds, abs=1e-12)
        assert gain.noise == pytest.approx(expected.noise, abs=1e-12)


def test_a_curve_may_be_wrong_by_its_medians_and_its_residual():
    curve = Curve((0.0,), (1.0,), 0.4, (Sample(1, 1.0, 0.6, 4),))  # medians known to 0.6 / sqrt(4)
    profile = two_nodes(Curve((0.0,), (1e-2,)), measured_as=curve)
    assert relative_error(profile, curve) == pytest.approx(0.5)
    assert relative_error(profile, Curve((0.0,), (1.0,))) == pytest.approx(profile.noise()) == pytest.approx(0.3)
    assert relative_error(replace(profile, measured=False), Curve((0.0,), (1.0,))) == 0


def constant(seconds, residual=0.0):
    return Curve((0.0,), (seconds,), residual)


def two_nodes(dense, packed=8.9e-3, measured_as=None, **more):
    """Dense tensors along one allreduce, compressed ones along one allgather and 0.1 ms of codecs; all else is slow."""
    slow = measured_as or constant(1.0)
    moves = {
        (op, level, alone): slow
        for op in ("allreduce", "reduce_scatter", "allgather", "alltoall", "reduce", "gather", "broadcast")
        for level, alone in (("flat", False), ("inter", False), ("inter", True))
    }
    moves |= {("allreduce", "flat", False): dense, ("allgather", "flat", False): constant(packed)}
    codecs = {("onebit", "cpu", direction): constant(2.5e-5) for direction in ("encode", "decode")}
    codecs["onebit", "cpu", "decode"] = constant(3.75e-5)  # two payloads are decoded
    return Profile(2, 1, codecs, moves, {}, Curve.line(0, 0), **more)


ONE = Workload((WorkloadTensor("w", 1000, 1e-3),))
"""One tensor, which compression brings home in 9 ms instead of 10."""


def compressors_of(made):
    return [strategy.compressor for strategy in made.strategies.values()]


@pytest.mark.parametrize(
    ("residual", "expected"), [(0.0, "onebit"), (0.05, "onebit"), (0.095, "onebit"), (0.105, "none"), (0.3, "none")]
)
def test_compression_must_gain_more_than_the_noise(residual, expected):
    made = plan(ONE, two_nodes(constant(1e-2, residual)), ["onebit"])
    assert compressors_of(made) == [expected]
    forecast = made.forecast
    assert forecast.dense == pytest.approx(1.1e-2)
    assert forecast.seconds == pytest.approx(1.0e-2 if expected == "onebit" else 1.1e-2)
    if expected == "onebit":
        assert (forecast.noise, forecast.forgone) == (pytest.approx(residual * 1e-2), 0)


@pytest.mark.parametrize(("noise", "expected"), [(0.0, "onebit"), (0.05, "onebit"), (0.2, "none")])
def test_noise_can_be_given(noise, expected):
    assert compressors_of(plan(ONE, two_nodes(constant(1e-2, 0.3)), ["onebit"], noise=noise)) == [expected]


def test_what_two_plans_have_in_common_is_not_noise():
    """A check that may be wrong by half takes far longer than what compression gains, in both plans alike."""
    profile = replace(two_nodes(constant(1e-2)), check=constant(0.5, 0.5))
    assert compressors_of(plan(ONE, profile, ["onebit"])) == ["onebit"]


def test_what_nobody_waits_for_is_not_noise():
    """A dense tensor that may take twice as long is still hidden; that gains nothing, so nothing is compressed."""
    workload = Workload((WorkloadTensor("w", 1000, 1e-3), WorkloadTensor("last", 10, 1.0)))
    made = plan(workload, two_nodes(constant(1e-2, 0.5), packed=1e-2), ["onebit"], fusion=False)
    assert compressors_of(made) == ["none", "none"]


def test_one_of_two_that_stand_in_for_each_other_stays_compressed():
    """Each by itself gains nothing while the other is compressed; both dense lose 2 ms."""
    workload = Workload((WorkloadTensor("a", 1000, 0.0), WorkloadTensor("b", 1000, 0.0), WorkloadTensor("c", 1, 0.01)))
    line = Curve((0.0, 1.0, 4000.0), (0.0, 0.0, 6e-3))
    profile = replace(two_nodes(line), measured=False)
    profile = replace(profile, moves={**profile.moves, ("allgather", "flat", False): constant(1e-3)})
    problem = Problem.of(workload, profile, ["onebit"], lanes="host")
    both = np.array([problem.option(i, Strategy("onebit", "flat-allgather")) for i in (0, 1)]
                    + [problem.option(2, Strategy("none", "flat"))])  # fmt: skip
    kept = without_noise(Doubts(problem), both)
    assert (problem.method[kept] >= 0).sum() == 1
    assert problem.seconds(kept) == pytest.approx(problem.seconds(both))


@pytest.mark.parametrize(("spread", "expected"), [(0.0, "onebit"), (0.1, "none")])
def test_the_spread_of_the_steps_is_carried_through_the_timeline(spread, expected):
    """Dense communication sticks out by 0.2 ms behind a backward pass of 9.8 ms: a tenth longer would hide it all."""
    tensors = (WorkloadTensor("w", 1000, 0.0), WorkloadTensor("last", 1, 9.8e-3))
    line = Curve((0.0, 4.0, 4000.0), (0.0, 0.0, 1e-2))
    made = plan(Workload(tensors, spread=spread), two_nodes(line), ["onebit"], fusion=False)
    assert compressors_of(made) == [expected, "none"]
    assert made.forecast.seconds == pytest.approx(9.8e-3 if expected == "onebit" else 1e-2, rel=1e-3)


@pytest.mark.parametrize("seed", [26, 27])
def test_taking_back_what_gains_nothing_makes_no_step_longer_by_schedules(seed):
    """What a single swap gains with the keys as they are is not what it gains with schedules of its own."""
    problem = random_problem([seed, 21], tensors=8, order="schedule")
    choice = search(problem, effort="quick").choice
    kept = without_noise(Doubts(problem, 0.0), choice)
    assert problem.seconds(kept) <= problem.seconds(choice) * (1 + 1e-12)


@pytest.mark.parametrize(("seed", "noise"), [(535, 0.0), (535, 0.1)])
def test_no_runner_up_is_quicker_unless_it_compresses_what_is_dense(seed, noise):
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, compressors=(COMPRESSOR, "int8"))
    workload = random_workload(rng, int(rng.integers(3, 14)), "gpu", sizes=6)
    made = plan(workload, profile, ["int8", COMPRESSOR], noise=noise)
    for buffer in made.forecast.buffers:
        if buffer.runner_up.compressor in ("none", made.strategy(buffer.tensors[0]).compressor):
            other = replace(made, strategies=made.strategies | dict.fromkeys(buffer.tensors, buffer.runner_up))
            problem, choice = evaluated(other, workload, profile, lanes=made.forecast.lanes, order="schedule")
            assert problem.seconds(choice) >= made.forecast.seconds * (1 - 1e-12), buffer


def test_dense_when_all_gains_together_are_below_the_noise():
    """Many tensors share a curve: it is wrong for all of them at once."""
    workload = Workload(tuple(WorkloadTensor(f"t{i}", 1000, 1e-3) for i in range(6)))
    made = plan(workload, two_nodes(constant(1e-2, 0.2)), ["onebit"], fusion=False)
    assert set(compressors_of(made)) == {"none"}


# --- whole plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "device", "seed"),
    [("schedule", "cpu", 12), ("fifo", "cpu", 13), ("schedule", "gpu", 14), ("backprop", "cpu", 15)],
)
def test_never_worse_than_a_baseline(order, device, seed):
    rng = np.random.default_rng(seed)
    profile, workload = random_profile(rng, compressors=SEVERAL), random_workload(rng, 8, device)
    made = plan(workload, profile, SEVERAL, order=order, noise=0.0)
    forecast = made.forecast
    problem, choice = evaluated(made, workload, profile, order=forecast.order, lanes=forecast.lanes)
    assert problem.seconds(choice) == pytest.approx(forecast.seconds)
    assert forecast.bound <= forecast.seconds * (1 + 1e-12)
    for spec in SEVERAL:
        for name in usable(workload):
            other = evaluated(
                baseline(name, workload, profile, spec), workload, profile, order=order, lanes=forecast.lanes
            )
            assert forecast.seconds <= other[0].seconds(other[1]) * (1 + 1e-9)
    assert min(forecast.baselines.values()) >= forecast.seconds * (1 - 1e-9)


@pytest.mark.parametrize("model, testbed", [("lstm", "pcie-25g"), ("lstm", "nvlink-100g"), ("vgg16", "nvlink-100g")])
def test_never_worse_than_a_baseline_for_models_of_the_paper(model, testbed):
    made = plan(model_workload(model), TESTBEDS[testbed].profile(), ["onebit"], fusion=False)
    forecast = made.forecast
    assert forecast.order == "schedule"
    assert forecast.bound <= forecast.seconds
    candidates = {name: seconds for name, seconds in forecast.baselines.items() if name != "fp16"}
    assert len(candidates) > 5
    assert forecast.seconds <= min(candidates.values()) * (1 + 1e-12)


def test_a_baseline_that_compresses_everything_is_improved_with_all_options():
    """It may stand in for the search's plan, and be made dense again: its own routes all compress."""
    rng = np.random.default_rng(22)
    profile, workload = random_profile(rng), random_workload(rng, 5)
    maker = _Maker.of(workload, profile, [COMPRESSOR], None, "schedule", False, True, None, None, 0.0, "normal")
    problem = maker.problem(workload, [COMPRESSOR])
    rival = maker.rival("everything-gpu", COMPRESSOR)
    slowest = [problem.options(i)[int(np.argmax(problem.alone[list(problem.options(i))]))] for i in range(5)]
    slow = Draft(rival.groups, problem, np.array(slowest))
    found = maker.quickest(slow, [rival])
    assert found.seconds <= rival.seconds < slow.seconds
    assert all((found.problem.method[list(found.problem.options(i))] < 0).any() for i in range(5))


def test_a_plan_says_what_it_was_made_for():
    rng = np.random.default_rng(14)
    profile = random_profile(rng, fingerprint={"mpi": "some"})
    workload = Workload(
        (WorkloadTensor("w", 6000, 1e-3, "float32", (2, 3000)), WorkloadTensor("b", 50, 2e-3)), "gpu", 1e-3
    )
    made = plan(workload, profile)
    assert made.made_for.tensors == {"w": ((2, 3000), "float32"), "b": (50, "float32")}
    assert (made.made_for.nodes, made.made_for.ranks_per_node, made.made_for.device) == (4, 4, "gpu")
    assert made.made_for.fingerprint == {"mpi": "some"}
    assert made.fuse_bytes == 0
    assert [name for entry in made.forecast.buffers for name in entry.tensors] == ["w", "b"]
    assert made.forecast.compute == pytest.approx(3e-3)


def test_without_compressors_a_plan_is_dense():
    rng = np.random.default_rng(15)
    profile, workload = random_profile(rng), random_workload(rng, 6)
    made = plan(workload, profile, [])
    assert set(compressors_of(made)) == {"none"}
    assert made.forecast.seconds == made.forecast.dense
    plain = evaluated(baseline("fp32", workload, profile, COMPRESSOR), workload, profile, lanes=made.forecast.lanes,
                      order=made.forecast.order)  # fmt: skip
    assert made.forecast.seconds <= plain[0].seconds(plain[1])


def test_devices_and_sums_are_kept_to():
    rng = np.random.default_rng(16)
    profile, workload = random_profile(rng, compressors=SEVERAL), random_workload(rng, 5)
    slow = {key: scaled(curve, 30) for key, curve in profile.moves.items()}
    made = plan(workload, replace(profile, moves=slow), SEVERAL, devices=("cpu",), linear=False, noise=0.0)
    assert set(compressors_of(made)) != {"none"}
    assert not any("gpu" in str(s.route) or s.route.sums_payloads for s in made.strategies.values())


@pytest.mark.parametrize("order", ["backprop", "fifo"])
def test_an_error_budget_is_kept(order):
    rng = np.random.default_rng(17)
    profile, workload = random_profile(rng, compressors=SEVERAL), random_workload(rng, 6, "cpu")
    seconds = []
    for budget in (0.0, 1e-4, 0.2, None):
        made = plan(workload, profile, SEVERAL, order=order, error_budget=budget, noise=0.0)
        assert budget is None or made.forecast.error <= budget * (1 + 1e-12)
        seconds.append(made.forecast.seconds)
    assert seconds[0] >= seconds[-1]
    assert min(seconds) == pytest.approx(seconds[-1])


def test_the_error_of_a_plan_is_the_mean_over_its_elements():
    workload = Workload((WorkloadTensor("a", 30000, 0.0), WorkloadTensor("b", 10000, 0.0)), "gpu")
    profile = random_profile(np.random.default_rng(18))
    two_passes, dense = Strategy(COMPRESSOR, "flat-alltoall"), Strategy("none", "flat")
    problem = Problem.of(workload, profile, [COMPRESSOR], routes=[two_passes.route, dense.route], prune=False)
    choice = np.array([problem.option(0, two_passes), problem.option(1, dense)])
    from espresso_mpi import compressors

    once = compressors.get(COMPRESSOR).gaussian_error(30000)
    assert total_error(problem, choice) == pytest.approx(0.75 * 2 * once)
    assert errors(problem)[choice[1]] == 0


# --- arguments --------------------------------------------------------------------------------------------------------


def test_defaults_follow_the_device_and_the_profile():
    profile, workload = random_profile(np.random.default_rng(0)), random_workload(np.random.default_rng(0), 2)
    assert defaults(replace(workload, device="cpu"), profile) == ("host", "schedule")
    assert defaults(replace(workload, device="cpu"), replace(profile, overlaps=False)) == ("serial", "schedule")
    assert defaults(workload, replace(profile, measured=False)) == ("one-network", "schedule")
    assert defaults(workload, profile) == ("separate", "schedule")


def test_all_that_was_profiled_is_used():
    profile = random_profile(np.random.default_rng(0), compressors=SEVERAL)
    only_host = {key: curve for key, curve in profile.codecs.items() if key[:2] != ("fp16", "gpu")}
    assert profiled(replace(profile, codecs=only_host), ("cpu", "gpu")) == (COMPRESSOR, "onebit")
    assert profiled(replace(profile, codecs=only_host), ("cpu",)) == SEVERAL


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"devices": ("gpu",)}, "host memory"),
        ({"noise": -0.1}, "noise=-0.1; expected"),
        ({"error_budget": float("nan")}, "error_budget=nan; expected"),
        ({"compressors": ["int8"]}, "not in it"),
        ({"compressors": ["onebits"]}, "not known"),
        ({"lanes": "many"}, "lanes='many'; expected"),
        ({"order": "lifo"}, "order='lifo'; expected"),
    ],
)
def test_wrong_arguments_are_told(more, said):
    with pytest.raises(ConfigError, match=said):
        plan(ONE, two_nodes(constant(1e-2)), **{"compressors": ["onebit"], **more})


def test_a_profile_of_the_gpu_alone_is_enough_for_it():
    """Plans of others that compress on the CPU cannot be priced then, and are left out."""
    rng = np.random.default_rng(19)
    profile, workload = random_profile(rng), random_workload(rng, 3)
    on_gpu = {key: curve for key, curve in profile.codecs.items() if key[1] == "gpu"}
    made = plan(workload, replace(profile, codecs=on_gpu), [COMPRESSOR], devices=("gpu",))
    assert {name.split()[0] for name in made.forecast.baselines} == {"everything-gpu", "hipress", "hitopkcomm", "fp32"}
