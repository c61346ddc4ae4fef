"""``bench optimizers`` with a tiny model: it trains as one process would, replicas agree, a stopped call goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from espresso_mpi.bench import optimizer_runs, optimizers, text
from espresso_mpi.bench.model import learning_rate
from espresso_mpi.bench.optimizer_ways import OWN
from espresso_mpi.bench.training import Method
from espresso_mpi.errors import ConfigError

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

SHAPE = optimizer_runs.Shape(context=16, width=64, layers=1, heads=2)
"""Two of its tensors are large enough to be compressed."""
TINY = {"steps": 4, "batch": 2, "shape": SHAPE, "eval_every": 4, "without_feedback": ""}


@pytest.fixture
def path(world, tmp_path):
    """A file in rank 0's temporary folder, on every rank."""
    return Path(world.bcast(str(tmp_path))) / "optimizers.json"


def losses_of_one_process(optimizer, settings, rate, seed, ranks):
    """Validation losses, bits per character, before and after training on all ranks' sequences in one batch."""
    from espresso_mpi.bench.gpt import GPT

    corpus, context, model = text.load(), settings.shape.context, GPT(settings.shape, seed)
    hidden = [p for layer in model.blocks.modules() if isinstance(layer, torch.nn.Linear) for p in [layer.weight]]
    rest = [p for p in model.parameters() if all(p is not other for other in hidden)]
    updates = {
        "adamw": lambda: [torch.optim.AdamW(model.parameters(), betas=(0.9, 0.999), weight_decay=0.01)],
        "sgd": lambda: [torch.optim.SGD(model.parameters(), momentum=0.9)],
        "muon": lambda: [
            torch.optim.Muon(hidden, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(rest)
        ],
    }[optimizer]()  # fmt: skip

    def loss_of(symbols, starts):
        block = torch.tensor(np.stack([symbols[start : start + context + 1] for start in starts]), dtype=torch.long)
        return model(block[:, :-1], block[:, 1:])

    def validation():
        stride = context * settings.validation_stride
        with torch.no_grad():
            found = loss_of(corpus.validation, range(0, len(corpus.validation) - context, stride))
        return float(found) / np.log(2)

    first = validation()
    generators = [np.random.default_rng([seed, rank]) for rank in range(ranks)]
    bounds = [text.shard_bounds(len(corpus.train), ranks, rank) for rank in range(ranks)]
    for step in range(settings.steps):
        starts = [
            start + generator.integers(0, stop - start - context, settings.batch)
            for generator, (start, stop) in zip(generators, bounds)
        ]
        model.zero_grad()
        loss_of(corpus.train, np.concatenate(starts)).backward()
        for update in updates:
            for group in update.param_groups:
                group["lr"] = learning_rate(step, settings.steps, rate)
            update.step()
    return [first, validation()]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_fp32_trains_as_one_process_does_on_all_sequences_together(world, optimizer):
    settings = optimizer_runs.OptimizerSettings(steps=4, batch=2, eval_every=4, shape=SHAPE)
    config = optimizer_runs.RunConfig(optimizer, 0.01, Method("none"), 3)
    row = optimizer_runs.train(world, text.load(), config, settings, lambda: None)
    expected = losses_of_one_process(optimizer, settings, 0.01, 3, world.size)
    assert [step for step, _ in row.curve] == [0, 4]
    assert [loss for _, loss in row.curve] == pytest.approx(expected, rel=1e-4)
    assert expected[1] < expected[0] - 0.01


def test_optimizers_that_synchronise_learn_and_end_with_equal_replicas(world):
    settings = optimizer_runs.OptimizerSettings(steps=10, batch=2, eval_every=10, shape=SHAPE)
    wrong = []
    for optimizer in OWN:
        config = optimizer_runs.RunConfig(optimizer, 0.01, Method(OWN[optimizer]), 3)
        row = optimizer_runs.train(world, text.load(), config, settings, lambda: None)
        wrong += [] if row.replicas_identical and row.curve[-1][1] < row.curve[0][1] - 0.01 else [(optimizer, row)]
    assert not wrong


@pytest.mark.mpi(min_size=2)
def test_replicas_agree_and_a_stopped_call_goes_on(world, path):
    """The second call trains what the first has not, and keeps what the file says."""
    arguments = {**TINY, "methods": "none,int8,powersgd,dgc,onebit", "json": path, "comm": world}
    first = optimizers.main(**arguments, optimizer="adamw")
    assert all(row["replicas_identical"] and row["loss"] for row in first["rows"])
    assert len({row["loss"] for row in first["rows"]}) == 5
    sent = {row["method"]: row["bytes_per_step"] for row in first["rows"]}
    assert sent["int8"] < sent["fp32"] / 2
    if world.rank == 0:
        marked = json.loads(path.read_text())
        marked["rows"][1]["loss"] = 1.25
        path.write_text(json.dumps(marked))
    second = optimizers.main(**arguments, optimizer="adamw,sgd")
    assert second["rows"][1]["loss"] == 1.25
    assert [row["optimizer"] for row in second["rows"]] == ["adamw"] * 5 + ["sgd"] * 5
    if world.rank == 0:
        assert json.loads(path.read_text()) == json.loads(json.dumps(second))
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(ConfigError, match="holds runs with steps 4, this call has 5"):
        optimizers.main(**{**arguments, "steps": 5})
