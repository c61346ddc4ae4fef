"""`espresso-mpi bench train`: what each compression method costs in loss, and what it saves in time and bytes.

The same small language model is trained by every method in turn, over all ranks of the job, from the same weights and
on the same batches. `train_tables.Row` says what the printed columns mean.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from espresso_mpi.cluster import launch
from espresso_mpi.compressors import get, read_specs
from espresso_mpi.feedback import Feedback

from ..collectives.messages.agreement import on_rank_0
from ..files.output import check_plot, check_writable, progress, result_of, write_result
from ..tracing import pictures
from . import blas, text
from . import train_tables as tables
from .defaults import Train as Defaults
from .harness.replicas import place_on_node, world
from .model import ModelShape
from .ticks import STEPS, Ticks
from .training import Method, Point, Run, TrainingSettings, train

TOTAL_BATCH = 512
"""Of all ranks together, so that the optimisation is the same on any number of them."""

MUCH = 0.1
"""Mean square error, relative to the gradient, from which on the ablation shows what feedback is good for."""


def main(
    *, methods: str = Defaults.methods, steps: int = Defaults.steps, batch: int | None = None,
    rate: float = TrainingSettings.rate, momentum: float = Defaults.momentum, hidden: int = Defaults.hidden,
    target_loss: float | None = None, seed: int = Defaults.seed, ablation: bool = Defaults.ablation,
    eval_every: int | None = None, route: str | None = None, plan: str | None = None, json: Path | None = None,
    plot: Path | None = None, trace: Path | None = None, comm: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Train with each method, print a table on rank 0, and write the files asked for. Collective.

    Args:
        methods: comma list of specs of compressors; "none" is fp32.
        steps: training steps of each method.
        batch: characters that each rank predicts in a step; default: 512 shared among the ranks.
        rate: peak learning rate, the same for all methods.
        momentum: of SGD; the learning rate counts for the mean of gradients that it makes, so it need not change.
        hidden: width of the model's hidden layer; 256 makes 66 880 parameters, 1024 makes 264 256.
        target_loss: validation loss in bits per character to reach; default: fp32's final loss plus 2 %.
        seed: of weights, batches and stochastic compressors.
        ablation: also run methods that lose much without error feedback.
        eval_every: steps between validations; default: a fifteenth of all.
        route: route of the compressed methods; default: the session's choice.
        plan: also train by the plan in this file; ``auto``: by one that the session makes, of these methods, in its
            first steps. The time that planning takes is part of the run's.
        json, plot: files to write, the plot as PNG.
        trace: trace a few early steps of each method to this file, the method's name before its suffix.
        comm: mpi4py communicator, default ``MPI.COMM_WORLD``.

    Returns:
        What the JSON file holds, on every rank.

    Raises:
        ConfigError: an argument does not fit, or a file could not be written later on.
        CorpusError: this Python has no training text.
    """
    comm = world() if comm is None else comm
    chosen = parse_methods(methods, ablation) + planned_methods(methods, plan)
    batch = max(1, TOTAL_BATCH // comm.size) if batch is None else batch
    settings = TrainingSettings(
        steps, batch, rate, momentum, seed, max(1, steps // 15) if eval_every is None else eval_every, route,
        shape=ModelShape(hidden=hidden),
    )  # fmt: skip
    return _trained(comm, chosen, settings, target_loss, _Files(json, plot, trace))


@dataclass(frozen=True)
class _Files:
    """What is to be written, see ``main``."""

    json: Path | None
    plot: Path | None
    trace: Path | None

    def check(self) -> None:
        """Find out before minutes of training whether they can be written."""
        check_writable(self.json)
        check_plot(self.plot)
        pictures.check_trace(self.trace)


def _trained(
    comm: Any, methods: Sequence[Method], settings: TrainingSettings, target_loss: float | None, files: _Files
) -> dict[str, Any]:
    """What the JSON file holds when all methods have trained."""
    on_rank_0(comm, files.check)
    _limit_threads(comm)
    corpus = text.load()
    if comm.rank == 0:
        print(tables.heading(corpus, settings, comm.size))
    runs = _train_all(comm, corpus, methods, settings, files.trace)
    rows, target = tables.rows(runs, target_loss), tables.target(runs, target_loss)
    result = _result(runs, rows, corpus, settings, target)
    if comm.rank == 0:
        goal = "" if target is None else f"; target: {target:.4f}"
        tables.TABLE.show(f"loss: validation, bits per character{goal}; bytes: of a rank in a step", rows)
        _write(result, runs, files)
    return result


def parse_methods(methods: str, ablation: bool) -> tuple[Method, ...]:
    """The methods of a comma list, each without feedback as well where ``ablation`` is set and it matters.

    Raises:
        ConfigError: no method, or a spec that names no compressor.
    """
    found = [Method(spec) for spec in read_specs(methods)]
    if ablation:
        needy = [method for method in found if method.compressor != "none" and _loses_much(method.compressor)]
        found += [replace(method, feedback=False) for method in needy]
    return tuple(dict.fromkeys(found))


def planned_methods(methods: str, plan: str | None) -> tuple[Method, ...]:
    """The method that goes by a plan, if one is given; a session that plans for itself may use all the others."""
    if plan is None:
        return ()
    return (Method("none", plan=plan, candidates=tuple(name for name in read_specs(methods) if name != "none")),)


def _loses_much(spec: str) -> bool:
    """Whether feedback is on by default for a compressor, and has much to feed back."""
    compressor, n = get(spec).at(None), 1 << 20
    error = compressor.gaussian_error(n)
    return Feedback().resolved(compressor, n).kind != "none" and (error is None or error > MUCH)


def _limit_threads(comm: Any) -> None:
    ranks, place = place_on_node(comm)
    threads = launch.threads_per_rank(ranks)
    if not blas.limit_threads(threads) and ranks > 1 and place == 0:
        print(
            "espresso-mpi: the threads of numpy's matrix products cannot be limited here; "
            f"set OMP_NUM_THREADS={threads}, or start the job with: espresso-mpi run",
            file=sys.stderr,
        )


def _train_all(
    comm: Any, corpus: text.Corpus, methods: Sequence[Method], settings: TrainingSettings, trace: Path | None
) -> list[Run]:
    runs = []
    for method in methods:
        runs.append(_trained_by(comm, corpus, method, settings, trace))
        if comm.rank == 0:
            print(tables.line(runs[-1]), file=sys.stderr, flush=True)
    return runs


def _trained_by(comm: Any, corpus: text.Corpus, method: Method, settings: TrainingSettings, trace: Path | None) -> Run:
    with progress(method.label, STEPS, comm.rank == 0) as tick:
        ticks = Ticks(tick)
        return train(comm, corpus, method, settings, lambda done: ticks(done / settings.steps), trace)


def _result(
    runs: Sequence[Run],
    rows: Sequence[tables.Row],
    corpus: text.Corpus,
    settings: TrainingSettings,
    target: float | None,
) -> dict[str, Any]:
    """What the JSON file holds."""
    return result_of(
        rows,
        kind="train",
        corpus={
            "module": text.MODULE,
            "sha256": corpus.sha256,
            "characters": corpus.characters,
            "train": len(corpus.train),
            "validation": len(corpus.validation),
            "alphabet": corpus.alphabet,
        },
        settings={
            **asdict(settings),
            "parameters": settings.shape.parameters,
            "ranks": runs[0].ranks,
            "target_loss": target,
        },
        curves={run.method.label: [_point(point) for point in run.curve] for run in runs},
    )


def _point(point: Point) -> dict[str, Any]:
    """A point for the JSON file, which cannot hold a loss that is not finite."""
    return {**asdict(point), "loss": point.loss if math.isfinite(point.loss) else None}


def _write(result: dict[str, Any], runs: Sequence[Run], files: _Files) -> None:
    if files.json is not None:
        write_result(files.json, result)
    if files.plot is not None:
        from . import plots

        plots.training(runs, files.plot)
        print(f"wrote {files.plot}")
