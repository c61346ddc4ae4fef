"""A digest of the source files that a function is made of.

A compiled function contains the helpers that it calls and the constants that it uses, also those of other modules.
numba keeps it on disk until its own file changes. After a change of another file, such as one that comes by `git pull`,
it would mix old and new code. So the name under which it is kept contains this digest.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

_IMPORT = re.compile(
    r"^(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n;]*)|import[ \t]+([\w., \t]+))", re.MULTILINE
)
"""An import at the top of a module. What kernels use is imported there: not in functions, and not for types alone."""

_IGNORED = re.compile(r"#[^\n]*|\\\n")
"""A comment, or the end of a line that goes on."""

_NAME = re.compile(r"(\*|[\w.]+)(?:\s+as\s+\w+)?")
_OWN = __name__.partition(".")[0]


def renamed(function: Any, suffix: str, **bound: Any) -> FunctionType:
    """A copy of a function with more at the end of its qualified name, under which numba keeps what it compiles.

    Args:
        bound: what some of the names of its module stand for in the copy.
    """
    names = {**function.__globals__, **bound} if bound else function.__globals__
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__doc__, made.__module__ = function.__doc__, function.__module__
    made.__qualname__ = function.__qualname__ + suffix
    return made


def with_digest(function: Any) -> FunctionType:
    """A copy of a function whose name contains the digest of its sources.

    To be made where the function is defined: later, the files may be others than those that were imported.
    """
    return renamed(function, f"_{digest_of(function)}")


def digest_of(function: Any) -> str:
    """Eight hexadecimal digits that change with the function's module and with every module that it imports.

    Modules count that belong to this package or to the function's own, and what they import in turn. The text is empty
    if the function is not from a file. A module that runs as a program has another digest than where it is imported:
    what numba keeps names the module.
    """
    try:
        path = Path(inspect.getfile(function))
    except TypeError:
        return ""
    spec = function.__globals__.get("__spec__")  # tells the name of a module that runs as a program
    name = function.__module__ if spec is None else spec.name
    return _digest(name, path, function.__module__) if path.is_file() else ""


@cache
def _digest(module: str, path: Path, runs_as: str) -> str:
    found, left = {path: module}, [path]
    while left:
        here = left.pop()
        for name, file in _imported(found[here], here):
            if file not in found:
                found[file] = name
                left.append(file)
    content = hashlib.blake2b(runs_as.encode(), digest_size=4)
    for text in sorted(hashlib.blake2b(_content(file)).digest() for file in found):
        content.update(text)
    return content.hexdigest()


@cache
def _content(path: Path) -> bytes:
    return path.read_bytes()


@cache
def _imported(module: str, path: Path) -> tuple[tuple[str, Path], ...]:
    """The modules that a module imports, and their files."""
    parts = module.split(".")
    package = parts if path.name == "__init__.py" else parts[:-1]
    tops = frozenset({_OWN, parts[0]})
    found = (_file(name, tops) for name in _names(_content(path).decode(errors="replace"), package))
    return tuple(one for one in found if one is not None)


def _names(text: str, package: list[str]) -> Iterator[str]:
    """The full names of what a module in ``package`` imports: modules, or what is in them."""
    for dots, start, names, modules in _IMPORT.findall(_IGNORED.sub(" ", text)):
        base = package[: len(package) - len(dots) + 1] if dots else []
        for name in _NAME.findall(names or modules):
            yield ".".join([*base, *filter(None, start.split(".")), name])


@cache
def _file(name: str, tops: frozenset[str]) -> tuple[str, Path] | None:
    """The module that a name is or is in, and its file; None for other packages."""
    top, *rest = name.split(".")
    places = getattr(sys.modules.get(top), "__path__", ()) if top in tops else ()
    for place in places:
        for parts in (rest, rest[:-1]):
            folder = Path(place, *parts)
            files = [folder / "__init__.py", *([folder.with_name(f"{parts[-1]}.py")] if parts else [])]
            for file in files:
                if file.is_file():
                    return ".".join([top, *parts]), file
    return None
