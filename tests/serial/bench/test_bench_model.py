"""The training benchmark's text, model and arithmetic, without MPI."""

from __future__ import annotations

import math
import sys
import types

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController, threadpool_info, threadpool_limits

from espresso_mpi.bench import blas, text, train, train_tables
from espresso_mpi.bench.deep import DeepModel, DeepShape
from espresso_mpi.bench.model import SGD, CharModel, ModelShape, learning_rate
from espresso_mpi.bench.training import Method, Point, Replica, Run, TrainingSettings
from espresso_mpi.errors import ConfigError

SMALL = ModelShape(alphabet=7, context=3, embedding=4, hidden=5)
TOWER = DeepShape(alphabet=7, context=3, embedding=4, hidden=5, blocks=2, widening=2)


def random_batch(shape, size, seed=0):
    symbols = np.random.default_rng(seed).integers(0, shape.alphabet, (size, shape.context + 1))
    return symbols[:, :-1], symbols[:, -1]


# --- the model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shape", "name"),
    [(kind, s, name) for kind, s in ((CharModel, SMALL), (DeepModel, TOWER)) for name in s.tensors()],
)
def test_gradient_agrees_with_central_differences(kind, shape, name):
    model = kind(shape, seed=1, dtype=np.float64)
    model.weights += 0.1 * np.random.default_rng(2).standard_normal(model.weights.size)  # no bias stays zero
    batch = random_batch(SMALL, 11)
    model.loss_and_gradient(*batch)
    step, weights = 1e-5, model.params[name].reshape(-1)
    for index in range(weights.size):
        kept = weights[index]
        losses = []
        for sign in (1, -1):
            weights[index] = kept + sign * step
            losses.append(model.loss(*batch))
        weights[index] = kept
        numeric = (losses[0] - losses[1]) / (2 * step)
        assert model.grads[name].reshape(-1)[index] == pytest.approx(numeric, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("kind", "shape"), [(CharModel, SMALL), (DeepModel, TOWER)])
def test_gradients_are_finished_when_their_names_come(kind, shape):
    model, batch = kind(shape, seed=1), random_batch(shape, 11)
    model.loss_and_gradient(*batch)
    whole = {name: grad.copy() for name, grad in model.grads.items()}
    model.gradient.fill(0)
    came = []
    for name in model.gradients(*batch):
        assert np.array_equal(model.grads[name], whole[name])
        came.append(name)
    assert came == list(shape.tensors()) == list(whole)


def test_the_deep_model_has_sixty_tensors_and_about_as_many_parameters_as_the_wide_one():
    assert len(DeepShape().tensors()) == 60
    assert DeepShape().parameters == pytest.approx(ModelShape(hidden=1024).parameters, rel=0.05)


def test_loss_of_zero_weights_is_that_of_guessing():
    model = CharModel(SMALL)
    model.weights.fill(0)
    assert model.loss(*random_batch(SMALL, 5)) == pytest.approx(math.log(SMALL.alphabet))


def test_views_cover_the_flat_vectors_in_float32():
    model = CharModel(ModelShape())
    assert sum(g.size for g in model.grads.values()) == model.gradient.size == ModelShape().parameters == 66880
    for name, shape in ModelShape().tensors().items():
        assert model.params[name].base is model.weights
        assert model.grads[name].base is model.gradient
        assert model.grads[name].shape == shape
        assert model.grads[name].dtype == np.float32
        assert model.grads[name].flags.c_contiguous


def test_gradient_replaces_the_previous_one():
    model = CharModel(SMALL)
    model.loss_and_gradient(*random_batch(SMALL, 4))
    first = model.gradient.copy()
    model.loss_and_gradient(*random_batch(SMALL, 4, seed=1))
    model.loss_and_gradient(*random_batch(SMALL, 4))
    np.testing.assert_array_equal(model.gradient, first)


