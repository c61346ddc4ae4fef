"""What compressors make of an optimizer's moments, against slow formulas in float64; samples; assessments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import slow_network

from espresso_mpi import compressors
from espresso_mpi.arrays.buffers import adopt_gradient
from espresso_mpi.autotune.fidelity import BUDGETS, SMALL, Assessment, Fidelity, error_of
from espresso_mpi.autotune.samples import Samples, largest_share
from espresso_mpi.feedback import AUTO, Feedback
from espresso_mpi.planner import explain, plan
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor
from espresso_mpi.planner.planfile import from_json, to_json
from espresso_mpi.tuning import Tuning

BLOCK = 2048


def onebit(x):
    """Each block of 2048 as its mean magnitude with the sign of each element."""
    out = np.empty_like(x)
    for begin in range(0, x.size, BLOCK):
        block = x[begin : begin + BLOCK]
        out[begin : begin + BLOCK] = np.where(block < 0, -1, 1) * np.abs(block).mean()
    return out


def topk(x):
    """The largest tenth."""
    out, kept = np.zeros_like(x), np.argsort(-np.abs(x), kind="stable")[: x.size // 10]
    out[kept] = x[kept]
    return out


def oracle(method, gradients, rule, decay=1.0):
    """The error by its definition: all in float64, moments as sums with explicit weights."""
    gradients = gradients.astype(np.float64)
    if rule.endswith("momentum"):
        there_and_back = {1: [0] * 7, 3: [0, 1, 2, 1, 0, 1, 2], 7: range(7)}
        gradients = gradients[there_and_back[len(gradients)]]
    seen, residual = [], np.zeros(gradients.shape[1])
    for gradient in gradients:
        wanted = gradient + decay * residual
        seen.append(method(wanted))
        residual = wanted - seen[-1]
    steps = len(gradients)

    def moment(rows, beta, power):
        return sum((1 - beta) * beta ** (steps - 1 - step) * row**power for step, row in enumerate(rows))

    def relative(found, wanted):
        return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)

    if rule == "sgd-momentum":
        return relative(sum(seen), sum(gradients))
    if rule == "adam-momentum":
        elements = zip(np.transpose(seen), np.transpose(gradients))
        return np.mean([min(1, abs(sum(found) - sum(wanted)) / sum(abs(wanted))) for found, wanted in elements])
    first = relative(moment(seen, 0.9, 1), moment(gradients, 0.9, 1))
    second = relative(np.sqrt(moment(seen, 0.999, 2)), np.sqrt(moment(gradients, 0.999, 2)))
    return first if rule == "sgd" else max(first, second)


def stream(steps=5, n=5000, seed=0):
    """Gradients that drift: a part that stays, and noise."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(n) + 0.7 * rng.standard_normal((steps, n))).astype(np.float32)


@pytest.mark.parametrize("rule", ["adam", "sgd", "adam-momentum", "sgd-momentum"])
@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize(
    ("spec", "method", "feedback"),
    [
        ("onebit", onebit, AUTO),
        ("topk:ratio=0.1", topk, AUTO),
        ("onebit", onebit, Feedback("plain", decay=0.5)),
        ("topk:ratio=0.1", topk, Feedback("none")),
    ],
)
def test_the_error_is_that_of_its_definition(spec, method, feedback, steps, rule):
    gradients = stream(steps)
    decay = {"none": 0.0}.get(feedback.kind, feedback.decay)
    found = error_of(compressors.get(spec), gradients, feedback, rule)
    assert found == pytest.approx(oracle(method, gradients, rule, decay), rel=1e-4)


@pytest.mark.parametrize("rule", ["adam", "sgd", "adam-momentum", "sgd-momentum"])
def test_the_error_does_not_depend_on_the_scale_of_the_loss(rule):
    gradients = stream()
    alike = {error_of(compressors.get("int4"), gradients * np.float32(2.0**k), AUTO, rule) for k in (-20, 0, 15)}
    assert max(alike) == pytest.approx(min(alike), rel=1e-5)


def test_zeros_that_stay_zeros_are_exact():
    assert error_of(compressors.get("onebit"), np.zeros((3, 100), np.float32), AUTO, "adam") == 0.0


