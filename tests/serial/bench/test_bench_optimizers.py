"""``bench optimizers`` without ranks: its model, its arguments, and what its tables say."""

from __future__ import annotations

import json

import pytest

from espresso_mpi.bench import optimizer_runs, optimizer_tables, optimizers, report
from espresso_mpi.bench.training import Method
from espresso_mpi.errors import ConfigError
from espresso_mpi.files.output import write_rows


def row(method="fp32", seed=0, loss=2.0, optimizer="adamw", **others):
    values = {
        "optimizer": optimizer, "lr": 0.1, "momentum": 0.9, "method": method, "compressor": method, "feedback": True,
        "seed": seed, "loss": loss, "diverged_at": None, "replicas_identical": True, "bytes_per_step": 2048.0,
        "seconds": 1.0, "curve": ((0, 6.0), (10, loss)), **others,
    }  # fmt: skip
    return optimizer_runs.Row(**values)


ROWS = [
    *(row(seed=seed, loss=loss) for seed, loss in ((0, 2.0), (1, 2.5))),
    *(row("onebit", seed=seed, loss=loss) for seed, loss in ((0, 2.2), (1, 3.0), (2, 9.0))),
    row("topk", loss=None, diverged_at=4),
    row("onebit", optimizer="sgd", loss=2.1, replicas_identical=False),
]


def test_the_table_compares_runs_of_one_seed():
    """Seed 2 has no fp32 run to compare with; nor has sgd one."""
    assert optimizer_tables.TABLE.lines(optimizer_tables.groups(ROWS)) == [
        ["adamw", "0.1", "fp32", "2", "2.2500", "0.5000", "", "", "2.0", "identical"],
        ["adamw", "0.1", "onebit", "3", "4.7333", "6.8000", "+15.00", "+10.00 to +20.00", "2.0", "identical"],
        ["adamw", "0.1", "topk", "1", "diverged", "", "", "", "2.0", "identical"],
        ["sgd", "0.1", "onebit", "1", "2.1000", "", "", "", "2.0", "DIFFER"],
    ]


def test_the_report_has_the_table_and_its_conditions(tmp_path):
    settings = {"shape": vars(optimizer_runs.Shape()), "parameters": 3208704, "ranks": 2, "batch": 4, "steps": 200,
                "text_characters": 465048, "text_sha256": "2a95"}  # fmt: skip
    write_rows(tmp_path / "o.json", ROWS, kind="optimizers", settings=settings)
    report.main(results=[tmp_path / "o.json"], output=tmp_path / "B.md")
    said = (tmp_path / "B.md").read_text()
    assert "| adamw | 0.1 | onebit | 3 | 4.7333 | 6.8000 | +15.00 | +10.00 to +20.00 | 2.0 | identical |" in said
    assert "3,208,704 parameters: 4 layers of width 256" in said
    assert optimizer_tables.rows_of(json.loads((tmp_path / "o.json").read_text())["rows"]) == ROWS


def test_a_method_with_a_momentum_of_its_own_gets_an_optimizer_without():
    configs = optimizers.configs_of("sgd,adamw", None, [Method("none"), Method("topk"), Method("dgc:mu=0.5")], "0")
    assert [config.momentum for config in configs] == [0.9, 0.9, 0.0, 0.0, 0.0, 0.0]
    assert [config.lr for config in configs] == [optimizer_runs.RATES["sgd"]] * 3 + [1e-3] * 3


def test_what_is_made_of_feedback_has_no_run_without_it():
    methods = [Method("onebit"), Method("onebit", feedback=False)]
    configs = optimizers.configs_of("adamw,demo,sparseloco", None, methods, "0")
    assert [(config.optimizer, config.method.feedback) for config in configs] == [
        ("adamw", True), ("adamw", False), ("demo", True), ("sparseloco", True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [("adam", None, "0"), ("sgd", "fast", "0"), ("sgd", "-1", "0"), ("sgd", None, "1.5")]
)
def test_arguments_that_cannot_be_read_are_refused(arguments):
    optimizer, lr, seeds = arguments
    with pytest.raises(ConfigError, match="expected"):
        optimizers.configs_of(optimizer, lr, [Method("none")], seeds)


def test_without_torch_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install torch"):
        optimizers.main()


def test_the_model_has_three_million_weights_and_looks_at_nothing_to_come():
    torch = pytest.importorskip("torch")
    from espresso_mpi.bench.gpt import GPT

    shape = optimizer_runs.Shape()
    model = GPT(shape, seed=0)
    assert sum(weights.numel() for weights in model.parameters()) == shape.parameters > 3_000_000
    symbols = torch.arange(shape.context)[None] % shape.alphabet
    other = symbols.clone()
    other[0, 40] = 1
    with torch.no_grad():
        differ = (model.logits(symbols) != model.logits(other)).any(dim=2)[0]
    assert differ.nonzero().flatten().tolist() == list(range(40, shape.context))


def test_muon_takes_hidden_matrices_and_refuses_a_network_without_them():
    torch = pytest.importorskip("torch")
    from espresso_mpi.bench.replica import Replica
    from espresso_mpi.bench.workloads import network

    symbols = torch.arange(16).reshape(2, 8).numpy()
    weights = []
    for optimizer in ("adamw", "muon"):
        replica = Replica(network("lstm", 16, 1, 0), optimizer, 0.0, 1)
        replica.gradients(symbols, symbols)
        replica.update(0.01)
        weights.append(dict(replica.model.named_parameters()))
    differ = {name for name, array in weights[0].items() if not torch.equal(array, weights[1][name])}
    assert differ == {"lstm.weight_ih_l0", "lstm.weight_hh_l0"}
    with pytest.raises(ConfigError, match="hidden layers"):
        Replica(network("resnet", 8, 1, 0), "muon", 0.0, 1)
