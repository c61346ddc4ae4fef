"""``bench planner``: how quick and how good the planner is, and the paper's figures beside its own. No MPI, one core.

The parts: time of selection; gaps to the certified bound; random cases against full enumeration; the paper's gains and
scaling factors; the distance of its algorithms from the Upper Bound; scaling of the time with tensors and options; and
plans for the order ``backprop`` beside those for schedules. All other parts are of plans for schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from espresso_mpi.errors import ConfigError
from espresso_mpi.planner.workloads.clusters import TESTBEDS
from espresso_mpi.planner.workloads.models import MODELS

from ..harness.suite import Suite
from . import cases, distance, paper, time
from .published import COMPRESSORS, DGC
from .rows import Row, ScalingRow
from .setups import Timer, one_core, setup
from .tables import PARTS, parts

OTHERS = ("onebit", "int8", "fp16", "randomk:ratio=0.01")
"""Methods that are added one by one where options grow; the last two are linear."""


USUAL, FEWER = Timer(), Timer(1, 10, 1.0)


@dataclass(frozen=True)
class Scope:
    """How much is measured.

    Attributes:
        models, testbeds, compressors: all of each are combined.
        fused: compressors for which gaps have fusion beside them, which takes seconds for each.
        methods: to decide, that are timer.
        cases: random ones; offloads: of Algorithm 2.
        tensors, different: how many tensors scaling is measured with, sizes repeating or not.
        others: methods that are added where options grow.
        scaled, chosen: the models that tensors and options grow in.
        timer: how often deciding is repeated; scaling_timer: the same for scaling.
    """

    models: tuple[str, ...] = tuple(MODELS)
    testbeds: tuple[str, ...] = tuple(TESTBEDS)
    compressors: tuple[str, ...] = COMPRESSORS
    fused: tuple[str, ...] = (DGC,)
    methods: tuple[str, ...] = time.METHODS
    cases: int = 2000
    offloads: int = 2000
    tensors: tuple[int, ...] = (10, 30, 100, 300, 1000, 3000, 10000)
    different: tuple[int, ...] = (10, 30, 100, 300, 1000)
    others: tuple[str, ...] = OTHERS
    scaled: str = "resnet101"
    chosen: str = "bert-base"
    timer: Timer = USUAL
    scaling_timer: Timer = FEWER


QUICK = Scope(
    models=("lstm",), testbeds=("pcie-25g",), compressors=COMPRESSORS[1:2], fused=(), methods=time.METHODS[:2],
    cases=20, offloads=10, tensors=(100, 200), different=(10,), others=("fp16",), scaled="lstm", chosen="lstm",
    timer=Timer(1, 1, 0.0), scaling_timer=Timer(1, 1, 0.0),
)  # fmt: skip
"""Everything once, in seconds: to see that it works."""


def main(quick: bool = False, only: str | None = None, json: Path | None = None, plot: Path | None = None) -> list[Row]:
    """Measure, print, and write the files asked for.

    Args:
        quick: little of everything.
        only: comma list of parts; all by default.
        json, plot: files to write; the plot is of scaling, as PNG.

    Raises:
        ConfigError: an unknown part, or a file that could not be written later on.
    """
    run = Suite("planner", None, json, plot)
    names, scope = _wanted(only), QUICK if quick else Scope()
    rows: list[Row] = []
    with one_core(), run.progress(sum(STEPS[name](scope) for name in names)) as tick:
        for name in names:
            rows += RUNS[name](scope, tick)
    for part, own in parts(rows):
        part.table.show(part.title, own)
        print("\n".join(part.notes(own)))
    scaling = [row for row in rows if isinstance(row, ScalingRow)]
    if scaling:
        run.draw(partial(time.draw, scaling))
    run.write(rows, picture=run.picture)
    return rows


def _wanted(only: str | None) -> list[str]:
    known = list(RUNS)
    wanted = known if only is None else [part.strip() for part in only.split(",")]
    unknown = [part for part in wanted if part not in known]
    if unknown:
        raise ConfigError(f"--only {only}: got {', '.join(map(repr, unknown))}; expected some of {', '.join(known)}")
    return wanted


# --- the parts --------------------------------------------------------------------------------------------------------

Tick = Callable[[], None]


def _selection(scope: Scope, tick: Tick) -> list[Row]:
    rows: list[Row] = []
    for model in scope.models:
        for testbed in scope.testbeds:
            rows += time.selection(setup(model, testbed, DGC), scope.timer, scope.methods)
            tick()
    return rows


def _places(scope: Scope) -> list[tuple[str, str, str]]:
    return [(m, t, c) for m in scope.models for t in scope.testbeds for c in scope.compressors]


def _gap(scope: Scope, tick: Tick) -> list[Row]:
    rows: list[Row] = []
    for place in _places(scope):
        rows.append(paper.gap(setup(*place), place[-1] in scope.fused))
        tick()
    return rows


def _orders(scope: Scope, tick: Tick) -> list[Row]:
    rows: list[Row] = []
    for place in _places(scope):
        rows.append(paper.orders(setup(*place)))
        tick()
    return rows


def _cases(scope: Scope, tick: Tick) -> list[Row]:
    return [
        *cases.searched(scope.cases, tick),
        *cases.searched(scope.cases, tick, order="backprop"),
        *cases.offloaded(scope.offloads, tick),
        *cases.offloaded(scope.offloads, tick, order="backprop"),
    ]


def _paper(scope: Scope, tick: Tick) -> list[Row]:
    rows: list[Row] = []
    for model in scope.models:
        rows += [*paper.gains([model]), *paper.factors([model])]
        tick()
    return rows


def _distance(scope: Scope, tick: Tick) -> list[Row]:
    rows: list[Row] = []
    for model in scope.models:
        rows += distance.distances([model])
        tick()
    return rows


def _scaling(scope: Scope, tick: Tick) -> list[Row]:
    scaling, chosen = (setup(model, scope.testbeds[-1], DGC) for model in (scope.scaled, scope.chosen))
    return [
        *time.by_tensors(scaling, scope.tensors, False, scope.scaling_timer, tick),
        *time.by_tensors(scaling, scope.tensors, False, scope.scaling_timer, tick, "backprop"),
        *time.by_tensors(scaling, scope.different, True, scope.scaling_timer, tick),
        *time.by_options(chosen, time.choices(DGC, scope.others), scope.scaling_timer, tick),
    ]


RUNS: dict[str, Callable[[Scope, Tick], list[Row]]] = {
    "selection": _selection,
    "gap": _gap,
    "cases": _cases,
    "paper": _paper,
    "distance": _distance,
    "scaling": _scaling,
    "orders": _orders,
}

STEPS: dict[str, Callable[[Scope], int]] = {
    "selection": lambda a: len(a.models) * len(a.testbeds),
    "gap": lambda a: len(_places(a)),
    "cases": lambda a: 2 * (a.cases + a.offloads),
    "paper": lambda a: len(a.models),
    "distance": lambda a: len(a.models),
    "scaling": lambda a: 2 * len(a.tensors) + len(a.different) + 3 + len(a.others),
    "orders": lambda a: len(_places(a)),
}
"""How many ticks each part has."""


assert {part.name for part in PARTS} - {"factors"} == set(RUNS)
