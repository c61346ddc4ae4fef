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
    r"^(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([\w.]+))", re.MULTILINE
)
"""An import at the top of a module. What kernels use is imported there: not in functions, and not for types alone."""

_COMMENT, _NAME = re.compile(r"#[^\n]*"), re.compile(r"(\w+)(?:\s+as\s+\w+)?")
_OWN = __name__.partition(".")[0]


def renamed(function: Any, suffix: str) -> FunctionType:
    """A copy of a function with more at the end of its qualified name, under which numba keeps what it compiles."""
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__doc__, made.__module__ = function.__doc__, function.__module__
    made.__qualname__ = function.__qualname__ + suffix
    return made


def digest_of(function: Any) -> str:
    """Eight hexadecimal digits that change with the function's module and with every module that it imports.

    Modules count that belong to this package or to the function's own, and what they import in turn. The text is empty
    if the function is not from a file.
    """
    try:
        path = Path(inspect.getfile(function))
    except TypeError:
        return ""
    return _digest(function.__module__, path) if path.is_file() else ""


@cache
def _digest(module: str, path: Path) -> str:
    found, left = {path: module}, [path]
    while left:
        here = left.pop()
        for name, file in _imported(found[here], here):
            if file not in found:
                found[file] = name
                left.append(file)
    content = hashlib.blake2b(digest_size=4)
    for name, file in sorted((name, file) for file, name in found.items()):
        content.update(f"{name}\n".encode() + hashlib.blake2b(_text(file).encode()).digest())
    return content.hexdigest()


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _imported(module: str, path: Path) -> tuple[tuple[str, Path], ...]:
    """The modules that a module imports, and their files."""
    parts = module.split(".")
    package = parts if path.name == "__init__.py" else parts[:-1]
    tops = frozenset({_OWN, parts[0]})
    found = (_file(name, tops) for name in _names(_text(path), package))
    return tuple(one for one in found if one is not None)


def _names(text: str, package: list[str]) -> Iterator[str]:
    """The full names of what a module in ``package`` imports: modules, or what is in them."""
    for dots, start, names, whole in _IMPORT.findall(text):
        if whole:
            yield whole
            continue
        base = package[: len(package) - len(dots) + 1] if dots else []
        for name in _NAME.findall(_COMMENT.sub("", names)):
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