def test_digest_sees_one_changed_bit():
    one, other = CharModel(SMALL, seed=3), CharModel(SMALL, seed=3)
    assert one.digest() == other.digest()
    other.weights.view(np.uint32)[0] ^= 1
    assert one.digest() != other.digest()
    assert one.digest() != CharModel(SMALL, seed=4).digest()


def test_sgd_is_the_formula():
    weights, gradient = np.array([1, 2], np.float32), np.array([4, -2], np.float32)
    SGD(weights).step(gradient, 0.5)
    np.testing.assert_array_equal(weights, [-1, 3])
    np.testing.assert_array_equal(gradient, [4, -2])


def test_momentum_averages_the_gradients():
    weights = np.zeros(1, np.float32)
    descent = SGD(weights, momentum=0.5)
    for gradient, expected in ((8, -4), (8, -10), (0, -13)):  # means 4, 6, 3
        descent.step(np.array([gradient], np.float32), 1)
        assert weights[0] == expected


def test_learning_rate_rises_and_falls():
    rates = [learning_rate(step, 100, 2.0) for step in range(100)]
    assert rates[0] == pytest.approx(2 / 15)
    assert max(rates) == rates[14] == 2
    assert rates[15:] == sorted(rates[15:], reverse=True)
    assert 0.04 <= rates[-1] < 0.05
    assert learning_rate(0, 1, 2.0) == 2


# --- the text ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus():
    return text.load()


def test_corpus_is_the_same_each_time(corpus):
    again = text.load()
    assert again.sha256 == corpus.sha256
    assert len(corpus.sha256) == 64
    np.testing.assert_array_equal(again.train, corpus.train)


def test_corpus_is_split_without_overlap(corpus):
    assert len(corpus.train) + len(corpus.validation) == corpus.characters > 100_000
    assert len(corpus.validation) / corpus.characters == pytest.approx(0.1, abs=1e-4)


def test_alphabet_reads_back_as_english(corpus):
    assert len(corpus.alphabet) == len(set(corpus.alphabet)) == 64
    assert corpus.train.dtype == np.uint8
    assert max(corpus.train.max(), corpus.validation.max()) == 63
    assert np.mean(corpus.train == 0) < 0.01
    assert " the " in "".join(corpus.alphabet[symbol] for symbol in corpus.train[:5000])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_shards_are_disjoint_and_cover_all(ranks):
    bounds = [text.shard_bounds(1000, ranks, rank) for rank in range(ranks)]
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(1000))
    assert max(b - a for a, b in bounds) - min(b - a for a, b in bounds) <= 1


def test_shard_of_a_rank_that_does_not_exist():
    with pytest.raises(ValueError, match=r"0\.\.3, got 4"):
        text.shard_bounds(10, 4, 4)


def test_windows_hold_what_follows():
    contexts, targets = text.windows(np.arange(10, dtype=np.uint8), np.array([0, 6]), 3)
    np.testing.assert_array_equal(contexts, [[0, 1, 2], [6, 7, 8]])
    np.testing.assert_array_equal(targets, [3, 9])


@pytest.mark.parametrize("module", [None, types.SimpleNamespace(), types.SimpleNamespace(topics=["a"])])
def test_missing_text_names_the_cure(monkeypatch, module):
    monkeypatch.setitem(sys.modules, text.MODULE, module)
    with pytest.raises(text.CorpusError, match="standard library: install"):
        text.load()


# --- training ---------------------------------------------------------------------------------------------


def test_replicas_start_equal_and_draw_different_batches(corpus):
    replicas = [Replica(TrainingSettings(batch=8), corpus, 2, rank) for rank in (0, 1, 0)]
    assert len({replica.model.digest() for replica in replicas}) == 1
    for replica in replicas:
        replica.compute_gradients()
    first, second, again = (replica.model.gradient for replica in replicas)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, second)


def test_training_lowers_the_loss(corpus):
    replica = Replica(TrainingSettings(steps=100, batch=64), corpus, 1, 0)
    batch = text.windows(corpus.validation, np.arange(0, 2000, 2), replica.model.shape.context)
    before = replica.model.loss(*batch)
    for step in range(100):
        replica.compute_gradients()
        replica.update(step)
    assert replica.model.loss(*batch) < 0.75 * before


