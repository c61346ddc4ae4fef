"""Finds compressors by name: every file of this folder may register one; its folders hold what methods share.

Other packages offer theirs by entry points (``plugins``).

A spec is ``name`` or ``name:parameter=value,parameter=value``; ``str(compressor)`` gives it back. A number may be a
schedule: ``topk:ratio=0.25~0.01@400`` begins at 25 % and arrives at 1 % after 400 steps.
"""

from __future__ import annotations

import difflib
import logging
import pkgutil
import re
from dataclasses import fields
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigError
from . import plugins
from .base import Compressor
from .schedule import ParameterSchedule

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_CLASSES: dict[str, type[Compressor]] = {}

_NAME = re.compile(r"[a-z0-9_-]+")

C = TypeVar("C", bound=type[Compressor])


def register(cls: C) -> C:
    """Class decorator: make a compressor known under ``cls.name``.

    Raises:
        ConfigError: another class has that name, or the class is none that a spec could make.

    Example:
        >>> from dataclasses import dataclass
        >>> from espresso_mpi import compressors
        >>> @compressors.register
        ... @dataclass(frozen=True)
        ... class Sketch(type(compressors.get("count_sketch"))):
        ...     name = "sketch"
        >>> compressors.get("sketch").name
        'sketch'
        >>> compressors.unregister("sketch")
    """
    problem = _unfit(cls)
    if problem:
        raise ConfigError(f"compressor {getattr(cls, '__name__', cls)}: {problem}")
    if not _built_in(cls):
        _load_all()  # so that a name that is taken is refused here and not at the first use of any
    known = _CLASSES.setdefault(cls.name, cls)
    if known.__qualname__ != cls.__qualname__ or known.__module__ != cls.__module__:
        raise ConfigError(f"compressor {cls.name!r} is registered twice: by {known.__module__} and {cls.__module__}")
    _CLASSES[cls.name] = cls
    return cls


def _unfit(cls: Any) -> str:
    """Why a class cannot be registered; nothing if it can."""
    if not (isinstance(cls, type) and issubclass(cls, Compressor)):
        return "it is no subclass of Compressor"
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "none":
        return f"name={name!r}; expected lower-case letters, digits, _ and -, and not 'none'"
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        return f"it lacks {', '.join(missing)}"
    if "__dataclass_fields__" not in vars(cls) and cls.__annotations__:
        return "it has parameters but is no dataclass; put @dataclass(frozen=True) under @register"
    odd = [f.name for f in fields(cls) if not isinstance(f.default, (bool, int, float, str))]
    return f"parameter {odd[0]} needs a default of type int, float, bool or str" if odd else ""


def unregister(name: str) -> None:
    """Forget the compressor of that name: for tests that register one on the fly.

    Example:
        >>> from espresso_mpi import compressors
        >>> compressors.unregister("unknown")  # nothing happens
    """
    _CLASSES.pop(name, None)


@lru_cache(maxsize=1)
def _load_all() -> None:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not module.ispkg:
            import_module(f"{__package__}.{module.name}")


def _built_in(cls: type[Compressor]) -> bool:
    return cls.__module__.startswith(f"{__package__}.")


def names(installed: bool = True) -> tuple[str, ...]:
    """The names of all compressors, sorted.

    Args:
        installed: whether those of other packages and those that were registered on the fly are listed as well. A
            package whose compressor cannot be loaded is left out, and the log says so; ``get`` raises what is wrong.

    Raises:
        ConfigError: a package offers a name that another one or a built-in compressor has.

    Example:
        >>> "topk" in espresso_mpi.compressors.names()
        True
    """
    _load_all()
    if not installed:
        return tuple(sorted(name for name, cls in _CLASSES.items() if _built_in(cls)))
    for name in _offered():
        try:
            _find(name)
        except ConfigError as error:
            _warn_left_out(str(error))
    return tuple(sorted(_CLASSES))


@lru_cache
def _warn_left_out(reason: str) -> None:
    logging.getLogger("espresso_mpi").warning("left out of the list of compressors: %s", reason)