def test_ef21_sends_differences():
    """A constant gradient: what was sent comes nearer with every step, and the error is that of the sums."""
    gradients, sent, seen = np.tile(stream(1), (4, 1)), np.zeros(5000), []
    for gradient in gradients.astype(np.float64):
        sent = sent + topk(gradient - sent)
        seen.append(sent)
    weights = 0.9 ** np.arange(3, -1, -1)
    wanted = weights.sum() * gradients[0].astype(np.float64)
    expected = np.linalg.norm(weights @ np.array(seen) - wanted) / np.linalg.norm(wanted)
    found = error_of(compressors.get("topk:ratio=0.1"), gradients, Feedback("ef21"), "sgd")
    assert found == pytest.approx(expected, rel=1e-4)


def test_levels_hold_for_gradients_of_noise_alone_what_they_say():
    """Noise is the worst for feedback. int4 stays within safe, and signs and one percent within no level but fast."""
    gradients = np.random.default_rng(1).standard_normal((4, 20_000)).astype(np.float32)
    for rule in ("adam", "sgd"):
        errors = {spec: error_of(compressors.get(spec), gradients, AUTO, rule) for spec in ("int4", "onebit", "topk")}
        assert errors["int4"] <= BUDGETS["safe"][rule]
        assert min(errors["onebit"], errors["topk"]) > BUDGETS["balanced"][rule]


def test_elements_that_do_not_move_hide_nothing_and_may_not_move_either():
    """Rows of rare tokens: what is lost of the others stays lost, and noise in these rows is noise."""
    moving = stream(7)
    rare = np.concatenate([moving, np.zeros((7, 15_000), np.float32)], axis=1)
    alone, among = (
        {
            "topk": error_of(compressors.get("topk:ratio=0.001"), gradients[:, :5000], AUTO, "adam-momentum"),
            "onebit": error_of(compressors.get("onebit"), gradients, AUTO, "adam-momentum"),
        }
        for gradients in (moving, rare)
    )
    few = error_of(compressors.get(f"topk:ratio={0.001 / 4}"), rare, AUTO, "adam-momentum")
    assert few == pytest.approx(alone["topk"], rel=0.05) and few > BUDGETS["balanced"]["adam-momentum"]
    assert among["onebit"] > alone["onebit"]


@pytest.mark.parametrize("rule", ["adam-momentum", "sgd-momentum"])
def test_few_momenta_tell_as_much_as_seven(rule):
    """A session watches three steps where they take long. What signs do not deliver grows with the steps."""
    rng, momentum, seen = np.random.default_rng(4), np.zeros(20_000), []
    for _ in range(40):
        momentum = 0.9 * momentum + rng.standard_normal(20_000)
        seen.append(momentum.astype(np.float32))
    signs = compressors.get("onebit")
    errors = [error_of(signs, np.array(seen[-steps:]), AUTO, rule) for steps in (3, 5, 7)]
    assert errors == pytest.approx([errors[-1]] * 3, rel=0.25)


# --- samples ----------------------------------------------------------------------------------------------------------


def filled(steps, whole=False):
    samples = Samples(whole)
    for grads in steps:
        samples.take([adopt_gradient(name, value) for name, value in grads.items()])
        samples.end_step()
    return samples


def test_small_models_are_kept_as_they_are_but_for_the_first_step():
    steps = [{"w": np.full((3, 4), k, np.float32), "h": np.full(5, k, np.float16)} for k in range(4)]
    samples = filled(steps)
    assert np.array_equal(samples.of("w", 12), np.outer([1, 2, 3], np.ones(12)))
    assert np.array_equal(samples.of("h", 5), np.outer([1, 2, 3], np.ones(5)))
    assert samples.of("w", 13).size == samples.of("x", 12).size == 0


def test_a_gradient_that_came_before_its_step_began_is_a_sample_of_that_step():
    samples = Samples()
    for early in (False, False, True):
        samples.take([adopt_gradient("w", np.ones(2, np.float32))])
        if early:
            samples.take([adopt_gradient("b", np.ones(3, np.float32))])
        samples.end_step({"b"} if early else frozenset())
    samples.end_step()
    assert [set(step) for step in samples.steps] == [{"w"}, {"w"}, {"b"}]


def test_a_sample_is_a_copy_and_steps_that_are_not_finite_do_not_count():
    grads = [{"w": np.full(4, k, np.float32)} for k in range(3)]
    grads[1]["w"][0] = np.inf
    samples = filled(grads)
    grads[2]["w"][:] = 9
    assert np.array_equal(samples.of("w", 4), [[2, 2, 2, 2]])


