"""A short ``bench train`` with every method: equal replicas, files in order, errors on all ranks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from mpi4py import MPI

from espresso_mpi.bench import text, train, training
from espresso_mpi.errors import ConfigError, MismatchError
from espresso_mpi.files import output

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

TINY = {"steps": 6, "batch": 8, "eval_every": 4, "rate": 0.5}
LABELS = [
    "fp32",
    "fp16",
    "int8",
    "onebit",
    "topk:ratio=0.01",
    "onebit, no feedback",
    "topk:ratio=0.01, no feedback",
]


@pytest.fixture
def folder(world, tmp_path):
    """Rank 0's temporary folder, on every rank."""
    return Path(world.bcast(str(tmp_path)))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Of the file that ``trained`` writes, on every rank."""
    return Path(MPI.COMM_WORLD.bcast(str(tmp_path_factory.mktemp("train") / "train.json")))


@cache
def trained(path):
    """The result of one short call for several tests. It is made in a test, so that ranks fail together."""
    return train.main(**TINY, json=path)


def test_every_method_trains_and_is_written(world, path):
    result = trained(path)
    if world.rank == 0:
        assert json.loads(path.read_text()) == json.loads(json.dumps(result))
    assert set(result) == {"environment", "kind", "corpus", "settings", "rows", "curves"}
    assert len(result["corpus"]["sha256"]) == 64
    assert result["settings"]["ranks"] == world.size
    assert [row["method"] for row in result["rows"]] == list(result["curves"]) == LABELS
    for row in result["rows"]:
        assert row["replicas_identical"]
        assert row["diverged_at"] is None
        assert row["compute_seconds"] > 0
        assert [point["step"] for point in result["curves"][row["method"]]] == [0, 4, 6]


def test_runs_start_from_the_same_loss_and_end_differently(world, path):
    curves = trained(path)["curves"]
    assert len({curve[0]["loss"] for curve in curves.values()}) == 1
    assert len({curve[-1]["loss"] for curve in curves.values()}) == (len(LABELS) if world.size > 1 else 1)


def test_same_seed_same_losses(world):
    first, second, other = (
        train.main(**TINY, methods="none,onebit", seed=seed, comm=world)["curves"] for seed in (5, 5, 6)
    )
    assert losses(first) == losses(second) != losses(other)


def losses(curves):
    return {label: [point["loss"] for point in curve] for label, curve in curves.items()}


@pytest.mark.mpi(min_size=2)
def test_bytes_are_those_of_the_payload(path):
    """Compressed methods send less, in the order of their payloads; a step sends as much as any other."""
    result = trained(path)
    sent = [sum(row["bytes_per_step"].values()) for row in result["rows"] if "no feedback" not in row["method"]]
    assert len(sent) == 5
    assert sent == sorted(sent, reverse=True)
    for curve in result["curves"].values():
        totals = [sum(point["bytes_by_level"].values()) for point in curve]
        assert totals[0] == 0
        assert totals[1] * 6 == totals[2] * 4 > 0


def test_divergence_ends_the_run_on_all_ranks(world):
    """A rate this high overflows float32 within a few steps."""
    result = train.main(methods="none", steps=50, batch=8, rate=1e30, comm=world)
    (row,) = result["rows"]
    assert row["diverged_at"] is not None
    assert row["loss"] is None
    assert len(set(world.allgather(row["diverged_at"]))) == 1


def test_validation_does_not_depend_on_who_computes_it(world):
    corpus, model = text.load(), training.CharModel(training.ModelShape())
    together = training.validation_loss(world, model, corpus, 50)
    alone = training.validation_loss(MPI.COMM_SELF, model, corpus, 50)
    assert together == pytest.approx(alone, rel=1e-6)


@pytest.mark.mpi(min_size=2)
def test_unequal_starts_are_refused(world):
    corpus = text.load()
    settings = training.TrainingSettings(seed=world.rank)
    with pytest.raises(MismatchError, match="rank 1 has another initial weights"):
        training.train(world, corpus, training.Method("none"), settings, lambda step: None)


def test_a_folder_that_does_not_exist_is_refused_first(world, folder):
    missing = folder / "missing" / "out.json"
    with pytest.raises(ConfigError, match="directory does not exist"):
        train.main(json=missing, comm=world)


def test_plot_without_matplotlib_names_the_extra(world, folder, monkeypatch):
    monkeypatch.setattr(output, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"espresso-mpi\[report\]"):
        train.main(plot=folder / "out.png", comm=world)
