"""A plan as a JSON file, and whether it fits what it is used for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from msgspec import Struct

from ..errors import ConfigError
from ..files import schema
from ..files.schema import Count
from ..timetable import Schedule
from ..types import Chosen, Forecast, MadeFor, Outlook, Plan, Route, Strategy, TensorSpec
from .model.fingerprints import difference

KIND = schema.Kind("espresso_mpi plan", 1, "espresso-mpi plan --profile FILE --workload FILE -o FILE")

MOST_BYTES = 1 << 29
"""Of a file: a tensor has some 1000 bytes there."""

_SHOWN = 3
"""Names that are listed before the rest is only counted."""


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan as JSON: all of it, or nothing if that fails.

    Raises:
        ConfigError: the file cannot be written.

    Example:
        >>> plan = espresso_mpi.Plan(default=espresso_mpi.Strategy("int8", "flat-allgather"))
        >>> espresso_mpi.planner.save_plan(plan, "plan.json")
    """
    schema.write(path, to_json(plan))


def load(path: str | os.PathLike[str], how: str = KIND.how) -> Plan:
    """Read a plan that ``save`` wrote.

    Args:
        how: by what such a file is made, for the errors' texts.

    Raises:
        ConfigError: the file cannot be read, holds no valid plan of this version, or was changed by hand: its digest is
            not that of what it says.

    Example:
        >>> plan = espresso_mpi.Plan(default=espresso_mpi.Strategy("int8", "flat-allgather"))
        >>> espresso_mpi.planner.save_plan(plan, "plan.json")
        >>> espresso_mpi.planner.load_plan("plan.json") == plan
        True
    """
    return schema.load(path, from_json, MOST_BYTES, how=how)


