"""A plan as a JSON file, and whether it fits what it is used for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_args

from ..errors import ConfigError, EspressoError
from ..types import DeviceKind, Forecast, MadeFor, Order, Outlook, Plan, Strategy, TensorSpec
from . import _json
from .profile import difference

VERSION = 1
KIND = "espresso_mpi plan"
_MADE_BY = "espresso-mpi plan"

_PLAN = ("strategies", "default", "groups", "fuse_bytes", "made_for", "forecast")
_FORECAST = tuple(f.name for f in fields(Forecast))
_OUTLOOK = tuple(f.name for f in fields(Outlook))
_MADE_FOR = tuple(f.name for f in fields(MadeFor))

_SHOWN = 3
"""Names that are listed before the rest is only counted."""


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan as JSON: all of it, or nothing if that fails.

    Raises:
        ConfigError: the file cannot be written.
    """
    _json.write(path, to_json(plan))


def load(path: str | os.PathLike[str]) -> Plan:
    """Read a plan that ``save`` wrote.

    Raises:
        ConfigError: the file cannot be read, holds no valid plan of this version, or was changed by hand: its digest is
            not that of what it says.
    """
    document = _json.read(path)
    try:
        return from_json(document)
    except EspressoError as error:
        raise ConfigError(f"{path}: {error}") from error


