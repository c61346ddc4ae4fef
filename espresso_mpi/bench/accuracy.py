"""`espresso-mpi bench accuracy`: seconds and megabytes to a target loss.

A network is trained with PyTorch by every way in turn, from the same weights and on the same batches, over all ranks of
the job: by DDP over gloo with torch's hooks, by ``GradientSync`` with each compressor, and by the optimizers that send
something else than gradients. ``accuracy_runs.Run`` says what is kept of a run, ``accuracy_tables`` what the runs come
to. Every finished run is written at once, and a later call with the same file goes on where the last one stopped.

The network between the ranks is that in which the command is started. Alternatively, the curves of an earlier call are
taken, and only the step times are measured (``accuracy_times``), or taken from a file as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..cluster.environment import environment
from ..collectives.messages.agreement import first_failure, on_every_rank, on_rank_0
from ..errors import ConfigError
from ..files import output
from . import accuracy_tables as tables
from .accuracy_runs import AccuracySettings, Run, Way, plans, usual_ways, waits_from, ways_of
from .accuracy_times import StepTime, priced
from .datasets import Dataset
from .defaults import Accuracy as Defaults
from .harness.replicas import node_of, world
from .harness.resuming import KeptRuns, begin, held, rows_of
from .harness.timing import Repetitions
from .optimizer_runs import WARMUP
from .optimizer_ways import Phases
from .optimizers import numbers
from .workloads import dataset, workload_of

KIND = "accuracy"
"""Of the result."""


def main(
    *, workload: str | None = None, ways: str | None = None, seeds: str | None = None, steps: int | None = None,
    eval_every: int | None = None, batch: int | None = None, width: int | None = None, layers: int | None = None,
    dense_steps: int | None = None, every: int | None = None, lr: float | None = None,
    tolerance: float = Defaults.tolerance, curves: Path | None = None, repeats: int = Defaults.repeats,
    times: Path | None = None, json: Path | None = None, plot: Path | None = None, comm: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Train by each way and seed, print a table on rank 0, and write the files asked for. Collective.

    Args:
        workload: "gpt" (the default) or "lstm", on text under AdamW; "resnet", on images under SGD with momentum.
        ways: comma list of ``gloo:none``, ``gloo:fp16``, ``gloo:powersgd:rank=4`` (DDP over gloo); ``gradsync:``,
            ``push:`` or ``sync:`` (with and without overlap) and a compressor, ``none``, ``auto``, or ``auto@FILE``,
            with a ``plan_file``; ``optimizer_ways.OWN``, or as ``onebit-adam+update_clip=1:int2``. Default: most.
        seeds: comma list of seeds of weights, batches and stochastic compressors.
        steps: training steps of each run. eval_every: steps between validations; default: a twentieth of all.
        batch: examples of each rank in a step; default: those of the workload shared among the ranks.
        width, layers: of the network; default: those of the workload.
        dense_steps: first steps, in which optimizers of other messages synchronise gradients; default: a fifth of all.
        every: local steps between two averages of ``diloco`` and its kind. lr: peak rate; default: as the workload.
        tolerance: percent by which the target is above the final loss of fp32, the mean over the seeds.
        curves: a file of an earlier call. Its runs are not repeated: only the times of their steps are measured here,
            in turns. ``ways`` and ``seeds`` choose among them; all that makes a run is that of the file.
        repeats: steps of each way that are timed with ``curves``. times: a file of an earlier call with ``curves``,
            whose step times are taken instead: for runs that were added to the curves since.
        json: file to write after every run. Runs that it holds already are not repeated. plot: PNG of the curves.
        comm: mpi4py communicator, default ``MPI.COMM_WORLD``.

    Returns:
        What the JSON file holds, on every rank.

    Raises:
        ConfigError: an argument does not fit, a package is missing, ``json`` holds runs with other settings, ``curves``
            were measured on other ranks, or a file could not be written later on.
        CorpusError: this Python has no training text.
    """
    comm = world() if comm is None else comm
    asked = {
        "workload": workload, "steps": steps, "eval_every": eval_every, "batch": batch, "width": width,
        "layers": layers, "dense_steps": dense_steps, "every": every, "lr": lr,
    }  # fmt: skip
    on_every_rank(comm, lambda: _check(tolerance, repeats, json, plot), wording=first_failure)
    if curves is not None or times is not None:
        return _priced(comm, curves, asked, (ways, seeds, repeats, tolerance), times, json, plot)
    settings = _settings(comm, asked)
    chosen, every_seed = (
        ways_of(usual_ways(settings.workload) if ways is None else ways),
        numbers("--seeds", Defaults.seeds if seeds is None else seeds, int),
    )
    return _trained(comm, settings, [(way, seed) for seed in every_seed for way in chosen], tolerance, json, plot)


