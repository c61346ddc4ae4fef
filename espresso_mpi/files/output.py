"""What the benchmarks share: sizes, a progress bar, a printed table, a JSON file."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import schema

WIDTH = 150
"""Columns of a printed table."""

RESULT_BYTES = 1 << 26
"""Of a file of results at most: the largest benchmark writes some 100 kB."""

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_sizes(text: str) -> list[int]:
    """Bytes of each size in a comma list, rounded down to whole float32 values.

    Raises:
        ConfigError: a size cannot be read or holds no value.
    """
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB)?\s*", part)
        nbytes = int(float(match[1]) * _UNITS[match[2] or "B"]) // 4 * 4 if match else 0
        if nbytes < 4:
            raise ConfigError(f"size {part!r}; expected a number with B, KiB, MiB or GiB, at least 4B, such as 16MiB")
        sizes.append(nbytes)
    return sizes


def check_writable(path: Path | None, option: str = "--json") -> None:
    """Refuse, before anything is measured, a file that could not be written afterwards.

    Raises:
        ConfigError: its directory does not exist.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: its directory does not exist; make it first")
    if path is not None and path.is_dir():
        raise ConfigError(f"{option} {path}: is a directory; name a file")


def check_plot(path: Path | None) -> None:
    """Refuse, before anything is measured, a picture that could not be drawn or written afterwards.

    Raises:
        ConfigError: its directory does not exist, or matplotlib is not installed.
    """
    check_writable(path, "--plot")
    if path is not None and find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'espresso-mpi[report]'")


def milliseconds(seconds: float | None) -> str:
    """Milliseconds as people read them; nothing for None."""
    return "" if seconds is None else f"{seconds * 1e3:.2f}"


def number(value: float | None, spec: str = ".2f") -> str:
    """A number in a table; nothing for None."""
    return "" if value is None else format(value, spec)


@contextmanager
def progress(title: str, total: int, shown: bool = True) -> Iterator[Callable[[], None]]:
    """A bar on the terminal, if there is one."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not (shown and sys.stderr.isatty()), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def show(title: str, header: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[str] = ("method",)) -> None:
    """Print a table; ``left`` names the columns of text, the others are numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in header:
        table.add_column(heading, justify="left" if heading in left else "right", overflow="fold", vertical="bottom")
    for line in lines:
        table.add_row(*line)
    # Without colours: mpirun passes everything off as a terminal, redirected or not.
    Console(width=WIDTH, color_system=None).print(table)


def result_of(rows: Sequence[Any], **more: Any) -> dict[str, Any]:
    """The result of a benchmark, as its JSON file holds it: dataclass rows, their environment, and ``more``."""
    from ..cluster.environment import environment

    return {"environment": environment(), **more, "rows": [asdict(row) for row in rows]}


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON, replace a file of that name, and say so."""
    schema.write(path, result)
    print(f"wrote {path}")


def write_rows(path: Path, rows: Sequence[Any], **more: Any) -> None:
    """``result_of``, written to a file."""
    write_result(path, result_of(rows, **more))