def _offered() -> dict[str, EntryPoint]:
    """The entry points of other packages by name, none of which is that of a built-in compressor."""
    offered = plugins.installed()
    for name in offered.keys() & set(names(installed=False)):
        raise ConfigError(
            f"compressor {name!r} is offered twice: by {_CLASSES[name].__module__}, which is built in, and by "
            f"{plugins.origin(offered[name])}; uninstall that package, or give its compressor another name"
        )
    return offered


def _find(name: str) -> type[Compressor] | None:
    """The class of that name; packages are asked only if no built-in or registered one has it."""
    _load_all()
    if name not in _CLASSES:
        entry = _offered().get(name)
        if entry is not None:
            _register_entry(entry)
    return _CLASSES.get(name)


def _register_entry(entry: EntryPoint) -> None:
    cls, where = plugins.load(entry), f"compressor {entry.name!r}: {plugins.origin(entry)}"
    got = getattr(cls, "name", None)
    if got != entry.name:
        raise ConfigError(f"{where}, has name={got!r}; expected the name of the entry point")
    try:
        register(cls)
    except ConfigError as error:
        raise ConfigError(f"{where}, is refused: {error}") from error


def get(spec: str | Compressor) -> Compressor:
    """The compressor with this spec, e.g. ``"topk:ratio=0.01"``; a Compressor is returned as it is.

    Raises:
        ConfigError: unknown name or parameter, or a value that does not fit.

    Example:
        >>> compressor = espresso_mpi.compressors.get("topk:ratio=0.01")
        >>> compressor.ratio, compressor.nbytes(1000)
        (0.01, 80)
    """
    if isinstance(spec, Compressor):
        return spec
    if not isinstance(spec, str):
        raise ConfigError(f"compressor: got {type(spec).__name__}; expected a spec such as 'topk:ratio=0.01'")
    name, _, text = spec.strip().partition(":")
    cls = _find(name)
    if cls is None:
        near = difflib.get_close_matches(name.lower(), names(), 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"compressor {name!r} is not known; known are none, {', '.join(names())}{meant}")
    return cls(**_parameters(cls, text))


def split_specs(text: str) -> list[str]:
    """The parts of a comma list. A bare ``parameter=value`` belongs to the part before it."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if found and part.partition("=")[0].isidentifier() and "=" in part and ":" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def read_specs(text: str) -> list[str]:
    """The compressors of a comma list as they are written there, ``none`` among them.

    A bare ``parameter=value`` belongs to the compressor before it.

    Raises:
        ConfigError: a spec names no compressor, or there is none.

    Example:
        >>> espresso_mpi.compressors.read_specs("none,fp16,topk:ratio=0.01")
        ['none', 'fp16', 'topk:ratio=0.01']
    """
    found = split_specs(text)
    if not found:
        raise ConfigError("no compressor is named; expected a list such as none,fp16,topk:ratio=0.01")
    for spec in found:
        if spec != "none":
            get(spec)
    return found


def _parameters(cls: type[Compressor], text: str) -> dict[str, Any]:
    kinds = {f.name: type(f.default) for f in fields(cls)}
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in kinds:
            known = ", ".join(f"{k}=<{t.__name__}>" for k, t in kinds.items()) or "no parameters"
            raise ConfigError(f"compressor {cls.name!r}: cannot read {item!r}; it takes {known}")
        if key in values:
            raise ConfigError(f"compressor {cls.name!r}: {key} is given twice in {text!r}")
        values[key] = _convert(cls.name, key, value, kinds[key])
    return values


def _convert(owner: str, key: str, value: str, kind: type) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ConfigError(f"compressor {owner!r}: {key}={value!r}; expected true or false")
        return value.lower() == "true"
    try:
        scheduled = ParameterSchedule.parse(value, kind) if kind in (int, float) else None
        return kind(value) if scheduled is None else scheduled
    except ConfigError:
        raise
    except ValueError:
        example = "1~4@400" if kind is int else "0.25~0.01@400"
        raise ConfigError(
            f"compressor {owner!r}: {key}={value!r}; expected {kind.__name__}, or a schedule such as {example}"
        ) from None