def _settings(comm: Any, asked: dict[str, Any]) -> AccuracySettings:
    name = asked["workload"] or Defaults.workload
    usual = workload_of(name)
    steps = Defaults.steps if asked["steps"] is None else asked["steps"]
    phases = Phases.usual(steps)
    defaults = {
        "workload": name, "steps": steps, "eval_every": max(1, steps // 20), "batch": max(1, usual.batch // comm.size),
        "width": usual.width, "layers": usual.layers, "dense_steps": phases.dense, "every": phases.every, "lr": None,
    }  # fmt: skip
    return AccuracySettings(**{key: defaults[key] if value is None else value for key, value in asked.items()})


def _check(tolerance: float, repeats: int, json: Path | None, plot: Path | None) -> None:
    if find_spec("torch") is None:
        raise ConfigError("bench accuracy trains with PyTorch, which is not installed: pip install torch")
    if not 0 <= tolerance < 100:
        raise ConfigError(f"--tolerance {tolerance}; expected percent, from 0 to below 100")
    if repeats < 1:
        raise ConfigError(f"--repeats {repeats}; expected at least 1")
    output.check_writable(json)
    output.check_plot(plot)


def _cell(comm: Any) -> dict[str, Any]:
    """Nodes, ranks, and the rate of the links as the lab tells it. Collective."""
    lab = environment()["lab"] or ""
    rate = dict(part.partition("=")[::2] for part in lab.split()).get("rate")
    return {"nodes": len(set(node_of(comm))), "ranks": comm.size, "rate": rate}


def _groups(ways: Sequence[Way]) -> AbstractContextManager[Any]:
    """Gloo's group, if a way needs it."""
    from .averaging import gloo_group

    return gloo_group() if any(way.kind == "gloo" for way in ways) else nullcontext()


# --- training ---------------------------------------------------------------------------------------------------------


def _trained(
    comm: Any, settings: AccuracySettings, configs: Sequence[tuple[Way, int]], tolerance: float, json: Path | None,
    plot: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """What the JSON file holds when all runs are done."""
    data, _ = on_every_rank(comm, lambda: dataset(settings.workload), wording=first_failure)
    cell = _cell(comm)
    before = on_rank_0(comm, lambda: begin(KIND, json, _conditions(settings, data, cell), Run))
    kept = KeptRuns(before, Run, json if comm.rank == 0 else None, tables.line)
    done = {(run.way, run.seed) for run in kept.rows}
    todo = [(way, seed) for way, seed in dict.fromkeys(configs) if (way.spec, seed) not in done]
    if comm.rank == 0:
        print(_heading(before["settings"], len(todo), len(configs)), flush=True)
    from .accuracy_ways import check, train

    check(comm, settings, list(dict.fromkeys(way for way, _ in todo)))
    with _groups([way for way, _ in todo]) as gloo:
        for way, seed in todo:
            with output.progress(f"{way.spec}, seed {seed}", settings.steps, comm.rank == 0) as advance:
                kept.add(train(comm, data, settings, way, seed, gloo, advance))
    if comm.rank == 0:
        show(kept.rows, before["settings"], tolerance, plot)
    return kept.result()


def _conditions(settings: AccuracySettings, data: Dataset, cell: dict[str, Any]) -> dict[str, Any]:
    """What all runs of a file have in common."""
    from .replica import version
    from .workloads import network

    network_of = network(settings.workload, settings.width, settings.layers, 0)
    parameters = sum(weights.numel() for weights in network_of.parameters())
    found = {"warmup": WARMUP, "parameters": parameters, "torch": version(), "data_sha256": data.digest}
    return {**asdict(settings), **cell, **found}


def _heading(settings: dict[str, Any], todo: int, configs: int) -> str:
    return f"{tables.describe(settings)}\nRuns: {todo} to do, {configs - todo} done already"


def show(runs: Sequence[Run], settings: dict[str, Any], tolerance: float, plot: Path | None) -> None:
    """Print the table and what it comes to, and draw the curves if asked."""
    found = tables.groups(runs, tolerance, settings)
    target, unit = found[0].target, workload_of(settings["workload"]).unit
    goal = "" if target is None else f"; target {target:.4f}, fp32 + {tolerance:g} %"
    tables.TABLE.show(f"{tables.describe(settings)}\nloss: validation, {unit}{goal}", found)
    print(tables.summary(found))
    if plot is not None:
        from . import plots

        plots.accuracy(found, unit, plot)
        print(f"wrote {plot}")


# --- curves of an earlier call ----------------------------------------------------------------------------------------


def _priced(
    comm: Any, curves: Path | None, asked: dict[str, Any], choice: tuple[str | None, str | None, int, float],
    times: Path | None, json: Path | None, plot: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Runs of an earlier call with the seconds that their steps take here, or took; what the JSON file holds."""
    ways, seeds, repeats, tolerance = choice
    if curves is None:
        raise ConfigError("--times: expected --curves as well, the file of the runs")
    timed = None if times is None else on_rank_0(comm, lambda: _timed(times))
    cell = _cell(comm) if timed is None else {name: timed["settings"][name] for name in ("nodes", "ranks", "rate")}
    before = on_rank_0(comm, lambda: _curves(curves, asked, cell))
    runs = _chosen(rows_of(before["rows"], Run), ways, seeds)
    settings = AccuracySettings(**{name: before["settings"][name] for name in asked})
    known = None if timed is None else rows_of(timed["step_times"], StepTime)
    found = _step_times(comm, settings, runs, repeats) if known is None else known
    told = {**before["settings"], **cell, "curves_rate": before["settings"]["rate"]}
    rows = _with_seconds(runs, found, settings, comm.rank == 0)
    if not rows:  # on every rank: all have the same times
        raise ConfigError(
            f"--curves {curves}: of none of its ways, all kinds of steps were timed; use more --repeats than {repeats}"
        )
    result = output.result_of(rows, kind=KIND, settings=told, step_times=[asdict(time) for time in found])
    if timed is not None:
        result["environment"] = timed["environment"]
    if comm.rank == 0:
        show(rows, told, tolerance, plot)
        if json is not None:
            output.write_result(json, result)
    return result


def _step_times(comm: Any, settings: AccuracySettings, runs: Sequence[Run], repeats: int) -> list[StepTime]:
    """What the steps of all ways of some runs take here."""
    data, _ = on_every_rank(comm, lambda: dataset(settings.workload), wording=first_failure)
    from .accuracy_ways import time_steps

    chosen = ways_of(",".join(dict.fromkeys(run.way for run in runs)))
    with _groups(chosen) as gloo, output.progress("step times", repeats, comm.rank == 0) as advance:
        return time_steps(comm, data, settings, chosen, gloo, Repetitions(repeats, tick=advance))


def _with_seconds(
    runs: Sequence[Run], times: Sequence[StepTime], settings: AccuracySettings, says: bool
) -> list[Run]:  # fmt: skip
    """Runs with the seconds that their steps take, those whose steps were timed; says which ways are left out."""
    found = {(run.way, run.seed): priced(run, times, waits_from(run.way, settings)) for run in runs}
    missing = sorted({way for (way, _), run in found.items() if run is None})
    if missing and says:
        print(f"Left out, because not all their kinds of steps were timed: {', '.join(missing)}")
        print("Use more --repeats for them")
    return [run for run in found.values() if run is not None]


def _timed(path: Path) -> dict[str, Any]:
    """What a file with step times holds."""
    found = held(KIND, path, Run, "--times")
    if found is None or "step_times" not in found:
        raise ConfigError(f"--times {path}: expected a file that bench accuracy --curves --json has written")
    return found


def _curves(path: Path, asked: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """What the file holds, if its runs could have been made here."""
    before = held(KIND, path, Run, "--curves")
    if before is None:
        raise ConfigError(f"--curves {path}: there is no such file; make it with bench accuracy --json")
    if "step_times" in before:
        raise ConfigError(f"--curves {path}: its seconds were made from step times already; name the file of the runs")
    if missing := {*asked, *cell} - set(before["settings"]):
        raise ConfigError(f"--curves {path}: its settings lack {', '.join(sorted(missing))}; make it anew")
    for name, value in asked.items():
        if value is not None and value != before["settings"][name]:
            told = before["settings"][name]
            raise ConfigError(f"--{name.replace('_', '-')} {value}: the runs of --curves have {told}; leave it out")
    for name in ("nodes", "ranks"):
        if before["settings"][name] != cell[name]:
            raise ConfigError(
                f"--curves {path}: made with {before['settings'][name]} {name}, this job has {cell[name]}; sums of "
                f"compressed gradients depend on that: make curves with lab --rate unlimited and these {name}"
            )
    return before


def _chosen(runs: Sequence[Run], ways: str | None, seeds: str | None) -> list[Run]:
    """Those of the runs that are asked for, by default all but those whose bits depend on the network."""
    if ways is None:
        found = [run for run in runs if not plans(run.way.partition(":")[2])]
    else:
        names = [way.spec for way in ways_of(ways)]
        wrong = [name for name in names if plans(name.partition(":")[2]) or name not in {run.way for run in runs}]
        if wrong:
            raise ConfigError(
                f"--ways {wrong[0]}: --curves has no such run that would be the same on another network; it has "
                f"{', '.join(dict.fromkeys(run.way for run in runs))}"
            )
        found = [run for run in runs if run.way in names]
    kept = {run.seed for run in found} if seeds is None else set(numbers("--seeds", seeds, int))
    found = [run for run in found if run.seed in kept]
    if not found:
        raise ConfigError("--curves: holds no run that was asked for")
    return found
