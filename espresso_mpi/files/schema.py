"""JSON documents that are checked against types.

The types are dataclasses and msgspec structs whose annotations carry the ranges; msgspec does the checking. This module
reads and writes the files, and says what msgspec does not: in which document, at which place, and what was found there.
"""

from __future__ import annotations

import json
import numbers
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from ..errors import ConfigError, EspressoError
from . import json_text
from .atomic import replacing

LARGEST = 1 << 48
"""No file or count is larger; below it, products with a few more factors stay exact in 64 bits."""

MOST_ELEMENTS = 1 << 40
"""Of all tensors of a step together: 4 TiB as float32, more than the memory of any rank."""
MOST_RANKS = 1 << 18
"""Of a job, four times those of the largest training runs. So many payloads of so many elements, of 16 bytes each, are
less than 2⁶³ bytes: what a rank moves is a number of 64 bits."""

Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
Elements = Annotated[int, Meta(ge=1, le=MOST_ELEMENTS)]
Ranks = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
Finite = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""Sums and products of a few such numbers are finite as well."""

Seconds = Annotated[float, Meta(ge=0, le=1e30)]
Moment = Annotated[float, Meta(ge=0, le=1e9)]
"""Seconds since a step began, up to 30 years: float64 still tells moments apart that are 0.1 us from each other."""
Relative = Annotated[float, Meta(ge=0, le=1e6)]
"""A part of something, such as an error of what was measured; a million times what it is a part of says nothing."""

_AT_ONCE = 1 << 24
"""Bytes that are read of a file at once."""

T = TypeVar("T")


# --- files ------------------------------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike[str],
    read: Callable[[Any], T],
    most: int,
    parsed: Callable[[bytes], Any] | None = None,
    how: str = "",
) -> T:
    """What ``read`` makes of the value in a JSON file, or in a file of the format that ``parsed`` knows.

    Args:
        most: bytes that such a file has at most.
        how: by what such a file is made, for the errors' texts.

    Raises:
        ConfigError: the file cannot be read, is larger, or one of the two refuses it; the text names the file.
    """
    try:
        data = contents(path, most)
    except ConfigError as error:
        raise ConfigError(f"{error}{_made_by('make one', how, error)}") from None
    try:
        return read((parsed or parse)(data))
    except EspressoError as error:
        raise ConfigError(f"{path}: {error}{_made_by('make it anew', how, error)}") from None


def _made_by(what: str, how: str, error: EspressoError) -> str:
    return f"; {what} by {how}" if how and how not in str(error) else ""


def contents(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a file, ``most`` at most: no more are read of a larger one, nor of a device that never ends.

    Raises:
        ConfigError: it cannot be read, or is larger.
    """
    try:
        with Path(path).open("rb") as file:
            size, data = os.fstat(file.fileno()).st_size, bytearray()
            while size <= most and len(data) <= most and (part := file.read(min(_AT_ONCE, most + 1 - len(data)))):
                data += part
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if max(size, len(data)) > most:
        raise ConfigError(
            f"{path}: has {size or f'more than {most}'} bytes; expected at most {most}, more than any file of this "
            f"kind has; name another file"
        )
    return bytes(data)


def parse(data: bytes) -> Any:
    """The value in a JSON text.

    Raises:
        ConfigError: it is not JSON, or holds what ``json_text`` refuses.
    """
    json_text.refuse(data)
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected JSON; {error}") from None


def write(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write a document; a file of that name is replaced when the new one is whole.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = Path(path)
    try:
        with replacing(target) as file:
            file.write(json.dumps(document, indent=1, allow_nan=False, default=_own) + "\n")
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror or error}") from error


# --- checks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What a document says it is under ``kind`` and ``version``; ``how``: how one is made, for the errors' texts."""

    name: str
    version: int
    how: str

    def content(self, document: Any) -> dict[str, Any]:
        """The document without these two keys.

        Raises:
            ConfigError: it is of another kind or version.
        """
        found = document.get("kind") if isinstance(document, Mapping) else None
        if found != self.name:
            got = f"kind {shown(found)}" if isinstance(document, Mapping) else shown(document)
            raise ConfigError(
                f"{self.name}: got {got}; expected an object of kind {self.name!r}, as made by {self.how}"
            )
        version = document.get("version")
        if version != self.version or isinstance(version, bool):
            raise ConfigError(
                f"{self.name}: got version {shown(version)}; expected {self.version}; make it anew by {self.how}"
            )
        return {key: value for key, value in document.items() if key not in ("kind", "version")}

    def header(self) -> dict[str, Any]:
        """The two keys."""
        return {"kind": self.name, "version": self.version}


def plain(value: Any) -> Any:
    """A dataclass or struct of finite numbers as JSON gives it back."""
    return msgspec.json.decode(msgspec.json.encode(value))


def convert(document: Any, kind: Any, where: str) -> Any:
    """A JSON value as a value of a type; objects that become dataclasses may have no keys besides their fields.

    Values that are already of the type pass as they are.

    Raises:
        ConfigError: it does not fit; the text says where, what was found and what was expected.
    """
    try:
        return _converted(document, kind)
    except msgspec.ValidationError:
        raise ConfigError(_wrong(document, kind, where)) from None


def _converted(document: Any, kind: Any) -> Any:
    if _is_record(kind) and isinstance(document, kind):
        return document
    return msgspec.convert(msgspec.convert(document, _strict(kind)), kind, from_attributes=True)


def decode(data: bytes, kind: Any, where: str) -> Any:
    """A JSON text as a value of a type, without a detour by plain values: for large texts.

    Raises:
        ConfigError: it is not JSON, holds what ``json_text`` refuses, or does not fit.
    """
    json_text.refuse(data)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return convert(parse(data), kind, where)