def test_of_large_tensors_pieces_of_the_whole_length_are_kept(monkeypatch):
    for name, value in (("SAMPLED", 100), ("SAMPLED_WHOLE", 5000), ("LEAST", 50), ("SHORTEST", 10)):
        monkeypatch.setattr(f"espresso_mpi.autotune.samples.{name}", value)
    values = np.arange(1000, dtype=np.float32)
    samples = filled([{"w": values, "b": values[:10]}] * 2)
    (row,) = samples.of("w", 1000)
    assert row.size <= 90 and row[0] == 0 and row[-1] == 999
    assert (np.diff(row) > 0).all() and np.diff(row).max() < 150
    assert np.array_equal(samples.of("b", 10), values[None, :10])
    monkeypatch.setattr("espresso_mpi.autotune.samples.SHORTEST", 40)
    (row,) = filled([{"w": values, "b": values[:10]}] * 2).of("w", 1000)
    assert sorted(np.diff(row))[-2:] == [1, 911], "two pieces of 45, no shorter ones"
    many = {str(k): values for k in range(20)}
    (row,) = filled([many] * 2).of("7", 1000)
    assert row.size == 50, "more than a twentieth of 100"
    (row,) = filled([{"w": values}] * 2, whole=True).of("w", 1000)
    assert row.size == 1000


@pytest.mark.parametrize(("spec", "kept"), [("int4", 4096), ("powersgd:rank=4", 5000), ("acpsgd", 5000)])
def test_whole_tensors_are_kept_for_methods_that_see_their_shape(monkeypatch, spec, kept):
    monkeypatch.setattr("espresso_mpi.autotune.samples.SAMPLED", 100)
    fidelity = Fidelity(Tuning(("int8", spec)), AUTO)
    for _ in range(2):
        fidelity.take([adopt_gradient("w", np.ones(5000, np.float32))])
        fidelity.samples.end_step()
    assert fidelity.samples.of("w", 5000).shape == (1, kept)


@pytest.mark.parametrize("seed", range(5))
def test_shares_fill_what_may_be_kept(seed):
    rng = np.random.default_rng(seed)
    sizes, total = rng.integers(1, 1000, 20).tolist(), int(rng.integers(20, 12000))
    share = largest_share(sizes, total)
    assert sum(min(size, share) for size in sizes) <= total
    assert share == max(sizes) or sum(min(size, share + 1) for size in sizes) > total


# --- plans ------------------------------------------------------------------------------------------------------------


def test_no_tensor_travels_by_what_it_is_barred_from():
    profile = slow_network(2, ("int8", "onebit"))
    free = Workload(tuple(WorkloadTensor(f"t{i}", 10**5 * (1 + i % 2), 1e-3 * i) for i in range(8)), "cpu")
    unlimited = plan(free, profile, ["int8", "onebit"], noise=0.0)
    assert {s.compressor for s in unlimited.strategies.values()} == {"onebit"}
    assessment = Assessment({f"t{i}": ("onebit",) for i in (1, 2, 6)} | {"t6": ("onebit", "int8")})
    workload = assessment.on(free)
    for baselines in (False, True):
        made = plan(workload, profile, ["int8", "onebit"], baselines=baselines, noise=0.0)
        for tensor in workload.tensors:
            assert made.strategy(tensor.name).compressor not in tensor.barred
        assert made.strategy("t0").compressor == "onebit", "others of the same size may"
    assert assessment.left(["int8", "onebit", "fp16"], workload) == ("int8", "onebit", "fp16")
    everywhere = Assessment({tensor.name: ("onebit",) for tensor in free.tensors})
    assert everywhere.left(["int8", "onebit"], free) == ("int8",)
    assert everywhere.on(free).without_bars == free


def test_bars_are_kept_in_files_of_workloads():
    workload = Workload((replace(WorkloadTensor("w", SMALL, 0.0), barred=("onebit",)),))
    assert Workload.from_json(workload.to_json()) == workload


def test_plans_say_what_was_dropped_and_keep_it_in_files():
    workload = Workload((WorkloadTensor("w", 10**5, 0.0),), "cpu")
    made = plan(workload, slow_network(2, ("int8",)), ["int8"], baselines=False)
    assert made.forecast is not None
    line = "onebit dropped for 1 of 1 tensors: error 0.6; accuracy='safe' allows 0.13 (adam)"
    told = replace(made, forecast=replace(made.forecast, dropped=(line,)))
    assert from_json(to_json(told)) == told and told.digest == made.digest
    assert f"Left out before the search: {line}." in explain(told).words
    assert not any("Left out" in words for words in explain(made).words)