# --- to JSON ----------------------------------------------------------------------------------------------------------


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values. A strategy is [compressor, route]."""
    made, forecast = plan.made_for, plan.forecast
    return {
        "kind": KIND,
        "version": VERSION,
        "digest": plan.digest,
        "strategies": {name: _pair(strategy) for name, strategy in plan.strategies.items()},
        "default": _pair(plan.default),
        "groups": [list(group) for group in plan.groups],
        "fuse_bytes": plan.fuse_bytes,
        "made_for": None if made is None else {**_values(made), "tensors": _tensors_to_json(made)},
        "forecast": None
        if forecast is None
        else {**_values(forecast), "buffers": [_outlook_to_json(entry) for entry in forecast.buffers]},
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


def from_json(document: Any) -> Plan:
    """The plan in JSON values.

    Raises:
        ConfigError: they describe none, or of another version, or not the one whose digest they hold; PlanError: the
            plan contradicts itself.
    """
    _json.check_kind(document, KIND, VERSION, _MADE_BY)
    _json.check_keys(document, "plan", ("kind", "version", "digest", *_PLAN))
    strategies = {
        name: _strategy(pair, f"plan: tensor {name!r}") for name, pair in _object(document, "strategies").items()
    }
    groups = tuple(
        tuple(_names(group, f"plan: group {n}"))
        for n, group in enumerate(_json.array(document["groups"], "plan: groups"))
    )
    fuse = document["fuse_bytes"]
    plan = Plan(
        strategies,
        _optional(document["default"], lambda pair: _strategy(pair, "plan: default")),
        groups,
        None if fuse is None else _json.integer(fuse, "plan: fuse_bytes", 0),
        _optional(document["made_for"], _made_for),
        _optional(document["forecast"], _forecast),
    )
    if plan.digest != document["digest"]:
        raise ConfigError(
            f"plan: got the digest {document['digest']!r}, expected {plan.digest!r}, that of the strategies and groups "
            f"beside it; the file was changed after it was made: make it anew by {_MADE_BY}"
        )
    return plan


T = TypeVar("T")


def _optional(value: Any, read: Callable[[Any], T]) -> T | None:
    return None if value is None else read(value)


def _object(document: Mapping[str, Any], key: str, where: str = "plan") -> dict[str, Any]:
    value = document[key]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {key}: got {type(value).__name__}; expected an object")
    return dict(value)


def _strategy(pair: Any, where: str) -> Strategy:
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise ConfigError(f"{where}: got {pair!r}; expected [compressor, route]")
    try:
        return Strategy(*pair)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _names(value: Any, where: str) -> list[str]:
    return [_json.text(name, where) for name in _json.array(value, where)]


def _made_for(document: Any) -> MadeFor:
    _json.check_keys(document, "plan: made_for", _MADE_FOR)
    tensors = {name: _tensor(row, name) for name, row in _object(document, "tensors", "plan: made_for").items()}
    return MadeFor(
        tensors,
        _json.integer(document["machines"], "plan: made_for: machines", 1),
        _json.integer(document["ranks_per_machine"], "plan: made_for: ranks_per_machine", 1),
        _device(document["device"]),
        _object(document, "fingerprint", "plan: made_for"),
    )


def _device(value: Any) -> DeviceKind:
    return _json.text(value, "plan: made_for: device", get_args(DeviceKind))  # type: ignore[return-value]


def _tensor(row: Any, name: str) -> tuple[tuple[int, ...] | int, str]:
    where = f"plan: made_for: tensor {name!r}"
    if not isinstance(row, list) or len(row) != 2:
        raise ConfigError(f"{where}: got {row!r}; expected [shape or number of elements, element type]")
    shape, dtype = row
    if isinstance(shape, list):
        return tuple(_json.integer(n, where, 0) for n in shape), _json.text(dtype, where)
    return _json.integer(shape, where, 1), _json.text(dtype, where)


_TEXTS, _NUMBERS = ("lanes", "bound_kind"), ("seconds", "bound", "compute", "dense", "noise", "forgone")


def _forecast(document: Any) -> Forecast:
    where = "plan: forecast"
    _json.check_keys(document, where, _FORECAST)
    numbers: dict[str, Any] = {key: _json.number(document[key], f"{where}: {key}", 0) for key in _NUMBERS}
    texts: dict[str, Any] = {key: _json.text(document[key], f"{where}: {key}") for key in _TEXTS}
    baselines = {
        name: _json.number(seconds, f"{where}: baselines: {name}", 0)
        for name, seconds in _object(document, "baselines", where).items()
    }
    buffers = tuple(_outlook(row, n) for n, row in enumerate(_json.array(document["buffers"], f"{where}: buffers")))
    error = _optional(document["error"], lambda value: _json.number(value, f"{where}: error", 0))
    texts["order"] = _json.text(document["order"], f"{where}: order", get_args(Order))
    return Forecast(**numbers, **texts, baselines=baselines, buffers=buffers, error=error)


def _outlook(row: Any, number: int) -> Outlook:
    where = f"plan: forecast: buffer {number}"
    _json.check_keys(row, where, _OUTLOOK)
    seconds = {key: _json.number(row[key], f"{where}: {key}", 0) for key in ("seconds", "exposed")}
    margins = {key: _json.number(row[key], f"{where}: {key}") for key in ("margin", "dense_margin")}
    runner_up = _optional(row["runner_up"], lambda pair: _strategy(pair, f"{where}: runner_up"))
    return Outlook(tuple(_names(row["tensors"], f"{where}: tensors")), **seconds, **margins, runner_up=runner_up)


# --- does it fit ------------------------------------------------------------------------------------------------------


def misfits(
    plan: Plan,
    specs: Sequence[TensorSpec],
    machines: int,
    ranks_per_machine: int,
    fingerprint: Mapping[str, Any] | None = None,
    complete: bool = True,
) -> list[str]:
    """What differs between what a plan was made for and what it is to be used for, in words; empty if nothing does.

    A plan without ``made_for`` fits everything. Entries of ``specs`` without elements fit any tensor of their name.

    Args:
        specs: all tensors of a step.
        fingerprint: as a profile made here would have it; None: not compared.
        complete: the specs are those of a whole step, so all of the plan's tensors should be among them.
    """
    made = plan.made_for
    if made is None:
        return []
    found = [
        f"{what}: {before} when the plan was made, {now} here"
        for what, before, now in (
            ("machines", made.machines, machines), ("ranks on each machine", made.ranks_per_machine, ranks_per_machine)
        )
        if before != now
    ]  # fmt: skip
    if fingerprint is not None:
        there, here = (_besides_the_ranks(values) for values in (made.fingerprint, fingerprint))
        found += difference(there, here, ("the plan", "here"))
    return found + _missing(plan, made, specs, complete) + _changed(made, specs)


def _besides_the_ranks(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fingerprint.items() if key not in ("machines", "ranks_per_machine")}


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