# --- to JSON ----------------------------------------------------------------------------------------------------------


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values. A strategy is [compressor, route]."""
    made, forecast = plan.made_for, plan.forecast
    return {
        **KIND.header(),
        "digest": plan.digest,
        "strategies": {name: _pair(strategy) for name, strategy in plan.strategies.items()},
        "default": _pair(plan.default),
        "groups": [list(group) for group in plan.groups],
        "fuse_bytes": plan.fuse_bytes,
        "made_for": None if made is None else {**_values(made), "tensors": _tensors_to_json(made)},
        "forecast": None
        if forecast is None
        else {**_values(forecast), "buffers": [_outlook_to_json(entry) for entry in forecast.buffers]},
        "schedule": None if plan.schedule is None else asdict(plan.schedule),
        "held": plan.held,
        "chosen": None if plan.chosen is None else asdict(plan.chosen),
    }


def _values(of: Any) -> dict[str, Any]:
    """The fields of a dataclass; mappings as objects."""
    found = {f.name: getattr(of, f.name) for f in fields(of)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}


def _pair(strategy: Strategy | None) -> list[str] | None:
    return None if strategy is None else [strategy.compressor, str(strategy.route)]


def _tensors_to_json(made: MadeFor) -> dict[str, Any]:
    return {
        name: [shape if isinstance(shape, int) else list(shape), dtype] for name, (shape, dtype) in made.tensors.items()
    }


def _outlook_to_json(entry: Outlook) -> dict[str, Any]:
    return {**_values(entry), "tensors": list(entry.tensors), "runner_up": _pair(entry.runner_up)}


# --- from JSON --------------------------------------------------------------------------------------------------------


class _Pair(Struct, array_like=True, forbid_unknown_fields=True):
    compressor: str
    route: str


@dataclass(frozen=True)
class _Outlook(Outlook):
    runner_up: _Pair | None = None  # type: ignore[assignment]


@dataclass(frozen=True)
class _Forecast(Forecast):
    buffers: tuple[_Outlook, ...] = ()


@dataclass(frozen=True)
class _Document:
    """The content of a file; for all names here see ``Plan`` and what it holds."""

    digest: str
    strategies: dict[str, _Pair]
    default: _Pair | None
    groups: tuple[tuple[str, ...], ...]
    fuse_bytes: Count | None
    made_for: MadeFor | None
    forecast: _Forecast | None
    schedule: Schedule | None
    held: bool = False
    chosen: Chosen | None = None


def from_json(document: Any) -> Plan:
    """The plan in JSON values.

    Raises:
        ConfigError: they describe none, or of another version, or not the one whose digest they hold; PlanError: the
            plan contradicts itself.
    """
    found: _Document = schema.convert(KIND.content(document), _Document, "plan")
    plan = Plan(
        {name: _strategy(pair, f"plan: strategies: {name}") for name, pair in found.strategies.items()},
        None if found.default is None else _strategy(found.default, "plan: default"),
        found.groups,
        found.fuse_bytes,
        found.made_for,
        None if found.forecast is None else _forecast(found.forecast),
        found.schedule,
        found.held,
        found.chosen,
    )
    for buffer in plan.forecast.buffers if plan.forecast else ():
        for name in buffer.tensors:
            plan.strategy(name)  # raises where the plan has none
    if plan.digest != found.digest:
        raise ConfigError(
            f"plan: got the digest {schema.shown(found.digest)}, expected {plan.digest!r}, that of the strategies, "
            f"groups and schedule beside it; the file was changed after it was made"
        )
    return plan


def _strategy(pair: _Pair, where: str) -> Strategy:
    try:
        return Strategy(pair.compressor, Route.parse(pair.route))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _forecast(found: _Forecast) -> Forecast:
    return Forecast(**{**vars(found), "buffers": tuple(map(_outlook, found.buffers, range(len(found.buffers))))})


def _outlook(found: _Outlook, number: int) -> Outlook:
    where = f"plan: forecast: buffers[{number}]: runner_up"
    other = None if found.runner_up is None else _strategy(found.runner_up, where)
    return Outlook(**{**vars(found), "runner_up": other})


# --- does it fit ------------------------------------------------------------------------------------------------------


def misfits(
    plan: Plan,
    specs: Sequence[TensorSpec],
    nodes: int,
    ranks_per_node: int,
    fingerprint: Mapping[str, Any] | None = None,
    complete: bool = True,
) -> list[str]:
    """What differs between what a plan was made for and what it is to be used for, in words; empty if nothing does.

    A plan without ``made_for`` fits everything. Entries of ``specs`` without elements fit any tensor of their name.

    Args:
        specs: all tensors of a step.
        fingerprint: as a profile made here would have it; None: not compared.
        complete: the specs are those of a whole step, so all of the plan's tensors should be among them.

    Example:
        >>> from espresso_mpi.planner import TESTBEDS, Workload, WorkloadTensor, misfits, plan
        >>> workload = Workload((WorkloadTensor("w", 1000, 0.01),), device="gpu")
        >>> made = plan(workload, TESTBEDS["pcie-25g"].profile(), ["int8"])
        >>> misfits(made, [espresso_mpi.TensorSpec("w", (1000,), "float32", "gpu")], nodes=4, ranks_per_node=8)
        ['nodes: 8 when the plan was made, 4 here']
    """
    made = plan.made_for
    if made is None:
        return []
    found = [
        f"{what}: {before} when the plan was made, {now} here"
        for what, before, now in (
            ("nodes", made.nodes, nodes), ("ranks on each node", made.ranks_per_node, ranks_per_node)
        )
        if before != now
    ]  # fmt: skip
    if fingerprint is not None:
        there, here = (_besides_the_ranks(values) for values in (made.fingerprint, fingerprint))
        found += difference(there, here, ("the plan", "here"))
    return found + _missing(plan, made, specs, complete) + _changed(made, specs)


def _besides_the_ranks(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fingerprint.items() if key not in ("nodes", "ranks_per_node")}


def _missing(plan: Plan, made: MadeFor, specs: Sequence[TensorSpec], complete: bool) -> list[str]:
    here = {spec.name for spec in specs}
    new = [] if plan.default is not None else [s.name for s in specs if s.size and s.name not in made.tensors]
    gone = [name for name in made.tensors if name not in here] if complete else []
    return [
        f"tensor{'s' * (len(names) > 1)} {_listed(names)}: {what}"
        for names, what in ((new, "not in the plan"), (gone, "in the plan, but not here"))
        if names
    ]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _changed(made: MadeFor, specs: Iterable[TensorSpec]) -> list[str]:
    found = []
    for spec in specs:
        if not spec.size or spec.name not in made.tensors:
            continue
        shape, dtype = made.tensors[spec.name]
        same = spec.size == shape if isinstance(shape, int) else spec.shape == shape
        if (same, spec.dtype, spec.device) != (True, dtype, made.device):
            before = f"{dtype}[{shape} elements]" if isinstance(shape, int) else f"{dtype}{list(shape)}"
            found.append(
                f"tensor {spec.name!r}: {before} on the {made.device} in the plan, {spec} on the {spec.device} here"
            )
    shown = found[:_SHOWN]
    return shown + ([f"{len(found) - _SHOWN} more tensors differ"] if len(found) > _SHOWN else [])
