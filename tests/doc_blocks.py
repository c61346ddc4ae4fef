"""The code blocks of README.md, CONTRIBUTING.md and docs/, and what the comments before them say.

Every block has a language. ``python`` runs, and of ``console`` the lines that begin with ``$``; others are data.
An HTML comment right before a block, which no reader sees, may say

- ``<!-- not run: REASON -->``: it cannot run in a test, and why;
- ``<!-- needs: MODULE -->``: it is left out where the module is missing;
- ``<!-- file: NAME -->``: it is the content of a file that later blocks of the page read;
- ``<!-- hidden`` … ``-->``: Python that runs before the next block.

The blocks of a page share names and a folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

from markdown_it import MarkdownIt

import espresso_mpi
from espresso_mpi.collectives.ops.base import CollectiveOp
from espresso_mpi.tracing.recording import TensorStats

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if not {"_build", "_generated"} & set(path.parts)
)
STARTS_RANKS = ("run", "lab", "demo")
"""Commands of espresso-mpi that start ranks: they run after the job that runs the pages, not within it."""
LANGUAGES = ("python", "console", "text", "toml", "json")


def _documented() -> Iterator[tuple[str, Any]]:
    """The names that a user calls: the public callables of the modules, and what a session has."""
    folders = [name for name in ("torch", "jax") if find_spec(name) and (name == "torch" or find_spec("optax"))]
    modules = [import_module(f"espresso_mpi.{name}") for name in ("types", *folders)]
    for module in (espresso_mpi, espresso_mpi.compressors, espresso_mpi.planner, espresso_mpi.optim, *modules):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        prefix = module.__name__.partition(".")[2]
        for name in getattr(module, "__all__", own):
            value = getattr(module, name)
            error = isinstance(value, type) and issubclass(value, BaseException)
            documented = isinstance(value, (type, FunctionType)) and not error
            if documented and not name.startswith("_"):
                yield f"{prefix}.{name}".lstrip("."), value
    yield from (("CollectiveOp", CollectiveOp), ("TensorStats", TensorStats))
    for kind in espresso_mpi.Session.__mro__[:-1]:
        for name, value in vars(kind).items():
            if not name.startswith("_") and (callable(value) or isinstance(value, property)):
                yield f"Session.{name}", value


DOCUMENTED = dict(_documented())
"""Public names: their docstrings have an example, which the job runs as well."""

_COMMENT = re.compile(r"<!--\s*(not run|needs|file|hidden)\b:?\s*(.*?)\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One block of a page; ``marks``: what the comments before it say."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str]

    @property
    def commands(self) -> list[str]:
        """The commands of a console."""
        return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]

    @property
    def runs(self) -> bool:
        """Whether the block is there to be run."""
        return self.language in ("python", "console", "hidden") and "not run" not in self.marks


def blocks(page: str) -> list[Block]:
    """The blocks of a page in order, hidden ones among them."""
    return list(_found(page, (ROOT / page).read_text()))


def _found(page: str, text: str) -> Iterator[Block]:
    marks: dict[str, str] = {}
    for token in MarkdownIt().parse(text):
        line = (token.map or [0])[0] + 1
        if token.type == "html_block":
            for kind, content in _COMMENT.findall(token.content):
                if kind == "hidden":
                    yield Block(page, line, "hidden", content, marks)
                else:
                    marks = {**marks, kind: content}
            continue
        if token.type == "fence" and not token.info.startswith("{"):  # those are Sphinx's directives
            yield Block(page, line, token.info.strip(), token.content, marks)
        marks = {}
