#!/usr/bin/env python3
"""Checks the shape of the package: how large its parts are, what folders say, and what they take from each other.

    python .ci/layout.py            fails if a rule is broken
    python .ci/layout.py --lower    writes down smaller sizes, never larger ones

What is larger than allowed stands in ``.ci/large.txt`` with its lines. Nothing may be added there and nothing may grow;
what has shrunk is written down, so that it stays small.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "espresso_mpi"
LARGE = ROOT / ".ci" / "large.txt"
LAYERS = ROOT / "docs" / "architecture.md"

MODULE, CLASS, FUNCTION = 450, 300, 50
"""Lines that a module, a class and a function may have, docstrings among them."""

TOP = 10
"""Modules that may stand at the top of the package: what users hold, and what everybody needs."""

Sizes = dict[str, int]


def main(lower: bool) -> int:
    """The exit status: 0 if every rule is kept."""
    trees = {path: ast.parse(path.read_text(), str(path)) for path in sorted(PACKAGE.rglob("*.py"))}
    large, listed = too_large(trees), read_list()
    if lower:
        listed = {name: min(lines, large[name]) for name, lines in listed.items() if name in large}
        LARGE.write_text("".join(f"{lines:5} {name}\n" for name, lines in sorted(listed.items())))
    problems = [*sizes(large, listed), *folders(trees), *unnamed(trees), *private(trees)]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"layout: {len(trees)} modules, {len(listed)} parts are still too large, {len(problems)} problems")
    return 1 if problems else 0


# --- sizes ------------------------------------------------------------------------------------------------------------


def too_large(trees: dict[Path, ast.Module]) -> Sizes:
    """Lines of every module, class and function that has more than it may, by ``path`` or ``path::name``."""
    found = {}
    for path, tree in trees.items():
        name = path.relative_to(ROOT).as_posix()
        lines = len(path.read_text().splitlines())
        if lines > MODULE:
            found[name] = lines
        for part, limit, node in parts(tree):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > limit:
                found[f"{name}::{part}"] = lines
    return found


def parts(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, int, ast.ClassDef | ast.FunctionDef]]:
    """Classes and functions with their dotted names and limits; a function counts with what is defined in it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield inside + node.name, CLASS, node
            yield from parts(node, f"{inside}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield inside + node.name, FUNCTION, node
        else:
            yield from parts(node, inside)


def read_list() -> Sizes:
    """What ``large.txt`` allows."""
    lines = LARGE.read_text().splitlines() if LARGE.exists() else []
    return {name: int(count) for count, name in (line.split(maxsplit=1) for line in lines if line.strip())}


def sizes(large: Sizes, listed: Sizes) -> Iterator[str]:
    """What is larger than it may be, and what is listed and need not be."""
    for name, lines in large.items():
        if name not in listed:
            yield f"{name}: {lines} lines; modules have at most {MODULE}, classes {CLASS}, functions {FUNCTION}: cut it"
        elif lines > listed[name]:
            yield f"{name}: has grown from {listed[name]} to {lines} lines and was too large already: cut it"
        elif lines < listed[name]:
            yield f"{name}: has {lines} lines and no more {listed[name]}; run: python .ci/layout.py --lower"
    for name in listed.keys() - large.keys():
        yield f"{name}: is no longer too large; run: python .ci/layout.py --lower"


# --- folders ----------------------------------------------------------------------------------------------------------


def folders(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Folders that do not say what they are for, and too many modules at the top."""
    top = [path.name for path in trees if path.parent == PACKAGE]
    if len(top) > TOP:
        yield f"{PACKAGE.name}: {len(top)} modules at the top, at most {TOP}: {', '.join(top)}; put one into a folder"
    for folder in {path.parent for path in trees}:
        tree = trees.get(folder / "__init__.py")
        if tree is None or not ast.get_docstring(tree):
            name = folder.relative_to(ROOT).as_posix()
            yield f"{name}/__init__.py: has no docstring; say what lives there, what it may import, how to add to it"


def unnamed(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Modules and folders that the docstring of their folder does not name, and names of what is not there.

    A docstring names them by items of a list, such as "- ``waiting``, ``failures``: handle waits and errors". The table
    of layers in docs/architecture.md names what stands at the top of the package.
    """
    for folder in {path.parent for path in trees}:
        inside = {path.stem for path in trees if path.parent == folder}
        inside |= {path.parent.name for path in trees if path.name == "__init__.py" and path.parent.parent == folder}
        inside = {name for name in inside if not name.startswith("_")}
        if folder == PACKAGE:
            where, section = LAYERS, LAYERS.read_text().partition("\n## Layers\n")[2].partition("\n## ")[0]
            named = set(re.findall(r"`(\w+)/?`", " ".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))))
        else:
            where, text = folder / "__init__.py", ast.get_docstring(trees[folder / "__init__.py"]) or ""
            items = re.findall(r"^- (``.*?):", text, re.MULTILINE | re.DOTALL)
            named = set(re.findall(r"``(\w+)``", " ".join(items)))
        for name in sorted(inside ^ named):
            problem = "does not name" if name in inside else "names what is not there:"
            yield f"{where.relative_to(ROOT).as_posix()}: {problem} {name}"


def private(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Private modules and names that are taken from another folder: by an import, or from a module that is imported."""
    for path, tree in trees.items():
        modules: dict[str, Path] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(PACKAGE.name)):
                home = source(path, node)
                modules |= {alias.asname or alias.name: home / alias.name for alias in node.names}
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                if folder_of(home) != path.parent:
                    yield from hidden(path, node, names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                home = modules.get(node.value.id, path)
                if home.with_suffix(".py") in trees and home.parent != path.parent:
                    yield from hidden(path, node, [node.attr])


def hidden(path: Path, node: ast.ImportFrom | ast.Attribute, names: list[str]) -> Iterator[str]:
    """A complaint if any of the names is private."""
    found = [name for name in names if name.startswith("_") and not name.startswith("__")]
    if found:
        where = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
        yield f"{where}: takes {', '.join(found)} from another folder; make it public, or move it"


def source(path: Path, node: ast.ImportFrom) -> Path:
    """The module or folder that an import takes names from, as a path without suffix."""
    parts = node.module.split(".") if node.module else []
    return (path.parents[node.level - 1] if node.level else ROOT).joinpath(*parts)


def folder_of(home: Path) -> Path:
    """The folder that a module stands in, or the folder itself."""
    return home if home.is_dir() else home.parent


if __name__ == "__main__":
    sys.exit(main("--lower" in sys.argv[1:]))
