"""The commands ``plan`` and ``explain``: a plan from files, and what it says."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from ..compressors.registry import read_specs
from ..errors import ConfigError
from ..files.output import WIDTH, check_writable, show
from ..planner import planfile
from ..planner.explain import Explanation, explain
from ..planner.lane_tables import Table
from ..planner.model.beside import beside
from ..planner.model.problem import evaluated
from ..planner.model.profile import Profile
from ..planner.model.timeline import LANES, ORDERS, Order
from ..planner.model.workload import Workload
from ..planner.plan import plan
from ..planner.workloads.clusters import TESTBEDS
from ..planner.workloads.models import MODELS, model_workload
from ..types import DeviceKind, Plan
from .compiling import announced

T = TypeVar("T")


def plan_main(
    profile: str,
    workload: str,
    compressors: str | None = None,
    output: Path | None = None,
    order: str | None = None,
    lanes: str | None = None,
    error_budget: float | None = None,
    picture: Path | None = None,
    fusion: bool = True,
    device: str | None = None,
    backward: float | None = None,
) -> None:
    """Make a plan, say what it does, and write it.

    Args:
        profile: a file of ``espresso-mpi profile``, or the name of one of ``TESTBEDS``.
        workload: a file of ``Workload.save``, or the name of one of ``MODELS``.
        compressors: specs, separated by commas; None: all that were profiled.
        picture: SVG, PNG or JSON file for the predicted timeline.
        device: where the gradients of a shipped model are, cpu or gpu.
        backward: seconds of a shipped model's backward pass, see ``model_workload``.

    Raises:
        ConfigError: there is no such file or name, or an argument is out of its range.
    """
    check_writable(output, "--output")
    if picture is not None:
        from ..planner import pictures

        pictures.require(picture)
    _among("order", order, ORDERS)
    _among("lanes", lanes, LANES)
    measured = _file_or_name("profile", profile, TESTBEDS, Profile.load, lambda name: TESTBEDS[name].profile())
    recorded = _steps(workload, device, backward)
    steps, dearer = beside(recorded, measured)
    chosen = None if compressors is None else read_specs(compressors)
    with announced():
        made = plan(steps, dearer, chosen, order=cast("Order | None", order), lanes=lanes, fusion=fusion,
                    error_budget=error_budget)  # fmt: skip
    told = explain(made)
    _print(replace(told, words=(*told.words, *_told_of_pushes(recorded, steps, measured))), tables=2)
    if output is not None:
        planfile.save(made, output)
        print(f"wrote {output}; espresso-mpi explain {output} tells the rest")
    if picture is not None:
        _draw(made, steps, dearer, picture)


def explain_main(path: Path, tensor: str | None = None) -> None:
    """Say what a plan does and why, or what it does with one tensor.

    Raises:
        ConfigError: the file holds no plan; PlanError: the plan does not know the tensor.
    """
    _print(explain(planfile.load(path), tensor))


def _file_or_name(
    what: str, given: str, names: Mapping[str, Any], load: Callable[[str], T], make: Callable[[str], T]
) -> T:
    """What a file holds, or what is shipped under a name."""
    if Path(given).is_file():
        return load(given)
    if given in names:
        return make(given)
    raise ConfigError(f"{what} {given!r}: there is no such file; expected one, or one of {', '.join(names)}")


def _steps(workload: str, device: str | None, backward: float | None) -> Workload:
    """A recorded workload, or a model's."""
    if backward is not None and Path(workload).is_file():
        raise ConfigError(
            f"--backward {backward:g} with the file {workload!r}; expected the name of a model: a file's times stay as "
            f"they were recorded, so leave --backward out"
        )
    return _file_or_name("workload", workload, MODELS, Workload.load, lambda name: _model(name, device, backward))


def _model(name: str, device: str | None, backward: float | None) -> Workload:
    _among("device", device, get_args(DeviceKind))
    return model_workload(name, backward=backward, device=cast(DeviceKind, "gpu" if device is None else device))


def _told_of_pushes(recorded: Workload, steps: Workload, profile: Profile) -> tuple[str, ...]:
    """That gradients count as ready at other times than recorded, if they do."""
    if steps == recorded:
        return ()
    before, now = ((workload.tensors[0].ready, workload.tensors[-1].ready) for workload in (recorded, steps))
    return (
        f"Gradients were recorded as ready from {before[0] * 1e3:.4g} to {before[1] * 1e3:.4g} ms, and count as ready "
        f"from {now[0] * 1e3:.4g} to {now[1] * 1e3:.4g} ms: by the profile, pushes hide {profile.hidden:.0%} of "
        f"what they could, and computing takes {profile.slowed:.0%} longer beside them.",
    )


def _among(what: str, value: str | None, known: Any) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"{what} {value!r}; expected one of {', '.join(known)}")


def _draw(made: Plan, workload: Workload, profile: Profile, picture: Path) -> None:
    """The predicted timeline of a plan as a picture."""
    from ..planner import pictures

    assert made.forecast is not None
    problem, choice = evaluated(made, workload, profile, lanes=made.forecast.lanes, order=made.forecast.order)
    pictures.picture(problem, choice, picture, f"{workload.source}: {made.forecast.seconds * 1e3:.4g} ms")
    print(f"wrote {picture}")


def _print(explanation: Explanation, tables: int | None = None) -> None:
    """Print it; ``tables``: only so many of its tables."""
    for words in explanation.words:
        print(textwrap.fill(words, WIDTH, break_long_words=False, break_on_hyphens=False))
    for table in explanation.tables[:tables]:
        _show(table)


def _show(table: Table) -> None:
    print()
    show(table.title, table.header, table.rows, table.text)
