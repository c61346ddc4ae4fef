"""`espresso-mpi bench optimizers`: what each compression method loses under AdamW and under SGD with momentum.

A GPT of 3.2 million parameters is trained from the same weights on the same batches by every method and optimizer in
turn, with PyTorch, over all ranks of the job. ``optimizer_runs.Row`` says what is kept of a run. Every finished run is
written at once, and a later call with the same file goes on where the last one stopped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from espresso_mpi.compressors import read_specs
from espresso_mpi.errors import ConfigError

from ..collectives.messages.agreement import first_failure, on_every_rank, on_rank_0
from ..files import output
from . import optimizer_tables as tables
from . import text
from .defaults import Optimizers as Defaults
from .harness.replicas import world
from .harness.resuming import KeptRuns, begin
from .optimizer_runs import RATES, WARMUP, OptimizerSettings, Row, RunConfig, Shape, check, train
from .optimizer_ways import FEEDBACK, Choice
from .training import Method

TOTAL_BATCH = 8
"""Sequences of all ranks together, so that the optimisation is the same on any number of them."""


def main(
    *,
    methods: str = Defaults.methods,
    without_feedback: str = Defaults.without_feedback,
    optimizer: str = Defaults.optimizer,
    lr: str | None = None,
    seeds: str = Defaults.seeds,
    steps: int = Defaults.steps,
    batch: int | None = None,
    shape: Shape | None = None,
    eval_every: int | None = None,
    json: Path | None = None,
    plot: Path | None = None,
    comm: Any = None,
) -> dict[str, Any]:
    """Train with each optimizer, method and seed, print a table on rank 0, and write the files asked for. Collective.

    Args:
        methods: comma list of specs of compressors; "none" is fp32.
        without_feedback: comma list of those to train once more, with what they lose dropped; "" for none of them.
        optimizer: comma list of "adamw", "muon", "demo"; "sgd" and "momentum-sgd", which have a momentum of 0.9;
            "onebit-adam", "onebit-lamb", "zero-one-adam", "diloco", "muloco" and "sparseloco", which begin with a fifth
            of the steps on gradients, or some of them. "demo" and "sparseloco" have the error feedback of their papers.
            With arguments of a class: "onebit-adam+update_clip=1".
        lr: comma list of peak learning rates, of every optimizer named; default: ``optimizer_runs.RATES``.
        seeds: comma list of seeds of weights, batches and stochastic compressors.
        steps: training steps of each run.
        batch: sequences that each rank predicts in a step; default: 8 shared among the ranks.
        shape: sizes of the model; default: 3 208 704 parameters.
        eval_every: steps between validations; default: a third of all.
        json: file to write after every run. Runs that it holds already are not repeated. plot: PNG of the curves.
        comm: mpi4py communicator, default ``MPI.COMM_WORLD``.

    Returns:
        What the JSON file holds, on every rank: the runs of this call and those that the file held.

    Raises:
        ConfigError: an argument does not fit, torch is missing, ``json`` holds runs with other settings, or a file
            could not be written later on.
        CorpusError: this Python has no training text.
    """
    comm = world() if comm is None else comm
    settings = OptimizerSettings(
        steps=steps,
        batch=max(1, TOTAL_BATCH // comm.size) if batch is None else batch,
        eval_every=max(1, steps // 3) if eval_every is None else eval_every,
        shape=shape or Shape(),
    )
    configs = configs_of(optimizer, lr, _methods(methods, without_feedback), seeds)
    return _trained(comm, settings, configs, json, plot)


def _trained(
    comm: Any, settings: OptimizerSettings, configs: Sequence[RunConfig], json: Path | None, plot: Path | None
) -> dict[str, Any]:
    """What the JSON file holds when all runs are done."""
    corpus, _ = on_every_rank(comm, lambda: _corpus(settings), wording=first_failure)
    before = on_rank_0(comm, lambda: _start(settings, corpus, comm.size, json, plot))
    report = KeptRuns(before, Row, json if comm.rank == 0 else None, tables.line)
    todo = [config for config in configs if not any(same_run(config, row) for row in report.rows)]
    if comm.rank == 0:
        print(_heading(corpus, settings, comm.size, len(todo), len(configs)), flush=True)
    check(comm, todo, settings)
    for config in todo:
        with output.progress(config.label, settings.steps, comm.rank == 0) as advance:
            report.add(train(comm, corpus, config, settings, advance))
    result = report.result()
    if comm.rank == 0:
        _show(report.rows, plot)
    return result


def configs_of(optimizer: str, lr: str | None, methods: Sequence[Method], seeds: str) -> list[RunConfig]:
    """The runs that the arguments of ``main`` ask for, in the order in which they are made.

    Optimizers that are made of error feedback have none without it.

    Raises:
        ConfigError: an argument cannot be read.
    """
    names = [name.strip() for name in optimizer.split(",")]
    usual = {name: RATES.get(Choice.of(name).name) for name in names}
    for name in names:
        if usual[name] is None:
            raise ConfigError(f"--optimizer {name!r}; expected {' or '.join(RATES)}, some with commas between them")
    rates = None if lr is None else numbers("--lr", lr, float)
    runs = [
        RunConfig(name, rate, method, seed)
        for seed, name in itertools.product(numbers("--seeds", seeds, int), names)
        for rate, method in itertools.product(rates or [usual[name]], methods)
        if method.feedback or Choice.of(name).name not in FEEDBACK
    ]
    return list(dict.fromkeys(runs))


def same_run(config: RunConfig, row: Row) -> bool:
    """Whether ``row`` is the result of ``config``."""
    method = config.method
    return (config.optimizer, config.lr, method.compressor, method.feedback, config.seed) == (
        row.optimizer, row.lr, row.compressor, row.feedback, row.seed,
    )  # fmt: skip


def _methods(methods: str, without_feedback: str) -> list[Method]:
    dropping = read_specs(without_feedback) if without_feedback.strip() else []
    return [Method(name) for name in read_specs(methods)] + [Method(name, feedback=False) for name in dropping]


def numbers(option: str, given: str, kind: Callable[[str], Any]) -> list[Any]:
    """The numbers of a comma list, which are not negative, each once.

    Raises:
        ConfigError: there is something else in it.
    """
    try:
        found = [kind(part) for part in given.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {given!r}; expected numbers with commas between them") from None
    if not all(number >= 0 for number in found):
        raise ConfigError(f"{option} {given!r}; expected numbers that are not negative")
    return list(dict.fromkeys(found))


# --- before the first run ---------------------------------------------------------------------------------------------


def _corpus(settings: OptimizerSettings) -> text.Corpus:
    if find_spec("torch") is None:
        raise ConfigError("bench optimizers trains with PyTorch, which is not installed: pip install torch")
    return text.load(settings.shape.alphabet)


def _start(
    settings: OptimizerSettings, corpus: text.Corpus, ranks: int, json: Path | None, plot: Path | None
) -> dict[str, Any]:
    """What the JSON file holds, or will hold before the first run, once it is known that all files can be written."""
    output.check_writable(json)
    output.check_plot(plot)
    from .replica import version

    conditions = {
        **asdict(settings),
        "warmup": WARMUP,
        "parameters": settings.shape.parameters,
        "ranks": ranks,
        "torch": version(),
        "text_sha256": corpus.sha256,
        "text_characters": corpus.characters,
    }
    return begin("optimizers", json, conditions, Row)


# --- results ----------------------------------------------------------------------------------------------------------


def _heading(corpus: text.Corpus, settings: OptimizerSettings, ranks: int, todo: int, configs: int) -> str:
    return (
        f"Text: {corpus.characters} characters, SHA-256 {corpus.sha256}\n"
        f"Model: GPT, {settings.shape.parameters} parameters, {settings.shape.context} characters of context; {ranks} "
        f"ranks x batch {settings.batch}, {settings.steps} steps\n"
        f"Runs: {todo} to do, {configs - todo} done already"
    )


def _show(rows: Sequence[Row], plot: Path | None) -> None:
    tables.TABLE.show("loss: validation, bits per character", tables.groups(rows))
    if plot is not None:
        from . import plots

        plots.optimizers(rows, plot)
        print(f"wrote {plot}")