def check(value: Any, where: str) -> None:
    """See that the fields of a frozen dataclass or struct fit their annotations; numpy's scalars become Python's.

    Raises:
        ConfigError: one does not fit.
    """
    annotated: Any = type(value)
    put = msgspec.structs.force_setattr if isinstance(value, msgspec.Struct) else object.__setattr__
    for name, kind in _hints(annotated).items():
        found = getattr(value, name)
        own = _own(found)
        try:
            fitting = msgspec.convert(own, kind)
        except msgspec.ValidationError:
            raise ConfigError(_wrong(own, kind, f"{where}: {name}")) from None
        if fitting is not found:
            put(value, name, fitting)


def _own(value: Any) -> Any:
    """Python's own numbers for numpy's, also in tuples and lists."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_own, value)) if type(value) in (tuple, list) else value
    if type(value) in (int, float, bool, str) or not isinstance(value, numbers.Real):
        return value
    try:
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    except (OverflowError, ValueError):  # a fraction beyond all floats: no number of ours
        return value


@lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass or struct with their annotations."""
    return get_type_hints(kind, include_extras=True)


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, msgspec.Struct))


@lru_cache
def _strict(kind: Any) -> Any:
    """The type with a struct that refuses unknown keys in the place of each dataclass."""
    if isinstance(kind, type) and is_dataclass(kind):
        rows: list[Any] = []
        for one in fields(kind):
            given = {name: getattr(one, name) for name in ("default", "default_factory")}
            default = msgspec.field(**{name: value for name, value in given.items() if value is not MISSING})
            rows.append((one.name, _strict(_hints(kind)[one.name]), default))
        return msgspec.defstruct(kind.__name__, rows, forbid_unknown_fields=True, kw_only=True)
    origin, args = get_origin(kind), get_args(kind)
    if origin is None or origin is Annotated or not any(_strict(arg) is not arg for arg in args if arg is not ...):
        return kind
    within = tuple(arg if arg is ... else _strict(arg) for arg in args)
    return (Union if origin is UnionType else origin)[within]


# --- what is wrong, in words ------------------------------------------------------------------------------------------

_WORDS = {
    "`int": "`a whole number", "`float": "`a finite number", "`str": "`text", "`bool": "`true or false",
    "`object": "`an object", "`array": "`a list", " | null": " or null", "`": "", " >= ": " of at least ",
    " <= ": " of at most ",
}  # fmt: skip
"""msgspec's words, and what stands in their place."""

_UNIONS = (Union, UnionType)

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 60, 60


def shown(value: Any) -> str:
    """A value for an error's text, shortened."""
    try:
        return _SHORT.repr(value)
    except ValueError:
        return "a number of thousands of digits"


def _wrong(value: Any, kind: Any, where: str) -> str:
    """What is wrong with a value that does not fit, with the way to the innermost part that does not.

    msgspec names the part by its place, but says neither what stood there nor which key of a dict led there.
    """
    for place, part, inner in _parts(value, kind):
        try:
            _converted(part, inner)
        except msgspec.ValidationError:
            return _wrong(part, inner, f"{where}{place}")
    try:
        _converted(value, kind)
    except msgspec.ValidationError as error:
        return f"{where}: {_complaint(str(error), value, kind)}"
    raise AssertionError("only called with a value that does not fit")


def _parts(value: Any, kind: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The parts of a container with their places and types; of an object with free keys, those are parts as well."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in _UNIONS or origin is Annotated:
        for one in args if origin in _UNIONS else args[:1]:
            yield from _parts(value, one)
    elif isinstance(value, Mapping) and _is_record(kind):
        tag = getattr(kind, "__struct_config__", None)
        if tag and tag.tag is not None and value.get(tag.tag_field) != tag.tag:
            return
        yield from ((f": {name}", value[name], hint) for name, hint in _hints(kind).items() if name in value)
    elif isinstance(value, list) and _is_record(kind):
        yield from ((f": {name}", part, hint) for part, (name, hint) in zip(value, _hints(kind).items()))
    elif isinstance(value, Mapping) and origin in (dict, Mapping):
        yield from ((f": the key {shown(key)}", key, args[0]) for key in value)
        yield from ((f": {shown(key)}".replace("'", ""), part, args[1]) for key, part in value.items())
    elif isinstance(value, (list, tuple)) and origin in (list, tuple):
        fixed = origin is tuple and ... not in args and len(args) == len(value)
        yield from ((f"[{number}]", part, args[number if fixed else 0]) for number, part in enumerate(value))


def _complaint(problem: str, value: Any, kind: Any) -> str:
    kinds = [one for one in (get_args(kind) if get_origin(kind) in _UNIONS else (kind,)) if _is_record(one)]
    known = f" ({', '.join(_hints(kinds[0]))})" if len(kinds) == 1 else ""
    if problem.startswith("Object "):  # misses a field, or has one too many
        return f"{problem.removeprefix('Object ')}; expected an object{known}"
    if problem.endswith("out of range"):
        return f"got {shown(value)}; expected a finite number{known}"
    if problem.startswith("Invalid enum value"):
        return f"got {shown(value)}; expected {' or '.join(map(repr, get_args(kind)))}"
    if problem.startswith(("Expected ", "Number ")):
        words = f"{problem[0].lower()}{problem[1:].partition(', got ')[0]}"
        for theirs, ours in _WORDS.items():
            words = words.replace(theirs, ours)
        return f"got {shown(value)}; {words}{known}"
    return problem  # of __post_init__: a whole sentence