@pytest.mark.parametrize("values", [{"steps": 0}, {"batch": -1}, {"rate": float("nan")}, {"seed": -1}])
def test_settings_refuse(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        TrainingSettings(**values)


def test_methods_are_read_and_doubled_by_the_ablation():
    chosen = train.parse_methods("none, int8:block=128,rounding=nearest,topk:ratio=0.1", ablation=True)
    assert [method.compressor for method in chosen[:3]] == [
        "none",
        "int8:block=128,rounding=nearest",
        "topk:ratio=0.1",
    ]
    assert chosen[3:] == (Method("topk:ratio=0.1", feedback=False),)
    assert [m.label for m in chosen[::3]] == ["fp32", "topk:ratio=0.1, no feedback"]
    assert train.parse_methods("none,none", ablation=False) == (Method("none"),)


@pytest.mark.parametrize("methods", ["", ",", "fp32", "topk:ratio=2"])
def test_methods_refuse(methods):
    with pytest.raises(ConfigError):
        train.parse_methods(methods, ablation=True)


# --- the summary ------------------------------------------------------------------------------------------


def finished(method, losses, diverged_at=None):
    """A run of 10 steps per point, one second per step, 40 bytes per step over 2 ranks."""
    curve = [Point(10 * i, 10.0 * i, {"intra": 0, "inter": 400 * i}, loss) for i, loss in enumerate(losses)]
    last = curve[-1]
    return Run(method, tuple(curve), last.step, 2, last.seconds, 0.25, True, diverged_at)


def test_rows_hold_the_formulas():
    runs = [finished(Method("none"), [6, 3, 2.0]), finished(Method("onebit"), [6, 4, 2.03, 2.1])]
    baseline, onebit = train_tables.rows(runs, None)
    assert train_tables.target(runs, None) == pytest.approx(2.04)
    assert (baseline.steps_to_target, baseline.seconds_to_target) == (20, 20.0)
    assert (onebit.steps_to_target, onebit.loss) == (20, 2.1)
    assert onebit.loss_vs_fp32 == pytest.approx(5)
    assert (onebit.step_seconds, onebit.compute_seconds, onebit.sync_seconds) == (1.0, 0.25, 0.75)
    assert onebit.bytes_per_step == {"intra": 0, "inter": 20}


def test_rows_without_fp32_compare_with_nothing():
    runs = [finished(Method("onebit"), [6, 3])]
    assert train_tables.target(runs, None) is None
    assert train_tables.rows(runs, None)[0].loss_vs_fp32 is None
    assert train_tables.rows(runs, 4.0)[0].steps_to_target == 10


def test_divergence_is_a_result(capsys):
    runs = [finished(Method("none"), [6, 2]), finished(Method("onebit", False), [6, float("nan")], 7)]
    row = train_tables.rows(runs, None)[1]
    assert (row.loss, row.loss_vs_fp32, row.steps_to_target) == (None, None, None)
    train_tables.TABLE.show("loss", [row])
    assert "diverged at 7" in capsys.readouterr().out


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    from espresso_mpi.bench import plots

    plots.training([finished(Method("none"), [6, 3, 2]), finished(Method("onebit"), [6, 2])], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def blas_threads():
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_blas_threads_are_the_users_if_set(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(blas, "ThreadpoolController", lambda: pytest.fail("looked for a library"))
    assert blas.limit_threads(1)


def test_blas_threads_are_limited(monkeypatch):
    for name in blas._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with threadpool_limits(limits=2, user_api="blas"):  # gives back what the test changes
        assert blas.limit_threads(1) == bool(blas_threads())
        assert blas_threads() <= {1}


def test_blas_that_is_unknown_is_reported(monkeypatch):
    for name in blas._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    none = ThreadpoolController().select(user_api="none of these")
    monkeypatch.setattr(blas.ThreadpoolController, "select", lambda self, **kind: none)
    assert not blas.limit_threads(1)
