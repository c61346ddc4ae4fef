"""The planner's files: JSON objects that say what they are, in which version, and hold no key that is not known."""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files import replacing


def write(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write a document; a file of that name is replaced when the new one is whole.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = Path(path)
    try:
        with replacing(target) as file:
            file.write(json.dumps(document, indent=1, allow_nan=False, default=_plain) + "\n")
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror or error}") from error


def _plain(value: Any) -> Any:
    """A scalar of numpy as Python's own."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} {value!r} cannot be written as JSON")


def read(path: str | os.PathLike[str]) -> Any:
    """The JSON value in a file.

    Raises:
        ConfigError: the file cannot be read or is not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # of JSON and of UTF-8
        raise ConfigError(f"{path}: expected JSON; {error}") from error


def check_kind(document: Any, kind: str, version: int, how: str) -> None:
    """See that a document is of this kind and version.

    Args:
        how: how such a file is made, for the error's text.

    Raises:
        ConfigError: it is something else.
    """
    found = document.get("kind") if isinstance(document, Mapping) else None
    if found != kind:
        got = f"kind {found!r}" if isinstance(document, Mapping) else type(document).__name__
        raise ConfigError(f"{kind}: got {got}; expected an object of kind {kind!r}, as made by {how}")
    if document.get("version") != version or isinstance(document["version"], bool):
        raise ConfigError(f"{kind}: got version {document.get('version')!r}; expected {version}; make it anew by {how}")


def check_keys(document: Any, where: str, required: Collection[str], optional: Collection[str] = ()) -> None:
    """See that an object has all keys that it needs, and no key that nobody would read.

    Raises:
        ConfigError: it has not, or is no object.
    """
    if not isinstance(document, Mapping):
        raise ConfigError(f"{where}: got {type(document).__name__}; expected an object with {', '.join(required)}")
    missing = [key for key in required if key not in document]
    unknown = [key for key in document if key not in required and key not in optional]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} missing; expected {', '.join([*required])}")
    if unknown:
        raise ConfigError(
            f"{where}: got {', '.join(map(repr, unknown))}; expected no keys but {', '.join([*required, *optional])}"
        )


def number(value: Any, where: str, least: float = -math.inf) -> float:
    """A finite number of at least ``least``, as a float.

    Raises:
        ConfigError: it is none.
    """
    try:
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        good = real and math.isfinite(value) and float(value) >= least
    except OverflowError:  # a whole number beyond all floats
        good = False
    if not good:
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise ConfigError(f"{where}: got {value!r}; expected a finite number{bound}")
    return float(value)


def integer(value: Any, where: str, least: int) -> int:
    """A whole number of at least ``least``.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ConfigError(f"{where}: got {value!r}; expected a whole number of at least {least}")
    return int(value)


def text(value: Any, where: str, among: Collection[str] = ()) -> str:
    """A string; one of ``among`` where that is given.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, str) or (among and value not in among):
        raise ConfigError(f"{where}: got {value!r}; expected {' or '.join(map(repr, among)) or 'text'}")
    return value


def array(value: Any, where: str) -> list[Any]:
    """A list.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, list):
        raise ConfigError(f"{where}: got {type(value).__name__}; expected a list")
    return value
